"""Prior of the bootstrap, METHODS eq. 11': vectors of the nodes of a level, from the texts and documents of labels."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit

from ..label_tree import LabelTree
from .level_data import LevelData

# Bounds of what a scale is fitted on.
_MAX_DOCUMENTS, _MAX_SCORES = 2048, 1 << 23


def normalized(rows: np.ndarray) -> np.ndarray:
    """Rows of unit length; rows of zeros stay."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 1e-6, norms, np.inf)


class NodeVectors:
    """
    A vector for each node of a level, counted from 1.

    That of a label is the normalised sum of its text's vector (zero without text) and of its centroid, which is the
    normalised sum of its documents' vectors. That of a node above is the normalised mean of its children's vectors.
    `vectors` are of unit length, `targets` are `(documents, labels)`.
    """

    def __init__(
        self, tree: LabelTree, level: int, vectors: np.ndarray, targets: csr_matrix, texts: np.ndarray | None = None
    ) -> None:
        self.tree, self.level, self.vectors = tree, level, vectors
        self._sums = np.asarray(targets.T @ vectors)[tree.leaf_labels]
        self._texts = None if texts is None else texts[tree.leaf_labels]
        rows = self._with_texts(normalized(self._sums), slice(None))
        for upper in range(tree.depth, level, -1):
            parents = tree.parents(upper)
            counts = np.bincount(parents)
            mean = csr_matrix((1 / counts[parents], parents, np.arange(len(parents) + 1)), (len(parents), len(counts)))
            rows = normalized(np.asarray(mean.T @ rows))
        self.rows = rows.astype(np.float32, copy=False)

    def _with_texts(self, centroids: np.ndarray, nodes: np.ndarray | slice) -> np.ndarray:
        """Normalised sums of centroids and the vectors of texts."""
        return centroids if self._texts is None else normalized(centroids + self._texts[nodes])

    def without(self, documents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Cosines of documents with nodes, whose centroids leave the document out; above the labels they do not."""
        rows = self.rows[nodes]
        if self.level == self.tree.depth:
            rows = self._with_texts(normalized(self._sums[nodes] - self.vectors[documents]), nodes)
        return (self.vectors[documents] * rows).sum(axis=1)

    def fit_scale(self, data: LevelData, loss: str, seed: int) -> tuple[float, float]:
        """Fits a line, see [`fit_line`], to the targets of the level on a sample of documents."""
        chosen = sample_rows(len(self.vectors), len(self.rows), seed)
        cosines = self.vectors[chosen] @ self.rows.T
        counts = data.counts[chosen]
        row, node = counts.nonzero()
        cosines[row, node] = self.without(chosen[row], node)
        signs = np.full(cosines.shape, -1, np.float32)
        signs[row, node] = 1
        shown = np.ones(cosines.shape, bool)
        if data.shortlist is not None:
            parents = np.repeat(np.arange(len(data.offsets) - 1), np.diff(data.offsets))
            shown = np.asarray(data.shortlist[chosen].todense())[:, parents] > 0
        return fit_line(cosines[shown].astype(np.float64), signs[shown], data.negative_weight, loss)


def sample_rows(count: int, num_nodes: int, seed: int) -> np.ndarray:
    """Draws rows of documents whose scores of all nodes fit into memory, in order."""
    size = max(1, min(count, _MAX_DOCUMENTS, _MAX_SCORES // num_nodes))
    return np.sort(np.random.default_rng(seed).choice(count, size, replace=False))


def fit_line(cosines: np.ndarray, signs: np.ndarray, negative_weight: float, loss: str) -> tuple[float, float]:
    """
    Fits `scale * cosine + bias` to signs by the loss of a head; returns the scale, not negative, and the bias.

    Signs are 1 where a node is true for the document, else -1; `negative_weight` is the weight of the latter.
    """
    weights = np.where(signs > 0, 1.0, negative_weight)

    def value(line: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (line[0] * cosines + line[1])
        if loss == "bce":
            losses, slopes = np.logaddexp(0, -margins), -expit(-margins)
        else:
            gaps = np.maximum(1 - margins, 0)
            losses, slopes = gaps**2, -2 * gaps
        slopes = weights * slopes * signs
        total = weights.sum()
        return float(weights @ losses / total), np.array([slopes @ cosines, slopes.sum()]) / total

    found = minimize(value, np.array([1.0, -1.0]), jac=True, method="L-BFGS-B", bounds=[(0, None), (None, None)])
    return float(found.x[0]), float(found.x[1])

"""Targets, candidates and weights of the documents at one level of the label tree."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix


class LevelData:
    """
    Targets, candidates and weights of one level for every training document.

    Args:
        level (`int`):
            The level, counted from 1.
        counts (`csr_matrix`):
            `R^(t)`: `(documents, nodes)` true nodes with the number of true labels under each.
        offsets (`np.ndarray`):
            Where the level's nodes under each node of the level before begin, see [`LabelTree.descendants`].
        shortlist (`csr_matrix`, *optional*):
            `(documents, nodes of the level before)`: those whose descendants are in a document's loss; all nodes of
            the level by default.
        cost_sensitive (`bool`, *optional*, defaults to `False`):
            See [`LevelArguments`].
        negative_weight (`float`, *optional*):
            See [`LevelArguments`].
        in_pass (`bool`, *optional*, defaults to `False`):
            Whether the model finds the candidates in the pass that trains it: a batch then has true nodes only.
        beam_size (`int`, *optional*):
            Nodes of the level before that it finds.
    """

    def __init__(
        self,
        level: int,
        counts: csr_matrix,
        offsets: np.ndarray,
        shortlist: csr_matrix | None = None,
        cost_sensitive: bool = False,
        negative_weight: float | None = None,
        in_pass: bool = False,
        beam_size: int | None = None,
    ) -> None:
        self.level, self.counts, self.offsets, self.shortlist = level, counts, offsets, shortlist
        self.in_pass, self.beam_size = in_pass, beam_size
        self.cost_sensitive = cost_sensitive
        labelled = np.count_nonzero(np.diff(counts.indptr))
        self.mean_true = counts.nnz / labelled if labelled else 1.0
        if negative_weight is None:
            negative_weight = 1 / self.mean_true if cost_sensitive else 1.0
        self.negative_weight = negative_weight

    def batch(self, documents: np.ndarray) -> dict[str, Any]:
        """
        What the head is trained on for some documents.

        Returns:
            `dict[str, Any]`: `targets` and `weights`, float32 `(documents, nodes)`; where not all nodes of the level
            are among them, `nodes`, int64 `(nodes,)`: the candidates of any of the documents, ascending. With
            `in_pass` `true_nodes` and `true_weights` of shape `(documents, most)`, -1 for none, and the numbers
            `negative_weight` and `beam_size`, where there is one.
        """
        true = self.counts[documents]
        if self.in_pass:
            return self._true_batch(true)
        rows = np.repeat(np.arange(len(documents)), np.diff(true.indptr))
        columns, counts = true.indices, true.data
        if self.shortlist is None:
            nodes = None
            weights = np.full((len(documents), self.counts.shape[1]), self.negative_weight, dtype=np.float32)
        else:
            candidate_rows, candidates = self._candidates(documents)
            nodes, places = np.unique(candidates, return_inverse=True)
            candidate = np.zeros((len(documents), len(nodes) + 1), dtype=bool)
            candidate[candidate_rows, places] = True
            weights = candidate[:, :-1] * np.float32(self.negative_weight)
            # Without teacher forcing a true node may be no candidate of its document, or of none.
            columns = np.where(np.isin(columns, nodes), np.searchsorted(nodes, columns), len(nodes))
            known = candidate[rows, columns]
            rows, columns, counts = rows[known], columns[known], counts[known]
        targets = np.zeros_like(weights)
        targets[rows, columns] = 1
        if self.cost_sensitive:
            sums = np.asarray(true.sum(axis=1)).ravel()
            weights[rows, columns] = counts / sums[rows]
        else:
            weights[rows, columns] = 1
        batch = {"targets": targets, "weights": weights}
        return batch if nodes is None else {"nodes": nodes, **batch}

    def _true_batch(self, true: csr_matrix) -> dict[str, Any]:
        lengths = np.diff(true.indptr)
        places = np.arange(lengths.max(initial=0)) < lengths[:, None]
        nodes, weights = np.full(places.shape, -1, dtype=np.int64), np.ones(places.shape, dtype=np.float32)
        nodes[places] = true.indices
        if self.cost_sensitive:
            weights[places] = true.data / np.repeat(np.asarray(true.sum(axis=1)).ravel(), lengths)
        batch = {"true_nodes": nodes, "true_weights": weights, "negative_weight": self.negative_weight}
        return batch if self.beam_size is None else {**batch, "beam_size": self.beam_size}

    def _candidates(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row and node of every candidate, row by row."""
        assert self.shortlist is not None
        parents = self.shortlist[documents]
        rows = np.repeat(np.arange(len(documents)), np.diff(parents.indptr))
        first = self.offsets[parents.indices]
        sizes = self.offsets[parents.indices + 1] - first
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(rows, sizes), np.repeat(first, sizes) + within

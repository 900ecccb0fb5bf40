"""Which documents train the children of a node: equations (7) and (8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..linear_ranker import LinearRanker

NEGATIVES = ("tfn", "man", "both")


@dataclass(frozen=True)
class Shortlist:
    """Documents of each node of one level, int64, in ascending order."""

    indptr: np.ndarray
    rows: np.ndarray

    def documents(self, node: int) -> np.ndarray:
        """Documents shortlisted for `node`."""
        return self.rows[self.indptr[node] : self.indptr[node + 1]]


def level_shortlist(
    features: Features,
    true_nodes: csr_matrix | None,
    num_nodes: int,
    negatives: str,
    beam_size: int,
    ranker: LinearRanker | None,
    level: int,
    num_threads: int | None,
) -> Shortlist:
    """
    Documents that train the children of each of the `num_nodes` nodes above `level`.

    Args:
        true_nodes (`csr_matrix`, *optional*):
            `(documents, nodes)` true nodes of the level above; `None` for the root, which gets every document.
        negatives (`str`):
            `"tfn"`: documents with a true label under the node; `"man"`: documents whose beam reaches the node, which
            leaves out positives the levels above miss; `"both"`: their union.
        ranker (`LinearRanker`, *optional*):
            The levels trained so far, for `"man"`.
    """
    count = len(features)
    if true_nodes is None:
        return Shortlist(np.array([0, count]), np.arange(count))
    pairs = true_nodes.indices.astype(np.int64), np.repeat(np.arange(count), np.diff(true_nodes.indptr))
    if negatives != "tfn":
        assert ranker is not None
        width = min(beam_size, num_nodes)
        _, nodes = ranker.search(features, level - 1, width, beam_size, True, num_threads)
        first_node = 1 + sum(ranker.tree.level_sizes[: level - 2])
        found = nodes >= 0
        predicted = nodes[found] - first_node, np.repeat(np.arange(count), found.sum(axis=1))
        pairs = (
            predicted if negatives == "man" else (np.append(pairs[0], predicted[0]), np.append(pairs[1], predicted[1]))
        )
    key = np.unique(pairs[0] * count + pairs[1])
    node_of = key // count
    indptr = np.searchsorted(node_of, np.arange(num_nodes + 1))
    return Shortlist(indptr, key - node_of * count)

"""Documents that train the children of each node (XR-Transformer, eq. 7 and 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..linear_ranker import Beam, LinearRanker, first_node
from ..parallel.stage_cache import Runtime
from ..simd import compiled

NEGATIVES = ("tfn", "man", "both")

# Bounds the copy of the documents that are searched together: 16 MB.
_VALUES_PER_SEARCH = 1 << 21

# A search that passes so many levels, in trees of hundreds of thousands of labels, keeps a third of its beam on the
# way, but no fewer nodes than these: of those it ends with, all but a few of the worst are beams as well, which as
# negatives teach nothing, in half the time.
_MANY_LEVELS = 3
LEAST_ON_THE_WAY = 20


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
    initial_beam: Beam | None = None,
    runtime: Runtime = Runtime(),
) -> Shortlist:
    """
    Documents that train the children of each of the `num_nodes` nodes above `level`.

    `true_nodes` are those of the level above, `(documents, nodes)`; `None` for the root, which gets every document.
    `negatives` are `"tfn"`: documents with a true label under the node; `"man"`: documents whose beam reaches the
    node, by the levels of `ranker` trained so far, which leaves out positives the levels above miss; `"both"`: their
    union. `initial_beam` says where the beams start, if not at the root; those of the level above are used directly.
    """
    if true_nodes is None:
        return Shortlist(np.array([0, len(features)]), np.arange(len(features)))
    true_ptr, true = true_nodes.indptr, true_nodes.indices
    beams = np.empty((len(features), 0), dtype=np.int64)
    numbered_from = 0
    if negatives != "tfn" and initial_beam is not None and initial_beam.level == level - 1:
        beams = initial_beam.nodes
    elif negatives != "tfn":
        assert ranker is not None
        beams = np.empty((len(features), min(beam_size, num_nodes)), dtype=np.int64)
        passed = level - ranker.first_level - 1
        on_the_way = beam_size if passed < _MANY_LEVELS else min(beam_size, max(LEAST_ON_THE_WAY, beam_size // 3))
        # Documents with a true node in common visit the same classifiers: together they find them in the cache.
        first_true = np.append(true, 0)[true_ptr[:-1]]
        num_values = (0 if features.sparse is None else features.sparse.nnz) + len(features) * features.num_dense
        num_groups = min(len(features), 1 + num_values // _VALUES_PER_SEARCH)
        groups = np.array_split(np.argsort(first_true, kind="stable"), num_groups)

        def search(indices: Sequence[int]) -> Iterator[dict[str, np.ndarray]]:
            for rows in (groups[index] for index in indices):
                begin = None if initial_beam is None else initial_beam[rows]
                options = (level - 1, beams.shape[1], on_the_way, True, runtime.num_threads, begin)
                yield {"nodes": ranker.search(features[rows], *options)[1]}

        for rows, beam in zip(groups, runtime.cache.pieces("beams", len(groups), search), strict=True):
            beams[rows] = beam["nodes"]
        numbered_from = first_node(ranker.tree, level - 1)
    if negatives == "man":
        true_ptr = np.zeros_like(true_ptr)
    return Shortlist(*_documents_by_node(true_ptr, true, beams, numbered_from, num_nodes))


@compiled
def _documents_by_node(true_ptr, true, beams, numbered_from, num_nodes):
    """
    Documents of each node, ascending, each once: those with the node in their row of `true` or of `beams`.

    `beams` numbers the nodes from `numbered_from`, -1 stands for none. A first round counts, a second one fills.
    """
    indptr = np.zeros(num_nodes + 1, dtype=np.int64)
    rows = np.empty(0, dtype=np.int64)
    fill = indptr[1:]
    for filling in (False, True):
        for document in range(beams.shape[0]):
            for position in range(beams.shape[1]):
                node = beams[document, position] - numbered_from
                if node >= 0:
                    if filling:
                        rows[fill[node]] = document
                    fill[node] += 1
            for p in range(true_ptr[document], true_ptr[document + 1]):
                node = np.int64(true[p])
                if not _contains(beams[document], numbered_from + node):
                    if filling:
                        rows[fill[node]] = document
                    fill[node] += 1
        if not filling:
            indptr[:] = np.cumsum(indptr)
            rows = np.empty(indptr[-1], dtype=np.int64)
            fill = indptr[:-1].copy()
    return indptr, rows


@compiled
def _contains(values, value):
    for i in range(values.shape[0]):
        if values[i] == value:
            return True
    return False

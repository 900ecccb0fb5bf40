"""Edits of a linear ranker: classifiers of further labels, or fewer labels; all other classifiers keep their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from .features import Features
from .kernels_search import squared_norms
from .kernels_solver import train_blocks
from .label_tree import LabelTree
from .linear_ranker import LOSSES, LinearRanker, RankerWeights, blocks_of, dense_part, first_node, sparse_part
from .simd import HEADER, LANES
from .utils import offsets_of

# Costs of positive and negative documents, chosen on validation documents so that new labels neither push others aside
# nor stay unfound.
_POSITIVE_COST, _NEGATIVE_COST = 0.5, 2.0
# The bias of a classifier is constant: the few negatives would not hold it down, and with a higher one a label is
# predicted for every document that reaches its cluster.
_BIAS = np.float32(-1)
# A label has few documents, so that many passes cost little.
_MAX_PASSES, _TOLERANCE, _SEED = 50, 0.01, 0
_PRUNE_THRESHOLD = np.float32(1e-4)
# Clusters whose new labels are trained at a time; it bounds the memory of the documents of the other labels there.
_CLUSTERS_AT_A_TIME = 32


@dataclass(frozen=True)
class NewLabels:
    """
    Further labels of a ranker, and the documents that their classifiers are trained on.

    Args:
        clusters (`np.ndarray`): The cluster of each label: its parent, a node of the level above the labels.
        documents ([`Features`]): Documents, in the features of the ranker.
        targets (`csr_matrix`): `(documents, new labels)`, ones for the labels of each document.
        vectors (`np.ndarray`, *optional*): Unit vectors of the documents of each old label, `(labels, dimensions)`.
        dense_norm (`float`, *optional*, defaults to 1.0): Norm of the dense features of a document.
    """

    clusters: np.ndarray
    documents: Features
    targets: csr_matrix
    vectors: np.ndarray | None = None
    dense_norm: float = 1.0


def with_labels(ranker: LinearRanker, tree: LabelTree, new: NewLabels) -> LinearRanker:
    """
    Returns a ranker with further labels; `tree` is its tree with these labels.

    The classifier of a new label is trained on its documents. Negatives are the documents of other new labels of the
    cluster and a stand-in for each old one, see [`documents_of_classifiers`].

    The new labels of a cluster are blocks of their own: with another feature in a block, the sums of the other
    classifiers there would be rounded differently.
    """
    old, width = ranker.weights, ranker.num_dense + 1
    clusters, counts = np.unique(new.clusters, return_counts=True)
    blocks = blocks_of(counts)
    parts = [
        _train(ranker, new, clusters, blocks[(blocks[:, 0] >= start) & (blocks[:, 0] < start + _CLUSTERS_AT_A_TIME)])
        for start in range(0, len(clusters), _CLUSTERS_AT_A_TIME)
    ]
    sizes, records, buckets, dense = map(np.concatenate, zip(*parts, strict=True))
    first = first_node(ranker.tree, ranker.tree.depth)
    ends = first + ranker.tree.child_offsets[-1][clusters[blocks[:, 0]] + 1]
    at = np.searchsorted(ranker.block_child, ends)
    weights = RankerWeights(
        offsets_of(np.insert(np.diff(old.row_begin), at, sizes[:, 0])),
        offsets_of(np.insert(np.diff(old.bucket_begin), at, sizes[:, 1])),
        np.insert(old.buckets, np.repeat(old.bucket_begin[at], sizes[:, 1]), buckets),
        np.insert(old.records, np.repeat(old.row_begin[at], sizes[:, 0]), records, axis=0),
        np.insert(old.dense, np.repeat(at * width, width), dense, axis=0),
        np.insert(np.diff(ranker.block_child), at, blocks[:, 2]).astype(np.uint8),
    )
    return LinearRanker(tree, weights, **ranker.settings)


def without_nodes(ranker: LinearRanker, tree: LabelTree, is_left: np.ndarray) -> LinearRanker:
    """
    Returns a ranker for the nodes that are left, marked as by [`LabelTree.without_labels`], which also gives the tree.

    Records stay even if all their weights are gone: without them, the sums of the other classifiers of the block would
    be rounded differently.
    """
    old, width = ranker.weights, ranker.num_dense + 1
    first, begin = ranker.block_child[0], ranker.block_child
    sizes = np.add.reduceat(is_left[first:], begin[:-1] - first, dtype=np.int64)
    kept = sizes > 0
    changed = np.flatnonzero(kept & (sizes < np.diff(begin)))
    num_rows, num_buckets = np.diff(old.row_begin), np.diff(old.bucket_begin)
    weights = RankerWeights(
        offsets_of(num_rows[kept]),
        offsets_of(num_buckets[kept]),
        old.buckets[np.repeat(kept, num_buckets)],
        old.records[np.repeat(kept, num_rows)],
        old.dense[np.repeat(kept, width)],
        sizes[kept].astype(np.uint8),
    )
    place = np.cumsum(kept) - 1
    codes = _codes(weights.records)
    for block in changed:
        lanes = np.flatnonzero(is_left[begin[block] : begin[block + 1]])
        at = place[block]
        rows = slice(weights.row_begin[at], weights.row_begin[at + 1])
        for array in (codes[rows], weights.dense[at * width : (at + 1) * width]):
            array[:, : len(lanes)], array[:, len(lanes) :] = array[:, lanes], 0
    return LinearRanker(tree, weights, **ranker.settings)


def documents_of_classifiers(
    ranker: LinearRanker, clusters: np.ndarray, vectors: np.ndarray | None = None
) -> tuple[Features, np.ndarray]:
    """
    Returns a document for each label of some clusters, from the positive weights of its classifier, and its cluster.

    It stands for the documents of the label, of which a ranker keeps nothing else, and has unit length. The clusters
    ascend. `vectors` are the dense parts of the documents of each label. By default they are all dense weights of its
    classifier: a poor choice, as it lacks what all documents have in common.
    """
    tree, weights, width = ranker.tree, ranker.weights, ranker.num_dense + 1
    first, offsets = first_node(tree, tree.depth), tree.child_offsets[-1]
    starts, ends = (np.searchsorted(ranker.block_child, first + offsets[clusters + end]) for end in (0, 1))
    blocks = np.concatenate([np.arange(*pair) for pair in zip(starts, ends, strict=True)])
    num_rows = np.diff(weights.row_begin)[blocks]
    rows = np.repeat(weights.row_begin[blocks] - np.cumsum(num_rows) + num_rows, num_rows) + np.arange(num_rows.sum())
    records = weights.records[rows]
    places, lanes = np.nonzero(_codes(records) > 0)
    values = _codes(records)[places, lanes] * records.view(np.float32)[places, 1]
    labels = np.repeat(np.arange(len(blocks)), num_rows)[places] * LANES + lanes
    shape = (len(blocks) * LANES, ranker.num_sparse)
    sparse = csr_matrix((values, (labels, records.view(np.int32)[places, 0])), shape=shape, dtype=np.float32)
    sparse.sort_indices()
    dense = (
        weights.dense.reshape(-1, width, LANES)[blocks, :-1].transpose(0, 2, 1).reshape(len(blocks) * LANES, width - 1)
    )
    sizes = np.diff(ranker.block_child)[blocks]
    used = (np.arange(LANES) < sizes[:, None]).ravel()
    documents = Features(sparse if ranker.num_sparse else None, dense if width > 1 else None)[np.flatnonzero(used)]
    if vectors is not None:
        places = np.concatenate([np.arange(offsets[node], offsets[node + 1]) for node in clusters])
        documents = Features(documents.sparse, vectors[tree.leaf_labels[places]].astype(np.float32))
    return documents.normalized(), np.repeat(clusters, np.diff(offsets)[clusters])


def _train(ranker: LinearRanker, new: NewLabels, clusters: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Trains blocks, given as (position in `clusters`, first new label in the order of the tree, number of labels)."""
    first, last = blocks[0, 1], blocks[-1, 1:].sum()
    own = np.argsort(new.clusters, kind="stable")[first:last]
    parents = np.searchsorted(clusters, new.clusters[own]) - blocks[0, 0]
    used = np.flatnonzero(np.diff(new.targets[:, own].indptr))
    targets = csr_matrix(new.targets[used][:, own])
    num_parents = blocks[-1, 0] - blocks[0, 0] + 1
    others, other_clusters = documents_of_classifiers(ranker, clusters[blocks[0, 0] :][:num_parents], new.vectors)
    if others.dense is not None:
        others = Features(others.sparse, others.dense * np.float32(new.dense_norm))
    documents = new.documents[used].followed_by(others)
    sparse, dense = sparse_part(documents), dense_part(documents)
    dense[:, -1] = 0
    norms = squared_norms(sparse.indptr, sparse.data) + (dense**2).sum(axis=1)
    # The documents that train the labels of each cluster.
    rows, labels = targets.nonzero()
    places = np.concatenate([rows, len(used) + np.arange(len(others))])
    owners = np.concatenate([parents[labels], np.searchsorted(clusters, other_clusters) - blocks[0, 0]])
    pairs = np.unique(owners * len(documents) + places)
    shortlist_ptr = np.searchsorted(pairs, np.arange(num_parents + 1) * len(documents))
    target_ptr = np.concatenate([targets.indptr, np.full(len(others), targets.nnz)]).astype(np.int64)
    size = sparse.shape[1]
    buffers = np.zeros((size, LANES), np.float32), np.zeros(size, np.float32), np.zeros(size, np.int32)
    return train_blocks(
        sparse.indptr, sparse.indices, sparse.data, dense, norms, target_ptr, targets.indices, targets.data,
        shortlist_ptr, pairs % len(documents), blocks - [blocks[0, 0], first, 0], LOSSES[ranker.loss], _POSITIVE_COST,
        _NEGATIVE_COST, False, _BIAS, np.empty((0, dense.shape[1]), np.float32), _MAX_PASSES, _TOLERANCE, _SEED,
        _PRUNE_THRESHOLD, ranker.weights.records.shape[1] == HEADER + LANES, sparse.nnz, *buffers,
    )  # fmt: skip


def _codes(records: np.ndarray) -> np.ndarray:
    """The weights of records without their scales, `(records, LANES)`."""
    return records[:, HEADER:] if records.shape[1] == HEADER + LANES else records.view(np.float32)[:, HEADER // 4 :]

"""Builds label trees from label features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from ..features import Features
from ..label_tree import LabelTree
from ..linear_ranker import sparse_part
from ..parallel.stage_cache import Runtime
from ..utils import count_threads
from .kernels_cluster import bisect, nearest_centre
from .options import TreeArguments

# Largest first level; more nodes get another level above them.
_MAX_TOP_NODES = 64


def build_tree(label_features: Features, arguments: TreeArguments, runtime: Runtime = Runtime()) -> LabelTree:
    """
    Builds the label tree.

    Args:
        label_features (`Features`):
            One row per label. Zero rows (labels without documents or text) are spread over the tree.
        arguments (`TreeArguments`): Options.
        runtime ([`Runtime`], *optional*): Threads and progress. The tree does not depend on it.
    """
    num_labels = len(label_features)
    if num_labels == 0:
        raise ValueError("There are no labels to build a tree from: the training data has no label at all.")
    if arguments.clustering == "frequency":
        raise ValueError("`clustering='frequency'` needs label counts: call `frequency_tree`.")
    if arguments.clustering == "hierarchy":
        raise ValueError("`clustering='hierarchy'` needs parents: call `LabelTree.from_hierarchy`.")
    if arguments.clustering == "flat" or arguments.max_depth == 1 or num_labels <= arguments.max_leaf_size:
        return LabelTree.flat(num_labels)
    rows = _Rows(label_features, runtime)
    if arguments.clustering == "kmeans":
        return _kmeans_tree(rows, arguments, runtime)
    return _balanced_tree(rows, arguments, runtime)


def frequency_tree(counts: np.ndarray, shares: Sequence[float], shares_of: str = "mass") -> LabelTree:
    """
    Sorts labels by frequency and splits them into a head cluster and tail clusters (APLC-XLNet), a tree of two levels.

    The first level has a node for each frequent label, followed by a node for each tail. The second level are the
    labels, most frequent first. Empty tails are left out, and a single label does not form a tail. The head cluster
    and each tail have their share of the sum of `counts` (`"mass"`) or of the number of labels (`"count"`).
    """
    if len(counts) == 0:
        raise ValueError("There are no labels to build a tree from: the training data has no label at all.")
    order = np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable")
    mass = np.asarray(counts, dtype=np.float64)[order] if shares_of == "mass" else np.ones(len(order))
    before = (np.cumsum(mass) - mass) / max(mass.sum(), 1)
    # A label belongs to the cluster in which its interval of the cumulated mass begins.
    bounds = np.cumsum(shares)[:-1]
    part = np.searchsorted(bounds, before + 1e-9, side="right")
    num_frequent, *sizes = np.bincount(part, minlength=len(shares)).tolist()
    tails: list[int] = []
    for size in sizes:
        if size == 1 and tails:
            tails[-1] += 1
        elif size:
            tails.append(size)
    children = [1] * num_frequent + tails
    return LabelTree([np.array([0, len(children)]), np.concatenate([[0], np.cumsum(children)])], order)


def balanced_arities(num_labels: int, branching: int, max_leaf_size: int, max_depth: int | None) -> list[int]:
    """Returns the children per node of each level above the labels, root first. Nodes of a level have equally many."""
    clusters = math.ceil(num_labels / max_leaf_size)
    arities: list[int] = []
    while clusters > max(branching, _MAX_TOP_NODES) and (max_depth is None or len(arities) < max_depth - 2):
        arities.insert(0, branching)
        clusters = math.ceil(clusters / branching)
    return [clusters, *arities]


class _Rows:
    """Label features as the kernels take them, and zeroed working memory for each thread."""

    def __init__(self, features: Features, runtime: Runtime) -> None:
        sparse = sparse_part(features)
        dense = np.empty((len(features), 0), np.float32) if features.dense is None else features.dense
        self.arrays = (sparse.indptr, sparse.indices, sparse.data, dense)
        self.count, self.num_sparse, self.num_dense = len(features), features.num_sparse, features.num_dense
        self.num_threads = count_threads(runtime.num_threads)
        self.buffers: SimpleQueue = SimpleQueue()
        for _ in range(self.num_threads):
            self.buffers.put((np.zeros((self.num_sparse, 2), np.float32), np.zeros((self.num_dense, 2), np.float32)))

    def bisect(self, members: np.ndarray, left_count: int, iterations: int, seed: int) -> None:
        buffers = self.buffers.get()
        try:
            bisect(*self.arrays, members, left_count, iterations, seed, *buffers)
        finally:
            self.buffers.put(buffers)


def _balanced_tree(rows: _Rows, arguments: TreeArguments, runtime: Runtime) -> LabelTree:
    """Recursive balanced k-means. The shape follows from the number of labels; clustering decides their order."""
    arities = balanced_arities(rows.count, arguments.branching, arguments.max_leaf_size, arguments.max_depth)
    sizes = np.array([rows.count])
    child_offsets = []
    for arity in arities:
        child_offsets.append(np.arange(0, len(sizes) * arity + 1, arity))
        sizes = (sizes[:, None] // arity + (np.arange(arity) < sizes[:, None] % arity)).ravel()
    child_offsets.append(np.concatenate([[0], np.cumsum(sizes)]))
    boundaries = child_offsets[-1]
    strides = np.cumprod([1, *arities[:0:-1]])[::-1].tolist()  # lowest nodes under one node of each level, top first
    order = np.random.default_rng(arguments.tree_seed).permutation(rows.count)
    # Ranges of lowest nodes that are still to be split in two. The ranges of one round are independent.
    ranges = [(0, len(sizes))]
    done = 0
    with ThreadPoolExecutor(rows.num_threads) as pool:
        while ranges:
            cuts = [(first, _middle(first, last, strides), last) for first, last in ranges if last - first > 1]

            def cut(nodes: tuple[int, int, int]) -> None:
                first, middle, last = (int(boundaries[node]) for node in nodes)
                seed = arguments.tree_seed + first + 1
                rows.bisect(order[first:last], middle - first, arguments.kmeans_iterations, seed)

            for _ in pool.map(cut, cuts):
                done += 1
                runtime.report("tree", done, len(sizes) - 1)
            ranges = [part for first, middle, last in cuts for part in ((first, middle), (middle, last))]
    return LabelTree(child_offsets, order)


def _middle(first: int, last: int, strides: list[int]) -> int:
    """Returns where to split a range of lowest nodes: at the border of the highest node inside the range."""
    stride = next(stride for stride in strides if last - first > stride)
    return first + (last - first) // stride // 2 * stride


def _kmeans_tree(rows: _Rows, arguments: TreeArguments, runtime: Runtime) -> LabelTree:
    """Splits every node by spherical k-means until it is small enough or the depth is reached."""
    depth = arguments.max_depth or 3
    groups = [np.arange(rows.count)]
    parents = []
    for level in range(1, depth):
        parent: list[int] = []
        below: list[np.ndarray] = []
        for node, members in enumerate(groups):
            parts = [members]
            if len(members) > arguments.max_leaf_size:
                seed = arguments.tree_seed + level * 1_000_003 + int(members[0])
                parts = _kmeans_split(rows, members, arguments.branching, arguments.kmeans_iterations, seed)
            below.extend(parts)
            parent.extend([node] * len(parts))
            runtime.report(f"tree level {level}", node + 1, len(groups))
        parents.append(np.array(parent))
        groups = below
    leaf_parent = np.empty(rows.count, dtype=np.int64)
    for node, members in enumerate(groups):
        leaf_parent[members] = node
    return LabelTree.from_parents([*parents, leaf_parent])


def _kmeans_split(rows: _Rows, members: np.ndarray, k: int, iterations: int, seed: int) -> list[np.ndarray]:
    """Returns the non-empty clusters of spherical k-means."""
    indptr, indices, data, dense = rows.arrays
    k = min(k, len(members))
    start = np.random.default_rng(seed).choice(len(members), k, replace=False)
    assignment = np.full(len(members), -1, dtype=np.int64)
    assignment[start] = np.arange(k)
    for _ in range(iterations):
        chosen = assignment >= 0
        sparse_centres = np.zeros((rows.num_sparse, k), dtype=np.float32)
        dense_centres = np.zeros((rows.num_dense, k), dtype=np.float32)
        for member, cluster in zip(members[chosen], assignment[chosen]):
            entries = slice(indptr[member], indptr[member + 1])
            sparse_centres[indices[entries], cluster] += data[entries]
            dense_centres[:, cluster] += dense[member]
        norms = np.sqrt((sparse_centres**2).sum(axis=0) + (dense_centres**2).sum(axis=0))
        norms[norms == 0] = 1
        changed = nearest_centre(*rows.arrays, members, sparse_centres / norms, dense_centres / norms, assignment)
        if changed == 0:
            break
    parts = [members[assignment == cluster] for cluster in range(k)]
    return [part for part in parts if len(part)]

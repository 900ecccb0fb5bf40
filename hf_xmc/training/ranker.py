"""Trains the linear ranker, level by level, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..kernels_search import squared_norms
from ..kernels_solver import train_blocks
from ..label_tree import LabelTree
from ..linear_ranker import LOSSES, Beam, LinearRanker, RankerWeights, blocks_of, dense_part, first_node, sparse_part
from ..parallel.stage_cache import Runtime, digest
from ..simd import HEADER, LANES
from ..utils import count_threads
from .options import RankerArguments
from .shortlist import Shortlist, level_shortlist

# Documents of the blocks that one task trains.
DOCUMENTS_PER_TASK = 8192

# Pieces of a level that are shared among processes and cached: the largest useful number of processes.
MAX_PIECES = 256
_PARTS = ("sizes", "records", "buckets", "dense")
_BEGINS = {"records": "row_begin", "buckets": "bucket_begin"}
# The default beam at prediction.
_LEAST_BEAM, _CLUSTERS_PER_BEAM = 40, 25

# Non-zeros of a node's documents up to which each thread works on a copy of them: 8 MB.
COPIED_NONZEROS = 1 << 20


@dataclass(frozen=True)
class KeptRanker:
    """
    A trained ranker, some labels of which (`changed`) are to be trained again.

    The labels of a block share their features: all of them are trained again, or none. Inner nodes always are.
    """

    ranker: LinearRanker
    changed: np.ndarray

    def blocks(self, level: int) -> np.ndarray:
        """Returns the blocks of a level that are trained, as [`blocks_of`] does."""
        tree, begin = self.ranker.tree, self.ranker.block_child
        nodes = first_node(tree, level), first_node(tree, level + 1)
        chosen = np.flatnonzero(self._are_trained & (begin[:-1] >= nodes[0]) & (begin[:-1] < nodes[1]))
        first = begin[chosen] - nodes[0]
        return np.stack([tree.parents(level)[first], first, begin[chosen + 1] - begin[chosen]], axis=1)

    @cached_property
    def _are_trained(self) -> np.ndarray:
        tree = self.ranker.tree
        before = np.concatenate([[0], np.cumsum(self.changed[tree.leaf_labels])])
        begin = self.ranker.block_child - first_node(tree, tree.depth)
        return (begin[:-1] < 0) | (before[np.maximum(begin[1:], 0)] > before[np.maximum(begin[:-1], 0)])

    def joined(self, trained: RankerWeights) -> RankerWeights:
        """Returns the weights with the blocks trained so far in place of their own; others are the same to the bit."""
        kept, width, is_new = self.ranker.weights, self.ranker.num_dense + 1, self._are_trained
        count = len(trained.row_begin) - 1
        if count < is_new.sum():  # inner nodes, for the search of negatives
            return trained if kept.block_sizes is None else replace(trained, block_sizes=kept.block_sizes[:count])
        # Place of each block in its source, and runs of consecutive blocks of one source.
        place = np.where(is_new, np.cumsum(is_new) - 1, np.arange(len(is_new)))
        bounds = [0, *np.flatnonzero(is_new[1:] != is_new[:-1]) + 1, len(is_new)]
        runs = [(trained if is_new[i] else kept, place[i], place[j - 1] + 1) for i, j in pairwise(bounds)]
        arrays = {"dense": np.concatenate([source.dense[width * i : width * j] for source, i, j in runs])}
        for name, begin_name in _BEGINS.items():
            parts, sizes = [], []
            for source, i, j in runs:
                begin = getattr(source, begin_name)
                parts.append(getattr(source, name)[begin[i] : begin[j]])
                sizes.append(np.diff(begin[i : j + 1]))
            arrays[name] = np.concatenate(parts)
            arrays[begin_name] = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])
        return RankerWeights(**arrays, block_sizes=kept.block_sizes)


def default_beam(tree: LabelTree) -> int:
    """Beam size for a tree: on held-out documents wider beams pay with many clusters, and cost time."""
    clusters = tree.level_sizes[-2] if tree.depth > 1 else 1
    return max(_LEAST_BEAM, clusters // _CLUSTERS_PER_BEAM)


def train_ranker(
    features: Features,
    targets: csr_matrix,
    tree: LabelTree,
    arguments: RankerArguments,
    runtime: Runtime = Runtime(),
    initial_beam: Beam | None = None,
    kept: KeptRanker | None = None,
) -> LinearRanker:
    """
    Trains one linear classifier per node of the tree, or of its levels below `initial_beam`.

    Args:
        features (`Features`): Training documents.
        targets (`csr_matrix`): `(documents, labels)` indicator of the true labels.
        tree (`LabelTree`): The label tree.
        arguments (`RankerArguments`): Options.
        runtime ([`Runtime`], *optional*): Threads, progress and cache. The result does not depend on it.
        initial_beam ([`Beam`], *optional*): Nodes that another matcher predicts for the training documents.
        kept ([`KeptRanker`], *optional*):
            A ranker with this tree, of which only inner nodes and the blocks with changed labels are trained.
    """
    if targets.shape[0] != len(features):
        raise ValueError(f"There are {len(features)} documents but targets for {targets.shape[0]}.")
    if targets.count_nonzero() == 0:
        raise ValueError("No training document has a label: there is nothing to learn.")
    problem = _Problem(features, arguments, runtime)
    level_targets = tree.targets(targets)
    weights = _GrowingWeights(arguments.weight_dtype)
    ranker = None
    first_level = 1 if initial_beam is None else initial_beam.level + 1
    for level in range(first_level, tree.depth + 1):
        above = len(tree.child_offsets[level - 1]) - 1
        negatives = arguments.negatives if level == tree.depth else "tfn"
        true_nodes, beam_size = level_targets[level - 2] if level > 1 else None, arguments.train_beam_size
        shortlist = level_shortlist(
            features, true_nodes, above, negatives, beam_size, ranker, level, initial_beam, runtime
        )
        blocks = blocks_of(np.diff(tree.child_offsets[level - 1])) if kept is None else kept.blocks(level)
        stage = f"ranker level {level}/{tree.depth}"
        ranker = None  # its arrays are about to grow
        # The last level is the largest: only the main process holds its weights, the others map the saved file.
        holds = runtime.cache.processes.is_main or level < tree.depth
        problem.train_level(level_targets[level - 1], shortlist, blocks, weights if holds else None, stage)
        if holds and (level == tree.depth or arguments.negatives != "tfn"):
            snapshot = weights.snapshot()
            ranker = LinearRanker(
                tree,
                snapshot if kept is None else kept.joined(snapshot),
                num_sparse=features.num_sparse,
                num_dense=features.num_dense,
                loss=arguments.loss,
                ranking=arguments.ranking,
                beam_size=arguments.beam_size or default_beam(tree),
                first_level=first_level,
            )

    def trained() -> LinearRanker:
        assert ranker is not None
        return ranker

    return runtime.cache.once(
        "ranker", trained, LinearRanker.save_pretrained, lambda folder: LinearRanker.from_pretrained(folder, tree=tree)
    )


def train_classifiers(
    features: Features,
    targets: csr_matrix,
    offsets: np.ndarray,
    shortlist: Shortlist,
    arguments: RankerArguments,
    stage: str,
    runtime: Runtime = Runtime(),
    initial: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Trains the classifiers of one level on the dense features of documents.

    `targets` are `(documents, nodes)`, with the number of true labels below each node. `offsets` has the first child
    of each parent node, and the number of nodes; `shortlist` the documents that train the children of each. `initial`,
    float32 `(nodes, dimensions + 1)`, has weights that each node is drawn to; 0 by default.

    Returns the blocks as (parent, first child, number of children) and their weights, `(blocks * (dimensions + 1),
    LANES)`. The bias is the last of the weights.
    """
    blocks = blocks_of(np.diff(offsets))
    weights = _GrowingWeights(arguments.weight_dtype)
    problem = _Problem(features, arguments, runtime)
    if initial is not None:
        problem.initial = np.ascontiguousarray(initial, dtype=np.float32)
    problem.train_level(targets, shortlist, blocks, weights, stage)
    return blocks, weights.snapshot().dense


class _Problem:
    """The training documents as the solver takes them, and working memory for each thread."""

    def __init__(self, features: Features, arguments: RankerArguments, runtime: Runtime) -> None:
        self.arguments, self.runtime = arguments, runtime
        self.num_threads = count_threads(runtime.num_threads)
        sparse = sparse_part(features)
        self.dense = dense_part(features)
        self.indptr, self.indices, self.data = sparse.indptr, sparse.indices, sparse.data
        self.norms = squared_norms(sparse.indptr, sparse.data) + (self.dense**2).sum(axis=1)
        self.initial = np.empty((0, self.dense.shape[1]), dtype=np.float32)
        self.buffers: SimpleQueue = SimpleQueue()
        size = sparse.shape[1]
        for _ in range(self.num_threads):
            self.buffers.put(
                (np.zeros((size, LANES), np.float32), np.zeros(size, np.float32), np.zeros(size, np.int32))
            )

    def train_level(
        self,
        targets: csr_matrix,
        shortlist: Shortlist,
        blocks: np.ndarray,
        weights: _GrowingWeights | None,
        stage: str,
    ) -> None:
        """Trains the blocks of one level and appends them to `weights` if given."""
        before = np.cumsum(np.append(0, np.diff(shortlist.indptr)[blocks[:-1, 0]]))
        tasks = np.split(blocks, np.flatnonzero(np.diff(before // DOCUMENTS_PER_TASK)) + 1)
        # Pieces that any process may train.
        pieces = [part.tolist() for part in np.array_split(np.arange(len(tasks)), min(len(tasks), MAX_PIECES))]

        def train(indices: Sequence[int]) -> Iterator[dict[str, np.ndarray]]:
            own = [tasks[task] for index in indices for task in pieces[index]]
            trained = self._train_tasks(targets, shortlist, own, stage)
            for index in indices:
                parts = zip(*(next(trained) for _ in pieces[index]), strict=True)
                yield dict(zip(_PARTS, map(np.concatenate, parts), strict=True))

        def key() -> str:
            return digest(
                repr(self.arguments), self.indptr, self.indices, self.data, self.dense, targets.indptr,
                targets.indices, targets.data, shortlist.indptr, shortlist.rows, np.concatenate(tasks), self.initial,
            )  # fmt: skip

        for arrays in self.runtime.cache.pieces(stage.replace("/", " of "), len(pieces), train, key):
            if weights is not None:
                weights.append(arrays)

    def _train_tasks(
        self, targets: csr_matrix, shortlist: Shortlist, tasks: list[np.ndarray], stage: str
    ) -> Iterator[tuple[np.ndarray, ...]]:
        done, total = 0, sum(map(len, tasks))
        with ThreadPoolExecutor(self.num_threads) as pool:
            for trained in pool.map(lambda task: self._train_blocks(targets, shortlist, task), tasks):
                done += len(trained[0])
                self.runtime.report(stage, done, total)
                yield trained

    def _train_blocks(self, targets: csr_matrix, shortlist: Shortlist, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        arguments = self.arguments
        positive_cost = arguments.C
        if arguments.cost_sensitive:
            # The shares of a document sum to 1. Scale them so that a true node weighs 1 on average.
            positive_cost *= targets.nnz / np.count_nonzero(np.diff(targets.indptr))
        buffers = self.buffers.get()
        try:
            return train_blocks(
                self.indptr, self.indices, self.data, self.dense, self.norms, targets.indptr, targets.indices,
                targets.data, shortlist.indptr, shortlist.rows, blocks, LOSSES[arguments.loss], positive_cost,
                arguments.negative_cost or arguments.C, arguments.cost_sensitive, np.float32(arguments.bias_prior),
                self.initial, arguments.max_passes, arguments.tolerance, arguments.ranker_seed,
                np.float32(arguments.prune_threshold), arguments.weight_dtype == "int8", COPIED_NONZEROS, *buffers,
            )  # fmt: skip
        finally:
            self.buffers.put(buffers)


class _GrowingArray:
    """Rows appended to one array that grows in place: a large model is never held twice."""

    def __init__(self, shape: tuple[int, ...], dtype: type) -> None:
        self.array: np.ndarray = np.empty((0, *shape), dtype=dtype)
        self.used = 0

    def append(self, rows: np.ndarray) -> None:
        needed = self.used + len(rows)
        if needed > len(self.array):
            # No snapshot is alive while the array grows: each level takes a new one.
            self.array.resize((needed + needed // 8, *self.array.shape[1:]), refcheck=False)
        self.array[self.used : needed] = rows
        self.used = needed

    def rows(self) -> np.ndarray:
        return self.array[: self.used]


class _GrowingWeights:
    """The blocks trained so far, appended in order."""

    def __init__(self, weight_dtype: str) -> None:
        self.sizes: list[np.ndarray] = []
        self.arrays = {
            "records": _GrowingArray((HEADER + LANES * (1 if weight_dtype == "int8" else 4),), np.int8),
            "buckets": _GrowingArray((), np.int32),
            "dense": _GrowingArray((LANES,), np.float32),
        }

    def append(self, trained: Mapping[str, np.ndarray]) -> None:
        """Appends the result of [`train_blocks`]."""
        self.sizes.append(trained["sizes"])
        for name, array in self.arrays.items():
            array.append(trained[name])

    def snapshot(self) -> RankerWeights:
        """Returns the trained blocks without a copy; valid until the next `append`."""
        begin = np.cumsum(np.concatenate([np.zeros((1, 2), np.int64), *self.sizes]), axis=0)
        arrays = {name: array.rows() for name, array in self.arrays.items()}
        return RankerWeights(row_begin=begin[:, 0].copy(), bucket_begin=begin[:, 1].copy(), **arrays)

"""Trains the linear ranker, level by level, block by block."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..kernels import bucket_bits, hash_order, quantize_rows
from ..label_tree import LabelTree
from ..lanes import LANES
from ..linear_ranker import LOSSES, RANKINGS, LinearRanker, RankerWeights, dense_part, number_blocks, sparse_part
from .clustering import Progress
from .shortlist import NEGATIVES, Shortlist, level_shortlist
from .solver import block_diagonal, collect_rows, solve_block

WEIGHT_DTYPES = ("int8", "float32")


@dataclass
class RankerArguments:
    """
    How the linear ranker is trained and how it predicts.

    Args:
        loss (`str`, *optional*, defaults to `"squared_hinge"`): `"squared_hinge"` or `"logistic"`.
        cost (`float`, *optional*, defaults to `1.0`): Weight C of a document's loss against the regulariser.
        negative_cost (`float`, *optional*): The same for negative documents; `cost` by default.
        cost_sensitive (`bool`, *optional*, defaults to `False`):
            Whether a positive weighs as its share of the document's true labels under the node, equation (6).
        negatives (`str`, *optional*, defaults to `"both"`):
            Documents a lowest node's labels are trained on: `"tfn"` those with a true label under the node, `"man"` those
            that the levels above send there, `"both"` their union.
        train_beam_size (`int`, *optional*, defaults to `20`): Nodes per document in the beam that finds `man` negatives.
        ranking (`str`, *optional*, defaults to `"leaf"`): `"leaf"` or `"path"`, see [`LinearRanker`].
        beam_size (`int`, *optional*, defaults to `20`): Nodes per level at prediction.
        threshold (`float`, *optional*, defaults to `0.05`): Smaller weights are dropped.
        weight_dtype (`str`, *optional*, defaults to `"int8"`): `"int8"` (one scale per row) or `"float32"`.
        max_passes (`int`, *optional*, defaults to `10`): Largest number of passes over a node's documents.
        tolerance (`float`, *optional*, defaults to `0.1`): Training of a node ends when no margin is wrong by more.
        bias_prior (`float`, *optional*, defaults to `-1.0`): Margin that every classifier starts from.
        ranker_seed (`int`, *optional*, defaults to `0`): Seed of the order in which documents are visited.
    """

    loss: str = field(default="squared_hinge", metadata={"help": "Loss of the ranker.", "choices": tuple(LOSSES)})
    cost: float = field(default=1.0, metadata={"help": "Weight C of a document's loss against the regulariser."})
    negative_cost: float | None = field(default=None, metadata={"help": "C of negative documents; `cost` by default."})
    cost_sensitive: bool = field(default=False, metadata={"help": "Weigh positives by their share of the true labels."})
    negatives: str = field(
        default="both", metadata={"help": "Documents a label is trained on: tfn, man or both.", "choices": NEGATIVES}
    )
    train_beam_size: int = field(default=20, metadata={"help": "Beam that finds matcher-aware negatives."})
    ranking: str = field(
        default="leaf", metadata={"help": "Rank labels by their own margin or by the whole path.", "choices": RANKINGS}
    )
    beam_size: int = field(default=20, metadata={"help": "Nodes kept per level at prediction."})
    threshold: float = field(default=0.05, metadata={"help": "Weights smaller than this are dropped."})
    weight_dtype: str = field(
        default="int8", metadata={"help": "How weights are stored: int8 or float32.", "choices": WEIGHT_DTYPES}
    )
    max_passes: int = field(default=10, metadata={"help": "Largest number of passes over a node's documents."})
    tolerance: float = field(default=0.1, metadata={"help": "Largest wrong margin at which training may stop."})
    bias_prior: float = field(default=-1.0, metadata={"help": "Margin that every classifier starts from."})
    ranker_seed: int = field(default=0, metadata={"help": "Seed of the order in which documents are visited."})

    def __post_init__(self) -> None:
        for name, choices in (
            ("loss", tuple(LOSSES)),
            ("negatives", NEGATIVES),
            ("ranking", RANKINGS),
            ("weight_dtype", WEIGHT_DTYPES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not one of {', '.join(choices)}.")
        for name in ("cost", "negative_cost", "tolerance"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0, not {value}.")
        for name in ("train_beam_size", "beam_size", "max_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, not {getattr(self, name)}.")
        if not self.threshold >= 0:
            raise ValueError(f"`threshold` must not be negative, but is {self.threshold}.")


def train_ranker(
    features: Features,
    targets: csr_matrix,
    tree: LabelTree,
    arguments: RankerArguments,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> LinearRanker:
    """
    Trains one linear classifier per node of the tree.

    Args:
        features (`Features`):
            Training documents.
        targets (`csr_matrix`):
            `(documents, labels)` indicator of the true labels.
        tree (`LabelTree`):
            The hierarchy.
        arguments (`RankerArguments`):
            Settings.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default. The result does not depend on it.
        progress (`Callable`, *optional*):
            Called with (stage, done, total).
    """
    if targets.shape[0] != len(features):
        raise ValueError(f"There are {len(features)} documents but targets for {targets.shape[0]}.")
    if targets.nnz == 0:
        raise ValueError("No training document has a label: there is nothing to learn.")
    problem = _Problem(features, arguments, num_threads or os.cpu_count() or 1)
    level_targets = tree.targets(targets)
    child_begin, block_begin = number_blocks(tree)
    trained: list[RankerWeights] = []
    ranker = None
    first_node = 0
    for level in range(1, tree.depth + 1):
        above = len(tree.child_offsets[level - 1]) - 1
        negatives = arguments.negatives if level == tree.depth else "tfn"
        shortlist = level_shortlist(
            features, level_targets[level - 2] if level > 1 else None, above, negatives, arguments.train_beam_size, ranker,
            level, num_threads,
        )  # fmt: skip
        last_node = first_node + above
        blocks = _level_blocks(child_begin, block_begin, first_node, last_node)
        stage = f"ranker level {level}/{tree.depth}"
        trained.append(problem.train_level(level_targets[level - 1], shortlist, blocks, stage, progress))
        weights = _joined(trained) if level == tree.depth or arguments.negatives != "tfn" else None
        if weights is not None:
            ranker = LinearRanker(
                tree,
                weights,
                num_sparse=features.num_sparse,
                num_dense=features.num_dense,
                loss=arguments.loss,
                ranking=arguments.ranking,
                beam_size=arguments.beam_size,
            )
        first_node = last_node
    assert ranker is not None
    return ranker


def _level_blocks(child_begin: np.ndarray, block_begin: np.ndarray, first_node: int, last_node: int) -> np.ndarray:
    """(parent, first child, number of children) of each block of a level, parent and children counted within their level."""
    nodes = np.arange(first_node, last_node)
    counts = np.diff(block_begin)[first_node:last_node]
    parent = np.repeat(nodes, counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = child_begin[parent] + within * LANES
    size = np.minimum(LANES, child_begin[parent + 1] - first)
    return np.stack([parent - first_node, first - child_begin[first_node], size], axis=1)


class _Problem:
    """The training documents as the solver wants them, and working memory for each thread."""

    def __init__(self, features: Features, arguments: RankerArguments, num_threads: int) -> None:
        self.arguments, self.num_threads = arguments, num_threads
        sparse = sparse_part(features)
        self.dense = dense_part(features)
        # Frequent features first: their weights share pages and cache sets, and they are what documents mostly hold.
        frequency = np.bincount(sparse.indices, minlength=sparse.shape[1])
        self.feature_of = np.argsort(-frequency, kind="stable").astype(np.int32)
        rank = np.empty_like(self.feature_of)
        rank[self.feature_of] = np.arange(len(rank), dtype=np.int32)
        self.indptr, self.indices, self.data = sparse.indptr, rank[sparse.indices], sparse.data
        squares = np.add.reduceat(np.append(sparse.data**2, np.float32(0)), sparse.indptr[:-1]) if len(features) else 0
        squares = np.where(np.diff(sparse.indptr) == 0, 0, squares)
        self.norms = (squares + (self.dense**2).sum(axis=1)).astype(np.float32)
        self.work: SimpleQueue = SimpleQueue()
        for _ in range(num_threads):
            self.work.put((np.zeros((sparse.shape[1], LANES), np.float32), np.zeros(sparse.shape[1], np.bool_)))

    def train_level(
        self, targets: csr_matrix, shortlist: Shortlist, blocks: np.ndarray, stage: str, progress: Progress | None
    ) -> RankerWeights:
        parts = []
        with ThreadPoolExecutor(self.num_threads) as pool:
            for part in pool.map(lambda block: self._train_block(targets, shortlist, block), blocks):
                parts.append(part)
                if progress is not None:
                    progress(stage, len(parts), len(blocks))
        return _level_weights(parts, self.arguments.weight_dtype)

    def _train_block(self, targets: csr_matrix, shortlist: Shortlist, block: np.ndarray) -> _Block:
        arguments = self.arguments
        parent, first, size = (int(value) for value in block)
        documents = shortlist.documents(parent)
        diagonal = np.empty((len(documents), LANES), dtype=np.float32)
        loss = LOSSES[arguments.loss]
        block_diagonal(
            targets.indptr, targets.indices, targets.data, documents, first, size, loss, arguments.cost,
            arguments.negative_cost or arguments.cost, arguments.cost_sensitive, diagonal,
        )  # fmt: skip
        dense_weights = np.zeros((self.dense.shape[1], LANES), dtype=np.float32)
        weights, seen = self.work.get()
        try:
            solve_block(
                self.indptr, self.indices, self.data, self.dense, self.norms, documents, diagonal, size, loss,
                np.float32(arguments.bias_prior), arguments.max_passes, arguments.tolerance,
                arguments.ranker_seed + first, weights, dense_weights,
            )  # fmt: skip
            features, rows = collect_rows(
                self.indptr, self.indices, documents, weights, np.float32(arguments.threshold), seen
            )
        finally:
            self.work.put((weights, seen))
        dense_weights[-1] += np.float32(arguments.bias_prior)
        return _packed(self.feature_of[features], rows, dense_weights, arguments.weight_dtype)


@dataclass(frozen=True)
class _Block:
    """One trained block in its final form."""

    features: np.ndarray
    weights: np.ndarray
    scales: np.ndarray
    buckets: np.ndarray
    dense: np.ndarray


def _packed(features: np.ndarray, rows: np.ndarray, dense: np.ndarray, weight_dtype: str) -> _Block:
    order, buckets = hash_order(features, bucket_bits(len(features)))
    rows = rows[order]
    scales = np.empty(0, dtype=np.float32)
    if weight_dtype == "int8":
        codes, scales = np.empty(rows.shape, dtype=np.int8), np.empty(len(rows), dtype=np.float32)
        quantize_rows(rows, codes, scales)
        rows = codes
    return _Block(features[order], rows, scales, buckets, dense)


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _level_weights(parts: list[_Block], weight_dtype: str) -> RankerWeights:
    return RankerWeights(
        row_begin=_offsets([len(part.features) for part in parts]),
        bucket_begin=_offsets([len(part.buckets) for part in parts]),
        buckets=np.concatenate([part.buckets for part in parts]),
        features=np.concatenate([part.features for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
        dense=np.concatenate([part.dense for part in parts]),
    )


def _joined(levels: list[RankerWeights]) -> RankerWeights:
    """The levels one after another."""
    joined = {name: np.concatenate([vars(level)[name] for level in levels]) for name in vars(levels[0])}
    for name in ("row_begin", "bucket_begin"):
        lengths = np.concatenate([np.diff(vars(level)[name]) for level in levels])
        joined[name] = np.concatenate([[0], np.cumsum(lengths)])
    return RankerWeights(**joined)

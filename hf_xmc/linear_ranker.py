"""The linear ranker: tree-structured sparse linear classifiers, their prediction and file."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.special import expit

from .checks import MAX_WEIGHT, CheckedFile, first_fault
from .features import Features
from .kernels_check import first_bad_record, first_bad_table
from .kernels_search import LOGISTIC, SQUARED_HINGE, search
from .label_tree import LabelTree
from .restriction import Restriction, permitted_only
from .serialization import MAX_SHARD_SIZE, save_sharded
from .simd import HEADER, LANES
from .utils import check_count, count_threads, offsets_of, run_in_threads

RANKER_FILE = "ranker.safetensors"
_KIND = "linear ranker"
_BLOCK_SIZES = "block_sizes"
_SETTINGS = ("num_sparse", "num_dense", "loss", "ranking", "beam_size", "first_level")
LOSSES = {"squared_hinge": SQUARED_HINGE, "logistic": LOGISTIC}
RANKINGS = ("leaf", "path")

_MAX_FEATURES = (1 << 31) - 1

# Bounds of the documents that a thread searches together, and of their candidates.
MAX_DOCUMENTS = 1 << 15
MAX_HEAP = 1 << 21

_ALL_NODES = np.zeros(0, dtype=np.bool_)

# For fewer documents, creating a table of the features takes longer than it saves.
_MIN_DOCUMENTS_FOR_TABLE = 64


@dataclass(frozen=True)
class RankerWeights:
    """
    The classifiers of a ranker as flat arrays; `kernels_search.py` describes the search.

    Args:
        row_begin (`np.ndarray`): First record of each block, int64 (blocks + 1).
        bucket_begin (`np.ndarray`): First entry of each block's bucket table, int64 (blocks + 1).
        buckets (`np.ndarray`): First record of each hash bucket, relative to the block, int32.
        records (`np.ndarray`):
            One row per feature of a block, int8 (rows, bytes): the feature as int32, the scale as float32, then LANES
            weights as int8 or float32.
        dense (`np.ndarray`):
            Weights of the dense features and the bias (last); float32 (blocks * (dimensions + 1), LANES).
        block_sizes (`np.ndarray`, *optional*):
            Number of siblings of each block, uint8, in models whose labels were edited. By default all blocks of a
            node are full except its last.
    """

    row_begin: np.ndarray
    bucket_begin: np.ndarray
    buckets: np.ndarray
    records: np.ndarray
    dense: np.ndarray
    block_sizes: np.ndarray | None = None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, without `block_sizes` if it is left out."""
        return {name: array for name, array in vars(self).items() if array is not None}


@dataclass(frozen=True)
class Beam:
    """
    Nodes of one level for each document, from which a search continues.

    Args:
        level (`int`): The level, counted from 1.
        nodes (`np.ndarray`): int64 `(documents, nodes)`, numbered within the level, padded with -1.
        log_probabilities (`np.ndarray`): float32 of the same shape.
    """

    level: int
    nodes: np.ndarray
    log_probabilities: np.ndarray

    def __getitem__(self, rows: slice | np.ndarray) -> Beam:
        return Beam(self.level, self.nodes[rows], self.log_probabilities[rows])


class LinearRanker:
    """
    One linear classifier per tree node, searched from the root with a beam.

    A ranker may have no classifiers for the upper levels of its tree. Then `predict` needs the nodes to start from.

    Args:
        tree (`LabelTree`):
            The label hierarchy.
        weights (`RankerWeights`):
            The classifiers in tree order; during training possibly only those of the first levels.
        num_sparse (`int`):
            Number of sparse features.
        num_dense (`int`):
            Number of dense features.
        loss (`str`, *optional*, defaults to `"squared_hinge"`):
            `"squared_hinge"` or `"logistic"`; it determines how a logit becomes a probability.
        ranking (`str`, *optional*, defaults to `"leaf"`):
            `"leaf"` ranks labels by their own logit, `"path"` by the product of the probabilities from the root.
        beam_size (`int`, *optional*, defaults to `40`):
            Default number of nodes kept per level.
        first_level (`int`, *optional*, defaults to `1`):
            First level of the tree, counted from 1, with classifiers.
    """

    def __init__(
        self,
        tree: LabelTree,
        weights: RankerWeights,
        *,
        num_sparse: int,
        num_dense: int = 0,
        loss: str = "squared_hinge",
        ranking: str = "leaf",
        beam_size: int = 40,
        first_level: int = 1,
    ) -> None:
        if loss not in LOSSES:
            raise ValueError(f"`loss={loss!r}` is not one of {', '.join(LOSSES)}.")
        if ranking not in RANKINGS:
            raise ValueError(f"`ranking={ranking!r}` is not one of {', '.join(RANKINGS)}.")
        self.tree, self.weights = tree, weights
        self.num_sparse, self.num_dense = num_sparse, num_dense
        self.loss, self.ranking, self.beam_size = loss, ranking, beam_size
        self.first_level = first_level
        sizes = weights.block_sizes if weights.block_sizes is not None else block_sizes(tree, first_level)
        # First child of each block, and first child and first block of each node.
        self.block_child = first_node(tree, first_level) + offsets_of(sizes)
        self._child_begin = first_children(tree)
        self._block_begin = np.searchsorted(self.block_child, self._child_begin)

    def __repr__(self) -> str:
        return f"LinearRanker({self.tree}, features: {self.num_sparse} sparse + {self.num_dense} dense)"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor besides tree and weights."""
        return {name: getattr(self, name) for name in _SETTINGS}

    @property
    def num_bytes(self) -> int:
        """Size of the weights and their index."""
        return sum(array.nbytes for array in self.weights.arrays.values())

    def predict(
        self,
        features: Features,
        top_k: int = 10,
        *,
        beam_size: int | None = None,
        num_threads: int | None = None,
        initial_beam: Beam | None = None,
        restriction: Restriction | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Returns the best labels of each document.

        Args:
            features (`Features`):
                Documents, with the features of the training.
            top_k (`int`, *optional*, defaults to `10`):
                Number of labels per document.
            beam_size (`int`, *optional*):
                Number of nodes kept per level; defaults to the `beam_size` of the ranker. 0 keeps all: exact search.
            num_threads (`int`, *optional*):
                Number of threads; all cores by default. The result does not depend on it.
            initial_beam ([`Beam`], *optional*):
                Nodes of the level above `first_level` to start from, if that level is not the root. Only labels under
                these nodes are found.
            restriction ([`Restriction`], *optional*):
                The labels to choose from; all by default.

        Returns:
            `tuple[np.ndarray, np.ndarray]`: float32 scores in [0, 1] and int64 label ids, both `(documents, top_k)`,
            best first; 0 and -1 where the beam reached fewer labels.
        """
        logits, labels = self.logits(
            features,
            top_k,
            beam_size=beam_size,
            num_threads=num_threads,
            initial_beam=initial_beam,
            restriction=restriction,
        )
        return np.where(labels >= 0, self._probabilities(logits), np.float32(0)), labels

    def logits(
        self,
        features: Features,
        top_k: int = 10,
        *,
        beam_size: int | None = None,
        num_threads: int | None = None,
        initial_beam: Beam | None = None,
        restriction: Restriction | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """As [`~LinearRanker.predict`], with logits (`ranking="path"`: log-probabilities); -inf for missing labels."""
        top_k, depth, by_path = check_count("top_k", top_k), self.tree.depth, self.ranking == "path"
        beam_size = self.beam_size if beam_size is None else check_count("beam_size", beam_size, least=0)
        raw, nodes = self.search(features, depth, top_k, beam_size, by_path, num_threads, initial_beam, restriction)
        leaves = np.maximum(nodes - first_node(self.tree, depth), 0)
        return raw, np.where(nodes >= 0, self.tree.leaf_labels[leaves], -1)

    def search(
        self,
        features: Features,
        depth: int,
        top_k: int,
        beam_size: int,
        by_path: bool,
        num_threads: int | None = None,
        initial_beam: Beam | None = None,
        restriction: Restriction | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the raw scores and the best nodes of level `depth`, numbered over the whole tree (root: 0)."""
        if not isinstance(features, Features):
            raise TypeError(f"`features` is {type(features).__name__}. Pass `Features(...)`.")
        check_features(features, self.num_sparse, self.num_dense)
        sparse, dense, count = sparse_part(features), dense_part(features), len(features)
        start_scores, start_nodes = self._start(initial_beam, count)
        permitted = _ALL_NODES
        if restriction is not None:
            permitted, _ = restriction.nodes_of(self.tree)
            beam_size = restriction.beam_size(self.tree, beam_size)
            start_scores, start_nodes = permitted_only(start_scores, start_nodes, permitted)
        beam_size = min(beam_size, max(self.tree.level_sizes)) if beam_size > 0 else max(self.tree.level_sizes)
        scores = np.empty((count, top_k), dtype=np.float32)
        nodes = np.empty((count, top_k), dtype=np.int64)
        weights = self.weights
        views = weights.records.view(np.int32), weights.records.view(np.float32)
        num_threads = count_threads(num_threads)
        # Documents that are searched together share the weights in the cache; the memory of their beams is bounded.
        together = max(1, min(MAX_DOCUMENTS, MAX_HEAP // max(beam_size, top_k), -(-count // num_threads)))

        def run(first: int) -> None:
            last = min(first + together, count)
            table = np.zeros(self.num_sparse if last - first >= _MIN_DOCUMENTS_FOR_TABLE else 0, dtype=np.int32)
            search(
                sparse.indptr, sparse.indices, sparse.data, dense, first, last, self._child_begin, self._block_begin,
                self.block_child, weights.row_begin, weights.bucket_begin, weights.buckets, weights.records, *views,
                weights.dense, LOSSES[self.loss], start_scores[first:last], start_nodes[first:last],
                depth - self.first_level + 1, beam_size, by_path, permitted, table, scores[first:last],
                nodes[first:last],
            )  # fmt: skip

        run_in_threads(run, range(0, count, together), num_threads)
        return scores, nodes

    def save_pretrained(self, save_directory: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes `ranker.safetensors`, or its shards; the tree has a separate file."""
        metadata = {name: str(value) for name, value in self.settings.items()} | {"tree": self.tree.digest()}
        save_sharded(save_directory, RANKER_FILE, self.weights.arrays, _KIND, metadata, max_shard_size)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike, *, tree: LabelTree | None = None, **hub_kwargs
    ) -> LinearRanker:
        """Opens the ranker of a saved model, memory-mapped, with its tree unless `tree` is given."""
        file = CheckedFile.open_sharded(name_or_path, RANKER_FILE, _KIND, **hub_kwargs)
        tree = tree if tree is not None else LabelTree.from_pretrained(name_or_path, **hub_kwargs)
        settings: dict[str, Any] = {
            "num_sparse": file.number("num_sparse", 0, _MAX_FEATURES),
            "num_dense": file.number("num_dense", 0, _MAX_FEATURES),
            "loss": file.choice("loss", LOSSES),
            "ranking": file.choice("ranking", RANKINGS),
            "beam_size": file.number("beam_size", 0, _MAX_FEATURES),
            "first_level": file.number("first_level", 1, tree.depth, 1),
        }
        file.check_tree(tree)
        features = settings["num_sparse"], settings["num_dense"]
        return cls(tree, _checked_weights(file, tree, settings["first_level"], *features), **settings)

    def _start(self, initial_beam: Beam | None, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log-probabilities and the nodes, numbered over the whole tree, that a search starts from."""
        if self.first_level == 1 and initial_beam is None:
            return np.zeros((count, 1), dtype=np.float32), np.zeros((count, 1), dtype=np.int64)
        above = self.first_level - 1
        if initial_beam is None or initial_beam.level != above or initial_beam.nodes.shape[0] != count:
            actual = (
                "None"
                if initial_beam is None
                else f"{initial_beam.nodes.shape[0]} rows of nodes of level {initial_beam.level}"
            )
            raise ValueError(
                f"`initial_beam` is {actual}, but the ranker needs nodes of level {above} of all {count} documents. "
                "Predict with the whole model."
            )
        if initial_beam.nodes.size and initial_beam.nodes.max() >= self.tree.level_sizes[above - 1]:
            raise ValueError(f"`initial_beam` has a node outside 0..{self.tree.level_sizes[above - 1] - 1}.")
        nodes = np.where(initial_beam.nodes >= 0, initial_beam.nodes + first_node(self.tree, above), -1)
        return np.ascontiguousarray(initial_beam.log_probabilities, dtype=np.float32), nodes

    def _probabilities(self, raw: np.ndarray) -> np.ndarray:
        """
        Maps the scores of `logits` to [0, 1].

        For a label of probability `p`, the logit `2p - 1` minimises the expected squared hinge loss and `logit(p)` the
        expected logistic loss; the inverse functions give `p`. With unequal costs of positives and negatives the order
        is right, but the values are not calibrated.
        """
        if self.ranking == "path":
            return np.exp(raw)
        if self.loss == "squared_hinge":
            return np.clip((raw + 1) / 2, 0, 1)
        return expit(raw)


def check_features(features: Features, num_sparse: int, num_dense: int) -> None:
    """Raises if documents have other features than those of the training."""
    if features.num_sparse != num_sparse or features.num_dense != num_dense:
        raise ValueError(
            f"The documents have {features.num_sparse} sparse and {features.num_dense} dense features, but the "
            f"ranker was trained on {num_sparse} and {num_dense}. Pass the result of `model.featurize`."
        )


def sparse_part(features: Features) -> csr_matrix:
    """Returns the sparse features, or a matrix without columns."""
    return csr_matrix(np.empty((len(features), 0), np.float32)) if features.sparse is None else features.sparse


def dense_part(features: Features) -> np.ndarray:
    """Returns the dense features with a last column of ones for the bias."""
    ones = np.ones((len(features), 1), dtype=np.float32)
    return ones if features.dense is None else np.hstack([features.dense, ones])


def first_node(tree: LabelTree, level: int) -> int:
    """Returns the number of the first node of a level; nodes are numbered level by level from the root (0)."""
    return 0 if level == 0 else 1 + sum(tree.level_sizes[: level - 1])


def blocks_of(counts: np.ndarray) -> np.ndarray:
    """Returns the blocks of nodes with so many children: (node, first child, number of children) of each."""
    per_node = -(-counts // LANES)
    node = np.repeat(np.arange(len(counts)), per_node)
    within = (np.arange(len(node)) - np.repeat(np.cumsum(per_node) - per_node, per_node)) * LANES
    first = (np.cumsum(counts) - counts)[node] + within
    return np.stack([node, first, np.minimum(LANES, counts[node] - within)], axis=1)


def first_children(tree: LabelTree) -> np.ndarray:
    """Returns the first child of every inner node, and the end of the children of the last one."""
    starts = [offsets[:-1] + first_node(tree, level) for level, offsets in enumerate(tree.child_offsets, start=1)]
    return np.concatenate([*starts, [first_node(tree, tree.depth + 1)]])


def block_sizes(tree: LabelTree, first_level: int) -> np.ndarray:
    """Returns the number of siblings of each block of a new ranker for the levels from `first_level` on, uint8."""
    children = np.concatenate([np.diff(offsets) for offsets in tree.child_offsets[first_level - 1 :]])
    return blocks_of(children)[:, 2].astype(np.uint8)


def _checked_block_sizes(file: CheckedFile, tree: LabelTree, first_level: int) -> np.ndarray:
    """Returns the block sizes of a file, by which every child of every node is in one block of that node."""
    sizes = file.ids(_BLOCK_SIZES, np.uint8, None, LANES + 1)
    child_begin = first_children(tree)
    ends = first_node(tree, first_level) + np.cumsum(sizes, dtype=np.int64)
    if not (sizes > 0).all() or not np.isin(child_begin[first_node(tree, first_level - 1) + 1 :], ends).all():
        file.fail(_BLOCK_SIZES, f"does not divide the children of the nodes of {tree}")
    if ends[-1] != child_begin[-1]:
        file.fail(_BLOCK_SIZES, f"is for {ends[-1]} nodes, but {tree} has {child_begin[-1]}")
    return sizes


def _checked_weights(
    file: CheckedFile, tree: LabelTree, first_level: int, num_sparse: int, num_dense: int
) -> RankerWeights:
    """Returns the classifiers of a file, in which a search cannot leave the arrays."""
    file.check_names([field.name for field in fields(RankerWeights)])
    sizes = _checked_block_sizes(file, tree, first_level) if _BLOCK_SIZES in file.tensors else None
    blocks = len(block_sizes(tree, first_level) if sizes is None else sizes)
    records = file.array("records", np.int8, None, None)
    if records.shape[1] not in (HEADER + LANES, HEADER + 4 * LANES):
        file.fail("records", f"has rows of {records.shape[1]} bytes")
    row_begin = file.offsets("row_begin", blocks + 1, len(records))
    buckets = file.array("buckets", np.int32, None)
    bucket_begin = file.offsets("bucket_begin", blocks + 1, len(buckets))
    block = first_fault(lambda begin, end: first_bad_table(row_begin, bucket_begin, buckets, begin, end), blocks)
    if block >= 0:
        file.fail("buckets", f"does not describe the rows of block {block}")
    features, floats = records.view(np.int32), records.view(np.float32)
    last = 2 if records.shape[1] == HEADER + LANES else floats.shape[1]
    limit = np.float32(MAX_WEIGHT)
    row = first_fault(
        lambda begin, end: first_bad_record(features, floats, begin, end, num_sparse, last, limit), len(records)
    )
    if row >= 0:
        file.fail("records", f"has a feature outside 0..{num_sparse - 1} or a weight that is not finite in row {row}")
    dense = file.weights("dense", np.float32, blocks * (num_dense + 1), LANES)
    return RankerWeights(row_begin, bucket_begin, buckets, records, dense, sizes)

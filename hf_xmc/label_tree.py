"""The label hierarchy: arrays, validation, file."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from .checks import CheckedFile
from .hierarchy import Hierarchy
from .serialization import save_tensors
from .utils import offsets_of

TREE_FILE = "label_tree.safetensors"


class LabelTree:
    """
    A hierarchy of labels in which all labels have the same depth.

    Level 0 is the root, level `depth` are the labels. The nodes of a level are numbered so that the children of a node
    are contiguous: the children of node `b` of level `t - 1` are the nodes `child_offsets[t - 1][b]` to
    `child_offsets[t - 1][b + 1]` (exclusive) of level `t`. Position `p` of the last level is label `leaf_labels[p]`.

    Args:
        child_offsets (`Sequence[np.ndarray]`):
            One int64 array per level `t = 1..depth`, of length "nodes of the level above" + 1.
        leaf_labels (`np.ndarray`):
            The label id at each position of the last level: a permutation of all labels.
    """

    def __init__(self, child_offsets: Sequence[np.ndarray], leaf_labels: np.ndarray) -> None:
        self.child_offsets = [np.asarray(offsets, dtype=np.int64) for offsets in child_offsets]
        self.leaf_labels = np.asarray(leaf_labels, dtype=np.int64)
        self._validate()

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return len(self.child_offsets)

    @property
    def level_sizes(self) -> list[int]:
        """Number of nodes of each level, from the root's children to the labels."""
        return [int(offsets[-1]) for offsets in self.child_offsets]

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return len(self.leaf_labels)

    @cached_property
    def leaf_positions(self) -> np.ndarray:
        """Position of every label in the last level: the inverse of `leaf_labels`."""
        positions = np.empty(self.num_labels, dtype=np.int64)
        positions[self.leaf_labels] = np.arange(self.num_labels)
        return positions

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LabelTree)
            and self.depth == other.depth
            and all(np.array_equal(a, b) for a, b in zip(self.child_offsets, other.child_offsets))
            and np.array_equal(self.leaf_labels, other.leaf_labels)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LabelTree({' → '.join(str(size) for size in [1, *self.level_sizes])})"

    def parents(self, level: int) -> np.ndarray:
        """Parent (a node of level `level - 1`) of every node of `level`, counted from 1."""
        offsets = self.child_offsets[level - 1]
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))

    def descendants(self, upper: int, lower: int) -> np.ndarray:
        """
        Returns the offsets of the nodes of level `lower` under each node of level `upper` (0: the root).

        The nodes under node `b` are `offsets[b]` to `offsets[b + 1]` (exclusive).
        """
        offsets = np.arange((1 if upper == 0 else self.level_sizes[upper - 1]) + 1)
        for level in range(upper, lower):
            offsets = self.child_offsets[level][offsets]
        return offsets

    def indicator(self, level: int) -> csr_matrix:
        """`C^(t)` of shape `(K_t, K_{t-1})`: 1 where a node of `level` is a child of a node of the level above."""
        size, above = self.level_sizes[level - 1], len(self.child_offsets[level - 1]) - 1
        ones = np.ones(size, dtype=np.float32)
        return csr_matrix((ones, self.parents(level), np.arange(size + 1)), shape=(size, above))

    def targets(self, labels: csr_matrix) -> list[csr_matrix]:
        """
        Returns the number of true labels under each node of every level (`R^(t)` of XR-Transformer).

        Args:
            labels (`csr_matrix`):
                `(documents, labels)` indicator of the true labels.

        Returns:
            `list[csr_matrix]`: one `(documents, K_t)` matrix per level `t = 1..depth`, columns in tree order. Its
            non-zeros are the true nodes of the level (`Y^(t)`).
        """
        if labels.shape[1] != self.num_labels:
            raise ValueError(f"The targets have {labels.shape[1]} labels and the tree has {self.num_labels}.")
        labels = binarized(labels)
        counts = csr_matrix(
            (np.ones(labels.nnz, dtype=np.float32), self.leaf_positions[labels.indices], labels.indptr),
            shape=labels.shape,
        )
        counts.sort_indices()
        levels = [counts]
        for level in range(self.depth, 1, -1):
            counts = csr_matrix(
                (counts.data, self.parents(level)[counts.indices], counts.indptr),
                shape=(labels.shape[0], self.level_sizes[level - 2]),
                copy=True,
            )
            counts.sum_duplicates()
            levels.insert(0, counts)
        return levels

    @classmethod
    def flat(cls, num_labels: int) -> LabelTree:
        """Builds a tree without hierarchy: every label is a child of the root (one-vs-rest)."""
        return cls([np.array([0, num_labels])], np.arange(num_labels))

    @classmethod
    def from_parents(cls, parents: Sequence[np.ndarray]) -> LabelTree:
        """
        Builds the tree from the parent of every node, in any numbering.

        Args:
            parents (`Sequence[np.ndarray]`):
                For each level `t = 1..depth` the index of each node's parent in level `t - 1`. The last level is the
                labels, the root is node 0 of level 0.
        """
        order = np.zeros(1, dtype=np.int64)  # node of the level above at each new position
        child_offsets = []
        for level, parent in enumerate(parents, start=1):
            parent = np.asarray(parent, dtype=np.int64)
            if parent.size and (parent.min() < 0 or parent.max() >= len(order)):
                raise ValueError(
                    f"Level {level} has a parent outside 0..{len(order) - 1}, the nodes of the level above."
                )
            new_parent = np.argsort(order)[parent]
            counts = np.bincount(new_parent, minlength=len(order))
            child_offsets.append(offsets_of(counts))
            order = np.argsort(new_parent, kind="stable")
        return cls(child_offsets, order)

    @classmethod
    def from_cluster_chain(cls, chain: Sequence[csr_matrix]) -> LabelTree:
        """Builds the tree from indicator matrices `C^(t)` of shape `(K_t, K_{t-1})`, as PECOS keeps them."""
        parents = []
        for level, matrix in enumerate(chain, start=1):
            rows = csr_matrix(matrix)
            if not (np.diff(rows.indptr) == 1).all():
                node = int(np.flatnonzero(np.diff(rows.indptr) != 1)[0])
                raise ValueError(
                    f"Node {node} of level {level} has {np.diff(rows.indptr)[node]} parents; it needs exactly one."
                )
            parents.append(rows.indices)
        return cls.from_parents(parents)

    @classmethod
    def from_taxonomy(cls, labels: Sequence[Hashable], parent_of: Mapping[Any, Hashable]) -> LabelTree:
        """
        Builds the tree from a taxonomy with labels of any depth.

        Args:
            labels (`Sequence[Hashable]`):
                The labels in the order of their ids.
            parent_of (`Mapping[Hashable, Hashable]`):
                Parent of a label or of an inner node; nodes without an entry are children of the root. An inner node
                that is a label, too, also becomes a leaf under itself.
        """
        if len(set(labels)) != len(labels):
            twice = Counter(labels).most_common(1)[0][0]
            raise ValueError(f"The label {twice!r} occurs twice in `labels`. Remove one.")
        for node, above_it in parent_of.items():
            if not isinstance(above_it, Hashable):
                raise TypeError(
                    f"`parent_of` maps {node!r} to {above_it!r}. It must map each child to one parent: choose one of "
                    "several parents, or invert the mapping."
                )
        inner = set(parent_of.values())
        paths = [_path(label, parent_of, label in inner) for label in labels]
        depth = max(map(len, paths), default=0)
        # Unnamed nodes, so that all labels have the same depth.
        paths = [path + (None,) * (depth - len(path)) for path in paths]
        parents: list[np.ndarray] = []
        above: dict[tuple, int] = {(): 0}
        for level in range(1, depth + 1):
            nodes: dict[tuple, int] = {}
            parent: list[int] = []
            for path in paths:
                if path[:level] not in nodes:
                    nodes[path[:level]] = len(nodes)
                    parent.append(above[path[: level - 1]])
            parents.append(np.array(parent))
            above = nodes
        parents.append(np.array([above[path] for path in paths]))
        return cls.from_parents(parents)

    @classmethod
    def from_hierarchy(cls, hierarchy: Hierarchy) -> LabelTree:
        """
        Builds the tree from the parents of labels, see `from_taxonomy`.

        A label with several parents goes below the one that is nearest to the top.

        Args:
            hierarchy ([`Hierarchy`]): The hierarchy of the labels, `model.labels.hierarchy`.
        """
        levels = hierarchy.levels
        parent_of = {
            label: min(parents, key=lambda parent: levels[parent])
            for label, parents in enumerate(hierarchy.parents)
            if parents
        }
        return cls.from_taxonomy(range(len(hierarchy)), parent_of)

    def with_labels(self, clusters: np.ndarray) -> LabelTree:
        """
        Returns the tree with further labels; each is the last child of its cluster.

        Args:
            clusters (`np.ndarray`): The parent of each new label, a node of the level above the labels.
        """
        clusters = np.asarray(clusters, dtype=np.int64)
        order = np.argsort(clusters, kind="stable")
        offsets = self.child_offsets[-1]
        more = np.bincount(clusters, minlength=len(offsets) - 1)
        leaves = np.insert(self.leaf_labels, offsets[clusters[order] + 1], self.num_labels + order)
        return LabelTree([*self.child_offsets[:-1], offsets + offsets_of(more)], leaves)

    def without_labels(self, labels: np.ndarray) -> tuple[LabelTree, np.ndarray]:
        """
        Returns the tree without some labels and without the nodes that would have none, and which nodes are left.

        The other labels are numbered anew, in the same order. The marks are in the order of the nodes, level by level
        from the root.

        Args:
            labels (`np.ndarray`): Ids of the labels to remove, not all.
        """
        is_left = np.ones(self.num_labels, dtype=np.bool_)
        is_left[labels] = False
        kept = is_left[self.leaf_labels]
        leaves = (np.cumsum(is_left) - 1)[self.leaf_labels[kept]]
        levels: list[np.ndarray] = [kept]
        child_offsets: list[np.ndarray] = []
        for offsets in reversed(self.child_offsets):
            children = np.add.reduceat(levels[0], offsets[:-1], dtype=np.int64)
            levels.insert(0, children > 0)
            child_offsets.insert(0, offsets_of(children[children > 0]))
        return LabelTree(child_offsets, leaves), np.concatenate(levels)

    def digest(self) -> str:
        """Returns a fingerprint of the tree, which is stored in the files that belong to it."""
        fingerprint = hashlib.blake2b(digest_size=16)
        for array in (*self.child_offsets, self.leaf_labels):
            fingerprint.update(array.tobytes())
        return fingerprint.hexdigest()

    def save_pretrained(self, save_directory: str | os.PathLike, filename: str = TREE_FILE) -> None:
        """Writes `label_tree.safetensors`, or a file of another name."""
        tensors = {f"child_offsets.{level}": offsets for level, offsets in enumerate(self.child_offsets, start=1)}
        tensors["leaf_labels"] = self.leaf_labels
        save_tensors(os.path.join(save_directory, filename), tensors, "label tree", {"depth": str(self.depth)})

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike, filename: str = TREE_FILE, **hub_kwargs) -> LabelTree:
        """Reads the tree of a saved model from a folder or the Hub."""
        file = CheckedFile.open(name_or_path, filename, "label tree", **hub_kwargs)
        offsets, size = [], 1
        for level in range(1, file.number("depth", 1, len(file.tensors)) + 1):
            offsets.append(file.offsets(f"child_offsets.{level}", size + 1, None))
            size = int(offsets[-1][-1])
        try:
            return cls(offsets, file.ids("leaf_labels", np.int64, size, size))
        except ValueError as error:
            raise ValueError(f"`{file.path}` is not a valid label tree: {error} Save or download it again.") from error

    def _validate(self) -> None:
        if not self.child_offsets:
            raise ValueError("A label tree needs at least one level.")
        above = 1
        for level, offsets in enumerate(self.child_offsets, start=1):
            if offsets.ndim != 1 or len(offsets) != above + 1:
                raise ValueError(
                    f"Level {level} has {offsets.size} child offsets; the {above} nodes above need {above + 1}."
                )
            if offsets[0] != 0:
                raise ValueError(f"The child offsets of level {level} start at {offsets[0]}, not at 0.")
            if (np.diff(offsets) <= 0).any():
                node = int(np.flatnonzero(np.diff(offsets) <= 0)[0])
                raise ValueError(
                    f"Node {node} of level {level - 1} has no children. Every inner node needs at least one."
                )
            above = int(offsets[-1])
        if len(self.leaf_labels) != above:
            raise ValueError(f"The last level has {above} positions, but {len(self.leaf_labels)} labels are given.")
        out_of_range = (self.leaf_labels < 0) | (self.leaf_labels >= above)
        if out_of_range.any():
            raise ValueError(f"Label {self.leaf_labels[out_of_range][0]} is outside 0..{above - 1}.")
        seen = np.bincount(self.leaf_labels, minlength=above)
        if (seen != 1).any():
            label = int(np.flatnonzero(seen != 1)[0])
            raise ValueError(f"Label {label} occurs {seen[label]} times in the tree. Each label must occur once.")


def binarized(labels: csr_matrix) -> csr_matrix:
    """Returns ones where `labels` is not zero; explicit zeros and duplicates are removed."""
    ones = csr_matrix(labels, dtype=np.float32, copy=True)
    ones.sum_duplicates()
    ones.eliminate_zeros()
    ones.data[:] = 1
    return ones


def _path(label: Hashable, parent_of: Mapping[Any, Hashable], is_inner: bool) -> tuple:
    """The inner nodes above a label, from the top."""
    path = [label] if is_inner else []
    seen = {label}
    node = label
    while node in parent_of:
        node = parent_of[node]
        if node in seen:
            raise ValueError(f"The taxonomy has a cycle through {node!r}. Remove one of its links.")
        seen.add(node)
        path.append(node)
    return tuple(reversed(path))

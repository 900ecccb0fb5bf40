"""Predictions restricted to some of the labels."""

from __future__ import annotations

import numpy as np

from .label_tree import LabelTree
from .utils import offsets_of

# Up to so many permitted labels, all of them are scored.
MAX_EXHAUSTIVE = 1024


class Restriction:
    """
    The labels, `ids` of all `num_labels`, that a prediction may return, see [`~Labels.restrict`].

    Up to 1,024 permitted labels are all scored, so that the best ones are found exactly. Of more labels, a beam search
    through the nodes above permitted labels finds the best ones, as it does without a restriction.
    """

    def __init__(self, ids: np.ndarray, num_labels: int) -> None:
        self.ids = np.unique(np.asarray(ids, dtype=np.int64))
        self.permitted = np.zeros(num_labels, dtype=np.bool_)
        self.permitted[self.ids] = True
        self._nodes: list[tuple[LabelTree, np.ndarray, int]] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Restriction({len(self)} of {len(self.permitted)} labels)"

    @property
    def is_exhaustive(self) -> bool:
        """Whether all permitted labels are scored."""
        return len(self) <= MAX_EXHAUSTIVE

    def candidates(self, count: int) -> np.ndarray | None:
        """Returns the labels to score for each of `count` documents, if these are all permitted ones."""
        return np.tile(self.ids, (count, 1)) if self.is_exhaustive else None

    def nodes_of(self, tree: LabelTree) -> tuple[np.ndarray, int]:
        """
        Returns which nodes have a permitted label below them, and the largest number of them on a level.

        Nodes are numbered level by level from the root (0).
        """
        for known, nodes, widest in self._nodes:
            if known is tree:
                return nodes, widest
        level = self.permitted[tree.leaf_labels]
        levels = [level]
        for offsets in reversed(tree.child_offsets):
            before = offsets_of(level)
            level = before[offsets[1:]] > before[offsets[:-1]]
            levels.append(level)
        nodes, widest = np.concatenate(levels[::-1]), max(int(level.sum()) for level in levels)
        self._nodes = [*self._nodes[-3:], (tree, nodes, widest)]
        return nodes, widest

    def beam_size(self, tree: LabelTree, beam_size: int) -> int:
        """Returns the number of nodes to keep per level, given that of a search without a restriction (0: all)."""
        widest = self.nodes_of(tree)[1]
        return widest if self.is_exhaustive or beam_size == 0 else min(beam_size, widest)

    def select(self, scores: np.ndarray, labels: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first `top_k` permitted labels of ranked ones and their scores, padded with -1 and 0."""
        found, ids = (array[:, :top_k] for array in permitted_only(scores, labels, self.permitted))
        missing = [(0, 0), (0, top_k - ids.shape[1])]
        return np.pad(found, missing), np.pad(ids, missing, constant_values=-1)


def permitted_only(scores: np.ndarray, ids: np.ndarray, permitted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores, float32, and ids without those that are not permitted; the rows are padded with 0 and -1."""
    kept = (ids >= 0) & permitted[np.maximum(ids, 0)]
    order = np.argsort(~kept, axis=1, kind="stable")
    scores, ids = np.where(kept, scores, 0).astype(np.float32), np.where(kept, ids, -1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)

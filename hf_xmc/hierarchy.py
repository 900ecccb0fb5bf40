"""The hierarchy of labels: ancestors, levels, and predictions in terms of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from scipy.sparse import csr_matrix, eye_array
from scipy.sparse.csgraph import connected_components

from .utils import check_count


class Hierarchy:
    """
    The parents of labels. A label may have several; there are no cycles.

    Args:
        parents (`Sequence[Sequence[int]]`): For each label the ids of its parents.
        names (`Sequence[str]`, *optional*): Names for errors; the ids by default.
    """

    def __init__(self, parents: Sequence[Sequence[int]], names: Sequence[str] | None = None) -> None:
        self.parents = [list(own) for own in parents]
        self._links: dict[int, csr_matrix] = {}  # of the last level that `roll_up` was called with
        size = len(self.parents)
        names = list(map(str, range(size))) if names is None else names
        flat = np.array([parent for own in self.parents for parent in own], dtype=np.int64)
        if len(flat) and not (flat.min() >= 0 and flat.max() < size):
            raise ValueError(f"`parents` has ids outside 0..{size - 1}, the labels.")
        offsets = np.cumsum([0, *map(len, self.parents)])
        self._above = csr_matrix((np.ones(len(flat), np.int8), flat, offsets), shape=(size, size))
        children = np.repeat(np.arange(size), np.diff(offsets))
        in_cycle = np.zeros(size, bool)
        in_cycle[children[children == flat]] = True
        _, component = connected_components(self._above, connection="strong")
        in_cycle |= np.bincount(component)[component] > 1
        if in_cycle.any():
            shown = ", ".join(f"{names[i]!r:.80}" for i in np.flatnonzero(in_cycle)[:5])
            raise ValueError(f"The parents form a cycle through {shown}. Remove one of the links.")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def _below(self) -> csr_matrix:
        return csr_matrix(self._above.T)

    def ancestors(self, ids: Iterable[int]) -> np.ndarray:
        """Returns the labels above any of `ids`, and these themselves, in ascending order."""
        return _reachable(self._above, ids)

    def descendants(self, ids: Iterable[int]) -> np.ndarray:
        """Returns the labels below any of `ids`, and these themselves, in ascending order."""
        return _reachable(self._below, ids)

    @cached_property
    def levels(self) -> np.ndarray:
        """Level of each label: 1 for labels without parents, for others one more than that of the highest parent."""
        levels, current, level = np.zeros(len(self), np.int64), np.diff(self._above.indptr) == 0, 1
        while current.any():
            levels[current] = level
            current = np.asarray(self._below[current].sum(axis=0)).ravel() > 0
            current &= levels == 0
            level += 1
        return levels

    @property
    def depth(self) -> int:
        """The largest level."""
        return int(self.levels.max(initial=0))

    @cached_property
    def closure(self) -> csr_matrix:
        """Boolean `(labels, labels)`: each label's row has the label itself and all its ancestors."""
        reached = csr_matrix(self._above.astype(bool) + eye_array(len(self), dtype=bool, format="csr"))
        while True:
            # Squares: after t of them, all paths of length 2 ** t are in.
            further = csr_matrix(reached @ reached)
            if further.nnz == reached.nnz:
                further.sort_indices()
                return further
            reached = further

    def check_level(self, level: int) -> int:
        """Returns a level; raises if there is no such one."""
        if check_count("level", level) > self.depth:
            raise ValueError(f"`level={level}`: the hierarchy of the labels has {self.depth} levels.")
        return level

    def roll_up(
        self, scores: np.ndarray, indices: np.ndarray, level: int, top_k: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Replaces labels by their ancestors of a level (1: the top); those above the level stay as they are.

        The score of an ancestor is the highest score of its descendants among the labels. Scores, best first, and ids,
        padded with -1, are `(documents, labels)`; the result has at most `top_k` of them, padded with 0 and -1.
        """
        if self.check_level(level) not in self._links:
            self._links = {level: self._links_to(level)}
        return _follow(self._links[level], self.levels, scores, indices, top_k)

    def _links_to(self, level: int) -> csr_matrix:
        rows = np.repeat(np.arange(len(self)), np.diff(self.closure.indptr))
        columns = self.closure.indices
        kept = np.where(self.levels[rows] < level, rows == columns, self.levels[columns] == level)
        return csr_matrix((kept[kept], (rows[kept], columns[kept])), shape=self.closure.shape)

    def with_ancestors(self, scores: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Adds all ancestors to labels. The score of each is at least the highest score of its descendants among them.

        Arguments and result are those of `roll_up`; a label comes before an ancestor with the same score.
        """
        return _follow(self.closure, self.levels, scores, indices)


def _reachable(links: csr_matrix, ids: Iterable[int]) -> np.ndarray:
    reached = np.zeros(links.shape[0], bool)
    current = np.unique(np.fromiter(ids, dtype=np.int64))
    while len(current):
        reached[current] = True
        following = np.unique(links[current].indices)
        current = following[~reached[following]]
    return np.flatnonzero(reached)


def _follow(
    links: csr_matrix, levels: np.ndarray, scores: np.ndarray, indices: np.ndarray, top_k: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Replaces each label by those that it is linked to; the highest score of a label counts."""
    rows, places = np.nonzero(indices >= 0)
    labels = indices[rows, places]
    counts = np.diff(links.indptr)[labels]
    # The positions of the links of all labels, one label after another.
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1] if len(ends) else 0) + np.repeat(links.indptr[labels] - ends + counts, counts)
    targets = links.indices[positions]
    sources = (rows, places, labels, scores[rows, places])
    rows, places, labels, values = (np.repeat(array, counts) for array in sources)
    order = np.lexsort((targets, -levels[targets], targets != labels, places, -values, rows))
    rows, targets, values = rows[order], targets[order], values[order]
    _, first = np.unique(rows.astype(np.int64) * len(levels) + targets, return_index=True)
    first.sort()
    rows, targets, values = rows[first], targets[first], values[first]
    sizes = np.bincount(rows, minlength=len(indices))
    ranks = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    width = int(sizes.max(initial=0)) if top_k is None else top_k
    kept = ranks < width
    found = np.zeros((len(indices), width), np.float32)
    ids = np.full((len(indices), width), -1, np.int64)
    found[rows[kept], ranks[kept]], ids[rows[kept], ranks[kept]] = values[kept], targets[kept]
    return found, ids

"""The levels of the tree that an encoder is trained on: options, schedule, and what a batch of a level consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from scipy.sparse import csr_matrix

from ..heads import HEAD_LOSSES, SPARSE_ROWS
from ..label_tree import LabelTree

HEAD_NEGATIVES = ("tfn", "man", "both", "all", "dynamic")

T = TypeVar("T")


@dataclass
class LevelArguments:
    """
    How an encoder and its heads are trained, level by level. Lists hold one value for all levels or one for each.

    Args:
        indices (`list[int]`, *optional*):
            Levels to train, counted from 1 (the coarsest) or back from -1 (the labels). By default the labels and,
            where there are too many to score all for every document, the level above them.
        max_nodes (`int`, *optional*, defaults to 131072): Nodes of the largest level to train.
        epochs (`list[float]`, *optional*, defaults to `[1.0]`):
            Passes over the documents; 0 leaves the encoder as it is and only bootstraps the heads.
        steps (`list[int]`, *optional*): Optimiser steps, in place of `epochs`.
        learning_rate (`list[float]`, *optional*, defaults to `[1e-4]`): Highest learning rate of the encoder.
        head_learning_rate (`list[float]`, *optional*, defaults to `[5e-3]`): Highest learning rate of the head.
        projection_learning_rate (`list[float]`, *optional*):
            Highest learning rate of what shortens the vector for a head; that of the head by default.
        warmup (`float`, *optional*, defaults to 0.1):
            Part of a level's steps in which the learning rates rise; in the rest they fall.
        rate_floor (`float`, *optional*, defaults to 0.0):
            Part of the highest learning rates from which they rise and to which they fall; 1 keeps them constant.
        loss (`str`, *optional*, defaults to `"bce"`): `"bce"` or `"squared_hinge"`.
        negatives (`list[str]`, *optional*):
            Nodes in the loss of a document: `"tfn"` those under the true nodes of the level before, `"man"` those
            under the nodes that the model itself finds there before the first step, `"both"` or `"all"`; `"dynamic"`
            both with the nodes that it finds in the very same pass. By default all of a level that is small enough,
            both of others.
        beam_size (`list[int]`, *optional*, defaults to `[20]`): Nodes of the level before that the model finds.
        cost_sensitive (`bool`, *optional*, defaults to `False`):
            Whether a true node weighs as its share of the document's labels, equation (6).
        negative_weight (`float`, *optional*):
            Weight α of the other nodes; by default 1, or with `cost_sensitive` the mean weight of a true node.
        bootstrap (`bool`, *optional*, defaults to `True`):
            Whether a head starts from the linear model of the level on the encoder as it is, equation (11).
        bootstrap_cost (`float`, *optional*, defaults to 4.0): Weight C of the loss of that linear model.
        dropout (`float`, *optional*, defaults to 0.1): Part of the document vector that is hidden from the heads.
        joint (`bool`, *optional*, defaults to `False`):
            Whether all levels are trained in the same steps, by the sum of their losses, instead of one after another.
            A head below another one then starts from what tells the children of the true nodes apart.
        bottleneck (`int`, *optional*, defaults to 0):
            Length to which the vector is projected before the labels score it, where a level above has a head; 0
            leaves it as it is.
        shrink (`float`, *optional*):
            Makes the labels' head an adaptive one: each tail of a tree by frequency gets a vector shorter by this
            factor than that of the tail before.
        swa_start (`float`, *optional*, defaults to 1.0):
            Part of a level's steps after which weights are averaged; the mean is evaluated and kept. 1 averages none.
        swa_steps (`int`, *optional*, defaults to 10): Steps from one averaged state to the next.
    """

    indices: list[int] | None = field(default=None, metadata={"help": "Levels to train; -1 are the labels."})
    max_nodes: int = field(default=131072, metadata={"help": "Nodes of the largest level to train."})
    epochs: list[float] = field(default_factory=lambda: [1.0], metadata={"help": "Passes over the documents."})
    steps: list[int] | None = field(default=None, metadata={"help": "Optimiser steps, in place of epochs."})
    learning_rate: list[float] = field(
        default_factory=lambda: [1e-4], metadata={"help": "Highest learning rate of the encoder."}
    )
    head_learning_rate: list[float] = field(
        default_factory=lambda: [5e-3], metadata={"help": "Highest learning rate of the head."}
    )
    projection_learning_rate: list[float] | None = field(
        default=None, metadata={"help": "The same of what shortens the vector for a head."}
    )
    warmup: float = field(default=0.1, metadata={"help": "Part of the steps in which the learning rates rise."})
    rate_floor: float = field(default=0.0, metadata={"help": "Part of the learning rates that is left at the end."})
    loss: str = field(default="bce", metadata={"help": "Loss of the heads.", "choices": HEAD_LOSSES})
    negatives: list[str] | None = field(
        default=None, metadata={"help": "Nodes in the loss: tfn, man, both, all or dynamic."}
    )
    beam_size: list[int] = field(
        default_factory=lambda: [20], metadata={"help": "Nodes of the level before that the model finds."}
    )
    cost_sensitive: bool = field(default=False, metadata={"help": "Weigh true nodes by their share of the labels."})
    negative_weight: float | None = field(default=None, metadata={"help": "Weight of nodes that are not true."})
    bootstrap: bool = field(default=True, metadata={"help": "Start heads from a linear model."})
    bootstrap_cost: float = field(default=4.0, metadata={"help": "Weight of the loss of that linear model."})
    dropout: float = field(default=0.1, metadata={"help": "Part of the document vector hidden from the heads."})
    joint: bool = field(default=False, metadata={"help": "Train all levels in the same steps."})
    bottleneck: int = field(default=0, metadata={"help": "Length of the vector that labels score; 0 for all of it."})
    shrink: float | None = field(default=None, metadata={"help": "How much shorter each tail's vector is."})
    swa_start: float = field(default=1.0, metadata={"help": "Part of the steps before weights are averaged."})
    swa_steps: int = field(default=10, metadata={"help": "Steps from one averaged state to the next."})

    def __post_init__(self) -> None:
        rates = ("learning_rate", "head_learning_rate", "projection_learning_rate")
        for name in ("indices", "epochs", "steps", *rates, "negatives", "beam_size"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, list(value) if isinstance(value, (list, tuple)) else [value])
        if self.loss not in HEAD_LOSSES:
            raise ValueError(f"`loss={self.loss!r}` is not one of {', '.join(HEAD_LOSSES)}.")
        for negatives in self.negatives or ():
            if negatives not in HEAD_NEGATIVES:
                raise ValueError(f"`negatives={negatives!r}` is not one of {', '.join(HEAD_NEGATIVES)}.")
        for name in ("epochs", "steps", *rates):
            if any(not value >= 0 for value in getattr(self, name) or ()):
                raise ValueError(f"`{name}` must not be negative, but is {getattr(self, name)}.")
        if any(value < 1 for value in self.beam_size):
            raise ValueError(f"`beam_size` must be at least 1, not {self.beam_size}.")
        for name in ("warmup", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 0 and less than 1, not {getattr(self, name)}.")
        if self.negative_weight is not None and not self.negative_weight >= 0:
            raise ValueError(f"`negative_weight` must not be negative, but is {self.negative_weight}.")
        if not self.bootstrap_cost > 0:
            raise ValueError(f"`bootstrap_cost` must be greater than 0, not {self.bootstrap_cost}.")
        for name in ("rate_floor", "swa_start"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be between 0 and 1, not {getattr(self, name)}.")
        for name, least in (("bottleneck", 0), ("swa_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, not {getattr(self, name)}.")
        self._check_joint()

    def _check_joint(self) -> None:
        """Raises where options contradict each other that concern levels trained together."""
        if "dynamic" in (self.negatives or ()) and not self.joint:
            raise ValueError("`negatives='dynamic'` needs the level above in the same pass: set `joint`.")
        if self.shrink is None:
            return
        if not self.shrink >= 1:
            raise ValueError(f"`shrink` must be at least 1, not {self.shrink}.")
        if not self.joint or self.bottleneck:
            raise ValueError("`shrink` needs `joint` and goes without `bottleneck`: tails have their own projections.")
        if set(self.negatives or ()) != {"tfn"}:
            raise ValueError(
                f"`shrink` needs `negatives='tfn'`, not {self.negatives}: a tail's loss counts the documents with a "
                "true label in it."
            )

    def choose_levels(self, tree: LabelTree) -> list[int]:
        """The levels of a tree to train, ascending."""
        if self.indices is None:
            above = [tree.depth - 1] if tree.num_labels > SPARSE_ROWS and tree.depth > 1 else []
            levels = [level for level in (*above, tree.depth) if tree.level_sizes[level - 1] <= self.max_nodes]
            if not levels:
                raise ValueError(
                    f"`level_max_nodes={self.max_nodes}` leaves no level to train: the levels have {tree.level_sizes} "
                    "nodes. Raise it, or name levels in `level_indices`."
                )
            return levels
        levels = sorted({index if index > 0 else tree.depth + 1 + index for index in self.indices})
        if not levels or levels[0] < 1 or levels[-1] > tree.depth or 0 in self.indices:
            raise ValueError(
                f"`level_indices={self.indices}` names a level that the tree has not: it has the levels 1 to "
                f"{tree.depth}, or -{tree.depth} to -1, of {tree.level_sizes} nodes."
            )
        return levels

    def group_levels(self, levels: Sequence[int]) -> list[list[int]]:
        """The levels that are trained in the same steps, group after group."""
        return [list(levels)] if self.joint else [[level] for level in levels]

    def choose_negatives(self, tree: LabelTree, levels: Sequence[int]) -> list[str]:
        """The kind of negatives of each trained level."""
        if self.negatives is None:
            return ["all" if tree.level_sizes[level - 1] <= SPARSE_ROWS else "both" for level in levels]
        return per_level(self.negatives, len(levels), "negatives")


def per_level(values: Sequence[T], count: int, name: str) -> list[T]:
    """One value for each of `count` levels; one value is taken for all."""
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise ValueError(
            f"`level_{name}` has {len(values)} values, but {count} levels are trained: pass one for all, or {count}."
        )
    return list(values)


class Schedule:
    """
    Which level is trained at which step, and with which learning rates.

    Args:
        steps (`Sequence[int]`): Steps of each level.
        learning_rates (`Sequence[float]`): Highest learning rate of the encoder at each level.
        head_learning_rates (`Sequence[float]`): The same for the heads.
        warmup (`float`): Part of a level's steps in which the learning rates rise.
        projection_learning_rates (`Sequence[float]`, *optional*): The same for projections; as the heads by default.
        floor (`float`, *optional*, defaults to 0.0): Part of them from which they rise and to which they fall.
    """

    def __init__(
        self,
        steps: Sequence[int],
        learning_rates: Sequence[float],
        head_learning_rates: Sequence[float],
        warmup: float,
        projection_learning_rates: Sequence[float] | None = None,
        floor: float = 0.0,
    ) -> None:
        self.steps = list(steps)
        self.learning_rates, self.head_learning_rates = list(learning_rates), list(head_learning_rates)
        self.projection_learning_rates = list(projection_learning_rates or head_learning_rates)
        self.warmup, self.floor = warmup, floor
        self.ends = np.cumsum(self.steps).tolist()

    @classmethod
    def from_arguments(cls, arguments: LevelArguments, num_levels: int, steps_per_epoch: int) -> Schedule:
        """The schedule for so many levels, or groups of them."""
        projections = arguments.projection_learning_rate
        if arguments.steps is not None:
            steps = per_level(arguments.steps, num_levels, "steps")
        else:
            epochs = per_level(arguments.epochs, num_levels, "epochs")
            steps = [round(number * steps_per_epoch) for number in epochs]
        return cls(
            steps,
            per_level(arguments.learning_rate, num_levels, "learning_rate"),
            per_level(arguments.head_learning_rate, num_levels, "head_learning_rate"),
            arguments.warmup,
            None if projections is None else per_level(projections, num_levels, "projection_learning_rate"),
            arguments.rate_floor,
        )

    @property
    def total(self) -> int:
        """Steps of all levels."""
        return self.ends[-1]

    def index(self, step: int) -> int:
        """Which of the trained levels, counted from 0, the step after `step` steps belongs to."""
        return min(int(np.searchsorted(self.ends, step, side="right")), len(self.ends) - 1)

    def end_level(self, step: int) -> None:
        """Ends the level at work after `step` steps; the next ones follow at once."""
        index = self.index(step)
        saved = self.ends[index] - step
        self.ends = [end - saved if i >= index else end for i, end in enumerate(self.ends)]

    def steps_done(self, step: int) -> tuple[int, int]:
        """How many steps of its level are done after `step` steps, and how many were planned, early end or not."""
        index = self.index(step)
        return step - (self.ends[index - 1] if index else 0), self.steps[index]

    def factor(self, step: int) -> float:
        """What part of their highest value the learning rates have after `step` steps."""
        done, planned = self.steps_done(step)
        rising = max(1, round(self.warmup * planned))
        part = min((done + 1) / rising, max(0.0, (planned - done) / max(1, planned - rising)), 1.0)
        return self.floor + (1 - self.floor) * part

    def learning_rate(self, step: int) -> float:
        """Learning rate of the encoder after `step` steps."""
        return self.learning_rates[self.index(step)] * self.factor(step)

    def head_learning_rate(self, step: int) -> float:
        """Learning rate of the heads after `step` steps."""
        return self.head_learning_rates[self.index(step)] * self.factor(step)

    def projection_learning_rate(self, step: int) -> float:
        """Learning rate of the projections after `step` steps."""
        return self.projection_learning_rates[self.index(step)] * self.factor(step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"steps": self.steps, "ends": self.ends}


class LevelData:
    """
    Targets, candidates and weights of one level for every training document.

    Args:
        level (`int`):
            The level, counted from 1.
        counts (`csr_matrix`):
            `R^(t)`: `(documents, nodes)` true nodes with the number of true labels under each.
        offsets (`np.ndarray`):
            Where the level's nodes under each node of the level before begin, see [`LabelTree.descendants`].
        shortlist (`csr_matrix`, *optional*):
            `(documents, nodes of the level before)`: those whose descendants are in a document's loss; all nodes of
            the level by default.
        cost_sensitive (`bool`, *optional*, defaults to `False`):
            See [`LevelArguments`].
        negative_weight (`float`, *optional*):
            See [`LevelArguments`].
        in_pass (`bool`, *optional*, defaults to `False`):
            Whether the model finds the candidates in the pass that trains it: a batch then has true nodes only.
        beam_size (`int`, *optional*):
            Nodes of the level before that it finds.
    """

    def __init__(
        self,
        level: int,
        counts: csr_matrix,
        offsets: np.ndarray,
        shortlist: csr_matrix | None = None,
        cost_sensitive: bool = False,
        negative_weight: float | None = None,
        in_pass: bool = False,
        beam_size: int | None = None,
    ) -> None:
        self.level, self.counts, self.offsets, self.shortlist = level, counts, offsets, shortlist
        self.in_pass, self.beam_size = in_pass, beam_size
        self.cost_sensitive = cost_sensitive
        labelled = np.count_nonzero(np.diff(counts.indptr))
        self.mean_true = counts.nnz / labelled if labelled else 1.0
        if negative_weight is None:
            negative_weight = 1 / self.mean_true if cost_sensitive else 1.0
        self.negative_weight = negative_weight

    def batch(self, documents: np.ndarray) -> dict[str, Any]:
        """
        What the head is trained on for some documents.

        Returns:
            `dict[str, Any]`: `targets` and `weights`, float32 `(documents, nodes)`; where not all nodes of the level
            are among them, `nodes`, int64 `(nodes,)`: the candidates of any of the documents, ascending. With
            `in_pass` `true_nodes` and `true_weights` of shape `(documents, most)`, -1 for none, and the numbers
            `negative_weight` and `beam_size`, where there is one.
        """
        true = self.counts[documents]
        if self.in_pass:
            return self._true_batch(true)
        rows = np.repeat(np.arange(len(documents)), np.diff(true.indptr))
        columns, counts = true.indices, true.data
        if self.shortlist is None:
            nodes = None
            weights = np.full((len(documents), self.counts.shape[1]), self.negative_weight, dtype=np.float32)
        else:
            candidate_rows, candidates = self._candidates(documents)
            nodes, places = np.unique(candidates, return_inverse=True)
            candidate = np.zeros((len(documents), len(nodes) + 1), dtype=bool)
            candidate[candidate_rows, places] = True
            weights = candidate[:, :-1] * np.float32(self.negative_weight)
            # Without teacher forcing a true node may be no candidate of its document, or of none.
            columns = np.where(np.isin(columns, nodes), np.searchsorted(nodes, columns), len(nodes))
            known = candidate[rows, columns]
            rows, columns, counts = rows[known], columns[known], counts[known]
        targets = np.zeros_like(weights)
        targets[rows, columns] = 1
        if self.cost_sensitive:
            sums = np.asarray(true.sum(axis=1)).ravel()
            weights[rows, columns] = counts / sums[rows]
        else:
            weights[rows, columns] = 1
        batch = {"targets": targets, "weights": weights}
        return batch if nodes is None else {"nodes": nodes, **batch}

    def _true_batch(self, true: csr_matrix) -> dict[str, Any]:
        lengths = np.diff(true.indptr)
        places = np.arange(lengths.max(initial=0)) < lengths[:, None]
        nodes, weights = np.full(places.shape, -1, dtype=np.int64), np.ones(places.shape, dtype=np.float32)
        nodes[places] = true.indices
        if self.cost_sensitive:
            weights[places] = true.data / np.repeat(np.asarray(true.sum(axis=1)).ravel(), lengths)
        batch = {"true_nodes": nodes, "true_weights": weights, "negative_weight": self.negative_weight}
        return batch if self.beam_size is None else {**batch, "beam_size": self.beam_size}

    def _candidates(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row and node of every candidate, row by row."""
        assert self.shortlist is not None
        parents = self.shortlist[documents]
        rows = np.repeat(np.arange(len(documents)), np.diff(parents.indptr))
        first = self.offsets[parents.indices]
        sizes = self.offsets[parents.indices + 1] - first
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(rows, sizes), np.repeat(first, sizes) + within

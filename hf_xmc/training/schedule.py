"""Which level is trained at which step, and with which learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import SchedulerType

from .options import LevelArguments, per_level

if TYPE_CHECKING:
    from .arguments import XMCTrainingArguments

# Decay of the learning rate by the part of the steps after the warmup that is left.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 * (1 - math.cos(math.pi * left)),
    "constant": lambda left: 1.0,
    "constant_with_warmup": lambda left: 1.0,
}
SCHEDULERS = tuple(_DECAYS)
# Steps of a level whose length is a time, before its first step is done.
UNKNOWN_STEPS = 10**9


class Schedule:
    """
    Steps and learning rates of levels, or groups of levels, that are trained one after the other.

    `steps` and the highest learning rates of encoder, heads and projections (by default those of the heads) are lists
    with a value for each level. With `seconds`, a level takes as many steps as fit into its time; they are planned
    again after every step. `warmup_steps` below 1 are a ratio of the steps of a level, `min_lr_ratio` is the ratio of
    the lowest to the highest learning rates, `scheduler`, one of `SCHEDULERS`, says how they decay.
    """

    def __init__(
        self,
        steps: Sequence[int],
        learning_rates: Sequence[float],
        head_learning_rates: Sequence[float],
        projection_learning_rates: Sequence[float] | None = None,
        *,
        warmup_steps: float = 0.0,
        min_lr_ratio: float = 0.0,
        scheduler: str = "linear",
        seconds: Sequence[float] | None = None,
    ) -> None:
        self.steps, self.seconds = list(steps), seconds
        # Time that the current level has taken.
        self.elapsed = 0.0
        self.learning_rates, self.head_learning_rates = list(learning_rates), list(head_learning_rates)
        self.projection_learning_rates = list(projection_learning_rates or head_learning_rates)
        # As in transformers, `constant` has no warmup.
        self.warmup_steps = 0.0 if scheduler == "constant" else warmup_steps
        self.min_lr_ratio, self._decay = min_lr_ratio, _DECAYS[scheduler]
        self.ends = np.cumsum(self.steps).tolist()

    @classmethod
    def from_arguments(cls, args: XMCTrainingArguments, num_groups: int, steps_per_epoch: int) -> Schedule:
        """The schedule that the options of a training describe."""
        levels = args.make_level_arguments()
        rates = {}
        for name in ("learning_rate", "head_learning_rate", "projection_learning_rate"):
            value = getattr(levels, name)
            rates[f"{name}s"] = None if value is None else per_level(value, num_groups, name)
        seconds = None
        if args.time_budget is not None:
            seconds = [60 * args.time_budget * share for share in _shares(levels, num_groups)]
        return cls(
            _count_steps(args, num_groups, steps_per_epoch) if seconds is None else [UNKNOWN_STEPS] * num_groups,
            **rates,  # type: ignore[arg-type]
            warmup_steps=args.warmup_steps,
            min_lr_ratio=levels.min_lr_ratio,
            scheduler=SchedulerType(args.lr_scheduler_type).value,
            seconds=seconds,
        )

    @property
    def total(self) -> int:
        """Steps of all levels."""
        return self.ends[-1]

    @property
    def limit(self) -> int:
        """Steps that all levels can take at most."""
        return self.total if self.seconds is None else UNKNOWN_STEPS * len(self.steps)

    def index(self, step: int) -> int:
        """Position, from 0, of the level that is trained after `step` steps."""
        return min(int(np.searchsorted(self.ends, step, side="right")), len(self.ends) - 1)

    def end_level(self, step: int) -> None:
        """Ends the current level after `step` steps; the next ones move forward."""
        self._move_end(self.index(step), step)

    def plan_by_time(self, step: int, elapsed: float) -> None:
        """Plans the steps of the current level again, of which `step` is the last one done, after so many seconds."""
        assert self.seconds is not None
        index = self.index(step - 1)
        start = self.ends[index - 1] if index else 0
        planned = done = step - start
        if elapsed < self.seconds[index]:
            # At least two more: the Trainer would take one for the end.
            planned = max(done + 2, round(done * self.seconds[index] / elapsed))
        self.steps[index], self.elapsed = planned, elapsed
        self._move_end(index, start + planned)

    def _move_end(self, index: int, step: int) -> None:
        moved = step - self.ends[index]
        self.ends = [end + moved if i >= index else end for i, end in enumerate(self.ends)]

    def steps_done(self, step: int) -> tuple[int, int]:
        """Done and planned steps of the current level after `step` steps; an early end does not change the plan."""
        index = self.index(step)
        return step - (self.ends[index - 1] if index else 0), self.steps[index]

    def factor(self, step: int) -> float:
        """Ratio of the learning rates after `step` steps to their highest values."""
        done, planned = self.steps_done(step)
        warmup = round(self.warmup_steps * planned) if self.warmup_steps < 1 else int(self.warmup_steps)
        warmup = max(1, warmup)
        left = min(1.0, max(0.0, (planned - done) / max(1, planned - warmup)))
        part = min((done + 1) / warmup, self._decay(left))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * part

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
        """State for a checkpoint."""
        return {"steps": self.steps, "ends": self.ends, "elapsed": self.elapsed}

    def load(self, state: dict[str, Any]) -> bool:
        """Restores a state; returns whether it belongs to the same plan."""
        is_same = self.seconds is not None or state["steps"] == self.steps
        self.steps, self.ends, self.elapsed = state["steps"], state["ends"], state.get("elapsed", 0.0)
        return is_same


def _count_steps(args: XMCTrainingArguments, num_groups: int, steps_per_epoch: int) -> list[int]:
    """Steps of each level: `level_steps`, `level_epochs`, or its share in `max_steps` or `num_train_epochs`."""
    levels = args.make_level_arguments()
    if levels.steps is not None:
        return per_level(levels.steps, num_groups, "steps")
    if levels.epochs is not None or (args.max_steps <= 0 and args.num_train_epochs < 0):
        epochs = per_level(1.0 if levels.epochs is None else levels.epochs, num_groups, "epochs")
        return [round(number * steps_per_epoch) for number in epochs]
    total = args.max_steps if args.max_steps > 0 else round(args.num_train_epochs * steps_per_epoch)
    ends = [round(total * share) for share in np.cumsum(_shares(levels, num_groups))]
    return np.diff([0, *ends]).tolist()


def _shares(levels: LevelArguments, num_groups: int) -> list[float]:
    """Share of each level in the whole training."""
    shares = list(levels.epoch_shares or [1.0])
    # The labels are last; further levels above get the first share.
    shares = ([shares[0]] * num_groups + shares[1:])[-num_groups:]
    return [share / sum(shares) for share in shares]

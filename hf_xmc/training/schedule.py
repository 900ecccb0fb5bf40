"""The levels of the tree that an encoder is trained on: options, schedule, and what a batch of a level consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from .options import LevelArguments, per_level

T = TypeVar("T")


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
            arguments.min_lr_ratio,
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

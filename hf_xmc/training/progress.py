"""One progress bar that names the stage at work, and the time each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerState

from ..parallel.stage_cache import NO_CACHE, StageCache
from ..utils import Progress


class StageProgressCallback(ProgressCallback):
    """The bar of the trainer, restarted and renamed for every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self._stage = self._level = ""

    def report(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` pieces of a stage are done."""
        if self.training_bar is None and self.prediction_bar is None:
            self.prediction_bar = tqdm(total=total, desc=stage, dynamic_ncols=True)
            self._stage = stage
        bar = self.prediction_bar if self.training_bar is None else self.training_bar
        if stage != self._stage or bar.total != total:
            bar.set_description(stage, refresh=False)
            bar.reset(total)
            self._stage = stage
        bar.update(done - bar.n)

    def show_level(self, name: str, state: TrainerState) -> None:
        """Makes the bar count the steps of fine-tuning, all levels together, and names the level at work."""
        if self.training_bar is not None:
            self.training_bar.set_description(name, refresh=False)
            self.training_bar.reset(state.max_steps)
            self.training_bar.update(state.global_step)
        self._stage = self._level = name
        self.current_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts a step."""
        if self.training_bar is not None and self._level != self._stage:
            self.show_level(self._level, state)
        else:
            super().on_step_end(args, state, control, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar; its length is that of the first stage."""
        super().on_train_begin(args, state, control, **kwargs)
        self._stage = ""


class StageTimer:
    """
    Runs the stages of a training: times each and logs it.

    Args:
        log (`Callable[[dict[str, float]], None]`):
            Takes the seconds of a stage.
        report (`Callable`, *optional*):
            Called with (stage, done, total) while a stage is at work.
        work ([`StageCache`], *optional*):
            Shares what a stage does with other processes; this process alone by default.
    """

    def __init__(
        self, log: Callable[[dict[str, float]], None], report: Progress | None = None, work: StageCache = NO_CACHE
    ) -> None:
        self._log = log
        self.report, self.work = report, work
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, float]]:
        """Times its block. What the block puts into the dictionary is logged along with the seconds."""
        start = time.perf_counter()
        facts: dict[str, float] = {}
        yield facts
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._log({f"{name}_seconds": round(seconds, 2), **facts})


class CountedTexts(Sequence):
    """
    Texts that report how many of them were read.

    Args:
        texts (`Sequence[str]`):
            A list or the column of a dataset.
        stage (`str`):
            Name of what reads them.
        report (`Callable`, *optional*):
            Called with (stage, done, total) on every reading.
    """

    def __init__(self, texts: Sequence[str], stage: str, report: Progress | None) -> None:
        self._texts, self._stage, self._report = texts, stage, report

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, rows: Any) -> Any:
        if self._report is not None:
            last = rows.indices(len(self))[1] if isinstance(rows, slice) else rows + 1
            self._report(self._stage, last, len(self))
        return self._texts[rows]

"""What a training prints: a line for each finished stage, and one bar with the time left."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import psutil
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils import logging as transformers_logging

from ..kernels_solver import train_blocks
from .record import describe_label_texts

LOGS = ("text", "json", "none")
# Usual shares of the stages in the time of a training. The second of two trainings uses the measured ones.
_LINEAR_SHARES = {"labels": 0.01, "features": 0.25, "tree": 0.1, "ranker": 0.55, "save": 0.03, "evaluate": 0.06}
_ENCODER_SHARES = {**_LINEAR_SHARES, "tokens": 0.05, "embed": 0.4, "steps": 3.0}
_SECONDS, _STEPS = "_seconds", "steps"
# Seconds between two updates of the bar.
_INTERVAL = 0.1
_UNITS = {"depth": "levels", "features": "terms", "max length": "per document at most"}
_REPORTED = ("P@1", "P@5", "nDCG@5")
_LEVEL = re.compile(r"level (\d+)/(\d+)")
_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class StageProgressCallback(TrainerCallback):
    """
    Prints the stages of a training, and shows one bar for all of it if standard error is a terminal.

    `log` is `"text"` for a line per stage, `"json"` for the logs as JSON lines, or `"none"`.
    """

    def __init__(self, log: str = "text", bar: bool | None = None) -> None:
        if log not in LOGS:
            raise ValueError(f"`log={log!r}` is not one of {', '.join(LOGS)}.")
        self.log, self.has_bar = log, log == "text" and (sys.stderr.isatty() if bar is None else bar)
        self._bar: Any = None
        self._shares: Mapping[str, float] = _LINEAR_SHARES
        self._span, self._begin, self._shown = (0.0, 1.0), 0.0, 0.0
        self._seconds: dict[str, float] = {}
        self._stage, self._inner, self._part, self._parts = "", 0.0, "", 0
        self._is_training, self._level, self._loss, self._labels = False, "", 0.0, float("inf")
        self._level_begin, self._level_end, self._level_step, self._step = 0.0, 0.0, 0, 0

    @classmethod
    def of(cls, trainer: Any) -> StageProgressCallback:
        """The callback of a trainer, which replaces those of transformers. It is added unless the user gave one."""
        for callback in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            trainer.remove_callback(callback)
        given = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, cls))
        progress = next(given, None)
        if progress is None:
            progress = cls(bar=False if trainer.args.disable_tqdm else None)
            trainer.add_callback(progress)
        if not trainer.is_world_process_zero():
            progress.silence()
        return progress

    # ---- The bar ----

    def use_span(self, start: float, stop: float) -> None:
        """Sets the part of the bar that belongs to the next training, if a task consists of several."""
        self._span = start, stop
        if start:
            self._shares, self._seconds = dict(self._seconds), {}

    def silence(self) -> None:
        """Shows nothing: another process does."""
        self.log, self.has_bar = "none", False

    def begin_training(self, trains_encoder: bool) -> None:
        """A training begins."""
        self._is_training = True
        if not _are_loops_compiled():
            self.note("Compiling, which happens once and takes about a minute")
        if not self._span[0]:
            self._shares = _ENCODER_SHARES if trains_encoder else _LINEAR_SHARES

    def begin_stage(self, name: str) -> None:
        """A stage begins."""
        self._stage, self._inner, self._part, self._parts = name, 0.0, "", 0
        if self.has_bar and self._bar is None:
            self._open()
        self._show(name, force=True)

    def report(self, stage: str, done: int, total: int) -> None:
        """Shows the progress of a part of the current stage."""
        if self.has_bar and self._bar is None:
            self._open()
        if stage != self._part:
            self._part, self._parts = stage, self._parts + 1
        self._inner = max(self._inner, _share_done(stage, self._parts, done / max(total, 1)))
        self._show(f"{stage} {done:,} of {total:,}")

    def _open(self) -> None:
        self._begin = self._begin or time.perf_counter()
        layout = "{desc:<30.30} {percentage:3.0f}% |{bar:16}| {unit}"  # the unit of tqdm is any text
        width = shutil.get_terminal_size().columns  # tqdm shows nothing in a terminal that does not know its size
        self._bar = tqdm(total=1.0, bar_format=layout, leave=False, file=sys.stderr, ncols=width, nrows=24, unit="")

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, text: str, force: bool = False) -> None:
        now = time.perf_counter()
        if self._bar is None or not (force or now - self._shown > _INTERVAL):
            return
        done, elapsed = self._fraction(), now - self._begin
        left = f", about {_clock(elapsed / done - elapsed)} left" if done > 0.02 else ""
        self._bar.n, self._shown = done, now
        self._bar.set_description_str(text, refresh=False)
        self._bar.unit = f"{_clock(elapsed)}{left}"
        self._bar.refresh()

    def _fraction(self) -> float:
        finished = sum(share for stage, share in self._shares.items() if stage in self._seconds)
        running = 0.0 if self._stage in self._seconds else self._shares.get(self._stage, 0.0)
        start, stop = self._span
        done = min(1.0, (finished + running * self._inner) / sum(self._shares.values()))
        return start + (stop - start) * done

    # ---- Events of the trainer ----

    def show_level(self, name: str, state: TrainerState) -> None:
        """A level of fine-tuning begins."""
        self._end_level()
        self._level, self._level_begin, self._level_step = name, time.perf_counter(), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts a step."""
        self._step, self._level_end = state.global_step, time.perf_counter()
        self._stage, self._inner = _STEPS, self._step / max(state.max_steps, 1)
        self._show(f"fine-tuning {self._level}, step {self._step:,} of {state.max_steps:,}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Prints a line for a stage, an evaluation or the end."""
        logs = logs or {}
        if self.log == "json":
            self.write(json.dumps({**logs, "step": state.global_step, "memory_bytes": _memory()}))
        self._loss = logs.get("loss", self._loss)
        runtime = next((name for name in logs if name.endswith("_runtime")), None)
        if runtime == "train_runtime":
            self._end_level()
            self._line("trained", "", logs[runtime])
        elif runtime is not None:
            prefix = runtime.removesuffix("runtime")
            shown = _REPORTED if self._labels > 5 else _REPORTED[:1]
            scores = {name: logs[prefix + name] for name in shown if prefix + name in logs}
            what = ", ".join(f"{name} {100 * value:.1f} %" for name, value in scores.items())
            self._line(prefix.removesuffix("_"), what, logs[runtime])
            if not self._is_training:
                self._seconds["evaluate"] = float(logs[runtime])
        elif stage := next((name for name in logs if name.endswith(_SECONDS)), None):
            self._end_level()
            name = stage.removesuffix(_SECONDS)
            self._seconds[name] = self._seconds.get(name, 0.0) + float(logs[stage])
            self._labels = logs.get("labels", self._labels)
            facts = [_fact(key, value) for key, value in logs.items() if key not in (stage, "epoch")]
            self._line(name, ", ".join(facts), float(logs[stage]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar, unless another training follows."""
        self._end_level()
        self._is_training = False
        self.on_evaluate(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar after an evaluation that is not part of a training."""
        if not self._is_training and self._span[1] == 1.0:
            self.close()

    on_predict = on_evaluate

    def _end_level(self) -> None:
        """Prints the line of the level whose steps have ended."""
        steps, seconds = self._step - self._level_step, self._level_end - self._level_begin
        if self._level and steps > 0:
            loss = f", loss {self._loss:.4g}" if self._loss else ""
            self._seconds[_STEPS] = self._seconds.get(_STEPS, 0.0) + seconds
            self._line(f"fine-tuning {self._level}", f"{steps:,} steps{loss}", seconds)
        self._level, self._level_step = "", self._step

    # ---- Lines ----

    def note(self, text: str) -> None:
        """Prints a sentence for people."""
        if self.log == "text":
            self.write(text)

    def note_label_texts(self, labels: Any, uses: Iterable[str], are_wanted: bool = True) -> None:
        """Prints whether the texts of labels were used, and by which parts."""
        used = describe_label_texts(labels, uses)
        if used is None:
            used = "not used" + ("" if are_wanted else ": `label_texts=False`")
        self.note(f"{'label texts':<20}{used}")

    def _line(self, name: str, what: str, seconds: float) -> None:
        if self.log == "text":
            memory = f" {format_size(_memory()):>8}" if len(what) <= 40 else ""  # a line fits into 80 characters
            self.write(f"{name:<20}{what:<40} {seconds:>{max(1, 47 - max(40, len(what)))}.1f} s{memory}")

    def write(self, line: str) -> None:
        """Prints a line above the bar."""
        if self.log != "none":
            tqdm.write(line)
            sys.stdout.flush()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hides the bars of transformers and datasets within its block."""
    hub_bars, table_bars = transformers_logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    level = datasets.logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are raised as well
    try:
        yield
    finally:
        if hub_bars:
            transformers_logging.enable_progress_bar()
        if not table_bars:
            datasets.enable_progress_bars()
        datasets.logging.set_verbosity(level)


def format_size(num_bytes: float) -> str:
    """A number of bytes for people."""
    unit, size = next(((unit, size) for unit, size in _SIZES if num_bytes >= size), _SIZES[-1])
    return f"{num_bytes / size:.{int(unit == 'GB')}f} {unit}"


def format_count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _fact(name: str, value: Any) -> str:
    """What a stage reports, with its unit."""
    if name.endswith("_bytes"):
        return format_size(value)
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
    name = name.removeprefix("eval_").replace("_", " ")
    unit = _UNITS.get(name, name)
    return f"{text} {unit[:-1] if value == 1 and unit.endswith('s') else unit}"


def _share_done(part: str, number: int, done: float) -> float:
    """The share of a stage that is done, after a share of one of its parts."""
    level = _LEVEL.search(part)
    if level:  # of n; each level has about four times the work of the one above
        before, after = (4 ** (int(level[1]) - i) - 1 for i in (1, 0))
        return (before + (after - before) * done) / (4 ** int(level[2]) - 1)
    # How many parts will follow is not known: a stage is half done after its first one.
    before, after = ((number - i) / (number - i + 1) for i in (1, 0))
    return before + (after - before) * done


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _are_loops_compiled() -> bool:
    """Whether numba has compiled anything for this installation before."""
    statistics = getattr(train_blocks, "stats", None)  # without compilation it is a function of Python
    folder = getattr(statistics, "cache_path", None)
    return folder is None or any(Path(folder).glob("*kernels_*.nbi"))


def _memory() -> int:
    """Bytes that this process occupies."""
    return psutil.Process().memory_info().rss

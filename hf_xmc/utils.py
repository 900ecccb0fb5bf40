"""Threads, progress, checks of arguments, offsets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import Any

import numpy as np

Progress = Callable[[str, int, int], None]
"""Callback with the arguments (stage, done, total)."""


def available_cores() -> int:
    """Returns the number of cores that this process may use, which a scheduler or `taskset` may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join_texts(values: Sequence[str | None]) -> str:
    """Joins the texts of several columns, a line for each but the last, which may have more."""
    *first, last = (value or "" for value in values)
    return "\n".join([*(" ".join(value.split()) for value in first), last])


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Returns an argument that must be a whole number of at least `least`."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise TypeError(f"`{name}` must be a whole number, not {value!r:.80} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, not {value}.")
    return int(value)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Returns the begin of consecutive runs of these lengths, and the end of the last one, int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def count_threads(num_threads: int | None) -> int:
    """Checks a number of threads; `None` stands for all available cores."""
    return available_cores() if num_threads is None else check_count("num_threads", num_threads)


def run_in_threads(run: Callable[[int], None], starts: range, num_threads: int | None) -> None:
    """Calls a function, whose compiled loop releases the GIL, with the start of each task."""
    if len(starts) <= 1 or count_threads(num_threads) == 1:
        for start in starts:
            run(start)
    else:
        with ThreadPoolExecutor(count_threads(num_threads)) as pool:
            list(pool.map(run, starts))

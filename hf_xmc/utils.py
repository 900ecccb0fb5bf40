"""Threads and progress."""

from __future__ import annotations

import os
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Callback with the arguments (stage, done, total)."""


def available_cores() -> int:
    """Returns the number of cores that this process may use, which a scheduler or `taskset` may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_threads(num_threads: int | None) -> int:
    """Checks a number of threads; `None` stands for all available cores."""
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"`num_threads` must be at least 1, not {num_threads}; leave it out for all cores.")
    return num_threads or available_cores()

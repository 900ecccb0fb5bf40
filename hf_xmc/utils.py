"""Threads and progress."""

from __future__ import annotations

import os
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


def available_cores() -> int:
    """The cores that this process may use, which are not all where a scheduler or `taskset` gave it some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_threads(num_threads: int | None) -> int:
    """
    The number of threads to use.

    Args:
        num_threads (`int`, *optional*):
            What was asked for; all available cores by default.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"`num_threads` must be at least 1, not {num_threads}; leave it out for all cores.")
    return num_threads or available_cores()

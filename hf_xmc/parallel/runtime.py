"""What a long computation runs with: threads, a progress callback and a cache of finished pieces."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils import Progress
from .stage_cache import NO_CACHE, StageCache


@dataclass(frozen=True)
class Runtime:
    """
    Resources of a computation. They change its speed, never its result.

    Args:
        num_threads (`int`, *optional*):
            Threads to use; all available cores by default.
        progress (`Callable[[str, int, int], None]`, *optional*):
            Called with (stage, done, total).
        cache ([`StageCache`], *optional*):
            Shares pieces of work among processes and keeps finished ones on disk. By default this process does
            everything and keeps nothing.
    """

    num_threads: int | None = None
    progress: Progress | None = None
    cache: StageCache = NO_CACHE

"""Long computations in pieces: shared among processes, kept on disk and reused by a run that resumes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..serialization import load_tensors, new_folder, read_json, save_tensors, write_json
from ..utils import Progress
from .process_group import ProcessGroup

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]

CACHE_FOLDER = ".stage_cache"
_KIND = "piece of a stage"
# Seconds until a file of another process must be visible here: network file systems cache directories.
_VISIBLE_WITHIN = 90
# Rows of a piece. There are enough pieces for many processes, and each is large enough for sorting by length to pay.
# The size does not depend on the number of processes, so the result does not either.
MAX_ROWS, _MIN_ROWS, _PIECES = 4096, 256, 64


class PieceFolder:
    """
    A folder with one file for each finished piece of a computation, a plan that identifies it, and a lock.

    `pattern` is the format of the file names, with `{index}` and `{count}`; `owned` the regular expression of all
    names that [`~PieceFolder.clear`] removes.
    """

    def __init__(self, path: str | os.PathLike, pattern: str, owned: str = "") -> None:
        self.path, self._pattern, self._owned = Path(path), pattern, re.compile(owned)
        # Hidden, so that a reader of the folder as a dataset does not see it.
        self._state = self.path / ".hf-xmc"
        self._plan = self._state / "plan.json"
        self._lock: int | None = None
        self._is_exclusive = False

    def piece(self, index: int, count: int) -> Path:
        """Path of a piece."""
        return self.path / self._pattern.format(index=index, count=count)

    def pieces(self, count: int) -> list[Path]:
        """Paths of all pieces."""
        return [self.piece(index, count) for index in range(count)]

    def missing(self, count: int) -> list[int]:
        """Indices of the pieces that do not exist yet."""
        names = set(os.listdir(self.path)) if self.path.is_dir() else set()
        return [index for index, path in enumerate(self.pieces(count)) if path.name not in names]

    def read_plan(self, ignore_damage: bool = False) -> Any:
        """The plan, or `None` without one."""
        try:
            return read_json(self._plan) if self._plan.is_file() else None
        except ValueError as error:
            if ignore_damage:
                return None
            raise ValueError(f"{error} Or start again with `overwrite` (`--overwrite`).") from error

    def write_plan(self, plan: Any) -> None:
        """Writes the plan, to which pieces belong from now on."""
        write_json(self._plan, plan)

    def has_files(self) -> bool:
        """Whether the folder contains files that are not hidden."""
        return self.path.is_dir() and any(not name.startswith(".") for name in os.listdir(self.path))

    def remove_temporary(self) -> None:
        """Removes files that a killed process has left unfinished."""
        for path in self._owned_files():
            if path.name.startswith("."):
                path.unlink()

    def clear(self) -> None:
        """Removes the plan and all pieces. Files with other names stay."""
        self._plan.unlink(missing_ok=True)  # first, so that a kill in between leaves no pieces that look valid
        for path in self._owned_files():
            path.unlink()

    def remove(self) -> None:
        """Removes the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _owned_files(self) -> list[Path]:
        return [path for path in self.path.iterdir() if self._owned.fullmatch(path.name)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Releases the lock at the end, and removes a folder in which no plan was written."""
        try:
            yield
        finally:
            if self._lock is not None:
                if self._is_exclusive and not self._plan.exists():
                    (self._state / "lock").unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # the folder may contain other files, or be gone
                        self._state.rmdir()
                        self.path.rmdir()
                os.close(self._lock)
                self._lock = None

    def lock(self, shared: bool = False) -> None:
        """
        Takes the lock, or changes its kind. The system releases it when the process ends, even if it is killed.

        Other processes of the same job may hold a `shared` lock too. A new job cannot start while one of them lives,
        because that process could still write pieces of the old job.
        """
        path = self._state / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666) if self._lock is None else self._lock
        # A job that ends removes the file, and a lock on a removed file protects nothing.
        is_valid = _flock(file, shared) and path.exists() and os.path.samestat(os.fstat(file), os.stat(path))
        if not is_valid:
            if self._lock is None:
                os.close(file)
            raise OSError(
                f"`{self.path}` is being written by another process. Wait for it to end, or choose another output."
            )
        self._lock, self._is_exclusive = file, not shared


def _flock(file: int, shared: bool) -> bool:
    """Locks an open file and returns whether that succeeded. Without support by the system it always does."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("The output cannot be locked (%s): do not start a second job on it.", error.strerror)
    return True


def share_pieces(
    processes: ProcessGroup, folder: PieceFolder, count: int, write: Callable[[Sequence[int]], None]
) -> int:
    """Writes the missing pieces of a folder, each in one process, and returns how many they were. Collective."""
    missing: list[int] = processes.from_main(lambda: folder.missing(count))
    write(processes.own(missing))
    processes.wait()
    for index in missing:
        _wait_for(folder.piece(index, count), 0 if processes.count == 1 else _VISIBLE_WITHIN)
    return len(missing)


class StageCache:
    """
    Shares the stages of a training among processes and keeps finished pieces on disk.

    All processes share the file system of `folder`. With `keep`, a run that resumes finds finished pieces.
    """

    def __init__(self, processes: ProcessGroup, folder: str | os.PathLike, keep: bool) -> None:
        self.processes, self.folder = processes, Path(folder)
        self.keep = keep

    def within(self, name: str) -> StageCache:
        """A cache of its own in a subfolder, for a computation that is done twice on different data."""
        return StageCache(self.processes, self.folder / name, self.keep)

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes."""
        return self.processes.count > 1

    @property
    def is_begun(self) -> bool:
        """Whether an interrupted run has left pieces."""
        return self.folder.is_dir()

    def start(self, resume: bool) -> None:
        """Removes the pieces of an earlier run, unless this run resumes it. Collective."""
        if self.processes.is_main and not resume:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.processes.wait()

    def finish(self) -> None:
        """Removes all pieces. Memory-mapped arrays stay valid. Collective."""
        self.processes.wait()
        if self.processes.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)

    def once(self, name: str, make: Callable[[], T], save: Callable[[T, str], Any], load: Callable[[str], T]) -> T:
        """Computes a result in the main process and saves it to a folder, which the others load. Collective."""
        if not self.is_shared:
            return make()
        folder = self.folder / name
        if self.processes.is_main:
            with new_folder(folder) as temporary:
                save(make(), temporary)
        self.processes.wait()
        _wait_for(folder, _VISIBLE_WITHIN)
        result = load(str(folder))
        self._close(folder, None)
        return result

    def pieces(
        self,
        name: str,
        count: int,
        make: Callable[[Sequence[int]], Iterator[Arrays]],
        key: Callable[[], str] | None = None,
    ) -> Iterator[Arrays]:
        """
        Yields the pieces of a stage in order, as `make` yields those of given indices. Collective.

        Each is computed in one process. `key` returns a digest of everything that the pieces depend on. A run that
        resumes reuses pieces with the same key; without a key, pieces are not kept.
        """
        if self.is_shared:
            folder = self._share(name, count, make, key)
            for path in folder.pieces(count):
                yield load_tensors(path, _KIND)[0]
            self._close(folder.path, key)
        elif key is None or not self.keep:
            yield from make(range(count))
        else:
            folder = self._open(name, key)
            missing = folder.missing(count)
            computed = make(missing)
            for index, path in enumerate(folder.pieces(count)):
                if index in missing:
                    arrays = next(computed)
                    save_tensors(path, arrays, _KIND)
                    yield arrays
                else:
                    yield load_tensors(path, _KIND)[0]

    def rows(
        self, name: str, count: int, make: Callable[[int, int], Arrays], key: Callable[[], str] | None = None
    ) -> Arrays:
        """
        Computes arrays of `count` rows, piece by piece. Several processes map the same files. Collective.

        `make` computes the rows from the first index up to the second; for `key` see [`~StageCache.pieces`].
        """
        size = min(MAX_ROWS, max(_MIN_ROWS, -(-count // _PIECES)))
        starts = range(0, max(count, 1), size)

        def make_pieces(indices: Sequence[int]) -> Iterator[Arrays]:
            for index in indices:
                yield make(starts[index], min(starts[index] + size, count))

        if not self.is_shared:
            return _concatenate(self.pieces(name, len(starts), make_pieces, key), count)
        folder = self._share(name, len(starts), make_pieces, key)

        def save(_: Arrays, target: str) -> None:
            pieces = (load_tensors(path, _KIND)[0] for path in folder.pieces(len(starts)))
            for array in _concatenate(pieces, count, Path(target)).values():
                array.flush()  # type: ignore[attr-defined]

        merged = self.once(f"{name}-merged", dict, save, _map_rows)
        self._close(folder.path, key)
        return merged

    def _share(
        self, name: str, count: int, make: Callable[[Sequence[int]], Iterator[Arrays]], key: Callable[[], str] | None
    ) -> PieceFolder:
        """Returns the folder of a stage when it contains all pieces."""
        folder = self._open(name, key)

        def write(indices: Sequence[int]) -> None:
            for index, arrays in zip(indices, make(indices), strict=True):
                save_tensors(folder.piece(index, count), arrays, _KIND)

        share_pieces(self.processes, folder, count, write)
        return folder

    def _open(self, name: str, key: Callable[[], str] | None) -> PieceFolder:
        """The folder of a stage, emptied unless its pieces have the same key."""
        folder = PieceFolder(self.folder / name, "{index:05d}.safetensors")
        if self.processes.is_main:
            plan = None if key is None or not self.keep else key()
            if plan is None or folder.read_plan(ignore_damage=True) != plan:
                folder.remove()
                folder.write_plan(plan)
        self.processes.wait()
        return folder

    def _close(self, folder: Path, key: Callable[[], str] | None) -> None:
        """Waits until all processes have read a folder and removes it unless it is kept."""
        self.processes.wait()
        if self.processes.is_main and (key is None or not self.keep):
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # other stages may be kept
                self.folder.rmdir()


NO_CACHE = StageCache(ProcessGroup(), "", keep=False)
"""A single process that keeps nothing."""


def digest(*parts: str | np.ndarray) -> str:
    """A fingerprint of strings and arrays, in this order."""
    fingerprint = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = (
            part.encode() if isinstance(part, str) else np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        )
        # The length separates one part from the next.
        fingerprint.update(f"{len(content)} ".encode())
        fingerprint.update(content)
    return fingerprint.hexdigest()


def _concatenate(pieces: Iterator[Arrays], count: int, folder: Path | None = None) -> dict[str, np.ndarray]:
    """Arrays of `count` rows from consecutive pieces, in memory or in the files of a folder. Holds one copy only."""
    start, whole = 0, {}
    for arrays in pieces:
        for name, piece in arrays.items():
            if name not in whole:
                shape = (count, *piece.shape[1:])
                if folder is None:
                    whole[name] = np.empty(shape, piece.dtype)
                else:
                    whole[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", piece.dtype, shape)
            whole[name][start : start + len(piece)] = piece
        start += len(next(iter(arrays.values())))
    return whole


def _map_rows(folder: str) -> dict[str, np.ndarray]:
    # Mode "c": changes stay in this process, and torch accepts the array as writable.
    return {path.stem: np.load(path, mmap_mode="c") for path in sorted(Path(folder).glob("*.npy"))}


def _wait_for(path: Path, seconds: float) -> None:
    """Waits until a file or folder that another process has written is visible here."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"`{path}` was written but is not visible here. It was removed, or processes on several machines do "
                "not share this file system. Finished work is kept: start again."
            )
        time.sleep(0.2)


@dataclass(frozen=True)
class Runtime:
    """
    Resources of a computation. They change its speed, never its result.

    `num_threads` is by default the number of cores. `progress` is called with (stage, done, total). `cache` shares
    pieces of work among processes and keeps finished ones on disk; by default this process does everything and keeps
    nothing.
    """

    num_threads: int | None = None
    progress: Progress | None = None
    cache: StageCache = NO_CACHE

    def report(self, stage: str, done: int, total: int) -> None:
        """Calls `progress`, if there is one."""
        if self.progress is not None:
            self.progress(stage, done, total)

"""Long work in pieces: shared out over processes, kept on disk, found again by a run that was interrupted."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..serialization import atomic_write, load_tensors, new_folder, save_tensors
from .process_group import ProcessGroup

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]

CACHE_FOLDER = ".work"
_KIND = "piece of work"
_KEY_FILE = "key.txt"
# Seconds until a file that another process has written must be visible here: network file systems look twice.
_VISIBLE_WITHIN = 90
# Rows that are made in one piece: so many pieces that all processes have some, but not so small that sorting by length
# has nothing to sort. It does not depend on the number of processes, and so the result does not either.
_MOST_ROWS, _LEAST_ROWS, _PIECES = 4096, 256, 64


class StageCache:
    """
    Does the stages of a training that are not steps of an optimiser.

    Args:
        processes ([`ProcessGroup`]):
            The processes to share the work with.
        folder (`str`):
            Folder that all of them see; pieces are kept in it until [`~StageCache.finish`].
        keep (`bool`):
            Whether pieces are kept that one process makes for itself, to be found again after an interruption.
    """

    def __init__(self, processes: ProcessGroup, folder: str | os.PathLike, keep: bool) -> None:
        self.processes, self.folder = processes, Path(folder)
        self.keep = keep

    @property
    def is_shared(self) -> bool:
        """Whether several processes work."""
        return self.processes.count > 1

    @property
    def is_begun(self) -> bool:
        """Whether a run that was interrupted has left something."""
        return self.folder.is_dir()

    def start(self, resume: bool) -> None:
        """Forgets the pieces of an earlier run, unless this one is its continuation."""
        if self.processes.is_main and not resume:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.processes.wait()

    def finish(self) -> None:
        """Removes what is left in the folder. Arrays that are still in use stay so."""
        self.processes.wait()
        if self.processes.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)

    def once(self, name: str, make: Callable[[], T], save: Callable[[T, str], Any], load: Callable[[str], T]) -> T:
        """
        What the main process makes, for all: the others load what it has saved.

        Args:
            name (`str`): Name of the work.
            make (`Callable[[], T]`): Makes it.
            save (`Callable[[T, str], Any]`): Writes it into a folder.
            load (`Callable[[str], T]`): Reads it there, best by memory map.
        """
        if not self.is_shared:
            return make()
        folder = self.folder / name
        if self.processes.is_main:
            with new_folder(folder) as temporary:
                save(make(), temporary)
        self.processes.wait()
        _wait_for(folder)
        made = load(str(folder))
        self._close(folder, None)
        return made

    def pieces(
        self,
        name: str,
        count: int,
        make: Callable[[Sequence[int]], Iterator[Arrays]],
        key: Callable[[], str] | None = None,
    ) -> Iterator[Arrays]:
        """
        The pieces of a work, in their order, each made by one of the processes.

        Args:
            name (`str`):
                Name of the work.
            count (`int`):
                Number of pieces.
            make (`Callable[[Sequence[int]], Iterator[Arrays]]`):
                Makes the pieces of the given numbers, one after the other.
            key (`Callable[[], str]`, *optional*):
                Gives the digest of all that the pieces depend on, where that is asked for: pieces with the same key
                are found again after an interruption. Without it they are not kept.
        """
        if self.is_shared:
            folder = self._share(name, count, make, key)
            for index in range(count):
                yield load_tensors(_piece(folder, index), _KIND)[0]
            self._close(folder, key)
        elif key is None or not self.keep:
            yield from make(range(count))
        else:
            folder = self._open(name, key)
            missing = _missing(folder, count)
            made = make(missing)
            for index in range(count):
                if index in missing:
                    arrays = next(made)
                    save_tensors(_piece(folder, index), arrays, _KIND)
                    yield arrays
                else:
                    yield load_tensors(_piece(folder, index), _KIND)[0]

    def rows(
        self, name: str, count: int, make: Callable[[int, int], Arrays], key: Callable[[], str] | None = None
    ) -> Arrays:
        """
        Arrays of `count` rows, pieces of which are made by different processes. All of them map the same files.

        Args:
            name (`str`):
                Name of the work.
            count (`int`):
                Number of rows.
            make (`Callable[[int, int], Arrays]`):
                Makes the rows from the first number up to the second.
            key (`Callable[[], str]`, *optional*):
                See [`~StageCache.pieces`].
        """
        size = min(_MOST_ROWS, max(_LEAST_ROWS, -(-count // _PIECES)))
        starts = range(0, max(count, 1), size)

        def make_pieces(indices: Sequence[int]) -> Iterator[Arrays]:
            for index in indices:
                yield make(starts[index], min(starts[index] + size, count))

        if not self.is_shared:
            return _put_together(self.pieces(name, len(starts), make_pieces, key), count)
        folder = self._share(name, len(starts), make_pieces, key)

        def save(_: Arrays, target: str) -> None:
            pieces = (load_tensors(_piece(folder, index), _KIND)[0] for index in range(len(starts)))
            for array in _put_together(pieces, count, Path(target)).values():
                array.flush()  # type: ignore[attr-defined]

        merged = self.once(f"{name} of all", dict, save, _map_rows)
        self._close(folder, key)
        return merged

    def _share(
        self,
        name: str,
        count: int,
        make: Callable[[Sequence[int]], Iterator[Arrays]],
        key: Callable[[], str] | None,
    ) -> Path:
        """The folder in which all pieces are when this returns."""
        folder = self._open(name, key)
        missing = _missing(folder, count)
        self.processes.wait()  # before anyone adds a piece, so that all find the same ones missing
        own = self.processes.own(missing)
        for index, arrays in zip(own, make(own), strict=True):
            save_tensors(_piece(folder, index), arrays, _KIND)
        self.processes.wait()
        for index in missing:
            _wait_for(_piece(folder, index))
        return folder

    def _open(self, name: str, key: Callable[[], str] | None) -> Path:
        """The folder of a work; empty, unless it holds pieces of the same key."""
        folder = self.folder / name
        if self.processes.is_main:
            content = "" if key is None or not self.keep else key()
            key_file = folder / _KEY_FILE
            if not content or not key_file.is_file() or key_file.read_text() != content:
                shutil.rmtree(folder, ignore_errors=True)
                with atomic_write(key_file) as temporary:
                    Path(temporary).write_text(content)
        self.processes.wait()
        return folder

    def _close(self, folder: Path, key: Callable[[], str] | None) -> None:
        """Ends a work of several processes when all have read what is in a folder, which goes unless it is kept."""
        self.processes.wait()
        if self.processes.is_main and (key is None or not self.keep):
            shutil.rmtree(folder)
            with suppress(OSError):  # unless other pieces are kept
                self.folder.rmdir()


NO_CACHE = StageCache(ProcessGroup(), "", keep=False)
"""This process works for itself and keeps nothing."""


def digest(*parts: str | np.ndarray) -> str:
    """A fingerprint of texts and arrays: equal for equal content in the same order."""
    fingerprint = hashlib.blake2b(digest_size=16)
    for part in parts:
        # Text and bytes of other parts must not run into each other.
        content = (
            part.encode() if isinstance(part, str) else np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        )
        fingerprint.update(f"{len(content)} ".encode())
        fingerprint.update(content)
    return fingerprint.hexdigest()


def _put_together(pieces: Iterator[Arrays], count: int, folder: Path | None = None) -> dict[str, np.ndarray]:
    """Arrays of `count` rows from pieces of them, never held twice; in files of a folder, where one is given."""
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
    # "c": what is written to the array stays with this process, and torch takes it for an ordinary one.
    return {path.stem: np.load(path, mmap_mode="c") for path in sorted(Path(folder).glob("*.npy"))}


def _missing(folder: Path, count: int) -> list[int]:
    return [index for index in range(count) if not _piece(folder, index).is_file()]


def _piece(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.safetensors"


def _wait_for(path: Path) -> None:
    """Returns when a file or folder that another process has written is visible here."""
    give_up = time.monotonic() + _VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > give_up:
            raise FileNotFoundError(
                f"The main process has written `{path}`, but this process cannot see it. Processes on several "
                "machines need an `output_dir` on a file system that all of them share."
            )
        time.sleep(0.2)

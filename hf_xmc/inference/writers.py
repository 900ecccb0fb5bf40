"""Files of predictions: writing one, joining several, and the folder in which an interrupted job is taken up again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, List, Value

from ..data.corpus import Batch
from ..serialization import atomic_write, read_json, write_json

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FORMATS = ("jsonl", "parquet")
# Names of the columns of predictions.
PREDICTED = ("labels", "scores")
_ROWS_OF_A_GROUP = 16_384
_PART = re.compile(r"\.?part-\d+-of-\d+\.(jsonl|parquet)(\..*)?")

# The (label, score) pairs of each document.
Predictions = list[list[tuple[str, float]]]
# Takes the columns to keep, and the predictions for the same documents.
Write = Callable[[Batch, Predictions], None]


def json_line(kept: dict[str, Any], pairs: list[tuple[str, float]]) -> str:
    """A document's line in a file of JSON lines."""
    found = [{"label": label, "score": round(score, 6)} for label, score in pairs]
    return json.dumps({**kept, "labels": found}, ensure_ascii=False, default=str) + "\n"


def parquet_schema(kept: Features) -> pa.Schema:
    """Schema of a parquet file of predictions: labels are lists of names, as in the data one trains on."""
    return Features({**kept, "labels": List(Value("string")), "scores": List(Value("float32"))}).arrow_schema


@contextmanager
def prediction_writer(path: str | os.PathLike, schema: pa.Schema | None) -> Iterator[Write]:
    """
    Writes a file of predictions, which takes its name when it is whole and on the disk.

    Args:
        path (`str` or `os.PathLike`):
            The file.
        schema (`pyarrow.Schema`, *optional*):
            What [`parquet_schema`] says, for a parquet file; JSON lines are written without.

    Yields:
        Function that takes the columns to keep and the (label, score) pairs of each document.
    """
    with _new_file(path) as file:
        writer = _LineWriter(file) if schema is None else _TableWriter(file, schema)

        def write(kept: Batch, predictions: Predictions) -> None:
            with _named_errors(path):
                writer.write(kept, predictions)

        try:
            yield write
        except BaseException:
            with contextlib.suppress(Exception):
                writer.finish()
            raise
        with _named_errors(path):
            writer.finish()


@contextmanager
def _new_file(path: str | os.PathLike) -> Iterator[Any]:
    """Opens a file that takes its name when it is whole and on the disk, so that it outlives the machine, too."""
    with atomic_write(path) as temporary:
        file = open(temporary, "wb")
        try:
            yield file
            with _named_errors(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # of what could not be written before
                file.close()


class _LineWriter:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, kept: Batch, predictions: Predictions) -> None:
        for row, pairs in enumerate(predictions):
            self._file.write(json_line({name: values[row] for name, values in kept.items()}, pairs).encode("utf-8"))

    def finish(self) -> None:
        pass


class _TableWriter:
    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(file, schema)
        self._waiting: list[pa.Table] = []

    def write(self, kept: Batch, predictions: Predictions) -> None:
        labels = [[label for label, _ in pairs] for pairs in predictions]
        scores = [[score for _, score in pairs] for pairs in predictions]
        columns = {**kept, "labels": labels, "scores": scores}
        self._waiting.append(pa.Table.from_pydict(columns, schema=self._schema))
        if sum(map(len, self._waiting)) >= _ROWS_OF_A_GROUP:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting.clear()

    def finish(self) -> None:
        if self._waiting:
            self._flush()
        self._writer.close()


def join_files(paths: Sequence[Path], path: str | os.PathLike) -> None:
    """
    Makes one file of several of the same format.

    Args:
        paths (`Sequence[Path]`): Files of predictions, one at least.
        path (`str` or `os.PathLike`): The file to write, over one that is there.
    """
    with _new_file(path) as file, _named_errors(path):
        if paths[0].suffix == ".parquet":
            with pq.ParquetWriter(file, pq.read_schema(paths[0])) as writer:
                for part in paths:
                    with pq.ParquetFile(part) as table:
                        for group in range(table.num_row_groups):
                            writer.write_table(table.read_row_group(group))
        else:
            for part in paths:
                with open(part, "rb") as lines:
                    shutil.copyfileobj(lines, file, 1 << 20)


@contextmanager
def _named_errors(path: str | os.PathLike) -> Iterator[None]:
    """Errors of the file system name the file and say that nothing is lost."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(
            error.errno,
            f"`{path}` cannot be written ({os.strerror(error.errno)}). Finished parts are kept: see to the disk and "
            "give the same command again",
        ) from error


class PartsFolder:
    """
    Folder of a job: its plan, a lock, and one file for each part that is finished.

    Args:
        path (`str` or `os.PathLike`): The folder; it need not exist.
        suffix (`str`): Ending of the parts: `.jsonl` or `.parquet`.
    """

    def __init__(self, path: str | os.PathLike, suffix: str) -> None:
        self.path = Path(path)
        self.suffix = suffix
        # Hidden: whoever reads the folder as a dataset does not see it.
        self._state = self.path / ".hf-xmc"
        self._plan = self._state / "plan.json"
        self._lock: int | None = None
        self._alone = False  # whether no other process of the job has the lock

    def part(self, number: int, count: int) -> Path:
        """File of a part."""
        return self.path / f"part-{number:05d}-of-{count:05d}{self.suffix}"

    def parts(self, count: int) -> list[Path]:
        """Files of all parts."""
        return [self.part(number, count) for number in range(count)]

    def unfinished(self, count: int) -> list[int]:
        """Parts that are not there."""
        there = set(os.listdir(self.path)) if self.path.is_dir() else set()
        return [number for number, path in enumerate(self.parts(count)) if path.name not in there]

    def read_plan(self, damaged_is_none: bool = False) -> dict[str, Any] | None:
        """The plan, where there is one."""
        try:
            return read_json(self._plan) if self._plan.is_file() else None
        except ValueError as error:
            if damaged_is_none:
                return None
            raise ValueError(f"{error} Or start again with `overwrite` (`--overwrite`).") from error

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Writes the plan: from now on parts belong to it."""
        write_json(self._plan, plan)

    def holds_files(self) -> bool:
        """Whether there is anything but hidden files."""
        return self.path.is_dir() and any(not name.startswith(".") for name in os.listdir(self.path))

    def remove_temporary(self) -> None:
        """Removes what a killed process was writing."""
        for path in self._own_files():
            if path.name.startswith("."):
                path.unlink()

    def clear(self) -> None:
        """Removes all parts and their plan; files of other names stay."""
        self._plan.unlink(missing_ok=True)  # first: without it, parts that are left are not taken for finished
        for path in self._own_files():
            path.unlink()

    def _own_files(self) -> list[Path]:
        return [path for path in self.path.iterdir() if _PART.fullmatch(path.name)]

    def remove(self) -> None:
        """Removes the folder with all that is in it."""
        shutil.rmtree(self.path)

    # ---- One job at a time ----

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets go of the lock at the end; a folder in which nothing was begun is removed."""
        try:
            yield
        finally:
            if self._lock is not None:
                if self._alone and not self._plan.exists():
                    (self._state / "lock").unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # there may be other files, or no folder any more
                        self._state.rmdir()
                        self.path.rmdir()
                os.close(self._lock)
                self._lock = None

    def lock(self, shared: bool = False) -> None:
        """
        Takes the lock, or changes its kind. The system lets go of it when the process ends, however it ends.

        Args:
            shared (`bool`, *optional*, defaults to `False`):
                Whether the other processes of the job may hold it as well. A new job cannot begin while one of them
                is alive: its parts would get into the new job's.
        """
        path = self._state / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666) if self._lock is None else self._lock
        if not _flock(file, shared) or not _is_at(file, path):
            if self._lock is None:
                os.close(file)
            raise OSError(
                f"`{self.path}` is being written by another process. Wait for it to end, end it, or choose another "
                "output."
            )
        self._lock, self._alone = file, not shared


def _flock(file: int, shared: bool) -> bool:
    """Whether an open file is locked now. Where the system cannot lock, it is taken for granted."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("The output cannot be locked (%s): do not start a second job on it.", error.strerror)
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at a path: a job that ends may have removed it."""
    return path.exists() and os.path.samestat(os.fstat(file), os.stat(path))

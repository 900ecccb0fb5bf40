"""Files of predictions: writing one and joining several."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, List, Value

from ..data.corpus import Batch
from ..serialization import atomic_write

FORMATS = ("jsonl", "parquet")
PREDICTED = ("labels", "scores", "names")
"""Columns of the predictions; the last one only where labels have names in words."""
_ROW_GROUP_SIZE = 16_384

Predictions = list[list[dict[str, Any]]]
"""The labels of each document, as `{"label": ..., "score": ...}` and, where it differs, `"name"`."""
Write = Callable[[Batch, Predictions], None]
"""Writes the columns to keep and the predictions of some documents."""


def json_lines(kept: Batch, predictions: Predictions) -> Iterator[str]:
    """Yields the JSON lines of some documents."""
    for row, predicted in enumerate(predictions):
        labels = [{**label, "score": round(label["score"], 6)} for label in predicted]
        document = {**{name: values[row] for name, values in kept.items()}, "labels": labels}
        yield json.dumps(document, ensure_ascii=False, default=str) + "\n"


def parquet_schema(kept: Features, has_names: bool = False) -> pa.Schema:
    """Schema of a parquet file of predictions; `labels` are lists of strings, as in training data."""
    columns = {"labels": "string", "scores": "float32", **({"names": "string"} if has_names else {})}
    return Features({**kept, **{name: List(Value(kind)) for name, kind in columns.items()}}).arrow_schema


@contextmanager
def prediction_writer(path: str | os.PathLike, schema: pa.Schema | None) -> Iterator[Write]:
    """
    Opens a file of predictions, which appears under its name when it is complete and on disk.

    Yields a function that writes the columns to keep and the predictions of some documents. A parquet file
    needs its [`parquet_schema`]; without one, the file contains JSON lines.
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
    """Opens a file that appears under its name when it is complete and flushed to disk."""
    with atomic_write(path) as temporary:
        file = open(temporary, "wb")
        try:
            yield file
            with _named_errors(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # the first error counts
                file.close()


class _LineWriter:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, kept: Batch, predictions: Predictions) -> None:
        self._file.writelines(line.encode("utf-8") for line in json_lines(kept, predictions))

    def finish(self) -> None:
        pass


class _TableWriter:
    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(file, schema)
        self._waiting: list[pa.Table] = []

    def write(self, kept: Batch, predictions: Predictions) -> None:
        columns = {
            **kept,
            "labels": [[label["label"] for label in labels] for labels in predictions],
            "scores": [[label["score"] for label in labels] for labels in predictions],
        }
        if "names" in self._schema.names:
            columns["names"] = [[label.get("name", label["label"]) for label in labels] for labels in predictions]
        self._waiting.append(pa.Table.from_pydict(columns, schema=self._schema))
        if sum(map(len, self._waiting)) >= _ROW_GROUP_SIZE:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting.clear()

    def finish(self) -> None:
        if self._waiting:
            self._flush()
        self._writer.close()


def join_files(paths: Sequence[Path], path: str | os.PathLike) -> None:
    """Concatenates files of one format (at least one) into a new file, replacing an existing one."""
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
    """Adds the name of the file and a way out to errors of the file system."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(
            error.errno,
            f"`{path}` cannot be written ({os.strerror(error.errno)}). Finished parts are kept: check the disk and "
            "run the same command again",
        ) from error

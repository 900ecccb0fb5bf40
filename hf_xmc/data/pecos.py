"""Folders of PECOS: label and feature matrices as npz files, texts and label names as lines."""

from __future__ import annotations

import itertools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from scipy.sparse import csr_matrix, load_npz

from .columns import check_rows
from .streams import cached_dataset, text_lines

SPLITS = {"train": "trn", "validation": "val", "test": "tst"}
# Subfolders of the vectors in published archives.
VECTOR_FOLDERS = ("", "tfidf-attnxml")
# What numpy and zipfile raise for damaged files.
_DAMAGES = (
    ArithmeticError, EOFError, IndexError, KeyError, MemoryError, NotImplementedError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_ENTRIES_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 10_000


def pecos_splits(folder: Path) -> dict[str, Path]:
    """The label matrices of a folder by split; empty if it is not a PECOS folder."""
    files = {split: folder / f"Y.{short}.npz" for split, short in SPLITS.items()}
    return {split: path for split, path in files.items() if path.is_file()}


def pecos_label_names(folder: Path) -> list[str] | None:
    """Lines of `output-items.txt`, or `None` without that file."""
    path = folder / "output-items.txt"
    return list(text_lines(path)) if path.is_file() else None


def names_are_labels(names: list[str] | None) -> bool:
    """Whether names identify labels. Otherwise labels are numbers, and names are their texts."""
    return names is not None and all(names) and len(set(names)) == len(names)


def read_pecos(folder: Path, split: str, cache_dir: str | None = None) -> Dataset:
    """Loads one split: labels, and vectors and texts if the folder has them."""
    short = SPLITS[split]
    labels = folder / f"Y.{short}.npz"
    vectors = next((path for name in VECTOR_FOLDERS if (path := folder / name / f"X.{short}.npz").is_file()), None)
    text = folder / f"X.{short}.txt"
    features: dict[str, Any] = {}
    if text.is_file():
        features["text"] = Value("string")
    if vectors is not None:
        features |= {"feature_ids": List(Value("int32")), "feature_values": List(Value("float32"))}
    if not features:
        raise FileNotFoundError(f"`{labels}` has neither `{text.name}` nor `X.{short}.npz` beside it.")
    names = pecos_label_names(folder)
    features["labels"] = List(Value("string" if names_are_labels(names) else "int32"))
    options = {
        "labels": str(labels),
        "vectors": None if vectors is None else str(vectors),
        "text": str(text) if text.is_file() else None,
        "folder": str(folder),
    }
    files = [
        path for path in (labels, vectors, text, folder / "output-items.txt") if path is not None and path.is_file()
    ]
    return cached_dataset(pecos_tables, options, Features(features), files=files, split=split, cache_dir=cache_dir)


def pecos_tables(labels: str, vectors: str | None, text: str | None, folder: str) -> Iterator[pa.Table]:
    """Reads the files of a split in parallel and yields a table for each block of rows."""
    names = pecos_label_names(Path(folder))
    lines = None if text is None else text_lines(text)
    with CsrStream(labels) as y, CsrStream(vectors or labels) as x:
        if x.shape[0] != y.shape[0]:
            raise ValueError(f"`{vectors}` has {x.shape[0]} rows, `{labels}` has {y.shape[0]}. Take files of one set.")
        if names is not None and len(names) != y.shape[1]:
            raise ValueError(
                f"`{folder}/output-items.txt` names {len(names)} labels, `{labels}` has {y.shape[1]} columns."
            )
        if y.shape[0] == 0:
            raise ValueError(f"`{labels}` does not contain documents.")
        bounds = _common_blocks(x.indptr, y.indptr)
        for start, stop in itertools.pairwise(bounds):
            columns = {}
            if lines is not None:
                block = list(itertools.islice(lines, stop - start))
                if len(block) < stop - start:
                    raise ValueError(f"`{text}` has {start + len(block)} lines, `{labels}` has {y.shape[0]} rows.")
                columns["text"] = pa.array(block, pa.string())
            if vectors is not None:
                offsets, ids, values = x.read(start, stop)
                row_offsets = pa.array(offsets, pa.int32())
                columns["feature_ids"] = pa.ListArray.from_arrays(row_offsets, pa.array(ids, pa.int32()))
                columns["feature_values"] = pa.ListArray.from_arrays(row_offsets, pa.array(values, pa.float32()))
            columns["labels"] = _label_lists(*y.read(start, stop), names if names_are_labels(names) else None)
            yield pa.table(columns)
    if lines is not None and (rest := sum(1 for _ in lines)):
        raise ValueError(f"`{text}` has {y.shape[0] + rest} lines, `{labels}` has {y.shape[0]} rows.")


def _common_blocks(*indptrs: np.ndarray) -> list[int]:
    """Row bounds of blocks that are small in rows and in entries (one row at least)."""
    bounds = [0]
    num_rows = len(indptrs[0]) - 1
    while bounds[-1] < num_rows:
        start = bounds[-1]
        stops = [np.searchsorted(p, p[start] + _ENTRIES_AT_ONCE, side="right") - 1 for p in indptrs]
        bounds.append(max(start + 1, min(num_rows, start + _ROWS_AT_ONCE, *(int(stop) for stop in stops))))
    return bounds


def _label_lists(offsets: np.ndarray, ids: np.ndarray, values: np.ndarray, names: list[str] | None) -> pa.Array:
    # A stored zero means that the label is not set.
    kept = np.concatenate([[0], np.cumsum(values != 0)])[offsets]
    items = pa.array(ids[values != 0], pa.int32())
    if names is not None:
        items = pa.array(names, pa.string()).take(items)
    return pa.ListArray.from_arrays(pa.array(kept, pa.int32()), items)


class CsrStream:
    """
    A sparse matrix in an npz file, read row block after row block in one pass.

    Files in column order (csc) or another of scipy's formats cannot be read in this way and are loaded whole.

    Args:
        path (`str`): File written by `scipy.sparse.save_npz` or by PECOS, compressed or not.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise self._damaged(error) from error
        self._matrix: csr_matrix | None = None
        self._indices: IO[bytes] | None = None
        try:
            self._open()
        except BaseException:
            self._zip.close()
            raise

    def _open(self) -> None:
        try:
            if self._array("format").item() not in (b"csr", "csr"):
                matrix = load_npz(self.path)
                if hasattr(matrix, "check_format"):  # scipy converts what it has not checked, out of bounds
                    matrix.check_format(full_check=True)
                self._matrix = csr_matrix(matrix)
                self.shape = self._matrix.shape
                self.indptr = self._matrix.indptr.astype(np.int64)
                return
            num_rows, num_columns = self._array("shape")
            self.shape = (int(num_rows), int(num_columns))
            self.indptr = self._array("indptr").astype(np.int64)
            self._indices, self._index_type, num_ids = self._member("indices")
            self._data, self._value_type, num_values = self._member("data")
        except _DAMAGES as error:
            raise self._damaged(error) from error
        ascends = (self.indptr[1:] >= self.indptr[:-1]).all()  # a difference could overflow
        sound = len(self.indptr) == self.shape[0] + 1 and self.indptr[0] == 0 and ascends
        if not sound or not self.indptr[-1] == num_ids == num_values:
            raise self._damaged("its row pointers do not fit its entries")

    def _damaged(self, reason: object) -> ValueError:
        return ValueError(
            f"`{self.path}` is not a readable sparse matrix ({reason}). Write it with `scipy.sparse.save_npz`, or "
            "download it again."
        )

    def _array(self, name: str) -> np.ndarray:
        with self._zip.open(f"{name}.npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    def _member(self, name: str) -> tuple[IO[bytes], np.dtype, int]:
        file = self._zip.open(f"{name}.npy")
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read_header(file)
        if kind.hasobject:
            raise ValueError(f"`{name}` contains Python objects")
        return file, kind, int(np.prod(shape))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Offsets, ids and float32 values of rows `start` to `stop`, right after those of the last call."""
        offsets = self.indptr[start : stop + 1] - self.indptr[start]
        if self._matrix is not None:
            entries = slice(self.indptr[start], self.indptr[stop])
            ids, values = self._matrix.indices[entries], self._matrix.data[entries]
        else:
            assert self._indices is not None
            ids = self._take(self._indices, self._index_type, int(offsets[-1]))
            values = self._take(self._data, self._value_type, int(offsets[-1]))
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        ids, values = check_rows(
            offsets, ids.astype(np.int64), values, lambda row: f"`{self.path}`, row {start + row},", self.shape[1]
        )
        return offsets, ids, values

    def _take(self, file: IO[bytes], kind: np.dtype, count: int) -> np.ndarray:
        try:
            content = file.read(count * kind.itemsize)
        except _DAMAGES as error:
            raise self._damaged(error) from error
        if len(content) < count * kind.itemsize:
            raise self._damaged("it ends too early")
        return np.frombuffer(content, kind)

    def __enter__(self) -> CsrStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

"""
Formats of benchmark datasets.

- PECOS: folders with label and feature matrices as npz files, texts and label names as lines.
- Extreme Classification Repository: a header, then `l1,l2 f:v f:v` for each document.
- AttentionXML and LightXML: pairs of files; line i of one is a text, line i of the other its labels.
"""

from __future__ import annotations

import itertools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from datasets import Dataset, Features, List, Value
from scipy.sparse import csr_matrix, load_npz

from .columns import check_rows, raise_at
from .streams import BLOCK_BYTES, cached_dataset, line_blocks, open_bytes, text_lines

# ---- PECOS ----

_PECOS_SPLITS = {"train": "trn", "validation": "val", "test": "tst"}
# Subfolders of the vectors in published archives.
_VECTOR_FOLDERS = ("", "tfidf-attnxml")
# What numpy and zipfile raise for damaged files.
_DAMAGES = (
    ArithmeticError, EOFError, IndexError, KeyError, MemoryError, NotImplementedError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_ENTRIES_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 10_000


def pecos_splits(folder: Path) -> dict[str, Path]:
    """The label matrices of a folder by split; empty if it is not a PECOS folder."""
    files = {split: folder / f"Y.{short}.npz" for split, short in _PECOS_SPLITS.items()}
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
    short = _PECOS_SPLITS[split]
    labels = folder / f"Y.{short}.npz"
    vectors = next((path for name in _VECTOR_FOLDERS if (path := folder / name / f"X.{short}.npz").is_file()), None)
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
    possible = (labels, vectors, text, folder / "output-items.txt")
    files = [path for path in possible if path is not None and path.is_file()]
    return cached_dataset(pecos_tables, options, Features(features), files=files, split=split, cache_dir=cache_dir)


def pecos_tables(labels: str, vectors: str | None, text: str | None, folder: str) -> Iterator[pa.Table]:
    """Reads the files of a split in parallel and yields a table for each block of rows."""
    names = pecos_label_names(Path(folder))
    lines = None if text is None else text_lines(text)
    with closing(CsrStream(labels)) as y, closing(CsrStream(vectors or labels)) as x:
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
                columns["feature_ids"] = pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32()))
                columns["feature_values"] = pa.ListArray.from_arrays(offsets, values)
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
    return pa.ListArray.from_arrays(kept, items)


class CsrStream:
    """
    A sparse matrix in an npz file of scipy or PECOS, read row block after row block in one pass.

    Files in column order (csc) or another of scipy's formats cannot be read in this way and are loaded whole.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except _DAMAGES as error:
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

    def close(self) -> None:
        """Closes the file."""
        self._zip.close()


# ---- Extreme Classification Repository ----

_XMC_FEATURES = Features(
    {"feature_ids": List(Value("int32")), "feature_values": List(Value("float32")), "labels": List(Value("int32"))}
)
_HEADER = re.compile(rb"\s*(\d+)\s+(\d+)\s+(\d+)\s*")
_TO_CSV = bytes.maketrans(b": ", b",\n")


@dataclass
class _Lines:
    """Parsed lines: number of entries per line, and all entries."""

    num_labels: np.ndarray
    labels: np.ndarray
    num_features: np.ndarray
    ids: np.ndarray
    values: np.ndarray


def has_xmc_header(path: Path) -> bool:
    """Whether the first line of a file is `documents features labels`."""
    with open_bytes(path) as file:
        return _HEADER.fullmatch(file.readline(1000)) is not None


def read_xmc_text(path: Path, split: str, cache_dir: str | None = None) -> Dataset:
    """Loads vectors and integer labels from a file, plain or gzipped."""
    options = {"path": str(path)}
    return cached_dataset(xmc_tables, options, _XMC_FEATURES, files=[path], split=split, cache_dir=cache_dir)


def xmc_tables(path: str) -> Iterator[pa.Table]:
    """Reads a file in blocks of lines, checks them against the header and yields a table for each."""
    with open_bytes(path) as file:
        line = file.readline()
        if not line:
            raise ValueError(f"`{path}` is empty.")
        header = _HEADER.fullmatch(line)
        if header is None:
            raise ValueError(
                f"`{path}`, line 1, is `{line[:60].decode('utf-8', 'replace').strip()}`. A .txt file with labels "
                "starts with `documents features labels` (Extreme Classification Repository). If this is a table, "
                "rename it to .csv or .tsv."
            )
        num_documents, num_features, num_labels = (int(number) for number in header.groups())
        row = 0
        for lines in line_blocks(file):
            lines = [line.rstrip() for line in lines]
            if row + len(lines) > num_documents:
                if any(lines[num_documents - row :]):
                    raise ValueError(
                        f"`{path}` has more lines than the {num_documents} documents of its header. Correct line 1."
                    )
                lines = lines[: num_documents - row]
            if lines:
                yield _table(_parse(lines, path, row + 2), path, row + 2, num_features, num_labels)
            row += len(lines)
    if row == 0:
        raise ValueError(f"`{path}` does not contain documents.")
    if row < num_documents:
        raise ValueError(
            f"`{path}` ends after {row} of the {num_documents} documents of its header. The file is truncated, or "
            "line 1 is wrong."
        )


def _table(lines: _Lines, path: str, first_line: int, num_features: int, num_labels: int) -> pa.Table:
    label_offsets = np.concatenate([[0], np.cumsum(lines.num_labels)])

    def place(row: int) -> str:
        return f"`{path}`, line {first_line + row},"

    def what(entry: int) -> str:
        return f"the label {lines.labels[entry]}, but the header announces {num_labels} labels, numbered from 0"

    bad = (lines.labels < 0) | (lines.labels >= num_labels)
    raise_at(bad, label_offsets, what, "Correct line 1 or the label.", place)
    offsets = np.concatenate([[0], np.cumsum(lines.num_features)])
    with np.errstate(over="ignore"):
        values = lines.values.astype(np.float32)
    ids, values = check_rows(offsets, lines.ids, values, place, num_features)
    columns = {
        "feature_ids": pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32())),
        "feature_values": pa.ListArray.from_arrays(offsets, values),
        "labels": pa.ListArray.from_arrays(label_offsets, pa.array(lines.labels, pa.int32())),
    }
    return pa.table(columns)


def _parse(lines: list[bytes], path: str, first_line: int) -> _Lines:
    parsed = _parse_fast(lines)
    return _parse_slowly(lines, path, first_line) if parsed is None else parsed


def _parse_fast(lines: list[bytes]) -> _Lines | None:
    """Parses well-formed lines with a few passes over the block. Returns `None` if anything is unusual."""
    heads, tails = [], []
    for line in lines:
        head, _, tail = line.partition(b" ")
        # A document without labels may lack the leading space.
        heads.append(b"" if b":" in head else head)
        tails.append(line if b":" in head else tail.lstrip())
    num_labels = np.array([head.count(b",") + 1 if head else 0 for head in heads], np.int64)
    num_features = np.array([tail.count(b":") for tail in tails], np.int64)
    try:
        labels = _columns(b",".join([head for head in heads if head]).replace(b",", b"\n"), [pa.int64()])
        features = _columns(b" ".join([tail for tail in tails if tail]).translate(_TO_CSV), [pa.int64(), pa.float64()])
    except pa.ArrowInvalid:
        return None
    # A comma among the features would be read as a colon.
    if len(labels[0]) != num_labels.sum() or len(features[0]) != num_features.sum():
        return None
    return _Lines(num_labels, labels[0], num_features, *features)


def _columns(text: bytes, types: list[pa.DataType]) -> list[np.ndarray]:
    """Columns of comma-separated numbers. Arrow's reader is strict and many times faster than a loop in Python."""
    if not text:
        return [np.zeros(0, kind.to_pandas_dtype()) for kind in types]
    names = [str(i) for i in range(len(types))]
    table = csv.read_csv(
        pa.py_buffer(text),
        read_options=csv.ReadOptions(use_threads=False, column_names=names, block_size=BLOCK_BYTES),
        parse_options=csv.ParseOptions(quote_char=False, double_quote=False, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(column_types=dict(zip(names, types, strict=True)), null_values=[]),
    )
    return [column.to_numpy() for column in table.columns]


def _parse_slowly(lines: list[bytes], path: str, first_line: int) -> _Lines:
    """Parses line by line. Accepts any whitespace between entries and reports the line of an error."""
    num_labels, labels, num_features, ids, values = [], [], [], [], []
    for number, line in enumerate(lines, first_line):
        tokens = line.split()
        has_labels = bool(tokens) and line[:1].strip() != b"" and b":" not in tokens[0]
        try:
            row_labels = [int(label) for label in tokens[0].split(b",")] if has_labels else []
            features = [token.split(b":") for token in tokens[has_labels:]]
            row_ids = [int(feature) for feature, _ in features]
            row_values = [float(value) for _, value in features]
        except ValueError as error:
            raise ValueError(
                f"`{path}`, line {number}, does not match `label,label feature:value feature:value` ({error}): "
                f"{line[:80]!r}."
            ) from error
        num_labels.append(len(row_labels))
        labels += row_labels
        num_features.append(len(features))
        ids += row_ids
        values += row_values
    counts = np.array(num_labels, np.int64), np.array(num_features, np.int64)
    try:
        numbers = np.array(labels, np.int64), np.array(ids, np.int64)
    except OverflowError as error:
        raise ValueError(f"`{path}`, lines {first_line} to {first_line + len(lines) - 1}: {error}.") from error
    return _Lines(counts[0], numbers[0], counts[1], numbers[1], np.array(values, np.float64))


# ---- Pairs of files ----

_PAIR_FEATURES = Features({"text": Value("string"), "labels": List(Value("string"))})
_PAIR_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}
# Raw texts are preferred to tokenised ones.
_PAIR_TEXTS = ("raw_texts", "texts")


def pair_splits(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The pairs (texts, labels) of a folder by split; empty if it has none."""
    pairs = {}
    for split, prefixes in _PAIR_SPLITS.items():
        for prefix in prefixes:
            labels = _existing(folder / f"{prefix}_labels.txt")
            texts = next((path for name in _PAIR_TEXTS if (path := _existing(folder / f"{prefix}_{name}.txt"))), None)
            if labels is not None and texts is not None:
                pairs[split] = (texts, labels)
                break
            if labels is not None or texts is not None:
                path, missing = (labels, f"{prefix}_texts.txt") if labels else (texts, f"{prefix}_labels.txt")
                raise FileNotFoundError(f"`{path}` needs a file `{missing}` beside it, which does not exist.")
    return pairs


def _existing(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def read_pair(
    texts: Path, labels: Path, split: str, delimiter: str | None = None, cache_dir: str | None = None
) -> Dataset:
    """Loads texts and string labels, which are separated by whitespace by default."""
    options = {"texts": str(texts), "labels": str(labels), "delimiter": delimiter}
    files = [texts, labels]
    return cached_dataset(pair_tables, options, _PAIR_FEATURES, files=files, split=split, cache_dir=cache_dir)


def pair_tables(texts: str, labels: str, delimiter: str | None) -> Iterator[pa.Table]:
    """Reads both files in parallel and yields a table for each block of lines."""
    text_stream, label_stream = text_lines(texts), text_lines(labels)
    num_rows = 0
    while True:
        text_block = list(itertools.islice(text_stream, _ROWS_AT_ONCE))
        label_block = list(itertools.islice(label_stream, _ROWS_AT_ONCE))
        if len(text_block) != len(label_block):
            num_texts = num_rows + len(text_block) + sum(1 for _ in text_stream)
            num_labels = num_rows + len(label_block) + sum(1 for _ in label_stream)
            raise ValueError(
                f"`{texts}` has {num_texts} lines, `{labels}` has {num_labels}, but both need one per document."
            )
        if not text_block:
            break
        num_rows += len(text_block)
        lists = [[name for label in line.split(delimiter) if (name := label.strip())] for line in label_block]
        yield pa.table({"text": pa.array(text_block, pa.string()), "labels": pa.array(lists, pa.list_(pa.string()))})
    if num_rows == 0:
        raise ValueError(f"`{texts}` is empty.")

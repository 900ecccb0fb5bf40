"""
Text formats of benchmark datasets.

- Extreme Classification Repository: a header, then `l1,l2 f:v f:v` for each document.
- AttentionXML and LightXML: pairs of files; line i of one is a text, line i of the other its labels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from datasets import Dataset, Features, List, Value

from .columns import check_rows
from .streams import BLOCK_BYTES, cached_dataset, line_blocks, open_bytes, text_lines

FEATURES = Features(
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
    return cached_dataset(xmc_tables, {"path": str(path)}, FEATURES, files=[path], split=split, cache_dir=cache_dir)


def xmc_tables(path: str) -> Iterator[pa.Table]:
    """Reads a file in blocks of lines, checks them against the header and yields a table for each."""
    with open_bytes(path) as file:
        line = file.readline()
        if not line:
            raise ValueError(f"`{path}` is empty.")
        header = _HEADER.fullmatch(line)
        if header is None:
            raise ValueError(
                f"`{path}`, line 1, is {line[:60]!r}, but the format of the Extreme Classification Repository starts "
                "with `documents features labels`. Add that line, or use the extension of the file's format."
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
    bad = (lines.labels < 0) | (lines.labels >= num_labels)
    if bad.any():
        entry = int(np.argmax(bad))
        row = int(np.searchsorted(label_offsets, entry, side="right")) - 1
        raise ValueError(
            f"`{path}`, line {first_line + row}, has the label {lines.labels[entry]}, but the header announces "
            f"{num_labels} labels, numbered from 0. Correct line 1 or the label."
        )
    offsets = np.concatenate([[0], np.cumsum(lines.num_features)])
    with np.errstate(over="ignore"):
        values = lines.values.astype(np.float32)
    ids, values = check_rows(
        offsets, lines.ids, values, lambda row: f"`{path}`, line {first_line + row},", num_features
    )
    offsets = pa.array(offsets, pa.int32())
    return pa.table(
        {
            "feature_ids": pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32())),
            "feature_values": pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32())),
            "labels": pa.ListArray.from_arrays(
                pa.array(label_offsets, pa.int32()), pa.array(lines.labels, pa.int32())
            ),
        }
    )


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
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}
# Raw texts are preferred to tokenised ones.
_TEXTS = ("raw_texts", "texts")
_PAIRS_AT_ONCE = 10_000


def pair_splits(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The pairs (texts, labels) of a folder by split; empty if it has none."""
    pairs = {}
    for split, prefixes in _SPLITS.items():
        for prefix in prefixes:
            labels = _existing(folder / f"{prefix}_labels.txt")
            texts = next((path for name in _TEXTS if (path := _existing(folder / f"{prefix}_{name}.txt"))), None)
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
    return cached_dataset(
        pair_tables, options, _PAIR_FEATURES, files=[texts, labels], split=split, cache_dir=cache_dir
    )


def pair_tables(texts: str, labels: str, delimiter: str | None) -> Iterator[pa.Table]:
    """Reads both files in parallel and yields a table for each block of lines."""
    text_stream, label_stream = text_lines(texts), text_lines(labels)
    num_rows = 0
    while True:
        text_block = list(itertools.islice(text_stream, _PAIRS_AT_ONCE))
        label_block = list(itertools.islice(label_stream, _PAIRS_AT_ONCE))
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

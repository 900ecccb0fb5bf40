"""Pairs of files of AttentionXML and LightXML: line i of one is a text, line i of the other its labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, Features, List, Value

from .streams import cached_dataset, text_lines

FEATURES = Features({"text": Value("string"), "labels": List(Value("string"))})
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}
# Raw texts are preferred to tokenised ones.
_TEXTS = ("raw_texts", "texts")
_ROWS_AT_ONCE = 10_000


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
    return cached_dataset(pair_tables, options, FEATURES, files=[texts, labels], split=split, cache_dir=cache_dir)


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

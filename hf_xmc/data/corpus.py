"""The documents of many files as one corpus, memory-mapped from the Arrow cache of `datasets`."""

from __future__ import annotations

import bisect
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value

from .columns import is_text, missing_column, prepare_dataset
from .formats import has_xmc_header
from .readers import TABLES, extension_of, folder_splits, load_xmc_dataset, split_name
from .streams import cached_dataset, open_bytes, text_lines

Batch = dict[str, list[Any]]
"""Column → one value for each document."""

VECTOR_COLUMNS = {"feature_ids": List(Value("int64")), "feature_values": List(Value("float64"))}
_ROWS_PER_TABLE = 1000
_EXTENSIONS = (*TABLES, ".txt", ".svm")
_JSON_TYPES = {"int": "int64", "float": "float64", "str": "string", "bool": "bool"}


@dataclass(frozen=True)
class CorpusColumns:
    """
    The columns to read: of texts, vectors if they are needed, and those to copy; `sheet` is that of an Excel file.
    """

    text: tuple[str, ...] = ("text",)
    vectors: bool = False
    keep: tuple[str, ...] = ()
    sheet: str | None = None

    @property
    def names(self) -> list[str]:
        """All columns, without duplicates."""
        return list(dict.fromkeys((*self.text, *(VECTOR_COLUMNS if self.vectors else ()), *self.keep)))

    @property
    def json_names(self) -> list[str]:
        """Columns that are cached as JSON strings when they come from JSON lines, because their type is not known."""
        return [name for name in self.keep if name not in self.text and not (self.vectors and name in VECTOR_COLUMNS)]


class Source:
    """One file or dataset of a corpus. `kind` is the extension of a file that is read by this module."""

    def __init__(self, name: str, columns: CorpusColumns, load: Callable[[], Dataset], kind: str = "") -> None:
        self.name, self.columns = name, columns
        self._load, self._kind = load, kind

    @cached_property
    def dataset(self) -> Dataset:
        """The documents. The first access converts a file, which may take long."""
        dataset = self._load()
        for name in self.columns.names:
            if self._column(name) not in dataset.column_names:
                raise ValueError(f"`{self.name}`: {missing_column(self._column(name), dataset.column_names)}")
        return dataset.with_format("arrow")

    def identity(self) -> dict[str, Any]:
        """Values that change when the documents change."""
        if not os.path.isfile(self.name):
            return {"path": self.name, "fingerprint": self.dataset._fingerprint}
        state = os.stat(self.name)
        return {"path": os.path.abspath(self.name), "size": state.st_size, "modified_ns": state.st_mtime_ns}

    def read(self, start: int, stop: int) -> Batch:
        """Documents `start` to `stop`."""
        table = self.dataset[start:stop]
        batch = {name: table.column(self._column(name)).to_pylist() for name in self.columns.names}
        for name in self._json_columns:
            batch[name] = [None if value is None else json.loads(value) for value in batch[name]]
        return batch

    def kept_types(self) -> dict[str, Any]:
        """Features of the columns to keep; `None` for JSON values that do not have one simple type."""
        types = {name: self.dataset.features[self._column(name)] for name in self.columns.keep}
        return types | {name: self._json_type(name) for name in self._json_columns}

    @property
    def _json_columns(self) -> list[str]:
        return self.columns.json_names if self._kind == ".jsonl" else []

    def _column(self, name: str) -> str:
        """The dataset's name of a column: [`prepare_dataset`] renames the column of the texts."""
        return "text" if self.columns.text[:1] == (name,) and not self._kind else name

    def _json_type(self, name: str) -> Value | None:
        kinds: set[str] = set()
        for table in self.dataset.select_columns([name]).iter(_ROWS_PER_TABLE):
            values = [json.loads(value) for value in table.column(name).to_pylist() if value is not None]
            kinds |= {type(value).__name__ for value in values}
            if any(type(value) is int and not -(2**63) <= value < 2**63 for value in values):
                kinds.add("large int")
        if kinds == {"int", "float"}:
            return Value("float64")
        if not kinds:
            return Value("null")
        return Value(_JSON_TYPES[min(kinds)]) if len(kinds) == 1 and kinds <= _JSON_TYPES.keys() else None


class Corpus:
    """The sources of [`find_sources`] as one sequence of documents."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._starts = list(itertools.accumulate((len(source.dataset) for source in sources), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def location(self, document: int) -> str:
        """Describes where a document comes from."""
        index = bisect.bisect_right(self._starts, document) - 1
        return f"`{self.sources[index].name}`, document {document - self._starts[index] + 1}"

    def read(self, start: int, stop: int) -> Batch:
        """Documents `start` to `stop`, which may come from several sources."""
        batch: Batch = {}
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        for source, offset in zip(self.sources[first:last], self._starts[first:last], strict=True):
            for name, values in source.read(max(start - offset, 0), stop - offset).items():
                batch.setdefault(name, []).extend(values)
        return batch


def find_sources(
    inputs: Sequence[str | os.PathLike | Dataset], columns: CorpusColumns, split: str | None = None
) -> list[Source]:
    """
    The sources of a corpus, in order. Nothing is read yet.

    `inputs` are files, patterns such as `part-*.jsonl`, folders (a dataset with splits, or files in the order of their
    names), ids of datasets on the Hub, or loaded datasets; `split` is that of folders and datasets with several.
    """
    sources: list[Source] = []
    for number, item in enumerate(inputs, 1):
        if isinstance(item, Dataset):
            load = partial(prepare_dataset, item, **_preparation(columns))
            sources.append(Source(f"dataset {number}", columns, load))
            continue
        files = _find_files(os.fspath(item), split)
        paths = [Path(item)] if files is None else files
        sources += [_path_source(path, columns, split) for path in paths]
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{repeated}` is among the inputs more than once. Give each file once.")
    return sources


def _find_files(path: str, split: str | None) -> list[Path] | None:
    """The files of a path or pattern; `None` for a dataset that [`load_xmc_dataset`] loads as a whole."""
    location = Path(path).expanduser()
    if location.is_file():
        return [location]
    if location.is_dir():
        return _folder_files(location, split_name(split))
    if glob.has_magic(path):
        files = sorted(Path(name) for name in glob.glob(str(location), recursive=True) if os.path.isfile(name))
        if not files:
            raise FileNotFoundError(f"No file matches the pattern `{path}`.")
        return files
    return None


def _folder_files(folder: Path, split: str | None) -> list[Path] | None:
    try:
        splits = folder_splits(folder)
    except FileNotFoundError:
        names = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        files = [path for path in names if extension_of(path) in _EXTENSIONS]
        if files and split is None:
            return files
        raise
    if split is None and len(splits) > 1:
        raise ValueError(f"`{folder}` has the splits {', '.join(splits)}. Choose one with `split` (`--split`).")
    kind, _, files = splits.get(split or next(iter(splits)), ("part of a split", "", []))
    return files if kind == "files" else None


def _path_source(path: Path, columns: CorpusColumns, split: str | None) -> Source:
    """A source for a file, or for a path or Hub id that [`load_xmc_dataset`] loads."""
    kind, suffix = extension_of(path), path.suffix.lower()
    read = {".parquet": _read_parquet, ".jsonl": _read_json, ".txt": _read_lines}.get(kind)
    is_readable = suffix == kind or (suffix == ".gz" and kind != ".parquet")
    if read is not None and is_readable and path.is_file() and not (kind == ".txt" and has_xmc_header(path)):
        return Source(str(path), columns, partial(read, path, columns), kind)

    def load() -> Dataset:
        options: dict[str, Any] = {} if columns.sheet is None else {"sheet": columns.sheet}
        loaded = load_xmc_dataset(path, split, **_preparation(columns), **options)
        if isinstance(loaded, Dataset):
            return loaded
        if len(loaded) > 1:
            raise ValueError(f"`{path}` has the splits {', '.join(loaded)}. Choose one with `split` (`--split`).")
        return next(iter(loaded.values()))

    return Source(str(path), columns, load)


def _preparation(columns: CorpusColumns) -> dict[str, Any]:
    is_renamed = columns.text and columns.text[0] != "text"
    return {
        "column_mapping": {columns.text[0]: "text"} if is_renamed else None,
        "require_labels": False,
        "keep_columns": [name for name in (*columns.text[1:], *columns.keep) if name != columns.text[0]],
    }


# ---- Readers of files: each yields tables for the Arrow cache ----


def _read_lines(path: Path, columns: CorpusColumns) -> Dataset:
    """Lines of text: each is a document, even an empty one."""
    for name in columns.names:
        if name not in columns.text[:1]:
            raise ValueError(f"`{path}` has no column `{name}`: each line is the text of a document.")
    options = {"path": str(path), "name": columns.text[0]}
    return cached_dataset(_line_tables, options, Features({columns.text[0]: Value("string")}), files=[path])


def _line_tables(path: str, name: str) -> Iterator[pa.Table]:
    lines = text_lines(path)
    while batch := list(itertools.islice(lines, _ROWS_PER_TABLE)):
        yield pa.table({name: pa.array(batch, pa.string())})


def _read_parquet(path: Path, columns: CorpusColumns) -> Dataset:
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"`{path}` cannot be read as parquet ({error}). The file is damaged.") from error
    types = {field.name: field.type for field in schema}
    types = {name: kind.value_type if pa.types.is_dictionary(kind) else kind for name, kind in types.items()}
    for name in columns.names:
        if name not in types:
            raise ValueError(f"`{path}`: {missing_column(name, list(types))}")
        if name in columns.text and not (is_text(types[name]) or pa.types.is_null(types[name])):
            raise ValueError(f"`{path}`: column `{name}` is of type {types[name]}, not of strings.")
    features = Features.from_arrow_schema(pa.schema({name: types[name] for name in columns.names}))
    options = {"path": str(path), "names": columns.names}
    return cached_dataset(_parquet_tables, options, features, files=[path])


def _parquet_tables(path: str, names: list[str]) -> Iterator[pa.Table]:
    # Buffered, because a row group may be the whole file.
    with pq.ParquetFile(path, buffer_size=1 << 20) as file:
        for batch in file.iter_batches(_ROWS_PER_TABLE, columns=names):
            arrays = [batch.column(name) for name in names]
            arrays = [a.dictionary_decode() if pa.types.is_dictionary(a.type) else a for a in arrays]
            yield pa.table(arrays, names)


def _read_json(path: Path, columns: CorpusColumns) -> Dataset:
    """JSON lines. The loader of `datasets` would turn numbers into texts and, at a bad line, read the whole file."""
    features = Features({name: Value("string") for name in columns.names})
    if columns.vectors:
        features.update(VECTOR_COLUMNS)
    options = {"path": str(path), "schema": features.arrow_schema, "json_names": columns.json_names}
    return cached_dataset(_json_tables, options, features, files=[path])


def _json_tables(path: str, schema: pa.Schema, json_names: list[str]) -> Iterator[pa.Table]:
    keys: dict[str, None] = {}
    with open_bytes(path) as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if not line.isspace())
        while batch := list(itertools.islice(lines, _ROWS_PER_TABLE)):
            documents = {number: _parse_document(path, number, line) for number, line in batch}
            for document in documents.values():
                keys.update(dict.fromkeys(document))
                for name in json_names:
                    value = document.get(name)
                    document[name] = None if value is None else json.dumps(value, ensure_ascii=False)
            yield pa.table([_json_array(path, field, documents) for field in schema], schema=schema)
    for name in schema.names if keys else ():
        if name not in keys:
            raise ValueError(f"`{path}`: {missing_column(name, list(keys))}")


def _parse_document(path: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise ValueError(f"`{path}`, line {number}, is not valid JSON ({error}). Correct or remove it.") from error
    if not isinstance(document, dict):
        raise ValueError(f'`{path}`, line {number}, is not a JSON object. Write a document as {{"text": ...}}.')
    return document


def _json_array(path: str, field: pa.Field, documents: dict[int, dict[str, Any]]) -> pa.Array:
    """The values of one column. The line of a bad value is searched only after an error."""
    try:
        return pa.array([document.get(field.name) for document in documents.values()], field.type)
    except (TypeError, ValueError, OverflowError):
        for number, document in documents.items():
            try:
                pa.array([document.get(field.name)], field.type)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"`{path}`, line {number}: `{field.name}` must be of type {field.type}, or null ({error})."
                ) from error
        raise

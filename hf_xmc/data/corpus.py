"""Documents of many files as one stream that can be read from any document on. No file is held in memory."""

from __future__ import annotations

import bisect
import glob
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Value

from .columns import is_text, missing_column, prepare_dataset
from .readers import extension_of, folder_splits, load_xmc_dataset, split_name
from .streams import open_bytes
from .xmc_text import has_xmc_header

# Column → one value for each document.
Batch = dict[str, list[Any]]

VECTOR_COLUMNS = ("feature_ids", "feature_values")
# Documents between two places of a file that are remembered.
_STRIDE = 4096
_ROWS_AT_ONCE = 1024
_READABLE = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".svm")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class WantedColumns:
    """
    The columns that are read of each document.

    Args:
        text (`str`, *optional*, defaults to `"text"`): Column of the texts; `None` where texts are not needed.
        vectors (`bool`, *optional*, defaults to `False`): Whether `feature_ids` and `feature_values` are needed.
        keep (`tuple[str, ...]`, *optional*): Columns that are handed through.
    """

    text: str | None = "text"
    vectors: bool = False
    keep: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, each once."""
        text = () if self.text is None else (self.text,)
        return tuple(dict.fromkeys((*text, *(VECTOR_COLUMNS if self.vectors else ()), *self.keep)))


class DocumentSource:
    """
    The documents of one file or dataset, in their order.

    Args:
        name (`str`): What errors call it.
        columns ([`WantedColumns`]): What is read.
    """

    def __init__(self, name: str, columns: WantedColumns) -> None:
        self.name = name
        self.columns = columns
        self.places: list[list[int]] = []
        self._stream: Iterator[Any] = iter(())
        self._row: int | None = None  # of the document that the stream yields next

    def identity(self) -> dict[str, Any]:
        """What differs as soon as the documents do."""
        state = os.stat(self.name)
        return {"path": os.path.abspath(self.name), "size": state.st_size, "modified_ns": state.st_mtime_ns}

    def scan(self) -> dict[str, Any]:
        """
        Looks through all documents and raises where one cannot be read.

        Returns:
            `dict`: `documents`, their number; `places`, from where they can be read; and `types`, features of the
            columns to keep (`None` where there are values of several types).
        """
        raise NotImplementedError

    def read(self, row: int, count: int) -> Batch:
        """Documents from `row` on, fewer than `count` only at the end. Reading on where it ended is cheapest."""
        if self._row is None or row < self._row or self._nearest_place(row) > self._row:
            self._row = self._nearest_place(row)
            self._stream = self._open(self._row)
        items = list(itertools.islice(self._stream, row - self._row, row - self._row + count))
        self._row = row + len(items)
        return self._batch(items)

    def _nearest_place(self, row: int) -> int:
        """Last row, up to the given one, from which `_open` can read without looking at those before."""
        raise NotImplementedError

    def _open(self, row: int) -> Iterator[Any]:
        raise NotImplementedError

    def _batch(self, items: list[Any]) -> Batch:
        return {name: [item[name] for item in items] for name in self.columns.names}


class LineFile(DocumentSource):
    """A file, plain or gzipped, with a document in each line."""

    def __init__(self, path: Path, columns: WantedColumns) -> None:
        super().__init__(str(path), columns)
        self._zipped = path.suffix == ".gz"

    def scan(self) -> dict[str, Any]:
        count, places = 0, []
        for number, offset, line in self._lines(0, 1):
            if count % _STRIDE == 0:
                places.append([offset, number])
            self._check(number, self._parse(number, line))
            count += 1
        return {"documents": count, "places": places, "types": self._types()}

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        """The document in a line; an error names the line."""
        raise NotImplementedError

    def _is_document(self, line: bytes) -> bool:
        return True

    def _check(self, number: int, document: dict[str, Any]) -> None:
        """Raises where the document lacks something, and notes what `_types` says of all of them."""

    def _types(self) -> dict[str, Any]:
        raise NotImplementedError

    def _lines(self, offset: int, number: int) -> Iterator[tuple[int, int, bytes]]:
        """Yields (line number, place in the file, line) of each document from a place on."""
        with open_bytes(self.name) as file:
            file.seek(offset)
            for line in file:
                if self._is_document(line):
                    yield number, offset, line
                offset += len(line)
                number += 1

    def _nearest_place(self, row: int) -> int:
        # An archive is unpacked from its beginning in any case.
        return 0 if self._zipped else row // _STRIDE * _STRIDE

    def _open(self, row: int) -> Iterator[tuple[int, int, bytes]]:
        return self._lines(*self.places[row // _STRIDE])

    def _batch(self, items: list[tuple[int, int, bytes]]) -> Batch:
        documents = [self._parse(number, line) for number, _, line in items]
        return {name: [document.get(name) for document in documents] for name in self.columns.names}


class TextLines(LineFile):
    """A text file: each line is a document, an empty one too."""

    def __init__(self, path: Path, columns: WantedColumns) -> None:
        super().__init__(path, columns)
        if columns.vectors:
            raise ValueError(f"`{path}` holds texts, but the model was trained on vectors and cannot read them.")
        for name in columns.keep:
            if name != columns.text:
                raise ValueError(f"`{path}` has no column `{name}`: a line of it is the text of a document.")

    def _types(self) -> dict[str, Any]:
        return {name: Value("string") for name in self.columns.keep}

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"`{self.name}`, line {number}, is not UTF-8 ({error.reason} at byte {error.start}). Convert the file."
            ) from error
        return dict.fromkeys(self.columns.names, text)


class JsonLines(LineFile):
    """A file with a JSON object in each line; blank lines are no documents."""

    def __init__(self, path: Path, columns: WantedColumns) -> None:
        super().__init__(path, columns)
        # Column → kinds of its values, of the columns to keep.
        self._kinds: dict[str, set[str]] = {}

    def _is_document(self, line: bytes) -> bool:
        return not line.isspace()

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            document = json.loads(line)
            if b"\\ud" in line or b"\\uD" in line:
                # An escape may stand for half a character, which cannot be written.
                json.dumps(document, ensure_ascii=False).encode("utf-8")
        except ValueError as error:
            raise ValueError(
                f"`{self.name}`, line {number}, is not valid JSON ({error}). Correct or remove the line."
            ) from error
        if not isinstance(document, dict):
            example = self.columns.text or VECTOR_COLUMNS[0]
            raise ValueError(
                f'`{self.name}`, line {number}, is no JSON object: write a document as {{"{example}": ...}}.'
            )
        return document

    def _check(self, number: int, document: dict[str, Any]) -> None:
        for name, value in document.items():
            kinds = self._kinds.setdefault(name, set())
            if name in self.columns.keep:
                kinds.add(_kind(value))
        text = None if self.columns.text is None else document.get(self.columns.text)
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"`{self.name}`, line {number}: `{self.columns.text}` is of the type {type(text).__name__}, but must "
                "be a string (or null, for no text)."
            )

    def _types(self) -> dict[str, Any]:
        for name in self.columns.names:
            if self._kinds and name not in self._kinds:
                raise ValueError(f"`{self.name}`: {missing_column(name, list(self._kinds))}")
        return {name: _common_type(self._kinds.get(name, set())) for name in self.columns.keep}


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value not in _INT64:
        return "large number"
    return type(value).__name__


def _common_type(kinds: set[str]) -> Value | None:
    """Type of a column of JSON values: `None` where these are of several types, or lists and objects."""
    kinds = kinds - {"NoneType"}
    if kinds == {"int", "float"}:
        return Value("float64")
    names = {"int": "int64", "float": "float64", "str": "string", "bool": "bool"}
    if not kinds:
        return Value("null")
    return Value(names[min(kinds)]) if len(kinds) == 1 and kinds <= names.keys() else None


class ParquetDocuments(DocumentSource):
    """A parquet file: a few rows of it at a time."""

    def __init__(self, path: Path, columns: WantedColumns) -> None:
        super().__init__(str(path), columns)

    def scan(self) -> dict[str, Any]:
        with self._file() as file:
            schema, metadata = file.schema_arrow, file.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        for name in self.columns.names:
            if name not in schema.names:
                raise ValueError(f"`{self.name}`: {missing_column(name, schema.names)}")
        if self.columns.text is not None:
            kind = schema.field(self.columns.text).type
            if not is_text(kind.value_type if pa.types.is_dictionary(kind) else kind) and not pa.types.is_null(kind):
                raise ValueError(f"`{self.name}`: column `{self.columns.text}` is of type {kind}, not of strings.")
        kept = Features.from_arrow_schema(schema)
        starts = itertools.accumulate(sizes, initial=0)
        return {
            "documents": sum(sizes),
            "places": [[start, group] for group, start in enumerate(starts)][: len(sizes)],
            "types": {name: kept[name] for name in self.columns.keep},
        }

    def _file(self) -> pq.ParquetFile:
        try:
            # Buffered: a group of rows, which may be the whole file, is not read at once.
            return pq.ParquetFile(self.name, buffer_size=1 << 20)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"`{self.name}` cannot be read as parquet ({error}). The file is damaged, or of another format than "
                "its name says."
            ) from error

    def _nearest_place(self, row: int) -> int:
        return self.places[self._group(row)][0] if self.places else 0

    def _group(self, row: int) -> int:
        return bisect.bisect_right(self.places, [row, len(self.places)]) - 1

    def _open(self, row: int) -> Iterator[dict[str, Any]]:
        groups = list(range(self._group(row), len(self.places)))
        with self._file() as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, groups, list(self.columns.names)) if groups else ():
                yield from batch.to_pylist()


class DatasetDocuments(DocumentSource):
    """
    A memory-mapped `datasets.Dataset` in the columns of [`prepare_dataset`].

    Args:
        name (`str`): What errors call it.
        columns ([`WantedColumns`]): What is read.
        dataset (`datasets.Dataset`): The documents, as [`load_xmc_dataset`] loads them.
    """

    def __init__(self, name: str, columns: WantedColumns, dataset: Dataset) -> None:
        super().__init__(name, columns)
        for column in VECTOR_COLUMNS if columns.vectors else ():
            if column not in dataset.column_names:
                raise ValueError(
                    f"The model was trained on vectors. `{name}`: {missing_column(column, dataset.column_names)}"
                )
        # The column of texts has been renamed.
        self._source = {column: "text" if column == columns.text else column for column in columns.names}
        if columns.text is not None and "text" not in dataset.column_names:
            raise ValueError(f"The model reads texts. `{name}`: {missing_column('text', dataset.column_names)}")
        self._dataset = dataset

    def identity(self) -> dict[str, Any]:
        return {"path": self.name, "fingerprint": self._dataset._fingerprint}

    def scan(self) -> dict[str, Any]:
        types = {name: self._dataset.features[self._source[name]] for name in self.columns.keep}
        return {"documents": len(self._dataset), "places": [], "types": types}

    def _nearest_place(self, row: int) -> int:
        return row

    def _open(self, row: int) -> Iterator[dict[str, Any]]:
        dataset = self._dataset.select(range(row, len(self._dataset))).with_format("arrow")
        for table in dataset.iter(_ROWS_AT_ONCE):
            yield from table.to_pylist()

    def _batch(self, items: list[dict[str, Any]]) -> Batch:
        return {name: [item[source] for item in items] for name, source in self._source.items()}


def find_sources(
    inputs: Sequence[str | os.PathLike | Dataset], columns: WantedColumns, split: str | None = None
) -> list[DocumentSource]:
    """
    The sources of documents that are meant, in the order in which they are given.

    Parquet, JSON lines and lines of text are read from their files. Anything else goes through the cache of
    `datasets`.

    Args:
        inputs (`Sequence`):
            Files, patterns such as `part-*.jsonl`, folders (a dataset with splits, or files by name), ids of data
            sets on the Hub, or loaded `datasets.Dataset`s.
        columns ([`WantedColumns`]):
            What is read.
        split (`str`, *optional*):
            Split of folders and datasets, where they have several.
    """
    sources: list[DocumentSource] = []
    for number, given in enumerate(inputs, 1):
        if isinstance(given, Dataset):
            dataset = prepare_dataset(given, **_preparation(columns))
            sources.append(DatasetDocuments(f"dataset {number}", columns, dataset))
            continue
        files = _files(os.fspath(given), split)
        if files is None:
            sources.append(_through_cache(os.fspath(given), columns, split))
        else:
            sources += [_file_source(path, columns, split) for path in files]
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ValueError(f"`{twice}` is among the inputs more than once. Give each file once.")
    return sources


def _files(given: str, split: str | None) -> list[Path] | None:
    """The files that are meant; `None` where it is a dataset for [`load_xmc_dataset`]."""
    location = Path(given).expanduser()
    if location.is_file():
        return [location]
    if location.is_dir():
        return _folder_files(location, split_name(split))
    if glob.has_magic(given):
        found = sorted(Path(path) for path in glob.glob(str(location), recursive=True) if os.path.isfile(path))
        if not found:
            raise FileNotFoundError(f"No file fits the pattern `{given}`.")
        return found
    return None


def _folder_files(folder: Path, split: str | None) -> list[Path] | None:
    try:
        splits = folder_splits(folder)
    except FileNotFoundError:
        files = sorted(
            path
            for path in folder.iterdir()
            if path.is_file() and extension_of(path) in _READABLE and not path.name.startswith(".")
        )
        if files and split is None:
            return files
        raise
    if split is None and len(splits) > 1:
        raise ValueError(f"`{folder}` has the splits {', '.join(splits)}. Choose one with `split` (`--split`).")
    kind, _, files = splits.get(split or next(iter(splits)), ("part of a split", "", []))
    return files if kind == "files" else None


def _file_source(path: Path, columns: WantedColumns, split: str | None) -> DocumentSource:
    extension = extension_of(path)
    plain = path.suffix.lower() == extension
    if extension == ".parquet" and plain:
        return ParquetDocuments(path, columns)
    if plain or path.suffix == ".gz":
        if extension == ".jsonl":
            return JsonLines(path, columns)
        if extension == ".txt" and not has_xmc_header(path):
            return TextLines(path, columns)
    return _through_cache(str(path), columns, split)


def _through_cache(path: str, columns: WantedColumns, split: str | None) -> DocumentSource:
    loaded = load_xmc_dataset(path, split, **_preparation(columns))
    if not isinstance(loaded, Dataset):
        if len(loaded) > 1:
            raise ValueError(f"`{path}` has the splits {', '.join(loaded)}. Choose one with `split` (`--split`).")
        (loaded,) = loaded.values()
    return DatasetDocuments(path, columns, loaded)


def _preparation(columns: WantedColumns) -> dict[str, Any]:
    renamed = columns.text is not None and columns.text != "text"
    return {
        "column_mapping": {columns.text: "text"} if renamed else None,
        "require_labels": False,
        "keep_columns": [name for name in columns.keep if name != columns.text],
    }


class Corpus:
    """
    Several sources as one: documents are numbered through.

    Args:
        sources (`Sequence[DocumentSource]`): As [`find_sources`] finds them.
        scans (`Sequence[dict]`): What their `scan` said.
    """

    def __init__(self, sources: Sequence[DocumentSource], scans: Sequence[dict[str, Any]]) -> None:
        self.sources = list(sources)
        for source, scan in zip(sources, scans, strict=True):
            source.places = scan["places"]
        self._starts = list(itertools.accumulate((scan["documents"] for scan in scans), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def place(self, document: int) -> str:
        """Where a document is, for a message."""
        number = bisect.bisect_right(self._starts, document) - 1
        return f"`{self.sources[number].name}`, document {document - self._starts[number] + 1}"

    def read(self, start: int, stop: int) -> Batch:
        """The documents of a range; a file with fewer than it had when it was scanned is an error."""
        batch: Batch = {}
        for number in range(bisect.bisect_right(self._starts, start) - 1, len(self.sources)):
            first, end = max(start, self._starts[number]), min(stop, self._starts[number + 1])
            if first >= stop:
                break
            if first >= end:
                continue
            found = self.sources[number].read(first - self._starts[number], end - first)
            if len(next(iter(found.values()))) != end - first:
                raise ValueError(f"`{self.sources[number].name}` has become shorter while it was read.")
            for name, values in found.items():
                batch.setdefault(name, []).extend(values)
        return batch


def common_types(sources: Sequence[DocumentSource], scans: Sequence[dict[str, Any]]) -> Features:
    """The types of the columns to keep, where all sources agree on them; an error names two that do not."""
    found: dict[str, tuple[Any, str]] = {}
    for source, scan in zip(sources, scans, strict=True):
        for name, kind in scan["types"].items():
            if kind is None:
                raise ValueError(
                    f"Column `{name}` of `{source.name}` holds values of several types, lists or objects, which do "
                    "not fit into a parquet column. Write JSON lines, or leave it out."
                )
            known, where = found.get(name, (Value("null"), ""))
            if Value("null") in (known, kind):
                found[name] = (known, where) if kind == Value("null") else (kind, source.name)
            elif known != kind:
                raise ValueError(
                    f"Column `{name}` is {known} in `{where}` but {kind} in `{source.name}`. Write JSON lines, or "
                    "convert one of them."
                )
    return Features({name: kind for name, (kind, _) in found.items()})

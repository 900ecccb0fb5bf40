"""Loads labelled documents from any file: finds the columns, drops useless rows, joins rows of one document."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, List, Value, concatenate_datasets

from ..utils import join_texts
from .columns import prepare_dataset
from .csv_format import find_csv_format
from .discovery import FoundColumns, find_columns, parse_labels
from .readers import TABLES, extension_of, load_sample, load_splits, split_name

_BATCH_SIZE = 10_000
_SPLITS = ("train", "validation", "test")


@dataclass
class RowCounts:
    """What became of the rows of a table."""

    rows: int = 0
    empty: int = 0  # without a text, left out
    unlabelled: int = 0  # without labels, left out
    repeated: int = 0  # with a text that occurred before, to which their labels were added

    @property
    def documents(self) -> int:
        """Rows that are documents."""
        return self.rows - self.empty - self.unlabelled - self.repeated


@dataclass
class Documents:
    """Labelled documents by split, with `text` (or vectors) and `labels`, and how they were found."""

    name: str | None  # path or Hub id
    splits: dict[str, Dataset]
    columns: FoundColumns | None = None  # `None` if the documents were prepared already
    counts: dict[str, RowCounts] = field(default_factory=dict)
    # Of a csv file.
    encoding: str | None = None
    separator: str | None = None


def load_documents(
    source: str | Path | Dataset | Mapping[str, Dataset],
    split: str | None = None,
    *,
    text_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_delimiter: str | None = None,
    encoding: str | None = None,
    separator: str | None = None,
    sheet: str | None = None,
    known: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
) -> Documents:
    """
    Loads documents with labels. What is not given is found by looking at the data.

    Rows without text or labels are left out. Rows with the same text, or with the same id, are one document with the
    labels of all of them.

    `source` is a file (csv, tsv, parquet, jsonl, json, xlsx), a folder, the id of a dataset on the Hub, `"sample"`, or
    loaded data. Several columns of texts are joined, see [`join_texts`]. A `label_delimiter` of `""` stands for one
    label in each row. `encoding` and `separator` are those of a csv file, `sheet` is one of an Excel file. `known` are
    the fields of [`FoundColumns`] of other data of the same kind; they are used where they fit.
    """
    options = {"encoding": encoding, "sep": separator, "sheet": sheet}
    given = {name: value for name, value in options.items() if value is not None}
    name, tables = _load(source, split, given, cache_dir)
    first = next(iter(tables.values()))
    if len(first) == 0:
        raise ValueError(f"`{name}` does not contain documents.")
    if text_column is None and label_column is None and not label_delimiter and _is_prepared(first):
        found = FoundColumns("text", "labels", "lists")
        if "text" not in first.column_names:  # vectors
            return Documents(name, {key: prepare_dataset(table) for key, table in tables.items()})
    else:
        try:
            found = find_columns(first, text_column, label_column, label_delimiter, known)
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}" if name else str(error)) from error
    documents = Documents(name, {}, found, encoding=given.get("encoding"), separator=given.get("sep"))
    for key, table in tables.items():
        documents.splits[key], documents.counts[key] = _make_documents(table, found, name or "the data")
    return documents


def is_prepared_data(path: str, split: str | None) -> bool:
    """Whether data can be loaded as it is: its columns have the names and types of [`prepare_dataset`]."""
    location = Path(path).expanduser()
    if {extension_of(file) for file in _files(location)} & {".csv", ".tsv", ".xlsx"}:
        return False
    loaded = load_splits(path, split, None, None, {})
    return all(_is_prepared(part) for part in ([loaded] if isinstance(loaded, Dataset) else loaded.values()))


def _load(
    source: str | Path | Dataset | Mapping[str, Dataset],
    split: str | None,
    options: dict[str, Any],
    cache_dir: str | None,
) -> tuple[str | None, dict[str, Dataset]]:
    if type(source).__module__.split(".")[0] == "pandas":
        source = Dataset.from_pandas(source, preserve_index=False)
    if isinstance(source, Dataset):
        return None, {"train": source}
    if not isinstance(source, (str, Path, os.PathLike, Mapping)):
        raise TypeError(
            f"`data` is a {type(source).__name__}. Give a file, a `pandas.DataFrame`, or a `datasets.Dataset`, which "
            "`Dataset.from_list` makes of dictionaries."
        )
    if isinstance(source, Mapping):
        loaded: Any = {str(split_name(key)): dataset for key, dataset in source.items()}
    elif str(source) == "sample" and not Path(source).exists():
        loaded = load_sample(cache_dir)
    else:
        path = Path(source).expanduser()
        files = _files(path)
        kinds = {extension_of(file) for file in files}
        if kinds & {".csv", ".tsv"}:
            options["as_text"] = True  # 007 is not a number here
            if len(files) == 1:
                csv_format = find_csv_format(files[0], options.get("encoding"), options.get("sep"))
                options.update(encoding=csv_format.encoding, sep=csv_format.separator)
        elif "encoding" in options or "sep" in options:
            raise ValueError(f"`{source}` is not csv: `encoding` and `separator` have no meaning. Leave them out.")
        if "sheet" in options and ".xlsx" not in kinds:
            raise ValueError(f"`{source}` is not an Excel file: `sheet` has no meaning. Leave it out.")
        loaded = load_splits(_only_table(path, files), split, None, cache_dir, options)
    name = None if isinstance(source, Mapping) else str(source)
    if isinstance(loaded, Dataset):
        return name, {str(split_name(split)) if split else "train": loaded}
    if split is not None:
        if split_name(split) not in loaded:
            raise ValueError(f"`{name}` has no split `{split}`; it has {', '.join(loaded)}.")
        return name, {str(split_name(split)): loaded[split_name(split)]}
    splits = {key: loaded[key] for key in _SPLITS if key in loaded}
    if not splits and len(loaded) == 1:
        splits = {"train": next(iter(loaded.values()))}
    if "train" not in splits:
        raise ValueError(f"`{name}` has no split `train`; it has {', '.join(loaded)}. Choose one with `train_split`.")
    return name, splits


def _files(path: Path) -> list[Path]:
    """The files of the documents: all of a folder but its vocabulary."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return sorted(file for file in path.glob("*") if not file.name.lower().startswith("labels."))


def _only_table(path: Path, files: list[Path]) -> str:
    """The path, or the file in it if it is a folder with a single table."""
    tables = [file for file in files if extension_of(file) in TABLES]
    return str(tables[0]) if path.is_dir() and len(tables) == 1 else str(path)


def _is_prepared(dataset: Dataset) -> bool:
    """Whether the columns have the names and types of [`prepare_dataset`]."""
    columns = dataset.column_names
    if "labels" not in columns or not ("text" in columns or {"feature_ids", "feature_values"} <= set(columns)):
        return False
    return pa.types.is_list(dataset.data.schema.field("labels").type)


def _make_documents(table: Dataset, found: FoundColumns, name: str) -> tuple[Dataset, RowCounts]:
    counts = RowCounts(rows=len(table))
    if found.more_texts:
        table = _join_columns(table, [found.text, *found.more_texts], found)
    table = _name_classes(table, found.labels)
    rows: list[int] = []
    labels: list[dict[Any, None]] = []
    known: dict[bytes, int] = {}
    wanted = [found.text, found.labels, *([found.id] if found.id else [])]
    row = 0
    for batch in table.select_columns(wanted).iter(batch_size=_BATCH_SIZE):
        ids = batch[found.id] if found.id else [None] * len(batch[found.text])
        for text, value, identifier in zip(batch[found.text], batch[found.labels], ids, strict=True):
            row += 1
            try:
                own = parse_labels(value, found)
            except ValueError as error:
                raise ValueError(
                    f"`{name}`, row {row}, column `{found.labels}`: {error}. Correct it, or give `label_delimiter`."
                ) from error
            text = "" if text is None else str(text).strip()
            same_id = None if identifier in (None, "") else _digest(f"id {identifier}")
            document = known.get(_digest(text)) if text else known.get(same_id) if same_id else None
            if not text and document is None:
                counts.empty += 1
            elif not own:
                counts.unlabelled += 1
            elif document is not None:
                labels[document].update(dict.fromkeys(own))
                counts.repeated += 1
            else:
                known[_digest(text)] = len(rows)
                if same_id:
                    known.setdefault(same_id, len(rows))
                rows.append(row - 1)
                labels.append(dict.fromkeys(own))
    if not rows:
        raise ValueError(
            f"`{name}` has no row with text and labels: of {counts.rows:,} rows, {counts.empty:,} have nothing in "
            f"`{found.text}` and {counts.unlabelled:,} nothing in `{found.labels}`. Name the columns with "
            "`text_column` and `label_column`."
        )
    return _assemble(table, found, rows, [list(own) for own in labels]), counts


def _join_columns(table: Dataset, names: list[str], found: FoundColumns) -> Dataset:
    """Replaces the first of some columns by the joined texts of all."""
    used = [*dict.fromkeys([*names, found.labels, *([found.id] if found.id else [])])]
    table = table.select_columns(used)
    features = table.features.copy()
    features[found.text] = Value("string")

    def join(batch: Mapping[str, list[Any]]) -> dict[str, list[str]]:
        rows = zip(*(batch[name] for name in names), strict=True)
        return {found.text: [join_texts([None if text is None else str(text) for text in row]) for row in rows]}

    return table.map(join, batched=True, batch_size=_BATCH_SIZE, features=features, desc="Joining texts")


def _assemble(table: Dataset, found: FoundColumns, rows: list[int], labels: list[list[Any]]) -> Dataset:
    """The chosen rows with their labels as lists. Texts stay memory-mapped."""
    texts = table.select_columns([found.text])
    if found.text != "text":
        texts = texts.rename_column(found.text, "text")
    texts = texts if len(rows) == len(table) else texts.select(rows)
    kind = pa.int64()
    if not all(isinstance(label, int) for own in labels for label in own):
        kind, labels = pa.string(), [[str(label) for label in own] for own in labels]
    column = Dataset(pa.table({"labels": pa.array(labels, pa.list_(kind))}))
    return prepare_dataset(concatenate_datasets([texts, column], axis=1, split=table.split))


def _name_classes(table: Dataset, column: str) -> Dataset:
    """Replaces class numbers by their names; -1, the mark of documents without a class, by nothing."""
    feature = table.features[column]
    classes = getattr(feature, "feature", feature)
    if not hasattr(classes, "names"):
        return table
    names = classes.names

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [names[number] for number in value if number is not None and number != -1]
        return None if value is None or value == -1 else names[value]

    features = table.features.copy()
    features[column] = List(Value("string")) if classes is not feature else Value("string")
    return table.map(lambda row: {column: name(row[column])}, features=features)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()

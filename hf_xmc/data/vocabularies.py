"""Reads label vocabularies: tables, JSON, SKOS and the vocabulary files of Annif."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import fsspec
from datasets import Dataset
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from ..label_columns import short
from ..serialization import read_json
from ..vocabulary import LabelEntry, LabelVocabulary
from .csv_format import find_encoding
from .discovery import split_lists
from .formats import names_are_labels, pecos_label_names
from .readers import TABLES, extension_of, is_hub_name, load_table
from .skos import SKOS_FORMATS, read_skos

_LABEL_COLUMNS = ("label", "id", "uri", "code")
_NAME_COLUMNS = ("text", "name")
_LISTS = ("synonyms", "parents")
# A comma, or a space, is part of many names, but not of labels that are known.
_DELIMITERS = {"synonyms": "|;\n\t", "parents": "|;\n\t, "}

VocabularySource: TypeAlias = str | os.PathLike | Mapping[Any, Any]


def load_vocabulary(source: VocabularySource, *, language: str | Sequence[str] | None = None) -> LabelVocabulary:
    """
    Loads a label vocabulary: a thesaurus, catalogue or code book.

    The format is recognised by the name of the file, which may be compressed:

    - tables (parquet, jsonl, json, csv, tsv, xlsx) with the columns `label`, `text` (or `name`) and optionally
      `synonyms`, `description` and `parents`. The latter lists are lists, or strings separated by a bar, a semicolon
      or the like, which is found by looking. Other columns are ignored. `id`, `uri` and `code` are read as `label`;
    - JSON with one object, from labels to names or entries, see [`LabelVocabulary`];
    - SKOS as RDF/XML (`.rdf`, `.xml`), Turtle (`.ttl`) or N-Triples (`.nt`): labels are the URIs of concepts. Needs
      `pip install hf-xmc[skos]`. Deprecated concepts are left out. A concept without a name in the language has an
      empty name. Parents that are not in the file are left out with a warning;
    - the vocabulary of Annif (`.tsv`): lines of `<uri>`, a tab and the name;
    - a folder, or a dataset on the Hub, with one of these as `labels.parquet`, `labels.csv`, `labels.ttl` and so on;
      a folder of PECOS with its `output-items.txt`.

    Labels that no document has are allowed, and so are labels without a name. Where labels are URIs and the
    documents have only their last parts, a training recognises them, see [`LabelVocabulary.for_labels`].

    Args:
        source (`str`, `os.PathLike` or `Mapping`):
            File, folder, or id of a dataset on the Hub; or a dictionary, see [`LabelVocabulary`].
        language (`str` or `Sequence[str]`, *optional*):
            Language of the names in a SKOS file, such as `"en"`. Of several languages, the first one that has a name
            for a concept gives it, the names in all others are synonyms. By default the only language, or English.

    Example:

    ```python
    vocabulary = load_vocabulary("thesaurus.ttl", language="en")
    ```
    """
    if isinstance(source, Mapping):
        return source if isinstance(source, LabelVocabulary) else LabelVocabulary(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"A vocabulary is a file, a folder or a dictionary, not {source!r:.80}.")
    path = Path(source).expanduser()
    if path.is_dir():
        file = vocabulary_file(path)
        if file is None:
            return _pecos_vocabulary(path)
        path = file
    elif not path.exists():
        path = _download(str(source))
    if path.stat().st_size == 0:
        raise ValueError(f"`{path}` is empty.")
    extension = extension_of(path)
    if extension in SKOS_FORMATS:
        return read_skos(path, language)
    if language is not None:
        raise ValueError(f"`language={language!r}` is for SKOS files, but `{path}` is not one. Leave it out.")
    try:
        return _read_file(path, extension)
    except (TypeError, ValueError) as error:
        if str(path) in str(error):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError  # not that of a decoder
        raise kind(f"`{path}`: {error}") from error


def vocabulary_beside(
    data: str | os.PathLike | None,
    label_texts: bool | VocabularySource | None,
    language: str | Sequence[str] | None = None,
) -> LabelVocabulary | Literal[False] | None:
    """
    Returns the vocabulary for a training; `None` if there is none, `False` if none is wanted, not even names.

    `label_texts` is what [`load_vocabulary`] loads; `True` stands for the vocabulary beside the data, `None` for the
    same if the folder has any, `False` for none.
    """
    if label_texts is False:
        return False
    if label_texts is None:
        label_texts = None if data is None else vocabulary_file(data)
    elif label_texts is True:
        if data is None:
            raise ValueError(
                "`label_texts=True` reads a file beside the data, but the data has no folder. Pass a path."
            )
        label_texts = Path(data).parent if Path(data).is_file() else data
    if label_texts is None:
        return None
    return load_vocabulary(label_texts, language=language)


def load_label_texts(path: str | os.PathLike) -> dict[str, str]:
    """Loads the names of labels alone: those of [`load_vocabulary`]."""
    return {label: entry.name for label, entry in load_vocabulary(path).items()}


def load_label_list(path: str | os.PathLike, *columns: str) -> list[list[str]]:
    """
    Loads columns of labels, the first one `label`, from a table; or, if it is the only one, the lines of a text file.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file `{path}`.")
    extension, names = extension_of(path), ("label", *columns)
    if extension == ".txt" and not columns:
        lines = [line.strip() for line in path.read_text(encoding=find_encoding(path)).splitlines()]
        table: Mapping[str, list[Any]] = {"label": [line.lstrip("\ufeff") for line in lines if line.lstrip("\ufeff")]}
    elif extension not in TABLES or extension == ".txt":
        raise ValueError(f"`{path}` is not a table. Use {', '.join(TABLES)} with the columns {', '.join(names)}.")
    else:
        loaded = load_table([path], "train", None, {"as_text": True} if TABLES[extension] == "csv" else {})
        if missing := [name for name in names if name not in loaded.column_names]:
            found = ", ".join(loaded.column_names)
            raise ValueError(f"`{path}` has no column `{missing[0]}`; its columns are {found}. Rename one.")
        table = {name: loaded[name][:] for name in names}
    try:
        return [list(_labels_of(table[name], name)) for name in names]
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from error


def vocabulary_file(path: str | os.PathLike) -> Path | None:
    """The file of the vocabulary in a folder, if it has one."""
    folder = Path(path).expanduser()
    files = (folder / f"labels{extension}" for extension in (*TABLES, *SKOS_FORMATS))
    return next((file for file in files if file.is_file()), None)


def _pecos_vocabulary(folder: Path) -> LabelVocabulary:
    names = pecos_label_names(folder)
    if names is None:
        raise FileNotFoundError(
            f"`{folder}` has neither a `labels.parquet` (or jsonl, csv, ttl) nor an `output-items.txt`."
        )
    labels = names if names_are_labels(names) else map(str, range(len(names)))
    return LabelVocabulary(dict(zip(labels, names, strict=True)))


def _download(name: str) -> Path:
    if not is_hub_name(name) or extension_of(Path(name)) in (*SKOS_FORMATS, ".gz"):
        raise FileNotFoundError(f"There is no file or folder `{name}`.")
    try:
        return Path(hf_hub_download(name, "labels.parquet", repo_type="dataset"))
    except (EntryNotFoundError, RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"There is no file or folder `{name}`, nor a dataset of that name with a `labels.parquet` on the Hub."
        ) from error


# ---- Tables ----


def _read_file(path: Path, extension: str) -> LabelVocabulary:
    if extension in (".tsv", ".txt") and _starts_with(path, "<"):
        return _read_annif(path)
    if extension == ".json" and _starts_with(path, "{"):
        content = read_json(path) if path.suffix == ".json" else None
        if isinstance(content, dict) and not any(isinstance(value, list) for value in content.values()):
            return LabelVocabulary(content)
    if extension not in TABLES:
        raise ValueError(f"The format of `{path}` is not supported. Use {', '.join((*TABLES, *SKOS_FORMATS))}.")
    # Of csv files, all values are texts: 007 is not 7.
    options = {"as_text": True} if TABLES[extension] == "csv" else {}
    return _read_table(load_table([path], "train", None, options))


def _starts_with(path: Path, character: str) -> bool:
    with fsspec.open(str(path), "rb", compression="infer") as file:
        return bytes(file.read(100)).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(character.encode())


def _read_annif(path: Path) -> LabelVocabulary:
    """Reads `<uri>`, name and optionally a notation, separated by tabs."""
    entries: dict[str, str] = {}
    with fsspec.open(str(path), "rt", encoding=find_encoding(path), newline="\n", compression="infer") as file:
        for number, line in enumerate(file, start=1):
            fields = line.strip().lstrip("\ufeff").split("\t")
            if fields == [""]:
                continue
            uri = fields[0].strip()
            if len(fields) < 2 or not (uri.startswith("<") and uri.endswith(">")):
                raise ValueError(f"`{path}`, line {number}: {short(line.strip())} is not `<uri>`, a tab and a name.")
            if uri[1:-1] in entries:
                raise ValueError(f"`{path}`, line {number}: the label {short(uri)} occurs twice. Remove one line.")
            entries[uri[1:-1]] = fields[1].strip()
    return LabelVocabulary(entries)


def _read_table(table: Dataset) -> LabelVocabulary:
    names = table.column_names
    label_column = next((name for name in _LABEL_COLUMNS if name in names), None)
    if label_column is None:
        raise ValueError(f"There is no column `label`; the columns are {', '.join(names)}. Rename one.")
    name_columns = [name for name in _NAME_COLUMNS if name in names]
    if len(name_columns) > 1:
        raise ValueError("There are the columns `text` and `name`. Keep one: the preferred name of a label.")
    kept = [*name_columns, *(name for name in ("synonyms", "description", "parents") if name in names)]
    if not kept:
        raise ValueError(
            f"There is no column `text`, `name`, `synonyms`, `description` or `parents`; the columns are "
            f"{', '.join(names)}."
        )
    labels = list(_labels_of(table[label_column][:], label_column))
    rows = {label: row for row, label in enumerate(labels, start=1)}
    columns = {name: table[name][:] for name in kept}
    for name in _LISTS:
        if name in columns:
            columns[name] = split_lists(columns[name], _DELIMITERS[name], set(rows) if name == "parents" else None)
    if "parents" in columns:
        for row, parents in enumerate(columns["parents"], start=1):
            unknown = next((parent for parent in parents if str(parent) not in rows), None)
            if unknown is not None:
                raise ValueError(
                    f"Row {row}: {short(labels[row - 1])} has the parent {short(str(unknown))}, which is not a label "
                    "of the file. Add a row for it, or remove it."
                )
    entries: dict[str, LabelEntry] = {}
    for row, label in enumerate(labels, start=1):
        values = {name: values[row - 1] for name, values in columns.items()}
        for name in (*name_columns, "description"):
            # A number is a name, too.
            if isinstance(values.get(name), (int, float)) and not isinstance(values[name], bool):
                values[name] = str(values[name])
        try:
            entries[label] = LabelVocabulary({label: {**values, "parents": ()}})[label]
        except (TypeError, ValueError) as error:
            raise type(error)(f"Row {row}: {error}") from error
    parents = columns.get("parents") or [()] * len(entries)
    described = zip(entries.items(), parents, strict=True)
    return LabelVocabulary({label: replace(entry, parents=tuple(above)) for (label, entry), above in described})


def _labels_of(values: Sequence[Any], column: str) -> Iterator[str]:
    """Yields the labels as texts."""
    rows: dict[str, int] = {}
    for row, value in enumerate(values, start=1):
        label = "" if value is None else str(value).strip()
        if not label or not isinstance(value, (str, int)):
            raise ValueError(f"Row {row} has no label: column `{column}` has {value!r:.80}. Add one, or drop the row.")
        if label in rows:
            raise ValueError(
                f"Row {row} has the label {short(label)}, which row {rows[label]} has already. Keep one; "
                "further names go into the column `synonyms`."
            )
        rows[label] = row
        yield label

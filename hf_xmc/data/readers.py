"""Loads any supported file or folder as memory-mapped datasets."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from .columns import prepare_dataset
from .csv_format import find_csv_format
from .excel import read_excel
from .formats import has_xmc_header, pair_splits, pecos_splits, read_pair, read_pecos, read_xmc_text
from .streams import open_bytes, plain_error

# Extension → loader of `datasets`, in order of preference.
TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".xlsx": "excel"}
_XMC_EXTENSIONS = (".txt", ".svm")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SPLIT_NAMES = {
    "train": ("train", "trn", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "tst", "testing"),
}
_SHARD = re.compile(r"[-_.]?\d+([-_.]?of[-_.]?\d+)?")


def load_xmc_dataset(
    path: str | Path,
    split: str | None = None,
    *,
    column_mapping: Mapping[str, str] | None = None,
    label_delimiter: str | None = None,
    require_labels: bool = True,
    keep_columns: Sequence[str] = (),
    cache_dir: str | None = None,
    **load_options: Any,
) -> DatasetDict | Dataset:
    """
    Loads a dataset. The format is recognised by file names and content:

    - parquet, jsonl/json, csv, tsv and xlsx files (compressed too), split by name: `train.parquet`,
      `data/dev-00000-of-00002.jsonl`; encoding and separator of csv are recognised;
    - the text format of the Extreme Classification Repository (`.txt`, `.svm`, gzipped too), vectors only;
    - PECOS folders: `Y.trn.npz` with `X.trn.npz` (or `tfidf-attnxml/X.trn.npz`), `X.trn.txt` or both, and label names
      from `output-items.txt` (if names repeat, labels are numbers: see [`load_vocabulary`]);
    - pairs of AttentionXML and LightXML: `train_raw_texts.txt` or `train_texts.txt` with `train_labels.txt`;
    - any dataset on the Hub that `datasets.load_dataset` loads.

    Files are converted once to the Arrow cache of `datasets`, without being held in memory, and memory-mapped.

    Args:
        path (`str` or `Path`):
            A folder, a file or the id of a dataset on the Hub.
        split (`str`, *optional*):
            Only this split (`train`, `validation` or `dev`, `test`), or the name of a file in the folder without its
            extension (`train-5k`), or several of them concatenated (`train+validation`).
        column_mapping (`Mapping[str, str]`, *optional*):
            The data's column → `text`, `labels`, `feature_ids` or `feature_values`, see [`prepare_dataset`].
        label_delimiter (`str`, *optional*):
            Separator of labels in a string column, required for tables; whitespace by default in the label file of a
            pair.
        require_labels (`bool`, *optional*, defaults to `True`):
            Whether tables must have labels.
        keep_columns (`Sequence[str]`, *optional*):
            Further columns to keep unchanged.
        cache_dir (`str`, *optional*):
            Folder of the Arrow files; by default the cache of `datasets`.
        load_options:
            Passed to `datasets.load_dataset` for tables and Hub datasets; `sheet` of an Excel file.

    Returns:
        `DatasetDict` of all splits (the development set is called `validation`), or a `Dataset` if `split` is given or
        `path` is a file.
    """
    prepare: dict[str, Any] = {
        "column_mapping": column_mapping,
        "label_delimiter": label_delimiter,
        "require_labels": require_labels,
        "keep_columns": keep_columns,
    }
    return load_splits(path, split, prepare, cache_dir, load_options)


def load_splits(
    path: str | Path,
    split: str | None,
    prepare: dict[str, Any] | None,
    cache_dir: str | None,
    load_options: dict[str, Any],
) -> DatasetDict | Dataset:
    """Loads a dataset as [`load_xmc_dataset`] does; `prepare=None` leaves the columns as they are."""
    location = Path(path).expanduser()
    if split is not None and "+" in split:
        if location.is_file():
            raise ValueError(f"`{path}` is a file and does not have the splits `{split}`. Pass its folder.")
        parts = {name: load_splits(path, name, prepare, cache_dir, load_options) for name in split_names(split)}
        return join_splits(parts)  # type: ignore[arg-type]
    split = split_name(split)
    if not location.exists():
        return _load_from_hub(str(path), split, prepare, cache_dir, load_options)
    if location.is_file():
        own_split = _split_of(location)
        if split is not None and own_split is not None and split != own_split:
            raise ValueError(f"`{path}` is the split `{own_split}`, not `{split}`. Leave out `split`.")
        name = split or own_split or "train"
        return _load_split("files", name, [location], prepare, cache_dir, load_options)
    splits = folder_splits(location)
    if split is not None and split not in splits:
        # A part of a split, such as `train-5k.parquet`.
        files = [path for path in location.iterdir() if path.is_file() and _stem(path) == split.lower()]
        if len(files) == 1:
            return _load_split("files", split.split("-")[0], files, prepare, cache_dir, load_options)
        raise ValueError(f"`{path}` has no split `{split}`; it has {', '.join(splits)}.")
    chosen = splits if split is None else [split]
    loaded = {name: _load_split(*splits[name], prepare, cache_dir, load_options) for name in chosen}
    return DatasetDict(loaded) if split is None else loaded[split]


def is_hub_name(name: str) -> bool:
    """Whether a path may be a Hub id. A name with the extension of a data file is not: that file does not exist."""
    is_file = extension_of(Path(name)) in (*TABLES, *_XMC_EXTENSIONS)
    return not is_file and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


def extension_of(path: Path) -> str:
    """Last extension of a file name, ignoring that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def split_name(split: str | None) -> str | None:
    """The canonical name of a split: the development set is called `validation`."""
    return "validation" if split in _SPLIT_NAMES["validation"] else split


def split_names(splits: str) -> list[str]:
    """The canonical names of the splits in an expression such as `train+dev`."""
    names = [str(split_name(part.strip())) for part in splits.split("+")]
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"`{splits}` is not a list of different splits, such as `train+validation`.")
    return names


def join_splits(splits: Mapping[str, Dataset]) -> Dataset:
    """Concatenates several splits. A single one is returned unchanged."""
    if len(splits) == 1:
        return next(iter(splits.values()))
    types = {name: dataset.features for name, dataset in splits.items()}
    if any(features != next(iter(types.values())) for features in types.values()):
        listed = "; ".join(f"`{name}` has {dict(features)}" for name, features in types.items())
        raise ValueError(f"The splits {' and '.join(splits)} have different columns or types: {listed}.")
    return concatenate_datasets(list(splits.values()))


def _stem(path: Path) -> str:
    name = path.name.lower()
    return name[: name.rfind(extension_of(path))] if extension_of(path) else name


def _split_of(path: Path) -> str | None:
    """The split in a file name such as `wiki10_train.txt` or `dev.parquet`."""
    words = re.split(r"[^a-z]+", _stem(path))
    splits = [split for split, names in _SPLIT_NAMES.items() if any(name in words for name in names)]
    return splits[0] if len(splits) == 1 else None


def folder_splits(folder: Path) -> dict[str, tuple[str, str, list[Path]]]:
    """Split → (kind of reader, split, its files) of a folder."""
    if pecos := pecos_splits(folder):
        return {split: ("pecos", split, [path]) for split, path in pecos.items()}
    if pairs := pair_splits(folder):
        return {split: ("pair", split, list(pair)) for split, pair in pairs.items()}
    for place in (folder, folder / "data"):
        files = sorted(path for path in place.glob("*") if path.is_file())
        for extensions in (*((extension,) for extension in TABLES), _XMC_EXTENSIONS):
            splits = _split_files([path for path in files if extension_of(path) in extensions])
            if splits:
                return {split: ("files", split, paths) for split, paths in splits.items()}
    names = sorted(path.name for path in folder.iterdir())
    raise FileNotFoundError(
        f"`{folder}` does not contain a dataset; its files are {', '.join(names[:10]) or 'none'}. Name files by their "
        "split, such as train.parquet and test.parquet (or .jsonl, .csv, .txt in the repository's format)."
    )


def _split_files(files: list[Path]) -> dict[str, list[Path]]:
    """Files by split: `train.csv` if it exists, else its shards, else the only file with the word in its name."""
    splits = {}
    for split, names in _SPLIT_NAMES.items():
        exact = [path for path in files if _stem(path) in names]
        shards = [
            path
            for path in files
            if any(_SHARD.fullmatch(_stem(path)[len(n) :]) for n in names if _stem(path).startswith(n))
        ]
        paths = exact or shards or [path for path in files if _split_of(path) == split]
        if len(paths) > 1 and paths is not shards:
            listed = ", ".join(path.name for path in paths)
            raise ValueError(
                f"`{paths[0].parent}` has several files for the split `{split}`: {listed}. Keep or pass one."
            )
        if paths:
            splits[split] = paths
    return splits


def _load_split(
    reader: str,
    split: str,
    files: list[Path],
    prepare: dict[str, Any] | None,
    cache_dir: str | None,
    options: dict[str, Any],
) -> Dataset:
    for path in files:
        if path.stat().st_size == 0:
            raise ValueError(f"`{path}` is empty.")
    extension = extension_of(files[0])
    is_table = reader == "files" and extension in TABLES
    if options and not is_table:
        raise TypeError(f"`{files[0]}` is not a table, so it does not support {', '.join(options)}.")
    if is_table:
        dataset = load_table(files, split, cache_dir, options)
    elif reader == "pecos":
        dataset = read_pecos(files[0].parent, split, cache_dir)
    elif reader == "pair":
        dataset = read_pair(files[0], files[1], split, (prepare or {}).get("label_delimiter"), cache_dir)
    elif len(files) > 1:
        raise ValueError(f"Pass one file for the split `{split}`, not {', '.join(path.name for path in files)}.")
    elif extension in _XMC_EXTENSIONS or has_xmc_header(files[0]):
        dataset = read_xmc_text(files[0], split, cache_dir)
    else:
        if extension == ".xls":
            raise ValueError(f"`{files[0]}` is in the old format of Excel. Open it and save it as .xlsx or .csv.")
        raise ValueError(
            f"The format of `{files[0]}` is not supported. Use {', '.join(TABLES)} or the text format of the "
            "Extreme Classification Repository, whose first line is `documents features labels`."
        )
    if prepare is None:
        return dataset
    try:
        return prepare_dataset(dataset, **prepare)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{files[0]}`: {error}") from error


def load_table(files: list[Path], split: str, cache_dir: str | None, options: dict[str, Any]) -> Dataset:
    """Loads tables of one kind; `as_text=True` leaves the values of csv files as they are."""
    extension = extension_of(files[0])
    loader = TABLES[extension]
    if loader == "excel":
        return _load_excel(files, split, cache_dir, options)
    names = ", ".join(f"`{path}`" for path in files)
    try:
        if loader == "csv":
            options = _csv_options(files[0], **options)
        dataset = datasets.load_dataset(
            loader, data_files={split: [str(path) for path in files]}, split=split, cache_dir=cache_dir, **options
        )
        # Arrow accepts texts that are not UTF-8, and fails when they are used, without the name of the file.
        dataset.data.table.validate(full=True)
        return dataset
    except (DatasetGenerationError, EOFError, gzip.BadGzipFile, pa.ArrowException, UnicodeError) as error:
        reason = str(plain_error(error)).strip()
        if fields := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason):
            raise ValueError(
                f"{names}, line {fields[2]}, has {fields[3]} columns and not {fields[1]}. Quote texts that contain "
                "the separator, or give the separator (`--separator`)."
            ) from error
        if extension == ".jsonl" and (place := _find_bad_line(files)):
            raise ValueError(f"{place}. Correct the line, or remove it.") from error
        raise ValueError(
            f"{names} cannot be read as {loader} ({reason}). The file is damaged or has the wrong extension."
        ) from error
    except (OSError, TypeError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"{names} does not contain documents.") from error
        # A damaged parquet file is an `OSError` without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{names} cannot be read as {loader} ({error}). Check the file and the options.") from error


def _find_bad_line(files: list[Path]) -> str | None:
    """Says which line of some files is not JSON."""
    for path in files:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    json.loads(line.strip() or "null")
                except ValueError as error:
                    return f"`{path}`, line {number}, is not JSON ({getattr(error, 'msg', error)})"
    return None


def _csv_options(path: Path, as_text: bool = False, **options: Any) -> dict[str, Any]:
    """Options of the loader of `datasets` for a file: its encoding and separator; with `as_text` no numbers."""
    found = find_csv_format(path, options.get("encoding"), options.get("sep"))
    if as_text:
        options["features"] = Features({name: Value("string") for name in found.columns})
        options["skipinitialspace"] = True
    if found.skipped:
        options["skiprows"] = found.skipped
    # "NA" and "null" are ordinary texts.
    return {"keep_default_na": False, **options, "sep": found.separator, "encoding": found.encoding}


def _load_excel(files: list[Path], split: str, cache_dir: str | None, options: dict[str, Any]) -> Dataset:
    for name in options:
        if name != "sheet":
            raise ValueError(f"`{files[0]}` is an Excel file: `{name}` has no meaning for it. Leave it out.")
    return concatenate_datasets([read_excel(path, split, options.get("sheet"), cache_dir) for path in files])


def _load_from_hub(
    path: str, split: str | None, prepare: dict[str, Any] | None, cache_dir: str | None, load_options: dict[str, Any]
) -> DatasetDict | Dataset:
    if not is_hub_name(path):
        raise FileNotFoundError(f"There is no file or folder `{path}`.")
    try:
        loaded = datasets.load_dataset(path, cache_dir=cache_dir, **load_options)
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"There is no file or folder `{path}`, nor a dataset of that name on the Hub."
        ) from error
    except ConnectionError as error:
        raise ConnectionError(
            f"There is no file or folder `{path}`, and the Hub cannot be reached to look for a dataset ({error})."
        ) from error
    names = {name: next((s for s, words in _SPLIT_NAMES.items() if str(name) in words), str(name)) for name in loaded}
    splits = {names[name]: dataset for name, dataset in loaded.items()}
    if split is not None and split not in splits:
        raise ValueError(f"`{path}` has no split `{split}`; it has {', '.join(splits)}.")
    if split is not None:
        splits = {split: splits[split]}
    if prepare is not None:
        splits = {name: prepare_dataset(dataset, **prepare) for name, dataset in splits.items()}
    return DatasetDict(splits) if split is None else splits[split]


SAMPLE_FOLDER = Path(__file__).with_name("sample")


def load_sample(cache_dir: str | None = None) -> DatasetDict:
    """
    Loads the bundled sample: `train`, `validation` and `test` with the columns `text` and `labels` (subject names).

    Its `README.md` describes origin, licences and size.

    Args:
        cache_dir (`str`, *optional*): Folder of the Arrow files; by default the cache of `datasets`.
    """
    splits = load_xmc_dataset(SAMPLE_FOLDER, cache_dir=cache_dir)
    assert isinstance(splits, DatasetDict)
    return splits

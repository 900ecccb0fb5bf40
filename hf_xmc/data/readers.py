"""Reading any supported file or folder as memory-mapped datasets."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, concatenate_datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from .attentionxml import pair_splits, read_pair
from .columns import prepare_dataset
from .pecos import names_are_labels, pecos_label_names, pecos_splits, read_pecos
from .streams import plain_error
from .xmc_text import has_xmc_header, read_xmc_text

# Extension → loader of `datasets`, the most faithful first.
_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
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
    Reads a dataset whatever its format, which is recognised by names and content:

    - parquet, jsonl/json, csv and tsv files (compressed too), split by name: `train.parquet`,
      `data/dev-00000-of-00002.jsonl`;
    - the text format of the Extreme Classification Repository (`.txt`, `.svm`, gzipped too), vectors only;
    - PECOS folders: `Y.trn.npz` with `X.trn.npz` (or `tfidf-attnxml/X.trn.npz`), `X.trn.txt` or both, and label names
      from `output-items.txt` (where names repeat, labels are their numbers: see [`load_label_texts`]);
    - pairs of AttentionXML and LightXML: `train_raw_texts.txt` or `train_texts.txt` with `train_labels.txt`;
    - anything else that `datasets.load_dataset` finds on the Hub under this name.

    Files are converted once, piece by piece, into the Arrow cache of `datasets` and are memory-mapped from there.

    Args:
        path (`str` or `Path`):
            A folder, a file or the id of a dataset on the Hub.
        split (`str`, *optional*):
            Only this split (`train`, `validation` or `dev`, `test`), or the name of a file of the folder without its
            ending (`train-5k`), or several of them, one after the other (`train+validation`).
        column_mapping (`Mapping[str, str]`, *optional*):
            The data's column → `text`, `labels`, `feature_ids` or `feature_values`, see [`prepare_dataset`].
        label_delimiter (`str`, *optional*):
            What separates labels where they come as one string. Needed for such a column of a table; in the label file
            of a pair it is white space by default.
        require_labels (`bool`, *optional*, defaults to `True`):
            Whether tables must have labels.
        keep_columns (`Sequence[str]`, *optional*):
            Further columns that stay, as they are.
        cache_dir (`str`, *optional*):
            Where the Arrow files go; by default the cache of `datasets`.
        load_options:
            Passed to `datasets.load_dataset` for tables and for datasets on the Hub.

    Returns:
        `DatasetDict` of the splits there are (the development set is called `validation`); a `Dataset` where `split`
        is given or `path` is one file.
    """
    location = Path(path).expanduser()
    prepare: dict[str, Any] = {
        "column_mapping": column_mapping,
        "label_delimiter": label_delimiter,
        "require_labels": require_labels,
        "keep_columns": keep_columns,
    }
    if split is not None and "+" in split:
        if location.is_file():
            raise ValueError(f"`{path}` is one file: it has no splits `{split}`. Give the folder that it is in.")
        wanted = split_names(split)
        return join_splits(
            {name: load_xmc_dataset(path, name, cache_dir=cache_dir, **prepare, **load_options) for name in wanted}
        )
    split = split_name(split)
    if not location.exists():
        return _load_from_hub(str(path), split, prepare, cache_dir, load_options)
    if location.is_file():
        found = _split_of(location)
        if split is not None and found is not None and split != found:
            raise ValueError(f"`{path}` is one file with the split `{found}`, not `{split}`. Give the file alone.")
        name = split or found or "train"
        return _load_split("files", name, [location], prepare, cache_dir, load_options)
    splits = folder_splits(location)
    if split is not None and split not in splits:
        # A part of a split, say: `train-5k.parquet`.
        own = [path for path in location.iterdir() if path.is_file() and _stem(path) == split.lower()]
        if len(own) == 1:
            return _load_split("files", split.split("-")[0], own, prepare, cache_dir, load_options)
        raise ValueError(f"`{path}` has no split `{split}`; it has {', '.join(splits)}.")
    chosen = splits if split is None else [split]
    loaded = {name: _load_split(*splits[name], prepare, cache_dir, load_options) for name in chosen}
    return DatasetDict(loaded) if split is None else loaded[split]


def load_label_texts(path: str | Path) -> dict[str, str]:
    """
    Texts of the labels of a folder or of a dataset on the Hub, by label.

    Read from `labels.parquet`, `labels.jsonl`, `labels.json`, `labels.csv` or `labels.tsv` with the columns `label`
    and `text`, or from `output-items.txt` of a PECOS folder; of a dataset on the Hub from `labels.parquet`, as
    `hf-xmc push-dataset` writes it.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        return _read_label_texts(_label_texts_on_hub(str(path)))
    for extension in _LOADERS:
        file = folder / f"labels{extension}"
        if file.is_file():
            return _read_label_texts(file)
    names = pecos_label_names(folder)
    if names is None:
        raise FileNotFoundError(
            f"`{folder}` has neither a `labels.parquet` (or jsonl, csv) nor an `output-items.txt`."
        )
    return (
        dict(zip(names, names, strict=True)) if names_are_labels(names) else {str(i): n for i, n in enumerate(names)}
    )


def _read_label_texts(file: Path) -> dict[str, str]:
    table = _load_table([file], "train", None, {})
    if not {"label", "text"} <= set(table.column_names):
        raise ValueError(f"`{file}` has the columns {', '.join(table.column_names)}: `label` and `text` are needed.")
    return {str(label): text or "" for label, text in zip(table["label"], table["text"], strict=True)}


def _label_texts_on_hub(name: str) -> Path:
    if not _is_hub_name(name):
        raise FileNotFoundError(f"There is no folder `{name}`.")
    try:
        return Path(hf_hub_download(name, "labels.parquet", repo_type="dataset"))
    except (EntryNotFoundError, RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"There is no folder `{name}`, nor a dataset of that name with a `labels.parquet` on the Hub."
        ) from error


def _is_hub_name(name: str) -> bool:
    """Whether a name may be one on the Hub: one with the ending of a data file is a file that is not there."""
    is_file = extension_of(Path(name)) in (*_LOADERS, *_XMC_EXTENSIONS)
    return not is_file and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


def extension_of(path: Path) -> str:
    """Last extension of a file name, without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def split_name(split: str | None) -> str | None:
    """A split by the name it has here: the development set is called `validation`."""
    return "validation" if split in _SPLIT_NAMES["validation"] else split


def split_names(splits: str) -> list[str]:
    """The splits that an expression such as `train+dev` stands for, by the names they have here."""
    names = [str(split_name(part.strip())) for part in splits.split("+")]
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"`{splits}` has to be different splits with a plus between them, such as train+validation.")
    return names


def join_splits(splits: Mapping[str, Dataset]) -> Dataset:
    """The documents of several splits, one after the other; one alone stays what it is."""
    if len(splits) == 1:
        return next(iter(splits.values()))
    kinds = {name: dataset.features for name, dataset in splits.items()}
    if any(features != next(iter(kinds.values())) for features in kinds.values()):
        listed = "; ".join(f"`{name}` has {dict(features)}" for name, features in kinds.items())
        raise ValueError(f"The splits {' and '.join(splits)} have not the same columns and types: {listed}.")
    return concatenate_datasets(list(splits.values()))


def _stem(path: Path) -> str:
    name = path.name.lower()
    return name[: name.rfind(extension_of(path))] if extension_of(path) else name


def _split_of(path: Path) -> str | None:
    """The split that a file name speaks of: `wiki10_train.txt`, `dev.parquet`."""
    words = re.split(r"[^a-z]+", _stem(path))
    found = [split for split, names in _SPLIT_NAMES.items() if any(name in words for name in names)]
    return found[0] if len(found) == 1 else None


def folder_splits(folder: Path) -> dict[str, tuple[str, str, list[Path]]]:
    """Split → (kind of reader, split, its files) of a folder."""
    if pecos := pecos_splits(folder):
        return {split: ("pecos", split, [path]) for split, path in pecos.items()}
    if pairs := pair_splits(folder):
        return {split: ("pair", split, list(pair)) for split, pair in pairs.items()}
    for place in (folder, folder / "data"):
        files = sorted(path for path in place.glob("*") if path.is_file())
        for extensions in (*((extension,) for extension in _LOADERS), _XMC_EXTENSIONS):
            splits = _split_files([path for path in files if extension_of(path) in extensions])
            if splits:
                return {split: ("files", split, paths) for split, paths in splits.items()}
    names = sorted(path.name for path in folder.iterdir())
    raise FileNotFoundError(
        f"`{folder}` holds no dataset that can be read: there are {', '.join(names[:10]) or 'no files'}. Name files "
        "by their split, such as train.parquet and test.parquet (or .jsonl, .csv, .txt in the repository's format)."
    )


def _split_files(files: list[Path]) -> dict[str, list[Path]]:
    """Files by split: `train.csv` where it is there, else its shards, else the one file whose name has the word."""
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
                f"`{paths[0].parent}` has several files for the split `{split}`: {listed}. Keep or give one."
            )
        if paths:
            splits[split] = paths
    return splits


def _load_split(
    reader: str, split: str, files: list[Path], prepare: dict[str, Any], cache_dir: str | None, options: dict[str, Any]
) -> Dataset:
    for path in files:
        if path.stat().st_size == 0:
            raise ValueError(f"`{path}` is empty.")
    extension = extension_of(files[0])
    is_table = reader == "files" and extension in _LOADERS
    if options and not is_table:
        raise TypeError(f"`{files[0]}` is no table and takes no option {', '.join(options)}.")
    if is_table:
        dataset = _load_table(files, split, cache_dir, options)
    elif reader == "pecos":
        dataset = read_pecos(files[0].parent, split, cache_dir)
    elif reader == "pair":
        dataset = read_pair(files[0], files[1], split, prepare["label_delimiter"], cache_dir)
    elif len(files) > 1:
        raise ValueError(f"Give one file for the split `{split}`, not {', '.join(path.name for path in files)}.")
    elif extension in _XMC_EXTENSIONS or has_xmc_header(files[0]):
        dataset = read_xmc_text(files[0], split, cache_dir)
    else:
        raise ValueError(
            f"`{files[0]}` is of no known format. Known are {', '.join(_LOADERS)} and the text format of the Extreme "
            "Classification Repository, whose first line is `documents features labels`."
        )
    try:
        return prepare_dataset(dataset, **prepare)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{files[0]}`: {error}") from error


def _load_table(files: list[Path], split: str, cache_dir: str | None, options: dict[str, Any]) -> Dataset:
    extension = extension_of(files[0])
    loader = _LOADERS[extension]
    if loader == "csv":
        # "NA" and "null" are texts like any other.
        options = {"keep_default_na": False, **({"sep": "\t"} if extension == ".tsv" else {}), **options}
    names = ", ".join(f"`{path}`" for path in files)
    try:
        return datasets.load_dataset(
            loader, data_files={split: [str(path) for path in files]}, split=split, cache_dir=cache_dir, **options
        )
    except (DatasetGenerationError, EOFError, gzip.BadGzipFile, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{names} cannot be read as {loader} ({plain_error(error)}). The file is damaged, or of another format "
            "than its name says."
        ) from error
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        raise ValueError(f"{names} holds no documents.") from error


def _load_from_hub(
    path: str, split: str | None, prepare: dict[str, Any], cache_dir: str | None, load_options: dict[str, Any]
) -> DatasetDict | Dataset:
    if not _is_hub_name(path):
        raise FileNotFoundError(f"There is no file or folder `{path}`.")
    try:
        loaded = datasets.load_dataset(path, cache_dir=cache_dir, **load_options)
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"There is no file or folder `{path}`, nor a dataset of that name on the Hub."
        ) from error
    except ConnectionError as error:
        raise ConnectionError(
            f"There is no file or folder `{path}`, and the Hub cannot be asked for a dataset of that name ({error})."
        ) from error
    names = {name: next((s for s, words in _SPLIT_NAMES.items() if str(name) in words), str(name)) for name in loaded}
    splits = {names[name]: dataset for name, dataset in loaded.items()}
    if split is None:
        return DatasetDict({name: prepare_dataset(dataset, **prepare) for name, dataset in splits.items()})
    if split not in splits:
        raise ValueError(f"`{path}` has no split `{split}`; it has {', '.join(splits)}.")
    return prepare_dataset(splits[split], **prepare)


SAMPLE_FOLDER = Path(__file__).with_name("sample")


def load_sample(cache_dir: str | None = None) -> DatasetDict:
    """
    The bundled sample: `train`, `validation` and `test` with the columns `text` and `labels` (names of subjects).

    Its origin, licences and numbers are in the `README.md` beside the files.

    Args:
        cache_dir (`str`, *optional*):
            Where the Arrow files go; by default the cache of `datasets`.
    """
    splits = load_xmc_dataset(SAMPLE_FOLDER, cache_dir=cache_dir)
    assert isinstance(splits, DatasetDict)
    return splits

"""Files of a model: finding, atomic writing, JSON, safetensors in one file or in shards."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_KEY = "hf_xmc"

# Files in the folder of a model that describe it without being part of it.
TRAINING_ARGS_FILE = "training_args.json"
RECORD_FILE = "training_record.json"
ENSEMBLE_FILE = "ensemble.json"
RESULTS_SUFFIX = "_results.json"

# Suffix of incomplete files and folders.
_SUFFIX = ".partial"
# Names of the temporary files of `atomic_write`.
_TEMPORARY = re.compile(rf"\..+\.[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")


def resolve_file(name_or_path: str | os.PathLike, filename: str, *, required: bool = True, **hub_kwargs) -> str | None:
    """
    Returns the path of one file of a model, which is downloaded if `name_or_path` is a Hub id.

    A missing file is an error if it is `required`; otherwise `None` is returned. `hub_kwargs` are `revision`, `token`,
    `cache_dir`, `local_files_only` and `subfolder` as in `from_pretrained`.
    """
    if os.path.isdir(name_or_path):
        path = Path(name_or_path, hub_kwargs.get("subfolder") or "", filename)
        if path.is_file():
            check_link(path)
            return str(path)
        if required:
            raise FileNotFoundError(
                f"The folder `{path.parent}` has no file `{filename}`. Check that it holds a model saved by hf_xmc."
            )
        return None
    # Imported here: not needed for local folders.
    from huggingface_hub.utils import HFValidationError, validate_repo_id
    from transformers.utils import cached_file

    try:
        validate_repo_id(str(name_or_path))
    except HFValidationError as error:
        raise FileNotFoundError(f"`{name_or_path}` is neither a folder nor a valid Hub id.") from error
    path = cached_file(
        name_or_path,
        filename,
        _raise_exceptions_for_missing_entries=required,
        _raise_exceptions_for_gated_repo=required,
        **{key: value for key, value in hub_kwargs.items() if value is not None},
    )
    if path is None and required:  # transformers ignores a missing config.json
        raise OSError(f"`{name_or_path}` has no file `{filename}`. Check that it holds a model saved by hf_xmc.")
    return path


def check_plain_name(name: Any, source: str) -> str:
    """Returns a name of a file or folder that a model lists; raises if it could lead out of the model's folder."""
    if not isinstance(name, str) or name in ("", os.curdir, os.pardir) or re.search(r"[/\\:\x00]", name):
        raise ValueError(
            f"{source} lists {name!r:.80}, which is not a plain name. A model may only name files in its own folder. "
            "Do not use it, or save it again."
        )
    return name


def check_link(path: Path) -> None:
    """Raises if a file is a link out of its folder; a snapshot of the Hub may link to the blobs beside it."""
    if not path.is_symlink():
        return
    target, folder = path.resolve(), path.parent.resolve()
    blobs = next((above.parent / "blobs" for above in (folder, *folder.parents) if above.name == "snapshots"), folder)
    if not target.is_relative_to(folder) and not target.is_relative_to(blobs):
        raise ValueError(
            f"`{path}` is a link to `{target}`, which is outside of the model's folder. Replace it by the file itself "
            "if you trust it."
        )


def check_links(folder: str | os.PathLike) -> None:
    """Raises if a file in a folder is a link out of it, see [`check_link`]. Files on the Hub are not links."""
    if os.path.isdir(folder):
        for entry in Path(folder).iterdir():
            if not entry.is_dir():
                check_link(entry)


def check_model_type(name_or_path: str | os.PathLike, model_type: str, **hub_kwargs) -> None:
    """
    Raises an error if there is no model, or a model of another type. transformers would load it without an error.
    """
    path = str(resolve_file(name_or_path, "config.json", **hub_kwargs))
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` is damaged: it is not a JSON object. Save or download it again.")
    actual = content.get("model_type")
    if actual != model_type:
        place = "/".join(filter(None, (str(name_or_path), hub_kwargs.get("subfolder"))))
        raise ValueError(
            f"`{place}` holds a model of the type {actual!r:.80} (`config.json`), but the type {model_type!r} is "
            "needed. `AutoModel.from_pretrained` loads either."
        )


def _read_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


# Read once: reading the umask changes it for a moment, in which other threads may create files.
_FILE_MODE = 0o666 & ~_read_umask()


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[str]:
    """Yields a temporary path that is renamed to `path` if the block succeeds, and removed otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent)
    os.close(handle)
    try:
        yield temporary
        # Files of mkstemp are private; a model should be as readable as any other file.
        os.chmod(temporary, _FILE_MODE)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def remove_leftovers(folder: str | os.PathLike) -> None:
    """Removes the temporary files that killed processes have left in a folder."""
    for path in Path(folder).glob(".*"):
        if path.is_file() and _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[str]:
    """Yields an empty folder that is removed afterwards; the content of a killed process is removed first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def partial_name(path: str | os.PathLike) -> str:
    """Returns the temporary name of a folder, see [`new_folder`]."""
    return str(Path(path).with_name(f".{Path(path).name}{_SUFFIX}"))


@contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[str]:
    """Yields an empty folder that replaces `path` if the block succeeds."""
    with _temporary_folder(Path(partial_name(path))) as temporary:
        yield temporary
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)


@contextmanager
def staged_files(folder: str | os.PathLike, last: str) -> Iterator[str]:
    """
    Yields an empty folder whose content is moved into `folder` if the block succeeds.

    Other files in `folder` stay. The file `last` is moved last: its presence shows that the others are complete.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    try:
        with _temporary_folder(folder / ".saving") as temporary:
            yield temporary
            _move_files(Path(temporary), folder, last)
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def _move_files(source: Path, folder: Path, last: str) -> None:
    for name in sorted(os.listdir(source), key=lambda name: (name == last, name)):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        if (source / name).is_file():
            os.chmod(source / name, _FILE_MODE)  # files of safetensors are private, too
        os.replace(source / name, folder / name)


def remove_files(folder: str | os.PathLike, names: Collection[str]) -> None:
    """Removes the given files and folders of a folder, if they exist."""
    for name in names:
        path = Path(folder, name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, content: Any, indent: int | None = None) -> None:
    """Writes `content` atomically as UTF-8 JSON."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=indent)
        file.write("\n")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file; raises a `ValueError` with its name if it is damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` is damaged: it is not valid JSON ({error}). Save or download it again.") from error


def save_tensors(
    path: str | os.PathLike, tensors: Mapping[str, np.ndarray], kind: str, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays atomically as a safetensors file with its `kind` in the metadata."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with atomic_write(path) as temporary:
        with written(path):
            save_file(arrays, temporary, metadata={"format": "pt", FORMAT_KEY: kind, **(metadata or {})})
        _sort_metadata(temporary)


@contextmanager
def written(path: str | os.PathLike) -> Iterator[None]:
    """Turns errors of safetensors, such as that of a full disk, into an `OSError` that names the file or folder."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"`{path}` could not be written: {error}. Check the free space of the disk.") from error


def _sort_metadata(path: str) -> None:
    """Sorts the entries of the header, which safetensors does not, so that equal tensors give equal files."""
    with open(path, "r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(content) <= size:  # headers are padded with spaces
            file.seek(8)
            file.write(content.ljust(size))


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Opens a file of [`save_tensors`]; returns the memory-mapped arrays by name, and the metadata of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        # The torch reader maps the file, the numpy reader copies it.
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            if metadata.get(FORMAT_KEY) != kind:
                raise ValueError(
                    f"`{path}` is not a {kind} file of hf_xmc, but {metadata.get(FORMAT_KEY)!r}. "
                    "Pass the folder of a model saved by hf_xmc."
                )
            return {name: file.get_tensor(name).numpy() for name in file.keys()}, metadata
    except (SafetensorError, TypeError, RuntimeError, OverflowError) as error:  # the last ones: types without numpy
        raise ValueError(
            f"`{path}` is damaged or not a safetensors file ({error}). Save or download it again."
        ) from error


# Largest size of a file by default, as in `PreTrainedModel.save_pretrained`.
MAX_SHARD_SIZE = "50GB"


def index_name(filename: str) -> str:
    """Returns the name of the index of shards."""
    return f"{filename}.index.json"


def save_sharded(
    folder: str | os.PathLike,
    filename: str,
    tensors: Mapping[str, np.ndarray],
    kind: str,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """
    Writes arrays as `filename` or, if they are larger than `max_shard_size`, as numbered shards and an index.

    Arrays are not split, so that each can be memory-mapped: a larger array gets a shard of its own. The shards of
    `ranker.safetensors` are named `ranker-00001-of-00002.safetensors`.
    """
    # Imported here: not needed to load a model.
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda array: array.nbytes,
        filename_pattern=filename.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    for name, members in split.filename_to_tensors.items():
        save_tensors(Path(folder, name), {member: tensors[member] for member in members}, kind, metadata)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(Path(folder, index_name(filename)), index)
    written = {*split.filename_to_tensors, *([index_name(filename)] if split.is_sharded else [])}
    for name in sharded_files(folder, filename):
        if name not in written:
            Path(folder, name).unlink()


def load_sharded(
    name_or_path: str | os.PathLike, filename: str, kind: str, **hub_kwargs
) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, str]]:
    """
    Opens the files of [`save_sharded`] in a folder or on the Hub; the arguments are those of [`resolve_file`].

    Returns the memory-mapped arrays by name, the metadata of the files, and the file of each array.
    """
    index = resolve_file(name_or_path, index_name(filename), required=False, **hub_kwargs)
    expected = {} if index is None else read_index(index)
    tensors, paths = {}, {}
    metadata: dict[str, str] = {}
    for name in sorted(set(expected.values())) or [filename]:
        path = str(resolve_file(name_or_path, name, **hub_kwargs))
        shard, shard_metadata = load_tensors(path, kind)
        if metadata and metadata != shard_metadata:
            raise ValueError(f"`{path}` belongs to another model than the other shards. Save or download all again.")
        tensors.update(shard)
        paths.update(dict.fromkeys(shard, path))
        metadata = shard_metadata
    missing = ", ".join(sorted(expected.keys() - tensors.keys()))
    if missing:
        raise ValueError(f"The shards of `{index}` lack the arrays {missing}. Save or download all of them again.")
    return tensors, metadata, paths


def read_index(path: str | os.PathLike) -> dict[str, str]:
    """Reads an index of shards: the file of each array."""
    content = read_json(path)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"`{path}` is damaged: `weight_map` does not list any files. Save or download it again.")
    return {name: check_plain_name(file, f"`{path}`") for name, file in shards.items()}


def sharded_files(folder: str | os.PathLike, filename: str) -> list[str]:
    """Returns the names of the files in a folder that hold the arrays of `filename`."""
    stem = re.escape(filename.removesuffix(".safetensors"))
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(index_name(filename))}")
    return sorted(path.name for path in Path(folder).iterdir() if pattern.fullmatch(path.name))

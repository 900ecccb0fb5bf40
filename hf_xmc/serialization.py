"""Files of a model: where they are found, how they are written, what is checked when they are read."""

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

# Of a file or folder that is not whole yet.
_SUFFIX = ".partial"
# Names that `tempfile` gives to the files of `atomic_write`.
_TEMPORARY = re.compile(rf"\..+\.[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")


def resolve_file(name_or_path: str | os.PathLike, filename: str, *, required: bool = True, **hub_kwargs) -> str | None:
    """
    Path of one file of a model, downloaded first where `name_or_path` is a Hub id.

    Args:
        name_or_path (`str` or `os.PathLike`):
            A local folder or a model id on the Hub.
        filename (`str`):
            Name of the file inside it.
        required (`bool`, *optional*, defaults to `True`):
            Whether a missing file is an error; `None` is returned otherwise.
        hub_kwargs:
            `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder` as in `from_pretrained`.
    """
    if os.path.isdir(name_or_path):
        path = Path(name_or_path, hub_kwargs.get("subfolder") or "", filename)
        if path.is_file():
            return str(path)
        if required:
            raise FileNotFoundError(
                f"There is no `{filename}` in the folder `{path.parent}`. "
                "Check that the folder holds a saved hf_xmc model."
            )
        return None
    # Imported here: a local folder needs none of them.
    from huggingface_hub.utils import HFValidationError, validate_repo_id
    from transformers.utils import cached_file

    try:
        validate_repo_id(str(name_or_path))
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder `{name_or_path}`, and a Hub id it cannot be.") from error
    path = cached_file(
        name_or_path,
        filename,
        _raise_exceptions_for_missing_entries=required,
        _raise_exceptions_for_gated_repo=required,
        **{key: value for key, value in hub_kwargs.items() if value is not None},
    )
    if path is None and required:  # transformers does not mind a missing config.json
        raise OSError(f"`{name_or_path}` has no file `{filename}`. Check that it holds a model saved by hf_xmc.")
    return path


def check_model_type(name_or_path: str | os.PathLike, model_type: str, **hub_kwargs) -> None:
    """
    Raises where there is no model, or one of another type, which its class would load as its own.

    Args:
        name_or_path (`str` or `os.PathLike`):
            A local folder or a model id on the Hub.
        model_type (`str`):
            Type that `config.json` must name.
        hub_kwargs:
            As of [`resolve_file`].
    """
    found = read_json(resolve_file(name_or_path, "config.json", **hub_kwargs)).get("model_type")  # type: ignore[arg-type]
    if found != model_type:
        place = "/".join(filter(None, (str(name_or_path), hub_kwargs.get("subfolder"))))
        raise ValueError(
            f"`{place}` holds a model of the type {found!r}, but one of the type {model_type!r} is needed. "
            "`AutoModel.from_pretrained` loads either."
        )


def _read_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


# Read once: it cannot be read without being changed for a moment, in which other threads make files.
_FILE_MODE = 0o666 & ~_read_umask()


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[str]:
    """Yields a temporary path beside `path` that takes its name once the block has succeeded."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent)
    os.close(handle)
    try:
        yield temporary
        # mkstemp makes files private; a published model is readable like any other file.
        os.chmod(temporary, _FILE_MODE)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def remove_leftovers(folder: str | os.PathLike) -> None:
    """Removes what [`atomic_write`] had not finished in a folder when its process was killed."""
    for path in Path(folder).glob(".*"):
        if path.is_file() and _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[str]:
    """Yields an empty folder that is gone afterwards, and with it what a process that was killed has left there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def partial_name(path: str | os.PathLike) -> str:
    """Name that a folder has until it is whole, see [`new_folder`]."""
    return str(Path(path).with_name(f".{Path(path).name}{_SUFFIX}"))


@contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[str]:
    """Yields an empty folder beside `path` that takes its name, and the place of what is there, when it is whole."""
    with _temporary_folder(Path(partial_name(path))) as temporary:
        yield temporary
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)


@contextmanager
def staged_files(folder: str | os.PathLike, last: str) -> Iterator[str]:
    """
    Yields an empty folder inside `folder`, whose content goes into `folder` when it is whole.

    Args:
        folder (`str` or `os.PathLike`):
            Folder, made where it is missing. What else is in it stays there.
        last (`str`):
            The file that makes the others complete: it is the last to come.
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
            os.chmod(source / name, _FILE_MODE)  # safetensors makes files private, too
        os.replace(source / name, folder / name)


def remove_files(folder: str | os.PathLike, names: Collection[str]) -> None:
    """Removes those of the files and folders that are there."""
    for name in names:
        path = Path(folder, name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, content: Any, indent: int | None = None) -> None:
    """Writes `content` as UTF-8 JSON, whole or not at all."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=indent)
        file.write("\n")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file; a damaged one is a `ValueError` that names it."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise ValueError(
            f"`{path}` is not valid JSON ({error}). The file is damaged: save or download it again."
        ) from error


def save_tensors(
    path: str | os.PathLike, tensors: Mapping[str, np.ndarray], kind: str, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays as a safetensors file that says what it holds (`kind`), whole or not at all."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with atomic_write(path) as temporary:
        save_file(arrays, temporary, metadata={"format": "pt", FORMAT_KEY: kind, **(metadata or {})})
        _sort_metadata(temporary)


def _sort_metadata(path: str) -> None:
    """Orders the header's entries, which safetensors writes in any order: equal tensors make equal files."""
    with open(path, "r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(content) <= size:  # the rest of a header is filled with spaces
            file.seek(8)
            file.write(content.ljust(size))


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """
    Opens a safetensors file written by [`save_tensors`] as memory-mapped arrays.

    Returns:
        The arrays by name and the file's metadata.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # The torch reader maps the file; the numpy one copies it.
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            found = metadata.get(FORMAT_KEY)
            if found != kind:
                raise ValueError(
                    f"`{path}` is not a {kind} file of hf_xmc: its header says {found!r}. "
                    "Point to the folder of a model saved by hf_xmc."
                )
            return {name: file.get_tensor(name).numpy() for name in file.keys()}, metadata
    except SafetensorError as error:
        raise ValueError(
            f"`{path}` cannot be read as safetensors ({error}). "
            "The file is truncated or foreign: save or download it again."
        ) from error


MAX_SHARD_SIZE = "50GB"
"""Size above which a file is cut, as in `PreTrainedModel.save_pretrained`."""


def index_name(filename: str) -> str:
    """Name of the file that says which shard an array is in."""
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
    Writes arrays as `filename` or, where they are larger than a shard may be, as numbered files and an index.

    Arrays stay whole, so that each can be mapped: one that is larger than a shard may be gets a shard of its own.

    Args:
        folder (`str` or `os.PathLike`):
            Folder, made where it is missing.
        filename (`str`):
            Name of the file if there is one, `ranker.safetensors`; shards are `ranker-00001-of-00002.safetensors`.
        tensors (`Mapping[str, np.ndarray]`):
            The arrays.
        kind (`str`):
            What the file holds.
        metadata (`Mapping[str, str]`, *optional*):
            Written into each file.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`):
            Largest size of a file, in bytes or as `"5GB"`.
    """
    # Imported here: loading a model needs none of it.
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
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """
    Opens what [`save_sharded`] wrote by memory map.

    Args:
        name_or_path (`str` or `os.PathLike`):
            A local folder or a model id on the Hub.
        filename (`str`):
            Name of the file if there is one.
        kind (`str`):
            What the file holds.
        hub_kwargs:
            `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder` as in `from_pretrained`.

    Returns:
        The arrays by name and the metadata of the first file.
    """
    index = resolve_file(name_or_path, index_name(filename), required=False, **hub_kwargs)
    if index is None:
        path = resolve_file(name_or_path, filename, **hub_kwargs)
        return load_tensors(path, kind)  # type: ignore[arg-type]
    tensors: dict[str, np.ndarray] = {}
    found: dict[str, str] = {}
    weight_map = read_json(index)["weight_map"]
    for name in sorted(set(weight_map.values())):
        path = resolve_file(name_or_path, name, **hub_kwargs)
        part, metadata = load_tensors(path, kind)  # type: ignore[arg-type]
        if found and metadata != found:
            raise ValueError(f"`{path}` and the files beside it are of different models: save or download all again.")
        tensors.update(part)
        found = metadata
    missing = ", ".join(sorted(weight_map.keys() - tensors.keys()))
    if missing:
        raise ValueError(f"`{index}` names arrays that its files lack: {missing}. Save or download all of them again.")
    return tensors, found


def sharded_files(folder: str | os.PathLike, filename: str) -> list[str]:
    """Names of the files that hold the arrays of `filename`, whole or in shards."""
    stem = re.escape(filename.removesuffix(".safetensors"))
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(index_name(filename))}")
    return sorted(path.name for path in Path(folder).iterdir() if pattern.fullmatch(path.name))

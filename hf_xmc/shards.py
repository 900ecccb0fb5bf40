"""Arrays in one safetensors file or, above a size, in several with an index beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .files import load_tensors, read_json, resolve_file, save_tensors, write_json

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

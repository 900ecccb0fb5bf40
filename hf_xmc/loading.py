"""What is checked around the loading of a model by transformers: names, pickles, configuration, weights, checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from .checks import MAX_WEIGHT, first_fault
from .kernels_check import first_beyond
from .serialization import (
    ENSEMBLE_FILE,
    RECORD_FILE,
    RESULTS_SUFFIX,
    TRAINING_ARGS_FILE,
    check_links,
    check_plain_name,
    index_name,
    read_index,
    read_json,
    resolve_file,
    write_json,
)

HUB_KWARGS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
# Files that describe a model. They change without it, so they have no checksum.
_RECORDS = (RECORD_FILE, TRAINING_ARGS_FILE, ENSEMBLE_FILE)
_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".spm", ".tiktoken")
# Entries of `config.json` that point to code beside it, which publishing adds.
CODE_ENTRIES = ("auto_map", "custom_pipelines")
# Numbers of the encoder's configuration with these in their name count modules that are made one by one.
_COUNTS = ("layer", "expert", "block", "group", "stage")
# The number of weights that the model may have which is being loaded, see `check_size`.
_MAX_WEIGHTS: ContextVar[int | None] = ContextVar("max_weights", default=None)


# ---- Before loading ----


def check_model_files(
    name_or_path: str | os.PathLike, hub_kwargs: Mapping[str, Any], use_safetensors: bool
) -> int | None:
    """
    Checks what transformers would trust, before it opens the weights of a model, and returns the number of weights.

    Raises an error if files are links or names that lead out of the folder, if the weights are only there as a pickle
    (with `use_safetensors`; otherwise returns `None`), or if the configuration would make more modules than these
    weights can fill.
    """
    check_links(os.path.join(name_or_path, hub_kwargs.get("subfolder") or ""))
    index = resolve_file(name_or_path, index_name(SAFE_WEIGHTS_NAME), required=False, **hub_kwargs)
    if index is not None:
        paths = [resolve_file(name_or_path, name, **hub_kwargs) for name in sorted(set(read_index(index).values()))]
    else:
        paths = [resolve_file(name_or_path, SAFE_WEIGHTS_NAME, required=False, **hub_kwargs)]
        if paths == [None]:
            if use_safetensors:
                raise_without_safetensors(name_or_path, hub_kwargs)
            return None
    sizes = [size for path in paths for size in _tensor_sizes(str(path))]
    path = str(resolve_file(name_or_path, CONFIG_NAME, **hub_kwargs))
    content = read_json(path)
    _check_encoder_config(content.get("encoder_config"), len(sizes), path)
    # Quantised weights are stored as up to eight in a number.
    return sum(sizes) * (8 if "quantization_config" in content else 1)


def raise_without_safetensors(name_or_path: str | os.PathLike, hub_kwargs: Mapping[str, Any]) -> None:
    """Raises the error about missing safetensors; does nothing if there is no pickle either."""
    hub_kwargs = {key: value for key, value in hub_kwargs.items() if key in HUB_KWARGS}
    for name in (WEIGHTS_NAME, f"{WEIGHTS_NAME}.index.json"):
        if resolve_file(name_or_path, name, required=False, **hub_kwargs) is not None:
            raise OSError(
                f"`{name_or_path}` has its weights only as a pickle, `{name}`, which can run code when it is loaded. "
                "If you trust it, convert it once: `AutoModel.from_pretrained(name, use_safetensors=False)"
                ".save_pretrained(folder)`, with its tokenizer, and use that folder."
            )


def _tensor_sizes(path: str) -> list[int]:
    """The number of elements of each tensor in a file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]
    except SafetensorError as error:
        raise ValueError(f"The weights `{path}` are damaged ({error}). Save or download them again.") from error


def _check_encoder_config(content: Any, num_tensors: int, path: str) -> None:
    """Raises if a configuration asks for more modules than there are weights, or for code of another repository."""
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        if "attn_implementation" in name and "/" in str(value):
            raise ValueError(
                f"`{path}` asks for the kernels `{value}` of the Hub (`{name}`). Kernels are code: remove the entry, "
                "and pass `attn_implementation` if you trust them."
            )
        if isinstance(value, int) and value > num_tensors and any(count in name for count in _COUNTS):
            raise ValueError(
                f"`{path}` is damaged: `{name}` is {value}, but the weights have only {num_tensors} tensors. Save or "
                "download it again."
            )
        if isinstance(value, dict):  # parts of encoders such as T5's or those of several modalities
            _check_encoder_config(value, num_tensors, path)


@contextmanager
def guarded(name_or_path: str | os.PathLike, num_weights: int | None) -> Iterator[None]:
    """Names the files in errors that transformers raises for damaged ones, and limits the model for [`check_size`]."""
    # Files lack what can be computed, such as sinusoidal positions.
    token = _MAX_WEIGHTS.set(None if num_weights is None else 2 * num_weights + (1 << 22))
    try:
        yield
    except (ImportError, MemoryError, OSError):
        raise
    except Exception as error:
        # The messages of transformers seldom name a file, and types of errors depend on its version.
        raise ValueError(
            f"The model `{name_or_path}` cannot be loaded from its `{CONFIG_NAME}` and `{SAFE_WEIGHTS_NAME}` "
            f"({type(error).__name__}: {error}). If you have not passed options, save or download it again."
        ) from error
    finally:
        _MAX_WEIGHTS.reset(token)


def check_size(model: nn.Module) -> None:
    """
    Raises if a model that is being loaded is much larger than its files: its configuration is damaged or hostile.

    transformers makes it without memory first, and would allocate the memory before it compares shapes.
    """
    limit = _MAX_WEIGHTS.get()
    if limit is None:
        return
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors = [(tensor.numel(), name) for name, tensor in model.named_parameters() if name not in tied]
    tensors += [(buffer.numel(), name) for name, buffer in model.named_buffers()]
    if sum(size for size, _ in tensors) > limit:
        size, name = max(tensors)
        raise ValueError(f"by its configuration, `{name}` has {size} numbers, more than the files of the weights")


# ---- After loading ----


def check_loaded(model: nn.Module, info: Mapping[str, Any], source: str | os.PathLike) -> None:
    """Raises if weights are missing, by the `output_loading_info` of `from_pretrained`, or not finite."""
    path = f"`{os.path.join(source, SAFE_WEIGHTS_NAME)}`"
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"{path} lacks the weights {', '.join(missing[:5])}. Save or download it again.")
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter.detach(), name.startswith("heads.")):
            raise ValueError(f"{path} is damaged: `{name}` has values that are not finite. Save or download it again.")


def _is_finite(tensor: torch.Tensor, is_head: bool) -> bool:
    if tensor.device.type == "meta" or not tensor.is_floating_point():
        return True
    if is_head and tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        # A beam search ranks products of these: they must not overflow.
        values = tensor.reshape(-1).numpy()
        limit = np.float32(MAX_WEIGHT)
        return first_fault(lambda begin, end: first_beyond(values, begin, end, limit), len(values)) < 0
    # A sum is three times as fast as `isfinite`, and finite only if all its terms are.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


# ---- Checksums ----


def file_digests(folder: str | os.PathLike) -> dict[str, str]:
    """Returns the sha256 checksums of the files that a model consists of, by name."""
    folder = Path(folder)
    config = folder / CONFIG_NAME
    names = read_json(config).get("members") or [] if config.is_file() else []
    members = [folder / check_plain_name(name, f"`{config}`") for name in names]
    paths = [path for part in (folder, *filter(Path.is_dir, members)) for path in sorted(part.iterdir())]
    return {
        path.relative_to(folder).as_posix(): _digest(path)
        for path in paths
        if path.is_file()
        and path.suffix in _SUFFIXES
        and path.name not in _RECORDS
        and not path.name.startswith((".", "_"))
        and not path.name.endswith(RESULTS_SUFFIX)
    }


def _digest(path: Path) -> str:
    if path.name == CONFIG_NAME:
        content = {name: value for name, value in read_json(path).items() if name not in CODE_ENTRIES}
        if isinstance(content.get("encoder_config"), dict):
            content["encoder_config"] = {**content["encoder_config"], "_name_or_path": None}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def update_digests(folder: str | os.PathLike) -> None:
    """Writes the checksums of a model that was saved over another one into the record in its folder, if it has one."""
    path = Path(folder, RECORD_FILE)
    if path.is_file():
        record = read_json(path)
        if isinstance(record, dict):
            write_json(path, {**record, "files": file_digests(folder)}, indent=1)


def recorded_digests(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> dict[str, str]:
    """Returns the checksums in the training record of a model; empty if there are none."""
    path = resolve_file(name_or_path, RECORD_FILE, required=False, **hub_kwargs)
    content = {} if path is None else read_json(path)
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        return {}
    for name in files:
        for part in name.split("/", 1):
            check_plain_name(part, f"`{path}`")
    return files


def verify_files(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> int:
    """
    Compares the files of a model with the checksums in its training record, and returns how many there are.

    Checksums find damage. They do not show who wrote a model: whoever changes a file can change the record, too.
    """
    digests = recorded_digests(name_or_path, **hub_kwargs)
    if not digests:
        raise ValueError(
            f"`{name_or_path}` has no checksums in `{RECORD_FILE}`: it was trained by hf_xmc 0.1, or saved without "
            "its record. Load it without `verify`."
        )
    for name, digest in digests.items():
        path = resolve_file(name_or_path, name, **hub_kwargs)
        if _digest(Path(str(path))) != digest:
            raise ValueError(
                f"`{path}` is not the file that was saved: its checksum differs from the one in `{RECORD_FILE}`. Save "
                "or download it again."
            )
    return len(digests)

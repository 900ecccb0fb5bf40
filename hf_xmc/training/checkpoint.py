"""What a checkpoint holds beside the model: optimiser, random numbers, the level at work. No pickle."""

from __future__ import annotations

import logging
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_matrix
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..modeling_xmc import XMCForTextClassification
from ..serialization import atomic_write, load_tensors, read_json, save_tensors, write_json
from .arguments import XMCTrainingArguments

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
OPTIMIZER_GROUPS_FILE = "optimizer.json"
RANDOM_FILE = "random_state"
LEVEL_FILE = "level_state.json"
SHORTLIST_FILE = "shortlist.safetensors"
TRAINER_STATE_FILE = "trainer_state.json"
# Written last: says which files a checkpoint consists of.
SEAL_FILE = "checkpoint.json"
# All of these, as patterns: what is in a checkpoint and not of the model.
STATE_FILES = (
    OPTIMIZER_FILE,
    OPTIMIZER_GROUPS_FILE,
    f"{RANDOM_FILE}_*",
    LEVEL_FILE,
    SHORTLIST_FILE,
    TRAINER_STATE_FILE,
    SEAL_FILE,
)


def save_optimizer(folder: str, state: dict[str, Any], scheduler: dict[str, Any]) -> None:
    """Writes the state of an optimiser and of its scheduler: tensors as safetensors, all else as JSON."""
    tensors = {
        f"{parameter}.{name}": value.detach().cpu().contiguous()
        for parameter, entries in state["state"].items()
        for name, value in entries.items()
    }
    with atomic_write(os.path.join(folder, OPTIMIZER_FILE)) as temporary:
        save_file(tensors, temporary)
    write_json(os.path.join(folder, OPTIMIZER_GROUPS_FILE), {"groups": state["param_groups"], "scheduler": scheduler})


def load_optimizer(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads what [`save_optimizer`] wrote."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in load_file(os.path.join(folder, OPTIMIZER_FILE)).items():
        parameter, name = key.split(".", 1)
        state.setdefault(int(parameter), {})[name] = value
    rest = read_json(os.path.join(folder, OPTIMIZER_GROUPS_FILE))
    return {"state": state, "param_groups": rest["groups"]}, rest["scheduler"]


def save_random_state(folder: str, process: int = 0) -> None:
    """Writes the state of all random number generators of this process."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    tensors = {"python": np.array(words, dtype=np.int64), "numpy": keys, "torch": torch.get_rng_state().numpy()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state.numpy() for i, state in enumerate(torch.cuda.get_rng_state_all())}
    name = os.path.join(folder, f"{RANDOM_FILE}_{process}")
    save_tensors(f"{name}.safetensors", tensors, "random state", {})
    rest = {"python": [version, gauss], "numpy": [kind, int(position), int(has_gauss), float(cached)]}
    write_json(f"{name}.json", rest)


def load_random_state(folder: str, process: int = 0) -> None:
    """Sets all random number generators to what [`save_random_state`] wrote; does nothing where there is no file."""
    name = os.path.join(folder, f"{RANDOM_FILE}_{process}")
    if not os.path.isfile(f"{name}.json"):
        return
    tensors, _ = load_tensors(f"{name}.safetensors", "random state")
    rest = read_json(f"{name}.json")
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].copy(), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(tensors["torch"].copy()))
    if torch.cuda.is_available() and "cuda.0" in tensors:
        cuda = [torch.from_numpy(tensors[f"cuda.{i}"].copy()) for i in range(torch.cuda.device_count())]
        torch.cuda.set_rng_state_all(cuda)


def save_level_state(folder: str, state: dict[str, Any], shortlists: Sequence[csr_matrix | None]) -> None:
    """Writes the levels at work, with what identifies the run, and the shortlist of each that has one."""
    tensors: dict[str, np.ndarray] = {}
    for index, shortlist in enumerate(shortlists):
        if shortlist is not None:
            tensors[f"{index}.indptr"] = shortlist.indptr.astype(np.int64)
            tensors[f"{index}.indices"] = shortlist.indices.astype(np.int64)
    if tensors:
        save_tensors(os.path.join(folder, SHORTLIST_FILE), tensors, "shortlist", {})
    shapes = [None if shortlist is None else list(shortlist.shape) for shortlist in shortlists]
    write_json(os.path.join(folder, LEVEL_FILE), {**state, "shortlists": shapes})


def load_level_state(folder: str) -> tuple[dict[str, Any], list[csr_matrix | None]]:
    """Reads what [`save_level_state`] wrote."""
    state = read_json(os.path.join(folder, LEVEL_FILE))
    shortlists: list[csr_matrix | None] = []
    has_any = any(shape is not None for shape in state["shortlists"])
    tensors = load_tensors(os.path.join(folder, SHORTLIST_FILE), "shortlist")[0] if has_any else {}
    for index, shape in enumerate(state["shortlists"]):
        shortlist = None
        if shape is not None:
            indptr, indices = tensors[f"{index}.indptr"], tensors[f"{index}.indices"]
            shortlist = csr_matrix((np.ones(len(indices), dtype=np.float32), indices, indptr), shape=tuple(shape))
        shortlists.append(shortlist)
    return state, shortlists


def seal_checkpoint(folder: str | os.PathLike) -> None:
    """Writes down size and checksum of each file of a complete checkpoint."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != SEAL_FILE)
    files = {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in paths}
    write_json(Path(folder, SEAL_FILE), {"files": files})


def find_damage(folder: str | os.PathLike) -> str | None:
    """What is wrong with a checkpoint: a text for a message, or `None`."""
    seal = Path(folder, SEAL_FILE)
    if not seal.is_file():
        return f"it has no `{SEAL_FILE}`, so it was not written to its end"
    try:
        files = read_json(seal)["files"]
    except (ValueError, KeyError):
        return f"its `{SEAL_FILE}` is damaged"
    for name, (size, checksum) in files.items():
        path = Path(folder, name)
        if not path.is_file():
            return f"`{name}` is missing"
        if path.stat().st_size != size:
            return f"`{name}` has {path.stat().st_size:,} bytes in place of {size:,}"
        if _checksum(path) != checksum:
            return f"the content of `{name}` is not what was written"
    return None


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def last_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint in a folder that is whole; a damaged one is named in a warning and left alone."""
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdigit():
            found.append((int(step), path))
    for _, path in sorted(found, reverse=True):
        damage = find_damage(path)
        if damage is None:
            return str(path)
        logger.warning(
            "The checkpoint `%s` cannot be used: %s. An earlier one is taken, if there is one.", path, damage
        )
    return None


def find_checkpoint(args: XMCTrainingArguments, resume: str | bool | None) -> str | None:
    """Returns the checkpoint to resume from: `resume`, or with `True` the last complete one, if any."""
    if not resume:
        return None
    if resume is True:
        if not args.trains_encoder:
            return None
        checkpoint = last_checkpoint(str(args.output_dir))
        if checkpoint is None:
            logger.warning("`%s` has no checkpoint yet: training starts from the beginning.", args.output_dir)
        return checkpoint
    folder = os.fspath(resume)
    if not args.trains_encoder:
        raise ValueError(
            f"The method {args.method!r} has no checkpoints such as `{folder}`. Pass `resume_from_checkpoint=True` to "
            "reuse the finished pieces in `output_dir`."
        )
    if not os.path.isfile(os.path.join(folder, LEVEL_FILE)):
        raise FileNotFoundError(
            f"`{folder}` is not a checkpoint of hf_xmc: it has no `{LEVEL_FILE}`. Pass a folder `checkpoint-N`."
        )
    damage = find_damage(folder)
    if damage is not None:
        raise ValueError(
            f"The checkpoint `{folder}` is damaged: {damage}. Pass another one, or `True` for the last complete one."
        )
    return folder


def load_checkpoint(folder: str, args: XMCTrainingArguments) -> XMCForTextClassification:
    """Loads the model of a checkpoint."""
    attention = args.encoder_attn_implementation
    options = {} if attention is None else {"attn_implementation": attention}
    return XMCForTextClassification.from_pretrained(folder, **options)

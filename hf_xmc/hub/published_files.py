"""Which files of a model's folder are published, and what is left out of them."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from ..remote_code import CLASSES, CODE_ENTRIES, member_folders
from ..serialization import ENSEMBLE_FILE, RECORD_FILE, RESULTS_SUFFIX, TRAINING_ARGS_FILE, read_json
from ..training.record import public_name
from .model_card import CARD_FILE

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
# Folders of a training, temporary files and caches, results (which the record has, too, without the names of folders);
# `.eval_results` is the one hidden folder that is published.
_PRIVATE = ("checkpoint-*", "_*", ".*", "*.tmp", f"*{RESULTS_SUFFIX}")
_EVAL_RESULTS = ".eval_results"
# Folders that ensembles are saved with.
MEMBER = re.compile(r"member-\d+")

logger = logging.getLogger(__name__)


def check_saved_model(folder: str | os.PathLike) -> None:
    """Raises where a folder holds no model of hf_xmc."""
    path = Path(folder, CONFIG_NAME)
    if not path.is_file():
        raise FileNotFoundError(f"`{folder}` holds no saved model: it has no `{CONFIG_NAME}`.")
    kind = read_json(path).get("model_type")
    if kind not in CLASSES:
        raise ValueError(f"`{folder}` holds a model of the type {kind!r}, which is none of hf_xmc's.")


def publishable_files(folder: str | os.PathLike, ignore: Sequence[str] = ()) -> list[str]:
    """
    Files of a folder that are uploaded: no checkpoints, no hidden or temporary files, no pickles, no models that an
    earlier ensemble has left there.

    Args:
        folder (`str` or `os.PathLike`):
            The folder.
        ignore (`Sequence[str]`, *optional*):
            Further patterns of names to leave out.
    """
    found = []
    members = member_folders(folder)
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder)
        parts = name.parts[1:] if name.parts[0] == _EVAL_RESULTS else name.parts
        private = any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in (*_PRIVATE, *ignore))
        left_over = bool(MEMBER.fullmatch(name.parts[0])) and name.parts[0] not in members
        if private or left_over or not path.is_file():
            continue
        if is_pickle(path):
            logger.warning("`%s` is not uploaded: a pickle can run anything on the machine that opens it.", path)
            continue
        found.append(name.as_posix())
    return found


def is_pickle(path: str | os.PathLike) -> bool:
    """Whether a file is a pickle, by its name or its first bytes; the archives of `torch.save` are some, too."""
    path = Path(path)
    if path.suffix in _PICKLE_SUFFIXES:
        return True
    with open(path, "rb") as file:
        start = file.read(2)
    if start == b"PK" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def is_record(name: str) -> bool:
    """Whether a file is about a model, or about one of an ensemble, and not a part of it."""
    first, _, rest = name.partition("/")
    name = rest if MEMBER.fullmatch(first) else name
    known = (CARD_FILE, RECORD_FILE, TRAINING_ARGS_FILE, ENSEMBLE_FILE)
    return name in known or name.endswith(".png") or name.startswith(f"{_EVAL_RESULTS}/")


def published_json(path: str | os.PathLike) -> dict[str, Any] | None:
    """A JSON file as it is published, where that is not as it is: without code and without folders of this machine."""
    if Path(path).name == CONFIG_NAME:
        config = {key: value for key, value in read_json(path).items() if key not in CODE_ENTRIES}
        encoder = config.get("encoder_config") or {}
        if "_name_or_path" in encoder:
            config["encoder_config"] = {**encoder, "_name_or_path": public_name(encoder["_name_or_path"])}
        return config
    if Path(path).name == TRAINING_ARGS_FILE:
        options = read_json(path)
        return {**options, "encoder_name": public_name(options.get("encoder_name")), "embedding_cache": None}
    if Path(path).name == ENSEMBLE_FILE:
        facts = read_json(path)
        return {**facts, "models": [public_name(name) for name in facts.get("models") or []]}
    return None

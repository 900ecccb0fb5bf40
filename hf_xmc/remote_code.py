"""Models that carry the code that loads them, for use with `trust_remote_code=True`: saving and uploading."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from .configuration_xmc import TASK
from .knn_ranker import KNN_FILE, KNN_VECTORS_FILE
from .label_tree import TREE_FILE
from .label_vectors import LABEL_VECTORS_FILE
from .labels import LABELS_NAME
from .linear_ranker import RANKER_FILE
from .loading import CODE_ENTRIES, update_digests
from .scorer import SCORER_FILE
from .serialization import (
    MAX_SHARD_SIZE,
    atomic_write,
    read_json,
    remove_files,
    sharded_files,
    staged_files,
    write_json,
    written,
)
from .tfidf import TFIDF_FILE, VOCABULARY_FILE

# All classes are loaded from this module: transformers imports each module that `config.json` names, with all that it
# imports, as a separate copy.
_ENTRY = "pipeline_xmc"
# Names of the configuration and model classes by model type.
CLASSES = {
    "hf-xmc": ("XMCConfig", "XMCForTextClassification"),
    "hf-xmc-ensemble": ("XMCEnsembleConfig", "XMCEnsemble"),
}
_CUSTOM_PIPELINES = {
    TASK: {"impl": f"{_ENTRY}.ExtremeTextClassificationPipeline", "pt": ["AutoModel"], "default": {}, "type": "text"}
}
RANKER_TREE_FILE = "ranker_tree.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHARDED_FILES = (SAFE_WEIGHTS_NAME, RANKER_FILE, LABEL_VECTORS_FILE, KNN_FILE, KNN_VECTORS_FILE)
_SINGLE_FILES = (LABELS_NAME, TREE_FILE, RANKER_TREE_FILE, TFIDF_FILE, VOCABULARY_FILE, SCORER_FILE, *TOKENIZER_FILES)
_PUSH_KWARGS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


def code_files(folder: str | os.PathLike = Path(__file__).parent) -> list[Path]:
    """Returns the modules in a folder that load a model and predict with it: the pipeline and its imports."""
    entry = Path(folder, f"{_ENTRY}.py")
    return sorted({entry, *map(Path, get_relative_import_files(entry))})


def add_code(folder: str | os.PathLike) -> None:
    """Copies the code into the folder of a model and adds it to `config.json`."""
    for source in code_files():
        with atomic_write(Path(folder, source.name)) as temporary:
            shutil.copyfile(source, temporary)
    path = Path(folder, CONFIG_NAME)
    config = read_json(path)
    config_class, model_class = (f"{_ENTRY}.{name}" for name in CLASSES[config["model_type"]])
    auto_map = dict.fromkeys(("AutoModel", "AutoModelForSequenceClassification"), model_class)
    config.update(auto_map={"AutoConfig": config_class, **auto_map}, custom_pipelines=_CUSTOM_PIPELINES)
    write_json(path, dict(sorted(config.items())), indent=2)


def remove_code(folder: str | os.PathLike) -> None:
    """Removes the code of a model, of this or an earlier version; does nothing if the model has none."""
    config = _read_config(folder)
    if "auto_map" not in config:
        return
    # The modules of an earlier version have other names than ours.
    sources = code_files(folder) if Path(folder, f"{_ENTRY}.py").is_file() else code_files()
    plain = {key: value for key, value in config.items() if key not in CODE_ENTRIES}
    write_json(Path(folder, CONFIG_NAME), plain, indent=2)
    for source in sources:
        Path(folder, source.name).unlink(missing_ok=True)


def model_files(folder: str | os.PathLike) -> list[str]:
    """Returns the names of the files of a model in a folder, without its configuration."""
    return [*(name for filename in _SHARDED_FILES for name in sharded_files(folder, filename)), *_SINGLE_FILES]


def member_folders(folder: str | os.PathLike) -> list[str]:
    """Returns the subfolders with the models of an ensemble; empty for any other model."""
    names = _read_config(folder).get("members") or []
    return [name for name in names if os.path.basename(name) == name and name not in ("", os.curdir, os.pardir)]


def _read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """The content of `config.json`, or nothing if it is missing or damaged and about to be replaced."""
    try:
        return read_json(Path(folder, CONFIG_NAME))
    except (FileNotFoundError, ValueError):
        return {}


class SelfContainedModel(PreTrainedModel):
    """Base class of models with several files: saves and uploads all of them, optionally with the code."""

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        self_contained: bool | None = None,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        **kwargs: Any,
    ) -> None:
        """
        Writes all files of the model. The folder it was loaded from may be overwritten.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder; created if it does not exist.
            is_main_process (`bool`, *optional*, defaults to `True`):
                Only the main process writes.
            push_to_hub (`bool`, *optional*, defaults to `False`):
                Whether to upload the model afterwards, to `repo_id` or a repository named like the folder.
            self_contained (`bool`, *optional*):
                Whether to add the code that loads the model, so that it can be used without this package and with
                `trust_remote_code=True`. By default, only if the model was loaded with its code.
            max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`):
                Largest size of a file of weights or of the ranker.
            kwargs:
                Passed to [`~transformers.PreTrainedModel.save_pretrained`] or, with `push_to_hub`, to
                [`~XMCForTextClassification.push_to_hub`].
        """
        hub_kwargs = {name: kwargs.pop(name) for name in _PUSH_KWARGS if name in kwargs}
        had_code = getattr(self.config, "auto_map", None) is not None
        weights: dict[str, Any] = {"max_shard_size": max_shard_size, **kwargs}
        if not is_main_process:
            self._save_weights(save_directory, is_main_process=False, **weights)
            return
        with staged_files(save_directory, last=CONFIG_NAME) as folder:
            self._save_parts(folder, max_shard_size)
            with self._config_without_code(), written(save_directory):
                self._save_weights(folder, is_main_process=True, **weights)
            if had_code if self_contained is None else self_contained:
                add_code(folder)
            # Files of another model in this folder would be taken for parts of this one.
            remove_code(save_directory)
            remove_files(save_directory, [CONFIG_NAME, *member_folders(save_directory), *model_files(save_directory)])
        update_digests(save_directory)
        if push_to_hub:
            repo_id = hub_kwargs.pop("repo_id", os.path.basename(os.path.abspath(save_directory)))
            # The base class would upload only the files that it has written itself.
            self.push_to_hub(
                repo_id,
                token=kwargs.get("token"),
                self_contained=self_contained,
                max_shard_size=max_shard_size,
                **hub_kwargs,
            )

    def _save_parts(self, folder: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes everything but the configuration and the weights, which are written last."""
        raise NotImplementedError

    def _save_weights(self, folder: str | os.PathLike, **kwargs: Any) -> None:
        """Writes the configuration and the weights."""
        super().save_pretrained(folder, **kwargs)

    def push_to_hub(self, repo_id: str, *, self_contained: bool | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """
        Uploads all files of the model, and a model card if the repository has none.

        Args:
            repo_id (`str`):
                Name of the repository; created if it does not exist.
            self_contained (`bool`, *optional*, defaults to `True`):
                Whether to add the code that loads the model, so that it can be used without this package.
            kwargs:
                `private`, `token`, `revision`, `create_pr`, `commit_message`, `commit_description`, `max_shard_size`
                and `tags`, as in [`~transformers.PreTrainedModel.push_to_hub`].
        """
        # The code that a model carries does not include `hub/`.
        if find_spec(f"{__package__}.hub") is None:
            return super().push_to_hub(repo_id, **kwargs)
        push_model = import_module(f"{__package__}.hub.upload").push_model
        return push_model(self, repo_id, self_contained=self_contained is not False, **kwargs)

    @contextmanager
    def _config_without_code(self) -> Iterator[None]:
        """Hides the entries of code in the configuration, to which `pipeline()` adds classes that are not JSON."""
        entries = self.config.__dict__
        hidden = {name: entries.pop(name) for name in CODE_ENTRIES if name in entries}
        try:
            yield
        finally:
            entries.update(hidden)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: `save_pretrained` adds the code."""

"""Models that carry the code that loads them: saving with and without it, and uploading."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME

from .configuration_xmc import TASK
from .serialization import MAX_SHARD_SIZE, atomic_write, read_json, remove_files, staged_files, write_json

_PUSH_KWARGS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


def member_folders(folder: str | os.PathLike) -> list[str]:
    """Returns the subfolders with the models of an ensemble; empty for any other model."""
    try:
        names = read_json(os.path.join(folder, CONFIG_NAME)).get("members") or []
    except (FileNotFoundError, ValueError):  # a damaged file is about to be replaced
        return []
    return [name for name in names if os.path.basename(name) == name and name not in ("", os.curdir, os.pardir)]


class SelfContainedModel(PreTrainedModel):
    """Base class: a model of several files that is saved and uploaded whole, with its code where that is wanted."""

    # What uploads a model, with its card; set by the package. Code that travels with a model has the base class's way.
    _publish: ClassVar[Callable[..., Any] | None] = None

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
        Writes all files of the model. The folder it was loaded from is a good place, too.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder, made where it is missing.
            is_main_process (`bool`, *optional*, defaults to `True`):
                Only the main process writes.
            push_to_hub (`bool`, *optional*, defaults to `False`):
                Whether to upload the model afterwards, to `repo_id` or a repository named like the folder.
            self_contained (`bool`, *optional*):
                Whether the code that loads the model is written along, for those who have not this package: they pass
                `trust_remote_code=True`. By default as the model was loaded; a new one is without.
            max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`):
                Size above which weights and ranker are written as several files.
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
            with self._config_without_code():
                self._save_weights(folder, is_main_process=True, **weights)
            if had_code if self_contained is None else self_contained:
                add_code(folder)
            # What another model has left in this folder would be taken for a part of this one.
            remove_code(save_directory)
            left = [*member_folders(save_directory), *self._files_in(save_directory)]
            remove_files(save_directory, [CONFIG_NAME, *left])
        if push_to_hub:
            repo_id = hub_kwargs.pop("repo_id", os.path.basename(os.path.abspath(save_directory)))
            # The base class would upload only what itself has written.
            self.push_to_hub(
                repo_id,
                token=kwargs.get("token"),
                self_contained=self_contained,
                max_shard_size=max_shard_size,
                **hub_kwargs,
            )

    def _save_parts(self, folder: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes everything but the configuration and the weights, which come last and make the model complete."""
        raise NotImplementedError

    def _files_in(self, folder: str | os.PathLike) -> list[str]:
        """Names of the files in a folder that are of a model like this one and may be of another one."""
        return []

    def _save_weights(self, folder: str | os.PathLike, **kwargs: Any) -> None:
        """Writes the configuration and the weights."""
        super().save_pretrained(folder, **kwargs)

    def push_to_hub(self, repo_id: str, *, self_contained: bool | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """
        Uploads all files of the model, and a card where the repository has none.

        Args:
            repo_id (`str`):
                Name of the repository, made where it is missing.
            self_contained (`bool`, *optional*):
                Whether the code that loads the model goes along, so that it can be used without this package. By
                default it does.
            kwargs:
                `private`, `token`, `revision`, `create_pr`, `commit_message`, `commit_description`, `max_shard_size`
                and `tags`, as in [`~transformers.PreTrainedModel.push_to_hub`].
        """
        if self._publish is None:
            # Loaded from code of its own, and saved with it.
            return super().push_to_hub(repo_id, **kwargs)
        return self._publish(repo_id, self_contained=self_contained is not False, **kwargs)

    @contextmanager
    def _config_without_code(self) -> Iterator[None]:
        """Hides what `config.json` said of code; `pipeline()` has put classes into it that cannot be written."""
        entries = self.config.__dict__
        hidden = {name: entries.pop(name) for name in CODE_ENTRIES if name in entries}
        try:
            yield
        finally:
            entries.update(hidden)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: a model saves its code by itself (`runtime_code.py`), and all of it."""


# All classes are asked of one module: transformers gives each module that it is asked for, with what that imports, a
# place of its own, and there would be three copies of every class.
_ENTRY = "pipeline_xmc"
# Classes of configuration and model by the type in `config.json`.
CLASSES = {
    "hf-xmc": ("XMCConfig", "XMCForTextClassification"),
    "hf-xmc-ensemble": ("XMCEnsembleConfig", "XMCEnsemble"),
}
CODE_ENTRIES = ("auto_map", "custom_pipelines")
_CUSTOM_PIPELINES = {
    TASK: {"impl": f"{_ENTRY}.ExtremeTextClassificationPipeline", "pt": ["AutoModel"], "default": {}, "type": "text"}
}


def code_files() -> list[Path]:
    """The modules that load a model and predict with it: what the pipeline imports, and what that imports."""
    entry = Path(__file__).with_name(f"{_ENTRY}.py")
    return sorted({entry, *map(Path, get_relative_import_files(entry))})


def with_code(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a `config.json` with the entries that point to the code beside it."""
    config_class, model_class = (f"{_ENTRY}.{name}" for name in CLASSES[config["model_type"]])
    auto_map = {
        "AutoConfig": config_class,
        "AutoModel": model_class,
        "AutoModelForSequenceClassification": model_class,
    }
    return dict(sorted({**config, "auto_map": auto_map, "custom_pipelines": _CUSTOM_PIPELINES}.items()))


def add_code(folder: str | os.PathLike) -> None:
    """Puts the code into the folder of a model and makes its `config.json` point to it."""
    for source in code_files():
        with atomic_write(Path(folder, source.name)) as temporary:
            shutil.copyfile(source, temporary)
    path = Path(folder, CONFIG_NAME)
    write_json(path, with_code(read_json(path)), indent=2)


def remove_code(folder: str | os.PathLike) -> None:
    """Undoes [`add_code`]; does nothing to the folder of a model without code."""
    path = Path(folder, CONFIG_NAME)
    if not path.is_file():
        return
    try:
        config = read_json(path)
    except ValueError:  # a damaged file is about to be replaced
        return
    if "auto_map" in config:
        plain = {key: value for key, value in config.items() if key not in CODE_ENTRIES}
        write_json(path, plain, indent=2)
        for source in code_files():
            Path(folder, source.name).unlink(missing_ok=True)

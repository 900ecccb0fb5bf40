"""The code that travels with a self-contained model, so that it loads where the package is not installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME

from .configuration_xmc import TASK
from .files import atomic_write, read_json, write_json

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

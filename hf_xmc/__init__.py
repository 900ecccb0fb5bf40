"""
Extreme multi-label text classification in the Hugging Face ecosystem.

Importing the package registers its configurations with `AutoConfig`, now or as soon as transformers is imported. The
models (`AutoModel`, `AutoModelForSequenceClassification`) and the pipeline of the task `extreme-text-classification`
are registered when the first configuration is created, which is how `AutoModel.from_pretrained` and `pipeline` start.
All other modules are imported on first use, so that `hf-xmc --help` does without torch and transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .configuration_xmc import XMCConfig, XMCEnsembleConfig
    from .data import load_label_texts, load_sample, load_vocabulary, load_xmc_dataset, prepare_dataset
    from .ensemble_xmc import XMCEnsemble
    from .evaluation import XMCMetrics
    from .features import Features
    from .knn_ranker import KNNRanker
    from .label_tree import LabelTree
    from .labels import Labels
    from .linear_ranker import LinearRanker
    from .modeling_xmc import XMCForTextClassification
    from .pipeline_xmc import ExtremeTextClassificationPipeline
    from .tfidf import TfidfFeaturizer
    from .training.arguments import XMCTrainingArguments
    from .training.run import train
    from .training.trainer import XMCTrainer
    from .vocabulary import LabelVocabulary

_NAMES = {
    "configuration_xmc": ("TASK", "XMCConfig", "XMCEnsembleConfig"),
    "data": ("load_label_texts", "load_sample", "load_vocabulary", "load_xmc_dataset", "prepare_dataset"),
    "ensemble_xmc": ("XMCEnsemble",),
    "evaluation": ("XMCMetrics",),
    "features": ("Features",),
    "knn_ranker": ("KNNRanker",),
    "label_tree": ("LabelTree",),
    "labels": ("Labels",),
    "linear_ranker": ("LinearRanker",),
    "modeling_xmc": ("XMCForTextClassification",),
    "pipeline_xmc": ("ExtremeTextClassificationPipeline",),
    "tfidf": ("TfidfFeaturizer",),
    "training.arguments": ("XMCTrainingArguments",),
    "training.run": ("train",),
    "training.trainer": ("XMCTrainer",),
    "vocabulary": ("LabelVocabulary",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ExtremeTextClassificationPipeline",
    "Features",
    "KNNRanker",
    "LabelTree",
    "LabelVocabulary",
    "Labels",
    "LinearRanker",
    "TfidfFeaturizer",
    "XMCConfig",
    "XMCEnsemble",
    "XMCEnsembleConfig",
    "XMCForTextClassification",
    "XMCMetrics",
    "XMCTrainer",
    "XMCTrainingArguments",
    "load_label_texts",
    "load_sample",
    "load_vocabulary",
    "load_xmc_dataset",
    "pipeline",
    "prepare_dataset",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def pipeline(
    model: str | os.PathLike | XMCForTextClassification | XMCEnsemble, **kwargs: Any
) -> ExtremeTextClassificationPipeline:
    """
    Creates the pipeline of a model: `transformers.pipeline` with the task set.

    Args:
        model (`str`, `os.PathLike`, [`XMCForTextClassification`] or [`XMCEnsemble`]):
            Folder or Hub id of a model, or a loaded model.
        kwargs:
            Passed to `transformers.pipeline`: `revision`, `token`, `device`, `top_k`, `batch_size` and the like.
    """
    from transformers import pipeline as make_pipeline

    from .configuration_xmc import TASK

    _register_models()
    return make_pipeline(TASK, model=model, **kwargs)


@cache
def _register_models() -> None:
    from transformers import AutoModel, AutoModelForSequenceClassification
    from transformers.pipelines import PIPELINE_REGISTRY

    from .configuration_xmc import TASK, XMCConfig, XMCEnsembleConfig
    from .ensemble_xmc import XMCEnsemble
    from .modeling_xmc import XMCForTextClassification
    from .pipeline_xmc import ExtremeTextClassificationPipeline

    for config_class, model_class in ((XMCConfig, XMCForTextClassification), (XMCEnsembleConfig, XMCEnsemble)):
        for auto_class in (AutoModel, AutoModelForSequenceClassification):
            auto_class.register(config_class, model_class, exist_ok=True)
    if TASK not in PIPELINE_REGISTRY.supported_tasks:  # avoids a warning
        PIPELINE_REGISTRY.register_pipeline(TASK, ExtremeTextClassificationPipeline, pt_model=AutoModel, type="text")


_AUTO_CONFIG, _CONFIGURATIONS = "transformers.models.auto.configuration_auto", f"{__name__}.configuration_xmc"


def _register_configurations() -> None:
    """Registers the configurations. Called when either module is imported; the second one completes it."""
    if _CONFIGURATIONS not in sys.modules:
        import_module(_CONFIGURATIONS)  # which calls this function again
        return
    module, auto = sys.modules[_CONFIGURATIONS], sys.modules[_AUTO_CONFIG]
    if not hasattr(module, "RegisteredTask"):  # it is being imported, and will call this function at its end
        return
    for config_class in (module.XMCConfig, module.XMCEnsembleConfig):
        auto.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    module.SelfContainedConfig.custom_pipelines = module.RegisteredTask({module.TASK: {}})
    module.SelfContainedConfig._register_models = _register_models


class _RegisterAfterImport:
    """Finder that calls `_register_configurations` after the import of either module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in (_AUTO_CONFIG, _CONFIGURATIONS) else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register_configurations()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _RegisterAfterImport)  # type: ignore[arg-type]
if _AUTO_CONFIG in sys.modules:
    _register_configurations()

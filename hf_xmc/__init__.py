"""
Extreme multi-label text classification in the Hugging Face ecosystem.

Importing the package registers its configurations with `AutoConfig`. The models (`AutoModel`,
`AutoModelForSequenceClassification`) and the pipeline of the task `extreme-text-classification` are registered when
the first configuration is created, which is how `AutoModel.from_pretrained` and `pipeline` start. All other modules
are imported on first use.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from .configuration_xmc import TASK, RegisteredTask, SelfContainedConfig, XMCConfig, XMCEnsembleConfig
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .data import load_label_texts, load_sample, load_xmc_dataset, prepare_dataset
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
    from .training.trainer import XMCTrainer

_LAZY = {
    "ExtremeTextClassificationPipeline": "pipeline_xmc",
    "Features": "features",
    "LabelTree": "label_tree",
    "Labels": "labels",
    "LinearRanker": "linear_ranker",
    "KNNRanker": "knn_ranker",
    "TfidfFeaturizer": "tfidf",
    "XMCEnsemble": "ensemble_xmc",
    "XMCForTextClassification": "modeling_xmc",
    "XMCMetrics": "evaluation",
    "XMCTrainer": "training.trainer",
    "XMCTrainingArguments": "training.arguments",
    "load_label_texts": "data",
    "load_sample": "data",
    "load_xmc_dataset": "data",
    "prepare_dataset": "data",
}

__all__ = [
    "ExtremeTextClassificationPipeline",
    "Features",
    "KNNRanker",
    "LabelTree",
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
    "load_xmc_dataset",
    "pipeline",
    "prepare_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
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

    _register_models()
    return make_pipeline(TASK, model=model, **kwargs)


def _register_configurations() -> None:
    for config_class in (XMCConfig, XMCEnsembleConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    SelfContainedConfig.custom_pipelines = RegisteredTask({TASK: {}})
    SelfContainedConfig._register_models = _register_models


@cache
def _register_models() -> None:
    from transformers import AutoModel, AutoModelForSequenceClassification
    from transformers.pipelines import PIPELINE_REGISTRY

    from .ensemble_xmc import XMCEnsemble
    from .modeling_xmc import XMCForTextClassification
    from .pipeline_xmc import ExtremeTextClassificationPipeline

    for config_class, model_class in ((XMCConfig, XMCForTextClassification), (XMCEnsembleConfig, XMCEnsemble)):
        for auto_class in (AutoModel, AutoModelForSequenceClassification):
            auto_class.register(config_class, model_class, exist_ok=True)
    if TASK not in PIPELINE_REGISTRY.supported_tasks:  # avoids a warning
        PIPELINE_REGISTRY.register_pipeline(TASK, ExtremeTextClassificationPipeline, pt_model=AutoModel, type="text")


_register_configurations()

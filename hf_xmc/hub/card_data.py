"""Content of a model card, read from the folder of the model."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData
from transformers.utils import CONFIG_NAME

from ..configuration_xmc import TASK, XMCConfig, XMCEnsembleConfig
from ..labels import Labels
from ..serialization import TRAINING_ARGS_FILE, read_json
from ..training.record import TrainingRecord, is_hub_id, public_name
from .citations import Paper, paper_of

LIBRARY = "hf_xmc"
# Metrics that a card reports.
_KINDS, _KS = ("P", "nDCG", "PSP"), (1, 3, 5)
_METRIC_NAMES = {"P": "precision", "nDCG": "nDCG", "PSP": "propensity-scored precision"}
# Options that the table of a card leaves out.
_HIDDEN_OPTIONS = ("encoder_name", "embedding_cache", "num_threads", "eval_ks")


@dataclass
class CardOptions:
    """
    Content of a card that the files of the model do not contain.

    Args:
        model_name (`str`, *optional*): Hub id; the name of the folder by default.
        dataset (`str`, *optional*): Name of the data or its Hub id, if the training record lacks it.
        base_model (`str`, *optional*): Hub id of the encoder, if the training started from a folder.
        license (`str`, *optional*): Licence of the model, such as `cc-by-4.0`.
        language (`str` or `list[str]`, *optional*): Language of the texts, such as `en`.
        tags (`list[str]`, *optional*): Additional tags.
    """

    model_name: str | None = None
    dataset: str | None = None
    base_model: str | None = None
    license: str | None = None
    language: str | list[str] | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class ModelSummary:
    """
    What the folder of a model contains, as its card presents it.

    Args:
        folder (`Path`): The folder.
        config ([`XMCConfig`] or [`XMCEnsembleConfig`]): Configuration.
        labels ([`Labels`]): Labels.
        options (`dict[str, Any]`): Options of the training.
        record ([`TrainingRecord`]): Record of the training.
        card_options ([`CardOptions`]): Options of the card.
        members (`list[ModelSummary]`, *optional*): Summary of each model of an ensemble.
    """

    folder: Path
    config: Any
    labels: Labels
    options: dict[str, Any]
    record: TrainingRecord
    card_options: CardOptions
    members: list[ModelSummary] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | os.PathLike, card_options: CardOptions | None = None) -> ModelSummary:
        """Reads the files of a model, except its weights."""
        folder = Path(folder)
        arguments = folder / TRAINING_ARGS_FILE
        is_ensemble = read_json(folder / CONFIG_NAME).get("model_type") == XMCEnsembleConfig.model_type
        config: Any = (XMCEnsembleConfig if is_ensemble else XMCConfig).from_pretrained(folder)
        members = [cls.read(folder / name) for name in config.members] if is_ensemble else []
        return cls(
            folder=folder,
            config=config,
            labels=members[0].labels if members else Labels.from_pretrained(folder),
            options=read_json(arguments) if arguments.is_file() else {},
            record=TrainingRecord.load(folder),
            card_options=card_options or CardOptions(),
            members=members,
        )

    @property
    def models(self) -> list[ModelSummary]:
        """The models of an ensemble, or the model itself."""
        return self.members or [self]

    @property
    def model_name(self) -> str:
        """Hub id of the model, or the name of its folder."""
        return self.card_options.model_name or self.folder.resolve().name

    @property
    def dataset(self) -> str | None:
        """Name of the training data, without local directories."""
        return public_name(self.card_options.dataset or self.record.dataset)

    @property
    def base_model(self) -> str | None:
        """The encoder that the training started from."""
        name = self.options.get("encoder_name")
        if name is None and not self.members:
            name = getattr(self.config.encoder_config, "_name_or_path", None) or None
        return public_name(self.card_options.base_model or name)

    @property
    def base_models(self) -> list[str]:
        """Hub ids of the encoders of all models."""
        names = [self.base_model] if self.card_options.base_model else [model.base_model for model in self.models]
        return [name for name in dict.fromkeys(names) if name is not None and is_hub_id(name)]

    @property
    def methods(self) -> list[str]:
        """Names of the methods of all models."""
        return [*dict.fromkeys(model.config.method for model in self.models if model.config.method)]

    @property
    def papers(self) -> list[Paper]:
        """The papers of the methods."""
        return [*dict.fromkeys(paper for paper in map(paper_of, self.methods) if paper is not None)]

    @property
    def method_name(self) -> str:
        """The method as its authors write it."""
        paper = paper_of(self.config.method)
        return paper.name if paper else self.config.method or LIBRARY

    @property
    def holds_documents(self) -> bool:
        """Whether the model, or a model of the ensemble, contains its training documents."""
        return any(model.config.ranker_type == "knn" for model in self.models)

    @property
    def tree_shape(self) -> str:
        """The level sizes of the tree, such as `16 → 256 → 4,108`."""
        return " → ".join(f"{size:,}" for size in self.config.level_sizes or [])

    @property
    def reads_text(self) -> bool:
        """Whether the model takes texts instead of vectors."""
        return all(model.config.has_tfidf or model.config.encoder_config is not None for model in self.models)

    @property
    def num_bytes(self) -> int:
        """Size of the files of the model."""
        files = [path for model in self.models for path in model.folder.iterdir()]
        return sum(path.stat().st_size for path in files if path.suffix in (".safetensors", ".json", ".txt"))

    def frequent_labels(self, count: int = 8) -> list[str]:
        """Returns the labels with the most training documents, escaped for a Markdown table."""
        order = np.argsort(-self.labels.counts, kind="stable")[:count]
        return [html.escape(self.labels.names[i], quote=False).replace("|", "&#124;") for i in order]

    def rare_fraction(self, limit: int = 5) -> float:
        """Returns the fraction of the labels that have at most `limit` training documents."""
        return float((self.labels.counts <= limit).mean())

    def option_cells(self) -> dict[str, Any]:
        """Returns the options of the training that are set, as cells of a Markdown table."""
        options = {name: value for name, value in self.options.items() if value is not None}
        return {name: _cell(value) for name, value in options.items() if name not in _HIDDEN_OPTIONS}


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        # As code, because Markdown and HTML would interpret the characters of a pattern.
        return f"`{value}`".replace("|", r"\|")
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def reported(metrics: dict[str, float]) -> dict[str, float]:
    """Selects the metrics that a card reports."""
    names = [f"{kind}@{k}" for kind in _KINDS for k in _KS]
    return {name: metrics[name] for name in names if name in metrics}


def card_data(summary: ModelSummary) -> ModelCardData:
    """Returns the metadata of a card."""
    options, encoders, evaluations = summary.card_options, summary.base_models, summary.record.evaluations
    tags = ["hf-xmc", TASK, "multi-label-classification", *(["ensemble"] if summary.members else []), *summary.methods]
    return ModelCardData(
        language=options.language,
        license=options.license,
        library_name=LIBRARY,
        pipeline_tag="text-classification",
        tags=[*dict.fromkeys([*tags, *options.tags])],
        base_model=encoders if len(encoders) > 1 else next(iter(encoders), None),
        datasets=summary.dataset if is_hub_id(summary.dataset) else None,
        metrics=[*dict.fromkeys(name for one in evaluations for name in reported(one["metrics"]))] or None,
        widget=[{"text": text} for text in summary.record.examples] or None,
        model_name=summary.model_name,
        eval_results=[
            EvalResult(
                task_type="text-classification",
                task_name="Extreme multi-label text classification",
                dataset_type=dataset,
                dataset_name=dataset,
                dataset_split=split,
                metric_type=name,
                metric_name="{} at {}".format(_METRIC_NAMES[name.partition("@")[0]], name.partition("@")[2]),
                metric_value=value,
            )
            for dataset, split, name, value in _results(summary)
        ]
        or None,
    )


def eval_entries(summary: ModelSummary) -> list[EvalResultEntry]:
    """Returns the results for `.eval_results/`, which the Hub collects by dataset."""
    return [
        EvalResultEntry(dataset_id=dataset, task_id=name, value=value, notes=f"split {split}")
        for dataset, split, name, value in _results(summary)
    ]


def _results(summary: ModelSummary) -> Iterator[tuple[str, str, str, float]]:
    """Yields dataset, split, metric and value of each reported result."""
    for evaluation in summary.record.evaluations:
        for name, value in reported(evaluation["metrics"]).items():
            yield evaluation_name(summary, evaluation), evaluation["split"], name, value


def evaluation_name(summary: ModelSummary, evaluation: dict[str, Any]) -> str:
    """Returns the name of the data of an evaluation."""
    return evaluation["dataset"] or summary.dataset or "unnamed"

"""What the card of a model says, gathered from the model's folder."""

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
# What a card reports of all that is measured.
_KINDS, _KS = ("P", "nDCG", "PSP"), (1, 3, 5)
_METRIC_NAMES = {"P": "precision", "nDCG": "nDCG", "PSP": "propensity-scored precision"}


@dataclass
class CardOptions:
    """
    What a card says that no file of the model knows. Everything may be left out.

    Args:
        model_name (`str`, *optional*): Id on the Hub; the name of the folder by default.
        dataset (`str`, *optional*): Name of the data or its id on the Hub, if the record of the training has none.
        base_model (`str`, *optional*): Id on the Hub of the encoder, if the training started from a folder.
        license (`str`, *optional*): Licence of the model, such as `cc-by-4.0`.
        language (`str` or `list[str]`, *optional*): Language of the texts, such as `en`.
        tags (`list[str]`, *optional*): Further tags.
    """

    model_name: str | None = None
    dataset: str | None = None
    base_model: str | None = None
    license: str | None = None
    language: str | list[str] | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class CardFacts:
    """
    What the folder of a model tells.

    Args:
        folder (`Path`): The folder.
        config ([`XMCConfig`] or [`XMCEnsembleConfig`]): Configuration.
        labels ([`Labels`]): Labels.
        options (`dict[str, Any]`): What the model was trained with.
        record ([`TrainingRecord`]): The training.
        given ([`CardOptions`]): What the user says.
        members (`list[CardFacts]`, *optional*): The same of each model of an ensemble.
    """

    folder: Path
    config: Any
    labels: Labels
    options: dict[str, Any]
    record: TrainingRecord
    given: CardOptions
    members: list[CardFacts] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | os.PathLike, given: CardOptions | None = None) -> CardFacts:
        """
        Reads the files of a model, except its weights.

        Args:
            folder (`str` or `os.PathLike`):
                Folder of a model.
            given ([`CardOptions`], *optional*):
                What the user says.
        """
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
            given=given or CardOptions(),
            members=members,
        )

    @property
    def models(self) -> list[CardFacts]:
        """The models of an ensemble, or the model itself."""
        return self.members or [self]

    @property
    def model_name(self) -> str:
        """Id of the model on the Hub or, as long as it has none, the name of its folder."""
        return self.given.model_name or self.folder.resolve().name

    @property
    def dataset(self) -> str | None:
        """Name of the training data; of a folder only its name, as the rest is nobody's business."""
        return public_name(self.given.dataset or self.record.dataset)

    @property
    def base_model(self) -> str | None:
        """The encoder that the training started from."""
        known = self.options.get("encoder_name")
        if known is None and not self.members:
            known = getattr(self.config.encoder_config, "_name_or_path", None) or None
        return public_name(self.given.base_model or known)

    @property
    def base_models(self) -> list[str]:
        """Ids on the Hub of the encoders, of all models."""
        names = [self.base_model] if self.given.base_model else [model.base_model for model in self.models]
        return [name for name in dict.fromkeys(names) if name is not None and is_hub_id(name)]

    @property
    def methods(self) -> list[str]:
        """Names of the methods, of all models."""
        return [*dict.fromkeys(model.config.method for model in self.models if model.config.method)]

    @property
    def papers(self) -> list[Paper]:
        """The papers of the methods."""
        found = [paper_of(method) for method in self.methods]
        return [paper for place, paper in enumerate(found) if paper is not None and paper not in found[:place]]

    @property
    def method_name(self) -> str:
        """The method as its authors write it."""
        paper = paper_of(self.config.method)
        return paper.name if paper else self.config.method or LIBRARY

    @property
    def holds_documents(self) -> bool:
        """Whether training documents can be read from the model, or from one of an ensemble."""
        return any(model.config.ranker_type == "knn" for model in self.models)

    @property
    def tree_shape(self) -> str:
        """The tree in one line: `16 → 256 → 4,108`."""
        return " → ".join(f"{size:,}" for size in self.config.level_sizes or [])

    @property
    def reads_text(self) -> bool:
        """Whether the model takes texts, and not vectors."""
        return all(one.config.has_tfidf or one.config.encoder_config is not None for one in self.models)

    @property
    def num_bytes(self) -> int:
        """Size of the model's files."""
        kinds = (".safetensors", ".json", ".txt")
        files = [path for model in self.models for path in model.folder.iterdir()]
        return sum(path.stat().st_size for path in files if path.suffix in kinds)

    def frequent_labels(self, count: int = 8) -> list[str]:
        """Labels with the most training documents, written so that a table of Markdown shows them as they are."""
        order = np.argsort(-self.labels.counts, kind="stable")[:count]
        return [html.escape(self.labels.names[i], quote=False).replace("|", "&#124;") for i in order]

    def rare_share(self, limit: int = 5) -> float:
        """Part of the labels that have at most so many training documents."""
        return float((self.labels.counts <= limit).mean())

    def changed_options(self) -> dict[str, Any]:
        """The options of the training that have a value, written as cells of a table in Markdown."""
        hidden = ("encoder_name", "embedding_cache", "num_threads", "eval_ks")
        shown = {name: value for name, value in self.options.items() if value is not None and name not in hidden}
        return {name: _cell(value) for name, value in shown.items()}


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        # As code: a pattern is full of what Markdown or HTML would take for its own.
        return f"`{value}`".replace("|", r"\|")
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def reported(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that a card reports, of those measured."""
    names = [f"{kind}@{k}" for kind in _KINDS for k in _KS]
    return {name: metrics[name] for name in names if name in metrics}


def card_data(facts: CardFacts) -> ModelCardData:
    """The metadata of a card."""
    given = facts.given
    tags = ["hf-xmc", TASK, "multi-label-classification", *(["ensemble"] if facts.members else []), *facts.methods]
    encoders = facts.base_models
    return ModelCardData(
        language=given.language,
        license=given.license,
        library_name=LIBRARY,
        pipeline_tag="text-classification",
        tags=[*dict.fromkeys([*tags, *given.tags])],
        base_model=encoders if len(encoders) > 1 else next(iter(encoders), None),
        datasets=facts.dataset if is_hub_id(facts.dataset) else None,
        metrics=[*{name: None for one in facts.record.evaluations for name in reported(one["metrics"])}] or None,
        widget=[{"text": text} for text in facts.record.examples] or None,
        model_name=facts.model_name,
        eval_results=list(_eval_results(facts)) or None,
    )


def _eval_results(facts: CardFacts) -> Iterator[EvalResult]:
    for evaluation in facts.record.evaluations:
        for name, value in reported(evaluation["metrics"]).items():
            kind, _, k = name.partition("@")
            yield EvalResult(
                task_type="text-classification",
                task_name="Extreme multi-label text classification",
                dataset_type=evaluation_name(facts, evaluation),
                dataset_name=evaluation_name(facts, evaluation),
                dataset_split=evaluation["split"],
                metric_type=name,
                metric_name=f"{_METRIC_NAMES[kind]} at {k}",
                metric_value=value,
            )


def eval_entries(facts: CardFacts) -> list[EvalResultEntry]:
    """The results for `.eval_results/`, which the Hub collects by dataset."""
    return [
        EvalResultEntry(
            dataset_id=evaluation_name(facts, evaluation),
            task_id=name,
            value=value,
            notes=f"split {evaluation['split']}",
        )
        for evaluation in facts.record.evaluations
        for name, value in reported(evaluation["metrics"]).items()
    ]


def evaluation_name(facts: CardFacts, evaluation: dict[str, Any]) -> str:
    """Name of the data of an evaluation."""
    return evaluation["dataset"] or facts.dataset or "unnamed"

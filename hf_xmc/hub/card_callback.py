"""Gathers, while a model is trained, what its card says."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from ..evaluation.metrics import XMCMetrics
from ..modeling_xmc import XMCForTextClassification
from .training_record import TrainingRecord, describe_machine, describe_versions

# Examples of a card: how many, and how long they may be.
_EXAMPLES, _SHORTEST, _LONGEST = 3, 20, 300
# Documents that are timed one by one, and the seconds that this may take.
_TIMED, _TIME_LIMIT = 20, 1.0
_LOGGED = ("level", "loss", "documents_per_second")


class ModelCardCallback(TrainerCallback):
    """
    Keeps a [`TrainingRecord`] of the training it watches.

    Args:
        train_dataset (`datasets.Dataset`, *optional*):
            Training documents in the columns of [`prepare_dataset`].
        eval_dataset (`datasets.Dataset` or `dict[str, datasets.Dataset]`, *optional*):
            Documents to take examples from.
    """

    def __init__(
        self, train_dataset: Dataset | None = None, eval_dataset: Dataset | Mapping[str, Dataset] | None = None
    ) -> None:
        self.record = TrainingRecord()
        self._level = ""
        self._tuning: dict[str, float] = {}
        # When the step at work began, and the seconds of stages within it.
        self._step_start = self._staged = 0.0
        if isinstance(eval_dataset, Mapping):
            eval_dataset = next(iter(eval_dataset.values()), None)
        self._texts = _texts(eval_dataset) or _texts(train_dataset)
        self._trained_on = None if train_dataset is None else train_dataset._fingerprint
        if train_dataset is not None:
            self.record.documents = len(train_dataset)
            self.record.dataset = hub_id(train_dataset)
            self.record.split = None if train_dataset.split is None else str(train_dataset.split)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes where the training runs."""
        self.record.machine, self.record.versions = describe_machine(), describe_versions()
        self.record.levels, self._level, self._tuning = [], "", {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock of a step."""
        self._step_start, self._staged = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds a step to the time of its level; shortlist and bootstrap, made within the first one, have their own."""
        name = f"{self._level} fine-tuning".strip()
        seconds = time.perf_counter() - self._step_start - self._staged
        self._tuning[name] = self._tuning.get(name, 0.0) + seconds

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Notes the progress of a level, and in the end the time of all stages."""
        logs = logs or {}
        for name, value in logs.items():
            self._staged += float(value) if name.endswith("_seconds") and "train_runtime" not in logs else 0.0
            if begun := re.fullmatch(r"(level \d+) shortlist_seconds", name):
                self._level = begun[1]
        if "level" in logs and "loss" in logs:
            entry = {name: float(logs[name]) for name in _LOGGED if name in logs}
            self.record.levels.append({"step": state.global_step, **entry})
        if "train_runtime" in logs:
            self.record.seconds = float(logs["train_runtime"])
            stages = {name: re.fullmatch(r"train_(.+)_seconds", name) for name in logs}
            done = {found[1]: float(logs[name]) for name, found in stages.items() if found}
            self.record.stages = done | {name: round(seconds, 4) for name, seconds in self._tuning.items()}

    def add_evaluation(self, name: str, dataset: Dataset, metrics: XMCMetrics, seconds: float) -> None:
        """
        Notes the results of an evaluation of the whole model.

        Args:
            name (`str`):
                Prefix of the metrics. `test` says what the documents are, as `eval_dev` does; with `eval` alone they
                are asked for their split.
            dataset (`datasets.Dataset`): The documents.
            metrics ([`XMCMetrics`]): The results.
            seconds (`float`): How long it took.
        """
        evaluation: dict[str, Any] = {
            "dataset": hub_id(dataset) or self.record.dataset,
            "split": self._split(name, dataset),
            "documents": metrics.documents,
            "seconds": round(seconds, 3),
            "metrics": metrics.compute(),
        }
        if metrics.counts is not None:
            evaluation["by_frequency"] = metrics.by_frequency()
        self.record.add_evaluation(evaluation)

    def _split(self, name: str, dataset: Dataset) -> str:
        if name != "eval":
            return name.removeprefix("eval_")
        if dataset._fingerprint == self._trained_on:
            return "train"
        # What is held out of a split (`train_test_split`) still goes by its name.
        return name if dataset.split is None or str(dataset.split) == "train" else str(dataset.split)

    def finish(self, model: XMCForTextClassification, shows_examples: bool = False) -> None:
        """
        Times single documents and chooses examples, once the model is trained.

        Args:
            model ([`XMCForTextClassification`]):
                The trained model.
            shows_examples (`bool`, *optional*, defaults to `False`):
                Whether the card may show texts of the data.
        """
        if not self._texts or (model.tfidf is None and model.encoder is None):
            return
        if shows_examples:
            self.record.examples = [text[:_LONGEST] for text in self._texts[:_EXAMPLES]]
        model.predict(self._texts[:1])  # what happens once is no latency
        seconds: list[float] = []
        for text in self._texts:
            start = time.perf_counter()
            model.predict([text])
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > _TIME_LIMIT:
                break
        self.record.latency = {"median_ms": round(1e3 * statistics.median(seconds), 3), "documents": len(seconds)}


def hub_id(dataset: Dataset) -> str | None:
    """The id on the Hub of what a dataset was loaded from; `None` for local files."""
    sources = (dataset.info.download_checksums or {}) if dataset.info is not None else {}
    found = (re.match(r"hf://datasets/([^/]+/[^/@]+)", source) for source in sources)
    return next((match[1] for match in found if match), None)


def _texts(dataset: Dataset | None) -> list[str]:
    """Some texts, those of a good length for an example first."""
    if dataset is None or "text" not in dataset.column_names:
        return []
    texts = [text for text in dataset.select(range(min(len(dataset), 10 * _TIMED)))["text"] if text.strip()]
    fitting = [text for text in texts if _SHORTEST <= len(text) <= _LONGEST]
    return (fitting + [text for text in texts if text not in set(fitting)])[:_TIMED]

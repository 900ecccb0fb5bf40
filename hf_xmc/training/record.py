"""The record of a training (data, time, machine, results), which model cards are made of."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import TrainerCallback

from ..evaluation.metrics import XMCMetrics
from ..labels import Labels
from ..modeling_xmc import XMCForTextClassification
from ..serialization import RECORD_FILE, RESULTS_SUFFIX, read_json, write_json
from ..utils import available_cores

_EVALUATION = ("dataset", "split", "documents", "seconds", "metrics", "by_frequency")
_PACKAGES = ("hf-xmc", "transformers", "torch", "datasets", "numba", "numpy", "scipy")
# Examples of a card: how many, and their length in characters.
_EXAMPLES, _MIN_LENGTH, _MAX_LENGTH = 3, 20, 300
# Documents that are timed one by one, and the seconds after which timing stops.
_TIMED, _TIME_LIMIT = 20, 1.0
_LOGGED = ("level", "loss", "documents_per_second")


@dataclass
class TrainingRecord:
    """One training of a model."""

    dataset: str | None = None  # name of the training data, or its id on the Hub
    split: str | None = None  # such as `train` or `train+validation`
    columns: dict[str, Any] | None = None  # fields of [`FoundColumns`]
    documents: int | None = None
    data: str | None = None  # fingerprint of the documents and their labels
    seconds: float | None = None  # from features to saving
    stages: dict[str, float] = field(default_factory=dict)  # seconds of each
    # Log of the fine-tuning of an encoder: `step`, `level`, `loss`, `documents_per_second`.
    levels: list[dict[str, float]] = field(default_factory=list)
    label_texts: list[str] = field(default_factory=list)  # parts of the training that used them
    # Further documents for an earlier model: `date`, `model`, `previous_documents`, `documents`, new `labels`.
    extensions: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)  # processor, cores and accelerators
    versions: dict[str, str] = field(default_factory=dict)  # of Python and packages
    latency: dict[str, Any] | None = None  # `median_ms` per document, and how many `documents` were timed
    examples: list[str] = field(default_factory=list)  # texts to try the model on
    files: dict[str, str] = field(default_factory=dict)  # sha256 checksums of the files of the model
    # Results: `dataset`, `split`, `documents`, `seconds`, `metrics` and `by_frequency` each.
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def add_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Adds results; they replace earlier ones of the same dataset and split."""
        evaluation = {**evaluation, "dataset": public_name(evaluation.get("dataset") or self.dataset)}
        key = evaluation["dataset"], evaluation["split"]
        self.evaluations = [old for old in self.evaluations if (old["dataset"], old["split"]) != key] + [evaluation]

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the record into the folder of the model."""
        write_json(Path(folder, RECORD_FILE), asdict(self), indent=1)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> TrainingRecord:
        """
        Reads the record of a model and the results that `hf-xmc train` and `hf-xmc evaluate` wrote beside it.

        Without a record file, the record is empty except for the results.
        """
        path = Path(folder, RECORD_FILE)
        content = read_json(path) if path.is_file() else {}
        names = {entry.name for entry in fields(cls)}
        record = cls(**{name: value for name, value in content.items() if name in names})
        for _, evaluation in result_files(folder):
            if "options" not in evaluation:  # measured with the options of the model itself
                record.add_evaluation({name: evaluation[name] for name in _EVALUATION if name in evaluation})
        return record


def describe_label_texts(labels: Labels, uses: Iterable[str]) -> str | None:
    """Says how the texts of labels were used, and in which parts; `None` if they were not."""
    parts = [*uses]
    if not parts:
        return None
    counts = {
        "synonyms": sum(map(bool, labels.synonyms or ())),
        "descriptions": sum(map(bool, labels.descriptions or ())),
        "parents": sum(map(bool, labels.parents or ())),
    }
    listed = "".join(f", {count:,} with {name}" for name, count in counts.items() if count)
    texts = sum(map(bool, labels.readable_texts()))
    return f"{texts:,} of {len(labels):,} labels{listed}; used in {', '.join(parts)}"


def result_files(folder: str | os.PathLike) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields path and content of each file of results that `hf-xmc train` or `hf-xmc evaluate` wrote into a folder."""
    for path in sorted(Path(folder).glob(f"*{RESULTS_SUFFIX}")):
        content = read_json(path)
        if isinstance(content, dict) and "metrics" in content:
            yield path, content


class TrainingRecorder(TrainerCallback):
    """Fills a [`TrainingRecord`] during training; `eval_dataset` gives examples of texts."""

    def __init__(
        self, train_dataset: Dataset | None = None, eval_dataset: Dataset | Mapping[str, Dataset] | None = None
    ) -> None:
        self.record = TrainingRecord()
        self._level = ""
        self._tuning: dict[str, float] = {}
        # Start of the current step, and the seconds of stages that ran within it.
        self._step_start = self._staged = 0.0
        self._texts = _example_texts(first_dataset(eval_dataset)) or _example_texts(train_dataset)
        self._train_fingerprint = None if train_dataset is None else train_dataset._fingerprint
        if train_dataset is not None:
            self.record.documents = len(train_dataset)
            self.record.dataset = hub_id(train_dataset)
            self.record.split = None if train_dataset.split is None else str(train_dataset.split)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records machine and versions."""
        self.record.machine, self.record.versions = describe_machine(), describe_versions()
        self.record.levels, self._level, self._tuning = [], "", {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock of a step."""
        self._step_start, self._staged = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds a step to the time of its level, without the stages that ran within the step."""
        name = f"{self._level} fine-tuning".strip()
        seconds = time.perf_counter() - self._step_start - self._staged
        self._tuning[name] = self._tuning.get(name, 0.0) + seconds

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Records the loss of a level and, at the end of training, the time of all stages."""
        logs = logs or {}
        for name, value in logs.items():
            self._staged += float(value) if name.endswith("_seconds") and "train_runtime" not in logs else 0.0
            if started := re.fullmatch(r"(level \d+) shortlist_seconds", name):
                self._level = started[1]
        if "level" in logs and "loss" in logs:
            entry = {name: float(logs[name]) for name in _LOGGED if name in logs}
            self.record.levels.append({"step": state.global_step, **entry})
        if "train_runtime" in logs:
            self.record.seconds = float(logs["train_runtime"])
            matches = {name: re.fullmatch(r"train_(.+)_seconds", name) for name in logs}
            stages = {match[1]: float(logs[name]) for name, match in matches.items() if match}
            self.record.stages = stages | {name: round(seconds, 4) for name, seconds in self._tuning.items()}

    def add_evaluation(self, name: str, dataset: Dataset, metrics: XMCMetrics, seconds: float) -> None:
        """
        Records an evaluation of the whole model.

        `name` is the prefix of the metrics. `test` and `eval_dev` name the split; for `eval`, the dataset names it.
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
        if dataset._fingerprint == self._train_fingerprint:
            return "train"
        # Documents held out with `train_test_split` still carry the name of the split they come from.
        return name if dataset.split is None or str(dataset.split) == "train" else str(dataset.split)

    def finish(self, model: XMCForTextClassification, with_examples: bool = False) -> None:
        """
        Measures the latency of the trained model and, with `with_examples`, chooses texts of the data that the card
        shows.
        """
        if not self._texts or (model.tfidf is None and model.encoder is None):
            return
        if with_examples:
            self.record.examples = [text[:_MAX_LENGTH] for text in self._texts[:_EXAMPLES]]
        model.predict(self._texts[:1])  # warm up
        seconds: list[float] = []
        for text in self._texts:
            start = time.perf_counter()
            model.predict([text])
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > _TIME_LIMIT:
                break
        self.record.latency = {"median_ms": round(1e3 * statistics.median(seconds), 3), "documents": len(seconds)}


def first_dataset(datasets: Dataset | Mapping[str, Dataset] | None) -> Dataset | None:
    """Returns the first of several datasets, or the only one."""
    return next(iter(datasets.values()), None) if isinstance(datasets, Mapping) else datasets


def hub_id(dataset: Dataset) -> str | None:
    """Returns the Hub id that a dataset was loaded from, or `None` for local files."""
    sources = (dataset.info.download_checksums or {}) if dataset.info is not None else {}
    matches = (re.match(r"hf://datasets/([^/]+/[^/@]+)", source) for source in sources)
    return next((match[1] for match in matches if match), None)


def _example_texts(dataset: Dataset | None) -> list[str]:
    """Returns up to 20 texts, those of a suitable length for an example first."""
    if dataset is None or "text" not in dataset.column_names:
        return []
    texts = [text for text in dataset.select(range(min(len(dataset), 10 * _TIMED)))["text"] if text.strip()]
    suitable = [text for text in texts if _MIN_LENGTH <= len(text) <= _MAX_LENGTH]
    return (suitable + [text for text in texts if text not in set(suitable)])[:_TIMED]


def public_name(name: str | None) -> str | None:
    """Strips the local directories from a path; Hub ids and plain names stay."""
    if name is None or (is_hub_id(name) and not os.path.exists(name)):
        return name
    return Path(name).name or name


def is_hub_id(name: str | None) -> bool:
    """Whether a name has the form `owner/name`."""
    if name is None or name.count("/") != 1:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def speed_metrics(prefix: str, start: float, num_samples: int) -> dict[str, float]:
    """As `speed_metrics` of transformers, since a `start` by `time.perf_counter`, which does not jump as clocks do."""
    seconds = time.perf_counter() - start
    return {f"{prefix}_runtime": round(seconds, 4), f"{prefix}_samples_per_second": round(num_samples / seconds, 3)}


def describe_machine() -> dict[str, Any]:
    """Returns processor, cores and accelerators of this machine."""
    machine: dict[str, Any] = {"processor": _processor(), "cores": available_cores()}
    if torch.cuda.is_available():
        machine["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return machine


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result may depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}

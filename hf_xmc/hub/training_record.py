"""What is on record of a training: data, time, machine, results. Model cards are made of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..serialization import read_json, write_json
from ..utils import available_cores

RECORD_FILE = "training_record.json"
TRAINING_ARGS_FILE = "training_args.json"
ENSEMBLE_FILE = "ensemble.json"
RESULTS_SUFFIX = "_results.json"
_EVALUATION = ("dataset", "split", "documents", "seconds", "metrics", "by_frequency")
_PACKAGES = ("hf-xmc", "transformers", "torch", "datasets", "numba", "numpy", "scipy")


@dataclass
class TrainingRecord:
    """
    One training of a model.

    Args:
        dataset (`str`, *optional*): Name of the training data, or its id on the Hub.
        split (`str`, *optional*): Which part of it, such as `train` or `train+validation`.
        documents (`int`, *optional*): Training documents.
        data (`str`, *optional*): Fingerprint of these documents and their labels.
        seconds (`float`, *optional*): Time of the training, from features to saving.
        stages (`dict[str, float]`, *optional*): Seconds of each stage.
        levels (`list[dict]`, *optional*):
            What was logged while an encoder was fine-tuned: `step`, `level`, `loss`, `documents_per_second`.
        machine (`dict[str, Any]`, *optional*): Processor, cores and accelerators.
        versions (`dict[str, str]`, *optional*): Versions of Python and packages.
        latency (`dict[str, Any]`, *optional*): Milliseconds of one document (`median_ms`) and how many were timed.
        examples (`list[str]`, *optional*): A few texts to try the model on.
        evaluations (`list[dict]`, *optional*):
            Results: `dataset`, `split`, `documents`, `seconds`, `metrics` and `by_frequency` each.
    """

    dataset: str | None = None
    split: str | None = None
    documents: int | None = None
    data: str | None = None
    seconds: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    levels: list[dict[str, float]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    latency: dict[str, Any] | None = None
    examples: list[str] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def add_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Adds results, in place of earlier ones of the same documents."""
        evaluation = {**evaluation, "dataset": public_name(evaluation.get("dataset") or self.dataset)}
        key = evaluation["dataset"], evaluation["split"]
        self.evaluations = [old for old in self.evaluations if (old["dataset"], old["split"]) != key] + [evaluation]

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the record beside the model."""
        write_json(Path(folder, RECORD_FILE), asdict(self), indent=1)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> TrainingRecord:
        """
        Reads the record of a model, with the results that `hf-xmc train` and `hf-xmc evaluate` left beside it.

        Args:
            folder (`str` or `os.PathLike`):
                Folder of a model; one without a record has an empty one.
        """
        path = Path(folder, RECORD_FILE)
        known = {found.name for found in fields(cls)}
        content = read_json(path) if path.is_file() else {}
        record = cls(**{name: value for name, value in content.items() if name in known})
        for _, evaluation in result_files(folder):
            if "options" in evaluation:  # a trial, not the model as it is
                continue
            record.add_evaluation({name: evaluation[name] for name in _EVALUATION if name in evaluation})
        return record


def result_files(folder: str | os.PathLike) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of results that `hf-xmc train` and `hf-xmc evaluate` left beside a model, and what they hold."""
    for path in sorted(Path(folder).glob(f"*{RESULTS_SUFFIX}")):
        content = read_json(path)
        if isinstance(content, dict) and "metrics" in content:
            yield path, content


def public_name(name: str | None) -> str | None:
    """A Hub id or a plain name as it is; of a path the last part: where it was is nobody's business."""
    if name is None or (is_hub_id(name) and not os.path.exists(name)):
        return name
    return Path(name).name or name


def is_hub_id(name: str | None) -> bool:
    """Whether a name is `owner/name`."""
    if name is None or name.count("/") != 1:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def describe_machine() -> dict[str, Any]:
    """Processor, cores and accelerators of this machine."""
    found: dict[str, Any] = {"processor": _processor(), "cores": available_cores()}
    if torch.cuda.is_available():
        found["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result may depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}

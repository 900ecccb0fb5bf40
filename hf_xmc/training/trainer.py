"""Trains, measures and saves models."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.sparse import csr_matrix
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl
from transformers.trainer_utils import PredictionOutput, TrainOutput, speed_metrics

from ..configuration_xmc import XMCConfig
from ..data import prepare_dataset
from ..files import write_json
from ..modeling_xmc import XMCForTextClassification
from .clustering import Progress
from .linear_training import train_linear
from .prediction import evaluate_model, predict_batches
from .progress import StageProgressCallback, Stages
from .training_args import XMCTrainingArguments

TRAINING_ARGS_FILE = "training_args.json"


class XMCTrainer(Trainer):
    """
    Trains extreme multi-label text classifiers.

    Args:
        model ([`XMCForTextClassification`], *optional*):
            A model to complete (labels, TF-IDF and tree that it has already are used as they are) or a trained one to
            evaluate. A new one by default.
        args ([`XMCTrainingArguments`], *optional*):
            Options; among them the method.
        train_dataset (`datasets.Dataset`, *optional*):
            Documents with labels: texts, vectors or both. See [`prepare_dataset`] for the columns.
        eval_dataset (`datasets.Dataset` or `dict[str, datasets.Dataset]`, *optional*):
            Documents to evaluate on.
        column_mapping (`Mapping[str, str]`, *optional*):
            The datasets' columns → `text`, `labels`, `feature_ids`, `feature_values`.
        label_delimiter (`str`, *optional*):
            What separates labels in a column of strings.
        label_texts (`Mapping[str, str]`, *optional*):
            Texts of the labels by name.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks of transformers.

    Example:

    ```python
    trainer = XMCTrainer(
        args=XMCTrainingArguments("my-tagger", method="xr-linear"),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        column_mapping={"title": "text", "subjects": "labels"},
    )
    trainer.train()
    trainer.evaluate()["eval_P@1"]
    ```
    """

    args: XMCTrainingArguments
    model: XMCForTextClassification
    control: TrainerControl

    def __init__(
        self,
        model: XMCForTextClassification | None = None,
        args: XMCTrainingArguments | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        column_mapping: Mapping[str, str] | None = None,
        label_delimiter: str | None = None,
        label_texts: Mapping[str, str] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        args = XMCTrainingArguments() if args is None else args
        if not isinstance(args, XMCTrainingArguments):
            raise TypeError(f"`args` is a {type(args).__name__}; XMCTrainer takes `XMCTrainingArguments`.")
        if model is None:
            model = XMCForTextClassification(XMCConfig(method=args.method))
        if not isinstance(model, XMCForTextClassification):
            raise TypeError(
                f"`model` is {model!r:.80}. The method {args.method!r} trains no encoder: leave `model` out, or pass "
                "an `XMCForTextClassification`, such as `XMCForTextClassification.from_pretrained(...)` gives."
            )
        self.column_mapping = dict(column_mapping or {})
        self.label_delimiter = label_delimiter
        self.label_texts = None if label_texts is None else dict(label_texts)
        if train_dataset is not None:
            train_dataset = self._prepare(train_dataset)
        if isinstance(eval_dataset, Mapping):
            eval_dataset = {name: self._prepare(dataset) for name, dataset in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_dataset = self._prepare(eval_dataset)
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, callbacks=callbacks
        )
        # The base class notes a setting of text generation in the configuration.
        self.model.config.__dict__.pop("use_cache", None)
        # Linear methods have no epochs, and a 0 in every log line would tell nothing.
        self.state.epoch = None  # type: ignore[assignment]
        self._progress: StageProgressCallback | None = None
        if not args.disable_tqdm:
            self._progress = StageProgressCallback()
            self.remove_callback(ProgressCallback)
            self.add_callback(self._progress)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        Trains the model and saves it into `args.output_dir`.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Linear methods have no checkpoints; they start anew.
            trial (*optional*):
                Of a hyper-parameter search, which linear methods have not.
            ignore_keys_for_eval (`list[str]`, *optional*):
                Has no meaning here.

        Returns:
            `TrainOutput`: its metrics are the seconds of the run and of its stages. There is no training loss (NaN).
        """
        if resume_from_checkpoint:
            raise ValueError(
                f"The method {self.args.method!r} makes no checkpoints to resume from. Call `train()` alone."
            )
        dataset = self._check_can_train()
        start = time.time()
        stages = Stages(self.log, self._report)
        self.is_in_train = True
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        try:
            self.model.config.method = self.args.method
            train_linear(self.model, dataset, self.args, stages, self.label_texts)
            with stages.stage("save"):
                self.save_model(_internal_call=True)
            metrics = speed_metrics("train", start, num_samples=len(dataset))
            metrics.update({f"train_{name}_seconds": round(value, 4) for name, value in stages.seconds.items()})
            self.log(dict(metrics))
            if self.args.eval_strategy != "no":
                self.evaluate()
        finally:
            self.is_in_train = False
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, float("nan"), metrics)

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Measures the model on documents with labels, a batch in memory at a time.

        Args:
            eval_dataset (`datasets.Dataset` or `dict[str, datasets.Dataset]`, *optional*):
                Documents; those of the constructor by default. Of several sets, each gets its name into the prefix.
            ignore_keys (`list[str]`, *optional*):
                Has no meaning here.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`):
                Prefix of the metrics' names, as in `eval_P@1`.

        Returns:
            `dict[str, float]`: the metrics of [`XMCMetrics`] as fractions, and the time.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("There is no `eval_dataset`: pass one to `evaluate` or to the trainer.")
        if isinstance(dataset, Mapping):
            results: dict[str, float] = {}
            for name, part in dataset.items():
                results.update(self.evaluate(part, metric_key_prefix=f"{metric_key_prefix}_{name}"))
            return results
        dataset = self._prepare(dataset)
        start = time.time()
        metrics = evaluate_model(
            self.model, dataset, self.args.eval_ks, num_threads=self.args.num_threads, report=self._report
        )
        results = {f"{metric_key_prefix}_{name}": value for name, value in metrics.compute().items()}
        results.update(speed_metrics(metric_key_prefix, start, num_samples=len(dataset)))
        self.log(dict(results))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, results)
        return results

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """
        Predicts documents.

        Args:
            test_dataset (`datasets.Dataset`):
                Documents, with or without labels.
            ignore_keys (`list[str]`, *optional*):
                Has no meaning here.
            metric_key_prefix (`str`, *optional*, defaults to `"test"`):
                Prefix of the metrics' names.

        Returns:
            `PredictionOutput`: `predictions` are scores and label ids, `(documents, top_k)` each, with -1 for no
            label; `label_ids` the true labels known to the model, padded with -100 (`None` without labels).
        """
        dataset = self._prepare(test_dataset, require_labels=False)
        start = time.time()
        batches = list(predict_batches(self.model, dataset, num_threads=self.args.num_threads, report=self._report))
        predictions = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
        metrics = speed_metrics(metric_key_prefix, start, num_samples=len(dataset))
        label_ids = None
        if "labels" in dataset.column_names:
            assert self.model.labels is not None
            label_ids = _padded(self.model.labels.encode(dataset))
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions, label_ids, metrics)  # type: ignore[arg-type]

    @property
    def _report(self) -> Progress | None:
        return None if self._progress is None else self._progress.report

    def _prepare(self, dataset: Dataset, require_labels: bool = True) -> Dataset:
        """The dataset in the library's columns; one that has them already may come without the mapped ones."""
        columns: Iterable[str] = getattr(dataset, "column_names", ())
        mapping = {
            source: target
            for source, target in self.column_mapping.items()
            if source in columns or target not in columns
        }
        if not require_labels:
            mapping = {source: target for source, target in mapping.items() if source in columns or target != "labels"}
        return prepare_dataset(dataset, mapping, self.label_delimiter, require_labels)

    def _check_can_train(self) -> Dataset:
        if self.train_dataset is None:
            raise ValueError("There is no `train_dataset`: pass one to the trainer.")
        if self.model.ranker is not None:
            raise ValueError("The model is trained already. Leave `model` out to train a new one.")
        config_file = os.path.join(str(self.args.output_dir), "config.json")
        if os.path.exists(config_file) and not self.args.overwrite:
            raise FileExistsError(
                f"`{self.args.output_dir}` holds a finished model already. Choose another `output_dir`, or set "
                "`overwrite=True` to replace it."
            )
        return self.train_dataset

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model and its options. The base class would pickle the latter."""
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        self.model.save_pretrained(folder, state_dict=state_dict)
        write_json(os.path.join(folder, TRAINING_ARGS_FILE), self.args.xmc_options())


def _padded(targets: csr_matrix) -> np.ndarray:
    """Column ids of each row, padded with -100 to the longest."""
    lengths = np.diff(targets.indptr)
    padded = np.full((targets.shape[0], int(lengths.max(initial=0))), -100, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = targets.indices
    return padded

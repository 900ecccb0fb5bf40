"""Trains, evaluates and saves models."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState, set_seed
from transformers.trainer_utils import PredictionOutput, TrainOutput

from ..data import prepare_dataset
from ..data.columns import documents_digest
from ..data.vocabularies import VocabularySource, vocabulary_beside
from ..inference.predict import evaluate_model, predict_batches
from ..loading import file_digests
from ..modeling_xmc import XMCForTextClassification
from ..parallel.process_group import ProcessGroup
from ..parallel.stage_cache import CACHE_FOLDER, PieceFolder, Runtime, StageCache
from ..scorer import Scorer
from ..serialization import TRAINING_ARGS_FILE, remove_leftovers, write_json
from ..utils import available_cores
from .arguments import XMCTrainingArguments
from .callbacks import LevelCallback, SignalCallback, StartCallback
from .checkpoint import TRAINER_STATE_FILE, find_checkpoint, load_checkpoint
from .context import RunContext
from .contrastive import make_levels
from .extension import Extension
from .level_trainer import LevelTrainer
from .progress import StageProgressCallback, quiet_libraries
from .record import TrainingRecord, TrainingRecorder, first_dataset, speed_metrics
from .setup import (
    check_best_metric,
    check_can_train,
    check_label_text_options,
    check_parallelism,
    check_trainer_arguments,
    each_of,
    finished_model,
    init_model,
    make_model,
    padded_labels,
    remaining_mapping,
    training_precision,
)
from .stages import COMPLETION, LINEAR_STAGES, PREPARATION

logger = logging.getLogger(__name__)


class XMCTrainer(LevelTrainer):
    """
    Trains extreme multi-label text classifiers.

    One call of `train` runs all stages: features and label tree, then level by level shortlist, bootstrap and
    fine-tuning, then the ranker. Checkpoints, logging, callbacks and early stopping are those of
    [`~transformers.Trainer`]. Early stopping ends the current level, and the best model is that of the last level.

    Args:
        model ([`XMCForTextClassification`] or `str`, *optional*):
            Folder or Hub id of the encoder, by default `args.encoder_name`; or a model whose labels, TF-IDF and tree
            are kept; or a trained model to evaluate.
        args ([`XMCTrainingArguments`], *optional*):
            Options, among them the method.
        train_dataset (`datasets.Dataset`, *optional*):
            Documents with labels: texts, vectors or both. See [`prepare_dataset`] for the columns.
        eval_dataset (`datasets.Dataset` or `dict[str, datasets.Dataset]`, *optional*):
            Documents to evaluate on.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            Tokenizer of the encoder; by default the one in its folder.
        model_init (`Callable`, *optional*):
            Returns what `model` accepts. Called at the start of every `train`, as `hyperparameter_search` needs it.
        compute_metrics (`Callable[[EvalPrediction], dict]`, *optional*):
            Further metrics. `predictions` are scores and label ids, `label_ids` the true labels padded with -100.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks of transformers.
        optimizers (`tuple`, *optional*):
            Optimizer and scheduler for a model that has its heads already.
        column_mapping (`Mapping[str, str]`, *optional*):
            Column of the datasets → `text`, `labels`, `feature_ids` or `feature_values`.
        label_delimiter (`str`, *optional*):
            Separator of the labels in a column of strings.
        label_texts (`str`, `os.PathLike`, `Mapping` or `False`, *optional*):
            Names and descriptions of the labels: a [`LabelVocabulary`], a dictionary, or what [`load_vocabulary`]
            loads. `False` does without texts, even where the labels are words themselves.
        labels_seen_only (`bool`, *optional*, defaults to `False`):
            Whether to leave out labels of `label_texts` that no training document has. By default they are labels of
            the model, too, known by their texts.
        previous_dataset (`datasets.Dataset`, *optional*):
            All documents that `model` was trained on: the model is extended by those of `train_dataset`.
        kwargs:
            Other arguments of [`~transformers.Trainer`] are errors that say why.
    """

    control: TrainerControl
    state: TrainerState
    model_init: Callable[..., Any] | None

    def __init__(
        self,
        model: XMCForTextClassification | str | os.PathLike | None = None,
        args: XMCTrainingArguments | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        column_mapping: Mapping[str, str] | None = None,
        label_delimiter: str | None = None,
        label_texts: VocabularySource | bool | None = None,
        labels_seen_only: bool = False,
        previous_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        args = check_trainer_arguments(args, kwargs)
        self._tokenizer = processing_class
        if model_init is not None:
            if model is not None or previous_dataset is not None:
                raise ValueError("`model_init` replaces `model` and does not go with `previous_dataset`. Pass one.")
            model = init_model(model_init)
        self.column_mapping = dict(column_mapping or {})
        self.label_delimiter = label_delimiter
        check_label_text_options(args, label_texts)
        self.labels_seen_only = labels_seen_only
        with args.main_process_first(local=False, desc="reading the data"):
            self.label_texts = vocabulary_beside(None, label_texts)
            train_dataset = None if train_dataset is None else self._prepare(train_dataset)
            eval_dataset = each_of(eval_dataset, self._prepare)
            previous = None if previous_dataset is None else self._prepare(previous_dataset)
        self.extension = None if previous is None else Extension(model, args, previous, train_dataset)
        if self.extension is not None:
            model, args, train_dataset = self.extension.model, self.extension.args, self.extension.dataset
        check_best_metric(args, eval_dataset)
        super().__init__(
            model=make_model(model, args, processing_class, train_dataset),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.model_init = model_init
        # A last scorer that was fitted in another training, to be used as it is.
        self.scorer: Scorer | None = None
        self._set_up_processes()
        # The base class sets an option of text generation.
        self.model.config.__dict__.pop("use_cache", None)
        # Linear methods have no epochs to log.
        self.state.epoch = None  # type: ignore[assignment]
        self.recorder = TrainingRecorder(self.train_dataset, self.eval_dataset)
        self.add_callback(self.recorder)
        self._progress = StageProgressCallback.of(self)

    def _set_up_processes(self) -> None:
        check_parallelism(self)
        args, processes = self.args, ProcessGroup.current()
        folder = os.path.join(str(args.output_dir), CACHE_FOLDER)
        self.cache = StageCache(processes, folder, args.save_strategy != "no")
        self.signals = SignalCallback(processes)
        if processes.count > 1:
            if args.num_threads is None:
                args.num_threads = max(1, available_cores() // processes.per_node)
            if args.ddp_find_unused_parameters is None:
                # Heads of other levels have no gradients.
                args.ddp_find_unused_parameters = True
        logger.info("Process %d of %d, %s threads.", processes.index + 1, processes.count, args.num_threads or "all")

    @property
    def runtime(self) -> Runtime:
        """Threads, progress bar and cache of this trainer."""
        return Runtime(self.args.num_threads, self._progress.report if self._progress.has_bar else None, self.cache)

    @cached_property
    def publisher(self) -> Any:
        """Cards and uploads. Imported by name, as `hub` is the layer above `training`."""
        return import_module("hf_xmc.hub.publisher").Publisher(self)

    # ---- Training ----

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
                A checkpoint, or `True` for the last complete one in `args.output_dir`; without a checkpoint training
                starts from the beginning. Finished pieces of stages without steps are reused as well. Linear methods
                have no checkpoints and accept `True` only.
            trial (*optional*): Trial of a hyperparameter search.
            ignore_keys_for_eval (`list[str]`, *optional*): Ignored.

        Returns:
            `TrainOutput`: its metrics are the seconds of the run and its stages. The loss of linear methods is NaN.
        """
        folder = str(self.args.output_dir)
        try:
            if trial is not None:
                self._hp_search_setup(trial)
                self.args.output_dir = self._get_output_dir(trial)
                self.cache.folder = Path(self.args.output_dir, CACHE_FOLDER)
            if self.model_init is not None:
                set_seed(self.args.seed)
                model = init_model(self.model_init, trial)
                model = make_model(model, self.args, self._tokenizer, self.train_dataset)
                self._use_model(model)
            lock = PieceFolder(str(self.args.output_dir), "")
            with self.cache.processes.explained(), lock.locked(), self.signals.handling(), quiet_libraries():
                self.cache.processes.from_main(lock.lock)
                return self._train(resume_from_checkpoint, trial)
        finally:
            self.args.output_dir = folder

    def call_model_init(self, trial: Any = None) -> Any:
        """Returns the model that `train` has prepared: the base class asks for a new one when its loop begins."""
        return self.model

    def _train(self, resume: str | bool | None, trial: Any) -> TrainOutput:
        if resume and self.cache.processes.is_main:
            remove_leftovers(str(self.args.output_dir))
        was_interrupted = self.cache.is_begun
        may_be_finished = resume is True and not was_interrupted
        finished = finished_model(self.args, self.train_dataset) if may_be_finished else None
        if finished is not None:
            logger.warning("The training in `%s` is finished: its model is loaded.", self.args.output_dir)
            self._use_model(finished)
            self.recorder.record = record = TrainingRecord.load(str(self.args.output_dir))
            metrics = {} if record.seconds is None else {"train_runtime": record.seconds}
            return TrainOutput(self.state.global_step, float("nan"), metrics)
        extends = self.extension is not None
        checkpoint = None if extends else find_checkpoint(self.args, resume)
        resumes = checkpoint is not None or (bool(resume) and was_interrupted)
        dataset = check_can_train(self.model, self.args, self.train_dataset, resumes, extends)
        start = time.perf_counter()
        self.cache.start(resume=bool(resume))
        has_steps = self.model.encoder is not None and not extends
        self._progress.begin_training(has_steps)
        if checkpoint is not None:
            self._use_model(load_checkpoint(checkpoint, self.args))
        self.model.config.method = self.args.method
        validation = first_dataset(self.eval_dataset)
        needed = self.model, self.args, dataset, self.runtime, self.log, self._progress.begin_stage
        context = RunContext(*needed, self.label_texts, validation, self.scorer, self.labels_seen_only)
        if has_steps:
            with training_precision(self):
                output = self._train_encoder(context, checkpoint, trial)
        else:
            output = self._run_without_steps(partial(self._run_stages, context))
        self.recorder.record.label_texts = list(context.text_uses)
        self.recorder.record.extensions = [] if self.extension is None else self.extension.describe()
        self._progress.note_label_texts(self.model.labels, context.text_uses, context.label_texts is not False)
        metrics = {**output.metrics, **speed_metrics("train", start, len(dataset))}
        metrics.update({f"train_{name}_seconds": round(value, 4) for name, value in context.seconds.items()})
        if self.cache.is_shared:
            metrics["train_processes"] = self.cache.processes.count
        self.log(dict(metrics))
        if self.cache.processes.is_main:
            self.recorder.record.data = documents_digest(dataset)
            self.recorder.record.files = file_digests(str(self.args.output_dir))
        self.recorder.finish(self.model, self.args.widget_examples)
        self.publisher.update_model_card()
        self.cache.finish()
        if self.args.eval_strategy != "no":
            self.evaluate()
        return TrainOutput(self.state.global_step, output.training_loss, metrics)

    def _run_stages(self, context: RunContext) -> None:
        for stage in LINEAR_STAGES if self.extension is None else self.extension.stages:
            stage(context)
        self._save_new_model(context)

    def _train_encoder(self, context: RunContext, checkpoint: str | None, trial: Any) -> TrainOutput:
        if self.is_fsdp_enabled and checkpoint is None:
            # The base class leaves this to FSDP, which starts later and ignores heads.
            self._move_model_to_device(self.model, self.args.device)
        for stage in PREPARATION:
            stage(context)
        self._levels = levels = make_levels(context.for_tuning())
        self._first_step = 0
        if checkpoint is not None:
            levels.load(checkpoint)
            state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_FILE))
            self._first_step = state.global_step
        callback = LevelCallback(levels, self.callback_handler.callbacks)
        start = StartCallback(self, checkpoint, list(self.state.log_history))
        options = {"max_steps": levels.schedule.limit, "ignore_data_skip": True, "logging_nan_inf_filter": False}
        before = {name: getattr(self.args, name) for name in options}
        for name, value in options.items():
            setattr(self.args, name, value)
        callbacks = (start, callback, self.signals) if self._first_step < levels.schedule.total else ()
        for added in callbacks:
            self.add_callback(added)
        try:
            if callbacks:
                self.prepare_parallel()
                return super().train(checkpoint, trial)  # type: ignore[misc]
            if checkpoint is not None:
                state.log_history.extend(start.earlier_logs)
                self.state = state
            return self._run_without_steps(self._complete)
        finally:
            for added in callbacks:
                self.remove_callback(added)
            for name, value in before.items():
                setattr(self.args, name, value)
            self._levels = None  # type: ignore[assignment]
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def _run_without_steps(self, run: Callable[[], None]) -> TrainOutput:
        """Runs stages without training steps, with the events that callbacks expect."""
        self.is_in_train = True
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        try:
            run()
        finally:
            self.is_in_train = False
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, float("nan"), {})

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> TrainOutput:
        """Overridden because the ranker is trained before `on_train_end`, and the best model is loaded before that."""
        self._complete()
        loads_best, self.args.load_best_model_at_end = self.args.load_best_model_at_end, False
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.load_best_model_at_end = loads_best

    def _complete(self) -> None:
        """Runs what follows the last training step."""
        levels, context = self._levels, self._levels.context.root
        if context.sharded is not None:
            levels.average.gather()
            context.model, context.sharded = context.sharded.whole_model(self.model), None
            self._use_model(context.model)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None and os.path.isdir(best):
            self._load_best(best)
        self.model.eval()
        levels.complete()
        for stage in COMPLETION:
            stage(context)
        self._save_new_model(context)

    def _load_best(self, checkpoint: str) -> None:
        if self._levels.adapters is None:
            best = XMCForTextClassification.from_pretrained(checkpoint)
            self.model.load_state_dict(best.state_dict())
        else:
            self._levels.adapters.load(checkpoint)
        self._levels.average.load(checkpoint, self.model.device)
        self._levels.context.encoder_changed()

    def _save_new_model(self, context: RunContext) -> None:
        with context.stage("save"):
            if self.cache.processes.is_main:
                self.publisher.forget_model(str(self.args.output_dir))
            self.save_model(_internal_call=True)

    def _use_model(self, model: XMCForTextClassification) -> None:
        """Replaces the model."""
        self.model = self.model_wrapped = model
        self._move_model_to_device(model, self.args.device)
        self.callback_handler.model = model

    # ---- Evaluation and prediction ----

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Evaluates the model on documents with labels, in constant memory.

        Args:
            eval_dataset (`datasets.Dataset` or `dict[str, datasets.Dataset]`, *optional*):
                Documents; by default those of the constructor. The prefix of several datasets includes their name.
            ignore_keys (`list[str]`, *optional*): Ignored.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`): Prefix of the metrics, as in `eval_P@1`.

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
        start = time.perf_counter()
        options: dict[str, Any] = {"batch_size": self.args.per_device_eval_batch_size, "runtime": self.runtime}
        if self._levels is not None and self.model.ranker is None:
            # During fine-tuning only what is trained now can be evaluated.
            with self._levels.average.in_place(self.model), self._levels.context.whole_encoder():
                metrics = self._levels.evaluate(self.model, dataset, self.args.eval_ks, **options)
        else:
            metrics = evaluate_model(self.model, dataset, self.args.eval_ks, **options)
        results = {f"{metric_key_prefix}_{name}": value for name, value in metrics.compute().items()}
        if self.compute_metrics is not None and self._levels is None:
            output = self._predict(dataset)
            further = self.compute_metrics(EvalPrediction(*output))
            results.update({f"{metric_key_prefix}_{name}": value for name, value in further.items()})
        results.update(speed_metrics(metric_key_prefix, start, len(dataset)))
        self.log(dict(results))
        if self._levels is None:
            self.recorder.add_evaluation(metric_key_prefix, dataset, metrics, time.perf_counter() - start)
            if self.recorder.record.seconds is not None:  # trained here: the model in `output_dir` is this one
                self.publisher.update_model_card()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, results)
        return results

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """
        Predicts documents.

        Args:
            test_dataset (`datasets.Dataset`): Documents, with or without labels.
            ignore_keys (`list[str]`, *optional*): Ignored.
            metric_key_prefix (`str`, *optional*, defaults to `"test"`): Prefix of the metrics.

        Returns:
            `PredictionOutput`: `predictions` are scores and label ids, `(documents, top_k)` each, padded with -1;
            `label_ids` the true labels known to the model, padded with -100 (`None` without labels).
        """
        dataset = self._prepare(test_dataset, require_labels=False)
        start = time.perf_counter()
        predictions, label_ids = self._predict(dataset)
        metrics = speed_metrics(metric_key_prefix, start, len(dataset))
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions, label_ids, metrics)  # type: ignore[arg-type]

    def _predict(self, dataset: Dataset) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
        batch_size = self.args.per_device_eval_batch_size
        batches = list(predict_batches(self.model, dataset, batch_size=batch_size, runtime=self.runtime))
        predictions = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
        if "labels" not in dataset.column_names:
            return predictions, None
        return predictions, padded_labels(self.model.checked_labels().encode(dataset))

    def _prepare(self, dataset: Dataset, require_labels: bool = True) -> Dataset:
        """Maps the columns of a dataset, unless they have been mapped before."""
        mapping = remaining_mapping(self.column_mapping, getattr(dataset, "column_names", ()), require_labels)
        return prepare_dataset(dataset, mapping, self.label_delimiter, require_labels)

    # ---- Saving and publishing ----

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model and its options. Overridden because the base class pickles the options."""
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        if self._levels is not None and self._levels.adapters is not None:
            state_dict = self._levels.adapters.plain_weights()
        self.model.save_pretrained(folder, state_dict=state_dict)
        options = self.args.xmc_options() if self._levels is None else self._levels.options
        write_json(os.path.join(folder, TRAINING_ARGS_FILE), options)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the model card into `args.output_dir`, see `Publisher.create_model_card`."""
        self.publisher.create_model_card(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the model and its card and uploads all files, see `Publisher.push_to_hub`."""
        return self.publisher.push_to_hub(*args, **kwargs)

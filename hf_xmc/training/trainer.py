"""Trains, measures and saves models."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix
from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import PredictionOutput, TrainOutput, speed_metrics
from transformers.utils import CONFIG_NAME

from ..configuration_xmc import XMCConfig
from ..data import prepare_dataset
from ..data.columns import documents_digest
from ..evaluation import XMCMetrics
from ..hub.model_card import forget_model
from ..hub.publishing import PublishingMixin
from ..inference.predict import evaluate_level, evaluate_model, predict_batches
from ..modeling_xmc import XMCForTextClassification
from ..parallel.process_group import ProcessGroup
from ..parallel.runtime import Runtime
from ..parallel.stage_cache import CACHE_FOLDER, StageCache
from ..remote_code import CLASSES
from ..serialization import TRAINING_ARGS_FILE, read_json, remove_leftovers, write_json
from ..text_encoder import padding_id
from ..utils import Progress, available_cores
from .arguments import XMCTrainingArguments
from .checkpoint import LEVEL_FILE, TRAINER_STATE_FILE, find_damage, last_checkpoint
from .embedding import TokenCollator
from .encoder_training import EncoderRun
from .fsdp import check_encoder, set_up_plugin
from .level_trainer import LevelTrainer
from .presets import ENCODER_METHODS
from .progress import StageProgressCallback, StageTimer
from .record import TrainingRecord
from .stages import train_linear
from .termination import Termination

logger = logging.getLogger(__name__)


class XMCTrainer(PublishingMixin, LevelTrainer):
    """
    Trains extreme multi-label text classifiers.

    A method with an encoder is trained in one `train()`: features and tree, then level by level shortlist, bootstrap
    and fine-tuning, then the ranker. Checkpoints, logging, callbacks and early stopping are those of
    [`~transformers.Trainer`]; early stopping ends the level at work, and the best model is that of the last level.

    Args:
        model ([`XMCForTextClassification`] or `str`, *optional*):
            The encoder to start from, as a folder or Hub id (`args.encoder_name` by default); or a model to complete
            (labels, TF-IDF and tree that it has already are used as they are) or a trained one to evaluate.
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
    state: TrainerState

    def __init__(
        self,
        model: XMCForTextClassification | str | os.PathLike | None = None,
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
        model = _make_model(model, args)
        self.column_mapping = dict(column_mapping or {})
        self.label_delimiter = label_delimiter
        self.label_texts = None if label_texts is None else dict(label_texts)
        with args.main_process_first(local=False, desc="reading the data"):
            if train_dataset is not None:
                train_dataset = self._prepare(train_dataset)
            if isinstance(eval_dataset, Mapping):
                eval_dataset = {name: self._prepare(dataset) for name, dataset in eval_dataset.items()}
            elif eval_dataset is not None:
                eval_dataset = self._prepare(eval_dataset)
        _check_best_metric(args, eval_dataset)
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, callbacks=callbacks
        )
        self._work_together()
        # The base class notes a setting of text generation in the configuration.
        self.model.config.__dict__.pop("use_cache", None)
        # Linear methods have no epochs, and a 0 in every log line would tell nothing.
        self.state.epoch = None  # type: ignore[assignment]
        self._watch_for_card()
        if not args.disable_tqdm:
            self._progress = StageProgressCallback()
            self.remove_callback(ProgressCallback)
            self.add_callback(self._progress)

    def _work_together(self) -> None:
        """Finds the other processes of this training, if there are any."""
        if self.is_deepspeed_enabled:
            raise ValueError(
                "DeepSpeed brings an optimiser and checkpoints of its own, which heads of large levels cannot use. "
                "Launch with FSDP (`distributed_type: FSDP`) for the same saving of memory, or with DDP "
                "(`distributed_type: MULTI_GPU`)."
            )
        if self.is_fsdp_enabled:
            set_up_plugin(self.accelerator.state.fsdp_plugin)
            if self.model.encoder is not None:
                check_encoder(self.model.encoder)
            if self.args.encoder_lora_rank:
                raise ValueError(
                    "FSDP saves nothing where `encoder_lora_rank` is set: adapters are small, and every process needs "
                    "the whole encoder between the levels. Launch with DDP (`distributed_type: MULTI_GPU`)."
                )
        args, processes = self.args, ProcessGroup.current()
        self.termination = Termination()
        self.work = StageCache(processes, os.path.join(str(args.output_dir), CACHE_FOLDER), args.save_strategy != "no")
        if processes.count > 1:
            if args.num_threads is None:
                args.num_threads = max(1, available_cores() // processes.per_node)
            if args.ddp_find_unused_parameters is None:
                # Heads of levels that are not at work have no gradients.
                args.ddp_find_unused_parameters = True
        logger.info("Process %d of %d, %s threads.", processes.index + 1, processes.count, args.num_threads or "all")

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
                A checkpoint to go on from, or `True` for the last one in `args.output_dir` that is whole; where there
                is none yet, training starts anew. What stages without steps had done is found again, too: linear
                methods have nothing else, and take `True` alone.
            trial (*optional*):
                Of a hyper-parameter search; see [`~transformers.Trainer.train`].
            ignore_keys_for_eval (`list[str]`, *optional*):
                Has no meaning here.

        Returns:
            `TrainOutput`: its metrics are the seconds of the run and of its stages. The training loss is NaN where no
            encoder is trained.
        """
        with self.work.processes.explained(), self.termination:
            return self._train(resume_from_checkpoint, trial)

    def _train(self, resume: str | bool | None, trial: Any) -> TrainOutput:
        if resume and self.work.processes.is_main:
            remove_leftovers(str(self.args.output_dir))
        finished = self._finished_model() if resume is True else None
        if finished is not None:
            logger.warning("The training in `%s` has ended already: its model is taken.", self.args.output_dir)
            self._use_model(finished)
            self.card.record = record = TrainingRecord.load(str(self.args.output_dir))
            metrics = {} if record.seconds is None else {"train_runtime": record.seconds}
            return TrainOutput(self.state.global_step, float("nan"), metrics)
        checkpoint = self._find_checkpoint(resume)
        dataset = self._check_can_train(resumes=checkpoint is not None or (bool(resume) and self.work.is_begun))
        start = time.time()
        self.work.start(resume=bool(resume))
        stages = StageTimer(self.log, self._report, self.work)
        self.model.config.method = self.args.method
        if self.model.encoder is None:
            output = self._train_in_stages(lambda: self._train_linear(dataset, stages))
        else:
            output = self._train_encoder(dataset, stages, checkpoint, trial)
        metrics = {**output.metrics, **speed_metrics("train", start, num_samples=len(dataset))}
        metrics.update({f"train_{name}_seconds": round(value, 4) for name, value in stages.seconds.items()})
        if self.work.is_shared:
            metrics["train_processes"] = self.work.processes.count
        self.log(dict(metrics))
        if self.work.processes.is_main:
            self.card.record.data = documents_digest(dataset)
        self.card.finish(self.model, self.args.widget_examples)
        self._update_card()
        self.work.finish()
        if self.args.eval_strategy != "no":
            self.evaluate()
        return TrainOutput(self.state.global_step, output.training_loss, metrics)

    def _finished_model(self) -> XMCForTextClassification | None:
        """The model in `output_dir`, where a training of these options on these documents has ended there."""
        folder = str(self.args.output_dir)
        options = os.path.join(folder, TRAINING_ARGS_FILE)
        if self.work.is_begun or self.train_dataset is None or not os.path.isfile(os.path.join(folder, CONFIG_NAME)):
            return None
        # As it is read back; the number of threads changes nothing.
        mine = json.loads(json.dumps({**self.args.xmc_options(), "num_threads": None}))
        if not os.path.isfile(options) or {**read_json(options), "num_threads": None} != mine:
            return None
        # Of a training that was killed while it wrote its record only the number of documents is known.
        known = TrainingRecord.load(folder).data
        if known is not None and known != documents_digest(self.train_dataset):
            return None
        model = XMCForTextClassification.from_pretrained(folder)
        return model if model.labels.num_documents == len(self.train_dataset) else None

    def _train_linear(self, dataset: Dataset, stages: StageTimer) -> None:
        train_linear(self.model, dataset, self.args, stages, self.label_texts)
        with stages.stage("save"):
            self._save_new_model()

    def _train_in_stages(self, work: Callable[[], None]) -> TrainOutput:
        """Training without steps, with the events that callbacks wait for."""
        self.is_in_train = True
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        try:
            work()
        finally:
            self.is_in_train = False
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, float("nan"), {})

    # ---- Training an encoder ----

    def _train_encoder(self, dataset: Dataset, stages: StageTimer, checkpoint: str | None, trial: Any) -> TrainOutput:
        if checkpoint is not None:
            attention = self.args.encoder_attn_implementation
            options = {} if attention is None else {"attn_implementation": attention}
            self._use_model(XMCForTextClassification.from_pretrained(checkpoint, **options))
        elif self.is_fsdp_enabled:
            # The base class leaves this to FSDP, which comes after the first stages and does not look at heads.
            self._move_model_to_device(self.model, self.args.device)
        self.model.autocast_dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        self._run = run = EncoderRun(self.model, dataset, self.args, stages, self.label_texts)
        step = 0
        if checkpoint is not None:
            run.load(checkpoint)
            step = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_FILE)).global_step
        self._earlier_logs = list(self.state.log_history)
        self.data_collator = TokenCollator(padding_id(self.model.config.encoder_config, self.model.tokenizer))
        try:
            if step < run.schedule.total:
                return super().train(checkpoint, trial)
            if checkpoint is not None:
                self.state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_FILE))
                self.state.log_history.extend(self._earlier_logs)
            return self._train_in_stages(self._finish_run)
        finally:
            self._run = None
            # From here on it predicts as it will when it is loaded: not in mixed precision.
            self.model.autocast_dtype = None
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def _use_model(self, model: XMCForTextClassification) -> None:
        """Replaces the model by that of a checkpoint."""
        self.model = self.model_wrapped = model
        self._move_model_to_device(model, self.args.device)
        self.callback_handler.model = model

    def _finish_run(self) -> None:
        assert self._run is not None
        self.termination.is_patient = False
        if self._run.sharded is not None:
            self._use_model(self._run.gather_model())
        eval_dataset = self.eval_dataset
        if isinstance(eval_dataset, Mapping):
            eval_dataset = next(iter(eval_dataset.values()), None)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None and os.path.isdir(best):
            self._load_best_model()
            self._run.average.load(best, self.model.device)
        self.model.eval()
        self._run.finish(eval_dataset)
        with self._run.stages.stage("save"):
            self._save_new_model()

    def _save_new_model(self) -> None:
        if self.work.processes.is_main:
            forget_model(str(self.args.output_dir))
        self.save_model(_internal_call=True)

    def _find_checkpoint(self, wanted: str | bool | None) -> str | None:
        if not wanted:
            return None
        if isinstance(wanted, (str, os.PathLike)):
            wanted = os.fspath(wanted)
            if not self.args.trains_encoder:
                raise ValueError(
                    f"The method {self.args.method!r} makes no checkpoints such as `{wanted}`. Pass "
                    "`resume_from_checkpoint=True` to go on with what `output_dir` holds."
                )
            if not os.path.isfile(os.path.join(wanted, LEVEL_FILE)):
                raise FileNotFoundError(
                    f"`{wanted}` is no checkpoint of hf_xmc: it has no `{LEVEL_FILE}`. Pass a folder `checkpoint-…`."
                )
            damage = find_damage(wanted)
            if damage is not None:
                raise ValueError(
                    f"The checkpoint `{wanted}` is damaged: {damage}. Pass another one, or `True` for the last one "
                    "that is whole."
                )
            return wanted
        if not self.args.trains_encoder:
            return None
        found = last_checkpoint(str(self.args.output_dir))
        if found is None:
            logger.warning("There is no checkpoint in `%s` yet: training starts anew.", self.args.output_dir)
        return found

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> TrainOutput:
        self._finish_run()
        # The base class would load the best model once more, over what has been trained since.
        wanted, self.args.load_best_model_at_end = self.args.load_best_model_at_end, False
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.load_best_model_at_end = wanted

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
        options = self._prediction_options
        ks = self.args.eval_ks
        if self._run is not None and self.model.ranker is None:
            # Between the steps of a level there is only what its heads say of its nodes.
            with self._run.average.in_place(self.model), self._run.whole_encoder():
                metrics = evaluate_level(self.model, dataset, self._run.level, ks, **options)
        else:
            metrics = evaluate_model(self.model, dataset, ks, **options)
        results = {f"{metric_key_prefix}_{name}": value for name, value in metrics.compute().items()}
        results.update(speed_metrics(metric_key_prefix, start, num_samples=len(dataset)))
        self.log(dict(results))
        if self._run is None:
            self.card.add_evaluation(metric_key_prefix, dataset, metrics, time.time() - start)
            if self.card.record.seconds is not None:  # trained here, so the model in `output_dir` is this one
                self._update_card()
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
        batches = list(predict_batches(self.model, dataset, **self._prediction_options))
        predictions = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
        metrics = speed_metrics(metric_key_prefix, start, num_samples=len(dataset))
        label_ids = None
        if "labels" in dataset.column_names:
            assert self.model.labels is not None
            label_ids = _padded(self.model.labels.encode(dataset))
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions, label_ids, metrics)  # type: ignore[arg-type]

    @property
    def _prediction_options(self) -> dict[str, Any]:
        runtime = Runtime(self.args.num_threads, self._report, self.work)
        return {"batch_size": self.args.per_device_eval_batch_size, "runtime": runtime}

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

    def _check_can_train(self, resumes: bool) -> Dataset:
        if self.train_dataset is None:
            raise ValueError("There is no `train_dataset`: pass one to the trainer.")
        if self.model.ranker is not None or self.model.config.trained_levels:
            raise ValueError("The model is trained already. Start from an encoder, or leave `model` out.")
        config_file = os.path.join(str(self.args.output_dir), CONFIG_NAME)
        # A run that is resumed may have been cut off while it saved its model.
        if os.path.exists(config_file) and not self.args.overwrite and not resumes:
            raise FileExistsError(
                f"`{self.args.output_dir}` holds a finished model already. Choose another `output_dir`, or set "
                "`overwrite=True` to replace it."
            )
        return self.train_dataset

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model and its options. The base class would pickle the latter."""
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        if self._run is not None and self._run.adapters is not None:
            state_dict = self._run.adapters.plain_weights()
        self.model.save_pretrained(folder, state_dict=state_dict)
        write_json(os.path.join(folder, TRAINING_ARGS_FILE), self.args.xmc_options())


def _check_best_metric(args: XMCTrainingArguments, eval_dataset: Dataset | Mapping[str, Dataset] | None) -> None:
    """Raises where the metric that decides on checkpoints is none that is measured on the way."""
    wanted = args.metric_for_best_model
    if wanted is None or eval_dataset is None or args.eval_strategy == "no" or not args.trains_encoder:
        return
    # As the heads of a level are measured: without the training counts of labels, which its nodes have not.
    metrics = XMCMetrics(**({} if args.eval_ks is None else {"ks": args.eval_ks}))  # type: ignore[arg-type]
    ranking = np.arange(metrics.ks[-1])[None]
    metrics.update(ranking, csr_matrix(ranking >= 0, dtype=np.float32))
    names = list(metrics.compute())
    if isinstance(eval_dataset, Mapping):
        names = [f"{part}_{name}" for part in eval_dataset for name in names]
    if wanted.removeprefix("eval_") not in names:
        raise ValueError(
            f"`metric_for_best_model={wanted!r}` is not measured between the steps of a level. Choose one of "
            f"{', '.join(names)}."
        )


def _check_encoder(name: str, args: XMCTrainingArguments) -> None:
    """Raises where `name` is not what a training may begin with; what cannot be read is left to its loading."""
    config = os.path.join(name, CONFIG_NAME)
    if os.path.isfile(config) and read_json(config).get("model_type") in CLASSES:
        raise ValueError(
            f"`{name}` is a trained model, not an encoder. To evaluate it or to predict with it, pass "
            f"`XMCForTextClassification.from_pretrained({name!r})`; to train another one, name the encoder."
        )
    if not args.trains_encoder:
        raise ValueError(
            f"The method {args.method!r} trains no encoder, but `{name}` was given. Leave it out, or choose a method "
            f"with an encoder: {', '.join(ENCODER_METHODS)}."
        )


def _make_model(model: Any, args: XMCTrainingArguments) -> XMCForTextClassification:
    """The model to train, from what the user passed."""
    name = args.encoder_name
    if isinstance(model, (str, os.PathLike)):
        name, model = os.fspath(model), None
    if isinstance(model, XMCForTextClassification):
        return model
    if model is not None:
        raise TypeError(
            f"`model` is {model!r:.80}. Pass the folder or the Hub id of an encoder, or an "
            "`XMCForTextClassification`, such as `XMCForTextClassification.from_pretrained(...)` gives."
        )
    if name is not None:
        _check_encoder(name, args)
        args.encoder_name = name
    if not args.trains_encoder:
        return XMCForTextClassification(XMCConfig(method=args.method))
    if name is None:
        raise ValueError(
            f"The method {args.method!r} needs an encoder to start from: pass its folder or Hub id as `model`, or set "
            "`encoder_name`."
        )
    options = args.make_encoder_arguments().model_kwargs()
    return XMCForTextClassification.from_encoder(name, method=args.method, **options)


def _padded(targets: csr_matrix) -> np.ndarray:
    """Column ids of each row, padded with -100 to the longest."""
    lengths = np.diff(targets.indptr)
    padded = np.full((targets.shape[0], int(lengths.max(initial=0))), -100, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = targets.indices
    return padded

"""What a trainer is set up with: checks of its arguments, and the model to train."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix
from transformers.trainer_utils import number_of_arguments
from transformers.utils import CONFIG_NAME

from ..configuration_xmc import XMCConfig
from ..data.columns import documents_digest
from ..evaluation import XMCMetrics
from ..modeling_xmc import XMCForTextClassification
from ..remote_code import CLASSES
from ..serialization import TRAINING_ARGS_FILE, read_json
from .arguments import XMCTrainingArguments
from .label_features import TEXT_LABEL_FEATURES
from .large_encoders import check_encoder, set_up_plugin
from .presets import ENCODER_METHODS
from .record import TrainingRecord

# Arguments of `Trainer` that have no meaning here, and why.
_REFUSED = {
    "data_collator": "batches are made from the label tree",
    "compute_loss_func": "the loss follows from the method: set `level_loss`",
    "preprocess_logits_for_metrics": "evaluation works on the best labels, never on all logits",
    "optimizer_cls_and_kwargs": "large heads need an AdamW that updates rows: set `learning_rate`, `weight_decay` and "
    "`adam_*` in `args`, or pass `optimizers`",
}

# Texts whose tokens are counted, and the share of them that is not truncated by default.
_NUM_SAMPLED, _SHARE_THAT_FITS = 2000, 0.95


def check_trainer_arguments(args: Any, kwargs: Mapping[str, Any]) -> XMCTrainingArguments:
    """Returns the options of a trainer; raises for arguments that it does not take."""
    for name in kwargs:
        reason = f": {_REFUSED[name]}" if name in _REFUSED else ""
        raise TypeError(f"XMCTrainer does not take the argument `{name}`{reason}.")
    args = XMCTrainingArguments() if args is None else args
    if not isinstance(args, XMCTrainingArguments):
        raise TypeError(f"`args` is a {type(args).__name__}; XMCTrainer takes `XMCTrainingArguments`.")
    return args


def each_of(data: Any, function: Callable[[Dataset], Dataset]) -> Any:
    """Applies a function to a dataset, or to each of several; `None` stays."""
    if isinstance(data, Mapping):
        return {name: function(part) for name, part in data.items()}
    return None if data is None else function(data)


def check_label_text_options(args: XMCTrainingArguments, label_texts: Any) -> None:
    """Raises if options need the texts that `label_texts=False` switches off."""
    if label_texts is False and args.label_features in TEXT_LABEL_FEATURES:
        raise ValueError(
            f"`label_features={args.label_features!r}` needs texts of the labels, but `label_texts=False` switches "
            "them off. Choose one."
        )


def check_best_metric(args: XMCTrainingArguments, eval_dataset: Dataset | Mapping[str, Dataset] | None) -> None:
    """Raises if `metric_for_best_model` is not measured during fine-tuning."""
    wanted = args.metric_for_best_model
    if wanted is None or eval_dataset is None or args.eval_strategy == "no" or not args.trains_encoder:
        return
    # Inner nodes have no training counts, so there are no propensity-scored metrics.
    metrics = XMCMetrics(**({} if args.eval_ks is None else {"ks": args.eval_ks}))  # type: ignore[arg-type]
    ranking = np.arange(metrics.ks[-1])[None]
    metrics.update(ranking, csr_matrix(ranking >= 0, dtype=np.float32))
    names = list(metrics.compute())
    if isinstance(eval_dataset, Mapping):
        names = [f"{part}_{name}" for part in eval_dataset for name in names]
    if wanted.removeprefix("eval_") not in names:
        raise ValueError(
            f"`metric_for_best_model={wanted!r}` is not measured during fine-tuning. Choose one of {', '.join(names)}."
        )


def check_parallelism(trainer: Any) -> None:
    """Raises if the launcher asks for a kind of parallelism that is not supported; configures FSDP."""
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "DeepSpeed is not supported: heads of large levels cannot use its optimizer. Launch with FSDP "
            "(`distributed_type: FSDP`) or DDP (`distributed_type: MULTI_GPU`)."
        )
    if trainer.is_fsdp_enabled:
        set_up_plugin(trainer.accelerator.state.fsdp_plugin)
        if trainer.model.encoder is not None:
            check_encoder(trainer.model.encoder)
        if trainer.args.encoder_lora_rank:
            raise ValueError(
                "`encoder_lora_rank` does not work with FSDP: every process needs the whole encoder between the "
                "levels. Launch with DDP (`distributed_type: MULTI_GPU`)."
            )


@contextmanager
def training_precision(trainer: Any) -> Iterator[None]:
    """Lets all stages of a training run the encoder as its steps do, and then as a loaded model does."""
    args, encoder = trainer.args, trainer.model.encoder
    attention = encoder.config._attn_implementation
    trainer.model.autocast_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    uses_eager = args.bf16 and args.use_cpu and args.encoder_attn_implementation is None
    if uses_eager:
        encoder.set_attn_implementation("eager")  # the fastest there
    try:
        yield
    finally:
        trainer.model.autocast_dtype = None
        if uses_eager:
            trainer.model.encoder.set_attn_implementation(attention)


def check_can_train(
    model: XMCForTextClassification,
    args: XMCTrainingArguments,
    dataset: Dataset | None,
    resumes: bool,
    extends: bool = False,
) -> Dataset:
    """Returns the training documents; raises if there are none, or if a finished model would be overwritten."""
    if dataset is None:
        raise ValueError("There is no `train_dataset`: pass one to the trainer.")
    if not extends and (model.ranker is not None or model.config.trained_levels):
        raise ValueError(
            "The model is trained already. Start from an encoder, or leave `model` out. To add documents to it, pass "
            "those of its training as `previous_dataset`."
        )
    # A run that is resumed may have been interrupted while it saved its model.
    if os.path.exists(os.path.join(str(args.output_dir), CONFIG_NAME)) and not args.overwrite and not resumes:
        raise FileExistsError(
            f"`{args.output_dir}` contains a finished model. Choose another `output_dir`, or set `overwrite=True` to "
            "replace it."
        )
    return dataset


def finished_model(args: XMCTrainingArguments, dataset: Dataset | None) -> XMCForTextClassification | None:
    """Returns the model in `args.output_dir`, if a training with these options and documents has finished there."""
    folder = str(args.output_dir)
    options = os.path.join(folder, TRAINING_ARGS_FILE)
    if dataset is None or not os.path.isfile(options) or not os.path.isfile(os.path.join(folder, CONFIG_NAME)):
        return None
    # As it is read back from JSON. The number of threads does not change the result.
    current = json.loads(json.dumps({**args.xmc_options(), "num_threads": None}))
    if {**read_json(options), "num_threads": None} != current:
        return None
    # A training that was killed while it wrote its record has no digest; the number of documents must do.
    data = TrainingRecord.load(folder).data
    if data is not None and data != documents_digest(dataset):
        return None
    model = XMCForTextClassification.from_pretrained(folder)
    return model if model.labels.num_documents == len(dataset) else None


def init_model(model_init: Callable[..., Any], trial: Any = None) -> Any:
    """Calls `model_init`, with the trial if it has a parameter. The result may be whatever [`make_model`] takes."""
    return model_init(trial) if number_of_arguments(model_init) else model_init()


def make_model(
    model: Any, args: XMCTrainingArguments, tokenizer: Any = None, dataset: Dataset | None = None
) -> XMCForTextClassification:
    """
    Returns the model to train: `model`, a new one on the encoder that it names, or on `args.encoder_name`.

    The tokenizer is by default that of the encoder. `max_length` of a new model follows the texts of `dataset` unless
    an option sets it.
    """
    name = args.encoder_name
    if isinstance(model, (str, os.PathLike)):
        name, model = os.fspath(model), None
    is_new = model is None
    if model is None:
        model = _start_model(name, args)
    elif not isinstance(model, XMCForTextClassification):
        raise TypeError(
            f"`model` is {model!r:.80}. Pass the folder or Hub id of an encoder, or an `XMCForTextClassification`."
        )
    if tokenizer is not None:
        if model.encoder is None:
            raise ValueError(f"`processing_class` has no effect: {args.method!r} has no encoder. Leave it out.")
        model.tokenizer = tokenizer
    if is_new and model.encoder is not None and args.encoder_max_length is None:
        if dataset is not None and "text" in dataset.column_names:
            model.config.max_length = _fitting_length(model, dataset["text"])
    return model


def _fitting_length(model: XMCForTextClassification, texts: Sequence[str]) -> int:
    """Number of tokens that most texts have, up to `max_length` of the model; a multiple of 8."""
    sample = texts[:: max(1, len(texts) // _NUM_SAMPLED)]
    longest = np.quantile([len(windows[0]) for windows in model.tokenize(sample)], _SHARE_THAT_FITS)
    return min(model.config.max_length, 8 * math.ceil(longest / 8))


def _start_model(name: str | None, args: XMCTrainingArguments) -> XMCForTextClassification:
    if name is not None:
        _check_encoder_name(name, args)
        args.encoder_name = name
    if not args.trains_encoder:
        return XMCForTextClassification(XMCConfig(method=args.method))
    if name is None:
        raise ValueError(
            f"The method {args.method!r} needs an encoder: pass its folder or Hub id as `model`, or `encoder_name`."
        )
    options = args.make_encoder_arguments().model_kwargs()
    return XMCForTextClassification.from_encoder(name, method=args.method, **options)


def _check_encoder_name(name: str, args: XMCTrainingArguments) -> None:
    config = os.path.join(name, CONFIG_NAME)
    if os.path.isfile(config) and read_json(config).get("model_type") in CLASSES:
        raise ValueError(
            f"`{name}` is a trained model, not an encoder. To evaluate it, pass "
            f"`XMCForTextClassification.from_pretrained({name!r})`; to train a new model, pass an encoder; to add "
            "documents to it, pass those of its training as `previous_dataset`."
        )
    if not args.trains_encoder:
        raise ValueError(
            f"`{name}` was given, but the method {args.method!r} has no encoder. Leave it out, or choose one of "
            f"{', '.join(ENCODER_METHODS)}."
        )


def remaining_mapping(mapping: Mapping[str, str], columns: Iterable[str], require_labels: bool) -> dict[str, str]:
    """Returns the part of a column mapping that has not been applied to a dataset with these columns."""
    columns = list(columns)
    # Optional labels may be missing.
    done = [*columns, *(() if require_labels else ("labels",))]
    return {source: target for source, target in mapping.items() if source in columns or target not in done}


def padded_labels(targets: csr_matrix) -> np.ndarray:
    """Column ids of each row, padded with -100."""
    lengths = np.diff(targets.indptr)
    padded = np.full((targets.shape[0], int(lengths.max(initial=0))), -100, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = targets.indices
    return padded

"""Further documents for a trained model: what is kept, what is trained again, and the checks of what is given."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets

from ..labels import Labels
from ..linear_ranker import LinearRanker
from ..modeling_xmc import XMCForTextClassification
from ..serialization import TRAINING_ARGS_FILE, read_json, resolve_file
from .arguments import XMCTrainingArguments
from .context import RunContext
from .ranker import KeptRanker
from .record import TrainingRecord, public_name
from .stages import Stage, make_features, tokenize, train_predictors

# Options that do not change a model. All others are those of its training.
_FREE_OPTIONS = ("embedding_cache", "num_threads", "eval_ks", "widget_examples")


class Extension:
    """
    A trained model that gets further documents.

    Labels, TF-IDF, label tree, encoder, heads and last scorer are kept. Of the ranker, those blocks of labels are
    trained again that have a label with a new document, on previous and new documents. Label vectors and indices of
    similar documents are made again.

    Args:
        model ([`XMCForTextClassification`] or `str`): The model, or its folder or Hub id.
        args ([`XMCTrainingArguments`]): Options of this training.
        previous (`datasets.Dataset`): The documents that the model was trained on.
        new (`datasets.Dataset`): The new documents, with the same columns.
    """

    def __init__(self, model: Any, args: XMCTrainingArguments, previous: Dataset, new: Dataset | None) -> None:
        if new is None:
            raise ValueError("`previous_dataset` needs `train_dataset`: the new documents.")
        self.model = _load(model)
        self.folder = str(self.model.name_or_path)
        self.args = extended_arguments(args, self.folder)
        self.previous, self.new = len(previous), len(new)
        self.dataset = _joined(previous, new)
        self.record = TrainingRecord.load(self.folder)
        # The parts as they were, in case that the training is interrupted and started again.
        self._labels, self._ranker, self._scorer = self.model.labels, self.model.ranker, self.model.scorer

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the training."""
        return (
            self.extend_labels,
            make_features,
            *(() if self.model.encoder is None else (tokenize,)),
            train_predictors,
        )

    def extend_labels(self, context: RunContext) -> None:
        """Encodes the labels and marks those to train again."""
        model, labels = context.model, self._labels
        assert labels is not None
        with context.stage("labels") as metrics:
            targets = labels.encode(context.dataset)
            _check_counts(labels, np.bincount(targets[: self.previous].indices, minlength=len(labels)))
            changed = np.bincount(targets[self.previous :].indices, minlength=len(labels)) > 0
            if not changed.any():
                raise ValueError(
                    "None of the new documents in `train_dataset` has a label: there is nothing to learn."
                )
            model.labels = labels = copy.copy(labels)
            labels.counts = np.bincount(targets.indices, minlength=len(labels)).astype(np.int64)
            labels.num_documents = len(context.dataset)
            context.targets, context.scorer, context.num_previous = targets, self._scorer, self.previous
            if isinstance(self._ranker, LinearRanker):
                context.kept = KeptRanker(self._ranker, changed)
            if context.label_texts is None and self.record.stages and not self.record.label_texts:
                context.label_texts = False  # as in the training of the model
            metrics.update(documents=self.new, labels=len(labels), trained_again=int(changed.sum()))

    def describe(self) -> list[dict[str, Any]]:
        """Returns all extensions of the model, for its record."""
        return []


def _load(model: Any) -> XMCForTextClassification:
    if isinstance(model, (str, os.PathLike)):
        model = XMCForTextClassification.from_pretrained(os.fspath(model))
    if not isinstance(model, XMCForTextClassification):
        raise TypeError(
            f"`previous_dataset` was given, but `model` is {type(model).__name__}. Pass the folder or Hub id of a "
            "trained model; of an ensemble, extend each model."
        )
    if model.ranker is None or model.labels is None:
        if model.config.trained_levels:
            raise ValueError(
                "The model predicts with heads alone, which only fine-tuning could adapt to further documents. Train "
                "a new model on all documents, or one with `predict_with='all'`, which can be extended."
            )
        raise ValueError("`previous_dataset` was given, but `model` is not trained. Leave out `previous_dataset`.")
    return model


def extended_arguments(args: XMCTrainingArguments, folder: str) -> XMCTrainingArguments:
    """
    Returns the options with which a model was trained; raises if others are set explicitly.

    Args:
        args ([`XMCTrainingArguments`]): Options of the new training: folders, devices, logging.
        folder (`str`): Folder or Hub id of the trained model.
    """
    path = resolve_file(folder, TRAINING_ARGS_FILE, required=False) if folder else None
    if path is None:
        raise FileNotFoundError(
            f"The options of the training of the model are missing: {TRAINING_ARGS_FILE} in `{folder or 'its folder'}`."
            " Pass the folder or Hub id of a model that `XMCTrainer` has saved."
        )
    if os.path.isdir(folder) and os.path.realpath(folder) == os.path.realpath(str(args.output_dir)):
        raise ValueError(
            f"`output_dir` is the folder of the model to extend, `{folder}`, which must stay as it is until the new "
            "one is complete. Choose another `output_dir`."
        )
    stored = read_json(str(path))
    chosen = _as_json({name: value for name, value in args.xmc_options().items() if name not in _FREE_OPTIONS})
    usual = _as_json(XMCTrainingArguments(args.output_dir, method=args.method, use_cpu=args.use_cpu).xmc_options())
    is_chosen = {name: value != usual[name] for name, value in chosen.items()}
    is_chosen["method"] = not hasattr(args, "method_reason")
    for name, value in chosen.items():
        if is_chosen[name] and name in stored and stored[name] != value:
            raise ValueError(
                f"`{name}={value!r}`, but the model was trained with `{name}={stored[name]!r}`. Further documents do "
                f"not change options: leave it out, or train a new model on all documents."
            )
    known = {name: stored[name] for name in chosen if name in stored}
    whole = XMCTrainingArguments(args.output_dir, use_cpu=args.use_cpu, **known)
    extended = copy.copy(args)
    for name in chosen:
        setattr(extended, name, getattr(whole, name))
    return extended


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(options))


def _joined(previous: Dataset, new: Dataset) -> Dataset:
    """Returns all documents, the previous ones first."""
    if set(previous.column_names) != set(new.column_names):
        raise ValueError(
            f"`previous_dataset` has the columns {', '.join(previous.column_names)} and `train_dataset` "
            f"{', '.join(new.column_names)}. Both need the same."
        )
    kinds = previous.features
    if new.features["labels"] != kinds["labels"]:
        # Labels that are numbers in one of them have the same names as strings.
        kinds = Features({**kinds, "labels": List(Value("string"))})
    parts = [part if part.features == kinds else part.cast(kinds) for part in (previous, new)]
    return concatenate_datasets(parts, split=previous.split)


def _check_counts(labels: Labels, counts: np.ndarray) -> None:
    """Raises if documents are not those that a model was trained on: their labels must be as frequent."""
    wrong = np.flatnonzero(counts != labels.counts)
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"`previous_dataset` is not what the model was trained on: the label {labels.names[first]!r} has "
            f"{counts[first]:,} documents there and {labels.counts[first]:,} in the model, and {len(wrong) - 1:,} "
            f"other labels differ, too. Pass all {labels.num_documents:,} documents of its training, and none of the "
            "new ones: labels that occur in new documents are learnt from both."
        )

"""Further documents for a trained model: what is kept, what is trained again, and the checks of what is given."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import numpy as np
from datasets import Dataset, List, Value, concatenate_datasets
from datasets import Features as Columns
from scipy.sparse import csc_matrix, diags

from ..features import Features
from ..label_columns import distinct_names
from ..labels import Labels
from ..linear_ranker import LinearRanker, sparse_part
from ..modeling_xmc import XMCForTextClassification
from ..serialization import TRAINING_ARGS_FILE, read_json, resolve_file
from .arguments import XMCTrainingArguments
from .context import RunContext
from .ranker import KeptRanker
from .record import TrainingRecord, public_name
from .stages import Stage, make_features, tokenize, train_predictors

logger = logging.getLogger(__name__)

# Options that do not change a model. All others are those of its training.
_FREE_OPTIONS = ("embedding_cache", "num_threads", "eval_ks", "widget_examples")
_CHANGED_PARTS = ("labels", "label_tree", "ranker", "label_vectors", "knn", "knn_vectors", "scorer")


class Extension:
    """
    A trained model that gets further documents (`new`), with the same columns as those of its training (`previous`).

    TF-IDF, label tree, encoder, heads and last scorer are kept. The ranker becomes that of a training on previous and
    new documents, except for blocks of labels without new documents, which stay. Label vectors and the indices of
    similar documents are made again. Labels that only new documents have are added.
    """

    def __init__(self, model: Any, args: XMCTrainingArguments, previous: Dataset, new: Dataset | None) -> None:
        if new is None:
            raise ValueError("`previous_dataset` needs `train_dataset`: the new documents.")
        self.model = _load(model)
        folder = str(self.model.name_or_path)
        self.args = extended_arguments(args, folder)
        self.previous = len(previous)
        self.dataset = _joined(self.model, previous, new)
        self.record = TrainingRecord.load(folder)
        # The parts as they are now, in case that the training is interrupted and started again.
        self._parts = {name: getattr(self.model, name) for name in _CHANGED_PARTS}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the training."""
        reads_tokens = () if self.model.encoder is None else (tokenize,)
        return (self.prepare, make_features, *reads_tokens, self.extend_labels, train_predictors)

    def prepare(self, context: RunContext) -> None:
        """Checks the previous documents."""
        for name, part in self._parts.items():
            setattr(self.model, name, part)
        labels, new = self.labels, context.dataset.select(range(self.previous, len(context.dataset)))
        with context.stage("previous documents") as metrics:
            targets = labels.encode(context.dataset.select(range(self.previous)))
            _check_counts(labels, np.bincount(targets.indices, minlength=len(labels)))
            self._new_names = _label_names(new, labels)
            _check_any(bool(self._new_names) or labels.encode(new).nnz > 0)
            metrics.update(documents=self.previous)
        context.num_previous, context.scorer = self.previous, self._parts["scorer"]
        ranker = self.model.ranker
        if isinstance(ranker, LinearRanker):
            context.kept = KeptRanker(ranker, np.zeros(len(labels), np.bool_))
        if context.label_texts is None and self.record.stages and not self.record.label_texts:
            context.label_texts = False  # as in the training of the model

    def extend_labels(self, context: RunContext) -> None:
        """Adds new labels, encodes all and marks those to train again."""
        model = self.model
        with context.stage("labels") as metrics:
            if self._new_names:
                self._add_labels(context)
            labels = model.labels = copy.copy(self.labels)
            context.targets = targets = labels.encode(context.dataset)
            labels.counts = np.bincount(targets.indices, minlength=len(labels)).astype(np.int64)
            labels.num_documents = len(context.dataset)
            changed = np.bincount(targets[self.previous :].indices, minlength=len(labels)) > 0
            _check_any(bool(changed.any()))
            if isinstance(model.ranker, LinearRanker):
                context.kept = KeptRanker(model.ranker, changed)
            metrics.update(labels=len(labels), trained_again=int(changed.sum()))

    def _add_labels(self, context: RunContext) -> None:
        """Adds labels to the tree, where the ranker looks for their documents; they are trained with the others."""
        features = context.features
        if self.model.encoder is not None:
            features = Features(features.sparse, context.vectors())
        is_known = np.diff(sparse_part(features).indptr) > 0 if features.dense is None else features.dense.any(axis=1)
        targets = csc_matrix(diags(np.asarray(is_known, np.float32)) @ Labels(self._new_names).encode(context.dataset))
        targets.eliminate_zeros()
        examples = {name: features[targets[:, i].indices] for i, name in enumerate(self._new_names)}
        for name in [name for name, rows in examples.items() if not len(rows)]:
            logger.warning("The new label %r is left out: no term of its documents is known to the model.", name)
            del examples[name]
        texts: Mapping[str, Any] = context.label_texts or {}
        self._new_names = list(examples)
        if examples:
            self.model.add_labels({name: texts.get(name) for name in examples}, examples)

    @property
    def labels(self) -> Labels:
        """The labels of the model."""
        return self.model.checked_labels()

    def describe(self) -> list[dict[str, Any]]:
        """Returns all extensions of the model, for its record."""
        own = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "model": public_name(str(self.model.name_or_path)),
            "previous_documents": self.previous,
            "documents": len(self.dataset) - self.previous,
            "labels": len(self._new_names),
        }
        return [*self.record.extensions, own]


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


def check_extension(model: Any, previous: Any) -> None:
    """Raises if only one of the two is given that an extension needs."""
    if (model is None) != (previous is None):
        raise ValueError(
            "A model is extended with `extend` (`--extend`), the trained model, and `previous` (`--previous`), the "
            "data that it was trained on: classifiers are learnt from previous and new documents. Give both."
        )


def extended_arguments(args: XMCTrainingArguments, folder: str) -> XMCTrainingArguments:
    """
    Returns the options with which the model in a folder was trained; raises if `args` sets others explicitly.

    Folders, devices and logging are those of `args`.
    """
    path = resolve_file(folder, TRAINING_ARGS_FILE, required=False) if folder else None
    if path is None:
        raise FileNotFoundError(
            f"The model has no {TRAINING_ARGS_FILE} with the options of its training. Pass the folder or Hub id of a "
            "model that `XMCTrainer` has saved."
        )
    if os.path.isdir(folder) and os.path.realpath(folder) == os.path.realpath(str(args.output_dir)):
        raise ValueError(
            f"`output_dir` is the folder of the model to extend, `{folder}`, which must stay as it is until the new "
            "one is complete. Choose another `output_dir`."
        )
    stored = read_json(str(path))
    chosen = _as_json({name: value for name, value in args.xmc_options().items() if name not in _FREE_OPTIONS})
    is_auto = hasattr(args, "method_reason")
    usual = XMCTrainingArguments(args.output_dir, method="auto" if is_auto else args.method, use_cpu=args.use_cpu)
    defaults = _as_json(usual.xmc_options())
    is_chosen = {name: value != defaults[name] for name, value in chosen.items()}
    is_chosen["method"] = not is_auto
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
    # `None` stands for what the last scorer has kept.
    extended.similar_documents = stored.get("similar_documents")
    return extended


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(options))


def _joined(model: XMCForTextClassification, previous: Dataset, new: Dataset) -> Dataset:
    """Returns all documents, the previous ones first, with the columns that the model reads."""
    reads_text = model.tfidf is not None or model.encoder is not None
    columns = ["text", "labels"] if reads_text else ["feature_ids", "feature_values", "labels"]
    for name, dataset in {"previous_dataset": previous, "train_dataset": new}.items():
        if set(columns) - set(dataset.column_names):
            raise ValueError(
                f"The model reads the columns {', '.join(columns)}; `{name}` has {', '.join(dataset.column_names)}. "
                "Pass documents like those of its training."
            )
    previous, new = previous.select_columns(columns), new.select_columns(columns)
    kinds = previous.features
    if new.features["labels"] != kinds["labels"]:
        # Labels that are numbers in one of them have the same names as strings.
        kinds = Columns({**kinds, "labels": List(Value("string"))})
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


def _check_any(has_labels: bool) -> None:
    if not has_labels:
        raise ValueError(
            "None of the new documents in `train_dataset` has a label that the model can learn. Check the column of "
            "the labels."
        )


def _label_names(dataset: Dataset, known: Labels) -> list[str]:
    """Returns the labels of documents that are not known."""
    if not any(map(len, dataset["labels"])):
        return []
    names = distinct_names(dataset, "labels")
    return [name for name, place in zip(names, known.ids(names), strict=True) if place < 0]

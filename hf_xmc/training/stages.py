"""
The stages of a training, in order.

Linear methods run [`LINEAR_STAGES`]. Methods with an encoder run [`PREPARATION`], then fine-tune level by level
(`levels.py`: shortlist, bootstrap, training steps), then run [`COMPLETION`].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix, vstack

from ..data import feature_matrix
from ..evaluation.metrics import XMCMetrics
from ..features import Features
from ..inference.predict import map_batches
from ..knn_ranker import KNNRanker
from ..label_tree import LabelTree
from ..labels import Labels
from ..linear_ranker import Beam, LinearRanker
from ..modeling_utils import mix_scores
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime
from ..serialization import load_tensors, save_tensors
from ..tfidf import TfidfFeaturizer
from ..utils import Progress
from .bootstrap import match_documents
from .clustering import build_tree, frequency_tree
from .context import RunContext
from .embedding import tokenize_dataset
from .knn import index_documents
from .label_features import check_label_texts, describe_labels, label_documents
from .options import TreeArguments
from .ranker import train_ranker

_MATRIX_FILE = "matrix.safetensors"
# Weights of the heads that are compared on validation documents, and the weight without such documents.
_HEADS_WEIGHTS = np.arange(0, 1.01, 0.05)
_DEFAULT_HEADS_WEIGHT = 0.2
_CHOSEN_BY = "nDCG@5"

Stage = Callable[[RunContext], None]


def encode_labels(context: RunContext) -> None:
    """Collects the labels, unless the model has them, and encodes those of the documents."""
    model, dataset = context.model, context.dataset
    with context.stage("labels") as metrics:
        if model.labels is None:
            model.labels = Labels.from_dataset(dataset, texts=context.label_texts)
        context.targets = model.labels.encode(dataset)
        metrics.update(documents=len(dataset), labels=len(model.labels))


def make_features(context: RunContext) -> None:
    """Computes the sparse features of the documents; fits TF-IDF on texts, unless the model has it."""
    model, args, dataset = context.model, context.args, context.dataset
    with context.stage("features") as metrics:
        has_text, has_vectors = "text" in dataset.column_names, "feature_ids" in dataset.column_names
        kind = args.features or ("text" if has_text else "vectors")
        if kind == "vectors" and model.encoder is not None and has_text:
            raise ValueError("`features='vectors'` needs a linear method: beside an encoder the ranker reads TF-IDF.")
        if not (has_text if kind == "text" else has_vectors):
            raise ValueError(f"`features={kind!r}`, but the training data has only {', '.join(dataset.column_names)}.")
        if kind == "vectors":
            model.config.vector_power = args.feature_power
            context.features = model.prepare_vectors(Features(feature_matrix(dataset)))
        else:
            model.tfidf, matrix = context.runtime.cache.once(
                "tf-idf", lambda: _fit_tfidf(context), _save_tfidf, _load_tfidf
            )
            context.features = Features(matrix)
        metrics.update(features=context.features.num_sparse)
    if args.label_text_weight:
        # The ranker needs the texts at the end; a missing one should fail now.
        check_label_texts(model, "label_text_weight", args.label_text_weight)


def _fit_tfidf(context: RunContext) -> tuple[TfidfFeaturizer, csr_matrix]:
    runtime, texts = context.runtime, context.dataset["text"]
    tfidf = context.model.tfidf
    if tfidf is None:
        tfidf = context.args.make_tfidf()
        tfidf.fit(CountedTexts(texts, "tf-idf: fit", runtime.progress), num_threads=runtime.num_threads)
    counted = CountedTexts(texts, "tf-idf: transform", runtime.progress)
    return tfidf, tfidf.transform(counted, num_threads=runtime.num_threads)


def _save_tfidf(result: tuple[TfidfFeaturizer, csr_matrix], folder: str) -> None:
    tfidf, matrix = result
    tfidf.save_pretrained(folder)
    arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}
    save_tensors(os.path.join(folder, _MATRIX_FILE), arrays, "sparse matrix")


def _load_tfidf(folder: str) -> tuple[TfidfFeaturizer, csr_matrix]:
    tfidf = TfidfFeaturizer.from_pretrained(folder)
    arrays, _ = load_tensors(os.path.join(folder, _MATRIX_FILE), "sparse matrix")
    shape = (len(arrays["indptr"]) - 1, tfidf.num_features)
    # The constructor of a filled matrix would read and copy the memory-mapped arrays.
    matrix = csr_matrix(shape, dtype=arrays["data"].dtype)
    matrix.data, matrix.indices, matrix.indptr = arrays["data"], arrays["indices"], arrays["indptr"]
    return tfidf, matrix


def tokenize(context: RunContext) -> None:
    """Tokenises the documents."""
    with context.stage("tokens"):
        context.tokens = context.runtime.cache.once(
            "tokens",
            lambda: tokenize_dataset(context.model, context.dataset),
            Dataset.save_to_disk,
            Dataset.load_from_disk,
        )


def make_tree(context: RunContext) -> None:
    """Builds the label tree, unless the model has one."""
    model, targets = context.model, context.targets
    features = context.features
    if context.args.label_features == "embedding" and model.label_tree is None:
        features = Features(None, context.vectors())
    with context.stage("tree") as metrics:
        if model.label_tree is None:
            model.label_tree = _build_tree(context, features, context.args.make_tree_arguments())
        elif model.label_tree.num_labels != targets.shape[1]:
            raise ValueError(
                f"The label tree has {model.label_tree.num_labels} labels, the training data {targets.shape[1]}. "
                "Build the tree from these labels, or leave it out."
            )
        metrics.update(depth=model.label_tree.depth)


def _build_tree(context: RunContext, features: Features, arguments: TreeArguments) -> LabelTree:
    model, targets, runtime = context.model, context.targets, context.runtime
    if arguments.clustering == "flat":
        return LabelTree.flat(targets.shape[1])
    if arguments.clustering == "frequency":
        counts = np.bincount(targets.indices, minlength=targets.shape[1])
        return frequency_tree(counts, arguments.shares, arguments.shares_of)

    def build() -> LabelTree:
        label_features = describe_labels(model, features, targets, context.args.label_features, runtime.num_threads)
        return build_tree(label_features, arguments, runtime)

    return runtime.cache.once("label tree", build, LabelTree.save_pretrained, LabelTree.from_pretrained)


def train_linear_ranker(context: RunContext) -> None:
    """Trains the ranker of a linear method."""
    _train_ranker(context, context.features)


def train_encoder_ranker(context: RunContext) -> None:
    """Trains the ranker on TF-IDF beside the vectors of the fine-tuned encoder, on a refined tree if asked for."""
    model, args = context.model, context.args
    model.config.embedding_scale = args.embedding_scale
    model.config.predict_with = str(args.predict_with)
    if args.predict_with == "heads":
        return
    features = model.ranker_features(Features(context.features.sparse, context.vectors()))
    tree, shape = None, args.make_tree_arguments()
    if args.refine_tree or shape.clustering == "frequency":
        # Labels of a tail cluster are alike only in being rare, so the ranker gets a tree by features.
        if shape.clustering == "frequency":
            shape = replace(shape, clustering="balanced")
        with context.stage("refined tree"):
            tree = _build_tree(context, features, shape)
    _train_ranker(context, features, tree, _match(context))


def _match(context: RunContext) -> Beam | None:
    """Returns the nodes that the heads predict above the labels, if the heads are the ranker's matcher."""
    model, arguments = context.model, context.args.make_ranker_arguments()
    assert model.label_tree is not None
    above = [level for level in model.config.head_levels or () if level < model.label_tree.depth]
    if arguments.matcher != "heads" or not above:
        return None
    vectors = context.vectors()
    with context.stage("match"):
        return match_documents(model, vectors, above[-1], arguments.train_beam_size, context.runtime)


def _train_ranker(
    context: RunContext, features: Features, tree: LabelTree | None = None, initial_beam: Beam | None = None
) -> None:
    """Trains the ranker on a tree, by default that of the model; label texts are further documents if weighted."""
    model, args, targets = context.model, context.args, context.targets
    tree = model.label_tree if tree is None else tree
    assert tree is not None
    ranker: LinearRanker | KNNRanker
    with context.stage("ranker") as metrics:
        if args.label_text_weight:
            texts, text_labels = label_documents(model, args.label_text_weight, context.runtime.num_threads)
            features, targets = features.followed_by(texts), csr_matrix(vstack([targets, text_labels], format="csr"))
            metrics.update(label_documents=len(texts))
        if args.uses_knn:
            ranker = index_documents(features, targets, tree, args.make_knn_arguments())
        else:
            ranker = train_ranker(features, targets, tree, args.make_ranker_arguments(), context.runtime, initial_beam)
        model.ranker = ranker
        metrics.update(ranker_bytes=ranker.num_bytes)


def choose_heads_weight(context: RunContext) -> None:
    """Sets the weight of the heads where heads and ranker predict together."""
    model, args, config = context.model, context.args, context.model.config
    if args.predict_with != "both":
        return
    assert model.label_tree is not None
    if model.label_tree.depth not in (config.head_levels or ()):
        config.predict_with = "ranker"
        return
    if args.heads_weight is not None or context.validation is None:
        config.heads_weight = _DEFAULT_HEADS_WEIGHT if args.heads_weight is None else args.heads_weight
    else:
        with context.stage("heads' weight") as metrics:
            config.heads_weight, best = best_heads_weight(
                model, context.validation, args.per_device_eval_batch_size, context.runtime
            )
            metrics.update({"heads_weight": config.heads_weight, f"eval_{_CHOSEN_BY}": best})
    if config.heads_weight == 0:
        config.predict_with = "ranker"


@torch.no_grad()
def best_heads_weight(
    model: XMCForTextClassification, dataset: Dataset, batch_size: int, runtime: Runtime = Runtime()
) -> tuple[float, float]:
    """
    Chooses the weight of the heads in a label's score by nDCG@5.

    Args:
        model ([`XMCForTextClassification`]): A model with heads for the labels and a ranker.
        dataset (`datasets.Dataset`): Validation documents with labels.
        batch_size (`int`): Documents in a batch of the encoder.
        runtime ([`Runtime`], *optional*): Threads, progress and cache.

    Returns:
        `tuple[float, float]`: the weight and its nDCG@5.
    """
    assert model.labels is not None
    truth: csr_matrix = model.labels.encode(dataset, keep_unseen=True)
    results = {float(weight): XMCMetrics(ks=(1, 5)) for weight in _HEADS_WEIGHTS}

    def rank(features: Features) -> dict[str, np.ndarray]:
        ranker_scores, head_scores, indices = model.candidate_scores(features, 5, num_threads=runtime.num_threads)
        best = [mix_scores(ranker_scores, head_scores, indices, weight, 5).indices for weight in results]
        return {str(weight): ids.cpu().numpy() for weight, ids in zip(results, best, strict=True)}  # type: ignore[union-attr]

    start = 0
    for best in map_batches(model, dataset, rank, batch_size=batch_size, runtime=runtime):
        count = len(next(iter(best.values())))
        for weight, metrics in results.items():
            metrics.update(best[str(weight)], truth[start : start + count])
        start += count
    values = {weight: metrics.compute()[_CHOSEN_BY] for weight, metrics in results.items()}
    chosen = max(values, key=lambda weight: (values[weight], -weight))
    return round(chosen, 2), values[chosen]


class CountedTexts(Sequence):
    """
    Texts that report how many of them have been read.

    Args:
        texts (`Sequence[str]`): A list or the column of a dataset.
        stage (`str`): Name of the stage.
        progress (`Callable`, *optional*): Called with (stage, done, total).
    """

    def __init__(self, texts: Sequence[str], stage: str, progress: Progress | None) -> None:
        self._texts, self._stage, self._progress = texts, stage, progress

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, rows: Any) -> Any:
        if self._progress is not None:
            last = rows.indices(len(self))[1] if isinstance(rows, slice) else rows + 1
            self._progress(self._stage, last, len(self))
        return self._texts[rows]


LINEAR_STAGES: tuple[Stage, ...] = (encode_labels, make_features, make_tree, train_linear_ranker)
PREPARATION: tuple[Stage, ...] = (encode_labels, make_features, tokenize, make_tree)
COMPLETION: tuple[Stage, ...] = (train_encoder_ranker, choose_heads_weight)

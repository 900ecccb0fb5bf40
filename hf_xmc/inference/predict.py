"""Predicting and measuring whole datasets, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..data import feature_matrix
from ..ensemble_xmc import MemberFeatures, XMCEnsemble
from ..evaluation.metrics import XMCMetrics
from ..features import Features
from ..modeling_utils import PredictMixin
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import NO_CACHE, StageCache
from ..utils import Progress

# Documents in memory at a time.
BATCH_SIZE = 4096
# The same where an encoder reads them: enough to sort by length, few enough to see the progress.
_ENCODED_TOGETHER = 1024


def document_features(
    model: PredictMixin, dataset: Dataset, num_threads: int | None = None
) -> Features | MemberFeatures:
    """
    Features of the documents of a dataset, as the model was trained on them.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]):
            A trained model: one with TF-IDF reads the column `text`, any other the vectors.
        dataset (`datasets.Dataset`):
            Documents in the columns of [`prepare_dataset`].
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
    """
    if isinstance(model, XMCEnsemble):
        return MemberFeatures([_own_features(member, dataset, num_threads) for member in model.models])
    assert isinstance(model, XMCForTextClassification)
    return _own_features(model, dataset, num_threads)


def _own_features(model: XMCForTextClassification, dataset: Dataset, num_threads: int | None) -> Features:
    if model.ranker is None and model.encoder is None:
        raise ValueError("The model is not trained: it has no ranker. Train it with `XMCTrainer`, or load one.")
    needed = "text" if reads_text(model) else "feature_ids"
    if needed not in dataset.column_names:
        kind = "texts" if needed == "text" else "vectors (`feature_ids` and `feature_values`)"
        raise ValueError(
            f"The model was trained on {kind}, but the dataset has only {', '.join(dataset.column_names)}."
        )
    if needed == "text":
        return model.featurize(dataset["text"], num_threads)
    assert model.ranker is not None
    return model.prepare_vectors(Features(feature_matrix(dataset, model.ranker.num_sparse)))


def reads_text(model: XMCForTextClassification) -> bool:
    """Whether a model takes texts; it takes vectors otherwise."""
    return model.tfidf is not None or model.encoder is not None


@torch.no_grad()
def map_batches(
    model: PredictMixin,
    dataset: Dataset,
    function: Callable[[Any], Mapping[str, np.ndarray]],
    batch_size: int = BATCH_SIZE,
    num_threads: int | None = None,
    report: Progress | None = None,
    work: StageCache = NO_CACHE,
) -> Iterator[Mapping[str, np.ndarray]]:
    """
    Yields what a function makes of the features of one batch of documents after another.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]):
            A trained model.
        dataset (`datasets.Dataset`):
            Documents in the columns of [`prepare_dataset`].
        function (`Callable[[Features], Mapping[str, np.ndarray]]`):
            Makes arrays of the features of a batch.
        batch_size (`int`, *optional*, defaults to 4096):
            Documents in memory at a time.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
        report (`Callable`, *optional*):
            Called with (stage, done, total).
        work ([`StageCache`], *optional*):
            Shares the batches out over processes; this process alone by default.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, not {batch_size}.")
    models = model.models if isinstance(model, XMCEnsemble) else [model]
    if any(getattr(own, "encoder", None) is not None for own in models):
        batch_size = min(batch_size, _ENCODED_TOGETHER)
    starts = range(0, len(dataset), batch_size)

    def make(indices: Sequence[int]) -> Iterator[Mapping[str, np.ndarray]]:
        for index in indices:
            stop = min(starts[index] + batch_size, len(dataset))
            batch = dataset.select(range(starts[index], stop))
            yield function(document_features(model, batch, num_threads))
            if report is not None:
                report("predict", stop, len(dataset))

    yield from work.pieces("predictions", len(starts), make)


def predict_batches(
    model: PredictMixin,
    dataset: Dataset,
    top_k: int | None = None,
    beam_size: int | None = None,
    batch_size: int = BATCH_SIZE,
    num_threads: int | None = None,
    report: Progress | None = None,
    work: StageCache = NO_CACHE,
    predict_with: str | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """
    Yields scores and label ids, `(documents, top_k)` each, of one batch of documents after another.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]):
            A trained model.
        dataset (`datasets.Dataset`):
            Documents in the columns of [`prepare_dataset`].
        top_k (`int`, *optional*):
            Labels per document; that of the model by default.
        beam_size (`int`, *optional*):
            Nodes kept per level; that of the model by default.
        batch_size (`int`, *optional*, defaults to 4096):
            Documents in memory at a time.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
        report (`Callable`, *optional*):
            Called with (stage, done, total).
        work ([`StageCache`], *optional*):
            Shares the batches out over processes; this process alone by default.
        predict_with (`str`, *optional*):
            `"ranker"`, `"heads"` or `"both"`; that of the model by default.
    """

    def predict(features: Any) -> dict[str, np.ndarray]:
        output = model(features, top_k, beam_size, num_threads, predict_with)
        return {"scores": output.scores.cpu().numpy(), "indices": output.indices.cpu().numpy()}

    for arrays in map_batches(model, dataset, predict, batch_size, num_threads, report, work):
        yield arrays["scores"], arrays["indices"]


def evaluate_model(
    model: PredictMixin,
    dataset: Dataset,
    ks: Iterable[int] | None = None,
    beam_size: int | None = None,
    batch_size: int = BATCH_SIZE,
    num_threads: int | None = None,
    report: Progress | None = None,
    work: StageCache = NO_CACHE,
) -> XMCMetrics:
    """
    Predicts a dataset and compares with its labels. Labels that training did not see count as missed.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]):
            A trained model.
        dataset (`datasets.Dataset`):
            Documents with labels, in the columns of [`prepare_dataset`].
        ks (`Iterable[int]`, *optional*):
            Lengths of the ranking at which to measure; those of [`XMCMetrics`] by default.
        beam_size (`int`, *optional*):
            Nodes kept per level; that of the model by default.
        batch_size (`int`, *optional*, defaults to 4096):
            Documents in memory at a time.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
        report (`Callable`, *optional*):
            Called with (stage, done, total).
        work ([`StageCache`], *optional*):
            Shares the batches out over processes, which get the same result; this process alone by default.
    """
    labels = model.labels
    if labels is None:
        raise ValueError("The model has no labels. Train it with `XMCTrainer`, or load a trained one.")
    truth = labels.encode(dataset, keep_unseen=True)
    if not (truth.indices < len(labels)).any():
        shown: list = next((row["labels"] for row in dataset if row["labels"]), [])[:3]
        raise ValueError(
            f"No label of the dataset is one of the model's {len(labels)} labels: it has such as {shown}, the model "
            f"such as {labels.names[:3]}. Check the column of labels and that both name labels the same way."
        )
    known = {"counts": labels.counts, "num_documents": labels.num_documents} if labels.num_documents else {}
    metrics = XMCMetrics(**known, **({} if ks is None else {"ks": ks}))  # type: ignore[arg-type]
    start = 0
    batches = predict_batches(model, dataset, metrics.ks[-1], beam_size, batch_size, num_threads, report, work)
    for _, indices in batches:
        metrics.update(indices, truth[start : start + len(indices)])
        start += len(indices)
    return metrics


@torch.no_grad()
def evaluate_level(
    model: XMCForTextClassification,
    dataset: Dataset,
    level: int,
    ks: Iterable[int] | None = None,
    num_threads: int | None = None,
    report: Progress | None = None,
    work: StageCache = NO_CACHE,
) -> XMCMetrics:
    """
    Compares the nodes that the heads find at one level with the true ones.

    Args:
        model ([`XMCForTextClassification`]):
            A model with heads down to the level.
        dataset (`datasets.Dataset`):
            Documents with labels, in the columns of [`prepare_dataset`].
        level (`int`):
            Level of the tree, counted from 1.
        ks (`Iterable[int]`, *optional*):
            Lengths of the ranking at which to measure; those of [`XMCMetrics`] by default.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
        report (`Callable`, *optional*):
            Called with (stage, done, total).
        work ([`StageCache`], *optional*):
            See [`evaluate_model`].
    """
    labels, tree = model.labels, model.label_tree
    assert labels is not None and tree is not None
    truth = tree.targets(labels.encode(dataset))[level - 1]
    metrics = XMCMetrics(**({} if ks is None else {"ks": ks}))  # type: ignore[arg-type]
    texts = dataset["text"]

    def search(start: int, stop: int) -> dict[str, np.ndarray]:
        vectors = torch.from_numpy(model.embed(texts[start:stop])).to(model.device)
        if report is not None:
            report("evaluate", stop, len(dataset))
        return {"nodes": model.search_level(vectors, level, metrics.ks[-1])[1].cpu().numpy()}

    metrics.update(work.rows("nodes", len(dataset), search)["nodes"], truth)
    return metrics

"""Prediction and evaluation of whole datasets, one chunk of documents at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset

from ..data import feature_matrix
from ..ensemble_xmc import MemberFeatures, XMCEnsemble
from ..evaluation.metrics import XMCMetrics
from ..features import Features
from ..modeling_utils import PREDICT_CHUNK, PredictMixin
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime
from ..utils import check_count

BATCH_SIZE = 32
"""Texts that pass through an encoder together, by default."""
CHUNK_SIZE = PREDICT_CHUNK
"""Documents in memory at a time."""
ENCODER_CHUNK_SIZE = 1024
"""The same for a model with an encoder: enough to sort by length, few enough to show progress."""

Documents: TypeAlias = Dataset | Mapping[str, Sequence[Any]]
"""Columns of documents: `text`, or `feature_ids` and `feature_values`."""


def chunk_size(model: PredictMixin, batch_size: int) -> int:
    """Number of documents to hold in memory at a time: at least one batch of the encoder."""
    if all(member.encoder is None for member in members_of(model)):
        return CHUNK_SIZE
    return max(batch_size, min(CHUNK_SIZE, ENCODER_CHUNK_SIZE))


def members_of(model: PredictMixin) -> list[XMCForTextClassification]:
    """The models of an ensemble, or the model itself."""
    return model.models if isinstance(model, XMCEnsemble) else [model]  # type: ignore[list-item]


def reads_text(model: XMCForTextClassification) -> bool:
    """Whether a model reads texts. Otherwise it reads vectors."""
    return model.tfidf is not None or model.encoder is not None


def document_features(
    model: PredictMixin, documents: Documents, batch_size: int = BATCH_SIZE, num_threads: int | None = None
) -> Features | MemberFeatures:
    """Features of documents, in the columns of [`prepare_dataset`], as the model was trained on them."""
    features = [_member_features(member, documents, batch_size, num_threads) for member in members_of(model)]
    return MemberFeatures(features) if isinstance(model, XMCEnsemble) else features[0]


def _member_features(
    model: XMCForTextClassification, documents: Documents, batch_size: int, num_threads: int | None
) -> Features:
    if model.ranker is None and model.encoder is None:
        raise ValueError("The model is not trained: it has no ranker. Train it with `XMCTrainer`, or load one.")
    needed = "text" if reads_text(model) else "feature_ids"
    if needed not in (columns := list(documents.column_names if isinstance(documents, Dataset) else documents)):
        kind = "texts" if needed == "text" else "vectors (`feature_ids` and `feature_values`)"
        raise ValueError(f"The model was trained on {kind}, but the columns of the dataset are {', '.join(columns)}.")
    if needed == "text":
        return model.featurize(documents["text"][:], num_threads, batch_size)
    assert model.ranker is not None
    if not isinstance(documents, Dataset):
        documents = Dataset.from_dict({name: documents[name] for name in ("feature_ids", "feature_values")})
    return model.prepare_vectors(Features(feature_matrix(documents, model.ranker.num_sparse)))


@torch.no_grad()
def map_batches(
    model: PredictMixin,
    dataset: Dataset,
    function: Callable[[Any], Mapping[str, np.ndarray]],
    batch_size: int = BATCH_SIZE,
    runtime: Runtime = Runtime(),
) -> Iterator[Mapping[str, np.ndarray]]:
    """
    Applies a function to the features of one chunk of documents after another.

    The documents are in the columns of [`prepare_dataset`], `batch_size` texts pass through an encoder together. The
    cache of `runtime` shares the chunks among processes.
    """
    size = chunk_size(model, check_count("batch_size", batch_size))
    starts = range(0, len(dataset), size)

    def make(indices: Sequence[int]) -> Iterator[Mapping[str, np.ndarray]]:
        for index in indices:
            stop = min(starts[index] + size, len(dataset))
            chunk = dataset.select(range(starts[index], stop))
            yield function(document_features(model, chunk, batch_size, runtime.num_threads))
            runtime.report("predict", stop, len(dataset))

    yield from runtime.cache.pieces("predictions", len(starts), make)


def predict_batches(
    model: PredictMixin,
    dataset: Dataset,
    top_k: int | None = None,
    beam_size: int | None = None,
    predict_with: str | None = None,
    batch_size: int = BATCH_SIZE,
    runtime: Runtime = Runtime(),
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """
    Yields scores and label ids, `(documents, top_k)` each, of one chunk of documents after another.

    The arguments are those of [`map_batches`] and of the model.
    """

    def predict(features: Any) -> dict[str, np.ndarray]:
        output = model(features, top_k, beam_size, runtime.num_threads, predict_with)
        return {"scores": output.scores.cpu().numpy(), "indices": output.indices.cpu().numpy()}

    for arrays in map_batches(model, dataset, predict, batch_size, runtime):
        yield arrays["scores"], arrays["indices"]


def evaluate_model(
    model: PredictMixin,
    dataset: Dataset,
    ks: Iterable[int] | None = None,
    beam_size: int | None = None,
    predict_with: str | None = None,
    batch_size: int = BATCH_SIZE,
    runtime: Runtime = Runtime(),
) -> XMCMetrics:
    """
    Predicts a dataset and compares with its labels, in every process. Labels unknown to the model count as missed.

    `ks` are by default those of [`XMCMetrics`]; the other arguments are those of [`predict_batches`].
    """
    labels = model.checked_labels()
    truth = labels.encode(dataset, keep_unseen=True)
    if not (truth.indices < len(labels)).any():
        examples: list = next((row["labels"] for row in dataset if row["labels"]), [])[:3]
        raise ValueError(
            f"The dataset has none of the model's {len(labels)} labels: its labels are like {examples}, the model's "
            f"like {labels.names[:3]}. Check the label column and that both use the same names."
        )
    options: dict[str, Any] = {"hierarchy": labels.hierarchy, **({} if ks is None else {"ks": ks})}
    if labels.num_documents:
        options.update(counts=labels.counts, num_documents=labels.num_documents)
    metrics = XMCMetrics(**options)
    start = 0
    for _, indices in predict_batches(model, dataset, metrics.ks[-1], beam_size, predict_with, batch_size, runtime):
        missing = metrics.ks[-1] - indices.shape[1]  # a model with few labels predicts no more than it has
        padded = np.pad(indices, [(0, 0), (0, max(0, missing))], constant_values=-1)
        metrics.update(padded, truth[start : start + len(indices)])
        start += len(indices)
    return metrics


@torch.no_grad()
def evaluate_level(
    model: XMCForTextClassification,
    dataset: Dataset,
    level: int,
    ks: Iterable[int] | None = None,
    batch_size: int = BATCH_SIZE,
    runtime: Runtime = Runtime(),
) -> XMCMetrics:
    """
    Compares the nodes that the heads predict at one level of the tree, counted from 1, with the true nodes.

    The other arguments are those of [`evaluate_model`].
    """
    labels, tree = model.labels, model.label_tree
    assert labels is not None and tree is not None
    truth = tree.targets(labels.encode(dataset))[level - 1]
    metrics = XMCMetrics(**({} if ks is None else {"ks": ks}))  # type: ignore[arg-type]
    texts = dataset["text"]

    def search(start: int, stop: int) -> dict[str, np.ndarray]:
        vectors = torch.from_numpy(model.embed(texts[start:stop], batch_size)).to(model.device)
        runtime.report("evaluate", stop, len(dataset))
        return {"nodes": model.search_level(vectors, level, metrics.ks[-1])[1].cpu().numpy()}

    metrics.update(runtime.cache.rows("nodes", len(dataset), search)["nodes"], truth)
    return metrics

"""Label features: the vectors from which the label tree is built, and label texts as training documents."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix, hstack

from ..features import Features
from ..label_tree import binarized
from ..utils import count_threads, run_in_threads
from .kernels_cluster import aggregate_rows, close_gaps, entry_bounds

if TYPE_CHECKING:  # training a ranker on vectors does not import the model
    from ..modeling_xmc import XMCForTextClassification

# The kinds from the fourth on need an encoder.
LABEL_FEATURES = ("pifa", "text", "both", "embedding", "text-embedding")
ENCODER_LABEL_FEATURES = LABEL_FEATURES[3:]
TEXT_LABEL_FEATURES = ("text", "both", "text-embedding")

# Largest entries kept of a label's PIFA vector: a few hundred decide its place in the tree.
MAX_PIFA_FEATURES = 1024
# Labels aggregated in one task.
_LABELS_PER_TASK = 256


def describe_labels(
    model: XMCForTextClassification, features: Features, targets: csr_matrix, kind: str, num_threads: int | None = None
) -> Features:
    """
    Computes one vector per label for the tree.

    Kinds: `"pifa"`, sum of the label's documents; `"text"`, TF-IDF of the label text; `"both"`, concatenation of the
    two; `"embedding"`, PIFA of the encoder's vectors, the dense part of `features`; `"text-embedding"`, the encoder's
    vector of the label text. In PIFA, a label without documents has the vector of its text.
    """
    if kind == "embedding":
        assert features.dense is not None
        return _with_texts(model, pifa(Features(None, features.dense), targets), targets, num_threads)
    if kind == "pifa":
        return _with_texts(model, pifa(features, targets, MAX_PIFA_FEATURES, num_threads), targets, num_threads)
    texts = check_label_texts(model, "label_features", kind)
    if kind == "text-embedding":
        vectors = model.embed(texts)
        # The vector of an empty text is meaningless.
        vectors[[not text.strip() for text in texts]] = 0
        return Features(None, vectors)
    assert model.tfidf is not None
    sparse = model.tfidf.transform(texts, num_threads=num_threads)
    if kind == "text":
        return Features(sparse)
    aggregated = pifa(features, targets, MAX_PIFA_FEATURES, num_threads)
    assert aggregated.sparse is not None
    return Features(csr_matrix(hstack([aggregated.sparse, sparse], format="csr")), aggregated.dense)


def _with_texts(
    model: XMCForTextClassification, aggregated: Features, targets: csr_matrix, num_threads: int | None
) -> Features:
    """Replaces the rows of labels without documents by the features of their texts."""
    empty = np.flatnonzero(np.bincount(targets.indices, minlength=targets.shape[1]) == 0)
    known = [] if model.labels is None or model.tfidf is None else model.labels.readable_texts()
    empty = np.array([i for i in empty if known and known[i]], dtype=np.int64)
    if not len(empty):
        return aggregated
    texts = [known[i] for i in empty]
    sparse, dense = aggregated.sparse, aggregated.dense
    if sparse is not None:
        assert model.tfidf is not None
        rows = model.tfidf.transform(texts, num_threads=num_threads)
        place = csr_matrix((np.ones(len(empty), np.float32), (empty, np.arange(len(empty)))), (len(known), len(empty)))
        sparse = csr_matrix(sparse + place @ rows)
    if dense is not None:
        dense = dense.copy()
        dense[empty] = model.embed(texts)
    return Features(sparse, dense)


def label_documents(texts: Features, weight: float) -> tuple[Features, csr_matrix]:
    """
    Returns the label texts as training documents of the ranker, scaled by `weight`, and their labels.

    Rare labels have few documents, and their texts consist of words that such documents use. There is a row for each
    label with a text.
    """
    assert texts.sparse is not None
    labels = np.flatnonzero(np.diff(texts.sparse.indptr))
    rows, scale = texts[labels], np.float32(weight)
    scaled = Features(rows.sparse * scale, None if rows.dense is None else rows.dense * scale)  # type: ignore[operator]
    ones, indptr = np.ones(len(labels), dtype=np.float32), np.arange(len(labels) + 1)
    return scaled, csr_matrix((ones, labels, indptr), shape=(len(labels), len(texts)))


def check_label_texts(model: XMCForTextClassification, option: str, value: str | float) -> list[str]:
    """Returns the label texts, or names; raises if they are not words, or if the model has nothing that reads text."""
    texts = [] if model.labels is None else model.labels.readable_texts()
    if not any(texts):
        raise ValueError(
            f"`{option}={value!r}` needs texts of the labels: pass `label_texts` to the trainer, or leave it out."
        )
    if model.tfidf is None and model.encoder is None:
        raise ValueError(f"`{option}={value!r}` needs documents that are texts, not vectors.")
    return texts


def pifa(
    features: Features, targets: csr_matrix, max_sparse: int | None = None, num_threads: int | None = None
) -> Features:
    """
    Positive instance feature aggregation (XR-Transformer, eq. 4): the normalised sum of the documents of each label.

    Args:
        features (`Features`): Documents.
        targets (`csr_matrix`): `(documents, labels)` indicator of the true labels.
        max_sparse (`int`, *optional*): Largest entries kept of each label's sparse vector; all by default.
        num_threads (`int`, *optional*): Threads to use; all cores by default.

    Returns:
        `Features`: one row per label, a zero row for a label without documents.
    """
    by_label = csr_matrix(binarized(targets).T)
    sparse = dense = None
    if features.sparse is not None:
        sparse = _sparse_sums(features.sparse, by_label, max_sparse or features.num_sparse, num_threads)
    if features.dense is not None:
        dense = Features(None, by_label @ features.dense).normalized().dense
    return Features(sparse, dense)


def _sparse_sums(documents: csr_matrix, by_label: csr_matrix, max_entries: int, num_threads: int | None) -> csr_matrix:
    num_labels, num_features = by_label.shape[0], documents.shape[1]
    # Each label writes to a slice that is large enough; the gaps are closed at the end. Concatenating small results
    # would hold all of them twice.
    begin = entry_bounds(documents.indptr, by_label.indptr, by_label.indices, min(max_entries, num_features))
    sizes = np.empty(num_labels, dtype=np.int64)
    indices, data = np.empty(begin[-1], dtype=np.int32), np.empty(begin[-1], dtype=np.float32)
    buffers: SimpleQueue = SimpleQueue()
    for _ in range(count_threads(num_threads)):
        buffers.put(tuple(np.zeros(num_features, dtype=dtype) for dtype in (np.float32, np.int32, np.bool_)))

    def run(first: int) -> None:
        last = min(first + _LABELS_PER_TASK, num_labels)
        arrays = buffers.get()
        try:
            aggregate_rows(
                documents.indptr, documents.indices, documents.data, by_label.indptr, by_label.indices, first, last,
                max_entries, begin, sizes, indices, data, *arrays,
            )  # fmt: skip
        finally:
            buffers.put(arrays)

    run_in_threads(run, range(0, num_labels, _LABELS_PER_TASK), num_threads)
    indptr = close_gaps(begin, sizes, indices, data)
    indices.resize(indptr[-1], refcheck=False)
    data.resize(indptr[-1], refcheck=False)
    return csr_matrix((data, indices, indptr), shape=(num_labels, num_features))

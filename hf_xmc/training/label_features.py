"""What a label looks like: the vectors that place it in the tree."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix, hstack

from ..features import Features
from ..label_tree import binarized
from ..utils import count_threads
from .kernels_cluster import aggregate_rows, close_gaps, entry_bounds

if TYPE_CHECKING:  # a ranker can be trained on vectors without all that a model imports
    from ..modeling_xmc import XMCForTextClassification

# What places a label in the tree; those of the second line need an encoder.
LABEL_FEATURES = ("pifa", "text", "both", "embedding", "text-embedding")
ENCODER_LABEL_FEATURES = LABEL_FEATURES[3:]

# Labels aggregated in one piece of work.
_LABELS_PER_TASK = 256


def describe_labels(
    model: XMCForTextClassification,
    features: Features,
    targets: csr_matrix,
    kind: str,
    max_sparse: int | None = None,
    num_threads: int | None = None,
) -> Features:
    """
    One vector per label, for the tree.

    Args:
        model ([`XMCForTextClassification`]):
            Model with labels; its TF-IDF or encoder reads their texts.
        features (`Features`):
            Documents: with a dense part, the encoder's vectors, where `kind` is `"embedding"`.
        targets (`csr_matrix`):
            `(documents, labels)` indicator of the true labels.
        kind (`str`):
            `"pifa"`: the documents that carry a label; `"text"`: TF-IDF of its own text; `"both"` side by side;
            `"embedding"`: as `"pifa"`, but the encoder's vectors of the documents alone; `"text-embedding"`: the
            encoder's vector of the label's own text.
        max_sparse (`int`, *optional*):
            Largest entries kept of each label's sparse PIFA vector; all by default.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
    """
    if kind == "text-embedding":
        return _text_embeddings(model, kind)
    if kind == "embedding":
        assert features.dense is not None
        return pifa(Features(None, features.dense), targets)
    parts = []
    if kind != "text":
        parts.append(pifa(features, targets, max_sparse, num_threads))
    if kind != "pifa":
        texts = check_label_texts(model, "label_features", kind)
        assert model.tfidf is not None
        parts.append(Features(model.tfidf.transform(texts, num_threads=num_threads)))
    return parts[0] if len(parts) == 1 else side_by_side(*parts)


def label_documents(
    model: XMCForTextClassification, length: float, num_threads: int | None = None
) -> tuple[Features, csr_matrix]:
    """
    The labels' own texts as documents for the ranker.

    A rare label has few documents to learn its words from, and its own text is made of them.

    Args:
        model ([`XMCForTextClassification`]):
            Model with labels that have texts, TF-IDF and, if it has one, the trained encoder.
        length (`float`):
            Length of their vectors in proportion to those of documents. A name says what to look for and nothing of
            the words that documents have beside it: it should count less than they do.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.

    Returns:
        `tuple[Features, csr_matrix]`: one row for each label that has a text, as the ranker takes them, and
        `(rows, labels)` the label of each.
    """
    texts = check_label_texts(model, "label_text_weight", length)
    assert model.tfidf is not None
    labels = np.array([label for label, text in enumerate(texts) if text.strip()])
    texts = [texts[label] for label in labels]
    sparse = model.tfidf.transform(texts, num_threads=num_threads)
    own = model.ranker_features(Features(sparse, None if model.encoder is None else model.embed(texts)))
    scale = np.float32(length)
    scaled = Features(own.sparse * scale, None if own.dense is None else own.dense * scale)  # type: ignore[operator]
    ones, indptr = np.ones(len(labels), dtype=np.float32), np.arange(len(labels) + 1)
    return scaled, csr_matrix((ones, labels, indptr), shape=(len(labels), len(model.labels or ())))


def _text_embeddings(model: XMCForTextClassification, kind: str) -> Features:
    texts = check_label_texts(model, "label_features", kind)
    vectors = model.embed(texts)
    # What an encoder makes of nothing says nothing.
    vectors[[not text.strip() for text in texts]] = 0
    return Features(None, vectors)


def check_label_texts(model: XMCForTextClassification, option: str, value: str | float) -> list[str]:
    """The texts of all labels; raises where there are none, or nothing to read them with, which an option needs."""
    texts = None if model.labels is None else model.labels.texts
    if texts is None or not any(texts):
        raise ValueError(
            f"`{option}={value!r}` needs texts of the labels: pass `label_texts` to the trainer, or leave it out."
        )
    if model.tfidf is None and model.encoder is None:
        raise ValueError(f"`{option}={value!r}` needs documents that are texts, not vectors.")
    return list(texts)


def pifa(
    features: Features, targets: csr_matrix, max_sparse: int | None = None, num_threads: int | None = None
) -> Features:
    """
    Positive instance feature aggregation, equation (4): the normalised sum of the documents that carry a label.

    Args:
        features (`Features`):
            Documents.
        targets (`csr_matrix`):
            `(documents, labels)` indicator of the true labels.
        max_sparse (`int`, *optional*):
            Largest entries kept of each label's sparse vector; all by default. A frequent label's vector has tens of
            thousands of entries, of which a few hundred decide where it belongs.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default. The result does not depend on it.

    Returns:
        `Features`: one row per label; a label without documents has a zero row.
    """
    by_label = csr_matrix(binarized(targets).T)
    sparse = dense = None
    if features.sparse is not None:
        sparse = _sparse_sums(features.sparse, by_label, max_sparse or features.num_sparse, num_threads)
    if features.dense is not None:
        dense = by_label @ features.dense
        norms = np.linalg.norm(dense, axis=1, keepdims=True)
        dense = dense / np.where(norms == 0, 1, norms)
    return Features(sparse, dense)


def _sparse_sums(documents: csr_matrix, by_label: csr_matrix, max_entries: int, num_threads: int | None) -> csr_matrix:
    num_labels, num_features = by_label.shape[0], documents.shape[1]
    # Each label writes to a place of its own, large enough for what it may have; the gaps are closed at the end.
    # Many small results would be held twice while they are put together, and their memory never quite given back.
    begin = entry_bounds(documents.indptr, by_label.indptr, by_label.indices, min(max_entries, num_features))
    sizes = np.empty(num_labels, dtype=np.int64)
    indices, data = np.empty(begin[-1], dtype=np.int32), np.empty(begin[-1], dtype=np.float32)
    work: SimpleQueue = SimpleQueue()
    threads = count_threads(num_threads)
    for _ in range(threads):
        work.put(tuple(np.zeros(num_features, dtype=dtype) for dtype in (np.float32, np.int32, np.bool_)))

    def run(first: int) -> None:
        last = min(first + _LABELS_PER_TASK, num_labels)
        arrays = work.get()
        try:
            aggregate_rows(
                documents.indptr, documents.indices, documents.data, by_label.indptr, by_label.indices, first, last,
                max_entries, begin, sizes, indices, data, *arrays,
            )  # fmt: skip
        finally:
            work.put(arrays)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(0, num_labels, _LABELS_PER_TASK)))
    indptr = close_gaps(begin, sizes, indices, data)
    indices.resize(indptr[-1], refcheck=False)
    data.resize(indptr[-1], refcheck=False)
    return csr_matrix((data, indices, indptr), shape=(num_labels, num_features))


def side_by_side(first: Features, second: Features) -> Features:
    """Two descriptions of the same labels with equal weight, e.g. PIFA and the label's own text."""
    sparse = [part.sparse for part in (first, second) if part.sparse is not None]
    dense = [part.dense for part in (first, second) if part.dense is not None]
    return Features(csr_matrix(hstack(sparse, format="csr")) if sparse else None, np.hstack(dense) if dense else None)

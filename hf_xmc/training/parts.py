"""The parts of a model beside ranker and heads: label vectors, and training documents that vote for their labels."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix, diags

from ..features import Features, normalize_rows
from ..kernels_similarity import largest_of_rows
from ..knn_ranker import KNNIndex, KNNRanker, KNNVectors
from ..label_tree import LabelTree
from ..label_vectors import InvertedIndex, LabelVectors
from ..tfidf import TfidfFeaturizer
from .label_features import pifa
from .options import KNNArguments

# Largest entries kept of the centroid of a label in the space of TF-IDF.
MAX_CENTROID_TERMS = 1024
# Smaller entries of the unit vectors of labels are dropped: they are 2 % of the squared length and half of the time of
# a prediction.
LEAST_TERM_WEIGHT = 0.05


def make_label_vectors(
    features: Features,
    targets: csr_matrix,
    texts: Features | None,
    columns: np.ndarray | None = None,
    num_threads: int | None = None,
) -> LabelVectors:
    """
    Returns the vectors of labels from their texts and from their documents, METHODS eq. 12.

    A label without documents has the vector of its text in place of its centroid, and a label without a text its
    centroid in place of that of the text.

    Args:
        features ([`Features`]): Documents of unit length; with encoder vectors as dense part.
        targets (`csr_matrix`): `(documents, labels)` indicator of the true labels.
        texts ([`Features`], *optional*): The same features of the label texts.
        columns (`np.ndarray`, *optional*): Which sparse columns are used, see [`LabelVectors`].
        num_threads (`int`, *optional*): Threads to use; all cores by default.
    """
    if columns is not None:
        features, texts = _of_columns(features, columns), None if texts is None else _of_columns(texts, columns)
    centroids = pifa(features, targets, MAX_CENTROID_TERMS, num_threads)
    kinds = {"centroid": centroids}
    if texts is not None:
        kinds = {"text": _filled(texts, centroids), "centroid": _filled(centroids, texts)}
    sparse, dense = {}, {}
    for kind, vectors in kinds.items():
        if vectors.sparse is not None:
            sparse[f"{kind}_tfidf"] = InvertedIndex.from_rows(
                _entries(vectors.sparse, np.abs(vectors.sparse.data) >= LEAST_TERM_WEIGHT)
            )
        if vectors.dense is not None:
            dense[f"{kind}_vector"] = vectors.dense.astype(np.float16)
    return LabelVectors(targets.shape[1], sparse, dense, columns)


def _entries(rows: csr_matrix, kept: np.ndarray) -> csr_matrix:
    """A sparse matrix with the marked entries only."""
    ends = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[rows.indptr]
    return csr_matrix((rows.data[kept], rows.indices[kept], ends), shape=rows.shape)


def _filled(rows: Features, others: Features) -> Features:
    """Replaces empty rows by those of `others`."""
    sparse, dense = rows.sparse, rows.dense
    if sparse is not None and others.sparse is not None:
        empty = (np.diff(sparse.indptr) == 0).astype(np.float32)
        if empty.any():
            sparse = csr_matrix(sparse + diags(empty) @ others.sparse, dtype=np.float32)
    if dense is not None and others.dense is not None:
        dense = np.where(dense.any(axis=1, keepdims=True), dense, others.dense)
    return Features(sparse, dense)


def word_columns(tfidf: TfidfFeaturizer | None) -> np.ndarray | None:
    """Marks the columns of single words, for [`LabelVectors`]; `None` if all are, or if they are not words."""
    if tfidf is None or tfidf.analyzer != "word" or tfidf.ngram_range[1] == 1:
        return None
    words = np.fromiter((" " not in term for term in tfidf.vocabulary), np.uint8, len(tfidf.vocabulary))
    return np.tile(words, tfidf.num_features // len(words)) if words.any() else None


def _of_columns(features: Features, columns: np.ndarray) -> Features:
    """Features with the marked sparse columns only, scaled to unit length."""
    rows = features.sparse
    assert rows is not None
    return Features(normalize_rows(_entries(rows, columns[rows.indices] > 0)), features.dense)


def index_documents(features: Features, targets: csr_matrix, tree: LabelTree, arguments: KNNArguments) -> KNNRanker:
    """
    Indexes documents by their terms.

    Args:
        features ([`Features`]): The documents, sparse.
        targets (`csr_matrix`): Their labels, `(documents, labels)`.
        tree ([`LabelTree`]): The label tree.
        arguments ([`KNNArguments`]): Options.
    """
    assert features.sparse is not None
    index = InvertedIndex.from_rows(_heaviest_terms(features.sparse, arguments.terms))
    knn_index = KNNIndex(index.term_begin, index.term_rows, index.term_weights, *_label_lists(targets))
    return KNNRanker(tree, knn_index, count=arguments.count, power=arguments.exponent)


def index_vectors(vectors: np.ndarray, targets: csr_matrix) -> KNNVectors:
    """Indexes documents by their vectors of unit length."""
    return KNNVectors(vectors.astype(np.float16), *_label_lists(targets), targets.shape[1])


def _label_lists(targets: csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    return targets.indptr.astype(np.int64), targets.indices.astype(np.int32)


def _heaviest_terms(rows: csr_matrix, count: int) -> csr_matrix:
    """Returns the `count` largest entries of each row; all with 0."""
    if not count:
        return rows
    return _entries(rows, largest_of_rows(rows.indptr, rows.data, count))

"""The parts of a model beside ranker and heads: label vectors, and training documents that vote for their labels."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..kernels_similarity import largest_of_rows
from ..knn_ranker import KNNIndex, KNNRanker, KNNVectors
from ..label_tree import LabelTree
from ..label_vectors import InvertedIndex, LabelVectors, entries, of_columns
from ..tfidf import TfidfFeaturizer
from .label_features import pifa
from .options import KNNArguments

# Largest entries kept of the centroid of a label in the space of TF-IDF.
MAX_CENTROID_TERMS = 1024


def make_label_vectors(
    features: Features,
    targets: csr_matrix,
    texts: Features | None,
    columns: np.ndarray | None = None,
    num_threads: int | None = None,
) -> LabelVectors:
    """
    Returns the vectors of labels from their texts and from their documents, see [`LabelVectors.from_features`].

    The features of documents are of unit length, with encoder vectors as dense part; those of `texts` are of the same
    kind. `columns` says which sparse columns are used, see [`LabelVectors`].
    """
    features, texts = of_columns(features, columns), None if texts is None else of_columns(texts, columns)
    return LabelVectors.from_features(texts, pifa(features, targets, MAX_CENTROID_TERMS, num_threads), columns)


def word_columns(tfidf: TfidfFeaturizer | None) -> np.ndarray | None:
    """Marks the columns of single words, for [`LabelVectors`]; `None` if all are, or if they are not words."""
    if tfidf is None or tfidf.analyzer != "word" or tfidf.ngram_range[1] == 1:
        return None
    words = np.fromiter((" " not in term for term in tfidf.vocabulary), np.uint8, len(tfidf.vocabulary))
    return np.tile(words, tfidf.num_features // len(words)) if words.any() else None


def index_documents(features: Features, targets: csr_matrix, tree: LabelTree, arguments: KNNArguments) -> KNNRanker:
    """Indexes documents by their heaviest terms."""
    rows = features.sparse
    assert rows is not None
    if arguments.terms:
        rows = entries(rows, largest_of_rows(rows.indptr, rows.data, arguments.terms))
    index = InvertedIndex.from_rows(rows)
    knn_index = KNNIndex(index.term_begin, index.term_rows, index.term_weights, *_label_lists(targets))
    return KNNRanker(tree, knn_index, count=arguments.count, power=arguments.exponent)


def index_vectors(vectors: np.ndarray, targets: csr_matrix) -> KNNVectors:
    """Indexes documents by their vectors of unit length."""
    return KNNVectors(vectors.astype(np.float16), *_label_lists(targets), targets.shape[1])


def _label_lists(targets: csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    return targets.indptr.astype(np.int64), targets.indices.astype(np.int32)

"""Indexes training documents for votes of similar documents."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..knn_ranker import KNNIndex, KNNRanker, KNNVectors, heaviest_terms
from ..label_tree import LabelTree
from ..label_vectors import InvertedIndex
from .options import KNNArguments


def index_documents(
    features: Features, targets: csr_matrix, tree: LabelTree, arguments: KNNArguments, query_terms: int = 0
) -> KNNRanker:
    """
    Indexes documents by their terms.

    Args:
        features ([`Features`]):
            The documents, sparse.
        targets (`csr_matrix`):
            Their labels, `(documents, labels)`.
        tree ([`LabelTree`]):
            The label tree.
        arguments ([`KNNArguments`]):
            Options.
        query_terms (`int`, *optional*, defaults to 0):
            See [`KNNRanker`].
    """
    assert features.sparse is not None
    index = InvertedIndex.from_rows(heaviest_terms(features.sparse, arguments.terms))
    begin, labels = _label_lists(targets)
    knn_index = KNNIndex(index.term_begin, index.term_rows, index.term_weights, begin, labels)
    return KNNRanker(tree, knn_index, count=arguments.count, power=arguments.exponent, query_terms=query_terms)


def index_vectors(vectors: np.ndarray, targets: csr_matrix) -> KNNVectors:
    """Indexes documents by their vectors of unit length."""
    return KNNVectors(vectors.astype(np.float16), *_label_lists(targets), targets.shape[1])


def _label_lists(targets: csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    return targets.indptr.astype(np.int64), targets.indices.astype(np.int32)

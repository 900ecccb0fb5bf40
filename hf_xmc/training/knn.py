"""Lists training documents so that those like another one are found."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..knn_ranker import KNNIndex, KNNRanker
from ..label_tree import LabelTree
from .kernels_cluster import largest_of_rows
from .options import KNNArguments


def index_documents(features: Features, targets: csr_matrix, tree: LabelTree, arguments: KNNArguments) -> KNNRanker:
    """
    A ranker that knows these documents.

    Args:
        features ([`Features`]):
            The documents, sparse.
        targets (`csr_matrix`):
            Their labels, (documents, labels).
        tree ([`LabelTree`]):
            The labels' tree.
        arguments ([`KNNArguments`]):
            Options.
    """
    documents = features.sparse
    assert documents is not None and features.dense is None
    if arguments.terms:
        kept = largest_of_rows(documents.indptr, documents.data, arguments.terms)
        ends = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[documents.indptr]
        documents = csr_matrix((documents.data[kept], documents.indices[kept], ends), shape=documents.shape)
    by_term = documents.tocsc()
    index = KNNIndex(
        by_term.indptr.astype(np.int64),
        by_term.indices.astype(np.int32),
        by_term.data.astype(np.float32),
        targets.indptr.astype(np.int64),
        targets.indices.astype(np.int32),
    )
    return KNNRanker(tree, index, count=arguments.count, power=arguments.exponent)

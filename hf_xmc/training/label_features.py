"""What a label looks like: the vectors that place it in the tree."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix, vstack

from ..features import Features, normalize_rows

# Labels aggregated at once: bounds the memory of the rows before they are cut to their largest entries.
_LABELS_PER_SLICE = 512


def pifa(features: Features, targets: csr_matrix, max_sparse: int | None = None) -> Features:
    """
    Positive instance feature aggregation, equation (4): the normalised sum of the documents that carry a label.

    Args:
        features (`Features`):
            Documents.
        targets (`csr_matrix`):
            `(documents, labels)` indicator of the true labels.
        max_sparse (`int`, *optional*):
            Largest entries kept of each label's sparse vector; all by default. A frequent label's vector has tens of
            thousands of entries of which few hundred decide where it belongs.

    Returns:
        `Features`: one row per label; a label without documents has a zero row.
    """
    by_label = csr_matrix(targets.T)
    sparse = None
    if features.sparse is not None:
        slices = []
        for first in range(0, by_label.shape[0], _LABELS_PER_SLICE):
            rows = csr_matrix(by_label[first : first + _LABELS_PER_SLICE] @ features.sparse)
            slices.append(normalize_rows(largest_entries(rows, max_sparse) if max_sparse else rows))
        sparse = csr_matrix(vstack(slices, format="csr"))
        sparse.sort_indices()
    dense = None
    if features.dense is not None:
        dense = by_label @ features.dense
        norms = np.linalg.norm(dense, axis=1, keepdims=True)
        dense = dense / np.where(norms == 0, 1, norms)
    return Features(sparse, dense)


def largest_entries(matrix: csr_matrix, count: int) -> csr_matrix:
    """The `count` largest entries of every row; ties go to the lower column."""
    if matrix.nnz == 0 or np.diff(matrix.indptr).max() <= count:
        return matrix
    matrix = matrix.sorted_indices()
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    order = np.lexsort((matrix.indices, -matrix.data, rows))
    rank = np.arange(matrix.nnz) - matrix.indptr[rows]
    keep = np.sort(order[rank < count])
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows[keep], minlength=matrix.shape[0]))])
    return csr_matrix((matrix.data[keep], matrix.indices[keep], indptr), shape=matrix.shape)


def combine(first: Features, second: Features) -> Features:
    """Two descriptions of the same labels side by side, e.g. PIFA and the label's own text, with equal weight."""
    from scipy.sparse import hstack

    sparse_parts = [part.sparse for part in (first, second) if part.sparse is not None]
    dense_parts = [part.dense for part in (first, second) if part.dense is not None]
    return Features(
        csr_matrix(hstack(sparse_parts, format="csr")) if sparse_parts else None,
        np.hstack(dense_parts) if dense_parts else None,
    )

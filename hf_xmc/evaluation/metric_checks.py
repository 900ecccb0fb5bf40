"""Checks of what the metrics are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import sparse


def check_indices(indices: Any, k: int) -> np.ndarray:
    """Predictions as an integer matrix with at least `k` columns."""
    indices = np.asarray(indices)
    if indices.dtype.kind not in "iu":
        if indices.dtype.kind == "f" and np.isnan(indices).any():
            raise ValueError("`indices` contains NaN. Mark an empty rank with -1 and pass integers.")
        raise TypeError(
            f"`indices` must contain integers, got {indices.dtype}. Pass the predicted label ids, not their scores; "
            "pad short rows with -1."
        )
    if indices.ndim != 2:
        raise ValueError(f"`indices` must have the shape (documents, k), got {indices.shape}.")
    if indices.shape[1] < k:
        raise ValueError(
            f"`indices` has {indices.shape[1]} columns, too few for k = {k}. Predict at least the top {k} (-1 for "
            "missing labels), or pass smaller `ks`."
        )
    return indices


def check_counts(counts: Any, num_documents: int) -> np.ndarray:
    """Training counts as int64."""
    counts = np.asarray(counts)
    if counts.ndim != 1:
        raise ValueError(f"`counts` must be one number per label, shape (num_labels,), got the shape {counts.shape}.")
    if counts.dtype.kind not in "iuf" and counts.size:
        raise TypeError(f"`counts` must contain numbers, got {counts.dtype}.")
    if num_documents < 1:
        raise ValueError(
            f"`num_documents` must be at least 1, got {num_documents}. Pass the number of training documents."
        )
    # Written so that NaN is caught too.
    bad = ~((counts >= 0) & (counts <= num_documents) & (counts == np.floor(counts)))
    if bad.any():
        label = int(np.argmax(bad))
        raise ValueError(
            f"`counts` must be whole numbers from 0 to `num_documents` = {num_documents}, but label {label} has "
            f"{counts[label]}. Pass the number of training documents of each label."
        )
    return counts.astype(np.int64)


def check_truth(truth: Any) -> sparse.csr_matrix | sparse.csr_array:
    """The truth with sorted, unique columns in each row; the caller's matrix is left alone."""
    if not sparse.issparse(truth):
        raise TypeError(
            f"`truth` must be a scipy sparse matrix, got {type(truth).__name__}. Wrap a dense 0/1 array in "
            "`scipy.sparse.csr_matrix`."
        )
    matrix: Any = truth  # the common base of the stubs lacks `tocsr` and `data`
    truth = matrix.tocsr()
    values = truth.data
    bad = values < 0 if values.dtype.kind in "iub" else ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        row = int(np.searchsorted(truth.indptr, np.argmax(bad), side="right")) - 1
        raise ValueError(
            f"`truth` has the value {values[np.argmax(bad)]} in row {row}. Use 1 for a true label and nothing "
            "elsewhere."
        )
    if truth.nnz and not (truth.indices.min() >= 0 and truth.indices.max() < truth.shape[1]):
        raise ValueError(
            f"`truth` has column indices outside 0 to {truth.shape[1] - 1}. The matrix is damaged: build it again."
        )
    if not truth.has_canonical_format or not values.all():
        truth = type(truth)((values > 0, truth.indices, truth.indptr), shape=truth.shape, copy=True)
        truth.eliminate_zeros()
        truth.sum_duplicates()
    return truth


def check_rows(rows: np.ndarray, start: int, num_labels: int) -> None:
    """Raises for ids out of range and for a label predicted twice for a document."""
    bad = ((rows < 0) & (rows != -1)) | (rows >= num_labels)
    if bad.any():
        row, place = np.argwhere(bad)[0]
        raise ValueError(
            f"`indices` has the label id {rows[row, place]} in row {start + row}, but there are {num_labels} labels. "
            f"Ids go from 0 to {num_labels - 1}, and -1 marks an empty rank."
        )
    ordered = np.sort(rows, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if repeated.any():
        row, place = np.argwhere(repeated)[0]
        raise ValueError(
            f"`indices` has the label id {ordered[row, place]} more than once in row {start + row}. A "
            "document's predictions must be different labels."
        )


def check_increasing(name: str, numbers: Iterable[int], smallest: int) -> tuple[int, ...]:
    """The numbers sorted, checked to be whole, different and not below `smallest`."""
    numbers = list(numbers)
    if not numbers or any(int(number) != number or number < smallest for number in numbers):
        raise ValueError(f"`{name}` must be one or more whole numbers of at least {smallest}, got {numbers}.")
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"`{name}` must be different numbers, got {numbers}.")
    return tuple(sorted(int(number) for number in numbers))

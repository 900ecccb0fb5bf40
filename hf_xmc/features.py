"""Feature vectors of documents or labels: a sparse part, a dense part, or both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix, vstack

from .kernels_check import is_canonical
from .kernels_search import scaled_rows, squared_norms


@dataclass(frozen=True)
class Features:
    """
    Rows of `[sparse ; dense]` features; the two parts are stored separately.

    Args:
        sparse (`csr_matrix`, *optional*):
            float32 rows with sorted column indices, such as TF-IDF. Unsorted indices are sorted in a copy.
        dense (`np.ndarray`, *optional*): float32 rows, such as embeddings.
    """

    sparse: csr_matrix | None = None
    dense: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.sparse is None and self.dense is None:
            raise ValueError("Pass `sparse`, `dense` or both.")
        if self.sparse is not None:
            object.__setattr__(self, "sparse", _checked_sparse(self.sparse))
        if self.dense is not None:
            object.__setattr__(self, "dense", _checked_dense(self.dense))
        if self.sparse is not None and self.dense is not None and self.sparse.shape[0] != self.dense.shape[0]:
            raise ValueError(
                f"`sparse` has {self.sparse.shape[0]} rows, but `dense` has {self.dense.shape[0]}. "
                "Both need one row per document."
            )

    def __len__(self) -> int:
        part = self.sparse if self.sparse is not None else self.dense
        return int(part.shape[0])  # type: ignore[union-attr]

    def __getitem__(self, rows: slice | np.ndarray) -> Features:
        return Features(
            None if self.sparse is None else self.sparse[rows], None if self.dense is None else self.dense[rows]
        )

    def followed_by(self, other: Features) -> Features:
        """Returns these rows followed by those of `other`, which has the same columns."""
        if (self.num_sparse, self.num_dense) != (other.num_sparse, other.num_dense):
            raise ValueError(
                f"Rows of {self.num_sparse} sparse and {self.num_dense} dense columns cannot be followed by rows of "
                f"{other.num_sparse} and {other.num_dense}."
            )
        sparse = [rows.sparse for rows in (self, other) if rows.sparse is not None]
        dense = [rows.dense for rows in (self, other) if rows.dense is not None]
        return Features(
            csr_matrix(vstack(sparse, format="csr")) if sparse else None, np.vstack(dense) if dense else None
        )

    @property
    def num_sparse(self) -> int:
        """Columns of the sparse part."""
        return 0 if self.sparse is None else int(self.sparse.shape[1])

    @property
    def num_dense(self) -> int:
        """Columns of the dense part."""
        return 0 if self.dense is None else int(self.dense.shape[1])

    def raised(self, power: float) -> Features:
        """Returns the features with the values of the sparse part raised to a power, keeping their signs."""
        if power == 1 or self.sparse is None:
            return self
        data = np.sign(self.sparse.data) * np.abs(self.sparse.data) ** np.float32(power)
        raised = csr_matrix((data, self.sparse.indices, self.sparse.indptr), shape=self.sparse.shape)
        return Features(raised, self.dense)

    def normalized(self) -> Features:
        """Returns the features with each row of each part scaled to unit length; zero rows stay zero."""
        sparse = None if self.sparse is None else normalize_rows(self.sparse)
        dense = self.dense
        if dense is not None:
            norms = np.linalg.norm(dense, axis=1, keepdims=True)
            dense = dense / np.where(norms == 0, 1, norms)
        return self if sparse is self.sparse and dense is None else Features(sparse, dense)


def normalize_rows(matrix: csr_matrix) -> csr_matrix:
    """Returns a sparse matrix with rows of unit length or 0; the same matrix if it has such rows already."""
    squares = squared_norms(matrix.indptr, matrix.data)
    squares[squares == 0] = 1
    # Twice the rounding error of a norm. Smaller corrections change no ranking, and copying a large matrix is slow.
    if np.abs(squares - 1).max(initial=0) <= 2e-5:
        return matrix
    data = scaled_rows(matrix.indptr, matrix.data, 1 / np.sqrt(squares))
    return csr_matrix((data, matrix.indices, matrix.indptr), shape=matrix.shape)


def _checked_sparse(matrix: csr_matrix) -> csr_matrix:
    if not isinstance(matrix, csr_matrix) or matrix.dtype != np.float32:
        matrix = csr_matrix(matrix, dtype=np.float32)
    if is_canonical(matrix.indptr, matrix.indices, matrix.data, matrix.shape[1]):
        return matrix
    # scipy does not check this, and the compiled loops would write beyond their arrays.
    falls = np.flatnonzero(matrix.indptr[1:] < matrix.indptr[:-1])
    if len(falls) or matrix.indptr[0] != 0 or matrix.indptr[-1] > min(len(matrix.indices), len(matrix.data)):
        row = falls[0] if len(falls) else matrix.shape[0] - 1
        raise ValueError(f"The row pointers (`indptr`) of the sparse features are not valid at row {row}.")
    if matrix.nnz and (matrix.indices.min() < 0 or matrix.indices.max() >= matrix.shape[1]):
        raise ValueError(f"The sparse features have a column index outside 0..{matrix.shape[1] - 1}.")
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    if not matrix.has_canonical_format:
        same = np.flatnonzero(matrix.indices[1:] == matrix.indices[:-1]) + 1
        row = _row_of(matrix, same[~np.isin(same, matrix.indptr)][0])
        raise ValueError(f"Row {row} of the sparse features has a column index twice. Call `sum_duplicates` first.")
    if not np.isfinite(matrix.data).all():
        entry = int(np.flatnonzero(~np.isfinite(matrix.data))[0])
        row = _row_of(matrix, entry)
        raise ValueError(f"Row {row} of the sparse features has the value {matrix.data[entry]}; it must be finite.")
    return matrix


def _row_of(matrix: csr_matrix, entry: int) -> int:
    return int(np.searchsorted(matrix.indptr, entry, side="right")) - 1


def _checked_dense(matrix: np.ndarray) -> np.ndarray:
    matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    if matrix.ndim != 2:
        raise ValueError(f"Dense features must have the shape (documents, dimensions), not {matrix.shape}.")
    finite = np.isfinite(matrix).all(axis=1)
    if not finite.all():
        raise ValueError(f"Row {int(np.argmin(finite))} of the dense features has values that are not finite.")
    return matrix

"""Label vectors: vectors of the labels' texts and documents, their similarity to documents, and their file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix, diags

from .checks import CheckedFile
from .features import Features, normalize_rows
from .kernels_similarity import HALF_SCALE, add_products, multiply_halves
from .serialization import MAX_SHARD_SIZE, save_sharded
from .utils import offsets_of, run_in_threads

LABEL_VECTORS_FILE = "label_vectors.safetensors"
_KIND = "label vectors"
_COLUMNS = "columns"
_ALL_COLUMNS = np.zeros(0, dtype=np.uint8)
_ARRAYS = ("term_begin", "term_rows", "term_weights")
# Documents, or vectors, of a task of a thread.
_DOCUMENTS_PER_TASK, _VECTORS_PER_TASK = 16, 8192
# Smaller entries of the unit vectors of labels are dropped: they are 2 % of the squared length and half of the time of
# a prediction.
LEAST_TERM_WEIGHT = 0.05


@dataclass(frozen=True)
class InvertedIndex:
    """
    A sparse matrix by columns: the rows that contain each term.

    Args:
        term_begin (`np.ndarray`): First entry of each term, int64 (terms + 1).
        term_rows (`np.ndarray`): Rows with the term, int32.
        term_weights (`np.ndarray`): Weights of the term in them, float32.
    """

    term_begin: np.ndarray
    term_rows: np.ndarray
    term_weights: np.ndarray

    @classmethod
    def from_rows(cls, rows: csr_matrix) -> InvertedIndex:
        """Indexes the rows of a sparse matrix."""
        columns = rows.tocsc()
        return cls(columns.indptr.astype(np.int64), columns.indices.astype(np.int32), columns.data.astype(np.float32))

    def followed_by(self, others: InvertedIndex, num_rows: int) -> InvertedIndex:
        """Returns the index of its `num_rows` rows and of those of another index of the same terms."""
        places = np.repeat(self.term_begin[1:], np.diff(others.term_begin))
        return InvertedIndex(
            self.term_begin + others.term_begin,
            np.insert(self.term_rows, places, others.term_rows + np.int32(num_rows)),
            np.insert(self.term_weights, places, others.term_weights),
        )

    def without(self, is_left: np.ndarray) -> InvertedIndex:
        """Returns the index of the rows that are marked, numbered anew."""
        kept = is_left[self.term_rows]
        begin = offsets_of(kept)[self.term_begin]
        rows = (np.cumsum(is_left) - 1).astype(np.int32)[self.term_rows[kept]]
        return InvertedIndex(begin, rows, self.term_weights[kept])

    def products(
        self, documents: csr_matrix, num_rows: int, columns: np.ndarray | None = None, num_threads: int | None = None
    ) -> np.ndarray:
        """
        Returns the dot products of documents with all rows, float32 `(documents, rows)`.

        With `columns`, they are divided by the norms of the documents over the columns that it marks.
        """
        products = np.zeros((documents.shape[0], num_rows), dtype=np.float32)
        marked = _ALL_COLUMNS if columns is None else columns

        def run(first: int) -> None:
            last = min(first + _DOCUMENTS_PER_TASK, len(products))
            add_products(
                documents.indptr, documents.indices, documents.data, first, last, self.term_begin, self.term_rows,
                self.term_weights, marked, products[first:last],
            )  # fmt: skip

        run_in_threads(run, range(0, len(products), _DOCUMENTS_PER_TASK), num_threads)
        return products


class LabelVectors:
    """
    Vectors of unit length for the labels, in the space of TF-IDF or of the encoder.

    The vector of a label is that of its text, or the normalised sum of the vectors of its training documents (its
    centroid). The score of a label is the cosine of its vector and the document's. A label without text or documents
    has a zero vector.

    Args:
        num_labels (`int`):
            Number of labels.
        sparse (`Mapping[str, InvertedIndex]`, *optional*):
            TF-IDF vectors by name, such as `text_tfidf`.
        dense (`Mapping[str, np.ndarray]`, *optional*):
            Encoder vectors by name, such as `text_vector`; float16 `(labels, dimensions)`.
        columns (`np.ndarray`, *optional*):
            Which columns of TF-IDF the vectors use, uint8 ones and zeros: single words give better similarities than
            longer n-grams. All by default.
    """

    def __init__(
        self,
        num_labels: int,
        sparse: Mapping[str, InvertedIndex] | None = None,
        dense: Mapping[str, np.ndarray] | None = None,
        columns: np.ndarray | None = None,
    ) -> None:
        self.num_labels = num_labels
        self.columns = columns
        self.sparse = dict(sparse or {})
        self.dense = dict(dense or {})

    def __repr__(self) -> str:
        return f"LabelVectors({self.num_labels} labels: {', '.join(self.names)})"

    @classmethod
    def from_features(
        cls, texts: Features | None, centroids: Features, columns: np.ndarray | None = None
    ) -> LabelVectors:
        """
        Returns the vectors of labels from those of their texts and from their centroids, METHODS eq. 12.

        A label without documents has the vector of its text in place of its centroid, and a label without a text its
        centroid in place of that of the text.

        Args:
            texts ([`Features`], *optional*): Features of the label texts, of unit length.
            centroids ([`Features`]): Sums of the features of the documents of each label, of unit length.
            columns (`np.ndarray`, *optional*): As for the class; other columns must be empty.
        """
        kinds = {"centroid": centroids}
        if texts is not None:
            kinds = {"text": _filled(texts, centroids), "centroid": _filled(centroids, texts)}
        sparse, dense = {}, {}
        for kind, vectors in kinds.items():
            if vectors.sparse is not None:
                sparse[f"{kind}_tfidf"] = InvertedIndex.from_rows(
                    entries(vectors.sparse, np.abs(vectors.sparse.data) >= LEAST_TERM_WEIGHT)
                )
            if vectors.dense is not None:
                dense[f"{kind}_vector"] = vectors.dense.astype(np.float16)
        return cls(len(centroids), sparse, dense, columns)

    def followed_by(self, others: LabelVectors) -> LabelVectors:
        """Returns these vectors and those of further labels, which have at least the same kinds."""
        sparse = {name: index.followed_by(others.sparse[name], self.num_labels) for name, index in self.sparse.items()}
        dense = {name: np.concatenate([vectors, others.dense[name]]) for name, vectors in self.dense.items()}
        return LabelVectors(self.num_labels + others.num_labels, sparse, dense, self.columns)

    def without(self, is_left: np.ndarray) -> LabelVectors:
        """Returns the vectors of the labels that are marked."""
        sparse = {name: index.without(is_left) for name, index in self.sparse.items()}
        dense = {name: vectors[is_left] for name, vectors in self.dense.items()}
        return LabelVectors(int(is_left.sum()), sparse, dense, self.columns)

    @property
    def names(self) -> list[str]:
        """Names of the kinds of vectors."""
        return [*self.sparse, *self.dense]

    @property
    def num_bytes(self) -> int:
        """Size of all vectors."""
        return sum(array.nbytes for array in self._tensors().values())

    def scores(self, name: str, features: Features, num_threads: int | None = None) -> np.ndarray:
        """
        Returns the cosines of documents with the vectors of all labels.

        Args:
            name (`str`): Kind of vectors.
            features ([`Features`]): Documents of unit length.
            num_threads (`int`, *optional*): Number of threads; all cores by default.

        Returns:
            `np.ndarray`: float32 `(documents, labels)`. The caller bounds the number of documents.
        """
        if name in self.sparse:
            assert features.sparse is not None
            return self.sparse[name].products(features.sparse, self.num_labels, self.columns, num_threads)
        assert features.dense is not None
        return dense_products(features.dense, self.dense[name], num_threads)

    def _tensors(self) -> dict[str, np.ndarray]:
        sparse = {f"{name}.{key}": getattr(index, key) for name, index in self.sparse.items() for key in _ARRAYS}
        columns = {} if self.columns is None else {_COLUMNS: self.columns}
        return {**sparse, **self.dense, **columns}

    def save_pretrained(self, save_directory: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes `label_vectors.safetensors`, or its shards."""
        metadata = {"num_labels": str(self.num_labels)}
        save_sharded(save_directory, LABEL_VECTORS_FILE, self._tensors(), _KIND, metadata, max_shard_size)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike, **hub_kwargs) -> LabelVectors:
        """Opens the label vectors of a saved model, memory-mapped."""
        file = CheckedFile.open_sharded(name_or_path, LABEL_VECTORS_FILE, _KIND, **hub_kwargs)
        num_labels = file.number("num_labels", 1, (1 << 31) - 1)
        indexed = dict.fromkeys(name.partition(".")[0] for name in file.tensors if "." in name)
        sparse = {name: _checked_index(file, name, num_labels) for name in indexed}
        kinds = [name for name in file.tensors if "." not in name and name != _COLUMNS]
        dense = {name: file.weights(name, np.float16, num_labels, None) for name in kinds}
        num_terms = max((len(index.term_begin) - 1 for index in sparse.values()), default=0)
        columns = file.array(_COLUMNS, np.uint8, num_terms) if _COLUMNS in file.tensors else None
        return cls(num_labels, sparse, dense, columns)


def dense_products(documents: np.ndarray, vectors: np.ndarray, num_threads: int | None = None) -> np.ndarray:
    """
    Returns the dot products of documents, float32 of unit length, with float16 vectors: `(documents, vectors)`.

    Why not torch: its products in float16 are slow on CPUs, and those of a float32 copy, twice as large, take 9.6 ms
    for one document and 67,764 vectors of 384 numbers, this loop 3.3 ms (`benchmarks/dense_products.py`).
    """
    products = np.empty((len(documents), len(vectors)), dtype=np.float32)
    scaled = np.ascontiguousarray(documents, dtype=np.float32) * HALF_SCALE
    # Read-only, as vectors of a saved model are: numba would compile the loop a second time for others.
    halves = vectors.view(np.uint16)
    halves.setflags(write=False)

    def run(first: int) -> None:
        multiply_halves(scaled, halves, first, min(first + _VECTORS_PER_TASK, len(vectors)), products)

    run_in_threads(run, range(0, len(vectors), _VECTORS_PER_TASK), num_threads)
    return products


def _checked_index(file: CheckedFile, name: str, num_rows: int) -> InvertedIndex:
    """Returns an index in which the compiled loops cannot leave the arrays."""
    weights = file.weights(f"{name}.term_weights", np.float32, None)
    return InvertedIndex(
        file.offsets(f"{name}.term_begin", None, len(weights)),
        file.ids(f"{name}.term_rows", np.int32, len(weights), num_rows),
        weights,
    )


def of_columns(features: Features, columns: np.ndarray | None) -> Features:
    """Features with the marked sparse columns only, scaled to unit length; all columns by default."""
    rows = features.sparse
    if rows is None or columns is None:
        return features
    return Features(normalize_rows(entries(rows, columns[rows.indices] > 0)), features.dense)


def entries(rows: csr_matrix, kept: np.ndarray) -> csr_matrix:
    """A sparse matrix with the marked entries only."""
    return csr_matrix((rows.data[kept], rows.indices[kept], offsets_of(kept)[rows.indptr]), shape=rows.shape)


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

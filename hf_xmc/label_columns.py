"""The labels of a dataset as Arrow arrays, and their look-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from .utils import offsets_of

if TYPE_CHECKING:
    # Imports inside `try` are optional for transformers: a published model must load without `datasets`.
    try:
        from datasets import Dataset
    except ImportError:
        pass

# Documents per look-up of labels. Large, because each look-up hashes all label names.
BATCH_SIZE = 200_000


def import_arrow() -> tuple[Any, Any]:
    # Inside `try` for the same reason as `datasets` above.
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError as error:
        raise ImportError("Reading the labels of a dataset needs pyarrow: `pip install pyarrow`.") from error
    return pyarrow, pyarrow.compute


def short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


def label_batches(dataset: Dataset, column: str) -> Iterator[tuple[int, np.ndarray, Any]]:
    """Yields batches: first row, number of labels of each document, and all labels as an Arrow array."""
    pa, pc = import_arrow()
    columns = getattr(dataset, "column_names", None)
    if isinstance(dataset, dict) or not hasattr(dataset, "select_columns") or columns is None:
        raise TypeError(f"`dataset` is {type(dataset).__name__}. Pass a `datasets.Dataset`: one split.")
    if column not in columns:
        raise ValueError(f"The dataset has no column `{column}`; it has {columns}. Map a column to `{column}` first.")
    if len(dataset) == 0:
        return
    feature = dataset.features[column]
    class_names = getattr(getattr(feature, "feature", None), "names", None)
    start = 0
    # A shuffled dataset has one chunk per row: they are combined.
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=BATCH_SIZE):
        for chunk in table.combine_chunks().column(column).chunks:
            if pa.types.is_fixed_size_list(chunk.type):
                chunk = chunk.cast(pa.list_(chunk.type.value_type))
            if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
                raise TypeError(
                    f"Column `{column}` has the type {chunk.type}, but each document needs a list of labels. "
                    "`prepare_dataset` splits delimited strings."
                )
            lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            values = chunk.flatten()
            _check_values(values, lengths, start, column)
            if pa.types.is_large_string(values.type) or pa.types.is_null(values.type):
                values = values.cast(pa.string())
            if class_names is not None:
                _check_classes(values, len(class_names), lengths, start, column)
                values = pa.array(class_names, pa.string()).take(values)
            yield start, lengths, values
            start += len(chunk)


def _check_values(values: Any, lengths: np.ndarray, start: int, column: str) -> None:
    pa, pc = import_arrow()
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    if len(values) and not (is_text or pa.types.is_integer(values.type) or pa.types.is_null(values.type)):
        raise TypeError(f"Column `{column}` has lists of {values.type}, but labels must be strings or integers.")
    bad = pc.equal(values, "").fill_null(True) if is_text else values.is_null()
    position = bad.index(True).as_py() if len(values) else -1
    if position >= 0:
        row = start + _row_of(position, lengths)
        raise ValueError(
            f"Row {row} has the label {values[position].as_py()!r} in column `{column}`. Remove empty labels; a "
            "document without labels has an empty list."
        )


def _check_classes(values: Any, num_classes: int, lengths: np.ndarray, start: int, column: str) -> None:
    numbers = values.to_numpy(zero_copy_only=False)
    outside = np.flatnonzero((numbers < 0) | (numbers >= num_classes))
    if len(outside):
        row = start + _row_of(int(outside[0]), lengths)
        raise ValueError(
            f"Row {row} has the class {numbers[outside[0]]} in column `{column}`, which has the classes 0 to "
            f"{num_classes - 1}. Remove it; a document without labels has an empty list."
        )


def _row_of(position: int, lengths: np.ndarray) -> int:
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def distinct_names(dataset: Dataset, column: str) -> list[str]:
    pa, pc = import_arrow()
    seen = None
    for _, _, values in label_batches(dataset, column):
        distinct = values.unique()
        seen = distinct if seen is None else pa.chunked_array([seen, distinct]).unique()
    if seen is None or len(seen) == 0:
        raise ValueError(
            f"None of the {len(dataset)} documents has a label in column `{column}`. Check the name of the column."
        )
    return seen.take(pc.sort_indices(seen)).cast(pa.string()).to_pylist()


def look_up(values: Any, known: Any) -> np.ndarray:
    """Returns the positions of `values` in `known`, -1 for unknown values."""
    pa, pc = import_arrow()
    positions = pc.index_in(values.cast(pa.string()), value_set=known)
    return positions.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def raise_unlisted(values: Any, ids: np.ndarray, lengths: np.ndarray, start: int, num_labels: int) -> None:
    positions = np.flatnonzero(ids < 0)
    shown = dict.fromkeys(short(str(values[int(i)].as_py())) for i in positions[:20])
    row = start + _row_of(int(positions[0]), lengths)
    raise ValueError(
        f"The dataset has labels that are not among the {num_labels} `names`, such as {', '.join(list(shown)[:5])} "
        f"(first in row {row}). Add them to `names`, or omit `names` to use all labels of the dataset."
    )


def label_matrix(rows: np.ndarray, ids: np.ndarray, shape: tuple[int, int]) -> csr_matrix:
    """Returns a matrix of ones; `rows` ascend, the ids of a row may repeat and have any order."""
    offsets = offsets_of(np.bincount(rows, minlength=shape[0]))
    matrix = csr_matrix((np.ones(len(ids), np.float32), ids, offsets), shape=shape)
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix

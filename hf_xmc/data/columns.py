"""Converts any `datasets.Dataset` to the columns that the library reads."""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value, concatenate_datasets
from scipy.sparse import csr_matrix

logger = logging.getLogger(__name__)

COLUMNS = ("text", "feature_ids", "feature_values", "labels")
_BATCH_SIZE = 10_000
# Column indices of scipy matrices are 32-bit if possible.
_MAX_FEATURES = 2**31 - 1


def prepare_dataset(
    dataset: Dataset,
    column_mapping: Mapping[str, str] | None = None,
    label_delimiter: str | None = None,
    require_labels: bool = True,
    keep_columns: Sequence[str] = (),
) -> Dataset:
    """
    Renames, checks and converts the columns of a dataset, and removes all others.

    The result has `text` (strings; null becomes an empty string), or `feature_ids` and `feature_values` (lists of
    integers and floats), or all three, and `labels` (lists of strings or integers; null means no labels). Only columns
    that change are rewritten; the others stay memory-mapped.

    Args:
        dataset (`datasets.Dataset`):
            Documents with labels as lists of strings, lists of integers, lists of `ClassLabel` (replaced by their
            names) or one delimited string per document.
        column_mapping (`Mapping[str, str]`, *optional*):
            The dataset's column → one of `text`, `labels`, `feature_ids`, `feature_values`.
        label_delimiter (`str`, *optional*):
            Separator of the labels in a string column. Whitespace around a label is removed.
        require_labels (`bool`, *optional*, defaults to `True`):
            Whether a missing `labels` column is an error. If not, a column that would need a `label_delimiter` is
            removed.
        keep_columns (`Sequence[str]`, *optional*):
            Further columns to keep unchanged.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(f"Expected a `datasets.Dataset`, got {type(dataset).__name__}. Pass one split of it.")
    dataset = _rename(dataset, dict(column_mapping or {}))
    columns = dataset.column_names
    if "text" not in columns and not {"feature_ids", "feature_values"} <= set(columns):
        raise ValueError(missing_column("text", columns))
    if "labels" not in columns and require_labels:
        raise ValueError(missing_column("labels", columns))
    for name in keep_columns:
        if name not in columns:
            own_names = {target: source for source, target in (column_mapping or {}).items()}
            raise ValueError(missing_column(name, [own_names.get(column, column) for column in columns]))
    dataset = dataset.select_columns([name for name in dict.fromkeys((*COLUMNS, *keep_columns)) if name in columns])
    if len(dataset) == 0:
        raise ValueError("The dataset is empty. Check the file or the filter that it comes from.")
    for name in ("feature_ids", "feature_values"):
        if name in columns:
            _check_feature_type(dataset, name)
    if "text" in columns:
        dataset = _prepare_text(dataset)
    if "labels" in columns:
        if require_labels or label_delimiter or _item_type(_arrow_type(dataset, "labels")) is not None:
            return _prepare_labels(dataset, label_delimiter)
        return dataset.remove_columns("labels")
    return dataset


def documents_digest(dataset: Dataset) -> str:
    """
    A fingerprint of the content of documents and their labels, as [`prepare_dataset`] returns them, in this order.
    """
    fingerprint = hashlib.blake2b(digest_size=16)
    columns = dataset.select_columns(sorted(dataset.column_names)).with_format("arrow")
    for table in columns.iter(batch_size=_BATCH_SIZE):
        for batch in table.combine_chunks().to_batches():
            fingerprint.update(batch.serialize())
    return fingerprint.hexdigest()


def _rename(dataset: Dataset, mapping: dict[str, str]) -> Dataset:
    for source, target in mapping.items():
        if target not in COLUMNS:
            is_reversed = source in COLUMNS and target in dataset.column_names
            way_out = f" Write it the other way round: {{{target!r}: {source!r}}}." if is_reversed else ""
            raise ValueError(
                f"`column_mapping` maps `{source}` to `{target}`, which is not one of {', '.join(COLUMNS)}.{way_out}"
            )
        if source not in dataset.column_names:
            raise ValueError(f"{missing_column(source, dataset.column_names)} In Python: `column_mapping`.")
    targets = list(mapping.values())
    for target in targets:
        if targets.count(target) > 1:
            sources = ", ".join(f"`{s}`" for s, t in mapping.items() if t == target)
            raise ValueError(f"`column_mapping` maps {sources} to `{target}`: join these columns into one first.")
    # A mapped column replaces a column of the same name.
    replaced = [name for name in targets if name in dataset.column_names and name not in mapping]
    return dataset.remove_columns(replaced).rename_columns(mapping)


def missing_column(name: str, columns: Sequence[str]) -> str:
    """Error message for a missing column, with the existing columns and the closest name."""
    close = difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    message = f"There is no column `{name}` in the dataset; its columns are {', '.join(columns) or 'none'}.{hint}"
    if name not in COLUMNS:
        return f"{message} Commands take columns as `--text-column`, `--label-column` or `--keep-columns`."
    example = close[0] if close else "your column"
    flag = {"text": f" (--text-column '{example}')", "labels": f" (--label-column '{example}')"}.get(name, "")
    return f'{message} Name the column to use with column_mapping={{"{example}": "{name}"}}{flag}.'


def _arrow_type(dataset: Dataset, column: str) -> pa.DataType:
    return dataset.data.schema.field(column).type


def _item_type(kind: pa.DataType) -> pa.DataType | None:
    """Type of the items of a list type, `None` for any other type."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return kind.value_type
    return None


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a string type."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _check_feature_type(dataset: Dataset, column: str) -> None:
    kind = _arrow_type(dataset, column)
    item = _item_type(kind)
    integers = column == "feature_ids"
    if item is None or not (pa.types.is_integer(item) or (pa.types.is_floating(item) and not integers)):
        expected = "integers" if integers else "floats"
        raise TypeError(f"Column `{column}` is of type {kind}, but must be lists of {expected}.")


def _prepare_text(dataset: Dataset) -> Dataset:
    kind = _arrow_type(dataset, "text")
    if pa.types.is_null(kind) or (is_text(kind) and dataset.data.column("text").null_count):
        return _convert(dataset, "text", _fill_text, Value("string"))
    if not is_text(kind):
        raise TypeError(f"Column `text` is of type {kind}, but must be strings. Convert it with `dataset.map`.")
    return dataset


def _prepare_labels(dataset: Dataset, delimiter: str | None) -> Dataset:
    kind = _arrow_type(dataset, "labels")
    item = _item_type(kind)
    feature = dataset.features["labels"]
    names = getattr(getattr(feature, "feature", None), "names", None)
    if names is not None:
        return _convert(dataset, "labels", _name_classes, List(Value("string")), names=list(names))
    if item is not None and (is_text(item) or pa.types.is_integer(item) or pa.types.is_null(item)):
        return dataset
    if item is None and (is_text(kind) or pa.types.is_integer(kind)) and not hasattr(feature, "names"):
        if not delimiter:
            raise ValueError(
                f"Column `labels` is of type {kind}, such as {dataset[0]['labels']!r}. Pass the separator of the "
                "labels as `label_delimiter`, or convert the column to lists."
            )
        return _convert(dataset, "labels", _split_labels, List(Value("string")), delimiter=delimiter)
    raise TypeError(
        f"Column `labels` is of type {kind}, but must be lists of strings, integers or `ClassLabel`, or delimited "
        "strings. Convert it with `dataset.map` or `dataset.cast_column`."
    )


def _convert(dataset: Dataset, column: str, function: Any, feature: Any, **options) -> Dataset:
    """Rewrites one column batch by batch and keeps the others."""
    changed = dataset.select_columns([column]).with_format("arrow")
    changed = changed.map(
        function,
        batched=True,
        batch_size=_BATCH_SIZE,
        features=Features({column: feature}),
        fn_kwargs=options,
        desc=f"Converting {column}",
    ).with_format(None)
    others = [name for name in dataset.column_names if name != column]
    if not others:
        return changed
    return concatenate_datasets(
        [dataset.select_columns(others).with_format(None), changed], axis=1, split=dataset.split
    )


def _fill_text(table: pa.Table) -> pa.Table:
    return pa.table({"text": table.column("text").cast(pa.string()).fill_null("")})


def _name_classes(table: pa.Table, names: list[str]) -> pa.Table:
    offsets, values = _flat(table.column("labels"))
    codes = values.to_numpy(zero_copy_only=False)
    if values.null_count or (len(codes) and not (0 <= codes.min() and codes.max() < len(names))):
        raise ValueError(f"Column `labels` has class indices outside 0 to {len(names) - 1}.")
    named = pa.array(names, pa.string()).take(values)
    return pa.table({"labels": pa.ListArray.from_arrays(offsets, named)})


def _split_labels(table: pa.Table, delimiter: str) -> pa.Table:
    column = table.column("labels").cast(pa.string()).fill_null("")
    offsets, values = _flat(pc.split_pattern(column, delimiter))
    values = pc.utf8_trim_whitespace(values)
    keep = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
    kept = np.concatenate([[0], np.cumsum(keep)])[offsets]
    return pa.table({"labels": pa.ListArray.from_arrays(kept, values.filter(pa.array(keep)))})


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Offsets (from 0) and items of a list column; null counts as an empty list."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), array.flatten()


def feature_matrix(dataset: Dataset, num_features: int | None = None) -> csr_matrix:
    """
    Converts `feature_ids` and `feature_values` of a dataset to a `(documents, features)` matrix with sorted indices.

    Ids may be in any order. Repeated or negative ids, NaN and infinity are errors, and features beyond `num_features`
    (by default the largest id plus one) are ignored with a warning.
    """
    for name in ("feature_ids", "feature_values"):
        if name not in dataset.column_names:
            raise ValueError(missing_column(name, dataset.column_names))
        _check_feature_type(dataset, name)
    lengths = [np.diff(offsets) for _, offsets, _, _ in _vector_batches(dataset)]
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([[], *lengths]), dtype=np.int64)])
    indices = np.empty(indptr[-1], np.int64 if indptr[-1] > np.iinfo(np.int32).max else np.int32)
    data = np.empty(indptr[-1], np.float32)
    for start, offsets, ids, values in _vector_batches(dataset):
        ids, values = check_rows(offsets, ids, values, partial(_place, start), _MAX_FEATURES)
        part = slice(indptr[start], indptr[start] + len(ids))
        indices[part], data[part] = ids, values
    width = int(indices.max()) + 1 if len(indices) else 0
    if num_features is None:
        return csr_matrix((data, indices, indptr), shape=(len(dataset), max(width, 1)))
    if width > num_features:
        known = indices < num_features
        logger.warning(
            "%d of %d feature values have an id of %d or more and are ignored.",
            len(known) - known.sum(),
            len(known),
            num_features,
        )
        indptr = np.concatenate([[0], np.cumsum(known, dtype=np.int64)])[indptr]
        indices, data = indices[known], data[known]
    return csr_matrix((data, indices, indptr), shape=(len(dataset), num_features))


def _place(start: int, row: int) -> str:
    return f"Row {start + row} of the dataset"


def _vector_batches(dataset: Dataset) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (first row, offsets, feature ids, float32 values) of each batch."""
    start = 0
    columns = dataset.select_columns(["feature_ids", "feature_values"]).with_format("arrow")
    for table in columns.iter(batch_size=_BATCH_SIZE):
        offsets, ids = _flat(table.column("feature_ids"))
        value_offsets, values = _flat(table.column("feature_values"))
        if not np.array_equal(offsets, value_offsets):
            row = int(np.argmax(np.diff(offsets) != np.diff(value_offsets)))
            raise ValueError(
                f"{_place(start, row)} has {offsets[row + 1] - offsets[row]} feature ids but "
                f"{value_offsets[row + 1] - value_offsets[row]} feature values. Both lists must be equally long."
            )
        for items, what in ((ids, lambda i: "a null feature id"), (values, lambda i: "a null feature value")):
            missing = items.is_null().to_numpy(zero_copy_only=False)
            raise_at(missing, offsets, what, "Remove that feature.", partial(_place, start))
        with np.errstate(over="ignore"):
            numbers = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        yield start, offsets, ids.to_numpy(zero_copy_only=False).astype(np.int64, copy=False), numbers
        start += len(offsets) - 1


def check_rows(
    offsets: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
    place: Callable[[int], str],
    num_features: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Checks sparse rows and sorts each by feature id; returns the same arrays if they were sorted already.

    Row i has the entries `offsets[i]` to `offsets[i + 1]`; the first offset is 0. `place` describes row i in errors.
    """
    raise_at(ids < 0, offsets, lambda i: f"the negative feature id {ids[i]}", "Feature ids start at 0.", place)
    if num_features is not None:
        way_out = f"Ids must be smaller than the number of features, {num_features}."
        raise_at(ids >= num_features, offsets, lambda i: f"the feature id {ids[i]}", way_out, place)
    way_out = "Feature values must be finite float32 numbers."
    raise_at(~np.isfinite(values), offsets, lambda i: f"the value {values[i]} for feature {ids[i]}", way_out, place)
    if len(ids) < 2:
        return ids, values
    step = np.diff(ids.astype(np.int64, copy=False))
    starts = offsets[1:-1]
    # The step to the first entry of a row compares two rows, where any order is right.
    step[starts[(starts > 0) & (starts < len(ids))] - 1] = 1
    if (step < 0).any():
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        order = np.lexsort((ids, rows))
        return check_rows(offsets, ids[order], values[order], place)
    way_out = "Add up or remove repeated features first."
    raise_at(np.append(step == 0, False), offsets, lambda i: f"feature {ids[i]} twice", way_out, place)
    return ids, values


def raise_at(
    bad: np.ndarray, offsets: np.ndarray, what: Callable[[int], str], way_out: str, place: Callable[[int], str]
) -> None:
    """Raises at the first bad entry of sparse rows: `place` describes its row, `what` the entry."""
    if bad.any():
        entry = int(np.argmax(bad))
        row = int(np.searchsorted(offsets, entry, side="right")) - 1
        raise ValueError(f"{place(row)} has {what(entry)}. {way_out}")

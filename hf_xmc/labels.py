"""The label space of a model: names, ids, training counts, texts and their file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from .serialization import read_json, resolve_file, write_json

if TYPE_CHECKING:
    # Imports inside `try` are optional for transformers: a published model must load without `datasets`.
    try:
        from datasets import Dataset
    except ImportError:
        pass

LABELS_NAME = "labels.json"
# Documents per look-up of labels. Large, because each look-up hashes all label names.
BATCH_SIZE = 200_000


class Labels:
    """
    The label space of a model: names, training counts and, optionally, texts of the labels.

    Args:
        names (`Sequence[str]`):
            Unique, non-empty label names. A label's id is its position.
        counts (`np.ndarray`, *optional*):
            Number of training documents of each label; all 0 by default.
        num_documents (`int`, *optional*, defaults to 0):
            Number of training documents, including those without labels.
        texts (`Sequence[str]`, *optional*):
            Text of each label; an empty string for labels without text.
    """

    def __init__(
        self,
        names: Sequence[str],
        counts: np.ndarray | Sequence[int] | None = None,
        num_documents: int = 0,
        texts: Sequence[str] | None = None,
    ):
        self.names = list(names)
        self.counts = np.zeros(len(self.names), np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
        self.num_documents = int(num_documents)
        self.texts = None if texts is None else list(texts)
        self._log_counts: tuple[Any, np.ndarray] = (None, np.empty(0, np.float32))
        self._check()

    def _check(self) -> None:
        if not self.names:
            raise ValueError("`names` is empty. Pass at least one label name.")
        for i, name in enumerate(self.names):
            if not isinstance(name, str) or not name:
                raise ValueError(f"`names[{i}]` is {name!r}. A label name must be a non-empty string.")
        if len(self._ids) != len(self.names):
            repeated = next(name for i, name in enumerate(self.names) if self._ids[name] != i)
            raise ValueError(f"The label name {_short(repeated)} occurs twice in `names`. Names must be unique.")
        if self.counts.shape != (len(self.names),) or (self.counts < 0).any():
            raise ValueError(
                f"`counts` must have one number >= 0 for each of the {len(self.names)} labels, but has the shape "
                f"{self.counts.shape}."
            )
        if self.num_documents < self.counts.max():
            raise ValueError(
                f"`num_documents` is {self.num_documents}, but a label has {self.counts.max()} documents."
            )
        if self.texts is not None and len(self.texts) != len(self.names):
            raise ValueError(f"`texts` has {len(self.texts)} entries for {len(self.names)} labels.")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        return self.names[index]

    def __repr__(self) -> str:
        return f"Labels({len(self)} labels, {self.num_documents} documents, texts: {self.texts is not None})"

    def ids(self, names: Iterable[str]) -> np.ndarray:
        """Returns the ids of `names`, -1 for unknown names."""
        return np.fromiter((self._ids.get(name, -1) for name in names), dtype=np.int64)

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset,
        *,
        column: str = "labels",
        names: Sequence[str] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> Labels:
        """
        Collects the labels of a training set and counts their documents. A repeated label of a document counts once.

        Args:
            dataset (`datasets.Dataset`):
                Documents with a column of label lists (strings or integers; the name of an integer is its digits).
            column (`str`, *optional*, defaults to `"labels"`):
                Name of that column.
            names (`Sequence[str]`, *optional*):
                The labels, in this order; other labels in the dataset are an error. By default all labels of the
                dataset, integers in numerical order, strings by code points.
            texts (`Mapping[str, str]`, *optional*):
                Text by label name (or number). Labels may be missing, but not all.
        """
        if names is None:
            names = _distinct_names(dataset, column)
        labels = cls([str(name) for name in names])
        counts = np.zeros(len(labels), np.int64)
        known = labels._name_array()
        for start, lengths, values in _label_batches(dataset, column):
            ids = _look_up(values, known)
            if (ids < 0).any():
                _raise_unlisted(values, ids, lengths, start, len(labels))
            rows = np.repeat(np.arange(len(lengths)), lengths)
            matrix = _label_matrix(rows, ids, (len(lengths), len(labels)))
            counts += np.bincount(matrix.indices, minlength=len(labels))
        labels.counts, labels.num_documents = counts, len(dataset)
        labels.texts = None if texts is None else labels._find_texts(texts)
        return labels

    @property
    def log_counts(self) -> np.ndarray:
        """`log(1 + n)` with the number of training documents of each label, float32."""
        counts, logarithms = self._log_counts
        if counts is not self.counts:
            logarithms = np.log1p(self.counts).astype(np.float32)
            self._log_counts = self.counts, logarithms
        return logarithms

    def readable_texts(self) -> list[str]:
        """Returns the text of each label, by default its name; an empty string for codes without letters."""
        texts = [""] * len(self) if self.texts is None else self.texts
        # Names such as `vendor:product_name` consist of words, too.
        chosen = [
            text if text.strip() else re.sub(r"[\W_]+", " ", name)
            for text, name in zip(texts, self.names, strict=True)
        ]
        return [text if any(map(str.isalpha, text)) else "" for text in chosen]

    def _find_texts(self, texts: Mapping[str, str]) -> list[str]:
        by_name = {str(name): text for name, text in texts.items()}
        label_texts = [by_name.get(name) or "" for name in self.names]
        if by_name and not any(label_texts):
            raise ValueError(
                f"None of the {len(self)} labels (such as {_short(self.names[0])}) is a key of `label_texts` (such as "
                f"{_short(next(iter(by_name)))}). The keys must be label names."
            )
        return label_texts

    def encode(self, dataset: Dataset, *, column: str = "labels", keep_unseen: bool = False) -> csr_matrix:
        """
        Returns the label lists of a dataset as a document × label matrix.

        Args:
            dataset (`datasets.Dataset`):
                Documents with a column of label lists.
            column (`str`, *optional*, defaults to `"labels"`):
                Name of that column.
            keep_unseen (`bool`, *optional*, defaults to `False`):
                Whether unknown labels get additional columns after the known ones (evaluation counts them as missed)
                or are dropped.

        Returns:
            `scipy.sparse.csr_matrix`: float32 ones with sorted indices, without duplicates.
        """
        known = self._name_array()
        unseen: dict[str, int] = {}
        all_rows, all_ids = [], []
        for start, lengths, values in _label_batches(dataset, column):
            ids = _look_up(values, known)
            rows = np.repeat(np.arange(start, start + len(lengths)), lengths)
            missing = ids < 0
            if keep_unseen and missing.any():
                ids[missing] = self._unseen_ids(values.take(np.flatnonzero(missing)), unseen)
            elif missing.any():
                rows, ids = rows[~missing], ids[~missing]
            all_rows.append(rows)
            all_ids.append(ids)
        empty = [np.zeros(0, np.int64)]
        shape = (len(dataset), len(self) + len(unseen))
        return _label_matrix(np.concatenate(all_rows or empty), np.concatenate(all_ids or empty), shape)

    def _unseen_ids(self, values: Any, unseen: dict[str, int]) -> np.ndarray:
        encoded = values.cast("string").dictionary_encode()
        columns = [unseen.setdefault(name, len(self) + len(unseen)) for name in encoded.dictionary.to_pylist()]
        return np.asarray(columns, dtype=np.int64)[encoded.indices.to_numpy()]

    def _name_array(self) -> Any:
        pa, _ = _arrow()
        return pa.array(self.names, type=pa.string())

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `labels.json` into a folder."""
        content: dict[str, Any] = {
            "num_documents": self.num_documents,
            "names": self.names,
            "counts": self.counts.tolist(),
        }
        if self.texts is not None:
            content["texts"] = self.texts
        write_json(os.path.join(save_directory, LABELS_NAME), content)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **hub_kwargs) -> Labels:
        """Reads `labels.json` from a folder or a model on the Hub."""
        path = resolve_file(pretrained_model_name_or_path, LABELS_NAME, **hub_kwargs)
        content = read_json(str(path))
        try:
            _check_types(content)
            return cls(content["names"], content["counts"], content["num_documents"], content.get("texts"))
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"`{path}` is not a valid label file ({type(error).__name__}: {error}). Save or download it again."
            ) from error


def _check_types(content: Any) -> None:
    """Raises if the content of a label file has other types than those that are saved."""
    expected = {"names": str, "counts": int, "texts": str}
    for name, kind in expected.items():
        values = content[name] if name in ("names", "counts") else content.get(name) or []
        wrong = next((i for i, value in enumerate(values) if type(value) is not kind), None)
        if not isinstance(values, list) or wrong is not None:
            raise TypeError(f"`{name}` must be a list of {kind.__name__}; see position {wrong}.")
    if type(content["num_documents"]) is not int:
        raise TypeError("`num_documents` must be a number.")


def _arrow() -> tuple[Any, Any]:
    # Inside `try` for the same reason as `datasets` above.
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError as error:
        raise ImportError("Reading the labels of a dataset needs pyarrow: `pip install pyarrow`.") from error
    return pyarrow, pyarrow.compute


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _label_batches(dataset: Dataset, column: str) -> Iterator[tuple[int, np.ndarray, Any]]:
    """Yields batches: first row, number of labels of each document, and all labels as an Arrow array."""
    pa, pc = _arrow()
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
                values = pa.array(class_names, pa.string()).take(values)
            yield start, lengths, values
            start += len(chunk)


def _check_values(values: Any, lengths: np.ndarray, start: int, column: str) -> None:
    pa, pc = _arrow()
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


def _row_of(position: int, lengths: np.ndarray) -> int:
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def _distinct_names(dataset: Dataset, column: str) -> list[str]:
    pa, pc = _arrow()
    seen = None
    for _, _, values in _label_batches(dataset, column):
        distinct = values.unique()
        seen = distinct if seen is None else pa.chunked_array([seen, distinct]).unique()
    if seen is None or len(seen) == 0:
        raise ValueError(
            f"None of the {len(dataset)} documents has a label in column `{column}`. Check the name of the column."
        )
    return seen.take(pc.sort_indices(seen)).cast(pa.string()).to_pylist()


def _look_up(values: Any, known: Any) -> np.ndarray:
    """Returns the positions of `values` in `known`, -1 for unknown values."""
    pa, pc = _arrow()
    positions = pc.index_in(values.cast(pa.string()), value_set=known)
    return positions.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _raise_unlisted(values: Any, ids: np.ndarray, lengths: np.ndarray, start: int, num_labels: int) -> None:
    positions = np.flatnonzero(ids < 0)
    shown = dict.fromkeys(_short(str(values[int(i)].as_py())) for i in positions[:20])
    row = start + _row_of(int(positions[0]), lengths)
    raise ValueError(
        f"The dataset has labels that are not among the {num_labels} `names`, such as {', '.join(list(shown)[:5])} "
        f"(first in row {row}). Add them to `names`, or omit `names` to use all labels of the dataset."
    )


def _label_matrix(rows: np.ndarray, ids: np.ndarray, shape: tuple[int, int]) -> csr_matrix:
    """Returns a matrix of ones; `rows` ascend, the ids of a row may repeat and have any order."""
    offsets = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=offsets[1:])
    matrix = csr_matrix((np.ones(len(ids), np.float32), ids, offsets), shape=shape)
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix

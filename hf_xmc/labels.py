"""Label names, their ids and how often training documents carry them: one object, one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from .serialization import read_json, resolve_file, write_json

if TYPE_CHECKING:
    # A model repository that carries this file must not ask for `datasets`: imports inside `try` are optional there.
    try:
        from datasets import Dataset
    except ImportError:
        pass

LABELS_NAME = "labels.json"
# Documents looked at together. Large, because each look-up hashes all label names once.
_BATCH_SIZE = 200_000


class Labels:
    """
    The label space of a model: id → name, training counts and, where labels have one, a text.

    Args:
        names (`Sequence[str]`):
            Unique, non-empty label names. A label's id is its position.
        counts (`np.ndarray`, *optional*):
            Number of training documents of each label. All 0 where left out.
        num_documents (`int`, *optional*, defaults to 0):
            Number of training documents, those without a label included.
        texts (`Sequence[str]`, *optional*):
            The labels' own texts in the order of `names`; an empty string where a label has none.
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
        self._check()

    def _check(self) -> None:
        if not self.names:
            raise ValueError("There are no labels: at least one label name is needed.")
        for i, name in enumerate(self.names):
            if not isinstance(name, str) or not name:
                raise ValueError(f"Label {i} is {name!r}: a label name is a non-empty string.")
        if len(self._ids) != len(self.names):
            repeated = next(name for i, name in enumerate(self.names) if self._ids[name] != i)
            raise ValueError(f"The label name {_short(repeated)} occurs twice: names must be unique.")
        if self.counts.shape != (len(self.names),) or (self.counts < 0).any():
            raise ValueError(
                f"`counts` must hold one number >= 0 for each of the {len(self.names)} labels, "
                f"got shape {self.counts.shape}."
            )
        if self.num_documents < self.counts.max():
            raise ValueError(
                f"A label has {self.counts.max()} documents, but `num_documents` is {self.num_documents}."
            )
        if self.texts is not None and len(self.texts) != len(self.names):
            raise ValueError(f"There are {len(self.texts)} label texts for {len(self.names)} labels.")

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
        """Ids of `names`, -1 where a name is unknown."""
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
        Collects the labels of a training set and counts their documents.

        Args:
            dataset (`datasets.Dataset`):
                Documents with a column of label lists (strings or integers; an integer label is named by its digits).
            column (`str`, *optional*, defaults to `"labels"`):
                Name of that column.
            names (`Sequence[str]`, *optional*):
                The labels to use, in this order; any other label in the dataset is an error. By default all labels
                seen, integers in numerical order, strings in the order of their code points.
            texts (`Mapping[str, str]`, *optional*):
                Text by label name (or number). A label that is not in it gets an empty text; none in it is an error.

        Returns:
            [`Labels`]: A label repeated in a document counts once; documents without labels are in `num_documents`.
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

    def _find_texts(self, texts: Mapping[str, str]) -> list[str]:
        by_name = {str(name): text for name, text in texts.items()}
        found = [by_name.get(name) or "" for name in self.names]
        if by_name and not any(found):
            raise ValueError(
                f"None of the {len(self)} labels, such as {_short(self.names[0])}, has a text in `label_texts`, whose "
                f"{len(by_name)} keys are such as {_short(next(iter(by_name)))}. Its keys must be the labels' names."
            )
        return found

    def encode(self, dataset: Dataset, *, column: str = "labels", keep_unseen: bool = False) -> csr_matrix:
        """
        Turns the label lists of a dataset into a document × label matrix.

        Args:
            dataset (`datasets.Dataset`):
                Documents with a column of label lists.
            column (`str`, *optional*, defaults to `"labels"`):
                Name of that column.
            keep_unseen (`bool`, *optional*, defaults to `False`):
                Whether labels that are not in this object get columns of their own behind the known ones (for
                evaluation, which counts them as missed) or are left out.

        Returns:
            `scipy.sparse.csr_matrix`: float32 ones with sorted indices; repeated labels of a document are merged.
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
        """Reads `labels.json` from a folder or a model on the Hub; takes `revision`, `token`, … as models do."""
        path = resolve_file(pretrained_model_name_or_path, LABELS_NAME, **hub_kwargs)
        content = read_json(str(path))
        try:
            return cls(content["names"], content["counts"], content["num_documents"], content.get("texts"))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"`{path}` is not a label file of hf_xmc ({type(error).__name__}: {error}). Save or download it again."
            ) from error


def _arrow() -> tuple[Any, Any]:
    # Inside `try` for the same reason as above: predicting with a published model needs no Arrow.
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError as error:
        raise ImportError("Reading the labels of a dataset needs pyarrow: `pip install pyarrow`.") from error
    return pyarrow, pyarrow.compute


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _label_batches(dataset: Dataset, column: str) -> Iterator[tuple[int, np.ndarray, Any]]:
    """Yields (first row, labels per document, all their labels as an Arrow array of integers or strings)."""
    pa, pc = _arrow()
    columns = getattr(dataset, "column_names", None)
    if isinstance(dataset, dict) or not hasattr(dataset, "select_columns") or columns is None:
        raise TypeError(f"Labels are read from a `datasets.Dataset`, got {type(dataset).__name__}. Pass one split.")
    if column not in columns:
        raise ValueError(f"The dataset has no column `{column}`; it has {columns}. Map a column to `{column}` first.")
    if len(dataset) == 0:
        return
    feature = dataset.features[column]
    class_names = getattr(getattr(feature, "feature", None), "names", None)
    start = 0
    # A shuffled dataset comes in one chunk per row.
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=_BATCH_SIZE):
        for chunk in table.combine_chunks().column(column).chunks:
            if pa.types.is_fixed_size_list(chunk.type):
                chunk = chunk.cast(pa.list_(chunk.type.value_type))
            if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
                raise TypeError(
                    f"Column `{column}` is of type {chunk.type}: a list of labels is needed for each document. "
                    "`hf_xmc.data.prepare_dataset` splits delimited strings."
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
        raise TypeError(f"Column `{column}` holds lists of {values.type}: labels are strings or integers.")
    bad = pc.equal(values, "").fill_null(True) if is_text else values.is_null()
    position = bad.index(True).as_py() if len(values) else -1
    if position >= 0:
        row = start + _row_of(position, lengths)
        raise ValueError(
            f"Row {row} of the dataset has a label {values[position].as_py()!r} in column `{column}`: "
            "remove empty labels (a document without labels has an empty list)."
        )


def _row_of(position: int, lengths: np.ndarray) -> int:
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def _distinct_names(dataset: Dataset, column: str) -> list[str]:
    pa, pc = _arrow()
    seen = None
    for _, _, values in _label_batches(dataset, column):
        found = values.unique()
        seen = found if seen is None else pa.chunked_array([seen, found]).unique()
    if seen is None or len(seen) == 0:
        raise ValueError(
            f"None of the {len(dataset)} documents has a label in column `{column}`. Check that it is the right one."
        )
    return seen.take(pc.sort_indices(seen)).cast(pa.string()).to_pylist()


def _look_up(values: Any, known: Any) -> np.ndarray:
    """Positions of `values` in `known`, -1 where they are not in it."""
    pa, pc = _arrow()
    found = pc.index_in(values.cast(pa.string()), value_set=known)
    return found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _raise_unlisted(values: Any, ids: np.ndarray, lengths: np.ndarray, start: int, num_labels: int) -> None:
    positions = np.flatnonzero(ids < 0)
    shown = dict.fromkeys(_short(str(values[int(i)].as_py())) for i in positions[:20])
    row = start + _row_of(int(positions[0]), lengths)
    raise ValueError(
        f"The dataset has labels that are not among the {num_labels} given names, such as "
        f"{', '.join(list(shown)[:5])} (first in row {row}). Add them to `names`, or leave `names` out "
        "to use every label of the dataset."
    )


def _label_matrix(rows: np.ndarray, ids: np.ndarray, shape: tuple[int, int]) -> csr_matrix:
    """Matrix of ones; `rows` ascend, ids of a row come in any order and may repeat."""
    offsets = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=offsets[1:])
    matrix = csr_matrix((np.ones(len(ids), np.float32), ids, offsets), shape=shape)
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix

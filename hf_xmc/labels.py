"""The label space of a model: names, ids, training counts, texts, hierarchy and their file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from .hierarchy import Hierarchy
from .label_columns import distinct_names, import_arrow, label_batches, label_matrix, look_up, raise_unlisted, short
from .restriction import Restriction
from .serialization import read_json, resolve_file, write_json
from .vocabulary import LabelEntry, LabelVocabulary

if TYPE_CHECKING:
    from .label_columns import Dataset

LABELS_NAME = "labels.json"
_URI = re.compile(r"<?(\w+://|urn:)")
# What a file has of the labels beside names and counts, in models trained with a vocabulary.
_VOCABULARY_KEYS = ("texts", "synonyms", "descriptions", "parents")


class Labels:
    """
    The label space of a model: the labels, their training counts and, optionally, what a vocabulary says about them.

    Args:
        names (`Sequence[str]`):
            The labels as the documents have them: unique, non-empty names or codes. A label's id is its position.
        counts (`np.ndarray`, *optional*):
            Number of training documents of each label; all 0 by default.
        num_documents (`int`, *optional*, defaults to 0):
            Number of training documents, including those without labels.
        texts (`Sequence[str]`, *optional*):
            The name of each label in words, which predictions show beside it; an empty string for none.
        synonyms (`Sequence[Sequence[str]]`, *optional*):
            Further names of each label.
        descriptions (`Sequence[str]`, *optional*):
            Description of each label; an empty string for none.
        parents (`Sequence[Sequence[int]]`, *optional*):
            Ids of the broader labels of each label.
        edits (`Sequence[dict]`, *optional*):
            Which labels were added, removed or renamed after the training, and when.
    """

    def __init__(
        self,
        names: Sequence[str],
        counts: np.ndarray | Sequence[int] | None = None,
        num_documents: int = 0,
        texts: Sequence[str] | None = None,
        synonyms: Sequence[Sequence[str]] | None = None,
        descriptions: Sequence[str] | None = None,
        parents: Sequence[Sequence[int]] | None = None,
        edits: Sequence[dict[str, Any]] = (),
    ):
        self.names = list(names)
        self.counts = np.zeros(len(self.names), np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
        self.num_documents = int(num_documents)
        self.texts = None if texts is None else list(texts)
        self.synonyms = None if synonyms is None else [list(own) for own in synonyms]
        self.descriptions = None if descriptions is None else list(descriptions)
        self.hierarchy = None if parents is None else Hierarchy(parents, self.names)
        self.edits = list(edits)
        self._log_counts: tuple[Any, np.ndarray] = (None, np.empty(0, np.float32))
        self._other_names: tuple[Any, dict[str, str]] = (None, {})
        self._restriction: tuple[Any, Restriction | None] = (None, None)
        self._check()

    def _check(self) -> None:
        if not self.names:
            raise ValueError("`names` is empty. Pass at least one label name.")
        for i, name in enumerate(self.names):
            if not isinstance(name, str) or not name:
                raise ValueError(f"`names[{i}]` is {name!r}. A label name must be a non-empty string.")
        if len(self._ids) != len(self.names):
            repeated = next(name for i, name in enumerate(self.names) if self._ids[name] != i)
            raise ValueError(f"The label name {short(repeated)} occurs twice in `names`. Names must be unique.")
        if self.counts.shape != (len(self.names),) or (self.counts < 0).any():
            raise ValueError(
                f"`counts` must have one number >= 0 for each of the {len(self.names)} labels, but has the shape "
                f"{self.counts.shape}."
            )
        if self.num_documents < self.counts.max():
            raise ValueError(
                f"`num_documents` is {self.num_documents}, but a label has {self.counts.max()} documents."
            )
        for key in _VOCABULARY_KEYS:
            values = getattr(self, key)
            if values is not None and len(values) != len(self.names):
                raise ValueError(f"`{key}` has {len(values)} entries for {len(self.names)} labels.")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        return self.names[index]

    def __repr__(self) -> str:
        return f"Labels({len(self)} labels, {self.num_documents} documents, texts: {self.texts is not None})"

    @property
    def parents(self) -> list[list[int]] | None:
        """Ids of the parents of each label; `None` without a hierarchy."""
        return None if self.hierarchy is None else self.hierarchy.parents

    def ancestors(self, name: str) -> np.ndarray:
        """Returns the ids of a label and of all labels above it."""
        return self.checked_hierarchy().ancestors([self._id_of(name)])

    def descendants(self, name: str) -> np.ndarray:
        """Returns the ids of a label and of all labels below it."""
        return self.checked_hierarchy().descendants([self._id_of(name)])

    def checked_hierarchy(self) -> Hierarchy:
        """Returns the hierarchy; raises if there is none."""
        if self.hierarchy is None:
            raise ValueError(
                "The labels have no hierarchy. Train the model with a vocabulary (`label_texts`) that has `parents`."
            )
        return self.hierarchy

    def _id_of(self, name: str) -> int:
        if name not in self._ids:
            meant = next((label for label, other in self.other_names.items() if other == name), None)
            hint = "" if meant is None else f" It is the name of the label {short(meant)}: pass that."
            raise ValueError(f"{short(str(name))} is not one of the {len(self)} labels of the model.{hint}")
        return self._ids[name]

    def restrict(
        self,
        labels: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        under: str | Sequence[str] | None = None,
    ) -> Restriction | None:
        """
        Returns the labels that a prediction may choose from; `None` if these are all labels.

        Args:
            labels (`Sequence[str]`, *optional*):
                The permitted labels.
            exclude (`Sequence[str]`, *optional*):
                Labels that are not permitted.
            under (`str` or `Sequence[str]`, *optional*):
                Labels of the hierarchy: these and all labels below any of them are permitted.
        """
        given = {"labels": labels, "exclude": exclude, "under": [under] if isinstance(under, str) else under}
        if all(value is None for value in given.values()):
            return None
        for key, value in given.items():
            if isinstance(value, str):
                raise TypeError(f"`{key}` is one label, not several. Pass a list: `[{short(value)}]`.")
            if value is not None and (isinstance(value, bytes) or not isinstance(value, Iterable)):
                raise TypeError(f"`{key}` must be a list of labels, not {value!r:.80}.")
        chosen = {key: None if value is None else tuple(value) for key, value in given.items()}
        # The same restriction usually serves many batches, and may have all labels of the model.
        identity = (*chosen.values(), id(self.names), len(self))
        if self._restriction[0] != identity:
            for key, names in chosen.items():
                for place, name in enumerate(names or ()):
                    if not isinstance(name, str):
                        raise TypeError(f"`{key}[{place}]` is {name!r:.80}, but labels are strings.")
            self._restriction = identity, self._restrict(**chosen)
        return self._restriction[1]

    def _restrict(
        self, labels: tuple[str, ...] | None, exclude: tuple[str, ...] | None, under: tuple[str, ...] | None
    ) -> Restriction | None:
        permitted = np.full(len(self), labels is None)
        permitted[[self._id_of(name) for name in labels or ()]] = True
        if under is not None:
            below = self.checked_hierarchy().descendants([self._id_of(name) for name in under])
            permitted &= np.isin(np.arange(len(self)), below)
        permitted[[self._id_of(name) for name in exclude or ()]] = False
        if not permitted.any():
            raise ValueError(
                "`labels`, `exclude` and `under` leave no label to choose from. Permit at least one label."
            )
        return None if permitted.all() else Restriction(np.flatnonzero(permitted), len(self))

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
        texts: Mapping[str, Any] | None = None,
        unseen: bool = False,
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
            texts (`Mapping[str, str]` or [`LabelVocabulary`], *optional*):
                Name in words, or entry of a vocabulary, by label. Labels may be missing, but not all.
            unseen (`bool`, *optional*, defaults to `False`):
                Whether entries of the vocabulary that no document has become labels, too, after the others. Those
                without words do not.
        """
        vocabulary = None if texts is None else _as_vocabulary(texts)
        if names is None:
            names = distinct_names(dataset, column)
            if vocabulary is not None:
                vocabulary = vocabulary.for_labels(names)
                _check_known(names, vocabulary)
                names += _unseen_names(names, vocabulary) if unseen else []
        labels = cls([str(name) for name in names])
        counts = np.zeros(len(labels), np.int64)
        known = labels._name_array()
        for start, lengths, values in label_batches(dataset, column):
            ids = look_up(values, known)
            if (ids < 0).any():
                raise_unlisted(values, ids, lengths, start, len(labels))
            rows = np.repeat(np.arange(len(lengths)), lengths)
            matrix = label_matrix(rows, ids, (len(lengths), len(labels)))
            counts += np.bincount(matrix.indices, minlength=len(labels))
        labels.counts, labels.num_documents = counts, len(dataset)
        if vocabulary is not None:
            labels.describe(vocabulary)
        return labels

    def describe(self, vocabulary: Mapping[str, Any]) -> None:
        """
        Takes over names, synonyms, descriptions and parents from a vocabulary.

        Args:
            vocabulary ([`LabelVocabulary`] or `Mapping`):
                Entries by label. Labels without an entry have no text. Where a parent is not a label, its own parents
                take its place.
        """
        vocabulary = _as_vocabulary(vocabulary)
        entries = [vocabulary.get(name, LabelEntry()) for name in self.names]
        self.texts = [entry.name for entry in entries]
        synonyms, descriptions = [list(entry.synonyms) for entry in entries], [entry.description for entry in entries]
        self.synonyms = synonyms if any(synonyms) else None
        self.descriptions = descriptions if any(descriptions) else None
        self.hierarchy = None
        if vocabulary.has_parents:
            parents = [vocabulary.parents_among(name, self._ids) for name in self.names]
            self.hierarchy = Hierarchy(parents, self.names)

    def followed_by(self, entries: Mapping[str, Any]) -> Labels:
        """Returns these labels and further ones without documents, with their entries of a vocabulary."""
        counts = np.concatenate([self.counts, np.zeros(len(entries), np.int64)])
        labels = Labels([*self.names, *entries], counts, self.num_documents, edits=self.edits)
        labels.describe({**self.vocabulary(), **entries})
        labels.texts = labels.texts if any(labels.texts or ()) else None
        return labels

    def subset(self, ids: np.ndarray) -> Labels:
        """Returns some of the labels; where one of the others is a parent, its own parents take its place."""
        labels = Labels([self.names[i] for i in ids], self.counts[ids], self.num_documents, edits=self.edits)
        if any(getattr(self, key) is not None for key in _VOCABULARY_KEYS):
            labels.describe(self.vocabulary())
        return labels

    def renamed(self, names: Sequence[str]) -> Labels:
        """Returns the labels under other names, which are in the same order."""
        vocabulary = {key: getattr(self, key) for key in _VOCABULARY_KEYS}
        return Labels(names, self.counts, self.num_documents, **vocabulary, edits=self.edits)

    def vocabulary(self) -> LabelVocabulary:
        """Returns what is known about the labels, see [`~Labels.describe`]."""
        count = len(self)
        rows = zip(
            self.names,
            self.texts or [""] * count,
            self.synonyms or [[]] * count,
            self.descriptions or [""] * count,
            self.parents or [[]] * count,
            strict=True,
        )
        return LabelVocabulary(
            {
                label: LabelEntry(name, tuple(synonyms), description, tuple(self.names[i] for i in parents))
                for label, name, synonyms, description, parents in rows
            }
        )

    def name_of(self, label: str) -> str:
        """Returns the name of a label in words; the label itself if it has none."""
        return self.other_names.get(label, self.names[self._id_of(label)])

    @property
    def other_names(self) -> dict[str, str]:
        """The names in words that differ from the labels, by label."""
        if self._other_names[0] is not self.texts:
            pairs = zip(self.names, self.texts or [""] * len(self), strict=True)
            self._other_names = self.texts, {label: text for label, text in pairs if text and text != label}
        return self._other_names[1]

    @property
    def log_counts(self) -> np.ndarray:
        """`log(1 + n)` with the number of training documents of each label, float32."""
        counts, logarithms = self._log_counts
        if counts is not self.counts:
            logarithms = np.log1p(self.counts).astype(np.float32)
            self._log_counts = self.counts, logarithms
        return logarithms

    def readable_texts(self) -> list[str]:
        """
        Returns what is known about each label in words: name, synonyms and description.

        A label without a name is its own name if it is words, or if nothing else is known; a URI, or a code without
        letters, has an empty string.
        """
        count = len(self)
        texts, descriptions = self.texts or [""] * count, self.descriptions or [""] * count
        rows = zip(self.names, texts, self.synonyms or [[]] * count, descriptions, strict=True)
        chosen = []
        for label, name, synonyms, description in rows:
            # Labels such as `vendor:product_name` consist of words, too.
            own = "" if _URI.match(label) else re.sub(r"[\W_]+", " ", label)
            known = [name.strip(), *synonyms, description]
            if not name.strip() and not any(map(str.isdigit, own)):
                known[0] = own
            chosen.append("; ".join(filter(None, known)) or own)
        return [text if any(map(str.isalpha, text)) else "" for text in chosen]

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
        for start, lengths, values in label_batches(dataset, column):
            ids = look_up(values, known)
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
        return label_matrix(np.concatenate(all_rows or empty), np.concatenate(all_ids or empty), shape)

    def _unseen_ids(self, values: Any, unseen: dict[str, int]) -> np.ndarray:
        encoded = values.cast("string").dictionary_encode()
        columns = [unseen.setdefault(name, len(self) + len(unseen)) for name in encoded.dictionary.to_pylist()]
        return np.asarray(columns, dtype=np.int64)[encoded.indices.to_numpy()]

    def _name_array(self) -> Any:
        pa, _ = import_arrow()
        return pa.array(self.names, type=pa.string())

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `labels.json` into a folder."""
        content: dict[str, Any] = {
            "num_documents": self.num_documents,
            "names": self.names,
            "counts": self.counts.tolist(),
        }
        for key in _VOCABULARY_KEYS:
            if getattr(self, key) is not None:
                content[key] = getattr(self, key)
        if self.edits:
            content["edits"] = self.edits
        write_json(os.path.join(save_directory, LABELS_NAME), content)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **hub_kwargs) -> Labels:
        """Reads `labels.json` from a folder or a model on the Hub."""
        path = resolve_file(pretrained_model_name_or_path, LABELS_NAME, **hub_kwargs)
        content = read_json(str(path))
        try:
            _check_types(content)
            vocabulary = {key: content.get(key) for key in _VOCABULARY_KEYS}
            edits = content.get("edits") or []
            return cls(content["names"], content["counts"], content["num_documents"], **vocabulary, edits=edits)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"`{path}` is not a valid label file ({type(error).__name__}: {error}). Save or download it again."
            ) from error


def _check_types(content: Any) -> None:
    """Raises if the content of a label file has other types than those that are saved."""
    expected = {"names": str, "counts": int, "texts": str, "descriptions": str}
    for name, kind in expected.items():
        _check_list(name, content[name] if name in ("names", "counts") else content.get(name) or [], kind)
    for name, kind in {"synonyms": str, "parents": int}.items():
        lists = content.get(name) or []
        _check_list(name, lists, list)
        for values in lists:
            _check_list(name, values, kind)
    _check_list("edits", content.get("edits") or [], dict)
    if type(content["num_documents"]) is not int:
        raise TypeError("`num_documents` must be a number.")


def _check_list(name: str, values: Any, kind: type) -> None:
    wrong = next((i for i, value in enumerate(values) if type(value) is not kind), None)
    if not isinstance(values, list) or wrong is not None:
        raise TypeError(f"`{name}` must be a list of {kind.__name__}; see position {wrong}.")


def _as_vocabulary(entries: Mapping[Any, Any]) -> LabelVocabulary:
    return entries if isinstance(entries, LabelVocabulary) else LabelVocabulary(entries)


def _check_known(names: Sequence[str], vocabulary: LabelVocabulary) -> None:
    if vocabulary and not any(name in vocabulary for name in names):
        raise ValueError(
            f"None of the {len(names)} labels (such as {short(names[0])}) is a key of `label_texts` (such as "
            f"{short(next(iter(vocabulary)))}). The keys must be labels."
        )


def _unseen_names(names: Sequence[str], vocabulary: LabelVocabulary) -> list[str]:
    """The labels of a vocabulary that are not in `names` and consist of, or are described by, words."""
    seen = set(names)
    others = [name for name in vocabulary if name not in seen]
    if not others:
        return []
    described = Labels(others)
    described.describe(LabelVocabulary({name: replace(vocabulary[name], parents=()) for name in others}))
    return [name for name, text in zip(others, described.readable_texts(), strict=True) if text]

"""Synthetic documents whose labels and words follow Zipf's law, at any size.

Labels come in fields of 32 which share words; each label has a few words of its own besides. A document has one label
drawn so that every label is seen, and up to four more by Zipf's law. Its words come from the fields and labels it
carries, the rest from a Zipf-distributed background. There are as many training documents as labels, and the features
grow as the square root of the labels: 30 thousand for 10 thousand labels, 300 thousand for a million.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix, vstack

FIELD_LABELS, FIELD_WORDS, OWN_WORDS = 32, 24, 8
TOKENS = 40
MORE_LABELS = (0.3, 0.25, 0.2, 0.15, 0.1)  # share of documents with 0, 1, 2, 3, 4 more labels
BACKGROUND, FIELD = 0.3, 0.3  # shares of the words; the rest are words of the document's labels
MAX_TEST_DOCUMENTS = 10_000
_CHUNK = 50_000


@dataclass(frozen=True)
class World:
    """What labels are about: their words, and how frequent each label is."""

    num_features: int
    field_words: np.ndarray
    own_words: np.ndarray
    label_of_rank: np.ndarray

    @classmethod
    def make(cls, num_labels: int, random: np.random.Generator) -> World:
        """Draws the words of every label."""
        num_features = int(300 * num_labels**0.5)
        fields = -(-num_labels // FIELD_LABELS)
        # The square of a uniform number: frequent words have lower ids, but no word belongs to every field.
        field_words, own_words = (
            (num_features * random.random(shape, dtype=np.float32) ** 2).astype(np.int32)
            for shape in ((fields, FIELD_WORDS), (num_labels, OWN_WORDS))
        )
        return cls(num_features, field_words, own_words, random.permutation(num_labels).astype(np.int32))

    def documents(self, first_labels: np.ndarray, random: np.random.Generator) -> tuple[csr_matrix, csr_matrix]:
        """Word counts and labels of documents that carry `first_labels` and others."""
        count, num_labels = len(first_labels), len(self.own_words)
        labels = self.label_of_rank[_zipf(num_labels, (count, len(MORE_LABELS)), random)]
        labels[:, 0] = first_labels
        sizes = 1 + random.choice(len(MORE_LABELS), count, p=MORE_LABELS)
        about = labels[np.arange(count)[:, None], (random.random((count, TOKENS)) * sizes[:, None]).astype(np.int64)]
        field_word = self.field_words[about // FIELD_LABELS, random.integers(FIELD_WORDS, size=about.shape)]
        words = self.own_words[about, random.integers(OWN_WORDS, size=about.shape)]
        source = random.random(about.shape)
        words = np.where(source < BACKGROUND + FIELD, field_word, words)
        words = np.where(source < BACKGROUND, _zipf(self.num_features, about.shape, random), words)
        # Repeating the first label instead of the ones beyond `sizes` keeps the table rectangular.
        labels = np.where(np.arange(len(MORE_LABELS)) < sizes[:, None], labels, labels[:, :1])
        targets = _count(labels, num_labels)
        targets.data[:] = 1
        return _count(words, self.num_features), targets


def make(num_labels: int, seed: int = 0) -> dict[str, csr_matrix]:
    """The matrices `X.trn`, `Y.trn`, `X.tst` and `Y.tst`; the features are TF-IDF of unit length."""
    random = np.random.default_rng(seed)
    world = World.make(num_labels, random)
    num_test = min(MAX_TEST_DOCUMENTS, num_labels // 10)
    first_labels = np.concatenate([random.permutation(num_labels), random.integers(num_labels, size=num_test)])
    parts = [world.documents(first_labels[at : at + _CHUNK], random) for at in range(0, num_labels + num_test, _CHUNK)]
    words, labels = (vstack([part[i] for part in parts], format="csr") for i in (0, 1))
    del parts
    _weigh(words, num_labels)
    train, test = slice(0, num_labels), slice(num_labels, None)
    return {"X.trn": words[train], "Y.trn": labels[train], "X.tst": words[test], "Y.tst": labels[test]}


def save(matrices: dict[str, csr_matrix], folder: str) -> None:
    """Writes plain arrays, which load as fast as the disk reads."""
    for name, matrix in matrices.items():
        np.savez(os.path.join(folder, f"{name}.npz"), shape=matrix.shape, **{k: getattr(matrix, k) for k in _PARTS})


def load(folder: str, name: str) -> csr_matrix:
    """Reads one matrix."""
    with np.load(os.path.join(folder, f"{name}.npz")) as arrays:
        return csr_matrix(tuple(arrays[key] for key in _PARTS), shape=tuple(arrays["shape"]))


_PARTS = ("data", "indices", "indptr")


def _zipf(size: int, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Numbers below `size`, number r about as often as 1 / (r + 1)."""
    ranks = np.exp(random.random(shape, dtype=np.float32) * np.float32(np.log(size + 1))) - 1
    return np.minimum(ranks.astype(np.int32), size - 1)


def _count(table: np.ndarray, num_columns: int) -> csr_matrix:
    """How often each number stands in each row."""
    table = np.sort(table, axis=1)
    first = np.ones(table.shape, dtype=bool)
    first[:, 1:] = table[:, 1:] != table[:, :-1]
    starts = np.flatnonzero(first)
    counts = np.diff(np.append(starts, table.size)).astype(np.float32)
    indptr = np.concatenate([[0], np.cumsum(first.sum(axis=1))])
    return csr_matrix((counts, table.ravel()[starts].astype(np.int32), indptr), shape=(len(table), num_columns))


def _weigh(words: csr_matrix, num_train: int) -> None:
    """Counts to TF-IDF of unit length, in place; document frequencies are those of the training documents."""
    frequency = np.bincount(words.indices[: words.indptr[num_train]], minlength=words.shape[1])
    words.data = (1 + np.log(words.data)) * np.log(num_train / np.maximum(frequency, 1)).astype(np.float32)[
        words.indices
    ]
    norms = np.sqrt(np.add.reduceat(words.data**2, words.indptr[:-1]))
    words.data /= np.repeat(norms, np.diff(words.indptr))

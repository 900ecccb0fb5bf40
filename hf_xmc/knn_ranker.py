"""k-nearest neighbours: votes of similar training documents, by TF-IDF or by the encoder's vectors."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import numpy as np
import torch

from .checks import CheckedFile
from .features import Features
from .kernels_similarity import count_votes, vote
from .label_tree import LabelTree
from .label_vectors import dense_products
from .linear_ranker import RANKER_FILE, Beam, check_features
from .restriction import Restriction
from .serialization import MAX_SHARD_SIZE, save_sharded
from .utils import check_count, run_in_threads

_KIND = "neighbour ranker"
KNN_FILE = "knn.safetensors"
KNN_VECTORS_FILE = "knn_vectors.safetensors"

_MAX_DOCUMENTS = (1 << 31) - 1

# Documents of a task of a thread.
DOCUMENTS_PER_TASK = 256
# Similarities in memory at a time.
_MAX_SIMILARITIES = 1 << 24


@dataclass(frozen=True)
class KNNIndex:
    """
    An inverted index of the training documents, and their labels.

    Args:
        term_begin (`np.ndarray`): First entry of each term's list, int64 (terms + 1).
        term_documents (`np.ndarray`): Documents with the term, int32.
        term_weights (`np.ndarray`): Weights of the term in them, float32.
        label_begin (`np.ndarray`): First entry of each document's labels, int64 (documents + 1).
        labels (`np.ndarray`): The labels, int32.
    """

    term_begin: np.ndarray
    term_documents: np.ndarray
    term_weights: np.ndarray
    label_begin: np.ndarray
    labels: np.ndarray


class KNNRanker:
    """
    Predicts the labels of the most similar training documents.

    The similarity is the dot product of the features. The most similar documents vote for their labels, each with its
    similarity raised to a power. The score of a label is its share of all votes.

    Alone it is seldom better than linear classifiers. It is most useful beside them, because it finds labels of
    documents with only two or three similar ones.

    Args:
        tree (`LabelTree`):
            The labels; the hierarchy is not used.
        index ([`KNNIndex`]):
            The training documents.
        count (`int`, *optional*, defaults to `30`):
            Number of documents that vote.
        power (`float`, *optional*, defaults to `4.0`):
            Exponent of the similarities; higher values give less similar documents less weight.
    """

    num_dense = 0

    def __init__(self, tree: LabelTree, index: KNNIndex, *, count: int = 30, power: float = 4.0) -> None:
        self.tree, self.index = tree, index
        self.count, self.power = count, power

    def __repr__(self) -> str:
        return f"KNNRanker({self.tree}, {len(self.index.label_begin) - 1} documents, {self.num_sparse} terms)"

    @property
    def num_sparse(self) -> int:
        """Number of sparse features."""
        return len(self.index.term_begin) - 1

    @property
    def num_bytes(self) -> int:
        """Size of the index."""
        return sum(array.nbytes for array in vars(self.index).values())

    def predict(
        self,
        features: Features,
        top_k: int = 10,
        *,
        beam_size: int | None = None,
        num_threads: int | None = None,
        initial_beam: Beam | None = None,
        restriction: Restriction | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Returns the best labels of each document, see [`LinearRanker.predict`].

        `beam_size` and `initial_beam` are ignored: a document is compared with all training documents.
        """
        top_k = check_count("top_k", top_k)
        if restriction is not None:
            most = _most_labels(self.index.label_begin, self.count, self.tree.num_labels)
            return restriction.select(*self.predict(features, most, num_threads=num_threads), top_k)
        check_features(features, self.num_sparse, 0)
        assert features.sparse is not None
        sparse, count, index = features.sparse, len(features), self.index
        voters = min(self.count, len(index.label_begin) - 1)
        scores = np.empty((count, top_k), dtype=np.float32)
        labels = np.empty((count, top_k), dtype=np.int64)

        def run(first: int) -> None:
            last = min(first + DOCUMENTS_PER_TASK, count)
            votes = np.zeros(self.tree.num_labels, dtype=np.float32)
            vote(
                sparse.indptr, sparse.indices, sparse.data, first, last, index.term_begin, index.term_documents,
                index.term_weights, index.label_begin, index.labels, votes, voters, np.float32(self.power),
                scores[first:last], labels[first:last],
            )  # fmt: skip

        run_in_threads(run, range(0, count, DOCUMENTS_PER_TASK), num_threads)
        return scores, labels

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        filename: str = RANKER_FILE,
    ) -> None:
        """Writes `ranker.safetensors` or `filename`, or its shards; the tree has a separate file."""
        metadata = {"count": str(self.count), "power": str(self.power), "tree": self.tree.digest()}
        save_sharded(save_directory, filename, vars(self.index), _KIND, metadata, max_shard_size)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        tree: LabelTree | None = None,
        filename: str = RANKER_FILE,
        **hub_kwargs,
    ) -> KNNRanker:
        """Opens the ranker of a saved model, memory-mapped, with its tree unless `tree` is given."""
        file = CheckedFile.open_sharded(name_or_path, filename, _KIND, **hub_kwargs)
        tree = tree if tree is not None else LabelTree.from_pretrained(name_or_path, **hub_kwargs)
        count, power = file.number("count", 1, _MAX_DOCUMENTS), file.number("power", 0.0, 1000.0)
        file.check_tree(tree)
        file.check_names([field.name for field in fields(KNNIndex)])
        label_begin, labels = _checked_labels(file, tree.num_labels)
        weights = file.weights("term_weights", np.float32, None)
        documents = file.ids("term_documents", np.int32, len(weights), len(label_begin) - 1)
        index = KNNIndex(file.offsets("term_begin", None, len(weights)), documents, weights, label_begin, labels)
        return cls(tree, index, count=count, power=power)


def _checked_labels(file: CheckedFile, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels of the training documents."""
    labels = file.ids("labels", np.int32, None, num_labels)
    return file.offsets("label_begin", None, len(labels)), labels


def _most_labels(label_begin: np.ndarray, count: int, num_labels: int) -> int:
    """Returns the largest number of labels that `count` documents can have."""
    return max(1, min(count * int(np.diff(label_begin).max(initial=0)), num_labels))


class KNNVectors:
    """
    Votes of the training documents with the most similar vectors of the encoder.

    The weight of a vote is `exp(cosine / temperature)`. The score of a label is its share of all votes. `vectors` are
    float16 of unit length, `(documents, dimensions)`; `label_begin` and `labels` are as in [`KNNIndex`].
    """

    count = 32
    temperature = 0.05

    def __init__(self, vectors: np.ndarray, label_begin: np.ndarray, labels: np.ndarray, num_labels: int) -> None:
        self.vectors, self.label_begin, self.labels, self.num_labels = vectors, label_begin, labels, num_labels

    def predict(
        self, vectors: np.ndarray, top_k: int = 10, restriction: Restriction | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best labels of each document as [`KNNRanker.predict`] does."""
        if restriction is not None:
            most = _most_labels(self.label_begin, self.count, self.num_labels)
            return restriction.select(*self.predict(vectors, most), top_k)
        scores = np.empty((len(vectors), top_k), dtype=np.float32)
        labels = np.empty((len(vectors), top_k), dtype=np.int64)
        votes = np.zeros(self.num_labels, dtype=np.float32)
        size = max(1, _MAX_SIMILARITIES // len(self.vectors))
        for first in range(0, len(vectors), size):
            cosines = torch.from_numpy(dense_products(vectors[first : first + size], self.vectors))
            best, nearest = cosines.topk(min(self.count, len(self.vectors)), dim=1)
            strengths = torch.softmax(best / self.temperature, dim=1)
            count_votes(
                nearest.numpy(), strengths.numpy(), self.label_begin, self.labels, votes,
                scores[first : first + size], labels[first : first + size],
            )  # fmt: skip
        return scores, labels

    def save_pretrained(self, save_directory: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes `knn_vectors.safetensors`, or its shards."""
        tensors = {"vectors": self.vectors, "label_begin": self.label_begin, "labels": self.labels}
        metadata = {"num_labels": str(self.num_labels)}
        save_sharded(save_directory, KNN_VECTORS_FILE, tensors, _KIND, metadata, max_shard_size)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike, **hub_kwargs) -> KNNVectors:
        """Opens the index of a saved model, memory-mapped."""
        file = CheckedFile.open_sharded(name_or_path, KNN_VECTORS_FILE, _KIND, **hub_kwargs)
        num_labels = file.number("num_labels", 1, _MAX_DOCUMENTS)
        label_begin, labels = _checked_labels(file, num_labels)
        return cls(
            file.weights("vectors", np.float16, len(label_begin) - 1, None), label_begin, labels, num_labels=num_labels
        )

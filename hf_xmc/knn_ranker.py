"""The k-nearest-neighbour ranker: votes of similar training documents, its prediction and file."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .features import Features
from .kernels_knn import vote
from .label_tree import LabelTree
from .linear_ranker import RANKER_FILE, Beam
from .serialization import MAX_SHARD_SIZE, load_sharded, save_sharded
from .utils import count_threads

_KIND = "neighbour ranker"

# Documents of a task of a thread.
DOCUMENTS_PER_TASK = 256


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

    Alone it is seldom better than linear classifiers. It is most useful in an ensemble, because it finds labels of
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
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Returns the best labels of each document, see [`LinearRanker.predict`].

        `beam_size` and `initial_beam` are ignored: a document is compared with all training documents.
        """
        if top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, not {top_k}.")
        if features.num_dense or features.sparse is None or features.num_sparse != self.num_sparse:
            raise ValueError(
                f"The documents have {features.num_sparse} sparse and {features.num_dense} dense features, but the "
                f"ranker was trained on {self.num_sparse} and 0. Pass the result of `model.featurize`."
            )
        sparse, count, index = features.sparse, len(features), self.index
        scores = np.empty((count, top_k), dtype=np.float32)
        labels = np.empty((count, top_k), dtype=np.int64)

        def run(first: int) -> None:
            last = min(first + DOCUMENTS_PER_TASK, count)
            votes = np.zeros(self.tree.num_labels, dtype=np.float32)
            vote(
                sparse.indptr, sparse.indices, sparse.data, first, last, index.term_begin, index.term_documents,
                index.term_weights, index.label_begin, index.labels, votes, self.count, np.float32(self.power),
                scores[first:last], labels[first:last],
            )  # fmt: skip

        with ThreadPoolExecutor(count_threads(num_threads)) as pool:
            list(pool.map(run, range(0, count, DOCUMENTS_PER_TASK)))
        return scores, labels

    def save_pretrained(self, save_directory: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes `ranker.safetensors`, or its shards; the tree has a separate file."""
        metadata = {"count": str(self.count), "power": str(self.power), "tree": self.tree.digest()}
        save_sharded(save_directory, RANKER_FILE, vars(self.index), _KIND, metadata, max_shard_size)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike, *, tree: LabelTree | None = None, **hub_kwargs
    ) -> KNNRanker:
        """Opens the ranker of a saved model, memory-mapped, with its tree unless `tree` is given."""
        tensors, metadata = load_sharded(name_or_path, RANKER_FILE, _KIND, **hub_kwargs)
        path = os.path.join(name_or_path, RANKER_FILE)
        tree = tree if tree is not None else LabelTree.from_pretrained(name_or_path, **hub_kwargs)
        try:
            index = KNNIndex(**tensors)
            ranker = cls(tree, index, count=int(metadata["count"]), power=float(metadata["power"]))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"`{path}` lacks an entry ({error}). The file is damaged: save or download it again."
            ) from error
        if len(index.term_documents) != len(index.term_weights) or any(
            begin[-1] != len(entries)
            for begin, entries in ((index.term_begin, index.term_documents), (index.label_begin, index.labels))
        ):
            raise ValueError(f"The arrays of `{path}` have different lengths. Save or download it again.")
        if metadata.get("tree") != tree.digest():
            raise ValueError(f"`{path}` was trained on another tree than {tree}. Save or download all files again.")
        return ranker

"""Labels by the votes of similar training documents: prediction and file."""

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

# Documents that a thread takes at a time.
_DOCUMENTS = 256


@dataclass(frozen=True)
class KNNIndex:
    """
    The training documents, listed by term, and their labels.

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
    Gives a document the labels of the training documents that are most like it.

    The similarity is the dot product of features. The most similar documents vote for their labels, each with its
    similarity raised to a power; the score of a label is its share in the strength of all voters.

    By itself this is seldom better than classifiers. It knows other things than they do, documents of which there are
    two or three alike, and so is worth most as a member of an ensemble.

    Args:
        tree (`LabelTree`):
            The labels. Their hierarchy has no meaning here.
        index ([`KNNIndex`]):
            The training documents.
        count (`int`, *optional*, defaults to `30`):
            Documents that vote.
        power (`float`, *optional*, defaults to `4.0`):
            Power that similarities are raised to; the higher, the less documents count that are less alike.
    """

    num_dense = 0

    def __init__(self, tree: LabelTree, index: KNNIndex, *, count: int = 30, power: float = 4.0) -> None:
        self.tree, self.index = tree, index
        self.count, self.power = count, power

    def __repr__(self) -> str:
        return f"KNNRanker({self.tree}, {len(self.index.label_begin) - 1} documents, {self.num_sparse} terms)"

    @property
    def num_sparse(self) -> int:
        """Sparse features of the documents."""
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
        start: Beam | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        The best labels of each document.

        Args:
            features (`Features`):
                Documents, with the features of the training documents.
            top_k (`int`, *optional*, defaults to `10`):
                Labels per document.
            beam_size (`int`, *optional*):
                Has no meaning here: all training documents are compared.
            num_threads (`int`, *optional*):
                Threads to use; all cores by default. The result does not depend on it.
            start ([`Beam`], *optional*):
                Has no meaning here.

        Returns:
            `tuple[np.ndarray, np.ndarray]`: float32 scores in [0, 1] and int64 label ids, both `(documents, top_k)`,
            best first; 0 and -1 where the similar documents have fewer labels.
        """
        if top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, not {top_k}.")
        if features.num_dense or features.sparse is None or features.num_sparse != self.num_sparse:
            raise ValueError(
                f"The documents have {features.num_sparse} sparse and {features.num_dense} dense features; the ranker "
                f"knows documents of {self.num_sparse} and 0. Make them with the model's own featurizer."
            )
        sparse, count, index = features.sparse, len(features), self.index
        scores = np.empty((count, top_k), dtype=np.float32)
        labels = np.empty((count, top_k), dtype=np.int64)

        def run(first: int) -> None:
            last = min(first + _DOCUMENTS, count)
            votes = np.zeros(self.tree.num_labels, dtype=np.float32)
            vote(
                sparse.indptr, sparse.indices, sparse.data, first, last, index.term_begin, index.term_documents,
                index.term_weights, index.label_begin, index.labels, votes, self.count, np.float32(self.power),
                scores[first:last], labels[first:last],
            )  # fmt: skip

        with ThreadPoolExecutor(count_threads(num_threads)) as pool:
            list(pool.map(run, range(0, count, _DOCUMENTS)))
        return scores, labels

    def save_pretrained(self, save_directory: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes `ranker.safetensors`, in shards where it is larger than one may be; the tree has its own file."""
        metadata = {"count": str(self.count), "power": str(self.power), "tree": self.tree.digest()}
        save_sharded(save_directory, RANKER_FILE, vars(self.index), _KIND, metadata, max_shard_size)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike, *, tree: LabelTree | None = None, **hub_kwargs
    ) -> KNNRanker:
        """Opens the ranker of a saved model by memory map, with its tree unless that is given."""
        tensors, metadata = load_sharded(name_or_path, RANKER_FILE, _KIND, **hub_kwargs)
        path = os.path.join(name_or_path, RANKER_FILE)
        tree = tree if tree is not None else LabelTree.from_pretrained(name_or_path, **hub_kwargs)
        try:
            index = KNNIndex(**tensors)
            ranker = cls(tree, index, count=int(metadata["count"]), power=float(metadata["power"]))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"`{path}` lacks an entry ({error}): the file is damaged, save or download it again."
            ) from error
        if len(index.term_documents) != len(index.term_weights) or any(
            begin[-1] != len(entries)
            for begin, entries in ((index.term_begin, index.term_documents), (index.label_begin, index.labels))
        ):
            raise ValueError(f"The lists in `{path}` do not fit together: the file is damaged, save it again.")
        if metadata.get("tree") != tree.digest():
            raise ValueError(f"`{path}` was trained on another tree than {tree}: they belong to different models.")
        return ranker

"""Lists training documents so that those like another one are found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_matrix

from ..features import Features
from ..label_tree import LabelTree
from ..neighbour_ranker import NeighbourIndex, NeighbourRanker
from .cluster_kernels import largest_of_rows


@dataclass
class NeighbourArguments:
    """
    How similar documents are found and vote.

    Args:
        count (`int`, *optional*, defaults to `30`): Documents that vote.
        power (`float`, *optional*, defaults to `4.0`):
            Power that similarities are raised to. 4 to 8 suit texts of some length, 2 titles.
        terms (`int`, *optional*, defaults to `256`):
            Heaviest terms by which a training document is found; 0 keeps all. More cost space and time and hardly
            change what is found.
    """

    count: int = field(default=30, metadata={"help": "Similar documents that vote."})
    power: float = field(default=4.0, metadata={"help": "Power that similarities are raised to in a vote."})
    terms: int = field(
        default=256, metadata={"help": "Heaviest terms by which a training document is found; 0 keeps all."}
    )

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"`count` must be at least 1, not {self.count}.")
        if not 0 < self.power < math.inf:
            raise ValueError(f"`power` must be a number greater than 0, not {self.power}.")
        if self.terms < 0:
            raise ValueError(f"`terms` must not be negative, but is {self.terms}; 0 keeps all.")


def index_documents(
    features: Features, targets: csr_matrix, tree: LabelTree, arguments: NeighbourArguments
) -> NeighbourRanker:
    """
    A ranker that knows these documents.

    Args:
        features ([`Features`]):
            The documents, sparse.
        targets (`csr_matrix`):
            Their labels, (documents, labels).
        tree ([`LabelTree`]):
            The labels' tree.
        arguments ([`NeighbourArguments`]):
            Options.
    """
    documents = features.sparse
    assert documents is not None and features.dense is None
    if arguments.terms:
        kept = largest_of_rows(documents.indptr, documents.data, arguments.terms)
        ends = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[documents.indptr]
        documents = csr_matrix((documents.data[kept], documents.indices[kept], ends), shape=documents.shape)
    by_term = documents.tocsc()
    index = NeighbourIndex(
        by_term.indptr.astype(np.int64),
        by_term.indices.astype(np.int32),
        by_term.data.astype(np.float32),
        targets.indptr.astype(np.int64),
        targets.indices.astype(np.int32),
    )
    return NeighbourRanker(tree, index, count=arguments.count, power=arguments.power)

"""Linear layers that score the nodes of a level of the label tree, plain or behind a bottleneck, and their losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

HEAD_LOSSES = ("bce", "squared_hinge")

# Above this many nodes a step touches few of a level's rows: gradients then hold only those.
SPARSE_ROWS = 16384
# The rows behind a bottleneck are short, and candidates of whole clusters touch most of them: gradients of all rows
# take less time until their memory counts. Measured on two busy cores for 59,307 labels of 300 numbers, 32 documents
# with 75 clusters of 100 labels each: 0.55 s for a step with the union of the candidates and dense gradients, 1.2 s
# with sparse ones, 2.0 s with rows gathered for every document.
SPARSE_SHORT_ROWS = 1 << 18


class LevelHead(nn.Module):
    """
    One linear classifier per node of a level, in tree order.

    Args:
        num_nodes (`int`):
            Nodes of the level.
        dimensions (`int`):
            Length of a document vector.
    """

    def __init__(self, num_nodes: int, dimensions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_nodes, dimensions))
        self.bias = nn.Parameter(torch.zeros(num_nodes))
        self.num_nodes = num_nodes
        self.sparse = num_nodes > SPARSE_ROWS

    def forward(self, vectors: torch.Tensor, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """
        Margins of nodes.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Documents.
            nodes (`torch.Tensor`, *optional*):
                The nodes to score: of shape `(nodes,)` the same for all documents, of shape `(batch, nodes)` each
                document's own; all nodes of the level by default.
        """
        vectors = vectors.to(self.weight.dtype)
        if nodes is None:
            return functional.linear(vectors, self.weight, self.bias)
        rows = functional.embedding(nodes, self.weight, sparse=self.sparse)
        if nodes.dim() == 1:
            return functional.linear(vectors, rows, self.bias[nodes])
        return torch.einsum("bd,bnd->bn", vectors, rows) + self.bias[nodes]


class BottleneckHead(LevelHead):
    """
    Linear classifiers on a short projection of the document vector: one short row per node.

    Args:
        num_nodes (`int`):
            Nodes of the level.
        dimensions (`int`):
            Length of a document vector.
        bottleneck (`int`):
            Length of its projection.
    """

    def __init__(self, num_nodes: int, dimensions: int, bottleneck: int) -> None:
        super().__init__(num_nodes, bottleneck)
        self.projection = nn.Linear(dimensions, bottleneck, bias=False)
        self.sparse = num_nodes > SPARSE_SHORT_ROWS

    def forward(self, vectors: torch.Tensor, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """Margins of nodes, see [`LevelHead`]."""
        return super().forward(self.projection(vectors.to(self.projection.weight.dtype)), nodes)


def node_losses(margins: torch.Tensor, targets: torch.Tensor, loss: str) -> torch.Tensor:
    """
    The loss of each margin.

    Args:
        margins (`torch.Tensor`):
            Scores of nodes.
        targets (`torch.Tensor`):
            1 where the node is true, else 0; of the same shape.
        loss (`str`):
            `"bce"`: binary cross entropy; `"squared_hinge"`: `max(0, 1 - ỹs)²` with `ỹ = ±1`.
    """
    if loss == "bce":
        return functional.binary_cross_entropy_with_logits(margins, targets, reduction="none")
    return torch.relu(1 - (2 * targets - 1) * margins) ** 2


def node_probabilities(margins: torch.Tensor, loss: str) -> torch.Tensor:
    """The probability whose expected loss a margin minimises: `σ(s)` for `"bce"`, `(s + 1) / 2` within [0, 1] else."""
    return torch.sigmoid(margins) if loss == "bce" else ((margins + 1) / 2).clamp(0, 1)

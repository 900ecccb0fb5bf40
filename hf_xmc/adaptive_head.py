"""Adaptive probabilistic label clusters: rare labels in tails of ever shorter vectors, each behind a gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .heads import BottleneckHead, LevelHead, node_losses, node_probabilities


class AdaptiveHead(nn.Module):
    """
    The labels of a tree whose first level are frequent labels, a node each, followed by one gate per tail.

    A frequent label is scored by the level above: below its node it is certain. The labels of tail `i` (counted from
    1) are scored on a projection of the document vector to `dimensions / shrink ** i` numbers.

    Args:
        num_frequent (`int`):
            Frequent labels; their positions come first.
        tails (`Sequence[int]`):
            Labels of each tail.
        dimensions (`int`):
            Length of a document vector.
        shrink (`float`):
            Factor by which the vector gets shorter from tail to tail.
    """

    def __init__(self, num_frequent: int, tails: Sequence[int], dimensions: int, shrink: float) -> None:
        super().__init__()
        self.num_frequent, self.num_nodes = num_frequent, num_frequent + sum(tails)
        self.tails = nn.ModuleList(
            BottleneckHead(size, dimensions, max(1, int(dimensions / shrink**i))) for i, size in enumerate(tails, 1)
        )
        for tail in self.tails:
            # All labels of a tail are in the loss of its documents: a step touches every row.
            tail.sparse = False

    def parts(self) -> Iterator[tuple[BottleneckHead, int, int]]:
        """Each tail with the position of its first label and the one after its last."""
        first = self.num_frequent
        for tail in self.tails:
            assert isinstance(tail, BottleneckHead)
            yield tail, first, first + len(tail.bias)
            first += len(tail.bias)

    def forward(self, vectors: torch.Tensor, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """
        Margins of labels under their node; infinite for frequent labels, which are certain there.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Documents.
            nodes (`torch.Tensor`, *optional*):
                Positions of labels, `(nodes,)` or `(batch, nodes)`; all by default.
        """
        if nodes is None:
            certain = vectors.new_full((len(vectors), self.num_frequent), torch.inf)
            return torch.cat([certain, *(tail(vectors) for tail in self.tails)], dim=1)
        if nodes.dim() == 1:
            nodes = nodes.expand(len(vectors), -1)
        margins = vectors.new_full(nodes.shape, torch.inf)
        for tail, first, end in self.parts():
            inside = (nodes >= first) & (nodes < end)
            if inside.any():
                margins = torch.where(inside, tail(vectors, (nodes - first).clamp(0, end - first - 1)), margins)
        return margins

    def loss(
        self,
        vectors: torch.Tensor,
        true_nodes: torch.Tensor,
        true_weights: torch.Tensor,
        negative_weight: float,
        loss: str,
    ) -> torch.Tensor:
        """
        The loss of all tails: in each the documents count that have a true label there, with all labels of the tail.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Documents.
            true_nodes (`torch.Tensor` of shape `(batch, most)`):
                Positions of each document's true labels, -1 for none.
            true_weights (`torch.Tensor` of shape `(batch, most)`):
                Weight of each of them in the loss.
            negative_weight (`float`):
                Weight of the other labels.
            loss (`str`):
                Loss of a margin, see [`node_losses`].

        Returns:
            `torch.Tensor`: sum over labels, mean over documents.
        """
        total = vectors.new_zeros(())
        for tail, first, end in self.parts():
            inside = (true_nodes >= first) & (true_nodes < end)
            documents = inside.any(dim=1).nonzero().squeeze(1)
            if not len(documents):
                continue
            margins = tail(vectors[documents]).float()
            targets, weights = torch.zeros_like(margins), torch.full_like(margins, negative_weight)
            rows, places = inside[documents].nonzero(as_tuple=True)
            columns = true_nodes[documents][rows, places] - first
            targets[rows, columns] = 1
            weights[rows, columns] = true_weights[documents][rows, places]
            total = total + (node_losses(margins, targets, loss) * weights).sum()
        return total / len(vectors)


def search_tails(
    vectors: torch.Tensor, gates: LevelHead, head: AdaptiveHead, top_k: int, loss: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The best labels by `p(l)` for frequent ones and `p(gate) p(l | gate)` for those of a tail.

    The result is exact, as no label of a tail can be more likely than its gate: a tail is computed for those documents
    only whose gate is above the worst of the best labels found so far, and sorted only where its best label is, too.

    Args:
        vectors (`torch.Tensor` of shape `(batch, dimensions)`):
            Documents.
        gates ([`LevelHead`]):
            Head of the level above: frequent labels first, then the gates.
        head ([`AdaptiveHead`]):
            The tails.
        top_k (`int`):
            Labels to return.
        loss (`str`):
            Loss of the heads.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: probabilities and positions of shape `(batch, top_k)`, best first; 0 and
        -1 where there are fewer labels.
    """
    above = node_probabilities(gates(vectors), loss)
    # What was not found loses against every label, also against one of probability 0.
    scores, nodes = above.new_full((len(vectors), top_k), -1), torch.full((len(vectors), top_k), -1).to(vectors.device)
    if head.num_frequent:
        scores, nodes = _merge(scores, nodes, *_best(above[:, : head.num_frequent], top_k))
    for gate, (tail, first, _) in enumerate(head.parts(), start=head.num_frequent):
        documents = (above[:, gate] > scores[:, -1]).nonzero().squeeze(1)
        if len(documents):
            margins = tail(vectors[documents])
            reached = above[documents, gate] * node_probabilities(margins.amax(dim=1), loss)
            above_worst = reached > scores[documents, -1]
            documents = documents[above_worst]
            # Margins have the order of the probabilities: those of the best alone are computed.
            margins, places = _best(margins[above_worst], top_k)
            own = above[documents, gate, None] * node_probabilities(margins, loss)
            scores[documents], nodes[documents] = _merge(scores[documents], nodes[documents], own, places + first)
    return scores.clamp(min=0), nodes


def _best(values: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values of each row, or all if there are fewer, and their places."""
    return values.topk(min(top_k, values.shape[1]), dim=1)


def _merge(
    scores: torch.Tensor, nodes: torch.Tensor, more: torch.Tensor, more_nodes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of two lists, as many as the first has."""
    scores, order = torch.cat([scores, more], dim=1).topk(scores.shape[1], dim=1)
    return scores, torch.cat([nodes, more_nodes], dim=1).gather(1, order)

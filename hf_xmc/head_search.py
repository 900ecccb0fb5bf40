"""Beam search through the heads: from the coarsest trained level down to the one asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .adaptive_head import AdaptiveHead, search_tails
from .heads import LevelHead, node_probabilities

Head = LevelHead | AdaptiveHead

# Bounds what is held for documents that are searched together: numbers of gathered rows, or of margins.
_MAX_NUMBERS = 1 << 25


def search_heads(
    vectors: torch.Tensor,
    heads: Sequence[Head],
    offsets: Sequence[torch.Tensor],
    top_k: int,
    beam_size: int,
    loss: str,
    by_path: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The best nodes of the level of the last head.

    Args:
        vectors (`torch.Tensor` of shape `(batch, dimensions)`):
            Documents.
        heads (`Sequence[LevelHead]`):
            Heads of the levels to pass, coarsest first. Where the last one is an [`AdaptiveHead`], the search is exact
            and by the path, whatever the other arguments say.
        offsets (`Sequence[torch.Tensor]`):
            For each head but the first: where the nodes of its level under each node of the level before begin, see
            [`LabelTree.descendants`].
        top_k (`int`):
            Nodes to return.
        beam_size (`int`):
            Nodes kept per level on the way; 0 keeps all.
        loss (`str`):
            Loss of the heads.
        by_path (`bool`):
            Whether to rank by the product of the probabilities on the way instead of the last one alone.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: probabilities and nodes of shape `(batch, top_k)`, best first; 0 and -1
        where the beam reached fewer.
    """
    widest = max((_numbers(*level, beam_size) for level in zip(heads[1:], offsets, strict=True)), default=0)
    together = max(1, _MAX_NUMBERS // max(widest, heads[0].num_nodes))
    parts = [
        _search(part, heads, offsets, top_k, beam_size, loss, by_path) for part in vectors.split(together) if len(part)
    ]
    if not parts:
        empty = vectors.new_zeros((0, top_k))
        return empty, empty.long()
    scores, nodes = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(nodes)


def _search(
    vectors: torch.Tensor,
    heads: Sequence[Head],
    offsets: Sequence[torch.Tensor],
    top_k: int,
    beam_size: int,
    loss: str,
    by_path: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(heads[-1], AdaptiveHead):
        gates = heads[-2]
        assert isinstance(gates, LevelHead)
        return search_tails(vectors, gates, heads[-1], top_k, loss)
    own = heads[0](vectors)
    path = node_probabilities(own, loss)
    nodes = torch.arange(own.shape[1], device=own.device).expand_as(own)
    for head, below in zip(heads[1:], offsets, strict=True):
        if 0 < beam_size < nodes.shape[1]:
            path, kept = path.topk(beam_size, dim=1)
            nodes = nodes.gather(1, kept)
        nodes, parent = _children(nodes, below)
        missing = nodes < 0
        own = _margins(head, vectors, nodes.clamp(min=0)).masked_fill(missing, -torch.inf)
        # A missing node loses against every real one, also against one of probability 0.
        path = (path.gather(1, parent) * node_probabilities(own, loss)).masked_fill(missing, -1)
    # Margins tell apart nodes whose probabilities are both 0 or 1.
    by_margin = not by_path or len(heads) == 1
    ranked = own if by_margin else path
    scores, best = ranked.topk(min(top_k, ranked.shape[1]), dim=1)
    nodes = nodes.gather(1, best)
    scores = node_probabilities(scores, loss) if by_margin else scores.clamp(min=0)
    lacking = top_k - scores.shape[1]
    if lacking > 0:
        scores = torch.nn.functional.pad(scores, (0, lacking))
        nodes = torch.nn.functional.pad(nodes, (0, lacking), value=-1)
    return scores, nodes


def _margins(head: Head, vectors: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Margins of each document's own nodes; of all nodes first where gathering would copy more rows than there are."""
    if nodes.numel() > head.num_nodes:
        return head(vectors).gather(1, nodes)
    return head(vectors, nodes)


def _children(nodes: torch.Tensor, below: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes under each row's nodes, with the places of those they are under; -1 fills up where there are fewer."""
    known = nodes.clamp(min=0)
    first, counts = below[known], below[known + 1] - below[known]
    counts = counts.masked_fill(nodes < 0, 0)
    ends = counts.cumsum(dim=1)
    places = torch.arange(int(ends[:, -1].max()), device=nodes.device).expand(len(nodes), -1).contiguous()
    parent = torch.searchsorted(ends, places, right=True)
    missing = parent >= nodes.shape[1]
    parent = parent.clamp(max=nodes.shape[1] - 1)
    children = first.gather(1, parent) + places - (ends - counts).gather(1, parent)
    return children.masked_fill(missing, -1), parent


def _numbers(head: Head, below: torch.Tensor, beam_size: int) -> int:
    """Most numbers that a document needs at a level: rows of the nodes that a beam can reach, or margins of all."""
    if isinstance(head, AdaptiveHead):
        return head.num_nodes
    counts = (below[1:] - below[:-1]).sort(descending=True).values
    return min(int(counts[: beam_size or None].sum()) * head.weight.shape[1], head.num_nodes)

"""All heads of a model: made from its configuration, trained one by one or together, searched from the top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .adaptive_head import AdaptiveHead
from .configuration_xmc import XMCConfig
from .head_search import Head, search_heads
from .heads import BottleneckHead, LevelHead, node_losses, node_probabilities
from .label_tree import LabelTree

# Nodes that a search keeps on the way unless asked otherwise.
_BEAM_SIZE = 20


class LevelHeads(nn.ModuleList):
    """
    The heads on an encoder, one for each level in `config.head_levels`.

    All are linear layers but that of the labels, which may have a bottleneck or tails.

    Args:
        config ([`XMCConfig`]):
            Says what the heads are and how they rank.
        dimensions (`int`):
            Length of a document vector.
    """

    def __init__(self, config: XMCConfig, dimensions: int) -> None:
        super().__init__(_make_head(config, level, dimensions) for level in config.head_levels or ())
        self.config, self.dimensions = config, dimensions

    def of(self, level: int) -> Head:
        """The head of a level, counted from 1."""
        levels = self.config.head_levels or []
        if level not in levels:
            raise ValueError(f"Level {level} has no head; these have: {', '.join(map(str, levels)) or 'none'}.")
        head = self[levels.index(level)]
        assert isinstance(head, (LevelHead, AdaptiveHead))
        return head

    @property
    def num_bytes(self) -> int:
        """Size of all weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    @property
    def full_width_bytes(self) -> int:
        """What it would be if every row were as long as the document vector, in float32 and with its bias."""
        rows = sum(module.num_nodes for module in self.modules() if isinstance(module, LevelHead))
        return 4 * rows * (self.dimensions + 1)

    def score(
        self,
        vectors: torch.Tensor,
        level: int,
        nodes: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Margins of nodes of one level and, with targets, their loss: sum over nodes, mean over documents.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Documents.
            level (`int`):
                Level, counted from 1.
            nodes (`torch.Tensor`, *optional*):
                Nodes to score, `(nodes,)` or `(batch, nodes)`; all by default.
            targets (`torch.Tensor` of shape `(batch, nodes)`, *optional*):
                1 where a node is true, else 0.
            weights (`torch.Tensor` of shape `(batch, nodes)`, *optional*):
                Weight of each node's loss; all 1 by default.
        """
        margins = self.of(level)(vectors, nodes)
        if targets is None:
            return margins, None
        losses = node_losses(margins.float(), targets, self.config.head_loss)
        return margins, (losses if weights is None else losses * weights).sum() / len(vectors)

    def joint_loss(self, vectors: torch.Tensor, batches: Sequence[dict[str, Any]], tree: LabelTree) -> torch.Tensor:
        """
        The sum of the losses of several levels, from the same vectors.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Documents.
            batches (`Sequence[dict]`):
                What each level is trained on, coarsest first: arguments of `score`; or, where candidates are found
                here, `level` with the arguments of [`AdaptiveHead.loss`] or of [`dynamic_candidates`].
            tree ([`LabelTree`]):
                The label hierarchy.
        """
        total = vectors.new_zeros(())
        above, margins = 0, None
        for batch in batches:
            inputs = dict(batch)
            level = inputs.pop("level")
            head = self.of(level)
            if isinstance(head, AdaptiveHead):
                total = total + head.loss(vectors, loss=self.config.head_loss, **inputs)
                continue
            if "true_nodes" in inputs:
                assert margins is not None
                offsets = torch.from_numpy(tree.descendants(above, level)).to(vectors.device)
                inputs = dynamic_candidates(margins, offsets, **inputs)
            margins, loss = self.score(vectors, level, **inputs)
            assert loss is not None
            total, above = total + loss, level
        return total

    def search(
        self, vectors: torch.Tensor, tree: LabelTree, level: int, top_k: int, beam_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The best nodes of a level by the heads of the levels down to it, see
        [`~XMCForTextClassification.search_level`].
        """
        self.of(level)
        levels = [other for other in self.config.head_levels or () if other <= level]
        offsets = [
            torch.from_numpy(tree.descendants(upper, lower)).to(vectors.device)
            for upper, lower in zip(levels, levels[1:])
        ]
        return search_heads(
            vectors,
            [self.of(other) for other in levels],
            offsets,
            top_k,
            _BEAM_SIZE if beam_size is None else beam_size,
            self.config.head_loss,
            self.config.head_ranking == "path",
        )

    def label_probabilities(self, vectors: torch.Tensor, nodes: torch.Tensor, tree: LabelTree) -> torch.Tensor:
        """What the heads say of nodes of the last level, `(batch, nodes)`, as they rank labels by themselves."""
        by_path = self.config.head_ranking == "path"
        product = torch.ones(nodes.shape, device=vectors.device)
        for level in (self.config.head_levels or ()) if by_path else (tree.depth,):
            above = nodes
            if level < tree.depth:
                offsets = torch.from_numpy(tree.descendants(level, tree.depth)).to(nodes.device)
                above = torch.searchsorted(offsets, nodes, right=True) - 1
            product = product * node_probabilities(self.of(level)(vectors, above), self.config.head_loss)
        return product


def dynamic_candidates(
    margins: torch.Tensor,
    offsets: torch.Tensor,
    true_nodes: torch.Tensor,
    true_weights: torch.Tensor,
    negative_weight: float,
    beam_size: int,
) -> dict[str, torch.Tensor]:
    """
    Candidates of this very forward pass, equation (8): the nodes under the best and under the true nodes above.

    The siblings of true nodes are there from the first step on, when those found are no better than chance.

    Args:
        margins (`torch.Tensor` of shape `(batch, nodes above)`):
            Margins of the level above.
        offsets (`torch.Tensor`):
            Where the nodes under each node above begin, see [`LabelTree.descendants`].
        true_nodes (`torch.Tensor` of shape `(batch, most)`):
            Each document's true nodes, -1 for none.
        true_weights (`torch.Tensor` of shape `(batch, most)`):
            Weight of each of them in the loss.
        negative_weight (`float`):
            Weight of the other candidates.
        beam_size (`int`):
            Nodes above of which all children are candidates.

    Returns:
        `dict[str, torch.Tensor]`: `nodes`, those that are a candidate of any document, ascending; `targets` and
        `weights` of shape `(batch, nodes)`, where a document's other nodes weigh nothing. Documents share most of
        their candidates: one product with the rows of all is faster than rows gathered for each document.
    """
    best = margins.detach().topk(min(beam_size, margins.shape[1]), dim=1).indices
    chosen = torch.zeros_like(margins, dtype=torch.bool).scatter_(1, best, True)
    documents, places = (true_nodes >= 0).nonzero(as_tuple=True)
    true = true_nodes[documents, places]
    chosen[documents, torch.searchsorted(offsets, true, right=True) - 1] = True
    parents = chosen.any(dim=0).nonzero().squeeze(1)
    sizes = offsets[parents + 1] - offsets[parents]
    owner = torch.repeat_interleave(torch.arange(len(parents), device=sizes.device), sizes)
    nodes = torch.arange(len(owner), device=sizes.device) + (offsets[parents] - sizes.cumsum(0) + sizes)[owner]
    weights = chosen[:, parents[owner]].to(true_weights.dtype) * negative_weight
    targets = torch.zeros_like(weights)
    columns = torch.searchsorted(nodes, true)
    targets[documents, columns] = 1
    weights[documents, columns] = true_weights[documents, places]
    return {"nodes": nodes, "targets": targets, "weights": weights}


def tail_sizes(tree: LabelTree) -> list[int]:
    """
    Labels of each tail of a tree whose first level are frequent labels, a node each, followed by the gates.

    Raises where the tree is another one.
    """
    sizes = [] if tree.depth != 2 else (tree.child_offsets[1][1:] - tree.child_offsets[1][:-1]).tolist()
    num_frequent = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
    if tree.depth != 2 or 1 in sizes[num_frequent:]:
        raise ValueError(
            f"Tails need a tree of two levels, frequent labels before the gates of the tails, but this one has "
            f"{tree.depth} levels of {tree.level_sizes} nodes. Set `tree_clustering='frequency'`."
        )
    return sizes[num_frequent:]


def _make_head(config: XMCConfig, level: int, dimensions: int) -> Head:
    """A new head, whose rows are 0."""
    sizes = config.level_sizes or []
    if level == len(sizes) and config.head_tails is not None:
        return AdaptiveHead(sizes[-1] - sum(config.head_tails), config.head_tails, dimensions, config.head_shrink)
    # A projection to as many numbers or more would only cost.
    if level == len(sizes) and config.head_bottleneck is not None and config.head_bottleneck < dimensions:
        return BottleneckHead(sizes[-1], dimensions, config.head_bottleneck)
    return LevelHead(sizes[level - 1], dimensions)

"""Heads on an encoder: linear, bottleneck and adaptive layers, their losses and the beam search through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .configuration_xmc import XMCConfig
from .label_tree import LabelTree

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
        Logits of nodes.

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
        """Logits of nodes, see [`LevelHead`]."""
        return super().forward(self.projection(vectors.to(self.projection.weight.dtype)), nodes)


def node_losses(logits: torch.Tensor, targets: torch.Tensor, loss: str) -> torch.Tensor:
    """
    The loss of each logit.

    Args:
        logits (`torch.Tensor`):
            Scores of nodes.
        targets (`torch.Tensor`):
            1 where the node is true, else 0; of the same shape.
        loss (`str`):
            `"bce"`: binary cross entropy; `"squared_hinge"`: `max(0, 1 - ỹs)²` with `ỹ = ±1`.
    """
    if loss == "bce":
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return torch.relu(1 - (2 * targets - 1) * logits) ** 2


def node_probabilities(logits: torch.Tensor, loss: str) -> torch.Tensor:
    """The probability whose expected loss a logit minimises: `σ(s)` for `"bce"`, `(s + 1) / 2` within [0, 1] else."""
    return torch.sigmoid(logits) if loss == "bce" else ((logits + 1) / 2).clamp(0, 1)


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
        Logits of labels under their node; infinite for frequent labels, which are certain there.

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
        logits = vectors.new_full(nodes.shape, torch.inf)
        for tail, first, end in self.parts():
            inside = (nodes >= first) & (nodes < end)
            if inside.any():
                logits = torch.where(inside, tail(vectors, (nodes - first).clamp(0, end - first - 1)), logits)
        return logits

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
                Loss of a logit, see [`node_losses`].

        Returns:
            `torch.Tensor`: sum over labels, mean over documents.
        """
        total = vectors.new_zeros(())
        for tail, first, end in self.parts():
            inside = (true_nodes >= first) & (true_nodes < end)
            documents = inside.any(dim=1).nonzero().squeeze(1)
            if not len(documents):
                continue
            logits = tail(vectors[documents]).float()
            targets, weights = torch.zeros_like(logits), torch.full_like(logits, negative_weight)
            rows, places = inside[documents].nonzero(as_tuple=True)
            columns = true_nodes[documents][rows, places] - first
            targets[rows, columns] = 1
            weights[rows, columns] = true_weights[documents][rows, places]
            total = total + (node_losses(logits, targets, loss) * weights).sum()
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
            logits = tail(vectors[documents])
            reached = above[documents, gate] * node_probabilities(logits.amax(dim=1), loss)
            above_worst = reached > scores[documents, -1]
            documents = documents[above_worst]
            # Logits have the order of the probabilities: those of the best alone are computed.
            logits, places = _best(logits[above_worst], top_k)
            own = above[documents, gate, None] * node_probabilities(logits, loss)
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


Head = LevelHead | AdaptiveHead

# Bounds what is held for documents that are searched together: numbers of gathered rows, or of logits.
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
        own = _logits(head, vectors, nodes.clamp(min=0)).masked_fill(missing, -torch.inf)
        # A missing node loses against every real one, also against one of probability 0.
        path = (path.gather(1, parent) * node_probabilities(own, loss)).masked_fill(missing, -1)
    # Logits tell apart nodes whose probabilities are both 0 or 1.
    by_logit = not by_path or len(heads) == 1
    ranked = own if by_logit else path
    scores, best = ranked.topk(min(top_k, ranked.shape[1]), dim=1)
    nodes = nodes.gather(1, best)
    scores = node_probabilities(scores, loss) if by_logit else scores.clamp(min=0)
    lacking = top_k - scores.shape[1]
    if lacking > 0:
        scores = torch.nn.functional.pad(scores, (0, lacking))
        nodes = torch.nn.functional.pad(nodes, (0, lacking), value=-1)
    return scores, nodes


def _logits(head: Head, vectors: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Logits of each document's own nodes; of all nodes first where gathering would copy more rows than there are."""
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
    """Most numbers that a document needs at a level: rows of the nodes that a beam can reach, or logits of all."""
    if isinstance(head, AdaptiveHead):
        return head.num_nodes
    counts = (below[1:] - below[:-1]).sort(descending=True).values
    return min(int(counts[: beam_size or None].sum()) * head.weight.shape[1], head.num_nodes)


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
        Logits of nodes of one level and, with targets, their loss: sum over nodes, mean over documents.

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
        logits = self.of(level)(vectors, nodes)
        if targets is None:
            return logits, None
        losses = node_losses(logits.float(), targets, self.config.head_loss)
        return logits, (losses if weights is None else losses * weights).sum() / len(vectors)

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
        above, logits = 0, None
        for batch in batches:
            inputs = dict(batch)
            level = inputs.pop("level")
            head = self.of(level)
            if isinstance(head, AdaptiveHead):
                total = total + head.loss(vectors, loss=self.config.head_loss, **inputs)
                continue
            if "true_nodes" in inputs:
                assert logits is not None
                offsets = torch.from_numpy(tree.descendants(above, level)).to(vectors.device)
                inputs = dynamic_candidates(logits, offsets, **inputs)
            logits, loss = self.score(vectors, level, **inputs)
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
    logits: torch.Tensor,
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
        logits (`torch.Tensor` of shape `(batch, nodes above)`):
            Logits of the level above.
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
    best = logits.detach().topk(min(beam_size, logits.shape[1]), dim=1).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, True)
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

"""Classification heads on an encoder: linear, bottleneck and adaptive layers, their losses and their beam search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .configuration_xmc import XMCConfig
from .label_tree import LabelTree
from .output import padded

# Heads with more nodes than this get sparse gradients: a training step uses few of their rows.
SPARSE_ROWS = 16384
# The same for rows behind a bottleneck. They are short, and candidates of whole clusters use most of them, so dense
# gradients are faster until memory matters. Measured on two busy cores for 59,307 labels of 300 numbers and 32
# documents with 75 clusters of 100 labels each: 0.55 s per step with dense, 1.2 s with sparse gradients.
SPARSE_SHORT_ROWS = 1 << 18
# Bounds the memory of a search: numbers (gathered weights or logits) of the documents that are searched together.
MAX_NUMBERS = 1 << 25
_BEAM_SIZE = 20  # of a search, by default

# Probabilities and nodes of shape `(batch, top_k)`, best first; 0 and -1 where fewer nodes were found.
Ranked = tuple[torch.Tensor, torch.Tensor]


# ---- Losses and probabilities ----


def node_losses(logits: torch.Tensor, targets: torch.Tensor, loss: str) -> torch.Tensor:
    """Returns the loss of each logit: `"bce"`, or `"squared_hinge"`, which is `max(0, 1 - ỹs)²` with `ỹ = ±1`."""
    if loss == "bce":
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return torch.relu(1 - (2 * targets - 1) * logits) ** 2


def node_probabilities(logits: torch.Tensor, loss: str) -> torch.Tensor:
    """The probability whose expected loss a logit minimises: `σ(s)` for `"bce"`, else `(s + 1) / 2` cut to [0, 1]."""
    return torch.sigmoid(logits) if loss == "bce" else ((logits + 1) / 2).clamp(0, 1)


# ---- Heads ----


class LevelHead(nn.Module):
    """One linear classifier per node of a level, in tree order, on vectors of `dimensions` numbers."""

    def __init__(self, num_nodes: int, dimensions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_nodes, dimensions))
        self.bias = nn.Parameter(torch.zeros(num_nodes))
        self.num_nodes = num_nodes
        self.sparse = num_nodes > SPARSE_ROWS

    def forward(self, vectors: torch.Tensor, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """
        Returns the logits of all nodes, or of `nodes`: `(nodes,)` for all documents, or `(batch, nodes)` per document.
        """
        vectors = vectors.to(self.weight.dtype)
        if nodes is None:
            return functional.linear(vectors, self.weight, self.bias)
        rows = functional.embedding(nodes, self.weight, sparse=self.sparse)
        if nodes.dim() == 1:
            return functional.linear(vectors, rows, self.bias[nodes])
        return torch.einsum("bd,bnd->bn", vectors, rows) + self.bias[nodes]


class BottleneckHead(LevelHead):
    """A [`LevelHead`] on a projection of the document vector to `bottleneck` numbers."""

    def __init__(self, num_nodes: int, dimensions: int, bottleneck: int) -> None:
        super().__init__(num_nodes, bottleneck)
        self.projection = nn.Linear(dimensions, bottleneck, bias=False)
        self.sparse = num_nodes > SPARSE_SHORT_ROWS

    def forward(self, vectors: torch.Tensor, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits of nodes, see [`LevelHead`]."""
        return super().forward(self.projection(vectors.to(self.projection.weight.dtype)), nodes)


class AdaptiveHead(nn.Module):
    """
    The label head of APLC-XLNet: frequent labels, whose positions come first, and tail clusters of rarer labels.

    The level above has one node per frequent label, followed by one node per tail. It scores the frequent labels, so
    their conditional probability here is 1. The labels of tail `i` (counted from 1) are scored on a projection of the
    document vector to `dimensions / shrink ** i` numbers.
    """

    def __init__(self, num_frequent: int, tails: Sequence[int], dimensions: int, shrink: float) -> None:
        super().__init__()
        self.num_frequent, self.num_nodes = num_frequent, num_frequent + sum(tails)
        self.tails = nn.ModuleList(
            BottleneckHead(size, dimensions, max(1, int(dimensions / shrink**i))) for i, size in enumerate(tails, 1)
        )
        for tail in self.tails:
            # The loss of a document includes all labels of a tail: a step uses every row.
            tail.sparse = False

    def parts(self) -> Iterator[tuple[BottleneckHead, int, int]]:
        """Yields each tail with the range (start, end) of the positions of its labels."""
        first = self.num_frequent
        for tail in self.tails:
            assert isinstance(tail, BottleneckHead)
            yield tail, first, first + tail.num_nodes
            first += tail.num_nodes

    def forward(self, vectors: torch.Tensor, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits of labels given their parent node, see [`LevelHead`]; infinity for frequent labels."""
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
        Returns the loss of all tails (sum over labels, mean over documents).

        A document counts in the tails of its true labels, with all labels of each tail. `true_nodes` are the positions
        of its true labels, padded with -1, and `true_weights` their weights; both have the shape `(batch, max_true)`.
        The other labels have the weight `negative_weight`.
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


Head = LevelHead | AdaptiveHead


# ---- Search ----


def search_heads(
    vectors: torch.Tensor,
    heads: Sequence[Head],
    offsets: Sequence[torch.Tensor],
    top_k: int,
    beam_size: int,
    loss: str,
    by_path: bool,
    max_numbers: int = MAX_NUMBERS,
) -> Ranked:
    """
    Finds the best nodes of the level of the last head by beam search through all heads, coarsest first.

    `offsets` has for each head but the first the offsets of the nodes of its level under each node of the level
    before, see [`LabelTree.descendants`]. A `beam_size` of 0 keeps all nodes. `by_path` ranks by the product of the
    probabilities along the path, not by the last one alone. If the last head is an [`AdaptiveHead`], the search is
    exact and by path in any case. `max_numbers` bounds the memory.
    """
    widest = max((_numbers(*level, beam_size) for level in zip(heads[1:], offsets, strict=True)), default=0)
    batch_size = max(1, max_numbers // max(widest, heads[0].num_nodes))
    parts = []
    for part in vectors.split(batch_size) if len(vectors) else ():
        if isinstance(heads[-1], AdaptiveHead):
            upper = heads[-2]
            assert isinstance(upper, LevelHead)
            parts.append(search_tails(part, upper, heads[-1], top_k, loss))
        else:
            parts.append(_search_beam(part, heads, offsets, top_k, beam_size, loss, by_path))
    if not parts:
        empty = vectors.new_zeros((0, top_k))
        return empty, empty.long()
    scores, nodes = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(nodes)


def _numbers(head: Head, below: torch.Tensor, beam_size: int) -> int:
    """Numbers per document at a level: the rows of the nodes that a beam can reach, or the logits of all nodes."""
    if isinstance(head, AdaptiveHead):
        return head.num_nodes
    counts = (below[1:] - below[:-1]).sort(descending=True).values
    return min(int(counts[: beam_size or None].sum()) * head.weight.shape[1], head.num_nodes)


def _search_beam(
    vectors: torch.Tensor,
    heads: Sequence[Head],
    offsets: Sequence[torch.Tensor],
    top_k: int,
    beam_size: int,
    loss: str,
    by_path: bool,
) -> Ranked:
    logits = heads[0](vectors)
    path = node_probabilities(logits, loss)
    nodes = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    for head, below in zip(heads[1:], offsets, strict=True):
        if 0 < beam_size < nodes.shape[1]:
            path, kept = path.topk(beam_size, dim=1)
            nodes = nodes.gather(1, kept)
        nodes, parent = _children(nodes, below)
        missing, known = nodes < 0, nodes.clamp(min=0)
        # All nodes are scored if that copies fewer rows.
        logits = head(vectors).gather(1, known) if known.numel() > head.num_nodes else head(vectors, known)
        logits = logits.masked_fill(missing, -torch.inf)
        # -1 ranks padding after every node, including nodes of probability 0.
        path = (path.gather(1, parent) * node_probabilities(logits, loss)).masked_fill(missing, -1)
    # Logits distinguish nodes whose probabilities are both 0 or both 1.
    by_logit = not by_path or len(heads) == 1
    scores, best = _best(logits if by_logit else path, top_k)
    nodes = nodes.gather(1, best)
    return padded(node_probabilities(scores, loss) if by_logit else scores.clamp(min=0), nodes, top_k)


def _children(nodes: torch.Tensor, below: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The children of each row's nodes, padded with -1, and the column of the parent of each child."""
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


def search_tails(vectors: torch.Tensor, upper: LevelHead, head: AdaptiveHead, top_k: int, loss: str) -> Ranked:
    """
    Finds the best labels by `p(l)` for frequent labels and `p(tail) p(l | tail)` for the labels of a tail.

    The search is exact: no label is more likely than its tail. So a tail is computed only for documents where its
    probability is above the worst of the best labels so far, and sorted only where its best label is above it, too.
    `upper` is the head of the level above: the logits of the frequent labels, then the cluster logits of the tails.
    """
    above = node_probabilities(upper(vectors), loss)
    # -1 ranks padding after every label, including labels of probability 0.
    scores, nodes = above.new_full((len(vectors), top_k), -1), torch.full((len(vectors), top_k), -1).to(vectors.device)
    if head.num_frequent:
        scores, nodes = _merge(scores, nodes, *_best(above[:, : head.num_frequent], top_k))
    for column, (tail, first, _) in enumerate(head.parts(), start=head.num_frequent):
        documents = (above[:, column] > scores[:, -1]).nonzero().squeeze(1)
        if len(documents):
            logits = tail(vectors[documents])
            reached = above[documents, column] * node_probabilities(logits.amax(dim=1), loss)
            above_worst = reached > scores[documents, -1]
            documents = documents[above_worst]
            # Logits and probabilities have the same order: only the probabilities of the best labels are computed.
            logits, places = _best(logits[above_worst], top_k)
            products = above[documents, column, None] * node_probabilities(logits, loss)
            scores[documents], nodes[documents] = _merge(scores[documents], nodes[documents], products, places + first)
    return scores.clamp(min=0), nodes


def _best(values: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values of each row, at most `top_k`, and their columns."""
    return values.topk(min(top_k, values.shape[1]), dim=1)


def _merge(scores: torch.Tensor, nodes: torch.Tensor, more: torch.Tensor, more_nodes: torch.Tensor) -> Ranked:
    """The best of two lists, as many as the first has."""
    scores, order = torch.cat([scores, more], dim=1).topk(scores.shape[1], dim=1)
    return scores, torch.cat([nodes, more_nodes], dim=1).gather(1, order)


# ---- Heads of all levels ----


class LevelHeads(nn.ModuleList):
    """
    The heads of the levels in `config.head_levels`, on document vectors of `dimensions` numbers.

    All are linear layers, except that the labels may have a [`BottleneckHead`] or an [`AdaptiveHead`].
    """

    def __init__(self, config: XMCConfig, dimensions: int) -> None:
        super().__init__(_make_head(config, level, dimensions) for level in config.head_levels or ())
        self.config, self.dimensions = config, dimensions

    def _apply(self, fn: Any, recurse: bool = True) -> LevelHeads:
        """Keeps the dtype of the heads when `to`, `half` or `bfloat16` change that of the model."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def of(self, level: int) -> Head:
        """Returns the head of a level, counted from 1."""
        levels = self.config.head_levels or []
        if level not in levels:
            raise ValueError(
                f"Level {level} has no head. Levels with a head: {', '.join(map(str, levels)) or 'none'}."
            )
        head = self[levels.index(level)]
        assert isinstance(head, (LevelHead, AdaptiveHead))
        return head

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    @property
    def full_width_bytes(self) -> int:
        """Size of float32 weights without projections: all rows as long as the document vector."""
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
        """Returns the logits of nodes and, with targets, their loss, see [`XMCForTextClassification.forward`]."""
        logits = self.of(level)(vectors, nodes)
        if targets is None:
            return logits, None
        losses = node_losses(logits.float(), targets, self.config.head_loss)
        return logits, (losses if weights is None else losses * weights).sum() / len(vectors)

    def joint_loss(self, vectors: torch.Tensor, batches: Sequence[dict[str, Any]], tree: LabelTree) -> torch.Tensor:
        """
        Returns the sum of the losses of several levels.

        `batches` are the inputs of each level, coarsest first: the arguments of `score`, or `level` with the arguments
        of [`AdaptiveHead.loss`] or [`dynamic_candidates`].
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
                inputs = dynamic_candidates(logits, _offsets(tree, above, level, vectors.device), **inputs)
            logits, loss = self.score(vectors, level, **inputs)
            assert loss is not None
            total, above = total + loss, level
        return total

    def search(
        self, vectors: torch.Tensor, tree: LabelTree, level: int, top_k: int, beam_size: int | None = None
    ) -> Ranked:
        """Finds the best nodes of a level, see [`~XMCForTextClassification.search_level`]."""
        self.of(level)  # raises if the level has no head
        levels = [other for other in self.config.head_levels or () if other <= level]
        return search_heads(
            vectors,
            [self.of(other) for other in levels],
            [_offsets(tree, upper, lower, vectors.device) for upper, lower in zip(levels, levels[1:])],
            top_k,
            _BEAM_SIZE if beam_size is None else beam_size,
            self.config.head_loss,
            self.config.head_ranking == "path",
        )

    def label_probabilities(self, vectors: torch.Tensor, nodes: torch.Tensor, tree: LabelTree) -> torch.Tensor:
        """Returns the scores of nodes of the last level, `(batch, nodes)`, as in a search."""
        by_path = self.config.head_ranking == "path"
        product = torch.ones(nodes.shape, device=vectors.device)
        for level in (self.config.head_levels or ()) if by_path else (tree.depth,):
            ancestors = nodes
            if level < tree.depth:
                offsets = _offsets(tree, level, tree.depth, nodes.device)
                ancestors = torch.searchsorted(offsets, nodes, right=True) - 1
            product = product * node_probabilities(self.of(level)(vectors, ancestors), self.config.head_loss)
        return product


def _offsets(tree: LabelTree, upper: int, lower: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(tree.descendants(upper, lower)).to(device)


def _make_head(config: XMCConfig, level: int, dimensions: int) -> Head:
    """Returns a new head; its rows are 0."""
    sizes = config.level_sizes or []
    if level == len(sizes) and config.head_tails is not None:
        return AdaptiveHead(sizes[-1] - sum(config.head_tails), config.head_tails, dimensions, config.head_shrink)
    # A projection to as many or more dimensions would save nothing.
    if level == len(sizes) and config.head_bottleneck is not None and config.head_bottleneck < dimensions:
        return BottleneckHead(sizes[-1], dimensions, config.head_bottleneck)
    return LevelHead(sizes[level - 1], dimensions)


def tail_sizes(tree: LabelTree) -> list[int]:
    """Returns the number of labels of each tail of a tree for an [`AdaptiveHead`]; raises for other trees."""
    sizes = [] if tree.depth != 2 else (tree.child_offsets[1][1:] - tree.child_offsets[1][:-1]).tolist()
    num_frequent = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
    if tree.depth != 2 or 1 in sizes[num_frequent:]:
        raise ValueError(
            "An adaptive head needs a tree of two levels with the frequent labels before the tails, but this tree has "
            f"{tree.depth} levels of {tree.level_sizes} nodes. Set `tree_clustering='frequency'`."
        )
    return sizes[num_frequent:]


# ---- Dynamic candidates ----


def dynamic_candidates(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    true_nodes: torch.Tensor,
    true_weights: torch.Tensor,
    negative_weight: float,
    beam_size: int,
) -> dict[str, torch.Tensor]:
    """
    Selects the candidates of a forward pass (LightXML): the children of the best and of the true nodes above.

    The siblings of true nodes are useful negatives from the first step on, when the level above is not trained yet.
    `logits` are those of the level above, `(batch, nodes above)`, and `offsets` the children of each node there, see
    [`LabelTree.descendants`]. `true_nodes`, `true_weights` and `negative_weight` are as in [`AdaptiveHead.loss`].

    Returns `nodes`, the sorted union of the candidates of all documents, and `targets` and `weights` of shape `(batch,
    nodes)`; the weight is 0 where a node is not a candidate of the document. Documents share most candidates: one
    product with the union is faster than rows gathered for each document.
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

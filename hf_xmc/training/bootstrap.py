"""Shortlist (XR-Transformer, eq. 7 and 8) and bootstrap (eq. 11, METHODS 11') of a level before it is fine-tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.sparse import csr_matrix
from scipy.special import logit

from ..features import Features
from ..label_columns import label_matrix
from ..label_tree import LabelTree
from ..linear_ranker import Beam
from ..modeling_heads import AdaptiveHead, BottleneckHead, Head, LevelHead
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime
from ..simd import LANES
from .head_prior import NodeVectors
from .level_data import LevelData
from .options import LevelArguments, RankerArguments, per_level
from .ranker import train_classifiers
from .shortlist import Shortlist

_SOLVER_LOSSES = {"bce": "logistic", "squared_hinge": "squared_hinge"}

# The squared hinge converges more slowly on dense vectors, which resemble each other, than on TF-IDF.
BOOTSTRAP_PASSES, BOOTSTRAP_TOLERANCE = 60, 0.1

# Documents from which principal components are computed.
PRINCIPAL_DOCUMENTS = 16384
# Concatenated layers are long and redundant: vectors longer than the first number are bootstrapped on as many
# principal components as the second.
MAX_DIMENSIONS, COMPONENTS = 1024, 384


def needs_vectors(arguments: LevelArguments, tree: LabelTree, levels: Sequence[int], index: int) -> bool:
    """Whether shortlist or bootstrap of the `index`-th trained level need the document vectors."""
    negatives = arguments.choose_negatives(tree, levels)[index]
    return arguments.bootstrap or (index > 0 and negatives in ("man", "both"))


def make_level_data(
    model: XMCForTextClassification,
    counts: list[csr_matrix],
    index: int,
    arguments: LevelArguments,
    vectors: np.ndarray | None,
    runtime: Runtime = Runtime(),
) -> LevelData:
    """Computes the shortlist of the `index`-th trained level with the heads above it."""
    tree, levels = model.label_tree, model.config.head_levels
    assert tree is not None and levels is not None
    above = levels[index - 1] if index else 0
    negatives = arguments.choose_negatives(tree, levels)[index]
    shortlist = None
    if index > 0 and negatives not in ("all", "dynamic") and arguments.shrink is None:
        size = tree.level_sizes[above - 1]
        parts = []
        if negatives != "man":
            parts.append(counts[above - 1])
        if negatives != "tfn":
            assert vectors is not None
            beam_size = per_level(arguments.beam_size, len(levels), "beam_size")[index]
            parts.append(_predicted_nodes(model, vectors, above, min(beam_size, size), runtime))
        shortlist = csr_matrix(sum(parts[1:], start=parts[0]) > 0, dtype=np.float32)
        shortlist.sort_indices()
    return level_data(tree, counts, levels, index, shortlist, arguments)


def level_data(
    tree: LabelTree,
    counts: list[csr_matrix],
    levels: Sequence[int],
    index: int,
    shortlist: csr_matrix | None,
    arguments: LevelArguments,
) -> LevelData:
    """Returns the data of the `index`-th trained level for a given shortlist."""
    level, above = levels[index], levels[index - 1] if index else 0
    is_dynamic = index > 0 and arguments.choose_negatives(tree, levels)[index] == "dynamic"
    return LevelData(
        level,
        counts[level - 1],
        tree.descendants(above, level),
        shortlist,
        arguments.cost_sensitive,
        arguments.negative_weight,
        in_pass=is_dynamic or (index > 0 and arguments.shrink is not None),
        beam_size=per_level(arguments.beam_size, len(levels), "beam_size")[index] if is_dynamic else None,
    )


def starting_data(
    data: LevelData, tree: LabelTree, counts: list[csr_matrix], levels: Sequence[int], index: int, joint: bool
) -> LevelData:
    """
    Returns the data from which the head of a level is initialised.

    Where the level above is trained in the same steps, these are the children of the true nodes: they are few, the
    same for every kind of negatives, and the level above tells the other clusters apart.
    """
    if not joint or index == 0:
        return data
    siblings = csr_matrix(counts[levels[index - 1] - 1] > 0, dtype=np.float32)
    return LevelData(data.level, data.counts, data.offsets, siblings, data.cost_sensitive, data.negative_weight)


def _parts(head: Head, data: LevelData) -> Iterator[tuple[LevelHead, LevelData, slice]]:
    """
    Yields a head with its data and nodes.

    For an adaptive head, yields every tail with the documents that have a true label in it.
    """
    if not isinstance(head, AdaptiveHead):
        yield head, data, slice(None)
        return
    for tail, first, end in head.parts():
        counts = data.counts[:, first:end]
        inside = csr_matrix((np.diff(counts.indptr) > 0)[:, None], dtype=np.float32)
        offsets = np.array([0, end - first])
        part = LevelData(data.level, counts, offsets, inside, data.cost_sensitive, data.negative_weight)
        yield tail, part, slice(first, end)


@torch.no_grad()
def _predicted_nodes(
    model: XMCForTextClassification, vectors: np.ndarray, level: int, top_k: int, runtime: Runtime
) -> csr_matrix:
    """`P^(t)` of XR-Transformer, eq. 7: the best nodes of a level for each document."""

    def search(start: int, stop: int) -> dict[str, np.ndarray]:
        part = torch.from_numpy(vectors[start:stop]).to(model.device)
        nodes = model.search_level(part, level, top_k, beam_size=top_k)[1].cpu().numpy()
        runtime.report("shortlist", stop, len(vectors))
        return {"nodes": nodes}

    nodes = runtime.cache.rows("nodes", len(vectors), search)["nodes"]
    assert model.label_tree is not None
    rows, places = np.nonzero(nodes >= 0)
    return label_matrix(rows, nodes[rows, places], (len(vectors), model.label_tree.level_sizes[level - 1]))


def match_documents(
    model: XMCForTextClassification, vectors: np.ndarray, level: int, top_k: int, runtime: Runtime = Runtime()
) -> Beam:
    """Returns the `top_k` best nodes of a level for all documents, see [`~XMCForTextClassification.match`]."""

    def match(start: int, stop: int) -> dict[str, np.ndarray]:
        beam = model.match(torch.from_numpy(vectors[start:stop]).to(model.device), level, top_k)
        return {"nodes": beam.nodes, "log_probabilities": beam.log_probabilities}

    return Beam(level, **runtime.cache.rows("matched nodes", len(vectors), match))


def bootstrap_head(
    head: Head,
    data: LevelData,
    vectors: np.ndarray,
    arguments: LevelArguments,
    seed: int = 0,
    runtime: Runtime = Runtime(),
    prior: NodeVectors | None = None,
) -> None:
    """
    Sets a head to the solution of the level's objective for fixed document vectors.

    With a `prior`, the regulariser draws the weights to the vectors of the nodes, and not to 0.

    A projection is initialised with the principal components of the vectors, and the rows behind it with the solution
    on these components.
    """
    line = None if prior is None else prior.fit_scale(data, arguments.loss, seed)
    for part, part_data, nodes in _parts(head, data):
        initial = None
        if prior is not None and line is not None:
            initial = prior.rows[nodes] * np.float32(line[0])
        bias_prior = -1.0 if line is None else line[1]
        is_short = isinstance(part, BottleneckHead)
        if not is_short and vectors.shape[1] <= MAX_DIMENSIONS:
            rows, bias = _solve(part_data, vectors, arguments, seed, runtime, initial, bias_prior)
        else:
            count = part.weight.shape[1] if is_short else COMPONENTS
            projection, centre = principal_components(vectors, count, seed)
            if initial is not None:
                # The rows of the projection have the same length and are orthogonal to each other.
                initial = initial @ projection.T / (projection[0] @ projection[0])
                initial = np.hstack([initial, initial @ centre[:, None]])
            components = vectors @ projection.T - centre
            rows, bias = _solve(part_data, components, arguments, seed, runtime, initial, bias_prior)
            bias = bias - rows @ centre
            rows = rows if is_short else rows @ projection
        with torch.no_grad():
            if isinstance(part, BottleneckHead):
                part.projection.weight.copy_(torch.from_numpy(projection))
            part.weight.copy_(torch.from_numpy(rows))
            part.bias.copy_(torch.from_numpy(bias))


def principal_components(vectors: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """
    Returns the principal components `(count, dimensions)` of document vectors, and their projected mean.

    They are computed on a sample where there are many documents, and scaled so that centred vectors have length 1 on
    average; otherwise vectors that all point the same way would need large classifier weights, which regularisation
    prevents.
    """
    if len(vectors) > PRINCIPAL_DOCUMENTS:
        chosen = np.random.default_rng(seed).choice(len(vectors), PRINCIPAL_DOCUMENTS, replace=False)
        vectors = vectors[np.sort(chosen)]
    mean = vectors.mean(axis=0)
    centred = vectors - mean
    largest = [vectors.shape[1] - count, vectors.shape[1] - 1]
    variances, directions = eigh((centred.T @ centred).astype(np.float64), subset_by_index=largest)
    scale = np.sqrt(len(vectors) / max(variances.sum(), 1e-12))
    projection = np.ascontiguousarray((scale * directions[:, ::-1]).T, dtype=np.float32)
    return projection, projection @ mean


def _solve(
    data: LevelData,
    vectors: np.ndarray,
    arguments: LevelArguments,
    seed: int,
    runtime: Runtime,
    initial: np.ndarray | None,
    bias_prior: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weight rows and biases that solve the level's objective for fixed vectors."""
    if initial is not None and initial.shape[1] == vectors.shape[1]:
        initial = np.pad(initial, [(0, 0), (0, 1)])
    cost = arguments.bootstrap_cost
    # The solver scales cost-sensitive positives to `cost` on average; negatives are scaled alike.
    scale = data.mean_true if data.cost_sensitive else 1.0
    settings = RankerArguments(
        loss=_SOLVER_LOSSES[arguments.loss],
        C=cost,
        negative_cost=max(cost * data.negative_weight * scale, 1e-6),
        cost_sensitive=data.cost_sensitive,
        weight_dtype="float32",
        max_passes=BOOTSTRAP_PASSES,
        tolerance=BOOTSTRAP_TOLERANCE,
        ranker_seed=seed,
        bias_prior=bias_prior,
    )
    if data.shortlist is None:
        offsets = np.array([0, data.counts.shape[1]])
        shortlist = Shortlist(np.array([0, len(vectors)]), np.arange(len(vectors)))
    else:
        offsets = data.offsets
        by_node = data.shortlist.tocsc()
        by_node.sort_indices()
        shortlist = Shortlist(by_node.indptr.astype(np.int64), by_node.indices.astype(np.int64))
    stage = f"bootstrap level {data.level}"
    blocks, dense = train_classifiers(
        Features(None, vectors), data.counts, offsets, shortlist, settings, stage, runtime, initial
    )
    width = vectors.shape[1] + 1
    lanes = dense.reshape(len(blocks), width, LANES).transpose(0, 2, 1)
    nodes = (blocks[:, 1, None] + np.arange(LANES)).ravel()
    filled = (np.arange(LANES) < blocks[:, 2, None]).ravel()
    solution = np.zeros((data.counts.shape[1], width), dtype=np.float32)
    solution[nodes[filled]] = lanes.reshape(-1, width)[filled]
    return solution[:, :-1], solution[:, -1]


def start_from_frequency(head: Head, data: LevelData, loss: str) -> None:
    """Sets the weights of a head, not its projections, to 0 and its biases to the logits of the frequencies."""
    for part, part_data, _ in _parts(head, data):
        bias = _frequency_bias(part_data, loss)
        with torch.no_grad():
            part.weight.zero_()
            part.bias.copy_(torch.from_numpy(bias.astype(np.float32)))


def _frequency_bias(data: LevelData, loss: str) -> np.ndarray:
    true = np.bincount(data.counts.indices, minlength=data.counts.shape[1]).astype(np.float64)
    shown = np.full(len(true), float(data.counts.shape[0]))
    if data.shortlist is not None:
        sizes = np.diff(data.offsets)
        shown = np.repeat(np.bincount(data.shortlist.indices, minlength=len(sizes)), sizes).astype(np.float64)
        # Without teacher forcing a true node may not be a candidate of its document.
        rows = np.repeat(np.arange(data.counts.shape[0]), np.diff(data.counts.indptr))
        above = np.repeat(np.arange(len(sizes)), sizes)[data.counts.indices]
        known = np.asarray(data.shortlist[rows, above]).ravel() > 0
        true = np.bincount(data.counts.indices[known], minlength=len(true)).astype(np.float64)
    # Laplace smoothing: one more positive and one more negative document.
    probability = (true + 1) / (shown + 2)
    return logit(probability) if loss == "bce" else 2 * probability - 1

"""What happens before a level is fine-tuned: its shortlist, equations (7) and (8), and its bootstrap, (11)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.sparse import csr_matrix
from scipy.special import logit

from ..features import Features
from ..label_tree import LabelTree
from ..linear_ranker import Beam
from ..modeling_heads import AdaptiveHead, BottleneckHead, Head, LevelHead
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import NO_CACHE, StageCache
from ..simd import LANES
from ..utils import Progress
from .level_data import LevelData
from .options import LevelArguments, RankerArguments, per_level
from .ranker import train_classifiers
from .shortlist import Shortlist

_SOLVER_LOSSES = {"bce": "logistic", "squared_hinge": "squared_hinge"}

# Dense vectors resemble each other: the squared hinge takes more passes than on TF-IDF to come near its optimum.
_BOOTSTRAP_PASSES = 60

# Documents whose principal components a projection starts from.
_PRINCIPAL_DOCUMENTS = 16384
# The time of a bootstrap grows with the length of the vectors, and those of several layers side by side repeat a lot:
# longer ones than the first number are solved on as many principal components as the second.
_MAX_DIMENSIONS, _COMPONENTS = 1024, 384


def needs_vectors(arguments: LevelArguments, tree: LabelTree, levels: Sequence[int], index: int) -> bool:
    """Whether the `index`-th of the trained levels can only start with the encoder's vectors of all documents."""
    negatives = arguments.choose_negatives(tree, levels)[index]
    return arguments.bootstrap or (index > 0 and negatives in ("man", "both"))


def make_level_data(
    model: XMCForTextClassification,
    counts: list[csr_matrix],
    index: int,
    arguments: LevelArguments,
    vectors: np.ndarray | None,
    progress: Progress | None = None,
    work: StageCache = NO_CACHE,
) -> LevelData:
    """
    The shortlists of one level by the heads above it, and all else a batch of the level is made of.

    Args:
        model ([`XMCForTextClassification`]):
            The model; its heads above the level are trained.
        counts (`list[csr_matrix]`):
            What [`LabelTree.targets`] gives.
        index (`int`):
            Which of the trained levels, counted from 0.
        arguments ([`LevelArguments`]):
            Options.
        vectors (`np.ndarray`, *optional*):
            The encoder's vectors of the documents, where [`needs_vectors`] says so.
        progress (`Callable`, *optional*):
            Called with (stage, done, total).
        work ([`StageCache`], *optional*):
            Shares the documents out over processes; this process alone by default.
    """
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
            parts.append(_predicted_nodes(model, vectors, above, min(beam_size, size), progress, work))
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
    """The data of the `index`-th of the trained levels with a shortlist that is there already."""
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
    What the head of a level starts from: its own data or, where the level above is trained in the same steps, the
    children of the true nodes. They are few, the same for all kinds of negatives, and the levels above tell the rest.
    """
    if not joint or index == 0:
        return data
    siblings = csr_matrix(counts[levels[index - 1] - 1] > 0, dtype=np.float32)
    return LevelData(data.level, data.counts, data.offsets, siblings, data.cost_sensitive, data.negative_weight)


def _parts(head: Head, data: LevelData) -> Iterator[tuple[LevelHead, LevelData]]:
    """A head with its data; of an adaptive head each tail with its own, the documents with a true label in it."""
    if not isinstance(head, AdaptiveHead):
        yield head, data
        return
    for tail, first, end in head.parts():
        counts = data.counts[:, first:end]
        inside = csr_matrix((np.diff(counts.indptr) > 0)[:, None], dtype=np.float32)
        offsets = np.array([0, end - first])
        yield tail, LevelData(data.level, counts, offsets, inside, data.cost_sensitive, data.negative_weight)


@torch.no_grad()
def _predicted_nodes(
    model: XMCForTextClassification,
    vectors: np.ndarray,
    level: int,
    top_k: int,
    progress: Progress | None,
    work: StageCache,
) -> csr_matrix:
    """`P^(t)`: the best nodes of a level for each document."""

    def search(start: int, stop: int) -> dict[str, np.ndarray]:
        part = torch.from_numpy(vectors[start:stop]).to(model.device)
        found = model.search_level(part, level, top_k, beam_size=top_k)[1].cpu().numpy()
        if progress is not None:
            progress("shortlist", stop, len(vectors))
        return {"nodes": found}

    nodes = work.rows("nodes", len(vectors), search)["nodes"]
    known = nodes >= 0
    indptr = np.concatenate([[0], np.cumsum(known.sum(axis=1))])
    assert model.label_tree is not None
    shape = (len(vectors), model.label_tree.level_sizes[level - 1])
    matrix = csr_matrix((np.ones(known.sum(), dtype=np.float32), nodes[known], indptr), shape=shape)
    matrix.sort_indices()
    return matrix


def match_documents(
    model: XMCForTextClassification, vectors: np.ndarray, level: int, top_k: int, work: StageCache = NO_CACHE
) -> Beam:
    """
    What [`~XMCForTextClassification.match`] finds for many documents.

    Args:
        model ([`XMCForTextClassification`]):
            A model with heads down to the level.
        vectors (`np.ndarray`):
            The encoder's vectors of the documents.
        level (`int`):
            Level, counted from 1.
        top_k (`int`):
            Nodes per document.
        work ([`StageCache`], *optional*):
            Shares the documents out over processes; this process alone by default.
    """

    def match(start: int, stop: int) -> dict[str, np.ndarray]:
        beam = model.match(torch.from_numpy(vectors[start:stop]).to(model.device), level, top_k)
        return {"nodes": beam.nodes, "log_probabilities": beam.log_probabilities}

    return Beam(level, **work.rows("matched nodes", len(vectors), match))


def bootstrap_head(
    head: Head,
    data: LevelData,
    vectors: np.ndarray,
    arguments: LevelArguments,
    seed: int = 0,
    num_threads: int | None = None,
    progress: Progress | None = None,
    work: StageCache = NO_CACHE,
) -> None:
    """
    Sets a head to the solution of the level's objective with the encoder as it is.

    A projection starts from the principal components of the vectors, and the rows behind it from the solution on them.

    Args:
        head ([`LevelHead`] or [`AdaptiveHead`]):
            The head; it is overwritten.
        data ([`LevelData`]):
            The level's targets, shortlists and weights.
        vectors (`np.ndarray`):
            The encoder's vectors of the documents.
        arguments ([`LevelArguments`]):
            Options.
        seed (`int`, *optional*, defaults to 0):
            Seed of the order in which documents are visited.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
        progress (`Callable`, *optional*):
            Called with (stage, done, total).
        work ([`StageCache`], *optional*):
            Shares the nodes out over processes; this process alone by default.
    """
    for part, own_data in _parts(head, data):
        is_short = isinstance(part, BottleneckHead)
        if not is_short and vectors.shape[1] <= _MAX_DIMENSIONS:
            rows, bias = _solve(own_data, vectors, arguments, seed, num_threads, progress, work)
        else:
            count = part.weight.shape[1] if is_short else _COMPONENTS
            projection, centre = principal_components(vectors, count, seed)
            components = vectors @ projection.T - centre
            rows, bias = _solve(own_data, components, arguments, seed, num_threads, progress, work)
            bias = bias - rows @ centre
            rows = rows if is_short else rows @ projection
        with torch.no_grad():
            if isinstance(part, BottleneckHead):
                part.projection.weight.copy_(torch.from_numpy(projection))
            part.weight.copy_(torch.from_numpy(rows))
            part.bias.copy_(torch.from_numpy(bias))


def principal_components(vectors: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """
    The projection on the directions in which vectors differ most, of a sample where there are many.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: the projection, `(count, dimensions)`, and where the mean of the vectors comes
        to lie. It is scaled so that what is left without the mean has length 1 on average: encoders whose vectors all
        point the same way need it, for a classifier's weights are kept small.
    """
    if len(vectors) > _PRINCIPAL_DOCUMENTS:
        chosen = np.random.default_rng(seed).choice(len(vectors), _PRINCIPAL_DOCUMENTS, replace=False)
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
    num_threads: int | None,
    progress: Progress | None,
    work: StageCache,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and biases of the level's nodes that solve its objective for these vectors."""
    cost = arguments.bootstrap_cost
    # The solver scales the shares of cost-sensitive positives to `cost` on average, and so the others with them.
    scale = data.mean_true if data.cost_sensitive else 1.0
    settings = RankerArguments(
        loss=_SOLVER_LOSSES[arguments.loss],
        C=cost,
        negative_cost=max(cost * data.negative_weight * scale, 1e-6),
        cost_sensitive=data.cost_sensitive,
        weight_dtype="float32",
        max_passes=_BOOTSTRAP_PASSES,
        ranker_seed=seed,
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
        Features(None, vectors), data.counts, offsets, shortlist, settings, stage, num_threads, progress, work
    )
    width = vectors.shape[1] + 1
    lanes = dense.reshape(len(blocks), width, LANES).transpose(0, 2, 1)
    nodes = (blocks[:, 1, None] + np.arange(LANES)).ravel()
    filled = (np.arange(LANES) < blocks[:, 2, None]).ravel()
    solution = np.zeros((data.counts.shape[1], width), dtype=np.float32)
    solution[nodes[filled]] = lanes.reshape(-1, width)[filled]
    return solution[:, :-1], solution[:, -1]


def start_from_frequency(head: Head, data: LevelData, loss: str) -> None:
    """
    Sets a head's rows to 0 and its biases to what is right without looking at the document.

    Args:
        head ([`LevelHead`] or [`AdaptiveHead`]):
            The head; its rows are overwritten, projections stay what they are.
        data ([`LevelData`]):
            The level's targets and shortlists.
        loss (`str`):
            Loss of the heads.
    """
    for part, own_data in _parts(head, data):
        bias = _frequency_bias(own_data, loss)
        with torch.no_grad():
            part.weight.zero_()
            part.bias.copy_(torch.from_numpy(bias.astype(np.float32)))


def _frequency_bias(data: LevelData, loss: str) -> np.ndarray:
    true = np.bincount(data.counts.indices, minlength=data.counts.shape[1]).astype(np.float64)
    shown = np.full(len(true), float(data.counts.shape[0]))
    if data.shortlist is not None:
        sizes = np.diff(data.offsets)
        shown = np.repeat(np.bincount(data.shortlist.indices, minlength=len(sizes)), sizes).astype(np.float64)
        # Without teacher forcing a true node may be no candidate of its document.
        rows = np.repeat(np.arange(data.counts.shape[0]), np.diff(data.counts.indptr))
        above = np.repeat(np.arange(len(sizes)), sizes)[data.counts.indices]
        known = np.asarray(data.shortlist[rows, above]).ravel() > 0
        true = np.bincount(data.counts.indices[known], minlength=len(true)).astype(np.float64)
    # As if each node had been seen once more as true and once more as false.
    probability = (true + 1) / (shown + 2)
    return logit(probability) if loss == "bce" else 2 * probability - 1

"""What happens before a level is fine-tuned: its shortlist, equations (7) and (8), and its bootstrap, (11)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.special import logit

from ..features import Features
from ..heads import LevelHead
from ..label_tree import LabelTree
from ..lanes import LANES
from ..modeling_xmc import XMCForTextClassification
from .clustering import Progress
from .levels import LevelArguments, LevelData, per_level
from .ranker_training import RankerArguments, train_classifiers
from .shortlist import Shortlist

_SOLVER_LOSSES = {"bce": "logistic", "squared_hinge": "squared_hinge"}

# Dense vectors resemble each other: the squared hinge takes more passes than on TF-IDF to come near its optimum.
_BOOTSTRAP_PASSES = 60

# Documents that search the level above together.
_DOCUMENTS_PER_SEARCH = 4096


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
    """
    tree, levels = model.label_tree, model.config.head_levels
    assert tree is not None and levels is not None
    level, above = levels[index], levels[index - 1] if index else 0
    negatives = arguments.choose_negatives(tree, levels)[index]
    shortlist = None
    if index > 0 and negatives != "all":
        size = tree.level_sizes[above - 1]
        parts = []
        if negatives != "man":
            parts.append(counts[above - 1])
        if negatives != "tfn":
            assert vectors is not None
            beam_size = per_level(arguments.beam_size, len(levels), "beam_size")[index]
            parts.append(_predicted_nodes(model, vectors, above, min(beam_size, size), progress))
        shortlist = csr_matrix(sum(parts[1:], start=parts[0]) > 0, dtype=np.float32)
        shortlist.sort_indices()
    return level_data(tree, counts, level, above, shortlist, arguments)


def level_data(
    tree: LabelTree,
    counts: list[csr_matrix],
    level: int,
    above: int,
    shortlist: csr_matrix | None,
    arguments: LevelArguments,
) -> LevelData:
    """The data of a level with a shortlist that is there already."""
    return LevelData(
        level,
        counts[level - 1],
        tree.descendants(above, level),
        shortlist,
        arguments.cost_sensitive,
        arguments.negative_weight,
    )


@torch.no_grad()
def _predicted_nodes(
    model: XMCForTextClassification, vectors: np.ndarray, level: int, top_k: int, progress: Progress | None
) -> csr_matrix:
    """`P^(t)`: the best nodes of a level for each document."""
    found = []
    for start in range(0, len(vectors), _DOCUMENTS_PER_SEARCH):
        part = torch.from_numpy(vectors[start : start + _DOCUMENTS_PER_SEARCH]).to(model.device)
        found.append(model.search_level(part, level, top_k, beam_size=top_k)[1].cpu().numpy())
        if progress is not None:
            progress("shortlist", start + len(part), len(vectors))
    nodes = np.concatenate(found)
    known = nodes >= 0
    indptr = np.concatenate([[0], np.cumsum(known.sum(axis=1))])
    assert model.label_tree is not None
    shape = (len(vectors), model.label_tree.level_sizes[level - 1])
    matrix = csr_matrix((np.ones(known.sum(), dtype=np.float32), nodes[known], indptr), shape=shape)
    matrix.sort_indices()
    return matrix


def bootstrap_head(
    head: LevelHead,
    data: LevelData,
    vectors: np.ndarray,
    arguments: LevelArguments,
    seed: int = 0,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """
    Sets a head to the solution of the level's objective with the encoder as it is.

    Args:
        head ([`LevelHead`]):
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
    """
    cost = arguments.bootstrap_cost
    # The solver scales the shares of cost-sensitive positives to `cost` on average, and so the others with them.
    scale = data.mean_true if data.cost_sensitive else 1.0
    settings = RankerArguments(
        loss=_SOLVER_LOSSES[arguments.loss],
        cost=cost,
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
        Features(None, vectors), data.counts, offsets, shortlist, settings, stage, num_threads, progress
    )
    width = vectors.shape[1] + 1
    lanes = dense.reshape(len(blocks), width, LANES).transpose(0, 2, 1)
    nodes = (blocks[:, 1, None] + np.arange(LANES)).ravel()
    filled = (np.arange(LANES) < blocks[:, 2, None]).ravel()
    solution = np.zeros((data.counts.shape[1], width), dtype=np.float32)
    solution[nodes[filled]] = lanes.reshape(-1, width)[filled]
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(solution[:, :-1]))
        head.bias.copy_(torch.from_numpy(solution[:, -1]))


def start_from_frequency(head: LevelHead, data: LevelData, loss: str) -> None:
    """
    Sets a head's weights to 0 and its biases to what is right without looking at the document.

    Args:
        head ([`LevelHead`]):
            The head; it is overwritten.
        data ([`LevelData`]):
            The level's targets and shortlists.
        loss (`str`):
            Loss of the heads.
    """
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
    bias = logit(probability) if loss == "bce" else 2 * probability - 1
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.from_numpy(bias.astype(np.float32)))

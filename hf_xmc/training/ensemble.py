"""Ensembles of trained models, with weights chosen on validation documents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix

from ..ensemble_xmc import MemberFeatures, XMCEnsemble, combine_members
from ..evaluation.metrics import XMCMetrics
from ..inference.predict import BATCH_SIZE, map_batches
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime

_METRIC = "nDCG@5"
_ROUNDS = 20


def make_ensemble(
    members: Sequence[XMCForTextClassification | str | os.PathLike],
    combine: str = "scores",
    weights: Sequence[float] | None = None,
    validation: Dataset | None = None,
    batch_size: int = BATCH_SIZE,
    runtime: Runtime = Runtime(),
) -> tuple[XMCEnsemble, dict[str, Any]]:
    """
    Combines trained models into an ensemble.

    Args:
        members (`Sequence[XMCForTextClassification or str]`):
            Models, or their folders or ids on the Hub.
        combine (`str`, *optional*, defaults to `"scores"`):
            `"scores"` or `"ranks"`, see [`XMCEnsembleConfig`].
        weights (`Sequence[float]`, *optional*):
            Weight of each model. Default: equal weights, or those chosen on `validation`.
        validation (`datasets.Dataset`, *optional*):
            Documents with labels, in the columns of [`prepare_dataset`], for [`choose_weights`].
        batch_size (`int`, *optional*, defaults to 32):
            Texts that pass through an encoder together.
        runtime ([`Runtime`], *optional*):
            Threads and progress callback.

    Returns:
        `tuple[XMCEnsemble, dict[str, Any]]`: the ensemble and, with `validation`, the nDCG@5 of the ensemble and of
        each model.
    """
    if weights is not None and validation is not None:
        raise ValueError("Pass either `weights` or `validation`, on which they are chosen.")
    ensemble = XMCEnsemble.from_members(members, weights, combine)
    if validation is None:
        return ensemble, {}
    ensemble.config.weights, results = choose_weights(ensemble, validation, batch_size, runtime)
    return ensemble, results


@torch.no_grad()
def choose_weights(
    ensemble: XMCEnsemble, dataset: Dataset, batch_size: int = BATCH_SIZE, runtime: Runtime = Runtime()
) -> tuple[list[float], dict[str, Any]]:
    """
    Chooses the weights with the best nDCG@5, by greedy ensemble selection with replacement (Caruana et al., 2004).

    Each of twenty rounds adds one more copy of the model that gives the best mean. The weights are the proportions in
    the best of the twenty means, so they are never worse than the best single model.

    Args:
        ensemble ([`XMCEnsemble`]): The ensemble.
        dataset (`datasets.Dataset`): Documents with labels.
        batch_size (`int`, *optional*, defaults to 32): Texts that pass through an encoder together.
        runtime ([`Runtime`], *optional*): Threads and progress callback.

    Returns:
        `tuple[list[float], dict[str, Any]]`: the weights, and the nDCG@5 of the ensemble and of each model.
    """
    truth = ensemble.labels.encode(dataset, keep_unseen=True)
    if not (truth.indices < len(ensemble.labels)).any():
        raise ValueError("No document of `validation` has a label of the models, so weights cannot be chosen on it.")

    def score_members(features: MemberFeatures) -> dict[str, np.ndarray]:
        scores, indices = ensemble.member_scores(features, 5, num_threads=runtime.num_threads)
        return {"scores": scores.cpu().numpy(), "indices": indices.cpu().numpy()}

    chunks = list(map_batches(ensemble, dataset, score_members, batch_size, runtime))
    scores, indices = (
        torch.from_numpy(np.concatenate([chunk[name] for chunk in chunks], axis=1)) for name in ("scores", "indices")
    )

    def measure(counts: Sequence[int]) -> float:
        weights = [count / sum(counts) for count in counts]
        best = combine_members(scores, indices, weights, ensemble.config.combine, 5)
        return _ndcg(best.indices, truth)

    members = range(len(ensemble.models))
    alone = [measure([int(other == member) for other in members]) for member in members]
    counts, chosen, best = [0 for _ in members], [0 for _ in members], -1.0
    for round_ in range(_ROUNDS):
        candidates = [[count + (other == member) for other, count in enumerate(counts)] for member in members]
        values = alone if round_ == 0 else [measure(candidate) for candidate in candidates]
        winner = max(members, key=lambda member: values[member])
        counts = candidates[winner]
        if values[winner] > best:
            best, chosen = values[winner], counts
        if runtime.progress is not None:
            runtime.progress("weights", round_ + 1, _ROUNDS)
    weights = [round(count / sum(chosen), 4) for count in chosen]
    return weights, {f"validation_{_METRIC}": best, f"validation_{_METRIC}_of_members": alone}


def _ndcg(indices: torch.Tensor | None, truth: csr_matrix) -> float:
    assert indices is not None
    metrics = XMCMetrics(ks=(1, 5))
    metrics.update(indices.cpu().numpy(), truth)
    return metrics.compute()[_METRIC]

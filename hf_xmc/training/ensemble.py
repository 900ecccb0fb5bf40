"""Makes one model of several, with the weights that rank validation documents best."""

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
from ..inference.predict import map_batches
from ..modeling_xmc import XMCForTextClassification
from ..utils import Progress

_CHOSEN_BY = "nDCG@5"
_ROUNDS = 20


def make_ensemble(
    members: Sequence[XMCForTextClassification | str | os.PathLike],
    combine: str = "scores",
    weights: Sequence[float] | None = None,
    validation: Dataset | None = None,
    num_threads: int | None = None,
    report: Progress | None = None,
) -> tuple[XMCEnsemble, dict[str, Any]]:
    """
    An ensemble of trained models.

    Args:
        members (`Sequence[XMCForTextClassification or str]`):
            Models, or their folders or ids on the Hub.
        combine (`str`, *optional*, defaults to `"scores"`):
            `"scores"` or `"ranks"`, see [`XMCEnsembleConfig`].
        weights (`Sequence[float]`, *optional*):
            Weight of each model; without them, and without `validation`, all weigh the same.
        validation (`datasets.Dataset`, *optional*):
            Documents with labels, in the columns of [`prepare_dataset`], on which the weights are chosen.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
        report (`Callable`, *optional*):
            Called with (stage, done, total).

    Returns:
        `tuple[XMCEnsemble, dict[str, Any]]`: the ensemble and, with `validation`, nDCG@5 there: of the ensemble and of
        each model alone.
    """
    if weights is not None and validation is not None:
        raise ValueError("Weights are given or chosen on validation documents: pass one of the two.")
    ensemble = XMCEnsemble.from_members(members, weights, combine)
    if validation is None:
        return ensemble, {}
    ensemble.config.weights, facts = choose_weights(ensemble, validation, num_threads, report)
    return ensemble, facts


@torch.no_grad()
def choose_weights(
    ensemble: XMCEnsemble, dataset: Dataset, num_threads: int | None = None, report: Progress | None = None
) -> tuple[list[float], dict[str, Any]]:
    """
    The weights with which an ensemble ranks documents best by nDCG@5.

    One model after the other is added, the same ones again and again: in each of twenty rounds the one that helps most
    or harms least. The weights are the shares in the best of the twenty sums, so that they do no worse than the best
    model alone, and a model that does not help gets none.

    Args:
        ensemble ([`XMCEnsemble`]):
            The ensemble.
        dataset (`datasets.Dataset`):
            Documents with labels.
        num_threads (`int`, *optional*):
            Threads to use; all cores by default.
        report (`Callable`, *optional*):
            Called with (stage, done, total).

    Returns:
        `tuple[list[float], dict[str, Any]]`: the weights; and nDCG@5 with them and of each model alone.
    """
    truth = ensemble.labels.encode(dataset, keep_unseen=True)
    if not (truth.indices < len(ensemble.labels)).any():
        raise ValueError("No validation document has a label of the models: weights cannot be chosen on them.")

    def ask_members(features: MemberFeatures) -> dict[str, np.ndarray]:
        found = ensemble.member_scores(features, 5, num_threads=num_threads)
        return {name: part.cpu().numpy() for name, part in zip(("scores", "indices"), found, strict=True)}

    parts = list(map_batches(ensemble, dataset, ask_members, num_threads=num_threads, report=report))
    scores, indices = (
        torch.from_numpy(np.concatenate([part[name] for part in parts], axis=1)) for name in ("scores", "indices")
    )
    count = len(ensemble.models)

    def measure(times: Sequence[int]) -> float:
        best = combine_members(scores, indices, [n / sum(times) for n in times], ensemble.config.combine, 5)
        return _ndcg(best.indices, truth)

    times = [0] * count
    alone = [measure([int(place == own) for place in range(count)]) for own in range(count)]
    best, chosen = -1.0, times
    for round_ in range(_ROUNDS):
        tried = [[n + (place == own) for place, n in enumerate(times)] for own in range(count)]
        values = alone if round_ == 0 else [measure(option) for option in tried]
        own = max(range(count), key=lambda place: values[place])
        times = tried[own]
        if values[own] > best:
            best, chosen = values[own], times
        if report is not None:
            report("weights", round_ + 1, _ROUNDS)
    weights = [round(n / sum(chosen), 4) for n in chosen]
    return weights, {f"validation_{_CHOSEN_BY}": best, f"validation_{_CHOSEN_BY}_of_members": alone}


def _ndcg(indices: torch.Tensor | None, truth: csr_matrix) -> float:
    assert indices is not None
    metrics = XMCMetrics(ks=(1, 5))
    metrics.update(indices.cpu().numpy(), truth)
    return metrics.compute()[_CHOSEN_BY]

"""Ensembles of trained models, and their last scorer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix

from ..ensemble_xmc import MemberFeatures, XMCEnsemble
from ..evaluation.metrics import XMCMetrics
from ..inference.predict import BATCH_SIZE, map_batches
from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime
from ..scorer import Scorer
from .scoring import MIN_DOCUMENTS, candidates_of, fit_scorer

_METRIC = "nDCG@5"


def make_ensemble(
    members: Sequence[XMCForTextClassification | str | os.PathLike],
    combine: str | None = None,
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
        combine (`str`, *optional*):
            `"scorer"`, `"scores"` or `"ranks"`, see [`XMCEnsembleConfig`]. `"scorer"` by default with `validation`,
            else `"scores"`.
        weights (`Sequence[float]`, *optional*):
            Weight of each model in the mean of `"scores"` or `"ranks"`; equal by default.
        validation (`datasets.Dataset`, *optional*):
            Documents with labels, in the columns of [`prepare_dataset`], that the scorer is fitted on: at least 200
            that no model was trained on.
        batch_size (`int`, *optional*, defaults to 32):
            Texts that pass through an encoder together.
        runtime ([`Runtime`], *optional*):
            Threads and progress callback.

    Returns:
        `tuple[XMCEnsemble, dict[str, Any]]`: the ensemble and, with `validation`, the nDCG@5 of the ensemble and of
        each model on these documents.
    """
    combine = combine or ("scores" if validation is None else "scorer")
    if (combine == "scorer") != (validation is not None):
        raise ValueError(
            f"`combine={combine!r}` {'needs' if validation is None else 'takes no'} `validation` documents."
        )
    if weights is not None and validation is not None:
        raise ValueError("Pass either `weights` or `validation`: the scorer has weights of its own.")
    if validation is None:
        return XMCEnsemble.from_members(members, weights, combine), {}
    ensemble = XMCEnsemble.from_members(members)
    scorer, results = fit_ensemble(ensemble, validation, batch_size, runtime)
    ensemble.config.combine, ensemble.config.weights, ensemble.scorer = "scorer", None, scorer
    return ensemble, results


@torch.no_grad()
def fit_ensemble(
    ensemble: XMCEnsemble, dataset: Dataset, batch_size: int = BATCH_SIZE, runtime: Runtime = Runtime()
) -> tuple[Scorer, dict[str, Any]]:
    """
    Fits a last scorer over the log-odds of the models, METHODS eq. 14, on documents with labels.

    Returns the scorer, and the nDCG@5 of the ensemble and of each model.
    """
    if len(dataset) < MIN_DOCUMENTS:
        raise ValueError(
            f"`validation` has {len(dataset)} documents, but a scorer needs {MIN_DOCUMENTS}. Pass more, or `weights`."
        )
    truth = ensemble.labels.encode(dataset, keep_unseen=True)
    if not (truth.indices < len(ensemble.labels)).any():
        raise ValueError("No document of `validation` has a label of the models, so a scorer cannot be fitted on it.")

    def score_members(features: MemberFeatures) -> dict[str, np.ndarray]:
        scores, indices = ensemble.member_scores(features, 5, num_threads=runtime.num_threads)
        return {"scores": scores.cpu().numpy(), "indices": indices.cpu().numpy()}

    chunks = list(map_batches(ensemble, dataset, score_members, batch_size, runtime))
    scores, indices = (
        torch.from_numpy(np.concatenate([chunk[name] for chunk in chunks], axis=1)) for name in ("scores", "indices")
    )
    parts, log_counts = ensemble.part_scores(scores, indices), ensemble.labels.log_counts
    scorer = fit_scorer(list(parts), [candidates_of(parts, len(log_counts))], truth, log_counts)
    best = _ndcg(scorer.predict(parts, log_counts, 5)[1], truth)
    alone = [_ndcg(part.labels, truth) for part in parts.values()]
    return scorer, {f"validation_{_METRIC}": best, f"validation_{_METRIC}_of_members": alone}


def _ndcg(labels: np.ndarray, truth: csr_matrix) -> float:
    metrics = XMCMetrics(ks=(5,))
    metrics.update(labels[:, :5], truth)
    return metrics.compute()[_METRIC]

"""Metrics of extreme multi-label classification for the `evaluate` library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import sparse

from hf_xmc.evaluation.metrics import XMCMetrics
from hf_xmc.hierarchy import Hierarchy

_DESCRIPTION = """
P@k, nDCG@k, R@k, RP@k, micro-F1@k and macro-F1@k of ranked label ids; with the training counts of the labels also the
propensity-scored PSP@k and PSnDCG@k and the coverage of tail labels; with their parents hierarchical precision, recall
and F1. Needs the package hf-xmc.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[list[int]]`):
        Predicted label ids of each document, best first. -1, or a shorter row, for missing labels.
    references (`list[list[int]]`):
        True label ids of each document. Ids from `len(counts)` on are labels unseen in training.
    counts (`list[int]`, *optional*):
        Number of training documents of each label.
    num_documents (`int`, *optional*):
        Number of training documents; required with `counts`.
    ks (`list[int]`, *optional*, defaults to `(1, 3, 5, 10)`):
        Cutoffs of the ranking. The longest row of predictions must reach the largest.
    a (`float`, *optional*, defaults to 0.55):
        Exponent of the propensity model.
    b (`float`, *optional*, defaults to 1.5):
        Offset of the propensity model.
    tail_max_count (`int`, *optional*, defaults to 5):
        A label with at most this many training documents is a tail label.
    parents (`list[list[int]]`, *optional*):
        Ids of the parents of each label, for the hierarchical hP@k, hR@k and hF1@k.

Returns:
    `dict[str, float]`: fractions between 0 and 1, `{"P@1": 0.83, ...}`.

Examples:

    >>> metric = evaluate.load("xmc_metrics")
    >>> metric.compute(predictions=[[2, 0, 1], [1, 0, 2]], references=[[2], [0, 2]], ks=[1, 3])["P@1"]
    0.5
"""


class XMCMetricsModule(evaluate.Metric):
    """[`~hf_xmc.evaluation.XMCMetrics`] as a metric of the `evaluate` library."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(
        self,
        predictions: Sequence[Sequence[int]],
        references: Sequence[Sequence[int]],
        counts: Sequence[int] | None = None,
        parents: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> dict[str, float]:
        hierarchy = None if parents is None else Hierarchy(parents)
        metrics = XMCMetrics(counts=counts, hierarchy=hierarchy, **options)
        lengths, ids = _flatten(predictions)
        indices = np.full((len(lengths), lengths.max(initial=0)), -1, np.int64)
        indices[np.arange(indices.shape[1]) < lengths[:, None]] = ids
        lengths, labels = _flatten(references)
        if labels.min(initial=0) < 0:
            raise ValueError(
                f"`references` contains the label id {labels.min()}. Ids start at 0; use an empty list for no label."
            )
        # Without counts, the number of labels is not known: take those that occur.
        seen = ids.max(initial=-1) + 1 if counts is None else len(counts)
        width = max(int(seen), int(labels.max(initial=-1)) + 1)
        offsets = np.append(0, np.cumsum(lengths))
        truth = sparse.csr_matrix((np.ones(len(labels), bool), labels, offsets), shape=(len(lengths), width))
        metrics.update(indices, truth)
        return metrics.compute()


def _flatten(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Length of each row, and all their numbers one after another."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return lengths, np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))

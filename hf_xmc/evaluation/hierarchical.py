"""Counts of the hierarchical metrics: labels together with their ancestors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..hierarchy import Hierarchy


def count_with_ancestors(
    hierarchy: Hierarchy, ks: Sequence[int], indices: np.ndarray, rows: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Counts true and predicted labels of documents with all their ancestors.

    Args:
        hierarchy ([`Hierarchy`]): The hierarchy. Labels beyond it have no ancestors.
        ks (`Sequence[int]`): Lengths of the ranking.
        indices (`np.ndarray`): Predicted labels of each document, padded with -1.
        rows (`np.ndarray`): The document of each true label.
        labels (`np.ndarray`): The true labels.

    Returns:
        `tuple[np.ndarray, np.ndarray, np.ndarray]`: for each k, sums over the documents: the sizes of the true sets,
        of the predicted sets, and of what they share.
    """
    width = max(len(hierarchy), int(indices.max(initial=0)) + 1, int(labels.max(initial=0)) + 1)
    true = _with_ancestors(hierarchy, rows, labels, width)
    predicted, shared = np.zeros(len(ks), np.int64), np.zeros(len(ks), np.int64)
    for i, k in enumerate(ks):
        places = np.nonzero(indices[:, :k] >= 0)
        found = _with_ancestors(hierarchy, places[0], indices[places].astype(np.int64), width)
        predicted[i] = len(found)
        shared[i] = len(np.intersect1d(found, true, assume_unique=True))
    return np.full(len(ks), len(true), np.int64), predicted, shared


def _with_ancestors(hierarchy: Hierarchy, rows: np.ndarray, labels: np.ndarray, width: int) -> np.ndarray:
    """The labels of documents and their ancestors, as unique numbers `row * width + label`."""
    known = labels < len(hierarchy)
    reached = hierarchy.closure[labels[known]]
    pairs = np.repeat(rows[known], np.diff(reached.indptr)) * width + reached.indices
    return np.unique(np.concatenate([pairs, rows[~known] * width + labels[~known]]))

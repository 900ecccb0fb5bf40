"""Training batches of one level of the label tree: targets, candidates, loss weights, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..text_encoder import pad_batch


class LevelData:
    """
    Targets, candidates and loss weights of one level, counted from 1, for every training document.

    - `counts`: `R^(t)` of XR-Transformer, eq. 6: `(documents, nodes)` true nodes with the number of true labels below.
    - `offsets`: first node under each node of the previous trained level, see [`LabelTree.descendants`].
    - `shortlist`: `(documents, nodes of the previous trained level)`: the descendants of these nodes are the
      candidates. By default all nodes of the level are candidates.
    - `cost_sensitive`: a true node is weighted by its share of the document's true labels (XR-Transformer, eq. 6).
    - `negative_weight`: loss weight of false candidates; by default that of an average true node.
    - `in_pass`: the model finds the candidates in the forward pass. A batch then has true nodes only.
    - `beam_size`: nodes of the previous level whose children become candidates in the forward pass.
    """

    def __init__(
        self,
        level: int,
        counts: csr_matrix,
        offsets: np.ndarray,
        shortlist: csr_matrix | None = None,
        cost_sensitive: bool = False,
        negative_weight: float | None = None,
        in_pass: bool = False,
        beam_size: int | None = None,
    ) -> None:
        self.level, self.counts, self.offsets, self.shortlist = level, counts, offsets, shortlist
        self.in_pass, self.beam_size = in_pass, beam_size
        self.cost_sensitive = cost_sensitive
        labelled = np.count_nonzero(np.diff(counts.indptr))
        self.mean_true = counts.nnz / labelled if labelled else 1.0
        if negative_weight is None:
            negative_weight = 1 / self.mean_true if cost_sensitive else 1.0
        self.negative_weight = negative_weight

    def batch(self, documents: np.ndarray) -> dict[str, Any]:
        """
        Inputs of the head for some documents.

        Returns `targets` and `weights`, float32 `(documents, nodes)`, and, unless all nodes of the level are
        candidates, `nodes`, int64 `(nodes,)`: the ascending union of the documents' candidates. With `in_pass`
        `true_nodes` and `true_weights` of shape `(documents, most)`, padded with -1, `negative_weight` and
        `beam_size`.
        """
        true = self.counts[documents]
        if self.in_pass:
            return self._true_batch(true)
        rows = np.repeat(np.arange(len(documents)), np.diff(true.indptr))
        columns, counts = true.indices, true.data
        if self.shortlist is None:
            nodes = None
            weights = np.full((len(documents), self.counts.shape[1]), self.negative_weight, dtype=np.float32)
        else:
            candidate_rows, candidates = self._candidates(documents)
            nodes, places = np.unique(candidates, return_inverse=True)
            is_candidate = np.zeros((len(documents), len(nodes) + 1), dtype=bool)
            is_candidate[candidate_rows, places] = True
            weights = is_candidate[:, :-1] * np.float32(self.negative_weight)
            # Without teacher forcing a true node may not be a candidate of its document, or of any document.
            columns = np.where(np.isin(columns, nodes), np.searchsorted(nodes, columns), len(nodes))
            kept = is_candidate[rows, columns]
            rows, columns, counts = rows[kept], columns[kept], counts[kept]
        targets = np.zeros_like(weights)
        targets[rows, columns] = 1
        if self.cost_sensitive:
            sums = np.asarray(true.sum(axis=1)).ravel()
            weights[rows, columns] = counts / sums[rows]
        else:
            weights[rows, columns] = 1
        batch = {"targets": targets, "weights": weights}
        return batch if nodes is None else {"nodes": nodes, **batch}

    def _true_batch(self, true: csr_matrix) -> dict[str, Any]:
        lengths = np.diff(true.indptr)
        places = np.arange(lengths.max(initial=0)) < lengths[:, None]
        nodes, weights = np.full(places.shape, -1, dtype=np.int64), np.ones(places.shape, dtype=np.float32)
        nodes[places] = true.indices
        if self.cost_sensitive:
            weights[places] = true.data / np.repeat(np.asarray(true.sum(axis=1)).ravel(), lengths)
        batch = {"true_nodes": nodes, "true_weights": weights, "negative_weight": self.negative_weight}
        return batch if self.beam_size is None else {**batch, "beam_size": self.beam_size}

    def _candidates(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row and node of every candidate, row by row."""
        assert self.shortlist is not None
        parents = self.shortlist[documents]
        rows = np.repeat(np.arange(len(documents)), np.diff(parents.indptr))
        first = self.offsets[parents.indices]
        sizes = self.offsets[parents.indices + 1] - first
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(rows, sizes), np.repeat(first, sizes) + within


class LevelCollator:
    """
    Data collator: pads tokenised documents and adds the targets and candidates of the levels in training.

    It runs in the workers of the `DataLoader`, beside the training step. Fine-tuning reads the first window of a
    document. The levels are trained in the same steps, coarsest first; with `joint`, the model takes all of them in
    one forward pass, otherwise there is one.
    """

    def __init__(self, padding: int, levels: Sequence[LevelData], joint: bool) -> None:
        self.padding, self.levels, self.joint = padding, levels, joint

    def __call__(self, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids, mask = pad_batch([document["token_ids"][0] for document in documents], self.padding)
        rows = np.array([document["document"] for document in documents])
        batches = [{"level": data.level, **_as_tensors(data.batch(rows))} for data in self.levels]
        inputs = {"levels": batches} if self.joint else batches[0]
        return {"input_ids": ids, "attention_mask": mask, **inputs}


def _as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}


def pass_batches(
    lengths: Sequence[int], batch_size: int, steps: tuple[int, int], process: tuple[int, int], seed: int | None
) -> list[list[int]]:
    """
    Batches of one pass over the documents for one process.

    Documents of similar length (in tokens) share a step. All processes get equally many batches, and a step has the
    same documents however many processes share it. `steps` is the number of steps of the pass, and of batches of each
    process in a step (gradient accumulation), `process` the index of the process and the number of processes. Without
    a `seed`, the order is that of the dataset.
    """
    (num_steps, accumulation), (index, count) = steps, process
    per_step = batch_size * accumulation * count
    if seed is None:
        order = np.arange(len(lengths))
    else:
        generator = torch.Generator().manual_seed(seed)
        order = np.array(get_length_grouped_indices(list(lengths), per_step, generator=generator))
    batches: list[list[int]] = []
    for step in range(num_steps):
        documents = order[step * per_step : (step + 1) * per_step]
        if len(documents) < accumulation * count:  # every batch needs at least one document
            documents = np.resize(documents, accumulation * count)
        parts = np.array_split(documents, accumulation * count)
        batches.extend(part.tolist() for part in parts[index::count])
    return batches

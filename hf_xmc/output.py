"""The output of models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers.utils import ModelOutput


@dataclass
class XMCOutput(ModelOutput):
    """
    Output of a model: the best labels of each document or, in training, the logits of nodes of one level.

    Args:
        loss (`torch.FloatTensor` of shape `()`):
            Loss, if targets were given.
        logits (`torch.FloatTensor` of shape `(batch, nodes)`):
            Logits of the nodes of a level.
        scores (`torch.FloatTensor` of shape `(batch, top_k)`):
            Scores between 0 and 1, best first; 0 where fewer labels were found.
        indices (`torch.LongTensor` of shape `(batch, top_k)`):
            Label ids; -1 where fewer labels were found.
        vectors (`torch.FloatTensor` of shape `(batch, dimensions)`):
            Document vectors, if label texts were given.
        label_vectors (`torch.FloatTensor` of shape `(labels, dimensions)`):
            Vectors of the label texts.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    vectors: torch.Tensor | None = None
    label_vectors: torch.Tensor | None = None

    @classmethod
    def from_numpy(cls, scores: np.ndarray, indices: np.ndarray, device: torch.device) -> XMCOutput:
        """Returns the output with these scores and label ids, on a device."""
        return cls(scores=torch.from_numpy(scores).to(device), indices=torch.from_numpy(indices).to(device))


def padded(scores: torch.Tensor, ids: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scores and ids of shape `(batch, top_k)`: up to so many, followed by 0 and -1."""
    padding = (0, top_k - scores.shape[1])
    return functional.pad(scores, padding), functional.pad(ids, padding, value=-1)


def mix_scores(
    ranker_scores: torch.Tensor, head_scores: torch.Tensor, indices: torch.Tensor, heads_weight: float, top_k: int
) -> XMCOutput:
    """Returns the best labels by the weighted mean of two scores of `indices`, which are padded with -1."""
    mixed = (1 - heads_weight) * ranker_scores + heads_weight * head_scores
    scores, best = mixed.masked_fill(indices < 0, -1).topk(min(top_k, mixed.shape[1]), dim=1)
    scores, indices = padded(scores.clamp(min=0), indices.gather(1, best), top_k)
    return XMCOutput(scores=scores, indices=indices)

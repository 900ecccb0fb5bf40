"""What a model says of documents, and how the scores of two sides become one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers.utils import ModelOutput


@dataclass
class XMCOutput(ModelOutput):
    """
    Best labels of each document, best first; or, in training, what the head of one level says.

    Args:
        loss (`torch.FloatTensor` of shape `()`):
            Loss of the level, where targets were given.
        margins (`torch.FloatTensor` of shape `(batch, nodes)`):
            Margins of the nodes of the level.
        scores (`torch.FloatTensor` of shape `(batch, top_k)`):
            Scores between 0 and 1; 0 where fewer labels were found.
        indices (`torch.LongTensor` of shape `(batch, top_k)`):
            Label ids; -1 where fewer labels were found.
    """

    loss: torch.Tensor | None = None
    margins: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    indices: torch.Tensor | None = None


def mix_scores(
    ranked: torch.Tensor, own: torch.Tensor, indices: torch.Tensor, heads_share: float, top_k: int
) -> XMCOutput:
    """
    The best labels by the weighted mean of two scores.

    Args:
        ranked (`torch.Tensor`): Scores of the ranker.
        own (`torch.Tensor`): Scores of the heads.
        indices (`torch.Tensor`): The labels, -1 for none.
        heads_share (`float`): Weight of the heads, 0 to 1.
        top_k (`int`): Labels per document.
    """
    mixed = (1 - heads_share) * ranked + heads_share * own
    scores, best = mixed.masked_fill(indices < 0, -1).topk(min(top_k, mixed.shape[1]), dim=1)
    lacking = (0, top_k - scores.shape[1])
    return XMCOutput(
        scores=functional.pad(scores.clamp(min=0), lacking),
        indices=functional.pad(indices.gather(1, best), lacking, value=-1),
    )

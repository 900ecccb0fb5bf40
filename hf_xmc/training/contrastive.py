"""Fine-tuning of the encoder on pairs of a document and the text of one of its labels, with a head of the labels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix
from torch.nn import functional

from ..evaluation import XMCMetrics
from ..inference.predict import evaluate_model
from ..label_vectors import LabelVectors
from ..modeling_heads import LevelHead
from ..modeling_xmc import XMCForTextClassification
from ..output import XMCOutput
from ..text_encoder import pad_batch
from .context import RunContext
from .head_prior import fit_line, sample_rows
from .levels import Levels

logger = logging.getLogger(__name__)

TEMPERATURE = 0.05
# The positive of a document is drawn with a probability proportional to the frequency of the label to this power.
FREQUENCY_POWER = -0.5
# Negatives of a head with sparse gradients. They are drawn for each pass, so that all processes have the same.
SAMPLED_NODES = 8192


def make_levels(context: RunContext) -> Levels:
    """Returns what is fine-tuned: heads of the levels of the tree, or the encoder alone on the texts of the labels."""
    if context.args.level_objective == "label_texts":
        if any(context.readable_texts()):
            levels = LabelTexts(context)
            if levels.schedule.limit:
                context.text_uses["fine-tuning"] = None
            return levels
        logger.warning("`level_objective='label_texts'`: the labels have no texts, so heads are trained.")
    return Levels(context)


class LabelTexts(Levels):
    """
    Fine-tuning of the encoder on the texts of the labels, in place of the levels of the tree.

    The encoder reads documents and label texts. A document and one of its labels form a pair, whose cosine competes
    with those of the document and the other labels of the batch, see [`decoupled_softmax`]. A head of the labels is
    trained in the same steps by the same loss. It starts from the vectors of the labels, and reads no texts.
    """

    def _choose_groups(self) -> list[list[int]]:
        model, targets = self.context.model, self.context.targets
        texts = model.checked_labels().readable_texts()
        has_text = np.array([bool(text) for text in texts])
        if not has_text.all():
            logger.info("%d of %d labels have no text: fine-tuning skips them.", (~has_text).sum(), len(texts))
        self.tokens = [windows[0] for windows in model.tokenize(texts)]
        frequency = np.maximum(np.bincount(targets.indices, minlength=len(texts)), 1)
        self._weights = has_text * frequency.astype(np.float64) ** FREQUENCY_POWER
        if self._has_heads():
            super()._choose_groups()
        return [[]]  # one group, without level data

    def _has_heads(self) -> bool:
        fits = self.tree.num_labels <= self.arguments.max_nodes
        return self.context.args.predict_with == "all" and self.arguments.bootstrap and fits

    @property
    def level(self) -> int:
        """The level of the labels."""
        return self.tree.depth

    @property
    def _trained_head(self) -> LevelHead | None:
        """The head that is trained with the encoder."""
        return self.context.model.head(self.level) if self.level in self.levels else None  # type: ignore[return-value]

    @property
    def name(self) -> str:
        """Name for the progress bar and messages."""
        return "label texts"

    def begin_group(self, index: int) -> None:
        """Initialises the head with the vectors of the labels."""
        super().begin_group(index)
        head = self._trained_head
        if head is not None and self.schedule.limit:
            rows = self._prior(self.level, self.context.vectors()).rows
            with torch.no_grad():
                head.weight.copy_(torch.from_numpy(rows / TEMPERATURE))
                head.bias.zero_()

    def complete(self) -> None:
        """Ends fine-tuning; the heads that were not trained are initialised: further parts for the last scorer."""
        super().complete()
        for index, level in enumerate(self.levels):
            head = self._trained_head
            if level == self.level and head is not None and self.schedule.limit:
                self._calibrate(head)
                self.context.model.config.trained_levels = index + 1
            else:
                self._begin_level(index)

    def _calibrate(self, head: LevelHead) -> None:
        """Scales the logits of a head, which are trained by their differences only, to those of probabilities."""
        context, loss = self.context, self.context.model.config.head_loss
        chosen = sample_rows(len(context.dataset), head.num_nodes, context.args.seed)
        with torch.no_grad():
            vectors = torch.from_numpy(context.vectors()[chosen]).to(head.weight.device)
            logits = head(vectors).double().cpu().numpy()
            signs = np.where(self.counts[self.level - 1][chosen].toarray() > 0, 1.0, -1.0)
            scale, bias = fit_line(logits.ravel(), signs.ravel(), 1.0, loss)
            head.weight.mul_(scale)
            head.bias.mul_(scale).add_(bias)

    def collator(self, pass_number: int) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
        """Returns what makes the batches of a pass; each pass draws other positives."""
        args = self.context.args
        seed = args.seed if args.data_seed is None else args.data_seed
        drawn = draw_positives(self.context.targets, self._weights, np.random.default_rng([seed, pass_number]))
        head = self._trained_head
        if head is None:
            return LabelTextCollator(self.padding, self.tokens, drawn)
        sampled = None
        if head.sparse:
            generator, size = np.random.default_rng([seed, pass_number, 1]), min(head.num_nodes, SAMPLED_NODES)
            sampled = np.sort(generator.choice(head.num_nodes, size, replace=False))
        return LabelTextCollator(self.padding, self.tokens, drawn, self.level, self.counts[self.level - 1], sampled)

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> XMCOutput:
        """Computes the loss of a batch, whose labels are those of all processes."""
        rows, labels, drawn = (inputs.pop(name) for name in ("documents", "labels_read", "drawn"))
        true, left_out = (inputs.pop(name, None) for name in ("true_nodes", "left_out"))
        output = model(**inputs)
        processes = self.context.runtime.cache.processes
        rows, labels, drawn = (processes.gather_rows(own).cpu().numpy() for own in (rows, labels, drawn))
        vectors, label_vectors = (processes.gather_rows(own) for own in (output.vectors, output.label_vectors))
        loss = batch_loss(vectors, label_vectors, labels, drawn, self.context.targets[rows])
        # Every process has the loss of all documents, but only the gradients of its own vectors, of which the mean is
        # taken.
        output.loss = loss + (processes.count - 1) * (loss - loss.detach())
        if true is not None:
            output.loss = output.loss + decoupled_softmax(output.logits.float(), true, left_out)
        return output

    def evaluate(
        self, model: XMCForTextClassification, dataset: Dataset, ks: Sequence[int] | None, **options: Any
    ) -> XMCMetrics:
        """Evaluates the ranking of the labels by the cosines of their texts with the document."""
        vectors = model.embed([[tokens] for tokens in self.tokens], options["batch_size"])
        vectors[self._weights == 0] = 0
        before = model.label_vectors
        model.label_vectors = LabelVectors(len(vectors), dense={"text_vector": vectors.astype(np.float16)})
        try:
            return evaluate_model(model, dataset, ks, predict_with="text_vector", **options)
        finally:
            model.label_vectors = before


class LabelTextCollator:
    """
    Data collator: pads documents and the texts of the labels that are drawn for them.

    `padding` is the id of the padding token, `tokens` are those of each label text, `drawn` is the label drawn for
    each document, -1 for none. If labels have a head, `level` is theirs in the tree, `counts` are the true nodes of
    the documents, `(documents, nodes)`, and `sampled` its negatives, ascending; all nodes by default.
    """

    def __init__(
        self,
        padding: int,
        tokens: Sequence[Sequence[int]],
        drawn: np.ndarray,
        level: int = 0,
        counts: csr_matrix | None = None,
        sampled: np.ndarray | None = None,
    ) -> None:
        self.padding, self.tokens, self.drawn = padding, tokens, drawn
        self.level, self.counts, self.sampled = level, counts, sampled

    def __call__(self, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rows = np.array([document["document"] for document in documents])
        drawn = self.drawn[rows]
        labels = np.unique(drawn[drawn >= 0])
        if not len(labels):
            labels = np.zeros(1, dtype=np.int64)  # the encoder needs a text
        ids, mask = pad_batch([document["token_ids"][0] for document in documents], self.padding)
        label_ids, label_mask = pad_batch([self.tokens[label] for label in labels], self.padding)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "label_input_ids": label_ids,
            "label_attention_mask": label_mask,
            "documents": torch.from_numpy(rows),
            "labels_read": torch.from_numpy(labels),
            "drawn": torch.from_numpy(drawn),
            **self._head_inputs(rows),
        }

    def _head_inputs(self, rows: np.ndarray) -> dict[str, Any]:
        """The nodes that the head scores, which of them are true for a document, and which are not its negatives."""
        if self.counts is None:
            return {}
        true = self.counts[rows]
        if self.sampled is None:
            is_true = torch.from_numpy(true.toarray() > 0)
            return {"level": self.level, "true_nodes": is_true, "left_out": is_true}
        nodes = np.union1d(self.sampled, true.indices)
        is_true = torch.from_numpy(true[:, nodes].toarray() > 0)
        others = torch.from_numpy(~np.isin(nodes, self.sampled))
        return {
            "level": self.level,
            "nodes": torch.from_numpy(nodes.astype(np.int64)),
            "true_nodes": is_true,
            "left_out": is_true | others,
        }


def draw_positives(targets: csr_matrix, weights: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """
    Draws a true label of each document in proportion to the weights of the labels; -1 where none is above 0.

    `targets` is the `(documents, labels)` indicator of the true labels. Each document takes one random number.
    """
    sums = np.concatenate([[0.0], np.cumsum(weights[targets.indices])])
    begin, end = targets.indptr[:-1], targets.indptr[1:]
    points = sums[begin] + generator.random(targets.shape[0]) * (sums[end] - sums[begin])
    # The entry whose interval contains the point; rounding must not lead into the next document.
    entries = np.clip(np.searchsorted(sums, points, side="right") - 1, begin, end - 1)
    drawn = np.full(targets.shape[0], -1, dtype=np.int64)
    has_weight = sums[end] > sums[begin]
    drawn[has_weight] = targets.indices[entries[has_weight]]
    return drawn


def batch_loss(
    vectors: torch.Tensor, label_vectors: torch.Tensor, labels: np.ndarray, drawn: np.ndarray, targets: csr_matrix
) -> torch.Tensor:
    """
    The loss of a batch, see [`decoupled_softmax`], from the vectors of documents and of the texts of `labels`.

    A label that several processes have read counts once. `drawn` is the positive of each document, -1 for none,
    `targets` the `(documents, labels)` indicator of all their true labels.
    """
    labels, first = np.unique(labels, return_index=True)
    true = torch.from_numpy(targets[:, labels].toarray() > 0).to(vectors.device)
    positives = torch.from_numpy(drawn[:, None] == labels).to(vectors.device)
    with torch.autocast(vectors.device.type, enabled=False):
        scores = vectors @ label_vectors[torch.from_numpy(first).to(vectors.device)].T / TEMPERATURE
        return decoupled_softmax(scores, positives, true)


def decoupled_softmax(scores: torch.Tensor, positives: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """
    Loss of label-aware fine-tuning: each positive competes with the labels that are false for its document.

    It is the mean over documents of `-1/|P| sum_{l in P} log(exp(s_l) / (exp(s_l) + sum_k exp(s_k)))`, where `k` runs
    over the labels that are not true. Documents without positives are left out. All arguments are `(documents,
    labels)`: cosines over the temperature, the positives `P` of a document, and all its true labels.
    """
    # A finite number, as the gradient would not be one where all labels are true.
    negatives = scores.masked_fill(true, torch.finfo(scores.dtype).min / 2).logsumexp(dim=1, keepdim=True)
    counts = positives.sum(dim=1)
    losses = (functional.softplus(negatives - scores) * positives).sum(dim=1) / counts.clamp(min=1)
    return losses.sum() / (counts > 0).sum().clamp(min=1)

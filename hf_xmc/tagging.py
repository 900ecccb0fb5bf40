"""Tagging documents by the names of their labels, whatever model does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scipy.sparse import csr_matrix

from .features import Features
from .labels import Labels
from .outputs import XMCOutput


class TextTagger:
    """
    Mixin for models: from documents to names of labels.

    A model has `labels`, makes features with `featurize` (of texts) and `prepare_vectors` (of vectors), and takes them
    when it is called.
    """

    labels: Labels | None
    featurize: Any
    prepare_vectors: Any
    __call__: Any
    eval: Any
    save_pretrained: Any

    @torch.no_grad()
    def predict(
        self,
        documents: Sequence[str] | Features | csr_matrix,
        top_k: int | None = None,
        beam_size: int | None = None,
        batch_size: int = 4096,
        num_threads: int | None = None,
        predict_with: str | None = None,
    ) -> list[list[tuple[str, float]]]:
        """
        The best labels of each document by name.

        Args:
            documents (`Sequence[str]`, [`Features`] or `csr_matrix`):
                Texts, or vectors such as the model was trained on (they are scaled to unit length here).
            top_k (`int`, *optional*):
                Labels per document; that of the configuration by default.
            beam_size (`int`, *optional*):
                Nodes kept per level; that of the configuration by default. 0 keeps all: exact search.
            batch_size (`int`, *optional*, defaults to 4096):
                Documents that are worked on together. It changes memory and speed, not results.
            num_threads (`int`, *optional*):
                Threads to use; all cores by default.
            predict_with (`str`, *optional*):
                `"ranker"`, `"heads"` or `"both"`; that of the configuration by default.

        Returns:
            `list[list[tuple[str, float]]]`: (label, score) pairs of each document, best first. There are fewer than
            `top_k` where the search reached fewer labels.
        """
        if isinstance(documents, (str, bytes)):
            raise TypeError("`documents` is one text, not several. Pass a list: `[text]`.")
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, not {batch_size}.")
        if isinstance(documents, csr_matrix):
            documents = Features(documents)
        results: list[list[tuple[str, float]]] = []
        for start in range(0, len(documents), batch_size):
            part = documents[start : start + batch_size]
            features = self.prepare_vectors(part) if isinstance(part, Features) else self.featurize(part, num_threads)
            results.extend(self.name_labels(self(features, top_k, beam_size, num_threads, predict_with)))
        return results

    def name_labels(self, output: XMCOutput) -> list[list[tuple[str, float]]]:
        """The (label, score) pairs of an output, best first; empty places are left out."""
        if self.labels is None:
            raise ValueError("The model has no labels. Train it with `XMCTrainer`, or load a trained one.")
        names = self.labels.names
        assert output.scores is not None and output.indices is not None
        rows = zip(output.indices.tolist(), output.scores.tolist(), strict=True)
        return [[(names[i], score) for i, score in zip(*row, strict=True) if i >= 0] for row in rows]

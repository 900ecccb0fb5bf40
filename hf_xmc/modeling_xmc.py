"""Extreme multi-label text classifiers: encoder, label tree, linear ranker and label names as one model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer

from .configuration_xmc import SelfContainedConfig, XMCConfig
from .features import Features
from .knn_ranker import KNNRanker
from .label_tree import LabelTree
from .labels import Labels
from .linear_ranker import Beam, LinearRanker
from .modeling_heads import Head, LevelHeads
from .modeling_utils import PredictMixin, XMCOutput, XMCPreTrainedModel, mix_scores
from .text_encoder import (
    default_pooling,
    load_encoder,
    make_encoder,
    pad_batch,
    padding_id,
    pool,
    position_limit,
    set_dropout,
    tokenize,
)
from .tfidf import TfidfFeaturizer

PREDICT_WITH = ("ranker", "heads", "both")

# Least number of labels that ranker and heads put forward where both predict.
_CANDIDATES = (100, 20)
# Documents that are sorted by length together before they are put into batches.
_SORTED_TOGETHER = 4096


class XMCForTextClassification(PredictMixin, XMCPreTrainedModel):
    """
    Tags text (or vectors) with a few of very many labels.

    A model without an encoder is a linear tagger: TF-IDF features and a tree-structured linear ranker. One with an
    encoder has a head per trained level of the label tree, and its ranker sees TF-IDF and the encoder's vector side by
    side. A new model has no labels; [`XMCTrainer`] adds what is missing.

    Args:
        config ([`XMCConfig`]):
            Configuration.
        labels ([`Labels`], *optional*):
            Names and training counts of the labels.
        label_tree ([`LabelTree`], *optional*):
            The label hierarchy; that of the ranker by default.
        tfidf ([`TfidfFeaturizer`], *optional*):
            Makes the sparse features of text. A model without takes vectors only, or has an encoder.
        ranker ([`LinearRanker`] or [`KNNRanker`], *optional*):
            The linear models of the tree's nodes, or the training documents themselves.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the encoder.

    Example:

    ```python
    model = XMCForTextClassification.from_pretrained("my-tagger")
    model.predict(["Prospects for renewable energy education in Jordan"], top_k=3)
    # [[('renewable energy sources', 0.83), ('Jordan', 0.71), ('energy policy', 0.35)]]
    ```
    """

    def __init__(
        self,
        config: XMCConfig,
        labels: Labels | None = None,
        label_tree: LabelTree | None = None,
        tfidf: TfidfFeaturizer | None = None,
        ranker: LinearRanker | KNNRanker | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(config)
        self.encoder = None if config.encoder_config is None else make_encoder(config.encoder_config)
        self.heads = LevelHeads(config, self.vector_size)
        self.labels = labels
        self.label_tree = ranker.tree if label_tree is None and ranker is not None else label_tree
        self.tfidf = tfidf
        self.ranker = ranker
        self.tokenizer = tokenizer
        # Precision in which `embed` runs the encoder: that of its weights, unless training in mixed precision sets it.
        self.autocast_dtype: torch.dtype | None = None
        # transformers asks a model's parameters for its device and dtype and writes no weight file for a model without
        # any. A linear tagger has this one alone.
        self.anchor = nn.Parameter(torch.ones(()), requires_grad=False)
        self.post_init()

    @classmethod
    def from_encoder(
        cls,
        name_or_path: str | os.PathLike,
        *,
        pooling: str | None = None,
        dropout: float | None = None,
        attn_implementation: str | None = None,
        labels: Labels | None = None,
        label_tree: LabelTree | None = None,
        tfidf: TfidfFeaturizer | None = None,
        hub_kwargs: dict[str, Any] | None = None,
        **config_kwargs: Any,
    ) -> XMCForTextClassification:
        """
        A new model on top of a pretrained encoder.

        Args:
            name_or_path (`str` or `os.PathLike`):
                Folder or Hub id of any encoder that `AutoModel` loads, with its tokenizer.
            pooling (`str`, *optional*):
                `"mean"`, `"cls"` or `"last"`; by default what suits the encoder.
            dropout (`float`, *optional*):
                Dropout inside the encoder in training; its own by default.
            attn_implementation (`str`, *optional*):
                How the encoder computes attention, such as `"sdpa"` or `"flash_attention_2"`.
            labels ([`Labels`], *optional*): Names of the labels.
            label_tree ([`LabelTree`], *optional*): The label hierarchy.
            tfidf ([`TfidfFeaturizer`], *optional*): Fitted sparse features.
            hub_kwargs (`dict`, *optional*):
                `revision`, `token`, `cache_dir`, `trust_remote_code` and the like.
            config_kwargs:
                Further fields of [`XMCConfig`], such as `max_length`.
        """
        hub_kwargs = dict(hub_kwargs or {})
        try:
            encoder_config = AutoConfig.from_pretrained(name_or_path, **hub_kwargs)
            if isinstance(encoder_config, SelfContainedConfig):
                raise ValueError("it is a model with labels, not an encoder.")
            if dropout is not None:
                set_dropout(encoder_config, dropout)
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, **hub_kwargs)
            attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
            encoder = load_encoder(name_or_path, config=encoder_config, **attention, **hub_kwargs)
        except (ImportError, OSError, ValueError) as error:
            raise OSError(
                f"The encoder `{name_or_path}` cannot be loaded: {error} Pass the folder or the Hub id of a model "
                "with config.json, weights and tokenizer."
            ) from error
        pooling = pooling or default_pooling(name_or_path, encoder_config, **hub_kwargs)
        config = XMCConfig(encoder_config=encoder_config, pooling=pooling, **config_kwargs)
        model = cls(config, labels=labels, label_tree=label_tree, tfidf=tfidf, tokenizer=tokenizer)
        model.encoder = encoder
        model.check_length()
        return model

    def check_length(self) -> None:
        """Raises where the texts are to be longer than the encoder can read."""
        limit = position_limit(self.config.encoder_config, self.tokenizer)
        if limit is not None and self.config.max_length > limit:
            raise ValueError(
                f"`max_length` is {self.config.max_length}, but the encoder reads at most {limit} tokens. Set at most "
                f"that, with `long_text='windows'` if texts are longer."
            )

    def add_heads(
        self,
        levels: Sequence[int],
        bottleneck: int | None = None,
        tails: Sequence[int] | None = None,
        shrink: float = 2.0,
    ) -> None:
        """
        Gives levels of the tree a new head each, which says nothing yet.

        Args:
            levels (`Sequence[int]`):
                Levels, counted from 1, ascending.
            bottleneck (`int`, *optional*): See `head_bottleneck` of [`XMCConfig`].
            tails (`Sequence[int]`, *optional*): See `head_tails` of [`XMCConfig`].
            shrink (`float`, *optional*, defaults to 2.0): See `head_shrink` of [`XMCConfig`].
        """
        if self.encoder is None or self.label_tree is None:
            raise ValueError("Heads need an encoder and a label tree.")
        config = self.config
        config.head_levels, config.level_sizes, config.trained_levels = list(levels), self.label_tree.level_sizes, 0
        config.head_bottleneck, config.head_shrink = bottleneck, shrink
        config.head_tails = None if tails is None else list(tails)
        self.heads = LevelHeads(config, self.vector_size).to(self.device)

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """
        Vectors of unit length of tokenised texts.

        Args:
            input_ids (`torch.Tensor` of shape `(batch, tokens)`):
                Token ids.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`):
                1 for tokens, 0 for padding.
        """
        if self.encoder is None:
            raise ValueError("This is a linear tagger: it has no encoder.")
        layers = self.config.pooling_layers
        output = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **({"output_hidden_states": True} if layers > 1 else {}),
        )
        states = output.hidden_states[-layers:] if layers > 1 else (output[0],)
        return pool(states, attention_mask, self.config.pooling)

    def tokenize(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Token ids of each text: one window or, with `long_text="windows"`, several."""
        config = self.config
        return tokenize(texts, self.tokenizer, config.max_length, config.long_text, config.max_windows)

    @torch.no_grad()
    def embed(
        self,
        documents: Sequence[Any],
        batch_size: int = 32,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """
        The encoder's vectors of documents, float32 of unit length.

        Args:
            documents (`Sequence[str]` or `Sequence[list[list[int]]]`):
                Texts, or what [`~XMCForTextClassification.tokenize`] made of them.
            batch_size (`int`, *optional*, defaults to 32):
                Windows that go through the encoder together. Those of similar length do, to save padding.
            progress (`Callable[[int], None]`, *optional*):
                Called with the number of documents done.
        """
        was_training = self.training
        self.eval()
        mixed = torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
        vectors = np.zeros((len(documents), self.vector_size), dtype=np.float32)
        padding = padding_id(self.config.encoder_config, self.tokenizer)
        for start in range(0, len(documents), _SORTED_TOGETHER):
            part = list(documents[start : start + _SORTED_TOGETHER])
            windows = self.tokenize(part) if part and isinstance(part[0], str) else part
            owner = np.repeat(np.arange(len(part)), [len(own) for own in windows])
            flat = [window for own in windows for window in own]
            order = np.argsort([-len(window) for window in flat], kind="stable")
            for first in range(0, len(order), batch_size):
                chosen = order[first : first + batch_size]
                ids, mask = pad_batch([flat[i] for i in chosen], padding)
                with mixed:
                    encoded = self.encode(ids.to(self.device), mask.to(self.device)).cpu().numpy()
                # Windows count by their length, so that a last short one does not weigh as much as a full one.
                lengths = np.array([[len(flat[i])] for i in chosen], dtype=np.float32)
                np.add.at(vectors, start + owner[chosen], encoded * lengths)
                if progress is not None:
                    progress(start + int(len(part) * min(1, (first + batch_size) / len(order))))
        self.train(was_training)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def featurize(self, texts: Sequence[str], num_threads: int | None = None, batch_size: int = 32) -> Features:
        """
        Features of texts as the model takes them: TF-IDF, the encoder's vectors, or both.

        Args:
            texts (`Sequence[str]`):
                The documents. One without a known word (an empty one, say) has no TF-IDF features.
            num_threads (`int`, *optional*):
                Threads to use for TF-IDF; all cores by default.
            batch_size (`int`, *optional*, defaults to 32):
                Texts that go through the encoder together.
        """
        if self.tfidf is None and self.encoder is None:
            raise ValueError(
                "This model was trained on vectors and has no TF-IDF: it cannot read text. Pass the vectors of the "
                "documents to `predict`, as `Features` or as a `csr_matrix`."
            )
        # Heads alone do not look at TF-IDF, which their model keeps from the making of its tree.
        reads_tfidf = self.tfidf is not None and (self.ranker is not None or self.encoder is None)
        sparse = self.tfidf.transform(texts, num_threads=num_threads) if reads_tfidf else None  # type: ignore[union-attr]
        return Features(sparse, None if self.encoder is None else self.embed(texts, batch_size))

    def prepare_vectors(self, vectors: Features) -> Features:
        """
        Given vectors as the ranker takes them: raised to a power as the configuration says, and of unit length.

        Args:
            vectors ([`Features`]):
                Vectors as they come with the data.
        """
        return vectors.raised(self.config.vector_power).normalized()

    def forward(
        self,
        features: Features | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        num_threads: int | None = None,
        predict_with: str | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        level: int | None = None,
        nodes: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        levels: Sequence[dict[str, Any]] | None = None,
        keep: torch.Tensor | None = None,
    ) -> XMCOutput:
        """
        Searches the best labels of each document or, with `level`, scores nodes of that level.

        Args:
            features ([`Features`], *optional*):
                Documents as [`~XMCForTextClassification.featurize`] makes them, rows of unit length. A document
                without features gets what its labels' biases say.
            top_k (`int`, *optional*):
                Labels per document; that of the configuration by default.
            beam_size (`int`, *optional*):
                Nodes kept per level; that of the configuration by default. 0 keeps all: exact search.
            num_threads (`int`, *optional*):
                Threads to use; all cores by default.
            predict_with (`str`, *optional*):
                `"ranker"`, `"heads"` or `"both"`; that of the configuration by default.
            input_ids (`torch.Tensor` of shape `(batch, tokens)`, *optional*):
                Token ids, in place of `features`.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*):
                1 for tokens, 0 for padding; all tokens by default.
            level (`int`, *optional*):
                Level of the tree, counted from 1, whose head is asked.
            nodes (`torch.Tensor`, *optional*):
                Nodes of the level to score, `(nodes,)` or `(batch, nodes)`; all by default.
            targets (`torch.Tensor` of shape `(batch, nodes)`, *optional*):
                1 where a node is true, else 0.
            weights (`torch.Tensor` of shape `(batch, nodes)`, *optional*):
                Weight of each node's loss; 0 leaves it out. All 1 by default.
            levels (`Sequence[dict]`, *optional*):
                What several levels are trained on together, see [`LevelHeads.joint_loss`].
            keep (`torch.Tensor` of shape `(batch, dimensions)`, *optional*):
                What the document vectors are multiplied with before heads see them, in place of a dropout.

        Returns:
            [`XMCOutput`]: `scores` and `indices` of shape `(batch, top_k)`; with `level` `logits`, and with `targets`
            or `levels` the `loss`, the sum over nodes and the mean over documents.
        """
        if input_ids is not None:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            vectors = self.encode(input_ids, mask)
            if keep is None:
                hidden = functional.dropout(vectors, self.config.head_dropout, self.training)
            else:
                hidden = vectors * keep.to(vectors.dtype)
            if levels is not None:
                assert self.label_tree is not None
                return XMCOutput(loss=self.heads.joint_loss(hidden, levels, self.label_tree))
            if level is not None:
                logits, loss = self.heads.score(hidden, level, nodes, targets, weights)
                return XMCOutput(loss=loss, logits=logits)
            features = Features(None, vectors.detach().cpu().numpy())
        if level is not None or levels is not None:
            raise ValueError("A level is scored from tokens: pass `input_ids`. `search_level` takes vectors.")
        if features is None:
            raise ValueError("There is nothing to work on: pass `features`, or `input_ids` for the encoder.")
        top_k = self.config.top_k if top_k is None else top_k
        beam_size = self.config.beam_size if beam_size is None else beam_size
        predict_with = self.config.predict_with if predict_with is None else predict_with
        if predict_with not in PREDICT_WITH:
            raise ValueError(f"`predict_with={predict_with!r}` is not one of {', '.join(PREDICT_WITH)}.")
        if predict_with == "heads":
            return self._predict_with_heads(features, top_k, beam_size)
        if predict_with == "both":
            ranked, own, indices = self.candidate_scores(features, top_k, beam_size, num_threads)
            return mix_scores(ranked, own, indices, self.config.heads_weight, top_k)
        scores, indices = self._predict_with_ranker(features, top_k, beam_size, num_threads)
        return XMCOutput(scores=scores, indices=indices)

    def _predict_with_ranker(
        self, features: Features, top_k: int, beam_size: int | None, num_threads: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.ranker is None:
            raise ValueError("The model is not trained: it has no ranker. Train it with `XMCTrainer`, or load one.")
        start = None
        if isinstance(self.ranker, LinearRanker) and self.ranker.first_level > 1:
            beam = self.ranker.beam_size if beam_size is None else beam_size
            start = self.match(self._dense_part(features), self.ranker.first_level - 1, beam)
        scores, indices = self.ranker.predict(
            self.ranker_features(features), top_k, beam_size=beam_size, num_threads=num_threads, start=start
        )
        return torch.from_numpy(scores).to(self.anchor.device), torch.from_numpy(indices).to(self.anchor.device)

    def candidate_scores(
        self, features: Features, top_k: int, beam_size: int | None = None, num_threads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        The best labels of the ranker and those of the heads, with what both say of each.

        Args:
            features ([`Features`]):
                Documents as [`~XMCForTextClassification.featurize`] makes them.
            top_k (`int`):
                Labels wanted per document; more are looked at, so that one side can lift labels of the other.
            beam_size (`int`, *optional*):
                Nodes kept per level; by default as many as ranker and heads keep by themselves.
            num_threads (`int`, *optional*):
                Threads to use; all cores by default.

        Returns:
            `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: scores of the ranker (0 for a label that it did not
            find), scores of the heads and label ids (-1 for none), of one shape.
        """
        self._check_label_head()
        assert self.label_tree is not None
        ranked_count, own_count = (min(max(top_k, count), self.label_tree.num_labels) for count in _CANDIDATES)
        ranked, indices = self._predict_with_ranker(features, ranked_count, beam_size, num_threads)
        positions = torch.from_numpy(self.label_tree.leaf_positions).to(indices.device)
        nodes, vectors = positions[indices.clamp(min=0)], self._dense_part(features)
        parts = zip(vectors.split(256), nodes.split(256), strict=True)
        tree = self.label_tree
        own = torch.cat([self.heads.label_probabilities(part, labels, tree) for part, labels in parts])
        found = self._predict_with_heads(features, own_count, beam_size)
        assert found.scores is not None and found.indices is not None
        known = (found.indices.unsqueeze(2) == indices.unsqueeze(1)).any(dim=2)
        return (
            torch.cat([ranked, torch.zeros_like(found.scores)], dim=1),
            torch.cat([own, found.scores], dim=1),
            torch.cat([indices, found.indices.masked_fill(known, -1)], dim=1),
        )

    def ranker_features(self, features: Features) -> Features:
        """Features as the ranker takes them: the encoder's vector in the length it has beside TF-IDF."""
        if self.encoder is None or features.dense is None or self.config.embedding_scale == 1:
            return features
        return Features(features.sparse, features.dense * np.float32(self.config.embedding_scale))

    def head(self, level: int) -> Head:
        """The head of a level, counted from 1."""
        return self.heads.of(level)

    def search_level(
        self, vectors: torch.Tensor, level: int, top_k: int, beam_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The best nodes of a level by the heads of the levels down to it.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Documents as [`~XMCForTextClassification.encode`] makes them.
            level (`int`):
                Level, counted from 1; it must have a head.
            top_k (`int`):
                Nodes per document.
            beam_size (`int`, *optional*):
                Nodes kept on the way; 20 by default, 0 keeps all.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: probabilities and nodes, `(batch, top_k)` each; 0 and -1 for none.
        """
        assert self.label_tree is not None
        return self.heads.search(vectors, self.label_tree, level, top_k, beam_size)

    @torch.no_grad()
    def match(self, vectors: torch.Tensor, level: int, top_k: int) -> Beam:
        """
        The best nodes of a level by the heads, as the ranker starts from them.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Documents as [`~XMCForTextClassification.encode`] makes them.
            level (`int`):
                Level, counted from 1; it must have a head.
            top_k (`int`):
                Nodes per document; 0 for all.
        """
        assert self.label_tree is not None
        size = self.label_tree.level_sizes[level - 1]
        scores, nodes = self.search_level(vectors, level, min(top_k, size) if top_k > 0 else size, top_k)
        # A node that the heads rule out has a small probability rather than none: its labels come last.
        return Beam(level, nodes.cpu().numpy(), scores.clamp(min=1e-9).log().cpu().numpy())

    def _check_label_head(self) -> None:
        levels, tree = self.config.head_levels or [], self.label_tree
        if tree is None or tree.depth not in levels or self.config.trained_levels < len(levels):
            raise ValueError(
                "The model has no trained head for its labels: predict with the ranker (`predict_with='ranker'`), or "
                "train the levels down to the labels."
            )

    def _dense_part(self, features: Features) -> torch.Tensor:
        if features.dense is None:
            raise ValueError("The heads need the encoder's vectors of the documents. Make them with `featurize`.")
        return torch.from_numpy(features.dense).to(self.device)

    def _predict_with_heads(self, features: Features, top_k: int, beam_size: int | None) -> XMCOutput:
        self._check_label_head()
        assert self.label_tree is not None
        vectors = self._dense_part(features)
        scores, nodes = self.search_level(vectors, self.label_tree.depth, top_k, beam_size)
        labels = torch.from_numpy(self.label_tree.leaf_labels).to(nodes.device)[nodes.clamp(min=0)]
        return XMCOutput(scores=scores, indices=labels.masked_fill(nodes < 0, -1))

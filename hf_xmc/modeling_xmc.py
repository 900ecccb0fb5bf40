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
from .label_editing import LabelEditingMixin
from .label_tree import LabelTree
from .labels import Labels
from .linear_ranker import Beam, LinearRanker
from .loading import check_size
from .modeling_heads import Head, LevelHeads
from .modeling_utils import PredictMixin, XMCPreTrainedModel
from .output import XMCOutput, mix_scores
from .restriction import Restriction
from .scorer import PARTS
from .text_encoder import (
    check_pooling_layers,
    default_pooling,
    limit_threads_after_fork,
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
from .utils import check_count

PREDICT_WITH = ("all", "both", *PARTS)

# Documents that `embed` sorts by length together before they are put into batches.
SORT_CHUNK = 4096


class XMCForTextClassification(PredictMixin, LabelEditingMixin, XMCPreTrainedModel):
    """
    Predicts a few of very many labels for texts or vectors.

    A model without an encoder is linear: TF-IDF features and a tree-structured linear ranker. A model with an encoder
    has a head per trained level of the label tree, and its ranker takes TF-IDF features and the encoder's vector.
    [`XMCTrainer`] adds the parts that a new model lacks.

    Args:
        config ([`XMCConfig`]):
            Configuration.
        labels ([`Labels`], *optional*):
            Names and training counts of the labels.
        label_tree ([`LabelTree`], *optional*):
            The label hierarchy; the tree of the ranker by default.
        tfidf ([`TfidfFeaturizer`], *optional*):
            Computes the sparse features of texts.
        ranker ([`LinearRanker`] or [`KNNRanker`], *optional*):
            The linear classifiers of the tree's nodes, or the index of training documents.
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
        if config.encoder_config is not None:
            check_pooling_layers(config.encoder_config, config.pooling_layers)
        self.encoder = None if config.encoder_config is None else make_encoder(config.encoder_config)
        self.heads = LevelHeads(config, self.vector_size)
        self.labels = labels
        self.label_tree = ranker.tree if label_tree is None and ranker is not None else label_tree
        self.tfidf = tfidf
        self.ranker = ranker
        self.tokenizer = tokenizer
        self.label_vectors = self.knn = self.knn_vectors = self.scorer = None
        # Mixed precision of `embed`, set by the trainer; by default the encoder computes in the dtype of its weights.
        self.autocast_dtype: torch.dtype | None = None
        # The only parameter of a linear model: transformers takes device and dtype from the parameters, and writes no
        # weight file without any.
        self.anchor = nn.Parameter(torch.ones(()), requires_grad=False)
        self.post_init()
        check_size(self)

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
        Creates a model from a pretrained encoder.

        Args:
            name_or_path (`str` or `os.PathLike`):
                Folder or Hub id of any encoder that `AutoModel` loads, with its tokenizer.
            pooling (`str`, *optional*):
                `"mean"`, `"cls"` or `"last"`; depends on the encoder by default.
            dropout (`float`, *optional*):
                Dropout inside the encoder; defaults to the configuration of the encoder.
            attn_implementation (`str`, *optional*):
                Attention implementation of the encoder, such as `"sdpa"` or `"flash_attention_2"`.
            labels ([`Labels`], *optional*): Names of the labels.
            label_tree ([`LabelTree`], *optional*): The label hierarchy.
            tfidf ([`TfidfFeaturizer`], *optional*): Fitted sparse features.
            hub_kwargs (`dict`, *optional*):
                `revision`, `token`, `cache_dir`, `trust_remote_code`, ... With `use_safetensors=False`, weights that
                are a pickle are loaded, too, which can run code.
            config_kwargs:
                Further fields of [`XMCConfig`], such as `max_length`.
        """
        hub_kwargs = dict(hub_kwargs or {})
        use_safetensors = hub_kwargs.pop("use_safetensors", True)
        try:
            encoder_config = AutoConfig.from_pretrained(name_or_path, **hub_kwargs)
            if isinstance(encoder_config, SelfContainedConfig):
                raise ValueError("It is a model with labels, not an encoder.")
            if dropout is not None:
                set_dropout(encoder_config, dropout)
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, **hub_kwargs)
            attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
            encoder = load_encoder(name_or_path, use_safetensors, config=encoder_config, **attention, **hub_kwargs)
        except (ImportError, OSError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise OSError(
                f"The encoder `{name_or_path}` cannot be loaded: {reason} Pass a folder or Hub id with config.json, "
                "weights and tokenizer."
            ) from error
        pooling = pooling or default_pooling(name_or_path, encoder_config, **hub_kwargs)
        limit = position_limit(encoder_config, tokenizer) or XMCConfig.max_length
        config_kwargs.setdefault("max_length", min(XMCConfig.max_length, limit))
        config = XMCConfig(encoder_config=encoder_config, pooling=pooling, **config_kwargs)
        model = cls(config, labels=labels, label_tree=label_tree, tfidf=tfidf, tokenizer=tokenizer)
        model.encoder = encoder
        model.check_length()
        return model

    def check_length(self) -> None:
        """Raises an error if `max_length` exceeds the limit of the encoder."""
        limit = position_limit(self.config.encoder_config, self.tokenizer)
        if limit is not None and self.config.max_length > limit:
            raise ValueError(
                f"`max_length` is {self.config.max_length}, but the encoder takes at most {limit} tokens. Lower it; "
                "`long_text='windows'` reads longer texts."
            )

    def add_heads(
        self,
        levels: Sequence[int],
        bottleneck: int | None = None,
        tails: Sequence[int] | None = None,
        shrink: float = 2.0,
    ) -> None:
        """
        Adds a zero-initialised head to each of the given levels.

        Args:
            levels (`Sequence[int]`): Levels of the tree, counted from 1, ascending.
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

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Returns the document vectors of tokenised texts, float32 of unit length.

        Args:
            input_ids (`torch.Tensor` of shape `(batch, tokens)`):
                Token ids.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*):
                1 for tokens, 0 for padding; all 1 by default.
        """
        if self.encoder is None:
            raise ValueError("The model is linear: it has no encoder.")
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        layers = self.config.pooling_layers
        output = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **({"output_hidden_states": True} if layers > 1 else {}),
        )
        states = output.hidden_states[-layers:] if layers > 1 else (output[0],)
        return pool(states, attention_mask, self.config.pooling)

    def tokenize(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Returns the token ids of each text: one window or, with `long_text="windows"`, several."""
        config = self.config
        return tokenize(texts, self.tokenizer, config.max_length, config.long_text, config.max_windows)

    @torch.no_grad()
    def embed(
        self, documents: Sequence[Any], batch_size: int = 32, progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """
        Returns the document vectors, float32 of unit length.

        Args:
            documents (`Sequence[str]` or `Sequence[list[list[int]]]`):
                Texts, or the results of [`~XMCForTextClassification.tokenize`].
            batch_size (`int`, *optional*, defaults to 32):
                Batch size of the encoder. Batches are made of windows of similar length.
            progress (`Callable[[int], None]`, *optional*):
                Called with the number of processed documents.
        """
        limit_threads_after_fork()
        # `train` and `eval` go through all modules, which takes as long as 5 % of a short text.
        was_training, is_training = self.training, self.training or self.encoder.training
        if is_training:
            self.eval()
        mixed = torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
        vectors = np.zeros((len(documents), self.vector_size), dtype=np.float32)
        padding = padding_id(self.config.encoder_config, self.tokenizer)
        for start in range(0, len(documents), SORT_CHUNK):
            chunk = list(documents[start : start + SORT_CHUNK])
            tokenized = self.tokenize(chunk) if chunk and isinstance(chunk[0], str) else chunk
            document = np.repeat(np.arange(len(chunk)), [len(windows) for windows in tokenized])
            windows = [window for windows in tokenized for window in windows]
            order = np.argsort([-len(window) for window in windows], kind="stable")
            for first in range(0, len(order), batch_size):
                chosen = order[first : first + batch_size]
                ids, mask = pad_batch([windows[i] for i in chosen], padding)
                try:
                    with mixed:
                        encoded = self.encode(ids.to(self.device), mask.to(self.device)).cpu().numpy()
                except IndexError as error:
                    raise ValueError(
                        f"The encoder cannot read the token ids up to {ids.max()} of `tokenizer.json`, or "
                        f"{ids.shape[1]} positions ({error}). Save or download the model again."
                    ) from error
                # The weight of a window is its length: a short last window counts less.
                lengths = np.array([[len(windows[i])] for i in chosen], dtype=np.float32)
                np.add.at(vectors, start + document[chosen], encoded * lengths)
                if progress is not None:
                    progress(start + int(len(chunk) * min(1, (first + batch_size) / len(order))))
        if is_training:
            self.train(was_training)
        if not np.isfinite(vectors).all():
            raise ValueError(
                "The encoder gives vectors that are not finite: its weights in `model.safetensors` are damaged or too "
                "large for its dtype. Check the model with `hf-xmc verify`."
            )
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def featurize(self, texts: Sequence[str], num_threads: int | None = None, batch_size: int = 32) -> Features:
        """
        Returns the features of texts: TF-IDF, document vectors, or both.

        Args:
            texts (`Sequence[str]`):
                The documents.
            num_threads (`int`, *optional*):
                Number of threads of TF-IDF; all cores by default.
            batch_size (`int`, *optional*, defaults to 32):
                Batch size of the encoder.
        """
        if self.tfidf is None and self.encoder is None:
            raise ValueError(
                "The model was trained on vectors (`has_tfidf` in `config.json`) and cannot read texts. Pass "
                "`Features` or a `csr_matrix`."
            )
        # A model with heads only keeps TF-IDF from building its tree, but does not predict with it.
        readers = (self.ranker, self.label_vectors, self.knn)
        reads_tfidf = self.tfidf is not None and (self.encoder is None or any(part is not None for part in readers))
        sparse = self.tfidf.transform(texts, num_threads=num_threads) if reads_tfidf else None  # type: ignore[union-attr]
        return Features(sparse, None if self.encoder is None else self.embed(texts, batch_size))

    def prepare_vectors(self, vectors: Features) -> Features:
        """Returns input vectors as the ranker takes them: raised to `config.vector_power`, of unit length."""
        return vectors.raised(self.config.vector_power).normalized()

    def forward(
        self,
        features: Features | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        num_threads: int | None = None,
        predict_with: str | None = None,
        *,
        restriction: Restriction | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        level: int | None = None,
        nodes: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        levels: Sequence[dict[str, Any]] | None = None,
        label_input_ids: torch.Tensor | None = None,
        label_attention_mask: torch.Tensor | None = None,
    ) -> XMCOutput:
        """
        Finds the best labels of each document or, with `level` or `levels`, scores nodes of the tree.

        Args:
            features ([`Features`], *optional*):
                Documents, see [`~XMCForTextClassification.featurize`]. A document without features is scored by the
                biases.
            top_k (`int`, *optional*):
                Number of labels per document; defaults to the configuration.
            beam_size (`int`, *optional*):
                Number of nodes kept per level; defaults to the configuration. 0 keeps all: exact search.
            num_threads (`int`, *optional*):
                Number of threads of the ranker; all cores by default.
            predict_with (`str`, *optional*):
                What predicts, see [`XMCConfig`]; defaults to the configuration.
            restriction ([`Restriction`], *optional*):
                The labels to choose from, see [`~Labels.restrict`]; all by default.
            input_ids (`torch.Tensor` of shape `(batch, tokens)`, *optional*):
                Token ids, instead of `features`.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*):
                1 for tokens, 0 for padding; all 1 by default.
            level (`int`, *optional*):
                Level of the tree, counted from 1, whose nodes are scored.
            nodes (`torch.Tensor`, *optional*):
                Nodes of the level to score, `(nodes,)` or `(batch, nodes)`; all by default.
            targets (`torch.Tensor` of shape `(batch, nodes)`, *optional*):
                1 for true nodes, else 0.
            weights (`torch.Tensor` of shape `(batch, nodes)`, *optional*):
                Weight of the loss of each node; all 1 by default.
            levels (`Sequence[dict]`, *optional*):
                Inputs of several levels that are trained jointly, see [`LevelHeads.joint_loss`].
            label_input_ids (`torch.Tensor` of shape `(labels, tokens)`, *optional*):
                Token ids of label texts. The output is then their vectors and those of the documents, and with `level`
                the `logits`.
            label_attention_mask (`torch.Tensor` of shape `(labels, tokens)`, *optional*):
                1 for tokens, 0 for padding; all 1 by default.

        Returns:
            [`XMCOutput`]: `scores` and `indices` of shape `(batch, top_k)`; with `level` the `logits`, and with
            `targets` or `levels` the `loss` (sum over nodes, mean over documents).
        """
        if input_ids is not None:
            vectors = self.encode(input_ids, attention_mask)
            label_vectors = None if label_input_ids is None else self.encode(label_input_ids, label_attention_mask)
            hidden = functional.dropout(vectors, self.config.head_dropout, self.training)
            if label_vectors is not None:
                logits = None if level is None else self.heads.score(hidden, level, nodes)[0]
                return XMCOutput(logits=logits, vectors=vectors, label_vectors=label_vectors)
            if levels is not None:
                assert self.label_tree is not None
                return XMCOutput(loss=self.heads.joint_loss(hidden, levels, self.label_tree))
            if level is not None:
                logits, loss = self.heads.score(hidden, level, nodes, targets, weights)
                return XMCOutput(loss=loss, logits=logits)
            features = Features(None, vectors.detach().cpu().numpy())
        if level is not None or levels is not None:
            raise ValueError("`level` needs `input_ids`. Call `search_level` to score vectors.")
        if features is None:
            raise ValueError("Pass `features` or `input_ids`.")
        top_k = check_count("top_k", self.config.top_k if top_k is None else top_k)
        if self.label_tree is not None:
            top_k = min(top_k, self.label_tree.num_labels if restriction is None else len(restriction))
        beam_size = self.config.beam_size if beam_size is None else beam_size
        predict_with = self.config.predict_with if predict_with is None else predict_with
        if predict_with not in PREDICT_WITH:
            raise ValueError(
                f"`predict_with={predict_with!r:.80}` is not one of {', '.join(PREDICT_WITH)}. Its default is in "
                "`config.json`."
            )
        if predict_with == "heads":
            found = self._predict_with_heads(features, top_k, beam_size, restriction)
            return XMCOutput(scores=found[0], indices=found[1])
        if predict_with == "both":
            candidates = self.candidate_scores(features, top_k, beam_size, num_threads, restriction)
            return mix_scores(*candidates, self.config.heads_weight, top_k)
        if predict_with == "ranker":
            scores, indices = self._search_ranker("predict", features, top_k, beam_size, num_threads, restriction)
        else:
            scores, indices = self._predict_with_parts(
                features, top_k, predict_with, restriction, beam_size=beam_size, num_threads=num_threads
            )
        return XMCOutput.from_numpy(scores, indices, self.anchor.device)

    def head(self, level: int) -> Head:
        """Returns the head of a level, counted from 1."""
        return self.heads.of(level)

    def search_level(
        self, vectors: torch.Tensor, level: int, top_k: int, beam_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Finds the best nodes of a level by beam search through the heads.

        Args:
            vectors (`torch.Tensor` of shape `(batch, dimensions)`):
                Document vectors, see [`~XMCForTextClassification.encode`].
            level (`int`):
                Level, counted from 1; it must have a head.
            top_k (`int`):
                Number of nodes per document.
            beam_size (`int`, *optional*):
                Number of nodes kept per level; 20 by default, 0 keeps all.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: probabilities and nodes of shape `(batch, top_k)`, padded with 0 and
            -1.
        """
        assert self.label_tree is not None
        return self.heads.search(vectors, self.label_tree, level, top_k, beam_size)

    @torch.no_grad()
    def match(self, vectors: torch.Tensor, level: int, top_k: int) -> Beam:
        """Finds the `top_k` best nodes of a level (0: all) by the heads, as the start of a search of the ranker."""
        assert self.label_tree is not None
        size = self.label_tree.level_sizes[level - 1]
        scores, nodes = self.search_level(vectors, level, min(top_k, size) if top_k > 0 else size, top_k)
        # The logarithm must be finite: the labels of nodes with probability 0 come last.
        return Beam(level, nodes.cpu().numpy(), scores.clamp(min=1e-9).log().cpu().numpy())

"""What all models share: their output, their files and prediction from texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from scipy.sparse import csr_matrix
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer
from transformers import initialization as init
from transformers.utils import SAFE_WEIGHTS_NAME, ModelOutput

from .configuration_xmc import XMCConfig
from .features import Features
from .knn_ranker import KNNRanker
from .label_tree import TREE_FILE, LabelTree
from .labels import LABELS_NAME, Labels
from .linear_ranker import RANKER_FILE, LinearRanker
from .modeling_heads import LevelHead
from .remote_code import SelfContainedModel
from .serialization import MAX_SHARD_SIZE, check_model_type, sharded_files
from .tfidf import TFIDF_FILE, VOCABULARY_FILE, TfidfFeaturizer

RANKER_TREE_FILE = "ranker_tree.safetensors"
_RANKERS: dict[str, type[LinearRanker] | type[KNNRanker]] = {
    "linear": LinearRanker,
    "knn": KNNRanker,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

HUB_KWARGS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")


def model_files(folder: str | os.PathLike) -> list[str]:
    """Names of the files that a model may have in a folder, but for its configuration."""
    sharded = [*sharded_files(folder, SAFE_WEIGHTS_NAME), *sharded_files(folder, RANKER_FILE)]
    return [*sharded, LABELS_NAME, TREE_FILE, RANKER_TREE_FILE, TFIDF_FILE, VOCABULARY_FILE, *_TOKENIZER_FILES]


class XMCPreTrainedModel(SelfContainedModel):
    """
    Base class: the parts of a model beside its weights, and the files of all of them.

    Each part (labels, label tree, TF-IDF, ranker, tokenizer) has its own file and can be read without the model.
    """

    config: XMCConfig
    config_class = XMCConfig  # named, as transformers would take the annotation for it, which is a mere string here
    base_model_prefix = "encoder"
    accepts_loss_kwargs = False
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    anchor: nn.Parameter
    encoder: nn.Module | None
    labels: Labels | None
    label_tree: LabelTree | None
    tfidf: TfidfFeaturizer | None
    ranker: LinearRanker | KNNRanker | None
    tokenizer: Any

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LevelHead):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, XMCPreTrainedModel):
            init.ones_(module.anchor)

    @property
    def vector_size(self) -> int:
        """Length of the encoder's document vector; 0 without an encoder."""
        if self.encoder is None:
            return 0
        config: Any = self.config.encoder_config
        return self.config.pooling_layers * config.get_text_config().hidden_size

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> Any:
        """
        Loads a model from a folder or the Hub. The ranker is opened by memory map: it takes no time and no copy.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A folder that [`~XMCForTextClassification.save_pretrained`] wrote, or a model id on the Hub.
            args:
                See [`~transformers.PreTrainedModel.from_pretrained`].
            kwargs:
                `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder` and the rest of
                [`~transformers.PreTrainedModel.from_pretrained`].
        """
        hub_kwargs = {name: kwargs[name] for name in HUB_KWARGS if kwargs.get(name) is not None}
        if kwargs.get("config") is None:
            # A folder without one would load with the default configuration.
            check_model_type(pretrained_model_name_or_path, XMCConfig.model_type, **hub_kwargs)
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"The weights of `{pretrained_model_name_or_path}` cannot be read ({error}). Their file is damaged or "
                "was not copied to the end: save or download it again."
            ) from error
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.anchor.requires_grad_(False)  # loading makes a new parameter of it
        model._load_parts(pretrained_model_name_or_path, hub_kwargs)
        return loaded

    def _save_parts(self, folder: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Writes everything but the configuration and the weights, which come last and make the model complete."""
        required = ("labels", "label_tree") if self.encoder is not None else ("labels", "label_tree", "ranker")
        missing = [name for name in required if getattr(self, name) is None]
        if missing:
            raise ValueError(f"The model cannot be saved: it has no {', '.join(missing)}. Train it with `XMCTrainer`.")
        assert self.label_tree is not None
        own_tree = self.ranker is not None and self.ranker.tree != self.label_tree
        self.config.level_sizes = self.label_tree.level_sizes
        self.config.has_tfidf, self.config.has_ranker = self.tfidf is not None, self.ranker is not None
        self.config.ranker_has_own_tree = own_tree
        self.config.ranker_type = "knn" if isinstance(self.ranker, KNNRanker) else "linear"
        self._check_parts("The model")
        if getattr(self.tokenizer, "is_fast", False):
            # What the last call has set would be saved, and a model that is loaded and saved again not be the same.
            self.tokenizer.backend_tokenizer.no_truncation()
            self.tokenizer.backend_tokenizer.no_padding()
        for part in (self.labels, self.label_tree, self.tfidf, self.tokenizer):
            if part is not None:
                part.save_pretrained(folder)
        if self.ranker is not None:
            self.ranker.save_pretrained(folder, max_shard_size)
        if own_tree:
            self.ranker.tree.save_pretrained(folder, RANKER_TREE_FILE)  # type: ignore[union-attr]

    def _files_in(self, folder: str | os.PathLike) -> list[str]:
        return model_files(folder)

    def _load_parts(self, name_or_path: str | os.PathLike, hub_kwargs: dict[str, Any]) -> None:
        self.labels = _load_part(Labels, name_or_path, hub_kwargs)
        self.label_tree = _load_part(LabelTree, name_or_path, hub_kwargs)
        if self.encoder is not None:
            # With the configuration at hand: looking for it, transformers would ask again whether to trust its code.
            self.tokenizer = _load_part(AutoTokenizer, name_or_path, {"config": self.config, **hub_kwargs})
        if self.config.has_tfidf:
            self.tfidf = _load_part(TfidfFeaturizer, name_or_path, hub_kwargs)
        if self.config.has_ranker:
            tree = self.label_tree
            if self.config.ranker_has_own_tree:
                tree = _load_part(LabelTree, name_or_path, {"filename": RANKER_TREE_FILE, **hub_kwargs})
            kind = _RANKERS.get(self.config.ranker_type)
            if kind is None:
                raise ValueError(
                    f"The configuration of `{name_or_path}` says `ranker_type={self.config.ranker_type!r}`, which is "
                    f"not one of {', '.join(_RANKERS)}. Update hf_xmc, or mend `config.json`."
                )
            self.ranker = _load_part(kind, name_or_path, {"tree": tree, **hub_kwargs})
        self._check_parts(f"`{name_or_path}`")

    def _check_parts(self, source: str) -> None:
        """Raises where labels, tree, features and ranker are not of one model."""
        labels, tree, ranker = self.labels, self.label_tree, self.ranker
        way_out = "The parts are of different models: save or download all of them again."
        if labels is not None and tree is not None and len(labels) != tree.num_labels:
            raise ValueError(
                f"{source} has {len(labels)} label names but a tree of {tree.num_labels} labels. {way_out}"
            )
        if tree is not None and self.config.level_sizes != tree.level_sizes:
            raise ValueError(
                f"{source} has a tree with the level sizes {tree.level_sizes}, but its configuration says "
                f"{self.config.level_sizes}. {way_out}"
            )
        if self.tfidf is not None and ranker is not None and self.tfidf.num_features != ranker.num_sparse:
            raise ValueError(
                f"{source} has TF-IDF of {self.tfidf.num_features} terms but `{RANKER_FILE}` for {ranker.num_sparse}. "
                f"{way_out}"
            )
        if ranker is not None and tree is not None and ranker.tree.num_labels != tree.num_labels:
            raise ValueError(f"{source} has a ranker for another label tree than its own. {way_out}")
        if ranker is not None and self.encoder is not None and ranker.num_dense != self.vector_size:
            raise ValueError(
                f"{source} has an encoder with vectors of {self.vector_size} numbers but a ranker for "
                f"{ranker.num_dense}. {way_out}"
            )


def _load_part(kind: Any, name_or_path: str | os.PathLike, kwargs: dict[str, Any]) -> Any:
    try:
        return kind.from_pretrained(name_or_path, **kwargs)
    except FileNotFoundError:
        raise
    except OSError as error:
        # The message of the Hub may name neither the model nor the file.
        raise OSError(f"The {kind.__name__} of the model `{name_or_path}` cannot be loaded: {error}") from error


@dataclass
class XMCOutput(ModelOutput):
    """
    Best labels of each document, best first; or, in training, what the head of one level says.

    Args:
        loss (`torch.FloatTensor` of shape `()`):
            Loss of the level, where targets were given.
        logits (`torch.FloatTensor` of shape `(batch, nodes)`):
            Logits of the nodes of the level.
        scores (`torch.FloatTensor` of shape `(batch, top_k)`):
            Scores between 0 and 1; 0 where fewer labels were found.
        indices (`torch.LongTensor` of shape `(batch, top_k)`):
            Label ids; -1 where fewer labels were found.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    indices: torch.Tensor | None = None


def mix_scores(
    ranked: torch.Tensor, own: torch.Tensor, indices: torch.Tensor, heads_weight: float, top_k: int
) -> XMCOutput:
    """
    The best labels by the weighted mean of two scores.

    Args:
        ranked (`torch.Tensor`): Scores of the ranker.
        own (`torch.Tensor`): Scores of the heads.
        indices (`torch.Tensor`): The labels, -1 for none.
        heads_weight (`float`): Weight of the heads, 0 to 1.
        top_k (`int`): Labels per document.
    """
    mixed = (1 - heads_weight) * ranked + heads_weight * own
    scores, best = mixed.masked_fill(indices < 0, -1).topk(min(top_k, mixed.shape[1]), dim=1)
    lacking = (0, top_k - scores.shape[1])
    return XMCOutput(
        scores=functional.pad(scores.clamp(min=0), lacking),
        indices=functional.pad(indices.gather(1, best), lacking, value=-1),
    )


class PredictMixin:
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

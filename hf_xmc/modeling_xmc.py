"""Extreme multi-label text classifiers: encoder, label tree, linear ranker and label names as one model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import CONFIG_NAME, ModelOutput

from .configuration_xmc import XMCConfig
from .features import Features
from .files import resolve_file
from .label_tree import LabelTree
from .labels import Labels
from .linear_ranker import RANKER_FILE, LinearRanker
from .tfidf import TFIDF_FILE, VOCABULARY_FILE, TfidfFeaturizer

_HUB_KWARGS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")


@dataclass
class XMCOutput(ModelOutput):
    """
    Best labels of each document, best first.

    Args:
        scores (`torch.FloatTensor` of shape `(batch, top_k)`):
            Scores between 0 and 1; 0 where fewer labels were found.
        indices (`torch.LongTensor` of shape `(batch, top_k)`):
            Label ids; -1 where fewer labels were found.
    """

    scores: torch.Tensor | None = None
    indices: torch.Tensor | None = None


class XMCPreTrainedModel(PreTrainedModel):
    """Base class: configuration, weight initialisation."""

    config: XMCConfig
    config_class = XMCConfig  # named, as transformers would take the annotation for it, which is a mere string here
    base_model_prefix = "encoder"
    accepts_loss_kwargs = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, XMCForTextClassification):
            init.ones_(module.ranker_share)


class XMCForTextClassification(XMCPreTrainedModel):
    """
    Tags text (or vectors) with a few of very many labels.

    A model without an encoder is a linear tagger: TF-IDF features and a tree-structured linear ranker. A new model has
    no labels; [`XMCTrainer`] adds what is missing.

    Args:
        config ([`XMCConfig`]):
            Configuration.
        labels ([`Labels`], *optional*):
            Names and training counts of the labels.
        label_tree ([`LabelTree`], *optional*):
            The label hierarchy; that of the ranker by default.
        tfidf ([`TfidfFeaturizer`], *optional*):
            Makes the sparse features of text. A model without takes vectors only.
        ranker ([`LinearRanker`], *optional*):
            The linear models of the tree's nodes.

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
        ranker: LinearRanker | None = None,
    ) -> None:
        super().__init__(config)
        if config.encoder_config is not None:
            raise ValueError(
                "The configuration has an `encoder_config`, but only linear taggers can be made so far. Leave it out."
            )
        self.labels = labels
        self.label_tree = ranker.tree if label_tree is None and ranker is not None else label_tree
        self.tfidf = tfidf
        self.ranker = ranker
        # transformers asks a model's parameters for its device and dtype and writes no weight file for a model without
        # any. A linear tagger has this one alone: the part of the ranker in a label's score, which is all of it.
        self.ranker_share = nn.Parameter(torch.ones(()), requires_grad=False)
        self.post_init()

    def featurize(self, texts: Sequence[str], num_threads: int | None = None) -> Features:
        """
        Features of texts as the ranker takes them.

        Args:
            texts (`Sequence[str]`):
                The documents. One without a known word (an empty one, say) has no features.
            num_threads (`int`, *optional*):
                Threads to use; all cores by default.
        """
        if self.tfidf is None:
            raise ValueError(
                "This model was trained on vectors and has no TF-IDF: it cannot read text. Pass the vectors of the "
                "documents to `predict`, as `Features` or as a `csr_matrix`."
            )
        return Features(self.tfidf.transform(texts, num_workers=num_threads))

    def prepare_vectors(self, vectors: Features) -> Features:
        """
        Given vectors as the ranker takes them: damped as the configuration says and scaled to unit length.

        Args:
            vectors ([`Features`]):
                Vectors as they come with the data.
        """
        power = self.config.vector_power
        if power != 1 and vectors.sparse is not None:
            sparse = vectors.sparse
            data = np.sign(sparse.data) * np.abs(sparse.data) ** np.float32(power)
            vectors = Features(csr_matrix((data, sparse.indices, sparse.indptr), shape=sparse.shape), vectors.dense)
        return vectors.normalized()

    def forward(
        self,
        features: Features,
        top_k: int | None = None,
        beam_size: int | None = None,
        num_threads: int | None = None,
    ) -> XMCOutput:
        """
        Searches the best labels of each document. A document without features gets what its labels' biases say.

        Args:
            features ([`Features`]):
                Documents as [`~XMCForTextClassification.featurize`] makes them, rows of unit length.
            top_k (`int`, *optional*):
                Labels per document; that of the configuration by default.
            beam_size (`int`, *optional*):
                Nodes kept per level; that of the configuration by default. 0 keeps all: exact search.
            num_threads (`int`, *optional*):
                Threads to use; all cores by default.

        Returns:
            [`XMCOutput`]: `scores` and `indices` of shape `(batch, top_k)`.
        """
        if self.ranker is None:
            raise ValueError("The model is not trained: it has no ranker. Train it with `XMCTrainer`, or load one.")
        scores, indices = self.ranker.predict(
            features,
            self.config.top_k if top_k is None else top_k,
            beam_size=self.config.beam_size if beam_size is None else beam_size,
            num_threads=num_threads,
        )
        device = self.ranker_share.device
        return XMCOutput(scores=torch.from_numpy(scores).to(device), indices=torch.from_numpy(indices).to(device))

    @torch.no_grad()
    def predict(
        self,
        documents: Sequence[str] | Features | csr_matrix,
        top_k: int | None = None,
        beam_size: int | None = None,
        batch_size: int = 4096,
        num_threads: int | None = None,
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
            results.extend(self.name_labels(self(features, top_k, beam_size, num_threads)))
        return results

    def name_labels(self, output: XMCOutput) -> list[list[tuple[str, float]]]:
        """The (label, score) pairs of an output, best first; empty places are left out."""
        if self.labels is None:
            raise ValueError("The model has no labels. Train it with `XMCTrainer`, or load a trained one.")
        names = self.labels.names
        assert output.scores is not None and output.indices is not None
        rows = zip(output.indices.tolist(), output.scores.tolist(), strict=True)
        return [[(names[i], score) for i, score in zip(*row, strict=True) if i >= 0] for row in rows]

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Writes all files of the model. The folder it was loaded from is a good place, too.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder, made where it is missing.
            is_main_process (`bool`, *optional*, defaults to `True`):
                Only the main process writes.
            push_to_hub (`bool`, *optional*, defaults to `False`):
                Whether to upload the model afterwards, to `repo_id` or a repository named like the folder.
            kwargs:
                Passed to [`~transformers.PreTrainedModel.save_pretrained`] or, with `push_to_hub`, to
                [`~transformers.PreTrainedModel.push_to_hub`].
        """
        hub_names = ("repo_id", "commit_message", "private", "create_pr", "commit_description", "tags")
        hub_kwargs = {name: kwargs.pop(name) for name in hub_names if name in kwargs}
        if is_main_process:
            self._save_parts(save_directory)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if push_to_hub and is_main_process:
            repo_id = hub_kwargs.pop("repo_id", os.path.basename(os.path.abspath(save_directory)))
            # The base class would upload only what itself has written.
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub_kwargs)

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
        hub_kwargs = {name: kwargs[name] for name in _HUB_KWARGS if kwargs.get(name) is not None}
        if kwargs.get("config") is None:
            # A folder without one would load with the default configuration.
            resolve_file(pretrained_model_name_or_path, CONFIG_NAME, **hub_kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.ranker_share.requires_grad_(False)  # loading makes a new parameter of it
        model._load_parts(pretrained_model_name_or_path, hub_kwargs)
        return loaded

    def _save_parts(self, folder: str | os.PathLike) -> None:
        """Writes everything but the configuration and the weights, which come last and make the model complete."""
        if self.labels is None or self.label_tree is None or self.ranker is None:
            missing = [name for name in ("labels", "label_tree", "ranker") if getattr(self, name) is None]
            raise ValueError(f"The model cannot be saved: it has no {', '.join(missing)}. Train it with `XMCTrainer`.")
        self.config.level_sizes = self.label_tree.level_sizes
        self.config.has_tfidf, self.config.has_ranker = self.tfidf is not None, self.ranker is not None
        self._check_parts("The model")
        for part in (self.labels, self.label_tree, self.ranker, self.tfidf):
            if part is not None:
                part.save_pretrained(folder)
        if self.tfidf is None:
            # What another model has left in this folder would be published along.
            for name in (TFIDF_FILE, VOCABULARY_FILE):
                if os.path.isfile(path := os.path.join(folder, name)):
                    os.unlink(path)

    def _load_parts(self, name_or_path: str | os.PathLike, hub_kwargs: dict[str, Any]) -> None:
        self.labels = _load_part(Labels, name_or_path, hub_kwargs)
        self.label_tree = _load_part(LabelTree, name_or_path, hub_kwargs)
        if self.config.has_tfidf:
            self.tfidf = _load_part(TfidfFeaturizer, name_or_path, hub_kwargs)
        if self.config.has_ranker:
            self.ranker = _load_part(LinearRanker, name_or_path, {"tree": self.label_tree, **hub_kwargs})
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
        if ranker is not None and ranker.tree is not tree and ranker.tree != tree:
            raise ValueError(f"{source} has a ranker for another label tree than its own. {way_out}")


def _load_part(kind: Any, name_or_path: str | os.PathLike, kwargs: dict[str, Any]) -> Any:
    try:
        return kind.from_pretrained(name_or_path, **kwargs)
    except FileNotFoundError:
        raise
    except OSError as error:
        # The message of the Hub may name neither the model nor the file.
        raise OSError(f"The {kind.__name__} of the model `{name_or_path}` cannot be loaded: {error}") from error

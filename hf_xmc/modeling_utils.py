"""What all models share: their output, prediction from texts, and their files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scipy.sparse import csr_matrix
from torch import nn
from transformers import AutoTokenizer
from transformers import initialization as init
from transformers.utils import CONFIG_NAME

from .configuration_xmc import XMCConfig
from .features import Features
from .hierarchy import Hierarchy
from .knn_ranker import KNN_FILE, KNNRanker, KNNVectors
from .label_tree import LabelTree
from .label_vectors import LabelVectors
from .labels import Labels
from .linear_ranker import RANKER_FILE, LinearRanker
from .loading import HUB_KWARGS, check_loaded, check_model_files, guarded, verify_files
from .modeling_heads import LevelHead
from .modeling_parts import PartsMixin
from .output import XMCOutput
from .remote_code import RANKER_TREE_FILE, TOKENIZER_FILES, SelfContainedModel
from .restriction import Restriction
from .scorer import Scorer
from .serialization import MAX_SHARD_SIZE, check_model_type
from .tfidf import TfidfFeaturizer
from .utils import check_count, join_texts

# Documents that `predict` holds in memory at a time.
PREDICT_CHUNK = 4096
_RANKERS: dict[str, type[LinearRanker] | type[KNNRanker]] = {"linear": LinearRanker, "knn": KNNRanker}


class PredictMixin:
    """
    Mixin that predicts label names.

    The class has `labels`, `featurize` (for texts), `prepare_vectors` (for vectors), and `forward` for the results of
    both.
    """

    config: Any
    labels: Labels | None
    featurize: Any
    prepare_vectors: Any
    __call__: Any
    eval: Any
    save_pretrained: Any

    @torch.no_grad()
    def predict(
        self,
        documents: Sequence[str] | Sequence[Mapping[str, str]] | Features | csr_matrix,
        top_k: int | None = None,
        beam_size: int | None = None,
        batch_size: int = 32,
        num_threads: int | None = None,
        predict_with: str | None = None,
        labels: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        under: str | Sequence[str] | None = None,
        level: int | None = None,
        with_parents: bool = False,
    ) -> list[list[tuple[str, float]]]:
        """
        Returns the best labels of each document with their scores.

        Args:
            documents (`Sequence[str]`, `Sequence[dict]`, [`Features`] or `csr_matrix`):
                Texts (or dictionaries of columns, see [`~PredictMixin.text_of`]), or vectors if the model was trained
                on vectors (of any length; they are normalised).
            top_k (`int`, *optional*):
                Number of labels per document; defaults to the configuration.
            beam_size (`int`, *optional*):
                Number of nodes kept per level; defaults to the configuration. 0 keeps all: exact search.
            batch_size (`int`, *optional*, defaults to 32):
                Batch size of the encoder. It affects speed and memory, not the labels.
            num_threads (`int`, *optional*):
                Number of threads of TF-IDF and ranker; all cores by default.
            predict_with (`str`, *optional*):
                What predicts, see [`XMCConfig`]; defaults to the configuration.
            labels (`Sequence[str]`, *optional*):
                The labels to choose from; all by default. Up to 1,024 are compared exactly.
            exclude (`Sequence[str]`, *optional*):
                Labels not to choose.
            under (`str` or `Sequence[str]`, *optional*):
                Labels of the hierarchy; only these and labels below any of them are chosen.
            level (`int`, *optional*):
                Level of the hierarchy, 1 for the top. Labels below it are replaced by their ancestors there.
            with_parents (`bool`, *optional*, defaults to `False`):
                Whether to add all ancestors of the labels, see [`~PredictMixin.find_labels`].

        Returns:
            `list[list[tuple[str, float]]]`: (label, score) pairs of each document, best first. There are fewer than
            `top_k` if the search reached fewer labels. `model.labels.name_of(label)` is the name of a label in words.
        """
        if isinstance(documents, (str, bytes)):
            raise TypeError("`documents` is one text, not several. Pass a list: `[text]`.")
        if isinstance(documents, Mapping) or not hasattr(documents, "__len__"):
            raise TypeError(f"`documents` must be a list of texts, not {type(documents).__name__}.")
        check_count("batch_size", batch_size)
        restriction = self.restrict(labels, exclude, under)
        self.check_hierarchy(level, with_parents)
        if isinstance(documents, csr_matrix):
            documents = Features(documents)
        chunk_size = max(batch_size, PREDICT_CHUNK)
        results: list[list[tuple[str, float]]] = []
        for start in range(0, len(documents), chunk_size):
            chunk = documents[start : start + chunk_size]
            if isinstance(chunk, Features):
                features = self.prepare_vectors(chunk)
            else:
                texts = [self.text_of(text, f"documents[{place}]") for place, text in enumerate(chunk, start)]
                features = self.featurize(texts, num_threads, batch_size)
            search = top_k, beam_size, num_threads, predict_with
            output = self.find_labels(
                features, *search, restriction=restriction, level=level, with_parents=with_parents
            )
            results.extend(self.name_labels(output))
        return results

    @property
    def text_columns(self) -> list[str]:
        """Columns that the texts of documents come from."""
        return self.config.text_columns or ["text"]

    def text_of(self, document: Any, name: str = "document") -> str:
        """
        Returns the text of a document.

        Args:
            document (`str` or `dict[str, str]`):
                A text, or the columns that the model was trained on (else `"text"`). Several are joined with
                line breaks, so a text for such a model has the first column in its first line.
            name (`str`, *optional*):
                What errors call the document.
        """
        text: Any = document
        if isinstance(document, Mapping):
            columns = self.text_columns
            if not set(columns) <= set(document):
                needed, keys = ", ".join(map(repr, columns)), ", ".join(map(repr, document)) or "none"
                raise ValueError(f"`{name}` needs the keys {needed}; its keys are {keys}. Pass '' for no text.")
            text = document[columns[0]] if len(columns) == 1 else join_texts([document[key] for key in columns])
        if not isinstance(text, str):
            raise TypeError(f"`{name}` is {type(text).__name__}, not str. Pass '' for no text.")
        return text

    def find_labels(
        self,
        features: Any,
        top_k: int | None = None,
        beam_size: int | None = None,
        num_threads: int | None = None,
        predict_with: str | None = None,
        *,
        restriction: Restriction | None = None,
        level: int | None = None,
        with_parents: bool = False,
    ) -> XMCOutput:
        """
        Returns the best labels of documents, in terms of the hierarchy of the labels if asked for.

        The score of an ancestor is the highest score of its descendants among the predicted labels. With `level`, the
        `top_k` best ancestors are returned; they come from the `20 * top_k` (at least 100) best labels. With
        `with_parents`, all ancestors of the `top_k` best labels are added, so that there are more than `top_k`. A
        restriction holds for the predicted labels, not for their ancestors.

        Args:
            features:
                Documents, see `featurize`.
            level (`int`, *optional*):
                Labels below this level of the hierarchy (1: the top) are replaced by their ancestors there. Labels
                above it stay as they are.
            with_parents (`bool`, *optional*, defaults to `False`):
                Whether to add all ancestors. One that was itself predicted, with a lower score, gets the higher one.
            top_k, beam_size, num_threads, predict_with, restriction:
                See `forward`.
        """
        search = beam_size, num_threads, predict_with
        hierarchy = self.check_hierarchy(level, with_parents)
        if hierarchy is None:
            return self(features, top_k, *search, restriction=restriction)
        top_k = check_count("top_k", self.config.top_k if top_k is None else top_k)
        candidates = top_k if level is None else max(20 * top_k, 100)
        output = self(features, candidates, *search, restriction=restriction)
        scores, indices = output.scores.cpu().numpy(), output.indices.cpu().numpy()
        if level is not None:
            scores, indices = hierarchy.roll_up(scores, indices, level, top_k)
        if with_parents:
            scores, indices = hierarchy.with_ancestors(scores, indices)
        return XMCOutput.from_numpy(scores, indices, output.indices.device)

    def checked_labels(self) -> Labels:
        """Returns the labels; raises if there are none."""
        if self.labels is None:
            raise ValueError("The model has no labels. Train it with `XMCTrainer`, or load a trained one.")
        return self.labels

    def check_hierarchy(self, level: int | None, with_parents: bool = False) -> Hierarchy | None:
        """Returns the hierarchy that predictions need; raises if there is none, or no such level."""
        if not isinstance(with_parents, bool):
            raise TypeError(f"`with_parents` must be True or False, not {with_parents!r:.80}.")
        if level is None and not with_parents:
            return None
        hierarchy = self.checked_labels().checked_hierarchy()
        if level is not None:
            hierarchy.check_level(level)
        return hierarchy

    def restrict(
        self,
        labels: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        under: str | Sequence[str] | None = None,
    ) -> Restriction | None:
        """Returns the labels that a prediction may choose from, see [`~Labels.restrict`]; `None` for all."""
        if labels is None and exclude is None and under is None:
            return None
        return self.checked_labels().restrict(labels, exclude, under)

    def name_labels(self, output: XMCOutput) -> list[list[tuple[str, float]]]:
        """Returns the (label, score) pairs of an output, best first, without padding."""
        names = self.checked_labels().names
        assert output.scores is not None and output.indices is not None
        scores = output.scores.tolist()
        if math.isnan(sum(map(sum, scores))):
            raise ValueError(
                "The model gives scores that are not numbers: its weights are damaged. Check it with `hf-xmc verify`."
            )
        rows = zip(output.indices.tolist(), scores, strict=True)
        return [[(names[i], score) for i, score in zip(*row, strict=True) if i >= 0] for row in rows]


def named(pair: tuple[str, float], names: Mapping[str, str]) -> dict[str, Any]:
    """A label and its score as a dictionary, with the name of the label if `names` has one."""
    label, score = pair
    return {"label": label, **({"name": names[label]} if label in names else {}), "score": score}


class XMCPreTrainedModel(PartsMixin, SelfContainedModel):
    """
    Base class of models: the parts besides the weights, and the files of all parts.

    Each part (labels, label tree, TF-IDF, ranker, label vectors, kNN, scorer, tokenizer) has a separate file and can
    be read without the model.
    """

    config: XMCConfig
    config_class = XMCConfig  # transformers would take the annotation, which is a string here
    base_model_prefix = "encoder"
    accepts_loss_kwargs = False
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _keep_in_fp32_modules_strict = {"heads"}

    tfidf: TfidfFeaturizer | None
    tokenizer: Any

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LevelHead):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, XMCPreTrainedModel):
            init.ones_(module.anchor)

    def __repr__(self) -> str:
        """Method, labels and size; `model.encoder` shows the layers."""
        labels = 0 if self.labels is None else len(self.labels)
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())
        size += 0 if self.ranker is None else self.ranker.num_bytes
        return f"{type(self).__name__}(method={self.config.method!r}, {labels:,} labels, {size / 1e6:,.0f} MB)"

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
        Loads a model from a folder or the Hub. The ranker is memory-mapped, not read.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A folder written by [`~XMCForTextClassification.save_pretrained`], or a model id on the Hub.
            args:
                See [`~transformers.PreTrainedModel.from_pretrained`].
            kwargs:
                `dtype` of the encoder (the heads stay in float32), `revision`, `token`, `cache_dir`,
                `local_files_only`, `subfolder` and the other arguments of
                [`~transformers.PreTrainedModel.from_pretrained`]. With `verify=True`, the files are compared with the
                checksums in `training_record.json`. `use_safetensors=False` also loads weights that are a pickle,
                which can run code.
        """
        hub_kwargs = {name: kwargs[name] for name in HUB_KWARGS if kwargs.get(name) is not None}
        kwargs.setdefault("use_safetensors", True)
        wants_info = kwargs.pop("output_loading_info", False)
        source = os.path.join(pretrained_model_name_or_path, hub_kwargs.get("subfolder") or "")
        if kwargs.get("config") is None:
            # transformers would load a folder without `config.json` with the default configuration.
            check_model_type(pretrained_model_name_or_path, XMCConfig.model_type, **hub_kwargs)
        if kwargs.pop("verify", False):
            verify_files(pretrained_model_name_or_path, **hub_kwargs)
        num_weights = check_model_files(pretrained_model_name_or_path, hub_kwargs, kwargs["use_safetensors"])
        with guarded(source, num_weights):
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        check_loaded(model, info, source)
        model.anchor.requires_grad_(False)  # loading replaces the parameter
        model._load_parts(pretrained_model_name_or_path, hub_kwargs)
        return (model, info) if wants_info else model

    def _save_parts(self, folder: str | os.PathLike, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        required = ("labels", "label_tree") if self.encoder is not None else ("labels", "label_tree", "ranker")
        missing = [name for name in required if getattr(self, name) is None]
        if missing:
            raise ValueError(f"The model cannot be saved without {', '.join(missing)}. Train it with `XMCTrainer`.")
        assert self.label_tree is not None
        own_tree = self.ranker is not None and self.ranker.tree != self.label_tree
        self.config.level_sizes = self.label_tree.level_sizes
        self.config.has_tfidf, self.config.has_ranker = self.tfidf is not None, self.ranker is not None
        self.config.ranker_has_own_tree = own_tree
        self.config.ranker_type = "knn" if isinstance(self.ranker, KNNRanker) else "linear"
        self.config.parts = None if self.scorer is None else list(self.scorer.parts)
        self._check_parts("The model")
        if getattr(self.tokenizer, "is_fast", False):
            # The options of the last call would be saved, and the file would change with every use.
            self.tokenizer.backend_tokenizer.no_truncation()
            self.tokenizer.backend_tokenizer.no_padding()
        for part in (self.labels, self.label_tree, self.tfidf, self.tokenizer, self.scorer):
            if part is not None:
                part.save_pretrained(folder)
        for part in (self.ranker, self.label_vectors, self.knn_vectors):
            if part is not None:
                part.save_pretrained(folder, max_shard_size)
        if self.knn is not None:
            self.knn.save_pretrained(folder, max_shard_size, KNN_FILE)
        if own_tree:
            self.ranker.tree.save_pretrained(folder, RANKER_TREE_FILE)  # type: ignore[union-attr]

    def _load_parts(self, name_or_path: str | os.PathLike, hub_kwargs: dict[str, Any]) -> None:
        def load(part: Any, **kwargs: Any) -> Any:
            return _load_part(part, name_or_path, {**kwargs, **hub_kwargs})

        self.labels, self.label_tree = load(Labels), load(LabelTree)
        if self.encoder is not None:
            # Without `config`, transformers would read it again and ask again whether to trust its code.
            self.tokenizer = _load_tokenizer(name_or_path, {"config": self.config, **hub_kwargs})
        if self.config.has_tfidf:
            self.tfidf = load(TfidfFeaturizer)
        if self.config.has_ranker:
            tree = self.label_tree
            if self.config.ranker_has_own_tree:
                tree = load(LabelTree, filename=RANKER_TREE_FILE)
            ranker_class = _RANKERS.get(self.config.ranker_type)
            if ranker_class is None:
                raise ValueError(
                    f"`ranker_type={self.config.ranker_type!r:.80}` in `{CONFIG_NAME}` of `{name_or_path}` is not one "
                    f"of {', '.join(_RANKERS)}. Update hf_xmc."
                )
            self.ranker = load(ranker_class, tree=tree)
        parts = set(self.config.parts or ())
        if parts:
            self.scorer = load(Scorer)
        if any(name.startswith(("text_", "centroid_")) for name in parts):
            self.label_vectors = load(LabelVectors)
        if "knn_tfidf" in parts:
            self.knn = load(KNNRanker, tree=self.label_tree, filename=KNN_FILE)
        if "knn_vector" in parts:
            self.knn_vectors = load(KNNVectors)
        self._check_parts(f"`{name_or_path}`")

    def _check_parts(self, source: str) -> None:
        """Raises an error if labels, tree, features and ranker do not belong to one model."""
        labels, tree, ranker, tfidf = self.labels, self.label_tree, self.ranker, self.tfidf
        num_sparse = tfidf.num_features if tfidf is not None else 0 if ranker is None else ranker.num_sparse
        label_counts, term_counts, lengths = self._vector_sizes()
        problem = None
        if labels is not None and tree is not None and len(labels) != tree.num_labels:
            problem = f"{len(labels)} label names but a tree of {tree.num_labels} labels"
        elif tree is not None and self.config.level_sizes != tree.level_sizes:
            problem = f"`level_sizes={self.config.level_sizes}` but a tree with the levels {tree.level_sizes}"
        elif ranker is not None and ranker.num_sparse != num_sparse:
            problem = f"TF-IDF of {num_sparse} terms but `{RANKER_FILE}` for {ranker.num_sparse}"
        elif ranker is not None and tree is not None and ranker.tree.num_labels != tree.num_labels:
            problem = f"{tree.num_labels} labels but a ranker for {ranker.tree.num_labels}"
        elif self.scorer is not None and not set(self.scorer.parts) <= set(self.available_parts):
            problem = f"a scorer of the parts {list(self.scorer.parts)} but the parts {self.available_parts}"
        elif any(count != tree.num_labels for count in label_counts):  # type: ignore[union-attr]
            problem = f"{len(labels or ())} labels but label vectors or neighbours of {label_counts}"
        elif any(count != num_sparse for count in term_counts):
            problem = f"{num_sparse} sparse features but label vectors or neighbours of {term_counts}"
        elif any(length != self.vector_size for length in lengths):
            problem = f"vectors of {self.vector_size} numbers but label vectors or neighbours of {lengths}"
        elif self.encoder is not None and tfidf is None and ranker is not None and ranker.num_sparse:
            problem = f"a ranker for {ranker.num_sparse} terms but no TF-IDF (`has_tfidf`)"
        elif tree is not None and not _heads_fit(self.config, tree):
            problem = f"`head_levels={self.config.head_levels}` and `head_tails={self.config.head_tails}` but {tree}"
        elif ranker is not None and self.encoder is not None and ranker.num_dense != self.vector_size:
            problem = f"encoder vectors of {self.vector_size} numbers but a ranker for {ranker.num_dense}"
        if problem is not None:
            raise ValueError(
                f"{source} has {problem}. The parts and `config.json` belong to different models: save or download "
                "all of them again."
            )

    def _vector_sizes(self) -> tuple[list[int], list[int], list[int]]:
        """The numbers of labels and terms and the lengths of vectors, of label vectors and similar documents."""
        sizes: tuple[list[int], list[int], list[int]] = ([], [], [])
        label_counts, term_counts, lengths = sizes
        if self.label_vectors is not None:
            label_counts.append(self.label_vectors.num_labels)
            term_counts.extend(len(index.term_begin) - 1 for index in self.label_vectors.sparse.values())
            lengths.extend(vectors.shape[1] for vectors in self.label_vectors.dense.values())
        if self.knn is not None:
            term_counts.append(self.knn.num_sparse)
        if self.knn_vectors is not None:
            label_counts.append(self.knn_vectors.num_labels)
            lengths.append(self.knn_vectors.vectors.shape[1])
        return sizes


def _heads_fit(config: XMCConfig, tree: LabelTree) -> bool:
    """Whether heads of these levels and tails can search a tree."""
    levels, tails = config.head_levels or [], config.head_tails
    if levels != sorted(set(levels)) or (levels and levels[-1] > tree.depth):
        return False
    num_frequent = tree.num_labels - sum(tails or ())
    return tails is None or (num_frequent >= 0 and tree.level_sizes[-2:-1] == [num_frequent + len(tails)])


def _load_part(part: Any, name_or_path: str | os.PathLike, kwargs: dict[str, Any]) -> Any:
    try:
        return part.from_pretrained(name_or_path, **kwargs)
    except FileNotFoundError:
        raise
    except OSError as error:
        # Messages of the Hub name neither the model nor the file.
        raise OSError(f"The {part.__name__} of the model `{name_or_path}` cannot be loaded: {error}") from error


def _load_tokenizer(name_or_path: str | os.PathLike, kwargs: dict[str, Any]) -> Any:
    try:
        return _load_part(AutoTokenizer, name_or_path, kwargs)
    except (ImportError, MemoryError, OSError):
        raise
    except BaseException as error:  # a panic of tokenizers is not an `Exception`
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ValueError(
            f"The tokenizer of `{name_or_path}` cannot be loaded from `{' and '.join(TOKENIZER_FILES)}` "
            f"({type(error).__name__}: {error}). Save or download it again."
        ) from error

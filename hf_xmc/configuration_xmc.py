"""Configuration of an extreme multi-label text classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

TASK = "extreme-text-classification"
HEAD_LOSSES = ("bce", "squared_hinge")
POOLINGS = ("mean", "cls", "last")
LONG_TEXTS = ("truncate", "head_tail", "windows")
_LARGEST = (1 << 31) - 1


def check_fields(config: PreTrainedConfig, rules: dict[str, tuple]) -> None:
    """
    Raises an error if a field of a configuration has a value that no model is saved with.

    `rules` has for each field its type and, for numbers, the smallest and the largest one; for texts, the choices. The
    type `list` is followed by the type of its items and their bounds. `None` is allowed if it is the default.
    """
    for name, (kind, *bounds) in rules.items():
        value = getattr(config, name, None)
        if value is None and getattr(type(config), name, None) is None:
            continue
        is_list = kind is list and isinstance(value, list)
        items = (value, *bounds) if is_list else ([value], kind, *bounds)
        if not all(_is_allowed(item, items[1], items[2:]) for item in items[0]):
            raise ValueError(f"`{name}` is {value!r:.80}")


def _is_allowed(item: Any, kind: type, limits: tuple) -> bool:
    if kind is float and type(item) is int:
        item = float(item)
    if type(item) is not kind:
        return False
    if kind is str:
        return not limits or item in limits
    return kind is bool or limits[0] <= item <= limits[1]


class SelfContainedConfig(PreTrainedConfig):
    """Base class of configurations whose `config.json` may name code beside it, see `remote_code.py`."""

    # Registers the models and the pipeline with transformers. Set by the package, which so defers their imports until
    # the first configuration is created; code that is loaded with a model leaves it unset.
    _register_models: ClassVar[Callable[[], None] | None] = None
    # Values that fields may have in `config.json`, see `check_fields`.
    rules: ClassVar[dict[str, tuple]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> SelfContainedConfig:
        """Registers the models first; unlike `__init__`, this also runs when a configuration is unpickled."""
        if cls._register_models is not None:
            cls._register_models()
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        """Drops `custom_pipelines` of `config.json` where the package has registered its own pipeline."""
        if hasattr(type(self), "custom_pipelines"):
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Reads the content of a `config.json`, whose fields are checked."""
        try:
            loaded = super().from_dict(config_dict, **kwargs)
            check_fields(loaded[0] if isinstance(loaded, tuple) else loaded, cls.rules)
        except ImportError:
            raise
        except Exception as error:
            raise ValueError(
                f"`config.json` is not valid ({type(error).__name__}: {error}). Save or download it again."
            ) from error
        return loaded

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: `save_pretrained` of the model adds the code."""


class XMCConfig(SelfContainedConfig):
    """
    Configuration of an [`XMCForTextClassification`]: its parts and its defaults of prediction.

    Label names are in `labels.json`; `id2label` would make `config.json` slow to read with a million labels.

    Args:
        encoder_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the transformer encoder. `None` for a linear model: a ranker on sparse features.
        method (`str`, *optional*):
            Name of the training method.
        pooling (`str`, *optional*, defaults to `"mean"`):
            How token states become one vector: `"mean"`, `"cls"` (first token) or `"last"` (last token).
        pooling_layers (`int`, *optional*, defaults to 1):
            Number of last layers of the encoder whose pooled states are concatenated.
        max_length (`int`, *optional*, defaults to 128):
            Largest number of tokens of an encoder input.
        long_text (`str`, *optional*, defaults to `"truncate"`):
            Treatment of longer texts: `"truncate"`, `"head_tail"` (the first and the last half of `max_length`) or
            `"windows"` (up to `max_windows` of them, their vectors averaged).
        max_windows (`int`, *optional*, defaults to 4):
            Largest number of windows of a text.
        level_sizes (`list[int]`, *optional*):
            Number of nodes of each level of the label tree, the root's children first, the labels last.
        head_levels (`list[int]`, *optional*):
            Levels of the tree with a head on the encoder, counted from 1, ascending.
        head_loss (`str`, *optional*, defaults to `"bce"`):
            Loss of the heads, `"bce"` or `"squared_hinge"`; it determines how a logit becomes a probability.
        head_dropout (`float`, *optional*, defaults to 0.1):
            Dropout of the document vector before the heads.
        head_ranking (`str`, *optional*, defaults to `"leaf"`):
            `"leaf"`: the heads rank labels by their own logit, `"path"`: by the product of the probabilities above.
        head_bottleneck (`int`, *optional*):
            Length of the projection of the document vector in the label head; no projection by default.
        head_tails (`list[int]`, *optional*):
            Number of labels of each tail of an adaptive label head, see [`AdaptiveHead`].
        head_shrink (`float`, *optional*, defaults to 2.0):
            Factor by which the projection gets shorter from tail to tail.
        trained_levels (`int`, *optional*, defaults to 0):
            Number of trained heads.
        predict_with (`str`, *optional*, defaults to `"ranker"`):
            What predicts: `"all"` (the last scorer, from the scores of all parts), or the name of one part, such as
            `"ranker"` or `"heads"`. `"both"` is the weighted mean of ranker and heads in models of version 0.1.
        parts (`list[str]`, *optional*):
            Parts that the last scorer uses, see [`Scorer`].
        heads_weight (`float`, *optional*, defaults to 0.0):
            Weight of the heads with `predict_with="both"`; the ranker has the rest.
        embedding_scale (`float`, *optional*, defaults to 1.0):
            Norm of the document vector in the ranker's features; the TF-IDF features have norm 1.
        has_tfidf (`bool`, *optional*, defaults to `False`):
            Whether the model has TF-IDF. Without TF-IDF and encoder it takes only vectors.
        has_ranker (`bool`, *optional*, defaults to `False`):
            Whether the model has a ranker.
        ranker_type (`str`, *optional*, defaults to `"linear"`):
            `"linear"` ([`LinearRanker`]) or `"knn"` ([`KNNRanker`]).
        ranker_has_own_tree (`bool`, *optional*, defaults to `False`):
            Whether the ranker searches another tree than the heads.
        vector_power (`float`, *optional*, defaults to 1.0):
            Exponent of the values of input vectors before they are scaled to unit length. 0.5 damps repeated terms in
            vectors of raw counts.
        top_k (`int`, *optional*, defaults to 10):
            Default number of predicted labels.
        beam_size (`int`, *optional*):
            Default number of nodes kept per level of a search; the beam size of the ranker by default. 0 keeps all:
            exact search.
        text_columns (`list[str]`, *optional*):
            Columns that the texts were joined from, if there were several, see [`~PredictMixin.text_of`].
    """

    rules: ClassVar[dict[str, tuple]] = {
        "method": (str,),
        "pooling": (str, *POOLINGS),
        "pooling_layers": (int, 1, 1000),
        "max_length": (int, 1, 1 << 20),
        "long_text": (str, *LONG_TEXTS),
        "max_windows": (int, 1, 1 << 16),
        "level_sizes": (list, int, 1, _LARGEST),
        "head_levels": (list, int, 1, 1000),
        "head_loss": (str, *HEAD_LOSSES),
        "head_dropout": (float, 0, 1),
        "head_ranking": (str, "leaf", "path"),
        "head_bottleneck": (int, 1, _LARGEST),
        "head_tails": (list, int, 1, _LARGEST),
        "head_shrink": (float, 1, 1000),
        "trained_levels": (int, 0, 1000),
        "predict_with": (str,),
        "parts": (list, str),
        "heads_weight": (float, 0, 1),
        "embedding_scale": (float, 0, 1e6),
        "has_tfidf": (bool,),
        "has_ranker": (bool,),
        "ranker_type": (str,),
        "ranker_has_own_tree": (bool,),
        "vector_power": (float, 0, 100),
        "top_k": (int, 1, _LARGEST),
        "beam_size": (int, 0, _LARGEST),
        "text_columns": (list, str),
    }

    model_type = "hf-xmc"
    sub_configs_defaults = {"encoder_config": SubConfigSpec(config_class=AutoConfig, model_type="bert", optional=True)}

    encoder_config: dict | PreTrainedConfig | None = None
    method: str | None = None
    pooling: str = "mean"
    pooling_layers: int = 1
    max_length: int = 128
    long_text: str = "truncate"
    max_windows: int = 4
    level_sizes: list[int] | None = None
    head_levels: list[int] | None = None
    head_loss: str = "bce"
    head_dropout: float = 0.1
    head_ranking: str = "leaf"
    head_bottleneck: int | None = None
    head_tails: list[int] | None = None
    head_shrink: float = 2.0
    trained_levels: int = 0
    predict_with: str = "ranker"
    parts: list[str] | None = None
    heads_weight: float = 0.0
    embedding_scale: float = 1.0
    has_tfidf: bool = False
    has_ranker: bool = False
    ranker_type: str = "linear"
    ranker_has_own_tree: bool = False
    vector_power: float = 1.0
    top_k: int = 10
    beam_size: int | None = None
    text_columns: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Renames the fields and values of version 0.1."""
        self.heads_weight = kwargs.pop("heads_share", self.heads_weight)
        self.ranker_type = "knn" if self.ranker_type == "neighbours" else self.ranker_type
        super().__post_init__(**kwargs)


class XMCEnsembleConfig(SelfContainedConfig):
    """
    Configuration of an [`XMCEnsemble`].

    Args:
        members (`list[str]`, *optional*):
            Subfolders of the models.
        weights (`list[float]`, *optional*):
            Weight of each model; their sum is 1.
        combine (`str`, *optional*, defaults to `"scores"`):
            `"scorer"`: the last scorer of the ensemble decides. Otherwise what is averaged: the `"scores"` of a label
            or, with `"ranks"`, one over its rank, for models whose scores are not comparable. A label that a model
            does not return counts 0.
        candidates (`int`, *optional*, defaults to 100):
            Number of labels that each model returns for a document, at least `top_k`.
        top_k (`int`, *optional*, defaults to 10):
            Default number of predicted labels.
        beam_size (`int`, *optional*):
            Default number of nodes kept per level of a search; each model has its own by default.
        predict_with (`str`, *optional*):
            What predicts, for all models, see [`XMCConfig`]; each model has its own by default.
    """

    rules: ClassVar[dict[str, tuple]] = {
        "members": (list, str),
        "weights": (list, float, 0, 1e6),
        "combine": (str,),
        "candidates": (int, 1, _LARGEST),
        "top_k": (int, 1, _LARGEST),
        "beam_size": (int, 0, _LARGEST),
        "predict_with": (str,),
    }

    model_type = "hf-xmc-ensemble"

    members: list[str] | None = None
    weights: list[float] | None = None
    combine: str = "scores"
    candidates: int = 100
    top_k: int = 10
    beam_size: int | None = None
    predict_with: str | None = None


class RegisteredTask(dict):
    """
    The value of `config.custom_pipelines` where the pipeline is registered: the task as its only key.

    `transformers.pipeline` infers the task from the keys. It must not find the task *in* the dictionary, or it would
    require `trust_remote_code`. Other tasks are refused here, since they would fail later with an obscure error.
    """

    def __contains__(self, task: object) -> bool:
        (registered,) = self.keys()
        if task != registered:
            raise ValueError(f"The model is not for the task {task!r}. Call `pipeline({registered!r}, model=...)`.")
        return False

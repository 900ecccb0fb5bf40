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


class SelfContainedConfig(PreTrainedConfig):
    """Base class of configurations: what code may be beside `config.json` (`runtime_code.py`)."""

    # Makes the models and the pipeline known to transformers; set by the package, as there is no model without a
    # configuration and much to import for one. Code that travels with a model is found by its entries instead.
    _register_models: ClassVar[Callable[[], None] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SelfContainedConfig:
        """An empty configuration, also where one is unpickled."""
        if cls._register_models is not None:
            cls._register_models()
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        """Completes the configuration; the code of a pipeline beside `config.json` counts only without the package."""
        if hasattr(type(self), "custom_pipelines"):
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: a model saves its code by itself (`runtime_code.py`), and all of it."""


class XMCConfig(SelfContainedConfig):
    """
    What a model is made of and how it predicts by default.

    The number and the names of the labels are not in here (`id2label` of a million labels makes a slow `config.json`):
    names are in `labels.json`, numbers in `level_sizes`.

    Args:
        encoder_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the transformer encoder. `None` is a linear tagger: a ranker on sparse features.
        method (`str`, *optional*):
            Name of the method that the model was trained by.
        pooling (`str`, *optional*, defaults to `"mean"`):
            How the states of a text's tokens become one vector: `"mean"`, `"cls"` (the first) or `"last"`.
        pooling_layers (`int`, *optional*, defaults to 1):
            Last layers of the encoder whose pooled states are put side by side.
        max_length (`int`, *optional*, defaults to 128):
            Tokens that the encoder reads at once.
        long_text (`str`, *optional*, defaults to `"truncate"`):
            What becomes of longer texts: `"truncate"`, `"head_tail"` (the first and the last half of `max_length`) or
            `"windows"` (up to `max_windows` of them, their vectors averaged).
        max_windows (`int`, *optional*, defaults to 4):
            Windows read of a text.
        level_sizes (`list[int]`, *optional*):
            Nodes of each level of the label tree, the root's children first, the labels last.
        head_levels (`list[int]`, *optional*):
            Levels of the tree that have a head on the encoder, counted from 1, ascending.
        head_loss (`str`, *optional*, defaults to `"bce"`):
            Loss of the heads, which says what a logit means: `"bce"` or `"squared_hinge"`.
        head_dropout (`float`, *optional*, defaults to 0.1):
            Part of the document vector that training hides from the heads.
        head_ranking (`str`, *optional*, defaults to `"leaf"`):
            `"leaf"`: the heads rank labels by their own logit, `"path"`: by the product of the probabilities above.
        head_bottleneck (`int`, *optional*):
            Length to which the document vector is projected before the labels score it; their head is a plain linear
            layer by default.
        head_tails (`list[int]`, *optional*):
            Rare labels in each of several tails, which come after the frequent labels in the tree: the labels' head is
            an adaptive one with a shorter vector for each tail.
        head_shrink (`float`, *optional*, defaults to 2.0):
            Factor by which the vector gets shorter from tail to tail.
        trained_levels (`int`, *optional*, defaults to 0):
            How many of the heads have been trained.
        predict_with (`str`, *optional*, defaults to `"ranker"`):
            What predicts: `"ranker"`, `"heads"` or `"both"`.
        heads_weight (`float`, *optional*, defaults to 0.0):
            Part of the heads in a label's score where both predict; the rest is the ranker's.
        embedding_scale (`float`, *optional*, defaults to 1.0):
            Length of the document vector beside the TF-IDF features, whose length is 1, in the ranker.
        has_tfidf (`bool`, *optional*, defaults to `False`):
            Whether the model makes TF-IDF features of text. A model without takes vectors only.
        vector_power (`float`, *optional*, defaults to 1.0):
            Power that the values of given vectors are raised to before they are scaled to unit length. 0.5 damps terms
            that one document repeats, where the vectors hold raw counts.
        has_ranker (`bool`, *optional*, defaults to `False`):
            Whether the model has a ranker.
        ranker_type (`str`, *optional*, defaults to `"linear"`):
            What ranks: `"linear"` ([`LinearRanker`]) or `"knn"` ([`KNNRanker`]).
        ranker_has_own_tree (`bool`, *optional*, defaults to `False`):
            Whether the ranker searches a tree of its own instead of that of the heads.
        top_k (`int`, *optional*, defaults to 10):
            Labels predicted for a document unless asked otherwise.
        beam_size (`int`, *optional*):
            Nodes kept per level in a search unless asked otherwise; by default as many as the ranker was trained for.
            0 keeps all: exact search.
    """

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
    heads_weight: float = 0.0
    embedding_scale: float = 1.0
    has_tfidf: bool = False
    has_ranker: bool = False
    ranker_type: str = "linear"
    ranker_has_own_tree: bool = False
    vector_power: float = 1.0
    top_k: int = 10
    beam_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Completes the configuration, and reads the names that version 0.1 wrote."""
        self.heads_weight = kwargs.pop("heads_share", self.heads_weight)
        self.ranker_type = "knn" if self.ranker_type == "neighbours" else self.ranker_type
        super().__post_init__(**kwargs)


class XMCEnsembleConfig(SelfContainedConfig):
    """
    What an ensemble is made of and how it predicts by default.

    Args:
        members (`list[str]`, *optional*):
            Subfolders of the models.
        weights (`list[float]`, *optional*):
            Weight of each model; they add up to 1.
        combine (`str`, *optional*, defaults to `"scores"`):
            What is averaged of a label: its `"scores"`, or with `"ranks"` one over its place among a model's labels,
            which suits models whose scores do not compare. A label that a model does not put forward counts 0.
        candidates (`int`, *optional*, defaults to 100):
            Labels that each model puts forward for a document, or more where more are asked for.
        top_k (`int`, *optional*, defaults to 10):
            Labels predicted for a document unless asked otherwise.
        beam_size (`int`, *optional*):
            Nodes kept per level in a search unless asked otherwise; those of each model by default.
        predict_with (`str`, *optional*):
            `"ranker"`, `"heads"` or `"both"` for all models; what each says itself by default.
    """

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
    The task (its key) of models whose pipeline is registered, as `pipeline()` asks for it.

    transformers infers the task of a model from the keys of `config.custom_pipelines`. If it then found the task in
    there, it would insist on `trust_remote_code`, although it has the pipeline. Other tasks than the model's own are
    refused here: they would fail later, for some odd reason.
    """

    def __contains__(self, task: object) -> bool:
        own = next(iter(self.keys()))
        if task != own:
            raise ValueError(f"This is no model for the task {task!r}. Call `pipeline({own!r}, model=...)`.")
        return False

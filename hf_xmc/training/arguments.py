"""All options of a training run."""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..modeling_xmc import PREDICT_WITH
from ..tfidf import TfidfFeaturizer
from ..utils import count_threads
from .label_features import ENCODER_LABEL_FEATURES, LABEL_FEATURES
from .options import EncoderArguments, KNNArguments, LevelArguments, RankerArguments, TreeArguments
from .presets import ENCODER_METHODS, METHODS, method_options

# Options `<prefix>_<name>` are the arguments `<name>` of these parts, which hold their defaults.
_PARTS: dict[str, type] = {
    "tfidf": TfidfFeaturizer,
    "tree": TreeArguments,
    "ranker": RankerArguments,
    "knn": KNNArguments,
    "encoder": EncoderArguments,
    "level": LevelArguments,
}
# Options of the base class that a schedule of levels has no use for, and what there is in their place.
_REPLACED = {
    "num_train_epochs": "level_epochs",
    "max_steps": "level_steps",
    "learning_rate": "level_learning_rate",
    "warmup_steps": "level_warmup",
    "lr_scheduler_type": "level_min_lr_ratio",
}
# Those that have a version for rows of large heads.
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
# One seed, `seed`, serves all parts.
_SEEDS = {"tree": "tree_seed", "ranker": "ranker_seed"}


def _taken_over(part: type, name: str) -> Any:
    """A field with the help and the choices it has in `part`. `None` stands for the value of the method."""
    (found,) = (found for found in dataclasses.fields(part) if found.name == name)
    return field(default=None, metadata=dict(found.metadata))


def _default(part: type, name: str, parameter: inspect.Parameter) -> Any:
    """Default of a part's argument; that of a list is made anew."""
    if dataclasses.is_dataclass(part):
        (found,) = (found for found in dataclasses.fields(part) if found.name == name)
        if found.default_factory is not dataclasses.MISSING:
            return found.default_factory()
    return parameter.default


def _tfidf(help_text: str, **metadata: Any) -> Any:
    return field(default=None, metadata={"help": help_text, **metadata})


@dataclass
class XMCTrainingArguments(TrainingArguments):
    """
    Options of [`XMCTrainer`]: those of [`~transformers.TrainingArguments`] and the ones below.

    In place of `num_train_epochs`, `max_steps`, `learning_rate`, `warmup_steps` and `lr_scheduler_type`, which are
    errors here, there are `level_epochs`, `level_steps`, `level_learning_rate`, `level_warmup`, `level_min_lr_ratio`.

    Options that begin with `tfidf_`, `tree_`, `ranker_`, `knn_`, `encoder_` and `level_` are the arguments of
    [`TfidfFeaturizer`], `TreeArguments`, `RankerArguments`, `KNNArguments`, `EncoderArguments` and
    `LevelArguments`, where they are explained and have their defaults. One that is left out (`None`) gets the value of
    the method's preset, or else that default; after construction each option holds the value that is used.

    Args:
        method (`str`, *optional*, defaults to `"xr-linear"`):
            Preset: `xr-transformer`, `x-transformer`, `lightxml`, `aplc-xlnet`, `xr-linear`, `parabel`, `bonsai`,
            `dismec` or `knn`. What is given explicitly wins over it.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether training may replace a finished model in `output_dir`.
        features (`str`, *optional*):
            `"text"` (TF-IDF of the texts) or `"vectors"` (those of the dataset); text by default where there is any.
        vector_power (`float`, *optional*, defaults to 1.0):
            Power that the values of given vectors are raised to: 0.5 damps terms that one document repeats where the
            vectors hold raw counts, 1.5 makes the heaviest terms of TF-IDF weigh more.
        label_features (`str`, *optional*, defaults to `"pifa"`):
            What places a label in the tree: `"pifa"` (TF-IDF of the documents that carry it), `"text"` (TF-IDF of its
            own text) or `"both"`; with an encoder also `"embedding"` (vectors of the documents that carry it, of the
            encoder as it comes) or `"text-embedding"` (such a vector of its own text).
        label_max_features (`int`, *optional*, defaults to `1024`):
            Largest entries kept of each label's PIFA vector; `None` or 0 keeps all.
        label_text_weight (`float`, *optional*, defaults to 0.0):
            Length of the labels' own texts as further training documents of the ranker, each with its one label,
            beside documents of length 1; 0 leaves them out. About 0.5 is good where texts of labels are names that
            documents use as well, most of all for rare labels.
        refine_tree (`bool`, *optional*, defaults to `False`):
            Whether the ranker of a model with an encoder gets a tree of its own, built from TF-IDF and the trained
            encoder's vectors.
        predict_with (`str`, *optional*):
            What predicts: `"ranker"`, `"heads"` (no ranker is trained then) or `"both"`.
        heads_weight (`float`, *optional*):
            Part of the heads in a label's score where both predict, 0 to 1. By default the best on the `eval_dataset`;
            a fifth where there is none.
        embedding_scale (`float`, *optional*, defaults to 0.7):
            Length of the encoder's vector beside TF-IDF, whose length is 1, in the ranker.
        embedding_cache (`str`, *optional*):
            Folder that keeps the vectors of documents, by content, for later runs.
        widget_examples (`bool`, *optional*, defaults to `False`):
            Whether the card of the model shows three texts of the data, to try it on. A card is published with its
            model: the texts must not be private.
        num_threads (`int`, *optional*):
            Threads for features, tree and ranker; all cores by default. Results do not depend on it.
        eval_ks (`list[int]`, *optional*):
            Lengths of the ranking at which to measure; by default those of [`XMCMetrics`].

    Example:

    ```python
    args = XMCTrainingArguments("my-tagger", method="bonsai", ranker_beam_size=20)
    args.tree_clustering, args.ranker_beam_size  # ('kmeans', 20)
    ```
    """

    method: str = field(default="xr-linear", metadata={"help": "Preset of options.", "choices": tuple(METHODS)})
    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata={"help": "Order of documents: random, sequential, group_by_length (random, with less padding)."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace a finished model in output_dir."})
    features: str | None = field(
        default=None,
        metadata={
            "help": "Train on text or vectors; text by default if there is any.",
            "choices": ("text", "vectors"),
        },
    )
    vector_power: float = field(
        default=1.0, metadata={"help": "Power that the values of given vectors are raised to."}
    )
    label_features: str = field(
        default="pifa", metadata={"help": "What places a label in the tree.", "choices": LABEL_FEATURES}
    )
    label_max_features: int | None = field(
        default=1024, metadata={"help": "Largest entries kept of each label's PIFA vector; 0 keeps all."}
    )
    label_text_weight: float = field(
        default=0.0, metadata={"help": "Length of the labels' texts as documents of the ranker; 0 leaves them out."}
    )
    refine_tree: bool = field(
        default=False, metadata={"help": "Build a new tree for the ranker after the encoder is trained."}
    )
    predict_with: str | None = field(
        default=None, metadata={"help": "What predicts: ranker, heads or both.", "choices": PREDICT_WITH}
    )
    heads_weight: float | None = field(
        default=None, metadata={"help": "Part of the heads in a score; by default chosen on the eval_dataset."}
    )
    embedding_scale: float = field(
        default=0.7, metadata={"help": "Length of the encoder's vector beside TF-IDF in the ranker."}
    )
    embedding_cache: str | None = field(
        default=None, metadata={"help": "Folder that keeps vectors of documents for later runs."}
    )
    widget_examples: bool = field(
        default=False, metadata={"help": "Show three texts of the data in the card, which is published."}
    )
    num_threads: int | None = field(default=None, metadata={"help": "Threads to use; all cores by default."})
    eval_ks: list[int] | None = field(default=None, metadata={"help": "Lengths of the ranking to measure at."})

    tfidf_analyzer: str | None = _tfidf("n-grams of words or of characters.", choices=("word", "char_wb"))
    tfidf_ngram_range: list[int] | None = _tfidf("Smallest and largest n of the n-grams.")
    tfidf_min_df: int | None = _tfidf("Documents that a term must be in.")
    tfidf_max_features: int | None = _tfidf("Terms to keep, the most frequent ones; 0 keeps all.")
    tfidf_sublinear_tf: bool | None = _tfidf("Count 1 + log(n) for a term that occurs n times.")
    tfidf_lowercase: bool | None = _tfidf("Ignore case.")
    tfidf_lead_words: int | None = _tfidf("First words of a document whose terms have features of their own; 0: none.")
    tfidf_lead_weight: float | None = _tfidf("Length of these features in proportion to the others.")
    tfidf_power: float | None = _tfidf("Power that weights are raised to; more than 1 favours the heaviest terms.")
    tfidf_time_pattern: str | None = _tfidf(
        "Pattern of dates, with a group `year`: terms have features by time as well."
    )
    tfidf_time_span: float | None = _tfidf("Years over which the features by time change.")
    tfidf_time_weight: float | None = _tfidf("Length of the features by time in proportion to the others.")

    tree_clustering: str | None = _taken_over(TreeArguments, "clustering")
    tree_branching: int | None = _taken_over(TreeArguments, "branching")
    tree_max_leaf_size: int | None = _taken_over(TreeArguments, "max_leaf_size")
    tree_max_depth: int | None = _taken_over(TreeArguments, "max_depth")
    tree_kmeans_iterations: int | None = _taken_over(TreeArguments, "kmeans_iterations")
    tree_shares: list[float] | None = _taken_over(TreeArguments, "shares")
    tree_shares_of: str | None = _taken_over(TreeArguments, "shares_of")

    ranker_loss: str | None = _taken_over(RankerArguments, "loss")
    ranker_cost: float | None = _taken_over(RankerArguments, "cost")
    ranker_negative_cost: float | None = _taken_over(RankerArguments, "negative_cost")
    ranker_cost_sensitive: bool | None = _taken_over(RankerArguments, "cost_sensitive")
    ranker_negatives: str | None = _taken_over(RankerArguments, "negatives")
    ranker_matcher: str | None = _taken_over(RankerArguments, "matcher")
    ranker_train_beam_size: int | None = _taken_over(RankerArguments, "train_beam_size")
    ranker_ranking: str | None = _taken_over(RankerArguments, "ranking")
    ranker_beam_size: int | None = _taken_over(RankerArguments, "beam_size")
    ranker_prune_threshold: float | None = _taken_over(RankerArguments, "prune_threshold")
    ranker_weight_dtype: str | None = _taken_over(RankerArguments, "weight_dtype")
    ranker_max_passes: int | None = _taken_over(RankerArguments, "max_passes")
    ranker_tolerance: float | None = _taken_over(RankerArguments, "tolerance")
    ranker_bias_prior: float | None = _taken_over(RankerArguments, "bias_prior")

    knn_count: int | None = _taken_over(KNNArguments, "count")
    knn_power: float | None = _taken_over(KNNArguments, "power")
    knn_terms: int | None = _taken_over(KNNArguments, "terms")

    encoder_name: str | None = _taken_over(EncoderArguments, "name")
    encoder_max_length: int | None = _taken_over(EncoderArguments, "max_length")
    encoder_long_text: str | None = _taken_over(EncoderArguments, "long_text")
    encoder_max_windows: int | None = _taken_over(EncoderArguments, "max_windows")
    encoder_pooling: str | None = _taken_over(EncoderArguments, "pooling")
    encoder_pooling_layers: int | None = _taken_over(EncoderArguments, "pooling_layers")
    encoder_attn_implementation: str | None = _taken_over(EncoderArguments, "attn_implementation")
    encoder_dropout: float | None = _taken_over(EncoderArguments, "dropout")
    encoder_lora_rank: int | None = _taken_over(EncoderArguments, "lora_rank")
    encoder_lora_alpha: float | None = _taken_over(EncoderArguments, "lora_alpha")

    level_indices: list[int] | None = _taken_over(LevelArguments, "indices")
    level_max_nodes: int | None = _taken_over(LevelArguments, "max_nodes")
    level_epochs: list[float] | None = _taken_over(LevelArguments, "epochs")
    level_steps: list[int] | None = _taken_over(LevelArguments, "steps")
    level_learning_rate: list[float] | None = _taken_over(LevelArguments, "learning_rate")
    level_head_learning_rate: list[float] | None = _taken_over(LevelArguments, "head_learning_rate")
    level_projection_learning_rate: list[float] | None = _taken_over(LevelArguments, "projection_learning_rate")
    level_warmup: float | None = _taken_over(LevelArguments, "warmup")
    level_min_lr_ratio: float | None = _taken_over(LevelArguments, "min_lr_ratio")
    level_loss: str | None = _taken_over(LevelArguments, "loss")
    level_negatives: list[str] | None = _taken_over(LevelArguments, "negatives")
    level_beam_size: list[int] | None = _taken_over(LevelArguments, "beam_size")
    level_cost_sensitive: bool | None = _taken_over(LevelArguments, "cost_sensitive")
    level_negative_weight: float | None = _taken_over(LevelArguments, "negative_weight")
    level_bootstrap: bool | None = _taken_over(LevelArguments, "bootstrap")
    level_bootstrap_cost: float | None = _taken_over(LevelArguments, "bootstrap_cost")
    level_dropout: float | None = _taken_over(LevelArguments, "dropout")
    level_joint: bool | None = _taken_over(LevelArguments, "joint")
    level_bottleneck: int | None = _taken_over(LevelArguments, "bottleneck")
    level_shrink: float | None = _taken_over(LevelArguments, "shrink")
    level_swa_start: float | None = _taken_over(LevelArguments, "swa_start")
    level_swa_steps: int | None = _taken_over(LevelArguments, "swa_steps")

    def __post_init__(self) -> None:
        self._check_replaced()
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            ks = self.eval_ks or [5]
            self.metric_for_best_model: str | None = f"nDCG@{5 if 5 in ks else max(ks)}"
            self.greater_is_better: bool | None = True
        # The base class asks for this word where there is no other device than the CPU anyway.
        self.use_cpu: bool = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()
        # The columns of tokenised documents are not arguments of the model.
        self.remove_unused_columns = False
        for name, value in method_options(self.method).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for prefix, part in _PARTS.items():
            for name, parameter in inspect.signature(part).parameters.items():
                option = f"{prefix}_{name}"
                if name != _SEEDS.get(prefix) and getattr(self, option) is None:
                    setattr(self, option, _default(part, name, parameter))
        for option, choices in (("features", (None, "text", "vectors")), ("label_features", LABEL_FEATURES)):
            if getattr(self, option) not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise ValueError(f"`{option}={getattr(self, option)!r}` is not one of {known}.")
        if self.predict_with is None:
            self.predict_with = "both" if self.trains_encoder else "ranker"
        if self.predict_with not in PREDICT_WITH:
            raise ValueError(f"`predict_with={self.predict_with!r}` is not one of {', '.join(PREDICT_WITH)}.")
        if self.predict_with != "ranker" and not self.trains_encoder:
            raise ValueError(f"`predict_with={self.predict_with!r}` needs heads, which {self.method!r} has not.")
        if self.label_features in ENCODER_LABEL_FEATURES and not self.trains_encoder:
            raise ValueError(f"`label_features={self.label_features!r}` needs an encoder: {self.method!r} has none.")
        if self.ranker_matcher == "heads" and not self.trains_encoder:
            raise ValueError(f"`ranker_matcher='heads'` needs heads, which {self.method!r} has not.")
        if self.ranker_matcher == "heads" and (self.refine_tree or self.tree_clustering == "frequency"):
            own_tree = "refine_tree" if self.refine_tree else "tree_clustering='frequency'"
            raise ValueError(
                f"`{own_tree}` gives the ranker a tree of its own, but with `ranker_matcher='heads'` it ranks the "
                "labels of nodes that the heads find in theirs. Leave one of them out."
            )
        if not 0 <= self.label_text_weight < math.inf:
            raise ValueError(f"`label_text_weight` must be 0 or a positive number, not {self.label_text_weight}.")
        if self.label_text_weight and self.predict_with == "heads":
            raise ValueError("`label_text_weight` is for the ranker, and `predict_with='heads'` trains none.")
        if self.label_text_weight and self.ranker_matcher == "heads":
            raise ValueError(
                "`label_text_weight` goes without `ranker_matcher='heads'`: heads are not asked for the nodes of the "
                "labels' texts. Leave one of them out."
            )
        if self.heads_weight is not None and not 0 <= self.heads_weight <= 1:
            raise ValueError(f"`heads_weight` must be between 0 and 1, not {self.heads_weight}.")
        for option in ("embedding_scale", "vector_power"):
            if not 0 < getattr(self, option) < math.inf:
                raise ValueError(f"`{option}` must be a number greater than 0, not {getattr(self, option)}.")
        if self.label_max_features is not None and self.label_max_features < 0:
            raise ValueError(f"`label_max_features` must not be negative, but is {self.label_max_features}.")
        if any(k < 1 for k in self.eval_ks or ()):
            raise ValueError(f"`eval_ks={self.eval_ks}`: a ranking has at least one label.")
        count_threads(self.num_threads)
        # A wrong value is an error here and not after minutes of work.
        self.make_tfidf(), self.make_tree_arguments(), self.make_ranker_arguments(), self.make_encoder_arguments()
        self.make_knn_arguments()
        levels = self.make_level_arguments()
        for found in dataclasses.fields(levels):
            setattr(self, f"level_{found.name}", getattr(levels, found.name))
        if self.optim not in _OPTIMIZERS:
            raise ValueError(
                f"`optim={OptimizerNames(self.optim).value}` is not supported: heads of large levels need AdamW."
            )
        if self.label_smoothing_factor:
            raise ValueError(
                f"`label_smoothing_factor={self.label_smoothing_factor}` would have no effect: the heads' losses "
                "take true labels as they are. Leave it out."
            )
        if not self.trains_encoder:
            instead = f"`method` to one of {', '.join(ENCODER_METHODS)}"
            self._check_unused("level", LevelArguments(), "trains no encoder", instead)
            self._check_unused("encoder", EncoderArguments(name=self.encoder_name), "trains no encoder", instead)
        if self.uses_knn:
            self._check_unused("ranker", RankerArguments(), "trains no classifiers", "`method='xr-linear'`")
            self._check_unused("tree", TreeArguments("flat"), "searches no tree", "`method='xr-linear'`")
        else:
            reason = "does not look for similar documents"
            self._check_unused("knn", KNNArguments(), reason, "`method='knn'`")

    def _check_replaced(self) -> None:
        defaults = {found.name: found.default for found in dataclasses.fields(TrainingArguments)}
        for name, instead in _REPLACED.items():
            value = getattr(self, name)
            if value != defaults[name]:
                raise ValueError(
                    f"`{name}={value!r}` would have no effect: levels are trained one after the other, each with a "
                    f"schedule of its own. Set `{instead}`, one value or one per level."
                )

    def _check_unused(self, prefix: str, defaults: Any, reason: str, instead: str) -> None:
        for found in dataclasses.fields(defaults):
            option = f"{prefix}_{found.name}"
            if found.name != _SEEDS.get(prefix) and getattr(self, option) != getattr(defaults, found.name):
                raise ValueError(
                    f"`{option}={getattr(self, option)!r}` would have no effect: {self.method!r} {reason}. Leave it "
                    f"out, or set {instead}."
                )

    @property
    def trains_encoder(self) -> bool:
        """Whether the method has an encoder."""
        return self.method in ENCODER_METHODS

    @property
    def uses_knn(self) -> bool:
        """Whether labels are those of similar documents, so that there are no classifiers."""
        return self.method == "knn"

    def make_tfidf(self) -> TfidfFeaturizer:
        """A new featurizer with the options `tfidf_*`."""
        return self._make("tfidf")

    def make_tree_arguments(self) -> TreeArguments:
        """The options `tree_*`."""
        return self._make("tree")

    def make_ranker_arguments(self) -> RankerArguments:
        """The options `ranker_*`."""
        return self._make("ranker")

    def make_knn_arguments(self) -> KNNArguments:
        """The options `knn_*`."""
        return self._make("knn")

    def make_encoder_arguments(self) -> EncoderArguments:
        """The options `encoder_*`."""
        return self._make("encoder")

    def make_level_arguments(self) -> LevelArguments:
        """The options `level_*`."""
        return self._make("level")

    def xmc_options(self) -> dict[str, Any]:
        """The options that this class adds to `TrainingArguments`, and the seed, for the record."""
        inherited = {found.name for found in dataclasses.fields(TrainingArguments)}
        names = [found.name for found in dataclasses.fields(self) if found.name not in inherited]
        return {name: getattr(self, name) for name in ("seed", *names) if name != "overwrite"}

    def _make(self, prefix: str) -> Any:
        part, seed = _PARTS[prefix], _SEEDS.get(prefix)
        names = [name for name in inspect.signature(part).parameters if name != seed]
        values = {name: getattr(self, f"{prefix}_{name}") for name in names}
        if seed is not None:
            values[seed] = self.seed
        try:
            return part(**values)
        except (TypeError, ValueError) as error:
            kind = "a value of the wrong type: " if isinstance(error, TypeError) else ""
            raise type(error)(f"Options `{prefix}_*`: {kind}{error}") from error

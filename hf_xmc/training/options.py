"""
Options of the parts of a training: TF-IDF, label tree, ranker, k-nearest neighbours, encoder and levels.

Each option is declared once, here, with its default, its help and its limits; [`XMCTrainingArguments`] derives its
fields `<part>_<name>` from them. Fields made by `setting` are not options: only the preset of a method sets them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

from ..configuration_xmc import HEAD_LOSSES, LONG_TEXTS, POOLINGS
from ..label_tree import LabelTree
from ..linear_ranker import LOSSES, RANKINGS
from ..tfidf import FIRST_LINE, load_stemmer
from .shortlist import NEGATIVES
from .text_statistics import LEAD_WORDS, LONG_TEXT

T = TypeVar("T")

CLUSTERINGS = ("balanced", "kmeans", "flat", "frequency", "hierarchy")
LEVEL_OBJECTIVES = ("heads", "label_texts")
HEAD_NEGATIVES = ("tfn", "man", "both", "all", "dynamic")
MATCHERS = ("ranker", "heads")
SHARES_OF = ("mass", "count")
WEIGHT_DTYPES = ("int8", "float32")

# Names of earlier versions: the option that replaces each, or the reason why it is gone.
_BY_METHOD = "the method sets it"
_CONSTANT = "it is a constant now"
_BY_DATE = "features by date were removed"
RENAMED_OPTIONS = {
    "card_examples": "widget_examples",
    "label_text_length": "label_text_weight",
    "level_warmup": "warmup_steps",
    "neighbours_count": "knn_count",
    "neighbours_power": "knn_exponent",
    "ranker_cost": "ranker_C",
    "ranker_threshold": "ranker_prune_threshold",
    "tfidf_power": "feature_power",
    "vector_power": "feature_power",
}
REMOVED_OPTIONS = {
    "heads_share": "the last scorer weighs heads and ranker",
    "heads_weight": "the last scorer weighs heads and ranker",
    "encoder_lora_alpha": "it is twice `encoder_lora_rank`",
    "label_max_features": _CONSTANT,
    "level_bootstrap_cost": _CONSTANT,
    "level_bottleneck": _BY_METHOD,
    "level_cost_sensitive": _BY_METHOD,
    "level_joint": _BY_METHOD,
    "level_max_nodes": _CONSTANT,
    "level_negative_weight": _CONSTANT,
    "level_min_lr_ratio": _BY_METHOD,
    "level_projection_learning_rate": _BY_METHOD,
    "level_rate_floor": _BY_METHOD,
    "level_shrink": _BY_METHOD,
    "level_swa_steps": _CONSTANT,
    "neighbours_terms": _CONSTANT,
    "ranker_bias_prior": _CONSTANT,
    "ranker_matcher": _BY_METHOD,
    "ranker_negatives": _BY_METHOD,
    "ranker_ranking": _BY_METHOD,
    "tfidf_lead_weight": _CONSTANT,
    "tfidf_lowercase": _CONSTANT,
    "tfidf_sublinear_tf": _CONSTANT,
    "tfidf_time_pattern": _BY_DATE,
    "tfidf_time_span": _BY_DATE,
    "tfidf_time_weight": _BY_DATE,
    "tree_kmeans_iterations": _CONSTANT,
    "tree_shares_of": _CONSTANT,
}


def explain_old_name(name: str) -> str | None:
    """A sentence on an option of an earlier version; `None` for any other name."""
    if name in RENAMED_OPTIONS:
        return f"`{name}` is now called `{RENAMED_OPTIONS[name]}`."
    if name in REMOVED_OPTIONS:
        return f"`{name}` is not an option anymore: {REMOVED_OPTIONS[name]}. Remove it."
    return None


def option(default: Any, help_text: str, **limits: Any) -> Any:
    """
    A field that users can set.

    Args:
        default (`Any`): Default; a list is copied for every object.
        help_text (`str`): Documentation. The command line shows its first sentence.
        limits (`dict`):
            `choices` of the value, or its limits: `least` and `most` are allowed values, `above` and `below` are not.
    """
    metadata = {"help": help_text, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def setting(default: Any, help_text: str, **limits: Any) -> Any:
    """A field that only the preset of a method sets; arguments as those of `option`."""
    return option(default, help_text, preset_only=True, **limits)


def default_of(declared: dataclasses.Field) -> Any:
    """Default of a field; that of a list is a new list."""
    return declared.default if declared.default_factory is dataclasses.MISSING else declared.default_factory()


def as_list(value: Any) -> list[Any]:
    """The values of an option that takes one value or a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_limits(arguments: Any, prefix: str = "") -> None:
    """Raises if a field of a dataclass exceeds the limits of its declaration. `None` is checked nowhere."""
    for declared in dataclasses.fields(arguments):
        if getattr(arguments, declared.name) is None:
            continue
        for value in as_list(getattr(arguments, declared.name)):
            try:
                problem = _find_problem(value, declared.metadata)
            except TypeError as error:
                raise TypeError(f"`{prefix}{declared.name}={value!r}` has the wrong type: {error}.") from error
            if problem:
                raise ValueError(f"`{prefix}{declared.name}={value!r}` is not allowed: it must be {problem}.")


def _find_problem(value: Any, limits: Any) -> str | None:
    if limits.get("choices") and value not in limits["choices"]:
        return f"one of {', '.join(limits['choices'])}"
    checks = {
        "least": (lambda limit: value >= limit, "at least"),
        "most": (lambda limit: value <= limit, "at most"),
        "above": (lambda limit: limit < value < math.inf, "a number greater than"),
        "below": (lambda limit: value < limit, "less than"),
    }
    for name, (holds, words) in checks.items():
        # NaN fulfils no condition.
        if name in limits and not holds(limits[name]):
            return f"{words} {limits[name]}"
    return None


class Part:
    """Base of the options of a part, which are the fields `<prefix><name>` of [`XMCTrainingArguments`]."""

    prefix: ClassVar[str]

    def __post_init__(self) -> None:
        check_limits(self, self.prefix)


@dataclass
class TfidfArguments(Part):
    """Options of [`TfidfFeaturizer`], which documents them."""

    prefix: ClassVar[str] = "tfidf_"

    analyzer: str = option("word", "Terms are n-grams of words or of characters.", choices=("word", "char_wb"))
    ngram_range: list[int] = option([1, 2], "Smallest and largest n of the n-grams.", least=1)
    min_df: int = option(1, "Number of documents that must contain a term.", least=1)
    max_features: int = option(300_000, "Number of terms to keep, the most frequent ones; 0 keeps all.", least=0)
    stemmer: str = option(
        "auto",
        "Language of the Snowball stemmer, such as `english`: words with the same stem are the same term. `auto`: the "
        "language that the texts seem to have; `none`: words as they are.",
    )
    lead_words: int | None = option(
        None,
        "First words, such as a title, whose terms get features of their own; -1 for the first line of the text, 0 "
        f"for none. By default {LEAD_WORDS} if half of the texts have {LONG_TEXT} words or more.",
        least=FIRST_LINE,
    )
    strip_accents: bool = option(False, "Letters with and without accents are the same.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(as_list(self.ngram_range)) != 2 or self.ngram_range[0] > self.ngram_range[1]:
            raise ValueError(f"`tfidf_ngram_range={self.ngram_range}` is not allowed: pass two numbers n <= m.")
        if self.stemmer not in ("auto", "none"):
            load_stemmer(self.stemmer)
            if self.analyzer != "word":
                raise ValueError(f"`tfidf_stemmer={self.stemmer!r}` needs `tfidf_analyzer='word'`.")


@dataclass
class TreeArguments(Part):
    """Shape of the label tree."""

    prefix: ClassVar[str] = "tree_"

    clustering: str = option(
        "balanced",
        "How labels are clustered. `balanced`: recursive balanced spherical k-means (Parabel, XR-Linear); `kmeans`: "
        "plain k-means with clusters of any size (Bonsai); `flat`: no hierarchy, one-vs-rest (DiSMEC); `frequency`: "
        "frequent labels first, rare ones in tail clusters (APLC-XLNet); `hierarchy`: no clustering, the parents that "
        "the vocabulary of the labels (`label_texts`) has.",
        choices=CLUSTERINGS,
    )
    branching: int = option(16, "Children of an inner node. Sixteen fill the SIMD lanes of the kernels.", least=2)
    max_leaf_size: int = option(16, "Largest number of labels in a cluster of the lowest level.", least=2)
    max_depth: int | None = option(None, "Largest number of levels, labels included; unlimited by default.", least=1)
    shares: list[float] = option(
        [0.7, 0.2, 0.1],
        "With `frequency`: shares of the frequent labels and of each tail cluster; they sum to 1.",
        above=0,
    )
    shares_of: str = setting("mass", "Shares of label occurrences (mass) or of labels (count).", choices=SHARES_OF)
    kmeans_iterations: int = setting(20, "Largest number of iterations of one k-means.", least=1)
    tree_seed: int = setting(0, "Seed of the initial centroids.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares = list(self.shares)
        if not math.isclose(sum(self.shares), 1, abs_tol=1e-6):
            raise ValueError(f"`tree_shares={self.shares}` is not allowed: shares must sum to 1.")


@dataclass
class RankerArguments(Part):
    """Training and prediction of the linear ranker."""

    prefix: ClassVar[str] = "ranker_"

    loss: str = option("squared_hinge", "Loss of the classifiers.", choices=tuple(LOSSES))
    C: float = option(1.0, "Weight of the loss relative to the L2 penalty, as in scikit-learn.", above=0)
    negative_cost: float | None = option(None, "C of negative documents; `ranker_C` by default.", above=0)
    cost_sensitive: bool = option(
        False,
        "Weight a positive by its share of the labels of the document. See XR-Transformer, eq. 6; the weights are "
        "scaled so that their mean is `ranker_C`.",
    )
    train_beam_size: int = option(
        60,
        "Beam size of the search for matcher-aware negatives. In trees of three levels or more the levels on the way "
        "keep a third of it, at least 20.",
        least=1,
    )
    beam_size: int | None = option(
        None, "Beam size at prediction. By default a twenty-fifth of the clusters of labels, at least 40.", least=1
    )
    prune_threshold: float = option(
        1e-4, "Drop weights that change the logits of a node by less than this (root mean square).", least=0
    )
    weight_dtype: str = option("int8", "Type of the stored weights.", choices=WEIGHT_DTYPES)
    max_passes: int = option(10, "Largest number of passes over the documents of a node.", least=1)
    tolerance: float = option(0.1, "Stop the training of a node when no logit is wrong by more than this.", above=0)
    negatives: str = setting(
        "both",
        "Training documents of a label: those with a label of the same cluster (tfn), those that the levels above "
        "send there (man), or both.",
        choices=NEGATIVES,
    )
    matcher: str = setting(
        "ranker", "What finds the clusters whose labels are ranked: the ranker or the heads.", choices=MATCHERS
    )
    ranking: str = setting("leaf", "Score of a label: its own logit (leaf) or its whole path.", choices=RANKINGS)
    bias_prior: float = setting(-1.0, "Initial logit of every classifier.")
    ranker_seed: int = setting(0, "Seed of the order of the documents.")


@dataclass
class KNNArguments(Part):
    """Votes of the most similar training documents."""

    prefix: ClassVar[str] = "knn_"

    count: int = option(30, "Number of similar documents that vote.", least=1)
    exponent: float = option(
        4.0, "A vote weighs the similarity to this power. 4 to 8 suit longer texts, 2 suits titles.", above=0
    )
    terms: int = setting(256, "Number of terms of a training document in the index; 0 keeps all.", least=0)


@dataclass
class EncoderArguments(Part):
    """How the encoder turns a text into one vector."""

    prefix: ClassVar[str] = "encoder_"

    name: str | None = option(None, "Folder or Hub id of the pretrained encoder.")
    max_length: int | None = option(
        None,
        "Largest number of tokens that the encoder reads at once. By default 128, or less if 95 % of texts have less.",
        least=8,
    )
    long_text: str = option(
        "truncate",
        "Treatment of longer texts. `truncate` keeps the beginning, `head_tail` the first and the last tokens; "
        "`windows` averages the vectors of several windows in the ranker and at prediction, fine-tuning reads the "
        "first.",
        choices=LONG_TEXTS,
    )
    max_windows: int = option(4, "Largest number of windows of a text.", least=1)
    pooling: str | None = option(None, "Pooling of the token states; by default the encoder's.", choices=POOLINGS)
    pooling_layers: int = option(1, "Number of last layers whose pooled states are concatenated.", least=1)
    attn_implementation: str | None = option(
        None,
        "Attention: sdpa, eager, flash_attention_2 or another one of transformers. By default that of the encoder, "
        "or, while training in bfloat16 on a CPU, `eager`, the fastest there.",
    )
    dropout: float = option(
        0.0, "Dropout of the encoder during fine-tuning. Steps are faster without it.", least=0, below=1
    )
    lora_rank: int = option(
        0,
        "Rank of the LoRA adapters of all linear layers; 0 trains the encoder itself. Adapters need about ten times "
        "the learning rate. They are merged into the encoder at the end.",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank:
            require_peft()

    def model_kwargs(self) -> dict[str, Any]:
        """The arguments of [`~XMCForTextClassification.from_encoder`] that these options set."""
        names = (
            "pooling",
            "pooling_layers",
            "dropout",
            "attn_implementation",
            "max_length",
            "long_text",
            "max_windows",
        )
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class LevelArguments(Part):
    """
    Fine-tuning of the encoder and its heads, level by level.

    Options typed `X | list[X]` take one value for all trained levels, or one for each.
    """

    prefix: ClassVar[str] = "level_"

    objective: str = option(
        "heads",
        "What the encoder is trained for. `heads`: classifiers of the levels; `label_texts`: document vectors "
        "that are close to the vectors of the texts, or names, of their labels, and a head of the labels.",
        choices=LEVEL_OBJECTIVES,
    )
    indices: int | list[int] | None = option(
        None,
        "Levels to train, counted from 1 (the coarsest) or back from -1 (the labels). By default the labels and, if "
        "there are more than 16,384, the level above.",
    )
    epochs: float | list[float] | None = option(
        None, "Passes over the documents for each level, instead of `num_train_epochs`.", least=0
    )
    steps: int | list[int] | None = option(None, "Optimizer steps for each level, instead of `max_steps`.", least=0)
    learning_rate: float | list[float] | None = option(
        None, "Highest learning rate of the encoder for each level, instead of `learning_rate`.", least=0
    )
    head_learning_rate: float | list[float] = option(5e-3, "Highest learning rate of the heads.", least=0)
    projection_learning_rate: float | list[float] | None = setting(
        None, "Highest learning rate of projections before a head; that of the head by default.", least=0
    )
    min_lr_ratio: float = setting(
        0.0, "Ratio of the lowest to the highest learning rate, before warmup and after decay.", least=0, most=1
    )
    loss: str = option("bce", "Loss of the heads.", choices=HEAD_LOSSES)
    negatives: str | list[str] | None = option(
        None,
        "Nodes in the loss of a document. `tfn`: children of the true nodes of the "
        "level above; `man`: children of the nodes that the model finds there before the first step; `both`: these "
        "two; `all`: every node; `dynamic`: as `both`, with the nodes found in the same forward pass. By default all "
        "nodes of levels of up to 16,384 nodes, `both` for larger ones.",
        choices=HEAD_NEGATIVES,
    )
    beam_size: int | list[int] = option(20, "Beam size of the search for negatives in the level above.", least=1)
    cost_sensitive: bool = setting(
        False, "Weight a true node by its share of the labels of the document. See XR-Transformer, eq. 6."
    )
    bootstrap: bool = option(
        True, "Initialise heads with linear classifiers on the encoder's vectors. See XR-Transformer, eq. 11."
    )
    dropout: float = option(0.1, "Dropout of the document vector before the heads.", least=0, below=1)
    swa_start: float = option(
        1.0,
        "Part of the steps of a level after which weights are averaged; 1 averages none. The averaged weights are "
        "evaluated and kept.",
        least=0,
        most=1,
    )
    swa_steps: int = setting(10, "Steps between two averaged states.", least=1)
    epoch_shares: list[float] | None = setting(
        None,
        "Shares of the levels in `num_train_epochs` and `max_steps`, the labels last. The first is repeated for "
        "further coarse levels. Equal by default.",
        above=0,
    )
    max_nodes: int = setting(131072, "Largest number of nodes of a level that is trained by default.", least=1)
    negative_weight: float | None = setting(
        None,
        "Weight of the other nodes; by default 1, or with `cost_sensitive` the mean weight of a true node.",
        least=0,
    )
    bootstrap_cost: float = setting(1.0, "C of the linear classifiers that initialise heads.", above=0)
    bootstrap_prior: bool = setting(
        True,
        "Draw these classifiers to the vectors of the labels; otherwise to 0 as in the paper, which needs a larger C.",
    )
    joint: bool = setting(
        False,
        "Train all levels in the same steps by the sum of their losses. The head of a lower level is initialised to "
        "separate the children of the true nodes.",
    )
    bottleneck: int = setting(
        0, "Size of a projection before the head of the labels, if a level above has a head; 0 for none.", least=0
    )
    shrink: float | None = setting(
        None, "Use an adaptive head: the projection of each tail cluster is smaller by this factor.", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        negatives = set() if self.negatives is None else set(as_list(self.negatives))
        if "dynamic" in negatives and not self.joint:
            raise ValueError("`level_negatives='dynamic'` needs a method that trains all levels jointly: lightxml.")
        if self.shrink is not None and (not self.joint or self.bottleneck):
            raise ValueError("`shrink` needs `joint` and no `bottleneck`: tail clusters have own projections.")
        if self.shrink is not None and negatives != {"tfn"}:
            raise ValueError(
                f"`level_negatives={self.negatives!r}` is not allowed with an adaptive head: the loss of a tail "
                "cluster is defined for `tfn` only."
            )

    def choose_levels(self, tree: LabelTree) -> list[int]:
        """The levels of a tree to train, in ascending order."""
        # Imported here: training a ranker does not need torch.
        from ..modeling_heads import SPARSE_ROWS

        if self.indices is None:
            above = [tree.depth - 1] if tree.num_labels > SPARSE_ROWS and tree.depth > 1 else []
            levels = [level for level in (*above, tree.depth) if tree.level_sizes[level - 1] <= self.max_nodes]
            if not levels:
                raise ValueError(
                    f"No level of the tree has at most {self.max_nodes} nodes: the levels have {tree.level_sizes}. "
                    "Name the levels to train in `level_indices`."
                )
            return levels
        indices = as_list(self.indices)
        levels = sorted({index if index > 0 else tree.depth + 1 + index for index in indices})
        if not levels or levels[0] < 1 or levels[-1] > tree.depth or 0 in indices:
            raise ValueError(
                f"`level_indices={self.indices}` does not fit the tree, whose levels are 1 to {tree.depth}, or "
                f"-{tree.depth} to -1, with {tree.level_sizes} nodes."
            )
        return levels

    def group_levels(self, levels: Sequence[int]) -> list[list[int]]:
        """Groups of levels that are trained in the same steps, in order of training."""
        return [list(levels)] if self.joint else [[level] for level in levels]

    def choose_negatives(self, tree: LabelTree, levels: Sequence[int]) -> list[str]:
        """The kind of negatives of each trained level."""
        from ..modeling_heads import SPARSE_ROWS

        if self.negatives is None:
            return ["all" if tree.level_sizes[level - 1] <= SPARSE_ROWS else "both" for level in levels]
        return per_level(self.negatives, len(levels), "negatives")


def options_of(part: type[Part]) -> list[dataclasses.Field]:
    """The fields of a part that users can set."""
    return [declared for declared in dataclasses.fields(part) if not declared.metadata.get("preset_only")]  # type: ignore[arg-type]


def per_level(values: T | Sequence[T], count: int, name: str) -> list[T]:
    """The values of `level_<name>` for `count` levels: one value for all, or one for each."""
    values = as_list(values)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ValueError(
            f"`level_{name}` has {len(values)} values, but {count} levels are trained: pass one value, or {count}."
        )
    return values


def require_peft() -> None:
    """Raises if the package peft is not installed."""
    if find_spec("peft") is None:
        raise ImportError(
            "`encoder_lora_rank` needs the package peft: `pip install hf-xmc[peft]`, or set `encoder_lora_rank=0` to "
            "train the encoder itself."
        )

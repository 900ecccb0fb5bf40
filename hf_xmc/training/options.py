"""Options of the parts of a training: encoder, tree, ranker, knn and levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TypeVar

from ..configuration_xmc import HEAD_LOSSES, LONG_TEXTS, POOLINGS
from ..label_tree import LabelTree
from ..linear_ranker import LOSSES, RANKINGS
from .shortlist import NEGATIVES

T = TypeVar("T")


@dataclass
class EncoderArguments:
    """
    How the encoder reads a text and makes one vector of it.

    Args:
        name (`str`, *optional*):
            Folder or Hub id of the pretrained encoder to start from.
        max_length (`int`, *optional*, defaults to 128): Tokens that the encoder reads at once.
        long_text (`str`, *optional*, defaults to `"truncate"`):
            What becomes of longer texts: `"truncate"` keeps their beginning, `"head_tail"` the first and the last half
            of the length; `"windows"` averages the vectors of up to `max_windows` pieces for the ranker and at
            prediction, while fine-tuning sees the first.
        max_windows (`int`, *optional*, defaults to 4): Windows read of a text.
        pooling (`str`, *optional*): `"mean"`, `"cls"` or `"last"`; by default what suits the encoder.
        pooling_layers (`int`, *optional*, defaults to 1): Last layers whose pooled states are put side by side.
        attn_implementation (`str`, *optional*):
            How the encoder computes attention: `"sdpa"`, `"eager"`, `"flash_attention_2"` or what else transformers
            knows; its own choice by default. Training in bfloat16 on a CPU is fastest with `"eager"`.
        dropout (`float`, *optional*, defaults to 0.0):
            Dropout inside the encoder while it is fine-tuned. Few passes over the documents need none, and without it
            a step is a good deal faster.
        lora_rank (`int`, *optional*, defaults to 0):
            Rank of adapters (LoRA) on all linear layers, which are trained in place of the encoder's weights: little
            memory for the optimiser, for large encoders. They learn at ten times the learning rate or so, and are
            merged into the weights in the end. 0 trains the encoder itself.
        lora_alpha (`float`, *optional*):
            The adapters weigh `lora_alpha / lora_rank`; twice the rank by default.
    """

    name: str | None = field(default=None, metadata={"help": "Folder or Hub id of the encoder to start from."})
    max_length: int = field(default=128, metadata={"help": "Tokens that the encoder reads at once."})
    long_text: str = field(
        default="truncate", metadata={"help": "What becomes of longer texts.", "choices": LONG_TEXTS}
    )
    max_windows: int = field(default=4, metadata={"help": "Windows read of a text."})
    pooling: str | None = field(
        default=None, metadata={"help": "How token states become one vector.", "choices": POOLINGS}
    )
    pooling_layers: int = field(default=1, metadata={"help": "Last layers whose states are put side by side."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "How the encoder computes attention: sdpa, eager, flash_attention_2."}
    )
    dropout: float = field(default=0.0, metadata={"help": "Dropout inside the encoder while it is fine-tuned."})
    lora_rank: int = field(
        default=0, metadata={"help": "Rank of adapters that are trained in place of the encoder; 0 for none."}
    )
    lora_alpha: float | None = field(
        default=None, metadata={"help": "Weight of the adapters times their rank; twice the rank by default."}
    )

    def __post_init__(self) -> None:
        for name, choices in (("long_text", LONG_TEXTS), ("pooling", (None, *POOLINGS))):
            if getattr(self, name) not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not one of {known}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and less than 1, not {self.dropout}.")
        for name, least in (("max_length", 8), ("max_windows", 1), ("pooling_layers", 1), ("lora_rank", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, not {getattr(self, name)}.")
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise ValueError(f"`lora_alpha` must be greater than 0, not {self.lora_alpha}.")
        if self.lora_rank:
            require_peft()


CLUSTERINGS = ("balanced", "kmeans", "flat", "frequency")


SHARES_OF = ("mass", "count")


@dataclass
class TreeArguments:
    """
    Shape of the label tree.

    Args:
        clustering (`str`, *optional*, defaults to `"balanced"`):
            `"balanced"`: recursive balanced spherical k-means (Parabel, XR-Linear); `"kmeans"`: plain k-means, whose
            clusters may differ in size (Bonsai); `"flat"`: no hierarchy, one-vs-rest (DiSMEC); `"frequency"`: frequent
            labels by themselves, rare ones in tails (APLC), see [`frequency_tree`].
        branching (`int`, *optional*, defaults to `16`):
            Children of an inner node; sixteen fill the lanes of the kernels.
        max_leaf_size (`int`, *optional*, defaults to `16`):
            Labels under a lowest node.
        max_depth (`int`, *optional*):
            Levels below the root, labels included; as many as needed by default.
        kmeans_iterations (`int`, *optional*, defaults to `20`):
            Largest number of rounds of one clustering.
        tree_seed (`int`, *optional*, defaults to `0`):
            Seed of the starting centres.
        shares (`list[float]`, *optional*, defaults to `[0.7, 0.2, 0.1]`):
            With `"frequency"` the parts of the frequent labels and of each tail; they add up to 1.
        shares_of (`str`, *optional*, defaults to `"mass"`):
            What the shares divide: `"mass"`, how often labels occur, or `"count"`, how many they are.
    """

    clustering: str = field(
        default="balanced",
        metadata={"help": "How labels are grouped: balanced, kmeans, flat or frequency.", "choices": CLUSTERINGS},
    )
    branching: int = field(default=16, metadata={"help": "Children of an inner node."})
    max_leaf_size: int = field(default=16, metadata={"help": "Labels under a lowest node."})
    max_depth: int | None = field(default=None, metadata={"help": "Levels below the root, labels included."})
    kmeans_iterations: int = field(default=20, metadata={"help": "Largest number of rounds of one clustering."})
    tree_seed: int = field(default=0, metadata={"help": "Seed of the starting centres."})
    shares: list[float] = field(
        default_factory=lambda: [0.7, 0.2, 0.1],
        metadata={"help": "Parts of frequent labels and of tails of rare ones."},
    )
    shares_of: str = field(
        default="mass", metadata={"help": "Shares of occurrences (mass) or of labels (count).", "choices": SHARES_OF}
    )

    def __post_init__(self) -> None:
        self.shares = list(self.shares)
        if min(self.shares, default=0) <= 0 or not math.isclose(sum(self.shares), 1, abs_tol=1e-6):
            raise ValueError(f"`shares` must be greater than 0 and add up to 1, but are {self.shares}.")
        if self.shares_of not in SHARES_OF:
            raise ValueError(f"`shares_of={self.shares_of!r}` is not one of {', '.join(SHARES_OF)}.")
        if self.clustering not in CLUSTERINGS:
            raise ValueError(f"`clustering={self.clustering!r}` is not one of {', '.join(CLUSTERINGS)}.")
        for name, least in (("branching", 2), ("max_leaf_size", 2), ("kmeans_iterations", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, not {getattr(self, name)}.")
        if self.max_depth is not None and self.max_depth < 1:
            raise ValueError(f"`max_depth` must be at least 1, not {self.max_depth}.")


WEIGHT_DTYPES = ("int8", "float32")


MATCHERS = ("ranker", "heads")


@dataclass
class RankerArguments:
    """
    How the linear ranker is trained and how it predicts.

    Args:
        loss (`str`, *optional*, defaults to `"squared_hinge"`): `"squared_hinge"` or `"logistic"`.
        cost (`float`, *optional*, defaults to `1.0`): Weight C of a document's loss against the regulariser.
        negative_cost (`float`, *optional*): The same for negative documents; `cost` by default.
        cost_sensitive (`bool`, *optional*, defaults to `False`):
            Whether a positive weighs as its share of the document's true labels, equation (6), so that documents with
            few labels count as much as those with many; scaled so that positives weigh `cost` on average.
        negatives (`str`, *optional*, defaults to `"both"`):
            Documents a lowest node's labels are trained on: `"tfn"` those with a true label under the node, `"man"`
            those that the levels above send there, `"both"` their union.
        matcher (`str`, *optional*, defaults to `"ranker"`):
            What finds the nodes whose labels are ranked: `"ranker"`: linear models of its own for the levels above;
            `"heads"`: the heads on the encoder, so that the ranker has the levels below the lowest of them only.
        train_beam_size (`int`, *optional*, defaults to `60`):
            Nodes in a document's beam that finds `man` negatives. A search that passes three levels or more keeps a
            third of them, but at least 20, on the way.
        ranking (`str`, *optional*, defaults to `"leaf"`): `"leaf"` or `"path"`, see [`LinearRanker`].
        beam_size (`int`, *optional*, defaults to `40`):
            Nodes per level at prediction. With some thousand labels 20 do as well, with 50,000 or more 160 are better.
        prune_threshold (`float`, *optional*, defaults to `1e-4`):
            Weights are dropped whose loss changes the node's logits by less than this (root mean square).
        weight_dtype (`str`, *optional*, defaults to `"int8"`): `"int8"` (one scale per row) or `"float32"`.
        max_passes (`int`, *optional*, defaults to `10`): Largest number of passes over a node's documents.
        tolerance (`float`, *optional*, defaults to `0.1`): Training of a node ends when no logit is wrong by more.
        bias_prior (`float`, *optional*, defaults to `-1.0`): Logit that every classifier starts from.
        ranker_seed (`int`, *optional*, defaults to `0`): Seed of the order in which documents are visited.
    """

    loss: str = field(default="squared_hinge", metadata={"help": "Loss of the ranker.", "choices": tuple(LOSSES)})
    cost: float = field(default=1.0, metadata={"help": "Weight C of a document's loss against the regulariser."})
    negative_cost: float | None = field(default=None, metadata={"help": "C of negative documents; `cost` by default."})
    cost_sensitive: bool = field(
        default=False, metadata={"help": "Weigh positives by their share of the true labels."}
    )
    negatives: str = field(
        default="both", metadata={"help": "Documents a label is trained on: tfn, man or both.", "choices": NEGATIVES}
    )
    matcher: str = field(
        default="ranker", metadata={"help": "What finds the nodes whose labels are ranked.", "choices": MATCHERS}
    )
    train_beam_size: int = field(default=60, metadata={"help": "Beam that finds matcher-aware negatives."})
    ranking: str = field(
        default="leaf", metadata={"help": "Rank labels by their own logit or by the whole path.", "choices": RANKINGS}
    )
    beam_size: int = field(default=40, metadata={"help": "Nodes kept per level at prediction."})
    prune_threshold: float = field(
        default=1e-4, metadata={"help": "Weights that move logits by less than this are dropped."}
    )
    weight_dtype: str = field(
        default="int8", metadata={"help": "How weights are stored: int8 or float32.", "choices": WEIGHT_DTYPES}
    )
    max_passes: int = field(default=10, metadata={"help": "Largest number of passes over a node's documents."})
    tolerance: float = field(default=0.1, metadata={"help": "Largest wrong logit at which training may stop."})
    bias_prior: float = field(default=-1.0, metadata={"help": "Logit that every classifier starts from."})
    ranker_seed: int = field(default=0, metadata={"help": "Seed of the order in which documents are visited."})

    def __post_init__(self) -> None:
        for name, choices in (
            ("loss", tuple(LOSSES)),
            ("negatives", NEGATIVES),
            ("matcher", MATCHERS),
            ("ranking", RANKINGS),
            ("weight_dtype", WEIGHT_DTYPES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not one of {', '.join(choices)}.")
        for name in ("cost", "negative_cost", "tolerance"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0, not {value}.")
        for name in ("train_beam_size", "beam_size", "max_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, not {getattr(self, name)}.")
        if not self.prune_threshold >= 0:
            raise ValueError(f"`prune_threshold` must not be negative, but is {self.prune_threshold}.")


@dataclass
class KNNArguments:
    """
    How similar documents are found and vote.

    Args:
        count (`int`, *optional*, defaults to `30`): Documents that vote.
        power (`float`, *optional*, defaults to `4.0`):
            Power that similarities are raised to. 4 to 8 suit texts of some length, 2 titles.
        terms (`int`, *optional*, defaults to `256`):
            Heaviest terms by which a training document is found; 0 keeps all. More cost space and time and hardly
            change what is found.
    """

    count: int = field(default=30, metadata={"help": "Similar documents that vote."})
    power: float = field(default=4.0, metadata={"help": "Power that similarities are raised to in a vote."})
    terms: int = field(
        default=256, metadata={"help": "Heaviest terms by which a training document is found; 0 keeps all."}
    )

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"`count` must be at least 1, not {self.count}.")
        if not 0 < self.power < math.inf:
            raise ValueError(f"`power` must be a number greater than 0, not {self.power}.")
        if self.terms < 0:
            raise ValueError(f"`terms` must not be negative, but is {self.terms}; 0 keeps all.")


HEAD_NEGATIVES = ("tfn", "man", "both", "all", "dynamic")


@dataclass
class LevelArguments:
    """
    How an encoder and its heads are trained, level by level. Lists hold one value for all levels or one for each.

    Args:
        indices (`list[int]`, *optional*):
            Levels to train, counted from 1 (the coarsest) or back from -1 (the labels). By default the labels and,
            where there are too many to score all for every document, the level above them.
        max_nodes (`int`, *optional*, defaults to 131072): Nodes of the largest level to train.
        epochs (`list[float]`, *optional*, defaults to `[1.0]`):
            Passes over the documents; 0 leaves the encoder as it is and only bootstraps the heads.
        steps (`list[int]`, *optional*): Optimiser steps, in place of `epochs`.
        learning_rate (`list[float]`, *optional*, defaults to `[1e-4]`): Highest learning rate of the encoder.
        head_learning_rate (`list[float]`, *optional*, defaults to `[5e-3]`): Highest learning rate of the head.
        projection_learning_rate (`list[float]`, *optional*):
            Highest learning rate of what shortens the vector for a head; that of the head by default.
        warmup (`float`, *optional*, defaults to 0.1):
            Part of a level's steps in which the learning rates rise; in the rest they fall.
        min_lr_ratio (`float`, *optional*, defaults to 0.0):
            Part of the highest learning rates from which they rise and to which they fall; 1 keeps them constant.
        loss (`str`, *optional*, defaults to `"bce"`): `"bce"` or `"squared_hinge"`.
        negatives (`list[str]`, *optional*):
            Nodes in the loss of a document: `"tfn"` those under the true nodes of the level before, `"man"` those
            under the nodes that the model itself finds there before the first step, `"both"` or `"all"`; `"dynamic"`
            both with the nodes that it finds in the very same pass. By default all of a level that is small enough,
            both of others.
        beam_size (`list[int]`, *optional*, defaults to `[20]`): Nodes of the level before that the model finds.
        cost_sensitive (`bool`, *optional*, defaults to `False`):
            Whether a true node weighs as its share of the document's labels, equation (6).
        negative_weight (`float`, *optional*):
            Weight α of the other nodes; by default 1, or with `cost_sensitive` the mean weight of a true node.
        bootstrap (`bool`, *optional*, defaults to `True`):
            Whether a head starts from the linear model of the level on the encoder as it is, equation (11).
        bootstrap_cost (`float`, *optional*, defaults to 4.0): Weight C of the loss of that linear model.
        dropout (`float`, *optional*, defaults to 0.1): Part of the document vector that is hidden from the heads.
        joint (`bool`, *optional*, defaults to `False`):
            Whether all levels are trained in the same steps, by the sum of their losses, instead of one after another.
            A head below another one then starts from what tells the children of the true nodes apart.
        bottleneck (`int`, *optional*, defaults to 0):
            Length to which the vector is projected before the labels score it, where a level above has a head; 0
            leaves it as it is.
        shrink (`float`, *optional*):
            Makes the labels' head an adaptive one: each tail of a tree by frequency gets a vector shorter by this
            factor than that of the tail before.
        swa_start (`float`, *optional*, defaults to 1.0):
            Part of a level's steps after which weights are averaged; the mean is evaluated and kept. 1 averages none.
        swa_steps (`int`, *optional*, defaults to 10): Steps from one averaged state to the next.
    """

    indices: list[int] | None = field(default=None, metadata={"help": "Levels to train; -1 are the labels."})
    max_nodes: int = field(default=131072, metadata={"help": "Nodes of the largest level to train."})
    epochs: list[float] = field(default_factory=lambda: [1.0], metadata={"help": "Passes over the documents."})
    steps: list[int] | None = field(default=None, metadata={"help": "Optimiser steps, in place of epochs."})
    learning_rate: list[float] = field(
        default_factory=lambda: [1e-4], metadata={"help": "Highest learning rate of the encoder."}
    )
    head_learning_rate: list[float] = field(
        default_factory=lambda: [5e-3], metadata={"help": "Highest learning rate of the head."}
    )
    projection_learning_rate: list[float] | None = field(
        default=None, metadata={"help": "The same of what shortens the vector for a head."}
    )
    warmup: float = field(default=0.1, metadata={"help": "Part of the steps in which the learning rates rise."})
    min_lr_ratio: float = field(default=0.0, metadata={"help": "Part of the learning rates that is left at the end."})
    loss: str = field(default="bce", metadata={"help": "Loss of the heads.", "choices": HEAD_LOSSES})
    negatives: list[str] | None = field(
        default=None, metadata={"help": "Nodes in the loss: tfn, man, both, all or dynamic."}
    )
    beam_size: list[int] = field(
        default_factory=lambda: [20], metadata={"help": "Nodes of the level before that the model finds."}
    )
    cost_sensitive: bool = field(default=False, metadata={"help": "Weigh true nodes by their share of the labels."})
    negative_weight: float | None = field(default=None, metadata={"help": "Weight of nodes that are not true."})
    bootstrap: bool = field(default=True, metadata={"help": "Start heads from a linear model."})
    bootstrap_cost: float = field(default=4.0, metadata={"help": "Weight of the loss of that linear model."})
    dropout: float = field(default=0.1, metadata={"help": "Part of the document vector hidden from the heads."})
    joint: bool = field(default=False, metadata={"help": "Train all levels in the same steps."})
    bottleneck: int = field(default=0, metadata={"help": "Length of the vector that labels score; 0 for all of it."})
    shrink: float | None = field(default=None, metadata={"help": "How much shorter each tail's vector is."})
    swa_start: float = field(default=1.0, metadata={"help": "Part of the steps before weights are averaged."})
    swa_steps: int = field(default=10, metadata={"help": "Steps from one averaged state to the next."})

    def __post_init__(self) -> None:
        rates = ("learning_rate", "head_learning_rate", "projection_learning_rate")
        for name in ("indices", "epochs", "steps", *rates, "negatives", "beam_size"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, list(value) if isinstance(value, (list, tuple)) else [value])
        if self.loss not in HEAD_LOSSES:
            raise ValueError(f"`loss={self.loss!r}` is not one of {', '.join(HEAD_LOSSES)}.")
        for negatives in self.negatives or ():
            if negatives not in HEAD_NEGATIVES:
                raise ValueError(f"`negatives={negatives!r}` is not one of {', '.join(HEAD_NEGATIVES)}.")
        for name in ("epochs", "steps", *rates):
            if any(not value >= 0 for value in getattr(self, name) or ()):
                raise ValueError(f"`{name}` must not be negative, but is {getattr(self, name)}.")
        if any(value < 1 for value in self.beam_size):
            raise ValueError(f"`beam_size` must be at least 1, not {self.beam_size}.")
        for name in ("warmup", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 0 and less than 1, not {getattr(self, name)}.")
        if self.negative_weight is not None and not self.negative_weight >= 0:
            raise ValueError(f"`negative_weight` must not be negative, but is {self.negative_weight}.")
        if not self.bootstrap_cost > 0:
            raise ValueError(f"`bootstrap_cost` must be greater than 0, not {self.bootstrap_cost}.")
        for name in ("min_lr_ratio", "swa_start"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be between 0 and 1, not {getattr(self, name)}.")
        for name, least in (("bottleneck", 0), ("swa_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, not {getattr(self, name)}.")
        self._check_joint()

    def _check_joint(self) -> None:
        """Raises where options contradict each other that concern levels trained together."""
        if "dynamic" in (self.negatives or ()) and not self.joint:
            raise ValueError("`negatives='dynamic'` needs the level above in the same pass: set `joint`.")
        if self.shrink is None:
            return
        if not self.shrink >= 1:
            raise ValueError(f"`shrink` must be at least 1, not {self.shrink}.")
        if not self.joint or self.bottleneck:
            raise ValueError("`shrink` needs `joint` and goes without `bottleneck`: tails have their own projections.")
        if set(self.negatives or ()) != {"tfn"}:
            raise ValueError(
                f"`shrink` needs `negatives='tfn'`, not {self.negatives}: a tail's loss counts the documents with a "
                "true label in it."
            )

    def choose_levels(self, tree: LabelTree) -> list[int]:
        """The levels of a tree to train, ascending."""
        # Imported here: a ranker can be trained without all that a model imports.
        from ..modeling_heads import SPARSE_ROWS

        if self.indices is None:
            above = [tree.depth - 1] if tree.num_labels > SPARSE_ROWS and tree.depth > 1 else []
            levels = [level for level in (*above, tree.depth) if tree.level_sizes[level - 1] <= self.max_nodes]
            if not levels:
                raise ValueError(
                    f"`level_max_nodes={self.max_nodes}` leaves no level to train: the levels have {tree.level_sizes} "
                    "nodes. Raise it, or name levels in `level_indices`."
                )
            return levels
        levels = sorted({index if index > 0 else tree.depth + 1 + index for index in self.indices})
        if not levels or levels[0] < 1 or levels[-1] > tree.depth or 0 in self.indices:
            raise ValueError(
                f"`level_indices={self.indices}` names a level that the tree has not: it has the levels 1 to "
                f"{tree.depth}, or -{tree.depth} to -1, of {tree.level_sizes} nodes."
            )
        return levels

    def group_levels(self, levels: Sequence[int]) -> list[list[int]]:
        """The levels that are trained in the same steps, group after group."""
        return [list(levels)] if self.joint else [[level] for level in levels]

    def choose_negatives(self, tree: LabelTree, levels: Sequence[int]) -> list[str]:
        """The kind of negatives of each trained level."""
        from ..modeling_heads import SPARSE_ROWS

        if self.negatives is None:
            return ["all" if tree.level_sizes[level - 1] <= SPARSE_ROWS else "both" for level in levels]
        return per_level(self.negatives, len(levels), "negatives")


def per_level(values: Sequence[T], count: int, name: str) -> list[T]:
    """One value for each of `count` levels; one value is taken for all."""
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise ValueError(
            f"`level_{name}` has {len(values)} values, but {count} levels are trained: pass one for all, or {count}."
        )
    return list(values)


def require_peft() -> None:
    """Raises where the package that makes adapters is missing."""
    if find_spec("peft") is None:
        raise ImportError(
            "`encoder_lora_rank` needs the package peft, which is not installed: `pip install hf-xmc[peft]`, or set "
            "`encoder_lora_rank=0` to train the encoder itself."
        )

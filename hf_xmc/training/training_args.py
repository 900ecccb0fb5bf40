"""All options of a training run."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from ..tfidf import TfidfFeaturizer
from .clustering import TreeArguments
from .methods import METHODS, method_options
from .ranker_training import RankerArguments

# Options `<prefix>_<name>` are the arguments `<name>` of these parts, which hold their defaults.
_PARTS: dict[str, type] = {"tfidf": TfidfFeaturizer, "tree": TreeArguments, "ranker": RankerArguments}
# One seed, `seed`, serves all parts.
_SEEDS = {"tree": "tree_seed", "ranker": "ranker_seed"}


def _taken_over(part: type, name: str) -> Any:
    """A field with the help and the choices it has in `part`. `None` stands for the value of the method."""
    (found,) = (found for found in dataclasses.fields(part) if found.name == name)
    return field(default=None, metadata=dict(found.metadata))


def _tfidf(help_text: str, **metadata: Any) -> Any:
    return field(default=None, metadata={"help": help_text, **metadata})


@dataclass
class XMCTrainingArguments(TrainingArguments):
    """
    Options of [`XMCTrainer`]: those of [`~transformers.TrainingArguments`] and the ones below.

    Options that begin with `tfidf_`, `tree_` and `ranker_` are the arguments of [`TfidfFeaturizer`], `TreeArguments`
    and `RankerArguments`, where they are explained and have their defaults. One that is left out (`None`) gets the
    value of the method's preset, or else that default; after construction each option holds the value that is used.

    Args:
        method (`str`, *optional*, defaults to `"xr-linear"`):
            Preset: `xr-linear`, `parabel`, `bonsai` or `dismec`. What is given explicitly wins over it.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether training may replace a finished model in `output_dir`.
        features (`str`, *optional*):
            `"text"` (TF-IDF of the texts) or `"vectors"` (those of the data set); text by default where there is any.
        vector_power (`float`, *optional*, defaults to 1.0):
            Power that the values of given vectors are raised to; 0.5 damps terms that one document repeats.
        label_features (`str`, *optional*, defaults to `"pifa"`):
            What places a label in the tree: `"pifa"` (the documents that carry it), `"text"` (its own) or `"both"`.
        label_max_features (`int`, *optional*, defaults to `1024`):
            Largest entries kept of each label's PIFA vector; `None` keeps all.
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
        default="pifa", metadata={"help": "What places a label in the tree.", "choices": ("pifa", "text", "both")}
    )
    label_max_features: int | None = field(
        default=1024, metadata={"help": "Largest entries kept of each label's PIFA vector."}
    )
    num_threads: int | None = field(default=None, metadata={"help": "Threads to use; all cores by default."})
    eval_ks: list[int] | None = field(default=None, metadata={"help": "Lengths of the ranking to measure at."})

    tfidf_analyzer: str | None = _tfidf("n-grams of words or of characters.", choices=("word", "char_wb"))
    tfidf_ngram_range: list[int] | None = _tfidf("Smallest and largest n of the n-grams.")
    tfidf_min_df: int | None = _tfidf("Documents that a term must be in.")
    tfidf_max_features: int | None = _tfidf("Terms to keep, the most frequent ones.")
    tfidf_sublinear_tf: bool | None = _tfidf("Count 1 + log(n) for a term that occurs n times.")
    tfidf_lowercase: bool | None = _tfidf("Ignore case.")

    tree_clustering: str | None = _taken_over(TreeArguments, "clustering")
    tree_branching: int | None = _taken_over(TreeArguments, "branching")
    tree_max_leaf_size: int | None = _taken_over(TreeArguments, "max_leaf_size")
    tree_max_depth: int | None = _taken_over(TreeArguments, "max_depth")
    tree_kmeans_iterations: int | None = _taken_over(TreeArguments, "kmeans_iterations")

    ranker_loss: str | None = _taken_over(RankerArguments, "loss")
    ranker_cost: float | None = _taken_over(RankerArguments, "cost")
    ranker_negative_cost: float | None = _taken_over(RankerArguments, "negative_cost")
    ranker_cost_sensitive: bool | None = _taken_over(RankerArguments, "cost_sensitive")
    ranker_negatives: str | None = _taken_over(RankerArguments, "negatives")
    ranker_train_beam_size: int | None = _taken_over(RankerArguments, "train_beam_size")
    ranker_ranking: str | None = _taken_over(RankerArguments, "ranking")
    ranker_beam_size: int | None = _taken_over(RankerArguments, "beam_size")
    ranker_threshold: float | None = _taken_over(RankerArguments, "threshold")
    ranker_weight_dtype: str | None = _taken_over(RankerArguments, "weight_dtype")
    ranker_max_passes: int | None = _taken_over(RankerArguments, "max_passes")
    ranker_tolerance: float | None = _taken_over(RankerArguments, "tolerance")
    ranker_bias_prior: float | None = _taken_over(RankerArguments, "bias_prior")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in method_options(self.method).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for prefix, part in _PARTS.items():
            for name, parameter in inspect.signature(part).parameters.items():
                option = f"{prefix}_{name}"
                if name != _SEEDS.get(prefix) and getattr(self, option) is None:
                    setattr(self, option, parameter.default)
        for option, choices in (("features", (None, "text", "vectors")), ("label_features", ("pifa", "text", "both"))):
            if getattr(self, option) not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise ValueError(f"`{option}={getattr(self, option)!r}` is not one of {known}.")
        if not self.vector_power > 0:
            raise ValueError(f"`vector_power` must be greater than 0, not {self.vector_power}.")
        # A wrong value is an error here and not after minutes of work.
        self.make_tfidf(), self.make_tree_arguments(), self.make_ranker_arguments()

    def make_tfidf(self) -> TfidfFeaturizer:
        """A new featurizer with the options `tfidf_*`."""
        return self._make("tfidf")

    def make_tree_arguments(self) -> TreeArguments:
        """The options `tree_*`."""
        return self._make("tree")

    def make_ranker_arguments(self) -> RankerArguments:
        """The options `ranker_*`."""
        return self._make("ranker")

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
        except ValueError as error:
            raise ValueError(f"Options `{prefix}_*`: {error}") from error

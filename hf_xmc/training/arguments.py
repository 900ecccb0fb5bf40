"""All options of a training run."""

from __future__ import annotations

import dataclasses
import functools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

import torch
from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from ..tfidf import TfidfFeaturizer
from ..utils import count_threads
from .label_features import ENCODER_LABEL_FEATURES, LABEL_FEATURES
from .options import (
    EncoderArguments,
    KNNArguments,
    LevelArguments,
    Part,
    RankerArguments,
    TfidfArguments,
    TreeArguments,
    default_of,
    explain_old_name,
    option,
    options_of,
)
from .presets import ENCODER_METHODS, METHODS, choose_method, method_preset
from .schedule import SCHEDULERS
from .text_statistics import default_lead_words, detect_language

# What can be trained to predict.
PREDICT_WITH = ("all", "ranker", "heads")
DEFAULT_LABEL_TEXT_WEIGHT = 0.5
# Optimizers with a version for the sparse rows of large heads.
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
# Options of the base class that it does not check.
_NUMBERS = (
    "learning_rate",
    "weight_decay",
    "num_train_epochs",
    "max_steps",
    "warmup_steps",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
)
# Options of the base class that belong to the record of a training.
_STANDARD_OPTIONS = (
    "seed",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "warmup_steps",
    "lr_scheduler_type",
    "weight_decay",
)


@dataclass
class GeneralArguments(Part):
    """Options of the training as a whole."""

    prefix: ClassVar[str] = ""

    method: str = option(
        "auto",
        "Preset of options. Options set explicitly win over it. `auto`: `xr-linear`, or `xr-transformer` with the "
        "encoder that is given. It is fine-tuned on label texts on a GPU or if a length such as `time_budget` is set.",
        choices=("auto", *METHODS),
    )
    overwrite: bool = option(False, "Replace a finished model in `output_dir`.")
    features: str | None = option(
        None,
        "Train on the texts (TF-IDF) or the vectors of the dataset; by default on texts if it has any.",
        choices=("text", "vectors"),
    )
    feature_power: float | None = option(
        None,
        "Power of the feature values, TF-IDF weights or vectors. 1.25 to 1.5 gives more weight to the heaviest terms "
        "of TF-IDF. By default 1, or 0.75 for vectors that are not of length 1, to damp repeated terms in raw counts.",
        above=0,
    )
    label_features: str = option(
        "pifa",
        "Features of the labels for the tree. `pifa`: TF-IDF of the documents of a label; `text`: TF-IDF of its text; "
        "`both`; with an encoder also `embedding` (vectors of the documents of a label, before fine-tuning) and "
        "`text-embedding` (the vector of its text).",
        choices=LABEL_FEATURES,
    )
    label_text_weight: float | None = option(
        None,
        "Norm of the label texts, or names, as further training documents of the ranker (norm 1); 0 for none. By "
        "default 0.5, or 0 for the methods of papers that do not read them.",
        least=0,
        below=math.inf,
    )
    refine_tree: bool = option(
        False, "Build a new tree for the ranker from TF-IDF and the fine-tuned encoder's vectors."
    )
    predict_with: str | None = option(
        None,
        "What predicts. `all`: ranker, heads, label vectors and similar documents, whose scores the last scorer turns "
        "into probabilities; it is fitted on the `eval_dataset` or, without one, on a tenth of the documents before "
        "the parts are trained on all of them. `ranker`, `heads`: this part alone. The default depends on the method.",
        choices=PREDICT_WITH,
    )
    similar_documents: bool | None = option(
        None,
        "With `predict_with='all'`: let similar training documents vote for their labels, too. The model then "
        "contains the terms, or vectors, of its training documents. By default with `method='auto'` only, and only if "
        "the documents of the last scorer show a clear gain.",
    )
    time_budget: float | None = option(
        None,
        "Minutes of fine-tuning, instead of `num_train_epochs` and `max_steps`. Learning rates then decay with the "
        "time, and a resumed training has the time that is left.",
        above=0,
    )
    embedding_scale: float = option(
        0.7, "Norm of the encoder's vector beside TF-IDF, which has norm 1, in the ranker.", above=0
    )
    embedding_cache: str | None = option(None, "Folder that caches the encoder's vectors for later runs.")
    widget_examples: bool = option(
        False, "Show three texts of the data in the model card. The card is published: the texts must not be private."
    )
    num_threads: int | None = option(
        None, "Number of threads; all cores by default. It does not change the results.", least=1
    )
    eval_ks: list[int] | None = option(None, "Cutoffs k of the metrics; by default those of `XMCMetrics`.", least=1)


PARTS: dict[str, type[Part]] = {
    part.prefix: part
    for part in (
        GeneralArguments,
        TfidfArguments,
        TreeArguments,
        RankerArguments,
        KNNArguments,
        EncoderArguments,
        LevelArguments,
    )
}


def _flat_fields() -> list[tuple[str, Any, Any]]:
    """Name, type and declaration of the options of all parts, for `make_dataclass`."""
    fields = []
    for prefix, part in PARTS.items():
        hints = get_type_hints(part)
        for declared in options_of(part):
            kind = hints[declared.name]
            # The command line reads one value or several as a list.
            kind = next((member for member in get_args(kind) if get_origin(member) is list), kind)
            metadata = {name: declared.metadata[name] for name in ("help", "choices") if name in declared.metadata}
            # `None` stands for the value of the method or the default of the part.
            default = None if prefix else default_of(declared)
            kind = kind | None if default is None else kind
            fields.append((f"{prefix}{declared.name}", kind, field(default=default, metadata=metadata)))
    return fields


def _with_own_options(cls: type) -> Any:
    """Completes the docstring of the arguments, and explains names of options of earlier versions."""
    lines = []
    for prefix, part in PARTS.items():
        for declared in options_of(part):
            kind, default = str(declared.type).removesuffix(" | None"), default_of(declared)
            ending = "" if default is None else f", defaults to `{default!r}`"
            lines.append(f"        {prefix}{declared.name} (`{kind}`, *optional*{ending}):")
            lines += textwrap.wrap(declared.metadata["help"], 107, initial_indent=" " * 12, subsequent_indent=" " * 12)
    cls.__doc__ = str(cls.__doc__).replace("        (own options)", "\n".join(lines))
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            explanation = explain_old_name(name)
            if explanation is not None:
                raise TypeError(explanation)
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _is_fast_in_bf16(use_cpu: bool) -> bool:
    """Whether the encoder is faster in bfloat16 than in float32."""
    if not use_cpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in all versions of torch
    return bool(found.get("avx512_bf16")) and not found.get("amx_tile")


if TYPE_CHECKING:

    class _OwnOptions:
        def __getattr__(self, name: str) -> Any: ...

else:
    _OwnOptions = dataclasses.make_dataclass("_OwnOptions", _flat_fields())


@_with_own_options
@dataclass
class XMCTrainingArguments(_OwnOptions, TrainingArguments):
    """
    Options of [`XMCTrainer`]: those of [`~transformers.TrainingArguments`] and the ones below.

    Standard options have their usual meaning. `num_train_epochs` are passes over the data in all and `max_steps` steps
    in all, shared out over the levels of the label tree that are trained one after the other; by default (-1) each
    level gets one pass, and 0 leaves the encoder as it is. `learning_rate` is the highest one of the encoder.
    `warmup_steps` (a number below 1 is a ratio) and `lr_scheduler_type` (`linear`, `cosine`, `constant` or
    `constant_with_warmup`) apply to each level. Options `level_*` override them for single levels.

    An option that is not set gets the value of the method's preset, or else its default; after construction each
    option holds the value that is used.

    Args:
        (own options)

    Example:

    ```python
    args = XMCTrainingArguments("my-tagger", method="bonsai", ranker_beam_size=20)
    args.tree_clustering, args.ranker_beam_size  # ('kmeans', 20)
    ```
    """

    num_train_epochs: float = field(
        default=-1.0, metadata={"help": "Passes over the data in all; by default one for each trained level."}
    )
    max_steps: int = field(
        default=-1, metadata={"help": "Steps of the optimizer in all; overrides `num_train_epochs`."}
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "Highest learning rate of the encoder."})
    warmup_steps: float = field(
        default=0.1, metadata={"help": "Warmup steps of each level; a number below 1 is a ratio of its steps."}
    )
    lr_scheduler_type: str = field(
        default="linear", metadata={"help": "Schedule of the learning rates in each level.", "choices": SCHEDULERS}
    )
    per_device_train_batch_size: int = field(
        default=32, metadata={"help": "Documents of a training step, on each device."}
    )
    per_device_eval_batch_size: int = field(
        default=32, metadata={"help": "Batch size of the encoder in evaluation and prediction."}
    )
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "Run the encoder in bfloat16 in training. By default with `method='auto'` on hardware that is "
            "fast at it: GPUs, and CPUs with `avx512_bf16` and without AMX, which fails on some virtual machines."
        },
    )
    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata={"help": "Order of documents: random, sequential, group_by_length (random, with less padding)."},
    )

    def __post_init__(self) -> None:
        self._check_standard_options()
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            ks = self.eval_ks or [5]
            self.metric_for_best_model: str | None = f"nDCG@{5 if 5 in ks else max(ks)}"
            self.greater_is_better: bool | None = True
        # The base class insists on this option if the CPU is the only device.
        self.use_cpu: bool = self.use_cpu or not torch.accelerator.is_available()
        if self.bf16 is None:
            chooses = self.method == "auto" and self.encoder_name is not None and not self.fp16
            self.bf16 = chooses and _is_fast_in_bf16(self.use_cpu)
        super().__post_init__()
        # The columns of tokenised documents are not arguments of the model.
        self.remove_unused_columns = False
        self._choose_method()
        self._fill_in()
        self._check_parts()
        self._check_prediction()
        self._check_steps()
        self._check_unused()

    def _choose_method(self) -> None:
        """Replaces `method="auto"` by the method that it stands for."""
        if self.method != "auto":
            self.similar_documents: bool | None = bool(self.similar_documents)
            return
        given = (self.time_budget, self.level_epochs, self.level_steps)
        has_length = any(value is not None for value in given) or self.num_train_epochs >= 0 or self.max_steps > 0
        options, self.method_reason = choose_method(self.encoder_name, has_length, not self.use_cpu)
        if self.bf16:
            self.method_reason += "; in bfloat16"
        for name, value in options.items():
            if name in ("method", "num_train_epochs") or getattr(self, name) is None:
                setattr(self, name, value)

    def _check_standard_options(self) -> None:
        """Refuses values of inherited options that are not supported."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                hint = " `level_learning_rate` takes one for each level." if name == "learning_rate" else ""
                raise TypeError(f"`{name}={value!r}` must be a number, not {type(value).__name__}.{hint}")
        scheduler = getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)
        if scheduler not in SCHEDULERS:
            raise ValueError(f"`lr_scheduler_type={scheduler!r}` is not one of {', '.join(SCHEDULERS)}.")
        if self.optim not in _OPTIMIZERS:
            raise ValueError(
                f"`optim={OptimizerNames(self.optim).value}` is not supported: the heads of large levels need AdamW."
            )
        for name in ("label_smoothing_factor", "lr_scheduler_kwargs"):
            if getattr(self, name):
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not supported. Leave it out.")
        if self.num_train_epochs != -1 and not self.num_train_epochs >= 0:
            raise ValueError(f"`num_train_epochs={self.num_train_epochs}` must be at least 0, or -1 for the default.")

    def _fill_in(self) -> None:
        """Sets options that were left out to the value of the preset or the default of their part."""
        for prefix, part in PARTS.items():
            for declared in options_of(part):
                value = getattr(self, prefix + declared.name)
                if value is None:
                    value = self._default(prefix, declared)
                if prefix == "level_" and isinstance(value, (list, tuple)) and len(value) == 1:
                    # One value for all levels means the same with and without brackets.
                    (value,) = value
                setattr(self, prefix + declared.name, value)
        if self.predict_with is None:
            self.predict_with: str | None = "all"
        if self.label_text_weight is None:
            self.label_text_weight: float | None = DEFAULT_LABEL_TEXT_WEIGHT

    def _default(self, prefix: str, declared: dataclasses.Field) -> Any:
        return self._preset(prefix).get(declared.name, default_of(declared))

    def _preset(self, prefix: str) -> dict[str, Any]:
        return method_preset(self.method).get(prefix.removesuffix("_") or "general", {})

    def _check_parts(self) -> None:
        """Makes all parts, so that a wrong value is an error now and not after minutes of work."""
        for prefix in PARTS:
            self._make(prefix)
        self.make_tfidf()
        count_threads(self.num_threads)

    def _check_prediction(self) -> None:
        """Checks what predicts against the method."""
        if self.predict_with == "heads" and not self.trains_encoder:
            raise ValueError(f"`predict_with='heads'` needs heads, and {self.method!r} has none.")
        if self.predict_with == "all" and self.uses_knn:
            raise ValueError("`predict_with='all'` needs classifiers: set `method='xr-linear'`.")
        needs_heads = None
        if self.make_ranker_arguments().matcher == "heads":
            needs_heads = "method"
        elif self.predict_with == "heads":
            needs_heads = "predict_with"
        if needs_heads and self.level_objective != "heads":
            raise ValueError(
                f"`{needs_heads}={getattr(self, needs_heads)!r}` needs heads, and `level_objective="
                f"{self.level_objective!r}` trains none. Leave it out, or set `level_objective='heads'`."
            )
        if self.label_features in ENCODER_LABEL_FEATURES and not self.trains_encoder:
            raise ValueError(f"`label_features={self.label_features!r}` needs an encoder; {self.method!r} has none.")
        if self.similar_documents and self.predict_with != "all":
            raise ValueError(
                f"`similar_documents` has no effect with `predict_with={self.predict_with!r}`. Leave it out."
            )
        if self.make_ranker_arguments().matcher != "heads":
            return
        frequency = self.tree_clustering == "frequency"
        for name, is_set in (
            ("refine_tree", self.refine_tree),
            ("tree_clustering='frequency'", frequency),
            ("label_text_weight", self.label_text_weight),
        ):
            if is_set:
                raise ValueError(
                    f"`{name}` does not go with {self.method!r}: its ranker ranks the labels of clusters that the "
                    "heads find for documents. Leave it out, or choose another method."
                )

    def _check_steps(self) -> None:
        """Refuses two ways of giving the length of the training."""
        lengths = ("level_epochs", "level_steps", "num_train_epochs", "max_steps")
        given = [name for name in lengths if getattr(self, name) not in (None, -1)]
        totals = [name for name in ("num_train_epochs", "max_steps") if getattr(self, name) > 0]
        if totals and not self.trains_encoder:
            raise ValueError(
                f"`{totals[0]}={getattr(self, totals[0])}` would have no effect: {self.method!r} does not train an "
                "encoder. Pass an encoder, or leave it out."
            )
        if self.time_budget is not None and (given or not self.trains_encoder):
            reason = f"`{given[0]}` is set as well" if given else f"{self.method!r} trains no encoder"
            raise ValueError(
                f"`time_budget={self.time_budget}` would have no effect: {reason}. Leave one of them out."
            )
        levels = [name for name in ("level_epochs", "level_steps") if getattr(self, name) is not None]
        if levels and totals:
            raise ValueError(
                f"`{totals[0]}` is the length of the whole training, `{levels[0]}` that of each level. Set one."
            )

    def _check_unused(self) -> None:
        """Refuses options of parts that the method does not have."""
        unused = {}
        if not self.trains_encoder:
            way_out = f"`method` to one of {', '.join(ENCODER_METHODS)}"
            unused.update(dict.fromkeys(("level_", "encoder_"), ("does not train an encoder", way_out)))
        if self.uses_knn:
            unused["ranker_"] = ("does not train classifiers", "`method='xr-linear'`")
            unused["tree_"] = ("does not search a tree", "`method='xr-linear'`")
        elif self.similar_documents is False:
            unused["knn_"] = ("does not use similar documents", "`similar_documents=True`")
        for prefix, (reason, way_out) in unused.items():
            for declared in options_of(PARTS[prefix]):
                name = f"{prefix}{declared.name}"
                # The trainer reports an encoder that the method cannot use.
                if name != "encoder_name" and getattr(self, name) != self._default(prefix, declared):
                    raise ValueError(
                        f"`{name}={getattr(self, name)!r}` would have no effect: {self.method!r} {reason}. Leave it "
                        f"out, or set {way_out}."
                    )

    @property
    def trains_encoder(self) -> bool:
        """Whether the method has an encoder."""
        return "encoder" in method_preset(self.method)

    @property
    def uses_knn(self) -> bool:
        """Whether similar documents vote for labels, instead of classifiers."""
        return "knn" in method_preset(self.method)

    def make_tfidf(self, texts: Sequence[str] = ()) -> TfidfFeaturizer:
        """A new featurizer with the options `tfidf_*`; some of their defaults depend on the texts."""
        options = dict(vars(self._make("tfidf_")))
        if options["stemmer"] in ("auto", "none"):
            is_auto = options["stemmer"] == "auto" and options["analyzer"] == "word"
            options["stemmer"] = detect_language(texts) if is_auto else None
        if options["lead_words"] is None:
            options["lead_words"] = default_lead_words(texts)
        return TfidfFeaturizer(**options, power=1.0 if self.feature_power is None else self.feature_power)

    def make_tree_arguments(self) -> TreeArguments:
        """The options `tree_*`."""
        return self._make("tree_")

    def make_ranker_arguments(self) -> RankerArguments:
        """The options `ranker_*`."""
        return self._make("ranker_")

    def make_knn_arguments(self) -> KNNArguments:
        """The options `knn_*`."""
        return self._make("knn_")

    def make_encoder_arguments(self) -> EncoderArguments:
        """The options `encoder_*`."""
        return self._make("encoder_")

    def make_level_arguments(self) -> LevelArguments:
        """The options `level_*`, with the standard learning rate if they set none."""
        levels = self._make("level_")
        if levels.learning_rate is None:
            levels.learning_rate = self.learning_rate
        return levels

    def _make(self, prefix: str) -> Any:
        part = PARTS[prefix]
        values = dict(self._preset(prefix))
        if f"{prefix}seed" in {declared.name for declared in dataclasses.fields(part)}:  # type: ignore[arg-type]
            values[f"{prefix}seed"] = self.seed
        for declared in options_of(part):
            values[declared.name] = getattr(self, prefix + declared.name)
        return part(**values)

    def xmc_options(self) -> dict[str, Any]:
        """The options of this class and the standard ones that matter, for the record of a training."""
        names = [prefix + declared.name for prefix, part in PARTS.items() for declared in options_of(part)]
        options = {name: getattr(self, name) for name in (*_STANDARD_OPTIONS, *names) if name != "overwrite"}
        return {**options, "lr_scheduler_type": SchedulerType(self.lr_scheduler_type).value}

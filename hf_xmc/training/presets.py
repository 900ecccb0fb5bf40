"""
Methods as presets of options.

A preset maps a part of [`XMCTrainingArguments`] (`tfidf`, `tree`, `ranker`, `knn`, `encoder`, `level`; `general` for
options without a prefix) to values of its fields, see options.py. Other fields have the default of their part. A
method with the key `encoder` trains an encoder; in one with the key `knn` similar documents vote for labels.
"""

from __future__ import annotations

import difflib
from typing import Any

# Parabel and Bonsai: the score of a label is the product of the probabilities along its path.
_PATH_RANKER: dict[str, Any] = {"negatives": "tfn", "ranking": "path", "beam_size": 10}
# The methods of papers as they are: neither stems nor label texts, and no part beside the ranker or the heads.
_RANKER_ALONE: dict[str, Any] = {"predict_with": "ranker", "label_text_weight": 0.0, "feature_power": 1.0}
_HEADS_ALONE: dict[str, Any] = {"predict_with": "heads", "label_text_weight": 0.0}
_PLAIN_WORDS: dict[str, Any] = {"min_df": 3, "stemmer": "none", "lead_words": 0}
# A hundred labels per cluster, two levels.
_CLUSTERS_OF_LABELS: dict[str, Any] = {"max_leaf_size": 100, "max_depth": 2}

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "xr-transformer": {
        "encoder": {},
        # Clusters are learnt in half of the steps that labels need.
        "level": {"epoch_shares": [1, 2]},
        "ranker": {"negative_cost": 2.0, "cost_sensitive": True},
    },
    # The heads find clusters, the ranker ranks the labels in them.
    "x-transformer": {
        "general": _RANKER_ALONE,
        "tfidf": _PLAIN_WORDS,
        "encoder": {},
        "tree": _CLUSTERS_OF_LABELS,
        "level": {"indices": 1, "negatives": "all", "loss": "squared_hinge"},
        "ranker": {
            "matcher": "heads",
            "negative_cost": 2.0,
            "cost_sensitive": True,
            "train_beam_size": 20,
            "beam_size": 20,
        },
    },
    "lightxml": {
        "general": _HEADS_ALONE,
        "tfidf": _PLAIN_WORDS,
        "encoder": {"pooling_layers": 5},
        "tree": _CLUSTERS_OF_LABELS,
        "level": {"joint": True, "negatives": "dynamic", "bottleneck": 300, "dropout": 0.5, "swa_start": 0.5},
    },
    "aplc-xlnet": {
        "general": _HEADS_ALONE,
        "tfidf": _PLAIN_WORDS,
        "encoder": {},
        "tree": {"clustering": "frequency"},
        # Encoder, projections and label rows have increasing learning rates.
        "level": {
            "indices": [1, 2],
            "joint": True,
            "negatives": "tfn",
            "shrink": 2.0,
            "projection_learning_rate": 5e-4,
            "min_lr_ratio": 1 / 32,
        },
    },
    "xr-linear": {"ranker": {"negative_cost": 2.0, "cost_sensitive": True}},
    "parabel": {
        "general": _RANKER_ALONE,
        "tfidf": _PLAIN_WORDS,
        "tree": {"branching": 2, "max_leaf_size": 96},
        "ranker": _PATH_RANKER,
    },
    "bonsai": {
        "general": _RANKER_ALONE,
        "tfidf": _PLAIN_WORDS,
        "tree": {"clustering": "kmeans", "branching": 100, "max_leaf_size": 96, "max_depth": 3},
        "ranker": _PATH_RANKER,
    },
    "dismec": {"general": _RANKER_ALONE, "tfidf": _PLAIN_WORDS, "tree": {"clustering": "flat"}},
    "knn": {"general": _RANKER_ALONE, "tfidf": _PLAIN_WORDS, "tree": {"clustering": "flat"}, "knn": {}},
}
ENCODER_METHODS = tuple(name for name, preset in METHODS.items() if "encoder" in preset)


def choose_method(encoder: str | None, has_length: bool, has_accelerator: bool) -> tuple[dict[str, Any], str]:
    """
    Chooses what `method="auto"` stands for.

    Args:
        encoder (`str`, *optional*): Folder or Hub id of an encoder.
        has_length (`bool`): Whether a number of passes or steps, or a time, is given for fine-tuning.
        has_accelerator (`bool`): Whether there is a GPU or another accelerator.

    Returns:
        `tuple[dict, str]`: options, among them the method, and the reason.
    """
    if encoder is None:
        return {"method": "xr-linear"}, "no encoder is given"
    options: dict[str, Any] = {"method": "xr-transformer", "level_objective": "label_texts"}
    if has_length:
        return options, "an encoder is given, and how long to fine-tune it"
    if has_accelerator:
        return options, "an encoder is given, and there is an accelerator to fine-tune it"
    reason = "an encoder is given; without a GPU, only a `time_budget` or a number of passes fine-tunes it"
    return {**options, "num_train_epochs": 0}, reason


def method_preset(method: str) -> dict[str, dict[str, Any]]:
    """The preset of a method."""
    if method not in METHODS:
        close = ["knn"] if method == "neighbours" else difflib.get_close_matches(method, METHODS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`method={method!r}` is not one of {', '.join(METHODS)}.{hint}")
    return METHODS[method]

"""Methods as presets: each is a set of values for [`XMCTrainingArguments`], nothing else."""

from __future__ import annotations

import difflib
from typing import Any

# What a preset does not name has the default of the part it belongs to.
_PRODUCT_ALONG_THE_PATH: dict[str, Any] = {
    "ranker_negatives": "tfn",
    "ranker_ranking": "path",
    "ranker_beam_size": 10,
}
METHODS: dict[str, dict[str, Any]] = {
    # Beside the encoder a wide beam costs nothing.
    "xr-transformer": {"ranker_negative_cost": 2.0, "ranker_cost_sensitive": True, "ranker_beam_size": 60},
    # About a hundred labels to a cluster; the encoder learns to find clusters, the ranker to rank what is in them.
    "x-transformer": {
        "tree_max_leaf_size": 100,
        "tree_max_depth": 2,
        "level_indices": [1],
        "level_negatives": ["all"],
        "level_loss": "squared_hinge",
        "ranker_matcher": "heads",
        "ranker_negative_cost": 2.0,
        "ranker_cost_sensitive": True,
        "ranker_train_beam_size": 20,
        "ranker_beam_size": 20,
        "predict_with": "ranker",
    },
    "lightxml": {
        "encoder_pooling_layers": 5,
        "tree_max_leaf_size": 100,
        "tree_max_depth": 2,
        "level_joint": True,
        "level_negatives": ["dynamic"],
        "level_bottleneck": 300,
        "level_dropout": 0.5,
        "level_swa_start": 0.5,
        "predict_with": "heads",
    },
    # From the encoder to the rows of the labels each learns faster than what is below it.
    "aplc-xlnet": {
        "tree_clustering": "frequency",
        "level_indices": [1, 2],
        "level_joint": True,
        "level_negatives": ["tfn"],
        "level_shrink": 2.0,
        "level_projection_learning_rate": [5e-4],
        "level_min_lr_ratio": 1 / 32,
        "predict_with": "heads",
    },
    "xr-linear": {"ranker_negative_cost": 2.0, "ranker_cost_sensitive": True},
    "parabel": {"tree_branching": 2, "tree_max_leaf_size": 96, **_PRODUCT_ALONG_THE_PATH},
    "bonsai": {
        "tree_clustering": "kmeans",
        "tree_branching": 100,
        "tree_max_leaf_size": 96,
        "tree_max_depth": 3,
        **_PRODUCT_ALONG_THE_PATH,
    },
    "dismec": {"tree_clustering": "flat"},
    # Labels are those of similar documents: there is nothing to cluster, nor to train.
    "knn": {"tree_clustering": "flat"},
}
# Methods with an encoder that is trained; the others have none.
ENCODER_METHODS = ("xr-transformer", "x-transformer", "lightxml", "aplc-xlnet")


def method_options(method: str) -> dict[str, Any]:
    """The values that a method sets."""
    if method not in METHODS:
        close = difflib.get_close_matches(method, METHODS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`method={method!r}` is not one of {', '.join(METHODS)}.{hint}")
    return METHODS[method]

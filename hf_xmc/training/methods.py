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
}
# Methods with an encoder that is trained; the others are linear.
ENCODER_METHODS = ("xr-transformer",)


def method_options(method: str) -> dict[str, Any]:
    """The values that a method sets."""
    if method not in METHODS:
        close = difflib.get_close_matches(method, METHODS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`method={method!r}` is not one of {', '.join(METHODS)}.{hint}")
    return METHODS[method]

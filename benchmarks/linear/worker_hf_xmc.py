"""hf_xmc: its linear rankers, one setting per method."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import numpy as np
import scipy.sparse as sp

from .worker_common import Predict, load_matrix, serve

WARM_UP_DOCUMENTS = 500
POWER = "feature_power"
LABEL_MAX_FEATURES = 1024  # as in training/stages.py


# ---- The calls to hf_xmc: everything that depends on its interface is in these three functions. ----


def fit(features: sp.csr_matrix, labels: sp.csr_matrix, model: str, threads: int, setting: str) -> dict[str, Any]:
    """Builds the tree, trains the ranker and saves both."""
    from hf_xmc.features import Features
    from hf_xmc.parallel.stage_cache import Runtime
    from hf_xmc.training.clustering import build_tree
    from hf_xmc.training.label_features import pifa
    from hf_xmc.training.options import RankerArguments, TreeArguments
    from hf_xmc.training.ranker import train_ranker

    start = time.perf_counter()
    options = options_of(setting)
    tree_options, ranker_options = (
        {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
        for prefix in ("tree_", "ranker_")
    )
    inputs = Features(features).raised(options.get(POWER, 1)).normalized()
    label_features = pifa(inputs, labels, LABEL_MAX_FEATURES, threads)
    tree = build_tree(label_features, TreeArguments(**tree_options), Runtime(threads))
    del label_features
    tree_s = time.perf_counter() - start
    ranker = train_ranker(inputs, labels, tree, RankerArguments(**ranker_options), Runtime(threads))
    fit_s = time.perf_counter() - start
    ranker.save_pretrained(model)
    tree.save_pretrained(model)
    return {"tree_s": tree_s, "fit_s": fit_s, "tree": [int(size) for size in tree.level_sizes]}


def load(model: str, threads: int, setting: str) -> Predict:
    """Loads the ranker as a user does."""
    from hf_xmc.features import Features
    from hf_xmc.linear_ranker import LinearRanker

    ranker = LinearRanker.from_pretrained(model)
    power = options_of(setting).get(POWER, 1)

    def predict(features: sp.csr_matrix, top_k: int) -> np.ndarray:
        return ranker.predict(Features(features).raised(power).normalized(), top_k=top_k, num_threads=threads)[1]

    return predict


def options_of(setting: str) -> dict[str, Any]:
    """Options of a setting: a method, then `name=value` for what differs from it, the value being JSON."""
    from hf_xmc.training.presets import method_preset

    method, *changes = setting.split()
    pairs = (change.split("=") for change in changes)
    preset = {
        f"{part}_{name}": value for part, values in method_preset(method).items() for name, value in values.items()
    }
    return {**preset, **{name: json.loads(value) for name, value in pairs}}


# ---- The rest follows the protocol. ----


def setup(work: str, model: str, threads: int, setting: str) -> None:
    """Fills the compiler's cache on disk with a small training and prediction; the report says how long that took."""
    features, labels = load_matrix(work, "X.trn")[:WARM_UP_DOCUMENTS], load_matrix(work, "Y.trn")[:WARM_UP_DOCUMENTS]
    folder = model + ".warm-up"
    fit(features, labels, folder, threads, setting)
    predict = load(folder, threads, setting)
    predict(features, 20)
    predict(features[0], 10)
    shutil.rmtree(folder)


def train(work: str, model: str, threads: int, setting: str) -> dict[str, Any]:
    """Trains on the prepared vectors."""
    return fit(load_matrix(work, "X.trn"), load_matrix(work, "Y.trn"), model, threads, setting)


def top_ids(result: np.ndarray, top_k: int) -> np.ndarray:
    """The ids come best first, with -1 where there are fewer."""
    return result[:, :top_k]


if __name__ == "__main__":
    serve("hf_xmc.linear_ranker", train=train, load=load, top_ids=top_ids, setup=setup)

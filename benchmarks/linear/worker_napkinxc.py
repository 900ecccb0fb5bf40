"""napkinXC: one probabilistic label tree with its defaults (logistic loss, exact search)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import scipy.sparse as sp

from .worker_common import Predict, load_matrix, pad_ids, serve


def train(work: str, model: str, threads: int, setting: str) -> dict[str, Any]:
    """Trains; napkinXC writes the model folder while it does."""
    from napkinxc.models import PLT

    features, labels = load_matrix(work, "X.trn"), load_matrix(work, "Y.trn")
    start = time.perf_counter()
    PLT(model, threads=threads, seed=0).fit(features, labels)
    return {"fit_s": time.perf_counter() - start}


def load(model: str, threads: int, setting: str) -> Predict:
    """Loads the model to memory, in the form it prefers."""
    from napkinxc.models import PLT

    loaded = PLT(model, threads=threads)
    loaded.load()

    def predict(features: sp.csr_matrix, top_k: int) -> list[list[tuple[int, float]]]:
        return loaded.predict_proba(features, top_k=top_k)

    return predict


def top_ids(result: list[list[tuple[int, float]]], top_k: int) -> np.ndarray:
    """Drops the probabilities, which come best first."""
    return pad_ids([[label for label, _ in row] for row in result], top_k)


if __name__ == "__main__":
    serve("napkinxc.models", train=train, load=load, top_ids=top_ids)

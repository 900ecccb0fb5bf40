"""omikuji: like Parabel (its defaults) and like Bonsai (the settings of its README), three trees each."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import scipy.sparse as sp

from .worker_common import Predict, load_matrix, pad_ids, serve


def setup(work: str, model: str, threads: int, setting: str) -> None:
    """Writes the vectors as text, the only form omikuji trains from."""
    path, source = _text_file(work), f"{work}/X.trn.npz"
    if os.path.exists(path) and os.path.getmtime(path) > os.path.getmtime(source):
        return
    features, labels = load_matrix(work, "X.trn"), load_matrix(work, "Y.trn")
    rows = np.flatnonzero(np.diff(features.indptr))  # omikuji refuses documents without features
    with open(path + ".tmp", "w", encoding="ascii") as file:
        file.write(f"{len(rows)} {features.shape[1]} {labels.shape[1]}\n")
        for i in rows.tolist():
            row = slice(features.indptr[i], features.indptr[i + 1])
            targets = labels.indices[labels.indptr[i] : labels.indptr[i + 1]].tolist()
            pairs = zip(features.indices[row].tolist(), features.data[row].tolist(), strict=True)
            # Nine digits give back the same float32.
            file.write(",".join(map(str, targets)) + " " + " ".join(f"{j}:{value:.9g}" for j, value in pairs) + "\n")
    os.replace(path + ".tmp", path)


def train(work: str, model: str, threads: int, setting: str) -> dict[str, Any]:
    """Trains from the text file."""
    import omikuji

    options = omikuji.Model.default_hyper_param()
    if setting == "bonsai":
        options.cluster_balanced, options.cluster_k, options.max_depth = False, 100, 3
    start = time.perf_counter()
    trained = omikuji.Model.train_on_data(_text_file(work), options, threads)
    fit_s = time.perf_counter() - start
    trained.save(model)
    return {"fit_s": fit_s}


def load(model: str, threads: int, setting: str) -> Predict:
    """Loads the model; omikuji takes one document per call, so a batch is a loop."""
    import omikuji

    loaded = omikuji.Model.load(model)
    loaded.init_prediction_thread_pool(threads)

    def predict(features: sp.csr_matrix, top_k: int) -> list[list[tuple[int, float]]]:
        ends, ids, values = features.indptr.tolist(), features.indices, features.data
        answers = []
        for i in range(features.shape[0]):
            row = slice(ends[i], ends[i + 1])
            pairs = list(zip(ids[row].tolist(), values[row].tolist(), strict=True))
            answers.append(loaded.predict(pairs, beam_size=10, top_k=top_k))
        return answers

    return predict


def top_ids(result: list[list[tuple[int, float]]], top_k: int) -> np.ndarray:
    """Drops the scores, which come best first."""
    return pad_ids([[label for label, _ in row] for row in result], top_k)


def _text_file(work: str) -> str:
    return f"{work}/trn.xmc"


if __name__ == "__main__":
    serve("omikuji", train=train, load=load, top_ids=top_ids, setup=setup)

"""PECOS XR-Linear: the library's defaults, and the ranker settings it publishes for Eurlex-4K."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import scipy.sparse as sp

from .worker_common import Predict, load_matrix, serve


def train(work: str, model: str, threads: int, setting: str) -> dict[str, Any]:
    """Label features (PIFA), tree and classifiers."""
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    features, labels = load_matrix(work, "X.trn"), load_matrix(work, "Y.trn")
    start = time.perf_counter()
    label_features = LabelEmbeddingFactory.create(labels, features, threads=threads)
    tree_options = {"nr_splits": 8, "max_leaf_size": 16} if setting == "published" else {}
    chain = Indexer.gen(label_features, threads=threads, **tree_options)
    tree_s = time.perf_counter() - start
    arguments = published(len(chain), threads) if setting == "published" else defaults(threads)
    trained = XLinearModel.train(features, labels, C=chain, **arguments)
    fit_s = time.perf_counter() - start
    trained.save(model)
    return {"tree_s": tree_s, "fit_s": fit_s, "tree": [int(level.shape[0]) for level in chain]}


def defaults(threads: int) -> dict[str, Any]:
    """Everything as the library and its command line have it."""
    from pecos.xmc.xlinear.model import XLinearModel

    return {
        "train_params": XLinearModel.TrainParams.from_dict({"threads": threads}, recursive=True),
        "pred_params": XLinearModel.PredParams.from_dict({}, recursive=True),
        "beam_size": 10,
    }


def published(depth: int, threads: int) -> dict[str, Any]:
    """The ranker of ``examples/xr-transformer-neurips21`` for Eurlex-4K, stretched to the present depth."""
    from pecos.xmc import MLModel
    from pecos.xmc.xlinear.model import XLinearModel

    train_params = XLinearModel.TrainParams.from_dict(
        {"rel_mode": "induce", "rel_norm": "l1", "nr_splits": 8}, recursive=True
    )
    train_params.hlm_args.neg_mining_chain = ["tfn"] * (depth - 1) + ["tfn+man"]
    train_params.hlm_args.model_chain = [
        MLModel.TrainParams(threshold=0.001, Cp=cost, Cn=2 * cost, threads=threads)
        for cost in [1.0] * (depth - 1) + [2.0]
    ]
    pred_params = XLinearModel.PredParams.from_dict({}, recursive=True)
    pred_params.hlm_args.model_chain = [
        *(MLModel.PredParams(only_topk=beam) for beam in [75] * (depth - 2) + [100]),
        MLModel.PredParams(only_topk=25, post_processor="noop"),
    ]
    return {"train_params": train_params, "pred_params": pred_params}


def load(model: str, threads: int, setting: str) -> Predict:
    """Loads the C++ form of the model, the faster of the two."""
    from pecos.xmc.xlinear.model import XLinearModel

    loaded = XLinearModel.load(model, is_predict_only=True)
    # The published beam is stored with the model; the default is the one of PECOS's command line.
    beam = {} if setting == "published" else {"beam_size": 10}

    def predict(features: sp.csr_matrix, top_k: int) -> sp.csr_matrix:
        return loaded.predict(features, only_topk=top_k, threads=threads, **beam)

    return predict


def top_ids(result: sp.csr_matrix, top_k: int) -> np.ndarray:
    """Sorts each row of the score matrix."""
    result = result.tocsr()
    ids = np.full((result.shape[0], top_k), -1, np.int64)
    for i in range(result.shape[0]):
        row = slice(result.indptr[i], result.indptr[i + 1])
        order = np.argsort(-result.data[row], kind="stable")[:top_k]
        ids[i, : len(order)] = result.indices[row][order]
    return ids


if __name__ == "__main__":
    serve("pecos.xmc.xlinear.model", train=train, load=load, top_ids=top_ids)

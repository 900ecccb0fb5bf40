"""The protocol of the workers: what a worker is asked, what it times and what it answers.

    python -m benchmarks.xr_transformer.worker_<system> setup   WORK MODEL THREADS OPTIONS
    python -m benchmarks.xr_transformer.worker_<system> train   WORK MODEL THREADS OPTIONS
    python -m benchmarks.xr_transformer.worker_<system> predict WORK MODEL THREADS OPTIONS --output FILE.npz [--all]

OPTIONS is a JSON object, see `Options`. The first test documents are predicted one by one (``first`` of the output),
with ``--all`` then the whole test set at once (``all``). The last line of a worker's output is one JSON object. This
module runs in the environment of every system, so it imports numpy and scipy only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from benchmarks.linear.worker_common import LATENCY_DOCUMENTS, LATENCY_TOP_K, TOP_K, load_matrix, respond

# Texts of the labels by name, for options of hf_xmc that read them.
LABEL_TEXTS_FILE = "label_texts.json"


@dataclass(frozen=True)
class Options:
    """What all systems have in common.

    Args:
        encoder (`str`):
            Folder of the encoder to start from.
        steps (`int`, *optional*, defaults to 300):
            Optimiser steps of all levels together.
        batch_size (`int`, *optional*, defaults to 32):
            Documents per step, and per batch of the encoder in prediction.
        max_length (`int`, *optional*, defaults to 128):
            Tokens which the encoder sees of a document.
        hf_xmc (`dict`, *optional*):
            Options of hf_xmc's `XMCTrainingArguments` other than its defaults.
    """

    encoder: str
    steps: int = 300
    batch_size: int = 32
    max_length: int = 128
    hf_xmc: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The form in which a worker gets them."""
        return json.dumps(asdict(self))


Work = Callable[[str, str, int, Options], Any]
Predict = Callable[["list[str]", sp.csr_matrix, int], Any]
Load = Callable[[str, int, Options], Predict]
TopIds = Callable[[Any, str, int], np.ndarray]


def serve(module: str, *, train: Work, load: Load, top_ids: TopIds, setup: Work | None = None) -> None:
    """Answers one request given on the command line.

    Args:
        module (`str`):
            Module of the system, imported under the clock before anything else.
        train (`Callable`):
            ``train(work, model, threads, options)`` trains, saves to the folder `model` and returns facts to record.
        load (`Callable`):
            ``load(model, threads, options)`` returns a function of texts, their vectors and `top_k` which predicts.
        top_ids (`Callable`):
            ``top_ids(result, work, top_k)`` turns what that function returns into label ids, outside the clock.
        setup (`Callable`, *optional*):
            One-off work which is no part of training, such as compilation.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["setup", "train", "predict"])
    parser.add_argument("work")
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("options", type=lambda text: Options(**json.loads(text)))
    parser.add_argument("--output")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    given = args.work, args.model, args.threads, args.options
    actions: dict[str, Any] = {"train": lambda: train(*given), "predict": lambda: _predict(args, load, top_ids)}
    respond(module, actions.get(args.action, lambda: setup and setup(*given)))


def text_file(work: str, split: str) -> str:
    """File with the texts of a split, one document per line."""
    return f"{work}/{split}.txt"


def read_texts(work: str, split: str) -> list[str]:
    """Reads the texts of a split."""
    with open(text_file(work, split), encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file]


def _predict(args: argparse.Namespace, load: Load, top_ids: TopIds) -> dict[str, Any]:
    texts, vectors = read_texts(args.work, "tst"), load_matrix(args.work, "X.tst")
    singles = [([texts[i]], vectors[i]) for i in range(min(LATENCY_DOCUMENTS, len(texts)))]
    start = time.perf_counter()
    predict = load(args.model, args.threads, args.options)
    answer: dict[str, Any] = {"load_s": time.perf_counter() - start}
    start = time.perf_counter()
    predict(*singles[0], LATENCY_TOP_K)
    answer["first_s"] = time.perf_counter() - start
    results, latencies = [], []
    for single in singles:
        start = time.perf_counter()
        results.append(predict(*single, LATENCY_TOP_K))
        latencies.append(1e3 * (time.perf_counter() - start))
    answer.update({f"p{percent}_ms": float(np.percentile(latencies, percent)) for percent in (50, 95)})
    ids: dict[str, Any] = {"first": np.concatenate([top_ids(result, args.work, LATENCY_TOP_K) for result in results])}
    if args.all:
        start = time.perf_counter()
        result = predict(texts, vectors, TOP_K)
        answer["batch_s"] = time.perf_counter() - start
        answer["documents_per_s"] = len(texts) / answer["batch_s"]
        ids["all"] = top_ids(result, args.work, TOP_K)
    np.savez(args.output, **ids)
    return answer

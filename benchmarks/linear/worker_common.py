"""The protocol of the workers: what a worker is asked, what it times and what it answers.

    python -m benchmarks.linear.worker_<system> setup   WORK MODEL THREADS [--setting NAME]
    python -m benchmarks.linear.worker_<system> train   WORK MODEL THREADS [--setting NAME]
    python -m benchmarks.linear.worker_<system> predict WORK MODEL THREADS [--setting NAME] [--output FILE.npz]

The last line of a worker's output is one JSON object. This module runs in the environment of every system, so it
imports numpy and scipy only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

TOP_K = 20
LATENCY_TOP_K = 10
LATENCY_DOCUMENTS = 200
# A pass over a small test set takes milliseconds: repeat it up to this many times and seconds, and take the median.
MAX_PASSES = 5
PASSES_SECONDS = 4.0

Train = Callable[[str, str, int, str], "dict[str, Any]"]
Predict = Callable[[sp.csr_matrix, int], Any]
Load = Callable[[str, int, str], Predict]
TopIds = Callable[[Any, int], np.ndarray]
Setup = Callable[[str, str, int, str], None]


def serve(module: str, *, train: Train, load: Load, top_ids: TopIds, setup: Setup | None = None) -> None:
    """Answers one request given on the command line.

    Args:
        module (`str`):
            Module of the system, imported under the clock before anything else.
        train (`Callable`):
            ``train(work, model, threads, setting)`` trains, saves to the folder `model` and returns facts to record.
        load (`Callable`):
            ``load(model, threads, setting)`` returns a function of sparse rows and `top_k` which makes predictions.
        top_ids (`Callable`):
            Turns what that function returns into label ids, best first, outside the clock.
        setup (`Callable`, *optional*):
            One-off work which is no part of training: other file formats, compilation.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["setup", "train", "predict"])
    parser.add_argument("work")
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("--setting", default="default")
    parser.add_argument("--output")
    args = parser.parse_args()
    given = args.work, args.model, args.threads, args.setting
    actions: dict[str, Any] = {"train": lambda: train(*given), "predict": lambda: _predict(args, load, top_ids)}
    respond(module, actions.get(args.action, lambda: setup and setup(*given)))


def respond(module: str, action: Callable[[], dict[str, Any] | None]) -> None:
    """Imports a module and runs an action, both under the clock, and writes what it returns."""
    start = time.perf_counter()
    importlib.import_module(module)
    answer: dict[str, Any] = {"import_s": time.perf_counter() - start}
    start = time.perf_counter()
    answer.update(action() or {})
    answer["total_s"] = time.perf_counter() - start
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def load_matrix(work: str, name: str) -> sp.csr_matrix:
    """Loads one of the prepared matrices."""
    return sp.csr_matrix(sp.load_npz(f"{work}/{name}.npz"))


def pad_ids(rows: list[list[int]], top_k: int) -> np.ndarray:
    """Makes an array of label ids from ragged lists, filled up with -1."""
    ids = np.full((len(rows), top_k), -1, np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row[:top_k])] = row[:top_k]
    return ids


def _predict(args: argparse.Namespace, load: Load, top_ids: TopIds) -> dict[str, Any]:
    features = load_matrix(args.work, "X.tst")
    rows = [features[i] for i in range(min(LATENCY_DOCUMENTS, features.shape[0]))]
    start = time.perf_counter()
    predict = load(args.model, args.threads, args.setting)
    load_s = time.perf_counter() - start
    start = time.perf_counter()
    predict(rows[0], LATENCY_TOP_K)
    first_s = time.perf_counter() - start
    passes: list[float] = []
    while not passes or (len(passes) < MAX_PASSES and sum(passes) + passes[-1] < PASSES_SECONDS):
        start = time.perf_counter()
        result = predict(features, TOP_K)
        passes.append(time.perf_counter() - start)
    latencies = []
    for row in rows:
        start = time.perf_counter()
        predict(row, LATENCY_TOP_K)
        latencies.append(1e3 * (time.perf_counter() - start))
    if args.output:
        np.savez(args.output, ids=top_ids(result, TOP_K))
    batch_s = float(np.median(passes))
    return {
        "load_s": load_s,
        "first_s": first_s,
        "batch_s": batch_s,
        "batch_passes": len(passes),
        "documents_per_s": features.shape[0] / batch_s,
        "p50_ms": float(np.percentile(latencies, 50)),
        "p95_ms": float(np.percentile(latencies, 95)),
    }

"""One step at one size, in a process of its own.

``python -m benchmarks.scale.worker make | train | predict LABELS FOLDER THREADS``: the last line of the output is
one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from hf_xmc.features import Features
from hf_xmc.linear_ranker import LinearRanker
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training.clustering import build_tree
from hf_xmc.training.label_features import pifa
from hf_xmc.training.options import RankerArguments, TreeArguments
from hf_xmc.training.ranker import train_ranker

from . import synthetic

LABEL_MAX_FEATURES = 1024  # the default of `XMCTrainingArguments`
LATENCY_DOCUMENTS = 500
WARM_UP_LABELS = 1000


class Clock:
    """Seconds of named steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times its block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def make(folder: str, num_labels: int, threads: int) -> dict[str, Any]:
    """Makes the data."""
    clock = Clock()
    with clock("make_s"):
        matrices = synthetic.make(num_labels)
        synthetic.save(matrices, folder)
    words, labels = matrices["X.trn"], matrices["Y.trn"]
    return {
        **clock.seconds,
        "documents": words.shape[0],
        "features": words.shape[1],
        "nonzeros_per_document": words.nnz / words.shape[0],
        "labels_per_document": labels.nnz / labels.shape[0],
        "labels_seen": len(np.unique(labels.indices)),
    }


def train(folder: str, num_labels: int, threads: int) -> dict[str, Any]:
    """Trains with the default settings and saves."""
    # Loading compiled kernels from disk takes as long for few labels as for many: keep it out of the time per label.
    warm_up = synthetic.make(WARM_UP_LABELS)
    fit(Features(warm_up["X.trn"]), warm_up["Y.trn"], threads, Clock())
    clock = Clock()
    with clock("read_s"):
        features, targets = Features(synthetic.load(folder, "X.trn")), synthetic.load(folder, "Y.trn")
    cpu = time.process_time()
    ranker, levels = fit(features, targets, threads, clock)
    cpu = time.process_time() - cpu
    with clock("save_s"):
        ranker.tree.save_pretrained(folder)
        ranker.save_pretrained(folder)
    files = ("label_tree.safetensors", "ranker.safetensors")
    return {
        **clock.seconds,
        "train_s": sum(clock.seconds[step] for step in ("pifa_s", "tree_s", "ranker_s")),
        "train_cpu_s": cpu,
        "ranker_levels_done_after_s": levels,
        "level_sizes": ranker.tree.level_sizes,
        "model_bytes": sum(os.path.getsize(os.path.join(folder, file)) for file in files),
    }


def fit(features: Features, targets: csr_matrix, threads: int, clock: Clock) -> tuple[LinearRanker, dict[str, float]]:
    """A ranker and, for each of its levels, the seconds after which it was done."""
    with clock("pifa_s"):
        label_features = pifa(features, targets, LABEL_MAX_FEATURES, threads)
    with clock("tree_s"):
        tree = build_tree(label_features, TreeArguments(), Runtime(threads))
    del label_features
    levels: dict[str, float] = {}
    start = time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        if done == total:
            levels[stage] = time.perf_counter() - start

    with clock("ranker_s"):
        ranker = train_ranker(features, targets, tree, RankerArguments(), Runtime(threads, progress))
    return ranker, levels


def predict(folder: str, num_labels: int, threads: int) -> dict[str, Any]:
    """Loads, tags the test documents one by one and all together."""
    clock = Clock()
    test, truth = synthetic.load(folder, "X.tst"), synthetic.load(folder, "Y.tst")
    rows = [Features(test[i]) for i in range(min(LATENCY_DOCUMENTS, test.shape[0]))]
    with clock("load_s"):
        ranker = LinearRanker.from_pretrained(folder)
    with clock("first_document_s"):
        ranker.predict(rows[0], num_threads=1)
    with clock("first_batch_s"):  # also brings the memory-mapped model into memory
        indices = ranker.predict(Features(test), num_threads=threads)[1]
    with clock("batch_s"):
        ranker.predict(Features(test), num_threads=threads)
    latencies = []
    for row in rows:
        start = time.perf_counter()
        ranker.predict(row, num_threads=1)
        latencies.append(1e3 * (time.perf_counter() - start))
    return {
        **clock.seconds,
        "documents_per_s": test.shape[0] / clock.seconds["batch_s"],
        "p50_ms": float(np.percentile(latencies, 50)),
        "p95_ms": float(np.percentile(latencies, 95)),
        "precision_at_1": float(np.asarray(truth[np.arange(test.shape[0]), indices[:, 0]]).mean()),
    }


if __name__ == "__main__":
    step, labels, folder, threads = sys.argv[1:]
    answer = {"make": make, "train": train, "predict": predict}[step](folder, int(labels), int(threads))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")

"""TF-IDF of PECOS over prepared token lines; runs in the PECOS environment, imports nothing of this package.

Usage: ``python tfidf_pecos.py WORK THREADS SPLIT...`` reads ``WORK/<split>.tokens`` (one document per line), fits on
the first split and writes ``WORK/X.<split>.npz`` for all of them. The last line of the output is JSON with timings.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import scipy.sparse as sp
from pecos.utils.featurization.text.vectorizers import Tfidf

# The vectors of the published peer figures: changing anything here makes runs incomparable with earlier ones.
SETTINGS = {
    "ngram_range": (1, 2),
    "min_df_cnt": 3,
    "max_feature": 300_000,
    "sublinear_tf": True,
    "norm": "l2",
    "analyzer": "word",
}


def read_lines(path: str) -> list[str]:
    """Reads token lines; splits at line feeds only, since other separators never occur inside tokens."""
    with open(path, encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file]


def main(work: str, threads: int, splits: list[str]) -> None:
    """Fits on the first split and transforms all splits."""
    timings = {}
    texts = read_lines(f"{work}/{splits[0]}.tokens")
    start = time.perf_counter()
    model = Tfidf.train(texts, {**SETTINGS, "threads": threads})
    timings["tfidf_fit_s"] = time.perf_counter() - start
    for split in splits:
        if split != splits[0]:
            texts = read_lines(f"{work}/{split}.tokens")
        start = time.perf_counter()
        matrix = sp.csr_matrix(model.predict(texts, threads=threads), dtype=np.float32)
        timings[f"tfidf_{split}_s"] = time.perf_counter() - start
        matrix.sort_indices()
        # As all other matrices of a work folder: whoever reads 64-bit numbers holds them beside their 32-bit copy.
        matrix.indptr, matrix.indices = matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32)
        sp.save_npz(f"{work}/X.{split}.npz", matrix, compressed=False)
    model.save(f"{work}/tfidf-pecos")
    latencies = []
    for text in texts[:200]:
        start = time.perf_counter()
        model.predict([text], threads=1)
        latencies.append(1e3 * (time.perf_counter() - start))
    timings["tfidf_p50_ms"] = float(np.median(latencies))
    sys.stdout.write(json.dumps(timings) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])

"""Times `fit_transform` of our TF-IDF and of scikit-learn's on one Parquet file with a column `text`.

Usage: ``python -m benchmarks.tfidf_sklearn FILE [--num-threads 2] [--repeats 3]`` prints JSON with the best wall and
CPU times in seconds. On a busy machine, trust the CPU times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer

from hf_xmc import TfidfFeaturizer

SETTINGS = {"analyzer": "word", "ngram_range": (1, 2), "min_df": 3, "max_features": 300_000}


def best_times(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Smallest wall time and smallest CPU time of several calls, in seconds."""
    times = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return {"wall": min(wall for wall, _ in times), "cpu": min(cpu for _, cpu in times)}


def main() -> None:
    """Times both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="Parquet file with a column `text`")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    texts = Dataset.from_parquet(options.file)["text"][:]
    TfidfFeaturizer(min_df=1).fit_transform(texts[:10])  # compiles the loops
    ours = best_times(lambda: TfidfFeaturizer(**SETTINGS).fit_transform(texts, options.num_threads), options.repeats)
    reference = TfidfVectorizer(**SETTINGS, sublinear_tf=True, dtype=np.float32)
    theirs = best_times(lambda: reference.fit_transform(texts), options.repeats)
    print(json.dumps({"documents": len(texts), "threads": options.num_threads, "hf_xmc": ours, "sklearn": theirs}))


if __name__ == "__main__":
    main()

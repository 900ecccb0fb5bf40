"""
What `labels=[...]` costs: time of a single document and documents per second, by number of permitted labels.

    python -m benchmarks.restriction MODEL DATA

Loads a trained model, and permits random labels: 1, 10, 1,000 and all of them. The first row is without a restriction.
The restrictions take turns on each document, so that other programs slow all of them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.parts import latency
from hf_xmc import XMCForTextClassification, load_xmc_dataset

_SIZES, _SINGLE, _BATCH, _ROUNDS = (1, 10, 1000), 200, 1000, 3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("data", help="folder of a dataset with a split `test`")
    args = parser.parse_args()
    model = XMCForTextClassification.from_pretrained(args.model)
    assert model.labels is not None
    names = model.labels.names
    drawn = np.random.default_rng(0).permutation(len(names))
    rows: dict[str, dict[str, Any]] = {"no restriction": {}}
    rows |= {f"{size:,}": {"labels": [names[i] for i in drawn[:size]]} for size in _SIZES}
    rows[f"all {len(names):,}"] = {"labels": names}
    texts = load_xmc_dataset(args.data)["test"].shuffle(seed=0)[: _SINGLE + _BATCH]["text"]
    singles: dict[str, list[float]] = {name: [] for name in rows}
    speeds: dict[str, list[float]] = {name: [] for name in rows}
    for options in rows.values():
        model.predict(texts[:20], top_k=5, num_threads=1, **options)
    # The labels of a restriction are looked up once: blocks of documents with the same ones.
    for first in range(0, _SINGLE, 20):
        for name, options in rows.items():
            model.predict([texts[0]], top_k=5, num_threads=1, **options)
            singles[name].append(latency(model, texts[first : first + 20], **options))
    for _ in range(_ROUNDS):
        for name, options in rows.items():
            start = time.perf_counter()
            model.predict(texts[_SINGLE:], top_k=5, num_threads=1, **options)
            speeds[name].append(_BATCH / (time.perf_counter() - start))
    print("| permitted labels | one document, ms | documents per second, one thread |\n|---|---:|---:|")
    for name in rows:
        print(f"| {name} | {np.median(singles[name]):.2f} | {np.max(speeds[name]):,.0f} |")


if __name__ == "__main__":
    main()

"""
Products of documents with the float16 vectors of labels, beside torch with a float32 copy of them.

    python -m benchmarks.dense_products
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from hf_xmc.label_vectors import dense_products

_DOCUMENTS, _VECTORS, _SIZE, _REPEATS = (1, 8, 32, 64), (2_182, 67_764), 384, 25


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of a function."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1000 * float(np.median(seconds))


def main() -> None:
    """Runs the benchmark."""
    generator = np.random.default_rng(0)
    print("| vectors | documents | torch, float32, ms | one thread, ms | all threads, ms | torch / all threads |")
    print("|---:|---:|---:|---:|---:|---:|")
    for count in _VECTORS:
        vectors = (generator.normal(size=(count, _SIZE)) / _SIZE**0.5).astype(np.float16)
        copy = torch.from_numpy(vectors.astype(np.float32))
        for size in _DOCUMENTS:
            documents = generator.normal(size=(size, _SIZE)).astype(np.float32)
            documents /= np.linalg.norm(documents, axis=1, keepdims=True)
            queries = torch.from_numpy(documents)
            theirs = milliseconds(lambda: functional.linear(queries, copy))  # noqa: B023
            ours = [milliseconds(lambda: dense_products(documents, vectors, n)) for n in (1, None)]  # noqa: B023
            shown = " | ".join(f"{value:.2f}" for value in (theirs, *ours))
            print(f"| {count:,} | {size} | {shown} | {theirs / ours[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()

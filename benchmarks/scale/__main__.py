"""Command line of the benchmark: ``python -m benchmarks.scale [--labels 10000 100000] [--output FILE.json]``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.linear import launch
from benchmarks.linear.runner import REPOSITORY, THREAD_VARIABLES, machine, revision

from .worker import WARM_UP_LABELS

logger = logging.getLogger(__name__)

PACKAGES = ("numpy", "scipy", "numba", "llvmlite", "safetensors")
STEPS = ("make", "train", "predict")

# Rows of the table: name, step and key of the value, and 0 or the factor of a value per label.
ROWS = (
    ("documents", "make", "documents", 0),
    ("features", "make", "features", 0),
    ("non-zeros per document", "make", "nonzeros_per_document", 0),
    ("labels per document", "make", "labels_per_document", 0),
    ("making the data, s", "make", "make_s", 0),
    ("PIFA, s", "train", "pifa_s", 0),
    ("tree, s", "train", "tree_s", 0),
    ("ranker, s", "train", "ranker_s", 0),
    ("PIFA, µs per label", "train", "pifa_s", 1e6),
    ("tree, µs per label", "train", "tree_s", 1e6),
    ("ranker, µs per label", "train", "ranker_s", 1e6),
    ("training, µs per label", "train", "train_s", 1e6),
    ("training, CPU µs per label", "train", "train_cpu_s", 1e6),
    ("model, bytes per label", "train", "model_bytes", 1),
    ("peak memory of training, MB", "train", "peak_rss_mb", 0),
    ("peak memory of prediction, MB", "predict", "peak_rss_mb", 0),
    ("load, s", "predict", "load_s", 0),
    ("latency p50, ms", "predict", "p50_ms", 0),
    ("latency p95, ms", "predict", "p95_ms", 0),
    ("batch, documents per s", "predict", "documents_per_s", 0),
    ("P@1, %", "predict", "precision_at_1", 0),
)


def main() -> None:
    """Reads the command line, measures each size and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--labels", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="sizes to measure")
    parser.add_argument("--output", type=Path, help="file for everything measured, as JSON")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of training and batches (default: all cores)"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": "python -m benchmarks.scale " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "revision": revision(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "threads": args.threads,
        "sizes": {},
    }
    # Compiles the kernels (numba keeps them on disk), so that no size pays for it.
    record["warm_up_s"] = measure(WARM_UP_LABELS, args.threads)["train"]["wall_s"]
    for num_labels in args.labels:
        record["sizes"][num_labels] = measure(num_labels, args.threads)
        if args.output:
            args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record["sizes"]))  # noqa: T201


def measure(num_labels: int, threads: int) -> dict[str, Any]:
    """Makes the data of one size, trains and predicts, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hf-xmc-scale-") as folder:
        return {step: _call(step, num_labels, folder, threads) for step in STEPS}


def table(sizes: dict[int, dict[str, Any]]) -> str:
    """Markdown with one column per size, and its ratio to the first one."""
    base, *others = sizes
    head = ["", f"{base:,} labels", *(cell for size in others for cell in (f"{size:,} labels", "ratio"))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---", *["---:"] * (len(head) - 1)])]
    for name, step, key, per_label in ROWS:
        values = [sizes[size][step][key] * (per_label / size if per_label else 1) for size in sizes]
        if name.endswith("%"):
            values = [100 * value for value in values]
        cells = [_number(values[0])]
        for value in values[1:]:
            cells += [_number(value), f"{value / values[0]:.2f}"]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def _call(step: str, num_labels: int, folder: str, threads: int) -> dict[str, Any]:
    """Runs the worker; what it answers and what was measured from outside."""
    log = Path(folder) / f"{step}.log"
    worker = [sys.executable, "-m", "benchmarks.scale.worker", step, str(num_labels), folder, str(threads)]
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    done = subprocess.run(
        [sys.executable, "-I", "-S", launch.__file__, str(log), "0", *worker],
        cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    measured: dict[str, Any] = json.loads(done.stdout)
    output = log.read_text(encoding="utf-8", errors="replace")
    if measured["status"]:
        raise RuntimeError(f"`{step}` with {num_labels} labels ended with status {measured['status']}:\n{output}")
    logger.info(
        "%d labels: %s took %.1f s, peak %.0f MB", num_labels, step, measured["wall_s"], measured["peak_rss_mb"]
    )
    return {**measured, **json.loads(output.strip().split("\n")[-1])}


if __name__ == "__main__":
    main()

"""How long a saved model takes to be ready, and what memory it takes: ``python -m benchmarks.loading [MODEL]``.

Without MODEL it trains one on synthetic texts with 59,307 labels first (about a minute), in a temporary folder or in
the one that ``--keep`` names. Each measurement is a new process; Linux only (it reads ``/proc``).

``--before FOLDER`` compares with another revision in FOLDER (``git worktree add FOLDER REVISION``): processes of both
take turns. The model must be one that both can load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
LABELS = 59_307
TEXT = "w1 w20 w300 w4000"
BATCH = 1000
# Loads and single documents that CPU times are the smallest or the median of.
LOADS, DOCUMENTS = 5, 400

ROWS = (
    ("importing hf_xmc and the model's class, s", "import_s"),
    ("from_pretrained, s", "load_s"),
    ("first document (loads the compiled loops), s", "first_s"),
    ("**ready: from_pretrained and first document, s**", "ready_s"),
    ("a later document, ms", "later_ms"),
    ("memory after importing, MB", "import_mb"),
    ("added by from_pretrained, MB", "load_mb"),
    ("of it not mapped from files, MB", "load_own_mb"),
    ("added by the first document, MB", "first_mb"),
    ("added by 1,000 documents more, MB", "batch_mb"),
)
CPU_ROWS = (
    ("from_pretrained, CPU s", "load_cpu_s"),
    ("from_pretrained again, the fastest of 5, CPU s", "reload_cpu_s"),
    ("a document, the median of 400, CPU ms", "document_cpu_ms"),
    ("a document, the fastest of 400, CPU ms", "fastest_cpu_ms"),
    ("a document of a batch of 1,000, CPU ms", "batch_cpu_ms"),
)


def main() -> None:
    """Reads the command line, measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder of a saved model that reads text")
    parser.add_argument("--labels", type=int, default=LABELS, help="labels of the synthetic model")
    parser.add_argument("--keep", type=Path, help="folder in which to keep the synthetic model")
    parser.add_argument("--repeats", type=int, default=5, help="processes to measure")
    parser.add_argument("--before", type=Path, help="folder with another revision to compare with")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.model)))
        return
    with tempfile.TemporaryDirectory(prefix="hf-xmc-loading-") as temporary:
        folder = args.model or str(args.keep or Path(temporary, "model"))
        if not Path(folder, "config.json").is_file():
            make(folder, args.labels)
        places = [REPOSITORY, *([args.before.resolve()] if args.before else [])]
        rounds = [[_call(folder, place) for place in places] for _ in range(args.repeats + 1)]
        # The first round brings the files into memory and compiles.
        runs, *before = (list(own) for own in zip(*rounds[1:], strict=True))
        print(report(folder, runs))
        if before:
            print("\n" + compare(before[0], runs, args.before))


def make(folder: str, num_labels: int, seed: int = 0) -> None:
    """Trains a linear tagger on texts of random words, as many documents as labels."""
    # Imported here, as in `report`: what is measured in a process must not have been imported there before.
    from datasets import Dataset
    from transformers import PrinterCallback

    from benchmarks.scale.synthetic import World
    from hf_xmc import XMCTrainer, XMCTrainingArguments

    random = np.random.default_rng(seed)
    counts, targets = World.make(num_labels, random).documents(random.permutation(num_labels), random)
    texts = [
        " ".join(f"w{word}" for word, times in zip(row.indices, row.data, strict=True) for _ in range(int(times)))
        for row in counts
    ]
    labels = [[f"label {label}" for label in row.indices] for row in targets]
    args = XMCTrainingArguments(folder, tfidf_ngram_range=[1, 1], disable_tqdm=True, use_cpu=True)
    trainer = XMCTrainer(args=args, train_dataset=Dataset.from_dict({"text": texts, "labels": labels}))
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def measure(folder: str) -> dict[str, float]:
    """Loads a model and predicts, in this process."""
    seconds, memory, cpu = [time.perf_counter()], [_memory()], [time.process_time()]

    def done() -> None:
        cpu.append(time.process_time())
        seconds.append(time.perf_counter())
        memory.append(_memory())

    from hf_xmc import XMCForTextClassification

    done()
    model = XMCForTextClassification.from_pretrained(folder)
    done()
    model.predict([TEXT])
    done()
    model.predict([TEXT])
    done()
    model.predict([f"{TEXT} w{number}" for number in range(BATCH)])
    done()
    took = np.diff(seconds)
    loads = [_cpu_seconds(lambda: XMCForTextClassification.from_pretrained(folder)) for _ in range(LOADS)]
    documents = [_cpu_seconds(lambda: model.predict([TEXT], num_threads=1)) for _ in range(DOCUMENTS)]
    batch = [f"{TEXT} w{number}" for number in range(BATCH)]
    total, own = (np.array([entry[i] for entry in memory]) for i in (0, 1))
    return {
        "labels": len(model.labels),
        "import_s": took[0],
        "load_s": took[1],
        "first_s": took[2],
        "ready_s": took[1] + took[2],
        "later_ms": 1e3 * took[3],
        "import_mb": total[1],
        "load_mb": total[2] - total[1],
        "load_own_mb": own[2] - own[1],
        "first_mb": total[3] - total[2],
        "batch_mb": total[5] - total[3],
        "load_cpu_s": cpu[2] - cpu[1],
        "reload_cpu_s": min(loads),
        "document_cpu_ms": 1e3 * statistics.median(documents),
        "fastest_cpu_ms": 1e3 * min(documents),
        "batch_cpu_ms": 1e3 / BATCH * min(_cpu_seconds(lambda: model.predict(batch, num_threads=1)) for _ in range(5)),
    }


def _cpu_seconds(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def report(folder: str, runs: list[dict[str, float]]) -> str:
    """The medians as a table, with where they come from."""
    from benchmarks.linear.runner import machine, revision

    files = {path.name: path.stat().st_size / 1e6 for path in Path(folder).iterdir() if path.is_file()}
    facts = machine()
    lines = [
        f"{runs[0]['labels']:,} labels, {sum(files.values()):,.0f} MB of files, of it the ranker "
        f"{sum(size for name, size in files.items() if name.startswith('ranker')):,.0f} MB; "
        f"{facts['processor']}, {facts['cores']} cores, load average {facts['load_average']:.1f}, Python "
        f"{facts['python']}, revision {revision()}. {len(runs)} processes, each after the files had been read once.",
        "",
        "| | median | smallest | largest |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, key in (*ROWS, *CPU_ROWS):
        values = [run[key] for run in runs]
        cells = [f"{value:,.3f}" for value in (statistics.median(values), min(values), max(values))]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def compare(before: list[dict[str, float]], after: list[dict[str, float]], place: Path) -> str:
    """The CPU times of two revisions as a table: the smallest of all processes, which other work disturbs least."""
    command = ["git", "-C", str(place), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    lines = [f"| smallest of {len(after)} processes each | {revision} | now | difference |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, key in CPU_ROWS:
        one, other = (min(run[key] for run in runs) for runs in (before, after))
        lines.append(f"| {name} | {one:,.3f} | {other:,.3f} | {other - one:+,.3f} ({other / one - 1:+.1%}) |")
    return "\n".join(lines)


def _memory() -> tuple[float, float]:
    """Resident memory of this process, all and without mapped files, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}
    return found["VmRSS"], found["RssAnon"]


def _call(folder: str, place: Path) -> dict[str, float]:
    # This file, whatever benchmarks that revision has.
    command = [sys.executable, str(Path(__file__).resolve()), os.path.abspath(folder), "--worker"]
    environment = {**os.environ, "PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()

"""Trains and predicts with each system in turn and records everything measured.

A run is one JSON file, ``WORK/runs/<date and time>.json``, written anew after each system so that an interrupted run
keeps what it has. Models and logs of the last run stay in ``WORK/models`` and ``WORK/logs``.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_xmc.evaluation.metrics import XMCMetrics

from .prepare import load_matrix, read_json, write_json
from .systems import System
from .venvs import freeze, python_of

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


def run(
    work: Path,
    systems: Sequence[System],
    *,
    repeats: int = 2,
    train_threads: int = 2,
    predict_threads: Sequence[int] = (1, 2),
    timeout: int = 0,
) -> Path:
    """Measures systems on one prepared dataset.

    Args:
        work (`Path`):
            Prepared folder.
        systems (`Sequence[System]`):
            What to measure.
        repeats (`int`, *optional*, defaults to 2):
            How often. All systems are measured once before any is measured again, each time starting with another one.
        train_threads (`int`, *optional*, defaults to 2):
            Threads of the training.
        predict_threads (`Sequence[int]`, *optional*, defaults to `(1, 2)`):
            Threads of the predictions, one process each.
        timeout (`int`, *optional*, defaults to 0):
            Seconds after which a process is stopped and its system recorded as failed; 0 for never.

    Returns:
        `Path`: the file of the run.
    """
    work = work.resolve()
    for folder in ("runs", "models", "logs"):
        (work / folder).mkdir(exist_ok=True)
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": "python -m benchmarks.linear " + " ".join(sys.argv[1:]),
        "data": read_json(work / "info.json"),
        "machine": machine(),
        "revision": revision(),
        "train_threads": train_threads,
        "versions": {venv: freeze(venv) for venv in dict.fromkeys(system.venv for system in systems)},
        "setup": {},
        "measurements": [],
    }
    path = work / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    for system in systems:
        if system.needs_setup:
            record["setup"][system.name] = _call(work, system, "setup", train_threads, timeout)
    for repeat in range(repeats):
        first = repeat % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            measured = measure(work, system, train_threads, predict_threads, timeout)
            record["measurements"].append({"system": system.name, "repeat": repeat, **measured})
            write_json(path, record)
    return path


def measure(
    work: Path, system: System, train_threads: int, predict_threads: Sequence[int], timeout: int
) -> dict[str, Any]:
    """Trains one system once, predicts with each number of threads and evaluates the predictions."""
    model = work / "models" / system.name
    shutil.rmtree(model, ignore_errors=True)
    measured: dict[str, Any] = {"train": _call(work, system, "train", train_threads, timeout), "predict": {}}
    if measured["train"]["status"]:
        return measured
    measured["model_mb"] = sum(file.stat().st_size for file in model.rglob("*") if file.is_file()) / 1e6
    output = model.with_name(f"{system.name}.top.npz")
    predictions: list[np.ndarray] = []
    for threads in predict_threads:
        answer = _call(work, system, "predict", threads, timeout, "--output", str(output))
        measured["predict"][str(threads)] = answer
        if not answer["status"]:
            with np.load(output) as arrays:
                predictions.append(arrays["ids"])
    if predictions:
        measured["same_for_all_threads"] = all(np.array_equal(predictions[0], other) for other in predictions[1:])
        measured["metrics"], measured["by_frequency"] = evaluate(work, predictions[0])
    return measured


def evaluate(work: Path, ids: np.ndarray) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics of ranked label ids on the test split; labels unseen in training count as misses."""
    labels = load_matrix(work, "Y.trn")
    counts = np.bincount(labels.indices, minlength=labels.shape[1])
    metrics = XMCMetrics(counts=counts, num_documents=labels.shape[0], ks=(1, 3, 5, 10, 20))
    metrics.update(ids, load_matrix(work, "Y.tst"))
    return metrics.compute(), metrics.by_frequency()


def machine() -> dict[str, Any]:
    """Processor, cores, memory and systems software."""
    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def revision() -> str | None:
    """Commit of this checkout, with a plus sign where files differ from it; `None` outside a repository."""
    git = ["git", "-C", str(REPOSITORY)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return None
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _call(work: Path, system: System, action: str, threads: int, timeout: int, *options: str) -> dict[str, Any]:
    """Runs a worker in its environment; what it answers and what was measured from outside."""
    log = work / "logs" / f"{system.name}.{action}.{threads}.log"
    model = work / "models" / system.name
    launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")), str(log), str(timeout)]
    worker = [str(python_of(system.venv)), "-m", f"benchmarks.linear.{system.worker}"]
    request = [action, str(work), str(model), str(threads), "--setting", system.setting, *options]
    # OpenMP threads which spin while they wait stall for whole time slices as soon as anything else runs on a core.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "HF_HUB_OFFLINE": "1"}
    environment.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    logger.info("%s: %s with %d threads", system.name, action, threads)
    done = subprocess.run(
        [*launcher, *worker, *request], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    if measured["status"]:
        logger.error("%s: %s failed with status %d, see %s", system.name, action, measured["status"], log)
        return measured
    answer = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    logger.info("%s: %s took %.1f s", system.name, action, measured["wall_s"])
    return {**measured, **answer}

"""Trains XR-Transformer with each system on the same documents and records everything measured.

A run is one JSON file, ``WORK/runs/<date and time>.json``, written anew after each result so that an interrupted run
keeps what it has. Models and logs of the last run stay in ``WORK/models`` and ``WORK/logs``.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.linear import launch
from benchmarks.linear.prepare import prepare, read_json, write_json
from benchmarks.linear.runner import REPOSITORY, THREAD_VARIABLES, evaluate, machine, revision
from benchmarks.linear.systems import SYSTEMS as LINEAR_SYSTEMS
from benchmarks.linear.venvs import freeze, python_of

from .venvs import PECOS
from .worker_common import LABEL_TEXTS_FILE, Options, text_file
from .worker_pecos import features_folder

logger = logging.getLogger(__name__)

Measurement = dict[str, Any]


class Comparison:
    """The measurements of one run.

    Args:
        work (`Path`):
            Folder for the documents and everything measured on them.
        options ([`Options`]):
            Encoder, budget and token limit of all systems.
        threads (`int`):
            Threads of training and of the prediction of the test set. Latency is also measured with one.
    """

    def __init__(self, work: Path, options: Options, threads: int) -> None:
        self.work, self.options, self.threads = work, options, threads
        for folder in ("runs", "models", "logs"):
            (work / folder).mkdir(exist_ok=True)

    def hf_xmc(self) -> dict[str, Measurement]:
        """The XR-Transformer of this library."""
        setup = self._work("hf-xmc", "hf-xmc", "worker_hf_xmc", "setup")
        train = self._work("hf-xmc", "hf-xmc", "worker_hf_xmc", "train")
        return {"hf-xmc": {"setup": setup, "train": train, **self._predict("hf-xmc", "hf-xmc", "worker_hf_xmc")}}

    def pecos(self) -> dict[str, Measurement]:
        """PECOS with its own ranker, and with the ranker settings which it publishes on the same tuned encoder."""
        trained = self._work("pecos-default", PECOS, "worker_pecos", "train")
        ranker = self._published_ranker()
        default, without_ranker = dict(trained), dict(trained)
        for key in ("wall_s", "cpu_s"):
            default[key] -= trained["features"][key]
            without_ranker[key] = default[key] - trained["ranker"][key]
        published = {
            "status": 0,
            "wall_s": without_ranker["wall_s"] + ranker["wall_s"],
            "cpu_s": without_ranker["cpu_s"] + ranker["cpu_s"],
            "peak_rss_mb": max(trained["peak_rss_mb_before_ranker"], ranker["peak_rss_mb"]),
            "others_cpu_s": trained["others_cpu_s"] + ranker["others_cpu_s"],
            "without_ranker_s": without_ranker["wall_s"],
            "ranker": ranker,
            "parts_s": {**trained["parts_s"], "ranker": ranker["wall_s"]},
        }
        return {
            name: {"train": train, **self._predict(name, PECOS, "worker_pecos")}
            for name, train in (("pecos-default", default), ("pecos-published", published))
        }

    def _published_ranker(self) -> Measurement:
        """Trains the ranker of the linear benchmark on the features which PECOS's training has left."""
        system = LINEAR_SYSTEMS["pecos-published"]
        encoder = self._model("pecos-default") / "text_encoder"
        model, features = self._model("pecos-published"), Path(features_folder(str(self._model("pecos-default"))))
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(encoder, model / encoder.name)
        shutil.copyfile(self.work / "Y.trn.npz", features / "Y.trn.npz")
        request = ["train", str(features), str(model / "concat_model"), str(self.threads), "--setting", system.setting]
        worker = f"benchmarks.linear.{system.worker}"
        return self._call("pecos-published.train", [str(python_of(system.venv)), "-m", worker, *request], self.threads)

    def _predict(self, name: str, venv: str, worker: str) -> Measurement:
        """Predicts in one process per number of threads and evaluates the predictions of the test set."""
        predict, ids = {}, {}
        for threads in dict.fromkeys((self.threads, 1)):
            output = self._model(f"{name}.{threads}.npz")
            request = ["--output", str(output), *(["--all"] if threads == self.threads else [])]
            predict[str(threads)] = self._work(name, venv, worker, "predict", threads, *request)
            with np.load(output) as arrays:
                ids[threads] = dict(arrays)
        metrics, by_frequency = evaluate(self.work, ids[self.threads]["all"])
        files = [path for path in self._model(name).rglob("*") if path.is_file()]
        return {
            "model_mb": sum(path.stat().st_size for path in files) / 1e6,
            "predict": predict,
            "same_for_all_threads": all(np.array_equal(ids[1]["first"], found["first"]) for found in ids.values()),
            "metrics": metrics,
            "by_frequency": by_frequency,
        }

    def _model(self, name: str) -> Path:
        return self.work / "models" / name

    def _work(
        self, name: str, venv: str, worker: str, action: str, threads: int | None = None, *request: str
    ) -> Measurement:
        """Runs a worker of this benchmark."""
        threads = threads or self.threads
        model = self._model(name)
        if action == "train":
            shutil.rmtree(model, ignore_errors=True)
        command = [str(python_of(venv)), "-m", f"benchmarks.xr_transformer.{worker}", action, str(self.work)]
        command += [str(model), str(threads), self.options.to_json(), *request]
        return self._call(f"{name}.{action}.{threads}", command, threads)

    def _call(self, name: str, command: list[str], threads: int) -> Measurement:
        """Runs a command; what it answers and what was measured from outside."""
        log = self.work / "logs" / f"{name}.log"
        # OpenMP threads which spin while they wait stall for whole time slices as soon as a core has other work.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "HF_HUB_OFFLINE": "1"}
        environment.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
        logger.info("%s", name)
        done = subprocess.run(
            [sys.executable, "-I", "-S", launch.__file__, str(log), "0", *command],
            cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        measured: Measurement = json.loads(done.stdout)
        output = log.read_text(encoding="utf-8", errors="replace")
        if measured["status"]:
            raise RuntimeError(f"{name} ended with status {measured['status']}, see {log}:\n{output[-2000:]}")
        logger.info("%s took %.1f s", name, measured["wall_s"])
        answer = next(line for line in reversed(output.split("\n")) if line.startswith("{"))
        return {**measured, **json.loads(answer)}


SYSTEMS: dict[str, Callable[[Comparison], dict[str, Measurement]]] = {
    "hf-xmc": Comparison.hf_xmc,
    "pecos": Comparison.pecos,
}


def compare(
    work: Path, data: Path, options: Options, systems: list[str], *, train: str = "train", threads: int
) -> Path:
    """Measures systems on one dataset.

    Args:
        work (`Path`):
            Folder for vectors, texts and everything measured.
        data (`Path`):
            Folder with ``<train>.parquet`` and ``test.parquet`` (columns ``text``, ``labels``); texts of labels are
            read from its ``labels.parquet`` (``label``, ``text``) if there is one.
        options ([`Options`]):
            Encoder, budget and token limit of all systems.
        systems (`list[str]`):
            Names of `SYSTEMS`, in the order to measure them.
        train (`str`, *optional*, defaults to `"train"`):
            Name of the training file without its ending.
        threads (`int`):
            Threads of training and of the prediction of the test set.

    Returns:
        `Path`: the file of the run.
    """
    unknown = sorted(set(systems) - set(SYSTEMS))
    if unknown or not systems:
        raise ValueError(f"There is no system {', '.join(unknown) or 'named'}; choose from {', '.join(SYSTEMS)}.")
    work, data = work.resolve(), data.resolve()
    prepare_documents(data, work, train)
    comparison = Comparison(work, options, threads)
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command(data, train, options, systems, threads),
        "options": {**asdict(options), "encoder": encoder_name(options)},
        "data": read_json(work / "info.json"),
        "machine": machine(),
        "revision": revision(),
        "train_threads": threads,
        "versions": {venv: freeze(venv) for venv in ("hf-xmc", PECOS)},
        "setup": {},
        "measurements": [],
    }
    path = work / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    for system in systems:
        for name, measured in SYSTEMS[system](comparison).items():
            if "setup" in measured:
                record["setup"][name] = measured.pop("setup")
            record["measurements"].append({"system": name, "repeat": 0, **measured})
        write_json(path, record)
    return path


def prepare_documents(data: Path, work: Path, train: str) -> None:
    """Makes vectors and texts, unless the folder has those of the same dataset."""
    info = work / "info.json"
    known = read_json(info) if info.is_file() else {}
    if (known.get("data"), known.get("train_file")) != (data.name, train):
        prepare(data, work, train=train)
    for split, name in (("trn", train), ("tst", "test")):
        texts = pq.read_table(data / f"{name}.parquet", columns=["text"])["text"].to_pylist()
        with open(text_file(str(work), split), "w", encoding="utf-8", newline="\n") as file:
            # PECOS takes a line for a document and a tab for the end of its text.
            file.writelines(" ".join(text.split()) + "\n" for text in texts)
    if (data / "labels.parquet").is_file():
        label_texts = pq.read_table(data / "labels.parquet", columns=["label", "text"]).to_pydict()
        write_json(work / LABEL_TEXTS_FILE, dict(zip(label_texts["label"], label_texts["text"], strict=True)))


def command(data: Path, train: str, options: Options, systems: list[str], threads: int) -> str:
    """The command of a run, with names in place of the folders of the machine it ran on."""
    return (
        f"python -m benchmarks.xr_transformer compare WORK --data {data.name} --train {train} "
        f"--encoder {encoder_name(options)} --systems {','.join(systems)} --steps {options.steps} "
        f"--batch-size {options.batch_size} --max-length {options.max_length} --threads {threads}"
        + (f" --hf-xmc '{json.dumps(options.hf_xmc)}'" if options.hf_xmc else "")
    )


def encoder_name(options: Options) -> str:
    """The last two parts of the encoder's folder."""
    return "/".join(Path(options.encoder).parts[-2:])

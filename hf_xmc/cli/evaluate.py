"""`hf-xmc evaluate`: measures a model on documents with labels."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm

from ..evaluation import format_by_frequency, format_metrics
from ..inference.predict import evaluate_model
from ..modeling_utils import PredictMixin
from ..parallel.stage_cache import Runtime
from ..serialization import write_json
from ..training.progress import quiet_libraries
from .arguments import data_options, load_model, load_split


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if args.output and os.path.isdir(args.output):
        raise IsADirectoryError(f"`--output {args.output}` is a folder. Name a file in it, such as results.json.")
    split = args.split or (None if os.path.isfile(args.data) else "test")
    with quiet_libraries():
        dataset = load_split(args.data, split, **data_options(args, args.model))
        model = load_model(args.model, args.dtype)
    trial = {name: getattr(args, name) for name in ("ks", "beam_size", "predict_with", "dtype")}
    trial = {name: value for name, value in trial.items() if value is not None}
    context = {"model": args.model, "dataset": args.data, "split": split, **({"options": trial} if trial else {})}
    options = {name: getattr(args, name) for name in ("ks", "beam_size", "predict_with", "batch_size")}
    path = args.output or _results_path(args.model, split, bool(trial))
    measure(model, dataset, path, context, Runtime(args.num_threads), **options)


def _results_path(model: str, split: str | None, is_trial: bool) -> str:
    """The default file: beside the model, whose card shows the results unless other options were tried."""
    name = f"{split or 'eval'}_{'trial_' if is_trial else ''}results.json"
    return os.path.join(model, name) if os.path.isdir(model) else name


def measure(
    model: PredictMixin,
    dataset: Dataset,
    path: str,
    context: Mapping[str, Any],
    runtime: Runtime = Runtime(),
    **options: Any,
) -> None:
    """Evaluates a model, prints tables and writes the results, with `context`, to a JSON file."""
    start = time.perf_counter()
    is_main = runtime.cache.processes.is_main
    hidden = None if is_main else True  # None: hidden without a terminal
    with tqdm(total=len(dataset), desc="evaluate", unit="doc", disable=hidden, leave=False) as bar:

        def show(stage: str, done: int, total: int) -> None:
            bar.update(done - bar.n)

        metrics = evaluate_model(model, dataset, runtime=replace(runtime, progress=show), **options)
    if not is_main:
        return
    seconds = time.perf_counter() - start
    values = metrics.compute()
    content = {**context, "documents": metrics.documents, "seconds": round(seconds, 3), "metrics": values}
    print(f"\n{format_metrics(values)}\n")
    if metrics.counts is not None:
        buckets = metrics.by_frequency()
        content["by_frequency"] = buckets
        print(f"{format_by_frequency(buckets, k=5 if 5 in metrics.ks else metrics.ks[-1])}\n")
    write_json(path, content)
    print(f"{metrics.documents:,} documents in {seconds:.1f} s; written to {path}.")

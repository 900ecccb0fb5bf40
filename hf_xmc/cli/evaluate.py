"""`hf-xmc evaluate`: measures a model on documents with labels."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm

from ..evaluation import format_by_frequency, format_metrics
from ..inference.predict import BATCH_SIZE, evaluate_model
from ..modeling_utils import PredictMixin
from ..modeling_xmc import PREDICT_WITH
from ..parallel.stage_cache import Runtime
from ..serialization import write_json
from .arguments import DTYPES, load_model, load_split, parse_mapping


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-xmc evaluate",
        description="Prints the metrics of a model in percent and writes them, as fractions, to a JSON file.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of the model")
    parser.add_argument("data", metavar="DATA", help="folder, file or Hub id of the data; `sample` is the bundled set")
    parser.add_argument("--split", help="split of the data; `test` by default, except of a single file")
    parser.add_argument(
        "--output",
        help="JSON file; by default SPLIT_results.json in the model's folder, which its card shows, or "
        "SPLIT_trial_results.json with --ks, --beam-size, --predict-with or --dtype",
    )
    parser.add_argument("--column-mapping", type=parse_mapping, help='JSON: {"title": "text", "subjects": "labels"}')
    parser.add_argument("--label-delimiter", help="what separates labels in a string column")
    parser.add_argument("--ks", type=int, nargs="+", help="lengths of the ranking to measure at")
    parser.add_argument("--beam-size", type=int, help="nodes kept per level; 0 keeps all")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="batch size of the encoder")
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the encoder; that of the saved model by default")
    parser.add_argument(
        "--predict-with", choices=PREDICT_WITH, help="part of the model that predicts; by default as configured"
    )
    parser.add_argument("--num-threads", type=int, help="threads to use; all cores by default")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if args.output and os.path.isdir(args.output):
        raise IsADirectoryError(f"`--output {args.output}` is a folder. Name a file in it, such as results.json.")
    split = args.split or (None if os.path.isfile(args.data) else "test")
    dataset = load_split(args.data, split, args.column_mapping, args.label_delimiter)
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
    with tqdm(total=len(dataset), desc="evaluate", unit="doc", disable=not is_main) as bar:
        runtime = replace(runtime, progress=lambda _, done, __: _advance(bar, done))
        metrics = evaluate_model(model, dataset, runtime=runtime, **options)
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


def _advance(bar: tqdm, done: int) -> None:
    bar.update(done - bar.n)

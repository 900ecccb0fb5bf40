"""Command line of the benchmark: ``python -m benchmarks.xr_transformer compare | speed | pruning | ablation``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from .ablation import VARIANTS


def main() -> None:
    """Reads the command line and does what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.xr_transformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("compare", help="train and predict with hf_xmc and PECOS")
    command.add_argument("work", type=Path, help="folder for the vectors and everything measured on them")
    command.add_argument("--data", type=Path, required=True, help="folder with <train>.parquet and test.parquet")
    command.add_argument("--train", default="train", help="training file without its ending, e.g. train-5k")
    command.add_argument("--systems", default="hf-xmc,pecos", help="comma-separated (default: %(default)s)")
    command.add_argument("--steps", type=int, default=300, help="of all levels together (default: %(default)s)")
    command.add_argument("--max-length", type=int, default=128, help="tokens of a document (default: %(default)s)")
    command.add_argument(
        "--hf-xmc", type=json.loads, default={}, help="options of XMCTrainingArguments as JSON (default: none)"
    )
    _add_common(command)

    command = commands.add_parser("speed", help="fine-tuning and prediction beside the bare encoder")
    command.add_argument("--labels", type=int, nargs="*", default=[4108, 59307], help="sizes of the label level")
    command.add_argument("--tokens", type=int, default=128, help="of every document (default: %(default)s)")
    command.add_argument("--steps", type=int, default=30, help="of fine-tuning (default: %(default)s)")
    command.add_argument(
        "--model", type=Path, help="trained model whose prediction to measure, e.g. WORK/models/hf-xmc"
    )
    command.add_argument("--data", type=Path, help="folder with test.parquet, the documents of that prediction")
    command.add_argument("--documents", type=int, default=960, help="of them to predict (default: %(default)s)")
    command.add_argument("--output", type=Path, help="file for everything measured, as JSON")
    _add_common(command)

    command = commands.add_parser("pruning", help="what APLC saves by leaving out tails that cannot win")
    command.add_argument("--model", type=Path, required=True, help="model trained by aplc-xlnet")
    command.add_argument("--data", type=Path, required=True, help="folder with test.parquet")
    command.add_argument("--documents", type=int, default=2000, help="(default: %(default)s)")
    command.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 64], help="documents searched together")
    command.add_argument("--top-k", type=int, default=10, help="(default: %(default)s)")

    command = commands.add_parser("ablation", help="what each part of the method is worth, on validation documents")
    command.add_argument("output", type=Path, help="file of the results (JSON); variants that are in it are not run")
    command.add_argument("--data", default="sample", help="folder, or the bundled sample (default: %(default)s)")
    command.add_argument("--train", default="train", help="split to train on (default: %(default)s)")
    command.add_argument("--validation", default="validation", help="split to measure on (default: %(default)s)")
    command.add_argument("--steps", type=int, default=300, help="of all levels together (default: %(default)s)")
    command.add_argument("--max-length", type=int, default=48, help="tokens of a document (default: %(default)s)")
    command.add_argument("--limit", type=int, help="training documents to use")
    command.add_argument(
        "--method", default="xr-transformer", choices=VARIANTS, help="whose parts to compare (default: %(default)s)"
    )
    command.add_argument("--variants", nargs="+", help="only these (default: all)")
    command.add_argument("--seeds", type=int, nargs="+", default=[0], help="each variant once with each (default: 0)")
    command.add_argument(
        "--held-out", type=int, help="documents drawn from the training split to measure on, in place of --validation"
    )
    command.add_argument(
        "--options", type=json.loads, default={}, help="of all variants, XMCTrainingArguments as JSON (default: none)"
    )
    _add_common(command)
    args = parser.parse_args()
    if args.command == "speed" and (args.model is None) != (args.data is None):
        parser.error("--model and --data belong together: a model and the documents which it predicts.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Each command imports what it needs only: threads are set before torch is imported.
    {"compare": _compare, "speed": _speed, "pruning": _pruning, "ablation": _ablation}[args.command](args)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--encoder", type=Path, help="folder of the encoder (default: MiniLM of PECOS's environment)")
    command.add_argument("--batch-size", type=int, default=32, help="(default: %(default)s)")
    command.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: all cores)")


def _encoder(args: argparse.Namespace) -> str:
    from .venvs import minilm

    return str((args.encoder or minilm()).resolve())


def _compare(args: argparse.Namespace) -> None:
    from .compare import compare
    from .report import report
    from .worker_common import Options

    options = Options(_encoder(args), args.steps, args.batch_size, args.max_length, args.hf_xmc)
    systems = [name for name in args.systems.split(",") if name]
    path = compare(args.work, args.data, options, systems, train=args.train, threads=args.threads)
    print(report(args.work, path.stem))


def _speed(args: argparse.Namespace) -> None:
    from benchmarks.linear.prepare import write_json
    from benchmarks.linear.runner import THREAD_VARIABLES, machine, revision
    from benchmarks.linear.venvs import freeze

    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(args.threads)))
    from .speed import fine_tuning, format_speed, prediction

    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "options": {name: value for name, value in vars(args).items() if not isinstance(value, Path)},
        "machine": machine(),
        "revision": revision(),
        "versions": freeze("hf-xmc"),
        "measured": {},
    }
    measured, common = record["measured"], {"batch_size": args.batch_size, "threads": args.threads}
    for labels in args.labels:
        name = f"fine-tuning, {labels:,} labels, {args.tokens} tokens"
        measured[name] = fine_tuning(_encoder(args), labels, tokens=args.tokens, steps=args.steps, **common)
    if args.model:
        name = f"prediction, {args.data.name}"
        measured[name] = prediction(args.model, args.data, documents=args.documents, **common)
    if args.output:
        write_json(args.output, record)
    print(format_speed(measured))


def _pruning(args: argparse.Namespace) -> None:
    from .pruning import format_pruning, pruning

    options = {"documents": args.documents, "batch_sizes": tuple(args.batch_sizes), "top_k": args.top_k}
    print(format_pruning(pruning(args.model, args.data, **options)))


def _ablation(args: argparse.Namespace) -> None:
    from .ablation import ablation, format_table

    results = ablation(
        args.data,
        args.train,
        args.validation,
        _encoder(args),
        args.steps,
        args.output,
        args.variants,
        args.limit,
        args.held_out,
        args.method,
        args.seeds,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=2 * args.batch_size,
        encoder_max_length=args.max_length,
        num_threads=args.threads,
        **args.options,
    )
    print(format_table(results))


if __name__ == "__main__":
    main()

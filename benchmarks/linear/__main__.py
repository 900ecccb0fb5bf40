"""Command line of the benchmark: ``python -m benchmarks.linear prepare | run | report | venvs``."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from .prepare import prepare
from .report import report
from .runner import run
from .systems import SYSTEMS, find_systems
from .venvs import RECIPES, python_of


def main() -> None:
    """Reads the command line and does what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("prepare", help="make the vectors of a dataset")
    command.add_argument("data", type=Path, help="folder with train and test as .parquet (text, labels) or .txt.gz")
    command.add_argument("work", type=Path, help="folder for the vectors and everything measured on them")
    command.add_argument("--train", default="train", help="training file without its ending, e.g. train-15k")
    command.add_argument("--normalise", action="store_true", help="scale given vectors to length 1")

    command.add_argument("--stemmer", help="language of a stemmer: the vectors that Annif passes to omikuji")

    command = commands.add_parser("run", help="train and predict with each system")
    command.add_argument("work", type=Path)
    command.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated (default: %(default)s)")
    command.add_argument("--repeats", type=int, default=2)
    command.add_argument("--train-threads", type=int, default=2)
    command.add_argument("--predict-threads", default="1,2", help="comma-separated (default: %(default)s)")
    command.add_argument("--timeout", type=int, default=0, help="seconds for one process, 0 for no limit")
    command.add_argument(
        "--against", default="pecos-default", help="system the ratios divide by (default: %(default)s)"
    )

    command = commands.add_parser("report", help="print the tables of a run")
    command.add_argument("work", type=Path)
    command.add_argument(
        "--run", action="append", help="name of a run (default: the newest); give several to pool them"
    )
    command.add_argument(
        "--against", default="pecos-default", help="system the ratios divide by (default: %(default)s)"
    )

    commands.add_parser("venvs", help="make the environments of the other systems")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    if args.command == "prepare":
        options = {"train": args.train, "normalise": args.normalise, "stemmer": args.stemmer}
        print(json.dumps(prepare(args.data, args.work, **options), indent=1))  # noqa: T201
    elif args.command == "run":
        threads = [int(number) for number in args.predict_threads.split(",")]
        path = run(
            args.work,
            find_systems(args.systems),
            repeats=args.repeats,
            train_threads=args.train_threads,
            predict_threads=threads,
            timeout=args.timeout,
        )
        print(report(args.work, runs=[path.stem], against=args.against))  # noqa: T201
    elif args.command == "report":
        print(report(args.work, runs=args.run, against=args.against))  # noqa: T201
    else:
        for name in RECIPES:
            print(python_of(name))  # noqa: T201


if __name__ == "__main__":
    main()

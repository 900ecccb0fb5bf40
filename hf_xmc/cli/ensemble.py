"""`hf-xmc ensemble`: makes one model of several."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from tqdm.auto import tqdm
from transformers.utils import CONFIG_NAME

from ..ensemble_xmc import COMBINATIONS
from ..hub.model_card import forget_model
from ..serialization import ENSEMBLE_FILE, write_json
from ..training.ensemble import make_ensemble
from .arguments import load_split, parse_mapping

DESCRIPTION = """
Averages trained models of the same labels and writes them, whole, into one folder, which is evaluated and used as any
other model. With --validation the weights are chosen on documents that were not trained on.
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="hf-xmc ensemble", description=DESCRIPTION)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="folders or Hub ids of the models, two or more")
    parser.add_argument("--output_dir", "--output-dir", required=True, help="folder of the ensemble")
    parser.add_argument("--combine", choices=COMBINATIONS, default="scores", help="what is averaged")
    parser.add_argument("--weights", type=float, nargs="+", help="weight of each model; equal by default")
    parser.add_argument("--validation", metavar="DATA", help="documents on which the weights are chosen")
    parser.add_argument("--split", help="split of DATA; `validation` by default, except of a single file")
    parser.add_argument("--column-mapping", type=parse_mapping, help='JSON: {"title": "text", "subjects": "labels"}')
    parser.add_argument("--label-delimiter", help="what separates labels in a string column")
    parser.add_argument("--num-threads", type=int, help="threads to use; all cores by default")
    parser.add_argument("--overwrite", action="store_true", help="replace a model in the output folder")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if len(args.models) < 2:
        raise ValueError("An ensemble is made of two models or more.")
    if os.path.exists(os.path.join(args.output_dir, CONFIG_NAME)) and not args.overwrite:
        raise FileExistsError(
            f"`{args.output_dir}` holds a model already. Choose another `--output_dir`, or give `--overwrite`."
        )
    if any(os.path.realpath(model) == os.path.realpath(args.output_dir) for model in args.models):
        raise ValueError(f"`{args.output_dir}` is one of the models: an ensemble needs a folder of its own.")
    dataset = None
    if args.validation is not None:
        split = args.split or (None if os.path.isfile(args.validation) else "validation")
        dataset = load_split(args.validation, split, args.column_mapping, args.label_delimiter)
    with tqdm(desc="ensemble", disable=dataset is None) as bar:

        def report(stage: str, done: int, total: int) -> None:
            bar.set_description(stage, refresh=False)
            bar.total, bar.n = total, done
            bar.refresh()

        ensemble, facts = make_ensemble(
            args.models, args.combine, args.weights, dataset, num_threads=args.num_threads, report=report
        )
    forget_model(args.output_dir)
    ensemble.save_pretrained(args.output_dir)
    made_of = {"models": args.models, "weights": ensemble.config.weights, "combine": args.combine, **facts}
    write_json(os.path.join(args.output_dir, ENSEMBLE_FILE), made_of)
    for model, weight in zip(args.models, ensemble.config.weights or (), strict=True):
        print(f"{weight:6.3f}  {model}")
    for name, value in facts.items():
        print(f"{name}: {value}")
    print(f"The ensemble is in {args.output_dir}.")

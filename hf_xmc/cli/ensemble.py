"""`hf-xmc ensemble`: combines several models into one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from tqdm.auto import tqdm
from transformers.utils import CONFIG_NAME

from ..ensemble_xmc import COMBINATIONS
from ..hub.model_card import forget_model
from ..inference.predict import BATCH_SIZE
from ..parallel.stage_cache import Runtime
from ..serialization import ENSEMBLE_FILE, write_json
from ..training.ensemble import make_ensemble
from .arguments import load_split, parse_mapping

DESCRIPTION = """
Combines trained models with the same labels into one folder, which is evaluated and used like any other model. With
--validation, the weights are chosen on documents that were not used for training.
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
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="batch size of the encoders")
    parser.add_argument("--num-threads", type=int, help="threads to use; all cores by default")
    parser.add_argument("--overwrite", action="store_true", help="replace a model in the output folder")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if len(args.models) < 2:
        raise ValueError("An ensemble needs at least two models.")
    if os.path.exists(os.path.join(args.output_dir, CONFIG_NAME)) and not args.overwrite:
        raise FileExistsError(
            f"`{args.output_dir}` contains a model already. Choose another `--output_dir`, or give `--overwrite`."
        )
    if any(os.path.realpath(model) == os.path.realpath(args.output_dir) for model in args.models):
        raise ValueError(f"`--output_dir {args.output_dir}` is one of the models. Choose another folder.")
    dataset = None
    if args.validation is not None:
        split = args.split or (None if os.path.isfile(args.validation) else "validation")
        dataset = load_split(args.validation, split, args.column_mapping, args.label_delimiter)
    with tqdm(desc="ensemble", disable=dataset is None) as bar:

        def show(stage: str, done: int, total: int) -> None:
            bar.set_description(stage, refresh=False)
            bar.total, bar.n = total, done
            bar.refresh()

        runtime = Runtime(args.num_threads, show)
        ensemble, results = make_ensemble(
            args.models, args.combine, args.weights, dataset, args.batch_size, runtime=runtime
        )
    forget_model(args.output_dir)
    ensemble.save_pretrained(args.output_dir)
    record = {"models": args.models, "weights": ensemble.config.weights, "combine": args.combine, **results}
    write_json(os.path.join(args.output_dir, ENSEMBLE_FILE), record)
    for model, weight in zip(args.models, ensemble.config.weights or (), strict=True):
        print(f"{weight:6.3f}  {model}")
    for name, value in results.items():
        print(f"{name}: {value}")
    print(f"The ensemble is in {args.output_dir}.")

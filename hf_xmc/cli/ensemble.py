"""`hf-xmc ensemble`: combines several models into one."""

from __future__ import annotations

import argparse
import os

from tqdm.auto import tqdm

from ..hub.model_card import forget_model
from ..parallel.stage_cache import Runtime
from ..serialization import ENSEMBLE_FILE, write_json
from ..training.ensemble import make_ensemble
from .arguments import check_output_folder, data_options, load_split, recorded_columns


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if len(args.models) < 2:
        raise ValueError("An ensemble needs at least two models.")
    check_output_folder(args.output_dir, args.overwrite)
    if any(os.path.realpath(model) == os.path.realpath(args.output_dir) for model in args.models):
        raise ValueError(f"`--output {args.output_dir}` is one of the models. Choose another folder.")
    dataset = None
    if args.validation is not None:
        split = args.split or (None if os.path.isfile(args.validation) else "validation")
        dataset = load_split(args.validation, split, **data_options(args, args.models[0]))
    with tqdm(desc="ensemble", disable=True if dataset is None else None, leave=False) as bar:

        def show(stage: str, done: int, total: int) -> None:
            bar.set_description(stage, refresh=False)
            bar.total, bar.n = total, done
            bar.refresh()

        options = args.combine, args.weights, dataset, args.batch_size, Runtime(args.num_threads, show)
        ensemble, results = make_ensemble(args.models, *options)
    forget_model(args.output_dir)
    ensemble.save_pretrained(args.output_dir)
    weights, combine = ensemble.config.weights, ensemble.config.combine
    record = {"models": args.models, "weights": weights, "combine": combine, **results}
    record["columns"] = recorded_columns(args.models[0])
    write_json(os.path.join(args.output_dir, ENSEMBLE_FILE), record)
    for model, weight in zip(args.models, weights or (), strict=weights is not None):
        print(f"{weight:6.3f}  {model}")
    for name, value in results.items():
        values = value if isinstance(value, list) else [value]
        print(f"{name}: {', '.join(f'{100 * number:.2f} %' for number in values)}")
    print(f"The ensemble is in {args.output_dir}.")

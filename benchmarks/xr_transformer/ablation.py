"""What each part of a method with an encoder is worth: one change at a time, at the same number of steps."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

METRICS = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@10")
PREDICTORS = ("ranker", "heads", "all")


def _lightxml(steps: int) -> dict[str, dict[str, Any]]:
    """
    Each variant changes one thing of `dynamic`.

    It has clusters however few the labels are, and a beam that leaves most of them out: else all negatives are one.
    `two stages` trains the clusters in half of the steps, finds candidates, and trains the labels in the other half.
    """
    halves = [steps // 2, steps - steps // 2]
    dynamic: dict[str, Any] = {"level_indices": [-2, -1], "level_steps": [steps], "level_beam_size": [5]}
    return {
        "frozen encoder": {**dynamic, "level_steps": [0]},
        "dynamic": dynamic,
        "static": {**dynamic, "level_negatives": ["both"]},
        "two stages": {
            **dynamic,
            "level_negatives": ["both"],
            "level_steps": halves,
            "preset": {"level": {"joint": False}},
        },
        "teacher forcing only": {**dynamic, "level_negatives": ["tfn"]},
        "all labels": {"level_steps": [steps], "level_negatives": ["all"]},
        "without averaging": {**dynamic, "level_swa_start": 1.0},
        "without bottleneck": {**dynamic, "preset": {"level": {"bottleneck": 0}}},
        "one layer": {**dynamic, "encoder_pooling_layers": 1},
        "less dropout": {**dynamic, "level_dropout": 0.1},
        "without bootstrap": {**dynamic, "level_bootstrap": False},
    }


def _aplc_xlnet(steps: int) -> dict[str, dict[str, Any]]:
    """Each variant changes one thing of `by mass`."""
    return {
        "frozen encoder": {"level_steps": [0]},
        "by mass": {"level_steps": [steps]},
        "by count": {
            "level_steps": [steps],
            "tree_shares": [0.5, 0.25, 0.25],
            "preset": {"tree": {"shares_of": "count"}},
        },
        "shorter tails": {"level_steps": [steps], "preset": {"level": {"shrink": 4.0}}},
        "without bootstrap": {"level_steps": [steps], "level_bootstrap": False},
    }


def _xr_transformer(steps: int) -> dict[str, dict[str, Any]]:
    """The first four compare schedules, the others change one thing of `labels only`."""
    flat: dict[str, Any] = {"level_indices": [-1], "level_steps": [steps], "level_negatives": ["all"]}
    two = {"level_indices": [-2, -1], "level_steps": [steps // 3, steps - steps // 3]}
    third = steps // 3
    return {
        "frozen encoder": {"num_train_epochs": 0},
        "labels only": flat,
        "two levels": two,
        "three levels": {"level_indices": [-3, -2, -1], "level_steps": [third, third, steps - 2 * third]},
        "two levels, without MAN": {**two, "level_negatives": ["tfn"]},
        "two levels, without bootstrap": {**two, "level_bootstrap": False},
        "without bootstrap": {**flat, "level_bootstrap": False},
        "with cost weights": {**flat, "preset": {"level": {"cost_sensitive": True}}},
        "squared hinge": {**flat, "level_loss": "squared_hinge"},
        "cls pooling": {**flat, "encoder_pooling": "cls"},
        "refined tree": {**flat, "refine_tree": True},
    }


# What is compared for each method: options by name of the variant, for a number of steps.
VARIANTS: dict[str, Callable[[int], dict[str, dict[str, Any]]]] = {
    "xr-transformer": _xr_transformer,
    "lightxml": _lightxml,
    "aplc-xlnet": _aplc_xlnet,
}


def ablation(
    dataset: str,
    train_split: str,
    validation_split: str,
    encoder: str,
    steps: int,
    path: Path,
    names: Iterable[str] | None = None,
    limit: int | None = None,
    held_out: int | None = None,
    method: str = "xr-transformer",
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """
    Trains every variant with every seed that is not yet in the file of results and adds it there.

    Args:
        dataset: Folder of the data, or `sample`.
        train_split: Split to train on.
        validation_split: Split to measure on; half of it chooses the share of the heads, the other half measures.
        encoder: Folder or Hub id of the encoder.
        steps: Optimiser steps of all levels together.
        path: File of the results.
        names: Variants to run; all by default.
        limit: Training documents to use; all by default.
        held_out: Documents drawn from the training split to measure on, in place of the validation split.
        method: Method whose parts are compared.
        seeds: Each variant is trained once with each.
        options: Further options of all variants.

    Returns:
        What was measured, by variant and seed.
    """
    from hf_xmc.cli.arguments import load_split

    train = load_split(dataset, train_split)
    if held_out is None:
        validation = load_split(dataset, validation_split)
    else:
        # Files may be sorted by date, say.
        train = train.shuffle(seed=0)
        train, validation = train.select(range(held_out, len(train))), train.select(range(held_out))
    if limit is not None:
        train = train.select(range(min(limit, len(train))))
    halves = [validation.select(range(start, len(validation), 2)) for start in (0, 1)]
    results: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = {"xr-linear": {}, **VARIANTS[method](steps)}
    options["method"] = method
    for seed in seeds:
        for name in known if names is None else names:
            if str(seed) in results.get(name, {}):
                continue
            common = {**options, "seed": seed}
            result = _run(train, halves[0], halves[1], encoder, known[name], name == "xr-linear", common)
            results.setdefault(name, {})[str(seed)] = result
            path.write_text(json.dumps(results, indent=1), encoding="utf-8")
            print(format_table({name: results[name]}), flush=True)
    return results


def _run(
    train: Any, choose: Any, measure: Any, encoder: str, changes: dict[str, Any], linear: bool, options: dict[str, Any]
) -> dict[str, Any]:
    from hf_xmc import XMCTrainer, XMCTrainingArguments
    from hf_xmc.training.presets import METHODS

    preset = METHODS[options["method"]]
    # Fields that are not options are changed in the preset, for this training.
    changed = {part: {**preset.get(part, {}), **values} for part, values in changes.get("preset", {}).items()}
    changes = {name: value for name, value in changes.items() if name != "preset"}
    common: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
    common |= {"seed": options["seed"]} if linear else {"predict_with": "all", **changes, **options}
    start = time.perf_counter()
    with patch.dict(preset, changed), tempfile.TemporaryDirectory() as folder:
        trainer = XMCTrainer(
            model=None if linear else encoder,
            args=XMCTrainingArguments(folder, **common),
            train_dataset=train,
            eval_dataset=choose,
        )
        output = trainer.train()
    seconds = time.perf_counter() - start
    measured = {}
    predictors = PREDICTORS if trainer.args.predict_with == "all" else (trainer.args.predict_with,)
    for predictor in predictors:
        trainer.model.config.predict_with = predictor
        values = trainer.evaluate(measure)
        measured[predictor] = {name: values[f"eval_{name}"] for name in METRICS}
    return {
        "options": {**changes, **changed},
        "seconds": seconds,
        "stages": {name: value for name, value in output.metrics.items() if name.endswith("_seconds")},
        "tree": trainer.model.config.level_sizes,
        "heads_bytes": trainer.model.heads.num_bytes,
        "full_width_bytes": trainer.model.heads.full_width_bytes,
        "metrics": measured,
    }


def format_table(results: dict[str, dict[str, Any]]) -> str:
    """The results in percent as a Markdown table: means over the seeds, with their standard deviation if several."""
    lines = [
        "| variant | seeds | seconds | nDCG@5 heads | nDCG@5 ranker | "
        + " | ".join(f"{name} both" for name in METRICS)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(METRICS),
    ]
    for name, runs in results.items():
        metrics = [run["metrics"] for run in runs.values()]
        # Where one predictor was trained alone, it is all there is.
        last = "all" if "all" in metrics[0] else next(iter(metrics[0]))
        cells = [
            name,
            str(len(runs)),
            f"{statistics.mean(run['seconds'] for run in runs.values()):.0f}",
            *(_cell(metrics, predictor, "nDCG@5") for predictor in ("heads", "ranker")),
            *(_cell(metrics, last, metric) for metric in METRICS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(runs: list[dict[str, dict[str, float]]], predictor: str, metric: str) -> str:
    values = [100 * run[predictor][metric] for run in runs if predictor in run]
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"

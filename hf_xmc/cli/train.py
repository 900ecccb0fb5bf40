"""`hf-xmc train`: trains a model as a recipe says."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..data import load_label_texts
from ..parallel.runtime import Runtime
from ..training.arguments import XMCTrainingArguments
from ..training.record import public_name
from ..training.trainer import XMCTrainer
from .arguments import DataArguments, RecipeParser
from .evaluate import measure

DESCRIPTION = """
Trains a model and saves it into --output_dir; with --eval_split also measures it. Options come from the recipe and
from flags of the same names, which win: hf-xmc train --config recipe.yaml --dataset PATH --output_dir my-tagger
A training that was interrupted goes on with --resume_from_checkpoint true. In several processes:
accelerate launch --config_file recipes/accelerate/one-gpu-machine.yaml -m hf_xmc train --config recipe.yaml ...
"""


def make_parser() -> RecipeParser:
    """The parser of the command."""
    return RecipeParser([DataArguments, XMCTrainingArguments], prog="hf-xmc train", description=DESCRIPTION)


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    data, args = make_parser().parse(argv)
    train_dataset = data.load(data.train_split)
    # Read before the work begins: a missing split should not come to light hours later.
    validation_dataset = data.load(data.validation_split) if data.validation_split else None
    eval_dataset = data.load(data.eval_split) if data.eval_split else None
    trainer = XMCTrainer(
        args=args,
        train_dataset=train_dataset,
        # What is measured in the end must not take part in any choice.
        eval_dataset=validation_dataset,
        label_texts=load_label_texts(data.dataset) if data.label_texts else None,
    )
    trainer.recorder.record.dataset, trainer.recorder.record.split = public_name(data.dataset), data.train_split
    resume: str | bool | None = args.resume_from_checkpoint
    processes = trainer.work.processes
    if processes.is_main:
        print(f"Training in {processes.count} process{'es' if processes.count > 1 else ''}.", flush=True)
    trained = trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    if processes.is_main:
        print(f"The model is in {args.output_dir}.")
    if eval_dataset is not None:
        path = os.path.join(args.output_dir, f"{data.eval_split}_results.json")
        facts = {
            "model": args.output_dir,
            "dataset": data.dataset,
            "split": data.eval_split,
            "training_seconds": trained.metrics.get("train_runtime"),
        }
        runtime = Runtime(args.num_threads, cache=trainer.work)
        options = {"ks": args.eval_ks, "batch_size": args.per_device_eval_batch_size}
        measure(trainer.model, eval_dataset, path, facts, runtime, **options)
        trainer.create_model_card()
    if args.push_to_hub:
        done = trainer.push_to_hub()
        if processes.is_main:
            print(f"It is at {done.commit_url}.")
    trainer.end()

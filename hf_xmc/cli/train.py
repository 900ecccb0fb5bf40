"""`hf-xmc train`: trains a model from a recipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields

from ..data import load_label_texts
from ..parallel.stage_cache import Runtime
from ..training.arguments import PARTS, XMCTrainingArguments
from ..training.options import options_of
from ..training.record import public_name
from ..training.trainer import XMCTrainer
from .arguments import DataArguments, RecipeParser
from .evaluate import measure

DESCRIPTION = """
Trains a model and saves it into --output_dir; with --eval_split also measures it. Options come from the recipe and
from flags of the same names, which win: hf-xmc train --config recipe.yaml --dataset PATH --output_dir my-tagger
--resume_from_checkpoint true resumes an interrupted training. To use several processes:
accelerate launch --config_file recipes/accelerate/one-gpu-machine.yaml -m hf_xmc train --config recipe.yaml ...
"""
EPILOG = "Defaults depend on the method. All other options of transformers.TrainingArguments are accepted, too."
# The most used options of transformers.TrainingArguments.
_STANDARD_OPTIONS = (
    "output_dir",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "warmup_steps",
    "lr_scheduler_type",
    "weight_decay",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "eval_strategy",
    "save_strategy",
    "seed",
    "push_to_hub",
    "resume_from_checkpoint",
)
_TITLES = {
    "": "training",
    "tfidf_": "TF-IDF",
    "tree_": "label tree",
    "ranker_": "linear ranker",
    "knn_": "method knn",
    "encoder_": "encoder",
    "level_": "fine-tuning of the encoder, one value for all levels or one for each",
}


def make_parser() -> RecipeParser:
    """The parser of the command."""
    groups = {"data": ("config", *(declared.name for declared in fields(DataArguments)))}
    for prefix, title in _TITLES.items():
        groups[title] = tuple(prefix + declared.name for declared in options_of(PARTS[prefix]))
    groups["standard options"] = _STANDARD_OPTIONS
    kinds = [DataArguments, XMCTrainingArguments]
    return RecipeParser(kinds, groups, prog="hf-xmc train", description=DESCRIPTION, epilog=EPILOG)


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    data, args = make_parser().parse(argv)
    train_dataset = data.load(data.train_split)
    # Loaded now, so that a missing split is an error before the training and not hours later.
    validation_dataset = data.load(data.validation_split) if data.validation_split else None
    eval_dataset = data.load(data.eval_split) if data.eval_split else None
    trainer = XMCTrainer(
        args=args,
        train_dataset=train_dataset,
        # The eval split must not influence any choice.
        eval_dataset=validation_dataset,
        label_texts=load_label_texts(data.dataset) if data.label_texts else None,
    )
    trainer.recorder.record.dataset, trainer.recorder.record.split = public_name(data.dataset), data.train_split
    resume: str | bool | None = args.resume_from_checkpoint
    processes = trainer.cache.processes
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
        runtime = Runtime(args.num_threads, cache=trainer.cache)
        options = {"ks": args.eval_ks, "batch_size": args.per_device_eval_batch_size}
        measure(trainer.model, eval_dataset, path, facts, runtime, **options)
        trainer.create_model_card()
    if args.push_to_hub:
        done = trainer.push_to_hub()
        if processes.is_main:
            print(f"It is at {done.commit_url}.")
    trainer.end()

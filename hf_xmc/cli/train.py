"""`hf-xmc train`: trains a model on a file, or from a recipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..parallel.process_group import ProcessGroup
from ..parallel.stage_cache import Runtime
from ..training.arguments import PARTS, XMCTrainingArguments
from ..training.options import options_of
from ..training.progress import StageProgressCallback, quiet_libraries
from ..training.record import public_name
from ..training.run import TrainReport, train
from ..training.trainer import XMCTrainer
from .arguments import TABLE_OPTIONS, DataArguments, RecipeParser
from .evaluate import measure
from .parsers import with_dashes

DESCRIPTION = """
`hf-xmc train DATA -o FOLDER` trains on a file, a folder or a dataset of the Hub, and measures the model on a part that
is held out; `hf-xmc train --config RECIPE` on the splits that the recipe or flags name, and measures it with
--eval_split. Options come from the recipe and from flags of the same names, which win. --resume_from_checkpoint true
resumes an interrupted training. To use several processes:
accelerate launch --config_file recipes/accelerate/one-gpu-machine.yaml -m hf_xmc train --config recipe.yaml ...
"""
EPILOG = "Defaults depend on the method. All other options of transformers.TrainingArguments are accepted, too."
ALIASES = {"-o": "--output_dir", "--output": "--output_dir", "--encoder": "--encoder_name"}
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
_SPLITS = ("train_split", "validation_split", "eval_split")


class TrainParser(RecipeParser):
    """The parser of the command, which also takes the data without a flag."""

    def parse_values(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of all options; `data` is the file that comes without a flag."""
        values = super().parse_values([_spelt_out(arg) for arg in argv])
        texts = values["text_column"] or []
        if values["data"] is None and values["dataset"] is None and len(texts) > 1 and os.path.exists(texts[-1]):
            values["data"] = texts.pop()  # --text-column title FILE
        if values["data"] is not None:
            if values["dataset"] is not None and any(arg.startswith("--dataset") for arg in argv):
                raise ValueError(f"The data is both `{values['data']}` and `{values['dataset']}`. Give one of them.")
            values["dataset"] = values["data"]
            for name in _SPLITS:
                if any(with_dashes(arg).split("=")[0] == with_dashes(f"--{name}") for arg in argv):
                    raise ValueError(
                        f"`--{name}` needs `--dataset {values['data']}`: without it, the splits train, validation and "
                        "test of the data are used, or a part is held out."
                    )
                values[name] = getattr(DataArguments, name)  # its default
        return values


def make_parser() -> TrainParser:
    """The parser of the command."""
    groups = {"data": ("config", *(declared.name for declared in fields(DataArguments)))}
    for prefix, title in _TITLES.items():
        groups[title] = tuple(prefix + declared.name for declared in options_of(PARTS[prefix]))
    groups["standard options"] = _STANDARD_OPTIONS
    kinds = [DataArguments, XMCTrainingArguments]
    parser = TrainParser(kinds, groups, prog="hf-xmc train", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("data", nargs="?", help="File, folder or Hub id of the data.")
    parser.add_argument("--help-all", action="help", help="Shows all options.")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    parser = make_parser()
    values = parser.parse_values(argv)
    data = DataArguments(**parser.values_of(DataArguments, values))
    options = parser.values_of(XMCTrainingArguments, values)
    if values["data"] is not None:
        _train_on(data, options)
    else:
        _train_from_recipe(data, XMCTrainingArguments(**options))


def _spelt_out(arg: str) -> str:
    """A flag in full; all parts of its name are joined in the same way."""
    name, equals, value = arg.partition("=")
    if name.startswith("--") and "_" in name:
        name = "--" + name[2:].replace("-", "_")
    return ALIASES.get(name, name) + equals + value


def _train_on(data: DataArguments, options: dict[str, Any]) -> None:
    """Trains on data whose columns and splits are found, and prints the report."""
    if not options["output_dir"]:
        raise ValueError(f"The folder of the model is missing. Write `hf-xmc train {data.dataset} -o my-tagger`.")
    columns: dict[str, Any] = {name: getattr(data, name) for name in (*TABLE_OPTIONS, "label_delimiter")}
    assert data.dataset is not None and not isinstance(data.column_mapping, str)
    for column, kind in (data.column_mapping or {}).items():
        columns[{"text": "text_column", "labels": "label_column"}.get(kind, kind)] = column
    folder = options.pop("output_dir")
    names = ("labels_seen_only", "extend", "previous", "holdout", "final_train", "log")
    chosen: dict[str, Any] = {name: getattr(data, name) for name in names}
    with quiet_libraries():
        label_texts = data.load_label_texts()
    _, report = train(data.dataset, folder, label_texts=label_texts, **columns, **chosen, **options)
    if ProcessGroup.current().is_main and data.log == "text":
        print(f"\n{report}\n\n{_next_commands(report, data.dataset)}")


def _next_commands(report: TrainReport, dataset: str) -> str:
    new = f"new{os.path.splitext(dataset)[1] or '.csv'}"
    name = os.path.basename(os.path.normpath(report.folder))
    return (
        "Next:\n"
        f"  hf-xmc predict {report.folder} {new} --output tags.jsonl\n"
        f"  hf-xmc evaluate {report.folder} {new}\n"
        f"  hf-xmc push {report.folder} USER/{name} --private"
    )


def _train_from_recipe(data: DataArguments, args: XMCTrainingArguments) -> None:
    """Trains and measures on the splits that are named."""
    with quiet_libraries():
        train_dataset = data.load(data.train_split)
        # Loaded now, so that a missing split is an error before the training and not hours later.
        validation_dataset = data.load(data.validation_split) if data.validation_split else None
        eval_dataset = data.load(data.eval_split) if data.eval_split else None
        label_texts = data.load_label_texts()
        extended = data.load_extended()
    trainer = XMCTrainer(
        **extended,
        args=args,
        train_dataset=train_dataset,
        # The eval split must not influence any choice.
        eval_dataset=validation_dataset,
        label_texts=label_texts,
        labels_seen_only=data.labels_seen_only,
        callbacks=[StageProgressCallback(data.log, bar=False if args.disable_tqdm else None)],
    )
    trainer.model.config.text_columns = data.texts if len(data.texts) > 1 else None
    trainer.recorder.record.dataset, trainer.recorder.record.split = public_name(data.dataset), data.train_split
    resume: str | bool | None = args.resume_from_checkpoint
    processes = trainer.cache.processes
    if processes.is_main and processes.count > 1:
        print(f"Training in {processes.count} processes.", flush=True)
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

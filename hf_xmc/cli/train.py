"""`hf-xmc train`: trains a model on a file, or from a recipe."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from ..parallel.process_group import ProcessGroup
from ..parallel.stage_cache import Runtime
from ..training.arguments import PARTS, XMCTrainingArguments
from ..training.options import explain_old_name, options_of
from ..training.progress import StageProgressCallback, quiet_libraries
from ..training.record import public_name
from ..training.run import TrainReport, train
from ..training.trainer import XMCTrainer
from .arguments import TABLE_OPTIONS, DataArguments
from .evaluate import measure
from .parsers import closest, with_dashes

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


class OptionFormatter(argparse.HelpFormatter):
    """Shows each option in one line where possible, with the first sentence of its help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=118)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return action.option_strings[0]

    def _expand_help(self, action: argparse.Action) -> str:
        text = (action.help or "").split(". ")[0].rstrip(".")
        return f"{text} ({', '.join(map(str, action.choices))})" if action.choices else text


class TrainParser(HfArgumentParser):
    """Reads options from a recipe (flat YAML of their names) and from flags, which win; the data needs no flag."""

    def __init__(self) -> None:
        # Not the default formatter of the base class: an option's default may come from the recipe or the method.
        options: dict[str, Any] = {"allow_abbrev": False, "formatter_class": OptionFormatter, "prog": "hf-xmc train"}
        super().__init__([DataArguments, XMCTrainingArguments], description=DESCRIPTION, epilog=EPILOG, **options)
        for action in self._actions:
            if action.type is string_to_bool:  # the base class gives optional ones no value
                action.nargs, action.const = "?", True
        self.add_argument("--config", metavar="RECIPE", help="Recipe: a YAML file of these options.")
        self.add_argument("data", nargs="?", help="File, folder or Hub id of the data.")
        self.add_argument("--help-all", action="help", help="Shows all options.")

    def format_help(self) -> str:
        """The help of the options of this library and the most used ones of transformers, in groups."""
        groups = {"data": ("config", *(declared.name for declared in fields(DataArguments)))}
        for prefix, title in _TITLES.items():
            groups[title] = tuple(prefix + declared.name for declared in options_of(PARTS[prefix]))
        groups["standard options"] = _STANDARD_OPTIONS
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s [--config RECIPE] [--option value ...]", [], [])
        formatter.add_text(self.description)
        actions = {action.dest: action for action in self._actions}
        for title, names in groups.items():
            formatter.start_section(title)
            formatter.add_arguments([actions[name] for name in names])
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_values(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of all options."""
        argv = [_spelt_out(arg) for arg in argv]
        recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        recipe.add_argument("--config")
        path = recipe.parse_known_args(argv)[0].config
        flags = [] if path is None else self._recipe_flags(path)
        namespace, unknown = self.parse_known_args([*flags, *argv])
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            flag = unknown[0].split("=")[0]
            if not flag.startswith("-"):
                raise ValueError(f"`{flag}` is one argument too many: give one DATA, and one value to each option.")
            raise ValueError(
                explain_old_name(flag.removeprefix("--").replace("-", "_"))
                or f"`{flag}` is not an option.{closest(flag, known)}"
            )
        values = vars(namespace)
        _set_data(values, argv)
        return values

    @staticmethod
    def values_of(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the fields of one dataclass."""
        return {declared.name: values[declared.name] for declared in fields(kind) if declared.init}

    def error(self, message: str) -> NoReturn:
        """Raises an error; the base class would print the usage and exit."""
        raise ValueError(message)

    def _recipe_flags(self, path: str) -> list[str]:
        """The recipe as flags, so that all values are parsed the same way."""
        names = [declared.name for kind in self.dataclass_types for declared in fields(kind) if declared.init]
        flags: list[str] = []
        for key, value in read_recipe(path, names).items():
            if isinstance(value, list):
                flags += [f"--{key}", *map(str, value)]
            elif value is not None:
                flags.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
        return flags


def _set_data(values: dict[str, Any], argv: Sequence[str]) -> None:
    """Moves the data that comes without a flag to its option; its splits then have their defaults."""
    texts = values["text_column"] or []
    if values["data"] is None and values["dataset"] is None and len(texts) > 1 and os.path.exists(texts[-1]):
        values["data"] = texts.pop()  # --text-column title FILE
    if values["data"] is None:
        return
    if values["dataset"] is not None and any(arg.startswith("--dataset") for arg in argv):
        raise ValueError(f"The data is both `{values['data']}` and `{values['dataset']}`. Give one of them.")
    values["dataset"] = values["data"]
    for name in _SPLITS:
        if any(with_dashes(arg).split("=")[0] == with_dashes(f"--{name}") for arg in argv):
            raise ValueError(
                f"`--{name}` needs `--dataset {values['data']}`: without it, the splits train, validation and test of "
                "the data are used, or a part is held out."
            )
        values[name] = getattr(DataArguments, name)


def read_recipe(path: str, names: Sequence[str]) -> dict[str, Any]:
    """Reads a recipe, a YAML file whose keys are among `names`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"The recipe `{path}` does not exist.")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`{path}` is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` is not a recipe: write one `name: value` per line.")
    for key in content:
        if key not in names:
            reason = explain_old_name(str(key)) or f"`{key}` is not an option.{closest(str(key), names)}"
            raise ValueError(f"{path}: {reason}")
    return content


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    parser = TrainParser()
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

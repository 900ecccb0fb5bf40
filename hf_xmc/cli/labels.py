"""`hf-xmc labels`: adds, removes and renames labels of a model."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from ..data.vocabularies import load_label_list, load_vocabulary
from ..hub.model_card import forget_model, write_model_card
from ..loading import file_digests
from ..modeling_xmc import XMCForTextClassification
from ..serialization import RECORD_FILE, TRAINING_ARGS_FILE, read_json, resolve_file, write_json
from .arguments import check_output_folder, data_options, load_model, load_split


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if not (args.add or args.remove or args.rename):
        raise ValueError("There is nothing to do: give `--add`, `--remove` or `--rename`.")
    if args.examples and not args.add:
        raise ValueError("`--examples` are documents of new labels. Give `--add`, too.")
    check_output_folder(args.output_dir, args.overwrite)
    added = load_vocabulary(args.add, language=args.label_language) if args.add else {}
    removed = load_label_list(args.remove)[0] if args.remove else []
    renamed = dict(zip(*load_label_list(args.rename, "new"), strict=True)) if args.rename else {}
    examples = _examples(args, set(added)) if args.examples else {}
    model = load_model(args.model)
    if not isinstance(model, XMCForTextClassification):
        raise ValueError(f"`{args.model}` is an ensemble. Edit the labels of its models, and combine them again.")
    if removed:
        model.remove_labels(removed)
    if renamed:
        model.rename_labels(renamed)
    if added:
        model.add_labels(added, examples, args.batch_size, args.num_threads)
    records = {name: _read(args.model, name) for name in (TRAINING_ARGS_FILE, RECORD_FILE)}
    forget_model(args.output_dir)
    model.save_pretrained(args.output_dir)
    _write_records(args.output_dir, records)
    write_model_card(args.output_dir)
    done = {"added": len(added), "removed": len(removed), "renamed": len(renamed)}
    counts = ", ".join(f"{count:,} labels {action}" for action, count in done.items() if count)
    print(f"{counts}. The model of {len(model.labels or ()):,} labels is in {args.output_dir}.")


def _examples(args: argparse.Namespace, new: set[str]) -> dict[str, list[str]]:
    """The documents of new labels."""
    dataset = load_split(args.examples, args.split, **data_options(args, args.model))
    if "text" not in dataset.column_names:
        raise ValueError(f"`{args.examples}` has no texts. Call `model.add_labels` with `Features` as `examples`.")
    examples: dict[str, list[str]] = defaultdict(list)
    for text, labels in zip(dataset["text"], dataset["labels"], strict=True):
        for label in new.intersection(map(str, labels)):
            examples[label].append(text)
    if not examples:
        raise ValueError(f"No document of `{args.examples}` has one of the new labels.")
    return dict(examples)


def _read(model: str, name: str) -> dict[str, Any] | None:
    path = resolve_file(model, name, required=False)
    content = None if path is None else read_json(path)
    return content if isinstance(content, dict) else None


def _write_records(folder: str, records: dict[str, dict[str, Any] | None]) -> None:
    """Writes options and record of the training beside the model; its results are not those of the edited model."""
    for name, content in records.items():
        if content is None:
            continue
        if name == RECORD_FILE:
            content = {**content, "evaluations": [], "latency": None, "files": file_digests(folder)}
        write_json(Path(folder, name), content, indent=1)

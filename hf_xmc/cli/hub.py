"""`hf-xmc card`, `export`, `push` and `push-dataset`: model cards, self-contained copies and uploads."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..data import load_sample, load_xmc_dataset
from ..data.vocabularies import vocabulary_beside
from ..hub.dataset import push_dataset
from ..hub.model_card import CARD_FILE, CardOptions, write_model_card
from ..hub.upload import Destination, check_saved_model, create_repo, export_model, push_folder
from ..loading import recorded_digests
from .arguments import load_model


def run(command: str, args: argparse.Namespace) -> None:
    """Runs a command."""
    actions = {"card": _card, "export": _export, "push": _push, "push-dataset": _push_dataset, "verify": _verify}
    actions[command](args)


def _card(args: argparse.Namespace) -> None:
    check_saved_model(args.model)
    path = write_model_card(args.model, _card_options(args, args.name), overwrite=args.overwrite)
    if path is None:
        raise FileExistsError(f"`{Path(args.model, CARD_FILE)}` was written by hand. Pass --overwrite to replace it.")
    if args.copy_to:
        Path(args.copy_to).mkdir(parents=True, exist_ok=True)
        for source in (path, *sorted(Path(args.model).glob("*.png"))):
            shutil.copyfile(source, Path(args.copy_to, source.name))
    print(f"The card is in {path}.")


def _export(args: argparse.Namespace) -> None:
    files = export_model(args.model, args.output)
    print(f"{len(files)} files are in {args.output}.")


def _verify(args: argparse.Namespace) -> None:
    count = len(recorded_digests(args.model))
    load_model(args.model, verify=count > 0)
    compared = f"{count} checksums are right" if count else "it has no checksums to compare (trained by hf_xmc 0.1?)"
    print(f"{args.model} loads, and {compared}.")


def _push(args: argparse.Namespace) -> None:
    check_saved_model(args.model)
    destination = _destination(args, "model")
    destination.repo_id = create_repo(destination)
    write_model_card(args.model, _card_options(args, destination.repo_id))
    commit = push_folder(args.model, destination, self_contained=not args.no_code)
    print(f"The model is at {commit.pr_url or commit.commit_url}.")


def _push_dataset(args: argparse.Namespace) -> None:
    if args.data == "sample":
        splits: Any = load_sample()
    else:
        splits = load_xmc_dataset(args.data, column_mapping=args.column_mapping, label_delimiter=args.label_delimiter)
        splits = {"train": splits} if isinstance(splits, Dataset) else splits
    texts = (vocabulary_beside(args.data, args.label_texts) or None) if args.label_texts else None
    options = CardOptions(license=args.license, language=args.language, tags=args.tags)
    commit = push_dataset(splits, _destination(args, "dataset"), texts, options)
    print(f"The dataset is at {commit.pr_url or commit.commit_url}.")


def _card_options(args: argparse.Namespace, model_name: str | None) -> CardOptions:
    language = args.language[0] if args.language and len(args.language) == 1 else args.language
    return CardOptions(model_name, args.dataset, args.base_model, args.license, language, args.tags)


def _destination(args: argparse.Namespace, repo_type: str) -> Destination:
    return Destination(
        args.repo,
        repo_type=repo_type,
        private=args.private,
        token=args.token,
        revision=args.revision,
        create_pr=args.create_pr,
        commit_message=args.message or f"Upload {repo_type}",
    )

"""`hf-xmc card`, `export`, `push` and `push-dataset`: model cards, self-contained copies and uploads."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..data import load_label_texts, load_sample, load_xmc_dataset
from ..hub.dataset import push_dataset
from ..hub.model_card import CARD_FILE, CardOptions, write_model_card
from ..hub.upload import Destination, check_saved_model, create_repo, export_model, push_folder
from ..loading import recorded_digests
from .arguments import load_model, parse_mapping

DESCRIPTIONS = {
    "card": "Writes README.md, its plots and .eval_results into the folder of a model, from the records of its "
    "training and of its evaluations (`hf-xmc evaluate`).",
    "export": "Copies a model and the code that loads it. Without hf_xmc, the copy loads with trust_remote_code=True.",
    "verify": "Checks a model of a folder or of the Hub: loads it, which checks all its arrays, and compares its "
    "files with the checksums in the record of its training.",
    "push": "Uploads a model with its card (a card written by hand is kept) and the code that loads it. Pickles are "
    "not uploaded. After an interruption, the same command continues the upload.",
    "push-dataset": "Uploads a dataset in the columns of hf_xmc (text, labels): all splits, the labels with their "
    "texts and counts, and a card.",
}


def make_parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command."""
    parser = argparse.ArgumentParser(prog=f"hf-xmc {command}", description=DESCRIPTIONS[command])
    if command == "push-dataset":
        parser.add_argument("data", metavar="DATA", help="folder or file of the data; `sample` is the bundled dataset")
    else:
        help_text = "folder or Hub id of the model" if command == "verify" else "folder of the model"
        parser.add_argument("model", metavar="MODEL" if command == "verify" else "FOLDER", help=help_text)
    if command == "verify":
        return parser
    if command == "card":
        parser.add_argument("--name", help="Hub id of the model; the name of the folder by default")
        parser.add_argument("--copy-to", metavar="FOLDER", help="also copy the card and its plots to this folder")
        parser.add_argument("--overwrite", action="store_true", help="replace a card that was written by hand")
    if command == "export":
        parser.add_argument("output", metavar="OUTPUT", help="folder of the copy")
        return parser
    if command in ("push", "push-dataset"):
        _add_destination_arguments(parser)
    if command == "push":
        parser.add_argument("--no-code", action="store_true", help="omit the code; the model then requires hf_xmc")
    if command == "push-dataset":
        mapping = 'JSON: {"title": "text", "subjects": "labels"}'
        parser.add_argument("--column-mapping", type=parse_mapping, help=mapping)
        parser.add_argument("--label-delimiter", help="separator of the labels in a string column")
        parser.add_argument("--label-texts", action="store_true", help="read the texts of the labels from the folder")
    else:
        parser.add_argument("--dataset", help="name of the training data or its Hub id")
        parser.add_argument("--base-model", help="Hub id of the encoder, if it was loaded from a folder")
    parser.add_argument("--license", help="licence, such as cc-by-4.0")
    parser.add_argument("--language", nargs="+", help="language of the texts, such as en")
    parser.add_argument("--tags", nargs="+", default=[], help="additional tags")
    return parser


def _add_destination_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", metavar="REPO", help="repository, such as me/my-tagger; created if it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch; created if it does not exist")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--message", help="commit message")
    parser.add_argument("--token", help="token; the one of `hf auth login` by default")


def run(command: str, argv: Sequence[str]) -> None:
    """Runs a command."""
    args = make_parser(command).parse_args(argv)
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
    texts = load_label_texts(args.data) if args.label_texts else None
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

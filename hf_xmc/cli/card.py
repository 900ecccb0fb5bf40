"""`hf-xmc card`: writes the card of a saved model."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..hub.card_data import CardOptions
from ..hub.model_card import CARD_FILE, write_model_card
from ..hub.published_files import check_saved_model

DESCRIPTION = """
Writes README.md into the folder of a model, with pictures and .eval_results, from what its training and its
evaluations (`hf-xmc evaluate`) left there.
"""


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a card."""
    parser.add_argument("--license", help="licence of the model, such as cc-by-4.0")
    parser.add_argument("--language", nargs="+", help="language of the texts, such as en")
    parser.add_argument("--dataset", help="name of the training data or its id on the Hub")
    parser.add_argument("--base-model", help="id on the Hub of the encoder, if it came from a folder")
    parser.add_argument("--tags", nargs="+", default=[], help="further tags")


def card_options(args: argparse.Namespace, model_name: str | None) -> CardOptions:
    """The options of a card from the command line."""
    language = args.language[0] if args.language and len(args.language) == 1 else args.language
    return CardOptions(model_name, args.dataset, args.base_model, args.license, language, args.tags)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="hf-xmc card", description=DESCRIPTION)
    parser.add_argument("model", metavar="FOLDER", help="folder of the model")
    parser.add_argument("--name", help="id of the model on the Hub; the name of the folder by default")
    add_card_arguments(parser)
    parser.add_argument("--copy-to", metavar="FOLDER", help="also copy the card and its pictures into this folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a card that was written by hand")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    check_saved_model(args.model)
    path = write_model_card(args.model, card_options(args, args.name), overwrite=args.overwrite)
    if path is None:
        raise FileExistsError(
            f"`{Path(args.model, CARD_FILE)}` was written by hand. Replace it with --overwrite, or leave it."
        )
    if args.copy_to:
        Path(args.copy_to).mkdir(parents=True, exist_ok=True)
        for source in (path, *sorted(Path(args.model).glob("*.png"))):
            shutil.copyfile(source, Path(args.copy_to, source.name))
    print(f"The card is in {path}.")

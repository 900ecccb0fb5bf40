"""`hf-xmc push-dataset`: uploads a dataset to the Hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from datasets import Dataset, DatasetDict

from ..data import load_label_texts, load_sample, load_xmc_dataset
from ..hub.card_data import CardOptions
from ..hub.dataset import push_dataset
from .arguments import parse_mapping
from .push import add_destination_arguments, destination_of

DESCRIPTION = """
Uploads a dataset in the columns that hf_xmc reads (text, labels): all splits as parquet, the labels with their texts
and counts, and a card.
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="hf-xmc push-dataset", description=DESCRIPTION)
    parser.add_argument("data", metavar="DATA", help="folder or file of the data; `sample` is the bundled set")
    add_destination_arguments(parser)
    parser.add_argument("--column-mapping", type=parse_mapping, help='JSON: {"title": "text", "subjects": "labels"}')
    parser.add_argument("--label-delimiter", help="what separates labels in a string column")
    parser.add_argument("--label-texts", action="store_true", help="read the labels' texts from the folder")
    parser.add_argument("--license", help="licence of the data, such as cc-by-4.0")
    parser.add_argument("--language", nargs="+", help="language of the texts, such as en")
    parser.add_argument("--tags", nargs="+", default=[], help="further tags")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if args.data == "sample":
        splits = load_sample()
    else:
        loaded = load_xmc_dataset(args.data, column_mapping=args.column_mapping, label_delimiter=args.label_delimiter)
        splits = DatasetDict({"train": loaded}) if isinstance(loaded, Dataset) else loaded
    texts = load_label_texts(args.data) if args.label_texts else None
    given = CardOptions(license=args.license, language=args.language, tags=args.tags)
    done = push_dataset(splits, destination_of(args, "dataset"), texts, given)
    print(f"The dataset is at {done.pr_url or done.commit_url}.")

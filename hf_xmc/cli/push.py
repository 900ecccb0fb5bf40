"""`hf-xmc push`: uploads a model to the Hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..hub.model_card import write_model_card
from ..hub.published_files import check_saved_model
from ..hub.push import Destination, create_repo, push_folder
from .card import add_card_arguments, card_options

DESCRIPTION = """
Uploads all files of a model in one commit, with a card (one written by hand stays as it is) and the code that loads
it. No pickles. After an interruption the same command goes on where it stopped.
"""


def add_destination_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of an upload."""
    parser.add_argument("repo", metavar="REPO", help="name of the repository, me/my-tagger; made where it is missing")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch, made where it is missing")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--message", help="message of the commit")
    parser.add_argument("--token", help="token; that of `hf auth login` by default")


def destination_of(args: argparse.Namespace, repo_type: str = "model") -> Destination:
    """Where an upload goes, from the command line."""
    return Destination(
        args.repo,
        repo_type=repo_type,
        private=args.private,
        token=args.token,
        revision=args.revision,
        create_pr=args.create_pr,
        commit_message=args.message or f"Upload {repo_type}",
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="hf-xmc push", description=DESCRIPTION)
    parser.add_argument("model", metavar="FOLDER", help="folder of the model")
    add_destination_arguments(parser)
    parser.add_argument("--no-code", action="store_true", help="leave out the code: the model then needs hf_xmc")
    add_card_arguments(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    check_saved_model(args.model)
    destination = destination_of(args)
    destination.repo_id = create_repo(destination)
    write_model_card(args.model, card_options(args, destination.repo_id))
    done = push_folder(args.model, destination, self_contained=not args.no_code)
    print(f"The model is at {done.pr_url or done.commit_url}.")

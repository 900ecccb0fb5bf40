"""`hf-xmc export`: copies a model together with the code that loads it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..hub.export import export_model

DESCRIPTION = """
Makes a self-contained copy of a model: where hf_xmc is not installed, it loads with `trust_remote_code=True`.
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="hf-xmc export", description=DESCRIPTION)
    parser.add_argument("model", metavar="FOLDER", help="folder of the model")
    parser.add_argument("output", metavar="OUTPUT", help="folder of the copy")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    files = export_model(args.model, args.output)
    print(f"{len(files)} files are in {args.output}.")

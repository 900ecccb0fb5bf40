"""Entry point of the command `hf-xmc`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "train": "train a model from a recipe",
    "predict": "predict the labels of documents",
    "evaluate": "evaluate a model on documents with labels",
    "ensemble": "combine several models into one",
    "card": "write the card of a model",
    "export": "copy a model with the code that loads it",
    "verify": "check the files of a model",
    "push": "upload a model to the Hub",
    "push-dataset": "upload a dataset to the Hub",
}
# Commands of the module `hub`; every other command has a module of its name.
HUB_COMMANDS = ("card", "export", "push", "push-dataset", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs `hf-xmc COMMAND ...` and returns the exit code.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.
    """
    args = _make_parser().parse_args(argv)
    try:
        if args.command in HUB_COMMANDS:
            import_module("hf_xmc.cli.hub").run(args.command, args.arguments)
        else:
            import_module(f"hf_xmc.cli.{args.command}").run(args.arguments)
    except BrokenPipeError:
        # The reader of our output has stopped. Without this, Python reports the error again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if args.traceback:
            raise
        print(f"hf-xmc {args.command}: interrupted.", file=sys.stderr)
        return 130  # the exit code of shells after SIGINT
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        if args.traceback:
            raise
        print(f"hf-xmc {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:14}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-xmc",
        description="Extreme multi-label text classification.",
        epilog=f"commands:\n{commands}\n\n`hf-xmc COMMAND --help` explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Entry point of the command `hf-xmc`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "train": "train a model as a recipe says",
    "predict": "tag the documents of a file",
    "evaluate": "measure a model on documents with labels",
    "ensemble": "make one model of several",
    "card": "write the card of a model",
    "export": "copy a model together with the code that loads it",
    "push": "upload a model to the Hub",
    "push-dataset": "upload a dataset to the Hub",
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs `hf-xmc COMMAND ...` and returns the exit code.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments; those of the process by default.
    """
    commands = "\n".join(f"  {name:14}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-xmc",
        description="Extreme multi-label text classification.",
        epilog=f"commands:\n{commands}\n\n`hf-xmc COMMAND --help` explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error arose")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    args = parser.parse_args(argv)
    command = import_module(f"hf_xmc.cli.{args.command.replace('-', '_')}")
    try:
        command.run(args.arguments)
    except BrokenPipeError:
        # Whoever read our output has had enough; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if args.traceback:
            raise
        print(f"hf-xmc {args.command}: interrupted.", file=sys.stderr)
        return 130  # as shells count a SIGINT
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        if args.traceback:
            raise
        print(f"hf-xmc {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

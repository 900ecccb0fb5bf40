"""Entry point of the command `hf-xmc`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ..version import __version__
from .parsers import COMMANDS, HELP, TRAIN_HELP, HelpFormatter, closest, make_parser

# Commands of the module `hub`; every other command has a module of its name.
HUB_COMMANDS = ("card", "export", "push", "push-dataset", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs `hf-xmc COMMAND ...` and returns the exit code.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.
    """
    args = _make_main_parser().parse_args(argv)
    if args.command not in COMMANDS:
        hint = closest(args.command, COMMANDS) or f" Commands are {', '.join(COMMANDS)}."
        print(f"hf-xmc: `{args.command}` is not a command.{hint}", file=sys.stderr)
        return 2
    try:
        _run(args.command, args.arguments)
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


def _run(command: str, argv: Sequence[str]) -> None:
    """Parses the arguments before anything large is imported, and runs the command."""
    if command == "train":
        if {"-h", "--help"} & set(argv):
            print(TRAIN_HELP, end="")
            raise SystemExit(0)
        import_module("hf_xmc.cli.train").run(argv)
        return
    args = make_parser(command).parse_args(argv)
    if command == "completion":  # needs no torch
        import_module("hf_xmc.cli.completion").run(args)
        return
    with import_module("hf_xmc.training.progress").quiet_libraries():
        if command in HUB_COMMANDS:
            import_module("hf_xmc.cli.hub").run(command, args)
        else:
            import_module(f"hf_xmc.cli.{command}").run(args)


def _make_main_parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:14}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-xmc",
        usage="hf-xmc COMMAND ...",
        description=HELP,
        epilog=f"commands:\n{commands}\n\n`hf-xmc COMMAND --help` explains a command.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-xmc {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

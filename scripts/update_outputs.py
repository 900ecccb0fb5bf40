"""
Writes what commands print into the documents: `python scripts/update_outputs.py [--trainings]`.

A document marks a place with `<!-- output: COMMAND -->`, a block of text and `<!-- end -->`. Help texts and errors are
always written again, trainings only with `--trainings`, because their times differ. `records.csv` is the train split
of the sample.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path

from hf_xmc import load_sample
from hf_xmc.cli.main import main as run_command

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/cli.md")
PLACE = re.compile(r"(<!-- output: (.*?) -->\n```text\n)(.*?)(```\n<!-- end -->)", re.S)


def write_tables(folder: Path) -> None:
    """Writes the files that the commands read: `records.csv` and some that have mistakes."""
    sample = load_sample()["train"]
    with open(folder / "records.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("id", "title", "subjects"))
        for number, row in enumerate(sample, 1):
            table.writerow((number, row["text"], "; ".join(row["labels"])))
    Path(folder, "notes.csv").write_text("one,two\nhello world,3\n")
    Path(folder, "wide.csv").write_text("text,label1,label2\nlakes,water,fish\nrivers,water,\n")
    Path(folder, "flags.csv").write_text("text,water,fish\nlakes,1,1\nrivers,1,0\nwoods,0,0\n")
    Path(folder, "damaged.jsonl").write_text('{"text": "lakes", "tags": ["water"]}\n{"text": "rivers",\n')
    Path(folder, "old.xls").write_bytes(b"\xd0\xcf\x11\xe0")
    Path(folder, "broken.csv").write_text("text,tags\nlakes,water\nrivers,water,fish\n")
    Path(folder, "mixed.csv").write_bytes(b"text,tags\n" + "Zürich,x\n".encode() * 50 + b"Z\xfcrich,y\n")


@cache
def output_of(command: str) -> str:
    """What a command prints. It runs once, because a second training would find the model of the first one."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
        run_command(shlex.split(command)[1:])
    return printed.getvalue().strip("\n") + "\n"


def is_training(command: str) -> bool:
    """Whether a command trains, so that its output has times."""
    return command == "hf-xmc train records.csv -o my-tagger"


def render(text: str, trainings: bool) -> str:
    """A document with new outputs."""

    def replace(match: re.Match[str]) -> str:
        if is_training(match[2]) and not trainings:
            return match[0]
        return match[1] + output_of(match[2]) + match[4]

    return PLACE.sub(replace, text)


def main() -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", action="store_true", help="also run the trainings")
    trainings = parser.parse_args().trainings
    os.environ["COLUMNS"] = "120"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_tables(Path(folder))
        for name in DOCUMENTS:
            path = ROOT / name
            path.write_text(render(path.read_text(encoding="utf-8"), trainings), encoding="utf-8")


if __name__ == "__main__":
    main()

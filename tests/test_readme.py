"""The examples of the README and of the documentation run as shown."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from hub_worker import Worker

from hf_xmc.cli.parsers import COMMANDS

ROOT = Path(__file__).parents[1]
HUB_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)

# Runs a line of a shell: `hf-xmc` in this process, everything else, and what is piped into it, by bash.
RUN_COMMAND = r"""
import contextlib, io, shlex, subprocess, sys
from hf_xmc.cli.main import main

before, command, arguments = line.rpartition("hf-xmc ")
output = io.StringIO()
piped = before.strip().removesuffix("|") if command else line
piped = subprocess.run(["bash", "-euc", piped], capture_output=True, text=True, check=True).stdout
if command:
    sys.stdin, stdin = io.StringIO(piped), sys.stdin
    with contextlib.redirect_stdout(output):
        code = main(shlex.split(arguments))
    sys.stdin = stdin
    assert code == 0, line
result = output.getvalue()
"""
RUN_PYTHON = r"""
import contextlib, io
output = io.StringIO()
with contextlib.redirect_stdout(output):
    exec(compile(text, page, "exec"), {"__name__": page})
result = output.getvalue()
"""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for kind, code in BLOCK.findall(text) if kind == language]


def run_python(worker: Worker, page: str, encoder: Path) -> str:
    """Runs the Python blocks of a page in a new namespace and returns what they print."""
    text = "\n".join(blocks(page, "python")).replace(HUB_ENCODER, str(encoder))
    text = re.sub(r"(num_train_epochs|level_epochs)=\[?0\.5\]?", "level_steps=[4]", text)
    return worker.run(RUN_PYTHON, text=text, page=page)


def run_shell(worker: Worker, page: str) -> str:
    """Runs the commands of a page and returns what `hf-xmc` prints."""
    lines = "".join(blocks(page, "bash")).splitlines()
    return "".join(worker.run(RUN_COMMAND, line=line) for line in lines)


@pytest.mark.slow
def test_examples(hub, tiny_encoder, tmp_path):
    # One process for all pages, because importing torch and transformers takes seconds, and one folder, because pages
    # use the models of the README.
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    load_script("update_outputs").write_tables(tmp_path)
    worker = Worker(hub.environment(tmp_path / "home"), tmp_path / "log.txt")
    printed, answers = {}, {}
    for page in PAGES:
        if page == "README.md":  # its commands come first
            answers[page] = run_shell(worker, page)
        printed[page] = run_python(worker, page, tiny_encoder)
        if page != "README.md":
            answers[page] = run_shell(worker, page)
    worker.close()

    assert HUB_ENCODER in "".join(blocks("README.md", "python"))
    assert re.search(r"P@1 \d\d\.\d\n", printed["README.md"])
    assert "('t2', 'lakes')" in printed["docs/vocabulary.md"]
    assert "['commerce', 'electronic commerce', 'online shops']" in printed["docs/vocabulary.md"]
    assert "['economy', 'electronic commerce', 'web shops']" in printed["docs/vocabulary.md"]
    for folder in ("my-tagger", "my-transformer", "my-ensemble", "my-taxonomy"):
        assert (tmp_path / folder / "config.json").is_file()
    assert hub.repos["me/my-transformer"].private
    assert {"ranker.safetensors", "pipeline_xmc.py", "README.md"} <= hub.files("me/my-transformer").keys()

    assert "Results on 800 documents" in answers["README.md"] and (tmp_path / "tags.jsonl").is_file()
    assert '{"labels": [{"label": ' in answers["README.md"]
    assert [path.name for path in (tmp_path / "tags").glob("part-*")] == ["part-00000-of-00001.parquet"]
    assert "P@1" in hub.files("me/my-tagger")["README.md"].decode()
    assert (tmp_path / "validation.json").is_file()


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_and_errors_are_those_shown(tmp_path, monkeypatch):
    script = load_script("update_outputs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    script.write_tables(tmp_path)
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    shown = [match[2] for match in script.PLACE.finditer(text)]
    assert {f"hf-xmc {command} --help" for command in COMMANDS} <= set(shown)
    assert script.render(text, trainings=False) == text, "run `python scripts/update_outputs.py`"


def test_two_commands_are_shown():
    text = "\n".join(blocks("README.md", "text"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("quickstart", "test"):
        assert f"make {command}" in text
        assert re.search(rf"^{command}:", makefile, re.M)

"""The documents agree with the code and with each other."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_xmc.training.options import REMOVED_OPTIONS, RENAMED_OPTIONS
from hf_xmc.version import __version__

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "docs", "recipes", "recipes/accelerate", "benchmarks", "benchmarks/results", "model_cards")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    text = CODE.sub("", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("http", "#")):
            assert (path.parent / link.partition("#")[0]).exists(), link


def test_the_map_of_the_code():
    text = read("CONTRIBUTING.md").partition("<!-- map -->")[2].partition("<!-- end of map -->")[0]
    named, folder = set(), ""
    for line in text.splitlines():
        if match := re.match(r"(hf_xmc/[\w/]*)", line):
            folder = match[1]
        elif match := re.match(r"  ([\w/]+\.py) ", line):
            named.add(folder + match[1])
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_xmc").rglob("*.py")}
    assert named == {module for module in modules if not module.endswith("/__init__.py")} | {"hf_xmc/__init__.py"}


def test_the_walks_through_the_code():
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", read("CONTRIBUTING.md"))
    assert len(steps) > 60
    for file, name in steps:
        body = ast.parse(read(f"hf_xmc/{file}")).body
        for part in name.split("."):
            defined = {node.name: node for node in body if isinstance(node, DEFINITIONS)}
            assert part in defined, f"{file}:{name}"
            body = defined[part].body


def test_the_table_of_options():
    assert load_script("update_options").render() == read("docs/options.md"), "run `python scripts/update_options.py`"


def test_mutants_are_of_this_code():
    mutants = load_script("mutants").load_mutants(ROOT / "scripts" / "mutants.yaml")
    assert len(mutants) == len({mutant.name for mutant in mutants}) > 100
    for mutant in mutants:
        assert mutant.apply(ROOT) != read(mutant.file)
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests), mutant.name


def test_the_changelog_lists_old_options():
    text = read("CHANGELOG.md")
    for old in (*RENAMED_OPTIONS, *REMOVED_OPTIONS):
        assert f"`{old}`" in text
    for old, new in RENAMED_OPTIONS.items():
        assert re.search(rf"^\| .*`{old}`.* \| `{new}`", text, re.M), old


def test_the_citation():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == __version__


def test_old_options_are_gone_from_documents():
    names = [name for name in (*RENAMED_OPTIONS, *REMOVED_OPTIONS) if not name.startswith("tfidf_time_")]
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for path in (*DOCUMENTS, *(ROOT / "recipes").rglob("*.yaml")):
        # The table of presets names values that only presets set.
        if path.name not in ("CHANGELOG.md", "options.md"):
            assert not pattern.search(path.read_text(encoding="utf-8")), path

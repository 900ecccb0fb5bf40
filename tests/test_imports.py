"""Imports: modules that ship with a model are flat, no layer imports a higher one, public names are lazy."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import hf_xmc

PACKAGE = Path(hf_xmc.__file__).parent
# A subpackage may import those below it; data, evaluation and parallel do not import each other.
LEVELS = {"": 0, "data": 1, "evaluation": 1, "parallel": 1, "inference": 2, "training": 3, "hub": 4, "cli": 5}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(module: list[str]) -> str:
    """The subpackage that a module of hf_xmc (path without the package's name) is in; '' for the flat ones."""
    return module[0] if module and (PACKAGE / module[0]).is_dir() else ""


def imported(path: Path) -> list[tuple[ast.stmt, list[str]]]:
    """Modules of hf_xmc that a file imports, as paths without the package's name."""
    here = list(path.relative_to(PACKAGE).with_suffix("").parts)
    found: list[tuple[ast.stmt, list[str]]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                found.append((node, here[: len(here) - node.level] + module))
            elif module[0] == "hf_xmc":
                found.append((node, module[1:]))
        elif isinstance(node, ast.Import):
            found.extend((node, alias.name.split(".")[1:]) for alias in node.names if alias.name.startswith("hf_xmc"))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_upward(path):
    # The entry of `python -m hf_xmc` has its place by name, but is the command.
    here = "cli" if path.name == "__main__.py" else part_of(list(path.relative_to(PACKAGE).parts[:-1]))
    for _, module in imported(path):
        there = part_of(module)
        assert there == here or LEVELS[there] < LEVELS[here], f"{here or 'flat'} must not import {'.'.join(module)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("[!_]*.py")), ids=lambda path: path.name)
def test_flat_modules_can_be_copied_along(path):
    # transformers finds the files of a model's code by `from .name import ...` and by nothing else.
    for node, _ in imported(path):
        right = isinstance(node, ast.ImportFrom) and node.level == 1 and node.module and "." not in node.module
        assert right, f"line {node.lineno}: write `from .module import name`"


def test_every_public_name_is_there():
    assert list(hf_xmc.__all__) == sorted(hf_xmc.__all__)
    for name in hf_xmc.__all__:
        assert getattr(hf_xmc, name).__name__ == name
    assert set(hf_xmc.__all__) <= set(dir(hf_xmc))
    with pytest.raises(AttributeError, match="XMCTrainr"):
        hf_xmc.XMCTrainr  # noqa: B018


def run_python(code: str) -> str:
    """Returns what a new interpreter prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_is_lazy_and_registers_the_models():
    code = """
import logging, os, sys
environment, handlers = dict(os.environ), list(logging.getLogger().handlers)
import hf_xmc
assert not {"torch", "transformers", "datasets", "pandas", "numba"} & set(sys.modules)
assert not [name for name in sys.modules if name.startswith(("hf_xmc.training", "hf_xmc.data", "hf_xmc.cli"))]
assert dict(os.environ) == environment and logging.getLogger().handlers == handlers
# Linear rankers do without transformers' models, whose import takes seconds and a hundred megabytes.
hf_xmc.Features, hf_xmc.LabelTree, hf_xmc.Labels, hf_xmc.LinearRanker, hf_xmc.TfidfFeaturizer, hf_xmc.XMCMetrics
import hf_xmc.training.clustering, hf_xmc.training.label_features, hf_xmc.training.ranker
assert "transformers.modeling_utils" not in sys.modules
hf_xmc.XMCConfig()
from transformers import AutoConfig, AutoModel
from transformers.pipelines import PIPELINE_REGISTRY
assert type(AutoConfig.for_model("hf-xmc")) is hf_xmc.XMCConfig
assert type(AutoConfig.for_model("hf-xmc-ensemble")) is hf_xmc.XMCEnsembleConfig
assert type(AutoModel.from_config(hf_xmc.XMCConfig())) is hf_xmc.XMCForTextClassification
assert PIPELINE_REGISTRY.check_task(hf_xmc.TASK)[1]["impl"] is hf_xmc.ExtremeTextClassificationPipeline
"""
    assert run_python(code) == ""


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"], ["predict", "--help"], ["predict"]])
def test_help_is_there_at_once(argv):
    code = f"""
import contextlib, io, sys
from contextlib import redirect_stderr, redirect_stdout
from hf_xmc.cli.main import main
with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
    main({argv!r})
print(sorted({{"torch", "transformers", "datasets", "numba", "numpy"}} & set(sys.modules)))
"""
    assert run_python(code) == "[]\n"


@pytest.mark.parametrize("first", ["transformers", "hf_xmc", "hf_xmc.modeling_xmc"])
def test_configurations_are_registered_whatever_is_imported_first(first):
    code = f"""
import {first}
import hf_xmc
from transformers import AutoConfig
print(type(AutoConfig.for_model("hf-xmc")) is hf_xmc.XMCConfig)
"""
    assert run_python(code) == "True\n"


def test_a_configuration_from_another_process_registers_the_models():
    config = pickle.dumps(hf_xmc.XMCConfig(top_k=7))
    code = f"""
import pickle
from transformers import AutoModel
model = AutoModel.from_config(pickle.loads({config!r}))
print(type(model).__name__, model.config.top_k)
"""
    assert run_python(code) == "XMCForTextClassification 7\n"

"""The examples of the README run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from local_hub import LocalHub

ROOT = Path(__file__).parents[1]
HUB_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def blocks(language: str) -> list[str]:
    return [code for kind, code in BLOCKS if kind == language]


def run(command: list[str], folder: Path, hub: LocalHub) -> str:
    # The commands are those of this environment, whether or not it is activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **hub.environment(folder / "home")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_python_examples(tmp_path, tiny_encoder, hub):
    code = "\n".join(blocks("python"))
    assert len(blocks("python")) >= 4 and HUB_ENCODER in code
    # A small encoder in place of the one on the Hub, and a few steps.
    assert "level_epochs=[0.5]" in code
    code = code.replace(HUB_ENCODER, str(tiny_encoder)).replace("level_epochs=[0.5]", "level_epochs=[0.02]")
    output = run([sys.executable, "-c", code], tmp_path, hub)
    assert re.search(r"P@1 0\.\d\d, nDCG@5 0\.\d\d", output)
    assert len(re.findall(r"^[01]\.\d\d \w", output, re.M)) == 3
    for folder in ("my-tagger", "my-transformer"):
        assert (tmp_path / folder / "ranker.safetensors").is_file()
    assert hub.repos["me/my-transformer"].private
    assert {"ranker.safetensors", "pipeline_xmc.py", "README.md"} <= hub.files("me/my-transformer").keys()


@pytest.mark.slow
def test_shell_examples(tmp_path, hub):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    commands, corpus = blocks("bash")
    output = run(["bash", "-euo", "pipefail", "-c", commands], tmp_path, hub)
    assert (tmp_path / "sample-tagger" / "test_results.json").is_file()
    assert '{"labels": [{"label": ' in output
    assert "P@1" in hub.files("me/sample-tagger")["README.md"].decode()
    assert (tmp_path / "validation.json").is_file()
    # The tagger of the first example serves for the second as well.
    training, *rest = corpus.splitlines()
    assert training.startswith("hf-xmc train")
    (tmp_path / "big-tagger").symlink_to("sample-tagger")
    run(["bash", "-euo", "pipefail", "-c", "\n".join(rest)], tmp_path, hub)
    assert [path.name for path in (tmp_path / "tags").glob("part-*")] == ["part-00000-of-00001.parquet"]


def test_two_commands_are_shown():
    text = "\n".join(blocks("text"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("quickstart", "test"):
        assert f"make {command}" in text
        assert re.search(rf"^{command}:", makefile, re.M)

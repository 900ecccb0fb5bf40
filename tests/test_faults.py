"""Faults of machine and Hub: what was written is whole, the error is one clear line, and the work can be repeated."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from pathlib import Path

import pytest
from conftest import make_documents, train_linear
from hub_worker import Worker

from hf_xmc import XMCForTextClassification
from hf_xmc.cli.main import main

TEXTS = ["topic07 word1 topic31", "topic59"]
LOAD = """
from hf_xmc import XMCForTextClassification
result = XMCForTextClassification.from_pretrained(name).predict(texts, top_k=3)
"""


# ---- Disk ----


@contextlib.contextmanager
def full_disk(size):
    """Files of this process cannot become larger than `size`: writing fails as on a full disk, with another number."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


@pytest.mark.parametrize("size", [100, 3000, 20_000])
def test_saving_over_a_model_on_a_full_disk(model_folder, tmp_path, size):
    model = XMCForTextClassification.from_pretrained(model_folder)
    model.save_pretrained(tmp_path)
    before = contents(tmp_path)
    with full_disk(size), pytest.raises(OSError, match=r"File too large|could not be written"):
        model.save_pretrained(tmp_path)
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    model.save_pretrained(tmp_path)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == model.predict(TEXTS)


def test_training_on_a_full_disk(tmp_path):
    documents = make_documents(200, seed=4)
    with full_disk(20_000), pytest.raises(OSError, match=r"File too large|could not be written"):
        train_linear(tmp_path / "model", documents)
    assert not (tmp_path / "model" / "config.json").exists()
    train_linear(tmp_path / "model", documents)
    assert XMCForTextClassification.from_pretrained(tmp_path / "model").predict(TEXTS)


@pytest.mark.parametrize("command", ["predict", "export"])
def test_commands_on_a_full_disk(model_folder, tmp_path, capsys, command):
    texts = tmp_path / "texts.jsonl"
    make_documents(3000, seed=2).to_json(texts)
    output = tmp_path / "output"
    arguments = {
        "predict": ["predict", str(model_folder), str(texts), "--output", f"{output}.jsonl"],
        "export": ["export", str(model_folder), str(output)],
    }[command]
    if command == "predict":
        assert main([*arguments[:-1], str(tmp_path / "first.jsonl")]) == 0  # fills the cache of documents
    with full_disk(20_000):
        assert main(arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"hf-xmc {command}: ")
    assert not output.exists() and not output.with_suffix(".jsonl").exists()
    assert main(arguments) == 0
    if command == "predict":
        assert output.with_suffix(".jsonl").read_bytes() == (tmp_path / "first.jsonl").read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that root cannot write")
def test_an_output_folder_that_cannot_be_written(documents):
    with pytest.raises(OSError, match="/proc/nothing"):
        train_linear(Path("/proc/nothing"), documents)


# ---- Hub ----


@pytest.fixture(scope="module")
def linear(hub, model_folder):
    """A model on the Hub."""
    hub.add("me/tagger", model_folder)
    return "me/tagger"


@pytest.fixture
def client(hub, tmp_path):
    """A process without a cache. It waits less for the Hub than by default."""
    environment = {**hub.environment(tmp_path / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
    worker = Worker(environment, tmp_path / "log")
    yield worker
    worker.close()
    hub.heal()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [(429, "config.json"), (500, "labels.json"), (503, "ranker.safetensors"), ("cut", "ranker.safetensors")],
)
def test_downloads_that_fail_once(hub, client, linear, model_folder, fault, name):
    rows = XMCForTextClassification.from_pretrained(model_folder).predict(TEXTS, top_k=3)
    expected = [[list(pair) for pair in row] for row in rows]
    pattern = rf"GET .*/resolve/.*/{name}"
    if fault == "cut":
        hub.cut(pattern)
    else:
        hub.fail(pattern, fault)
    try:
        result = client.run(LOAD, name=linear, texts=TEXTS)
    except RuntimeError as error:
        # Not retried by the client of the Hub: the error says what could not be loaded, and the next attempt works.
        assert linear in str(error)
        result = client.run(LOAD, name=linear, texts=TEXTS)
    assert result == expected


@pytest.mark.slow
def test_a_hub_that_is_down(hub, client, linear):
    hub.fail(r"GET|HEAD", 500, times=10_000)
    with pytest.raises(RuntimeError, match="OSError.*connect"):
        client.run(LOAD, name=linear, texts=TEXTS)
    hub.heal()
    assert client.run(LOAD, name=linear, texts=TEXTS)

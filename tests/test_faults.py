"""
Faults of machine and Hub: what was written is whole, the error is one clear line, and the work can be repeated.

Signals are in `test_encoder_resuming.py`, a killed process of several in `test_processes.py` and `test_corpus.py`,
interrupted uploads in `test_hub_client.py`, kills at random moments in `kills.py`.
"""

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import make_documents, refused, train_linear
from encoder_runs import Killed, assert_same_model
from hub_worker import Worker
from transformers import TrainerCallback

from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.cli.main import main
from hf_xmc.parallel.stage_cache import PieceFolder
from hf_xmc.training.record import TrainingRecord

TEXTS = ["topic07 word1 topic31", "topic59"]
LOAD = """
from hf_xmc import XMCForTextClassification
result = XMCForTextClassification.from_pretrained(name).predict(texts, top_k=3)
"""


PUSH = """
from hf_xmc import XMCForTextClassification
XMCForTextClassification.from_pretrained(folder).push_to_hub(name)
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


def test_a_checkpoint_on_a_full_disk(train, tmp_path):
    options = {"level_steps": [3, 3, 3], "save_steps": 2}
    with full_disk(50_000), pytest.raises((OSError, RuntimeError)) as raised:
        train(folder=tmp_path / "model", **options)
    assert "File too large" in str(raised.value) or "could not be written" in str(raised.value)
    assert not list(tmp_path.glob("model/checkpoint-*/checkpoint.json"))
    train(folder=tmp_path / "model", resume=True, **options)
    train(folder=tmp_path / "other", **options)
    assert_same_model(tmp_path / "model", tmp_path / "other")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that root cannot write")
@pytest.mark.parametrize("command", ["train", "predict", "export", "ensemble"])
def test_folders_that_cannot_be_written(documents, model_folder, tmp_path, capsys, command):
    place, data = "/proc/nothing/model", str(tmp_path / "train.jsonl")
    documents.to_json(data)
    arguments = {
        "train": ["--method", "xr-linear", "--dataset", data, "--output_dir", place],
        "predict": [str(model_folder), data, "--output", place],
        "export": [str(model_folder), place],
        "ensemble": [str(model_folder), str(model_folder), "--output", place],
    }[command]
    assert main([command, *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"hf-xmc {command}: ") and "/proc/nothing" in error


# ---- Two trainings, signals, clocks ----


class OnLog(TrainerCallback):
    """Calls a function when a stage has ended."""

    def __init__(self, stage, function):
        self.stage, self.function = stage, function

    def on_log(self, args, state, control, logs=None, **kwargs):
        if f"{self.stage}_seconds" in (logs or {}):
            self.function()


def linear_trainer(folder, callback=None):
    args = XMCTrainingArguments(str(folder), method="xr-linear", disable_tqdm=True, use_cpu=True)
    callbacks = [] if callback is None else [callback]
    return XMCTrainer(args=args, train_dataset=make_documents(200, seed=4), callbacks=callbacks)


def test_a_folder_in_which_another_process_trains(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        PieceFolder(tmp_path, "").lock()
        os.write(write, b"locked")
        signal.pause()
    try:
        assert os.read(read, 6) == b"locked"
        with pytest.raises(OSError, match="another process"):
            linear_trainer(tmp_path).train()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    # The lock of a dead process does not count.
    linear_trainer(tmp_path).train()
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS)


@pytest.mark.parametrize("stage", ["features", "ranker"])
def test_signals_between_the_stages_of_a_linear_training(tmp_path, stage):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            linear_trainer(tmp_path / "model", OnLog(stage, lambda: os.kill(os.getpid(), signal.SIGINT))).train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "model" / "config.json").exists()
    linear_trainer(tmp_path / "model").train(resume_from_checkpoint=True)
    linear_trainer(tmp_path / "other").train()
    assert_same_model(tmp_path / "model", tmp_path / "other")
    assert not (tmp_path / "model" / ".hf-xmc").exists()


@pytest.mark.parametrize("jump", [-20 * 365 * 86400, 20 * 365 * 86400])
def test_clocks_that_jump(train, tmp_path, monkeypatch, jump):
    clock, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: clock() + offset[0])

    class Jump(TrainerCallback):
        def __init__(self, last):
            self.last = last

        def on_step_end(self, args, state, control, **kwargs):
            offset[0] = jump - offset[0]  # and back with the next step
            if state.global_step == self.last:
                raise Killed

    options = {"level_steps": [3, 3, 3], "save_steps": 2}
    with pytest.raises(Killed):
        train(folder=tmp_path / "model", callbacks=[Jump(5)], **options)
    trainer = train(folder=tmp_path / "model", resume=True, callbacks=[Jump(99)], **options)
    offset[0] = 0.0
    train(folder=tmp_path / "other", **options)
    assert_same_model(tmp_path / "model", tmp_path / "other")
    record = TrainingRecord.load(tmp_path / "model")
    assert 0 < record.seconds < 600 and all(0 <= seconds < 600 for seconds in record.stages.values())
    assert 0 < trainer.evaluate(make_documents(20))["eval_runtime"] < 600


# ---- Hub ----


@pytest.fixture(scope="module")
def linear(hub, model_folder):
    """A model on the Hub."""
    hub.add("me/tagger", model_folder)
    return "me/tagger"


def inject(hub, request, fault):
    """Makes the next such request fail, with a status, half an answer or none in time."""
    if fault == "cut":
        hub.cut(request)
    elif fault == "stall":
        hub.stall(request, 5)
    else:
        hub.fail(request, fault)


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
    [
        (429, "config.json"),
        (500, "labels.json"),
        (503, "ranker.safetensors"),
        ("cut", "ranker.safetensors"),
        ("stall", "tfidf.safetensors"),
    ],
)
def test_downloads_that_fail_once(hub, client, linear, model_folder, fault, name):
    rows = XMCForTextClassification.from_pretrained(model_folder).predict(TEXTS, top_k=3)
    expected = [[list(pair) for pair in row] for row in rows]
    inject(hub, rf"GET .*/resolve/.*/{name}", fault)
    try:
        result = client.run(LOAD, name=linear, texts=TEXTS)
    except RuntimeError as error:
        # Not retried by the client of the Hub: the error says what could not be loaded, and the next attempt works.
        assert linear in str(error)
        result = client.run(LOAD, name=linear, texts=TEXTS)
    assert result == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "request_line"),
    [
        (429, "POST .*/commit/main"),
        (500, "PUT /lfs/"),
        ("cut", "POST .*/preupload/"),
        ("stall", "POST .*/commit/main"),
        (507, "POST .*/lfs/objects/batch"),
    ],
)
def test_uploads_that_fail_once(hub, client, model_folder, tmp_path, fault, request_line):
    repo, before = f"me/upload-{fault}", contents(model_folder)
    hub.blobs.clear()
    inject(hub, request_line, fault)
    try:
        client.run(PUSH, folder=str(model_folder), name=repo)
    except RuntimeError as error:
        assert repo in str(error) and "Run the upload again" in str(error)
        client.run(PUSH, folder=str(model_folder), name=repo)
    files = hub.files(repo)
    for name, content in before.items():
        assert files[name] == content or not name.endswith((".safetensors", ".txt")), name
    assert contents(model_folder) == before


@pytest.mark.slow
def test_an_upload_with_a_full_disk(hub, client, model_folder):
    limited = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
try:
    exec(PUSH)
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
"""
    with pytest.raises(RuntimeError, match=r"OSError.*(File too large|could not be written)"):
        client.run(limited, PUSH=PUSH, folder=str(model_folder), name="me/full")
    assert "me/full" not in hub.repos or len(hub.repos["me/full"].branches["main"]) == 1
    client.run(PUSH, folder=str(model_folder), name="me/full")
    assert "ranker.safetensors" in hub.files("me/full")


@pytest.mark.slow
def test_a_hub_that_is_down(hub, client, linear):
    hub.fail(r"GET|HEAD", 500, times=10_000)
    refused("OSError.*connect", client.run, LOAD, name=linear, texts=TEXTS, error=RuntimeError)
    hub.heal()
    assert client.run(LOAD, name=linear, texts=TEXTS)

"""Trainings with an encoder that are interrupted and resumed: they end in the model of an uninterrupted run."""

import hashlib
import json
import logging
import multiprocessing
import os
import signal

import pytest
from conftest import encoder_arguments, make_documents, refused
from encoder_runs import (
    KEEP_BEST,
    TEXTS,
    KillAfter,
    KillAt,
    Killed,
    KillWhileWriting,
    assert_predicts_as_saved,
    assert_same_model,
    kill,
    levels_of_steps,
    rank_best,
)
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_xmc import XMCTrainer
from hf_xmc.training.presets import ENCODER_METHODS

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

# A pass has five steps: checkpoints are within passes and levels and at their ends. With so narrow a beam, shortlists
# leave nodes out.
RESUMED = {"level_steps": [3, 4, 5], "level_beam_size": [2], "save_steps": 2, "per_device_train_batch_size": 32}
# Point of the interruption: callback, and the last complete checkpoint.
KILLS = {
    "in the first level": (KillAt("on_step_end", 3), 2),
    "at the end of a level": (KillAt("on_save", 3), 3),
    "while a checkpoint is written": (KillWhileWriting(6), 4),
    "after a shortlist": (KillAfter("level 3 shortlist"), 7),
    "before the ranker": (KillAfter("embed", step=12), 12),
    "before the model is saved": (KillAfter("ranker"), 12),
}
# Methods that train all levels jointly have as many steps.
OTHER_METHODS = [method for method in ENCODER_METHODS if method != "xr-transformer"]


@pytest.fixture
def uninterrupted(tiny_encoder, few, make_once):
    """Returns the folder of an uninterrupted run with some options; a name sets runs with other constants apart."""

    def get(name="plain", **options):
        def fill(folder):
            args = encoder_arguments(folder, **{**RESUMED, "save_strategy": "no", **options})
            XMCTrainer(model=tiny_encoder, args=args, train_dataset=few).train()

        key = hashlib.sha1(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
        return make_once(f"uninterrupted-{name}-{key}", fill)

    return get


def complete_checkpoints(folder):
    """Steps of the complete checkpoints in a folder."""
    return sorted(int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoint-*/checkpoint.json"))


@pytest.mark.parametrize("point", KILLS)
def test_resuming(train, uninterrupted, tmp_path, point):
    callback, last = KILLS[point]
    kill(train, callback, **RESUMED, logging_steps=1)
    assert complete_checkpoints(tmp_path)[-1] == last
    trainer = train(resume=True, **RESUMED, logging_steps=1)
    assert_same_model(tmp_path, uninterrupted())
    assert_predicts_as_saved(trainer, tmp_path)
    assert levels_of_steps(trainer) == [1] * 3 + [2] * 4 + [3] * 5


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_resuming_other_methods(train, uninterrupted, tmp_path, method):
    options = {"method": method, "level_steps": [12]}
    kill(train, KillAt("on_step_end", 10), **{**RESUMED, **options})
    train(resume=True, **{**RESUMED, **options})
    assert_same_model(tmp_path, uninterrupted(**options))


OTHER_OPTIONS = [
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16},
    {"level_bootstrap": False, "level_negatives": ["tfn"], "level_loss": "squared_hinge", "level_steps": [0, 7, 5]},
    {"encoder_lora_rank": 2, "level_indices": [1, 3], "level_steps": [4, 8]},
    {"method": "lightxml", "level_negatives": ["both"], "level_swa_start": 0.2, "level_settings": {"swa_steps": 1}},
    {"method": "aplc-xlnet", "level_bootstrap": False, "encoder_lora_rank": 2},
]


@pytest.mark.parametrize("options", OTHER_OPTIONS, ids=str)
def test_resuming_with_other_options(train, uninterrupted, tmp_path, options):
    if "method" in options:
        options = {"level_steps": [8], **options}
    kill(train, KillAt("on_step_end", 7), **{**RESUMED, **options})
    train(resume=True, **{**RESUMED, **options})
    assert_same_model(tmp_path, uninterrupted(**options))


def test_resuming_with_sparse_gradients(train, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", 20)
    kill(train, KillAt("on_step_end", 12), **RESUMED)
    trainer = train(resume=True, **RESUMED)
    assert [head.sparse for head in trainer.model.heads] == [False, False, True]
    assert_same_model(tmp_path, uninterrupted("sparse"))


class KillWorkers(TrainerCallback):
    """Kills the workers of the data loader."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 8:
            for worker in multiprocessing.active_children():
                worker.kill()


def test_a_dead_data_loader_worker(train, uninterrupted, tmp_path):
    options = {**RESUMED, "dataloader_num_workers": 1, "dataloader_prefetch_factor": 1}
    refused("dataloader_num_workers", train, callbacks=[KillWorkers()], error=ChildProcessError, **options)
    train(resume=True, **options)
    assert_same_model(tmp_path, uninterrupted())


def test_resuming_after_a_level_that_ended_early(train, tmp_path):
    options = {"level_steps": [6, 6, 6], "level_learning_rate": [0.0], "level_head_learning_rate": [0.0]}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "nDCG@5"}
    options |= {"eval_dataset": make_documents(30, seed=2), "logging_steps": 1}
    whole = train(folder=tmp_path / "whole", callbacks=[EarlyStoppingCallback(1)], **options)
    kill(train, EarlyStoppingCallback(1), KillAfter("level 2 shortlist"), folder=tmp_path / "parts", **options)
    resumed = train(folder=tmp_path / "parts", resume=True, callbacks=[EarlyStoppingCallback(1)], **options)
    assert resumed.state.global_step == whole.state.global_step == 12
    assert levels_of_steps(resumed, first=5) == levels_of_steps(whole, first=5)


def test_resuming_finds_the_best_model(train, tmp_path, monkeypatch):
    rank_best(monkeypatch, [6])
    options = {"level_steps": [2, 2, 6], **KEEP_BEST}
    train(folder=tmp_path / "whole", **options)
    kill(train, KillAfter("embed", step=10), folder=tmp_path / "parts", **options)
    train(folder=tmp_path / "parts", resume=True, **options)
    assert_same_model(tmp_path / "parts", tmp_path / "whole")


def test_a_checkpoint_is_written_once(train):
    """Also where a level and a pass end together."""
    written = []

    class Note(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            written.append(state.global_step)

    train(callbacks=[Note()], **{**RESUMED, "level_steps": [5, 3, 2], "save_steps": 4})
    assert written == [4, 5, 8, 10]


def test_nothing_to_resume_from(train, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = train(resume=True, level_steps=[1])
    assert str(tmp_path) in caplog.text
    assert trainer.state.global_step == 3


@pytest.fixture
def checkpoint(tiny_encoder, few, make_once):
    """A checkpoint in the second level."""

    def fill(folder):
        args = encoder_arguments(folder, **RESUMED)
        trainer = XMCTrainer(tiny_encoder, args, few, callbacks=[KillAt("on_step_end", 5)])
        with pytest.raises(Killed):
            trainer.train()

    return make_once("killed", fill) / "checkpoint-4"


def test_a_named_checkpoint(train, checkpoint, uninterrupted, tmp_path):
    assert {path.suffix for path in checkpoint.rglob("*.*")} <= {".json", ".safetensors", ".txt"}
    train(resume=str(checkpoint), **RESUMED)
    assert_same_model(tmp_path, uninterrupted())


def test_not_a_checkpoint(train, tmp_path, checkpoint):
    for folder in (tmp_path, tmp_path / "nowhere", checkpoint.parent):
        refused(str(folder), train, resume=folder, error=FileNotFoundError, **RESUMED)


OTHER_RUNS = {
    "documents": {"data": make_documents(160, seed=8)},
    "labels": {"data": make_documents(160, seed=7).map(lambda row: {"labels": row["labels"][:1]})},
    "level_steps": {"level_steps": [3, 4, 6]},
    "level_indices": {"level_indices": [1, 2], "level_steps": [3, 4]},
    "level_learning_rate": {"level_learning_rate": [2e-3]},
    "seed": {"seed": 1},
    "batch size": {"per_device_train_batch_size": 16},
    "tree": {"tree_branching": 8},
    "max_length": {"encoder_max_length": 12},
    "tfidf": {"tfidf_ngram_range": [1, 1]},
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_a_checkpoint_of_another_run(train, checkpoint, tmp_path, name):
    refused(name, train, resume=str(checkpoint), **{**RESUMED, **OTHER_RUNS[name]})
    assert not (tmp_path / "model.safetensors").exists()


class Send(TrainerCallback):
    """Sends a signal in a step."""

    def __init__(self, number, times=1):
        self.number, self.times = number, times

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.fixture
def handles_interrupts():
    """Ctrl-C raises, also in tests that run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handles_interrupts")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_writes_a_checkpoint(train, uninterrupted, tmp_path, number, error):
    before = signal.getsignal(number)
    with pytest.raises(error):
        train(callbacks=[Send(number)], **{**RESUMED, "save_steps": 100})
    assert signal.getsignal(number) is before
    assert complete_checkpoints(tmp_path) == [3, 5]  # the end of the first level, and the signal
    train(resume=True, **{**RESUMED, "save_steps": 100})
    assert_same_model(tmp_path, uninterrupted())


@pytest.mark.usefixtures("handles_interrupts")
def test_a_second_interrupt_stops_at_once(train, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[Send(signal.SIGINT, times=2)], **{**RESUMED, "save_steps": 100})
    assert complete_checkpoints(tmp_path) == [3]


def test_a_finished_training_is_not_repeated(train, tmp_path):
    first = train(**RESUMED)
    written = (tmp_path / "model.safetensors").stat().st_mtime_ns
    again = train(resume=True, **RESUMED)
    assert again.model.predict(TEXTS) == first.model.predict(TEXTS)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == written
    refused("level_learning_rate", train, resume=True, **{**RESUMED, "level_learning_rate": [1e-5]})

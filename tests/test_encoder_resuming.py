"""Training of models with an encoder that goes on from a checkpoint: it ends in the same model."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal

import pytest
from conftest import encoder_arguments, make_documents
from encoder_runs import (
    KEEP_BEST,
    TEXTS,
    KillAt,
    Killed,
    assert_same_model,
    kill_in,
    levels_of_steps,
    rank_best,
)
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_xmc import XMCForTextClassification, XMCTrainer
from hf_xmc.training import context, level_trainer
from hf_xmc.training.presets import ENCODER_METHODS

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

# An epoch has five steps: checkpoints are within epochs and at their ends, within levels and at their ends.
# The beam is so narrow that shortlists leave nodes out.
RESUMED = {"level_steps": [3, 4, 5], "level_beam_size": [2], "save_steps": 2, "per_device_train_batch_size": 32}


def kill_at(event, step):
    return lambda monkeypatch: KillAt(event, step)


def kill_while_writing(step):
    """Leaves a checkpoint that lacks its last files."""

    def prepare(monkeypatch):
        save = level_trainer.save_random_state

        def replacement(folder, process):
            if f"checkpoint-{step}." in folder:
                raise Killed
            save(folder, process)

        monkeypatch.setattr(level_trainer, "save_random_state", replacement)

    return prepare


def kill_while_saving(monkeypatch):
    """Ends the process when the weights of the finished model, not those of a checkpoint, are to be written."""
    from transformers import modeling_utils

    write = modeling_utils.safe_save_file

    def replacement(tensors, path, *arguments, **options):
        if "checkpoint-" not in str(path):
            raise Killed
        write(tensors, path, *arguments, **options)

    monkeypatch.setattr(modeling_utils, "safe_save_file", replacement)


KILLS = {
    "in the first level": (kill_at("on_step_end", 3), 2),
    "in a later level and epoch": (kill_at("on_step_end", 7), 6),
    "late in an epoch": (kill_at("on_step_end", 10), 8),
    "in the last level": (kill_at("on_step_end", 12), 10),
    "at a level's end": (kill_at("on_save", 3), 3),
    "before anything was saved": (kill_at("on_step_end", 1), None),
    "while a checkpoint is written": (kill_while_writing(6), 4),
    "in a shortlist": (kill_in("make_level_data", lambda model, counts, index, *rest: index == 2), 7),
    "in a bootstrap": (kill_in("bootstrap_head", lambda head, data, *rest: data.level == 2), 3),
    "in the ranker": (kill_in("train_ranker"), 12),
    "while the model is saved": (kill_while_saving, 12),
}
# Methods that train all their levels in the same steps make as many steps.
POINTS = [("xr-transformer", point) for point in KILLS]
POINTS += [(method, "late in an epoch") for method in ENCODER_METHODS if method != "xr-transformer"]


@pytest.fixture(scope="module")
def uninterrupted(tiny_encoder, few, tmp_path_factory):
    """Folders of runs that nothing interrupted, by what sets them apart and by options."""
    folders = {}

    def get(what="", **options):
        key = what + json.dumps(options, sort_keys=True)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("uninterrupted")
            args = encoder_arguments(folders[key], **{**RESUMED, "save_strategy": "no", **options})
            XMCTrainer(model=tiny_encoder, args=args, train_dataset=few).train()
        return folders[key]

    return get


def kill(train, monkeypatch, prepare, **options):
    """A run that ends where `prepare` arranges it."""
    with monkeypatch.context() as patch:
        callback = prepare(patch)
        with pytest.raises(Killed):
            train(callbacks=[callback] if callback else [], **{**RESUMED, **options})


def complete_checkpoints(folder):
    """Numbers of the checkpoints in a folder that are complete."""
    return sorted(int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoint-*/trainer_state.json"))


@pytest.mark.parametrize("method, point", POINTS)
def test_resuming_gives_the_model_of_an_uninterrupted_run(train, uninterrupted, tmp_path, monkeypatch, method, point):
    prepare, last = KILLS[point]
    options = {"method": method} if method == "xr-transformer" else {"method": method, "level_steps": [12]}
    kill(train, monkeypatch, prepare, **options)
    assert complete_checkpoints(tmp_path)[-1:] == ([] if last is None else [last])
    trainer = train(resume=True, **{**RESUMED, **options})
    assert_same_model(tmp_path, uninterrupted(**options))
    # Predictions of what the trainer holds are those of what it saved.
    assert trainer.model.predict(TEXTS) == XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS)


@pytest.mark.parametrize(
    "options",
    [
        {"train_sampling_strategy": "random"},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16},
        {"level_bootstrap": False, "level_negatives": ["tfn"], "level_loss": "squared_hinge"},
        {"level_steps": [0, 7, 5]},
        {"level_indices": (1, 3), "level_steps": [4, 8]},
        {"encoder_lora_rank": 2},
        {"encoder_lora_rank": 2, "method": "lightxml", "level_steps": [12]},
    ],
    ids=str,
)
def test_resuming_with_other_options(train, uninterrupted, tmp_path, monkeypatch, options):
    kill(train, monkeypatch, kill_at("on_step_end", 7), **options)
    train(resume=True, **{**RESUMED, **options})
    assert_same_model(tmp_path, uninterrupted(**options))


def test_resuming_with_heads_of_which_a_step_touches_few_rows(train, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", 20)
    kill(train, monkeypatch, kill_at("on_step_end", 12))
    trainer = train(resume=True, **RESUMED)
    assert [head.sparse for head in trainer.model.heads] == [False, False, True]
    assert_same_model(tmp_path, uninterrupted("sparse gradients"))


class KillWorkers(TrainerCallback):
    """Kills the processes that make batches."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:  # within a level: the next one has other workers
            for worker in multiprocessing.active_children():
                worker.kill()


def test_a_process_that_makes_batches_dies(train, uninterrupted, tmp_path):
    options = {**RESUMED, "dataloader_num_workers": 1, "dataloader_prefetch_factor": 1}
    with pytest.raises(ChildProcessError, match="dataloader_num_workers"):
        train(callbacks=[KillWorkers()], **options)
    train(resume=True, **options)
    assert_same_model(tmp_path, uninterrupted())


def test_resuming_after_a_level_that_ended_early(train, tmp_path, monkeypatch):
    options = {"level_steps": [6, 6, 6], "level_learning_rate": [0.0], "level_head_learning_rate": [0.0]}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "nDCG@5"}
    evaluation = make_documents(30, seed=2)

    def run(folder, **more):
        return train(
            folder=folder, callbacks=[EarlyStoppingCallback(1)], eval_dataset=evaluation, **{**options, **more}
        )

    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_in("make_level_data", lambda model, counts, index, *rest: index == 1)(patch)
        with pytest.raises(Killed):
            run(tmp_path / "parts")
    resumed = run(tmp_path / "parts", resume=True)
    assert resumed.state.global_step == whole.state.global_step == 12
    assert levels_of_steps(resumed, first=5) == levels_of_steps(whole, first=5)


@pytest.mark.parametrize("rank", [0, 2])
def test_resuming_finds_the_best_model(train, tmp_path, monkeypatch, rank):
    rank_best(monkeypatch, [6])
    options = {"level_steps": [2, 2, 6], "encoder_lora_rank": rank, **KEEP_BEST}
    train(folder=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        kill_in("train_ranker")(patch)
        with pytest.raises(Killed):
            train(folder=tmp_path / "parts", **options)
    train(folder=tmp_path / "parts", resume=True, **options)
    assert_same_model(tmp_path / "parts", tmp_path / "whole")


def test_a_resumed_run_knows_what_went_before(train, tmp_path, monkeypatch):
    options = {"logging_steps": 2, "level_steps": [2, 2, 2]}
    kill(train, monkeypatch, kill_in("train_ranker"), **options)
    trainer = train(resume=True, **{**RESUMED, **options})
    assert trainer.state.global_step == 6
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 4, 6]


def test_a_checkpoint_is_written_once(train, monkeypatch):
    """Also where a level and an epoch end together; what identifies the data is found once, too."""
    calls, written = [], []
    digest = context.tokens_digest
    monkeypatch.setattr(context, "tokens_digest", lambda tokens: calls.append(len(tokens)) or digest(tokens))

    class Note(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            written.append(state.global_step)

    train(callbacks=[Note()], **{**RESUMED, "level_steps": [5, 3, 2], "save_steps": 4})
    assert written == [4, 5, 8, 10]
    assert calls == [160]


def test_nothing_to_resume_from(train, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = train(resume=True, level_steps=[1])
    assert "no checkpoint" in caplog.text and str(tmp_path) in caplog.text
    assert trainer.state.global_step == 3


@pytest.fixture(scope="module")
def checkpoint(tiny_encoder, few, tmp_path_factory):
    """A checkpoint in the second level. Read only."""
    folder = tmp_path_factory.mktemp("killed")
    trainer = XMCTrainer(
        model=tiny_encoder,
        args=encoder_arguments(folder, **RESUMED),
        train_dataset=few,
        callbacks=[KillAt("on_step_end", 5)],
    )
    with pytest.raises(Killed):
        trainer.train()
    return folder / "checkpoint-4"


def test_a_checkpoint_holds_no_pickle(checkpoint):
    suffixes = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".txt"}


def test_a_checkpoint_may_be_named(train, checkpoint, uninterrupted, tmp_path):
    train(resume=str(checkpoint), **RESUMED)
    assert_same_model(tmp_path, uninterrupted(method="xr-transformer"))


def test_a_checkpoint_may_be_named_by_a_path(train, checkpoint):
    with pytest.raises(FileNotFoundError, match="checkpoint-"):
        train(resume=checkpoint.parent, **RESUMED)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_what_is_no_checkpoint(train, tmp_path, name):
    with pytest.raises(FileNotFoundError, match="checkpoint-"):
        train(resume=str(tmp_path / name), **RESUMED)


OTHER_LABELS = make_documents(160, seed=7).map(lambda row: {"labels": row["labels"][:1]})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": make_documents(160, seed=8)}, "documents"),
        ({"data": OTHER_LABELS}, "labels"),
        ({"level_steps": [3, 4, 6]}, "level_steps"),
        ({"level_negatives": ["tfn"]}, "level_negatives"),
        ({"level_indices": [1, 2], "level_steps": [3, 4]}, "level_indices"),
        ({"level_learning_rate": [2e-3]}, "level_learning_rate"),
        ({"seed": 1}, "seed"),
        ({"per_device_train_batch_size": 16}, "batch size"),
        ({"tree_branching": 8}, "tree"),
        ({"encoder_max_length": 12}, "max_length"),
        ({"tfidf_ngram_range": [1, 1]}, "tfidf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_resuming_another_run(train, checkpoint, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        train(resume=str(checkpoint), **{**RESUMED, **change})
    assert not (tmp_path / "model.safetensors").exists()


class Terminate(TrainerCallback):
    """Sends the signal to end in a step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_signal_to_end_writes_a_checkpoint_first(train, uninterrupted, tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level(logging.WARNING, "hf_xmc"), pytest.raises(SystemExit, match="143"):
        train(callbacks=[Terminate()], **{**RESUMED, "save_steps": 100})
    assert "step 5" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
    assert complete_checkpoints(tmp_path) == [3, 5]  # the end of the first level, and the signal
    train(resume=True, **{**RESUMED, "save_steps": 100})
    assert_same_model(tmp_path, uninterrupted())


def test_a_training_that_has_ended_is_not_done_again(train, tmp_path, caplog):
    first = train(**RESUMED)
    written = (tmp_path / "model.safetensors").stat().st_mtime_ns
    with caplog.at_level(logging.WARNING, "hf_xmc"):
        again = train(resume=True, **RESUMED)
    assert "is finished" in caplog.text
    assert again.model.predict(TEXTS) == first.model.predict(TEXTS)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="of another run: these differ: level_learning_rate"):
        train(resume=True, **{**RESUMED, "level_learning_rate": [1e-5]})

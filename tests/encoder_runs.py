"""Shared by the tests of trainings with an encoder: comparison of models, interruptions."""

from pathlib import Path

import pytest
import torch
from conftest import make_documents
from safetensors.torch import load_file
from small_problems import same_weights
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_xmc import XMCForTextClassification, XMCTrainer

PREDICT_WITH = ["ranker", "heads", "all"]
TEXTS = make_documents(12, seed=11)["text"][:]

# Options of a training that ends in the best of several models, see `rank_best`.
KEEP_BEST = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "eval_dataset": make_documents(20, seed=2),
}


def tensors_of(folder):
    return load_file(Path(folder) / "model.safetensors")


def assert_same_model(first, second):
    """Checks that the models in two folders are equal bit for bit."""
    weights, others = tensors_of(first), tensors_of(second)
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    one, other = (XMCForTextClassification.from_pretrained(folder) for folder in (first, second))
    assert (one.ranker is None) == (other.ranker is None)
    assert one.ranker is None or same_weights(one.ranker, other.ranker)
    assert (Path(first) / "config.json").read_text() == (Path(second) / "config.json").read_text()


def assert_predicts_as_saved(trainer, folder, kinds=PREDICT_WITH, texts=TEXTS):
    """Checks that the model of a trainer predicts as the one in a folder, which is returned."""
    loaded = XMCForTextClassification.from_pretrained(folder)
    for kind in kinds:
        assert loaded.predict(texts, predict_with=kind) == trainer.model.predict(texts, predict_with=kind)
    return loaded


def levels_of_steps(trainer, first=1):
    """Level of each logged step."""
    return [entry["level"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] >= first]


def rank_best(monkeypatch, steps):
    """Makes evaluations after some steps look better than all others."""
    evaluate = XMCTrainer.evaluate

    def replacement(self, *arguments, **options):
        value = 1.0 if self.state.global_step in steps else 0.5
        return {**evaluate(self, *arguments, **options), "eval_nDCG@5": value}

    monkeypatch.setattr(XMCTrainer, "evaluate", replacement)


class Killed(Exception):
    pass


def kill(train, *callbacks, **options):
    """Runs a training that a callback ends."""
    with pytest.raises(Killed):
        train(callbacks=list(callbacks), **options)


class KillAt(TrainerCallback):
    """Ends a training at an event of one step."""

    def __init__(self, event, step):
        self.step = step
        setattr(self, event, self._kill)

    def _kill(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


class KillAfter(TrainerCallback):
    """Ends a training when a stage is logged, after so many steps if given."""

    def __init__(self, stage, step=None):
        self.name, self.step = f"{stage}_seconds", step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.name in logs and self.step in (None, state.global_step):
            raise Killed


class KillWhileWriting(TrainerCallback, ExportableState):
    """Ends a training while the checkpoint of one step is written: its last files are missing."""

    def __init__(self, step):
        self.step, self.now = step, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.now = state.global_step

    def state(self):
        if self.now == self.step:
            raise Killed
        return {"args": {}, "attributes": {}}

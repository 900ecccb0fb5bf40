"""What the tests of trained encoders share: models compared, runs ended early."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import make_documents
from safetensors.torch import load_file
from small_problems import same_weights
from transformers import TrainerCallback

from hf_xmc import XMCForTextClassification, XMCTrainer
from hf_xmc.training import levels, stages

PREDICT_WITH = ["ranker", "heads", "both"]
TEXTS = make_documents(12, seed=11)["text"][:]

# Ends in the best of several models, see `rank_best`.
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
    """That the models in two folders are equal to the last bit."""
    weights, others = tensors_of(first), tensors_of(second)
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    one, other = (XMCForTextClassification.from_pretrained(folder) for folder in (first, second))
    assert (one.ranker is None) == (other.ranker is None)
    assert one.ranker is None or same_weights(one.ranker, other.ranker)
    assert (Path(first) / "config.json").read_text() == (Path(second) / "config.json").read_text()


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


class KillAt(TrainerCallback):
    """Ends the process at an event of one step."""

    def __init__(self, event, step):
        self.step = step
        setattr(self, event, self._kill)

    def _kill(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def kill_in(name, when=lambda *arguments: True):
    """Ends the process in a function that `levels` or `stages` calls, where `when` says so."""

    def prepare(monkeypatch):
        module = levels if hasattr(levels, name) else stages
        function = getattr(module, name)

        def replacement(*arguments):
            if when(*arguments):
                raise Killed
            return function(*arguments)

        monkeypatch.setattr(module, name, replacement)

    return prepare

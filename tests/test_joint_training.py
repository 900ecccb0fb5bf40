"""Methods that train all levels jointly, LightXML and APLC-XLNet, and averaged weights."""

import numpy as np
import pytest
import torch
from conftest import make_documents
from encoder_runs import KEEP_BEST, assert_predicts_as_saved, levels_of_steps, rank_best, tensors_of
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_xmc import XMCForTextClassification
from hf_xmc.modeling_heads import AdaptiveHead, BottleneckHead, LevelHead
from hf_xmc.training.optimizer import AVERAGE_FILE

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

JOINT_METHODS = ("lightxml", "aplc-xlnet")
EVALUATION = make_documents(40, seed=2)


class Note(TrainerCallback):
    """Keeps the weights after every step."""

    def __init__(self):
        self.states = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.states[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "negatives, bootstrap", [("dynamic", False), ("man", True), ("both", False), ("tfn", True), ("all", False)]
)
def test_all_kinds_of_negatives(train, tmp_path, negatives, bootstrap):
    options = {"level_negatives": [negatives], "level_bootstrap": bootstrap}
    trainer = train(method="lightxml", level_settings={"cost_sensitive": bootstrap}, **options)
    assert trainer.model.config.head_ranking == "path" and trainer.model.config.predict_with == "heads"
    assert_predicts_as_saved(trainer, tmp_path, ["heads"])
    stages = {name for entry in trainer.state.log_history for name in entry}
    assert ("level 2 bootstrap_seconds" in stages) == bootstrap


@pytest.mark.parametrize("method", JOINT_METHODS)
def test_one_pass_trains_all_levels(train, method):
    note = Note()
    trainer = train(method=method, callbacks=[note], logging_steps=1, save_strategy="no", level_swa_start=1.0)
    assert levels_of_steps(trainer) == [2, 2, 2, 2]
    first, last = note.states[1], note.states[4]
    assert all(not torch.equal(first[name], last[name]) for name in first if name.startswith("heads."))
    assert not torch.equal(first["encoder.embeddings.LayerNorm.bias"], last["encoder.embeddings.LayerNorm.bias"])
    sizes = next(entry for entry in trainer.state.log_history if "heads_bytes" in entry)
    assert 0 < sizes["heads_bytes"] < sizes["full_width_bytes"]


def test_kinds_of_heads(train, tmp_path):
    light = train(method="lightxml", folder=tmp_path / "light").model
    assert [type(head) for head in light.heads] == [LevelHead, BottleneckHead]
    assert light.config.pooling_layers == 2 and light.head(2).weight.shape == (60, 16)
    tails = train(method="aplc-xlnet", folder=tmp_path / "tails", predict_with="all").model
    assert [type(head) for head in tails.heads] == [LevelHead, AdaptiveHead] and len(tails.config.head_tails) == 2
    # Labels are in the order of their frequencies.
    counts = tails.labels.counts[tails.label_tree.leaf_labels]
    assert (np.diff(counts) <= 0).all()
    # Rare labels are not alike: the ranker has a tree by features.
    assert tails.ranker.tree != tails.label_tree and max(np.diff(tails.ranker.tree.child_offsets[-1])) <= 16


def test_few_labels_need_no_clusters(train):
    trainer = train(method="lightxml", level_indices=None)
    model = trainer.model
    assert model.label_tree.depth == 2 and model.config.head_levels == [2]
    (head,) = model.heads
    assert type(head) is LevelHead and head.num_nodes == 60


def test_projections_have_their_own_learning_rate(train):
    rates = []

    class Read(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            rates.append([group["lr"] for group in optimizer.param_groups])
            assert [len(group["params"]) for group in optimizer.param_groups[2:]] == [2, 2 + 2 * 2]

    rates_of = {"level_learning_rate": [1e-4], "level_head_learning_rate": [4e-4]}
    rates_of |= {"level_settings": {"projection_learning_rate": 2e-4, "min_lr_ratio": 1.0}}
    train(method="aplc-xlnet", callbacks=[Read()], **rates_of)
    assert np.allclose(rates, [[1e-4, 1e-4, 2e-4, 4e-4]] * 4)


# ---- Averaged weights ----

AVERAGED = {"method": "lightxml", "level_steps": [8], "level_swa_start": 0.5, "level_settings": {"swa_steps": 2}}


def test_the_saved_model_is_the_mean_of_late_states(train, tmp_path):
    note = Note()
    train(callbacks=[note], save_strategy="no", **AVERAGED)
    for name, saved in tensors_of(tmp_path).items():
        if name != "anchor":
            torch.testing.assert_close(saved, (note.states[6][name] + note.states[8][name]) / 2)


def test_the_mean_is_evaluated_between_the_steps(train, monkeypatch):
    seen = {}
    note = Note()
    search = XMCForTextClassification.search_level

    def replacement(self, *arguments, **options):
        seen.setdefault(len(note.states), self.head(2).bias.detach().clone())
        return search(self, *arguments, **options)

    monkeypatch.setattr(XMCForTextClassification, "search_level", replacement)
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": EVALUATION, "save_strategy": "no"}
    train(callbacks=[note], **options, **AVERAGED)
    states = {step: state["heads.1.bias"] for step, state in note.states.items()}
    for step in (2, 4, 6):
        assert torch.equal(seen[step], states[step])  # of no state, or of one
    torch.testing.assert_close(seen[8], (states[6] + states[8]) / 2)


def test_the_best_model_is_the_one_that_was_evaluated(train, tmp_path, monkeypatch):
    rank_best(monkeypatch, [8])
    options = {**AVERAGED, "level_steps": [12], "level_swa_start": 0.4, "level_settings": {"swa_steps": 1}}
    train(**options, **KEEP_BEST)
    mean, final = load_file(tmp_path / "checkpoint-8" / AVERAGE_FILE), tensors_of(tmp_path)
    assert all(torch.equal(final[name], tensor) for name, tensor in mean.items())
    assert not torch.equal(tensors_of(tmp_path / "checkpoint-8")["heads.1.bias"], final["heads.1.bias"])


def test_averages_of_each_level(train, tmp_path):
    note = Note()
    options = {"level_steps": [4, 2, 2], "level_swa_start": 0.0, "level_settings": {"swa_steps": 2}}
    train(callbacks=[note], save_strategy="no", **options)
    # The first level ends in the mean of two states, with which the next one begins; the others have one state each.
    first = (note.states[2]["heads.0.bias"] + note.states[4]["heads.0.bias"]) / 2
    torch.testing.assert_close(note.states[5]["heads.0.bias"], first)
    assert torch.equal(tensors_of(tmp_path)["heads.2.bias"], note.states[8]["heads.2.bias"])


# ---- Stopping ----


def test_early_stopping_ends_the_training(train):
    rates = ("level_learning_rate", "level_head_learning_rate")
    options = {name: [0.0] for name in rates} | {"level_settings": {"projection_learning_rate": 0.0, "bottleneck": 16}}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    options |= {"metric_for_best_model": "nDCG@5", "eval_dataset": EVALUATION, "callbacks": [EarlyStoppingCallback(1)]}
    trainer = train(method="lightxml", level_steps=[20], **options)
    assert trainer.state.global_step == 4 and trainer.model.config.trained_levels == 2

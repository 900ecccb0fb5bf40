"""Training of methods whose levels are trained together: LightXML and APLC-XLNet."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import SMALL_METHODS, THREE_LEVELS, encoder_arguments, make_documents, make_tokenizer
from encoder_runs import (
    KEEP_BEST,
    PREDICT_WITH,
    TEXTS,
    KillAt,
    Killed,
    assert_same_model,
    levels_of_steps,
    rank_best,
    tensors_of,
)
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback, XLNetConfig, XLNetModel

from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.modeling_heads import AdaptiveHead, BottleneckHead, LevelHead
from hf_xmc.training.averaging import AVERAGE_FILE

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

JOINT_METHODS = ("lightxml", "aplc-xlnet")
EVALUATION = make_documents(40, seed=2)


class Note(TrainerCallback):
    """Keeps the weights after every step."""

    def __init__(self):
        self.states = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.states[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("method", JOINT_METHODS)
def test_fine_tuning_makes_the_heads_better(train, method, tmp_path):
    data, evaluation = make_documents(400, seed=12), make_documents(200, seed=1)
    results = []
    for steps in (0, 45):
        options = {"level_steps": [steps], "level_dropout": 0.1, "save_strategy": "no"}
        trainer = train(method=method, folder=tmp_path / str(steps), data=data, **options)
        assert trainer.state.global_step == steps
        results.append(trainer.evaluate(evaluation)["eval_R@5"])
    frozen, tuned = results
    assert tuned > frozen + 0.05


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("negatives", ["dynamic", "man", "both", "tfn", "all"])
def test_all_kinds_of_negatives(train, tmp_path, negatives, bootstrap):
    trainer = train(
        method="lightxml", level_negatives=[negatives], level_bootstrap=bootstrap, level_cost_sensitive=bootstrap
    )
    assert trainer.model.config.head_ranking == "path" and trainer.model.config.predict_with == "heads"
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == trainer.model.predict(TEXTS)
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
    tails = train(method="aplc-xlnet", folder=tmp_path / "tails", predict_with="both").model
    assert [type(head) for head in tails.heads] == [LevelHead, AdaptiveHead] and len(tails.config.head_tails) == 2
    # The more documents a label has, the nearer to the front it is.
    counts = tails.labels.counts[tails.label_tree.leaf_labels]
    assert (np.diff(counts) <= 0).all()
    # What is rare together is not alike: the ranker has a tree of clusters.
    assert tails.ranker.tree != tails.label_tree and max(np.diff(tails.ranker.tree.child_offsets[-1])) <= 16


def test_few_labels_need_no_clusters(train, tmp_path):
    trainer = train(method="lightxml", level_indices=None)
    model = trainer.model
    assert model.label_tree.depth == 2 and model.config.head_levels == [2]
    (head,) = model.heads
    assert type(head) is LevelHead and head.num_nodes == 60
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == model.predict(TEXTS)


def test_presets():
    light, tails = (XMCTrainingArguments("out", method=method) for method in JOINT_METHODS)
    assert (light.encoder_pooling_layers, light.level_dropout) == (5, 0.5)
    assert (light.tree_max_leaf_size, light.tree_max_depth, light.level_negatives) == (100, 2, "dynamic")
    assert light.predict_with == tails.predict_with == "heads"
    levels = light.make_level_arguments(), tails.make_level_arguments()
    assert [(level.joint, level.bottleneck, level.shrink) for level in levels] == [(True, 300, None), (True, 0, 2.0)]
    rates = [tails.learning_rate, tails.level_projection_learning_rate, tails.level_head_learning_rate]
    assert rates == sorted(rates) and len(set(rates)) == 3
    assert XMCTrainingArguments("out", method="lightxml", predict_with="both").predict_with == "both"


def test_projections_have_their_own_learning_rate(train):
    rates = []

    class Read(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            rates.append([group["lr"] for group in optimizer.param_groups])
            assert [len(group["params"]) for group in optimizer.param_groups[2:]] == [2, 2 + 2 * 2]

    train(
        method="aplc-xlnet",
        callbacks=[Read()],
        level_learning_rate=[1.0e-4],
        level_projection_learning_rate=[2.0e-4],
        level_head_learning_rate=[4.0e-4],
        level_min_lr_ratio=1.0,
    )
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
    train(
        callbacks=[note], eval_strategy="steps", eval_steps=2, eval_dataset=EVALUATION, save_strategy="no", **AVERAGED
    )
    states = {step: state["heads.1.bias"] for step, state in note.states.items()}
    for step in (2, 4, 6):
        assert torch.equal(seen[step], states[step])  # none yet, or one
    torch.testing.assert_close(seen[8], (states[6] + states[8]) / 2)


def test_the_best_model_is_the_one_that_was_evaluated(train, tmp_path, monkeypatch):
    rank_best(monkeypatch, [8])
    options = {**AVERAGED, "level_steps": [12], "level_swa_start": 0.4, "level_settings": {"swa_steps": 1}}
    train(**options, **KEEP_BEST)
    mean, final = load_file(tmp_path / "checkpoint-8" / AVERAGE_FILE), tensors_of(tmp_path)
    assert all(torch.equal(final[name], tensor) for name, tensor in mean.items())
    assert not torch.equal(tensors_of(tmp_path / "checkpoint-8")["heads.1.bias"], final["heads.1.bias"])


def test_averages_of_levels_one_after_another(train, tmp_path):
    note = Note()
    options = {"level_steps": [4, 2, 2], "level_swa_start": 0.0, "level_settings": {"swa_steps": 2}}
    train(callbacks=[note], save_strategy="no", **options)
    # The first level ends in the mean of two states, with which the next one begins; each of the others has one state.
    first = (note.states[2]["heads.0.bias"] + note.states[4]["heads.0.bias"]) / 2
    torch.testing.assert_close(note.states[5]["heads.0.bias"], first)
    assert torch.equal(tensors_of(tmp_path)["heads.2.bias"], note.states[8]["heads.2.bias"])


# ---- Resuming, stopping ----


@pytest.mark.parametrize(
    "options",
    [
        {
            "method": "lightxml",
            "level_negatives": ["both"],
            "level_swa_start": 0.2,
            "level_settings": {"swa_steps": 1},
        },
        {"method": "aplc-xlnet", "level_bootstrap": False},
    ],
    ids=str,
)
def test_resuming_with_other_options(train, tmp_path, options):
    options = {"level_steps": [8], "save_steps": 2, **options}
    train(folder=tmp_path / "whole", **options)
    with pytest.raises(Killed):
        train(folder=tmp_path / "parts", callbacks=[KillAt("on_step_end", 7)], **options)
    train(folder=tmp_path / "parts", resume=True, **options)
    assert_same_model(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("method", JOINT_METHODS)
def test_early_stopping_ends_the_training(train, method):
    trainer = train(
        method=method,
        level_steps=[20],
        level_learning_rate=[0.0],
        level_head_learning_rate=[0.0],
        level_projection_learning_rate=[0.0],
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="nDCG@5",
        save_strategy="no",
        eval_dataset=EVALUATION,
        callbacks=[EarlyStoppingCallback(1)],
    )
    assert trainer.state.global_step == 4 and trainer.model.config.trained_levels == 2


# ---- Encoders, errors, commands ----


def test_xlnet(train, tmp_path):
    """It has no limit to its positions, pads in front, and its last token stands for the text."""
    folder = tmp_path / "xlnet"
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32}
    XLNetModel(XLNetConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)).save_pretrained(folder)
    trainer = train(model=folder, folder=tmp_path / "model", method="aplc-xlnet")
    assert trainer.model.config.pooling == "last"
    loaded = XMCForTextClassification.from_pretrained(tmp_path / "model")
    assert loaded.predict(TEXTS) == trainer.model.predict(TEXTS)
    # A text is tagged the same alone and beside longer ones.
    alone = [loaded.predict([text])[0] for text in TEXTS]
    for one, together in zip(alone, loaded.predict(TEXTS), strict=True):
        assert [score for _, score in one] == pytest.approx([score for _, score in together], abs=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({**THREE_LEVELS, "level_indices": [2, 3]}, "tree_clustering"),
        ({"level_indices": [1]}, "predict_with='heads'"),
        ({"level_negatives": ["dynamic"]}, "Options `level_.*negatives='tfn'"),
        ({"tree_shares": [0.5]}, "Options `tree_.*add up to 1"),
        ({"level_steps": [2, 2]}, "`level_steps` has 2 values, but 1 levels are trained"),
    ],
    ids=str,
)
def test_errors_before_training(train, options, message):
    with pytest.raises(ValueError, match=message):
        train(method="aplc-xlnet", **options)


def test_a_loss_that_is_no_number(train):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.head(2).bias.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match=r"nan at step 1 \(level 1\+2/2\)"):
        train(method="lightxml", callbacks=[Break()])


def test_the_score_of_both_is_the_weighted_mean(train):
    model = train(method="aplc-xlnet", predict_with="both", heads_weight=0.3).model
    model.config.beam_size = 0
    ranked, own, both = (
        [dict(row) for row in model.predict(TEXTS, top_k=60, predict_with=kind)] for kind in PREDICT_WITH
    )
    for document in range(len(TEXTS)):
        for label, score in both[document].items():
            assert score == pytest.approx(0.7 * ranked[document][label] + 0.3 * own[document][label], abs=1e-5)


def test_options_are_kept_with_the_model(train, tmp_path):
    train(method="aplc-xlnet", level_steps=[1])
    saved = json.loads((tmp_path / "training_args.json").read_text())
    assert saved["tree_shares"] == SMALL_METHODS["aplc-xlnet"]["tree_shares"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert sum(config["head_tails"]) < 60 and config["head_levels"] == [1, 2]


def test_a_model_is_trained_once(train, tmp_path, few):
    model = train(method="lightxml").model
    args = encoder_arguments(tmp_path / "again", "lightxml")
    with pytest.raises(ValueError, match="trained already"):
        XMCTrainer(model=model, args=args, train_dataset=few).train()

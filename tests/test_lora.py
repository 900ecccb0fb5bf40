"""Adapters in place of an encoder's weights: what they train, what checkpoints and models hold."""

from __future__ import annotations

import builtins
import importlib.util

import numpy as np
import pytest
import torch
from conftest import encoder_arguments, make_documents
from encoder_runs import KEEP_BEST, TEXTS, rank_best, tensors_of
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_xmc import XMCForTextClassification
from hf_xmc.training.lora import ADAPTERS_FILE, Adapters

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

LORA = {"encoder_lora_rank": 2, "level_learning_rate": [1e-2]}


class Watch(TrainerCallback):
    """Notes what is trained, and every weight before and after."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.trained = {name for name, own in model.named_parameters() if own.requires_grad}
        self.before = {name: own.detach().clone() for name, own in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after = {name: own.detach().clone() for name, own in model.named_parameters()}


def test_only_adapters_and_heads_are_trained(train, tmp_path, tiny_encoder):
    watch = Watch()
    trainer = train(callbacks=[watch], save_steps=2, **LORA)
    assert watch.trained and all(".lora_" in name or name.startswith("heads.") for name in watch.trained)
    # Six linear layers in each of two layers, two matrices each; three heads of weights and biases.
    assert len(watch.trained) == 2 * 6 * 2 + 2 * 3
    changed = {name for name in watch.before if not torch.equal(watch.before[name], watch.after[name])}
    assert changed == watch.trained
    start, saved = load_file(tiny_encoder / "model.safetensors"), tensors_of(tmp_path)
    plain = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16).state_dict().keys()
    assert {name for name in saved if not name.startswith("heads.")} == plain
    assert not hasattr(trainer.model.encoder, "peft_config")
    assert all(own.requires_grad for own in trainer.model.encoder.parameters())
    for name, tensor in saved.items():
        if name.startswith("encoder."):
            linear = name.endswith(".weight") and (".attention." in name or ".dense." in name) and "Norm" not in name
            assert torch.equal(tensor, start[name.removeprefix("encoder.")]) != linear, name
    # A checkpoint has the encoder as it came, and what was trained beside it.
    checkpoint = tmp_path / "checkpoint-4"
    for name, tensor in tensors_of(checkpoint).items():
        if name.startswith("encoder."):
            assert torch.equal(tensor, start[name.removeprefix("encoder.")])
    assert load_file(checkpoint / ADAPTERS_FILE).keys() == watch.trained
    assert not (tmp_path / ADAPTERS_FILE).exists()


def test_what_is_saved_predicts_the_same_and_needs_no_peft(train, tmp_path, monkeypatch):
    expected = train(**LORA).model.predict(TEXTS)
    load = builtins.__import__

    def without_peft(name, *arguments, **options):
        assert not name.startswith("peft")
        return load(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == expected


def test_adapters_are_merged_with_their_weight(tiny_encoder):
    model = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16).eval()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = model.embed(TEXTS)
    adapters = Adapters(model, rank=3, alpha=12.0, seed=1)
    np.testing.assert_allclose(model.embed(TEXTS), before, atol=1e-6)
    assert adapters.plain_weights().keys() == start.keys()
    name = "encoder.encoder.layer.1.output.dense"
    state = model.state_dict()
    up, down = state[f"{name}.lora_B.default.weight"], state[f"{name}.lora_A.default.weight"]
    assert up.shape[1] == down.shape[0] == 3
    up.copy_(torch.randn(up.shape, generator=torch.Generator().manual_seed(0)))
    trained = model.embed(TEXTS)
    assert np.abs(trained - before).max() > 0.01
    expected = start[f"{name}.weight"] + 4.0 * up @ down
    adapters.merge()
    torch.testing.assert_close(model.state_dict()[f"{name}.weight"], expected)
    np.testing.assert_allclose(model.embed(TEXTS), trained, atol=1e-5)
    assert model.state_dict().keys() == start.keys()


def test_the_seed_decides_where_adapters_start(tiny_encoder):
    found = []
    for seed in (0, 0, 1):
        model = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16)
        Adapters(model, 2, seed=seed)
        found.append({name: tensor for name, tensor in model.state_dict().items() if "lora_A" in name})
    first, again, other = found
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_best_model(train, tmp_path, monkeypatch):
    rank_best(monkeypatch, [4])
    options = {"level_steps": [6], "level_indices": [3], "level_negatives": ["all"], **LORA}
    train(folder=tmp_path / "best", **options, **KEEP_BEST)
    whole = tensors_of(tmp_path / "best")
    best = load_file(tmp_path / "best" / "checkpoint-4" / ADAPTERS_FILE)
    last = load_file(tmp_path / "best" / "checkpoint-6" / ADAPTERS_FILE)
    assert torch.equal(whole["heads.0.weight"], best["heads.0.weight"])
    assert not torch.equal(whole["heads.0.weight"], last["heads.0.weight"])


def test_it_learns(train, tmp_path):
    data, evaluation = make_documents(400, seed=12), make_documents(200, seed=1)
    options = {"per_device_train_batch_size": 32, "predict_with": "heads", "save_strategy": "no", "data": data}
    lora = {"encoder_lora_rank": 8, "level_learning_rate": [1e-2]}
    frozen, tuned = (
        train(folder=tmp_path / str(steps), level_steps=[steps], **options, **lora).evaluate(evaluation)["eval_R@5"]
        for steps in (0, 25)
    )
    assert tuned > frozen + 0.05


def test_wrong_options(tmp_path):
    with pytest.raises(ValueError, match="encoder_lora_rank"):
        encoder_arguments(tmp_path, encoder_lora_rank=-1)


def test_without_peft(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("hf_xmc.training.options.find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ImportError, match=r"needs the package peft.*pip install hf-xmc\[peft\]"):
        encoder_arguments(tmp_path, encoder_lora_rank=2)
    encoder_arguments(tmp_path)

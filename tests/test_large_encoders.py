"""What large encoders need: LoRA adapters, mixed precision, kinds of attention, settings of FSDP."""

import sys

import numpy as np
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import encoder_arguments, refused
from encoder_runs import KEEP_BEST, TEXTS, assert_predicts_as_saved, rank_best, tensors_of
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, Trainer, TrainerCallback

from hf_xmc import XMCForTextClassification, XMCTrainer
from hf_xmc.training.large_encoders import (
    ADAPTERS_FILE,
    Adapters,
    ShardedEncoder,
    check_encoder,
    choose_modules,
    set_up_plugin,
)

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

LORA = {"encoder_lora_rank": 2, "level_learning_rate": [1e-2]}


@pytest.fixture
def model(tiny_encoder):
    return XMCForTextClassification.from_encoder(tiny_encoder, max_length=16).eval()


# ---- LoRA ----


class Watch(TrainerCallback):
    """Notes which weights are trained, and all weights before and after."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_only_adapters_and_heads_are_trained(train, tmp_path, tiny_encoder, model, monkeypatch):
    watch = Watch()
    trainer = train(callbacks=[watch], save_steps=2, **LORA)
    assert watch.trained and all(".lora_" in name or name.startswith("heads.") for name in watch.trained)
    # Six linear layers in each of two layers, two matrices each; three heads of weights and biases.
    assert len(watch.trained) == 2 * 6 * 2 + 2 * 3
    assert {name for name in watch.before if not torch.equal(watch.before[name], watch.after[name])} == watch.trained
    start, saved = load_file(tiny_encoder / "model.safetensors"), tensors_of(tmp_path)
    assert {name for name in saved if not name.startswith("heads.")} == model.state_dict().keys()
    assert not hasattr(trainer.model.encoder, "peft_config")
    assert all(parameter.requires_grad for parameter in trainer.model.encoder.parameters())
    for name, tensor in saved.items():
        if name.startswith("encoder."):
            linear = name.endswith(".weight") and (".attention." in name or ".dense." in name) and "Norm" not in name
            assert torch.equal(tensor, start[name.removeprefix("encoder.")]) != linear, name
    # A checkpoint has the original encoder, and the adapters beside it.
    checkpoint = tmp_path / "checkpoint-4"
    for name, tensor in tensors_of(checkpoint).items():
        if name.startswith("encoder."):
            assert torch.equal(tensor, start[name.removeprefix("encoder.")])
    assert load_file(checkpoint / ADAPTERS_FILE).keys() == watch.trained
    assert not (tmp_path / ADAPTERS_FILE).exists()
    # Loading the model does not import peft.
    monkeypatch.setitem(sys.modules, "peft", None)
    assert_predicts_as_saved(trainer, tmp_path)


def test_adapters_are_merged(model):
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = model.embed(TEXTS)
    adapters = Adapters(model, rank=3, seed=1)
    np.testing.assert_allclose(model.embed(TEXTS), before, atol=1e-6)
    assert adapters.plain_weights().keys() == start.keys()
    name = "encoder.encoder.layer.1.output.dense"
    state = model.state_dict()
    up, down = state[f"{name}.lora_B.default.weight"], state[f"{name}.lora_A.default.weight"]
    assert up.shape[1] == down.shape[0] == 3
    up.copy_(torch.randn(up.shape, generator=torch.Generator().manual_seed(0)))
    trained = model.embed(TEXTS)
    assert np.abs(trained - before).max() > 0.01
    expected = start[f"{name}.weight"] + 2.0 * up @ down
    adapters.merge()
    torch.testing.assert_close(model.state_dict()[f"{name}.weight"], expected)
    np.testing.assert_allclose(model.embed(TEXTS), trained, atol=1e-5)
    assert model.state_dict().keys() == start.keys()


def test_the_seed_initialises_adapters(tiny_encoder):
    states = []
    for seed in (0, 0, 1):
        model = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16)
        Adapters(model, 2, seed=seed)
        states.append({name: tensor for name, tensor in model.state_dict().items() if "lora_A" in name})
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)


def test_the_best_adapters(train, tmp_path, monkeypatch):
    rank_best(monkeypatch, [4])
    train(level_steps=[6], level_indices=[3], level_negatives=["all"], **LORA, **KEEP_BEST)
    best, last = (load_file(tmp_path / f"checkpoint-{step}" / ADAPTERS_FILE)["heads.0.weight"] for step in (4, 6))
    saved = tensors_of(tmp_path)["heads.0.weight"]
    assert torch.equal(saved, best) and not torch.equal(saved, last)


def test_without_peft(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("peft", encoder_arguments, tmp_path, encoder_lora_rank=2, error=ImportError)
    encoder_arguments(tmp_path)


# ---- Precision and attention ----


@pytest.fixture
def precisions(monkeypatch):
    """Autocast dtypes of the encoder's batches."""
    dtypes = []
    encode = XMCForTextClassification.encode

    def listen(self, input_ids, attention_mask):
        # Single documents are timed for the model card, after the training.
        if len(input_ids) > 1:
            dtypes.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return encode(self, input_ids, attention_mask)

    monkeypatch.setattr(XMCForTextClassification, "encode", listen)
    return dtypes


@pytest.mark.parametrize("bf16", [True, False])
def test_all_stages_have_the_precision_of_the_steps(train, precisions, tmp_path, bf16):
    trainer = train(bf16=bf16, level_steps=[2])
    assert set(precisions) == {torch.bfloat16 if bf16 else None}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    precisions.clear()
    assert_predicts_as_saved(trainer, tmp_path)
    assert set(precisions) == {None}


def test_the_kind_of_attention(train, tmp_path):
    options = {"level_steps": [2, 2, 2], "save_steps": 2, "encoder_attn_implementation": "eager"}
    for resume in (None, str(tmp_path / "first" / "checkpoint-2")):
        trainer = train(folder=tmp_path / ("second" if resume else "first"), resume=resume, **options)
        assert trainer.model.encoder.config._attn_implementation == "eager"
    refused("quadratic", train, encoder_attn_implementation="quadratic", error=OSError)


# ---- FSDP: see test_processes.py for trainings ----


@pytest.fixture
def plugin():
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
    )


def test_fsdp_settings_that_are_refused():
    settings = {"fsdp_version": {"fsdp_version": 1}, "cpu_ram_efficient_loading": {"cpu_ram_efficient_loading": True}}
    settings |= {"fsdp_offload_params": {"cpu_offload": True}}
    settings |= {"gradient_checkpointing": {"activation_checkpointing": True}}
    for name, setting in settings.items():
        options = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, **setting}
        refused(name, set_up_plugin, FullyShardedDataParallelPlugin(**options))


def test_shared_embeddings_are_refused():
    options = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
    t5 = AutoModel.from_config(AutoConfig.for_model("t5", **options))
    refused("T5Model", check_encoder, t5)
    check_encoder(t5.encoder)


@pytest.mark.parametrize("setting", ["fsdp", "deepspeed"])
def test_adapters_with_fsdp_and_deepspeed_are_refused(tiny_encoder, few, tmp_path, monkeypatch, plugin, setting):
    original = Trainer.create_accelerator_and_postprocess

    def pretend(self):
        original(self)
        setattr(self, f"is_{setting}_enabled", True)
        monkeypatch.setattr(self.accelerator.state, "fsdp_plugin", plugin, raising=False)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", pretend)
    refused(f"(?i){setting}", XMCTrainer, tiny_encoder, encoder_arguments(tmp_path, encoder_lora_rank=2), few)


def test_what_fsdp_shards(model, plugin):
    set_up_plugin(plugin)
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    choose_modules(plugin, model)
    # Not `BertEmbeddings`, which must not be split: the token embeddings are sharded by themselves.
    assert plugin.transformer_cls_names_to_wrap == ["BertLayer"]
    ignored = [parameter for module in plugin.ignored_modules for parameter in module.parameters()]
    assert [id(parameter) for parameter in ignored] == [id(model.anchor)]
    ShardedEncoder(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}

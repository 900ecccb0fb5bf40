"""FSDP: which of its settings are refused, and what it is told to spread. See test_processes.py for trainings."""

from __future__ import annotations

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import encoder_arguments
from transformers import AutoConfig, AutoModel, Trainer

from hf_xmc import XMCForTextClassification, XMCTrainer
from hf_xmc.training.fsdp import ShardedEncoder, check_encoder, choose_modules, set_up_plugin

REFUSED = {
    "`fsdp_version: 2`": {"fsdp_version": 1},
    "`fsdp_cpu_ram_efficient_loading: false`": {"cpu_ram_efficient_loading": True},
    "`fsdp_offload_params: false`": {"cpu_offload": True},
    "`gradient_checkpointing: true` in the recipe": {"activation_checkpointing": True},
}


@pytest.fixture
def plugin():
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
    )


@pytest.mark.parametrize("way_out", REFUSED)
def test_settings_that_cannot_work_are_refused(way_out):
    options = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, **REFUSED[way_out]}
    with pytest.raises(ValueError, match="FSDP is not supported as it is set") as error:
        set_up_plugin(FullyShardedDataParallelPlugin(**options))
    assert way_out in str(error.value)


def test_models_are_saved_whole(plugin):
    set_up_plugin(plugin)
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"


def test_shared_embeddings_are_refused():
    options = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
    t5 = AutoModel.from_config(AutoConfig.for_model("t5", **options))
    with pytest.raises(
        ValueError, match="cannot spread a T5Model: its embeddings of tokens are shared by `shared` and"
    ):
        check_encoder(t5)
    check_encoder(t5.encoder)


@pytest.mark.parametrize(
    ("setting", "advice"), [("fsdp", "FSDP saves nothing where"), ("deepspeed", "DeepSpeed brings")]
)
def test_adapters_and_deepspeed_are_refused(tiny_encoder, few, tmp_path, monkeypatch, plugin, setting, advice):
    original = Trainer.create_accelerator_and_postprocess

    def pretend(self):
        original(self)
        setattr(self, f"is_{setting}_enabled", True)
        monkeypatch.setattr(self.accelerator.state, "fsdp_plugin", plugin, raising=False)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", pretend)
    with pytest.raises(ValueError, match=advice):
        XMCTrainer(tiny_encoder, encoder_arguments(tmp_path, encoder_lora_rank=2), few)


def test_layers_are_spread_one_by_one_and_heads_not_at_all(tiny_encoder, plugin):
    model = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16)
    choose_modules(plugin, model)
    # Not `BertEmbeddings`, though it is not to be split: the embeddings of tokens are spread by themselves.
    assert plugin.transformer_cls_names_to_wrap == ["BertLayer"]
    assert [own for module in plugin.ignored_modules for own in module.parameters()] == [model.anchor]


def test_the_skeleton_of_an_encoder_has_no_weights(tiny_encoder):
    model = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16)
    skeleton = ShardedEncoder(model)._skeleton
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}

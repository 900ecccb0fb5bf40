"""Tests of hf_xmc.configuration_xmc."""

import json

from transformers import BertConfig

from hf_xmc import XMCConfig


def test_round_trip(tmp_path):
    config = XMCConfig(method="parabel", level_sizes=[4, 60], has_tfidf=True, has_ranker=True, top_k=7, beam_size=3)
    config.save_pretrained(tmp_path)
    loaded = XMCConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    # Names of generation parameters such as `top_k` would be lost if they were not fields.
    assert (loaded.top_k, loaded.beam_size, loaded.level_sizes) == (7, 3, [4, 60])
    assert loaded.encoder_config is None


def test_label_names_stay_out_of_the_file(tmp_path):
    XMCConfig(level_sizes=[1000, 1_000_000]).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["model_type"] == "hf-xmc"
    assert not {"id2label", "label2id", "num_labels"} & set(content)


def test_an_encoder_config_is_nested(tmp_path):
    XMCConfig(encoder_config=BertConfig(hidden_size=48, num_attention_heads=4)).save_pretrained(tmp_path)
    encoder = XMCConfig.from_pretrained(tmp_path).encoder_config
    assert isinstance(encoder, BertConfig) and encoder.hidden_size == 48

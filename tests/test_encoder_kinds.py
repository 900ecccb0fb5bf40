"""Encoders of every kind: they train, are saved and loaded, and predict the same."""

import numpy as np
import pytest
import torch
from conftest import make_documents, make_tokenizer
from encoder_runs import TEXTS, assert_predicts_as_saved, tensors_of
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, GPT2Config, GPT2Model

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
POSITIONS = {"max_position_embeddings": 66}
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16}
# Configuration and default pooling of each kind.
KINDS = {
    "bert": ({**SMALL, **POSITIONS}, "mean"),
    "roberta": ({**SMALL, **POSITIONS}, "mean"),
    "distilbert": ({"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, **POSITIONS}, "mean"),
    "xlm-roberta": ({**SMALL, **POSITIONS}, "mean"),
    "mpnet": ({**SMALL, **POSITIONS}, "mean"),
    "modernbert": ({**SMALL, **POSITIONS}, "mean"),
    "deberta-v2": ({**SMALL, **POSITIONS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "mean"),
    "xlnet": (XLNET, "last"),
    "gpt2": ({"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}, "last"),
    "llama": ({**SMALL, **POSITIONS, "num_key_value_heads": 1}, "last"),
    "t5": ({"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}, "mean"),
}


# Adapters of other kinds are slow tests.
ADAPTED = ("bert", "gpt2", "t5")


def save_encoder(folder, kind, tokenizer):
    special = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    options = {"vocab_size": len(tokenizer), **special, **KINDS[kind][0]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model(kind, **options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def assert_padding_is_ignored(model):
    vectors = model.embed(TEXTS, batch_size=len(TEXTS))
    np.testing.assert_allclose(vectors, [model.embed([text])[0] for text in TEXTS], atol=2e-5)


@pytest.mark.parametrize(
    "kind, rank",
    [(kind, 0) for kind in KINDS]
    + [pytest.param(kind, 2, marks=[] if kind in ADAPTED else pytest.mark.slow) for kind in KINDS],
)
def test_an_encoder_of_every_kind(train, few, tmp_path, kind, rank):
    folder = tmp_path / "encoder"
    save_encoder(folder, kind, make_tokenizer())
    options = {"tree_clustering": "flat", "level_indices": [1], "level_steps": [3], "level_negatives": ["all"]}
    options |= {"model": folder, "data": few.select(range(96)), "save_strategy": "no", "encoder_lora_rank": rank}
    trainer = train(folder=tmp_path / "model", **options)
    assert trainer.model.config.pooling == KINDS[kind][1]
    start, trained = load_file(folder / "model.safetensors"), tensors_of(tmp_path / "model")
    assert any(
        not torch.equal(tensor, start[name.removeprefix("encoder.")])
        for name, tensor in trained.items()
        if name.removeprefix("encoder.") in start
    )
    loaded = assert_predicts_as_saved(trainer, tmp_path / "model")
    assert type(loaded.encoder) is type(trainer.model.encoder)
    assert_padding_is_ignored(loaded)


def test_padding_on_the_left(train, tmp_path):
    """XLNet has no limit of positions, pads on the left, and pools the last token."""
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    save_encoder(tmp_path / "encoder", "xlnet", tokenizer)
    trainer = train(model=tmp_path / "encoder", folder=tmp_path / "model", method="aplc-xlnet")
    assert_padding_is_ignored(assert_predicts_as_saved(trainer, tmp_path / "model", ["heads"]))


def test_an_encoder_without_a_padding_token(train, tmp_path):
    tokenizer = make_tokenizer(plain=True)
    tokenizer.save_pretrained(tmp_path / "gpt")
    special = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=len(tokenizer), **KINDS["gpt2"][0], **special)
    GPT2Model(config).save_pretrained(tmp_path / "gpt")
    trainer = train(model=tmp_path / "gpt", level_steps=[3], folder=tmp_path / "model")
    assert trainer.model.tokenizer.pad_token_id is None and trainer.model.config.pooling == "last"
    # An empty text has no tokens.
    assert_predicts_as_saved(trainer, tmp_path / "model", texts=[*TEXTS, ""])


def test_windows(train, tmp_path):
    rows = make_documents(160, seed=7).map(lambda row: {"text": " ".join([row["text"]] * 4)})
    trainer = train(data=rows, level_steps=[2], encoder_long_text="windows", encoder_max_windows=3)
    assert trainer.model.config.long_text == "windows"
    assert max(len(windows) for windows in trainer.model.tokenize(rows["text"][:20])) == 3

"""Encoders of every kind: each trains, is saved, loaded again and predicts the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import encoder_arguments, make_tokenizer
from encoder_runs import PREDICT_WITH, TEXTS, tensors_of
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from hf_xmc import XMCForTextClassification, XMCTrainer

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
POSITIONS = {"max_position_embeddings": 66}
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16}
# Configuration, and the pooling that suits the kind.
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


@pytest.fixture(scope="module", params=KINDS)
def encoder(request, tmp_path_factory):
    """Kind and folder of a tiny random encoder, with the tokenizer that all kinds share."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), make_tokenizer()
    special = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    options = {"vocab_size": len(tokenizer), **special, **KINDS[request.param][0]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model(request.param, **options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, folder


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapters"])
def test_an_encoder_of_every_kind(encoder, rank, few, tmp_path):
    kind, folder = encoder
    options = {"tree_clustering": "flat", "level_indices": [1], "level_steps": [3], "save_strategy": "no"}
    args = encoder_arguments(tmp_path, encoder_lora_rank=rank, level_negatives=["all"], **options)
    trainer = XMCTrainer(model=folder, args=args, train_dataset=few.select(range(96)))
    assert trainer.model.config.pooling == KINDS[kind][1]
    trainer.train()
    start = load_file(folder / "model.safetensors")
    trained = tensors_of(tmp_path)
    assert any(
        not torch.equal(tensor, start[name.removeprefix("encoder.")])
        for name, tensor in trained.items()
        if name.removeprefix("encoder.") in start
    )
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    assert type(loaded.encoder) is type(trainer.model.encoder)
    for predict_with in PREDICT_WITH:
        expected = trainer.model.predict(TEXTS, predict_with=predict_with)
        assert loaded.predict(TEXTS, predict_with=predict_with) == expected
    # Padding is not seen.
    vectors = loaded.embed(TEXTS, batch_size=len(TEXTS))
    np.testing.assert_allclose(vectors, [loaded.embed([text])[0] for text in TEXTS], atol=2e-5)

"""Training in bfloat16 and the attention that the user chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import encoder_arguments, make_documents

from hf_xmc import XMCForTextClassification, XMCTrainer

TEXTS = make_documents(12, seed=11)["text"][:]


@pytest.fixture
def train(tiny_encoder, tmp_path):
    def run(**options):
        data = make_documents(96, seed=7)
        trainer = XMCTrainer(model=tiny_encoder, args=encoder_arguments(tmp_path, **options), train_dataset=data)
        trainer.train()
        return trainer

    return run


@pytest.fixture
def precisions(monkeypatch):
    """Dtypes in which the encoder was asked about batches, `None` where it was not in mixed precision."""
    found = []
    encode = XMCForTextClassification.encode

    def listen(self, input_ids, attention_mask):
        # Single documents are timed for the card, after the training.
        if len(input_ids) > 1:
            found.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return encode(self, input_ids, attention_mask)

    monkeypatch.setattr(XMCForTextClassification, "encode", listen)
    return found


def test_embedding_in_another_precision(tiny_encoder, precisions):
    model = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16)
    exact = model.embed(TEXTS)
    model.autocast_dtype = torch.bfloat16
    rough = model.embed(TEXTS)
    assert precisions == [None, torch.bfloat16]
    assert rough.dtype == np.float32
    assert not np.array_equal(exact, rough)
    np.testing.assert_allclose(rough, exact, atol=0.02)


@pytest.mark.parametrize("bf16", [True, False])
def test_training_encodes_in_the_precision_of_its_steps(train, precisions, bf16):
    trainer = train(bf16=bf16, level_steps=[2])
    assert set(precisions) == {torch.bfloat16 if bf16 else None}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_after_training_in_bfloat16_the_model_predicts_as_the_saved_one(train, precisions, tmp_path):
    trainer = train(bf16=True, level_steps=[2])
    precisions.clear()
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    for kind in ("ranker", "heads", "both"):
        assert trainer.model.predict(TEXTS, predict_with=kind) == loaded.predict(TEXTS, predict_with=kind)
    assert set(precisions) == {None}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_is_the_one_asked_for(train, tmp_path, implementation):
    trainer = train(level_steps=[2, 2, 2], save_steps=2, encoder_attn_implementation=implementation)
    assert trainer.model.encoder.config._attn_implementation == implementation
    resumed = XMCTrainer(
        model=trainer.args.encoder_name,
        args=encoder_arguments(tmp_path, level_steps=[2, 2, 2], encoder_attn_implementation=implementation),
        train_dataset=make_documents(96, seed=7),
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.model.encoder.config._attn_implementation == implementation


def test_an_attention_that_is_not_there(tiny_encoder, tmp_path):
    arguments = encoder_arguments(tmp_path, encoder_attn_implementation="quadratic")
    with pytest.raises(OSError, match="quadratic"):
        XMCTrainer(model=tiny_encoder, args=arguments, train_dataset=make_documents(96))

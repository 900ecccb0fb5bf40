"""What can go wrong in the training of a model with an encoder: named before work is lost."""

from __future__ import annotations

import pytest
import torch
from conftest import encoder_arguments, make_vectors
from transformers import TrainerCallback

from hf_xmc import XMCForTextClassification, XMCTrainer

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")


def test_heads_that_cannot_predict_are_an_error_before_training(train):
    with pytest.raises(ValueError, match="predict_with"):
        train(level_indices=[1, 2], predict_with="heads")


def test_wrong_number_of_values_for_the_levels(train):
    with pytest.raises(ValueError, match="`level_steps` has 2 values, but 3 levels are trained"):
        train(level_steps=[1, 2])


def test_given_vectors_do_not_go_with_an_encoder(train, few):
    # At prediction there are texts only.
    both = make_vectors(160).remove_columns("labels")
    both = both.add_column("text", few["text"][:]).add_column("labels", few["labels"][:])
    with pytest.raises(ValueError, match="features='vectors'"):
        train(data=both, features="vectors", level_steps=[1])
    assert train(data=both, level_steps=[1]).model.tfidf is not None


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_missing_encoder(name, few, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=rf"The encoder `.*{name}` cannot be loaded"):
        XMCTrainer(model=tmp_path / name, args=encoder_arguments(tmp_path / "model"), train_dataset=few)


def test_a_trained_model_is_no_encoder(encoder_model_folder):
    with pytest.raises(OSError, match="cannot be loaded"):
        XMCForTextClassification.from_encoder(encoder_model_folder)


def test_no_encoder_named(few, tmp_path):
    with pytest.raises(ValueError, match="needs an encoder to start from"):
        XMCTrainer(args=encoder_arguments(tmp_path), train_dataset=few)


def test_texts_longer_than_the_encoder_reads(tiny_encoder, few, tmp_path):
    with pytest.raises(ValueError, match="max_length"):
        XMCTrainer(model=tiny_encoder, args=encoder_arguments(tmp_path, encoder_max_length=100), train_dataset=few)


def test_a_loss_that_is_no_number(train):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5:
                with torch.no_grad():
                    model.head(2).bias.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match=r"nan at step 5 \(level 2/3\).*level_learning_rate"):
        train(level_steps=[4], callbacks=[Break()])


def test_another_optimizer(train):
    with pytest.raises(ValueError, match="(?i)optim=.*adafactor.*not supported"):
        train(optim="adafactor")

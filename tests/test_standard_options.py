"""Standard options of transformers' Trainer in a training of several levels."""

import json
import math

import pytest
import torch
from conftest import make_documents
from encoder_runs import KillAt, Killed, assert_predicts_as_saved
from transformers import AutoModel

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")


def test_standard_options_are_those_of_transformers(train, tmp_path):
    options = {"level_steps": None, "level_learning_rate": None, "level_indices": [2, 3], "logging_steps": 1}
    trainer = train(max_steps=9, learning_rate=2e-3, warmup_steps=1, lr_scheduler_type="cosine", **options)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    # The labels get twice as many steps as the level above.
    assert [entry["level"] for entry in steps] == [2] * 3 + [3] * 6
    rates = [1e-3 * (1 + math.cos(math.pi * max(0, step - 1) / (n - 1))) for n in (3, 6) for step in range(n)]
    assert [entry["learning_rate"] for entry in steps] == pytest.approx(rates)
    assert trainer.args.max_steps == 9 and trainer.state.max_steps == 9
    saved = json.loads((tmp_path / "training_args.json").read_text())
    assert (saved["max_steps"], saved["learning_rate"], saved["lr_scheduler_type"]) == (9, 2e-3, "cosine")


def test_passes_over_the_data(train, tmp_path):
    # 160 documents in batches of 16.
    trainer = train(level_steps=None, num_train_epochs=0.4, level_indices=-1, save_strategy="no")
    assert trainer.state.global_step == 4 and trainer.state.epoch == pytest.approx(0.4)
    assert (trainer.args.num_train_epochs, trainer.args.max_steps) == (0.4, -1)
    assert json.loads((tmp_path / "training_args.json").read_text())["max_steps"] == -1
    # The options are those of the finished model, which is not trained again.
    again = train(resume=True, level_steps=None, num_train_epochs=0.4, level_indices=-1, save_strategy="no")
    assert again.state.global_step == 0


def test_without_a_pass_the_encoder_stays_as_it_is(train, tiny_encoder, tmp_path):
    trainer = train(level_steps=None, num_train_epochs=0)
    original = AutoModel.from_pretrained(tiny_encoder).state_dict()
    for name, weights in trainer.model.encoder.state_dict().items():
        assert torch.equal(weights, original[name])
    assert trainer.state.global_step == 0 and all(head.weight.abs().sum() > 0 for head in trainer.model.heads)
    assert trainer.evaluate(make_documents(50, seed=2))["eval_P@1"] > 0.5 and not list(tmp_path.glob("checkpoint-*"))
    assert_predicts_as_saved(trainer, tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"learning_rate": 2e-3}, {"lr_scheduler_type": "constant"}, {"warmup_steps": 2}, {"max_steps": 5}],
    ids=str,
)
def test_a_checkpoint_of_other_options_is_refused(train, options):
    common = {"level_steps": None, "level_learning_rate": None, "level_indices": -1, "max_steps": 4, "save_steps": 2}
    with pytest.raises(Killed):
        train(callbacks=[KillAt("on_step_end", 3)], **common)
    with pytest.raises(ValueError, match="checkpoint-2"):
        train(resume=True, **{**common, **options})

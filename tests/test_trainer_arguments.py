"""What XMCTrainer takes from Trainer: model_init, hyperparameter search, metrics, optimizers, standard options."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import encoder_arguments, make_documents, make_tokenizer, refused
from datasets import Dataset
from encoder_runs import KillAt, assert_predicts_as_saved, kill
from transformers import AutoModel

from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")


def linear_arguments(folder, **options):
    return XMCTrainingArguments(str(folder), method="xr-linear", disable_tqdm=True, report_to="none", **options)


def search(trainer, space, trials=2):
    return trainer.hyperparameter_search(
        space, lambda metrics: metrics["eval_nDCG@5"], trials, direction="maximize", backend="optuna"
    )


def test_hyperparameter_search_of_a_linear_method(tmp_path):
    trainer = XMCTrainer(
        args=linear_arguments(tmp_path),
        train_dataset=make_documents(200),
        eval_dataset=make_documents(50, seed=3),
        model_init=lambda: None,
    )
    best = search(trainer, lambda trial: {"ranker_C": trial.suggest_categorical("ranker_C", [1e-4, 1.0])})
    assert best.hyperparameters["ranker_C"] in (1e-4, 1.0)
    # Every trial has its own folder, and the model of each can be loaded.
    folders = sorted(tmp_path.glob("run-*"))
    assert len(folders) == 2
    for folder in folders:
        assert XMCForTextClassification.from_pretrained(folder).ranker is not None
    assert not (tmp_path / "config.json").exists()


def test_hyperparameter_search_of_an_encoder(tiny_encoder, few, tmp_path):
    rates, first_weights = [], []

    def model_init(trial):
        if trial is not None:
            rates.append(trial.params["learning_rate"])
        return str(tiny_encoder)

    trainer = XMCTrainer(
        args=encoder_arguments(tmp_path, level_steps=None, level_learning_rate=None, max_steps=3, save_strategy="no"),
        train_dataset=few,
        eval_dataset=make_documents(30, seed=3),
        model_init=model_init,
    )
    best = search(
        trainer,
        lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
            "num_train_epochs": trial.suggest_categorical("num_train_epochs", [1]),
        },
    )
    assert len(rates) == 2 and rates[0] != rates[1]
    assert best.hyperparameters["learning_rate"] in rates
    models = [XMCForTextClassification.from_pretrained(folder) for folder in sorted(tmp_path.glob("run-*"))]
    first_weights = [next(model.encoder.parameters()) for model in models]
    assert not torch.equal(*first_weights)
    # The arguments keep what the user has set.
    assert trainer.args.max_steps == 3 and trainer.args.output_dir == str(tmp_path)


def test_model_init_starts_every_training_anew(tiny_encoder, few, tmp_path):
    calls = []
    trainer = XMCTrainer(
        args=encoder_arguments(tmp_path, level_steps=None, max_steps=2, save_strategy="no", overwrite=True),
        train_dataset=few,
        model_init=lambda: calls.append(1) or str(tiny_encoder),
    )
    trainer.train()
    first = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert len(calls) == 3
    assert all(torch.equal(tensor, first[name]) for name, tensor in trainer.model.state_dict().items())


def test_model_and_model_init(tmp_path):
    refused("model_init", XMCTrainer, "an-encoder", linear_arguments(tmp_path), model_init=lambda: None)


def test_compute_metrics(model_folder, tmp_path):
    seen = []

    def compute(prediction):
        seen.append(prediction)
        (_, indices), truth = prediction.predictions, prediction.label_ids
        return {"hits": float(np.mean([first in row for first, row in zip(indices[:, 0], truth)]))}

    model = XMCForTextClassification.from_pretrained(model_folder)
    data = make_documents(40, seed=4)
    trainer = XMCTrainer(model, linear_arguments(tmp_path), eval_dataset=data, compute_metrics=compute)
    results = trainer.evaluate()
    assert results["eval_hits"] == pytest.approx(results["eval_P@1"])
    assert seen[0].predictions[0].shape[0] == seen[0].label_ids.shape[0] == 40


def test_the_length_of_the_texts(tiny_encoder, tmp_path):
    """95 of 100 texts fit; an option and a model win."""
    words = [10] * 94 + [20] + [60] * 5
    data = Dataset.from_dict({"text": ["word1 " * count for count in words], "labels": [["a"], ["b"]] * 50})
    options = encoder_arguments(tmp_path, encoder_max_length=None)
    trainer = XMCTrainer(str(tiny_encoder), options, train_dataset=data)
    longest = np.quantile([len(own[0]) for own in trainer.model.tokenize([text[:500] for text in data["text"]])], 0.95)
    assert trainer.model.config.max_length % 8 == 0 and longest <= trainer.model.config.max_length < longest + 8
    data = data.map(lambda row: {"text": row["text"] * 50})
    limit = XMCForTextClassification.from_encoder(tiny_encoder).config.max_length
    assert XMCTrainer(str(tiny_encoder), options, train_dataset=data).model.config.max_length == limit
    assert XMCTrainer(str(tiny_encoder), encoder_arguments(tmp_path), data).model.config.max_length == 16
    given = XMCForTextClassification.from_encoder(tiny_encoder, max_length=12)
    assert XMCTrainer(given, options, train_dataset=data).model.config.max_length == 12


def test_processing_class(tiny_encoder, tmp_path):
    tokenizer = make_tokenizer()
    trainer = XMCTrainer(str(tiny_encoder), encoder_arguments(tmp_path), processing_class=tokenizer)
    assert trainer.model.tokenizer is tokenizer
    refused("processing_class", XMCTrainer, None, linear_arguments(tmp_path), processing_class=tokenizer)


def test_an_optimizer_that_lacks_the_heads(tiny_encoder, few, tmp_path):
    model = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16)
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
    args = encoder_arguments(tmp_path, level_steps=None, max_steps=1, save_strategy="no")
    trainer = XMCTrainer(model, args, few, optimizers=(optimizer, None))
    refused("optimizers", trainer.train)


@pytest.mark.parametrize("name", ["data_collator", "compute_loss_func", "preprocess_logits_for_metrics", "colour"])
def test_arguments_that_are_not_taken(name, tmp_path):
    refused(name, XMCTrainer, None, linear_arguments(tmp_path), error=TypeError, **{name: print})


# ---- Standard options in a training of several levels ----


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
    kill(train, KillAt("on_step_end", 3), **common)
    refused("checkpoint-2", train, resume=True, **{**common, **options})

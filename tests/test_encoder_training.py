"""Training of models with an encoder: learning, saving, levels, early stopping."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import SMALL_METHODS, encoder_arguments, make_documents
from encoder_runs import (
    KEEP_BEST,
    PREDICT_WITH,
    TEXTS,
    assert_same_model,
    levels_of_steps,
    rank_best,
    tensors_of,
)
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, pipeline

from hf_xmc import XMCForTextClassification, XMCTrainer
from hf_xmc.cli.main import main
from hf_xmc.training.presets import ENCODER_METHODS

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")


# ---- Learning, saving, predicting ----


@pytest.mark.parametrize("predict_with, least", [("ranker", 0.9), ("heads", 0.3), ("both", 0.9)])
def test_learns(encoder_model_folder, tmp_path, predict_with, least):
    # One of 60 labels at random is right for one document in thirty.
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    model.config.predict_with = predict_with
    trainer = XMCTrainer(model=model, args=encoder_arguments(tmp_path), eval_dataset=make_documents(200, seed=1))
    assert trainer.evaluate()["eval_P@1"] > least


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
def test_fine_tuning_makes_the_heads_better(train, loss, tmp_path):
    data, evaluation = make_documents(400, seed=12), make_documents(200, seed=1)
    results = []
    for steps in (0, 20):
        options = {"level_steps": [steps], "per_device_train_batch_size": 32, "level_loss": loss}
        trainer = train(folder=tmp_path / str(steps), data=data, predict_with="heads", save_strategy="no", **options)
        results.append(trainer.evaluate(evaluation)["eval_R@5"])
    frozen, tuned = results
    assert tuned > frozen + 0.05


def test_every_method_with_an_encoder_is_tested():
    assert set(SMALL_METHODS) == set(ENCODER_METHODS)


@pytest.mark.parametrize("method", ENCODER_METHODS)
def test_what_is_saved_predicts_the_same(train, tmp_path, method):
    trainer = train(method=method, predict_with="both", eval_dataset=make_documents(30, seed=2))
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "copy")
    copy = XMCForTextClassification.from_pretrained(tmp_path / "copy")
    # The heads of X-Transformer know clusters only.
    for kind in PREDICT_WITH if method != "x-transformer" else ["ranker"]:
        expected = trainer.model.predict(TEXTS, predict_with=kind)
        assert loaded.predict(TEXTS, predict_with=kind) == expected
        assert copy.predict(TEXTS, predict_with=kind) == expected
    assert loaded.config.head_levels == SMALL_METHODS[method]["level_indices"]
    assert loaded.config.trained_levels == len(loaded.config.head_levels) == len(loaded.heads)
    assert_same_model(tmp_path, tmp_path / "copy")


@pytest.mark.parametrize("method", ENCODER_METHODS)
def test_pipeline(train, tmp_path, method):
    expected = train(method=method).model.predict(TEXTS, top_k=3)
    tag = pipeline("extreme-text-classification", model=str(tmp_path))
    for batch_size in (1, 5):
        found = tag(TEXTS, top_k=3, batch_size=batch_size)
        for row, pairs in zip(found, expected, strict=True):
            assert [entry["label"] for entry in row] == [label for label, _ in pairs]
            assert [entry["score"] for entry in row] == pytest.approx([score for _, score in pairs], abs=1e-5)
    assert len(tag("", top_k=3)) == 3


def test_commands(encoder_model_folder, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    output = tmp_path / "labels.jsonl"
    arguments = [str(encoder_model_folder), str(tmp_path / "texts.txt"), "--output", str(output), "--top-k", "3"]
    assert main(["predict", *arguments]) == 0
    found = [json.loads(line)["labels"] for line in output.read_text().splitlines()]
    expected = XMCForTextClassification.from_pretrained(encoder_model_folder).predict(TEXTS, top_k=3)
    assert [[entry["label"] for entry in row] for row in found] == [[label for label, _ in row] for row in expected]


def test_the_command_that_trains(tiny_encoder, tmp_path, few):
    few.to_parquet(tmp_path / "train.parquet")
    options = vars(encoder_arguments(tmp_path / "unused"))
    names = ["method", "tree_clustering", "tree_branching", "tree_max_leaf_size", "tree_max_depth", "use_cpu"]
    recipe = {name: options[name] for name in names} | {
        "dataset": str(tmp_path / "train.parquet"),
        "encoder_name": str(tiny_encoder),
        "encoder_max_length": 16,
        "output_dir": str(tmp_path / "model"),
        "level_steps": [1, 0, 2],
        "level_indices": [1, 2, 3],
        "level_negatives": "tfn",
        "disable_tqdm": True,
        "report_to": "none",
    }
    (tmp_path / "recipe.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in recipe.items()))
    assert main(["train", "--config", str(tmp_path / "recipe.yaml")]) == 0
    saved = json.loads((tmp_path / "model" / "training_args.json").read_text())
    assert (saved["level_steps"], saved["level_negatives"]) == ([1, 0, 2], "tfn")
    assert XMCForTextClassification.from_pretrained(tmp_path / "model").config.head_ranking == "path"


def test_logs(train):
    trainer = train(level_steps=[3, 2, 4], logging_steps=1, warmup_steps=0.0)
    history = trainer.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    assert [entry["level"] for entry in steps] == [1] * 3 + [2] * 2 + [3] * 4
    assert [entry["step"] for entry in steps] == list(range(1, 10))
    assert all(np.isfinite(entry["loss"]) and entry["loss"] > 0 for entry in steps)
    assert all(entry["documents_per_second"] > 0 for entry in steps)
    # One step rises to the highest rate, from which the others fall to 0.
    rates = [1e-3 * min(1.0, (n - i) / max(1, n - 1)) for n in (3, 2, 4) for i in range(n)]
    assert [entry["learning_rate"] for entry in steps] == pytest.approx(rates)
    assert [entry["head_learning_rate"] for entry in steps] == pytest.approx([10 * rate for rate in rates])
    stages = {name.removesuffix("_seconds") for entry in history for name in entry if name.endswith("_seconds")}
    assert {"labels", "features", "tree", "tokens", "embed", "ranker", "save"} < stages
    assert {f"level {level} {stage}" for level in (1, 2, 3) for stage in ("shortlist", "bootstrap")} < stages


def test_gradient_accumulation_is_a_larger_batch(train, tiny_encoder, tmp_path):
    encoder = tmp_path / "encoder"
    shutil.copytree(tiny_encoder, encoder)
    config = json.loads((encoder / "config.json").read_text())
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (encoder / "config.json").write_text(json.dumps(config | no_dropout))
    found = []
    for size, accumulated in ((16, 1), (4, 4)):
        trainer = train(
            folder=tmp_path / str(size),
            model=encoder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            train_sampling_strategy="sequential",
            level_dropout=0.0,
            save_strategy="no",
            predict_with="heads",
        )
        assert trainer.state.global_step == 12
        found.append(tensors_of(tmp_path / str(size)))
    start = load_file(encoder / "model.safetensors")
    for name, expected in found[0].items():
        # Rounding may turn the sign of a tiny gradient, and with it a step of Adam: single numbers may differ.
        moved = expected - start.get(name.removeprefix("encoder."), torch.zeros(()))
        assert (found[1][name] - expected).norm() <= 0.02 * moved.norm() + 1e-4, name
    assert not torch.equal(found[0]["encoder.embeddings.LayerNorm.bias"], start["embeddings.LayerNorm.bias"])


# ---- Steps, levels, stopping ----


def test_a_frozen_encoder(train, tiny_encoder, tmp_path):
    trainer = train(level_epochs=[0], level_steps=None, eval_dataset=make_documents(50, seed=2))
    assert trainer.state.global_step == 0
    start = XMCForTextClassification.from_encoder(tiny_encoder, max_length=16).encoder.state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in trainer.model.encoder.state_dict().items())
    for kind in PREDICT_WITH:
        assert XMCForTextClassification.from_pretrained(tmp_path).predict(
            TEXTS, predict_with=kind
        ) == trainer.model.predict(TEXTS, predict_with=kind)
    assert trainer.evaluate()["eval_P@1"] > 0.5
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("steps", [[0, 0, 3], [3, 0, 2], [2, 2, 0], [0, 3, 0]], ids=str)
def test_levels_without_steps(train, steps, tmp_path):
    trainer = train(level_steps=steps, logging_steps=1)
    assert levels_of_steps(trainer) == [level for level, number in enumerate(steps, start=1) for _ in range(number)]
    assert trainer.model.config.trained_levels == 3
    assert all(head.weight.any() for head in trainer.model.heads)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == trainer.model.predict(TEXTS)


@pytest.mark.parametrize(
    "options, levels, sizes",
    [
        ({"level_indices": [1, 3]}, [1, 3], [4, 60]),
        ({"level_indices": None, "level_negatives": None}, [3], [60]),  # what is chosen where nothing is said
    ],
    ids=str,
)
def test_some_levels_only(train, tmp_path, options, levels, sizes):
    trainer = train(level_steps=[2], **options)
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    assert loaded.config.head_levels == levels and [len(head.bias) for head in loaded.heads] == sizes
    assert loaded.predict(TEXTS, predict_with="heads") == trainer.model.predict(TEXTS, predict_with="heads")


def test_levels_above_the_labels_leave_prediction_to_the_ranker(train, tmp_path):
    trainer = train(level_steps=[2], level_indices=[1, 2], eval_dataset=make_documents(20, seed=2))
    assert trainer.model.config.predict_with == "ranker" and trainer.model.config.head_levels == [1, 2]
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == trainer.model.predict(TEXTS)
    with pytest.raises(ValueError, match="no trained head for its labels"):
        trainer.model.predict(TEXTS, predict_with="heads")


@pytest.mark.parametrize(
    "eval_steps, ends",
    [
        (2, [4, 8, 12]),  # within each level the second evaluation is no better
        (3, [6, 12, 18]),  # it comes with the last step of each level
    ],
)
def test_early_stopping_ends_the_level_and_goes_on(train, eval_steps, ends):
    # Nothing moves, and so nothing gets better.
    trainer = train(
        level_steps=[6],
        level_learning_rate=[0.0],
        level_head_learning_rate=[0.0],
        eval_strategy="steps",
        eval_steps=eval_steps,
        metric_for_best_model="nDCG@5",
        logging_steps=1,
        save_strategy="no",
        eval_dataset=make_documents(30, seed=2),
        callbacks=[EarlyStoppingCallback(1)],
    )
    expected = [level for level, end in enumerate(ends, start=1) for _ in range(end - ([0, *ends])[level - 1])]
    assert levels_of_steps(trainer) == expected
    assert trainer.state.global_step == ends[-1]
    assert trainer.model.config.trained_levels == 3 and trainer.model.ranker is not None


@pytest.mark.parametrize("steps, best", [([2, 2, 6], 8), ([2, 6, 0], 4)], ids=str)
def test_the_best_model_of_the_last_level_is_kept(train, tmp_path, monkeypatch, steps, best):
    rank_best(monkeypatch, [2, best])
    trainer = train(level_steps=steps, **KEEP_BEST)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    kept, final = tensors_of(tmp_path / f"checkpoint-{best}"), tensors_of(tmp_path)
    last = tensors_of(max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])))
    for name in kept:
        if name.startswith(("encoder.", "heads.0")):
            assert torch.equal(kept[name], final[name])
    assert not torch.equal(last["encoder.embeddings.LayerNorm.bias"], final["encoder.embeddings.LayerNorm.bias"])
    # What the trainer holds is what it saved.
    assert all(torch.equal(final[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_evaluation_between_the_steps_measures_the_level_at_work(train):
    trainer = train(
        level_steps=[2],
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=make_documents(40, seed=2),
        save_strategy="no",
    )
    measured = [entry for entry in trainer.state.log_history if "eval_P@1" in entry]
    assert [entry["step"] for entry in measured] == [2, 4, 6, 6]
    # Four nodes are easier to tell apart than sixty labels.
    assert measured[0]["eval_R@5"] == 1 and measured[2]["eval_R@5"] < 1

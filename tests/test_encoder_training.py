"""Training with an encoder: learning, saving, levels, early stopping, ranker and heads, errors."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import SMALL_METHODS, THREE_LEVELS, encoder_arguments, make_documents, make_vectors, refused
from datasets import Dataset
from encoder_runs import (
    KEEP_BEST,
    PREDICT_WITH,
    TEXTS,
    KillAfter,
    assert_predicts_as_saved,
    assert_same_model,
    levels_of_steps,
    rank_best,
    tensors_of,
)
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback, pipeline

from hf_xmc import LabelTree, XMCForTextClassification, XMCTrainer
from hf_xmc.cli.main import main
from hf_xmc.training.head_prior import NodeVectors
from hf_xmc.training.level_data import LevelCollator
from hf_xmc.training.presets import ENCODER_METHODS

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

EVALUATION = make_documents(30, seed=2)


# ---- Learning, saving, predicting ----


@pytest.mark.parametrize("predict_with, least", [("ranker", 0.9), ("heads", 0.3), ("all", 0.85)])
def test_learns(encoder_model_folder, tmp_path, predict_with, least):
    # One of 60 labels at random is right for one document in thirty.
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    model.config.predict_with = predict_with
    trainer = XMCTrainer(model=model, args=encoder_arguments(tmp_path), eval_dataset=make_documents(200, seed=1))
    assert trainer.evaluate()["eval_P@1"] > least


@pytest.mark.parametrize(
    "options, steps",
    [
        ({"per_device_train_batch_size": 32, "level_loss": "bce", "predict_with": "heads"}, 20),
        ({"per_device_train_batch_size": 32, "level_loss": "squared_hinge", "predict_with": "heads"}, 20),
        ({"method": "lightxml", "level_dropout": 0.1}, 45),
        ({"method": "aplc-xlnet", "level_dropout": 0.1}, 45),
    ],
    ids=str,
)
def test_fine_tuning_improves_the_heads(train, options, steps, tmp_path):
    options |= {"data": make_documents(400, seed=12), "save_strategy": "no"}
    frozen, tuned = (train(folder=tmp_path / str(number), level_steps=[number], **options) for number in (0, steps))
    evaluation = make_documents(200, seed=1)
    assert tuned.evaluate(evaluation)["eval_R@5"] > frozen.evaluate(evaluation)["eval_R@5"] + 0.05


def test_heads_start_at_the_vectors_of_their_labels(train):
    trainer = train(level_steps=[0], level_indices=[-1], predict_with="heads")
    model = trainer.model
    vectors, texts = model.embed(trainer.train_dataset["text"]), model.embed(model.labels.readable_texts())
    targets = model.labels.encode(trainer.train_dataset)
    prior = NodeVectors(model.label_tree, model.label_tree.depth, vectors, targets, texts).rows
    rows = model.head(model.label_tree.depth).weight.detach().numpy()
    cosines = (rows * prior).sum(axis=1) / np.linalg.norm(rows, axis=1)
    assert cosines.mean() > 0.9


@pytest.mark.parametrize("method", ENCODER_METHODS)
def test_a_saved_model_predicts_the_same(train, tmp_path, method):
    trainer = train(method=method, predict_with="all", eval_dataset=EVALUATION)
    # The heads of X-Transformer score clusters only.
    loaded = assert_predicts_as_saved(trainer, tmp_path, PREDICT_WITH if method != "x-transformer" else ["ranker"])
    loaded.save_pretrained(tmp_path / "copy")
    assert_same_model(tmp_path, tmp_path / "copy")
    assert loaded.config.head_levels == SMALL_METHODS[method]["level_indices"]
    assert loaded.config.trained_levels == len(loaded.config.head_levels) == len(loaded.heads)
    tag = pipeline("extreme-text-classification", model=str(tmp_path))
    for batch_size in (1, 5):
        for row, expected in zip(tag(TEXTS, top_k=3, batch_size=batch_size), loaded.predict(TEXTS, top_k=3)):
            assert [entry["label"] for entry in row] == [label for label, _ in expected]
            assert [entry["score"] for entry in row] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert len(tag("", top_k=3)) == 3


def test_the_train_command(tiny_encoder, tmp_path, few):
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
    assert saved["level_steps"] == [1, 0, 2] and saved["level_negatives"] == "tfn"
    assert XMCForTextClassification.from_pretrained(tmp_path / "model").config.head_ranking == "path"


def test_logs(train):
    trainer = train(level_steps=[3, 2, 4], logging_steps=1)
    history = trainer.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    assert [entry["level"] for entry in steps] == [1] * 3 + [2] * 2 + [3] * 4
    assert [entry["step"] for entry in steps] == list(range(1, 10))
    assert all(entry["loss"] > 0 and entry["documents_per_second"] > 0 for entry in steps)
    rates = np.array([entry["learning_rate"] for entry in steps])
    np.testing.assert_allclose([entry["head_learning_rate"] for entry in steps], 10 * rates)
    assert rates.max() == pytest.approx(1e-3) and (np.diff(rates)[[6, 7]] < 0).all()
    stages = {name.removesuffix("_seconds") for entry in history for name in entry if name.endswith("_seconds")}
    assert {"labels", "features", "tree", "tokens", "embed", "ranker", "save"} < stages
    assert {f"level {level} {stage}" for level in (1, 2, 3) for stage in ("shortlist", "bootstrap")} < stages


def test_gradient_accumulation_is_a_larger_batch(train, tiny_encoder, tmp_path):
    encoder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (encoder / "config.json").write_text(json.dumps(config | no_dropout))
    options = {"train_sampling_strategy": "sequential", "level_dropout": 0.0, "predict_with": "heads"}
    found = []
    for size, accumulated in ((16, 1), (4, 4)):
        options |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        trainer = train(folder=tmp_path / str(size), model=encoder, save_strategy="no", **options)
        assert trainer.state.global_step == 12
        found.append(tensors_of(tmp_path / str(size)))
    start = load_file(encoder / "model.safetensors")
    for name, expected in found[0].items():
        # Rounding may change the sign of a tiny gradient, and with it a step of Adam: single numbers may differ.
        moved = expected - start.get(name.removeprefix("encoder."), torch.zeros(()))
        assert (found[1][name] - expected).norm() <= 0.02 * moved.norm() + 1e-4, name
    assert not torch.equal(found[0]["encoder.embeddings.LayerNorm.bias"], start["embeddings.LayerNorm.bias"])


# ---- Steps, levels, stopping ----


@pytest.mark.parametrize("steps", [[3, 0, 2], [0, 3, 0]], ids=str)
def test_levels_without_steps(train, steps, tmp_path):
    trainer = train(level_steps=steps, logging_steps=1)
    assert levels_of_steps(trainer) == [level for level, number in enumerate(steps, start=1) for _ in range(number)]
    assert trainer.model.config.trained_levels == 3
    assert all(head.weight.any() for head in trainer.model.heads)
    assert_predicts_as_saved(trainer, tmp_path)


@pytest.mark.parametrize(
    "options, levels",
    [
        ({"level_indices": [1, 3]}, [1, 3]),
        ({"level_indices": None, "level_negatives": None}, [3]),
        ({"level_indices": [1, 2]}, [1, 2]),
    ],
    ids=str,
)
def test_some_levels_only(train, tmp_path, options, levels):
    trainer = train(level_steps=[2], eval_dataset=EVALUATION, **options)
    loaded = assert_predicts_as_saved(trainer, tmp_path, PREDICT_WITH if 3 in levels else ["ranker", "all"])
    assert loaded.config.head_levels == levels
    assert [len(head.bias) for head in loaded.heads] == [(4, 16, 60)[level - 1] for level in levels]
    if 3 not in levels:
        assert "heads" not in loaded.scorer.parts
        refused("head", loaded.predict, TEXTS, predict_with="heads")


# Within each level the second evaluation is not better; or it comes with the last step of each level.
@pytest.mark.parametrize("eval_steps, ends", [(2, [4, 8, 12]), (3, [6, 12, 18])])
def test_early_stopping_ends_the_level(train, eval_steps, ends):
    options = {"level_learning_rate": [0.0], "level_head_learning_rate": [0.0], "metric_for_best_model": "nDCG@5"}
    options |= {"eval_strategy": "steps", "eval_steps": eval_steps, "logging_steps": 1, "save_strategy": "no"}
    trainer = train(level_steps=[6], eval_dataset=EVALUATION, callbacks=[EarlyStoppingCallback(1)], **options)
    assert levels_of_steps(trainer) == [level for level in (1, 2, 3) for _ in range(ends[0])]
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
    assert all(torch.equal(final[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_evaluation_between_steps_measures_the_current_level(train):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    trainer = train(level_steps=[2], eval_dataset={"a": make_documents(40, seed=2), "b": EVALUATION}, **options)
    measured = [entry for entry in trainer.state.log_history if "eval_a_P@1" in entry]
    assert [entry["step"] for entry in measured] == [2, 4, 6, 6]
    # Four nodes are easier to tell apart than sixty labels.
    assert measured[0]["eval_a_R@5"] == 1 and measured[2]["eval_a_R@5"] < 1
    names = {name for entry in trainer.state.log_history for name in entry}
    assert {"eval_b_P@1", "last scorer_seconds"} < names


# ---- Ranker and heads ----


def test_refined_tree(train, tmp_path):
    trainer = train(refine_tree=True)
    loaded = assert_predicts_as_saved(trainer, tmp_path)
    assert loaded.ranker.tree == trainer.model.ranker.tree != loaded.label_tree == trainer.model.label_tree
    assert trainer.evaluate(EVALUATION)["eval_P@1"] > 0.5


def test_heads_alone(train, tmp_path):
    trainer = train(predict_with="heads", callbacks=[KillAfter("ranker")])
    assert trainer.model.ranker is None and not (tmp_path / "ranker.safetensors").exists()
    loaded = assert_predicts_as_saved(trainer, tmp_path, ["heads"])
    assert loaded.config.predict_with == "heads"
    refused("ranker", loaded.predict, TEXTS, predict_with="ranker")
    assert trainer.evaluate(make_documents(50, seed=2))["eval_P@1"] > 0.1


def test_the_last_scorer_joins_all_parts(train, tmp_path):
    # With so few terms TF-IDF alone cannot tell the labels apart.
    trainer = train(level_steps=[10], tfidf_max_features=12, eval_dataset=make_documents(250, seed=2))
    model = XMCForTextClassification.from_pretrained(tmp_path)
    assert model.scorer.num_documents == 250 and {"ranker", "heads", "centroid_vector"} < set(model.scorer.parts)
    (logged,) = (entry for entry in trainer.state.log_history if "last scorer_seconds" in entry)
    assert logged["documents"] == 250
    results = {}
    for kind in ("all", "ranker", "heads"):
        trainer.model.config.predict_with = kind
        results[kind] = trainer.evaluate(make_documents(200, seed=3))["eval_nDCG@5"]
    assert results["all"] > max(results["ranker"], results["heads"])


@pytest.fixture
def seen(monkeypatch):
    """The numbers of the documents in the batches of a training."""
    numbers, forward = [], LevelCollator.__call__

    def watched(self, documents):
        numbers.extend(document["document"] for document in documents)
        return forward(self, documents)

    monkeypatch.setattr(LevelCollator, "__call__", watched)
    return numbers


def test_fine_tuning_does_not_see_the_documents_held_out(train, seen):
    options = {"level_steps": [1, 1, 30], "per_device_train_batch_size": 64, "save_strategy": "no"}
    trainer = train(data=make_documents(2000), **options)
    assert trainer.model.scorer.num_documents == 200
    assert max(seen) == 1799 and trainer.model.labels.num_documents == 2000


def test_each_pass_has_all_documents_in_another_order(train, seen):
    train(level_indices=[1], level_negatives=["all"], level_steps=[20], save_strategy="no", predict_with="ranker")
    first, second = seen[:160], seen[160:320]
    assert sorted(first) == sorted(second) == list(range(160)) and first != second


def test_gradients_of_heads_and_encoder_are_clipped_apart(train):
    norms = {"heads": [], "encoder": []}

    class Read(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradients = {name: own.grad for name, own in model.named_parameters() if own.grad is not None}
            for part, values in norms.items():
                own = [gradient.norm() for name, gradient in gradients.items() if name.startswith(part)]
                values.append(torch.stack(own).norm().item())

    train(callbacks=[Read()], level_steps=[1], save_strategy="no", max_grad_norm=1e-4)
    for values in norms.values():
        assert values == pytest.approx([1e-4] * 3, rel=0.02)


@pytest.mark.parametrize("head_ranking", ["leaf", "path"])
def test_the_score_of_both_is_the_weighted_mean(encoder_model_folder, head_ranking):
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    model.config.beam_size, model.config.heads_weight, model.config.head_ranking = 0, 0.3, head_ranking
    ranked, own, both = (
        [dict(row) for row in model.predict(TEXTS, top_k=60, predict_with=kind)]
        for kind in ("ranker", "heads", "both")
    )
    for document in range(len(TEXTS)):
        assert len(both[document]) == 60
        for label, score in both[document].items():
            assert score == pytest.approx(0.7 * ranked[document][label] + 0.3 * own[document][label], abs=1e-5)


def test_embedding_scale_and_cache(train, tmp_path, monkeypatch):
    calls, embed = [], XMCForTextClassification.embed
    monkeypatch.setattr(
        XMCForTextClassification, "embed", lambda self, *rest: calls.append(len(rest[0])) or embed(self, *rest)
    )
    for run in ("first", "second"):
        options = {"embedding_scale": 3.0, "embedding_cache": str(tmp_path / "cache")}
        trainer = train(folder=tmp_path / run, level_steps=[2], **options)
    # Before each level and for the ranker; the second run finds all. Single documents are timed for the model card.
    assert [count for count in calls if count == 160] == [160] * 4
    assert_same_model(tmp_path / "first", tmp_path / "second")
    features = trainer.model.featurize(TEXTS)
    assert np.allclose(np.linalg.norm(trainer.model.ranker_features(features).dense, axis=1), 3, atol=1e-4)


# ---- Data ----


@pytest.mark.parametrize("count", [1, 3])
def test_very_few_labels(train, count):
    words = [f"topic{label:02d}" for label in range(count)]
    rows = [[words[i % count]] for i in range(40)]
    data = Dataset.from_dict({"text": [" ".join([*row, "word1"]) for row in rows], "labels": rows})
    trainer = train(data=data, level_indices=None, level_steps=[2], eval_dataset=data, tfidf_min_df=1)
    assert trainer.evaluate()["eval_P@1"] == 1
    for kind in PREDICT_WITH:
        assert {label for label, _ in trainer.model.predict(["topic00"], predict_with=kind)[0]} == set(words)


def test_documents_without_labels_or_text(train):
    rows = make_documents(60, seed=4)
    rows = Dataset.from_dict({"text": [*rows["text"], "", "word1"], "labels": [*rows["labels"], ["label 03"], []]})
    trainer = train(data=rows, level_steps=[8], level_settings={"cost_sensitive": True})
    assert len(trainer.model.predict(["", "topic07"])[0]) == 10


@pytest.mark.parametrize("fits", [True, False])
def test_a_given_tree(train, tiny_encoder, fits):
    tree = LabelTree.from_parents([[0, 0], np.arange(60 if fits else 7) % 2])
    model = XMCForTextClassification.from_encoder(tiny_encoder, label_tree=tree, max_length=16)
    if fits:
        assert train(model=model, level_indices=[1, 2], level_steps=[2]).model.label_tree is tree
    else:
        refused("7 labels", train, model=model)


# ---- Errors ----


@pytest.mark.parametrize(
    "options, name",
    [
        ({"level_indices": [1, 2], "predict_with": "heads"}, "predict_with"),
        ({"level_steps": [1, 2]}, "level_steps"),
        ({"encoder_max_length": 100}, "max_length"),
        ({"optim": "adafactor"}, "optim"),
        ({"model": None}, "encoder"),
        ({"method": "aplc-xlnet", **THREE_LEVELS, "level_indices": [2, 3]}, "tree_clustering"),
        ({"method": "aplc-xlnet", "level_indices": [1]}, "predict_with"),
        ({"method": "aplc-xlnet", "level_negatives": ["dynamic"]}, "negatives"),
    ],
    ids=str,
)
def test_errors_before_training(train, options, name):
    refused(name, train, **options)


def test_vectors_beside_an_encoder(train, few):
    # Only texts can be embedded at prediction.
    both = make_vectors(160).remove_columns("labels")
    both = both.add_column("text", few["text"][:]).add_column("labels", few["labels"][:])
    refused("features", train, data=both, features="vectors", level_steps=[1])
    assert train(data=both, level_steps=[1]).model.tfidf is not None


def test_a_missing_encoder(train, encoder_model_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        refused(name, train, model=tmp_path / name, folder=tmp_path / "model", error=OSError)
    refused(encoder_model_folder.name, XMCForTextClassification.from_encoder, encoder_model_folder, error=OSError)


def test_a_loss_that_is_not_finite(train):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5:
                with torch.no_grad():
                    model.head(2).bias.fill_(float("nan"))

    refused(r"step 5 \(level 2/3\)", train, level_steps=[4], callbacks=[Break()], error=FloatingPointError)

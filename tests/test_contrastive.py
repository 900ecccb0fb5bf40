"""Fine-tuning on label texts: its loss (equation 15), the drawn positives, training and resuming."""

import logging
from functools import partial

import numpy as np
import oracles
import pytest
import torch
from conftest import TOPICS, make_documents, refused, refused_each
from encoder_runs import KillAfter, KillAt, assert_predicts_as_saved, assert_same_model, kill, tensors_of
from scipy.sparse import csr_matrix
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_xmc import Labels, XMCTrainingArguments
from hf_xmc.inference.predict import evaluate_model
from hf_xmc.training.contrastive import LabelTextCollator, batch_loss, decoupled_softmax, draw_positives

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")

LABELS, DIMENSIONS = 7, 5
OPTIONS = {"level_objective": "label_texts", "label_texts": TOPICS, "per_device_train_batch_size": 32}
# Two passes of five steps, a checkpoint within the second one.
RESUMED = {**OPTIONS, "level_steps": [10], "save_steps": 2}


def problem(seed=0, documents=6):
    """Vectors of documents and labels, lists of true labels (the first document has none), and a drawn one of each."""
    rng = np.random.default_rng(seed)
    vectors, texts = (rng.normal(size=(count, DIMENSIONS)) for count in (documents, LABELS))
    vectors, texts = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (vectors, texts))
    truth = [sorted(rng.choice(LABELS, size=rng.integers(1, 4), replace=False).tolist()) for _ in vectors]
    truth[0], truth[1], truth[2] = [], [2, 4], [2, 5]
    drawn = [int(rng.choice(true)) if true else -1 for true in truth]
    drawn[1] = drawn[2] = 2  # the same label for two documents
    return vectors, texts, truth, drawn


def indicator(truth):
    matrix = np.zeros((len(truth), LABELS), dtype=np.float32)
    for row, true in enumerate(truth):
        matrix[row, true] = 1
    return csr_matrix(matrix)


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient(seed):
    vectors, texts, truth, drawn = problem(seed)
    # Of two processes, both of which have read label 2.
    read = np.array([label for label in [*sorted(set(drawn) - {-1, 6}), 6, 2]])
    positives = [[label] if label >= 0 else [] for label in drawn]
    own, own_texts = torch.tensor(vectors, requires_grad=True), torch.tensor(texts, requires_grad=True)
    loss = batch_loss(own, own_texts[read], read, np.array(drawn), indicator(truth))
    loss.backward()
    assert loss.item() == pytest.approx(oracles.pair_loss(vectors, texts, read, positives, truth), rel=1e-9)
    for gradient, parts in ((own.grad, (vectors, 0)), (own_texts.grad, (texts, 1))):
        array, position = parts
        for place in np.ndindex(array.shape):
            values = []
            for shift in (1e-6, -1e-6):
                moved = [vectors.copy(), texts.copy()]
                moved[position][place] += shift
                values.append(oracles.pair_loss(*moved, read, positives, truth))
            assert gradient[place].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-5)


def test_several_positives_of_a_document():
    vectors, texts, truth, _ = problem(4)
    scores = torch.tensor(vectors @ texts.T / 0.05)
    true = torch.tensor(indicator(truth).toarray() > 0)
    loss = decoupled_softmax(scores, true, true)
    assert loss.item() == pytest.approx(oracles.pair_loss(vectors, texts, range(LABELS), truth, truth), rel=1e-9)


def test_a_true_label_of_another_document_is_not_a_negative():
    vectors, texts = torch.zeros(2, 2), torch.eye(2, requires_grad=True)
    # Both labels are true for both documents: nothing is left to compete with.
    loss = batch_loss(vectors, texts, np.array([0, 1]), np.array([0, 1]), csr_matrix(np.ones((2, 2))))
    loss.backward()
    assert loss.item() == 0 and not texts.grad.any()


def test_a_batch_without_positives():
    vectors = torch.ones(2, 3, requires_grad=True)
    loss = batch_loss(vectors, torch.ones(1, 3), np.array([0]), np.array([-1, -1]), csr_matrix((2, 1)))
    loss.backward()
    assert loss.item() == 0 and not vectors.grad.any()


def test_rare_labels_are_drawn_more_often():
    truth = csr_matrix(np.tile([1, 1, 0, 1], (30_000, 1)))
    weights = np.array([1.0, 0.5, 9.0, 0.0])
    drawn = draw_positives(truth, weights, np.random.default_rng(0))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert shares == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.02)


def test_a_positive_is_a_true_label_of_its_document():
    rng = np.random.default_rng(1)
    truth = csr_matrix(rng.random((500, 40)) < 0.05)
    weights = rng.random(40) * (rng.random(40) < 0.7)
    drawn = draw_positives(truth, weights, np.random.default_rng(2))
    possible = [set(row.indices[weights[row.indices] > 0]) for row in truth]
    assert all(label in own if own else label == -1 for label, own in zip(drawn.tolist(), possible, strict=True))
    assert len(set(drawn.tolist())) > 10
    again = draw_positives(truth, weights, np.random.default_rng(2))
    assert (drawn == again).all()


def test_texts_that_can_be_read():
    assert Labels(["4711", "motor_cars", "A1"]).readable_texts() == ["", "motor cars", "A1"]
    assert Labels(["4711", "cars", "12"], texts=["motors", " ", "3"]).readable_texts() == ["motors", "cars", ""]


# ---- Training ----


def test_training_moves_documents_to_their_labels(train, tmp_path):
    options = {**OPTIONS, "data": make_documents(400, seed=12), "save_strategy": "no", "logging_steps": 5}
    validation = make_documents(100, seed=2)
    trainer = train(level_steps=[30], eval_strategy="steps", eval_steps=5, eval_dataset=validation, **options)
    quality = [entry["eval_nDCG@5"] for entry in trainer.state.log_history if "eval_nDCG@5" in entry]
    assert max(quality[1:6]) > quality[0] + 0.1
    assert {"heads", "text_vector"} < set(trainer.model.scorer.parts)
    heads = evaluate_model(trainer.model, make_documents(200, seed=3), ks=(5,), predict_with="heads")
    assert heads.compute()["nDCG@5"] > 0.3
    assert_predicts_as_saved(trainer, tmp_path, ["all", "text_vector"])
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and "head_learning_rate" in losses[0]


def test_each_pass_draws_other_positives(train):
    drawn = {}

    class Note(TrainerCallback):
        def on_step_begin(self, args, state, control, train_dataloader=None, **kwargs):
            levels = train_dataloader.levels
            for number in range(2):
                drawn[number] = levels.collator(number).drawn

    train(callbacks=[Note()], **OPTIONS, level_steps=[1])
    assert (drawn[0] != drawn[1]).mean() > 0.3 and (drawn[0] >= 0).all()


def test_codes_train_heads(train, few, caplog):
    codes = few.map(lambda row: {"labels": [label[-2:] for label in row["labels"]]})
    with caplog.at_level(logging.WARNING):
        trainer = train(data=codes, level_objective="label_texts", level_steps=[2])
    assert "level_objective" in caplog.text
    assert trainer.model.config.head_levels == [1, 2, 3]


def test_some_labels_without_texts(train, few):
    rest = few.map(lambda row: {"labels": [label[-2:] if label < "label 30" else label for label in row["labels"]]})
    trainer = train(data=rest, **{**OPTIONS, "label_texts": None}, level_steps=[3])
    assert trainer.state.global_step == 3 and "text_vector" in trainer.model.scorer.parts


@pytest.mark.parametrize("options", [{"predict_with": "ranker"}, {"level_bootstrap": False}], ids=str)
def test_without_heads(train, options):
    assert not train(**OPTIONS, level_steps=[1], **options).model.config.head_levels


@pytest.fixture
def whole(train, tmp_path, make_once):
    """Returns the folder of an uninterrupted run with some options."""

    def get(**options):
        name = "label-texts-" + "-".join(map(str, options.values()))
        return make_once(name, lambda folder: train(folder=folder, **{**RESUMED, **options, "save_strategy": "no"}))

    return get


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16},
        {"encoder_lora_rank": 2},
        {"level_swa_start": 0.4},
    ],
    ids=str,
)
def test_resuming(train, whole, tmp_path, options):
    kill(train, KillAt("on_step_end", 7), **{**RESUMED, **options})
    train(resume=True, **{**RESUMED, **options})
    assert_same_model(tmp_path, whole(**options))


def test_resuming_after_the_last_step(train, whole, tmp_path):
    kill(train, KillAfter("ranker"), **RESUMED)
    train(resume=True, **RESUMED)
    assert_same_model(tmp_path, whole())


def test_a_checkpoint_of_another_objective(train):
    kill(train, KillAt("on_step_end", 3), **RESUMED)
    refused("level_objective", train, resume=True, **{**RESUMED, "level_objective": "heads"})


def test_the_best_model_is_kept(train, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_steps": 2}
    options |= {"eval_dataset": make_documents(40, seed=2), "level_learning_rate": [0.0]}
    stopping = EarlyStoppingCallback(1)
    trainer = train(callbacks=[stopping], **{**OPTIONS, "level_steps": [10]}, **options)
    assert trainer.state.global_step == 4 and trainer.state.best_global_step == 2
    final, best = tensors_of(tmp_path), tensors_of(tmp_path / "checkpoint-2")
    assert all(torch.equal(final[name], tensor) for name, tensor in best.items() if not name.startswith("heads."))
    head = f"heads.{len(trainer.model.heads) - 1}.weight"
    scales = final[head] / best[head]
    assert torch.allclose(scales, scales[:1, :1]) and scales[0, 0] > 0  # calibrated, not trained further


# ---- Time budget ----


def test_a_time_budget(train, tmp_path):
    options = {**OPTIONS, "level_steps": None, "time_budget": 0.02, "save_steps": 3, "logging_steps": 1}
    kill(train, KillAt("on_step_end", 4), **options)
    trainer = train(resume=True, **options)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in entries]
    assert trainer.state.global_step == trainer.state.max_steps == entries[-1]["step"] > 5
    assert rates[-1] < 0.5 * max(rates)
    assert_predicts_as_saved(trainer, tmp_path, ["ranker"])


def test_options_that_do_not_fit():
    make = partial(XMCTrainingArguments, "out", use_cpu=True)
    tuned, texts = partial(make, method="xr-transformer"), partial(make, level_objective="label_texts")
    refused_each(partial(tuned, time_budget=1), max_steps=5, level_epochs=1)
    refused_each(tuned, time_budget=0, level_objective="names")
    refused("time_budget", make, method="xr-linear", time_budget=1)
    refused("max_steps", make, method="xr-linear", max_steps=5)
    refused("predict_with", texts, method="xr-transformer", predict_with="heads")
    refused("predict_with", texts, method="lightxml")
    refused("method", texts, method="x-transformer")


@pytest.mark.parametrize("sampled", [None, np.array([0, 3, 4, 9])])
def test_the_nodes_that_the_head_scores(sampled):
    """True nodes, and those that are negatives: all, or a sample."""
    counts = csr_matrix(np.random.default_rng(0).random((8, 12)) < 0.15, dtype=np.float32)
    collate = LabelTextCollator(0, [[1, 2], [3]], np.array([0, 1] * 4), 3, counts, sampled)
    rows = [5, 2, 6]
    inputs = collate([{"document": row, "token_ids": [[4, 5]]} for row in rows])
    is_true, every = counts[rows].toarray() > 0, np.arange(12)
    nodes = every if sampled is None else every[is_true.any(axis=0) | np.isin(every, sampled)]
    assert inputs["level"] == 3 and ("nodes" in inputs) == (sampled is not None)
    assert np.array_equal(inputs.get("nodes", nodes), nodes)
    assert np.array_equal(inputs["true_nodes"], is_true[:, nodes])
    is_negative = ~is_true & np.isin(every, every if sampled is None else sampled)
    assert np.array_equal(~inputs["left_out"], is_negative[:, nodes])


def test_the_probabilities_of_a_trained_head(train):
    trainer = train(data=make_documents(400, seed=12), **{**OPTIONS, "save_strategy": "no"}, level_steps=[30])
    documents = make_documents(100, seed=2)
    found = trainer.model.predict(documents["text"], predict_with="heads", top_k=60)
    total = np.mean([sum(score for _, score in labels) for labels in found])
    assert 0.5 < total / np.mean([len(labels) for labels in documents["labels"]]) < 2


def test_the_loss_of_the_head(train):
    losses = {}
    for bootstrap in (True, False):
        trainer = train(**OPTIONS, level_steps=[1], level_bootstrap=bootstrap, logging_steps=1, overwrite=True)
        losses[bootstrap] = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert losses[True] > losses[False] + 0.5
    assert trainer.model.heads is None or not len(trainer.model.heads)


def test_a_frozen_encoder_gets_heads(train):
    trainer = train(**OPTIONS, level_steps=None, num_train_epochs=0)
    assert "heads" in trainer.model.available_parts
    assert all(head.weight.any() for head in trainer.model.heads)


def test_label_texts_are_embedded_once_per_encoder(train, tmp_path):
    """Also where a tenth of the documents is held out, which fine-tuning does not see."""
    for steps, times in ((0, 1), (2, 2)):
        folder, options = tmp_path / str(steps), {**OPTIONS, "level_steps": [steps]}
        trainer = train(folder=folder, data=make_documents(2000, seed=5), **options)
        logged = [name for entry in trainer.state.log_history for name in entry]
        assert trainer.model.scorer.num_documents == 200
        assert logged.count("embed label texts_seconds") == logged.count("embed_seconds") == times

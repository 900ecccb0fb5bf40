"""Tests of hf_xmc.training.trainer: training of linear methods, evaluation, prediction, errors."""

import json
import logging
import math

import numpy as np
import pytest
from conftest import NUM_LABELS, TOPICS, encoder_arguments, make_documents, make_vectors, refused, train_linear
from datasets import Dataset
from sklearn.preprocessing import normalize
from transformers import TrainerCallback, TrainingArguments

from hf_xmc import (
    Labels,
    LabelTree,
    TfidfFeaturizer,
    XMCConfig,
    XMCForTextClassification,
    XMCMetrics,
    XMCTrainer,
    XMCTrainingArguments,
)
from hf_xmc.inference.predict import evaluate_model, predict_batches
from hf_xmc.training.presets import ENCODER_METHODS, METHODS
from hf_xmc.training.progress import StageProgressCallback
from hf_xmc.training.record import TrainingRecord


def arguments(folder, **options):
    return XMCTrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, **options)


def train(folder, data, model=None, eval_dataset=None, label_texts=None, callbacks=(), **options):
    args = arguments(folder, **options)
    trainer = XMCTrainer(model, args, data, eval_dataset, callbacks=list(callbacks), label_texts=label_texts)
    trainer.train()
    return trainer


# ---- Training ----


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(ENCODER_METHODS)))
def test_every_linear_method_learns(method, documents, tmp_path):
    small_tree = {} if method == "knn" else {"tree_max_leaf_size": 10, "tree_branching": 4}
    trainer = train(tmp_path, documents, method=method, **small_tree)
    # Similar documents also share filler words, which classifiers learn to ignore.
    assert trainer.evaluate(make_documents(200, seed=1))["eval_P@1"] > (0.75 if method == "knn" else 0.95)
    assert trainer.model.config.method == method
    assert (trainer.model.label_tree.depth == 1) == (method in ("dismec", "knn"))


class Listener(TrainerCallback):
    """Notes events and logged stages."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.extend(name for name in logs if name.endswith("_seconds") and not name.startswith("train_"))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def test_training_saves_and_logs(documents, tmp_path):
    listener = Listener()
    trainer = XMCTrainer(args=arguments(tmp_path), train_dataset=documents, callbacks=[listener])
    output = trainer.train()
    stages = ["labels", "features", "tree", "ranker", "label vectors", "save"]
    assert listener.events == ["begin", *(f"{stage}_seconds" for stage in stages), "end"]
    assert {f"train_{stage}_seconds" for stage in stages} < set(output.metrics)
    assert output.metrics["train_runtime"] > 0 and math.isnan(output.training_loss)
    assert trainer.state.log_history[0]["labels"] == 60
    model = XMCForTextClassification.from_pretrained(tmp_path)
    assert model.predict(["topic07"]) == trainer.model.predict(["topic07"])
    options = json.loads((tmp_path / "training_args.json").read_text())
    assert options["method"] == "xr-linear" and options["ranker_beam_size"] == trainer.args.ranker_beam_size
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".pkl", ".pt")]
    assert "use_cache" not in json.loads((tmp_path / "config.json").read_text())


def test_progress_bar_names_the_stages(documents, tmp_path, capsys):
    options = {"callbacks": [StageProgressCallback(bar=True)], "eval_dataset": make_documents(50, seed=1)}
    trainer = XMCTrainer(args=XMCTrainingArguments(str(tmp_path), use_cpu=True), train_dataset=documents, **options)
    trainer.train()
    trainer.evaluate()
    shown = capsys.readouterr()
    for stage in ("labels", "features", "tree", "ranker", "save"):
        assert stage in shown.err
    for line in ("features", "ranker", "trained", "eval"):
        assert f"\n{line} " in shown.out


def test_columns_are_mapped(documents, tmp_path):
    renamed = documents.rename_columns({"text": "title", "labels": "subjects"})
    joined = renamed.map(lambda row: {"subjects": "; ".join(row["subjects"])})
    mapping = {"title": "text", "subjects": "labels"}
    trainer = XMCTrainer(
        args=arguments(tmp_path), train_dataset=joined, eval_dataset=joined.select(range(50)),
        column_mapping=mapping, label_delimiter=";",
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_P@1"] > 0.95
    # Datasets with mapped columns are accepted as well, and so are documents without labels in predictions.
    assert trainer.evaluate(documents.select(range(50)))["eval_P@1"] > 0.95
    assert trainer.predict(renamed.remove_columns("subjects")).label_ids is None


def test_vectors(tmp_path):
    trainer = train(tmp_path, make_vectors(600))
    assert trainer.model.tfidf is None and trainer.model.ranker.num_sparse == 60
    assert trainer.evaluate(make_vectors(99, seed=1))["eval_P@1"] > 0.95
    refused("vectors", trainer.evaluate, make_documents(3).map(lambda row: {"labels": ["1"]}))


def test_the_power_of_vectors_is_applied_in_training_and_prediction(tmp_path):
    def predict(folder, power_of_data, **options):
        data = make_vectors(300).map(
            lambda row: {"feature_values": [(1.0 + place) ** power_of_data for place in range(len(row["labels"]))]}
        )
        predictions = train(folder, data, **options).predict(data).predictions
        loaded = XMCTrainer(XMCForTextClassification.from_pretrained(folder), arguments(folder))
        np.testing.assert_array_equal(loaded.predict(data).predictions, predictions)
        return predictions

    plain = predict(tmp_path / "plain", 1.0, feature_power=1.0)
    raised = predict(tmp_path / "raised", 1.0, feature_power=1.5)
    assert not np.array_equal(plain, raised)
    np.testing.assert_allclose(raised, predict(tmp_path / "given", 1.5, feature_power=1.0), atol=1e-5)


def test_the_default_power_damps_raw_counts(tmp_path):
    raw = make_vectors(300)
    unit = raw.map(lambda row: {"feature_values": (normalize([row["feature_values"]])[0]).tolist()})
    raw = raw.map(lambda row: {"feature_values": [3.0 + value for value in row["feature_values"]]})
    powers = [train(tmp_path / name, data).model.config.vector_power for name, data in (("a", raw), ("b", unit))]
    assert powers == [0.75, 1.0]
    assert train(tmp_path / "c", raw, method="parabel").model.config.vector_power == 1.0
    assert train(tmp_path / "d", raw, feature_power=1.5).model.config.vector_power == 1.5


def test_text_or_vectors(tmp_path):
    both = make_vectors(600).add_column("text", make_documents(600)["text"][:])
    for features, has_tfidf in ((None, True), ("vectors", False)):
        assert (train(tmp_path / str(features), both, features=features).model.tfidf is not None) == has_tfidf
    refused("features", train, tmp_path / "no", make_vectors(9), features="text")


@pytest.mark.parametrize("label_features", ["text", "both"])
def test_label_texts(documents, tmp_path, label_features):
    texts = {f"label {label:02d}": f"word{label % 4} topic{label:02d}" for label in range(60)}
    options = {"label_features": label_features, "tree_max_leaf_size": 15}
    model = train(tmp_path, documents, label_texts=texts, **options).model
    assert model.labels.texts[3] == "word3 topic03"
    if label_features == "text":
        # Labels with a common word are in one cluster.
        first, *_ = np.split(model.label_tree.leaf_labels, model.label_tree.child_offsets[-1][1:-1])
        assert len({label % 4 for label in first}) == 1


@pytest.mark.parametrize("method", ["xr-linear", "xr-transformer"])
def test_the_ranker_learns_from_label_texts(tmp_path, tiny_encoder, method):
    texts = {f"label {label:02d}": f"word{label % 4} name{label:02d}" for label in range(60)}
    # Names in documents do not depend on their labels: only the label texts connect the two.
    documents = make_documents(300)
    names = [f"{text} name{place % 60:02d}" for place, text in enumerate(documents["text"])]
    data = documents.remove_columns("text").add_column("text", names)
    options, model = {"tfidf_min_df": 1, "predict_with": "ranker"}, None
    if method == "xr-transformer":
        options |= {"method": method, "level_epochs": [0], "encoder_max_length": 16}
        model = tiny_encoder
    accuracy = {}
    for weight in (0.0, 1.0):
        trainer = train(tmp_path / str(weight), data, model, label_texts=texts, label_text_weight=weight, **options)
        best = trainer.model.predict([f"name{label:02d}" for label in range(60)], top_k=1)
        accuracy[weight] = np.mean([tags[0][0] == f"label {label:02d}" for label, tags in enumerate(best)])
    assert accuracy[1.0] > accuracy[0.0] + 0.3


@pytest.mark.parametrize("method", ["xr-linear", "xr-transformer"])
def test_labels_without_documents_are_found_by_their_texts(tmp_path, tiny_encoder, method):
    unseen = {f"label {i}" for i in range(50, NUM_LABELS)}
    data = make_documents(900)
    seen = data.select([i for i, row in enumerate(data["labels"]) if not unseen & set(row)])
    if method == "xr-linear":
        options = {"args": XMCTrainingArguments(str(tmp_path), method=method, disable_tqdm=True)}
    else:
        options = {"args": encoder_arguments(tmp_path, method, level_indices=None), "model": tiny_encoder}
    trainer = XMCTrainer(train_dataset=seen, label_texts=TOPICS, **options)
    trainer.train()
    model = XMCForTextClassification.from_pretrained(tmp_path)
    assert len(model.labels) == NUM_LABELS and set(np.array(model.labels.names)[model.labels.counts == 0]) == unseen
    words = [f"topic{i} word3" for i in range(50, NUM_LABELS)]
    # A random encoder is no help.
    part = "all" if method == "xr-linear" else "text_tfidf"
    best = [row[0][0] for row in model.predict(words, top_k=1, predict_with=part)]
    assert sum(label == f"label {i}" for i, label in enumerate(best, start=50)) >= 9
    found = model.predict(seen["text"][:100], top_k=1)
    assert sum(row[0][0] in true for row, true in zip(found, seen["labels"][:100], strict=True)) >= 95


def test_labels_without_documents_can_be_left_out(tmp_path):
    data = make_documents(300)
    seen = data.select([i for i, row in enumerate(data["labels"]) if "label 59" not in row])
    trainer = train_linear(tmp_path, seen, label_texts=TOPICS, labels_seen_only=True)
    assert len(trainer.model.labels) == NUM_LABELS - 1 and "label 59" not in trainer.model.labels.names


@pytest.mark.parametrize("text", ["", "the same name"])
def test_texts_that_tell_nothing_apart(tmp_path, text):
    data = make_documents(300)
    trainer = train_linear(tmp_path, data, label_texts=dict.fromkeys(TOPICS, text))
    assert trainer.model.labels.texts == [text] * NUM_LABELS
    found = trainer.model.predict(data["text"][:50], top_k=1)
    assert sum(row[0][0] in true for row, true in zip(found, data["labels"][:50], strict=True)) >= 45


def test_texts_of_unknown_labels_only(tmp_path):
    with pytest.raises(ValueError, match="None of the 60 labels.*'nobody'"):
        train_linear(tmp_path, make_documents(300), label_texts={"nobody": "has this label"})


def test_texts_of_labels_that_are_numbers(tmp_path):
    data = Dataset.from_dict({"text": [f"w{i % 4}" for i in range(40)], "labels": [[i % 4] for i in range(40)]})
    options = {"tfidf_min_df": 1, "label_text_weight": 0.5}
    trainer = train(tmp_path / "a", data, label_texts={0: "zero", 1: "one", 2: None}, **options)
    assert trainer.model.labels.texts == ["zero", "one", "", ""]
    refused("'0'.*'null'", train, tmp_path / "b", data, label_texts={"null": "zero"}, **options)


def test_parts_of_a_given_model_are_used(documents, tmp_path):
    labels = Labels.from_dataset(documents)
    tfidf = TfidfFeaturizer(ngram_range=(1, 1)).fit(documents["text"])
    tree = LabelTree.from_parents([np.zeros(2, int), np.arange(60) % 2])
    model = XMCForTextClassification(XMCConfig(top_k=4), labels, tree, tfidf)
    assert train(tmp_path, documents, model).model is model
    assert model.labels is labels and model.tfidf is tfidf and model.label_tree is tree
    assert len(XMCForTextClassification.from_pretrained(tmp_path).predict(["topic07"])[0]) == 4


@pytest.mark.parametrize("names", [["x"], ["new\nline", "tab\t", "long " * 2000, "ümläut"]], ids=["one", "odd"])
def test_few_labels_and_odd_names(tmp_path, names):
    count = len(names)
    rows = {"text": [f"w{i % count}" for i in range(40)], "labels": [[names[i % count]] * 2 for i in range(40)]}
    train(tmp_path, Dataset.from_dict(rows), tfidf_min_df=1)
    model = XMCForTextClassification.from_pretrained(tmp_path)
    assert [row[0][0] for row in model.predict([f"w{i}" for i in range(count)])] == names


def test_names_of_splits_in_the_record(documents, tmp_path):
    parts = documents.train_test_split(0.25, seed=0)
    trainer = train(tmp_path, parts["train"], eval_dataset=parts["test"], eval_strategy="epoch")
    assert trainer.state.log_history[-1]["eval_P@1"] > 0.9  # after the training
    for prefix, part in (("eval", "test"), ("test", "test"), ("eval_dev", "test"), ("eval", "train")):
        trainer.evaluate(parts[part], metric_key_prefix=prefix)
    splits = {result["split"]: result["documents"] for result in TrainingRecord.load(tmp_path).evaluations}
    held_out = len(parts["test"])
    assert splits == {"eval": held_out, "test": held_out, "dev": held_out, "train": len(parts["train"])}


# ---- Errors ----


@pytest.mark.parametrize(
    "options, parts", [({"metric_for_best_model": "PSP@5"}, None), ({"eval_ks": [1, 3]}, None), ({}, ("a", "b"))]
)
def test_the_metric_of_the_best_model_is_checked_at_once(options, parts, tiny_encoder, documents, tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    held_out = {part: documents for part in parts} if parts else documents
    with pytest.raises(ValueError, match="metric_for_best_model"):
        args = encoder_arguments(tmp_path, **{**best, "metric_for_best_model": "nDCG@5", **options})
        XMCTrainer(tiny_encoder, args, documents, held_out)
    args = encoder_arguments(tmp_path, **best, eval_ks=[1, 3])
    assert args.metric_for_best_model == "nDCG@3"
    XMCTrainer(tiny_encoder, args, documents, documents)


def test_label_texts_that_cannot_be_used(tmp_path):
    codes = Dataset.from_dict({"text": [f"w{i % 4}" for i in range(40)], "labels": [[i % 4] for i in range(40)]})
    refused("label_features", train, tmp_path, codes, label_features="text")
    refused("label_text_weight", train, tmp_path, codes, method="x-transformer", label_text_weight=0.5)


@pytest.mark.parametrize("name, content", [("README.md", b"caf\xe9"), ("my_results.json", b"{")])
def test_an_unreadable_file_does_not_cost_the_new_model(documents, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    train(tmp_path, documents)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(["topic07"])[0][0][0] == "label 07"
    assert (tmp_path / name).read_bytes() == content


def test_bad_input(documents, tmp_path, model_folder):
    args = arguments(tmp_path)
    refused("xr-linear", train, tmp_path, documents, "some/encoder")
    for method in ("xr-linear", "xr-transformer"):
        refused("from_pretrained", train, tmp_path, documents, model_folder, method=method)
    refused("model", train, tmp_path, documents, 3, error=TypeError)
    with pytest.raises(TypeError, match="XMCTrainingArguments"):
        XMCTrainer(args=TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=documents)
    refused("labels", train, tmp_path, documents.remove_columns("labels"))
    refused("train_dataset", train, tmp_path, None)
    with pytest.raises(ValueError, match="checkpoint"):
        XMCTrainer(args=args, train_dataset=documents).train(resume_from_checkpoint="checkpoint-1")
    refused("trained", train, tmp_path, documents, XMCForTextClassification.from_pretrained(model_folder))
    for texts, labels in ((["a", "b"], [[], []]), (["", ""], [["x"], ["y"]])):
        refused("document|term", train, tmp_path, Dataset.from_dict({"text": texts, "labels": labels}))
    with pytest.raises(ValueError, match="eval_dataset"):
        XMCTrainer(args=args, train_dataset=documents).evaluate()
    with pytest.raises(ValueError, match="labels"):
        XMCTrainer(args=args, train_dataset=documents).evaluate(documents)


# ---- Evaluation and prediction ----


@pytest.fixture
def trainer(model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(model_folder)
    return XMCTrainer(model=model, args=arguments(tmp_path), eval_dataset=make_documents(120, seed=2))


def test_evaluation_agrees_with_the_metrics(trainer):
    dataset = trainer.eval_dataset
    results = trainer.evaluate()
    scores, indices = (np.concatenate(parts) for parts in zip(*predict_batches(trainer.model, dataset), strict=True))
    labels = trainer.model.labels
    metrics = XMCMetrics(counts=labels.counts, num_documents=labels.num_documents)
    metrics.update(indices, labels.encode(dataset, keep_unseen=True))
    for name, value in metrics.compute().items():
        assert results[f"eval_{name}"] == value
    assert trainer.state.log_history[-1]["eval_P@1"] == results["eval_P@1"]
    assert evaluate_model(trainer.model, dataset, batch_size=7).compute() == metrics.compute()


def test_several_evaluation_sets_and_other_ks(model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(model_folder)
    sets = {"a": make_documents(30, seed=3), "b": make_documents(30, seed=4)}
    trainer = XMCTrainer(model=model, args=arguments(tmp_path, eval_ks=[2]), eval_dataset=sets)
    metrics = trainer.evaluate(metric_key_prefix="dev")
    assert {"dev_a_P@2", "dev_b_P@2"} < set(metrics) and "dev_a_P@1" not in metrics


def test_unseen_labels_count_as_missed(trainer):
    known = Dataset.from_dict({"text": ["topic07"], "labels": [["label 07"]]})
    unseen = Dataset.from_dict({"text": ["topic07"], "labels": [["label 07", "never seen"]]})
    assert trainer.evaluate(known)["eval_R@10"] == 1
    assert trainer.evaluate(unseen)["eval_R@10"] == 0.5
    refused("other", trainer.evaluate, Dataset.from_dict({"text": ["topic07", "topic08"], "labels": [["other"], []]}))


def test_predict(trainer):
    dataset = make_documents(9, seed=8)
    output = trainer.predict(dataset)
    scores, indices = output.predictions
    assert scores.shape == indices.shape == (9, 10)
    truth = [sorted(row[row >= 0].tolist()) for row in output.label_ids]
    assert truth == [sorted(trainer.model.labels.ids(labels).tolist()) for labels in dataset["labels"]]
    assert (output.label_ids.min() == -100) == (len({len(row) for row in truth}) > 1)
    assert output.metrics["test_runtime"] > 0


def test_unknown_features_are_ignored(vector_model_folder, tmp_path, caplog):
    model = XMCForTextClassification.from_pretrained(vector_model_folder)
    data = Dataset.from_dict({"feature_ids": [[5, 900]], "feature_values": [[1.0, 1.0]], "labels": [[5]]})
    with caplog.at_level(logging.WARNING):
        assert XMCTrainer(model=model, args=arguments(tmp_path)).evaluate(data)["eval_P@1"] == 1
    assert "feature" in caplog.text

"""Tests of hf_xmc.training.trainer, progress and prediction."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
from conftest import encoder_arguments, make_documents, make_vectors
from datasets import Dataset
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
from hf_xmc.training.record import TrainingRecord


def arguments(folder, **options):
    return XMCTrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, **options)


# ---- Training ----


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(ENCODER_METHODS)))
def test_every_linear_method_learns(method, documents, tmp_path):
    small_tree = {"tree_max_leaf_size": 10, "tree_branching": 4}
    trainer = XMCTrainer(
        args=arguments(tmp_path, method=method, **({} if method == "knn" else small_tree)),
        train_dataset=documents,
        eval_dataset=make_documents(200, seed=1),
    )
    trainer.train()
    metrics = trainer.evaluate()
    # Similar documents share words that stand for no label; classifiers learn to leave these aside.
    assert metrics["eval_P@1"] > (0.75 if method == "knn" else 0.95)
    assert trainer.model.config.method == method
    assert (trainer.model.label_tree.depth == 1) == (method in ("dismec", "knn"))


def test_train_saves_logs_and_reports(documents, tmp_path):
    class Listener(TrainerCallback):
        events: list[str] = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.events.append("begin")

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.events.extend(name for name in logs if name.endswith("_seconds") and not name.startswith("train_"))

        def on_train_end(self, args, state, control, **kwargs):
            self.events.append("end")

    trainer = XMCTrainer(args=arguments(tmp_path), train_dataset=documents, callbacks=[Listener()])
    output = trainer.train()
    stages = ["labels", "features", "tree", "ranker", "save"]
    assert Listener.events == ["begin", *(f"{stage}_seconds" for stage in stages), "end"]
    assert {f"train_{stage}_seconds" for stage in stages} < set(output.metrics)
    assert output.metrics["train_runtime"] > 0 and math.isnan(output.training_loss)
    assert trainer.state.log_history[0]["labels"] == 60
    model = XMCForTextClassification.from_pretrained(tmp_path)
    assert model.predict(["topic07"]) == trainer.model.predict(["topic07"])
    options = json.loads((tmp_path / "training_args.json").read_text())
    assert options["method"] == "xr-linear" and options["ranker_C"] == trainer.args.ranker_C
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".pkl", ".pt")]
    assert "use_cache" not in json.loads((tmp_path / "config.json").read_text())


def test_the_same_seed_gives_the_same_model(documents, tmp_path):
    models = []
    for threads in (1, 2):
        trainer = XMCTrainer(args=arguments(tmp_path / str(threads), num_threads=threads), train_dataset=documents)
        trainer.train()
        models.append(trainer.model)
    first, second = (vars(model.ranker.weights) for model in models)
    assert models[0].label_tree == models[1].label_tree
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_progress_bar_names_the_stages(documents, tmp_path, capsys):
    args = XMCTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=False)
    trainer = XMCTrainer(args=args, train_dataset=documents, eval_dataset=make_documents(50, seed=1))
    trainer.train()
    trainer.evaluate()
    shown = capsys.readouterr().err
    for stage in ("tf-idf: fit", "tf-idf: transform", "tree", "ranker level 1/", "predict"):
        assert stage in shown
    assert "600/600" in shown and "50/50" in shown


def test_columns_are_mapped(documents, tmp_path):
    renamed = documents.rename_columns({"text": "title", "labels": "subjects"})
    joined = renamed.map(lambda row: {"subjects": "; ".join(row["subjects"])})
    trainer = XMCTrainer(
        args=arguments(tmp_path),
        train_dataset=joined,
        eval_dataset=joined.select(range(50)),
        column_mapping={"title": "text", "subjects": "labels"},
        label_delimiter=";",
    )
    trainer.train()
    assert trainer.evaluate()["eval_P@1"] > 0.95
    # Data that is in the library's columns already may follow, and documents without labels may be predicted.
    assert trainer.evaluate(documents.select(range(50)))["eval_P@1"] > 0.95
    assert trainer.predict(renamed.remove_columns("subjects")).label_ids is None


def test_vectors(tmp_path):
    trainer = XMCTrainer(
        args=arguments(tmp_path), train_dataset=make_vectors(600), eval_dataset=make_vectors(99, seed=1)
    )
    trainer.train()
    assert trainer.model.tfidf is None and trainer.model.ranker.num_sparse == 60
    assert trainer.evaluate()["eval_P@1"] > 0.95
    with pytest.raises(ValueError, match="trained on vectors"):
        trainer.evaluate(make_documents(3).map(lambda row: {"labels": ["1"]}))


def test_the_power_of_vectors_is_applied_in_training_and_prediction(tmp_path):
    def scaled(row, power):
        return {"feature_values": [(1.0 + position) ** power for position in range(len(row["feature_values"]))]}

    def scores(folder, power_of_data, **options):
        data = make_vectors(300).map(scaled, fn_kwargs={"power": power_of_data})
        trainer = XMCTrainer(args=arguments(folder, **options), train_dataset=data)
        trainer.train()
        loaded = XMCForTextClassification.from_pretrained(folder)
        assert loaded.config.vector_power == options.get("feature_power", 1)
        np.testing.assert_array_equal(XMCTrainer(model=loaded, args=arguments(folder)).predict(data).predictions,
                                      trainer.predict(data).predictions)  # fmt: skip
        return trainer.predict(data).predictions

    plain, raised = scores(tmp_path / "plain", 1.0), scores(tmp_path / "raised", 1.0, feature_power=1.5)
    assert not np.array_equal(plain, raised)
    np.testing.assert_allclose(raised, scores(tmp_path / "given", 1.5), atol=1e-5)


def test_the_power_of_texts(documents, tmp_path):
    trainer = XMCTrainer(args=arguments(tmp_path, feature_power=1.5), train_dataset=documents)
    trainer.train()
    assert trainer.model.tfidf.power == 1.5 and trainer.model.config.vector_power == 1
    expected = TfidfFeaturizer(power=1.5).fit(documents["text"]).transform(["topic07 word1"])
    assert (trainer.model.featurize(["topic07 word1"]).sparse != expected).nnz == 0


def test_a_trained_model_is_no_encoder(model_folder, encoder_model_folder, documents, tmp_path):
    args = arguments(tmp_path)
    for folder in (model_folder, encoder_model_folder):
        for method in ("xr-linear", "xr-transformer"):
            with pytest.raises(ValueError, match="is a trained model, not an encoder.*from_pretrained"):
                XMCTrainer(model=folder, args=arguments(tmp_path, method=method), train_dataset=documents)
        with pytest.raises(ValueError, match="is a trained model"):
            XMCTrainer(model=str(folder), args=args)
    XMCTrainer(args=args, train_dataset=documents)  # the arguments are as they were


@pytest.mark.parametrize(
    "options, parts, message",
    [
        ({"metric_for_best_model": "PSP@5"}, None, "PSP@5.*Choose one of P@1"),
        ({"metric_for_best_model": "eval_nDCG@5", "eval_ks": [1, 3]}, None, "nDCG@5.*nDCG@3"),
        ({}, ("a", "b"), "nDCG@5.*a_nDCG@5.*b_nDCG@5"),
    ],
)
def test_the_metric_of_the_best_model_is_checked_at_once(options, parts, message, tiny_encoder, documents, tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    args = encoder_arguments(tmp_path, **{**best, **options})
    held_out = {part: documents for part in parts} if parts else documents
    with pytest.raises(ValueError, match=message):
        XMCTrainer(model=tiny_encoder, args=args, train_dataset=documents, eval_dataset=held_out)
    args = encoder_arguments(tmp_path, **best, eval_ks=[1, 3])
    assert args.metric_for_best_model == "nDCG@3"
    XMCTrainer(model=tiny_encoder, args=args, train_dataset=documents, eval_dataset=documents)


def test_text_or_vectors_by_choice(tmp_path):
    both = make_vectors(600).add_column("text", make_documents(600)["text"][:])
    for features, has_tfidf in ((None, True), ("text", True), ("vectors", False)):
        trainer = XMCTrainer(args=arguments(tmp_path / str(features), features=features), train_dataset=both)
        trainer.train()
        assert (trainer.model.tfidf is not None) == has_tfidf
    with pytest.raises(ValueError, match="features='text'.*feature_ids"):
        XMCTrainer(args=arguments(tmp_path / "no", features="text"), train_dataset=make_vectors(9)).train()


@pytest.mark.parametrize("label_features", ["text", "both"])
def test_label_texts(documents, tmp_path, label_features):
    texts = {f"label {label:02d}": f"word{label % 4} topic{label:02d}" for label in range(60)}
    args = arguments(tmp_path, label_features=label_features, tree_max_leaf_size=15)
    trainer = XMCTrainer(args=args, train_dataset=documents, label_texts=texts)
    trainer.train()
    assert trainer.model.labels.texts[3] == "word3 topic03"
    if label_features == "text":
        # Labels that share a word share a cluster.
        (first, *_) = np.split(trainer.model.label_tree.leaf_labels, trainer.model.label_tree.child_offsets[-1][1:-1])
        assert len({label % 4 for label in first}) == 1
    with pytest.raises(ValueError, match="pass `label_texts`"):
        XMCTrainer(args=arguments(tmp_path / "b", label_features="text"), train_dataset=documents).train()


@pytest.mark.parametrize("method", ["xr-linear", "xr-transformer"])
def test_the_ranker_learns_from_texts_of_labels(tmp_path, tiny_encoder, method):
    texts = {f"label {label:02d}": f"word{label % 4} name{label:02d}" for label in range(60)}
    # Names are spread over the documents whatever their labels: only the texts of labels tell whose they are.
    documents = make_documents(300)
    names = [f"{text} name{place % 60:02d}" for place, text in enumerate(documents["text"])]
    data = documents.remove_columns("text").add_column("text", names)
    found = {}
    for length in (0.0, 1.0):
        options = {"label_text_weight": length, "tfidf_min_df": 1}
        if method == "xr-transformer":
            options |= {"method": method, "level_epochs": [0], "encoder_max_length": 16, "predict_with": "ranker"}
        model = tiny_encoder if method == "xr-transformer" else None
        args = arguments(tmp_path / str(length), **options)
        trainer = XMCTrainer(model=model, args=args, train_dataset=data, label_texts=texts)
        trainer.train()
        asked = [f"name{label:02d}" for label in range(60)]
        best = trainer.model.predict(asked, top_k=1)
        found[length] = np.mean([tags[0][0] == f"label {label:02d}" for label, tags in enumerate(best)])
    assert found[1.0] > found[0.0] + 0.3


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "label_text_weight=0.5.*`label_texts`"),
        ({"label_text_weight": -1}, "label_text_weight"),
        ({"method": "lightxml"}, "label_text_weight"),
        ({"method": "x-transformer"}, "label_text_weight"),
    ],
)
def test_texts_of_labels_that_cannot_be_used(documents, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        XMCTrainer(args=arguments(tmp_path, **{"label_text_weight": 0.5, **options}), train_dataset=documents).train()


def test_parts_of_a_given_model_are_used(documents, tmp_path):
    labels = Labels.from_dataset(documents)
    tfidf = TfidfFeaturizer(ngram_range=(1, 1)).fit(documents["text"])
    tree = LabelTree.from_parents([np.zeros(2, int), np.arange(60) % 2])
    model = XMCForTextClassification(XMCConfig(top_k=4), labels, tree, tfidf)
    trainer = XMCTrainer(model=model, args=arguments(tmp_path), train_dataset=documents)
    trainer.train()
    assert trainer.model is model and model.labels is labels and model.tfidf is tfidf and model.label_tree is tree
    assert len(XMCForTextClassification.from_pretrained(tmp_path).predict(["topic07"])[0]) == 4


def test_one_label(tmp_path):
    data = Dataset.from_dict({"text": ["aa bb", "aa cc", "bb cc", "aa dd"], "labels": [["x"], ["x"], [], ["x"]]})
    trainer = XMCTrainer(args=arguments(tmp_path, tfidf_min_df=1), train_dataset=data)
    trainer.train()
    assert [label for label, _ in trainer.model.predict(["aa"])[0]] == ["x"]


def test_odd_label_names(tmp_path):
    names = ["new\nline", "tab\t", "long " * 2000, "ümläut"]
    data = Dataset.from_dict(
        {"text": [f"w{i % 4}" for i in range(40)], "labels": [[names[i % 4]] * 2 for i in range(40)]}
    )
    XMCTrainer(args=arguments(tmp_path, tfidf_min_df=1), train_dataset=data).train()
    model = XMCForTextClassification.from_pretrained(tmp_path)
    assert [row[0][0] for row in model.predict(["w0", "w1", "w2", "w3"])] == names


def test_texts_of_labels_that_are_numbers(tmp_path):
    data = Dataset.from_dict({"text": [f"w{i % 4}" for i in range(40)], "labels": [[i % 4] for i in range(40)]})
    options = {"tfidf_min_df": 1, "label_text_weight": 0.5}
    texts = {0: "zero", 1: "one", 2: None}
    trainer = XMCTrainer(args=arguments(tmp_path / "a", **options), train_dataset=data, label_texts=texts)
    trainer.train()
    assert trainer.model.labels.texts == ["zero", "one", "", ""]
    trainer = XMCTrainer(args=arguments(tmp_path / "b", **options), train_dataset=data, label_texts={"null": "zero"})
    with pytest.raises(ValueError, match="None of the 4 labels, such as '0'.*1 keys are such as 'null'"):
        trainer.train()


def test_splits_are_called_by_what_they_are(documents, tmp_path):
    parts = documents.train_test_split(0.25, seed=0)
    trainer = XMCTrainer(args=arguments(tmp_path), train_dataset=parts["train"], eval_dataset=parts["test"])
    trainer.train()
    for prefix, part in (("eval", "test"), ("test", "test"), ("eval_dev", "test"), ("eval", "train")):
        trainer.evaluate(parts[part], metric_key_prefix=prefix)
    found = {result["split"]: result["documents"] for result in TrainingRecord.load(tmp_path).evaluations}
    held_out = len(parts["test"])
    assert found == {"eval": held_out, "test": held_out, "dev": held_out, "train": len(parts["train"])}


# ---- What cannot be trained ----


def test_a_finished_model_is_not_replaced(documents, tmp_path):
    XMCTrainer(args=arguments(tmp_path), train_dataset=documents).train()
    before = (tmp_path / "ranker.safetensors").stat()
    with pytest.raises(FileExistsError, match="`overwrite=True`"):
        XMCTrainer(args=arguments(tmp_path), train_dataset=documents).train()
    assert (tmp_path / "ranker.safetensors").stat() == before
    XMCTrainer(args=arguments(tmp_path, overwrite=True, method="dismec"), train_dataset=documents).train()
    assert XMCForTextClassification.from_pretrained(tmp_path).config.method == "dismec"


@pytest.mark.parametrize("name, content", [("README.md", b"caf\xe9"), ("my_results.json", b"{")])
def test_a_file_that_cannot_be_read_does_not_cost_the_new_model(documents, tmp_path, caplog, name, content):
    (tmp_path / name).write_bytes(content)
    XMCTrainer(args=arguments(tmp_path), train_dataset=documents).train()
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(["topic07"])[0][0][0] == "label 07"
    assert (tmp_path / name).read_bytes() == content
    assert "Not all that the model before left is gone" in caplog.text


def test_bad_input(documents, tmp_path, model_folder):
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match="trains no encoder.*xr-transformer"):
        XMCTrainer(model="some/encoder", args=arguments(tmp_path), train_dataset=documents)
    with pytest.raises(TypeError, match="folder or the Hub id of an encoder"):
        XMCTrainer(model=3, args=args, train_dataset=documents)
    with pytest.raises(TypeError, match="XMCTrainingArguments"):
        XMCTrainer(args=TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=documents)
    with pytest.raises(ValueError, match="no `train_dataset`"):
        XMCTrainer(args=args).train()
    with pytest.raises(ValueError, match="makes no checkpoints"):
        XMCTrainer(args=args, train_dataset=documents).train(resume_from_checkpoint="checkpoint-1")
    with pytest.raises(ValueError, match="trained already"):
        model = XMCForTextClassification.from_pretrained(model_folder)
        XMCTrainer(model=model, args=args, train_dataset=documents).train()
    with pytest.raises(ValueError, match="no column `labels`"):
        XMCTrainer(args=args, train_dataset=documents.remove_columns("labels"))
    with pytest.raises(ValueError, match="None of the 3 documents has a label"):
        nothing = Dataset.from_dict({"text": ["a", "b", "c"], "labels": [[], [], []]})
        XMCTrainer(args=args, train_dataset=nothing).train()
    with pytest.raises(ValueError, match="No term is in 3 or more"):
        blank = Dataset.from_dict({"text": ["", "", ""], "labels": [["x"], ["y"], []]})
        XMCTrainer(args=args, train_dataset=blank).train()


# ---- Measuring and predicting ----


@pytest.fixture
def trainer(model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(model_folder)
    return XMCTrainer(model=model, args=arguments(tmp_path), eval_dataset=make_documents(120, seed=2))


def test_evaluate_agrees_with_the_metrics(trainer):
    dataset = trainer.eval_dataset
    got = trainer.evaluate()
    scores, indices = (np.concatenate(parts) for parts in zip(*predict_batches(trainer.model, dataset), strict=True))
    labels = trainer.model.labels
    metrics = XMCMetrics(counts=labels.counts, num_documents=labels.num_documents)
    metrics.update(indices, labels.encode(dataset, keep_unseen=True))
    for name, value in metrics.compute().items():
        assert got[f"eval_{name}"] == value
    assert trainer.state.log_history[-1]["eval_P@1"] == got["eval_P@1"]


def test_evaluation_does_not_depend_on_the_batch_size(trainer):
    whole = evaluate_model(trainer.model, trainer.eval_dataset).compute()
    assert evaluate_model(trainer.model, trainer.eval_dataset, batch_size=7).compute() == whole


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


def test_an_evaluation_set_without_known_labels(trainer):
    with pytest.raises(ValueError, match=r"No label .*\['other'\].*label 00"):
        trainer.evaluate(Dataset.from_dict({"text": ["topic07"], "labels": [["other"]]}))
    with pytest.raises(ValueError, match="No label"):
        trainer.evaluate(Dataset.from_dict({"text": ["topic07", "topic08"], "labels": [["7"], []]}))


def test_nothing_to_evaluate(documents, tmp_path):
    trainer = XMCTrainer(args=arguments(tmp_path), train_dataset=documents)
    with pytest.raises(ValueError, match="no `eval_dataset`"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="no labels"):
        trainer.evaluate(documents)


def test_predict(trainer):
    dataset = make_documents(9, seed=8)
    output = trainer.predict(dataset)
    scores, indices = output.predictions
    assert scores.shape == indices.shape == (9, 10)
    truth = [sorted(row[row >= 0].tolist()) for row in output.label_ids]
    assert truth == [sorted(trainer.model.labels.ids(labels).tolist()) for labels in dataset["labels"]]
    assert (output.label_ids.min() == -100) == (len({len(row) for row in truth}) > 1)
    assert output.metrics["test_runtime"] > 0


def test_eval_strategy_evaluates_after_training(documents, tmp_path):
    args = arguments(tmp_path, eval_strategy="epoch")
    trainer = XMCTrainer(args=args, train_dataset=documents, eval_dataset=make_documents(20, seed=1))
    trainer.train()
    assert trainer.state.log_history[-1]["eval_P@1"] > 0.9


def test_features_beyond_those_of_training_are_left_out(vector_model_folder, tmp_path, caplog):
    model = XMCForTextClassification.from_pretrained(vector_model_folder)
    data = Dataset.from_dict({"feature_ids": [[5, 900]], "feature_values": [[1.0, 1.0]], "labels": [[5]]})
    with caplog.at_level(logging.WARNING):
        assert XMCTrainer(model=model, args=arguments(tmp_path)).evaluate(data)["eval_P@1"] == 1
    assert "left out" in caplog.text

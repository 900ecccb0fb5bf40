"""Training of models with an encoder: ranker and heads, kinds of data, kinds of encoders."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_documents, make_tokenizer
from datasets import Dataset
from encoder_runs import PREDICT_WITH, TEXTS, assert_same_model, kill_in
from transformers import GPT2Config, GPT2Model

from hf_xmc import LabelTree, XMCForTextClassification

pytestmark = pytest.mark.usefixtures("fast_garbage_collection")


# ---- Ranker and heads ----


def test_refined_tree(train, tmp_path):
    trainer = train(refine_tree=True)
    assert (tmp_path / "ranker_tree.safetensors").is_file()
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    assert loaded.ranker.tree == trainer.model.ranker.tree != loaded.label_tree == trainer.model.label_tree
    for kind in PREDICT_WITH:
        assert loaded.predict(TEXTS, predict_with=kind) == trainer.model.predict(TEXTS, predict_with=kind)
    assert trainer.evaluate(make_documents(50, seed=2))["eval_P@1"] > 0.5


def test_heads_alone(train, tmp_path, monkeypatch):
    kill_in("train_ranker")(monkeypatch)
    trainer = train(predict_with="heads")
    assert trainer.model.ranker is None and not (tmp_path / "ranker.safetensors").exists()
    loaded = XMCForTextClassification.from_pretrained(tmp_path)
    assert loaded.config.predict_with == "heads" and loaded.predict(TEXTS) == trainer.model.predict(TEXTS)
    with pytest.raises(ValueError, match="no ranker"):
        loaded.predict(TEXTS, predict_with="ranker")
    assert trainer.evaluate(make_documents(50, seed=2))["eval_P@1"] > 0.1


def test_the_share_of_the_heads_is_the_best_on_the_evaluation_set(train):
    evaluation = make_documents(60, seed=2)
    # So few terms that TF-IDF alone does not tell the labels apart.
    trainer = train(level_steps=[10], tfidf_max_features=12, eval_dataset=evaluation)
    chosen = trainer.model.config.heads_weight
    results = {}
    for share in range(0, 101, 5):
        trainer.model.config.heads_weight = share / 100
        results[share / 100] = trainer.evaluate(evaluation)["eval_nDCG@5"]
    best = max(results.values())
    assert chosen == min(share for share, value in results.items() if value == best)
    assert best > results[0.0] and len(set(results.values())) > 5
    (logged,) = (entry for entry in trainer.state.log_history if "heads_weight" in entry)
    assert logged["heads_weight"] == chosen and logged["eval_nDCG@5"] == pytest.approx(best)


@pytest.mark.parametrize(
    "options, share",
    [
        ({}, 0.2),
        ({"heads_weight": 0.7}, 0.7),
        ({"heads_weight": 0.0, "eval_dataset": make_documents(20, seed=2)}, 0.0),
    ],
    ids=["no evaluation set", "given", "given 0"],
)
def test_the_share_of_the_heads(train, tmp_path, options, share):
    train(level_steps=[1], **options)
    config = XMCForTextClassification.from_pretrained(tmp_path).config
    assert (config.heads_weight, config.predict_with) == (share, "both" if share else "ranker")


@pytest.mark.parametrize("head_ranking", ["leaf", "path"])
def test_the_score_of_both_is_the_weighted_mean(encoder_model_folder, head_ranking):
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    model.config.beam_size, model.config.heads_weight, model.config.head_ranking = 0, 0.3, head_ranking
    ranked, own, both = (
        [dict(row) for row in model.predict(TEXTS, top_k=60, predict_with=kind)] for kind in PREDICT_WITH
    )
    for document in range(len(TEXTS)):
        assert len(both[document]) == 60
        for label, score in both[document].items():
            assert score == pytest.approx(0.7 * ranked[document][label] + 0.3 * own[document][label], abs=1e-5)


def test_the_length_of_the_embedding_beside_tfidf(train, tmp_path):
    trainer = train(level_steps=[0], embedding_scale=3.0)
    features = trainer.model.featurize(TEXTS)
    assert np.allclose(np.linalg.norm(trainer.model.ranker_features(features).dense, axis=1), 3, atol=1e-4)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(TEXTS) == trainer.model.predict(TEXTS)


def test_vectors_are_kept_for_a_later_run(train, tmp_path, monkeypatch):
    calls = []
    embed = XMCForTextClassification.embed
    monkeypatch.setattr(
        XMCForTextClassification, "embed", lambda self, *rest: calls.append(len(rest[0])) or embed(self, *rest)
    )
    for run in ("first", "second"):
        train(folder=tmp_path / run, level_steps=[2], embedding_cache=str(tmp_path / "cache"))
    # Before each level and for the ranker; the second run finds them all. Single documents are timed for the card.
    assert [count for count in calls if count > 1] == [160] * 4
    assert_same_model(tmp_path / "first", tmp_path / "second")


# ---- Data ----


def test_labels_that_only_the_evaluation_set_has(train):
    rows = make_documents(30, seed=2)
    unseen = rows.map(lambda row: {"labels": [*row["labels"], "never seen"]})
    trainer = train(level_steps=[2], eval_strategy="steps", eval_steps=2, eval_dataset=unseen)
    final = trainer.state.log_history[-1]
    assert 0 < final["eval_R@10"] < 1 and final["eval_P@1"] > 0.5


def test_several_evaluation_sets(train):
    sets = {"a": make_documents(20, seed=2), "b": make_documents(20, seed=3)}
    trainer = train(level_steps=[2], eval_strategy="steps", eval_steps=2, eval_dataset=sets)
    names = {name for entry in trainer.state.log_history for name in entry}
    assert {"eval_a_P@1", "eval_b_P@1", "heads_weight"} < names


@pytest.mark.parametrize("count", [1, 3])
def test_very_few_labels(train, tmp_path, count):
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
    trainer = train(data=rows, level_steps=[8], level_cost_sensitive=True)
    assert len(trainer.model.predict(["", "topic07"])[0]) == 10


@pytest.mark.parametrize("fits", [True, False])
def test_a_given_tree(train, tiny_encoder, fits):
    tree = LabelTree.from_parents([[0, 0], np.arange(60 if fits else 7) % 2])
    model = XMCForTextClassification.from_encoder(tiny_encoder, label_tree=tree, max_length=16)
    if fits:
        assert train(model=model, level_indices=[1, 2], level_steps=[2]).model.label_tree is tree
    else:
        with pytest.raises(ValueError, match="tree has 7 labels, but there are 60"):
            train(model=model)


# ---- Encoders ----


def test_an_encoder_without_a_padding_token(train, tmp_path):
    folder = tmp_path / "gpt"
    tokenizer = make_tokenizer(plain=True)
    tokenizer.save_pretrained(folder)
    GPT2Model(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).save_pretrained(folder)
    trainer = train(model=folder, level_steps=[3], folder=tmp_path / "model")
    assert trainer.model.tokenizer.pad_token_id is None and trainer.model.config.pooling == "last"
    loaded = XMCForTextClassification.from_pretrained(tmp_path / "model")
    for kind in PREDICT_WITH:
        # An empty text has no token at all.
        assert loaded.predict([*TEXTS, ""], predict_with=kind) == trainer.model.predict(
            [*TEXTS, ""], predict_with=kind
        )


def test_windows(train):
    rows = make_documents(160, seed=7).map(lambda row: {"text": " ".join([row["text"]] * 4)})
    trainer = train(data=rows, level_steps=[2], encoder_long_text="windows", encoder_max_windows=3)
    assert trainer.model.config.long_text == "windows"
    assert max(len(windows) for windows in trainer.model.tokenize(rows["text"][:20])) == 3

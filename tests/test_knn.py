"""Labels by the votes of similar documents: against a slow oracle, in files, and in an ensemble."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from conftest import make_documents, refused, train_linear
from scipy.sparse import csr_matrix
from small_problems import random_problem

from hf_xmc import XMCEnsemble, XMCForTextClassification, pipeline
from hf_xmc.features import Features
from hf_xmc.hub.model_card import write_model_card
from hf_xmc.kernels_similarity import largest_of_rows
from hf_xmc.knn_ranker import KNNRanker
from hf_xmc.label_tree import LabelTree
from hf_xmc.linear_ranker import RANKER_FILE
from hf_xmc.remote_code import code_files
from hf_xmc.serialization import save_tensors
from hf_xmc.training.options import KNNArguments
from hf_xmc.training.parts import index_documents


def problem(seed=0, documents=70):
    features, targets = random_problem(seed, documents, dense=0)
    queries, _ = random_problem(seed + 1, 40, dense=0)
    return features, targets, queries


def indexed(features, targets, **options):
    return index_documents(features, targets, LabelTree.flat(targets.shape[1]), KNNArguments(**options))


def slow_votes(query, documents, targets, count, exponent, terms):
    """Labels and scores of one document, best first; of equal scores the lower label first."""
    similarities = []
    for known in range(len(documents)):
        row = documents[known].astype(np.float64)
        if terms:
            row = np.where(np.isin(np.arange(len(row)), np.argsort(-row, kind="stable")[:terms]), row, 0)
        similarities.append(row @ query)
    alike = [known for known in range(len(documents)) if similarities[known] > 0]
    voters = sorted(alike, key=lambda known: -similarities[known])
    votes: dict[int, float] = defaultdict(float)
    for known in voters[:count]:
        for label in np.flatnonzero(targets[known]):
            votes[int(label)] += similarities[known] ** exponent
    total = sum(similarities[known] ** exponent for known in voters[:count])
    return {label: value / total for label, value in votes.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"count": 3}, {"count": 1, "exponent": 1.0}, {"count": 7, "exponent": 2.5, "terms": 4}, {"terms": 0}],
)
@pytest.mark.parametrize("top_k", [1, 5, 40])
def test_votes_are_those_of_the_oracle(options, top_k):
    features, targets, queries = problem()
    scores, labels = indexed(features, targets, **options).predict(queries, top_k)
    assert scores.shape == labels.shape == (len(queries), top_k)
    documents, truth = features.sparse.toarray(), targets.toarray()
    for row, query in enumerate(queries.sparse.toarray().astype(np.float64)):
        votes = slow_votes(query, documents, truth, **vars(KNNArguments(**options)))
        found = labels[row][labels[row] >= 0]
        assert len(found) == len(set(found)) == min(top_k, len(votes))
        assert scores[row, : len(found)] == pytest.approx([votes[label] for label in found], rel=1e-4)
        # None that was left out has more votes.
        assert scores[row, : len(found)] == pytest.approx(sorted(votes.values(), reverse=True)[: len(found)], rel=1e-4)
        assert (scores[row, len(found) :] == 0).all() and (labels[row, len(found) :] == -1).all()
        assert (np.diff(scores[row]) <= 0).all()


@pytest.mark.parametrize(
    "documents, truth, asked, labels, scores",
    [
        # Of equal labels the lower comes first, and a document finds itself.
        (np.eye(3), [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 1]], np.eye(3),
         [[1, 3, -1], [0, -1, -1], [2, 3, -1]], [[1, 1, 0], [1, 0, 0], [1, 1, 0]]),
        # Documents that are unlike do not vote.
        ([[1, 0], [-1, 0]], np.eye(2), [[1, 0], [0, 1], [0, 0]],
         [[0, -1], [-1, -1], [-1, -1]], [[1, 0], [0, 0], [0, 0]]),
        # Documents that are hardly alike vote as well.
        (np.eye(2), np.eye(2), [[2e-15, 1e-15]], [[0, 1]], [[16 / 17, 1 / 17]]),
    ],
    ids=["equal", "unlike", "hardly alike"],
)  # fmt: skip
def test_who_votes(documents, truth, asked, labels, scores):
    known, new = (Features(csr_matrix(np.array(rows, dtype=np.float32))) for rows in (documents, asked))
    found = indexed(known, csr_matrix(np.array(truth, dtype=np.float32))).predict(new, len(labels[0]))
    assert found[1].tolist() == labels
    np.testing.assert_allclose(found[0], scores, rtol=1e-6)


def test_threads_batches_and_index_types_change_nothing(monkeypatch):
    features, targets, queries = problem(documents=300)
    ranker = indexed(features, targets)
    expected = ranker.predict(queries, 5, num_threads=1)
    monkeypatch.setattr("hf_xmc.knn_ranker.DOCUMENTS_PER_TASK", 7)
    wide = queries.sparse.copy()
    wide.indptr, wide.indices = wide.indptr.astype(np.int64), wide.indices.astype(np.int64)
    for asked, threads in ((queries, 2), (Features(wide), 1), (Features(wide), None)):
        for found, right in zip(ranker.predict(asked, 5, num_threads=threads), expected, strict=True):
            assert np.array_equal(found, right)


def test_the_largest_entries_of_rows():
    rows = csr_matrix(np.array([[3, 1, 2, 1], [0, 0, 0, 0], [5, 5, 5, 0], [0, 1, 0, 0]], dtype=np.float32))
    kept = largest_of_rows(rows.indptr, rows.data, 2)
    assert kept.tolist() == [True, False, True, False, True, True, False, True]


def test_wrong_documents():
    features, targets, _ = problem()
    ranker = indexed(features, targets)
    other, _ = random_problem(dense=2)
    refused("40 sparse and 2 dense.*40 and 0", ranker.predict, other)
    refused("top_k", ranker.predict, features, 0)


def test_save_and_load_bit_equal(tmp_path):
    features, targets, queries = problem()
    ranker = indexed(features, targets, count=9, exponent=3.0)
    ranker.save_pretrained(tmp_path)
    ranker.tree.save_pretrained(tmp_path)
    for again in (KNNRanker.from_pretrained(tmp_path), KNNRanker.from_pretrained(tmp_path, tree=ranker.tree)):
        assert (again.count, again.power, again.num_bytes) == (9, 3.0, ranker.num_bytes)
        for found, expected in zip(again.predict(queries), ranker.predict(queries), strict=True):
            assert np.array_equal(found, expected)
    LabelTree.flat(5).save_pretrained(tmp_path)
    refused(RANKER_FILE, KNNRanker.from_pretrained, tmp_path)


def test_damaged_files(tmp_path):
    features, targets, _ = problem()
    ranker = indexed(features, targets)
    metadata = {"count": "9", "power": "3.0", "tree": ranker.tree.digest()}
    arrays = vars(ranker.index)
    for name in arrays:
        part = {key: value for key, value in arrays.items() if key != name}
        save_tensors(tmp_path / RANKER_FILE, part, "neighbour ranker", metadata)
        refused(f"{RANKER_FILE}.*{name}", KNNRanker.from_pretrained, tmp_path, tree=ranker.tree)
        save_tensors(tmp_path / RANKER_FILE, {**arrays, name: arrays[name][:-1]}, "neighbour ranker", metadata)
        refused(RANKER_FILE, KNNRanker.from_pretrained, tmp_path, tree=ranker.tree)
    save_tensors(tmp_path / RANKER_FILE, arrays, "neighbour ranker", {"power": "1"})
    refused(f"{RANKER_FILE}.*count", KNNRanker.from_pretrained, tmp_path, tree=ranker.tree)


# ---- As a model ----


def test_a_model_is_saved_loaded_and_joined_with_others(tmp_path):
    documents, held_out = make_documents(400), make_documents(60, seed=1)
    trainer = train_linear(tmp_path / "knn", documents, method="knn", knn_count=20)
    model = XMCForTextClassification.from_pretrained(tmp_path / "knn")
    assert isinstance(model.ranker, KNNRanker) and model.ranker.count == 20
    assert model.config.ranker_type == "knn" and model.label_tree.depth == 1
    texts = list(held_out["text"])
    tagged = pipeline(str(tmp_path / "knn"), top_k=3)(texts)
    assert tagged == pipeline(model=trainer.model, top_k=3)(texts)
    assert pipeline(str(tmp_path / "knn"))("") == []
    train_linear(tmp_path / "linear", documents)
    ensemble = XMCEnsemble.from_members([tmp_path / "linear", tmp_path / "knn"], weights=[0.7, 0.3])
    ensemble.save_pretrained(tmp_path / "both")
    linear, own = (pipeline(str(tmp_path / name), top_k=50)(texts[0]) for name in ("linear", "knn"))
    scores = {row["label"]: 0.7 * row["score"] for row in linear}
    for row in own:
        scores[row["label"]] = scores.get(row["label"], 0) + 0.3 * row["score"]
    for row in pipeline(str(tmp_path / "both"), top_k=3)(texts[0]):
        assert row["score"] == pytest.approx(scores[row["label"]], abs=1e-5)
    warning = "publish the model only if"
    assert warning in (tmp_path / "knn" / "README.md").read_text()
    assert "empty text" in (tmp_path / "knn" / "README.md").read_text()
    assert warning not in (tmp_path / "linear" / "README.md").read_text()
    assert warning in write_model_card(tmp_path / "both").read_text()
    assert {"knn_ranker.py", "kernels_similarity.py"} <= {path.name for path in code_files()}


def test_texts_of_labels_vote_too(tmp_path):
    documents = make_documents(200)
    names = sorted({label for labels in documents["labels"] for label in labels})
    texts = {name: f"word1 {name}" for name in names}
    ranker = train_linear(tmp_path, documents, texts, method="knn", label_text_weight=0.5).model.ranker
    assert isinstance(ranker, KNNRanker) and len(ranker.index.label_begin) - 1 > len(documents)


def test_a_ranker_that_this_version_does_not_know(tmp_path):
    trainer = train_linear(tmp_path, make_documents(100), method="knn")
    trainer.model.config.ranker_type = "oracle"
    trainer.model.config.save_pretrained(tmp_path)
    refused("ranker_type='oracle'", XMCForTextClassification.from_pretrained, tmp_path)

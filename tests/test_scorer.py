"""Label vectors, votes by vectors and the last scorer: against slow oracles, scikit-learn, and in whole trainings."""

import json
from functools import partial

import metric_oracles
import numpy as np
import oracles
import pytest
from conftest import make_documents, refused, train_linear
from datasets import Dataset
from scipy.sparse import csr_matrix
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression
from small_problems import random_problem

from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.label_vectors import dense_products
from hf_xmc.remote_code import code_files
from hf_xmc.scorer import SCORER_FILE, PartScores, Scorer, default_scorer, unite
from hf_xmc.tfidf import TfidfFeaturizer
from hf_xmc.training.parts import index_vectors, make_label_vectors, word_columns
from hf_xmc.training.scoring import (
    MIN_DOCUMENTS,
    TOLERATED_LOSS,
    UNSEEN_TRUST,
    candidates_of,
    fit_scorer,
    gain_of_parts,
    held_out_documents,
    rank_candidates,
)


def lists_of(targets):
    return [row.indices.tolist() for row in targets]


@pytest.mark.parametrize("size", [1, 3, 16, 45])
def test_products_with_float16_vectors(size):
    rng = np.random.default_rng(size)
    documents = rng.normal(size=(5, size)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    vectors = (rng.normal(size=(9000, size)) * 10.0 ** rng.integers(-7, 5, (9000, 1))).astype(np.float16)
    vectors[0], vectors[1] = 0, np.float16(2.0**-24)  # the smallest number of all
    vectors[2] = np.float16(-65504)
    found = dense_products(documents, vectors)
    expected = documents.astype(np.float64) @ vectors.astype(np.float64).T
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    assert (np.abs(found - expected) <= 1e-6 * lengths).all() and (found[:, 1] != 0).any()
    # Equal to the bit, however many documents, vectors and threads there are.
    np.testing.assert_array_equal(dense_products(documents[2:3], vectors, num_threads=1), found[2:3])
    np.testing.assert_array_equal(dense_products(documents, vectors[7:500]), found[:, 7:500])
    assert dense_products(documents[:0], vectors).shape == (0, 9000)


@pytest.mark.parametrize("marked", [None, "half"])
def test_label_vectors_are_those_of_the_oracle(marked):
    features, targets = random_problem(documents=40)
    texts, _ = random_problem(seed=1, documents=targets.shape[1])
    queries, _ = random_problem(seed=2, documents=6)
    columns = None if marked is None else (np.arange(40) % 2).astype(np.uint8)
    words = range(40) if columns is None else np.flatnonzero(columns).tolist()
    vectors = make_label_vectors(features, targets, texts, columns)
    rows, truth = features.sparse.toarray().astype(float).tolist(), lists_of(targets)
    dense, query_rows = features.dense.astype(float).tolist(), queries.sparse.toarray().astype(float).tolist()
    found = {name: vectors.scores(name, queries) for name in vectors.names}
    assert list(found) == ["text_tfidf", "centroid_tfidf", "text_vector", "centroid_vector"]
    for label in range(targets.shape[1]):
        sparse_centroid = oracles.centroid(rows, truth, label, words)
        dense_centroid = oracles.centroid(dense, truth, label, range(3))
        text = texts.sparse[label].toarray()[0].astype(float)
        text_words, dense_text = [text[word] for word in words], texts.dense[label].tolist()
        # One stands for the other where a label has no documents or no text.
        sparse_centroid = sparse_centroid if any(sparse_centroid) else text_words
        dense_centroid = dense_centroid if any(dense_centroid) else dense_text
        text_words = text_words if any(text_words) else sparse_centroid
        dense_text = dense_text if any(dense_text) else dense_centroid
        sparse_centroid, text_words = oracles.pruned(sparse_centroid), oracles.pruned(text_words)
        for i, query in enumerate(query_rows):
            own = [query[word] for word in words]
            expected = {
                "text_tfidf": oracles.product(own, text_words),
                "centroid_tfidf": oracles.product(own, sparse_centroid),
                "text_vector": oracles.cosine(queries.dense[i].tolist(), dense_text),
                "centroid_vector": oracles.cosine(queries.dense[i].tolist(), dense_centroid),
            }
            for name, value in expected.items():
                assert found[name][i, label] == pytest.approx(value, abs=2e-3)  # vectors are float16


def test_single_words_are_marked():
    tfidf = TfidfFeaturizer(min_df=1, lead_words=2).fit(["solar energy", "wind"])
    assert tfidf.vocabulary == ["energy", "solar", "solar energy", "wind"]
    assert word_columns(tfidf).tolist() == [1, 1, 0, 1] * 2
    assert word_columns(TfidfFeaturizer(min_df=1, ngram_range=(1, 1)).fit(["a word"])) is None


def test_votes_by_vectors_are_those_of_the_oracle():
    features, targets = random_problem(documents=50, sparse=0, dense=6)
    queries, _ = random_problem(seed=1, documents=9, sparse=0, dense=6)
    index = index_vectors(features.dense, targets)
    index.count = 7
    queries = queries.dense[2:]  # the first ones have no features
    scores, labels = index.predict(queries, top_k=40)
    for i, query in enumerate(queries.astype(float).tolist()):
        votes = oracles.softmax_votes(query, features.dense.astype(float).tolist(), lists_of(targets), 7, 0.05)
        found = {int(label): score for label, score in zip(labels[i], scores[i], strict=True) if label >= 0}
        # Vectors are float16, so that the last of the nearest documents may be another one that is as far away.
        assert sum(found.values()) == pytest.approx(sum(votes.values()), abs=0.05)
        for label in found.keys() | votes.keys():
            assert found.get(label, 0.0) == pytest.approx(votes.get(label, 0.0), abs=0.05)


def some_parts(rng, documents, labels):
    """A part that scores all labels and one that knows the best five."""
    matrix = rng.random((documents, labels)).astype(np.float32)
    best = np.argsort(-rng.random((documents, labels)), axis=1)[:, :5]
    scores = -np.sort(-rng.normal(size=(documents, 5)), axis=1).astype(np.float32)
    return {"centroid_tfidf": PartScores.from_matrix(matrix, 4), "ranker": PartScores.from_list(scores, best)}


def test_prediction_is_that_of_the_oracle():
    rng = np.random.default_rng(0)
    parts, counts = some_parts(rng, 8, 30), rng.integers(0, 50, 30)
    counts[:6] = 0
    weights, curve = rng.random((2, 2, 3)), np.array([[-3.0, 0.0, 1.0], [-2.0, 0.0, 4.0]])
    scorer = Scorer(["ranker", "centroid_tfidf"], weights, [0.3, -0.1], -0.5, 0.7, curve)
    probabilities, labels = scorer.predict(parts, np.log1p(counts).astype(np.float32), 6)
    ranker, centroids = parts["ranker"], parts["centroid_tfidf"]
    for i in range(8):
        proposed = set(ranker.labels[i].tolist()) | set(centroids.labels[i].tolist())
        known = dict(zip(ranker.labels[i].tolist(), ranker.scores[i].tolist(), strict=True))
        expected = {}
        for label in proposed:
            scores = [known.get(label, min(known.values())), float(centroids.matrix[i, label])]
            best = [max(known.values()), float(centroids.matrix[i].max())]
            value = oracles.last_logit(scores, best, weights, counts[label], counts.max(), (0.3, -0.1), -0.5, 0.7)
            points = [-3.0 - 1e6, *curve[0], 1.0 + 1e6], [-2.0 - 2e6 / 3, *curve[1], 4.0 + 4e6]
            expected[label] = 1 / (1 + np.exp(-np.interp(value, *points)))
        order = sorted(expected, key=lambda label: -expected[label])[:6]
        assert labels[i].tolist() == order
        assert probabilities[i] == pytest.approx([expected[label] for label in order], abs=1e-4)


def made_candidates(rng, documents=400, labels=20, each=8):
    """Candidates whose truth follows a known logistic model of two parts."""
    document = np.repeat(np.arange(documents), each)
    label = np.concatenate([rng.choice(labels, each, replace=False) for _ in range(documents)])
    scores = np.stack([rng.normal(size=len(label)), rng.random(len(label))], axis=1)
    best = scores.reshape(documents, each, 2).max(axis=1)[document]
    log_counts = np.log1p(rng.integers(1, 200, labels)).astype(np.float32)
    frequency = (log_counts / log_counts.max())[label]
    truth = rng.random(len(label)) < expit(2 * scores[:, 0] + (1 + frequency) * scores[:, 1] - 2)
    chunk = {"document": document, "label": label, "scores": scores, "differences": scores - best}
    targets = csr_matrix((truth.astype(np.float32), (document, label)), shape=(documents, labels))
    return {"count": np.array([documents]), **chunk}, targets, log_counts, truth


def test_the_fit_is_the_optimum_that_scikit_learn_finds():
    chunk, targets, log_counts, truth = made_candidates(np.random.default_rng(2))
    names = ["ranker", "centroid_tfidf"]
    scorer = fit_scorer(names, [chunk], targets, log_counts)
    assert scorer.num_documents == 400 and (scorer.weights >= 0).all()
    counts = log_counts[chunk["label"]].astype(float)
    frequency = counts / counts.max()
    columns = []
    for part in range(2):
        for view in ("scores", "differences"):
            columns += [chunk[view][:, part] * (1 - frequency), chunk[view][:, part] * frequency]
    design = np.stack([*columns, counts, counts**2], axis=1)
    standard = (design - design.mean(axis=0)) / design.std(axis=0)
    found = np.append(scorer.weights[:, :, :2].reshape(-1), scorer.count_weights) * design.std(axis=0)
    # Where no weight is at its bound, the optimum is that without bounds.
    free = found > 1e-6
    free[-2:] = True
    library = LogisticRegression(C=1.0, tol=1e-8, max_iter=10000).fit(standard[:, free], truth)
    assert found[free] == pytest.approx(library.coef_[0], abs=5e-3)


def test_a_part_without_information_gets_no_weight_and_a_misleading_one_none_either():
    rng = np.random.default_rng(3)
    chunk, targets, log_counts, _ = made_candidates(rng)
    chunk["scores"][:, 1] = -chunk["scores"][:, 0]  # high where labels are false
    chunk["differences"][:, 1] = 0
    scorer = fit_scorer(["ranker", "centroid_tfidf"], [chunk], targets, log_counts)
    assert scorer.weights[0].sum() > 0.5 and scorer.weights[1].max() < 0.05


def test_probabilities_are_calibrated_on_other_documents():
    rng = np.random.default_rng(4)
    chunk, targets, log_counts, truth = made_candidates(rng, documents=2000)
    # The score is a distorted logarithm of the odds: too steep above 0.
    chunk["scores"][:, 0] = np.where(chunk["scores"][:, 0] > 0, 4, 1) * chunk["scores"][:, 0]
    halves = []
    for rows in (slice(0, 1000), slice(1000, 2000)):
        own = (chunk["document"] >= rows.start) & (chunk["document"] < rows.stop)
        part = {name: chunk[name][own] for name in ("document", "label", "scores", "differences")}
        part["document"] = part["document"] - rows.start
        halves.append(({"count": np.array([1000]), **part}, targets[rows], truth[own]))
    scorer = fit_scorer(["ranker", "centroid_tfidf"], [halves[0][0]], halves[0][1], log_counts)
    other, _, true = halves[1]
    probabilities = scorer.probabilities(logits_of(scorer, other, log_counts))
    error = 0.0
    for group in np.array_split(np.argsort(probabilities), 10):
        error += abs(probabilities[group].mean() - true[group].mean()) * len(group) / len(true)
    assert error < 0.03
    assert (np.diff(scorer.probabilities(np.linspace(-50, 50, 500))) >= 0).all()


def test_few_documents_get_fixed_weights():
    chunk, targets, log_counts, _ = made_candidates(np.random.default_rng(5), documents=MIN_DOCUMENTS - 1)
    scorer = fit_scorer(["ranker", "knn_tfidf"], [chunk], targets, log_counts)
    assert scorer.num_documents == 0
    assert np.array_equal(scorer.weights, default_scorer(["ranker", "knn_tfidf"]).weights)


def test_ranked_candidates_are_those_of_the_scorer():
    rng = np.random.default_rng(6)
    parts = {name: PartScores.from_matrix(rng.random((250, 30), np.float32), 12) for name in ("ranker", "heads")}
    truth = csr_matrix(rng.random((250, 30)) < parts["heads"].matrix / 3)
    log_counts = np.log1p(rng.integers(1, 50, 30)).astype(np.float32)
    chunk = candidates_of(parts, 30)
    scorer = fit_scorer(list(parts), [chunk], truth, log_counts)
    labels, probabilities = rank_candidates(scorer, list(parts), chunk, log_counts, 5)
    expected, expected_labels = scorer.predict(parts, log_counts, 5)
    assert np.array_equal(labels, expected_labels) and probabilities == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("is_useful", [True, False])
def test_the_gain_of_parts_is_that_of_other_documents(is_useful):
    rng = np.random.default_rng(7)
    scores = rng.random((600, 30), np.float32)
    truth = csr_matrix(rng.random((600, 30)) < (scores if is_useful else 0.5) ** 4)
    parts = {"ranker": PartScores.from_matrix(rng.random((600, 30), np.float32), 12)}
    parts["knn_tfidf"] = PartScores.from_matrix(scores, 12)
    log_counts = np.log1p(np.full(30, 20)).astype(np.float32)
    chunk = candidates_of(parts, 30)
    gain, error = gain_of_parts(["knn_tfidf", "knn_vector"], list(parts), chunk, truth, log_counts)
    results = []
    for names in (list(parts), ["ranker"]):
        kept = {name: parts[name] for name in names}
        for fold in (0, 1):
            rows = chunk["document"] % 2 == fold
            half = {key: values if key == "count" else values[rows] for key, values in chunk.items()}
            columns = [list(parts).index(name) for name in names]
            half.update({key: half[key][:, columns] for key in ("scores", "differences")})
            scorer = fit_scorer(names, [half], truth, log_counts)
            # Candidates are those of all parts.
            _, labels = scorer.predict(kept, log_counts, 5, unite(parts, 10))
            for i in range(1 - fold, 600, 2):
                true = set(truth[i].indices)
                found = metric_oracles.ranking_metrics([labels[i].tolist()], [true], 5) if true else {"nDCG@5": 0.0}
                results.append((names, found["nDCG@5"]))
    both, alone = ([value for own, value in results if own == names] for names in (list(parts), ["ranker"]))
    assert gain == pytest.approx(np.mean(both) - np.mean(alone), abs=1e-6)
    assert error == pytest.approx(np.std(np.subtract(both, alone)) / 600**0.5, abs=1e-6)
    assert gain > 10 * error if is_useful else gain < 2 * error


def test_auto_keeps_similar_documents_that_pay(tmp_path):
    """Texts in which pairs of words stand for labels: classifiers of single words do not see them, neighbours do."""
    rng = np.random.default_rng(8)
    templates = [(rng.choice(400, 12, replace=False), rng.choice(50, 3, replace=False)) for _ in range(700)]
    rows = [templates[i] for i in rng.integers(0, 700, 4000)]
    texts = [" ".join(f"word{word}" for word in rng.permutation(words)[:8]) for words, _ in rows]
    data = Dataset.from_dict({"text": texts, "labels": [[f"code{label}" for label in labels] for _, labels in rows]})
    model = train_auto(tmp_path / "pays", data)
    assert model.knn is not None and "knn_tfidf" in model.scorer.parts
    model = train_auto(tmp_path / "does not", make_documents(2500))
    assert model.knn is None and "knn_tfidf" not in model.scorer.parts
    refused("knn_tfidf", model.predict, texts[:2], predict_with="knn_tfidf")


def train_auto(folder, data):
    args = XMCTrainingArguments(
        folder, method="auto", save_strategy="no", tfidf_ngram_range=[1, 1], report_to="none", disable_tqdm=True
    )
    trainer = XMCTrainer(args=args, train_dataset=data)
    trainer.train()
    return trainer.model


def candidates_with_unseen_labels(rng, documents=1500, seen=30, unseen=10, share=0.3):
    """A text part that says the same about all labels, and a ranker that knows labels with documents only."""
    labels = seen + unseen
    truth = rng.random((documents, labels)) < 0.1
    truth[:, seen:] &= rng.random((documents, 1)) < share
    text = truth + rng.normal(scale=0.4, size=truth.shape)
    ranker = np.where(np.arange(labels) < seen, truth + rng.normal(scale=0.3, size=truth.shape), rng.random(labels))
    scores = np.stack([ranker, text], axis=2).reshape(-1, 2)
    document, label = np.repeat(np.arange(documents), labels), np.tile(np.arange(labels), documents)
    best = scores.reshape(documents, labels, 2).max(axis=1)[document]
    chunk = {"document": document, "label": label, "scores": scores, "differences": scores - best}
    log_counts = np.log1p(np.where(np.arange(labels) < seen, 9, 0)).astype(np.float32)
    return {"count": np.array([documents]), **chunk}, truth, log_counts


def logits_of(scorer, chunk, log_counts):
    """The logits of all candidates by the oracle."""
    counts = np.expm1(log_counts)
    constants = (counts.max(), scorer.count_weights, scorer.bias, scorer.unseen_bias)
    parts = zip(chunk["scores"], chunk["differences"], chunk["label"], strict=True)
    return np.array([oracles.last_logit(s, s - d, scorer.weights, counts[label], *constants) for s, d, label in parts])


def ranks_of(scorer, chunk, log_counts):
    """Labels of each document, best first."""
    logits = logits_of(scorer, chunk, log_counts).reshape(int(chunk["count"][0]), len(log_counts))
    return np.argsort(-logits, axis=1, kind="stable")


def ndcg_at_5(ranks, truth):
    """nDCG@5 without the labels from 30 on in the truth."""
    values = []
    for ranked, true in zip(ranks, truth[:, :30], strict=True):
        gain = sum(1 / np.log2(place + 2) for place, label in enumerate(ranked[:5]) if label < 30 and true[label])
        values.append(gain / max(sum(1 / np.log2(place + 2) for place in range(min(5, true.sum()))), 1))
    return np.mean(values)


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_labels_without_documents_are_judged_by_their_texts_and_cost_the_others_little(share):
    chunk, truth, log_counts = candidates_with_unseen_labels(np.random.default_rng(6), share=share)
    scorer = fit_scorer(["ranker", "text_tfidf"], [chunk], csr_matrix(truth.astype(np.float32)), log_counts)
    assert not scorer.weights[0, :, 2].any() and scorer.weights[1, :, 2].sum() > 0.1
    ranks = ranks_of(scorer, chunk, log_counts)
    others = ~truth[:, 30:].any(axis=1)
    alone = np.array([[label for label in row if label < 30] for row in ranks])
    loss = ndcg_at_5(alone[others], truth[others]) - ndcg_at_5(ranks[others], truth[others])
    assert 0 <= loss <= TOLERATED_LOSS + 1e-9
    # Though no document of the fit may have them, they are shown: they may be new.
    assert (ranks[:, :10] >= 30).mean() > 0.05
    if share:
        found = np.mean([label in ranks[i, :10] for i, label in np.argwhere(truth) if label >= 30])
        assert found > 0.5


def test_without_text_parts_labels_without_documents_are_like_rare_ones():
    chunk, truth, log_counts = candidates_with_unseen_labels(np.random.default_rng(7))
    scorer = fit_scorer(["ranker", "knn_tfidf"], [chunk], csr_matrix(truth.astype(np.float32)), log_counts)
    np.testing.assert_array_equal(scorer.weights[:, :, 2], scorer.weights[:, :, 0])
    assert scorer.unseen_bias == scorer.bias


def test_labels_without_documents_that_the_fit_has_not_seen_get_fixed_trust():
    chunk, targets, log_counts, _ = made_candidates(np.random.default_rng(8))
    scorer = fit_scorer(["ranker", "text_tfidf"], [chunk], targets, log_counts)
    assert scorer.weights[1, :, 2].sum() > 0 and not scorer.weights[0, :, 2].any()
    assert scorer.unseen_bias < UNSEEN_TRUST[1]


def test_held_out_documents():
    rows = held_out_documents(4000, seed=1)
    assert len(rows) == 400 == len(set(rows)) and (np.diff(rows) > 0).all()
    assert np.array_equal(rows, held_out_documents(4000, seed=1))
    assert not np.array_equal(rows, held_out_documents(4000, seed=2))
    assert len(held_out_documents(10 * MIN_DOCUMENTS - 1, seed=1)) == 0


def test_wrong_numbers():
    right = {"parts": ["ranker", "heads"], "weights": np.ones((2, 2, 3)), "count_weights": [0, 0], "bias": 0.0}
    make = partial(Scorer, **right, unseen_bias=0.0)
    for parts in (["ranker", "ranker"], []):
        refused("parts", make, parts=parts)
    refused("shape", make, weights=np.zeros((1, 2, 3)))
    refused("negative", make, weights=-np.ones((2, 2, 3)))
    refused("finite", make, bias=np.nan)
    refused("finite", make, unseen_bias=np.inf)
    refused("ascend", make, curve=[[0, 1], [1, 0]])


# ---- In models ----


def test_a_tenth_is_held_out_without_validation(parts_model_folder):
    model = XMCForTextClassification.from_pretrained(parts_model_folder)
    assert model.scorer.num_documents == 200
    assert model.config.predict_with == "all"
    assert set(model.scorer.parts) == {"ranker", "text_tfidf", "centroid_tfidf", "knn_tfidf"}
    # In the end the parts know all documents.
    assert len(model.knn.index.label_begin) - 1 == 2000 == model.labels.num_documents


def test_validation_documents_fit_the_scorer(tmp_path):
    args = XMCTrainingArguments(str(tmp_path), method="xr-linear", save_strategy="no", disable_tqdm=True)
    trainer = XMCTrainer(args=args, train_dataset=make_documents(300), eval_dataset=make_documents(250, seed=1))
    trainer.train()
    assert trainer.model.scorer.num_documents == 250


def test_files_and_single_parts(parts_model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(parts_model_folder)
    texts = make_documents(30, seed=2)["text"][:]
    expected = model.predict(texts, top_k=4)
    model.save_pretrained(tmp_path)
    assert XMCForTextClassification.from_pretrained(tmp_path).predict(texts, top_k=4) == expected
    for name in model.available_parts:
        predicted = model.predict(texts, top_k=2, predict_with=name)
        assert len(predicted) == 30 and any(predicted)
    refused("head", model.predict, texts, predict_with="heads")
    assert {"scorer.py", "label_vectors.py"} <= {path.name for path in code_files()}


def test_the_card_says_that_the_model_holds_documents(parts_model_folder, tmp_path):
    warning = "publish the model only if"
    assert warning in (parts_model_folder / "README.md").read_text()
    train_linear(tmp_path, make_documents(300), method="xr-linear")
    assert warning not in (tmp_path / "README.md").read_text()


def test_scores_are_probabilities(parts_model_folder):
    model = XMCForTextClassification.from_pretrained(parts_model_folder)
    test = make_documents(400, seed=3)
    predicted = model.predict(test["text"][:], top_k=5)
    shown = [pair for row in predicted for pair in row]
    hits = [label in true for row, true in zip(predicted, test["labels"], strict=True) for label, _ in row]
    probabilities = np.array([score for _, score in shown])
    assert abs(probabilities.mean() - np.mean(hits)) < 0.05


def test_the_lean_model_is_the_ranker_alone(tmp_path):
    options = {"predict_with": "ranker", "label_text_weight": 0.0, "tfidf_min_df": 3, "tfidf_stemmer": "none"}
    train_linear(tmp_path, make_documents(300), method="xr-linear", **options)
    model = XMCForTextClassification.from_pretrained(tmp_path)
    assert model.scorer is model.label_vectors is model.knn is None
    assert not (tmp_path / SCORER_FILE).exists()
    text = make_documents(1, seed=5)["text"][0]
    assert model.predict([text], predict_with="ranker") == model.predict([text])
    refused("predict_with", model.predict, [text], predict_with="all")


def test_damaged_scorer_file(parts_model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(parts_model_folder)
    model.save_pretrained(tmp_path)
    path = tmp_path / SCORER_FILE
    content = json.loads(path.read_text())
    for change in ({"bias": None}, {"curve": [[1, 1], [0, 1]]}, {"parts": {"ranker": {"score": [1, 1]}}}):
        path.write_text(json.dumps({**content, **change}))
        refused(SCORER_FILE, XMCForTextClassification.from_pretrained, tmp_path)


def test_logits_of_a_single_candidate():
    part = PartScores.from_list(np.array([[2.0]], np.float32), np.array([[0]]))
    scorer = Scorer(["ranker"], np.ones((1, 2, 3)), [0, 0], 0.0, 0.0)
    probabilities, labels = scorer.predict({"ranker": part}, np.zeros(1, np.float32), 1)
    assert labels.tolist() == [[0]] and logit(float(probabilities[0, 0])) == pytest.approx(2.0, abs=1e-5)

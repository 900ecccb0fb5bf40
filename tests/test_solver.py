"""Tests of hf_xmc.kernels_solver: its optimum against scikit-learn and scipy, and its parts."""

import numpy as np
import oracles
import pytest
from conftest import pairs
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from small_problems import (
    as_rows,
    as_weights,
    assert_optimal,
    cost_sensitive_weights,
    random_problem,
    same_weights,
    uneven_tree,
)

from hf_xmc.features import Features
from hf_xmc.kernels_solver import LOGISTIC, SQUARED_HINGE, block_diagonal, collect_rows
from hf_xmc.label_tree import LabelTree
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training import ranker as ranker_training
from hf_xmc.training.options import RankerArguments
from hf_xmc.training.ranker import train_ranker

# The optimum: no pruning, no rounding, no prior.
EXACT = {
    "C": 1.0, "negative_cost": None, "cost_sensitive": False, "bias_prior": 0.0, "prune_threshold": 0.0,
    "weight_dtype": "float32", "tolerance": 1e-5, "max_passes": 3000,
}  # fmt: skip
LOSSES = ["squared_hinge", "logistic"]


def trained_weights(features, targets, **options):
    """Weights of a flat ranker, (labels, sparse + dense + 1)."""
    arguments = RankerArguments(**{**EXACT, **options})
    return as_weights(train_ranker(features, targets, LabelTree.flat(targets.shape[1]), arguments))[0]


def objectives(weights, rows, truth, loss, positive_cost=1.0, negative_cost=1.0, prior=0.0):
    """The oracle's objective of every label on all documents."""
    everything = np.ones(len(rows))
    return np.array(
        [
            oracles.node_objective(
                weights[label], rows, truth[:, label], everything,
                np.where(truth[:, label] > 0, positive_cost, negative_cost), loss, prior,
            )
            for label in range(truth.shape[1])
        ]
    )  # fmt: skip


def sklearn_weights(loss, rows, truth, cost, dual=True):
    """One scikit-learn classifier per label; its intercept is a feature with the value 1, as it is here."""
    options = {"C": cost, "dual": dual, "tol": 1e-8, "max_iter": 200_000}
    weights = []
    for label in range(truth.shape[1]):
        if loss == "squared_hinge":
            model = LinearSVC(loss="squared_hinge", intercept_scaling=1, random_state=0, **options)
        else:
            model = LogisticRegression(solver="liblinear", intercept_scaling=1, random_state=0, **options)
        model.fit(rows[:, :-1], truth[:, label])
        weights.append(np.append(model.coef_[0], model.intercept_))
    return np.array(weights)


COSTS = [(1.0, None, False, 0.0), (2.0, 0.25, False, 0.0), (1.0, 0.5, True, 0.0), (1.0, None, False, -1.0)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cost, negative_cost, cost_sensitive, prior", COSTS)
def test_optimum_of_the_objective(loss, cost, negative_cost, cost_sensitive, prior):
    """XR-Transformer, eq. 9."""
    features, targets = random_problem(seed=3, documents=30, sparse=5, dense=2, labels=6)
    truth, rows = targets.toarray(), as_rows(features)
    negative = negative_cost or cost
    loss_weights = np.where(truth > 0, cost, negative)
    if cost_sensitive:
        loss_weights = cost_sensitive_weights(truth, cost, negative)
        assert len(np.unique(loss_weights)) > 2
    options = {"C": cost, "negative_cost": negative_cost, "cost_sensitive": cost_sensitive, "bias_prior": prior}
    weights = trained_weights(features, targets, loss=loss, **options)
    assert_optimal(weights, rows, truth, np.ones_like(truth), loss_weights, loss, prior)


@pytest.mark.parametrize("loss, cost", [("squared_hinge", 1.0), ("logistic", 10.0)])
def test_optimum_on_long_documents(loss, cost):
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(60, 4)) * 8
    truth = (rows @ rng.normal(size=4) + rng.normal(size=60) * 8 > 0)[:, None].astype(np.float32)
    features = Features(None, rows)
    weights = trained_weights(features, csr_matrix(truth), loss=loss, C=cost, max_passes=100_000)
    ours = objectives(weights, as_rows(features), truth, loss, cost, cost)
    theirs = sklearn_weights(loss, as_rows(features), truth, cost, dual=False)
    np.testing.assert_allclose(ours, objectives(theirs, as_rows(features), truth, loss, cost, cost), rtol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_sparse_dense_and_both_are_one_problem(loss):
    features, targets = random_problem(seed=5, sparse=12, dense=4)
    rows = as_rows(features)[:, :-1].astype(np.float32)
    expected = trained_weights(features, targets, loss=loss)
    for part in (Features(csr_matrix(rows)), Features(None, rows)):
        np.testing.assert_allclose(trained_weights(part, targets, loss=loss), expected, atol=2e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_loose_settings_come_close_and_tight_ones_closer(loss):
    features, targets = random_problem(seed=6)
    truth, rows = targets.toarray(), as_rows(features)
    values = []
    for passes, tolerance in ((1, 0.1), (10, 0.1), (100, 1e-3), (3000, 1e-6)):
        weights = trained_weights(features, targets, loss=loss, max_passes=passes, tolerance=tolerance)
        values.append(objectives(weights, rows, truth, loss).sum())
    assert values[0] > values[1] > values[3] and values[1] < values[3] * 1.1
    assert values[3] * (1 - 1e-6) <= values[2] <= values[3] * (1 + 1e-3)


def test_stored_zeros_change_nothing():
    features, targets = random_problem(seed=7, sparse=12, dense=0)
    rows = features.sparse.toarray()
    places = np.indices(rows.shape).reshape(2, -1)
    stored = csr_matrix((rows.ravel(), tuple(places)), shape=rows.shape)
    assert stored.nnz == rows.size > features.sparse.nnz
    for threshold in (0.0, 1e-3):
        expected = trained_weights(features, targets, prune_threshold=threshold)
        np.testing.assert_allclose(
            trained_weights(Features(stored), targets, prune_threshold=threshold), expected, atol=1e-5
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_threads_and_seeds(loss):
    features, targets = random_problem(seed=8, documents=200, labels=60)

    def train(threads=None, **options):
        arguments = RankerArguments(loss=loss, max_passes=3, **options)
        return train_ranker(features, targets, LabelTree.flat(60), arguments, Runtime(num_threads=threads))

    one = train(1)
    assert same_weights(one, train(1)) and same_weights(one, train(2)) and same_weights(one, train())
    assert not same_weights(one, train(ranker_seed=1))


@pytest.mark.parametrize("loss, weighted", pairs([SQUARED_HINGE, LOGISTIC], [False, True]))
def test_block_diagonal_holds_the_costs(loss, weighted):
    """XR-Transformer, eq. 6."""
    counts = np.array([[2, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 2], [0, 3, 0, 0]], dtype=np.float32)
    level = csr_matrix(counts)
    documents = np.array([0, 2, 3])
    diagonal = np.empty((3, 16), dtype=np.float32)
    block_diagonal(level.indptr, level.indices, level.data, documents, 1, 3, loss, 2.0, 0.5, weighted, diagonal)
    shares = oracles.importance_weights(counts, 0.25)
    for row, document in enumerate(documents):
        for lane in range(3):
            true = counts[document, 1 + lane] > 0
            cost = (2.0 * shares[document, 1 + lane] if weighted else 2.0) if true else 0.5
            value = cost if loss == LOGISTIC else 1 / (2 * cost)
            assert diagonal[row, lane] == pytest.approx(value if true else -value)


def test_collect_rows_prunes_and_clears_the_buffers():
    rng = np.random.default_rng(9)
    rows = csr_matrix((rng.random((12, 9)) * (rng.random((12, 9)) < 0.5)).astype(np.float32))
    documents = np.array([1, 2, 5, 7, 11])
    values = rows.toarray()[documents]
    weights = np.zeros((9, 16), dtype=np.float32)
    weights[values.any(axis=0)] = rng.normal(size=(values.any(axis=0).sum(), 16))
    energy = np.zeros(9, dtype=np.float32)
    expected = {}
    for feature in range(9):
        influence = np.abs(weights[feature]) * np.sqrt((values[:, feature] ** 2).mean())
        if (influence >= 0.8).any():
            expected[feature] = np.where(influence >= 0.8, weights[feature], 0)
    assert 0 < len(expected) < 9
    features, kept = collect_rows(rows.indptr, rows.indices, rows.data, documents, weights, np.float32(0.8), energy)
    assert dict(zip(features.tolist(), kept.tolist(), strict=True)) == {f: row.tolist() for f, row in expected.items()}
    assert not weights.any() and not energy.any()


@pytest.mark.parametrize("limit", [0, 60])
def test_copies_of_documents_change_nothing(monkeypatch, limit):
    features, targets = random_problem(seed=11)
    arguments = RankerArguments()
    copied = train_ranker(features, targets, uneven_tree(), arguments)
    monkeypatch.setattr(ranker_training, "COPIED_NONZEROS", limit)  # no nodes are copied, or small ones only
    assert same_weights(copied, train_ranker(features, targets, uneven_tree(), arguments))


def test_threshold_bounds_the_change_of_the_logits():
    features, targets = random_problem(seed=10, dense=0)
    rows = as_rows(features)
    exact, pruned = trained_weights(features, targets), trained_weights(features, targets, prune_threshold=0.02)
    dropped = (exact != 0) & (pruned == 0)
    assert 0 < dropped.sum() < dropped.size
    influence = np.abs(exact) * np.sqrt((rows**2).mean(axis=0))
    assert np.array_equal(exact[~dropped], pruned[~dropped])
    assert influence[dropped].max() < 0.02 <= influence[(pruned != 0) & (np.arange(rows.shape[1]) < 40)].min()

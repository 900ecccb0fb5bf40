"""Tests of hf_xmc.training.shortlist: documents of each node (XR-Transformer, eq. 7 to 9)."""

from itertools import pairwise

import numpy as np
import oracles
import pytest
from conftest import pairs
from scipy.sparse import csr_matrix
from small_problems import (
    CHAIN,
    OFFSETS,
    TREE,
    as_rows,
    as_weights,
    assert_optimal,
    cost_sensitive_weights,
    random_problem,
)

from hf_xmc.label_tree import LabelTree
from hf_xmc.training import shortlist
from hf_xmc.training.options import RankerArguments
from hf_xmc.training.ranker import KeptRanker, train_ranker
from hf_xmc.training.shortlist import level_shortlist

EXACT = {"bias_prior": -1.0, "prune_threshold": 0.0, "weight_dtype": "float32", "tolerance": 1e-5, "max_passes": 3000}


def oracle_shortlist(level, negatives, beam_size, truth, rows, weights, loss):
    """`M^(t)` of one level (from 1) by the oracles, with the levels above as they were trained."""
    if level == 1:
        return np.ones((len(rows), OFFSETS[0][-1]))
    predicted = true = None
    if negatives != "tfn":
        logits = oracles.logits_of(rows, weights[: level - 1])
        scores = oracles.beam_scores(logits, OFFSETS, loss, "path", beam_size)
        predicted = oracles.top_nodes(scores, beam_size) * np.isfinite(scores)
    if negatives != "man":
        true = oracles.true_nodes(truth, CHAIN, TREE.leaf_labels.tolist())[level - 2]
    return oracles.shortlist(predicted, true, CHAIN[level - 1])


@pytest.mark.parametrize(
    "loss, negatives, beam_size", pairs(["squared_hinge", "logistic"], ["tfn", "man", "both"], [1, 2, 100])
)
def test_documents_of_each_node(loss, negatives, beam_size):
    """Eq. 7 and 8."""
    features, targets = random_problem(seed=1)
    truth, rows = targets.toarray(), as_rows(features)
    ranker = train_ranker(features, targets, TREE, RankerArguments(loss=loss))
    weights = as_weights(ranker)
    true_levels = TREE.targets(targets)
    for level in range(1, TREE.depth + 1):
        above = len(OFFSETS[level - 1]) - 1
        true_nodes = true_levels[level - 2] if level > 1 else None
        found = level_shortlist(features, true_nodes, above, negatives, beam_size, ranker, level)
        expected = oracle_shortlist(level, negatives, beam_size, truth, rows, weights, loss)
        assert len(found.indptr) == above + 1
        for parent in range(above):
            documents = found.documents(parent)
            assert (np.diff(documents) > 0).all()
            for child in range(OFFSETS[level - 1][parent], OFFSETS[level - 1][parent + 1]):
                assert documents.tolist() == np.flatnonzero(expected[:, child]).tolist()


def test_a_search_through_three_levels_keeps_a_third_of_its_nodes_on_the_way(monkeypatch):
    monkeypatch.setattr(shortlist, "LEAST_ON_THE_WAY", 1)
    features, targets = random_problem(seed=6)
    tree = LabelTree.from_parents([np.arange(size) * above // size for above, size in pairwise((1, 4, 7, 10, 14, 28))])
    ranker = train_ranker(features, targets, tree, RankerArguments())
    offsets = [level.tolist() for level in tree.child_offsets]
    logits = oracles.logits_of(as_rows(features), as_weights(ranker)[:4])
    found = level_shortlist(features, tree.targets(targets)[3], 14, "man", 6, ranker, 5)
    kept = {}
    for on_the_way in (2, 6):
        scores = oracles.beam_scores(logits, offsets, "squared_hinge", "path", on_the_way)
        kept[on_the_way] = oracles.top_nodes(scores, 6) * np.isfinite(scores)
    assert [found.documents(node).tolist() for node in range(14)] == [np.flatnonzero(n).tolist() for n in kept[2].T]
    assert not np.array_equal(kept[2], kept[6])


@pytest.mark.parametrize(
    "loss, negatives, beam_size", [("squared_hinge", "tfn", 1), ("logistic", "man", 2), ("squared_hinge", "both", 1)]
)
def test_every_level_is_optimal_on_its_shortlist(loss, negatives, beam_size):
    """Eq. 9."""
    features, targets = random_problem(seed=3, sparse=12, dense=2)
    truth, rows = targets.toarray(), as_rows(features)
    arguments = RankerArguments(
        loss=loss, C=2.0, negative_cost=0.5, cost_sensitive=True, negatives=negatives, train_beam_size=beam_size,
        **EXACT,
    )  # fmt: skip
    weights = as_weights(train_ranker(features, targets, TREE, arguments))
    counts = oracles.true_label_counts(truth, CHAIN, TREE.leaf_labels.tolist())
    for level in range(1, TREE.depth + 1):
        # The levels above the labels are always trained on the true nodes.
        kind = negatives if level == TREE.depth else "tfn"
        chosen = oracle_shortlist(level, kind, beam_size, truth, rows, weights, loss)
        loss_weights = cost_sensitive_weights(counts[level - 1], 2.0, 0.5)
        truth_of_level = counts[level - 1]
        assert_optimal(weights[level - 1], rows, truth_of_level, chosen, loss_weights, loss, arguments.bias_prior)


@pytest.mark.parametrize("negatives, beam_size", [("both", 1), ("man", 2)])
def test_blocks_that_are_trained_again_are_optimal_on_all_documents(negatives, beam_size):
    """Eq. 9."""
    features, targets = random_problem(seed=3, sparse=12, dense=2)
    truth, rows = targets.toarray(), as_rows(features)
    arguments = RankerArguments(
        C=2.0, negative_cost=0.5, cost_sensitive=True, negatives=negatives, train_beam_size=beam_size, **EXACT
    )
    old = train_ranker(features[:60], targets[:60], TREE, arguments)
    changed = truth[60:].any(axis=0) & (np.arange(28) < 6)
    weights = as_weights(train_ranker(features, targets, TREE, arguments, kept=KeptRanker(old, changed)))
    counts = oracles.true_label_counts(truth, CHAIN, TREE.leaf_labels.tolist())[-1]
    chosen = oracle_shortlist(TREE.depth, negatives, beam_size, truth, rows, weights, "squared_hinge")
    nodes = TREE.leaf_positions[np.flatnonzero(changed)]
    assert 0 < len(nodes) < 6
    costs = cost_sensitive_weights(counts, 2.0, 0.5)
    of_nodes = (array[:, nodes] for array in (counts, chosen, costs))
    assert_optimal(weights[-1][nodes], rows, *of_nodes, "squared_hinge", arguments.bias_prior)


def test_a_node_without_documents_rejects_everything():
    features, targets = random_problem(seed=4)
    truth = targets.toarray()
    truth[:, [2, 3]] = 0  # nothing is ever true under the second node
    targets = csr_matrix(truth)
    tree = LabelTree.from_parents([[0, 0], [1 if label in (2, 3) else 0 for label in range(28)]])
    found = level_shortlist(features, tree.targets(targets)[0], 2, "tfn", 1, None, 2)
    assert len(found.documents(0)) > 0 and len(found.documents(1)) == 0
    ranker = train_ranker(features, targets, tree, RankerArguments(negatives="tfn", bias_prior=-1.0))
    empty = as_weights(ranker)[1][[tree.leaf_labels.tolist().index(label) for label in (2, 3)]]
    assert not empty[:, :-1].any() and (empty[:, -1] == -1).all()
    scores, labels = ranker.predict(features, top_k=28, beam_size=0)
    assert (scores[(labels == 2) | (labels == 3)] == 0).all()
    assert np.isfinite(scores).all() and (np.sort(labels, axis=1) == np.arange(28)).all()

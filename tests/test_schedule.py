"""Tests of hf_xmc.training.schedule: options, schedule, and the equations (5), (6) and (8) of a batch."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from scipy.sparse import csr_matrix
from small_problems import random_problem, uneven_tree

from hf_xmc.label_tree import LabelTree
from hf_xmc.training.level_data import LevelData
from hf_xmc.training.options import LevelArguments, per_level
from hf_xmc.training.schedule import Schedule

TREE = uneven_tree()
OFFSETS = [offsets.tolist() for offsets in TREE.child_offsets]
CHAIN = oracles.cluster_chain(OFFSETS)


# ---- Options ----


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss": "hinge"}, "loss='hinge'.*bce, squared_hinge"),
        ({"negatives": ["both", "none"]}, "negatives='none'.*tfn, man, both, all"),
        ({"epochs": [1, -1]}, "`epochs` must not be negative"),
        ({"epochs": [math.nan]}, "`epochs` must not be negative"),
        ({"steps": [-1]}, "`steps` must not be negative"),
        ({"learning_rate": [-1e-4]}, "`learning_rate` must not be negative"),
        ({"head_learning_rate": -1.0}, "`head_learning_rate` must not be negative"),
        ({"beam_size": [20, 0]}, "`beam_size` must be at least 1"),
        ({"warmup": 1.0}, "`warmup` must be at least 0 and less than 1"),
        ({"dropout": -0.1}, "`dropout` must be at least 0 and less than 1"),
        ({"bootstrap_cost": 0.0}, "`bootstrap_cost` must be greater than 0"),
        ({"negative_weight": -1.0}, "`negative_weight` must not be negative"),
        ({"projection_learning_rate": -1.0}, "`projection_learning_rate` must not be negative"),
        ({"min_lr_ratio": 1.1}, "`min_lr_ratio` must be between 0 and 1"),
        ({"swa_start": 1.1}, "`swa_start` must be between 0 and 1"),
        ({"swa_steps": 0}, "`swa_steps` must be at least 1"),
        ({"bottleneck": -1}, "`bottleneck` must be at least 0"),
        ({"negatives": ["dynamic"]}, "negatives='dynamic'.*set `joint`"),
        ({"shrink": 0.5, "joint": True}, "`shrink` must be at least 1"),
        ({"shrink": 2.0}, "`shrink` needs `joint`"),
        ({"shrink": 2.0, "joint": True, "bottleneck": 4}, "goes without `bottleneck`"),
        ({"shrink": 2.0, "joint": True, "negatives": "both"}, "`shrink` needs `negatives='tfn'`"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LevelArguments(**options)


def test_one_value_may_come_without_a_list():
    arguments = LevelArguments(epochs=2, learning_rate=1e-5, negatives="tfn", beam_size=(5, 6))
    assert (arguments.epochs, arguments.learning_rate, arguments.steps) == ([2], [1e-5], None)
    assert (arguments.negatives, arguments.beam_size) == (["tfn"], [5, 6])


def test_one_value_for_all_levels_or_one_for_each():
    assert per_level([7], 3, "steps") == [7, 7, 7]
    assert per_level([1, 2, 3], 3, "steps") == [1, 2, 3]
    for values in ([1, 2], [1, 2, 3, 4], []):
        with pytest.raises(ValueError, match=f"`level_steps` has {len(values)} values, but 3 levels are trained"):
            per_level(values, 3, "steps")


@pytest.mark.parametrize(
    "options, levels",
    [
        ({"indices": [3, 1]}, [1, 3]),
        ({"indices": [-1]}, [3]),
        ({"indices": [-3, 1, -1]}, [1, 3]),
        ({"indices": [3], "max_nodes": 5}, [3]),
    ],
    ids=str,
)
def test_chosen_levels(options, levels):
    assert LevelArguments(**options).choose_levels(TREE) == levels


@pytest.mark.parametrize(
    "together, options, levels, negatives",
    [
        (28, {}, [3], ["all"]),
        (27, {}, [2, 3], ["all", "both"]),
        (5, {}, [2, 3], ["both", "both"]),
        (27, {"max_nodes": 6}, [2], ["all"]),
        (5, {"indices": [1, 2, 3]}, [1, 2, 3], ["all", "both", "both"]),
        (27, {"negatives": "tfn"}, [2, 3], ["tfn", "tfn"]),
        (27, {"negatives": ["all", "man"]}, [2, 3], ["all", "man"]),
    ],
    ids=str,
)
def test_levels_and_negatives_by_the_nodes_that_can_be_scored_together(
    together, options, levels, negatives, monkeypatch
):
    # The tree has 3, 6 and 28 nodes.
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", together)
    arguments = LevelArguments(**options)
    assert arguments.choose_levels(TREE) == levels
    assert arguments.choose_negatives(TREE, levels) == negatives


def test_a_tree_without_levels_above_the_labels(monkeypatch):
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", 5)
    assert LevelArguments().choose_levels(LabelTree.flat(9)) == [1]


@pytest.mark.parametrize("options", [{"indices": [i]} for i in (0, 4, -4)] + [{"indices": []}], ids=str)
def test_levels_that_are_not_there(options):
    with pytest.raises(ValueError, match="levels 1 to 3"):
        LevelArguments(**options).choose_levels(TREE)


def test_a_limit_that_leaves_no_level():
    with pytest.raises(ValueError, match="max_nodes"):
        LevelArguments(max_nodes=2).choose_levels(TREE)


# ---- Schedule ----


def make_schedule(steps, warmup=0.0, rates=None):
    rates = [1.0] * len(steps) if rates is None else rates
    return Schedule(steps, rates, [10 * rate for rate in rates], warmup)


def test_schedule_from_epochs_or_steps():
    arguments = LevelArguments(epochs=[0, 0.5, 2], learning_rate=[1e-5], head_learning_rate=[1e-3, 2e-3, 3e-3])
    schedule = Schedule.from_arguments(arguments, 3, steps_per_epoch=7)
    assert schedule.steps == [0, round(3.5), 14] and schedule.ends == [0, 4, 18] and schedule.total == 18
    assert schedule.learning_rates == [1e-5] * 3 and schedule.head_learning_rates == [1e-3, 2e-3, 3e-3]
    assert Schedule.from_arguments(LevelArguments(steps=5, epochs=9), 2, 7).steps == [5, 5]
    with pytest.raises(ValueError, match="`level_epochs` has 3 values, but 2 levels"):
        Schedule.from_arguments(arguments, 2, 7)


@pytest.mark.parametrize("steps", [[3, 2, 4], [0, 2, 3], [2, 0, 3], [2, 3, 0], [0, 0, 2], [0, 0, 0], [4]], ids=str)
def test_the_level_of_a_step(steps):
    schedule = make_schedule(steps)
    levels = [level for level, number in enumerate(steps) for _ in range(number)]
    assert [schedule.index(step) for step in range(schedule.total)] == levels
    # After the last step the last level is at work, whatever it is.
    assert schedule.index(schedule.total) == len(steps) - 1


@pytest.mark.parametrize("warmup, planned", [(0.0, 5), (0.1, 20), (0.4, 10), (0.9, 10), (0.5, 1), (0.3, 2)])
def test_learning_rates_rise_and_fall_in_every_level(warmup, planned):
    schedule = make_schedule([3, planned, 0, planned], warmup, rates=[1.0, 2.0, 3.0, 4.0])
    rising = max(1, round(warmup * planned))
    expected = []
    for done in range(planned):
        if done < rising:
            expected.append((done + 1) / rising)
        else:
            expected.append((planned - done) / (planned - rising))
    for begin, highest in ((3, 2.0), (3 + planned, 4.0)):
        rates = [schedule.learning_rate(begin + done) for done in range(planned)]
        assert rates == pytest.approx([highest * factor for factor in expected])
        assert max(rates) == highest and min(rates) > 0
        heads = [schedule.head_learning_rate(begin + done) for done in range(planned)]
        assert heads == pytest.approx([10 * rate for rate in rates])


@pytest.mark.parametrize("floor", [0.25, 1.0])
def test_learning_rates_do_not_fall_below_their_floor(floor):
    plain = make_schedule([10], 0.3)
    schedule = Schedule([10], [2.0], [20.0], 0.3, [7.0], floor)
    for step in range(10):
        factor = floor + (1 - floor) * plain.factor(step)
        assert schedule.learning_rate(step) == pytest.approx(2 * factor)
        assert schedule.head_learning_rate(step) == pytest.approx(20 * factor)
        assert schedule.projection_learning_rate(step) == pytest.approx(7 * factor)
    # Where nothing is said, projections learn as heads do.
    assert plain.projection_learning_rate(4) == plain.head_learning_rate(4)


def test_levels_that_are_trained_together_have_one_schedule():
    together = LevelArguments(joint=True, steps=5, projection_learning_rate=1e-4)
    assert together.group_levels([1, 3]) == [[1, 3]] and LevelArguments().group_levels([1, 3]) == [[1], [3]]
    assert Schedule.from_arguments(together, 1, 7).projection_learning_rates == [1e-4]
    with pytest.raises(ValueError, match="`level_steps` has 2 values, but 1 levels"):
        Schedule.from_arguments(LevelArguments(joint=True, steps=[5, 6]), 1, 7)


def test_a_level_that_ends_early_is_followed_by_the_next():
    schedule, full = make_schedule([10, 6, 4], 0.2), make_schedule([10, 6, 4], 0.2)
    schedule.end_level(7)
    assert schedule.ends == [7, 13, 17] and schedule.total == 17 and schedule.steps == [10, 6, 4]
    assert [schedule.index(step) for step in (6, 7, 12, 13, 17)] == [0, 1, 1, 2, 2]
    # The others keep their length and their learning rates, and so do the steps that were made.
    assert [schedule.factor(step) for step in range(7)] == [full.factor(step) for step in range(7)]
    assert [schedule.factor(step) for step in range(7, 17)] == [full.factor(step) for step in range(10, 20)]
    schedule.end_level(15)
    assert schedule.ends == [7, 13, 15] and schedule.state() == {"steps": [10, 6, 4], "ends": [7, 13, 15]}


# ---- Data of a level ----

FEATURES, TARGETS = random_problem(seed=6)
TRUTH = TARGETS.toarray()
COUNTS = oracles.true_label_counts(TRUTH, CHAIN, TREE.leaf_labels.tolist())
TRUE = oracles.true_nodes(TRUTH, CHAIN, TREE.leaf_labels.tolist())
BATCH = np.array([5, 0, 1, 33, 5, 69])  # document 0 has no label; one document comes twice


def predicted_nodes(above, seed=0):
    scores = np.random.default_rng(seed).random((len(TRUTH), TREE.level_sizes[above - 1]))
    return oracles.top_nodes(scores, 2)


def whole_matrices(batch, size):
    """Targets and weights of a batch over all nodes of the level; 0 where it does not name a node."""
    nodes = batch.get("nodes", np.arange(size))
    assert np.all(np.diff(nodes) > 0) and batch["targets"].dtype == batch["weights"].dtype == np.float32
    targets, weights = np.zeros((2, len(batch["targets"]), size))
    targets[:, nodes], weights[:, nodes] = batch["targets"], batch["weights"]
    return targets, weights


@pytest.mark.parametrize(
    "cost_sensitive, alpha", [(False, None), (False, 0.3), (True, None), (True, 0.3), (True, 0.0)]
)
@pytest.mark.parametrize("above, level", [(0, 1), (1, 2), (2, 3), (1, 3), (0, 3)])
@pytest.mark.parametrize("negatives", ["tfn", "man", "both", "all"])
def test_targets_weights_and_candidates_of_a_batch(negatives, above, level, cost_sensitive, alpha):
    chosen, shortlist = np.ones((len(TRUTH), TREE.level_sizes[level - 1])), None
    if above > 0 and negatives != "all":
        predicted = None if negatives == "tfn" else predicted_nodes(above)
        true = None if negatives == "man" else TRUE[above - 1]
        chosen = oracles.shortlist(predicted, true, oracles.membership(CHAIN, above, level))
        parts = [part for part in (predicted, true) if part is not None]
        shortlist = csr_matrix(np.maximum.reduce(parts).astype(np.float32))
    counts = TREE.targets(TARGETS)[level - 1]
    offsets = TREE.descendants(above, level)
    data = LevelData(level, counts, offsets, shortlist, cost_sensitive, alpha)
    # Without a value given: 1, or what a true node weighs on average.
    labelled = (COUNTS[level - 1] > 0).sum(axis=1)
    mean_true = labelled[labelled > 0].mean()
    if alpha is None:
        alpha = 1 / mean_true if cost_sensitive else 1.0
    expected = oracles.importance_weights(COUNTS[level - 1], alpha)
    if not cost_sensitive:
        expected[TRUE[level - 1] > 0] = 1
    batch = data.batch(BATCH)
    assert ("nodes" in batch) == (shortlist is not None)
    targets, weights = whole_matrices(batch, TREE.level_sizes[level - 1])
    assert np.array_equal(targets, (TRUE[level - 1] * chosen)[BATCH])
    np.testing.assert_allclose(weights, (expected * chosen)[BATCH], rtol=1e-6)
    if "nodes" in batch:
        assert np.array_equal(batch["nodes"], np.flatnonzero(chosen[BATCH].any(axis=0)))


@pytest.mark.parametrize("cost_sensitive", [False, True])
@pytest.mark.parametrize("beam_size", [None, 4])
def test_true_nodes_of_a_batch_whose_candidates_the_model_finds(cost_sensitive, beam_size):
    counts, offsets = TREE.targets(TARGETS)[1], TREE.descendants(1, 2)
    data = LevelData(2, counts, offsets, None, cost_sensitive, 0.3, in_pass=True, beam_size=beam_size)
    batch = data.batch(BATCH)
    assert batch["negative_weight"] == 0.3 and batch.get("beam_size") == beam_size
    weights = oracles.importance_weights(COUNTS[1], 0.3)
    for document, nodes, found in zip(BATCH, batch["true_nodes"], batch["true_weights"], strict=True):
        true = np.flatnonzero(TRUE[1][document])
        assert nodes.tolist() == [*true, *[-1] * (len(nodes) - len(true))]
        expected = weights[document, true] if cost_sensitive else np.ones(len(true))
        np.testing.assert_allclose(found[: len(true)], expected, rtol=1e-6)


def test_a_batch_in_which_the_model_found_no_true_node():
    tree = LabelTree.from_parents([[0, 0], [0, 0, 1, 1]])
    counts = tree.targets(csr_matrix([[1, 0, 0, 0], [0, 0, 0, 1]]))[1]
    found = csr_matrix(np.array([[0, 1], [1, 0]], dtype=np.float32))  # for each document the wrong half
    data = LevelData(2, counts, tree.descendants(1, 2), found)
    batch = data.batch(np.array([0]))
    assert batch["nodes"].tolist() == [2, 3] and not batch["targets"].any() and batch["weights"].all()
    both = data.batch(np.array([0, 1]))
    assert both["nodes"].tolist() == [0, 1, 2, 3] and not both["targets"].any()
    assert both["weights"].tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]


def test_no_candidates_at_all():
    counts = TREE.targets(TARGETS)[1]
    nothing = csr_matrix((len(TRUTH), TREE.level_sizes[0]), dtype=np.float32)
    batch = LevelData(2, counts, TREE.descendants(1, 2), nothing).batch(BATCH)
    assert batch["nodes"].shape == (0,) and batch["targets"].shape == batch["weights"].shape == (len(BATCH), 0)


def test_documents_without_labels_do_not_count_for_the_mean():
    counts = csr_matrix(np.array([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=np.float32))
    assert LevelData(1, counts, np.array([0, 3]), cost_sensitive=True).negative_weight == 1 / 1.5
    assert LevelData(1, csr_matrix((2, 3), dtype=np.float32), np.array([0, 3])).mean_true == 1

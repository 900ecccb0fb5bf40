"""Tests of hf_xmc.training.schedule and level_data: XR-Transformer, eq. 5, 6 and 8."""

import math

import numpy as np
import oracles
import pytest
import torch
from scipy.sparse import csr_matrix
from small_problems import CHAIN, TREE, random_problem
from transformers import SchedulerType, get_scheduler

from hf_xmc import XMCTrainingArguments
from hf_xmc.training.level_data import LevelData
from hf_xmc.training.schedule import Schedule

# ---- Schedule ----


def make_schedule(steps, warmup_steps=0.0, rates=None, scheduler="linear"):
    rates = [1.0] * len(steps) if rates is None else rates
    return Schedule(steps, rates, [10 * rate for rate in rates], warmup_steps=warmup_steps, scheduler=scheduler)


def make_arguments(method="xr-transformer", **options):
    return XMCTrainingArguments("out", method=method, use_cpu=True, **options)


def planned(num_groups=1, steps_per_epoch=7, method="xr-transformer", **options):
    return Schedule.from_arguments(make_arguments(method, **options), num_groups, steps_per_epoch)


def test_one_pass_for_each_level_by_default():
    schedule = planned(3)
    assert schedule.steps == [7, 7, 7] and schedule.total == 21
    assert schedule.learning_rates == [1e-4] * 3 and schedule.head_learning_rates == [5e-3] * 3
    # A tenth of the steps is warmup; then the learning rate falls to 0.
    assert planned(steps_per_epoch=20).warmup_steps == 0.1
    rates = [planned(steps_per_epoch=20).learning_rate(step) for step in range(21)]
    assert rates == pytest.approx([5e-5] + [1e-4 * (20 - step) / 18 if step > 1 else 1e-4 for step in range(1, 21)])


@pytest.mark.parametrize(
    "options, num_groups, steps",
    [
        ({"num_train_epochs": 3}, 1, [21]),
        # By the preset the labels get twice as many steps as each level above.
        ({"num_train_epochs": 3}, 2, [7, 14]),
        ({"num_train_epochs": 4}, 3, [7, 7, 14]),
        ({"num_train_epochs": 0}, 2, [0, 0]),
        ({"num_train_epochs": 0.5}, 1, [round(3.5)]),
        ({"max_steps": 10}, 1, [10]),
        ({"max_steps": 10}, 2, [3, 7]),
        ({"max_steps": 10, "num_train_epochs": 3}, 2, [3, 7]),
        ({"max_steps": 1}, 2, [0, 1]),
        ({"level_steps": 5}, 2, [5, 5]),
        ({"level_steps": [5, 6], "level_epochs": 9}, 2, [5, 6]),
        ({"level_epochs": [0, 0.5, 2]}, 3, [0, round(3.5), 14]),
        ({"num_train_epochs": 3, "method": "lightxml"}, 1, [21]),
    ],
    ids=str,
)
def test_steps_of_the_levels(options, num_groups, steps):
    schedule = planned(num_groups, **options)
    assert schedule.steps == steps and schedule.ends == np.cumsum(steps).tolist()


def test_steps_that_fit_into_a_time():
    schedule = planned(2, time_budget=3)  # a third of it for the level above the labels
    assert schedule.seconds == [60, 120] and schedule.limit > 1e9
    for step in range(1, 31):  # two seconds each
        schedule.plan_by_time(step, 2.0 * step)
        assert schedule.steps[0] == 30 or step > 28
        assert schedule.factor(step) == pytest.approx(min((step + 1) / 3, (30 - step) / 27), abs=0.08)
    assert schedule.ends[0] == 30 and schedule.index(30) == 1
    schedule.plan_by_time(31, 10.0)
    assert schedule.steps[1] == 12 and schedule.total == 42
    # Slower than planned: the level is over when its time is.
    schedule.plan_by_time(32, 125.0)
    assert schedule.total == 32
    assert Schedule.from_arguments(make_arguments(time_budget=3), 2, 7).load(schedule.state())


def test_a_stored_plan_of_other_steps():
    schedule = planned(2, level_steps=[3, 4])
    assert schedule.load({"steps": [3, 4], "ends": [2, 6]}) and schedule.total == 6
    assert not schedule.load({"steps": [3, 5], "ends": [3, 8]})


@pytest.mark.parametrize("total", [0, 1, 2, 3, 10, 99, 1000])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["xr-transformer", "x-transformer"])
def test_all_steps_are_shared_out(total, num_groups, method):
    shares = [1] * (num_groups - 1) + [1 if method == "x-transformer" else 2]
    for options in ({"max_steps": total}, {"num_train_epochs": total / 50}) if total else ({"num_train_epochs": 0},):
        steps = planned(num_groups, 50, method, **options).steps
        assert sum(steps) == total and len(steps) == num_groups
        for number, share in zip(steps, shares, strict=True):
            assert abs(number - total * share / sum(shares)) <= 1


def test_learning_rates_of_the_levels():
    schedule = planned(2, learning_rate=1e-5, level_head_learning_rate=[1e-3, 2e-3])
    assert schedule.learning_rates == [1e-5] * 2 and schedule.head_learning_rates == [1e-3, 2e-3]
    schedule = planned(2, learning_rate=1e-5, level_learning_rate=[3e-5, 4e-5])
    assert schedule.learning_rates == [3e-5, 4e-5]
    for name in ("level_epochs", "level_steps", "level_learning_rate"):
        with pytest.raises(ValueError, match=name):
            planned(2, **{name: [1, 2, 3]})


def test_values_that_are_set_after_construction():
    # As a hyperparameter search does.
    args = XMCTrainingArguments("out", method="xr-transformer", use_cpu=True)
    args.num_train_epochs, args.learning_rate, args.warmup_steps = 2.0, 3e-4, 5
    args.lr_scheduler_type, args.level_head_learning_rate = SchedulerType.COSINE, 1e-3
    schedule = Schedule.from_arguments(args, 1, 7)
    assert (schedule.steps, schedule.learning_rates, schedule.head_learning_rates) == ([14], [3e-4], [1e-3])
    expected = [min((step + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * max(0, step - 5) / 9)) for step in range(14)]
    assert [schedule.factor(step) for step in range(14)] == pytest.approx(expected)


@pytest.mark.parametrize("steps", [[3, 2, 4], [0, 2, 3], [2, 0, 3], [2, 3, 0], [0, 0, 2], [0, 0, 0], [4]], ids=str)
def test_the_level_of_a_step(steps):
    schedule = make_schedule(steps)
    levels = [level for level, number in enumerate(steps) for _ in range(number)]
    assert [schedule.index(step) for step in range(schedule.total)] == levels
    # After the last step the last level is at work, whatever it is.
    assert schedule.index(schedule.total) == len(steps) - 1


@pytest.mark.parametrize(
    "warmup, planned", [(0.0, 5), (0.1, 20), (0.4, 10), (0.9, 10), (0.5, 1), (0.3, 2), (1, 5), (4, 10), (10, 10)]
)
def test_learning_rates_rise_and_fall_in_every_level(warmup, planned):
    schedule = make_schedule([3, planned, 0, planned], warmup, rates=[1.0, 2.0, 3.0, 4.0])
    rising = max(1, round(warmup * planned)) if warmup < 1 else warmup
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


@pytest.mark.parametrize(
    "scheduler, expected",
    [
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, *(0.5 + 0.5 * math.cos(math.pi * part) for part in (0, 0.25, 0.5, 0.75, 1))]),
        ("constant", [1] * 7),
        ("constant_with_warmup", [0.5, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_schedulers(scheduler, expected):
    schedule = make_schedule([6], 2, scheduler=scheduler)
    assert [schedule.factor(step) for step in range(7)] == pytest.approx(expected)
    # Those of transformers start the warmup at 0 and are otherwise the same.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(scheduler, optimizer, num_warmup_steps=2, num_training_steps=6)
    assert [theirs.lr_lambdas[0](step) for step in range(2, 7)] == pytest.approx(expected[2:])


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_learning_rates_do_not_fall_below_their_minimum(ratio):
    plain = make_schedule([10], 0.3)
    schedule = Schedule([10], [2.0], [20.0], [7.0], warmup_steps=0.3, min_lr_ratio=ratio)
    for step in range(10):
        factor = ratio + (1 - ratio) * plain.factor(step)
        assert schedule.learning_rate(step) == pytest.approx(2 * factor)
        assert schedule.head_learning_rate(step) == pytest.approx(20 * factor)
        assert schedule.projection_learning_rate(step) == pytest.approx(7 * factor)
    # Where nothing is said, projections learn as heads do.
    assert plain.projection_learning_rate(4) == plain.head_learning_rate(4)


def test_a_level_that_ends_early_is_followed_by_the_next():
    schedule, full = make_schedule([10, 6, 4], 0.2), make_schedule([10, 6, 4], 0.2)
    schedule.end_level(7)
    assert schedule.ends == [7, 13, 17] and schedule.total == 17 and schedule.steps == [10, 6, 4]
    assert [schedule.index(step) for step in (6, 7, 12, 13, 17)] == [0, 1, 1, 2, 2]
    # The others keep their length and their learning rates, and so do the steps that were made.
    assert [schedule.factor(step) for step in range(7)] == [full.factor(step) for step in range(7)]
    assert [schedule.factor(step) for step in range(7, 17)] == [full.factor(step) for step in range(10, 20)]
    schedule.end_level(15)
    assert schedule.ends == [7, 13, 15]
    assert schedule.state() == {"steps": [10, 6, 4], "ends": [7, 13, 15], "elapsed": 0.0}


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


def test_no_candidates_at_all():
    counts = TREE.targets(TARGETS)[1]
    nothing = csr_matrix((len(TRUTH), TREE.level_sizes[0]), dtype=np.float32)
    batch = LevelData(2, counts, TREE.descendants(1, 2), nothing).batch(BATCH)
    assert batch["nodes"].shape == (0,) and batch["targets"].shape == batch["weights"].shape == (len(BATCH), 0)


def test_documents_without_labels_do_not_count_for_the_mean():
    counts = csr_matrix(np.array([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=np.float32))
    assert LevelData(1, counts, np.array([0, 3]), cost_sensitive=True).negative_weight == 1 / 1.5
    assert LevelData(1, csr_matrix((2, 3), dtype=np.float32), np.array([0, 3])).mean_true == 1

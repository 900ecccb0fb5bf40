"""The linear ranker: search against exhaustive scoring, independence of threads and batches, files, bad input."""

import os
from pathlib import Path

import numpy as np
import oracles
import pytest
from conftest import refused, refused_each
from guard_pages import beside_guard
from scipy.sparse import csr_matrix
from small_problems import UNEVEN_LABELS, as_rows, as_weights, random_problem, same_weights, uneven_tree

import hf_xmc.linear_ranker as linear_ranker_module
import hf_xmc.training.ranker as ranker_training_module
from hf_xmc.features import Features
from hf_xmc.label_tree import LabelTree
from hf_xmc.linear_ranker import RANKER_FILE, LinearRanker
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training.options import RankerArguments
from hf_xmc.training.ranker import default_beam, train_ranker

TREES = {"uneven": uneven_tree(), "flat": LabelTree.flat(UNEVEN_LABELS)}
LOSSES = ["squared_hinge", "logistic"]
RANKINGS = ["leaf", "path"]


def trained(tree="uneven", seed=0, documents=70, sparse=40, dense=3, **options):
    """A ranker with its training documents."""
    features, targets = random_problem(seed, documents, sparse, dense)
    return train_ranker(features, targets, TREES[tree], RankerArguments(**options)), features


def offsets_of(ranker):
    return [offsets.tolist() for offsets in ranker.tree.child_offsets]


def oracle_scores(ranker, features, weights=None, beam_size=None):
    """Raw scores (documents, labels) by the oracles; -inf for labels that the beam does not reach."""
    logits = oracles.logits_of(as_rows(features), weights or as_weights(ranker))
    arguments = (logits, offsets_of(ranker), ranker.loss, ranker.ranking)
    scores = oracles.beam_scores(*arguments, beam_size or 10**9)
    by_label = np.empty_like(scores)
    by_label[:, ranker.tree.leaf_labels] = scores
    return by_label


def as_probability(ranker, raw):
    if ranker.ranking == "path":
        return np.exp(raw)
    return np.clip((raw + 1) / 2, 0, 1) if ranker.loss == "squared_hinge" else 1 / (1 + np.exp(-raw))


def assert_predictions(ranker, scores, labels, expected, top_k, tolerance):
    """The best `top_k` of the expected raw scores, best first; where two are as good, either may come first."""
    assert scores.dtype == np.float32 and labels.dtype == np.int64
    assert scores.shape == labels.shape == (len(expected), top_k)
    for row in range(len(expected)):
        found = labels[row] >= 0
        best = np.sort(expected[row][np.isfinite(expected[row])])[::-1][:top_k]
        assert found.sum() == len(best) == len(set(labels[row][found])) and found[: len(best)].all()
        np.testing.assert_allclose(scores[row][found], as_probability(ranker, best), rtol=tolerance, atol=tolerance)
        own = expected[row][labels[row][found]]
        np.testing.assert_allclose(scores[row][found], as_probability(ranker, own), rtol=tolerance, atol=tolerance)
        assert (np.diff(scores[row]) <= 0).all() and (scores[row][~found] == 0).all()
        # Clipped scores look alike: the labels must be the best ones by their logits all the same.
        np.testing.assert_allclose(np.sort(own)[::-1], best, rtol=tolerance, atol=tolerance)


# Search --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("weight_dtype", ["float32", "int8"])
@pytest.mark.parametrize("tree", TREES)
def test_exact_search_is_exhaustive_scoring(loss, ranking, weight_dtype, tree):
    ranker, features = trained(tree, documents=40, loss=loss, ranking=ranking, weight_dtype=weight_dtype)
    expected = oracle_scores(ranker, features)
    for top_k in (1, 5, 40):  # the last is beyond the labels
        for beam_size in (0, max(ranker.tree.level_sizes), 10**6):
            scores, labels = ranker.predict(features, top_k, beam_size=beam_size)
            assert_predictions(ranker, scores, labels, expected, top_k, 2e-5)


@pytest.mark.parametrize(("sparse", "dense"), [(40, 0), (0, 6)])
def test_exact_search_with_only_one_kind_of_features(sparse, dense):
    for weight_dtype in ("float32", "int8"):
        ranker, features = trained(sparse=sparse, dense=dense, weight_dtype=weight_dtype)
        scores, labels = ranker.predict(features, 5, beam_size=0)
        assert_predictions(ranker, scores, labels, oracle_scores(ranker, features), 5, 2e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("beam_size", [1, 2, 3])
def test_narrow_beams(loss, ranking, beam_size):
    ranker, features = trained(loss=loss, ranking=ranking, beam_size=beam_size)
    scores, labels = ranker.predict(features, 25)
    expected = oracle_scores(ranker, features, beam_size=beam_size)
    assert (labels < 0).any() and (labels >= 0).any()
    assert_predictions(ranker, scores, labels, expected, 25, 2e-5)


@pytest.mark.parametrize("ranking", RANKINGS)
def test_int8_is_within_its_quantisation_error(ranking):
    options = {"ranking": ranking, "negatives": "tfn"}  # `man` negatives would see the rounding of the levels above
    exact, features = trained(weight_dtype="float32", **options)
    rounded, _ = trained(weight_dtype="int8", **options)
    weights, rows = as_weights(exact), np.abs(as_rows(features))
    bounds = []
    for level, offsets in enumerate(offsets_of(exact)):
        bound = np.zeros((len(rows), offsets[-1]))
        for parent in range(len(offsets) - 1):
            for first in range(offsets[parent], offsets[parent + 1], 16):
                block = slice(first, min(first + 16, offsets[parent + 1]))
                half_step = np.abs(weights[level][block]).max(axis=0) / 127 / 2
                half_step[40:] = 0  # dense weights and bias are not rounded
                bound[:, block] = (rows @ half_step)[:, None] + 1e-5
        bounds.append(bound)
    differences = [
        np.abs(a - b)
        for a, b in zip(
            *(oracles.logits_of(as_rows(features), levels) for levels in (weights, as_weights(rounded))), strict=True
        )
    ]
    assert all((difference <= bound).all() for difference, bound in zip(differences, bounds, strict=True))
    assert max(difference.max() for difference in differences) > 1e-5
    if ranking == "leaf":
        scores, labels = rounded.predict(features, UNEVEN_LABELS, beam_size=0)
        expected = as_probability(exact, oracle_scores(exact, features))
        limit = np.empty_like(bounds[-1])
        limit[:, exact.tree.leaf_labels] = bounds[-1]
        for row in range(len(rows)):
            assert (np.abs(scores[row] - expected[row][labels[row]]) <= limit[row][labels[row]]).all()


# Independence of threads and batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("negatives", ["tfn", "man", "both"])
@pytest.mark.parametrize("weight_dtype", ["int8", "float32"])
def test_training_does_not_depend_on_threads_or_tasks(negatives, weight_dtype, monkeypatch):
    features, targets = random_problem(seed=3, documents=200)
    arguments = RankerArguments(negatives=negatives, weight_dtype=weight_dtype, train_beam_size=2)
    one, again, two = (
        train_ranker(features, targets, TREES["uneven"], arguments, Runtime(threads)) for threads in (1, 1, 2)
    )
    assert same_weights(one, again) and same_weights(one, two)
    for size in (1, 50, 10**9):
        monkeypatch.setattr(ranker_training_module, "DOCUMENTS_PER_TASK", size)
        assert same_weights(one, train_ranker(features, targets, TREES["uneven"], arguments, Runtime(2)))


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("beam_size", [0, 2])
def test_prediction_does_not_depend_on_threads_or_batches(ranking, beam_size, monkeypatch):
    ranker, features = trained(documents=150, sparse=400, ranking=ranking)
    expected = ranker.predict(features, 7, beam_size=beam_size, num_threads=1)

    def assert_same(found):
        assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])

    for threads in (None, 2, 5):
        assert_same(ranker.predict(features, 7, beam_size=beam_size, num_threads=threads))
    for size in (1, 7, 149):
        parts = [
            ranker.predict(features[first : first + size], 7, beam_size=beam_size) for first in range(0, 150, size)
        ]
        assert_same([np.concatenate(column) for column in zip(*parts)])
    for limit, value in (("MAX_DOCUMENTS", 4), ("MAX_HEAP", 60)):
        monkeypatch.setattr(linear_ranker_module, limit, value)
        assert_same(ranker.predict(features, 7, beam_size=beam_size, num_threads=2))


@pytest.mark.slow  # compiles the kernels for 64-bit indices
@pytest.mark.parametrize(("pointer_dtype", "index_dtype"), [(np.int64, np.int64), (np.int64, np.int32)])
def test_all_index_types(pointer_dtype, index_dtype):
    features, targets = random_problem(seed=4)
    wide = features.sparse.copy()
    wide.indptr, wide.indices = wide.indptr.astype(pointer_dtype), wide.indices.astype(index_dtype)
    typed = Features(wide, features.dense)
    assert (typed.sparse.indptr.dtype, typed.sparse.indices.dtype) == (pointer_dtype, index_dtype)
    wide_targets = targets.copy()
    wide_targets.indptr, wide_targets.indices = wide_targets.indptr.astype(np.int64), wide_targets.indices.astype(int)
    expected = train_ranker(features, targets, TREES["uneven"], RankerArguments())
    ranker = train_ranker(typed, wide_targets, TREES["uneven"], RankerArguments())
    assert same_weights(ranker, expected)
    for found, right in zip(ranker.predict(typed), expected.predict(features), strict=True):
        assert np.array_equal(found, right)


# Unusual input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", ["int8", "float32"])
@pytest.mark.parametrize("edge", ["begin", "end"])
def test_search_stays_within_its_arrays(edge, weight_dtype):
    ranker, features = trained(weight_dtype=weight_dtype)
    expected = ranker.predict(features, 7)
    # The weights are not written, either.
    weights = {name: beside_guard(array, edge, writable=False) for name, array in ranker.weights.arrays.items()}
    sparse = features.sparse.copy()
    sparse.data, sparse.indices, sparse.indptr = (
        beside_guard(array, edge) for array in (sparse.data, sparse.indices, sparse.indptr)
    )
    guarded = LinearRanker(ranker.tree, type(ranker.weights)(**weights), num_sparse=40, num_dense=3)
    found = guarded.predict(Features(sparse, beside_guard(features.dense, edge)), 7)
    np.testing.assert_array_equal(found, expected)


def test_documents_without_features_get_the_biases():
    ranker, features = trained()
    assert not as_rows(features)[0, :-1].any()
    scores, labels = ranker.predict(features[:1], UNEVEN_LABELS, beam_size=0)
    biases = np.empty(UNEVEN_LABELS)
    biases[ranker.tree.leaf_labels] = as_weights(ranker)[-1][:, -1]
    np.testing.assert_allclose(scores[0], as_probability(ranker, biases[labels[0]]), rtol=1e-6)


def test_no_documents():
    ranker, features = trained()
    for threads in (1, 2):
        scores, labels = ranker.predict(features[:0], 4, num_threads=threads)
        assert scores.shape == labels.shape == (0, 4)
        assert scores.dtype == np.float32 and labels.dtype == np.int64


def test_one_label():
    features, targets = random_problem(seed=6, labels=5)
    for truth in (targets[:, :1], csr_matrix(np.ones((70, 1)))):  # the second: no document without it
        ranker = train_ranker(features, csr_matrix(truth), LabelTree.flat(1), RankerArguments())
        scores, labels = ranker.predict(features, 3)
        assert (labels == [0, -1, -1]).all() and (scores[:, 1:] == 0).all()
        positive = truth.toarray()[:, 0] > 0
        assert scores[positive, 0].mean() > 0.6
        if not positive.all():
            assert scores[~positive, 0].mean() < 0.4


@pytest.mark.filterwarnings("error")
def test_large_margins_are_probabilities_without_warnings():
    for loss in LOSSES:
        for ranking in RANKINGS:
            ranker, _ = trained(dense=2, loss=loss, ranking=ranking)
            huge = Features(csr_matrix((2, 40)), np.array([[1e6, -1e6], [-1e6, 1e6]]))
            scores, _ = ranker.predict(huge, UNEVEN_LABELS, beam_size=0)
            assert ((scores >= 0) & (scores <= 1)).all()


def test_wrong_number_of_features():
    ranker, features = trained()
    refused("39 sparse and 3 dense.*40 and 3", ranker.predict, Features(features.sparse[:, :39], features.dense))
    refused("40 sparse and 0 dense", ranker.predict, Features(features.sparse))
    refused("0 sparse and 3 dense", ranker.predict, Features(None, features.dense))


def test_wrong_top_k_and_settings():
    ranker, features = trained()
    refused("top_k", ranker.predict, features, 0)
    refused("beam_size", ranker.predict, features, beam_size=-1)
    for option in ({"loss": "hinge"}, {"ranking": "best"}):
        refused(next(iter(option)), LinearRanker, ranker.tree, ranker.weights, num_sparse=40, num_dense=3, **option)


def test_wrong_training_data():
    features, targets = random_problem()
    tree = TREES["uneven"]
    refused("70.*69", train_ranker, features, targets[:69], tree, RankerArguments())
    refused("27.*28", train_ranker, features, targets[:, :27], tree, RankerArguments())
    nothing = csr_matrix((np.zeros(1), ([0], [0])), shape=targets.shape)
    for empty in (csr_matrix(targets.shape), nothing):
        refused("label", train_ranker, features, empty, tree, RankerArguments())


def test_wrong_options():
    refused_each(RankerArguments, loss="hinge", negatives="all", ranking="label", weight_dtype="float64", C=0)
    refused_each(RankerArguments, negative_cost=-1.0, tolerance=float("nan"), train_beam_size=0, beam_size=0)
    refused_each(RankerArguments, max_passes=0, prune_threshold=-1e-3)


def test_progress_reaches_its_total_on_every_level():
    calls = []
    features, targets = random_problem()
    train_ranker(
        features, targets, TREES["uneven"], RankerArguments(), Runtime(progress=lambda *call: calls.append(call))
    )
    for level, blocks in ((1, 1), (2, 3), (3, 7)):  # one block per sixteen children
        done = [call[1:] for call in calls if call[0] == f"ranker level {level}/3"]
        assert done == sorted(done) and done[-1] == (blocks, blocks)
    assert len({call[0] for call in calls}) == 3


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_dtype": "float32", "loss": "logistic", "ranking": "path", "beam_size": 3},
        {"sparse": 0, "dense": 5},  # no records at all
        {"prune_threshold": 1e9},  # everything pruned
    ],
)
def test_save_and_load_bit_equal(tmp_path, options):
    ranker, features = trained(**options)
    ranker.save_pretrained(tmp_path)
    ranker.tree.save_pretrained(tmp_path)
    for again in (LinearRanker.from_pretrained(tmp_path), LinearRanker.from_pretrained(tmp_path, tree=ranker.tree)):
        assert same_weights(again, ranker) and again.tree == ranker.tree
        for name in ("num_sparse", "num_dense", "loss", "ranking", "beam_size", "num_bytes"):
            assert getattr(again, name) == getattr(ranker, name)
        for found, expected in zip(again.predict(features), ranker.predict(features), strict=True):
            assert np.array_equal(found, expected)
    again.save_pretrained(tmp_path)  # over the file it is mapped from
    assert same_weights(LinearRanker.from_pretrained(tmp_path), ranker)
    assert sorted(os.listdir(tmp_path)) == ["label_tree.safetensors", RANKER_FILE]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_loaded_weights_are_mapped(tmp_path):
    ranker, features = trained(documents=200)
    ranker.save_pretrained(tmp_path)
    again = LinearRanker.from_pretrained(tmp_path, tree=ranker.tree)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / RANKER_FILE) in line]
    spans = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps]
    for array in again.weights.arrays.values():
        address = array.__array_interface__["data"][0]
        assert any(first <= address < last for first, last in spans)
    assert same_weights(again, ranker) and len(again.predict(features)[0]) == 200


def test_loading_with_the_wrong_tree(tmp_path):
    ranker, _ = trained()
    ranker.save_pretrained(tmp_path)
    # The second has the same shape.
    reordered = LabelTree(ranker.tree.child_offsets, ranker.tree.leaf_labels[::-1])
    for other in (LabelTree.flat(UNEVEN_LABELS), reordered):
        other.save_pretrained(tmp_path)
        refused(RANKER_FILE, LinearRanker.from_pretrained, tmp_path)


def test_the_default_beam_grows_with_the_clusters():
    def tree(labels):
        return LabelTree.from_parents([np.zeros(labels // 16, np.int64), np.arange(labels) // 16])

    assert [default_beam(tree(labels)) for labels in (1600, 32_000)] == [40, 80]
    assert default_beam(LabelTree.flat(50_000)) == 40

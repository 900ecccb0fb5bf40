"""Tests of hf_xmc.training.label_features and clustering: label vectors and the trees built from them."""

import numpy as np
import oracles
import pytest
from conftest import pairs, refused
from scipy.sparse import csr_matrix
from small_problems import random_problem

from hf_xmc.features import Features
from hf_xmc.label_tree import LabelTree
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training.clustering import build_tree, frequency_tree
from hf_xmc.training.label_features import pifa
from hf_xmc.training.options import TreeArguments


def random_labels(count, seed=0, width=60):
    """Unit label vectors with about six entries each; the first two labels have none."""
    rng = np.random.default_rng(seed)
    rows = rng.random((count, width)) * (rng.random((count, width)) < 0.1)
    rows[:2] = 0
    return Features(csr_matrix(rows.astype(np.float32))).normalized()


def grouped_labels(sizes, seed=0):
    """Label vectors in clear groups, shuffled, and the group of each label."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = np.eye(len(sizes))[group] + 0.1 * rng.random((len(group), len(sizes)))
    return Features(csr_matrix(rows.astype(np.float32))).normalized(), group


def assert_balanced(tree, num_labels, max_leaf_size):
    """Checks that the tree has every label once, and that the label counts of siblings differ by at most one."""
    assert sorted(tree.leaf_labels.tolist()) == list(range(num_labels))
    below = np.ones(num_labels, dtype=int)
    for offsets in reversed(tree.child_offsets):
        for first, last in zip(offsets[:-1], offsets[1:]):
            assert below[first:last].max() - below[first:last].min() <= 1
        below = np.add.reduceat(below, offsets[:-1])
    assert np.diff(tree.child_offsets[-1]).max() <= max_leaf_size


def leaf_groups(tree):
    offsets = tree.child_offsets[-1]
    return [tree.leaf_labels[first:last] for first, last in zip(offsets[:-1], offsets[1:])]


# ---- Label features ----


@pytest.mark.parametrize(("sparse", "dense"), [(20, 0), (0, 5), (20, 5)])
def test_pifa(sparse, dense):
    """XR-Transformer, eq. 4."""
    features, targets = random_problem(seed=2, documents=40, sparse=sparse, dense=dense)
    vectors = pifa(features, targets)
    assert len(vectors) == targets.shape[1]
    for part, documents in ((vectors.sparse, features.sparse), (vectors.dense, features.dense)):
        assert (part is None) == (documents is None)
        if part is not None:
            rows, source = (m if isinstance(m, np.ndarray) else m.toarray() for m in (part, documents))
            np.testing.assert_allclose(rows, oracles.label_vectors(source, targets.toarray()), atol=1e-6)
            assert not rows[-1].any()  # the label without documents


def test_pifa_keeps_the_largest_entries():
    features, targets = random_problem(seed=3, documents=40, sparse=20, dense=2)
    vectors = pifa(features, targets, max_sparse=4)
    whole = oracles.label_vectors(features.sparse.toarray(), targets.toarray())
    for row, full in zip(vectors.sparse.toarray(), whole, strict=True):
        kept = sorted(range(20), key=lambda column: (-full[column], column))[:4]
        expected = np.array([full[column] if column in kept else 0.0 for column in range(20)])
        length = np.sqrt((expected**2).sum())
        np.testing.assert_allclose(row, expected / length if length else expected, atol=1e-6)
    assert np.array_equal(vectors.dense, pifa(features, targets).dense)


def test_pifa_with_stored_zeros_in_documents_and_targets():
    features, targets = random_problem(seed=4, documents=30, sparse=15, dense=3)
    everything = np.indices(features.sparse.shape).reshape(2, -1)
    stored = csr_matrix((features.sparse.toarray().ravel(), tuple(everything)), shape=features.sparse.shape)
    all_pairs = np.indices(targets.shape).reshape(2, -1)
    stored_targets = csr_matrix((targets.toarray().ravel(), tuple(all_pairs)), shape=targets.shape)
    assert stored.nnz == stored.shape[0] * stored.shape[1] and stored_targets.nnz > targets.nnz
    expected, vectors = pifa(features, targets), pifa(Features(stored, features.dense), stored_targets)
    assert np.array_equal(vectors.sparse.toarray(), expected.sparse.toarray())
    assert np.array_equal(vectors.dense, expected.dense)


def test_pifa_does_not_depend_on_the_threads():
    features, targets = random_problem(seed=5, documents=400, sparse=50, dense=4, labels=700)
    one, two = pifa(features, targets, 10, num_threads=1), pifa(features, targets, 10, num_threads=2)
    for name in ("data", "indices", "indptr"):
        assert np.array_equal(getattr(one.sparse, name), getattr(two.sparse, name))
    assert np.array_equal(one.dense, two.dense)


# ---- Balanced trees ----


@pytest.mark.parametrize(
    "num_labels, branching, max_leaf_size", pairs([17, 31, 33, 129, 1000], [16, 2, 5, 100], [16, 2, 3])
)
def test_balanced_tree_has_the_right_shape(num_labels, branching, max_leaf_size):
    tree = build_tree(random_labels(num_labels), TreeArguments(branching=branching, max_leaf_size=max_leaf_size))
    assert_balanced(tree, num_labels, max_leaf_size)
    for offsets in tree.child_offsets[1:-1]:
        assert (np.diff(offsets) == branching).all()
    assert len(np.diff(tree.child_offsets[0])) == 1 and tree.level_sizes[0] <= max(branching, 64)


@pytest.mark.parametrize("max_depth", [1, 3])
def test_max_depth(max_depth):
    tree = build_tree(random_labels(600), TreeArguments(branching=3, max_leaf_size=2, max_depth=max_depth))
    assert tree.depth == max_depth and sorted(tree.leaf_labels.tolist()) == list(range(600))


@pytest.mark.parametrize("alike", [0, 12])
def test_two_clusters_are_a_fixed_point_of_spherical_two_means(alike):
    # Where some labels are alike, the sum of their cluster is longer than that of the other.
    rows = random_labels(31, seed=7).sparse.toarray()
    rows[2 : 2 + alike, 0] += 2
    labels = Features(csr_matrix(rows)).normalized()
    tree = build_tree(labels, TreeArguments(kmeans_iterations=200))
    left, right = leaf_groups(tree)
    assert (len(left), len(right)) == (16, 15)
    rows = labels.sparse.toarray().astype(np.float64)
    centres = [rows[group].sum(axis=0) for group in (left, right)]
    direction = centres[0] / np.linalg.norm(centres[0]) - centres[1] / np.linalg.norm(centres[1])
    assert (rows[left] @ direction).min() >= (rows[right] @ direction).max() - 1e-6


def test_nodes_at_the_top_are_clusters_too():
    # Five clear groups and five nodes at the top: not a power of two.
    labels, group = grouped_labels([48] * 5)
    tree = build_tree(labels, TreeArguments(max_leaf_size=3))
    assert tree.level_sizes == [5, 80, 240]
    assert all(len(set(top)) == 1 for top in group[tree.leaf_labels].reshape(5, 48))


@pytest.mark.parametrize("clustering", ["balanced", "kmeans"])
def test_sparse_dense_and_both_give_the_same_tree(clustering):
    labels, _ = grouped_labels([16] * 4, seed=1)
    rows = labels.sparse.toarray()
    arguments = TreeArguments(clustering=clustering, branching=4, kmeans_iterations=50)
    trees = [
        build_tree(features, arguments)
        for features in (labels, Features(None, rows), Features(csr_matrix(rows[:, :2]), rows[:, 2:]))
    ]
    expected = {frozenset(members.tolist()) for members in leaf_groups(trees[0])}
    for tree in trees[1:]:
        assert {frozenset(members.tolist()) for members in leaf_groups(tree)} == expected


# ---- Trees of Bonsai ----


def test_kmeans_is_a_fixed_point_and_may_be_uneven():
    labels, _ = grouped_labels([40, 25, 10, 3], seed=2)
    tree = build_tree(labels, TreeArguments(clustering="kmeans", branching=4, max_depth=2, kmeans_iterations=100))
    assert tree.depth == 2 and sorted(tree.leaf_labels.tolist()) == list(range(78))
    members = leaf_groups(tree)
    rows = labels.sparse.toarray().astype(np.float64)
    centres = np.array([rows[group].sum(axis=0) / np.linalg.norm(rows[group].sum(axis=0)) for group in members])
    for number, group in enumerate(members):
        similarity = rows[group] @ centres.T
        assert (similarity[:, number] >= similarity.max(axis=1) - 1e-6).all()
    assert np.ptp([len(group) for group in members]) > 1


@pytest.mark.parametrize("max_depth", [None, 2, 4])
def test_kmeans_depth_and_leaf_size(max_depth):
    arguments = TreeArguments(clustering="kmeans", branching=3, max_leaf_size=10, max_depth=max_depth)
    tree = build_tree(random_labels(120), arguments)
    assert tree.depth == (max_depth or 3)
    assert sorted(tree.leaf_labels.tolist()) == list(range(120))
    for level, offsets in enumerate(tree.child_offsets[:-1]):
        assert np.diff(offsets).max() <= 3, level
    # A node that is small enough is not split: its only child holds the same labels.
    sizes = np.diff(tree.child_offsets[-1])
    for offsets in reversed(tree.child_offsets[:-1]):
        above = np.add.reduceat(sizes, offsets[:-1])
        assert (np.diff(offsets)[above <= 10] == 1).all()
        sizes = above


# ---- All trees ----


@pytest.mark.parametrize("clustering", ["balanced", "kmeans"])
def test_seed_and_threads(clustering):
    labels = random_labels(500, seed=7)

    def build(threads=None, **options):
        arguments = TreeArguments(clustering=clustering, branching=4, max_leaf_size=4, **options)
        return build_tree(labels, arguments, Runtime(num_threads=threads))

    assert build(1) == build(2) == build(1) != build(tree_seed=1)


@pytest.mark.parametrize("clustering", ["balanced", "kmeans"])
@pytest.mark.parametrize(
    "rows", [np.zeros((40, 3)), np.ones((40, 3)), np.vstack([np.zeros((39, 3)), np.ones((1, 3))])]
)
def test_equal_label_vectors(clustering, rows):
    arguments = TreeArguments(clustering=clustering, branching=2, max_leaf_size=4)
    for features in (Features(csr_matrix(rows)), Features(None, rows)):
        tree = build_tree(features, arguments)
        assert sorted(tree.leaf_labels.tolist()) == list(range(40))
        if clustering == "balanced":
            assert_balanced(tree, 40, 4)


def test_flat_trees():
    labels = random_labels(30)
    assert build_tree(labels, TreeArguments(clustering="flat")) == LabelTree.flat(30)
    assert build_tree(labels, TreeArguments(max_depth=1)) == LabelTree.flat(30)
    assert build_tree(labels, TreeArguments(max_leaf_size=30)) == LabelTree.flat(30)
    assert build_tree(random_labels(2)[np.array([0])], TreeArguments()) == LabelTree.flat(1)


@pytest.mark.slow  # compiles the kernels for 64-bit indices
def test_large_index_types():
    labels = random_labels(70)
    typed = labels.sparse.copy()
    typed.indptr, typed.indices = typed.indptr.astype(np.int64), typed.indices.astype(np.int64)
    features = Features(typed)
    assert features.sparse.indptr.dtype == np.int64
    for clustering in ("balanced", "kmeans"):
        arguments = TreeArguments(clustering=clustering)
        assert build_tree(features, arguments) == build_tree(labels, arguments)


@pytest.mark.parametrize("clustering", ["balanced", "kmeans"])
def test_progress_ends_at_its_total(clustering):
    calls = {}
    arguments = TreeArguments(clustering=clustering, branching=4, max_leaf_size=4)
    build_tree(
        random_labels(200), arguments, Runtime(progress=lambda *call: calls.setdefault(call[0], []).append(call))
    )
    for stage, reports in calls.items():
        assert stage.startswith("tree")
        assert [done for _, done, _ in reports] == list(range(1, reports[0][2] + 1))


def test_nothing_to_cluster():
    refused("label", build_tree, Features(csr_matrix((0, 5))), TreeArguments())
    refused("label", frequency_tree, np.array([]), [1.0])
    refused("frequency_tree", build_tree, random_labels(30), TreeArguments(clustering="frequency"))
    for shares in ([], [0.5, 0.4], [1.2, -0.2]):
        refused("shares", TreeArguments, shares=shares)


# ---- By frequency ----


@pytest.mark.parametrize(
    "shares, shares_of", pairs([[0.7, 0.2, 0.1], [0.5, 0.5], [1.0], [0.1, 0.3, 0.3, 0.3]], ["mass", "count"])
)
def test_labels_by_frequency_in_shares(shares, shares_of):
    counts = np.random.default_rng(1).zipf(1.5, 40)
    tree = frequency_tree(counts, shares, shares_of)
    frequent, *tails = oracles.frequency_partition(counts.tolist(), shares, shares_of == "mass")
    tails = [tail for tail in tails if tail]
    if len(tails) > 1 and len(tails[-1]) == 1:
        tails[-2:] = [tails[-2] + tails[-1]]
    assert tree.leaf_labels.tolist() == [*frequent, *(label for tail in tails for label in tail)]
    assert np.diff(tree.child_offsets[1]).tolist() == [1] * len(frequent) + [len(tail) for tail in tails]
    assert tree.depth == 2 and tree.level_sizes == [len(frequent) + len(tails), 40]


@pytest.mark.parametrize(
    "counts, children",
    [
        ([5], [1]),
        ([0, 0, 0], [1, 1, 1]),
        ([60, 20, 10, 5, 5], [1, 2, 2]),
        ([60, 20, 10, 10], [1, 3]),  # a tail of one label joins the one before,
        ([60, 30, 5, 5], [1, 1, 2]),  # or the frequent labels
    ],
)
def test_few_labels_by_frequency(counts, children):
    tree = frequency_tree(np.array(counts), [0.6, 0.3, 0.1])
    assert np.diff(tree.child_offsets[1]).tolist() == children

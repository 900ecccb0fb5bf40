"""The label tree: its checks, its makers, its targets against the oracle, its file."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from conftest import refused
from scipy.sparse import csc_matrix, csr_matrix
from small_problems import UNEVEN_LABELS, UNEVEN_PARENTS, random_problem, uneven_tree

from hf_xmc.label_tree import LabelTree, binarized


def label_paths(tree: LabelTree) -> list[list[int]]:
    """The nodes from the top down to each label, found by walking up."""
    paths: list[list[int]] = [[] for _ in range(tree.num_labels)]
    for position, label in enumerate(tree.leaf_labels):
        node = position
        for offsets in reversed(tree.child_offsets):
            node = next(b for b in range(len(offsets) - 1) if offsets[b] <= node < offsets[b + 1])
            paths[label].insert(0, node)
        paths[label] = paths[label][1:]  # without the root
    return paths


def groups(tree: LabelTree) -> set[frozenset[int]]:
    """The sets of labels under the lowest inner nodes."""
    offsets = tree.child_offsets[-1]
    return {frozenset(tree.leaf_labels[a:b].tolist()) for a, b in zip(offsets[:-1], offsets[1:])}


def test_shape():
    tree = LabelTree([[0, 2], [0, 1, 3]], [2, 0, 1])
    assert (tree.depth, tree.level_sizes, tree.num_labels) == (2, [2, 3], 3)
    assert repr(tree) == "LabelTree(1 → 2 → 3)"
    assert tree.parents(1).tolist() == [0, 0] and tree.parents(2).tolist() == [0, 1, 1]
    assert tree.leaf_labels.dtype == np.int64 and all(offsets.dtype == np.int64 for offsets in tree.child_offsets)
    flat = LabelTree.flat(5)
    assert flat.depth == 1 and flat.level_sizes == [5] and flat.leaf_labels.tolist() == [0, 1, 2, 3, 4]
    assert LabelTree.flat(1).num_labels == 1


def test_equality():
    tree = uneven_tree()
    assert tree == uneven_tree() and tree != "tree" and tree != LabelTree.flat(UNEVEN_LABELS)
    swapped = tree.leaf_labels.copy()
    swapped[:2] = swapped[1::-1]
    assert tree != LabelTree(tree.child_offsets, swapped)
    with pytest.raises(TypeError):
        hash(tree)


@pytest.mark.parametrize(
    ("child_offsets", "leaf_labels", "message"),
    [
        ([], [], "level"),
        ([[0, 2], [0, 1, 3]], [0, 1, 1], "Label 1"),
        ([[0, 2], [0, 1, 3]], [0, 0, 1], "Label 0"),
        ([[0, 2], [0, 1, 3]], [1, 2, 2], "Label 0"),
        ([[0, 2], [0, 1, 3]], [0, 1, 3], r"Label 3 is outside 0\.\.2"),
        ([[0, 2], [0, 1, 3]], [0, 1, -1], r"Label -1 is outside 0\.\.2"),
        ([[0, 2], [0, 1, 3]], [0, 1], "3.*2"),
        ([[0, 2], [0, 1, 3]], [0, 1, 2, 3], "3.*4"),
        ([[0, 3], [0, 2, 1, 3]], [0, 1, 2], "Node 1 of level 1"),
        ([[0, 2], [0, 0, 3]], [0, 1, 2], "Node 0 of level 1"),
        ([[0, 2], [0, 1, 1]], [0], "Node 1 of level 1"),
        ([[0, 0]], [], "Node 0 of level 0"),
        ([[1, 3]], [0, 1, 2], "level 1"),
        ([[0, 2], [0, 3]], [0, 1, 2], "Level 2"),
        ([[0, 2], [0, 1, 2, 3]], [0, 1, 2], "Level 2"),
        ([[0, 1, 2]], [0, 1], "Level 1"),
        ([[[0, 2]]], [0, 1], "Level 1"),
        ([[]], [], "Level 1"),
    ],
)
def test_invalid_trees(child_offsets, leaf_labels, message):
    refused(message, LabelTree, child_offsets, leaf_labels)


def test_from_parents_keeps_every_family():
    tree = uneven_tree()
    assert tree.level_sizes == [3, 6, UNEVEN_LABELS]
    expected: dict[int, set[int]] = {}
    for label, parent in enumerate(UNEVEN_PARENTS[2]):
        expected.setdefault(parent, set()).add(label)
    assert groups(tree) == {frozenset(labels) for labels in expected.values()}
    # Labels share their node of level t exactly where the given parents say so.
    top = [UNEVEN_PARENTS[1][parent] for parent in UNEVEN_PARENTS[2]]
    paths = label_paths(tree)
    for first in range(UNEVEN_LABELS):
        for second in range(UNEVEN_LABELS):
            assert (paths[first][0] == paths[second][0]) == (top[first] == top[second])
            assert (paths[first][1] == paths[second][1]) == (UNEVEN_PARENTS[2][first] == UNEVEN_PARENTS[2][second])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[0, 0], [0, 2]], r"Level 2.*0\.\.1"),
        ([[0, 0], [0, -1]], r"Level 2.*0\.\.1"),
        ([[1]], r"Level 1.*0\.\.0"),
        ([[0, 0], [1, 1]], "Node 0 of level 1"),
        ([[]], "Node 0 of level 0"),
        ([], "level"),
    ],
)
def test_from_parents_errors(parents, message):
    refused(message, LabelTree.from_parents, parents)


@pytest.mark.parametrize("kind", [csr_matrix, csc_matrix, np.array])
def test_from_cluster_chain(kind):
    chain = [kind([[1.0], [1.0]]), kind([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])]
    tree = LabelTree.from_cluster_chain(chain)
    assert tree == LabelTree.from_parents([[0, 0], [1, 0, 1]])
    assert tree.leaf_labels.tolist() == [1, 0, 2]
    for row, number in (([0, 0], 0), ([1, 1], 2)):
        wrong = [kind(np.ones((2, 1))), kind([[1, 0], row, [0, 1]])]
        refused(f"Node 1 of level 2.*{number}", LabelTree.from_cluster_chain, wrong)


def test_from_taxonomy_with_labels_at_several_depths():
    labels = ["poodle", "beagle", "animal", "dog", "stone", "cat"]
    parent_of = {"poodle": "dog", "beagle": "dog", "dog": "mammal", "cat": "mammal", "mammal": "animal"}
    tree = LabelTree.from_taxonomy(labels, parent_of)
    tree._validate()
    assert tree.num_labels == 6 and tree.depth == 4
    # dog is a label and an inner node: it lies beside its children. animal, too, lies below itself.
    assert groups(tree) == {frozenset({0, 1, 3}), frozenset({2}), frozenset({4}), frozenset({5})}
    paths = dict(zip(labels, label_paths(tree), strict=True))
    assert paths["poodle"][0] == paths["cat"][0] == paths["animal"][0] == paths["dog"][0] != paths["stone"][0]
    assert paths["poodle"][1] == paths["cat"][1] == paths["dog"][1] != paths["animal"][1]
    assert paths["poodle"][2] == paths["dog"][2] != paths["cat"][2]


def test_from_taxonomy_of_ids_and_without_any_inner_node():
    assert groups(LabelTree.from_taxonomy([10, 11, 12], {10: 1, 11: 2, 12: 1})) == {frozenset({0, 2}), frozenset({1})}
    flat = LabelTree.from_taxonomy(["a", "b"], {})
    assert flat.depth == 1 and flat.num_labels == 2


def test_wrong_taxonomies():
    cycles = [{"a": "b", "b": "a"}, {"a": "a"}, {"a": "x", "x": "y", "y": "z", "z": "x"}, {"a": "b", "b": "b"}]
    for parent_of in cycles:
        refused("cycle", LabelTree.from_taxonomy, ["a", "b"], parent_of)
    refused(r"parent_of.*'a'.*\['x', 'y'\]", LabelTree.from_taxonomy, ["a", "b"], {"a": ["x", "y"]}, error=TypeError)
    refused("'a'", LabelTree.from_taxonomy, ["a", "b", "a"], {"a": "x"})
    refused("children", LabelTree.from_taxonomy, [], {"a": "b"})


def test_indicator_is_the_cluster_matrix():
    tree = uneven_tree()
    chain = oracles.cluster_chain([offsets.tolist() for offsets in tree.child_offsets])
    indicators = [tree.indicator(level) for level in range(1, tree.depth + 1)]
    assert all(np.array_equal(found.toarray(), expected) for found, expected in zip(indicators, chain, strict=True))
    again = LabelTree.from_cluster_chain(indicators)
    assert all(np.array_equal(a, b) for a, b in zip(tree.child_offsets, again.child_offsets, strict=True))


@pytest.mark.parametrize("tree", [uneven_tree(), LabelTree.flat(UNEVEN_LABELS)], ids=["uneven", "flat"])
def test_targets_equations_5_and_6(tree):
    _, targets = random_problem(seed=1, sparse=2, dense=0)
    truth = targets.toarray()
    chain = oracles.cluster_chain([offsets.tolist() for offsets in tree.child_offsets])
    nodes = oracles.true_nodes(truth, chain, tree.leaf_labels.tolist())
    counts = oracles.true_label_counts(truth, chain, tree.leaf_labels.tolist())
    levels = tree.targets(targets)
    assert len(levels) == tree.depth
    for level, node_truth, node_counts in zip(levels, nodes, counts, strict=True):
        assert level.has_canonical_format
        assert np.array_equal(level.toarray(), node_counts)
        assert np.array_equal(level.toarray() > 0, node_truth)
    if tree.depth > 1:
        assert max(level.max() for level in levels) > 1
    assert np.array_equal(targets.toarray(), truth)


def test_targets_take_any_way_of_writing_the_same_labels():
    tree = LabelTree.from_parents([[0, 0], [0, 1, 1]])
    plain = csr_matrix(np.array([[1, 0, 1], [0, 1, 1]], dtype=np.float32))
    untidy = csr_matrix((2, 3), dtype=np.float64)
    # Label 2 of the first row twice, label 1 stored as 0, another value than 1, nothing in order.
    untidy.data = np.array([1.0, 1.0, 0.0, 1.0, 3.0, 1.0])
    untidy.indices, untidy.indptr = np.array([2, 0, 1, 2, 2, 1]), np.array([0, 4, 6])
    for expected, level, other in zip(
        tree.targets(plain), tree.targets(untidy), tree.targets(csc_matrix(plain)), strict=True
    ):
        assert np.array_equal(level.toarray(), expected.toarray())
        assert np.array_equal(other.toarray(), expected.toarray())
    assert untidy.data.tolist() == [1, 1, 0, 1, 3, 1]
    assert np.array_equal(binarized(untidy).toarray(), plain.toarray())
    refused("4.*3", tree.targets, csr_matrix((2, 4)))


def test_save_and_load_bit_equal(tmp_path):
    tree = uneven_tree()
    tree.save_pretrained(tmp_path / "new folder")
    again = LabelTree.from_pretrained(tmp_path / "new folder")
    assert again == tree and repr(again) == repr(tree)
    again.save_pretrained(tmp_path / "new folder")  # over the file it is mapped from
    assert again == tree and LabelTree.from_pretrained(tmp_path / "new folder") == tree

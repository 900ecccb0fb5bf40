"""Tests of hf_xmc.modeling_heads: heads made from a configuration, and levels trained together."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from small_problems import uneven_tree

from hf_xmc import LabelTree, XMCConfig
from hf_xmc.modeling_heads import AdaptiveHead, BottleneckHead, LevelHead, LevelHeads, dynamic_candidates, tail_sizes

TREE = uneven_tree()
DIMENSIONS, DOCUMENTS = 6, 5
FREQUENT, TAILS = 3, [4, 5]
TAIL_TREE = LabelTree([np.array([0, 5]), np.array([0, 1, 2, 3, 7, 12])], np.arange(12))
TRUE = [[0, 27, 3], [5], [], [9, 10], [27]]


def make_heads(tree=TREE, levels=(2, 3), dimensions=DIMENSIONS, **options):
    config = XMCConfig(level_sizes=tree.level_sizes, head_levels=list(levels), **options)
    heads = LevelHeads(config, dimensions)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads


def make_vectors(seed=1):
    return torch.randn(DOCUMENTS, DIMENSIONS, generator=torch.Generator().manual_seed(seed))


def padded(rows):
    return torch.tensor([row + [-1] * (4 - len(row)) for row in rows])


def rows_of(head):
    return np.hstack([head.weight.detach().numpy(), head.bias.detach().numpy()[:, None]])


# ---- Kinds of heads ----


@pytest.mark.parametrize(
    "options, kinds",
    [
        ({}, [LevelHead, LevelHead]),
        ({"head_bottleneck": 3}, [LevelHead, BottleneckHead]),
        ({"head_bottleneck": DIMENSIONS}, [LevelHead, LevelHead]),  # it would save nothing
    ],
    ids=str,
)
def test_kinds(options, kinds):
    heads = make_heads(**options)
    assert [type(head) for head in heads] == kinds
    assert [head.num_nodes for head in heads] == TREE.level_sizes[1:]
    with pytest.raises(ValueError, match="Level 1 has no head; these have: 2, 3"):
        heads.of(1)


def test_tails():
    heads = make_heads(TAIL_TREE, (1, 2), head_tails=TAILS, head_shrink=2.0)
    assert [type(head) for head in heads] == [LevelHead, AdaptiveHead]
    assert heads.of(2).num_frequent == FREQUENT and heads.of(2).num_nodes == 12
    assert tail_sizes(TAIL_TREE) == TAILS
    assert tail_sizes(LabelTree([np.array([0, 2]), np.array([0, 1, 2])], np.arange(2))) == []
    for tree in (TREE, LabelTree.flat(5), LabelTree([np.array([0, 3]), np.array([0, 1, 5, 6])], np.arange(6))):
        with pytest.raises(ValueError, match="Tails need a tree of two levels.*tree_clustering='frequency'"):
            tail_sizes(tree)


def test_bytes_beside_heads_of_full_width():
    plain, short = make_heads(), make_heads(head_bottleneck=2)
    nodes = 6 + 28
    assert plain.num_bytes == plain.full_width_bytes == short.full_width_bytes == 4 * nodes * (DIMENSIONS + 1)
    assert short.num_bytes == 4 * (6 * (DIMENSIONS + 1) + 28 * 3 + 2 * DIMENSIONS)


def test_margins_behind_a_bottleneck():
    head, vectors = make_heads(head_bottleneck=3).of(3), make_vectors()
    shorter = oracles.projected(vectors.numpy(), head.projection.weight.detach().numpy())
    (expected,) = oracles.logits_of(shorter, [rows_of(head)])
    np.testing.assert_allclose(head(vectors).detach().numpy(), expected, atol=1e-5)
    nodes = torch.tensor([3, 0, 27])
    np.testing.assert_allclose(head(vectors, nodes).detach().numpy(), expected[:, nodes], atol=1e-5)


def test_few_of_very_many_short_rows_get_a_gradient(monkeypatch):
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_SHORT_ROWS", 20)
    head = make_heads(head_bottleneck=3).of(3)
    head(make_vectors(), torch.tensor([4, 9])).sum().backward()
    assert head.weight.grad.is_sparse and not head.projection.weight.grad.is_sparse


# ---- Candidates of the same pass ----


@pytest.mark.parametrize("beam_size", [1, 2, 6, 50])
def test_candidates_are_those_under_the_best_and_the_true_nodes_above(beam_size):
    offsets = TREE.descendants(2, 3)
    logits = torch.randn(DOCUMENTS, 6, generator=torch.Generator().manual_seed(4))
    true, weights = padded(TRUE), torch.rand(DOCUMENTS, 4, generator=torch.Generator().manual_seed(5))
    found = dynamic_candidates(logits, torch.from_numpy(offsets), true, weights, 0.3, beam_size)
    expected = oracles.dynamic_candidates(logits.numpy(), offsets.tolist(), TRUE, beam_size)
    nodes = found["nodes"].tolist()
    assert nodes == sorted(set(nodes)) and set(nodes) >= {node for row in expected for node in row}
    for document, row in enumerate(expected):
        shown = {node for node, weight in zip(nodes, found["weights"][document].tolist()) if weight > 0}
        assert shown == set(row) >= set(TRUE[document])
        assert {node for node, target in zip(nodes, found["targets"][document]) if target} == set(TRUE[document])
        for place, node in enumerate(TRUE[document]):
            assert found["weights"][document, nodes.index(node)] == weights[document, place]
        others = [nodes.index(node) for node in set(row) - set(TRUE[document])]
        assert (found["weights"][document, others] == 0.3).all()


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
@pytest.mark.parametrize("bottleneck", [None, 3])
def test_the_loss_of_two_levels_with_candidates_of_the_same_pass(loss, bottleneck):
    heads, vectors = make_heads(head_bottleneck=bottleneck, head_loss=loss), make_vectors()
    upper, lower = heads
    above = torch.rand(DOCUMENTS, 6, generator=torch.Generator().manual_seed(6)) < 0.4
    weights = torch.rand(DOCUMENTS, 4, generator=torch.Generator().manual_seed(7))
    batches = [
        {"level": 2, "targets": above.float(), "weights": torch.full(above.shape, 0.5)},
        {"level": 3, "true_nodes": padded(TRUE), "true_weights": weights, "negative_weight": 0.3, "beam_size": 2},
    ]
    rows = oracles.with_constant(vectors.numpy())
    (logits_above,) = oracles.logits_of(rows, [rows_of(upper)])
    true_above = [{node: 0.5 for node in range(6) if above[document, node]} for document in range(DOCUMENTS)]
    expected = oracles.sum_of_losses(logits_above, [range(6)] * DOCUMENTS, true_above, 0.5, loss)
    if bottleneck:
        rows = oracles.projected(vectors.numpy(), lower.projection.weight.detach().numpy())
    (logits,) = oracles.logits_of(rows, [rows_of(lower)])
    shown = oracles.dynamic_candidates(logits_above, TREE.descendants(2, 3).tolist(), TRUE, 2)
    true = [dict(zip(nodes, row)) for nodes, row in zip(TRUE, weights.tolist(), strict=True)]
    expected += oracles.sum_of_losses(logits, shown, true, 0.3, loss)
    assert heads.joint_loss(vectors, batches, TREE).item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_gates_and_tails():
    heads, vectors = make_heads(TAIL_TREE, (1, 2), head_tails=TAILS), make_vectors()
    true, ones = [[0, 4], [11], [], [7, 8, 2], [1]], torch.ones(DOCUMENTS, 4)
    above = torch.zeros(DOCUMENTS, 5)
    for document, nodes in enumerate(true):
        for node in nodes:
            above[document, node if node < 3 else 3 + (node >= 7)] = 1
    batches = [
        {"level": 1, "targets": above},
        {"level": 2, "true_nodes": padded(true), "true_weights": ones, "negative_weight": 1.0},
    ]
    (logits,) = oracles.logits_of(oracles.with_constant(vectors.numpy()), [rows_of(heads[0])])
    gates = [{node: 1.0 for node in range(5) if above[document, node]} for document in range(DOCUMENTS)]
    expected = oracles.sum_of_losses(logits, [range(5)] * DOCUMENTS, gates, 1.0, "bce")
    tails = [(tail.projection.weight.detach().numpy(), rows_of(tail)) for tail in heads[1].tails]
    expected += oracles.adaptive_loss(vectors.numpy(), tails, FREQUENT, true, ones.tolist(), 1.0, "bce")
    assert heads.joint_loss(vectors, batches, TAIL_TREE).item() == pytest.approx(expected, rel=1e-5)


def test_the_heads_say_the_same_of_given_labels_as_of_those_they_find():
    heads, vectors = make_heads(TAIL_TREE, (1, 2), head_tails=TAILS, head_ranking="path"), make_vectors()
    with torch.no_grad():
        scores, nodes = heads.search(vectors, TAIL_TREE, 2, 12)
        found = heads.label_probabilities(vectors, nodes, TAIL_TREE)
    torch.testing.assert_close(found, scores)
    assert (scores >= 0).all() and (scores <= 1).all()

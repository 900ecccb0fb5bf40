"""Tests of hf_xmc.modeling_heads against the slow versions in `oracles`."""

import numpy as np
import oracles
import pytest
import torch
from conftest import refused
from small_problems import OFFSETS, ORACLE_LOSSES, TREE, make_bounded

from hf_xmc import LabelTree, XMCConfig
from hf_xmc.modeling_heads import (
    AdaptiveHead,
    BottleneckHead,
    LevelHead,
    LevelHeads,
    dynamic_candidates,
    node_losses,
    node_probabilities,
    search_heads,
    tail_sizes,
)

LOSSES = ["bce", "squared_hinge"]
DIMENSIONS, DOCUMENTS = 6, 9
TRUE = [[0, 27, 3], [5], [], [9, 10], [27], [1], [2], [3, 4], []]
FREQUENT, TAILS = 3, [4, 5]
TAIL_TREE = LabelTree([np.array([0, 5]), np.array([0, 1, 2, 3, 7, 12])], np.arange(12))


def make_heads(tree=TREE, levels=(2, 3), **options):
    """Heads with random weights."""
    config = XMCConfig(level_sizes=tree.level_sizes, head_levels=list(levels), **options)
    return randomize(LevelHeads(config, DIMENSIONS))


def randomize(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def make_vectors(seed=1, dimensions=DIMENSIONS):
    return torch.randn(DOCUMENTS, dimensions, generator=torch.Generator().manual_seed(seed))


def random_numbers(*shape, seed):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def padded(rows):
    return torch.tensor([row + [-1] * (4 - len(row)) for row in rows])


def rows_of(head):
    """Weights with the bias as last column, as the oracles take them."""
    return np.hstack([head.weight.detach().numpy(), head.bias.detach().numpy()[:, None]])


def tails_of(head):
    return [(tail.projection.weight.detach().numpy(), rows_of(tail)) for tail in head.tails]


def oracle_logits(vectors, heads):
    return oracles.logits_of(oracles.with_constant(vectors.numpy()), [rows_of(head) for head in heads])


# ---- Losses and probabilities ----

LOGITS = [-40.0, -1.5, -1.0, -0.2, 0.0, 0.7, 1.0, 1.3, 40.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_probabilities(loss):
    logits = torch.tensor(LOGITS)
    for target in (0, 1):
        losses = node_losses(logits, torch.full((len(LOGITS),), float(target)), loss)
        expected = [oracles.loss_value(ORACLE_LOSSES[loss], target, logit) for logit in LOGITS]
        np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-6, atol=1e-9)
    expected = [oracles.head_probability(loss, logit) for logit in LOGITS]
    np.testing.assert_allclose(node_probabilities(logits, loss).numpy(), expected, rtol=1e-6, atol=1e-9)


# ---- One head ----

NODES = 7
# Repeated nodes in any order: each place is scored by itself.
SHARED = torch.tensor([4, 0, 4, 6])
PER_DOCUMENT = torch.tensor([[1, 1, 5], [0, 6, 2], [3, 2, 1], [6, 6, 6]])


@pytest.fixture
def head():
    return randomize(LevelHead(NODES, DIMENSIONS))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("nodes", [None, SHARED, PER_DOCUMENT], ids=["all", "shared", "per document"])
def test_logits(head, nodes, sparse):
    head.sparse = sparse
    vectors = make_vectors()[:4]
    (expected,) = oracle_logits(vectors, [head])
    if nodes is not None:
        expected = np.array([expected[i, nodes if nodes.dim() == 1 else nodes[i]] for i in range(4)])
    logits = head(vectors, nodes)
    assert logits.shape == expected.shape
    np.testing.assert_allclose(logits.detach().numpy(), expected, atol=1e-5)


def test_vectors_of_another_precision_are_scored_in_that_of_the_head(head):
    assert head(make_vectors().bfloat16()).dtype == torch.float32


def test_new_heads_are_zero_and_large_ones_have_sparse_gradients(monkeypatch):
    assert not LevelHead(NODES, DIMENSIONS)(make_vectors()).any()
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", NODES)
    assert [LevelHead(size, DIMENSIONS).sparse for size in (NODES, NODES + 1)] == [False, True]


@pytest.mark.parametrize("nodes", [SHARED, PER_DOCUMENT], ids=["shared", "per document"])
def test_sparse_gradients_equal_dense_ones(head, nodes):
    gradients = []
    for sparse in (False, True):
        head.sparse = sparse
        head.zero_grad()
        (head(make_vectors()[:4], nodes) ** 2).sum().backward()
        assert head.weight.grad.is_sparse == sparse
        gradients.append((head.weight.grad.to_dense(), head.bias.grad.clone()))
        unused = sorted(set(range(NODES)) - set(nodes.flatten().tolist()))
        assert unused and not gradients[-1][0][unused].any()
    for dense, sparse in zip(*gradients, strict=True):
        torch.testing.assert_close(sparse, dense)


def test_logits_behind_a_bottleneck():
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


# ---- Beam search ----


def bounded_heads(levels):
    return make_bounded([LevelHead(TREE.level_sizes[level - 1], DIMENSIONS) for level in levels], seed=0)


def unit_vectors():
    return torch.nn.functional.normalize(make_vectors())


@torch.no_grad()
def search(heads, levels, top_k, beam_size, loss="bce", by_path=True, vectors=None, **options):
    vectors = unit_vectors() if vectors is None else vectors
    offsets = [torch.from_numpy(TREE.descendants(above, below)) for above, below in zip(levels, levels[1:])]
    scores, nodes = search_heads(vectors, heads, offsets, top_k, beam_size, loss, by_path, **options)
    assert scores.shape == nodes.shape == (len(vectors), top_k) and nodes.dtype == torch.int64
    return scores.numpy(), nodes.numpy()


def assert_ranking(scores, nodes, expected):
    """The best of `expected` (-1: not reached) in order, then 0 and -1."""
    for document in range(len(expected)):
        reached = [node for node in range(expected.shape[1]) if expected[document, node] >= 0]
        ranking = sorted(reached, key=lambda node: -expected[document, node])[: scores.shape[1]]
        empty = scores.shape[1] - len(ranking)
        assert nodes[document].tolist() == ranking + [-1] * empty
        best = [expected[document, node] for node in ranking] + [0.0] * empty
        np.testing.assert_allclose(scores[document], best, rtol=1e-5)


@pytest.mark.parametrize(
    "levels, loss, by_path, beam_size",
    [
        ([1, 2, 3], "bce", True, 1),
        ([1, 2, 3], "bce", True, 2),
        ([1, 2, 3], "squared_hinge", True, 4),
        ([1, 2, 3], "bce", False, 2),
        ([1, 2, 3], "squared_hinge", False, 1),
        ([1, 2], "squared_hinge", True, 2),
        ([1, 2], "bce", False, 1),
        ([1, 3], "bce", True, 2),
        ([1, 3], "squared_hinge", False, 2),
        ([2, 3], "squared_hinge", True, 1),
        ([2, 3], "bce", False, 4),
        ([3], "bce", True, 2),
        ([3], "squared_hinge", False, 1),
        *(([1, 2, 3], "bce", by_path, size) for by_path in (True, False) for size in (0, TREE.num_labels, 1000)),
    ],
    ids=str,
)
def test_beam(levels, loss, by_path, beam_size):
    heads = bounded_heads(levels)
    logits = oracle_logits(unit_vectors(), heads)
    expected = oracles.head_scores(logits, levels, OFFSETS, loss, by_path, min(beam_size, TREE.num_labels))
    assert beam_size < TREE.num_labels or (expected > 0).all()
    for top_k in (1, 5, 40):  # the last is beyond the nodes
        assert_ranking(*search(heads, levels, top_k, beam_size, loss, by_path), expected)


def test_nodes_of_probability_0_come_before_padding():
    heads = bounded_heads([1, 2])
    with torch.no_grad():
        for head in heads:
            head.bias.fill_(-5)  # the probability of the squared hinge is then 0
    scores, nodes = search(heads, [1, 2], 8, 2, "squared_hinge")
    for row in nodes.tolist():
        real = [node for node in row if node >= 0]
        assert real and len(set(real)) == len(real) and row == real + [-1] * (8 - len(real))
    assert not scores.any()


def test_documents_are_searched_in_batches():
    levels, sizes = [1, 2, 3], []
    heads = bounded_heads(levels)
    whole = search(heads, levels, 7, 2)
    heads[0].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    parts = search(heads, levels, 7, 2, max_numbers=DIMENSIONS * 40)
    assert len(sizes) > 1 and sum(sizes) == DOCUMENTS
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    assert np.array_equal(parts[1], whole[1])


def test_no_documents():
    search(bounded_heads([1, 2]), [1, 2], 5, 2, vectors=unit_vectors()[:0])


# ---- Adaptive head ----

WIDTH, ADAPTIVE_FREQUENT, ADAPTIVE_TAILS = 12, 4, [5, 7]
LABELS = ADAPTIVE_FREQUENT + sum(ADAPTIVE_TAILS)
# Multiples of 1/4: products and sums are exact, and equal scores are equal.
GRID = torch.arange(-4, 5) / 4


def adaptive_heads(seed=0, frequent=ADAPTIVE_FREQUENT, tails=ADAPTIVE_TAILS, shrink=2.0):
    """The head of frequent labels and clusters, and the adaptive head."""
    generator = torch.Generator().manual_seed(seed)
    upper, head = LevelHead(frequent + len(tails), WIDTH), AdaptiveHead(frequent, tails, WIDTH, shrink)
    with torch.no_grad():
        for parameter in (*upper.parameters(), *head.parameters()):
            parameter.copy_(GRID[torch.randint(len(GRID), parameter.shape, generator=generator)])
    return upper, head


def grid_vectors():
    return GRID[torch.randint(len(GRID), (DOCUMENTS, WIDTH), generator=torch.Generator().manual_seed(1))]


@torch.no_grad()
def search_adaptive(upper, head, top_k, loss="bce", vectors=None, **options):
    vectors = grid_vectors() if vectors is None else vectors
    return search_heads(vectors, [upper, head], [torch.zeros(2)], top_k, 3, loss, True, **options)


def test_the_projection_of_each_tail_is_shorter():
    widths = [tail.weight.shape for tail in adaptive_heads(tails=[5, 7, 6], shrink=3.0)[1].tails]
    assert widths == [(5, 4), (7, 1), (6, 1)]


def test_logits_of_some_labels_are_those_of_all():
    _, head = adaptive_heads()
    vectors = grid_vectors()
    logits = head(vectors)
    assert logits.shape == (DOCUMENTS, LABELS) and torch.isinf(logits[:, :ADAPTIVE_FREQUENT]).all()
    nodes = torch.randint(LABELS, (DOCUMENTS, 6), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head(vectors, nodes), logits.gather(1, nodes))
    shared = torch.tensor([LABELS - 1, 0, ADAPTIVE_FREQUENT])
    torch.testing.assert_close(head(vectors, shared), logits[:, shared])


@pytest.mark.parametrize("loss, negative_weight", [("bce", 1.0), ("squared_hinge", 0.3)])
def test_adaptive_loss(loss, negative_weight):
    _, head = adaptive_heads()
    rng = np.random.default_rng(2)
    true = [rng.choice(LABELS, rng.integers(1, 4), replace=False).tolist() for _ in range(DOCUMENTS - 2)]
    true += [[], [0, ADAPTIVE_FREQUENT, LABELS - 1]]
    weights = random_numbers(DOCUMENTS, 4, seed=3)
    found = head.loss(grid_vectors(), padded(true), weights, negative_weight, loss)
    expected = oracles.adaptive_loss(
        grid_vectors().numpy(), tails_of(head), ADAPTIVE_FREQUENT, true, weights.tolist(), negative_weight, loss
    )
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_a_tail_without_a_true_label_gets_no_gradient():
    _, head = adaptive_heads()
    true = torch.full((DOCUMENTS, 1), ADAPTIVE_FREQUENT)
    head.loss(grid_vectors(), true, torch.ones(true.shape), 1.0, "bce").backward()
    assert head.tails[0].weight.grad.any() and head.tails[1].weight.grad is None


@pytest.mark.parametrize("loss", LOSSES)  # the probability of the squared hinge is cut at 0 and 1: many are equal
@pytest.mark.parametrize(
    "frequent, tails, top_k",
    [(4, [5, 7], 1), (4, [5, 7], 5), (4, [5, 7], 20), (4, [], 3), (0, [16], 3), (0, [16], 16), (1, [3] * 5, 3)],
    ids=str,
)
def test_the_search_that_skips_tails_is_exact(frequent, tails, top_k, loss):
    for seed in range(3):
        upper, head = adaptive_heads(seed, frequent, tails)
        expected = oracles.adaptive_probabilities(
            grid_vectors().numpy(), rows_of(upper), tails_of(head), frequent, loss
        )
        assert (expected >= 0).all() and (expected <= 1).all()
        all_scores, all_nodes = search_adaptive(upper, head, top_k, loss)
        for scores, nodes, row in zip(all_scores.numpy(), all_nodes.numpy(), expected, strict=True):
            real = nodes[nodes >= 0].tolist()
            assert len(set(real)) == len(real) == min(top_k, len(row))
            np.testing.assert_allclose(scores[: len(real)], row[real], rtol=1e-5)
            np.testing.assert_allclose(scores[: len(real)], np.sort(row)[::-1][:top_k], rtol=1e-5)
            assert not scores[len(real) :].any() and (nodes[len(real) :] == -1).all()


def test_a_tail_is_computed_only_for_the_documents_that_need_it():
    upper, head = adaptive_heads()
    vectors, sizes = grid_vectors(), []
    with torch.no_grad():
        upper.bias[:ADAPTIVE_FREQUENT] = 40.0  # every frequent label is certain,
        upper.weight[-1] = vectors[2] * 50  # and one document's second tail, too
        upper.bias[ADAPTIVE_FREQUENT:] = -1.0
    for place, tail in enumerate(head.tails):
        tail.register_forward_pre_hook(lambda _, inputs, place=place: sizes.append((place, len(inputs[0]))))
    search_adaptive(upper, head, 3)
    assert sizes == []
    scores, nodes = search_adaptive(upper, head, ADAPTIVE_FREQUENT + 1, vectors=vectors[2:4])
    assert sizes[0] == (0, 2) and (nodes[0] >= 0).all()
    sizes.clear()
    again = search_adaptive(upper, head, ADAPTIVE_FREQUENT + 1, vectors=vectors[2:4], max_numbers=LABELS)
    assert torch.equal(again[0], scores) and {size for _, size in sizes} == {1}


# ---- Heads of several levels ----


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
    refused("Level 1", heads.of, 1)


def test_tails():
    heads = make_heads(TAIL_TREE, (1, 2), head_tails=TAILS, head_shrink=2.0)
    assert [type(head) for head in heads] == [LevelHead, AdaptiveHead]
    assert heads.of(2).num_frequent == FREQUENT and heads.of(2).num_nodes == 12
    assert tail_sizes(TAIL_TREE) == TAILS
    assert tail_sizes(LabelTree([np.array([0, 2]), np.array([0, 1, 2])], np.arange(2))) == []
    for tree in (TREE, LabelTree.flat(5), LabelTree([np.array([0, 3]), np.array([0, 1, 5, 6])], np.arange(6))):
        refused("tree_clustering", tail_sizes, tree)


def test_bytes_beside_heads_of_full_width():
    plain, short = make_heads(), make_heads(head_bottleneck=2)
    nodes = 6 + 28
    assert plain.num_bytes == plain.full_width_bytes == short.full_width_bytes == 4 * nodes * (DIMENSIONS + 1)
    assert short.num_bytes == 4 * (6 * (DIMENSIONS + 1) + 28 * 3 + 2 * DIMENSIONS)


@pytest.mark.parametrize("beam_size", [1, 2, 6, 50])
def test_dynamic_candidates(beam_size):
    offsets = TREE.descendants(2, 3)
    logits, true, weights = make_vectors(seed=4), padded(TRUE), random_numbers(DOCUMENTS, 4, seed=5)
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


@pytest.mark.parametrize("loss, bottleneck", [("bce", None), ("squared_hinge", 3), ("bce", 3)])
def test_joint_loss_with_dynamic_candidates(loss, bottleneck):
    heads, vectors = make_heads(head_bottleneck=bottleneck, head_loss=loss), make_vectors()
    upper, lower = heads
    above, weights = random_numbers(DOCUMENTS, 6, seed=6) < 0.4, random_numbers(DOCUMENTS, 4, seed=7)
    batches = [
        {"level": 2, "targets": above.float(), "weights": torch.full(above.shape, 0.5)},
        {"level": 3, "true_nodes": padded(TRUE), "true_weights": weights, "negative_weight": 0.3, "beam_size": 2},
    ]
    (logits_above,) = oracle_logits(vectors, [upper])
    true_above = [{node: 0.5 for node in range(6) if above[document, node]} for document in range(DOCUMENTS)]
    expected = oracles.sum_of_losses(logits_above, [range(6)] * DOCUMENTS, true_above, 0.5, loss)
    rows = oracles.with_constant(vectors.numpy())
    if bottleneck:
        rows = oracles.projected(vectors.numpy(), lower.projection.weight.detach().numpy())
    (logits,) = oracles.logits_of(rows, [rows_of(lower)])
    shown = oracles.dynamic_candidates(logits_above, TREE.descendants(2, 3).tolist(), TRUE, 2)
    true = [dict(zip(nodes, row)) for nodes, row in zip(TRUE, weights.tolist(), strict=True)]
    expected += oracles.sum_of_losses(logits, shown, true, 0.3, loss)
    assert heads.joint_loss(vectors, batches, TREE).item() == pytest.approx(expected, rel=1e-5)


def test_joint_loss_of_clusters_and_tails():
    heads, vectors = make_heads(TAIL_TREE, (1, 2), head_tails=TAILS), make_vectors()
    true, ones = [[0, 4], [11], [], [7, 8, 2], [1], [], [5], [6, 10], [0]], torch.ones(DOCUMENTS, 4)
    above = torch.zeros(DOCUMENTS, 5)
    for document, nodes in enumerate(true):
        for node in nodes:
            above[document, node if node < 3 else 3 + (node >= 7)] = 1
    batches = [
        {"level": 1, "targets": above},
        {"level": 2, "true_nodes": padded(true), "true_weights": ones, "negative_weight": 1.0},
    ]
    (logits,) = oracle_logits(vectors, [heads[0]])
    true_above = [{node: 1.0 for node in range(5) if above[document, node]} for document in range(DOCUMENTS)]
    expected = oracles.sum_of_losses(logits, [range(5)] * DOCUMENTS, true_above, 1.0, "bce")
    expected += oracles.adaptive_loss(vectors.numpy(), tails_of(heads[1]), FREQUENT, true, ones.tolist(), 1.0, "bce")
    assert heads.joint_loss(vectors, batches, TAIL_TREE).item() == pytest.approx(expected, rel=1e-5)


def test_scores_of_given_labels_are_those_of_a_search():
    heads, vectors = make_heads(TAIL_TREE, (1, 2), head_tails=TAILS, head_ranking="path"), make_vectors()
    with torch.no_grad():
        scores, nodes = heads.search(vectors, TAIL_TREE, 2, 12)
        torch.testing.assert_close(heads.label_probabilities(vectors, nodes, TAIL_TREE), scores)
    assert (scores >= 0).all() and (scores <= 1).all()

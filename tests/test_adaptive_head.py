"""Tests of hf_xmc.modeling_heads: probabilities and loss of tails, and the search that skips them."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch

from hf_xmc import modeling_heads as head_search
from hf_xmc.modeling_heads import AdaptiveHead, LevelHead, search_heads

DIMENSIONS, DOCUMENTS, FREQUENT, TAILS = 12, 9, 4, [5, 7]
LABELS = FREQUENT + sum(TAILS)
# Weights that are multiples of 1/4: products and sums are exact, and equal scores are equal.
GRID = torch.arange(-4, 5) / 4


def make_heads(seed=0, frequent=FREQUENT, tails=TAILS, shrink=2.0):
    """The head of frequent labels and gates, and that of the tails."""
    generator = torch.Generator().manual_seed(seed)
    gates, head = LevelHead(frequent + len(tails), DIMENSIONS), AdaptiveHead(frequent, tails, DIMENSIONS, shrink)
    with torch.no_grad():
        for parameter in (*gates.parameters(), *head.parameters()):
            parameter.copy_(GRID[torch.randint(len(GRID), parameter.shape, generator=generator)])
    return gates, head


def make_vectors(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return GRID[torch.randint(len(GRID), (DOCUMENTS, DIMENSIONS), generator=generator)]


def as_arrays(gates, head):
    """What the oracles take: rows with the bias last, and for each tail its projection."""

    def rows(part):
        return np.hstack([part.weight.detach().numpy(), part.bias.detach().numpy()[:, None]])

    return rows(gates), [(tail.projection.weight.detach().numpy(), rows(tail)) for tail in head.tails]


def true_positions(seed=2):
    """True labels of each document, padded with -1; one document has none, one has labels of all parts."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(LABELS, rng.integers(1, 4), replace=False).tolist() for _ in range(DOCUMENTS - 2)]
    rows += [[], [0, FREQUENT, LABELS - 1]]
    return rows, torch.tensor([row + [-1] * (4 - len(row)) for row in rows])


def test_the_vector_of_each_tail_is_shorter():
    widths = [tail.weight.shape for tail in make_heads(tails=[5, 7, 6], shrink=3.0)[1].tails]
    assert widths == [(5, 4), (7, 1), (6, 1)]


def test_margins_of_some_labels_are_those_of_all():
    _, head = make_heads()
    vectors = make_vectors()
    everything = head(vectors)
    assert everything.shape == (DOCUMENTS, LABELS) and torch.isinf(everything[:, :FREQUENT]).all()
    own = torch.randint(LABELS, (DOCUMENTS, 6), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head(vectors, own), everything.gather(1, own))
    shared = torch.tensor([LABELS - 1, 0, FREQUENT])
    torch.testing.assert_close(head(vectors, shared), everything[:, shared])


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
@pytest.mark.parametrize("negative_weight", [1.0, 0.3])
def test_loss(loss, negative_weight):
    gates, head = make_heads()
    vectors, (rows, padded) = make_vectors(), true_positions()
    weights = torch.rand(padded.shape, generator=torch.Generator().manual_seed(3))
    found = head.loss(vectors, padded, weights, negative_weight, loss)
    expected = oracles.adaptive_loss(
        vectors.numpy(), as_arrays(gates, head)[1], FREQUENT, rows, weights.tolist(), negative_weight, loss
    )
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_a_tail_without_a_true_label_learns_nothing():
    _, head = make_heads()
    true = torch.full((DOCUMENTS, 1), FREQUENT)
    head.loss(make_vectors(), true, torch.ones(true.shape), 1.0, "bce").backward()
    assert head.tails[0].weight.grad.any() and head.tails[1].weight.grad is None


def assert_best(scores, nodes, expected, top_k):
    """That these are `top_k` best of `expected`; among equal ones any."""
    for document in range(len(expected)):
        found = nodes[document][nodes[document] >= 0].tolist()
        assert len(set(found)) == len(found) == min(top_k, expected.shape[1])
        np.testing.assert_allclose(scores[document][: len(found)], expected[document][found], rtol=1e-5)
        np.testing.assert_allclose(
            scores[document][: len(found)], np.sort(expected[document])[::-1][:top_k], rtol=1e-5
        )
        assert not scores[document][len(found) :].any() and (nodes[document][len(found) :] == -1).all()


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
@pytest.mark.parametrize("frequent, tails", [(4, [5, 7]), (4, []), (0, [16]), (1, [3, 3, 3, 3, 3])], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 5, 16, 20])
def test_the_search_that_skips_tails_finds_what_the_whole_computation_finds(frequent, tails, top_k, loss):
    # The probability of the squared hinge is cut at 0 and 1: many are equal.
    vectors = make_vectors()
    for seed in range(3):
        gates, head = make_heads(seed, frequent, tails)
        expected = oracles.adaptive_probabilities(vectors.numpy(), *as_arrays(gates, head), frequent, loss)
        assert (expected >= 0).all() and (expected <= 1).all()
        with torch.no_grad():
            scores, nodes = search_heads(vectors, [gates, head], [torch.zeros(2)], top_k, 3, loss, True)
        assert_best(scores.numpy(), nodes.numpy(), expected, top_k)


def test_a_tail_is_computed_for_the_documents_that_need_it_only(monkeypatch):
    gates, head = make_heads()
    vectors, sizes = make_vectors(), []
    with torch.no_grad():
        gates.bias[:FREQUENT] = 40.0  # every frequent label is certain,
        gates.weight[-1] = vectors[2] * 50  # and one document's second gate, too
        gates.bias[FREQUENT:] = -1.0
    for place, tail in enumerate(head.tails):
        tail.register_forward_pre_hook(lambda _, inputs, place=place: sizes.append((place, len(inputs[0]))))
    with torch.no_grad():
        search_heads(vectors, [gates, head], [torch.zeros(2)], 3, 3, "bce", True)
        assert sizes == []
        scores, nodes = search_heads(vectors[2:4], [gates, head], [torch.zeros(2)], FREQUENT + 1, 3, "bce", True)
    assert sizes[0] == (0, 2) and (nodes[0] >= 0).all()
    sizes.clear()
    monkeypatch.setattr(head_search, "_MAX_NUMBERS", LABELS)
    with torch.no_grad():
        again = search_heads(vectors[2:4], [gates, head], [torch.zeros(2)], FREQUENT + 1, 3, "bce", True)
    assert torch.equal(again[0], scores) and {size for _, size in sizes} == {1}

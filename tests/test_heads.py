"""Tests of hf_xmc.modeling_heads: logits, losses and probabilities of one level."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch

from hf_xmc.modeling_heads import LevelHead, node_losses, node_probabilities

NODES, DIMENSIONS, DOCUMENTS = 7, 5, 4
ORACLE_LOSSES = {"bce": "logistic", "squared_hinge": "squared_hinge"}


@pytest.fixture
def head():
    generator = torch.Generator().manual_seed(0)
    head = LevelHead(NODES, DIMENSIONS)
    with torch.no_grad():
        head.weight.copy_(torch.randn(NODES, DIMENSIONS, generator=generator))
        head.bias.copy_(torch.randn(NODES, generator=generator))
    return head


@pytest.fixture
def vectors():
    return torch.randn(DOCUMENTS, DIMENSIONS, generator=torch.Generator().manual_seed(1))


# Repeated nodes and any order: each place is scored by itself.
SHARED = torch.tensor([4, 0, 4, 6])
OWN = torch.tensor([[1, 1, 5], [0, 6, 2], [3, 2, 1], [6, 6, 6]])


def expected_logits(head, vectors, nodes):
    weights = np.hstack([head.weight.detach().numpy(), head.bias.detach().numpy()[:, None]])
    rows = np.hstack([vectors.numpy(), np.ones((len(vectors), 1))])
    (everything,) = oracles.logits_of(rows, [weights])
    if nodes is None:
        return everything
    if nodes.dim() == 1:
        return everything[:, nodes.numpy()]
    return np.array([everything[i, nodes[i].numpy()] for i in range(len(nodes))])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("nodes", [None, SHARED, OWN], ids=["all", "shared", "own"])
def test_logits(head, vectors, nodes, sparse):
    head.sparse = sparse
    logits = head(vectors, nodes)
    assert logits.shape == (DOCUMENTS, NODES if nodes is None else nodes.shape[-1])
    np.testing.assert_allclose(logits.detach().numpy(), expected_logits(head, vectors, nodes), atol=1e-5)


def test_vectors_of_another_precision_are_scored_in_that_of_the_head(head, vectors):
    assert head(vectors.bfloat16()).dtype == torch.float32


def test_a_new_head_says_nothing_and_large_ones_have_sparse_gradients(vectors, monkeypatch):
    assert not LevelHead(NODES, DIMENSIONS)(vectors).any()
    monkeypatch.setattr("hf_xmc.modeling_heads.SPARSE_ROWS", NODES)
    assert [LevelHead(size, DIMENSIONS).sparse for size in (NODES, NODES + 1)] == [False, True]


@pytest.mark.parametrize("nodes", [SHARED, OWN], ids=["shared", "own"])
def test_sparse_gradients_equal_dense_ones(head, vectors, nodes):
    gradients = []
    for sparse in (False, True):
        head.sparse = sparse
        head.zero_grad()
        (head(vectors, nodes) ** 2).sum().backward()
        assert head.weight.grad.is_sparse == sparse
        gradients.append((head.weight.grad.to_dense(), head.bias.grad.clone()))
        untouched = sorted(set(range(NODES)) - set(nodes.flatten().tolist()))
        assert untouched and not gradients[-1][0][untouched].any()
    for dense, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, dense)


MARGINS = [-40.0, -1.5, -1.0, -0.2, 0.0, 0.7, 1.0, 1.3, 40.0]


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
def test_losses(loss, target):
    found = node_losses(torch.tensor(MARGINS), torch.full((len(MARGINS),), float(target)), loss)
    expected = [oracles.loss_value(ORACLE_LOSSES[loss], target, logit) for logit in MARGINS]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
def test_probabilities(loss):
    found = node_probabilities(torch.tensor(MARGINS), loss)
    expected = [oracles.head_probability(loss, logit) for logit in MARGINS]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_the_best_margin_stands_for_the_probability_of_the_node(loss, probability):
    grid = torch.linspace(-4, 4, 8001)
    true, false = (node_losses(grid, torch.full_like(grid, target), loss) for target in (1.0, 0.0))
    best = grid[(probability * true + (1 - probability) * false).argmin()]
    assert node_probabilities(best, loss).item() == pytest.approx(probability, abs=1e-3)

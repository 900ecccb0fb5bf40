"""Tests of hf_xmc.modeling_heads: the beam through the heads against a slow one, equation (7)."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from small_problems import uneven_tree

from hf_xmc import modeling_heads as head_search
from hf_xmc.modeling_heads import LevelHead, search_heads

TREE = uneven_tree()
OFFSETS = [offsets.tolist() for offsets in TREE.child_offsets]
DIMENSIONS, DOCUMENTS = 6, 9
LOSSES = ["bce", "squared_hinge"]


def make_heads(levels, seed=0):
    """Heads whose logits stay between -1 and 1 for vectors of unit length: no probability is cut, and none ties."""
    generator = torch.Generator().manual_seed(seed)
    heads = []
    for level in levels:
        head = LevelHead(TREE.level_sizes[level - 1], DIMENSIONS)
        with torch.no_grad():
            head.weight.copy_(torch.nn.functional.normalize(torch.randn(head.weight.shape, generator=generator)) * 0.7)
            head.bias.copy_(torch.rand(head.bias.shape, generator=generator) * 0.5 - 0.25)
        heads.append(head)
    return heads


def make_vectors(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(DOCUMENTS, DIMENSIONS, generator=generator))


def logits_of(vectors, heads):
    rows = np.hstack([vectors.numpy(), np.ones((len(vectors), 1))])
    weights = [np.hstack([h.weight.detach().numpy(), h.bias.detach().numpy()[:, None]]) for h in heads]
    return oracles.logits_of(rows, weights)


def search(vectors, heads, levels, top_k, beam_size, loss, by_path):
    offsets = [torch.from_numpy(TREE.descendants(above, below)) for above, below in zip(levels, levels[1:])]
    with torch.no_grad():
        scores, nodes = search_heads(vectors, heads, offsets, top_k, beam_size, loss, by_path)
    assert scores.shape == nodes.shape == (len(vectors), top_k)
    return scores.numpy(), nodes.numpy()


def assert_ranking(scores, nodes, expected):
    """The best of `expected` (-1 where nothing was reached), in order; 0 and -1 where there are no more."""
    for document in range(len(expected)):
        reached = [node for node in range(expected.shape[1]) if expected[document, node] >= 0]
        ranking = sorted(reached, key=lambda node: -expected[document, node])[: scores.shape[1]]
        empty = scores.shape[1] - len(ranking)
        assert nodes[document].tolist() == ranking + [-1] * empty
        best = [expected[document, node] for node in ranking] + [0.0] * empty
        np.testing.assert_allclose(scores[document], best, rtol=1e-5)


@pytest.mark.parametrize("by_path", [True, False], ids=["path", "leaf"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("levels", [[1, 2, 3], [1, 2], [1, 3], [2, 3], [3]], ids=str)
@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_beam(levels, loss, by_path, beam_size):
    heads, vectors = make_heads(levels), make_vectors()
    expected = oracles.head_scores(logits_of(vectors, heads), levels, OFFSETS, loss, by_path, beam_size)
    for top_k in (1, 5, TREE.level_sizes[levels[-1] - 1]):
        assert_ranking(*search(vectors, heads, levels, top_k, beam_size, loss, by_path), expected)


@pytest.mark.parametrize("by_path", [True, False], ids=["path", "leaf"])
@pytest.mark.parametrize("beam_size", [0, max(TREE.level_sizes), 1000])
def test_a_beam_of_all_nodes_scores_everything(beam_size, by_path):
    levels = [1, 2, 3]
    heads, vectors = make_heads(levels), make_vectors()
    expected = oracles.head_scores(logits_of(vectors, heads), levels, OFFSETS, "bce", by_path, 0)
    assert (expected > 0).all()
    assert_ranking(*search(vectors, heads, levels, TREE.num_labels, beam_size, "bce", by_path), expected)


def test_more_nodes_asked_for_than_there_are():
    levels = [1, 2, 3]
    heads, vectors = make_heads(levels), make_vectors()
    narrow = oracles.head_scores(logits_of(vectors, heads), levels, OFFSETS, "bce", True, 1)
    assert {int((row >= 0).sum()) for row in narrow} > {1}  # single children and wide nodes are both reached
    scores, nodes = search(vectors, heads, levels, 40, 1, "bce", True)
    assert_ranking(scores, nodes, narrow)
    assert (nodes[:, TREE.num_labels :] == -1).all() and (scores[nodes == -1] == 0).all()


def test_a_node_of_probability_0_is_found_before_nothing():
    levels = [1, 2]
    heads, vectors = make_heads(levels), make_vectors()
    with torch.no_grad():
        for head in heads:
            head.bias.fill_(-5)  # the squared hinge's probability of that is 0
    scores, nodes = search(vectors, heads, levels, 8, 2, "squared_hinge", True)
    for row in nodes.tolist():
        found = [node for node in row if node >= 0]
        assert found and len(set(found)) == len(found) and row == found + [-1] * (8 - len(found))
    assert not scores.any()


def test_documents_are_searched_in_parts(monkeypatch):
    levels = [1, 2, 3]
    heads, vectors = make_heads(levels), make_vectors()
    whole = search(vectors, heads, levels, 7, 2, "bce", True)
    monkeypatch.setattr(head_search, "_MAX_NUMBERS", DIMENSIONS * 40)
    sizes = []
    wrapped = head_search._search
    monkeypatch.setattr(head_search, "_search", lambda part, *rest: sizes.append(len(part)) or wrapped(part, *rest))
    parts = search(vectors, heads, levels, 7, 2, "bce", True)
    assert len(sizes) > 1 and sum(sizes) == DOCUMENTS
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    assert np.array_equal(parts[1], whole[1])


def test_no_documents():
    heads = make_heads([1, 2])
    scores, nodes = search(make_vectors()[:0], heads, [1, 2], 5, 2, "bce", True)
    assert nodes.dtype == np.int64

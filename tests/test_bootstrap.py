"""Tests of hf_xmc.training.bootstrap: shortlists, bootstrap and loss of the heads (XR-Transformer, eq. 7 to 11)."""

import numpy as np
import oracles
import pytest
import torch
from conftest import pairs
from scipy.sparse import csr_matrix
from small_problems import (
    CHAIN,
    OFFSETS,
    ORACLE_LOSSES,
    TREE,
    assert_optimal,
    best_objective,
    make_bounded,
    random_problem,
)
from transformers import BertConfig

from hf_xmc import LabelTree, XMCConfig, XMCForTextClassification
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training import bootstrap
from hf_xmc.training.bootstrap import (
    bootstrap_head,
    level_data,
    make_level_data,
    needs_vectors,
    principal_components,
    start_from_frequency,
    starting_data,
)
from hf_xmc.training.head_prior import NodeVectors
from hf_xmc.training.options import LevelArguments

DIMENSIONS = 8


class Problem:
    """Document vectors, labels, and `Y^(t)` and `R^(t)` by the oracles."""

    def __init__(self, seed, documents, dimensions):
        features, self.labels = random_problem(seed, documents, sparse=0, dense=dimensions)
        self.vectors, self.truth = features.dense, self.labels.toarray()
        self.true = oracles.true_nodes(self.truth, CHAIN, TREE.leaf_labels.tolist())
        self.counts = oracles.true_label_counts(self.truth, CHAIN, TREE.leaf_labels.tolist())
        self.level_targets = TREE.targets(self.labels)


PROBLEM = Problem(seed=8, documents=70, dimensions=DIMENSIONS)


def make_model(levels, loss="bce", ranking="leaf", dimensions=DIMENSIONS):
    """A model with random heads, whose logits are between -1 and 1, on a tiny encoder."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 12}
    encoder = BertConfig(vocab_size=11, hidden_size=dimensions, **sizes)
    config = XMCConfig(encoder_config=encoder, head_loss=loss, head_ranking=ranking)
    model = XMCForTextClassification(config, label_tree=TREE).eval()
    model.add_heads(levels)
    make_bounded(model.heads, seed=3)
    return model


def weights_of(head):
    """Weights with the bias as the last column."""
    return np.hstack([head.weight.detach().numpy(), head.bias.detach().numpy()[:, None]]).astype(np.float64)


def as_rows(vectors):
    return np.hstack([vectors.astype(np.float64), np.ones((len(vectors), 1))])


def oracle_shortlist(model, index, negatives, beam_size, problem=PROBLEM):
    """`P^(t-1)` of equation (7) joined with the true nodes, both of the level before, and `M^(t)` of (8)."""
    levels = model.config.head_levels
    level = levels[index]
    if index == 0 or negatives == "all":
        return None, np.ones((len(problem.truth), TREE.level_sizes[level - 1]))
    above = levels[index - 1]
    predicted = true = None
    if negatives != "tfn":
        logits = oracles.logits_of(as_rows(problem.vectors), [weights_of(head) for head in list(model.heads)[:index]])
        by_path = model.config.head_ranking == "path"
        scores = oracles.head_scores(logits, levels[:index], OFFSETS, model.config.head_loss, by_path, beam_size)
        predicted = oracles.top_nodes(scores, beam_size) * (scores >= 0)
    if negatives != "man":
        true = problem.true[above - 1]
    nodes_above = np.maximum.reduce([part for part in (predicted, true) if part is not None])
    return nodes_above, oracles.shortlist(predicted, true, oracles.membership(CHAIN, above, level))


# ---- Shortlists ----


@pytest.mark.parametrize(
    "levels, loss, ranking, negatives, beam_size",
    pairs(
        [[1, 2, 3], [1, 3], [3]],
        ["bce", "squared_hinge"],
        ["leaf", "path"],
        ["tfn", "man", "both", "all"],
        [1, 2, 100],
    ),
)
def test_shortlist(levels, loss, ranking, negatives, beam_size):
    """Eq. 7 and 8."""
    model = make_model(levels, loss, ranking)
    counts = PROBLEM.level_targets
    arguments = LevelArguments(negatives=negatives, beam_size=beam_size, loss=loss)
    for index, level in enumerate(levels):
        data = make_level_data(model, counts, index, arguments, PROBLEM.vectors)
        nodes_above, chosen = oracle_shortlist(model, index, negatives, beam_size)
        assert data.level == level
        if nodes_above is None:
            assert data.shortlist is None
        else:
            assert np.array_equal(data.shortlist.toarray(), nodes_above) and data.shortlist.has_sorted_indices
            reached = np.zeros_like(chosen)
            for document in range(len(PROBLEM.truth)):
                for node in data.shortlist[document].indices:
                    reached[document, data.offsets[node] : data.offsets[node + 1]] = 1
            assert np.array_equal(reached, chosen)


def test_what_needs_vectors():
    arguments = LevelArguments(negatives=["all", "tfn", "man"], beam_size=[9, 9, 1], bootstrap=False)
    assert [needs_vectors(arguments, TREE, [1, 2, 3], index) for index in range(3)] == [False, False, True]
    # The first level has no level above to search.
    assert not needs_vectors(LevelArguments(negatives="both", bootstrap=False), TREE, [1, 3], 0)
    assert needs_vectors(LevelArguments(negatives="tfn"), TREE, [1, 3], 0)


def test_documents_are_searched_in_parts(monkeypatch):
    model, counts = make_model([1, 2]), PROBLEM.level_targets
    arguments = LevelArguments(negatives="man", beam_size=2)
    whole = make_level_data(model, counts, 1, arguments, PROBLEM.vectors).shortlist
    monkeypatch.setattr("hf_xmc.parallel.stage_cache.MAX_ROWS", 33)
    calls = []
    runtime = Runtime(progress=lambda *call: calls.append(call))
    parts = make_level_data(model, counts, 1, arguments, PROBLEM.vectors, runtime).shortlist
    assert (whole != parts).nnz == 0
    assert calls == [("shortlist", done, 70) for done in (33, 66, 70)]


# ---- Bootstrap ----

BOOTSTRAPS = [
    ("bce", {}),
    ("bce", {"cost_sensitive": True, "negative_weight": 0.2}),
    ("squared_hinge", {"negative_weight": 0.5}),
    ("squared_hinge", {"cost_sensitive": True}),
]


@pytest.fixture
def exact_solver(monkeypatch):
    """Solves the objective of a bootstrap to its optimum."""
    monkeypatch.setattr(bootstrap, "BOOTSTRAP_PASSES", 3000)
    monkeypatch.setattr(bootstrap, "BOOTSTRAP_TOLERANCE", 1e-5)


def assert_bootstrap_is_optimal(model, index, arguments, problem, tolerance):
    """Compares the bootstrap of a level with the optimum of its objective."""
    kind, negatives, vectors = ORACLE_LOSSES[arguments.loss], arguments.negatives, problem.vectors
    data = make_level_data(model, problem.level_targets, index, arguments, vectors)
    _, chosen = oracle_shortlist(model, index, negatives, 2, problem)
    bootstrap_head(model.heads[index], data, vectors, arguments)
    true, weights = problem.true[index], np.where(problem.true[index] > 0, 1.0, data.negative_weight)
    scale = arguments.bootstrap_cost
    if arguments.cost_sensitive:
        weights = oracles.importance_weights(problem.counts[index], data.negative_weight)
        # The shares of a document sum to 1. They are scaled so that a true node weighs 1 on average.
        scale *= true.sum() / (true.sum(axis=1) > 0).sum()
    # The regulariser pulls the bias to its prior of -1.
    learnt = weights_of(model.heads[index])
    assert_optimal(learnt, as_rows(vectors), true, chosen, scale * weights, kind, -1.0, tolerance)


@pytest.mark.parametrize("case, place", pairs(BOOTSTRAPS, [(0, "both"), (1, "man"), (2, "tfn"), (2, "all")]), ids=str)
def test_bootstrap_is_the_optimum_of_the_objective(case, place, exact_solver):
    """Eq. 9 and 11."""
    (loss, options), (index, negatives) = case, place
    arguments = LevelArguments(loss=loss, negatives=negatives, beam_size=2, bootstrap_cost=3.0, **options)
    assert_bootstrap_is_optimal(make_model([1, 2, 3], loss), index, arguments, PROBLEM, 1e-3)


def texts_of_labels(seed=4):
    """Vectors of label texts of unit length; the first label has none."""
    texts = np.random.default_rng(seed).normal(size=(TREE.num_labels, DIMENSIONS)).astype(np.float32)
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    texts[0] = 0
    return texts


def nested(level, node):
    """The labels under a node as nested lists."""
    if level == TREE.depth:
        return int(TREE.leaf_labels[node])
    offsets = TREE.child_offsets[level]
    return [nested(level + 1, child) for child in range(offsets[node], offsets[node + 1])]


@pytest.mark.parametrize("has_texts", [True, False])
def test_vectors_of_nodes_are_those_of_the_oracle(has_texts):
    """Eq. 11'."""
    texts = texts_of_labels() if has_texts else None
    given = np.zeros((TREE.num_labels, DIMENSIONS)) if texts is None else texts
    for level, size in enumerate(TREE.level_sizes, start=1):
        found = NodeVectors(TREE, level, PROBLEM.vectors, PROBLEM.labels, texts).rows
        groups = [nested(level, node) for node in range(size)]
        expected = oracles.node_prior(PROBLEM.vectors.tolist(), PROBLEM.truth.tolist(), given.tolist(), groups)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_document_is_left_out_of_the_centroid():
    prior = NodeVectors(TREE, TREE.depth, PROBLEM.vectors, PROBLEM.labels, texts_of_labels())
    documents, labels = PROBLEM.labels.nonzero()
    found = prior.without(documents, TREE.leaf_positions[labels])
    for place in (0, 7, 20):
        truth = PROBLEM.truth.copy()
        truth[documents[place], labels[place]] = 0
        rest = NodeVectors(TREE, TREE.depth, PROBLEM.vectors, csr_matrix(truth), texts_of_labels())
        expected = rest.rows[TREE.leaf_positions[labels[place]]] @ PROBLEM.vectors[documents[place]]
        assert found[place] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
@pytest.mark.parametrize("index, negatives", [(0, "both"), (1, "tfn"), (2, "all")])
def test_bootstrap_with_a_prior_is_the_optimum(loss, index, negatives, exact_solver):
    """Eq. 11': the weights are drawn to the scaled vectors of the nodes."""
    arguments = LevelArguments(loss=loss, negatives=negatives, bootstrap_cost=0.1)
    model = make_model([1, 2, 3], loss)
    data = make_level_data(model, PROBLEM.level_targets, index, arguments, PROBLEM.vectors)
    _, chosen = oracle_shortlist(model, index, negatives, 20)
    prior = NodeVectors(TREE, index + 1, PROBLEM.vectors, PROBLEM.labels, texts_of_labels())
    scale, bias = prior.fit_scale(data, loss, 0)
    assert scale > 0
    bootstrap_head(model.heads[index], data, PROBLEM.vectors, arguments, prior=prior)
    true = PROBLEM.true[index]
    weights = 0.1 * np.where(true > 0, 1.0, data.negative_weight)
    centres = np.hstack([scale * prior.rows, np.zeros((len(prior.rows), 1))]).astype(np.float64)
    learnt = weights_of(model.heads[index])
    arrays = as_rows(PROBLEM.vectors), true, chosen, weights, ORACLE_LOSSES[loss], bias
    assert_optimal(learnt, *arrays, 1e-3, centres)
    with pytest.raises(AssertionError):
        assert_optimal(learnt, *arrays, 1e-3, 0 * centres)


@pytest.mark.parametrize("loss", ["bce", "squared_hinge"])
def test_the_scale_of_the_prior_is_the_optimum(loss):
    prior = NodeVectors(TREE, TREE.depth, PROBLEM.vectors, PROBLEM.labels, texts_of_labels())
    data = level_data(TREE, PROBLEM.level_targets, [3], 0, None, LevelArguments(loss=loss))
    true = np.asarray(PROBLEM.true[2]) > 0
    cosines = PROBLEM.vectors @ prior.rows.T
    for row, node in zip(*true.nonzero(), strict=True):
        cosines[row, node] = prior.without(np.array([row]), np.array([node]))[0]

    def objective(scale, bias):
        return sum(
            oracles.loss_value(ORACLE_LOSSES[loss], is_true, scale * cosine + bias)
            for cosine, is_true in zip(cosines.ravel(), true.ravel(), strict=True)
        )

    scale, bias = prior.fit_scale(data, loss, 0)
    best = objective(scale, bias)
    for change in (-0.05, 0.05):
        assert objective(max(scale + change, 0), bias) >= best - 1e-4
        assert objective(scale, bias + change) > best


def test_prior_behind_a_projection(exact_solver):
    """With nearly no weight of the loss, the logits are those of the prior."""
    model = joint_model([1, 3], bottleneck=DIMENSIONS - 1)
    arguments = LevelArguments(negatives="tfn", bootstrap_cost=1e-6)
    data = make_level_data(model, PROBLEM.level_targets, 1, arguments, PROBLEM.vectors)
    prior = NodeVectors(TREE, 3, PROBLEM.vectors, PROBLEM.labels, texts_of_labels())
    bootstrap_head(model.head(3), data, PROBLEM.vectors, arguments, prior=prior)
    scale, bias = prior.fit_scale(data, arguments.loss, 0)
    with torch.no_grad():
        logits = model.head(3)(torch.from_numpy(PROBLEM.vectors)).numpy()
    # One of the dimensions, that of the least variance, is lost.
    expected = scale * PROBLEM.vectors @ prior.rows.T + bias
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.95


@pytest.mark.parametrize("loss, options", BOOTSTRAPS, ids=str)
def test_bootstrap_converges_in_the_passes_it_makes(loss, options):
    problem = Problem(seed=9, documents=200, dimensions=32)
    arguments = LevelArguments(loss=loss, negatives="tfn", **options)
    assert_bootstrap_is_optimal(make_model([1, 2, 3], loss, dimensions=32), 2, arguments, problem, 0.01)


def test_bootstrap_overwrites_the_head_whatever_the_threads():
    arguments = LevelArguments(negatives="tfn")
    found = []
    for fill, threads in ((0.0, 1), (5.0, 2)):
        model = make_model([1, 2, 3])
        head = model.heads[2]
        with torch.no_grad():
            head.weight.fill_(fill)
            head.bias.fill_(fill)
        data = make_level_data(model, PROBLEM.level_targets, 2, arguments, None)
        bootstrap_head(head, data, PROBLEM.vectors, arguments, runtime=Runtime(num_threads=threads))
        found.append(weights_of(head))
    assert np.array_equal(*found)


def test_a_node_that_no_document_trains_rejects_everything():
    model, counts = make_model([1, 2]), PROBLEM.level_targets
    arguments = LevelArguments()
    only_first = csr_matrix(np.tile([1.0, 0.0, 0.0], (len(PROBLEM.truth), 1)).astype(np.float32))
    data = level_data(TREE, counts, [1, 2], 1, only_first, arguments)
    bootstrap_head(model.heads[1], data, PROBLEM.vectors, arguments)
    weights, children = weights_of(model.heads[1]), OFFSETS[1][1]
    assert weights[:children, :-1].any(axis=1).all()
    assert not weights[children:, :-1].any() and (weights[children:, -1] == -1).all()


# ---- Bootstrap behind projections ----


def oracle_components(vectors, count):
    """Projection on the first principal components, scaled to mean length 1, and that of the mean."""
    centred = vectors.astype(np.float64) - vectors.astype(np.float64).mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    components = centred @ directions[:count].T
    scale = 1 / np.sqrt((components**2).sum(axis=1).mean())
    return scale * components


def assert_solves(part, data, vectors, components, arguments):
    """Checks that the logits of a head are optimal on the components, for the documents of the shortlist."""
    found = part(torch.from_numpy(vectors)).detach().numpy().astype(np.float64)
    rows = as_rows(components)
    for node in range(part.num_nodes):
        parent = np.searchsorted(data.offsets, node, side="right") - 1
        chosen = np.asarray(data.shortlist[:, parent].todense()).ravel()
        if not chosen.any():
            continue
        true = np.asarray(data.counts[:, node].todense()).ravel() > 0
        weights = np.full(len(rows), arguments.bootstrap_cost)
        # The smallest weights that give these logits.
        learnt = np.linalg.lstsq(rows, found[:, node], rcond=None)[0]
        learnt[-1] += 1
        ours = oracles.node_objective(learnt, rows, true, chosen, weights, "logistic", -1.0)
        best = best_objective(rows, true, chosen, weights, "logistic", -1.0)
        assert best * (1 - 1e-5) <= ours <= best * 1.01


def test_principal_components(monkeypatch):
    vectors = PROBLEM.vectors
    for count in (2, DIMENSIONS):
        projection, centre = principal_components(vectors, count)
        found, expected = vectors @ projection.T - centre, oracle_components(vectors, count)
        np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-4)  # the sign of a direction is arbitrary
    monkeypatch.setattr(bootstrap, "PRINCIPAL_DOCUMENTS", 30)
    sampled = principal_components(vectors, 2, seed=1)[0]
    assert np.array_equal(sampled, principal_components(vectors, 2, seed=1)[0])
    assert not np.array_equal(sampled, principal_components(vectors, 2, seed=2)[0])


def joint_model(levels=(1, 3), **options):
    model = make_model([1])
    model.add_heads(levels, **options)
    return model


@pytest.mark.parametrize("negatives", ["dynamic", "both", "all"])
def test_bootstrap_behind_a_bottleneck(negatives, exact_solver):
    model, counts, levels = joint_model(bottleneck=3), PROBLEM.level_targets, [1, 3]
    arguments = LevelArguments(joint=True, negatives=negatives, bottleneck=3, beam_size=1)
    data = make_level_data(model, counts, 1, arguments, PROBLEM.vectors)
    assert (data.shortlist is not None) == (negatives == "both") and data.in_pass == (negatives == "dynamic")
    start = starting_data(data, TREE, counts, levels, 1, joint=True)
    assert np.array_equal(start.shortlist.toarray(), PROBLEM.true[0])  # whatever the negatives
    bootstrap_head(model.head(3), start, PROBLEM.vectors, arguments)
    assert_solves(model.head(3), start, PROBLEM.vectors, oracle_components(PROBLEM.vectors, 3), arguments)


def test_bootstrap_of_tails(exact_solver):
    tree = LabelTree([np.array([0, 6]), np.array([0, 1, 2, 3, 4, 16, 28])], np.arange(28))
    model = joint_model([1])
    model.label_tree = tree
    model.add_heads([1, 2], tails=[12, 12], shrink=2.0)
    counts, vectors = tree.targets(PROBLEM.labels), PROBLEM.vectors
    arguments = LevelArguments(joint=True, negatives="tfn", shrink=2.0)
    data = make_level_data(model, counts, 1, arguments, vectors)
    assert data.in_pass and data.beam_size is None and data.shortlist is None
    head, start = model.head(2), starting_data(data, tree, counts, [1, 2], 1, joint=True)
    bootstrap_head(head, start, vectors, arguments)
    for tail, first, end in head.parts():
        own = counts[1][:, first:end]
        inside = csr_matrix((own.sum(axis=1) > 0).astype(np.float32))
        tail_data = level_data(tree, [own], [1], 0, inside, arguments)
        tail_data.offsets = np.array([0, end - first])
        assert_solves(tail, tail_data, vectors, oracle_components(vectors, tail.weight.shape[1]), arguments)
    start_from_frequency(head, start, "bce")
    for tail, first, end in head.parts():
        shown = (PROBLEM.truth[:, first:end].sum(axis=1) > 0).sum()
        expected = (PROBLEM.truth[:, first:end].sum(axis=0) + 1) / (shown + 2)
        assert not tail.weight.any() and tail.projection.weight.any()
        np.testing.assert_allclose(torch.sigmoid(tail.bias).detach().numpy(), expected, rtol=1e-5)


def test_long_vectors_are_bootstrapped_on_their_components(exact_solver, monkeypatch):
    monkeypatch.setattr(bootstrap, "MAX_DIMENSIONS", DIMENSIONS - 1)
    monkeypatch.setattr(bootstrap, "COMPONENTS", 4)
    model, counts, arguments = make_model([1, 2, 3]), PROBLEM.level_targets, LevelArguments(negatives="tfn")
    data = make_level_data(model, counts, 2, arguments, PROBLEM.vectors)
    bootstrap_head(model.head(3), data, PROBLEM.vectors, arguments)
    assert_solves(model.head(3), data, PROBLEM.vectors, oracle_components(PROBLEM.vectors, 4), arguments)


# ---- Start without a bootstrap ----


@pytest.mark.parametrize(
    "loss, index, negatives", pairs(["bce", "squared_hinge"], [0, 2], ["tfn", "man", "both", "all"])
)
def test_start_from_frequency(loss, index, negatives):
    model, counts = make_model([1, 2, 3], loss), PROBLEM.level_targets
    arguments = LevelArguments(loss=loss, negatives=negatives, beam_size=2)
    data = make_level_data(model, counts, index, arguments, PROBLEM.vectors)
    _, chosen = oracle_shortlist(model, index, negatives, 2)
    head = model.heads[index]
    start_from_frequency(head, data, loss)
    assert not head.weight.any()
    probabilities = []
    for node in range(TREE.level_sizes[index]):
        shown = [document for document in range(len(PROBLEM.truth)) if chosen[document, node]]
        true = [document for document in shown if PROBLEM.true[index][document, node]]
        probabilities.append((len(true) + 1) / (len(shown) + 2))
    found = [oracles.head_probability(loss, float(bias)) for bias in head.bias.detach()]
    assert found == pytest.approx(probabilities, rel=1e-5)


# ---- The loss of a batch ----


@pytest.mark.parametrize(
    "loss, negatives, cost_sensitive", pairs(["bce", "squared_hinge"], ["tfn", "man", "both", "all"], [False, True])
)
def test_the_loss_of_a_batch(loss, negatives, cost_sensitive):
    """Eq. 9."""
    model, counts = make_model([1, 2, 3], loss), PROBLEM.level_targets
    arguments = LevelArguments(loss=loss, negatives=negatives, beam_size=2, cost_sensitive=cost_sensitive)
    documents = np.array([1, 4, 0, 60])
    ids = torch.randint(1, 11, (len(documents), 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        vectors = model.encode(ids, torch.ones_like(ids)).numpy()
    for index, level in enumerate(model.config.head_levels):
        data = make_level_data(model, counts, index, arguments, PROBLEM.vectors)
        batch = {name: torch.from_numpy(array) for name, array in data.batch(documents).items()}
        found = model(input_ids=ids, level=level, **batch).loss
        _, chosen = oracle_shortlist(model, index, negatives, 2)
        weights = np.where(PROBLEM.true[index] > 0, 1.0, data.negative_weight)
        if cost_sensitive:
            weights = oracles.importance_weights(PROBLEM.counts[index], data.negative_weight)
        true, kind = PROBLEM.true[index][documents], ORACLE_LOSSES[loss]
        head, rows = weights_of(model.heads[index]), as_rows(vectors)
        expected = oracles.level_objective(
            head, rows, true, chosen[documents], weights[documents], kind, regularisation=0
        )
        assert found.item() == pytest.approx(expected / len(documents), rel=1e-5)


def test_dropout_in_training_only():
    model = make_model([1])
    model.config.head_dropout = 0.5
    ids = torch.ones((1, 4), dtype=torch.long)
    with torch.no_grad():
        still = [model(input_ids=ids, level=1).logits for _ in range(2)]
        assert torch.equal(*still)
        model.encoder.eval(), model.heads.train()
        model.training = True
        moving = [model(input_ids=ids, level=1).logits for _ in range(2)]
    assert not torch.equal(*moving)

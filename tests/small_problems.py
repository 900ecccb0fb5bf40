"""Small random problems for the tests of tree, ranker and heads; weights as plain matrices; optima."""

import numpy as np
import oracles
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from hf_xmc.features import Features
from hf_xmc.knn_ranker import KNNRanker
from hf_xmc.label_tree import LabelTree

# Depth 3; single children, a node of 17 labels (two blocks of lanes) and labels in no particular order.
UNEVEN_PARENTS = [
    [0, 0, 0],
    [2, 0, 1, 0, 2, 0],
    [3, 0, 5, 5, 1, 5, 5, 4, 5, 5, 5, 5, 2, 5, 5, 5, 5, 4, 5, 5, 5, 5, 0, 5, 3, 1, 0, 4],
]
UNEVEN_LABELS = len(UNEVEN_PARENTS[-1])


def uneven_tree():
    return LabelTree.from_parents([np.array(parents) for parents in UNEVEN_PARENTS])


TREE = uneven_tree()
OFFSETS = [offsets.tolist() for offsets in TREE.child_offsets]
CHAIN = oracles.cluster_chain(OFFSETS)
# Losses of heads and what the oracles call them.
ORACLE_LOSSES = {"bce": "logistic", "squared_hinge": "squared_hinge"}


def make_bounded(heads, seed):
    """Gives heads logits between -1 and 1 for unit vectors: no probability is cut, and none ties."""
    generator = torch.Generator().manual_seed(seed)
    for head in heads:
        with torch.no_grad():
            head.weight.copy_(torch.nn.functional.normalize(torch.randn(head.weight.shape, generator=generator)) * 0.7)
            head.bias.copy_(torch.rand(head.bias.shape, generator=generator) * 0.5 - 0.25)
    return heads


def random_problem(seed=0, documents=70, sparse=40, dense=3, labels=UNEVEN_LABELS):
    """
    Documents that resemble their labels, and the labels.

    Document 0 has neither features nor labels, document 1 labels only, and the last label has no document.
    """
    rng = np.random.default_rng(seed)
    truth = rng.random((documents, labels)) < 2.5 / labels
    truth[0] = False
    truth[:, -1] = False
    truth[1, 0] = True
    width = sparse + dense
    prototypes = rng.random((labels, width)) * (rng.random((labels, width)) < 0.2)
    values = truth @ prototypes + rng.random((documents, width)) * (rng.random((documents, width)) < 0.1)
    values[:, sparse:] -= 0.3  # embeddings have negative values
    values[:2] = 0
    features = Features(
        csr_matrix(values[:, :sparse].astype(np.float32)) if sparse else None,
        values[:, sparse:].astype(np.float32) if dense else None,
    )
    return features.normalized(), csr_matrix(truth.astype(np.float32))


def as_rows(features):
    """`[sparse ; dense ; 1]` as one float64 matrix."""
    parts = [np.ones((len(features), 1))]
    if features.dense is not None:
        parts.insert(0, features.dense.astype(np.float64))
    if features.sparse is not None:
        parts.insert(0, features.sparse.toarray().astype(np.float64))
    return np.hstack(parts)


def as_weights(ranker):
    """The weights of all nodes of each level it has, (nodes, sparse + dense + 1), from the documented layout."""
    weights, width = ranker.weights, ranker.num_dense + 1
    quantized = weights.records.shape[1] == 8 + 16
    levels = []
    block = 0
    for offsets in ranker.tree.child_offsets[ranker.first_level - 1 :]:
        matrix = np.zeros((offsets[-1], ranker.num_sparse + width))
        for parent in range(len(offsets) - 1):
            first = offsets[parent]
            while first < offsets[parent + 1]:
                full = 16 if weights.block_sizes is None else int(weights.block_sizes[block])
                lanes = min(full, offsets[parent + 1] - first)
                for row in range(weights.row_begin[block], weights.row_begin[block + 1]):
                    record = weights.records[row].tobytes()
                    feature = np.frombuffer(record[:4], np.int32)[0]
                    scale = np.frombuffer(record[4:8], np.float32)[0]
                    values = np.frombuffer(record[8:], np.int8 if quantized else np.float32).astype(np.float64)
                    matrix[first : first + lanes, feature] = (scale * values)[:lanes]
                dense = weights.dense[block * width : (block + 1) * width, :lanes]
                matrix[first : first + lanes, ranker.num_sparse :] = dense.T
                block, first = block + 1, first + lanes
        levels.append(matrix)
    assert block == len(weights.row_begin) - 1
    return levels


def same_weights(first, second):
    """Whether two rankers are equal to the last bit."""
    arrays, others = (
        vars(ranker.index) if isinstance(ranker, KNNRanker) else ranker.weights.arrays for ranker in (first, second)
    )
    return arrays.keys() == others.keys() and all(
        array.dtype == others[name].dtype and np.array_equal(array, others[name]) for name, array in arrays.items()
    )


def cost_sensitive_weights(counts, cost, negative_cost):
    """XR-Transformer, eq. 6, as the ranker uses it: positives in proportion to their shares, `cost` on average."""
    shares = oracles.importance_weights(counts, np.nan)
    return np.where(counts > 0, shares * cost / np.nanmean(shares), negative_cost)


def best_objective(rows, targets, chosen, loss_weights, loss, prior, centre=None):
    """Minimum of the objective of one node (XR-Transformer, eq. 9): found with gradients, measured by the oracle."""
    keep = chosen > 0
    centre = np.zeros(rows.shape[1]) if centre is None else centre
    rows, signs, costs = rows[keep], np.where(targets[keep] > 0, 1.0, -1.0), loss_weights[keep]

    def value_and_gradient(weights):
        logits = signs * (rows @ weights + prior)
        if loss == "squared_hinge":
            gap = np.maximum(0, 1 - logits)
            value, slope = gap**2, -2 * gap
        else:
            value, slope = np.logaddexp(0, -logits), -1 / (1 + np.exp(logits))
        away = weights - centre
        return (costs * value).sum() + away @ away / 2, (costs * slope * signs) @ rows + away

    options = {"gtol": 1e-4}
    found = minimize(value_and_gradient, np.zeros(rows.shape[1]), jac=True, method="BFGS", options=options).x
    return oracles.node_objective(found, rows, signs > 0, np.ones(len(rows)), costs, loss, prior, centre=centre)


def assert_optimal(weights, rows, truth, chosen, loss_weights, loss, prior, tolerance=0.001, centres=None):
    """Checks that the stored weights of all nodes of a level minimise its objective; the bias includes the prior."""
    learnt = weights.copy()
    learnt[:, -1] -= prior
    ours = oracles.level_objective(learnt, rows, truth > 0, chosen, loss_weights, loss, prior, centres=centres)
    best = sum(
        best_objective(
            rows,
            truth[:, node] > 0,
            chosen[:, node],
            loss_weights[:, node],
            loss,
            prior,
            None if centres is None else centres[node],
        )
        for node in range(truth.shape[1])
    )
    assert best * (1 - 1e-6) <= ours <= best * (1 + tolerance)

"""Labels added to, removed from and renamed in trained models: what changes, and what stays to the bit."""

import json

import numpy as np
import oracles
import pytest
from conftest import TOPICS, make_documents, train_linear
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from small_problems import UNEVEN_LABELS, as_rows, as_weights, random_problem, uneven_tree
from transformers import AutoModel

from hf_xmc import LabelVocabulary, XMCForTextClassification
from hf_xmc.features import Features
from hf_xmc.hub.upload import export_model
from hf_xmc.label_tree import LabelTree
from hf_xmc.label_vectors import InvertedIndex
from hf_xmc.labels import Labels
from hf_xmc.linear_ranker import LinearRanker, first_node
from hf_xmc.ranker_editing import NewLabels, documents_of_classifiers, with_labels, without_nodes
from hf_xmc.serialization import load_tensors, save_tensors
from hf_xmc.training.options import RankerArguments
from hf_xmc.training.ranker import train_ranker
from hf_xmc.vocabulary import LabelEntry

TREES = {"uneven": uneven_tree(), "flat": LabelTree.flat(UNEVEN_LABELS)}
TEXTS = ["topic07 word1 topic31", "topic59 topic02 topic33", "word3", ""]
NEW = {"new a": "topic07 word1", "word3": "", "new b": LabelEntry("topic59", synonyms=("topic02",))}


def trained(tree="uneven", sparse=40, dense=3, **options):
    features, targets = random_problem(1, 70, sparse, dense)
    return train_ranker(features, targets, TREES[tree], RankerArguments(**options)), features


def new_labels(ranker, features, count=20, seed=3):
    """`count` labels in a few clusters of a ranker, each with one to three documents."""
    rng = np.random.default_rng(seed)
    clusters = rng.integers(min(3, len(ranker.tree.child_offsets[-1]) - 1), size=count)
    truth = np.zeros((len(features), count), np.float32)
    for label in range(count):
        truth[rng.choice(np.arange(2, len(features)), 1 + label % 3, replace=False), label] = 1
    return NewLabels(clusters, features, csr_matrix(truth))


def extended(ranker, features, **options):
    new = new_labels(ranker, features, **options)
    return with_labels(ranker, ranker.tree.with_labels(new.clusters), new), new


def all_logits(ranker, features):
    """Logits of all labels by exhaustive search, `(documents, labels)`."""
    logits, labels = ranker.logits(features, ranker.tree.num_labels, beam_size=0)
    by_label = np.empty_like(logits)
    np.put_along_axis(by_label, labels, logits, axis=1)
    return by_label


# Tree and ranker -----------------------------------------------------------------------------------------------------


def test_leaves_of_new_labels_follow_their_siblings():
    tree = LabelTree([[0, 2], [0, 2, 5]], [3, 1, 0, 4, 2])
    larger = tree.with_labels(np.array([1, 0, 1]))
    assert [offsets.tolist() for offsets in larger.child_offsets] == [[0, 2], [0, 3, 8]]
    assert larger.leaf_labels.tolist() == [3, 1, 6, 0, 4, 2, 5, 7]


def test_nodes_without_labels_are_removed():
    tree = LabelTree([[0, 2], [0, 1, 3], [0, 2, 3, 5]], [3, 1, 0, 4, 2])
    smaller, is_left = tree.without_labels(np.array([1, 3, 4]))
    assert [offsets.tolist() for offsets in smaller.child_offsets] == [[0, 1], [0, 2], [0, 1, 2]]
    assert smaller.leaf_labels.tolist() == [0, 1]  # labels 0 and 2
    assert is_left.tolist() == [True, False, True, False, True, True, False, False, True, False, True]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("weight_dtype", ["int8", "float32"])
@pytest.mark.parametrize("options", [{"ranking": "leaf"}, {"ranking": "path", "loss": "logistic"}])
def test_other_classifiers_keep_their_scores_to_the_bit(tree, weight_dtype, options, tmp_path):
    ranker, features = trained(tree, weight_dtype=weight_dtype, **options)
    before = all_logits(ranker, features)
    larger, _ = extended(ranker, features)
    larger, _ = extended(larger, features, count=5, seed=4)
    after = all_logits(larger, features)
    assert after.shape[1] == UNEVEN_LABELS + 25
    np.testing.assert_array_equal(after[:, :UNEVEN_LABELS], before)
    larger.save_pretrained(tmp_path)
    larger.tree.save_pretrained(tmp_path)
    np.testing.assert_array_equal(all_logits(LinearRanker.from_pretrained(tmp_path), features), after)
    # A whole cluster and some others, of both old and new labels.
    removed = np.union1d(larger.tree.leaf_labels[: larger.tree.child_offsets[-1][1]], [2, 17, 30, 45])[: 40]
    smaller = without_nodes(larger, *larger.tree.without_labels(removed))
    np.testing.assert_array_equal(all_logits(smaller, features), np.delete(after, removed, axis=1))


@pytest.mark.parametrize("tree", TREES)
def test_adding_and_removing_restores_the_ranker(tree):
    ranker, features = trained(tree)
    larger, new = extended(ranker, features)
    again = without_nodes(larger, *larger.tree.without_labels(UNEVEN_LABELS + np.arange(len(new.clusters))))
    assert again.tree == ranker.tree and (again.block_child == ranker.block_child).all()
    for name, array in ranker.weights.arrays.items():
        np.testing.assert_array_equal(array, again.weights.arrays[name])


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_new_classifiers_are_the_optimum(loss):
    ranker, features = trained(weight_dtype="float32", loss=loss)
    larger, new = extended(ranker, features)
    rows, truth = as_rows(features)[:, :-1], new.targets.toarray() > 0
    stand_ins, clusters = documents_of_classifiers(ranker, np.arange(len(ranker.tree.child_offsets[-1]) - 1))
    stand_ins = as_rows(stand_ins)[:, :-1]
    weights = as_weights(larger)[-1][larger.tree.leaf_positions]
    for label, cluster in enumerate(new.clusters):
        used = truth[:, new.clusters == cluster].any(axis=1)
        x = np.vstack([rows[used], stand_ins[clusters == cluster]])
        is_positive = np.concatenate([truth[used, label], np.zeros((clusters == cluster).sum(), bool)])
        signs, costs = np.where(is_positive, 1, -1), np.where(is_positive, 0.5, 2.0)

        def objective(w, x=x, signs=signs, costs=costs):
            losses = [oracles_loss(margin, loss) for margin in signs * (x @ w - 1)]
            return w @ w / 2 + costs @ losses

        ours = weights[UNEVEN_LABELS + label]
        best = minimize(objective, np.zeros(x.shape[1])).fun
        assert ours[-1] == -1
        assert best * (1 - 1e-4) <= objective(ours[:-1]) <= best * 1.01


def oracles_loss(margin, loss):
    return max(0.0, 1 - margin) ** 2 if loss == "squared_hinge" else np.log1p(np.exp(-margin))


def test_documents_of_classifiers():
    ranker, _ = trained()
    weights, tree = as_weights(ranker)[-1], ranker.tree
    chosen = np.array([1, 4])
    documents, clusters = documents_of_classifiers(ranker, chosen)
    offsets = tree.child_offsets[-1]
    nodes = np.concatenate([np.arange(offsets[node], offsets[node + 1]) for node in chosen])
    assert clusters.tolist() == [node for node in chosen for _ in range(offsets[node + 1] - offsets[node])]
    positive, dense = np.maximum(weights[nodes, :40], 0), weights[nodes, 40:-1]
    norms = np.linalg.norm(positive, axis=1, keepdims=True)
    np.testing.assert_allclose(documents.sparse.toarray(), positive / np.where(norms, norms, 1), atol=1e-6)
    lengths = np.linalg.norm(dense, axis=1, keepdims=True)
    np.testing.assert_allclose(documents.dense, dense / np.where(lengths, lengths, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([16, 1], "does not divide"), ([0], "block_sizes"), ([17], "block_sizes"), ("all", "another number of nodes")],
)
def test_damaged_block_sizes(sizes, message, tmp_path):
    ranker, features = trained("flat")
    larger, _ = extended(ranker, features, count=1)
    larger.save_pretrained(tmp_path)
    path = tmp_path / "ranker.safetensors"
    tensors, metadata = load_tensors(str(path), "linear ranker")
    tensors = {name: np.array(array) for name, array in tensors.items()}
    tensors["block_sizes"] = np.append(tensors["block_sizes"], 1) if sizes == "all" else np.array(sizes)
    tensors["block_sizes"] = tensors["block_sizes"].astype(np.uint8)
    save_tensors(str(path), tensors, "linear ranker", {k: v for k, v in metadata.items() if k != "hf_xmc"})
    with pytest.raises(ValueError, match="block_sizes"):
        LinearRanker.from_pretrained(tmp_path, tree=larger.tree)

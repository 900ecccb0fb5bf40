"""Labels added to, removed from and renamed in trained models: what changes, and what stays to the bit."""

import numpy as np
import pytest
from conftest import TOPICS, encoder_arguments, make_documents, refused, train_linear
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from small_problems import UNEVEN_LABELS, as_rows, as_weights, random_problem, uneven_tree

from hf_xmc import LabelVocabulary, XMCForTextClassification, XMCTrainer
from hf_xmc.features import Features
from hf_xmc.label_tree import LabelTree
from hf_xmc.label_vectors import InvertedIndex
from hf_xmc.linear_ranker import LinearRanker
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
    removed = np.union1d(larger.tree.leaf_labels[: larger.tree.child_offsets[-1][1]], [2, 17, 30, 45])[:40]
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
    vectors = np.random.default_rng(0).normal(size=(UNEVEN_LABELS, 3)).astype(np.float16)
    given, _ = documents_of_classifiers(ranker, chosen, vectors)
    expected = vectors[tree.leaf_labels[nodes]].astype(np.float32)
    np.testing.assert_allclose(given.dense, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([16, 1], "does not divide"), ([0], "does not divide"), ([17], "outside 0..16"), ("more", "is for 31 nodes")],
)
def test_damaged_block_sizes(sizes, message, tmp_path):
    ranker, features = trained("flat")
    larger, _ = extended(ranker, features, count=1)
    larger.save_pretrained(tmp_path)
    path = tmp_path / "ranker.safetensors"
    tensors, metadata = load_tensors(str(path), "linear ranker")
    tensors = {name: np.array(array) for name, array in tensors.items()}
    tensors["block_sizes"] = np.append(tensors["block_sizes"], 1) if sizes == "more" else np.array(sizes)
    tensors["block_sizes"] = tensors["block_sizes"].astype(np.uint8)
    save_tensors(str(path), tensors, "linear ranker", {k: v for k, v in metadata.items() if k != "hf_xmc"})
    refused(f"block_sizes.*{message}", LinearRanker.from_pretrained, tmp_path, tree=larger.tree)


def test_rows_of_an_inverted_index():
    rng = np.random.default_rng(0)
    first, second = (csr_matrix((rng.random((rows, 12)) < 0.4) * rng.random((rows, 12))) for rows in (7, 3))
    joined = InvertedIndex.from_rows(first.astype(np.float32)).followed_by(
        InvertedIndex.from_rows(second.astype(np.float32)), 7
    )
    documents = csr_matrix(np.eye(12, dtype=np.float32))
    expected = np.vstack([first.toarray(), second.toarray()]).astype(np.float32)
    np.testing.assert_array_equal(joined.products(documents, 10).T, expected)
    is_left = np.arange(10) % 3 > 0
    np.testing.assert_array_equal(joined.without(is_left).products(documents, 6).T, expected[is_left])


# Models --------------------------------------------------------------------------------------------------------------


def load(folder):
    return XMCForTextClassification.from_pretrained(folder)


@pytest.fixture(params=["model_folder", "parts_model_folder", "other_model_folder"])
def model(request):
    """A linear model of all parts, one with similar documents, and one whose ranker predicts by path."""
    return load(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def frozen_folder(tiny_encoder, make_once):
    """Folder of a model with an encoder, without heads, and with trees of its own for the ranker."""

    def fill(folder):
        options = {"level_objective": "label_texts", "level_steps": [2], "refine_tree": True, "save_strategy": "no"}
        args = encoder_arguments(folder, similar_documents=True, **options)
        XMCTrainer(model=tiny_encoder, args=args, train_dataset=make_documents(300), label_texts=TOPICS).train()

    return make_once("frozen-model", fill)


def logits_of(model, texts=TEXTS):
    """Logits of all labels by the ranker, by name."""
    scores, labels = model._search_ranker("logits", model.featurize(texts), len(model.labels), 0, None)
    return [
        {model.labels[i]: score for i, score in zip(*row, strict=True)} for row in zip(labels, scores, strict=True)
    ]


def assert_kept(before, after, removed=()):
    for old, new in zip(before, after, strict=True):
        assert {label: score for label, score in new.items() if label in old} == {
            label: score for label, score in old.items() if label not in removed
        }


def assert_round_trip(model, folder):
    model.save_pretrained(folder)
    again = load(folder)
    for kind in dict.fromkeys(["ranker", model.config.predict_with, *model.available_parts]):
        assert again.predict(TEXTS, top_k=8, predict_with=kind) == model.predict(TEXTS, top_k=8, predict_with=kind)
    assert again.labels.vocabulary() == model.labels.vocabulary() and again.labels.edits == model.labels.edits
    assert again.label_tree == model.label_tree and again.ranker.tree == model.ranker.tree
    return again


def test_added_labels(model, tmp_path):
    before, sizes = logits_of(model), (len(model.labels), model.labels.num_documents)
    model.add_labels(NEW, {"word3": ["word3 word1", "word5 word3"]})
    assert model.labels.names[-3:] == list(NEW) and len(model.labels) == sizes[0] + 3
    assert model.labels.counts[-3:].tolist() == [0, 2, 0] and model.labels.num_documents == sizes[1] + 2
    assert model.labels.vocabulary()["new b"] == LabelEntry("topic59", synonyms=("topic02",))
    assert_kept(before, logits_of(model))
    # Labels look alike in the letters of words.
    top_k = 4 if model.tfidf.analyzer == "word" else 12
    found = [{label for label, _ in row} for row in model.predict(TEXTS[:3], top_k=top_k, beam_size=0)]
    assert "new a" in found[0] and "new b" in found[1] and "word3" in found[2]
    every = model.predict(TEXTS, 63, beam_size=0, predict_with="ranker")
    for row, chosen in zip(
        every, model.predict(TEXTS, labels=["new a", "label 07"], predict_with="ranker"), strict=True
    ):
        assert dict(chosen) == {label: score for label, score in row if label in ("new a", "label 07")}
    assert_round_trip(model, tmp_path)


@pytest.mark.parametrize("folder", ["frozen_folder", "x_transformer_folder"])
def test_labels_added_to_a_model_with_an_encoder(folder, request, tmp_path):
    model = load(request.getfixturevalue(folder))
    before = logits_of(model)
    model.add_labels({**NEW, "unknown word": ""}, {"word3": ["word3 word1", "word5 word3"]})
    assert_kept(before, logits_of(model))
    assert "new b" in {label for label, _ in model.predict(["topic59 topic02"], top_k=5, beam_size=0)[0]}
    again = assert_round_trip(model, tmp_path)
    again.remove_labels(["new a", "label 03", "word3"])
    assert_kept(logits_of(model), logits_of(again), {"new a", "label 03", "word3"})
    assert_round_trip(again, tmp_path)


def test_a_new_label_is_placed_beside_labels_of_its_words(frozen_folder):
    model = load(frozen_folder)
    model.add_labels({f"twin {i}": f"topic{i:02d}" for i in range(0, 60, 7)})
    for tree in (model.ranker.tree, model.label_tree):
        parents = tree.parents(tree.depth)[tree.leaf_positions]
        beside = [parents[60 + place] == parents[label] for place, label in enumerate(range(0, 60, 7))]
        assert np.mean(beside) > 0.6


def test_new_rows_of_a_head(frozen_folder):
    model = load(frozen_folder)
    old, places = model.heads[-1].weight.detach().numpy(), model.label_tree.leaf_positions
    model.add_labels({"new": "topic07 topic08"}, {"new": ["topic09 word1"]})
    new = model.heads[-1].weight.detach().numpy()[model.label_tree.leaf_positions]
    np.testing.assert_array_equal(new[:-1], old[places])
    mean = model.featurize(["topic07 topic08", "topic09 word1"]).dense.mean(axis=0)
    expected = mean / np.linalg.norm(mean) * np.median(np.linalg.norm(old, axis=1))
    np.testing.assert_allclose(new[-1], expected, rtol=1e-3, atol=1e-5)


def test_new_label_vectors(model):
    if model.label_vectors is None:
        pytest.skip("the model has none")
    old = {name: model.label_vectors.scores(name, model.featurize(TEXTS)) for name in model.label_vectors.names}
    model.add_labels({"new": "topic07 topic08"}, {"new": ["topic09 word1", "topic09"]})
    own = model.featurize(["topic07 topic08", "topic09"])
    text, example = (model.label_vectors.scores(f"{kind}_tfidf", own)[:, -1] for kind in ("text", "centroid"))
    assert text[0] > 0.999 and text[1] == 0
    assert example[0] == 0 and 0.8 < example[1] < 0.999
    # Without examples, half of the vector of the text.
    model.add_labels({"plain": "topic07 topic08"})
    again = model.label_vectors.scores("centroid_tfidf", own)
    assert again[0, -1] == pytest.approx(0.5, abs=1e-3)
    np.testing.assert_array_equal(again[:, -2], example)
    model.remove_labels(["plain"])
    for name, scores in old.items():
        np.testing.assert_array_equal(model.label_vectors.scores(name, model.featurize(TEXTS))[:, :-1], scores)


def test_removed_labels(model, tmp_path):
    before = logits_of(model)
    # All labels of a cluster, and two others.
    tree = model.label_tree
    cluster = tree.leaf_labels[: tree.child_offsets[-1][1]] if tree.depth > 1 else []
    removed = sorted({"label 07", "label 31", *(model.labels[i] for i in cluster)})
    model.remove_labels(removed)
    assert len(model.labels) == 60 - len(removed) and not set(removed) & set(model.labels.names)
    assert_kept(before, logits_of(model), set(removed))
    assert_round_trip(model, tmp_path)


def test_votes_without_removed_labels(parts_model_folder):
    model, other = load(parts_model_folder), load(parts_model_folder)
    model.remove_labels(["label 07", "label 31"])
    for old, new in zip(*(one.predict(TEXTS[:2], top_k=60, predict_with="knn_tfidf") for one in (other, model))):
        assert {label for label, _ in new} == {label for label, _ in old} - {"label 07", "label 31"}


def test_labels_removed_from_heads(encoder_model_folder, tmp_path):
    model, other = load(encoder_model_folder), load(encoder_model_folder)
    model.remove_labels(["label 07", "label 31"])
    for kind in ("heads", "ranker"):
        kept = [label for label in other.labels.names if label not in ("label 07", "label 31")]
        old = other.predict(TEXTS, 60, beam_size=0, predict_with=kind, labels=kept)
        new = model.predict(TEXTS, 60, beam_size=0, predict_with=kind)
        for before, after in zip(old, new, strict=True):
            assert dict(before) == pytest.approx(dict(after), abs=1e-6)
    assert_round_trip(model, tmp_path)


def test_a_vector_model(vector_model_folder, tmp_path):
    model = load(vector_model_folder)
    vectors = Features(csr_matrix(np.eye(4, model.ranker.num_sparse, dtype=np.float32)))
    before = model.predict(vectors, 60, beam_size=0, predict_with="ranker")
    model.add_labels({"new": ""}, {"new": Features(vectors.sparse[:1] * 5)})
    after = model.predict(vectors, 61, beam_size=0, predict_with="ranker")
    assert "new" in dict(after[0][:2])
    for old, new in zip(before, after, strict=True):
        assert dict(old) == {label: score for label, score in new if label != "new"}
    refused("examples", model.add_labels, {"newer": "words"})


def test_renamed_labels(model, tmp_path):
    before = model.predict(TEXTS)
    model.rename_labels({"label 07": "seven", "label 31": "label 07"})
    names = {"label 07": "seven", "label 31": "label 07"}
    assert model.predict(TEXTS) == [[(names.get(label, label), score) for label, score in row] for row in before]
    assert_round_trip(model, tmp_path)


def test_hierarchy_and_edits(model_folder):
    model = load(model_folder)
    below = {"middle": {"text": "topic02", "parents": ["top"]}, "low": {"text": "topic03", "parents": ["middle"]}}
    model.add_labels(LabelVocabulary({"top": "topic01", **below}))
    model.add_labels({"lower": LabelEntry("topic04", parents=("low", "label 05"))})
    hierarchy = model.labels.checked_hierarchy()
    assert [model.labels[i] for i in hierarchy.ancestors([63])] == ["label 05", "top", "middle", "low", "lower"]
    model.remove_labels(["middle", "low"])
    model.rename_labels({"lower": "lowest"})
    assert [model.labels[i] for i in model.labels.ancestors("lowest")] == ["label 05", "top", "lowest"]
    actions = [(edit["action"], edit["count"], edit["labels"]) for edit in model.labels.edits]
    assert actions == [
        ("added", 3, ["top", "middle", "low"]),
        ("added", 1, ["lower"]),
        ("removed", 2, ["middle", "low"]),
        ("renamed", 1, ["lower → lowest"]),
    ]


@pytest.mark.parametrize(
    ("labels", "examples", "error", "message"),
    [
        ({"new": "topic01", "label 07": "x"}, None, ValueError, "'label 07'"),
        ({}, None, ValueError, "empty"),
        (["new"], None, TypeError, "dictionary"),
        ({7: "topic01"}, None, TypeError, "dictionary"),
        ({"new": 7}, None, TypeError, "new"),
        ({"new": {"title": "topic01"}}, None, ValueError, "title"),
        ({"c_123": "", "new": "topic01"}, None, ValueError, "'c_123'"),
        ({"new": "unheard of"}, None, ValueError, "'new'"),
        ({"new": LabelEntry("topic01", parents=("nobody",))}, None, ValueError, "nobody"),
        ({"new": "topic01"}, {"new": "topic01 topic02"}, TypeError, "list of texts"),
        ({"new": "topic01"}, {"new": [1]}, TypeError, "list of texts"),
        ({"new": "topic01"}, {"other": ["topic01"]}, ValueError, "'other'"),
        ({"new": "topic01"}, ["topic01"], TypeError, "dictionary"),
    ],
)
def test_labels_that_cannot_be_added(labels, examples, error, message, model_folder):
    model = load(model_folder)
    refused(message, model.add_labels, labels, examples, error=error)
    assert len(model.labels) == model.label_tree.num_labels == model.ranker.tree.num_labels == 60


@pytest.mark.parametrize(
    ("call", "argument", "error", "message"),
    [
        ("remove_labels", ["label 07", "nothing"], ValueError, "'nothing'"),
        ("remove_labels", "label 07", TypeError, "list"),
        ("remove_labels", [7], TypeError, "list"),
        ("remove_labels", [], ValueError, "empty"),
        ("remove_labels", ["label 07", "label 07"], ValueError, "twice"),
        ("remove_labels", [f"label {i:02d}" for i in range(60)], ValueError, "all labels"),
        ("rename_labels", {"nothing": "x"}, ValueError, "'nothing'"),
        ("rename_labels", {"label 07": "label 08"}, ValueError, "'label 08'"),
        ("rename_labels", {"label 07": "x", "label 08": "x"}, ValueError, "'x'"),
        ("rename_labels", {"label 07": ""}, ValueError, "non-empty"),
        ("rename_labels", ["label 07"], TypeError, "dictionary"),
    ],
)
def test_wrong_edits(call, argument, error, message, model_folder):
    model = load(model_folder)
    with pytest.raises(error, match=message):
        getattr(model, call)(argument)
    assert model.labels.names == load(model_folder).labels.names and not model.labels.edits


def test_models_without_room_for_labels(documents, tmp_path, train):
    alone = train(folder=tmp_path / "heads", method="lightxml").model
    refused("head", alone.add_labels, {"new": "topic01"})
    knn = train_linear(tmp_path / "knn", documents, method="knn").model
    refused("knn", knn.add_labels, {"new": "topic01"})
    knn.remove_labels(["label 07"])
    assert "label 07" not in {label for row in knn.predict(TEXTS, 60) for label, _ in row}
    aplc = train(folder=tmp_path / "aplc", method="aplc-xlnet").model
    refused("adaptive", aplc.remove_labels, ["label 07"])

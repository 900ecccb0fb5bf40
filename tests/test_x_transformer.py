"""X-Transformer: heads find clusters and a ranker ranks their labels; kinds of label features."""

import numpy as np
import oracles
import pytest
import torch
from conftest import encoder_arguments, make_documents, pairs, refused
from datasets import Dataset
from scipy.sparse import csr_matrix
from small_problems import (
    CHAIN,
    OFFSETS,
    TREE,
    as_rows,
    as_weights,
    assert_optimal,
    cost_sensitive_weights,
    random_problem,
    same_weights,
)

from hf_xmc import Features, Labels, LabelTree, TfidfFeaturizer, XMCForTextClassification, XMCTrainer
from hf_xmc.linear_ranker import Beam, LinearRanker
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training.label_features import describe_labels, label_documents
from hf_xmc.training.options import RankerArguments
from hf_xmc.training.ranker import train_ranker
from hf_xmc.training.shortlist import level_shortlist

TEXTS = make_documents(40, seed=11)["text"][:]


def random_beam(level, documents, width=3, seed=0):
    """Some nodes of a level for each document, none for document 3."""
    rng = np.random.default_rng(seed)
    nodes = np.full((documents, width), -1)
    for document in range(documents):
        count = 0 if document == 3 else rng.integers(1, width + 1)
        nodes[document, :count] = rng.choice(TREE.level_sizes[level - 1], count, replace=False)
    return Beam(level, nodes, np.log(rng.random((documents, width))).astype(np.float32))


def pairs_of(beam):
    """A beam as pairs of score and node."""
    rows = zip(beam.log_probabilities.tolist(), beam.nodes.tolist(), strict=True)
    return [[(score, node) for score, node in zip(*row, strict=True) if node >= 0] for row in rows]


# ---- The ranker below the nodes of another matcher ----


@pytest.mark.parametrize("level, loss, ranking", pairs([1, 2], ["squared_hinge", "logistic"], ["leaf", "path"]))
def test_search_below_given_nodes(level, loss, ranking):
    features, targets = random_problem(seed=1)
    start = random_beam(level, len(features))
    arguments = RankerArguments(loss=loss, ranking=ranking, beam_size=2)
    ranker = train_ranker(features, targets, TREE, arguments, initial_beam=start)
    logits = oracles.logits_of(as_rows(features), as_weights(ranker))
    assert len(logits) == TREE.depth - level == TREE.depth + 1 - ranker.first_level
    expected = oracles.beam_scores(logits, OFFSETS[level:], loss, ranking, 2, pairs_of(start))
    for threads in (1, 2):
        scores, labels = ranker.predict(features, TREE.num_labels, initial_beam=start, num_threads=threads)
        for row, (own, found) in enumerate(zip(scores, labels, strict=True)):
            known = found >= 0
            raw = expected[row][TREE.leaf_positions[found[known]]]
            assert known.sum() == np.isfinite(expected[row]).sum() and (row == 3) == (not known.any())
            assert np.isfinite(raw).all() and (np.diff(raw) <= 1e-6).all()
            probability = np.exp(raw) if ranking == "path" else (raw + 1) / 2
            if ranking == "leaf" and loss == "logistic":
                probability = 1 / (1 + np.exp(-raw))
            np.testing.assert_allclose(own[known], np.clip(probability, 0, 1), atol=2e-5)
            assert not own[~known].any()


@pytest.mark.parametrize("negatives", ["tfn", "man", "both"])
def test_labels_learn_from_true_and_matched_clusters(negatives):
    features, targets = random_problem(seed=3, sparse=12, dense=2)
    truth, rows, start = targets.toarray(), as_rows(features), random_beam(2, len(features))
    options = {"prune_threshold": 0.0, "weight_dtype": "float32", "tolerance": 1e-5, "max_passes": 3000, "C": 2.0}
    arguments = RankerArguments(negatives=negatives, negative_cost=0.5, cost_sensitive=True, **options)
    ranker = train_ranker(features, targets, TREE, arguments, initial_beam=start)
    matched = np.zeros((len(rows), TREE.level_sizes[1]))
    for document, row in enumerate(pairs_of(start)):
        matched[document, [node for _, node in row]] = 1
    true = oracles.true_nodes(truth, CHAIN, TREE.leaf_labels.tolist())[1]
    chosen = oracles.shortlist(None if negatives == "tfn" else matched, None if negatives == "man" else true, CHAIN[2])
    found = level_shortlist(features, TREE.targets(targets)[1], 6, negatives, 60, None, 3, start)
    for child in range(TREE.num_labels):
        documents = found.documents(int(TREE.parents(3)[child]))
        assert documents.tolist() == np.flatnonzero(chosen[:, child]).tolist()
    counts = oracles.true_label_counts(truth, CHAIN, TREE.leaf_labels.tolist())[-1]
    loss_weights = cost_sensitive_weights(counts, 2.0, 0.5)
    (weights,) = as_weights(ranker)
    assert_optimal(weights, rows, counts, chosen, loss_weights, "squared_hinge", arguments.bias_prior)


def test_the_file_holds_only_the_levels_below(tmp_path):
    features, targets = random_problem(seed=4)
    start = random_beam(2, len(features))
    ranker, again = (
        train_ranker(features, targets, TREE, RankerArguments(), Runtime(num_threads=threads), start)
        for threads in (1, 2)
    )
    assert same_weights(ranker, again)
    whole = train_ranker(features, targets, TREE, RankerArguments())
    blocks = sum(-(-size // 16) for size in np.diff(TREE.child_offsets[2]))
    assert len(ranker.weights.row_begin) - 1 == blocks < len(whole.weights.row_begin) - 1
    ranker.save_pretrained(tmp_path)
    loaded = LinearRanker.from_pretrained(tmp_path, tree=TREE)
    assert loaded.first_level == 3 and same_weights(loaded, ranker)
    for found, expected in zip(
        loaded.predict(features, initial_beam=start), ranker.predict(features, initial_beam=start)
    ):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "start, problem",
    [
        (None, "level 2"),
        (random_beam(1, 70), "level 1"),
        (random_beam(2, 69), "69"),
        (Beam(2, np.full((70, 1), 6), np.zeros((70, 1))), r"0\.\.5"),
    ],
)
def test_nodes_that_do_not_fit(start, problem):
    features, targets = random_problem(seed=4)
    ranker = train_ranker(features, targets, TREE, RankerArguments(), initial_beam=random_beam(2, 70))
    refused(problem, ranker.predict, features, initial_beam=start)


# ---- The model ----


@pytest.fixture
def trained(x_transformer_folder):
    """A trained model and its training documents."""
    return XMCForTextClassification.from_pretrained(x_transformer_folder).eval(), make_documents(300, seed=5)


@pytest.mark.parametrize("ranking, beam_size", [("leaf", 1), ("path", 3), ("leaf", 0)])
def test_labels_of_the_best_clusters_are_ranked(trained, ranking, beam_size):
    model = trained[0]
    model.ranker.ranking = ranking
    features = model.featurize(TEXTS)
    head = model.head(1)
    clusters = oracles.logits_of(
        np.hstack([features.dense, np.ones((len(TEXTS), 1))]),
        [np.hstack([head.weight.detach().numpy(), head.bias.detach().numpy()[:, None]])],
    )[0]
    (logits,) = oracles.logits_of(as_rows(model.ranker_features(features)), as_weights(model.ranker))
    tree, top_b = model.label_tree, beam_size or 8
    with torch.no_grad():
        output = model(features, top_k=60, beam_size=beam_size)
    for row in range(len(TEXTS)):
        best = sorted(range(8), key=lambda cluster: -clusters[row, cluster])[:top_b]
        expected = {}
        for cluster in best:
            g = np.log(max(oracles.head_probability("squared_hinge", clusters[row, cluster]), 1e-9))
            for position in range(tree.child_offsets[1][cluster], tree.child_offsets[1][cluster + 1]):
                h = logits[row, position]
                score = min(1.0, max(0.0, (h + 1) / 2))
                if ranking == "path":
                    score = np.exp(g + oracles.log_probability("squared_hinge", h))
                expected[int(tree.leaf_labels[position])] = score
        found = [label for label in output.indices[row].tolist() if label >= 0]
        assert set(found) == set(expected)
        np.testing.assert_allclose(output.scores[row, : len(found)], [expected[label] for label in found], atol=1e-4)


def test_training_takes_the_clusters_that_the_heads_find(trained):
    model, data = trained
    features = model.featurize(data["text"][:])
    start = model.match(torch.from_numpy(features.dense), 1, 3)
    arguments = encoder_arguments("unused", "x-transformer").make_ranker_arguments()
    again = train_ranker(
        model.ranker_features(features), model.labels.encode(data), model.label_tree, arguments, initial_beam=start
    )
    assert same_weights(again, model.ranker)


@pytest.mark.parametrize("count", [1, 5])
def test_labels_too_few_for_clusters(tiny_encoder, tmp_path, count):
    words = [f"topic{label:02d}" for label in range(count)]
    data = Dataset.from_dict(
        {"text": [f"{words[i % count]} word1" for i in range(40)], "labels": [[words[i % count]] for i in range(40)]}
    )
    args = encoder_arguments(tmp_path, "x-transformer", level_steps=[2], tfidf_min_df=1, save_strategy="no")
    trainer = XMCTrainer(model=tiny_encoder, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.model.ranker.first_level == 1 and trainer.evaluate()["eval_P@1"] == 1


def test_heads_above_two_levels_of_the_ranker(tiny_encoder, tmp_path):
    # A given tree may be deeper than that of the preset.
    data = make_documents(160, seed=7)
    tree = LabelTree.from_parents([np.arange(3) * 0, np.arange(9) % 3, np.arange(60) % 9])
    model = XMCForTextClassification.from_encoder(tiny_encoder, label_tree=tree, max_length=16)
    args = encoder_arguments(tmp_path, "x-transformer", level_steps=[2], ranker_beam_size=3)
    trainer = XMCTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    assert trainer.model.ranker.first_level == 2
    assert trainer.evaluate(data)["eval_P@1"] > 0.8
    refused("head", trainer.model.predict, TEXTS, predict_with="heads")


# ---- Label features ----


@pytest.fixture
def described(tiny_encoder):
    """A model with labels, one of them without a text, and documents."""
    data = make_documents(50, seed=3)
    labels = Labels.from_dataset(data)
    texts = [name.replace("label ", "topic") for name in labels.names]
    texts[4] = " "
    model = XMCForTextClassification.from_encoder(
        tiny_encoder,
        max_length=16,
        labels=Labels(labels.names, texts=texts),
        tfidf=TfidfFeaturizer(min_df=1, ngram_range=(1, 1)).fit(data["text"][:]),
    )
    return model.eval(), data, texts


@pytest.mark.parametrize("kind", ["pifa", "text", "both", "embedding", "text-embedding"])
def test_label_features(described, kind):
    model, data, texts = described
    targets = model.labels.encode(data)
    documents = Features(model.tfidf.transform(data["text"][:]), model.embed(data["text"][:]))
    if kind not in ("embedding", "text-embedding"):
        documents = Features(documents.sparse)
    found = describe_labels(model, documents, targets, kind)
    truth = targets.toarray()
    if kind == "embedding":
        assert found.sparse is None
        np.testing.assert_allclose(found.dense, oracles.label_vectors(documents.dense, truth), atol=1e-5)
    elif kind == "text-embedding":
        # A label without text is described by its name.
        assert found.sparse is None and not texts[4].strip()
        texts = [text.strip() or name for text, name in zip(texts, model.labels.names, strict=True)]
        np.testing.assert_allclose(found.dense, model.embed(texts), atol=1e-5)
    else:
        parts = {
            "pifa": [oracles.label_vectors(documents.sparse.toarray(), truth)],
            "text": [model.tfidf.transform(model.labels.readable_texts()).toarray()],
        }
        parts["both"] = parts["pifa"] + parts["text"]
        assert found.dense is None
        np.testing.assert_allclose(found.sparse.toarray(), np.hstack(parts[kind]), atol=1e-5)


def test_label_features_without_texts(described):
    model, data, _ = described
    targets = model.labels.encode(data)
    model.labels = Labels([str(label) for label in range(len(model.labels))])
    for kind in ("text", "both", "text-embedding"):
        refused("label_features", describe_labels, model, Features(csr_matrix((50, 1))), targets, kind)


@pytest.mark.parametrize("with_encoder", [False, True])
def test_label_documents(described, with_encoder):
    model, _, texts = described
    model.config.embedding_scale = 0.25
    dense = model.embed(texts) if with_encoder else None
    features = Features(model.tfidf.transform(texts), dense)
    found, targets = label_documents(model.ranker_features(features), 0.5)
    labels = [label for label in range(len(texts)) if label != 4]  # 4 has no text
    written = [texts[label] for label in labels]
    np.testing.assert_allclose(found.sparse.toarray(), 0.5 * model.tfidf.transform(written).toarray(), atol=1e-6)
    np.testing.assert_array_equal(targets.toarray(), np.eye(len(texts))[labels])
    if with_encoder:
        np.testing.assert_allclose(found.dense, 0.5 * 0.25 * model.embed(written), atol=1e-6)
    else:
        assert found.dense is None


@pytest.mark.parametrize("kind", ["embedding", "text-embedding"])
def test_a_tree_by_vectors_of_the_encoder(tiny_encoder, tmp_path, kind):
    data = make_documents(160, seed=7)
    texts = {f"label {label:02d}": f"topic{label:02d}" for label in range(60)}
    args = encoder_arguments(tmp_path, "x-transformer", label_features=kind, level_steps=[2], save_steps=1)
    trainer, resumed = (XMCTrainer(tiny_encoder, args, data, label_texts=texts) for _ in range(2))
    trainer.train()
    stages = [name for entry in trainer.state.log_history for name in entry if name.endswith("_seconds")]
    assert stages.index("tokens_seconds") < stages.index("tree_seconds")
    # The same vectors serve tree and bootstrap.
    embedded = [place for place, name in enumerate(stages) if name == "embed_seconds"]
    assert len(embedded) == 2 and (kind == "embedding") == (embedded[0] < stages.index("tree_seconds"))
    # A resumed training uses the tree of the original encoder.
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.model.predict(TEXTS) == trainer.model.predict(TEXTS)

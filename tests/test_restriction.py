"""Predictions from some of the labels: equal to those from all of them, without the others."""

import json

import numpy as np
import pytest
from conftest import NUM_LABELS, make_documents, make_vectors, refused

import hf_xmc
import hf_xmc.restriction as restriction_module
from hf_xmc.cli.main import main
from hf_xmc.inference.corpus import PredictionArguments, predict_corpus
from hf_xmc.labels import Labels
from hf_xmc.restriction import Restriction

TEXTS = make_documents(20, seed=3)["text"]
CHOSEN = [f"label {i:02d}" for i in (3, 7, 11, 12, 30, 45, 59)]


def load(folder):
    kind = hf_xmc.XMCEnsemble if (folder / "member-1").exists() else hf_xmc.XMCForTextClassification
    return kind.from_pretrained(folder)


@pytest.fixture(params=["model", "vector_model", "parts_model", "encoder_model", "ensemble"])
def model(request):
    return load(request.getfixturevalue(f"{request.param}_folder"))


def features_of(model):
    if isinstance(model, hf_xmc.XMCEnsemble) or model.tfidf is not None or model.encoder is not None:
        return model.featurize(TEXTS)
    from hf_xmc.inference.predict import document_features

    return document_features(model, make_vectors(20, seed=3))


def ranked(output):
    rows = zip(output.indices.tolist(), output.scores.tolist(), strict=True)
    return [{i: score for i, score in zip(*row, strict=True) if i >= 0} for row in rows]


def parts_of(model):
    return (None,) if isinstance(model, hf_xmc.XMCEnsemble) else (None, *model.available_parts)


@pytest.mark.parametrize("kind", ["exhaustive", "beam"])
def test_restricted_is_filtered(model, kind, monkeypatch):
    if kind == "beam":
        monkeypatch.setattr(restriction_module, "MAX_EXHAUSTIVE", 2)
    features, names = features_of(model), model.labels.names
    chosen = [names[i] for i in (3, 7, 11, 12, 30, 45, 59)]
    for given in ({"labels": chosen}, {"exclude": chosen}, {"labels": chosen, "exclude": chosen[:3]}):
        restriction = model.restrict(**given)
        permitted = set(restriction.ids.tolist())
        assert len(permitted) == {1: {"labels": 7, "exclude": 53}[next(iter(given))], 2: 4}[len(given)]
        for predict_with in parts_of(model):
            everything = ranked(model(features, NUM_LABELS, 0, 1, predict_with))
            found = ranked(model(features, 5, 0, 1, predict_with, restriction=restriction))
            for row, (of_all, some) in enumerate(zip(everything, found, strict=True)):
                expected = [(label, score) for label, score in of_all.items() if label in permitted][:5]
                assert set(some) <= permitted and list(some.values()) == sorted(some.values(), reverse=True)
                np.testing.assert_allclose(
                    sorted(some.values())[::-1][: len(expected)],
                    [score for _, score in expected],
                    rtol=1e-4,
                    atol=1e-5,
                    err_msg=f"{predict_with}, document {row}",
                )
                # Scores of 0 have no order.
                certain = {label for label, score in expected if score > expected[-1][1] + 1e-4}
                assert certain <= set(some), (predict_with, row)


def test_narrow_beam_reaches_few_permitted_labels(model_folder):
    model = load(model_folder)
    features = model.featurize(TEXTS)
    restriction = model.restrict(labels=CHOSEN)
    narrow = model(features, 7, 1, 1, "ranker", restriction=restriction)
    assert (np.sort(narrow.indices.numpy(), axis=1) == restriction.ids).all()


def test_nodes_above_permitted_labels(model_folder):
    tree = load(model_folder).label_tree
    restriction = Restriction(np.array([5, 17, 17]), tree.num_labels)
    nodes, widest = restriction.nodes_of(tree)
    levels, start = [], 1
    for size in tree.level_sizes:
        levels.append(np.flatnonzero(nodes[start : start + size]))
        start += size
    assert nodes[0] and len(nodes) == start
    assert tree.leaf_labels[levels[-1]].tolist() in ([5, 17], [17, 5]) and widest == 2
    for level in range(tree.depth, 1, -1):
        assert levels[level - 2].tolist() == sorted(set(tree.parents(level)[levels[level - 1]].tolist()))
    assert restriction.nodes_of(tree)[0] is nodes


def test_select():
    restriction = Restriction(np.array([1, 4]), 6)
    scores, labels = np.array([[9.0, 8, 7, 6]], np.float32), np.array([[0, 4, 1, -1]])
    for top_k, expected in ((1, ([[8]], [[4]])), (3, ([[8, 7, 0]], [[4, 1, -1]])), (5, None)):
        found = restriction.select(scores, labels, top_k)
        assert found[0].shape == (1, top_k)
        if expected is not None:
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])


def test_labels_under_a_node():
    labels = Labels(["water", "lake", "pond", "sky"], parents=[[], [0], [1], []])
    assert labels.restrict() is None
    assert labels.restrict(under="lake").ids.tolist() == [1, 2]
    assert labels.restrict(under=["lake", "sky"], exclude=["pond"]).ids.tolist() == [1, 3]
    assert labels.restrict(labels=["pond", "sky"], under="water").ids.tolist() == [2]
    assert labels.restrict(labels=["pond"]) is labels.restrict(labels=["pond"])
    assert labels.restrict(exclude=[]) is labels.restrict(labels=labels.names) is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"labels": ["b", "x"]}, ValueError, "'x'"),
        ({"labels": ["bee"]}, ValueError, "name of the label 'b'"),
        ({"exclude": ["x"]}, ValueError, "'x'"),
        ({"labels": []}, ValueError, "no label"),
        ({"exclude": ["a", "b"]}, ValueError, "no label"),
        ({"labels": "a"}, TypeError, "labels.*'a'"),
        ({"exclude": "a"}, TypeError, "exclude.*'a'"),
        ({"under": "a"}, ValueError, "hierarchy"),
    ],
)
def test_wrong_restrictions(given, error, message):
    with pytest.raises(error, match=message):
        Labels(["a", "b"], texts=["", "bee"]).restrict(**given)


def test_unknown_label_stops_before_work(model_folder, tmp_path):
    model = load(model_folder)
    refused("'x'", model.predict, ["topic03"], labels=["x"])
    refused("'x'", hf_xmc.pipeline, model, labels=["x"])
    refused("'x'", predict_corpus, model, ["missing.txt"], tmp_path / "tags.jsonl", PredictionArguments(exclude=["x"]))
    assert not list(tmp_path.iterdir())


def test_pipeline_and_predict(model_folder):
    model = load(model_folder)
    expected = [[label for label, _ in row] for row in model.predict(TEXTS, top_k=3, labels=CHOSEN)]
    assert all(set(row) <= set(CHOSEN) and len(row) == 3 for row in expected)
    tag = hf_xmc.pipeline(model, labels=CHOSEN)
    assert [[label["label"] for label in row] for row in tag(TEXTS, top_k=3, batch_size=8)] == expected
    # A call adds to what the pipeline was made with.
    (row,) = tag([TEXTS[0]], exclude=expected[0][:1], top_k=2)
    assert [label["label"] for label in row] == expected[0][1:]
    assert [label["label"] for label in tag(TEXTS[0], top_k=10)] != CHOSEN and len(tag(TEXTS[0], top_k=10)) == 7


def test_command(model_folder, tmp_path, capsys):
    documents, permitted = tmp_path / "new.txt", tmp_path / "permitted.txt"
    documents.write_text("\n".join(TEXTS[:4]))
    permitted.write_text("\n".join(CHOSEN[1:]) + "\n")
    choice = ["--labels", CHOSEN[0], f"@{permitted}", "--exclude", CHOSEN[2]]
    main(["predict", str(model_folder), str(documents), "-o", str(tmp_path / "tags.jsonl"), "--top-k", "9", *choice])
    lines = [json.loads(line) for line in (tmp_path / "tags.jsonl").read_text().splitlines()]
    assert all({label["label"] for label in line["labels"]} == set(CHOSEN) - {CHOSEN[2]} for line in lines)
    everything = tmp_path / "all.txt"
    everything.write_text("\n".join(load(model_folder).labels.names))
    for choice, message in (
        (["--labels", "@missing.txt"], "missing.txt"),
        (["--exclude", f"@{everything}"], "no label"),
    ):
        assert main(["predict", str(model_folder), str(documents), "-o", "-", *choice]) != 0
        assert message in capsys.readouterr().err

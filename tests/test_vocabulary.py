import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import TOPICS, refused
from datasets import Dataset

import hf_xmc
from hf_xmc.labels import Labels
from hf_xmc.vocabulary import Hierarchy, LabelEntry, LabelVocabulary

# Two tops; `lake` is under `water` and `place`, `pond` under `lake`.
ENTRIES = {
    "1": {"name": "water"},
    "2": {"name": "place", "description": "A part of space."},
    "3": {"text": "lake", "synonyms": ["mere", "järvi", "mere"], "parents": ["1", "2"]},
    "4": {"name": "pond", "parents": ["3"]},
    "5": "sky",
    "6": None,
}


def make(rows):
    return Dataset.from_dict({"labels": rows})


def test_entries():
    vocabulary = LabelVocabulary(ENTRIES)
    assert len(vocabulary) == 6 and list(vocabulary) == list("123456") and vocabulary.has_parents
    assert vocabulary["3"] == LabelEntry("lake", ("mere", "järvi"), "", ("1", "2"))
    assert vocabulary["6"] == LabelEntry() and vocabulary["5"].name == "sky"
    assert LabelVocabulary(dict(vocabulary)) == vocabulary
    assert LabelVocabulary({7: {"name": "seven", "parents": [8]}, 8: "eight"})["7"].parents == ("8",)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"a": 3}, TypeError, "'a'"),
        ({"a": {"name": 3}}, TypeError, "name.*'a'"),
        ({"a": {"synonyms": "one"}}, TypeError, "synonyms.*'a'"),
        ({"a": {"synonyms": [None]}}, TypeError, "synonyms.*'a'"),
        ({"a": {"title": "x"}}, ValueError, "'a'.*'title'"),
        ({"a": {"name": "x", "text": "y"}}, ValueError, "'a'.*name.*text"),
        ({"": "x"}, ValueError, "empty label"),
        ({"1": "x", 1: "y"}, ValueError, "'1'.*number"),
        ({"a": {"parents": ["b"]}}, ValueError, "'a'.*'b'"),
        ({"a": {"parents": ["a"]}}, ValueError, "cycle.*'a'"),
        ({"a": {"parents": ["b"]}, "b": {"parents": ["c"]}, "c": {"parents": ["a"]}, "d": "x"}, ValueError, "cycle"),
        (["a"], TypeError, "dictionary"),
    ],
)
def test_wrong_entries(entries, error, message):
    refused(message, LabelVocabulary, entries, error=error)


def slow_above(parents, i):
    return {i}.union(*(slow_above(parents, parent) for parent in parents[i]))


def test_hierarchy_equals_slow_version():
    rng = np.random.default_rng(0)
    # Parents have higher ids, so that there are no cycles.
    parents = [
        sorted({int(x) for x in rng.integers(i + 1, 40, rng.integers(0, 3))}) if i < 39 else [] for i in range(40)
    ]
    hierarchy = Hierarchy(parents)
    above = [slow_above(parents, i) for i in range(40)]
    for i in range(40):
        assert hierarchy.ancestors([i]).tolist() == sorted(above[i])
        assert hierarchy.descendants([i]).tolist() == [j for j in range(40) if i in above[j]]
        expected = 1 if not parents[i] else 1 + min(hierarchy.levels[parent] for parent in parents[i])
        assert hierarchy.levels[i] == expected
    assert hierarchy.ancestors([3, 7]).tolist() == sorted(above[3] | above[7])
    assert hierarchy.ancestors([]).tolist() == [] and Hierarchy([[], []]).levels.tolist() == [1, 1]


def test_labels_of_a_vocabulary(tmp_path):
    labels = Labels.from_dataset(make([["3"], ["4", "3"], ["9"]]), texts=ENTRIES)
    assert labels.names == ["3", "4", "9"] and labels.texts == ["lake", "pond", ""]
    assert labels.synonyms == [["mere", "järvi"], [], []] and labels.descriptions is None
    assert labels.parents == [[], [0], []]
    assert labels.readable_texts() == ["lake; mere; järvi", "pond", ""]
    assert labels.ancestors("4").tolist() == [0, 1] and labels.descendants("3").tolist() == [0, 1]
    labels.save_pretrained(tmp_path)
    loaded = Labels.from_pretrained(tmp_path)
    for name in ("names", "texts", "synonyms", "descriptions", "parents", "num_documents"):
        assert getattr(loaded, name) == getattr(labels, name), name
    assert loaded.vocabulary() == {
        "3": LabelEntry("lake", ("mere", "järvi")),
        "4": LabelEntry("pond", parents=("3",)),
        "9": LabelEntry(),
    }
    assert loaded.name_of("4") == "pond" and loaded.name_of("9") == "9"
    assert loaded.other_names == {"3": "lake", "4": "pond"}
    refused("'7'", loaded.ancestors, "7")


def test_labels_without_documents():
    labels = Labels.from_dataset(make([["4"], ["9"]]), texts=ENTRIES, unseen=True)
    # "6" has no words. Labels with documents come first.
    assert labels.names == ["4", "9", "1", "2", "3", "5"] and labels.counts.tolist() == [1, 1, 0, 0, 0, 0]
    assert labels.parents == [[4], [], [], [], [2, 3], []]
    # The label between "a" and "c" is not among them.
    entries = {"a": {"name": "top"}, "12": {"parents": ["a"]}, "c": {"name": "leaf", "parents": ["12"]}}
    labels = Labels.from_dataset(make([["c"]]), texts=entries, unseen=True)
    assert labels.names == ["c", "a"] and labels.parents == [[1], []]


def test_texts_of_other_labels():
    dataset = make([["a"], ["b"]])
    with pytest.raises(ValueError, match="'a'.*'x'"):
        Labels.from_dataset(dataset, texts={"x": "lake"})
    labels = Labels.from_dataset(dataset, texts={"x": "lake", "b": " ", "y": "", "12": None}, unseen=True)
    # Those that words describe are labels.
    assert labels.names == ["a", "b", "x", "y"] and labels.readable_texts() == ["a", "b", "lake", "y"]
    assert Labels.from_dataset(dataset, texts={}).texts == ["", ""]


def test_same_names_stay_apart():
    labels = Labels.from_dataset(make([["a"], ["b"]]), texts={"a": "Mercury", "b": "Mercury"})
    assert labels.names == ["a", "b"] and labels.other_names == {"a": "Mercury", "b": "Mercury"}


def test_without_hierarchy():
    with pytest.raises(ValueError, match="hierarchy"):
        Labels(["a"]).descendants("a")


DAMAGED = {
    "parents": [[[1]], [[1], [0]], [[0], []], [[2], []], [[-1], []], [[0.5], []], [[True], []], {"0": []},
                [10**30, []], [[10**30], []]],
    "synonyms": [[["x"]], ["x", "y"], [[1], []]],
    "descriptions": [["x"], [["x"], ["y"]]],
    "texts": ["xy"],
}  # fmt: skip


@pytest.mark.parametrize("key", DAMAGED)
def test_damaged_vocabularies(tmp_path, key):
    for value in DAMAGED[key]:
        content = {"names": ["a", "b"], "counts": [1, 1], "num_documents": 2, key: value}
        (tmp_path / "labels.json").write_text(json.dumps(content))
        refused(r"labels\.json", Labels.from_pretrained, tmp_path)


@pytest.fixture(scope="module")
def named_model(model_folder):
    model = hf_xmc.XMCForTextClassification.from_pretrained(model_folder)
    model.labels.describe({name: {"name": text if name != "label 03" else ""} for name, text in TOPICS.items()})
    return model


def test_predictions_have_names(named_model, tmp_path):
    (found,) = named_model.predict(["topic03 topic07"], top_k=2)
    assert {label for label, _ in found} == {"label 03", "label 07"}
    shown = hf_xmc.pipeline(named_model)("topic03 topic07", top_k=2)
    assert {label["label"]: label.get("name") for label in shown} == {"label 03": None, "label 07": "topic07"}
    from hf_xmc.inference.corpus import predict_corpus

    data = Dataset.from_dict({"text": ["topic03 topic07"] * 3})
    predict_corpus(named_model, [data], tmp_path / "tags.parquet")
    table = pq.read_table(tmp_path / "tags.parquet").to_pylist()[0]
    assert dict(zip(table["labels"], table["names"], strict=True))["label 07"] == "topic07"
    assert dict(zip(table["labels"], table["names"], strict=True))["label 03"] == "label 03"
    predict_corpus(named_model, [data], tmp_path / "tags.jsonl")
    line = json.loads((tmp_path / "tags.jsonl").read_text().splitlines()[0])
    assert {label.get("name", label["label"]) for label in line["labels"][:2]} == {"label 03", "topic07"}

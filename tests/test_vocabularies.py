"""Files of label vocabularies, and trainings with them."""

import gzip
import json
import sys

import pytest
from conftest import TOPICS, refused, train_linear
from datasets import Dataset

import hf_xmc
from hf_xmc import LabelVocabulary, load_vocabulary
from hf_xmc.data.vocabularies import vocabulary_beside
from hf_xmc.labels import Labels
from hf_xmc.training.record import TrainingRecord
from hf_xmc.vocabulary import LabelEntry

ROWS = {
    "label": ["001", "002", "003", "004"],
    "text": ["water", "place", "lake", None],
    "synonyms": [[], None, ["mere", "järvi"], []],
    "description": ["", "A part of space, somewhere.", None, ""],
    "parents": [[], [], ["001", "002"], ["003"]],
}
EXPECTED = LabelVocabulary(
    {
        "001": "water",
        "002": {"name": "place", "description": "A part of space, somewhere."},
        "003": {"name": "lake", "synonyms": ["mere", "järvi"], "parents": ["001", "002"]},
        "004": {"parents": ["003"]},
    }
)
TURTLE = """
@prefix skos: <http://www.w3.org/2004/02/skos/core#> .
@prefix owl: <http://www.w3.org/2002/07/owl#> .
@prefix y: <http://example.org/y/> .
y:scheme a skos:ConceptScheme ; skos:prefLabel "all"@en .
y:p1 a skos:Concept ; skos:prefLabel "water"@en, "vesi"@fi ; skos:narrower y:p3 .
y:p2 a skos:Concept ; skos:prefLabel "place"@en-GB ; skos:definition "A part\\n of space."@en ;
  skos:scopeNote "Not a room."@en .
y:p3 a skos:Concept ; skos:prefLabel "järvi"@fi , "lake"@en ; skos:altLabel "mere"@en, "lampi"@fi, "LAC" ;
  skos:broader y:p1, y:p2, y:old, <http://elsewhere.org/z> .
y:p4 a skos:Concept ; skos:prefLabel "lätäkkö"@fi ; skos:broader y:p3 .
y:old a skos:Concept ; skos:prefLabel "old"@en ; owl:deprecated true .
y:group a skos:Collection ; skos:prefLabel "group"@en ; skos:member y:p1 .
"""
BASE = "http://example.org/y/"


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ---- Tables ----


@pytest.mark.parametrize("name", ["v.parquet", "v.jsonl", "v.json", "v.csv", "v.tsv", "v.csv.gz", "labels.parquet"])
@pytest.mark.parametrize("columns", [("label", "text"), ("id", "name")])
def test_tables(tmp_path, name, columns):
    path = tmp_path / name
    rows = {columns[0]: ROWS["label"], columns[1]: ROWS["text"], "count": [1, 2, 3, 4]}
    rows.update({key: ROWS[key] for key in ("synonyms", "description", "parents")})
    if "parquet" in name:
        Dataset.from_dict(rows).to_parquet(path)
    elif "json" in name:
        records = [{key: values[i] for key, values in rows.items()} for i in range(4)]
        write(path, json.dumps(records) if name == "v.json" else "\n".join(map(json.dumps, records)))
    else:
        separator = "\t" if "tsv" in name else ","
        rows["synonyms"], rows["parents"] = ["", "", "mere; järvi", ""], ["", "", "001|002", "003"]
        quoted = [f'"{value or ""}"' for i in range(4) for value in (values[i] for values in rows.values())]
        lines = [separator.join(quoted[i : i + 6]) for i in range(0, 24, 6)]
        content = "\n".join([separator.join(rows), *lines]) + "\n"
        path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    assert load_vocabulary(path) == EXPECTED
    assert load_vocabulary(str(path)) == EXPECTED
    if name == "labels.parquet":
        assert load_vocabulary(tmp_path) == EXPECTED
        write(tmp_path / "documents.csv", "text,labels\n")
        for data, wanted in ((tmp_path, None), (tmp_path, True), (tmp_path / "documents.csv", True)):
            assert vocabulary_beside(data, wanted) == EXPECTED
        assert vocabulary_beside(tmp_path / "documents.csv", None) is None


@pytest.mark.parametrize(
    ("one", "two"),
    [("a b", "a b;b c"), ("a b", "a b, b c"), ("a b", "a b|b c"), ('"[""a b""]"', '[""a b"", ""b c""]')],
)
def test_separators_of_parents_are_found(tmp_path, one, two):
    path = write(tmp_path / "v.csv", f'label,parents,synonyms\na b,,"x, y"\nb c,{one},z\nd,"{two}",\n')
    vocabulary = load_vocabulary(path)
    assert vocabulary["d"].parents == ("a b", "b c") and vocabulary["b c"].parents == ("a b",)
    # A comma is part of a name.
    assert vocabulary["a b"].synonyms == ("x, y",)


def test_other_sources(tmp_path):
    assert load_vocabulary({"a": "water"}) == {"a": LabelEntry("water")}
    vocabulary = LabelVocabulary({"a": "water"})
    assert load_vocabulary(vocabulary) is vocabulary
    assert load_vocabulary(write(tmp_path / "v.json", '{"a": "water", "b": {"name": "pond", "parents": ["a"]}}')) == {
        "a": LabelEntry("water"),
        "b": LabelEntry("pond", parents=("a",)),
    }
    path = write(tmp_path / "annif.tsv", f"<{BASE}p1>\twater\n\n<{BASE}p2>\tplace\t42.1\n")
    assert load_vocabulary(path) == {BASE + "p1": LabelEntry("water"), BASE + "p2": LabelEntry("place")}
    # Numbers as labels and as names.
    Dataset.from_dict({"label": [7, 8], "text": [1984, None]}).to_parquet(tmp_path / "numbers.parquet")
    assert load_vocabulary(tmp_path / "numbers.parquet") == {"7": LabelEntry("1984"), "8": LabelEntry()}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.csv", "code1,name1\nx,y\n", r"v\.csv.*no column `label`.*code1, name1"),
        ("v.csv", "label,count\nx,1\n", r"v\.csv.*`text`.*label, count"),
        ("v.csv", "label,text,name\nx,y,z\n", r"v\.csv.*`text` and `name`"),
        ("v.csv", "label,text\nx,y\n,z\n", r"v\.csv.*Row 2 has no label"),
        ("v.csv", "label,text\nx,y\nz,a\nx,b\n", r"v\.csv.*Row 3.*'x'.*row 1"),
        ("v.csv", "label,text,parents\nx,y,\nz,a,w\n", r"v\.csv.*Row 2.*'z'.*'w'"),
        ("v.csv", "label,parents\nx,z\nz,x\n", r"v\.csv.*cycle"),
        ("v.csv", "", r"v\.csv.*empty"),
        ("v.jsonl", '{"label": "x", "text": ["a"]}\n', r"v\.jsonl.*Row 1.*name"),
        ("v.json", '{"x": 3}', r"v\.json.*'x'"),
        ("v.json", "{", r"v\.json"),
        ("v.doc", "x", r"v\.doc.*not supported"),
        ("v.tsv", "<http://a>\twater\nplace\n", r"v\.tsv.*line 2.*'place'"),
        ("v.json", b'{"x": "\xff"}', r"v\.json"),
        ("v.tsv", "<http://a>\twater\n<http://a>\tplace\n", r"v\.tsv.*line 2.*twice"),
        ("v.ttl", "@prefix : <x> .\n:a :b ", r"v\.ttl.*turtle"),
        ("v.rdf", "<rdf", r"v\.rdf.*xml"),
        ("v.ttl", "<http://a> <http://b> <http://c> .", r"v\.ttl.*skos:Concept"),
        ("v.ttl", "<http://a> a <http://www.w3.org/2004/02/skos/core#Concept> .", r"v\.ttl.*prefLabel"),
        ("v.ttl", TURTLE + "y:p1 skos:broader y:p4 .", r"v\.ttl.*cycle"),
    ],
)
def test_wrong_files(tmp_path, name, content, message):
    refused(message, load_vocabulary, write(tmp_path / name, content), error=(TypeError, ValueError))


def test_wrong_sources(tmp_path):
    for name in ("none.csv", "none.ttl", "no/such/folder"):
        refused(name, load_vocabulary, tmp_path / name, error=FileNotFoundError)
    refused("3", load_vocabulary, 3, error=TypeError)
    refused(r"language.*v\.csv", load_vocabulary, write(tmp_path / "v.csv", "label,text\na,b\n"), language="en")
    with pytest.raises(FileNotFoundError, match=r"labels\.parquet"):
        (tmp_path / "empty").mkdir()
        load_vocabulary(tmp_path / "empty")
    refused("label_texts=True", vocabulary_beside, None, True)
    assert vocabulary_beside(None, None) is None and vocabulary_beside(tmp_path / "empty", None) is None
    assert vocabulary_beside(tmp_path / "empty", False) is False


# ---- SKOS ----


@pytest.mark.parametrize("kind", ["turtle", "xml", "nt"])
def test_skos(tmp_path, kind, caplog):
    rdflib = pytest.importorskip("rdflib")
    graph = rdflib.Graph().parse(data=TURTLE, format="turtle")
    path = tmp_path / {"turtle": "v.ttl", "xml": "v.rdf", "nt": "v.nt.gz"}[kind]
    content = graph.serialize(format=kind, encoding="utf-8")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    vocabulary = load_vocabulary(path)
    assert dict(vocabulary) == {
        BASE + "p1": LabelEntry("water"),
        BASE + "p2": LabelEntry("place", (), "A part of space. Not a room."),
        BASE + "p3": LabelEntry("lake", ("mere", "LAC"), "", vocabulary[BASE + "p3"].parents),
        BASE + "p4": LabelEntry("", parents=(BASE + "p3",)),
    }
    assert set(vocabulary[BASE + "p3"].parents) == {BASE + "p1", BASE + "p2"}
    assert "2 parents" in caplog.text and str(path) in caplog.text
    finnish = load_vocabulary(path, language="fi")
    assert finnish[BASE + "p3"].name == "järvi" and finnish[BASE + "p2"].name == ""
    both = load_vocabulary(path, language=["fi", "en"])
    assert both[BASE + "p2"].name == "place" and set(both[BASE + "p3"].synonyms) == {"lampi", "lake", "mere", "LAC"}
    refused(r"'de'.*en \(2\).*fi \(3\)|'de'.*fi \(3\).*en \(2\)", load_vocabulary, path, language="de")


def test_skos_languages(tmp_path):
    concept = "@prefix s: <http://www.w3.org/2004/02/skos/core#> . <http://a> a s:Concept ; s:prefLabel {} ."
    assert load_vocabulary(write(tmp_path / "a.ttl", concept.format('"water"')))["http://a"].name == "water"
    assert load_vocabulary(write(tmp_path / "b.ttl", concept.format('"vesi"@fi')))["http://a"].name == "vesi"
    refused("fi.*sv|sv.*fi", load_vocabulary, write(tmp_path / "c.ttl", concept.format('"vesi"@fi, "vatten"@sv')))


def test_skos_without_rdflib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdflib", None)
    refused(r"v\.ttl.*hf-xmc\[skos\]", load_vocabulary, write(tmp_path / "v.ttl", TURTLE), error=ImportError)


# ---- Labels as documents have them ----


@pytest.mark.parametrize("label", [BASE + "p3", "p3", f"<{BASE}p3>", "lake"])
def test_labels_of_documents(tmp_path, label):
    vocabulary = load_vocabulary(write(tmp_path / "v.ttl", TURTLE))
    labels = Labels.from_dataset(Dataset.from_dict({"labels": [[label], ["other"]]}), texts=vocabulary, unseen=True)
    # Without a name, a URI has no words.
    assert labels.name_of(label) == "lake" and len(labels) == (5 if label == "p3" else 4)
    assert sorted(labels.name_of(labels[i]) for i in labels.ancestors(label)) == ["lake", "place", "water"]


def test_labels_that_would_be_the_same():
    vocabulary = LabelVocabulary({"http://a/1": "x", "http://b/1": "y", "http://a/2": "z"})
    assert list(vocabulary.for_labels(["2"])) == ["http://a/1", "http://b/1", "2"]
    assert vocabulary.for_labels(["http://a/1", "2"]) is vocabulary
    assert vocabulary.for_labels(["unknown"]) is vocabulary and vocabulary.for_labels([]) is vocabulary


def test_own_words_of_labels_without_a_name():
    labels = Labels(["web_shop", "c12", "c13", "42", "http://a/b"])
    labels.describe({"web_shop": {"synonyms": ["store"]}, "c12": {"synonyms": ["lake"]}, "42": {"description": "x"}})
    assert labels.readable_texts() == ["web shop; store", "lake", "c13", "x", ""]


# ---- Training ----


def test_training_with_a_file(tmp_path, documents, capsys):
    lines = [f"{label},{text},all" for label, text in TOPICS.items()]
    path = write(tmp_path / "topics.csv", "\n".join(["label,text,parents", *lines, "all,everything,", "unused,-,"]))
    trainer = train_linear(tmp_path / "model", documents.select(range(200)), label_texts=str(path))
    assert trainer.model.labels.name_of("label 07") == "topic07"
    assert "label texts         61 of 61 labels, 60 with parents" in capsys.readouterr().out
    assert TrainingRecord.load(tmp_path / "model").label_texts == ["ranker", "label vectors"]
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "| label texts | 61 of 61 labels, 60 with parents; used in ranker, label vectors |" in card


def test_label_texts_switched_off(tmp_path, documents, capsys):
    data = documents.select(range(200))
    trainer = train_linear(tmp_path / "off", data, label_texts=False)
    assert "not used: `label_texts=False`" in capsys.readouterr().out
    assert not any(part.startswith("text_") for part in trainer.model.available_parts)
    assert "| label texts | not used |" in (tmp_path / "off" / "README.md").read_text(encoding="utf-8")
    # By default the names are texts, as they are words.
    names = train_linear(tmp_path / "on", data).model
    assert "text_tfidf" in names.available_parts
    ranker = train_linear(tmp_path / "ranker", data, label_texts=False, label_text_weight=0.5).model.ranker
    assert ranker.num_bytes == trainer.model.ranker.num_bytes
    with pytest.raises(ValueError, match=r"label_features='text'.*label_texts=False"):
        train_linear(tmp_path / "tree", data, label_texts=False, label_features="text")


def test_train_reads_what_is_beside_the_data(tmp_path, documents):
    documents.select(range(200)).to_parquet(tmp_path / "train.parquet")
    write(tmp_path / "labels.csv", "\n".join(["label,text", *(f"{label},{text}" for label, text in TOPICS.items())]))
    options = {"holdout": 0, "log": "none", "use_cpu": True}
    model, _ = hf_xmc.train(tmp_path, tmp_path / "beside", **options)
    assert model.labels.texts[7] == "topic07"
    model, _ = hf_xmc.train(tmp_path, tmp_path / "off", label_texts=False, **options)
    assert model.labels.texts is None
    model, _ = hf_xmc.train(
        tmp_path / "train.parquet", tmp_path / "file", label_texts=tmp_path / "labels.csv", **options
    )
    assert model.labels.texts[7] == "topic07"

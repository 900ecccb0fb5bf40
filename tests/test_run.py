"""From a file to a model and its results: `hf_xmc.train`, `hf-xmc train FILE`, and what they print."""

import csv
import io
import json

import pytest
from conftest import make_documents, refused
from datasets import Dataset, DatasetDict

import hf_xmc
from hf_xmc import XMCForTextClassification
from hf_xmc.cli.main import main
from hf_xmc.training.progress import StageProgressCallback
from hf_xmc.training.record import TrainingRecord


@pytest.fixture
def table(tmp_path):
    """A file with 300 documents, one of them twice, and a row without a text."""
    rows = [(text, "; ".join(labels)) for text, labels in zip(*make_documents(300)[:].values(), strict=True)]
    with open(tmp_path / "tickets.csv", "w", encoding="cp1252", newline="") as file:
        csv.writer(file, delimiter=";").writerows([("Beschreibung", "tags"), *rows, rows[0], ("", "x")])
    return tmp_path / "tickets.csv"


def test_train(table, tmp_path, capsys):
    folder = tmp_path / "model"
    model, report = hf_xmc.train(table, folder, use_cpu=True)
    documents = report.data.counts["train"].documents
    assert (report.data.counts["train"].empty, report.documents) == (1, documents)
    assert report.tested == int(0.1 * documents) // 2 and report.metrics["P@1"] > 0.8
    assert report.labels == len(model.labels) and report.model_bytes > 10_000
    assert model.predict(["topic07 word1"], top_k=1)[0][0][0] == "label 07"
    assert not (folder / ".holdout").exists()
    shown = capsys.readouterr().out
    for expected in (
        "tickets.csv",
        "Beschreibung",
        "--text-column",
        "column `tags`",
        "separated by ';'",
        "--holdout",
        "features",
    ):
        assert expected in shown
    assert "{" not in shown and "Writing" not in shown
    assert f"{report.tested:,} documents" in str(report) and "nDCG" in str(report)
    record = TrainingRecord.load(folder)
    assert record.columns["text"] == "Beschreibung" and record.documents == documents
    assert record.evaluations[0]["split"].startswith("holdout")
    refused("overwrite", hf_xmc.train, table, folder, error=FileExistsError)


@pytest.mark.parametrize("rows", [1, 3, 25])
def test_a_table_of_a_few_rows(tmp_path, capsys, rows):
    table = Dataset.from_dict({"text": [f"text {i}" for i in range(rows)], "labels": [[f"l{i}"] for i in range(rows)]})
    model, report = hf_xmc.train(table, tmp_path / "model", use_cpu=True)
    assert (report.documents, report.labels, report.metrics) == (rows, rows, {})
    assert f"{rows} are too few" in capsys.readouterr().out or rows == 25
    assert f"{rows} document" in str(report) and str(report.labels) in repr(report)


def test_three_labels(tmp_path, capsys):
    rows = {"text": [f"word{i % 3} text {i}" for i in range(60)], "label": [f"class {i % 3}" for i in range(60)]}
    report = hf_xmc.train(Dataset.from_dict(rows), tmp_path / "model", use_cpu=True)[1]
    assert "@1" in str(report) and "@3" not in str(report) and "P@5" not in capsys.readouterr().out


def test_misspelt_options(table, tmp_path):
    with pytest.raises(TypeError, match="`method`"):
        hf_xmc.train(table, tmp_path / "model", metod="knn")
    with pytest.raises(TypeError, match="`label_column`"):
        hf_xmc.train(table, tmp_path / "model", label_colum="tags")


def test_without_the_second_training(table, tmp_path):
    model, report = hf_xmc.train(table, tmp_path / "model", final_train=False, holdout=0.5, log="none", use_cpu=True)
    documents = report.data.counts["train"].documents
    assert report.documents == documents // 2 == model.labels.num_documents and report.tested == documents // 4
    _, report = hf_xmc.train(table, tmp_path / "all", holdout=0, log="none", use_cpu=True)
    assert not report.metrics and report.documents == report.data.counts["train"].documents
    refused("holdout", hf_xmc.train, table, tmp_path / "none", holdout=1)


def test_splits_of_the_data(tmp_path, capsys):
    splits = {
        "train": make_documents(200),
        "validation": make_documents(50, seed=1),
        "test": make_documents(60, seed=2),
    }
    _, report = hf_xmc.train(DatasetDict(splits), tmp_path / "model", method="parabel", use_cpu=True)
    assert (report.split, report.tested) == ("test", len(report.data.splits["test"]))
    assert "validation" in capsys.readouterr().out


def test_an_encoder_alone_means_a_transformer(tiny_encoder, table, tmp_path, capsys):
    options = {"level_steps": 3, "save_strategy": "no", "use_cpu": True, "encoder_max_length": 16}
    model, _ = hf_xmc.train(table, tmp_path / "model", encoder=str(tiny_encoder), final_train=False, **options)
    assert model.encoder is not None and model.config.method == "xr-transformer"
    assert "fine-tuning label texts" in capsys.readouterr().out


def test_the_command(table, tmp_path, capsys):
    folder, tags = tmp_path / "my-tagger", tmp_path / "tags.jsonl"
    assert main(["train", str(table), "-o", str(folder), "--use-cpu", "true", "--ranker_beam-size=5"]) == 0
    shown = capsys.readouterr().out
    assert f"hf-xmc predict {folder} new.csv" in shown and "documents of a label" in shown
    assert json.loads((folder / "training_args.json").read_text())["ranker_beam_size"] == 5
    # The column of the texts is known from the training.
    assert main(["predict", str(folder), str(table), "--output", str(tags), "--top-k", "1"]) == 0
    assert json.loads(tags.read_text().splitlines()[0])["labels"][0]["label"].startswith("label")
    assert main(["evaluate", str(folder), str(table)]) == 0
    assert json.loads((folder / "eval_results.json").read_text())["metrics"]["P@1"] > 0.8
    assert main(["train", str(table), "-o", str(folder)]) == 1
    assert "--overwrite" in capsys.readouterr().err


@pytest.fixture
def papers(tmp_path):
    """Documents with a title, which two rows lack, and an abstract, which one row lacks."""
    documents = make_documents(300)
    rows = [
        (f"title of\n{text.split()[0]}", text, "; ".join(own))
        for text, own in zip(*documents[:].values(), strict=True)
    ]
    rows[0], rows[1], rows[2] = ("", *rows[0][1:]), ("", *rows[1][1:]), (rows[2][0], "", rows[2][2])
    with open(tmp_path / "papers.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("title", "abstract", "subjects"), *rows, ("", "", "x")])
    return tmp_path / "papers.csv"


def test_several_text_columns(papers, tmp_path, capsys):
    folder, tags = tmp_path / "model", tmp_path / "tags.jsonl"
    data = ["train", str(papers), "-o", str(folder), "--use-cpu", "true", "--text-column", "title", "abstract"]
    assert main([*data, "--tfidf-lead-words", "-1"]) == 0
    assert "columns `title`, `abstract`" in capsys.readouterr().out
    model = XMCForTextClassification.from_pretrained(folder)
    assert model.text_columns == ["title", "abstract"] and model.tfidf.lead_words == -1
    # A dictionary, its joined text, and the file have the same labels.
    row = {"title": "title of\ntopic07", "abstract": "topic07 word1", "more": 1}
    text = "title of topic07\ntopic07 word1"
    (expected,) = model.predict([text], top_k=2)
    assert model.predict([row], top_k=2) == [expected]
    assert [(found["label"], found["score"]) for found in hf_xmc.pipeline(str(folder))(row, top_k=2)] == expected
    assert model.predict([{**row, "title": None}], top_k=2) == model.predict(["\ntopic07 word1"], top_k=2)
    for name in ("new.jsonl", "new.parquet", "new.csv"):
        new = tmp_path / name
        table = Dataset.from_list([row, {**row, "title": None}])
        getattr(table, f"to_{name[4:].replace('jsonl', 'json')}")(new)
        assert main(["predict", str(folder), str(new), "--output", str(tags), "--overwrite", "--top-k", "2"]) == 0
        first, second = (json.loads(line)["labels"] for line in tags.read_text().splitlines())
        assert [found["label"] for found in first] == [label for label, _ in expected]
        assert [found["score"] for found in first] == pytest.approx([score for _, score in expected], abs=1e-5)
        assert second != first
    assert main(["evaluate", str(folder), str(papers)]) == 0
    assert json.loads((folder / "eval_results.json").read_text())["metrics"]["P@1"] > 0.8


def test_a_column_of_the_training_is_missing(papers, tmp_path, capsys):
    folder, new = tmp_path / "model", tmp_path / "new.csv"
    hf_xmc.train(papers, folder, text_column=["title", "abstract"], use_cpu=True, holdout=0, log="none")
    new.write_text("title,subjects\ntopic07,label 07\n")
    output = ["--output", str(tmp_path / "tags.jsonl")]
    for command in (["predict", str(folder), str(new), *output], ["evaluate", str(folder), str(new)]):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert "`abstract`" in error and "text" in error and len(error.splitlines()) <= 2
        assert main([*command, "--text-column", "title"]) == 0
    model = XMCForTextClassification.from_pretrained(folder)
    refused("'abstract'", model.predict, [{"title": "topic07"}])
    refused(r"documents\[1\]", model.predict, ["topic07", 7], error=TypeError)
    for columns in (["title", "title"], ["title", "subjects"], ["title", "summary"]):
        refused("text_column", hf_xmc.train, papers, tmp_path / "none", text_column=columns, label_column="subjects")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["-o", "out", "--text-column", "text"], "Beschreibung"),
        (["-o", "out", "--eval_split", "test"], "--dataset"),
        (["-o", "out", "--dataset", "sample"], "sample"),
        (["-o", "out", "--log", "loud"], "log"),
        (["-o", "out", "--text-colum", "a"], "--text-column"),
        ([], "-o my-tagger"),
    ],
)
def test_mistakes(table, capsys, flags, message):
    assert main(["train", str(table), *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) <= 2


def test_json_lines(table, tmp_path, capsys):
    assert main(["train", str(table), "-o", str(tmp_path / "model"), "--log", "json", "--use_cpu", "true"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["columns"]["labels"] == "tags" and lines[0]["held_out"] > 0
    assert any("ranker_seconds" in line for line in lines) and all("memory_bytes" in line for line in lines[1:-1])
    assert lines[-1]["report"]["metrics"]["P@1"] > 0.8 and lines[-1]["report"]["by_frequency"]


def test_the_bar_only_grows(monkeypatch, table, tmp_path):
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    hf_xmc.train(table, tmp_path / "model", use_cpu=True)
    shares = [int(part.split("%")[0].split()[-1]) for part in terminal.getvalue().split("\r") if "%" in part]
    assert len(shares) > 5 and shares == sorted(shares)


def test_the_bar_moves_within_levels_of_the_ranker():
    progress = StageProgressCallback(bar=False)
    progress.begin_stage("ranker")
    shares = [0.0]
    for level, total in ((1, 2), (2, 8), (3, 50)):
        for done in range(1, total + 1):
            progress.report(f"ranker level {level}/3", done, total)
            shares.append(progress._inner)
    assert all(before < after for before, after in zip(shares, shares[1:], strict=False)) and shares[-1] == 1

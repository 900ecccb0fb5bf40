"""Model cards: the record of a training, the text of the card, and that its figures are those measured."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
import yaml
from conftest import encoder_arguments, make_documents, make_vectors, refused
from datasets import Dataset
from huggingface_hub import ModelCard

from hf_xmc import XMCEnsemble, XMCTrainer, XMCTrainingArguments
from hf_xmc.cli.main import main
from hf_xmc.evaluation.report import plot_training
from hf_xmc.hub import model_card
from hf_xmc.hub.model_card import EVAL_RESULTS_FILE, MARK, TEMPLATE, CardOptions, paper_of, reported, write_model_card
from hf_xmc.training.presets import METHODS
from hf_xmc.training.record import TrainingRecord, public_name

ROOT = TEMPLATE.parents[2]


def named(dataset, split):
    """The documents as a split with a name."""
    dataset._split = split
    return dataset


@pytest.fixture(scope="module", params=["linear", "encoder", "vectors"])
def trained(request, tmp_path_factory):
    """A trainer after training and evaluation, and what its evaluation said."""
    folder = tmp_path_factory.mktemp(f"card-{request.param}")
    if request.param == "encoder":
        args = encoder_arguments(folder, save_strategy="no", logging_steps=2)
        trainer = XMCTrainer(str(request.getfixturevalue("tiny_encoder")), args, make_documents(200))
    else:
        make = make_documents if request.param == "linear" else make_vectors
        args = XMCTrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, num_threads=1, widget_examples=True)
        trainer = XMCTrainer(args=args, train_dataset=make(300))
    trainer.train()
    make = make_vectors if request.param == "vectors" else make_documents
    metrics = trainer.evaluate(named(make(80, seed=1), "test"))
    return request.param, folder, metrics


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the folder of the trained model."""
    return shutil.copytree(trained[1], tmp_path / "model")


def card_of(folder):
    return ModelCard.load(folder / "README.md")


def run_snippet(folder, monkeypatch):
    """Runs the Python code of a card."""
    (code,) = re.findall(r"```python\n(.*?)```", card_of(folder).text, re.S)
    monkeypatch.chdir(folder.parent)
    exec(compile(code, "<card>", "exec"), {})


def table_values(text):
    """The numbers of the table of metrics by name: `{"P@1": 31.85}`."""
    header, _, *rows = re.search(r"^\| % .*?(?=\n\n)", text, re.M | re.S)[0].splitlines()
    ks = re.findall(r"@\d+", header)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {f"{row[0]}{k}": float(value) for row in cells for k, value in zip(ks, row[1:], strict=True)}


def test_numbers_are_those_of_the_evaluation(trained):
    kind, folder, metrics = trained
    card = card_of(folder)
    expected = {f"{name}@{k}": metrics[f"eval_{name}@{k}"] for name in ("P", "nDCG", "PSP") for k in (1, 3, 5)}
    assert table_values(card.text) == {name: round(100 * value, 2) for name, value in expected.items()}
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == expected
    entries = yaml.safe_load((folder / EVAL_RESULTS_FILE).read_text())
    assert {entry["dataset"]["task_id"]: entry["value"] for entry in entries} == expected
    assert all(entry["notes"] == "split test" for entry in entries)
    (evaluation,) = TrainingRecord.load(folder).evaluations
    assert evaluation["split"] == "test" and evaluation["documents"] == 80
    for row in evaluation["by_frequency"]:
        assert f"| {row['bucket']} " in card.text


def test_metadata_and_text(trained):
    kind, folder, _ = trained
    data, text = card_of(folder).data, card_of(folder).text
    method = "xr-transformer" if kind == "encoder" else "xr-linear"
    assert {"hf-xmc", "extreme-text-classification", method} <= set(data.tags)
    assert data.library_name == "hf_xmc" and data.pipeline_tag == "text-classification"
    assert data.base_model is None and data.datasets is None  # both were local
    assert bool(data.get("widget")) == (kind == "linear")  # only with `widget_examples`
    assert data.eval_results[0].dataset_split == "test"
    record = TrainingRecord.load(folder)
    config = json.loads((folder / "config.json").read_text())
    assert MARK in text and "**60 labels**" in text
    assert " → ".join(map(str, config["level_sizes"])) in text
    assert f"{record.seconds:,.1f} seconds on" in text and record.machine["processor"] in text
    assert f"| training documents | {record.documents}{f' ({record.split})' if record.split else ''} |" in text
    assert paper_of(method).bibtex in text
    assert str(folder.parent) not in (folder / "README.md").read_text()
    assert (kind == "vectors") == (record.latency is None)
    for name in ("label_frequency.png", "training.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in text


def test_the_picture_is_that_of_the_test_documents(copied, monkeypatch):
    record = TrainingRecord.load(copied)
    (test,) = record.evaluations
    record.evaluations = [test, {**test, "split": "validation"}]
    record.save(copied)
    pictured = []
    monkeypatch.setattr(model_card, "plot_by_frequency", lambda rows, path, k, title: pictured.append(title))
    write_model_card(copied)
    assert len(pictured) == 1 and pictured[0].endswith(", test")


def test_the_snippet_runs(trained, monkeypatch, capsys):
    kind, folder, _ = trained
    run_snippet(folder, monkeypatch)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^[01]\.\d\d label \d\d$", printed, re.M)) == 5 or kind == "vectors" and "[[(" in printed


def test_levels_are_on_record(trained):
    kind, folder, _ = trained
    record = TrainingRecord.load(folder)
    assert {entry["level"] for entry in record.levels} == ({1, 2, 3} if kind == "encoder" else set())
    assert ("level 3 fine-tuning" in record.stages) == (kind == "encoder")
    assert sum(record.stages.values()) <= record.seconds * 1.01
    assert "ranker" in record.stages and record.versions["transformers"]


def test_options_of_the_command(copied, tmp_path):
    results = {"dataset": "/data/eurlex57k", "split": "dev", "documents": 7, "seconds": 1.0, "metrics": {"P@1": 0.25}}
    (copied / "dev_results.json").write_text(json.dumps({"model": str(copied), **results}))
    words = f"--name me/tagger --license cc-by-4.0 --language en fi --tags law --copy-to {tmp_path / 'cards'}".split()
    assert main(["card", str(copied), *words, "--dataset", "me/data", "--base-model", "me/encoder"]) == 0
    card = ModelCard.load(tmp_path / "cards" / "README.md")
    assert card.data.license == "cc-by-4.0" and card.data.language == ["en", "fi"] and "law" in card.data.tags
    assert card.data.datasets == "me/data" and card.data.base_model == "me/encoder"
    assert {result.dataset_name for result in card.data.eval_results} == {"me/data", "eurlex57k"}
    assert (tmp_path / "cards" / "training.png").is_file()
    assert "/data/eurlex57k" not in (copied / "README.md").read_text() + (copied / "training_record.json").read_text()


def test_a_card_written_by_hand_stays(copied, capsys):
    (copied / "README.md").write_text("---\nlicense: mit\n---\nMy own words.\n")
    assert write_model_card(copied) is None
    assert main(["card", str(copied)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert "My own words." in (copied / "README.md").read_text()
    assert main(["card", str(copied), "--overwrite"]) == 0
    assert MARK in (copied / "README.md").read_text()


def test_a_card_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch, caplog):
    args = XMCTrainingArguments(str(tmp_path), disable_tqdm=True, use_cpu=True, num_threads=1)
    trainer = XMCTrainer(args=args, train_dataset=make_documents(100))

    def fail(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr("hf_xmc.hub.publisher.write_model_card", fail)
    trainer.train()
    assert trainer.evaluate(make_documents(20, seed=1))["eval_P@1"] > 0
    assert (tmp_path / "ranker.safetensors").is_file() and "the disk is full" in caplog.text


def test_without_matplotlib_there_are_no_pictures(copied, tmp_path, monkeypatch):
    for picture in copied.glob("*.png"):
        picture.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert write_model_card(copied) is not None
    assert not list(copied.glob("*.png")) and ".png" not in (copied / "README.md").read_text()
    refused("matplotlib", plot_training, {"ranker": 1.0}, [], tmp_path / "plot.png", error=ImportError)


def test_a_model_without_a_record(model_folder, tmp_path):
    names = ("training_record.json", "training_args.json", "README.md")
    copy = shutil.copytree(model_folder, tmp_path / "model", ignore=shutil.ignore_patterns(*names))
    text = write_model_card(copy, CardOptions(model_name="me/tagger")).read_text()
    assert 'model="me/tagger"' in text and not (copy / EVAL_RESULTS_FILE).exists()


def test_the_card_of_an_ensemble(ensemble_folder, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(ensemble_folder, tmp_path / "three-as-one")
    for name, encoder in (("member-1", "me/small"), ("member-3", "me/large")):
        (copy / name / "training_args.json").write_text(json.dumps({"encoder_name": encoder}))
    results = {"dataset": "me/data", "split": "test", "documents": 7, "seconds": 1.0, "metrics": {"P@1": 0.25}}
    (copy / "test_results.json").write_text(json.dumps(results))
    assert main(["card", str(copy), "--license", "mit"]) == 0
    card = card_of(copy)
    tags = {"hf-xmc", "extreme-text-classification", "ensemble", "xr-linear", "parabel", "xr-transformer"}
    assert tags <= set(card.data.tags) and card.data.base_model == ["me/small", "me/large"]
    assert [(result.metric_type, result.metric_value) for result in card.data.eval_results] == [("P@1", 0.25)]
    assert "**60 labels**" in card.text and "| models | 3, weighted mean of their scores |" in card.text
    assert "| `member-1` | XR-Linear, encoder me/small | 0.5 |" in card.text
    assert "| `member-2` | Parabel | 0.25 |" in card.text
    assert all(paper_of(name).bibtex in card.text for name in ("xr-linear", "parabel", "xr-transformer"))
    run_snippet(copy, monkeypatch)
    assert len(re.findall(r"^[01]\.\d\d label \d\d$", capsys.readouterr().out, re.M)) == 5


def test_the_card_of_an_ensemble_of_vectors(vector_model_folder, tmp_path, monkeypatch, capsys):
    XMCEnsemble.from_members([vector_model_folder] * 2, combine="ranks").save_pretrained(tmp_path / "pair")
    assert "reciprocal ranks" in write_model_card(tmp_path / "pair").read_text()
    run_snippet(tmp_path / "pair", monkeypatch)
    assert "[[(" in capsys.readouterr().out


def test_every_method_has_a_paper():
    for method in METHODS:
        bibtex = paper_of(method).bibtex
        assert re.fullmatch(r"@(inproceedings|article)\{\w+,\n(  \w+ = \{.+\},\n)+\}", bibtex)
        assert 1967 <= int(re.search(r"year = \{(\d+)\}", bibtex)[1]) <= 2022
    assert paper_of("xr-transformer-ensemble") == paper_of("xr-transformer") != paper_of("x-transformer")
    assert paper_of(None) is None and paper_of("other") is None


def test_public_names_and_metrics():
    names = {"me/data": "me/data", "/home/me/data": "data", "data": "data", "a/b/c": "c", None: None}
    assert {name: public_name(name) for name in names} == names
    assert reported({"P@1": 0.5, "R@1": 0.2, "nDCG@10": 0.3}) == {"P@1": 0.5}


def test_tables_escape_labels_and_options(tmp_path):
    args = XMCTrainingArguments(str(tmp_path), disable_tqdm=True, use_cpu=True, num_threads=1, tfidf_min_df=1)
    rows = {"text": ["rice in 1998", "milk in 2001"] * 5, "labels": [["R&D | <b>rice</b>"], ["milk"]] * 5}
    XMCTrainer(args=args, train_dataset=Dataset.from_dict(rows)).train()
    options = json.loads((tmp_path / "training_args.json").read_text())
    (tmp_path / "training_args.json").write_text(json.dumps({**options, "some_pattern": "(?:19|20)<b>"}))
    text = write_model_card(tmp_path).read_text()
    assert "| labels | 2, such as R&amp;D &#124; &lt;b&gt;rice&lt;/b&gt;; milk |\n" in text
    assert r"| `some_pattern` | `(?:19\|20)<b>` |" in text


def test_an_evaluation_replaces_that_of_the_same_documents():
    record = TrainingRecord(dataset="data")
    for value in (0.1, 0.2):
        record.add_evaluation({"split": "test", "metrics": {"P@1": value}})
    record.add_evaluation({"split": "dev", "metrics": {"P@1": 0.3}})
    assert [one["metrics"]["P@1"] for one in record.evaluations] == [0.2, 0.3]


@pytest.mark.parametrize("path", sorted((ROOT / "model_cards").glob("*/README.md")), ids=lambda path: path.parent.name)
def test_published_cards_are_whole(path):
    card = ModelCard.load(path)
    assert "extreme-text-classification" in card.data.tags and card.data.eval_results
    values: dict[str, dict[str, float]] = {}
    for result in card.data.eval_results:
        values.setdefault(result.dataset_split, {})[result.metric_type] = round(100 * result.metric_value, 2)
    for split, expected in values.items():
        assert table_values(card.text[card.text.index(f"split `{split}`") :]) == expected
    for picture in re.findall(r"\]\((\w+\.png)\)", card.text):
        assert (path.parent / picture).is_file()


def test_templates():
    assert (ROOT / "model_cards" / "template.md").read_text() == TEMPLATE.read_text()
    # A wheel contains only the data files that pyproject.toml lists.
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert '"hub/*.md", "hub/*.bib"' in pyproject and "jinja2" in pyproject

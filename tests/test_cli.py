"""Tests of hf_xmc.cli."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command_fails, make_documents

from hf_xmc import XMCForTextClassification
from hf_xmc.cli import parsers
from hf_xmc.cli.main import main
from hf_xmc.cli.parsers import COMMANDS
from hf_xmc.cli.train import ALIASES, TrainParser
from hf_xmc.ensemble_xmc import AVERAGES
from hf_xmc.inference.writers import FORMATS
from hf_xmc.modeling_xmc import PREDICT_WITH
from hf_xmc.training.record import TrainingRecord
from hf_xmc.version import __version__


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    make_documents(600).to_parquet(folder / "train.parquet")
    make_documents(80, seed=1).to_parquet(folder / "test.parquet")
    return folder


def recipe(folder, **options):
    path = folder / "recipe.yaml"
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    return str(path)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_train(data, tmp_path, capsys):
    output = tmp_path / "model"
    options = {"method": "parabel", "tfidf_ngram_range": [1, 1], "ranker_C": 0.5, "tree_branching": 4, "use_cpu": True}
    options |= {"dataset": "elsewhere", "eval_split": "test", "eval_ks": [1, 5], "label_delimiter": None}
    path = recipe(tmp_path, **options)
    flags = ["--dataset", str(data), "--output_dir", str(output), "--tree-branching", "8", "--disable_tqdm=true"]
    assert main(["train", "--config", path, *flags]) == 0
    options = json.loads((output / "training_args.json").read_text())
    assert (options["tree_branching"], options["ranker_C"], options["method"]) == (8, 0.5, "parabel")
    assert options["tfidf_ngram_range"] == [1, 1]
    results = json.loads((output / "test_results.json").read_text())
    assert results["metrics"]["P@1"] > 0.95 and results["documents"] == 80
    assert results["by_frequency"] and "P@3" not in results["metrics"]
    shown = capsys.readouterr().out
    assert "nDCG" in shown and "test_results.json" in shown
    # Once more: nothing is overwritten unless one says so.
    command_fails(capsys, "finished model", ["train", "--config", path, *flags])
    assert main(["train", "--config", path, *flags, "--overwrite"]) == 0


def test_train_with_column_mapping_and_label_texts(data, tmp_path):
    table = make_documents(300).rename_columns({"text": "title", "labels": "subjects"})
    table.to_json(data / "train.jsonl")
    for name in ("train.parquet", "test.parquet"):
        (data / name).unlink()
    (data / "labels.csv").write_text("label,text\nlabel 07,seven\n")
    mapping = {"title": "text", "subjects": "labels"}
    path = recipe(tmp_path, column_mapping=mapping, label_texts=True)
    assert main(train_flags(data, tmp_path / "model", "--config", path)) == 0
    labels = XMCForTextClassification.from_pretrained(tmp_path / "model").labels
    assert labels.texts[7] == "seven"


SKOS = "@prefix s: <http://www.w3.org/2004/02/skos/core#> . <http://a> a s:Concept ; s:prefLabel {} ."


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.csv", "label,text\nunknown,seven\nother,eight\n", "'unknown'"),
        ("v.csv", "label,text,parents\nlabel 07,seven,\nlabel 08,eight,label 99\n", "'label 99'"),
        ("v.csv", "label,text,parents\nlabel 07,seven,label 08\nlabel 08,eight,label 07\n", "cycle"),
        ("v.ttl", SKOS.format('"vesi"@fi, "vatten"@sv'), "not in English"),
    ],
)
def test_vocabularies_that_cannot_be_used(data, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    flags = train_flags(data, tmp_path / "model", "--label-texts", str(tmp_path / name), "--method", "xr-linear")
    assert main(flags) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("model/*.safetensors"))


def test_train_on_several_splits(data, tmp_path):
    make_documents(100, seed=2).to_parquet(data / "dev.parquet")
    splits = ["--train_split", "train+validation", "--validation_split", "", "--eval_split", "test"]
    assert main(train_flags(data, tmp_path / "model", *splits)) == 0
    record = TrainingRecord.load(tmp_path / "model")
    assert (record.documents, record.split) == (700, "train+validation")
    assert "| training documents | 700 (train+validation) |" in (tmp_path / "model" / "README.md").read_text()
    assert XMCForTextClassification.from_pretrained(tmp_path / "model").labels.num_documents == 700


@pytest.mark.parametrize(
    "options, flags, message",
    [
        ({"tree_brancing": 3}, [], "`tree_branching`"),
        ({}, ["--ranker_beamsize", "3"], "`--ranker_beam_size`"),
        ({"ranker_cost": 3}, [], "`ranker_C`"),
        ({}, ["--neighbours-power=3"], "`knn_exponent`"),
        ({}, ["--level_joint", "true"], "`level_joint`"),
        ({"tree_branching": "four"}, [], "tree_branching"),
        ({"tree_branching": 2.5}, [], "tree_branching"),
        ({"lr_scheduler_type": "polynomial"}, [], "constant_with_warmup"),
        ({"method": "parable"}, [], "parabel"),
        ({"ranker_loss": "hinge"}, [], "squared_hinge"),
        ({"column_mapping": "title=text"}, [], "is not JSON"),
        ({}, ["--dataset", "/no/such/folder"], "no file or folder `/no/such/folder`"),
        ({}, ["--eval_split", "validation"], "no split `validation`"),
        ({"dataset": None}, [], "`--dataset PATH`"),
        ({"train_split": "train+test"}, ["--eval_split", "test"], "eval_split"),
        ({"train_split": "train+dev", "validation_split": "validation"}, [], "--validation_split"),
        ({"train_split": "train+train"}, [], "train+train"),
    ],
)
def test_mistakes_in_recipes_and_flags(data, tmp_path, capsys, options, flags, message):
    options = {"dataset": str(data), "output_dir": str(tmp_path / "model"), "use_cpu": True, **options}
    assert main(["train", "--config", recipe(tmp_path, **options), *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize("content", ["just words", "a: b: c", "- 1\n- 2\n", ""])
def test_a_recipe_that_is_none(tmp_path, capsys, content):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    command_fails(capsys, str(path), ["train", "--config", str(path)])
    command_fails(capsys, "none.yaml", ["train", "--config", str(tmp_path / "none.yaml")])


def write_edits(folder):
    """Files of labels to add, to remove and to rename, and documents of the new label."""
    (folder / "new.csv").write_text("label,text\nfillers,word3 word4\n007,topic07\n")
    (folder / "old.txt").write_text("\ufefflabel 01\n\nlabel 02 \n", encoding="utf-8")
    (folder / "renamed.csv").write_text("label,new\nlabel 03,third\n")
    (folder / "examples.csv").write_text(
        "text,labels\nword3 word5,fillers;label 05\ntopic09,label 09\nword3,fillers\n"
    )


def test_labels(model_folder, tmp_path, capsys):
    write_edits(tmp_path)
    output, files = tmp_path / "edited", {name: str(tmp_path / name) for name in ("new.csv", "old.txt", "renamed.csv")}
    edits = ["--add", files["new.csv"], "--remove", files["old.txt"], "--rename", files["renamed.csv"]]
    examples = ["--examples", str(tmp_path / "examples.csv"), "--label-delimiter", ";"]
    command = ["labels", str(model_folder), *edits, *examples, "--output_dir", str(output)]
    assert main(command) == 0
    assert "2 labels added, 2 labels removed, 1 labels renamed" in capsys.readouterr().out
    model = XMCForTextClassification.from_pretrained(output, verify=True)
    names = [f"label {i:02d}" for i in range(60) if i not in (1, 2)]
    names[1] = "third"
    assert model.labels.names == [*names, "fillers", "007"]
    assert model.labels.counts[-2:].tolist() == [2, 0]
    assert "fillers" in dict(model.predict(["word3 word5"], top_k=3)[0])
    card = (output / "README.md").read_text()
    assert re.search(r"\| labels removed \| 2 on \d{4}-\d\d-\d\d: label 01; label 02 \|", card)
    assert re.search(r"\| labels added \| 2 on \S+, with 2 examples: fillers; 007 \|", card)
    assert "label 03 → third" in card and "those added since" in card
    record, trained = (json.loads((folder / "training_record.json").read_text()) for folder in (output, model_folder))
    assert record["documents"] == trained["documents"] and not record["evaluations"] and record["latency"] is None
    options, original = (json.loads((folder / "training_args.json").read_text()) for folder in (output, model_folder))
    assert options == original
    # Once more: nothing is overwritten unless one says so. The model may be replaced by itself.
    command_fails(capsys, "--overwrite", command)
    (tmp_path / "old.txt").write_text("third\n007\n")
    again = ["labels", str(output), "--remove", files["old.txt"], "--output-dir", str(output), "--overwrite"]
    assert main(again) == 0
    assert XMCForTextClassification.from_pretrained(output, verify=True).labels.names == [
        *[name for name in names if name != "third"],
        "fillers",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--add"),
        (["--examples", "examples.csv", "--remove", "old.txt"], "--add"),
        (["--add", "renamed.csv"], "renamed.csv"),
        (["--add", "known.csv"], "'label 04'"),
        (["--add", "none.csv"], "none.csv"),
        (["--rename", "new.csv"], "`new`"),
        (["--rename", "old.txt"], "old.txt"),
        (["--remove", "twice.csv"], "Row 2"),
        (["--remove", "none.txt"], "none.txt"),
        (["--remove", "new.csv"], "'fillers'"),
        (["--add", "new.csv", "--examples", "others.csv"], "others.csv"),
    ],
)
def test_mistakes_in_edits_of_labels(model_folder, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_edits(tmp_path)
    (tmp_path / "twice.csv").write_text("label\nlabel 01\nlabel 01\n")
    (tmp_path / "known.csv").write_text("label,text\nlabel 04,topic04\n")
    (tmp_path / "others.csv").write_text("text,labels\ntopic09,label 09\ntopic08,label 08\n")
    assert main(["labels", str(model_folder), *flags, "--output-dir", "edited"]) == 1
    assert message in capsys.readouterr().err and not Path("edited").exists()


def test_labels_of_an_ensemble_cannot_be_edited(ensemble_folder, tmp_path, capsys):
    write_edits(tmp_path)
    flags = ["--remove", str(tmp_path / "old.txt"), "--output-dir", str(tmp_path / "edited")]
    command_fails(capsys, "ensemble", ["labels", str(ensemble_folder), *flags])


def test_evaluate(data, model_folder, tmp_path, capsys):
    output = tmp_path / "results.json"
    assert main(["evaluate", str(model_folder), str(data), "--output", str(output), "--batch-size", "7"]) == 0
    results = json.loads(output.read_text())
    assert results["metrics"]["P@1"] > 0.95 and results["split"] == "test"
    assert "nDCG" in capsys.readouterr().out
    again = tmp_path / "again.json"
    argv = ["evaluate", str(model_folder), str(data / "test.parquet"), "--output", str(again), "--ks", "1"]
    assert main(argv) == 0
    assert json.loads(again.read_text())["metrics"]["P@1"] == results["metrics"]["P@1"]
    command_fails(capsys, "has no split", ["evaluate", str(model_folder), str(data), "--split", "dev"])


def test_results_of_trials_are_not_those_of_the_model(data, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    assert main(["evaluate", str(folder), str(data), "--beam_size", "1", "--ks=1"]) == 0
    trial = json.loads((folder / "test_trial_results.json").read_text())
    assert trial["options"] == {"ks": [1], "beam_size": 1}
    assert main(["evaluate", str(folder), str(data), "--ks", "1", "--output", str(folder / "test_results.json")]) == 0
    assert TrainingRecord.load(folder).evaluations == []
    assert main(["evaluate", str(folder), str(data)]) == 0
    assert "P@5" in TrainingRecord.load(folder).evaluations[0]["metrics"]


def train_flags(data, output, *more):
    flags = ["--dataset", str(data), "--output_dir", str(output), "--disable_tqdm=true", "--use_cpu=true"]
    return ["train", *flags, *more]


def test_a_finished_training_is_taken_up_again(data, tmp_path, capsys):
    output = tmp_path / "model"
    assert main(train_flags(data, output)) == 0
    before = (output / "ranker.safetensors").stat().st_mtime_ns
    again = train_flags(data, output, "--eval_split", "test", "--resume_from_checkpoint", "true")
    assert main(again) == 0
    results = json.loads((output / "test_results.json").read_text())
    assert results["training_seconds"] == TrainingRecord.load(output).seconds
    assert (output / "ranker.safetensors").stat().st_mtime_ns == before
    # Other documents, as many of them and with the same labels, are another training.
    make_documents(600, seed=5).to_parquet(data / "train.parquet")
    capsys.readouterr()
    command_fails(capsys, "output_dir", again)


def test_a_new_model_does_not_show_the_results_of_the_old_one(data, tmp_path):
    output = tmp_path / "model"
    assert main(train_flags(data, output, "--eval_split", "test")) == 0
    assert main(["evaluate", str(output), str(data), "--ks", "1"]) == 0
    (output / "my_results.json").write_text('{"mine": 1}')
    assert (output / ".eval_results").is_dir() and len(TrainingRecord.load(output).evaluations) == 1
    assert main(train_flags(data, output, "--overwrite", "true", "--method", "parabel")) == 0
    assert TrainingRecord.load(output).evaluations == []
    assert "Not evaluated yet" in (output / "README.md").read_text()
    assert not list(output.glob(".eval_results/*")) and not (output / "label_frequency.png").exists()
    assert [path.name for path in output.glob("*_results.json")] == ["my_results.json"]


def test_the_texts_of_the_data_are_not_in_the_card(data, tmp_path):
    for shows in (False, True):
        output = tmp_path / str(shows)
        assert main(train_flags(data, output, "--widget_examples", str(shows))) == 0
        published = (output / "README.md").read_text() + (output / "training_record.json").read_text()
        texts = make_documents(600)["text"]
        assert any(text in published for text in texts) == shows


def test_the_help_of_train_names_files_and_options_that_exist(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    files = re.findall(r"recipes/[\w/.-]+\.yaml", shown)
    assert files and all((Path(__file__).parents[1] / name).is_file() for name in files), files
    known = {name for action in TrainParser()._actions for name in action.option_strings}
    assert set(re.findall(r"--[a-z-]+", shown)) <= {*known, *ALIASES, "--OPTION"}


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl.gz"])
def test_a_name_of_a_format_that_is_not_written(data, model_folder, tmp_path, capsys, monkeypatch, name):
    output = tmp_path / name
    assert main(["predict", str(model_folder), str(data / "test.parquet"), "--output", str(output)]) == 1
    assert "jsonl or parquet" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("topic07\n"))
    command_fails(capsys, "jsonl or parquet", ["predict", str(model_folder), "-", "--output", str(output)])
    assert not output.exists()


def test_an_interruption_is_no_traceback(data, model_folder, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_xmc.cli.evaluate.load_model", stop)
    assert main(["evaluate", str(model_folder), str(data)]) == 130
    assert capsys.readouterr().err.endswith("hf-xmc evaluate: interrupted.\n")
    with pytest.raises(KeyboardInterrupt):
        main(["--traceback", "evaluate", str(model_folder), str(data)])


def test_a_missing_folder_without_network(monkeypatch, tmp_path, capsys):
    def offline(*args, **kwargs):
        raise ConnectionError("the Hub is far away")

    monkeypatch.setattr("datasets.load_dataset", offline)
    command_fails(capsys, "`data/none`", ["train", "--dataset", "data/none", "--output_dir", str(tmp_path / "out")])


def test_wrong_places(data, model_folder, tmp_path, capsys):
    command_fails(capsys, "config.json", ["card", str(data)])
    command_fails(capsys, "--output", ["evaluate", str(model_folder), str(data), "--output", str(tmp_path)])
    (data / "test.parquet").unlink()
    (data / "train.parquet").unlink()
    (data / "train.csv").write_text("text,labels\n")
    command_fails(capsys, "train.csv`", train_flags(data, tmp_path / "model"))
    assert main(train_flags("sample", tmp_path / "model", "--column_mapping", '{"a": "text"}')) == 1
    assert "`column_mapping`" in capsys.readouterr().err


def test_damaged_weights(data, model_folder, tmp_path, capsys):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["evaluate", str(folder), str(data)]) == 1
    error = capsys.readouterr().err
    assert str(folder) in error and "damaged" in error


def test_predict_a_table(data, model_folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    source = data / "documents.csv"
    source.write_text('id,title,labels\n1,"topic07, word1",a|b\n2,,c\n3,topic31,\n')
    argv = ["predict", str(model_folder), str(source), "--output", str(output)]
    argv += ["--text-column", "title", "--top-k", "2"]
    assert main([*argv, "--batch-size", "2"]) == 0
    first, second, third = lines(output)
    assert first["labels"][0]["label"] == "label 07" and third["labels"][0]["label"] == "label 31"
    assert len(second["labels"]) == 2
    command_fails(capsys, "--overwrite", argv)
    assert main([*argv, "--overwrite", "--threshold", "0.5"]) == 0
    assert [len(line["labels"]) for line in lines(output)][1] == 0


def test_predict_a_split_of_a_folder(data, model_folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    command_fails(capsys, "`--split`", ["predict", str(model_folder), str(data), "--output", str(output)])
    assert main(["predict", str(model_folder), str(data), "--split", "test", "--output", str(output)]) == 0
    model = XMCForTextClassification.from_pretrained(model_folder)
    expected = model.predict(make_documents(80, seed=1)["text"][:])
    assert [[entry["label"] for entry in line["labels"]] for line in lines(output)] == [
        [label for label, _ in row] for row in expected
    ]


def test_predict_lines(model_folder, tmp_path, monkeypatch, capsys):
    text = "topic07\n\ntopic31\r\n"
    source = tmp_path / "documents.txt"
    source.write_bytes(text.encode())
    output = tmp_path / "out.jsonl"
    argv = ["--top-k", "1", "--batch-size", "2"]
    assert main(["predict", str(model_folder), str(source), "--output", str(output), *argv]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["predict", str(model_folder), "-", "--output", "-", *argv]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == lines(output) and len(printed) == 3
    assert [line["labels"][0]["label"] for line in printed][::2] == ["label 07", "label 31"]


def test_a_model_of_vectors_does_not_read_lines(vector_model_folder, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("topic07\n")
    argv = ["predict", str(vector_model_folder), str(tmp_path / "words.txt"), "--output", str(tmp_path / "none")]
    command_fails(capsys, "words.txt`", argv)
    assert not (tmp_path / "none").exists()


def test_help_and_wrong_commands(capsys):
    for command in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as stop:
            main(command)
        shown = capsys.readouterr().out
        assert stop.value.code == 0 and "hf-xmc" in shown and "examples:" in shown and len(shown.splitlines()) < 50
    with pytest.raises(SystemExit):
        main(["--version"])
    assert __version__ in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "`train`" in capsys.readouterr().err


def test_choices_are_those_of_the_modules_that_the_parsers_do_not_import():
    assert (parsers.FORMATS, parsers.AVERAGES) == (tuple(FORMATS), tuple(AVERAGES))
    assert parsers.PREDICT_WITH == PREDICT_WITH


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "complete -o default -F _hf_xmc hf-xmc" in script and ("bashcompinit" in script) == (shell == "zsh")
    words = 'COMP_WORDS=(hf-xmc {}); COMP_CWORD={}; _hf_xmc; echo "${{COMPREPLY[*]}}"'
    for line, index, expected in (
        ("tr", 1, "train"),
        ("train --text-c", 2, "--text-column"),
        ("predict --predict-with he", 3, "heads"),
        ("evaluate my-fi", 2, ""),
    ):
        run = subprocess.run(
            [
                "bash",
                "-c",
                script.removeprefix("autoload -U +X bashcompinit && bashcompinit\n") + words.format(line, index),
            ],
            capture_output=True,
            text=True,
        )
        assert run.stdout.strip() == expected, (line, run.stderr)


def test_completion_for_fish(capsys):
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c hf-xmc ") and line.count("'") % 2 == 0 for line in lines)
    assert "complete -c hf-xmc -f -n __fish_use_subcommand -a predict -d 'tag the documents of files'" in lines
    options = [line for line in lines if "__fish_seen_subcommand_from predict'" in line]
    assert any(" -l top-k -r " in line for line in options) and any(" -l overwrite -d " in line for line in options)
    assert any(" -l format -x -a 'jsonl parquet' " in line for line in options)
    assert any(" -l output -s o -r " in line for line in options)


@pytest.mark.parametrize(
    "argv", [["predict", "model"], ["evaluate", "m", "d", "--topk", "3"], ["push", "m"], ["card"]]
)
def test_mistakes_in_arguments_are_one_line(argv, capsys):
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert f"hf-xmc {argv[0]} --help" in error and len(error.splitlines()) == 1


def test_a_reader_that_stops_early(model_folder, tmp_path):
    source = tmp_path / "documents.txt"
    source.write_text("topic07\n" * 20_000)
    command = f"{sys.executable} -m hf_xmc.cli.main predict {model_folder} {source} --output - | head -n 1"
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert json.loads(run.stdout)["labels"][0]["label"] == "label 07"
    assert "BrokenPipe" not in run.stderr

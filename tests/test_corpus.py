"""Tests of hf_xmc.inference.corpus: parts, plans, interruptions, several processes."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import command_fails, make_documents, make_vectors, refused
from datasets import Dataset, load_dataset

from hf_xmc import XMCEnsemble, XMCForTextClassification
from hf_xmc.cli.main import main
from hf_xmc.inference.corpus import PredictionArguments, predict_corpus
from hf_xmc.parallel.stage_cache import PieceFolder

TEXTS = make_documents(50, seed=3)["text"][:]
SMALL = ["--part-size", "8", "--batch-size", "4", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks smaller than parts and files, so that their borders differ."""
    monkeypatch.setattr("hf_xmc.inference.predict.CHUNK_SIZE", 3)


@pytest.fixture
def corpus(tmp_path):
    """Fifty documents in five files of different formats, in the order of their names."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    pq.write_table(pa.Table.from_pylist(rows[:13]), folder / "a.parquet", row_group_size=5)
    (folder / "b.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows[13:14]))
    (folder / "c.jsonl").write_text("")
    with gzip.open(folder / "d.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[14:30])
    (folder / "e.csv").write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in rows[30:]))
    return folder


def parquet_bytes(columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def write_lines(path, count):
    texts = make_documents(count, seed=3)["text"]
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("[!.]*"))}


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def expected(folder, texts, top_k):
    predictions = XMCForTextClassification.from_pretrained(folder).predict(texts, top_k)
    return [[label for label, _ in pairs] for pairs in predictions]


@pytest.mark.parametrize("name", ["out", "out.jsonl", "out.parquet", "parquet"])
def test_every_document_once_and_in_order(corpus, model_folder, tmp_path, name, capsys):
    output = tmp_path / name
    argv = ["predict", str(model_folder), str(corpus), "--output", str(output), "--keep-columns", "id", "--top-k", "2"]
    argv += [*SMALL, *(["--format", "parquet"] if name == "parquet" else [])]
    assert main(argv) == 0
    kind = "parquet" if "parquet" in name else "json"
    files = sorted(map(str, output.glob("part-*"))) if output.is_dir() else [str(output)]
    assert len(files) == (7 if output.is_dir() else 1)
    found = load_dataset(kind, data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert found["id"][:] == list(range(50))
    labels = [[e["label"] for e in row] for row in found["labels"]] if kind == "json" else found["labels"][:]
    assert labels == expected(model_folder, TEXTS, 2)
    assert not (tmp_path / f"{name}.parts").exists()
    if output.is_dir():
        assert [row["id"] for row in load_dataset(str(output), split="train")] == list(range(50))
        capsys.readouterr()
        before = {path: path.stat().st_mtime_ns for path in output.glob("part-*")}
        assert main(argv) == 0
        assert "complete already" in capsys.readouterr().err
        assert before == {path: path.stat().st_mtime_ns for path in output.glob("part-*")}


def test_patterns_and_standard_output(corpus, model_folder, tmp_path, capsys):
    argv = ["predict", str(model_folder), str(corpus / "[ab].*"), str(corpus / "d.jsonl.gz"), *SMALL]
    assert main([*argv, "--output", str(tmp_path / "out.jsonl")]) == 0
    capsys.readouterr()
    assert main([*argv, "--output", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "out.jsonl").read_text()
    assert len(lines(tmp_path / "out.jsonl")) == 30


def test_lost_parts_are_made_again(corpus, model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(model_folder)
    arguments = PredictionArguments(top_k=3, keep_columns=["id"], part_size=8)
    job = predict_corpus(model, [corpus], tmp_path / "out", arguments)
    assert (job.documents, job.parts, job.resumed) == (50, 7, 0)
    whole = contents(tmp_path / "out")
    for number in (0, 3, 6):
        job.files[number].unlink()
    (tmp_path / "out" / ".part-00003-of-00007.jsonl.x").write_text("a killed process was here")
    assert predict_corpus(model, [corpus], tmp_path / "out", arguments).resumed == 4
    assert contents(tmp_path / "out") == whole and b"".join(whole.values()).count(b"\n") == 50
    assert {path.name for path in (tmp_path / "out").glob(".*")} == {".hf-xmc"}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data, model: ["--top-k", "2"], "`top_k`"),
        (lambda data, model: ["--threshold", "0.1"], "`threshold`"),
        (lambda data, model: ["--part-size", "9"], "`part_size`"),
        (lambda data, model: ["--format", "parquet"], "`format`"),
        (lambda data, model: write_lines(data, 31) and [], "docs.jsonl`"),
        (lambda data, model: (model / "labels.json").open("a").write(" ") and [], "the model"),
    ],
)
def test_a_changed_job_is_refused(model_folder, tmp_path, capsys, change, message):
    data, model = write_lines(tmp_path / "docs.jsonl", 30), shutil.copytree(model_folder, tmp_path / "model")
    argv = ["predict", str(model), str(data), "--output", str(tmp_path / "out"), *SMALL, "--top-k", "3"]
    assert main(argv) == 0
    (tmp_path / "out" / "part-00000-of-00004.jsonl").unlink()
    (model / "test_results.json").write_text("{}")  # what does not change the model
    before = contents(tmp_path / "out")
    argv += change(data, model)
    capsys.readouterr()
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert message in error and "--overwrite" in error and error.count("\n  - ") == 1
    assert contents(tmp_path / "out") == before
    assert main([*argv, "--overwrite"]) == 0
    parts = {name.rsplit("-of-")[1] for name in contents(tmp_path / "out")}
    assert len(parts) == 1  # nothing of the other job is left
    assert main([*argv]) == 0


def test_an_output_that_is_there(model_folder, tmp_path, capsys):
    data = write_lines(tmp_path / "docs.jsonl", 30)
    folder, file = tmp_path / "mine", tmp_path / "mine.jsonl"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    file.write_text("mine")
    for output in (folder, file):
        argv = ["predict", str(model_folder), str(data), "--output", str(output), *SMALL]
        command_fails(capsys, str(output), argv)
        assert not (tmp_path / "mine.jsonl.parts").exists() and not (output / ".hf-xmc").exists()
        assert main([*argv, "--overwrite"]) == 0
    assert (folder / "notes.txt").read_text() == "mine" and len(lines(file)) == 30
    # Killed after the parts were joined and before they were removed.
    shutil.copytree(folder, tmp_path / "mine.jsonl.parts")
    (tmp_path / "mine.jsonl.parts" / "notes.txt").unlink()
    assert main(argv) == 0 and not (tmp_path / "mine.jsonl.parts").exists()
    shutil.copytree(folder, tmp_path / "mine.jsonl.parts")
    file.write_text("mine again")
    assert main(argv) == 1 and file.read_text() == "mine again"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.jsonl", '{"text": "a"}\n\n{"text": \n', "`{path}`, line 3"),
        ("x.jsonl", '{"text": "a"}\n["b"]\n', "`{path}`, line 2"),
        ("x.jsonl", '{"text": "a"}\n{"text": 5}\n', "`{path}`, line 2: `text`"),
        ("x.jsonl", '{"text": "\\ud800"}\n', "`{path}`, line 1"),
        ("x.jsonl", '{"txt": "a"}\n', "`{path}`: There is no column `text`"),
        ("x.txt", b"a\n\xff\n", "`{path}`, line 2"),
        ("x.txt.gz", gzip.compress(b"a\n" * 9999, mtime=0)[:-9], "`{path}`"),
        ("x.parquet", b"PAR1 and so on", "`{path}`"),
        ("x.parquet", parquet_bytes({"text": [1]}), "`{path}`: column `text`"),
        ("x.parquet", parquet_bytes({"txt": ["a"]}), "`{path}`: There is no column `text`"),
    ],
)
def test_bad_documents_are_found_before_any_work(model_folder, tmp_path, capsys, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    good = write_lines(tmp_path / "good.jsonl", 9)
    assert main(["predict", str(model_folder), str(good), str(path), "--output", str(tmp_path / "out"), *SMALL]) == 1
    assert message.format(path=path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--keep-columns", "labels"], "`keep_columns`"),
        (["--keep-columns", "idd"], "Did you mean `id`?"),
        (["--keep-columns", "meta", "--format", "parquet"], "Column `meta`"),
        (["docs.jsonl"], "`docs.jsonl`"),
        (["*.none"], "`*.none`"),
        (["-"], "Standard input"),
        (["--part-size", "0"], "`part_size`"),
        (["--beam-size", "-1"], "`beam_size`"),
        (["--threshold", "nan"], "`threshold`"),
        (["--num-threads", "0"], "`num_threads`"),
    ],
)
def test_mistakes(model_folder, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text('{"id": 1, "text": "a", "meta": [1]}\n')
    assert main(["predict", str(model_folder), "docs.jsonl", *flags, "--output", "out"]) == 1
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_kept_columns_keep_their_types(model_folder, tmp_path):
    table = pa.table({"day": pa.array([1, 2], pa.date32()), "id": [7, None], "text": ["topic07", None]})
    pq.write_table(table, tmp_path / "docs.parquet")
    model = XMCForTextClassification.from_pretrained(model_folder)
    arguments = PredictionArguments(keep_columns=["id", "day", "text"])
    predict_corpus(model, [tmp_path / "docs.parquet"], tmp_path / "out.parquet", arguments)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.select(["id", "day", "text"]).equals(table.select(["id", "day", "text"]))
    predict_corpus(model, [tmp_path / "docs.parquet"], tmp_path / "out.jsonl", arguments)
    assert [row["day"] for row in lines(tmp_path / "out.jsonl")] == ["1970-01-02", "1970-01-03"]


def test_vectors_and_ensembles(vector_model_folder, ensemble_folder, corpus, tmp_path):
    vectors = make_vectors(20, seed=1)
    vectors.to_json(tmp_path / "vectors.jsonl")
    arguments = PredictionArguments(top_k=1, part_size=8)
    model = XMCForTextClassification.from_pretrained(vector_model_folder)
    predict_corpus(model, [tmp_path / "vectors.jsonl"], tmp_path / "out.jsonl", arguments)
    predict_corpus(model, [vectors], tmp_path / "again.jsonl", arguments)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()
    found = [int(row["labels"][0]["label"]) for row in lines(tmp_path / "out.jsonl")]
    assert all(label in truth for label, truth in zip(found, vectors["labels"], strict=True))
    ensemble = XMCEnsemble.from_pretrained(ensemble_folder)
    predict_corpus(ensemble, [corpus], tmp_path / "ensemble.jsonl", arguments)
    expected = ensemble.predict(TEXTS, 1)
    assert [row["labels"][0]["label"] for row in lines(tmp_path / "ensemble.jsonl")] == [r[0][0] for r in expected]


def test_a_model_without_files_is_refused(model_folder, tmp_path):
    model = XMCForTextClassification.from_pretrained(model_folder)
    model.config._name_or_path = model.name_or_path = ""
    refused("The model", predict_corpus, model, [Dataset.from_dict({"text": ["a"]})], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_job_at_a_time(model_folder, tmp_path, capsys):
    data = write_lines(tmp_path / "docs.jsonl", 30)
    argv = ["predict", str(model_folder), str(data), "--output", str(tmp_path / "out"), *SMALL]
    for shared in (False, True):  # another job begins; a process of another job is still alive
        other = PieceFolder(tmp_path / "out", "part-{index}.jsonl")
        with other.locked():
            other.lock(shared)
            command_fails(capsys, str(tmp_path / "out"), [*argv, "--overwrite"])
    assert main(argv) == 0


# ---- The command in processes of its own ----


def command(model, data, output, *flags):
    return ["-m", "hf_xmc.cli.main", "predict", str(model), str(data), "--output", str(output), *SMALL, *flags]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment(), start_new_session=True, **pipes, **options
    )


def wait_for_parts(process, folder, count, timeout=120):
    end = time.monotonic() + timeout
    while process.poll() is None and len(list(folder.glob("part-*"))) < count:
        assert time.monotonic() < end
        time.sleep(0.002)


def parts_of(folder):
    return len(list(folder.glob("part-*")))


@pytest.mark.slow
def test_two_processes(encoder_model_folder, tmp_path):
    data = write_lines(tmp_path / "docs.jsonl", 1200)
    assert main(command(encoder_model_folder, data, tmp_path / "one")[2:]) == 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = [*torchrun, *command(encoder_model_folder, data, tmp_path / "two")]
    process = start(run)
    wait_for_parts(process, tmp_path / "two", 20)
    # One of them dies; the launcher ends the other.
    victim = [child for child in psutil.Process(process.pid).children() if "hf_xmc.cli.main" in child.cmdline()][1]
    victim.kill()
    process.communicate(timeout=300)
    there = parts_of(tmp_path / "two")
    assert process.returncode != 0 and 20 <= there < 150
    process = start(run)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"{there} of them finished by an earlier run" in errors
    assert contents(tmp_path / "two") == contents(tmp_path / "one")

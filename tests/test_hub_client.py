"""Uploads and downloads with the real Hub client and a local server."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
from conftest import THREE_LEVELS, make_documents, refused
from hub_worker import Worker, assert_same_tags
from local_hub import TOKEN

from hf_xmc import LabelTree, XMCEnsemble, XMCForTextClassification

TEXTS = ["topic07 word1 topic31", "topic59", ""]
PARTS = ("model.safetensors", "label_tree.safetensors", "labels.json", "ranker.safetensors", "tfidf.safetensors")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(hub, home, tmp_path_factory):
    """A process with the package that uses the local server."""
    worker = Worker(hub.environment(home), tmp_path_factory.mktemp("client") / "log")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def expected(model_folder):
    return as_lists(XMCForTextClassification.from_pretrained(model_folder).predict(TEXTS, top_k=3))


@pytest.fixture(scope="module")
def linear(client, model_folder):
    """A linear model on the Hub."""
    push(client, model_folder, "me/linear")
    return "me/linear"


def as_lists(rows):
    return [[list(pair) for pair in row] for row in rows]


LOAD = """
from hf_xmc import XMCForTextClassification
result = XMCForTextClassification.from_pretrained(name, **options).predict(texts, top_k=3)
"""
PUSH = """
from hf_xmc import XMCForTextClassification
done = XMCForTextClassification.from_pretrained(source, **load).push_to_hub(name, **options)
result = [done.oid, done.pr_url]
"""
COMMAND = """
import contextlib, io
from hf_xmc.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
    code = main(argv)
result = [code, out.getvalue(), error.getvalue()]
"""


def load(client, name, **options):
    return client.run(LOAD, name=str(name), options=options, texts=TEXTS)


def push(client, source, name, load=None, **options):
    return client.run(PUSH, source=str(source), name=name, load=load or {}, options=options)


def tag_with(client, name):
    """Predicts with the pipeline that `transformers` chooses."""
    code = """
import hf_xmc
from transformers import pipeline
rows = pipeline(model=name)(texts, top_k=3, batch_size=len(texts))
result = [[[entry["label"], entry["score"]] for entry in row] for row in rows]
"""
    return client.run(code, name=name, texts=TEXTS)


def command(client, *argv):
    return client.run(COMMAND, argv=[str(part) for part in argv])


@pytest.mark.parametrize("kind", ["model_folder", "encoder_model_folder"])
def test_pushed_downloaded_and_pushed_again(hub, client, request, kind):
    folder = request.getfixturevalue(kind)
    push(client, folder, f"me/{kind}")
    files = hub.files(f"me/{kind}")
    assert {*PARTS, "config.json", "tfidf_vocab.txt", "README.md"} <= files.keys()
    assert ("tokenizer.json" in files) == (kind == "encoder_model_folder")
    local = as_lists(XMCForTextClassification.from_pretrained(folder).predict(TEXTS, top_k=3))
    assert_same_tags(load(client, f"me/{kind}"), local)
    push(client, f"me/{kind}", f"me/{kind}-again")
    again = hub.files(f"me/{kind}-again")
    assert all(again[name] == files[name] == (folder / name).read_bytes() for name in PARTS)


def test_the_package_needs_no_flag(client, hub, linear, model_folder, expected):
    hub.add("me/plain", model_folder)
    code = """
import hf_xmc
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, pipeline
result = []
for name in names:
    for task in ((), (hf_xmc.TASK,)):
        for flag in ({}, {"trust_remote_code": True}):
            tag = pipeline(*task, model=name, **flag)
            assert type(tag) is hf_xmc.ExtremeTextClassificationPipeline, type(tag)
            result.append([[[e["label"], e["score"]] for e in row] for row in tag(texts, top_k=3)])
    assert type(AutoConfig.from_pretrained(name)) is hf_xmc.XMCConfig
    for auto_class in (AutoModel, AutoModelForSequenceClassification):
        assert type(auto_class.from_pretrained(name)) is hf_xmc.XMCForTextClassification
    result.append([[[e["label"], e["score"]] for e in row] for row in hf_xmc.pipeline(name)(texts, top_k=3)])
"""
    assert client.run(code, texts=TEXTS, names=[linear, "me/plain"]) == [expected] * 10
    with pytest.raises(RuntimeError, match="extreme-text-classification"):
        client.run("from transformers import pipeline; pipeline('text-classification', model='me/linear')")


def test_unchanged_files_are_not_sent_again(hub, client, linear, model_folder):
    with hub.watched() as requests:
        push(client, model_folder, linear)
    assert not [request for request in requests if request.startswith("PUT") or "/commit/" in request]


def test_an_interrupted_upload_goes_on(hub, client, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    model = XMCForTextClassification.from_pretrained(folder)
    model.ranker.beam_size = 7  # other content than any upload before
    model.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    oid = hashlib.sha256((folder / "ranker.safetensors").read_bytes()).hexdigest()
    hub.fail(r"POST .*/commit/main", 400)
    refused("me/interrupted", push, client, folder, "me/interrupted", error=RuntimeError)
    assert len(hub.repos["me/interrupted"].branches["main"]) == 1
    with hub.watched() as requests:
        push(client, folder, "me/interrupted")
    assert oid in hub.blobs and not [request for request in requests if request.startswith("PUT")]
    assert len(hub.repos["me/interrupted"].branches["main"]) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    # Server errors are retried, also if the server had made the commit before it failed.
    hub.fail(r"POST .*/commit/main", 503)
    hub.fail(r"POST .*/commit/main", 503, done=True)
    push(client, folder, "me/stumbling")
    assert "ranker.safetensors" in hub.files("me/stumbling")
    assert len(hub.repos["me/stumbling"].branches["main"]) == 2


def test_revisions_subfolders_and_pull_requests(hub, client, model_folder, encoder_model_folder, expected):
    push(client, model_folder, "me/branches")
    first = hub.repos["me/branches"].commit("main").sha
    push(client, encoder_model_folder, "me/branches", revision="next")
    assert "tokenizer.json" in hub.files("me/branches", "next")
    assert "tokenizer.json" not in hub.files("me/branches")
    assert load(client, "me/branches") == load(client, "me/branches", revision=first) == expected
    assert load(client, "me/branches", revision="next") != expected
    _, url = push(client, encoder_model_folder, "me/branches", create_pr=True)
    assert url.endswith("/me/branches/discussions/1") and "tokenizer.json" in hub.files("me/branches", "refs/pr/1")
    assert_same_tags(*(load(client, "me/branches", revision=name) for name in ("refs/pr/1", "next")))
    repo = hub.add("me/nested", model_folder)
    commit = repo.branches["main"][-1]
    commit.files = {f"some/where/{name}": data for name, data in commit.files.items()}
    assert load(client, "me/nested", subfolder="some/where") == expected


def test_parts_of_an_earlier_model_do_not_stay(
    hub, client, model_folder, vector_model_folder, parts_model_folder, expected
):
    parts = {"label_vectors.safetensors", "knn.safetensors", "scorer.json"}
    push(client, parts_model_folder, "me/replaced")
    assert parts <= hub.files("me/replaced").keys()
    push(client, vector_model_folder, "me/replaced")
    assert parts - {path.name for path in vector_model_folder.iterdir()}
    assert parts & hub.files("me/replaced").keys() <= {path.name for path in vector_model_folder.iterdir()}
    assert "tfidf.safetensors" not in hub.files("me/replaced")
    push(client, model_folder, "me/replaced", max_shard_size="20KB")
    shards = [name for name in hub.files("me/replaced") if name.startswith("ranker")]
    assert len(shards) > 2 and "ranker.safetensors.index.json" in shards and "ranker.safetensors" not in shards
    assert load(client, "me/replaced") == expected
    push(client, model_folder, "me/replaced", self_contained=False)
    assert [name for name in hub.files("me/replaced") if name.startswith("ranker")] == ["ranker.safetensors"]
    assert not [name for name in hub.files("me/replaced") if name.endswith(".py")]
    assert "auto_map" not in json.loads(hub.files("me/replaced")["config.json"])
    assert load(client, "me/replaced") == expected
    push(client, vector_model_folder, "me/replaced")
    assert not {"tfidf.safetensors", "tfidf_vocab.txt"} & hub.files("me/replaced").keys()


def test_ensembles(hub, client, ensemble_folder, model_folder, tmp_path):
    repo = hub.add("me/ensemble", model_folder)  # a single model was there before
    commits = len(repo.branches["main"])
    folder = shutil.copytree(ensemble_folder, tmp_path / "three")
    members = ("member-1", "member-2", "member-3")
    for name in members:
        shutil.copyfile(model_folder / "training_args.json", folder / name / "training_args.json")
    arguments = json.loads((folder / "member-3" / "training_args.json").read_text())
    (folder / "member-3" / "training_args.json").write_text(json.dumps({**arguments, "encoder_name": str(tmp_path)}))
    (folder / "ensemble.json").write_text(json.dumps({"models": [str(tmp_path / "a"), "me/b", "me/c"]}))
    (folder / "member-4").mkdir()  # left over from a larger one
    (folder / "member-4" / "labels.json").write_text("{}")
    code, _, error = command(client, "push", folder, "me/ensemble", "--license", "mit")
    assert code == 0, error
    assert len(repo.branches["main"]) == commits + 1
    files = hub.files("me/ensemble")
    for name in members:
        assert {f"{name}/{part}" for part in PARTS} <= files.keys()
        assert not {"auto_map", "custom_pipelines"} & json.loads(files[f"{name}/config.json"]).keys()
    assert "member-3/tokenizer.json" in files and "pipeline_xmc.py" in files
    assert not [name for name in files if name.startswith("member-") and name.endswith(".py")]
    assert not {*PARTS, "member-4/labels.json"} & files.keys()
    assert json.loads(files["config.json"])["auto_map"]["AutoModel"] == "pipeline_xmc.XMCEnsemble"
    texts = "".join(data.decode() for name, data in files.items() if name.endswith((".json", ".md")))
    assert str(tmp_path.parent) not in texts and str(model_folder.parent) not in texts
    assert "| models | 3," in files["README.md"].decode()
    assert_same_tags(tag_with(client, "me/ensemble"), XMCEnsemble.from_pretrained(folder).predict(TEXTS, top_k=3))
    # A smaller one in its place, from memory.
    smaller = """
from hf_xmc import XMCEnsemble
ensemble = XMCEnsemble.from_pretrained(name)
pair = XMCEnsemble.from_members(ensemble.models[:2], combine="ranks")
pair.push_to_hub(name, self_contained=False)
result = pair.predict(texts, top_k=3)
"""
    pair = client.run(smaller, name="me/ensemble", texts=TEXTS)
    assert_same_tags(tag_with(client, "me/ensemble"), pair)
    left = {name.partition("/")[0] for name in hub.files("me/ensemble") if "/" in name}
    assert left - {".eval_results"} == {"member-1", "member-2"}
    assert not [name for name in hub.files("me/ensemble") if name.endswith(".py") or name == "ensemble.json"]


def test_private_repositories_and_tokens(hub, client, linear, model_folder, expected, tmp_path):
    push(client, model_folder, "me/private", private=True)
    assert hub.repos["me/private"].private and not hub.repos[linear].private
    assert load(client, "me/private", token=TOKEN) == load(client, "me/private") == expected
    assert TOKEN in hub.tokens_seen
    with pytest.raises(RuntimeError, match=r"(?s)me/private.*hf auth login"):
        load(client, "me/private", token="hf_of_somebody_else", cache_dir=str(tmp_path))
    for name in ("me/private", "you/new"):
        with pytest.raises(RuntimeError, match=rf"(?s)OSError.*{name}.*`token`"):
            push(client, model_folder, name, token="hf_of_somebody_else")
    hub.add("me/gated", model_folder, gated=True)
    with pytest.raises(RuntimeError, match=r"(?s)me/gated.*(gated|restricted)"):
        load(client, "me/gated", token="hf_of_somebody_else")


def test_missing_and_foreign_files(hub, client, linear, model_folder, tmp_path):
    refused("me/nowhere", load, client, "me/nowhere", error=RuntimeError)
    refused("no-branch", load, client, linear, revision="no-branch", error=RuntimeError)
    for name in ("config.json", "label_tree.safetensors", "ranker.safetensors"):
        commit = hub.add("me/incomplete", model_folder).branches["main"][-1]
        del commit.files[name]
        with pytest.raises(RuntimeError, match=rf"OSError(?s:.*)me/incomplete(?s:.*){name}"):
            load(client, "me/incomplete", revision=commit.sha)
    folder = shutil.copytree(model_folder, tmp_path / "model")
    LabelTree.flat(60).save_pretrained(folder)
    hub.add("me/mixed", folder)
    refused("ValueError", load, client, "me/mixed", error=RuntimeError)


def test_pickles_and_private_files_stay_here(hub, client, model_folder, tmp_path):
    import torch

    folder = shutil.copytree(model_folder, tmp_path / "model")
    torch.save({"a": 1}, folder / "training_args.bin")
    (folder / "notes.dat").write_bytes(b"")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").write_bytes(b"")
    (folder / ".cache").write_text("")
    (folder / "notes.txt").write_text("mine")
    code, out, error = command(client, "push", folder, "me/clean", "--license", "mit", "--message", "first")
    assert code == 0 and "/me/clean/commit/" in out
    # The process of the client writes its log, with the warning, to a file.
    assert "training_args.bin" in error + client.log.read_text()
    files = hub.files("me/clean")
    assert "notes.txt" in files and "pipeline_xmc.py" in files
    assert not {"training_args.bin", "notes.dat", ".cache", "checkpoint-5/model.safetensors"} & files.keys()
    card = files["README.md"].decode()
    assert "license: mit" in card and 'model="me/clean"' in card
    assert hub.repos["me/clean"].branches["main"][-1].title == "first"
    texts = "".join(data.decode() for name, data in files.items() if name.endswith((".json", ".md")))
    assert str(tmp_path) not in texts


def test_commands_explain_what_is_wrong(client, model_folder, tiny_encoder, tmp_path):
    code, _, error = command(client, "push", tmp_path, "me/none")
    assert code == 1 and "config.json" in error and "Traceback" not in error
    for argv in (("push", tiny_encoder, "me/none"), ("export", tiny_encoder, tmp_path / "copy")):
        code, _, error = command(client, *argv)
        assert code == 1 and "'bert'" in error
    assert not (tmp_path / "copy").exists()
    code, _, error = command(client, "push", model_folder, "you/other", "--token", "hf_wrong")
    assert code == 1 and "you/other" in error


def test_push_a_dataset(hub, client, tmp_path):
    for name, count in (("train", 40), ("test", 10)):
        make_documents(count, seed=count).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "labels.csv").write_text("label,text\nlabel 07,seven\n")
    argv = ("push-dataset", tmp_path, "me/topics", "--label-texts", "--license", "cc0-1.0", "--language", "en")
    code, _, error = command(client, *argv)
    assert code == 0, error
    files = hub.files("datasets/me/topics")
    data = {f"data/{name}-00000-of-00001.parquet" for name in ("train", "test")}
    assert files.keys() == {*data, "labels.parquet", "README.md"}
    with hub.watched() as requests:
        assert command(client, *argv)[0] == 0
    assert not [request for request in requests if request.startswith("PUT") or "/commit/" in request]
    code, out, error = command(client, "push-dataset", tmp_path, "me/reviewed", "--create-pr")
    assert code == 0 and "/me/reviewed/discussions/1" in out, error
    assert not hub.files("datasets/me/reviewed")
    assert hub.files("datasets/me/reviewed", "refs/pr/1").keys() == files.keys()
    card = files["README.md"].decode()
    assert "license: cc0-1.0" in card and "| `test` | 10 |" in card and "configs:" in card
    read = """
from datasets import load_dataset
from hf_xmc import load_label_texts, load_xmc_dataset
data = load_dataset("me/topics")
assert load_xmc_dataset("me/topics")["train"][:] == data["train"][:]
errors = []
for name in ("me/none", "no/such/folder"):
    try:
        load_label_texts(name)
    except FileNotFoundError as error:
        errors.append(str(error))
result = [data["train"][:], data["test"][:], sorted(data), load_label_texts("me/topics")["label 07"], errors]
"""
    train, test, names, text, errors = client.run(read)
    assert text == "seven" and "me/none" in errors[0] and "no/such/folder" in errors[1]
    assert names == ["test", "train"]
    assert train == make_documents(40, seed=40)[:] and test == make_documents(10, seed=10)[:]


def test_every_save_uploads_the_whole_model(hub, client, tiny_encoder, tmp_path):
    make_documents(96).to_parquet(tmp_path / "train.parquet")
    code = """
import os
from datasets import Dataset
from hf_xmc import XMCTrainer, XMCTrainingArguments
args = XMCTrainingArguments(**options)
trainer = XMCTrainer(encoder, args, Dataset.from_parquet(data))
trainer.train()
trainer._finish_current_push()
held = [name for name in os.listdir(args.output_dir) if name.startswith("_push")]
trainer.push_to_hub(license="mit")
result = held
"""
    options: dict = {"output_dir": str(tmp_path / "out"), "method": "xr-transformer", "encoder_max_length": 16}
    options |= {"level_indices": [1, 2, 3], "level_steps": [2], "save_steps": 2, "save_total_limit": 1}
    options |= {**THREE_LEVELS, "num_threads": 1, "use_cpu": True}
    options |= {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_always_push": True, "disable_tqdm": True}
    options |= {"hub_model_id": "me/every-save"}
    held = client.run(code, options=options, encoder=str(tiny_encoder), data=str(tmp_path / "train.parquet"))
    assert held == []
    commits = hub.repos["me/every-save"].branches["main"]
    saves = [commit for commit in commits if "Training in progress" in commit.title]
    # One commit of the model and one of the checkpoint for each save.
    assert [commit.title[-6:] for commit in saves[::2]] == ["step 2", "step 4", "step 6"]
    copies = {name.partition("/")[2] for name in saves[-1].files if name.startswith("last-checkpoint/")}
    assert {"checkpoint.json", "trainer_state.json", "optimizer.safetensors", "config.json"} < copies
    for commit in saves:
        assert {"labels.json", "label_tree.safetensors", "tfidf.safetensors", "tokenizer.json"} < commit.files.keys()
        assert not [name for name in commit.files if name.startswith(("optimizer", "random_state", "checkpoint"))]
    files = hub.files("me/every-save")
    assert "ranker.safetensors" in files and "license: mit" in files["README.md"].decode()
    assert str(tiny_encoder) not in files["config.json"].decode() + files["training_args.json"].decode()
    assert len(load(client, "me/every-save")) == len(TEXTS)


@pytest.mark.slow
def test_without_network(hub, client, linear, home, model_folder, expected, tmp_path):
    # The cache of the client contains the model; this process has no connection to the Hub.
    environment = {**hub.environment(home), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    load(client, linear)
    offline = Worker(environment, tmp_path / "log")
    try:
        assert load(offline, linear) == load(offline, model_folder) == expected
        tagged = "import hf_xmc; result = hf_xmc.pipeline('me/linear')(texts[0], top_k=3)"
        assert [entry["label"] for entry in offline.run(tagged, texts=TEXTS)] == [label for label, _ in expected[0]]
        refused("couldn't connect", load, offline, "me/never", error=RuntimeError)
        code, _, error = command(offline, "push", model_folder, linear)
        assert code == 1 and linear in error
    finally:
        offline.close()

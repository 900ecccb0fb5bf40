"""Damaged and hostile models are refused with an error that names the file, before a compiled loop reads an array."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import refused
from safetensors.numpy import load_file, save_file
from transformers import AutoModel

from hf_xmc import XMCForTextClassification
from hf_xmc.checks import CheckedFile
from hf_xmc.loading import verify_files
from hf_xmc.serialization import load_tensors, save_tensors
from hf_xmc.tfidf import TfidfFeaturizer

KINDS = {"ranker": "linear ranker", "tfidf": "tfidf", "label_tree": "label tree", "label_vectors": "label vectors"}


@pytest.fixture
def folder(model_folder, tmp_path):
    """A copy of a linear model."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture
def encoder_folder(encoder_model_folder, tmp_path):
    """A copy of a model with an encoder."""
    return Path(shutil.copytree(encoder_model_folder, tmp_path / "model"))


def damage(folder, file, name, change):
    """Changes one array of a file."""
    path = folder / f"{file}.safetensors"
    tensors, metadata = load_tensors(path, KINDS[file])
    tensors = {key: array.copy() for key, array in tensors.items()}
    metadata = {key: value for key, value in metadata.items() if key not in ("format", "hf_xmc")}
    tensors[name] = change(tensors[name])
    save_tensors(path, tensors, KINDS[file], metadata)


def put(position, value, dtype=None):
    """A change that writes a value."""

    def change(array):
        view = array.reshape(-1) if dtype is None else array.reshape(-1).view(dtype)
        view[position] = value
        return array

    return change


DAMAGES = [
    ("ranker", "row_begin", put(1, 10**9)),
    ("ranker", "row_begin", put(1, -5)),
    ("ranker", "row_begin", put(-1, 1)),
    ("ranker", "row_begin", lambda array: array[:-1]),
    ("ranker", "row_begin", lambda array: array.astype(np.int32)),
    ("ranker", "bucket_begin", put(1, 3)),
    ("ranker", "bucket_begin", put(1, 1 << 62)),
    ("ranker", "buckets", put(2, 1 << 30)),
    ("ranker", "buckets", put(1, -1)),
    ("ranker", "buckets", put(0, 1)),
    ("ranker", "records", put(0, 10**8, np.int32)),
    ("ranker", "records", put(0, -1, np.int32)),
    ("ranker", "records", put(1, np.nan, np.float32)),
    ("ranker", "records", lambda array: array[:, :-1]),
    ("ranker", "dense", put(3, np.inf)),
    ("ranker", "dense", put(3, 1e30)),
    ("ranker", "dense", lambda array: array[1:]),
    ("tfidf", "idf", put(0, np.inf)),
    ("tfidf", "idf", put(0, 0.0)),
    ("tfidf", "idf", put(0, -1.0)),
    ("tfidf", "idf", lambda array: array[:-1]),
    ("label_tree", "leaf_labels", put(0, 60)),
    ("label_tree", "leaf_labels", put(0, -1)),
    ("label_tree", "child_offsets.1", put(-1, 1 << 40)),
]


@pytest.mark.parametrize(("file", "name", "change"), DAMAGES)
def test_damaged_arrays_are_named(folder, file, name, change):
    damage(folder, file, name, change)
    with pytest.raises(ValueError, match=f"{file}.safetensors") as raised:
        AutoModel.from_pretrained(folder)
    assert name[:6] in str(raised.value)


@pytest.mark.parametrize("file", ["ranker", "label_tree", "tfidf"])
def test_all_of_a_file_is_needed(folder, file):
    path, load = folder / f"{file}.safetensors", XMCForTextClassification.from_pretrained
    whole, (tensors, metadata) = path.read_bytes(), load_tensors(path, KINDS[file])
    tensors = {name: array.copy() for name, array in tensors.items()}
    metadata = {name: value for name, value in metadata.items() if name not in ("format", "hf_xmc")}
    # Rankers of earlier versions have no first level.
    for name in {*tensors, *metadata} - {"first_level", "vocabulary_crc32"}:
        rest, others = ({key: part[key] for key in part if key != name} for part in (tensors, metadata))
        save_tensors(path, rest, KINDS[file], others)
        refused(f"{path.name}.*{name}", load, folder)
    if file == "ranker":
        save_tensors(path, {**tensors, "more": np.ones(1)}, KINDS[file], metadata)
        refused(path.name, load, folder)
    save_file({"weight": np.ones(3)}, path, {"format": "pt"})
    refused(path.name, load, folder)
    path.write_bytes(whole[:-8])
    refused(path.name, load, folder)
    path.unlink()
    refused(path.name, load, folder, error=OSError)


def test_a_position_is_named(folder):
    damage(folder, "ranker", "dense", put(16 * 2 + 5, np.nan))
    refused(r"`dense`.*nan.*2, 5", AutoModel.from_pretrained, folder)


@pytest.mark.parametrize("size", [10, 3_000_000])  # one task, several
def test_the_first_fault_of_all_threads(tmp_path, size):
    values = np.arange(size, dtype=np.int64)
    values[[size - 3, size - 2]] = -1
    file = CheckedFile("a file", {"ids": values, "offsets": values}, {})
    refused(f"position {size - 3}", file.ids, "ids", np.int64, size, size)
    refused(f"position {size - 3}", file.offsets, "offsets", None, None)


def test_offsets_whose_differences_overflow():
    offsets = np.array([0, (1 << 63) - 1, -5, 10], dtype=np.int64)
    assert (np.diff(offsets) > 0).all()
    with pytest.raises(ValueError, match="offsets"):
        CheckedFile("a file", {"offsets": offsets}, {}).offsets("offsets", 4, 10)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_are_not_finite(dtype, value):
    weights = np.ones((2000, 3), dtype=dtype)
    file = CheckedFile("a file", {"weights": weights}, {})
    assert file.weights("weights", dtype, 2000, None) is weights
    weights[1500, 1] = value
    refused(r"weights.*1500, 1", file.weights, "weights", dtype, 2000, None)


def edit_json(path, **fields):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **fields}))


CONFIGS = [
    {"top_k": 0}, {"top_k": "ten"}, {"beam_size": -1}, {"level_sizes": [60]}, {"level_sizes": "abc"},
    {"pooling": "max"}, {"predict_with": 3}, {"vector_power": float("nan")}, {"has_tfidf": "yes"}, {"parts": [1]},
    {"encoder_config": 5}, {"head_levels": [7]},
]  # fmt: skip


@pytest.mark.parametrize("fields", CONFIGS)
def test_configurations_that_no_model_has(folder, fields):
    edit_json(folder / "config.json", **fields)
    refused(f"config.json|{next(iter(fields))}", XMCForTextClassification.from_pretrained, folder)


@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": 10**7}, {"_attn_implementation": "someone/kernels"}, {"vocab_size": 10**9}]
)
def test_encoders_that_do_not_fit_their_weights(encoder_folder, fields):
    path = encoder_folder / "config.json"
    edit_json(path, encoder_config={**json.loads(path.read_text())["encoder_config"], **fields})
    refused("config.json", XMCForTextClassification.from_pretrained, encoder_folder)


@pytest.mark.parametrize(
    ("field", "tensor"),
    [("max_position_embeddings", "position_embeddings"), ("intermediate_size", "dense"), ("vocab_size", "word_embed")],
)
def test_encoders_that_are_larger_than_their_weights(encoder_folder, field, tensor):
    path = encoder_folder / "config.json"
    encoder = json.loads(path.read_text())["encoder_config"]
    edit_json(path, encoder_config={**encoder, field: 10**6})
    # Said before the memory is allocated, unlike the error of transformers about shapes.
    refused(f"config.json.*{tensor}.*32000000 numbers", XMCForTextClassification.from_pretrained, encoder_folder)


def test_weights_that_are_missing_or_damaged(encoder_folder):
    path = encoder_folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("encoder."))
    save_file({key: value for key, value in tensors.items() if key != name}, path, {"format": "pt"})
    refused(f"model.safetensors.*{name}", XMCForTextClassification.from_pretrained, encoder_folder)
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, path, {"format": "pt"})
    refused(f"model.safetensors.*{name}", XMCForTextClassification.from_pretrained, encoder_folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", 3])
@pytest.mark.parametrize("index", ["ranker", "model"])
def test_shards_outside_of_the_folder(folder, index, name):
    (folder / f"{index}.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / f"{index}.safetensors.index.json").write_text(json.dumps({"weight_map": {"records": name}}))
    refused(f"{index}.safetensors.index.json", XMCForTextClassification.from_pretrained, folder)


@pytest.mark.parametrize("name", ["..", "../..", "/", "member-1/../..", ".", None])
def test_members_outside_of_the_folder(ensemble_folder, tmp_path, name):
    copy = Path(shutil.copytree(ensemble_folder, tmp_path / "ensemble"))
    members = json.loads((copy / "config.json").read_text())["members"]
    edit_json(copy / "config.json", members=[] if name is None else [name, *members[1:]])
    refused("config.json", AutoModel.from_pretrained, copy)


@pytest.mark.parametrize("name", ["ranker.safetensors", "model.safetensors", "labels.json", "config.json"])
def test_links_out_of_the_folder(folder, name):
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    refused(name, XMCForTextClassification.from_pretrained, folder)


def test_links_of_the_cache_of_the_hub(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--me--tagger" / "snapshots" / "abc", tmp_path / "models--me--tagger" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(folder.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert XMCForTextClassification.from_pretrained(snapshot).predict(["topic07"], top_k=1)[0]


def test_pickles_are_not_loaded(encoder_folder, tiny_encoder, tmp_path):
    model = XMCForTextClassification.from_pretrained(encoder_folder)
    torch.save(model.state_dict(), encoder_folder / "pytorch_model.bin")
    (encoder_folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="pytorch_model.bin.*use_safetensors"):
        XMCForTextClassification.from_pretrained(encoder_folder)
    loaded = XMCForTextClassification.from_pretrained(encoder_folder, use_safetensors=False)
    assert loaded.predict(["topic07"]) == model.predict(["topic07"])
    encoder = Path(shutil.copytree(tiny_encoder, tmp_path / "encoder"))
    weights = {name: torch.from_numpy(array) for name, array in load_file(encoder / "model.safetensors").items()}
    torch.save(weights, encoder / "pytorch_model.bin")
    (encoder / "model.safetensors").unlink()
    refused("pytorch_model.bin", XMCForTextClassification.from_encoder, encoder, max_length=32, error=OSError)
    XMCForTextClassification.from_encoder(encoder, max_length=32, hub_kwargs={"use_safetensors": False})


def test_verify(folder):
    assert verify_files(folder) >= 5
    XMCForTextClassification.from_pretrained(folder, verify=True)
    labels = folder / "labels.json"
    labels.write_text(labels.read_text().replace("label 07", "label XX"))
    XMCForTextClassification.from_pretrained(folder)
    refused("labels.json", XMCForTextClassification.from_pretrained, folder, verify=True)
    # A model that is saved again has new checksums.
    XMCForTextClassification.from_pretrained(folder).save_pretrained(folder)
    AutoModel.from_pretrained(folder, verify=True)
    (folder / "training_record.json").unlink()
    refused("training_record.json", XMCForTextClassification.from_pretrained, folder, verify=True)


def test_verify_command(folder, capsys):
    from hf_xmc.cli.main import main

    assert main(["verify", str(folder)]) == 0
    assert "checksums" in capsys.readouterr().out
    (folder / "tfidf_vocab.txt").write_text("other\n")
    assert main(["verify", str(folder)]) == 1
    assert "tfidf_vocab.txt" in capsys.readouterr().err


def test_limits_of_arguments(model_folder):
    model = XMCForTextClassification.from_pretrained(model_folder)
    assert len(model.predict(["topic07"], top_k=10**9)[0]) == 60
    for name, value in [("top_k", 2.5), ("top_k", "5"), ("top_k", True), ("batch_size", "x"), ("num_threads", 1.0)]:
        refused(name, model.predict, ["topic07"], error=TypeError, **{name: value})
    refused("documents", model.predict, b"topic07", error=TypeError)
    for documents in (None, 5, {"a": 1}, (text for text in ["topic07"])):
        refused("`documents`", model.predict, documents, error=TypeError)
    refused(r"documents\[1\]", model.predict, ["topic07", b"topic08"], error=TypeError)
    import hf_xmc

    tag = hf_xmc.pipeline(str(model_folder))
    refused("threshold", tag, "topic07", threshold=float("nan"))
    wrong = [("threshold", "0.5"), ("threshold", True), ("top_k", 1.5), ("beam_size", "x"), ("with_parents", "no")]
    for name, value in wrong:
        refused(name, tag, "topic07", error=TypeError, **{name: value})
    refused("batch_size", tag, ["topic07", "topic08"], batch_size="x", error=TypeError)
    refused("bytes", tag, b"topic07", error=TypeError)


@pytest.mark.parametrize("value", [b"label 07", 7, True, [7], [b"label 07"], [None], [["label 07"]], [float("nan")]])
@pytest.mark.parametrize("name", ["labels", "exclude", "under"])
def test_wrong_types_of_restrictions(model_folder, name, value):
    model = XMCForTextClassification.from_pretrained(model_folder)
    refused(f"`{name}", model.predict, ["topic07"], error=TypeError, **{name: value})


def test_settings_of_tfidf_that_would_need_too_much_memory(tmp_path):
    TfidfFeaturizer(min_df=1).fit(["solar energy"]).save_pretrained(tmp_path)
    tensors, metadata = load_tensors(tmp_path / "tfidf.safetensors", "tfidf")
    for name, value in [("ngram_range", [1, 10**9]), ("power", 1000.0), ("lead_words", 10**30), ("lead_weight", "x")]:
        settings = json.dumps({**json.loads(metadata["settings"]), name: value})
        changed = {"settings": settings, "vocabulary_crc32": metadata["vocabulary_crc32"]}
        save_tensors(tmp_path / "tfidf.safetensors", tensors, "tfidf", changed)
        refused("tfidf.safetensors", TfidfFeaturizer.from_pretrained, tmp_path)


@pytest.mark.slow
def test_a_long_text_needs_bounded_memory(encoder_model_folder):
    import resource

    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = "topic07 word03 " * (50_000_000 // 15)
    assert model.predict([text], top_k=1)[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # 1 GB

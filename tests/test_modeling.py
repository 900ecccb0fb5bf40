"""Tests of hf_xmc.modeling_xmc."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import make_documents, refused
from safetensors.numpy import load_file
from scipy.sparse import csr_matrix
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_xmc import Features, Labels, TfidfFeaturizer, XMCConfig, XMCForTextClassification

FILES = {
    "config.json",
    "label_tree.safetensors",
    "label_vectors.safetensors",
    "labels.json",
    "model.safetensors",
    "ranker.safetensors",
    "scorer.json",
    "tfidf.safetensors",
    "tfidf_vocab.txt",
}


@pytest.fixture
def model(model_folder):
    return XMCForTextClassification.from_pretrained(model_folder)


@pytest.fixture
def copied(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "copy")


def test_predict_names_the_labels(model):
    (first, second) = model.predict(["topic07 word1 topic31", "topic59"], top_k=3)
    assert {label for label, _ in first[:2]} == {"label 07", "label 31"}
    assert second[0][0] == "label 59"
    assert len(first) == len(second) == 3
    scores = [score for _, score in first]
    assert scores == sorted(scores, reverse=True) and all(0 <= score <= 1 for score in scores)


def test_forward_gives_tensors(model):
    output = model(model.featurize(["topic07", "topic31", ""]), top_k=4)
    assert output.scores.shape == output.indices.shape == (3, 4)
    assert output.scores.dtype == torch.float32 and output.indices.dtype == torch.int64
    assert model.labels[int(output.indices[0, 0])] == "label 07"
    assert model(model.featurize(["topic07"])).scores.shape == (1, model.config.top_k)


def test_batches_and_chunks_change_nothing(model, monkeypatch):
    texts = make_documents(50, seed=5)["text"][:]
    expected = [model.predict([text])[0] for text in texts]
    assert model.predict(texts) == model.predict(texts, batch_size=7) == expected
    monkeypatch.setattr("hf_xmc.modeling_utils.PREDICT_CHUNK", 7)
    assert model.predict(texts) == model.predict(texts, batch_size=9) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("predict_with", ["ranker", "heads", "both"])
def test_prediction_in_half_precision(encoder_model_folder, tmp_path, dtype, predict_with):
    texts = make_documents(30, seed=5)["text"][:]
    exact = XMCForTextClassification.from_pretrained(encoder_model_folder)
    loaded = XMCForTextClassification.from_pretrained(encoder_model_folder, dtype=dtype)
    cast = XMCForTextClassification.from_pretrained(encoder_model_folder).to(dtype)
    cast.save_pretrained(tmp_path)
    options = {"top_k": 60, "beam_size": 0, "predict_with": predict_with}
    expected = [dict(row) for row in exact.predict(texts, **options)]
    for model in (loaded, cast, XMCForTextClassification.from_pretrained(tmp_path)):
        assert model.dtype == dtype and {parameter.dtype for parameter in model.heads.parameters()} == {torch.float32}
        assert all(torch.equal(*pair) for pair in zip(model.heads.parameters(), exact.heads.parameters(), strict=True))
        assert model.embed(texts).dtype == np.float32
        for row, scores in zip(model.predict(texts, **options), expected, strict=True):
            for label, score in row:
                assert score == pytest.approx(scores.get(label, 0), abs=0.03)


def test_predict_takes_features_and_matrices(model):
    texts = ["topic07 word3", "topic31"]
    matrix = model.tfidf.transform(texts)
    expected = model.predict(texts)
    for documents in (matrix, 5 * matrix, Features(matrix)):
        got = model.predict(documents)
        assert [[label for label, _ in row] for row in got] == [[label for label, _ in row] for row in expected]


def test_empty_and_unknown_texts_are_ranked_by_bias(model):
    empty, blank, unknown = model.predict(["", " \n", "never seen before"], top_k=5)
    assert empty == blank == unknown and len(empty) == 5


def test_bad_input(model):
    refused("documents", model.predict, "topic07", error=TypeError)
    refused(r"documents\[1\].*NoneType", model.predict, ["topic07", None], error=TypeError)
    refused("top_k", model.predict, ["topic07"], top_k=0)
    refused("batch_size", model.predict, ["topic07"], batch_size=0)
    refused("3 sparse", model.predict, csr_matrix(np.eye(3, dtype=np.float32)))


def test_files_and_round_trip(model, model_folder, tmp_path):
    assert FILES < {path.name for path in model_folder.iterdir()}
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    for name in ("labels.json", "tfidf_vocab.txt"):
        assert (tmp_path / name).read_bytes() == (model_folder / name).read_bytes()
    for name in (name for name in FILES if name.endswith(".safetensors")):
        saved, original = load_file(tmp_path / name), load_file(model_folder / name)
        assert saved.keys() == original.keys()
        assert all(saved[key].tobytes() == original[key].tobytes() for key in saved)
    again = XMCForTextClassification.from_pretrained(tmp_path)
    texts = make_documents(20, seed=6)["text"][:]
    assert again.predict(texts) == model.predict(texts)


def test_saving_onto_the_folder_it_was_loaded_from(copied):
    model = XMCForTextClassification.from_pretrained(copied)
    expected = model.predict(["topic07 topic31"])
    model.config.top_k = 4
    model.save_pretrained(copied)
    assert model.predict(["topic07 topic31"], top_k=10) == expected
    again = XMCForTextClassification.from_pretrained(copied)
    assert again.predict(["topic07 topic31"]) == [expected[0][:4]]


def test_auto_classes(model_folder):
    for auto_class in (AutoModel, AutoModelForSequenceClassification):
        model = auto_class.from_pretrained(model_folder)
        assert type(model) is XMCForTextClassification
        assert model.predict(["topic07"])[0][0][0] == "label 07"


def test_options_of_from_pretrained(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "sub" / "folder")
    model, info = XMCForTextClassification.from_pretrained(
        tmp_path, subfolder="sub/folder", output_loading_info=True, dtype=torch.bfloat16
    )
    assert not info["missing_keys"]
    assert model.dtype == torch.bfloat16
    assert float(model.anchor) == 1 and not model.anchor.requires_grad
    assert model.predict(["topic07"])[0][0][0] == "label 07"


def test_an_unsaved_model_predicts(model):
    made = XMCForTextClassification(XMCConfig(), model.labels, tfidf=model.tfidf, ranker=model.ranker)
    assert made.label_tree is model.label_tree
    assert made.predict(["topic07"]) == model.predict(["topic07"], predict_with="ranker")


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    refused(name.replace(".", r"\."), XMCForTextClassification.from_pretrained, copied, error=OSError)


def other_sizes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "level_sizes": [3, 60]}))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda folder: Labels(["one", "two"]).save_pretrained(folder), "label names"),
        (lambda folder: TfidfFeaturizer(min_df=1).fit(["other words"]).save_pretrained(folder), "TF-IDF"),
        (other_sizes, "level_sizes"),
    ],
)
def test_parts_of_another_model(copied, change, message):
    change(copied)
    refused(message, XMCForTextClassification.from_pretrained, copied)


def test_a_vector_model_refuses_text(vector_model_folder):
    model = XMCForTextClassification.from_pretrained(vector_model_folder)
    assert model.tfidf is None
    (labels,) = model.predict(csr_matrix(([0.5], [31], [0, 1]), shape=(1, 60)), top_k=1)
    assert labels[0][0] == "31"
    refused("vectors", model.predict, ["topic31"])


def test_saving_a_vector_model_over_a_text_model(vector_model_folder, copied):
    model = XMCForTextClassification.from_pretrained(vector_model_folder)
    model.save_pretrained(copied)
    assert not (copied / "tfidf.safetensors").exists() and not (copied / "tfidf_vocab.txt").exists()
    assert XMCForTextClassification.from_pretrained(copied).tfidf is None


def test_all_files_of_a_model_are_as_readable_as_others(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "other").touch()
    assert {path.stat().st_mode for path in (tmp_path / "model").iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_saving_over_a_damaged_configuration(model, copied):
    (copied / "config.json").write_text("{")
    model.save_pretrained(copied)
    assert XMCForTextClassification.from_pretrained(copied).predict(["topic07"]) == model.predict(["topic07"])


def test_an_untrained_model():
    model = XMCForTextClassification(XMCConfig(), tfidf=TfidfFeaturizer(min_df=1).fit(["some words"]))
    refused("ranker", model.predict, ["some words"])
    refused("labels, label_tree, ranker", model.save_pretrained, "nowhere")

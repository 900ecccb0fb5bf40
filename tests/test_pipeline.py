"""Tests of hf_xmc.pipeline_xmc."""

import json
import multiprocessing

import pytest
from conftest import make_documents, refused
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset

import hf_xmc
from hf_xmc import ExtremeTextClassificationPipeline, XMCEnsemble, XMCForTextClassification
from hf_xmc.inference.corpus import PredictionArguments, predict_corpus
from hf_xmc.inference.predict import evaluate_model

TASK = hf_xmc.TASK


def tag_elsewhere(model, text):
    """What a new process does with a model it is given."""
    return pipeline("extreme-text-classification", model=model)(text, top_k=3)


@pytest.fixture(scope="module")
def tag(model_folder):
    return pipeline(TASK, model=str(model_folder), device="cpu")


@pytest.fixture(scope="module")
def texts():
    return make_documents(25, seed=7)["text"][:]


@pytest.fixture(scope="module")
def expected(tag, texts):
    rows = tag.model.predict(texts, top_k=3)
    return [[{"label": label, "score": score} for label, score in row] for row in rows]


def test_one_document(tag, texts, expected):
    assert isinstance(tag, ExtremeTextClassificationPipeline)
    assert tag(texts[0], top_k=3) == expected[0]
    assert tag({"text": texts[0], "id": 7}, top_k=3) == expected[0]
    assert len(tag(texts[0])) == 10


@pytest.mark.parametrize("batch_size", [1, 4, 25, 100])
def test_lists(tag, texts, expected, batch_size):
    assert tag(texts, top_k=3, batch_size=batch_size) == expected
    assert tag(tuple(texts), top_k=3, batch_size=batch_size) == expected
    assert tag([{"text": text} for text in texts], top_k=3, batch_size=batch_size) == expected
    assert tag([]) == []


def test_streams(tag, texts, expected):
    dataset = make_documents(25, seed=7)
    streams = [(text for text in texts), KeyDataset(dataset, "text"), iter(texts), dataset["text"], dataset]
    for stream in streams:
        assert list(tag(stream, top_k=3, batch_size=4)) == expected


def test_a_stream_is_read_as_it_is_used(tag, texts):
    read = []

    def stream():
        for text in texts:
            read.append(text)
            yield text

    results = iter(tag(stream(), batch_size=4))
    next(results)
    assert len(read) < len(texts)


@pytest.mark.parametrize("way", ["pipeline", "predict", "evaluate", "corpus", "ensemble"])
def test_the_batch_size_reaches_the_encoder(encoder_model_folder, tmp_path, way):
    model = XMCForTextClassification.from_pretrained(encoder_model_folder)
    dataset, sizes = make_documents(100, seed=7), []
    model.encoder.register_forward_hook(lambda *call: sizes.append(len(call[2]["input_ids"])), with_kwargs=True)
    if way == "pipeline":
        pipeline(TASK, model=model)(dataset["text"][:], batch_size=40)
    elif way == "predict":
        model.predict(dataset["text"][:], batch_size=40)
    elif way == "evaluate":
        evaluate_model(model, dataset, predict_with="heads", batch_size=40)
    elif way == "corpus":
        predict_corpus(model, [dataset], tmp_path / "out.jsonl", PredictionArguments(batch_size=40))
    else:
        XMCEnsemble.from_members([model, model]).predict(dataset["text"][:], batch_size=40)
    assert sizes == [40, 40, 20] * (2 if way == "ensemble" else 1)


def test_parameters_of_construction_and_call(model_folder, texts, expected):
    model = XMCForTextClassification.from_pretrained(model_folder)
    model.train()
    tag = pipeline(TASK, model=model, top_k=3, batch_size=8)
    assert not model.training
    assert tag(texts) == expected
    assert tag(texts, top_k=1) == [row[:1] for row in expected]
    (ranked,) = model.predict(texts[:1], top_k=3, predict_with="ranker")
    found = tag(texts[0], predict_with="ranker")
    assert [entry["label"] for entry in found] == [label for label, _ in ranked]
    assert [entry["score"] for entry in found] == pytest.approx([score for _, score in ranked], abs=1e-6)


def test_threshold(tag, texts, expected):
    threshold = expected[0][0]["score"]
    rows = tag(texts, top_k=3, threshold=threshold)
    assert rows == [[entry for entry in row if entry["score"] >= threshold] for row in expected]
    assert tag("", threshold=0.9) == []


def test_bad_input(tag, model_folder, tiny_encoder):
    refused("topk", pipeline, TASK, model=str(model_folder), topk=3, error=TypeError)
    refused(str(tiny_encoder), hf_xmc.pipeline, str(tiny_encoder))
    refused("topk", tag, "topic07", topk=3, error=TypeError)
    refused("NoneType", tag, [None], error=TypeError)
    refused("'title'", tag, {"title": "topic07"})
    refused("`top_k`", tag, "topic07", top_k=0)
    refused("`top_k`", pipeline, TASK, model=tag.model, top_k=0)  # before there is a text


def test_a_model_that_comes_from_another_process(model_folder, texts, expected):
    model = XMCForTextClassification.from_pretrained(model_folder)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(tag_elsewhere, (model, texts[0])) == expected[0]


def test_a_saved_pipeline_needs_no_remote_code(tag, tmp_path, texts, expected):
    tag.save_pretrained(tmp_path)
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    assert pipeline(TASK, model=str(tmp_path))(texts[0], top_k=3) == expected[0]

"""Tests of hf_xmc.training.embedding: tokens and vectors of datasets, and their cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import make_documents, make_vectors

from hf_xmc import XMCForTextClassification
from hf_xmc.parallel.runtime import Runtime
from hf_xmc.training.embedding import TokenCollator, embed_dataset, tokenize_dataset, tokens_digest

DOCUMENTS = make_documents(30, seed=5)


def make_model(folder, **options):
    return XMCForTextClassification.from_encoder(folder, **{"max_length": 10, **options}).eval()


@pytest.fixture
def model(tiny_encoder):
    return make_model(tiny_encoder)


@pytest.fixture
def encoder_calls(monkeypatch):
    """The documents that went through `embed`, call by call."""
    calls = []
    embed = XMCForTextClassification.embed
    monkeypatch.setattr(
        XMCForTextClassification,
        "embed",
        lambda self, rows, *rest: calls.append(len(rows)) or embed(self, rows, *rest),
    )
    return calls


# ---- Tokens ----


@pytest.mark.parametrize("long_text", ["truncate", "windows"])
def test_columns(tiny_encoder, long_text):
    model = make_model(tiny_encoder, max_length=8, long_text=long_text, max_windows=2)
    data = DOCUMENTS.add_column("more", list(range(30)))
    tokens = tokenize_dataset(model, data)
    expected = model.tokenize(data["text"][:])
    assert set(tokens.column_names) == {"token_ids", "length", "document"}
    assert tokens["token_ids"][:] == expected
    assert tokens["length"][:] == [len(windows[0]) for windows in expected]
    assert tokens["document"][:] == list(range(30))
    assert max(len(windows) for windows in expected) == (2 if long_text == "windows" else 1)


def test_rows_are_numbered_by_their_place(model):
    tokens = tokenize_dataset(model, DOCUMENTS.select([7, 3]))
    assert tokens["document"][:] == [0, 1]
    assert tokens["token_ids"][0] == model.tokenize([DOCUMENTS["text"][7]])[0]


def test_later_runs_find_tokens_on_disk(tiny_encoder, tmp_path, monkeypatch):
    DOCUMENTS.save_to_disk(tmp_path / "data")
    calls, kind = [], XMCForTextClassification
    tokenize = kind.tokenize
    monkeypatch.setattr(kind, "tokenize", lambda self, texts: calls.append(len(texts)) or tokenize(self, texts))

    def run(**options):
        calls.clear()
        data = DOCUMENTS.load_from_disk(str(tmp_path / "data"))
        lengths = tokenize_dataset(make_model(tiny_encoder, **options), data)["length"][:]
        return max(lengths), list(calls)

    assert run() == (10, [30])
    assert run() == (10, [])
    assert run(max_length=9) == (9, [30])
    assert run(long_text="head_tail") == (10, [30])
    assert run(pooling="cls") == (10, [])  # has nothing to do with tokens


def test_documents_without_text(model):
    with pytest.raises(ValueError, match="An encoder reads texts, but the dataset has only feature_ids"):
        tokenize_dataset(model, make_vectors(3))


def test_digest(tiny_encoder, model):
    tokens = tokenize_dataset(model, DOCUMENTS)
    digest = tokens_digest(tokens)
    assert tokens_digest(tokenize_dataset(model, make_documents(30, seed=5))) == digest
    windows = make_model(tiny_encoder, max_length=8, long_text="windows")
    longer = make_model(tiny_encoder, max_length=16)
    others = [
        tokens.select(range(29)),
        tokens.select([1, 0, *range(2, 30)]),
        tokenize_dataset(model, make_documents(30, seed=6)),
        tokenize_dataset(windows, DOCUMENTS),
        tokenize_dataset(longer, DOCUMENTS),
    ]
    assert len({digest, *map(tokens_digest, others)}) == 1 + len(others)


def test_digest_tells_windows_from_documents(model):
    features = tokenize_dataset(model, DOCUMENTS).features

    def digest(*documents):
        rows = {"token_ids": list(documents), "length": [1] * len(documents), "document": list(range(len(documents)))}
        return tokens_digest(DOCUMENTS.from_dict(rows, features=features))

    found = [
        digest([[5, 6, 7]]),
        digest([[5], [6, 7]]),
        digest([[5, 6], [7]]),
        digest([[5]], [[6, 7]]),
        digest([[5, 6]], [[7]]),
    ]
    assert len(set(found)) == len(found)


def test_a_batch_of_tokens(model):
    tokens = tokenize_dataset(model, DOCUMENTS)
    rows = [tokens[place] for place in (4, 9)]
    batch = TokenCollator(padding=6)(rows)
    assert batch["documents"].tolist() == [4, 9]
    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
        (window,) = row["token_ids"]
        assert ids.tolist() == window + [6] * (len(ids) - len(window))
        assert mask.tolist() == [1] * len(window) + [0] * (len(ids) - len(window))


def test_a_batch_holds_the_first_window_only(tiny_encoder):
    model = make_model(tiny_encoder, max_length=8, long_text="windows")
    tokens = tokenize_dataset(model, DOCUMENTS)
    row = next(row for row in tokens if len(row["token_ids"]) > 1)
    assert TokenCollator(0)([row])["input_ids"].tolist() == row["token_ids"][:1]


# ---- Vectors ----


@pytest.mark.parametrize("long_text", ["truncate", "windows"])
def test_vectors_are_those_of_the_texts(tiny_encoder, long_text):
    model = make_model(tiny_encoder, max_length=8, long_text=long_text)
    tokens = tokenize_dataset(model, DOCUMENTS)
    seen = []
    found = embed_dataset(model, tokens, 8, runtime=Runtime(progress=lambda *report: seen.append(report)))
    np.testing.assert_allclose(found, model.embed(DOCUMENTS["text"][:]), atol=1e-6)
    assert seen[-1] == ("embed", 30, 30)


def test_cached_vectors(model, tmp_path, encoder_calls):
    tokens = tokenize_dataset(model, DOCUMENTS)
    first = embed_dataset(model, tokens, 8, str(tmp_path / "cache"))
    again = embed_dataset(model, tokenize_dataset(model, make_documents(30, seed=5)), 5, str(tmp_path / "cache"))
    assert encoder_calls == [30]
    assert np.array_equal(first, again) and again.dtype == np.float32
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".safetensors"]
    embed_dataset(model, tokens, 8)
    assert encoder_calls == [30, 30]  # nothing is kept unless asked for


def change_weights(model):
    with torch.no_grad():
        model.encoder.get_parameter("encoder.layer.1.output.dense.bias")[3] += 1e-3


def change_pooling(model):
    model.config.pooling = "cls"


def change_layers(model):
    model.config.pooling_layers = 2


def change_precision(model):
    model.autocast_dtype = torch.bfloat16


@pytest.mark.parametrize("change", [change_weights, change_pooling, change_layers, change_precision])
def test_the_cache_knows_another_encoder(model, tmp_path, encoder_calls, change):
    tokens = tokenize_dataset(model, DOCUMENTS)
    before = embed_dataset(model, tokens, 8, str(tmp_path))
    change(model)
    after = embed_dataset(model, tokens, 8, str(tmp_path))
    assert encoder_calls == [30, 30]
    assert not np.array_equal(before, after)


def test_the_cache_knows_other_tokens(model, tmp_path, encoder_calls):
    for data in (DOCUMENTS, DOCUMENTS.select(range(29)), make_documents(30, seed=6)):
        embed_dataset(model, tokenize_dataset(model, data), 8, str(tmp_path))
    assert encoder_calls == [30, 29, 30]


def test_the_cache_takes_an_encoder_with_single_numbers(model, tmp_path, encoder_calls):
    model.encoder.register_buffer("scale", torch.tensor(2.0))
    tokens = tokenize_dataset(model, DOCUMENTS)
    for _ in range(2):
        embed_dataset(model, tokens, 8, str(tmp_path))
    assert encoder_calls == [30]

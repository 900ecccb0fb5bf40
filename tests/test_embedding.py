"""Tests of hf_xmc.training.embedding and level_data: tokens, batches and vectors of datasets."""

import numpy as np
import pytest
import torch
from conftest import make_documents, make_vectors, refused
from scipy.sparse import csr_matrix

from hf_xmc import XMCForTextClassification
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training.embedding import embed_dataset, tokenize_dataset, tokens_digest
from hf_xmc.training.level_data import LevelCollator, LevelData, pass_batches

DOCUMENTS = make_documents(30, seed=5)


def make_model(folder, **options):
    return XMCForTextClassification.from_encoder(folder, **{"max_length": 10, **options}).eval()


@pytest.fixture
def model(tiny_encoder):
    return make_model(tiny_encoder)


def count_calls(monkeypatch, name):
    """Numbers of documents that a method of the model was called with."""
    calls, method = [], getattr(XMCForTextClassification, name)
    monkeypatch.setattr(
        XMCForTextClassification, name, lambda self, rows, *rest: calls.append(len(rows)) or method(self, rows, *rest)
    )
    return calls


@pytest.fixture
def encoder_calls(monkeypatch):
    """Numbers of documents of the calls of `embed`."""
    return count_calls(monkeypatch, "embed")


# ---- Tokens ----


@pytest.mark.parametrize("long_text", ["truncate", "windows"])
def test_columns(tiny_encoder, long_text):
    model = make_model(tiny_encoder, max_length=8, long_text=long_text, max_windows=2)
    data = DOCUMENTS.add_column("more", list(range(30))).select([*range(29, -1, -1)])
    tokens = tokenize_dataset(model, data)
    expected = model.tokenize(data["text"][:])
    assert set(tokens.column_names) == {"token_ids", "length", "document"}
    assert tokens["token_ids"][:] == expected
    assert tokens["length"][:] == [len(windows[0]) for windows in expected]
    assert tokens["document"][:] == list(range(30))
    assert max(len(windows) for windows in expected) == (2 if long_text == "windows" else 1)


def test_tokens_are_cached_on_disk(tiny_encoder, tmp_path, monkeypatch):
    DOCUMENTS.save_to_disk(tmp_path / "data")
    calls = count_calls(monkeypatch, "tokenize")

    def run(**options):
        calls.clear()
        data = DOCUMENTS.load_from_disk(str(tmp_path / "data"))
        lengths = tokenize_dataset(make_model(tiny_encoder, **options), data)["length"][:]
        return max(lengths), list(calls)

    assert run() == (10, [30])
    assert run() == (10, [])
    assert run(max_length=9) == (9, [30])
    assert run(long_text="head_tail") == (10, [30])
    assert run(pooling="cls") == (10, [])  # does not change the tokens


def test_documents_without_text(model):
    refused("feature_ids", tokenize_dataset, model, make_vectors(3))


def test_digest(tiny_encoder, model):
    tokens = tokenize_dataset(model, DOCUMENTS)
    digest = tokens_digest(tokens)
    assert tokens_digest(tokenize_dataset(model, make_documents(30, seed=5))) == digest
    others = [
        tokens.select([1, 0, *range(2, 30)]),
        tokenize_dataset(model, make_documents(30, seed=6)),
        tokenize_dataset(make_model(tiny_encoder, max_length=8, long_text="windows"), DOCUMENTS),
    ]
    # The same tokens in other windows and documents.
    for documents in ([[[5, 6, 7]]], [[[5], [6, 7]]], [[[5, 6], [7]]], [[[5]], [[6, 7]]], [[[5, 6]], [[7]]]):
        rows = {"token_ids": documents, "length": [1] * len(documents), "document": list(range(len(documents)))}
        others.append(DOCUMENTS.from_dict(rows, features=tokens.features))
    assert len({digest, *map(tokens_digest, others)}) == 1 + len(others)


# ---- Batches ----


@pytest.mark.parametrize("joint", [False, True])
def test_a_batch_has_the_first_window_and_the_inputs_of_the_heads(tiny_encoder, joint):
    model = make_model(tiny_encoder, max_length=8, long_text="windows")
    tokens = tokenize_dataset(model, DOCUMENTS)
    rows = [tokens[place] for place in (4, 9)]
    assert any(len(row["token_ids"]) > 1 for row in rows)
    counts = csr_matrix(np.eye(30, 6, dtype=np.float32)[::-1])
    data = [LevelData(level, counts, np.array([0, 6])) for level in ((1, 2) if joint else (2,))]
    batch = LevelCollator(6, data, joint)(rows)
    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
        window = row["token_ids"][0]
        assert ids.tolist() == window + [6] * (len(ids) - len(window))
        assert mask.tolist() == [1] * len(window) + [0] * (len(ids) - len(window))
    parts = batch["levels"] if joint else [batch]
    for part, level in zip(parts, data, strict=True):
        assert part["level"] == level.level
        for name, expected in level.batch(np.array([4, 9])).items():
            assert np.array_equal(part[name].numpy(), expected)


@pytest.mark.parametrize("count", [64, 61])
def test_a_step_has_the_same_documents_in_any_number_of_processes(count):
    lengths = np.random.default_rng(0).integers(3, 20, count).tolist()

    def steps(batch_size, accumulation, processes, seed=0):
        parts = [
            pass_batches(lengths, batch_size, (4, accumulation), (index, processes), seed)
            for index in range(processes)
        ]
        assert {len(part) for part in parts} == {4 * accumulation}
        return [
            sorted(
                row
                for part in parts
                for batch in part[step * accumulation : (step + 1) * accumulation]
                for row in batch
            )
            for step in range(4)
        ]

    whole = steps(16, 1, 1)
    assert whole == steps(4, 2, 2) == steps(8, 1, 2) != steps(16, 1, 1, seed=1)
    assert sorted(row for step in whole for row in step) == list(range(count))
    assert steps(16, 1, 1, seed=None) == [list(range(start, min(start + 16, count))) for start in range(0, count, 16)]


def test_no_batch_is_empty():
    batches = [pass_batches([5] * 17, 4, (3, 1), (index, 2), 0) for index in range(2)]
    assert all(len(batch) >= 1 for part in batches for batch in part)


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
    assert encoder_calls == [30, 30]


def change_weights(model):
    with torch.no_grad():
        model.encoder.get_parameter("encoder.layer.1.output.dense.bias")[3] += 1e-3


CHANGES = {
    "weights": change_weights,
    "pooling": lambda model: setattr(model.config, "pooling", "cls"),
    "layers": lambda model: setattr(model.config, "pooling_layers", 2),
    "precision": lambda model: setattr(model, "autocast_dtype", torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_encoder_is_not_in_the_cache(model, tmp_path, encoder_calls, change):
    tokens = tokenize_dataset(model, DOCUMENTS)
    before = embed_dataset(model, tokens, 8, str(tmp_path))
    CHANGES[change](model)
    after = embed_dataset(model, tokens, 8, str(tmp_path))
    assert encoder_calls == [30, 30]
    assert not np.array_equal(before, after)


def test_other_tokens_are_not_in_the_cache(model, tmp_path, encoder_calls):
    for data in (DOCUMENTS, DOCUMENTS.select(range(29)), make_documents(30, seed=6)):
        embed_dataset(model, tokenize_dataset(model, data), 8, str(tmp_path))
    assert encoder_calls == [30, 29, 30]

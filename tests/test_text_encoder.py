"""Tests of hf_xmc.text_encoder, and of the model's `tokenize`, `encode` and `embed` that use it."""

import json

import numpy as np
import oracles
import pytest
import torch
from conftest import make_documents, make_tokenizer, refused
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, BertConfig, GPT2Config, T5Config, T5EncoderModel, T5Model, XLNetConfig

from hf_xmc import XMCConfig, XMCForTextClassification
from hf_xmc.text_encoder import (
    check_pooling_layers,
    default_pooling,
    load_encoder,
    make_encoder,
    pad_batch,
    padding_id,
    pool,
    position_limit,
    tokenize,
)

CLS, SEP, UNK = 2, 3, 1
TEXTS = [*make_documents(20, seed=3)["text"], "", "topic07", "word1 " * 40, "nothing known here"]


@pytest.fixture
def model(tiny_encoder):
    return XMCForTextClassification.from_encoder(tiny_encoder, max_length=16).eval()


# ---- Pooling ----


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("layers, padding", [(1, "right"), (3, "left")])
def test_pooling(pooling, layers, padding):
    lengths, tokens = [6, 1, 4, 2], 6
    mask = torch.tensor([[1] * length + [0] * (tokens - length) for length in lengths])
    mask = mask if padding == "right" else mask.flip(1)
    states = torch.randn(layers, len(lengths), tokens, 5, generator=torch.Generator().manual_seed(0))
    found = pool(tuple(states), mask, pooling)
    assert found.shape == (len(lengths), 5 * layers) and found.dtype == torch.float32
    for document in range(len(lengths)):
        expected = oracles.pooled(states[:, document].numpy(), mask[document].tolist(), pooling)
        np.testing.assert_allclose(found[document].numpy(), expected, atol=1e-6)


def test_vectors_are_float32_whatever_the_encoder_computes_in():
    states = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = pool((states,), torch.ones(2, 3, dtype=torch.long), "mean")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("pooling, layers", [("mean", 1), ("cls", 1), ("last", 2), ("mean", 3)])
def test_the_model_pools_the_last_layers(tiny_encoder, pooling, layers):
    model = XMCForTextClassification.from_encoder(tiny_encoder, pooling=pooling, pooling_layers=layers, max_length=16)
    model.eval()
    ids, mask = pad_batch([window for (window,) in model.tokenize(TEXTS[:5])], 0)
    with torch.no_grad():
        states = model.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        found = model.encode(ids, mask)
    assert found.shape == (5, model.vector_size) == (5, 32 * layers)
    for document in range(5):
        chosen = [layer[document].numpy() for layer in states[len(states) - layers :]]
        expected = oracles.pooled(chosen, mask[document].tolist(), pooling)
        np.testing.assert_allclose(found[document].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "encoder_config",
    [BertConfig(num_hidden_layers=2), GPT2Config(n_layer=2), T5Config(num_layers=2), XLNetConfig(n_layer=2)],
    ids=lambda config: config.model_type,
)
def test_more_pooling_layers_than_layers(encoder_config):
    check_pooling_layers(encoder_config, 3)  # the embeddings are a layer, too
    for layers in (4, 5):
        refused(f"pooling_layers.* {layers}.*2 layers", check_pooling_layers, encoder_config, layers)


def test_pooling_layers_are_checked_when_a_model_is_made(tiny_encoder):
    with pytest.raises(ValueError, match=f"pooling_layers.*{tiny_encoder}.*2 layers"):
        XMCForTextClassification.from_encoder(tiny_encoder, pooling_layers=5)
    config = XMCConfig(encoder_config=AutoConfig.from_pretrained(tiny_encoder), pooling_layers=5)
    refused("pooling_layers", XMCForTextClassification, config)


@pytest.mark.parametrize(
    "config, pooling",
    [(BertConfig(), "mean"), (GPT2Config(), "last"), (XLNetConfig(), "last"), (T5Config(), "mean")],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_default_pooling(config, pooling, tmp_path):
    assert default_pooling(tmp_path, config) == pooling


@pytest.mark.parametrize(
    "modes, pooling",
    [
        (["cls_token"], "cls"),
        (["lasttoken"], "last"),
        (["mean_tokens"], "mean"),
        ([], "last"),  # one that is not known here: what suits the encoder
    ],
    ids=str,
)
def test_a_sentence_transformers_model_names_its_pooling(modes, pooling, tmp_path):
    names = ["cls_token", "mean_tokens", "max_tokens", "lasttoken"]
    settings = {f"pooling_mode_{name}": name in (modes or ["max_tokens"]) for name in names}
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **settings}))
    assert default_pooling(tmp_path, GPT2Config()) == pooling


def test_the_encoder_has_no_pooler_of_its_own(tiny_encoder):
    config = AutoConfig.from_pretrained(tiny_encoder)
    loaded, new = load_encoder(tiny_encoder, config=config), make_encoder(config)
    assert loaded.pooler is None and new.pooler is None
    assert loaded.state_dict().keys() == new.state_dict().keys()


@pytest.mark.parametrize("kind", [T5Model, T5EncoderModel])
def test_of_an_encoder_decoder_only_the_encoder_is_used(kind, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    kind(config).save_pretrained(tmp_path)
    model = XMCForTextClassification.from_encoder(tmp_path, max_length=16)
    assert isinstance(model.encoder, T5EncoderModel)
    # A saved model is made anew from its configuration.
    assert isinstance(make_encoder(model.config.encoder_config), T5EncoderModel)
    assert model.embed(TEXTS[:3]).shape == (3, 8)


# ---- Tokens ----


def words(count, start=0):
    return " ".join(f"word{(start + i) % 40}" for i in range(count))


def ids_of(text):
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("long_text", ["truncate", "head_tail", "windows"])
def test_a_text_that_fits_is_kept_whole(long_text):
    texts = [words(count) for count in (0, 1, 5, 6)]
    assert tokenize(texts, make_tokenizer(), 8, long_text, 4) == [[[CLS, *ids_of(text), SEP]] for text in texts]


@pytest.mark.parametrize("max_length", [8, 9])
@pytest.mark.parametrize("count", [7, 8, 20, 100])
def test_long_texts(max_length, count):
    text, room = words(count), max_length - 2
    body = ids_of(text)
    cut = {}
    for long_text in ("truncate", "head_tail", "windows"):
        (cut[long_text],) = tokenize([text], make_tokenizer(), max_length, long_text, 3)
    assert cut["truncate"] == [[CLS, *body[:room], SEP]]
    if count > room:
        # Half of the room for the end; of an odd number the beginning has one more.
        tail = room // 2
        assert cut["head_tail"] == [[CLS, *body[: room - tail], *body[-tail:], SEP]]
    pieces = [body[start : start + room] for start in range(0, count, room)]
    assert cut["windows"] == [[CLS, *piece, SEP] for piece in pieces[:3]]
    assert all(len(window) <= max_length for windows in cut.values() for window in windows)


def test_a_tokenizer_that_adds_nothing():
    tokenizer, text = make_tokenizer(plain=True), words(10)
    assert tokenize([text], tokenizer, 8, "windows", 2) == [[ids_of(text)[:8], ids_of(text)[8:]]]
    assert tokenize(["", "no such"], tokenizer, 8, "truncate", 1) == [[[]], [[UNK, UNK]]]


@pytest.mark.parametrize("long_text", ["head_tail", "windows"])
def test_special_tokens_at_the_end_only(long_text):
    tokenizer, text = make_tokenizer(), words(10)
    # As XLNet has them.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP] [CLS]", special_tokens=[("[SEP]", SEP), ("[CLS]", CLS)]
    )
    (windows,) = tokenize([text], tokenizer, 8, long_text, 1)
    body = ids_of(text)
    kept = body[:3] + body[-3:] if long_text == "head_tail" else body[:6]
    assert windows == [[*kept, SEP, CLS]]


def test_the_model_tokenizes_as_its_configuration_says(tiny_encoder):
    text = words(50)
    for long_text in ("truncate", "head_tail", "windows"):
        options = {"max_length": 10, "long_text": long_text, "max_windows": 2}
        model = XMCForTextClassification.from_encoder(tiny_encoder, **options)
        assert model.tokenize([text, ""]) == tokenize([text, ""], make_tokenizer(), 10, long_text, 2)
        assert len(model.tokenize([text])[0]) == (2 if long_text == "windows" else 1)


@pytest.mark.parametrize(
    "sequences, padded, visible",
    [
        ([[5, 6], [7], [8, 9, 10]], [[5, 6, 4], [7, 4, 4], [8, 9, 10]], [[1, 1, 0], [1, 0, 0], [1, 1, 1]]),
        # A text without tokens is one padding token.
        ([[], [7, 8]], [[4, 4], [7, 8]], [[1, 0], [1, 1]]),
        ([[], []], [[4], [4]], [[1], [1]]),
    ],
    ids=str,
)
def test_batches_are_padded_to_the_longest(sequences, padded, visible):
    ids, mask = pad_batch(sequences, padding=4)
    assert ids.tolist() == padded and mask.tolist() == visible and ids.dtype == mask.dtype == torch.int64


@pytest.mark.parametrize(
    "tokens, config, expected",
    [
        ({"pad_token": "word3"}, {"pad_token_id": 9}, make_tokenizer().convert_tokens_to_ids("word3")),
        ({}, {"pad_token_id": 9}, 9),
        ({"eos_token": "word5"}, {}, make_tokenizer().convert_tokens_to_ids("word5")),
        ({}, {}, 0),
    ],
    ids=["tokenizer", "config", "end of text", "any"],
)
def test_padding_id(tokens, config, expected):
    tokenizer = make_tokenizer(plain=True)
    tokenizer.add_special_tokens(tokens)
    assert padding_id(GPT2Config(**config), tokenizer) == expected


# ---- Length ----

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 120}


@pytest.mark.parametrize(
    "kind, limit",
    [("bert", 20), ("gpt2", 20), ("roberta", 18), ("xlm-roberta", 18), ("mpnet", 18), ("data2vec-text", 18)],
)
def test_position_limit_is_what_the_encoder_can_read(kind, limit):
    config = AutoConfig.for_model(kind, max_position_embeddings=20, **SMALL)
    assert position_limit(config, None) == limit
    encoder = make_encoder(config).eval()
    for tokens in (limit, limit + 1):
        ids = torch.full((1, tokens), 7)
        if tokens <= limit:
            encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        else:
            with pytest.raises((IndexError, RuntimeError)):
                encoder(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_encoders_without_a_limit_and_tokenizers_with_a_lower_one():
    assert [position_limit(AutoConfig.for_model(kind), None) for kind in ("t5", "xlnet")] == [None, None]
    tokenizer = make_tokenizer()
    assert position_limit(BertConfig(max_position_embeddings=512), tokenizer) == 64
    tokenizer.model_max_length = int(1e30)  # what transformers sets where nothing is known
    assert position_limit(BertConfig(max_position_embeddings=512), tokenizer) == 512


def test_a_length_that_the_encoder_cannot_read(tiny_encoder):
    XMCForTextClassification.from_encoder(tiny_encoder, max_length=64)
    refused("max_length.*65.*64", XMCForTextClassification.from_encoder, tiny_encoder, max_length=65)


# ---- Vectors of texts ----


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_embedding_does_not_depend_on_batch_and_order(model, batch_size, monkeypatch):
    whole = model.embed(TEXTS)
    assert whole.dtype == np.float32 and np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    monkeypatch.setattr("hf_xmc.modeling_xmc.SORT_CHUNK", 7)
    found = model.embed([TEXTS[i] for i in order], batch_size)
    np.testing.assert_allclose(found, whole[order], atol=1e-5)


def test_windows_are_averaged_by_their_length(tiny_encoder):
    options = {"max_length": 10, "long_text": "windows", "max_windows": 3}
    model = XMCForTextClassification.from_encoder(tiny_encoder, **options).eval()
    texts = [words(20), words(3), words(100), ""]
    found = model.embed(texts, batch_size=2)
    counts = []
    for text, vector in zip(texts, found, strict=True):
        total = np.zeros(model.vector_size)
        (windows,) = model.tokenize([text])
        counts.append(len(windows))
        for window in windows:
            ids = torch.tensor([window])
            with torch.no_grad():
                total += len(window) * model.encode(ids, torch.ones_like(ids))[0].numpy()
        np.testing.assert_allclose(vector, total / np.linalg.norm(total), atol=1e-5)
    assert counts == [3, 1, 3, 1]


def test_embedding_without_dropout_whatever_the_mode(model):
    expected = model.embed(TEXTS)
    model.train()
    assert np.array_equal(model.embed(TEXTS), expected)
    assert model.training


def test_no_texts(model):
    assert model.embed([]).shape == (0, 32)

"""Tokens and vectors of whole datasets: made once, kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value
from datasets import Features as Columns
from datasets import List as ListColumn

from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import NO_CACHE, StageCache, digest
from ..serialization import load_tensors, save_tensors
from ..text_encoder import pad_batch
from ..utils import Progress

_BATCH_SIZE = 1024


def tokenize_dataset(model: XMCForTextClassification, dataset: Dataset) -> Dataset:
    """
    The token ids of a dataset's texts in an Arrow file, which later runs find in the cache of `datasets`.

    Args:
        model ([`XMCForTextClassification`]):
            Model with an encoder.
        dataset (`datasets.Dataset`):
            Documents with a column `text`.

    Returns:
        `datasets.Dataset`: `token_ids` (windows of each document), `length` (tokens of the first one) and `document`
        (its row).
    """
    if "text" not in dataset.column_names:
        raise ValueError(f"An encoder reads texts, but the dataset has only {', '.join(dataset.column_names)}.")
    ids = ListColumn(ListColumn(Value("int32")))
    return dataset.select_columns(["text"]).map(
        _tokenize_batch,
        batched=True,
        batch_size=_BATCH_SIZE,
        with_indices=True,
        remove_columns=["text"],
        features=Columns({"token_ids": ids, "length": Value("int32"), "document": Value("int64")}),
        fn_kwargs={"model": model},
        new_fingerprint=digest(dataset._fingerprint, _token_settings(model)),
        desc="Tokenising",
    )


def _tokenize_batch(batch: dict[str, Any], rows: list[int], model: XMCForTextClassification) -> dict[str, list]:
    windows = model.tokenize(batch["text"])
    return {"token_ids": windows, "length": [len(own[0]) for own in windows], "document": rows}


class TokenCollator:
    """
    Puts tokenised documents into a batch, padded to the longest of them. Fine-tuning sees their first window.

    Args:
        padding (`int`):
            Id that fills up.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, documents: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids, mask = pad_batch([document["token_ids"][0] for document in documents], self.padding)
        rows = torch.tensor([document["document"] for document in documents])
        return {"input_ids": ids, "attention_mask": mask, "documents": rows}


def embed_dataset(
    model: XMCForTextClassification,
    tokens: Dataset,
    batch_size: int,
    cache: str | None = None,
    progress: Progress | None = None,
    work: StageCache = NO_CACHE,
    documents: Callable[[], str] | None = None,
) -> np.ndarray:
    """
    The encoder's vectors of tokenised documents.

    Args:
        model ([`XMCForTextClassification`]):
            Model with an encoder.
        tokens (`datasets.Dataset`):
            What [`tokenize_dataset`] made.
        batch_size (`int`):
            Windows that go through the encoder together.
        cache (`str`, *optional*):
            Folder in which vectors are kept, by content: the same documents and the same encoder are not encoded
            twice.
        progress (`Callable`, *optional*):
            Called with (stage, done, total).
        work ([`StageCache`], *optional*):
            Shares the documents out over processes; this process alone by default.
        documents (`Callable[[], str]`, *optional*):
            Gives what [`tokens_digest`] would, where that is known already.
    """

    def key() -> str:
        known = tokens_digest(tokens) if documents is None else documents()
        return digest(known, _encoder_digest(model))

    path = None if cache is None else os.path.join(cache, f"{key()}.safetensors")
    if path is not None and work.processes.agree(os.path.isfile(path)):
        return load_tensors(path, "embeddings")[0]["vectors"]

    def embed(start: int, stop: int) -> dict[str, np.ndarray]:
        report = None if progress is None else lambda done: progress("embed", start + done, len(tokens))
        return {"vectors": model.embed(tokens[start:stop]["token_ids"], batch_size, report)}

    vectors = work.rows("vectors", len(tokens), embed, key)["vectors"]
    if path is not None and work.processes.is_main:
        save_tensors(path, {"vectors": vectors}, "embeddings", {})
    return vectors


def tokens_digest(tokens: Dataset) -> str:
    """A fingerprint of tokenised documents by content: equal for equal tokens in the same order."""
    fingerprint = hashlib.blake2b(digest_size=16)
    for batch in tokens.with_format("numpy").iter(_BATCH_SIZE):
        for windows in batch["token_ids"]:
            for window in windows:
                fingerprint.update(np.asarray(window, dtype=np.int32).tobytes() + b".")
            fingerprint.update(b"|")
    return fingerprint.hexdigest()


def _token_settings(model: XMCForTextClassification) -> str:
    config, tokenizer = model.config, model.tokenizer
    content = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
    return f"{content} {config.max_length} {config.long_text} {config.max_windows}"


def _encoder_digest(model: XMCForTextClassification) -> str:
    """Changes with the encoder's weights, with their precision and with the way its states are pooled."""
    assert model.encoder is not None
    settings = f"{model.config.pooling} {model.config.pooling_layers} {model.autocast_dtype}"
    fingerprint = hashlib.blake2b(settings.encode(), digest_size=16)
    for name, tensor in sorted(model.encoder.state_dict().items()):
        fingerprint.update(name.encode())
        fingerprint.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return fingerprint.hexdigest()

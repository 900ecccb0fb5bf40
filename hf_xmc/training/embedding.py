"""Tokens and document vectors of whole datasets, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value
from datasets import Features as Columns
from datasets import List as ListColumn

from ..modeling_xmc import XMCForTextClassification
from ..parallel.stage_cache import Runtime, digest
from ..serialization import load_tensors, save_tensors

_BATCH_SIZE = 1024


def tokenize_dataset(model: XMCForTextClassification, dataset: Dataset) -> Dataset:
    """
    Tokenises the texts of a dataset. The cache of `datasets` keeps the result for later runs.

    The columns are `token_ids` (windows of each document), `length` (tokens of the first window) and `document` (row).
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


def embed_dataset(
    model: XMCForTextClassification,
    tokens: Dataset,
    batch_size: int,
    cache_folder: str | None = None,
    runtime: Runtime = Runtime(),
    tokens_key: Callable[[], str] | None = None,
) -> np.ndarray:
    """
    Computes the encoder's vectors of tokenised documents, `batch_size` windows at a time.

    A `cache_folder` keeps them by the content of documents and encoder; `tokens_key` returns the known
    [`tokens_digest`].
    """

    def key() -> str:
        return digest(tokens_digest(tokens) if tokens_key is None else tokens_key(), _encoder_digest(model))

    processes = runtime.cache.processes
    path = None if cache_folder is None else os.path.join(cache_folder, f"{key()}.safetensors")
    if path is not None and processes.agree(os.path.isfile(path)):
        return load_tensors(path, "embeddings")[0]["vectors"]

    def embed(start: int, stop: int) -> dict[str, np.ndarray]:
        progress = runtime.progress
        report = None if progress is None else lambda done: progress("embed", start + done, len(tokens))
        return {"vectors": model.embed(tokens[start:stop]["token_ids"], batch_size, report)}

    vectors = runtime.cache.rows("vectors", len(tokens), embed, key)["vectors"]
    if path is not None and processes.is_main:
        save_tensors(path, {"vectors": vectors}, "embeddings", {})
    return vectors


def tokens_digest(tokens: Dataset) -> str:
    """Fingerprint of tokenised documents: equal for equal tokens in the same order."""
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
    """Fingerprint of the encoder: its weights, their precision and the pooling."""
    assert model.encoder is not None
    settings = f"{model.config.pooling} {model.config.pooling_layers} {model.autocast_dtype}"
    fingerprint = hashlib.blake2b(settings.encode(), digest_size=16)
    for name, tensor in sorted(model.encoder.state_dict().items()):
        fingerprint.update(name.encode())
        fingerprint.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return fingerprint.hexdigest()

"""Document vectors of any transformer of the Hub: loading, tokenisation, pooling."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoModel,
    AutoModelForTextEncoding,
    PreTrainedConfig,
)

from .loading import raise_without_safetensors
from .serialization import read_json, resolve_file

# `hidden_dropout_prob`, `attention_dropout`, `resid_pdrop`, `dropout_rate`, but not the dropout of a classifier.
_DROPOUT = re.compile(r"^(?!classifier|summary|seq_classif|qa_).*(dropout|pdrop)")
# Texts are cut to so many characters before they are tokenised, or to so many for each token that is used.
MAX_CHARACTERS, CHARACTERS_PER_TOKEN = 1 << 20, 256
# Pooling of sentence-transformers models.
_POOLING_FILE = "1_Pooling/config.json"
# The RoBERTa family: positions start after the padding id.
_COUNTING_FROM_PADDING = (
    "roberta", "camembert", "mpnet", "longformer", "data2vec-text", "ibert", "luke", "xmod", "lilt"
)  # fmt: skip

# OpenMP waits forever for its threads in a process that was forked from one that had started them.
_PROCESS = os.getpid()


def limit_threads_after_fork() -> None:
    """Restricts torch to one thread in a forked process, such as those of gunicorn or `datasets.map`."""
    if os.getpid() != _PROCESS and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def make_encoder(config: PreTrainedConfig) -> nn.Module:
    """Returns a new encoder without its pooler."""
    return without_pooler(_kind(config).from_config(config))


def load_encoder(name_or_path: str | os.PathLike, use_safetensors: bool = True, **hub_kwargs: Any) -> nn.Module:
    """
    Returns a pretrained encoder without its pooler, in float32 unless `dtype` is given.

    Weights that are a pickle, which can run code, are loaded only without `use_safetensors`.
    """
    kind = _kind(hub_kwargs.get("config"))
    options = {"dtype": torch.float32, "use_safetensors": True if use_safetensors else None, **hub_kwargs}
    try:
        return without_pooler(kind.from_pretrained(name_or_path, **options))
    except OSError:
        if use_safetensors:
            raise_without_safetensors(name_or_path, hub_kwargs)
        raise


def _kind(config: PreTrainedConfig | None) -> Any:
    """The class that loads an encoder; it loads only the encoder of an encoder-decoder model."""
    return AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel


def without_pooler(encoder: nn.Module) -> nn.Module:
    """Removes the pooler of an encoder, whose output is not used."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # type: ignore[assignment]
    return encoder


def set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    """Sets all dropout probabilities in the configuration of an encoder, whatever their names are."""
    for name in config.to_dict():
        if _DROPOUT.search(name) and isinstance(getattr(config, name), (int, float)):
            setattr(config, name, dropout)


def default_pooling(name_or_path: str | os.PathLike, config: PreTrainedConfig, **hub_kwargs: Any) -> str:
    """
    Returns the default pooling of an encoder.

    It is the pooling of a sentence-transformers model, `"last"` for causal models (only the last token has seen the
    whole text) and `"mean"` otherwise.
    """
    path = resolve_file(name_or_path, _POOLING_FILE, required=False, **hub_kwargs)
    if path is not None:
        settings = read_json(path)
        for key, pooling in (("cls_token", "cls"), ("lasttoken", "last"), ("mean_tokens", "mean")):
            if settings.get(f"pooling_mode_{key}"):
                return pooling
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    return "last" if is_causal and not config.is_encoder_decoder else "mean"


def pool(states: Sequence[torch.Tensor], mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """
    Returns one float32 vector of unit length per document.

    `states` are the token states `(batch, tokens, dimensions)` of one or several layers, which are concatenated,
    `mask` is 0 for padding. `pooling` is `"mean"` of all tokens, `"cls"` (first token) or `"last"` (last token).
    """
    if pooling == "mean":
        share = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        vectors = [torch.einsum("bt,btd->bd", share.to(layer.dtype), layer) for layer in states]
    else:
        chosen = mask.to(torch.long)
        if pooling == "last":
            chosen = chosen * torch.arange(mask.shape[1], device=mask.device)
        # With padding on the left, the first token is the one after the padding.
        token = chosen.argmax(dim=1)
        vectors = [layer[torch.arange(len(layer), device=layer.device), token] for layer in states]
    return functional.normalize(torch.cat(vectors, dim=1).float(), dim=1)


def check_pooling_layers(config: PreTrainedConfig, pooling_layers: int) -> None:
    """Raises an error if an encoder has fewer layers than are pooled; its embeddings count as a layer."""
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if num_layers is not None and pooling_layers > num_layers + 1:
        raise ValueError(
            f"`pooling_layers` is {pooling_layers}, but the encoder `{config.name_or_path or config.model_type}` has "
            f"only {num_layers} layers. Set at most {num_layers} (`encoder_pooling_layers` in training)."
        )


def position_limit(config: PreTrainedConfig, tokenizer: Any) -> int | None:
    """Returns the largest number of tokens that the encoder takes; `None` if it has no limit."""
    limits = []
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if positions and positions > 0 and config.model_type not in ("xlnet", "t5"):
        from_padding = any(name in config.model_type for name in _COUNTING_FROM_PADDING)
        limits.append(positions - ((config.pad_token_id or 0) + 1 if from_padding else 0))
    if tokenizer is not None and tokenizer.model_max_length < 1_000_000:
        limits.append(tokenizer.model_max_length)
    return min(limits, default=None)


def padding_id(config: PreTrainedConfig, tokenizer: Any) -> int:
    """Returns the token id of padding. If the encoder has none, any id will do: the attention mask hides it."""
    candidates = (tokenizer.pad_token_id, config.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in candidates if token is not None)


def tokenize(texts: Sequence[str], tokenizer: Any, max_length: int, long_text: str, max_windows: int) -> list[list]:
    """
    Returns the token ids of each text: a list of windows of at most `max_length` tokens, with special tokens.

    `max_length`, `long_text` and `max_windows` are fields of [`XMCConfig`].
    """
    # The tokenizer would first read all of a text, which takes a gigabyte for ten million words.
    limit = max(MAX_CHARACTERS, CHARACTERS_PER_TOKEN * max_length * max_windows)
    texts = [text if len(text) <= limit else _shortened(text, limit, long_text) for text in texts]
    try:
        return _tokenize(texts, tokenizer, max_length, long_text, max_windows)
    except BaseException as error:
        # What tokenizers raise for a damaged file; a panic is not an `Exception`.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"The tokenizer cannot tokenise the texts ({error}). Its `tokenizer.json` is damaged: save or download it "
            "again."
        ) from error


def _tokenize(texts: list[str], tokenizer: Any, max_length: int, long_text: str, max_windows: int) -> list[list]:
    if long_text == "truncate":
        ids = tokenizer(texts, truncation=True, max_length=max_length, return_attention_mask=False)["input_ids"]
        return [[window] for window in ids]
    before, after = _special_tokens(tokenizer)
    room = max_length - len(before) - len(after)
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    windows = []
    for body in ids:
        if long_text == "head_tail":
            head = room - room // 2
            parts = [body if len(body) <= room else body[:head] + body[len(body) - room // 2 :]]
        else:
            parts = [body[start : start + room] for start in range(0, max(len(body), 1), room)][:max_windows]
        windows.append([before + part + after for part in parts])
    return windows


def _shortened(text: str, limit: int, long_text: str) -> str:
    """The beginning of a very long text or, for `head_tail`, its beginning and its end."""
    return text[: limit // 2] + text[-limit // 2 :] if long_text == "head_tail" else text[:limit]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that the tokenizer adds before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return full[:start], full[start + len(plain) :]


def pad_batch(sequences: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token ids of sequences, padded to the longest, and their attention mask."""
    lengths = np.array([len(sequence) for sequence in sequences])
    mask = np.arange(max(1, lengths.max(initial=0))) < lengths[:, None]
    ids = np.full(mask.shape, padding, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    mask[lengths == 0, 0] = True  # attention needs at least one token
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))

"""From texts to one vector each: any transformer of the Hub, its tokens and its pooling."""

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

from .serialization import read_json, resolve_file

# `hidden_dropout_prob`, `attention_dropout`, `resid_pdrop`, `dropout_rate`; that of a classifier is not the encoder's.
_DROPOUT = re.compile(r"^(?!classifier|summary|seq_classif|qa_).*(dropout|pdrop)")
# Name of the file in which sentence-transformers models keep their pooling.
_POOLING_FILE = "1_Pooling/config.json"


def make_encoder(config: PreTrainedConfig) -> nn.Module:
    """A new encoder of this configuration, without the layer that some put on top of the first token."""
    return without_pooler(_kind(config).from_config(config))


def load_encoder(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> nn.Module:
    """The pretrained encoder, in float32 unless `dtype` says otherwise."""
    kind = _kind(hub_kwargs.get("config"))
    return without_pooler(kind.from_pretrained(name_or_path, **{"dtype": torch.float32, **hub_kwargs}))


def _kind(config: PreTrainedConfig | None) -> Any:
    """The class that loads an encoder: of an encoder-decoder the encoder alone, which forgets that it was one."""
    return AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel


def without_pooler(encoder: nn.Module) -> nn.Module:
    """The encoder without its own pooler, whose output nobody reads."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # type: ignore[assignment]
    return encoder


def set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    """Sets every probability of dropout in an encoder's configuration, whatever the encoder calls it."""
    for name in config.to_dict():
        if _DROPOUT.search(name) and isinstance(getattr(config, name), (int, float)):
            setattr(config, name, dropout)


def default_pooling(name_or_path: str | os.PathLike, config: PreTrainedConfig, **hub_kwargs: Any) -> str:
    """
    How to make one vector of the states of the tokens, where the user does not say.

    A sentence-transformers model says it itself. In a model that reads from left to right only the last token has seen
    the whole text. All others: the mean.
    """
    path = resolve_file(name_or_path, _POOLING_FILE, required=False, **hub_kwargs)
    if path is not None:
        settings = read_json(path)
        for key, pooling in (("cls_token", "cls"), ("lasttoken", "last"), ("mean_tokens", "mean")):
            if settings.get(f"pooling_mode_{key}"):
                return pooling
    left_to_right = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    return "last" if left_to_right and not config.is_encoder_decoder else "mean"


def pool(states: Sequence[torch.Tensor], mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """
    One vector of unit length per document.

    Args:
        states (`Sequence[torch.Tensor]`):
            Token states `(batch, tokens, dimensions)` of one layer or several; several are put side by side.
        mask (`torch.Tensor` of shape `(batch, tokens)`):
            1 for tokens, 0 for padding.
        pooling (`str`):
            `"mean"` of all tokens, `"cls"`: the first token, or `"last"`: the last one.
    """
    if pooling == "mean":
        share = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        vectors = [torch.einsum("bt,btd->bd", share.to(layer.dtype), layer) for layer in states]
    elif pooling == "cls":
        # Where padding comes first, so does the first token after it.
        first = mask.to(torch.long).argmax(dim=1)
        vectors = [layer[torch.arange(len(layer), device=layer.device), first] for layer in states]
    else:
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = (mask.to(torch.long) * positions).argmax(dim=1)
        vectors = [layer[torch.arange(len(layer), device=layer.device), last] for layer in states]
    return functional.normalize(torch.cat(vectors, dim=1).float(), dim=1)


def position_limit(config: PreTrainedConfig, tokenizer: Any) -> int | None:
    """The largest number of tokens that the encoder can read at once; `None` if it has no limit."""
    limits = []
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if positions and positions > 0 and config.model_type not in ("xlnet", "t5"):
        # The RoBERTa family counts positions from after the padding id.
        offset = (config.pad_token_id or 0) + 1 if _counts_from_padding(config) else 0
        limits.append(positions - offset)
    if tokenizer is not None and tokenizer.model_max_length < 1_000_000:
        limits.append(tokenizer.model_max_length)
    return min(limits, default=None)


def _counts_from_padding(config: PreTrainedConfig) -> bool:
    names = ("roberta", "camembert", "mpnet", "longformer", "data2vec-text", "ibert", "luke", "xmod", "lilt")
    return any(name in config.model_type for name in names)


def padding_id(config: PreTrainedConfig, tokenizer: Any) -> int:
    """What fills the places that the attention mask hides. Encoders without a token for it do not mind which."""
    candidates = (tokenizer.pad_token_id, config.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in candidates if token is not None)


def tokenize(texts: Sequence[str], tokenizer: Any, max_length: int, long_text: str, max_windows: int) -> list[list]:
    """
    Token ids of each text: a list of windows of at most `max_length` tokens, special ones included.

    Args:
        texts (`Sequence[str]`):
            The documents.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The encoder's tokenizer.
        max_length (`int`):
            Tokens of a window.
        long_text (`str`):
            What becomes of longer texts: `"truncate"` keeps their beginning, `"head_tail"` the first and the last
            half of the length, `"windows"` cuts them into windows.
        max_windows (`int`):
            Windows kept of a text.
    """
    texts = list(texts)
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


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return full[:start], full[start + len(plain) :]


def pad_batch(sequences: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of sequences, filled up to the longest."""
    lengths = np.array([len(sequence) for sequence in sequences])
    mask = np.arange(max(1, lengths.max(initial=0))) < lengths[:, None]
    ids = np.full(mask.shape, padding, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    mask[lengths == 0, 0] = True  # a text without any token is one padding token: attention needs something to see
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))

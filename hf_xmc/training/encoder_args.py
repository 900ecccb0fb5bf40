"""Options of the encoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..text_encoder import LONG_TEXTS, POOLINGS
from .lora import require_peft


@dataclass
class EncoderArguments:
    """
    How the encoder reads a text and makes one vector of it.

    Args:
        name (`str`, *optional*):
            Folder or Hub id of the pretrained encoder to start from.
        max_length (`int`, *optional*, defaults to 128): Tokens that the encoder reads at once.
        long_text (`str`, *optional*, defaults to `"truncate"`):
            What becomes of longer texts: `"truncate"` keeps their beginning, `"head_tail"` the first and the last half
            of the length; `"windows"` averages the vectors of up to `max_windows` pieces for the ranker and at
            prediction, while fine-tuning sees the first.
        max_windows (`int`, *optional*, defaults to 4): Windows read of a text.
        pooling (`str`, *optional*): `"mean"`, `"cls"` or `"last"`; by default what suits the encoder.
        pooling_layers (`int`, *optional*, defaults to 1): Last layers whose pooled states are put side by side.
        attn_implementation (`str`, *optional*):
            How the encoder computes attention: `"sdpa"`, `"eager"`, `"flash_attention_2"` or what else transformers
            knows; its own choice by default. Training in bfloat16 on a CPU is fastest with `"eager"`.
        dropout (`float`, *optional*, defaults to 0.0):
            Dropout inside the encoder while it is fine-tuned. Few passes over the documents need none, and without it
            a step is a good deal faster.
        lora_rank (`int`, *optional*, defaults to 0):
            Rank of adapters (LoRA) on all linear layers, which are trained in place of the encoder's weights: little
            memory for the optimiser, for large encoders. They learn at ten times the learning rate or so, and are
            merged into the weights in the end. 0 trains the encoder itself.
        lora_alpha (`float`, *optional*):
            The adapters weigh `lora_alpha / lora_rank`; twice the rank by default.
    """

    name: str | None = field(default=None, metadata={"help": "Folder or Hub id of the encoder to start from."})
    max_length: int = field(default=128, metadata={"help": "Tokens that the encoder reads at once."})
    long_text: str = field(
        default="truncate", metadata={"help": "What becomes of longer texts.", "choices": LONG_TEXTS}
    )
    max_windows: int = field(default=4, metadata={"help": "Windows read of a text."})
    pooling: str | None = field(
        default=None, metadata={"help": "How token states become one vector.", "choices": POOLINGS}
    )
    pooling_layers: int = field(default=1, metadata={"help": "Last layers whose states are put side by side."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "How the encoder computes attention: sdpa, eager, flash_attention_2."}
    )
    dropout: float = field(default=0.0, metadata={"help": "Dropout inside the encoder while it is fine-tuned."})
    lora_rank: int = field(
        default=0, metadata={"help": "Rank of adapters that are trained in place of the encoder; 0 for none."}
    )
    lora_alpha: float | None = field(
        default=None, metadata={"help": "Weight of the adapters times their rank; twice the rank by default."}
    )

    def __post_init__(self) -> None:
        for name, choices in (("long_text", LONG_TEXTS), ("pooling", (None, *POOLINGS))):
            if getattr(self, name) not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not one of {known}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and less than 1, not {self.dropout}.")
        for name, least in (("max_length", 8), ("max_windows", 1), ("pooling_layers", 1), ("lora_rank", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, not {getattr(self, name)}.")
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise ValueError(f"`lora_alpha` must be greater than 0, not {self.lora_alpha}.")
        if self.lora_rank:
            require_peft()

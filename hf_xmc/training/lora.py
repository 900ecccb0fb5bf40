"""Low-rank adapters (LoRA): trained in place of an encoder's weights, merged into them in the end."""

from __future__ import annotations

import os

import torch
from safetensors.torch import load_file, save_file

from ..modeling_xmc import XMCForTextClassification
from ..serialization import atomic_write
from .options import require_peft

# Beside the model in a checkpoint, which holds the encoder as it came.
ADAPTERS_FILE = "adapters.safetensors"


class Adapters:
    """
    Adapters on every linear layer of a model's encoder, whose own weights stay as they are.

    Args:
        model ([`XMCForTextClassification`]):
            The model; its encoder is changed in place.
        rank (`int`):
            Rank of the adapters.
        alpha (`float`, *optional*):
            Their weight is `alpha / rank`; twice the rank by default.
        seed (`int`, *optional*, defaults to 0):
            Seed of their first values.
    """

    def __init__(self, model: XMCForTextClassification, rank: int, alpha: float | None = None, seed: int = 0) -> None:
        require_peft()
        from peft import LoraConfig, LoraModel

        alpha = 2 * rank if alpha is None else alpha
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")  # type: ignore[arg-type]
        self._model = model
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._tuner = LoraModel(model.encoder, config, "default")

    def plain_weights(self) -> dict[str, torch.Tensor]:
        """All weights of the model under the names that they have without adapters; the adapters are left out."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self._model.state_dict().items()
            if ".lora_" not in name
        }

    def save(self, folder: str) -> None:
        """Writes what is trained, adapters and heads, into a checkpoint."""
        trained = {name: own.detach().cpu().contiguous() for name, own in self._trained().items()}
        with atomic_write(os.path.join(folder, ADAPTERS_FILE)) as temporary:
            save_file(trained, temporary)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        """Reads what [`~Adapters.save`] wrote."""
        tensors = load_file(os.path.join(folder, ADAPTERS_FILE))
        for name, own in self._trained().items():
            own.copy_(tensors[name])

    def merge(self) -> None:
        """Adds the adapters to the weights of the encoder, which is then as it was made, and can be trained whole."""
        encoder = self._tuner.merge_and_unload()
        # A note that peft leaves behind.
        vars(encoder).pop("peft_config", None)
        encoder.requires_grad_(True)
        self._model.encoder = encoder

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: own for name, own in self._model.named_parameters() if own.requires_grad}

"""Stochastic weight averaging late in the training of a level."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from ..serialization import load_tensors, save_tensors
from .fsdp import gathered, spread

AVERAGE_FILE = "average.safetensors"


class WeightAverage:
    """Running mean of the trainable weights of a model, in float32. It is empty at first."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Discards the mean."""
        self.count, self.last_step = 0, -1
        self.mean: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, model: nn.Module, step: int) -> None:
        """Adds the weights after `step` steps; a step is added once."""
        if step == self.last_step:
            return
        weights = {name: own.detach().float() for name, own in model.named_parameters() if own.requires_grad}
        if not self.count:
            self.mean = {name: tensor.clone() for name, tensor in weights.items()}
        else:
            self.mean = {name: spread(mean, weights[name]) for name, mean in self.mean.items()}
            get_swa_multi_avg_fn()(list(self.mean.values()), [weights[name] for name in self.mean], self.count)
        self.count, self.last_step = self.count + 1, step

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Sets the weights of the model to the mean for a block of code."""
        parameters = dict(model.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in self.mean}
        self._copy(self.mean, parameters)
        try:
            yield
        finally:
            self._copy(kept, parameters)

    def apply(self, model: nn.Module) -> bool:
        """Sets the weights of the model to the mean and discards it. Returns whether there was one."""
        applied = self.count > 0
        self._copy(self.mean, dict(model.named_parameters()))
        self.clear()
        return applied

    def gather(self) -> None:
        """Gathers a mean that FSDP shards."""
        self.mean = {name: gathered(tensor) for name, tensor in self.mean.items()}

    def save(self, folder: str, is_main: bool = True) -> None:
        """Writes the mean into a checkpoint. Collective: every process must call it; only the main one writes."""
        if not self.count:
            return
        tensors = {name: gathered(tensor).cpu().numpy() for name, tensor in self.mean.items()}
        if is_main:
            metadata = {"count": str(self.count), "last_step": str(self.last_step)}
            save_tensors(os.path.join(folder, AVERAGE_FILE), tensors, "average of weights", metadata)

    def load(self, folder: str, device: torch.device) -> None:
        """Reads the mean of a checkpoint, if it has one."""
        self.clear()
        path = os.path.join(folder, AVERAGE_FILE)
        if os.path.isfile(path):
            tensors, metadata = load_tensors(path, "average of weights")
            self.mean = {name: torch.from_numpy(array.copy()).to(device) for name, array in tensors.items()}
            self.count, self.last_step = int(metadata["count"]), int(metadata["last_step"])

    @staticmethod
    @torch.no_grad()
    def _copy(weights: dict[str, torch.Tensor], parameters: dict[str, nn.Parameter]) -> None:
        for name, tensor in weights.items():
            parameters[name].copy_(spread(tensor, parameters[name]))

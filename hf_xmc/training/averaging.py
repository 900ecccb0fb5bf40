"""Stochastic weight averaging: the mean of the states that weights go through late in training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..serialization import load_tensors, save_tensors
from .fsdp import gathered, spread

AVERAGE_FILE = "average.safetensors"


class WeightAverage:
    """The running mean of a model's trainable weights, in float32. Empty at first."""

    def __init__(self) -> None:
        self.count, self.last_step = 0, -1
        self.mean: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, model: nn.Module, step: int) -> None:
        """Takes the weights after `step` steps into the mean; a step counts once."""
        if step == self.last_step:
            return
        self.count, self.last_step = self.count + 1, step
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                now = parameter.detach().float()
                if self.count == 1:
                    self.mean[name] = now.clone()
                else:
                    mean = self.mean[name] = spread(self.mean[name], now)
                    mean.add_(now - mean, alpha=1 / self.count)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model has the mean for its weights, where there is one, and gets its own back afterwards."""
        own = dict(model.named_parameters())
        kept = {name: own[name].detach().clone() for name in self.mean}
        self._copy(self.mean, own)
        try:
            yield
        finally:
            self._copy(kept, own)

    def take(self, model: nn.Module) -> bool:
        """
        Replaces the weights by the mean, where there is one, and empties it.

        Returns:
            `bool`: whether there was one.
        """
        taken = self.count > 0
        self._copy(self.mean, dict(model.named_parameters()))
        self.__init__()  # type: ignore[misc]
        return taken

    def gather(self) -> None:
        """Makes the mean whole, where it is spread over processes."""
        self.mean = {name: gathered(tensor) for name, tensor in self.mean.items()}

    def save(self, folder: str, writes: bool = True) -> None:
        """Writes the mean into a checkpoint, where there is one; of several processes all come, and one `writes`."""
        if not self.count:
            return
        tensors = {name: gathered(tensor).cpu().numpy() for name, tensor in self.mean.items()}
        if writes:
            path = os.path.join(folder, AVERAGE_FILE)
            facts = {"count": str(self.count), "last_step": str(self.last_step)}
            save_tensors(path, tensors, "average of weights", facts)

    def load(self, folder: str, device: torch.device) -> None:
        """Goes on from the mean in a checkpoint; it is empty where there is none."""
        self.__init__()  # type: ignore[misc]
        path = os.path.join(folder, AVERAGE_FILE)
        if os.path.isfile(path):
            tensors, facts = load_tensors(path, "average of weights")
            self.mean = {name: torch.from_numpy(array.copy()).to(device) for name, array in tensors.items()}
            self.count, self.last_step = int(facts["count"]), int(facts["last_step"])

    @staticmethod
    @torch.no_grad()
    def _copy(weights: dict[str, torch.Tensor], parameters: dict[str, nn.Parameter]) -> None:
        for name, tensor in weights.items():
            parameters[name].copy_(spread(tensor, parameters[name]))

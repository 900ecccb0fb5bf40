"""AdamW with sparse rows for large heads, and stochastic weight averaging."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

from ..serialization import load_tensors, save_tensors
from .large_encoders import RowParts, gathered, spread


class RowAdamW(torch.optim.AdamW):
    """
    [`torch.optim.AdamW`] that updates only rows with a gradient where the gradient of a parameter is sparse.

    Parameters with dense gradients are updated as usual. A row has its own count of steps, so that its first update is
    as large as that of any other row; momentum does not move a row that the batch did not touch. If every row is
    touched at every step, the result is that of AdamW. If FSDP shards other parameters, each process keeps the moments
    of a part of such rows.
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """One step. See [`torch.optim.Optimizer.step`]."""
        sparse = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    sparse.append((group, parameter, parameter.grad.coalesce()))
                    parameter.grad = None
        loss = super().step(closure)
        for group, parameter, gradient in sparse:
            self._step_rows(group, parameter, gradient.indices()[0], gradient.values())
        return loss

    def _step_rows(
        self, group: dict[str, Any], parameter: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        parts = self._row_parts(parameter)
        state = self.state[parameter]
        if not state:
            # By this name the base class finds it in a loaded state, and leaves its dtype alone.
            kinds = {"step": torch.float32, "exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}
            for name, dtype in kinds.items():
                shape = parameter.shape[:1] if name == "step" else parameter.shape
                state[name] = parameter.new_zeros(shape, dtype=dtype) if parts is None else parts.zeros(shape, dtype)
        if parts is None:
            parameter[rows] = self._new_rows(group, parameter, rows, gradient, state, 0)
            return
        for name, value in state.items():
            state[name] = parts.spread(value)  # a loaded one is whole
        mine = (rows >= parts.first) & (rows < parts.stop)
        own_state = {name: value.to_local() for name, value in state.items()}  # views
        values = self._new_rows(group, parameter, rows[mine], gradient[mine], own_state, parts.first)
        parameter[rows] = parts.exchange(values, mine)

    def _row_parts(self, parameter: torch.Tensor) -> RowParts | None:
        """Parts of a parameter's rows, where the other parameters are spread over processes."""
        others = (own for group in self.param_groups for own in group["params"])
        like = next((own for own in others if isinstance(own, DTensor)), None)
        return None if like is None else RowParts(like, len(parameter))

    @staticmethod
    def _new_rows(
        group: dict[str, Any],
        parameter: torch.Tensor,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        first: int,
    ) -> torch.Tensor:
        """Values of some rows after a step; `state` begins at row `first`, and takes the step as well."""
        beta1, beta2 = group["betas"]
        places = rows - first
        steps = state["step"][places] + 1
        mean = state["exp_avg"][places].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"][places].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["step"][places], state["exp_avg"][places], state["exp_avg_sq"][places] = steps, mean, square
        # In float64 for each row, but not for its numbers, which would take most of the time.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        counts = steps.to(torch.float64).unsqueeze(1)
        size = (group["lr"] / (1 - beta1**counts)).to(dtype)
        correction = (1 - beta2**counts).sqrt().to(dtype)
        update = mean.to(dtype).div_(square.to(dtype).sqrt_().div_(correction).add_(group["eps"])).mul_(size)
        values = parameter[rows].to(dtype).mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)
        return values.to(parameter.dtype)


AVERAGE_FILE = "average.safetensors"


class WeightAverage:
    """Stochastic weight averaging late in a level: the mean of the trainable weights, in float32. Empty at first."""

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

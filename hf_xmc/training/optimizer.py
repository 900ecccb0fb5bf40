"""AdamW for encoders and for heads of which a step touches few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .fsdp import RowParts


class RowAdamW(torch.optim.AdamW):
    """
    AdamW that updates only the rows of a parameter that have a gradient, where that gradient is sparse.

    Parameters with dense gradients are updated as usual. A row keeps its own count of steps, so that its first update
    is as large as any other's first; momentum does not move a row that the batch did not touch. Where every row is
    touched at every step the result is that of AdamW. Where FSDP spreads other parameters over processes, each of them
    keeps the moments of a part of such rows.

    Args:
        params (iterable):
            Parameters or groups of them, as for [`torch.optim.AdamW`].
        kwargs:
            Options of [`torch.optim.AdamW`].
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
                zeros = parameter.new_zeros(shape, dtype=dtype) if parts is None else parts.zeros(shape, dtype)
                state[name] = zeros
        if parts is None:
            parameter[rows] = self._new_rows(group, parameter, rows, gradient, state, 0)
            return
        for name, value in state.items():
            state[name] = parts.spread(value)  # a loaded one is whole
        mine = (rows >= parts.first) & (rows < parts.stop)
        own_state = {name: parts.own(value) for name, value in state.items()}
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

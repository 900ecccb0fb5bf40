"""AdamW for encoders and for heads of which a step touches few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class RowAdamW(torch.optim.AdamW):
    """
    AdamW that updates only the rows of a parameter that have a gradient, where that gradient is sparse.

    Parameters with dense gradients are updated as usual. A row keeps its own count of steps, so that its first update
    is as large as any other's first; momentum does not move a row that the batch did not touch. Where every row is
    touched at every step the result is that of AdamW.

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
        state = self.state[parameter]
        if not state:
            # By this name the base class finds it in a loaded state, and leaves its dtype alone.
            state["step"] = torch.zeros(len(parameter), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        steps = state["step"][rows] + 1
        mean = state["exp_avg"][rows].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["step"][rows], state["exp_avg"][rows], state["exp_avg_sq"][rows] = steps, mean, square
        # In float64 for each row, but not for its numbers, which would take most of the time.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        counts = steps.to(torch.float64).unsqueeze(1)
        size = (group["lr"] / (1 - beta1**counts)).to(dtype)
        correction = (1 - beta2**counts).sqrt().to(dtype)
        update = mean.to(dtype).div_(square.to(dtype).sqrt_().div_(correction).add_(group["eps"])).mul_(size)
        values = parameter[rows].to(dtype).mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)
        parameter[rows] = values.to(parameter.dtype)

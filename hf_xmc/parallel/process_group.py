"""The processes of a training or prediction job: their ranks, barriers and small collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")

# A barrier may wait for a stage that the main process computes alone, so it needs a longer timeout than collectives
# have by default. A process that dies closes its connections, which ends the wait of the others at once.
_TIMEOUT = timedelta(days=7)
# How PyTorch's backends report a broken connection to another process.
_LOST = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout")


class ProcessGroup:
    """
    A thin layer over [`~accelerate.PartialState`], see [`~ProcessGroup.current`]. Without it, a single process.

    Barriers and collectives of Python objects use a gloo group, so that they work beside NCCL as well.
    """

    def __init__(self, state: Any = None) -> None:
        self.index: int = 0 if state is None else state.process_index
        self.count: int = 1 if state is None else state.num_processes
        self.device = torch.device("cpu") if state is None else state.device
        self._state = state
        self._group = distributed.new_group(backend="gloo", timeout=_TIMEOUT) if self.count > 1 else None

    @classmethod
    def current(cls) -> ProcessGroup:
        """The processes of `torchrun` or `accelerate launch`. Collective: every process must call it."""
        from accelerate import PartialState  # here, because its import takes seconds

        use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        return cls(PartialState(cpu=use_cpu or not torch.accelerator.is_available(), timeout=_TIMEOUT))

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes shared files."""
        return self.index == 0

    @property
    def per_node(self) -> int:
        """Number of processes on this machine."""
        return min(self.count, int(os.environ.get("LOCAL_WORLD_SIZE", self.count)))

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """The items assigned to this process: every `count`-th one, so that expensive neighbours are spread."""
        return items[self.index :: self.count]

    def wait(self) -> None:
        """Blocks until every process has called it."""
        if self.count > 1:
            with self.explained():
                distributed.barrier(group=self._group)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the block in the main process before the others run it, e.g. to fill a cache."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    def agree(self, value: bool) -> bool:
        """Whether `value` is true in every process."""
        if self.count == 1:
            return value
        votes = torch.tensor([int(value)])
        with self.explained():
            distributed.all_reduce(votes, distributed.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

    def from_main(self, make: Callable[[], T]) -> T:
        """Calls a function in the main process and returns its result in every process."""
        if self.count == 1:
            return make()
        result: list[Any] = [make() if self.is_main else None]
        with self.explained():
            distributed.broadcast_object_list(result, src=0, group=self._group)
        return result[0]

    def close(self) -> None:
        """Shuts down `torch.distributed`."""
        if self._state is not None:
            self._state.destroy_process_group()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explains errors that mean that another process, or a worker of a `DataLoader`, has died."""
        try:
            yield
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                raise ChildProcessError(
                    f"A worker process of the data loader has died, often for lack of memory ({error}). Lower "
                    "`dataloader_num_workers` and start again with `resume_from_checkpoint=True`."
                ) from error
            if self.count > 1 and any(sign in str(error).lower() for sign in _LOST):
                raise ConnectionError(
                    f"Process {self.index} of {self.count} has lost the connection to another process; see the output "
                    "of that process for the reason. Finished work is kept: start all processes again, a training "
                    f"with `resume_from_checkpoint=True`. ({error})"
                ) from error
            raise

    def average(self, gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
        """The mean of a dense gradient over processes, some of which may have none; `None` if all have none."""
        has_gradient = torch.tensor([float(gradient is not None)], device=parameter.device)
        distributed.all_reduce(has_gradient)
        if not has_gradient.item():
            return None
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        distributed.all_reduce(gradient)
        return gradient.div_(self.count)

    def average_rows(self, gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
        """The mean of a row-sparse gradient over processes, as a sparse tensor; `None` if all have none."""
        if gradient is None:
            rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        else:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        rows = self.gather_rows(rows)
        if not len(rows):
            return None
        total = torch.sparse_coo_tensor(rows.unsqueeze(0), self.gather_rows(values), parameter.shape)
        return (total / self.count).coalesce()

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of the tensors of all processes. Those of this process keep their gradients."""
        if self.count == 1:
            return tensor
        sizes = self._all_gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        # Collectives need tensors of equal shape.
        own = tensor.detach()
        padded = torch.cat([own, own.new_zeros((max(sizes) - len(own), *own.shape[1:]))])
        parts = list(self._all_gather(padded).split(max(sizes))) if max(sizes) else [own] * self.count
        parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        parts[self.index] = tensor
        return torch.cat(parts)

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes, concatenated."""
        gathered = [torch.empty_like(tensor) for _ in range(self.count)]
        distributed.all_gather(gathered, tensor)
        return torch.cat(gathered)

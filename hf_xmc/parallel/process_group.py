"""The processes of a training: who this one is, and waiting for the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")

# A stage that one process does for all may take long: waiting for it is bounded by this and not by the time limit of
# collectives. A process that dies closes its connections, which ends the waiting of the others at once.
_LONGEST_STAGE = timedelta(days=7)
# What a broken connection to another process is called by the libraries below.
_SIGNS_OF_LOSS = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout")


class ProcessGroup:
    """
    The processes that `accelerate launch` or `torchrun` started together; a single one where nothing did.

    The trainer's arguments have set up `torch.distributed` when this is made.
    """

    def __init__(self) -> None:
        self.index, self.count = 0, 1
        self._group: Any = None
        if distributed.is_available() and distributed.is_initialized():
            self.index, self.count = distributed.get_rank(), distributed.get_world_size()
        if self.count > 1:
            self._group = distributed.new_group(backend="gloo", timeout=_LONGEST_STAGE)

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes."""
        return self.index == 0

    @property
    def per_node(self) -> int:
        """How many of them share this machine."""
        return min(self.count, int(os.environ.get("LOCAL_WORLD_SIZE", self.count)))

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """The items that are up to this process: every `count`-th, so that none gets all the heavy ones."""
        return items[self.index :: self.count]

    def wait(self) -> None:
        """Returns when all processes have come here."""
        if self.count > 1:
            with self.explained():
                distributed.barrier(group=self._group)

    def agree(self, value: bool) -> bool:
        """Whether `value` is true in every process."""
        if self.count == 1:
            return value
        votes = torch.tensor([int(value)])
        with self.explained():
            distributed.all_reduce(votes, distributed.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Says what a broken connection to another process means, or a dead one that made batches for this one."""
        try:
            yield
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                raise ChildProcessError(
                    f"A process that makes batches has died, often for lack of memory ({error}). Set fewer "
                    "`dataloader_num_workers`, and start again with `resume_from_checkpoint=True` to go on from the "
                    "last checkpoint."
                ) from error
            if self.count > 1 and any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS):
                raise ConnectionError(
                    f"Process {self.index} of {self.count} has lost another process of this training, which ended or "
                    "does not answer: its own last messages say why. Start all of them again with "
                    f"`resume_from_checkpoint=True` to go on from the last checkpoint. ({error})"
                ) from error
            raise

    def average(self, gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
        """
        The mean over processes of a gradient, the same on each of them.

        Args:
            gradient (`torch.Tensor`, *optional*):
                Gradient of this process; none where its documents had nothing to do with the parameter.
            parameter (`torch.Tensor`):
                The parameter.

        Returns:
            `torch.Tensor`: `None` where no process has a gradient.
        """
        known = torch.tensor([float(gradient is not None)], device=parameter.device)
        distributed.all_reduce(known)
        if not known.item():
            return None
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        distributed.all_reduce(gradient)
        return gradient.div_(self.count)

    def average_rows(self, gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
        """
        The mean over processes of a gradient that holds few rows of a parameter, the same on each of them.

        Args:
            gradient (`torch.Tensor`, *optional*):
                Sparse gradient of this process; none where its documents touched no row.
            parameter (`torch.Tensor`):
                The parameter.

        Returns:
            `torch.Tensor`: sparse; `None` where no process touched a row.
        """
        if gradient is None:
            rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        else:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        sizes = self._gather(torch.tensor([len(rows)], device=parameter.device)).tolist()
        if not any(sizes):
            return None
        # Collectives want the same size of all.
        missing = max(sizes) - len(rows)
        all_rows = self._gather(torch.cat([rows, rows.new_zeros(missing)]))
        all_values = self._gather(torch.cat([values, values.new_zeros((missing, *values.shape[1:]))]))
        known = (torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)).flatten().to(parameter.device)
        summed = torch.sparse_coo_tensor(all_rows[known].unsqueeze(0), all_values[known], parameter.shape)
        return (summed / self.count).coalesce()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """What each process passes, one after the other."""
        gathered = [torch.empty_like(tensor) for _ in range(self.count)]
        distributed.all_gather(gathered, tensor)
        return torch.cat(gathered)

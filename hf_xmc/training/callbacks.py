"""Callbacks of the trainer: the start, the ends of levels, signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from ..parallel.process_group import ProcessGroup

if TYPE_CHECKING:
    from .levels import Levels

logger = logging.getLogger(__name__)

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


class StartCallback(TrainerCallback):
    """
    Completes the start of the training loop: logs of earlier stages, the state of a checkpoint, random numbers.

    The loop starts a new log, to which `earlier_logs` are added.
    """

    def __init__(self, trainer: Any, checkpoint: str | None, earlier_logs: list[dict[str, float]]) -> None:
        self._trainer, self._checkpoint, self.earlier_logs = trainer, checkpoint, earlier_logs

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs after the model has been wrapped and before the first step."""
        state.log_history.extend(self.earlier_logs)
        if self._checkpoint is not None:
            self._trainer.load_training_state(self._checkpoint)
        else:
            # Each process draws its own dropout.
            torch.manual_seed(args.seed + args.process_index)


class LevelCallback(TrainerCallback):
    """
    Ends levels: averages weights, asks for a checkpoint at the end of a level, and turns early stopping into the end
    of the current level instead of the end of training.

    It must be the last of `callbacks`, those of the trainer, so that it sees what the others ask for.
    """

    def __init__(self, levels: Levels, callbacks: list[TrainerCallback]) -> None:
        self.levels, self._callbacks = levels, callbacks
        self.last_save = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Updates the average of the weights; a stopped level ends here."""
        # A resumed training may begin in the middle of a pass, which the Trainer does not know.
        state.epoch = state.global_step / self.levels.steps_per_pass
        self.levels.update_average(state.global_step)
        if self.levels.plan_by_time(state.global_step):
            state.max_steps = args.max_steps = self.levels.schedule.total
            control.should_training_stop |= state.global_step >= state.max_steps
        self._end_level(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the level if early stopping, or another callback, asks for it."""
        self._end_level(args, state, control)

    on_epoch_end = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remembers the step of the last checkpoint."""
        self.last_save = state.global_step

    def _end_level(self, args: Any, state: Any, control: Any) -> None:
        levels, schedule, step = self.levels, self.levels.schedule, state.global_step
        if levels.active >= 0 and control.should_training_stop and step < schedule.total:
            # A level that ends at this step anyway must not end the next one as well.
            if step < schedule.ends[levels.active]:
                schedule.end_level(step)
            state.max_steps = args.max_steps = schedule.total
            control.should_training_stop = step >= schedule.total
            for callback in self._callbacks:
                if isinstance(callback, EarlyStoppingCallback):
                    callback.early_stopping_patience_counter = 0
        # The next level starts with long stages: they should not be lost with the steps before.
        if step in schedule.ends and step != self.last_save and args.save_strategy != "no":
            control.should_save = True


class SignalCallback(TrainerCallback):
    """
    Writes a checkpoint and exits after the current step when any process receives SIGTERM or SIGINT (Ctrl-C).

    Outside of training steps a signal ends the process at once: other stages keep their finished pieces on disk. So
    does a second SIGINT. `enable_jit_checkpoint` of transformers does not serve here, as its processes do not agree on
    the step at which they save.
    """

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._received = 0
        self._waits = self._ends = False
        self._previous: dict[int, Any] = {}

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handles the signals within its block. Only the main thread can handle signals."""
        self._received, self._waits, self._ends = 0, False, False
        if threading.current_thread() is threading.main_thread():
            # A process that ignores Ctrl-C, such as one in the background of a shell, goes on doing so.
            handled = [
                number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN
            ]
            self._previous = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and self._received == signal.SIGINT
        self._received = number
        if not self._waits or is_second:
            self._restore()
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT:
            logger.warning("Interrupted: a checkpoint is written after this step. Interrupt again to stop at once.")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From now on a checkpoint can be written before the process ends."""
        self._waits = args.save_strategy != "no"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for a checkpoint if any process received a signal."""
        if self._waits and not self._processes.agree(not self._received):
            control.should_save = self._ends = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exits once the checkpoint is written."""
        if self._ends:
            name = signal.Signals(self._received or signal.SIGTERM).name
            logger.warning(
                "Received %s. Resume after step %d with `resume_from_checkpoint=True`.", name, state.global_step
            )
            if self._received == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(SIGTERM_EXIT_CODE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No steps are left."""
        self._waits = False

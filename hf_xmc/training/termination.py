"""SIGTERM: a training that is asked to end writes a checkpoint first."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM


class Termination:
    """
    While it is entered, SIGTERM is noted instead of ending the process, as long as `is_patient` says so.

    Between the steps of an optimiser a checkpoint can be written before the process ends. Other stages keep what they
    have done as they go: there the signal ends the process at once, as it does without this.
    """

    def __init__(self) -> None:
        self.is_asked = self.is_patient = False
        self._before: Any = None

    def __enter__(self) -> Termination:
        self.is_asked = self.is_patient = False
        # Only the main thread may handle signals; a training in another one is ended as ever.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if not self.is_patient:
            self.__exit__()
            os.kill(os.getpid(), number)

"""TensorBoard's files, which a run can do without."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter  # type: ignore[import-untyped]


class Board:
    """Writes scalars for TensorBoard. Where that fails (a full disk), says so once and stops.

    tensorboardX hands them to a thread through a queue. A thread that has met an error is gone and
    nobody reads the queue any more: so the queue has no limit at which a call would wait, and
    nothing is put into it when the thread is gone.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        self._writer: Any = None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=first_step, max_queue=0)
        except OSError as error:
            self._say(error.strerror or "an error")

    @property
    def _events(self) -> Any:
        return self._writer.file_writer.event_writer

    def add(self, name: str, value: float, step: int) -> None:
        """A number, unless it is not known."""
        if self._writer is None or math.isnan(value):
            return
        if self._events._worker.is_alive():
            self._writer.add_scalar(name, value, step)
        else:
            self._give_up("an error of its writer")

    def close(self) -> None:
        if self._writer is None:
            return
        if not self._events._worker.is_alive():
            self._give_up("an error of its writer")
            return
        try:
            self._writer.close()
        except OSError as error:
            self._give_up(error.strerror or "an error")

    def _give_up(self, reason: str) -> None:
        queue = self._events._event_queue
        if queue is not None:
            queue.cancel_join_thread()  # or the process would not end before somebody reads it
        self._events._closed = True  # or it would be flushed once more at the end, in vain
        self._writer = None
        self._say(reason)

    def _say(self, reason: str) -> None:
        print(
            f"revrnn: nothing more is written for TensorBoard because of {reason}; the run goes on",
            file=sys.stderr,
        )

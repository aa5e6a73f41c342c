"""Stopping when asked: SIGINT and SIGTERM let the step in hand end first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class StoppedError(Exception):
    """A signal asked the run to stop; the checkpoint is written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Signals:
    """Within ``with``, the first signal is only noted, for `raise_if_asked`; a second one ends the
    process's work at once."""

    def __init__(self) -> None:
        self._asked = 0

    def __enter__(self) -> Self:
        both = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._ask) for number in both}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = number

    @property
    def asked(self) -> bool:
        return self._asked > 0

    def stopped(self) -> StoppedError:
        """By the signal noted; by SIGTERM if another process noted one."""
        return StoppedError(self._asked or signal.SIGTERM)

    def raise_if_asked(self) -> None:
        if self._asked:
            raise self.stopped()

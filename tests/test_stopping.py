"""Stopping when asked."""

from __future__ import annotations

import signal

import pytest

from revrnn.recipes.stopping import Signals, StoppedError


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted_and_the_second_ends(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Signals() as signals:  # noqa: PT012
        assert not signals.asked
        signals.raise_if_asked()
        signal.raise_signal(number)
        assert signals.asked
        with pytest.raises(StoppedError) as stopped:
            signals.raise_if_asked()
        assert stopped.value.exit_code == code
        signal.raise_signal(number)
    assert signal.getsignal(number) is before

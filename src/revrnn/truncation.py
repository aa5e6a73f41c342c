"""Truncated backpropagation: a long sequence in segments that carry their state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, TypeAlias

from torch import Tensor

from revrnn import _checks, _stream_checks

State: TypeAlias = Any
"""A tensor, or tuples and lists of them, as modules and `revrnn.stream` return: None at first."""


def detach(state: State) -> State:
    """The same state without its history."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return state.detach()
    if not isinstance(state, (tuple, list)):
        raise TypeError(
            f"state must be a tensor, or a tuple or list of states, got {type(state).__name__}"
        )
    return type(state)(detach(part) for part in state)


class Segment:
    """A part of a long sequence; `state` is what the segment before ended with, detached."""

    def __init__(self, first: int, tensors: tuple[Tensor, ...], state: State) -> None:
        self.first = first
        """Its first time step in the whole sequence."""
        self.tensors = tensors
        self.state = state
        """Assign the state that the segment ends with; the next one begins with it."""


def truncated(
    *tensors: Tensor, length: int | Iterable[int], state: State = None
) -> Iterator[Segment]:
    """Cut tensors (T, ...) into segments along time and carry the state from one to the next.

    ::

        for segment in revrnn.truncated(inputs, targets, length=70):
            x, y = segment.tensors
            loss, segment.state = revrnn.stream(rnn, x, segment.state, head=head, targets=y)
            loss.backward()
            ...

    Args:
        tensors: of equal length, time first.
        length: steps a segment; or one number for each segment, from an iterable that is read as
            far as the tensors reach.
        state: what the first segment begins with.
    """
    parts = _stream_checks.tensors("tensors", tensors)
    if not parts or parts[0].dim() < 1:
        raise ValueError(
            "tensors must hold at least one tensor, time first, got "
            + ("none" if not parts else "a scalar")
        )
    steps = parts[0].shape[0]
    _stream_checks.same_steps("tensors", parts, steps, "the first of them has")
    if isinstance(length, Iterable):
        return _segments(parts, steps, iter(length), detach(state))
    return _segments(parts, steps, repeat(_checks.positive("length", length)), detach(state))


def _segments(
    tensors: tuple[Tensor, ...], steps: int, lengths: Iterator[int], state: State
) -> Iterator[Segment]:
    first = 0
    while first < steps:
        length = next(lengths, None)
        if length is None:
            raise ValueError(
                f"length must cover all {steps} time steps, got an iterable that ends after {first}"
            )
        last = first + _checks.positive("length", length)
        segment = Segment(first, tuple(tensor[first:last] for tensor in tensors), state)
        yield segment
        state = detach(segment.state)
        first = last

"""What can go wrong while training, and what the message tells the user to do about it.

Errors about the arguments of a call are plain ``ValueError`` and ``TypeError``; these three are
about numbers and memory in the middle of a pass.
"""

from __future__ import annotations

from typing import Self

from revrnn.fixed import STATE_LIMIT_VALUE


class ReversalError(RuntimeError):
    """The backward pass could not bring the hidden states back.

    Raised when the information tape runs empty too early, when it is not empty after the last
    step, or when the pass does not arrive at the initial state. The gradients would be wrong, so
    there are none.
    """

    _ADVICE = (
        "Reversal needs the very numbers of the forward pass: check that no weight, input or tape "
        "tensor was changed between forward and backward. reversible=False trains the same model "
        "with its states stored."
    )

    row: int = 0
    """The batch row that failed first, where one did."""

    @classmethod
    def because(cls, reason: str, row: int = 0) -> Self:
        error = cls(f"{reason}. {cls._ADVICE}")
        error.row = row
        return error

    @classmethod
    def at(cls, layer: str, step: int, row: int) -> Self:
        return cls.because(
            f"{layer}: the states of batch row {row} could not be brought back at time step {step}",
            row,
        )


class StateOverflowError(OverflowError):
    """A hidden or cell state left the range of the fixed-point format, ``|h| < 254``.

    Raised by the forward pass, at the step that did it.
    """

    _FORGET_MORE = (
        "Lower the learning rate or clip the gradients, let the layer forget more "
        "(max_forget_bits=None or larger), or detach and rescale the state that is carried from "
        "sequence to sequence."
    )
    _NEVER_FORGETS = (
        "With forget='none' every step adds to the state and nothing takes away from it: begin "
        "shorter sequences at a zero state, penalise the norm of the state, or let the layer "
        "forget (forget='fractional')."
    )

    @classmethod
    def at(cls, layer: str, step: int, row: int, *, forgets: bool = True) -> Self:
        return cls(
            f"{layer}: the state of batch row {row} left the fixed-point range "
            f"|h| < {STATE_LIMIT_VALUE:g} at time step {step}. "
            f"{cls._FORGET_MORE if forgets else cls._NEVER_FORGETS}"
        )


class NonFiniteError(FloatingPointError):
    """A gate's pre-activation is NaN or infinite.

    Raised at the step that computed it: the input, the weights or the initial state are not
    finite, or so large that their products are not.
    """

    row: int = 0
    """The batch row."""

    @classmethod
    def at(cls, layer: str, step: int, row: int) -> Self:
        error = cls(
            f"{layer}: a gate of batch row {row} is NaN or infinite at time step {step}. Check the "
            "input and the weights for values that are not finite; if the weights diverged, lower "
            "the learning rate or clip the gradients."
        )
        error.row = row
        return error

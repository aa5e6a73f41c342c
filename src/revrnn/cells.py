"""The cells: one group's share of a time step, its exact inverse and its gradient.

The H units of a layer are two groups of D = H/2. Group 1 is updated from group 2's old state,
group 2 from group 1's *new* state. So whoever holds the new states can recompute group 2's gates,
undo group 2, recompute group 1's gates, and undo group 1.

In a group's step below, the states ``h`` (and ``c``) are the group's own, int32; ``other`` is h of
the other group as floats; ``pre`` is the input's share of the pre-activations, ``b + W x``, and
``recur`` adds the other group's. Gates lie side by side, in the order of `Cell.gate_names`. A
forget gate is kept as its sigmoid s and becomes ``z* = round(2**RADIX_Z (a + (1 - a) s))`` where it
multiplies; ``(*)`` is the exact multiplication by z*, and `to_fixed` rounds to the state's grid.

Gradients are those of the real-valued step at the quantised values: rounding is passed straight
through, ``z`` is ``z* / 2**RADIX_Z``, and ``dz/ds = 1 - a``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from revrnn.errors import ReversalError
from revrnn.exact import multiply_untaped
from revrnn.fixed import Z_ONE, ForgetRange, quantise_forget, to_fixed, to_float
from revrnn.tape import Codec

States: TypeAlias = tuple[Tensor, ...]
"""The S states of a group, each (n, D): (h,) or (h, c)."""

Recur: TypeAlias = Callable[[Tensor, Tensor, slice], Tensor]
"""``recur(values, start, gates)`` is ``start + values @ W.T``: (n, D), (n, m) -> (n, m). W is the m
rows ``gates`` of the group's recurrent weights (G*D, D)."""

RecurBack: TypeAlias = Callable[[Tensor, slice], Tensor]
"""``recur_back(d_pre, gates)`` is ``d_pre @ W`` for the same W: (n, m) -> (n, D)."""


@dataclass(frozen=True)
class Cell(ABC):
    """A kind of cell: its sizes, and one group's step in both directions."""

    name: str
    gate_names: tuple[str, ...]
    """In the order of the weight rows."""
    states: int
    """S: 1 (h) or 2 (h, c)."""

    @property
    def gates(self) -> int:
        """G."""
        return len(self.gate_names)

    @abstractmethod
    def activate(self, pre: Tensor, other: Tensor, recur: Recur) -> Tensor:
        """The gates (n, G*D) from ``pre`` (n, G*D) and ``other`` (n, D)."""

    @abstractmethod
    def advance(
        self,
        old: States,
        gates: Tensor,
        other: Tensor,
        forget: ForgetRange,
        codec: Codec,
        stored_units: int,
    ) -> tuple[States, Tensor]:
        """The states after the step, and what `gradient` needs besides gates and states (n, D).

        The first ``stored_units`` units of h skip the codec: their old values are stored.
        """

    @abstractmethod
    def rewind(
        self,
        new: States,
        gates: Tensor,
        other: Tensor,
        forget: ForgetRange,
        codec: Codec,
        stored: Tensor | None,
    ) -> tuple[States, Tensor]:
        """The states before the step, bit for bit, and the same extra tensor as `advance`.

        ``stored`` (n, K): the old values of the first K units of h.
        """

    @abstractmethod
    def gradient(
        self,
        d_new: States,
        gates: Tensor,
        old: States,
        other: Tensor,
        extra: Tensor,
        forget: ForgetRange,
        recur_back: RecurBack,
    ) -> tuple[Tensor, States, Tensor]:
        """Gradients of the pre-activations (n, G*D), of the old states and of ``other``.

        ``d_new`` and ``old`` are floats: the gradients of the new states, and the old states.
        """

    @abstractmethod
    def recurrent_inputs(self, other: Tensor, extra: Tensor) -> list[tuple[slice, Tensor]]:
        """Which rows of the recurrent weights multiplied what: ``dW[gates] = d_pre[:, gates].T @
        inputs`` summed over rows and steps."""


class _RevGRU(Cell):
    """::

    [z; r] = sigmoid(pre + W other)
    g      = tanh(pre + W (r other))
    h     <- z (*) h + to_fixed((1 - z) g)
    """

    def activate(self, pre: Tensor, other: Tensor, recur: Recur) -> Tensor:
        size = other.shape[1]
        zr, new = slice(0, 2 * size), slice(2 * size, 3 * size)
        gates = torch.empty_like(pre)
        gates[:, zr] = sigmoid(recur(other, pre[:, zr], zr))
        gates[:, new] = tanh(recur(self._reset(gates, other), pre[:, new], new))
        return gates

    def advance(
        self,
        old: States,
        gates: Tensor,
        other: Tensor,
        forget: ForgetRange,
        codec: Codec,
        stored_units: int,
    ) -> tuple[States, Tensor]:
        (h,) = old
        z, update = self._update(gates, forget)
        return (_multiply(codec, h, z, stored_units) + update,), self._reset(gates, other)

    def rewind(
        self,
        new: States,
        gates: Tensor,
        other: Tensor,
        forget: ForgetRange,
        codec: Codec,
        stored: Tensor | None,
    ) -> tuple[States, Tensor]:
        (h,) = new
        z, update = self._update(gates, forget)
        return (_divide(codec, h - update, z, stored),), self._reset(gates, other)

    def gradient(
        self,
        d_new: States,
        gates: Tensor,
        old: States,
        other: Tensor,
        extra: Tensor,
        forget: ForgetRange,
        recur_back: RecurBack,
    ) -> tuple[Tensor, States, Tensor]:
        """With ``h' = z h + (1 - z) g`` and ``q = r other`` (the extra tensor)::

        d_h = d_h' z            d_z = d_h' (h - g)                 d_g = d_h' (1 - z)
        d_q = W_g^T d_pre_g     d_r = d_q other                    d_other = d_q r + W_zr^T d_pre_zr
        d_pre_z = d_z (1-a) s (1-s)    d_pre_r = d_r r (1-r)       d_pre_g = d_g (1-g^2)
        """
        (d_h,), (h,) = d_new, old
        size = other.shape[1]
        zr, new = slice(0, 2 * size), slice(2 * size, 3 * size)
        s, r, g = gates.chunk(3, dim=1)
        z = _forget_value(s, forget)
        d_pre = torch.empty_like(gates)
        d_pre_z, d_pre_r, d_pre_g = d_pre.chunk(3, dim=1)
        d_pre_g.copy_(d_h * (1 - z) * (1 - g * g))
        d_reset = recur_back(d_pre_g, new)
        d_pre_r.copy_(d_reset * other * r * (1 - r))
        d_pre_z.copy_(d_h * (h - g) * _forget_slope(s, forget))
        d_other = d_reset * r + recur_back(d_pre[:, zr], zr)
        return d_pre, (d_h * z,), d_other

    def recurrent_inputs(self, other: Tensor, extra: Tensor) -> list[tuple[slice, Tensor]]:
        size = other.shape[1]
        return [(slice(0, 2 * size), other), (slice(2 * size, 3 * size), extra)]

    def _reset(self, gates: Tensor, other: Tensor) -> Tensor:
        """``r other``."""
        size = other.shape[1]
        return gates[:, size : 2 * size] * other

    def _update(self, gates: Tensor, forget: ForgetRange) -> tuple[Tensor, Tensor]:
        """z* and what is added to ``z (*) h``."""
        s, _, g = gates.chunk(3, dim=1)
        fixed = quantise_forget(s, forget)
        return fixed, to_fixed((1 - fixed.to(g.dtype) / Z_ONE) * g)


class _RevLSTM(Cell):
    """::

    [f; i; o; p] = sigmoid(pre + W other)
    g            = tanh(pre + W other)
    c           <- f (*) c + to_fixed(i g)
    h           <- p (*) h + to_fixed(o tanh(c))          with the new c
    """

    def activate(self, pre: Tensor, other: Tensor, recur: Recur) -> Tensor:
        size = other.shape[1]
        gates = recur(other, pre, slice(0, 5 * size))
        gates[:, : 4 * size] = sigmoid(gates[:, : 4 * size])
        gates[:, 4 * size :] = tanh(gates[:, 4 * size :])
        return gates

    def advance(
        self,
        old: States,
        gates: Tensor,
        other: Tensor,
        forget: ForgetRange,
        codec: Codec,
        stored_units: int,
    ) -> tuple[States, Tensor]:
        h, c = old
        f, i, o, p, g = gates.chunk(5, dim=1)
        c = codec.multiply(c, quantise_forget(f, forget)) + to_fixed(i * g)
        squashed = tanh(to_float(c, g.dtype))
        h = _multiply(codec, h, quantise_forget(p, forget), stored_units) + to_fixed(o * squashed)
        return (h, c), squashed

    def rewind(
        self,
        new: States,
        gates: Tensor,
        other: Tensor,
        forget: ForgetRange,
        codec: Codec,
        stored: Tensor | None,
    ) -> tuple[States, Tensor]:
        h, c = new
        f, i, o, p, g = gates.chunk(5, dim=1)
        squashed = tanh(to_float(c, g.dtype))
        h = _divide(codec, h - to_fixed(o * squashed), quantise_forget(p, forget), stored)
        c = codec.divide(c - to_fixed(i * g), quantise_forget(f, forget))
        return (h, c), squashed

    def gradient(
        self,
        d_new: States,
        gates: Tensor,
        old: States,
        other: Tensor,
        extra: Tensor,
        forget: ForgetRange,
        recur_back: RecurBack,
    ) -> tuple[Tensor, States, Tensor]:
        """With ``c' = f c + i g``, ``h' = p h + o y`` and ``y = tanh(c')`` (the extra tensor)::

        d_h = d_h' p      d_p = d_h' h      d_o = d_h' y      e = d_c' + d_h' o (1 - y^2)
        d_c = e f         d_f = e c         d_i = e g         d_g = e i
        d_pre_k = d_k (1-a) s (1-s) for k = f, p     d_k k (1-k) for k = i, o     d_g (1-g^2)
        d_other = W^T d_pre
        """
        (d_h, d_c), (h, c) = d_new, old
        f, i, o, p, g = gates.chunk(5, dim=1)
        d_c = d_c + d_h * o * (1 - extra * extra)
        d_pre = torch.cat(
            (
                d_c * c * _forget_slope(f, forget),
                d_c * g * i * (1 - i),
                d_h * extra * o * (1 - o),
                d_h * h * _forget_slope(p, forget),
                d_c * i * (1 - g * g),
            ),
            dim=1,
        )
        d_old = (d_h * _forget_value(p, forget), d_c * _forget_value(f, forget))
        return d_pre, d_old, recur_back(d_pre, slice(0, d_pre.shape[1]))

    def recurrent_inputs(self, other: Tensor, extra: Tensor) -> list[tuple[slice, Tensor]]:
        return [(slice(0, 5 * other.shape[1]), other)]


GRU = _RevGRU("RevGRU", ("z", "r", "g"), states=1)
LSTM = _RevLSTM("RevLSTM", ("f", "i", "o", "p", "g"), states=2)


def _multiply(codec: Codec, h: Tensor, z: Tensor, stored_units: int) -> Tensor:
    """``z (*) h``, of which the first units only need the value: what they were is stored."""
    if stored_units == 0:
        return codec.multiply(h, z)
    product = torch.empty_like(h)
    product[:, :stored_units] = multiply_untaped(h[:, :stored_units], z[:, :stored_units])
    if stored_units < h.shape[1]:
        product[:, stored_units:] = codec.multiply(h[:, stored_units:], z[:, stored_units:])
    return product


def _divide(codec: Codec, h: Tensor, z: Tensor, stored: Tensor | None) -> Tensor:
    """The h that `_multiply` was given; ``stored`` (n, K) are its first units.

    Each must lead to what its unit is now: nothing else would notice that it was changed.
    """
    if stored is None:
        return codec.divide(h, z)
    units = stored.shape[1]
    wrong = (multiply_untaped(stored, z[:, :units]) != h[:, :units]).any(1)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise ReversalError.because(f"a stored unit of batch row {row} was changed", row)
    if units == h.shape[1]:
        return stored
    return torch.cat((stored, codec.divide(h[:, units:], z[:, units:])), dim=1)


def _forget_value(gate: Tensor, forget: ForgetRange) -> Tensor:
    """``z* / 2**RADIX_Z`` for the sigmoid s of a forget gate."""
    return quantise_forget(gate, forget).to(gate.dtype) / Z_ONE


def _forget_slope(gate: Tensor, forget: ForgetRange) -> Tensor:
    """``dz/dpre = (1 - a) s (1 - s)``."""
    return (1 - forget.floor) * gate * (1 - gate)


# Reversal needs the very same gates again, whatever the batch and the number of threads. PyTorch's
# own sigmoid and tanh do not promise that: they use one routine in the body of a tensor and
# another in the tail of each thread's share, and the two differ in the last bit. So both are built
# from sums, products and quotients, which IEEE 754 rounds in one way only.


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^-x) = 1 / (2 + expm1(-x))``."""
    # A quotient, not the reciprocal that ``1 / tensor`` becomes.
    return x.new_ones(()) / (2 + _expm1(-x))


def tanh(x: Tensor) -> Tensor:
    """``(e^2x - 1) / (e^2x + 1) = t / (t + 2)`` with ``t = expm1(2 x)``: exact to the last bits
    around zero too."""
    t = _expm1(2 * x)
    return t / (t + 2)


def _expm1(x: Tensor) -> Tensor:
    """``e^x - 1`` for finite x, as ``2^n p + (2^n - 1)`` with ``p = expm1(x - n ln 2)``.

    p is a Taylor polynomial on ``|x - n ln 2| <= ln 2 / 2``, long enough for the dtype. x is cut at
    +-64, where sigmoid and tanh are long since constant.
    """
    bits, exponent, degree, split = _FORMATS[x.dtype]
    x = x.clamp(-64, 64)
    n = (x * (1 / math.log(2))).round()
    # ln 2 in two parts; n times the first is exact.
    high = round(math.log(2) * 2**split) / 2**split
    rest = (x - n * high) - n * (math.log(2) - high)
    p = torch.full_like(x, 1 / math.factorial(degree))
    for k in range(degree - 1, 0, -1):
        p.mul_(rest).add_(1 / math.factorial(k))
    p.mul_(rest)
    mantissa = bits.itemsize * 8 - 1 - exponent
    power = ((n.to(bits) + ((1 << (exponent - 1)) - 1)) << mantissa).view(x.dtype)
    return power * p + (power - 1)


_FORMATS = {
    # Integer of the same size, bits of the exponent, degree of the Taylor polynomial, and how many
    # bits of ln 2 its first part has.
    torch.float32: (torch.int32, 8, 7, 15),
    torch.float64: (torch.int64, 11, 13, 40),
}

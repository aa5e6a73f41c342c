"""The cells: one group's share of a time step, its exact inverse and its gradient.

The H units of a layer are two groups of D = H/2. Group 1 is updated from group 2's old state,
group 2 from group 1's *new* state. So whoever holds the new states can recompute group 2's gates,
undo group 2, recompute group 1's gates, and undo group 1.

In a group's step below, the states ``h`` (and ``c``) are the group's own, int32; ``other`` is h of
the other group as floats; ``pre`` is the input's share of the pre-activations, ``b + W x``, and
``recur`` adds the other group's. Gates lie side by side, in the order of `Cell.gate_names`. A
forget gate is kept as its sigmoid s and becomes ``z* = round(2**RADIX_Z (a + (1 - a) s))`` where it
multiplies; ``(*)`` is the exact multiplication by z*, and `to_fixed` rounds to the state's grid.
That is fractional forgetting; `revrnn.forgetting` has the other rules, and what a forget gate is in
each of them.

Gradients are those of the real-valued step at the quantised values: rounding is passed straight
through, ``z`` is ``z* / 2**RADIX_Z``, and ``dz/ds = 1 - a``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from revrnn.activations import sigmoid, tanh
from revrnn.fixed import ForgetRange, to_fixed, to_float
from revrnn.forgetting import Discrete, Draw, Estimator, Fractional, Retained, Rule
from revrnn.tape import Codec

States: TypeAlias = tuple[Tensor, ...]
"""The S states of a group, each (n, D): (h,) or (h, c)."""

Recur: TypeAlias = Callable[[Tensor, Tensor, slice], Tensor]
"""``recur(values, start, gates)`` is ``start + values @ W.T``: (n, D), (n, m) -> (n, m). W is the m
rows ``gates`` of the group's recurrent weights (G*D, D)."""

FORGET, KEEP, SEEN = 0, 1, 2
"""What noise is for: what is chosen for z or f, what is chosen for p, and what the gates see of the
other group."""

Uniform: TypeAlias = Callable[[int, int], Tensor]
"""``uniform(purpose, width)`` gives uniform numbers (n, width) in (0, 1), other ones for every
purpose and the same ones in both directions."""

RecurBack: TypeAlias = Callable[[Tensor, slice], Tensor]
"""``recur_back(d_pre, gates)`` is ``d_pre @ W`` for the same W: (n, m) -> (n, D)."""


@dataclass(frozen=True)
class Cell(ABC):
    """A kind of cell: its sizes, and one group's step in both directions."""

    name: str
    states: int
    """S: 1 (h) or 2 (h, c)."""
    rule: Rule
    """How units forget."""

    @property
    @abstractmethod
    def gate_names(self) -> tuple[str, ...]:
        """In the order of the weight rows."""

    @property
    def gates(self) -> int:
        """G."""
        return len(self.gate_names)

    @property
    def choices(self) -> int:
        """Columns a unit, behind those of the gates, for what was chosen."""
        return self.states if self.rule.chooses else 0

    @abstractmethod
    def activate(
        self, pre: Tensor, other: Tensor, recur: Recur, uniform: Uniform | None = None
    ) -> Tensor:
        """The gates (n, G*D) from ``pre`` (n, G*D) and ``other`` (n, D), and behind them what was
        chosen (n, choices*D)."""

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
        """The states after the step, and what `gradient` needs besides gates and states
        (n, (1 + choices)*D).

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

    @property
    def gate_names(self) -> tuple[str, ...]:
        return (*self.rule.names("z"), "r", "g")

    def activate(
        self, pre: Tensor, other: Tensor, recur: Recur, uniform: Uniform | None = None
    ) -> Tensor:
        main, new = self._rows(other.shape[1])
        sums = recur(other, pre[:, main], main)
        sizes = self._sizes(other.shape[1])
        z, chosen = self.rule.activate(sums[:, : sizes[0]], sizes[2], _draw(uniform, FORGET))
        r = sigmoid(sums[:, sizes[0] :])
        g = tanh(recur(r * other, pre[:, new], new))
        return torch.cat((z, r, g, chosen), dim=1)

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
        z, update, extra = self._step(gates, other, forget)
        return (self.rule.multiply(codec, h, z, stored_units) + update,), extra

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
        z, update, extra = self._step(gates, other, forget)
        return (self.rule.divide(codec, h - update, z, stored),), extra

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
        main, new = self._rows(size)
        columns, r, g = gates.split(self._sizes(size), dim=1)
        chosen = extra[:, size:]
        z = self.rule.value(columns, chosen, self.rule.amount(columns, chosen, forget))
        d_z = d_h * (h - g) if self.rule.forgets else -d_h * g
        d_pre = torch.empty_like(gates)
        d_pre_z, d_pre_r, d_pre_g = d_pre.split(self._sizes(size), dim=1)
        d_pre_g.copy_(d_h * (1 - z) * (1 - g * g))
        d_reset = recur_back(d_pre_g, new)
        d_pre_r.copy_(d_reset * other * r * (1 - r))
        d_pre_z.copy_(self.rule.slope(d_z, columns, chosen, forget))
        d_other = d_reset * r + recur_back(d_pre[:, main], main)
        return d_pre, (d_h * z if self.rule.forgets else d_h,), d_other

    def recurrent_inputs(self, other: Tensor, extra: Tensor) -> list[tuple[slice, Tensor]]:
        size = other.shape[1]
        main, new = self._rows(size)
        return [(main, other), (new, extra[:, :size])]

    def _rows(self, size: int) -> tuple[slice, slice]:
        """The rows of the recurrent weights that multiply h of the other group, and r times it."""
        end = (self.gates - 1) * size
        return slice(0, end), slice(end, end + size)

    def _sizes(self, size: int) -> tuple[int, int, int]:
        """Columns of z, r and g."""
        return (self.gates - 2) * size, size, size

    def _step(
        self, gates: Tensor, other: Tensor, forget: ForgetRange
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z*, what is added to ``z (*) h``, and the extra tensor: ``r other``, then what was
        chosen."""
        size = other.shape[1]
        columns, r, g, chosen = _split(gates, self._sizes(size))
        z = self.rule.amount(columns, chosen, forget)
        update = to_fixed((1 - self.rule.value(columns, chosen, z)) * g)
        return z, update, torch.cat((r * other, chosen), dim=1)


class _RevLSTM(Cell):
    """::

    [f; i; o; p] = sigmoid(pre + W other)
    g            = tanh(pre + W other)
    c           <- f (*) c + to_fixed(i g)
    h           <- p (*) h + to_fixed(o tanh(c))          with the new c
    """

    @property
    def gate_names(self) -> tuple[str, ...]:
        return (*self.rule.names("f"), "i", "o", *self.rule.names("p"), "g")

    def activate(
        self, pre: Tensor, other: Tensor, recur: Recur, uniform: Uniform | None = None
    ) -> Tensor:
        sums = recur(other, pre, slice(0, pre.shape[1]))
        f, i, o, p, g = sums.split(self._sizes(other.shape[1]), dim=1)
        f, chosen_f = self.rule.activate(f, g.shape[1], _draw(uniform, FORGET))
        p, chosen_p = self.rule.activate(p, g.shape[1], _draw(uniform, KEEP))
        return torch.cat((f, sigmoid(i), sigmoid(o), p, tanh(g), chosen_f, chosen_p), dim=1)

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
        f, p, i, o, g, chosen_f, chosen_p = self._amounts(gates, other, forget)
        c = self.rule.multiply(codec, c, f, 0) + to_fixed(self.rule.share(i * g, chosen_f))
        squashed = tanh(to_float(c, g.dtype))
        update = to_fixed(self.rule.share(o * squashed, chosen_p))
        h = self.rule.multiply(codec, h, p, stored_units) + update
        return (h, c), torch.cat((squashed, chosen_f, chosen_p), dim=1)

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
        f, p, i, o, g, chosen_f, chosen_p = self._amounts(gates, other, forget)
        squashed = tanh(to_float(c, g.dtype))
        update = to_fixed(self.rule.share(o * squashed, chosen_p))
        h = self.rule.divide(codec, h - update, p, stored)
        c = self.rule.divide(codec, c - to_fixed(self.rule.share(i * g, chosen_f)), f, None)
        return (h, c), torch.cat((squashed, chosen_f, chosen_p), dim=1)

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
        """With ``c' = f c + i g``, ``h' = p h + o y`` and ``y = tanh(c')`` (the extra tensor), and
        with zoneout a share of i g and of o y::

        d_h = d_h' p      d_p = d_h' h      d_o = d_h' y      e = d_c' + d_h' o (1 - y^2)
        d_c = e f         d_f = e c         d_i = e g         d_g = e i
        d_pre_k = d_k (1-a) s (1-s) for k = f, p     d_k k (1-k) for k = i, o     d_g (1-g^2)
        d_other = W^T d_pre
        """
        (d_h, d_c), (h, c) = d_new, old
        size = other.shape[1]
        f, i, o, p, g = gates.split(self._sizes(size), dim=1)
        y, chosen_f, chosen_p = self._extra(extra, size)
        d_update_h = self.rule.share(d_h, chosen_p)
        d_c = d_c + d_update_h * o * (1 - y * y)
        d_update_c = self.rule.share(d_c, chosen_f)
        d_pre = torch.cat(
            (
                self.rule.slope(d_c * c, f, chosen_f, forget),
                d_update_c * g * i * (1 - i),
                d_update_h * y * o * (1 - o),
                self.rule.slope(d_h * h, p, chosen_p, forget),
                d_update_c * i * (1 - g * g),
            ),
            dim=1,
        )
        if self.rule.forgets:
            d_h = d_h * self.rule.value(p, chosen_p, self.rule.amount(p, chosen_p, forget))
            d_c = d_c * self.rule.value(f, chosen_f, self.rule.amount(f, chosen_f, forget))
        return d_pre, (d_h, d_c), recur_back(d_pre, slice(0, d_pre.shape[1]))

    def recurrent_inputs(self, other: Tensor, extra: Tensor) -> list[tuple[slice, Tensor]]:
        return [(slice(0, self.gates * other.shape[1]), other)]

    def _sizes(self, size: int) -> tuple[int, int, int, int, int]:
        """Columns of f, i, o, p and g."""
        own = (self.gates - 3) // 2 * size
        return own, size, size, own, size

    def _extra(self, extra: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """tanh of the new c, and what was chosen for f and p."""
        own = (extra.shape[1] - size) // 2
        y, f, p = extra.split((size, own, own), dim=1)
        return y, f, p

    def _amounts(
        self, gates: Tensor, other: Tensor, forget: ForgetRange
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """f* and p*, then i, o and g, then what was chosen for f and p."""
        f, i, o, p, g, chosen = _split(gates, self._sizes(other.shape[1]))
        chosen_f, chosen_p = chosen.chunk(2, dim=1) if chosen.shape[1] else (chosen, chosen)
        z_f = self.rule.amount(f, chosen_f, forget)
        return z_f, self.rule.amount(p, chosen_p, forget), i, o, g, chosen_f, chosen_p


GRU = _RevGRU("RevGRU", 1, Fractional())
LSTM = _RevLSTM("RevLSTM", 2, Fractional())


def with_zoneout(cell: Cell, p: float) -> Cell:
    """The same cell with units that stay as they were, with probability p a step."""
    rule = cell.rule
    if not isinstance(rule, (Fractional, Retained)):
        raise TypeError(f"zoneout fits fractional forgetting and none, got {rule}")
    return replace(cell, rule=replace(rule, zoneout=p))


def without_forgetting(cell: Cell) -> Cell:
    """The same cell with nothing forgotten. f and p of a RevLSTM are of no use then."""
    return replace(cell, rule=Retained(gated=cell.states == 1))


def with_discrete_forgetting(
    cell: Cell, bits: int, estimator: Estimator = "gumbel", temperature: float = 1.0
) -> Cell:
    """The same cell with units that forget 0, 1, ... or ``bits`` whole bits."""
    return replace(cell, rule=Discrete(bits, estimator, temperature))


def _draw(uniform: Uniform | None, purpose: int) -> Draw | None:
    return None if uniform is None else partial(uniform, purpose)


def _split(gates: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The gates, and then the columns behind them: what was chosen."""
    return tuple(gates.split((*sizes, gates.shape[1] - sum(sizes)), dim=1))

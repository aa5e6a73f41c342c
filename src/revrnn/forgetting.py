"""How units forget: what a forget gate is computed as, and what it does to an integer state.

A state is updated by ``h <- z (*) h + u``. The *rule* of a cell says what z may be:

============  ======================  =================================================
`Fractional`  ``z* / 2**RADIX_Z``     the exact multiplication, ``log2(1 / z)`` bits on the tape
`Retained`    1: nothing is lost      h as it is, nothing on the tape
`Discrete`    1, 1/2, ..., ``2**-F``  ``h >> n``, n bits on the tape
============  ======================  =================================================

A forget gate has B *columns* a unit among the gates: B blocks of D, side by side. Tensors here are
``columns`` (n, B*D), ``chosen`` (n, D) or, for rules that choose nothing, (n, 0), and all others
(n, D).

*Zoneout* (Krueger et al.) leaves a unit as it was, with probability p a step: ``h <- h + w (z h + u
- h)`` with a *share* w that is 0 for such a unit and else 1; in eval w is ``1 - p``, what it is on
average. That is another z and another update, ``1 - w (1 - z)`` and ``w u``, so it takes nothing
more to undo: where w is 0, z is 1 and moves no digit (`revrnn.exact` holds for ``z* = 2**RADIX_Z``
too), and nothing is added. ``chosen`` is w then. Whole bits have no place for the z of eval, so
`Discrete` has no zoneout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from revrnn.activations import exp, log, sigmoid
from revrnn.errors import ReversalError
from revrnn.exact import multiply_untaped, rotate_left, rotate_right
from revrnn.fixed import Z_ONE, ForgetRange, quantise_forget
from revrnn.tape import Codec

Draw: TypeAlias = Callable[[int], Tensor]
"""``draw(width)`` gives uniform numbers (n, width) in (0, 1), the same ones in both directions."""

Estimator: TypeAlias = Literal["gumbel", "categorical"]


@dataclass(frozen=True)
class Rule(ABC):
    """What the forget gates of a cell do."""

    forgets: ClassVar[bool] = True
    """Whether states are multiplied at all, and so need a tape."""

    @property
    @abstractmethod
    def chooses(self) -> bool:
        """Whether something is chosen, at random if numbers are drawn, and kept beside the columns:
        z, or with zoneout w."""

    @abstractmethod
    def names(self, gate: str) -> tuple[str, ...]:
        """What the columns of a forget gate are called; B of them."""

    @abstractmethod
    def activate(self, sums: Tensor, units: int, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """``columns`` and ``chosen``, from the pre-activations (n, B*D) of D ``units``; None draws
        nothing."""

    @abstractmethod
    def amount(self, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """``z*``, int32: what the state is multiplied by."""

    def value(self, columns: Tensor, chosen: Tensor, amount: Tensor) -> Tensor:
        """z as a float, for the update ``(1 - z) g`` of a RevGRU."""
        return amount.to(columns.dtype) / Z_ONE

    def share(self, update: Tensor, chosen: Tensor) -> Tensor:
        """``w u``: what is added of an update that does not depend on z, or of its gradient."""
        return update

    @abstractmethod
    def slope(self, d_z: Tensor, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """Gradients of the pre-activations (n, B*D), from that of z."""

    def multiply(self, codec: Codec, h: Tensor, z: Tensor, stored_units: int) -> Tensor:
        """``z (*) h``, of which the first units only need the value: what they were is stored."""
        if stored_units == 0:
            return self._record(codec, h, z)
        product = torch.empty_like(h)
        product[:, :stored_units] = multiply_untaped(h[:, :stored_units], z[:, :stored_units])
        if stored_units < h.shape[1]:
            product[:, stored_units:] = self._record(
                codec, h[:, stored_units:], z[:, stored_units:]
            )
        return product

    def divide(self, codec: Codec, h: Tensor, z: Tensor, stored: Tensor | None) -> Tensor:
        """The h that `multiply` was given; ``stored`` (n, K) are its first units.

        Each must lead to what its unit is now: nothing else would notice that it was changed.
        """
        if stored is None:
            return self._recall(codec, h, z)
        units = stored.shape[1]
        _check_stored(multiply_untaped(stored, z[:, :units]), h[:, :units])
        if units == h.shape[1]:
            return stored
        return torch.cat((stored, self._recall(codec, h[:, units:], z[:, units:])), dim=1)

    def _record(self, codec: Codec, h: Tensor, z: Tensor) -> Tensor:
        """``z (*) h`` on the tape."""
        return codec.multiply(h, z)

    def _recall(self, codec: Codec, h: Tensor, z: Tensor) -> Tensor:
        """The inverse of `_record`."""
        return codec.divide(h, z)


@dataclass(frozen=True)
class _Zoned(Rule):
    """A rule with zoneout."""

    zoneout: float = 0.0
    """p."""

    @property
    def chooses(self) -> bool:
        return self.zoneout > 0

    def activate(self, sums: Tensor, units: int, draw: Draw | None) -> tuple[Tensor, Tensor]:
        if not self.chooses:
            return sigmoid(sums), sums[:, :0]
        if draw is None:
            w = sums.new_full((len(sums), units), 1 - self.zoneout)
        else:
            w = (draw(units) >= self.zoneout).to(sums.dtype)
        return sigmoid(sums), w

    def share(self, update: Tensor, chosen: Tensor) -> Tensor:
        return update * chosen if self.chooses else update


@dataclass(frozen=True)
class Fractional(_Zoned):
    """``s = sigmoid(pre)``, ``z* = round(2**RADIX_Z (a + (1 - a) s))``; the column keeps s."""

    def names(self, gate: str) -> tuple[str, ...]:
        return (gate,)

    def amount(self, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        return quantise_forget(columns, forget, chosen if self.chooses else None)

    def slope(self, d_z: Tensor, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """``w d_z (1 - a) s (1 - s)``."""
        return self.share(d_z, chosen) * ((1 - forget.floor) * columns * (1 - columns))


@dataclass(frozen=True)
class Retained(_Zoned):
    """No forgetting: h stays as it is, and nothing goes on the tape.

    A RevGRU still has its z, which only says how much of g is added: ``h <- h + (1 - z) g`` with
    ``z = sigmoid(pre)``, not quantised. A RevLSTM has no use for f and p, and no columns for them.
    """

    forgets = False
    gated: bool = True
    """Whether the cell's update depends on z."""

    def names(self, gate: str) -> tuple[str, ...]:
        return (gate,) if self.gated else ()

    def amount(self, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """Nothing: there is no multiplication."""
        return chosen

    def value(self, columns: Tensor, chosen: Tensor, amount: Tensor) -> Tensor:
        return 1 - chosen * (1 - columns) if self.chooses else columns

    def slope(self, d_z: Tensor, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """``w d_z s (1 - s)``."""
        return self.share(d_z, chosen) * (columns * (1 - columns)) if self.gated else columns

    def multiply(self, codec: Codec, h: Tensor, z: Tensor, stored_units: int) -> Tensor:
        return h

    def divide(self, codec: Codec, h: Tensor, z: Tensor, stored: Tensor | None) -> Tensor:
        if stored is not None:
            _check_stored(stored, h[:, : stored.shape[1]])
        return h


@dataclass(frozen=True)
class Discrete(Rule):
    """z is one of ``1, 1/2, ..., 2**-F``: units forget whole bits (the paper, appendix D).

    A unit has B = F + 1 columns. With ``s = relu(pre)`` the probability of ``2**-n`` is
    ``p_n = softmax(s)_n``. One is drawn by the Gumbel-max trick, with u uniform in (0, 1)::

        n = argmax_j a_j,   a_j = exp(s_j) / -log(u_j)          (log a_j = s_j + Gumbel noise)

    Where nothing is drawn, n is the arg max of ``pre``, which also decides between columns that
    relu brings to 0. The choice is passed straight through: gradients are those of
    ``sum_n w_n 2**-n`` with

        categorical   w = softmax(s)
        gumbel        w = softmax((s + Gumbel noise) / temperature), or a^(1/temperature) normalised

    A column keeps its w, negative where relu is flat.
    """

    bits: int
    """F."""
    estimator: Estimator = "gumbel"
    temperature: float = 1.0
    """Of the gumbel estimator."""

    @property
    def chooses(self) -> bool:
        return True

    def names(self, gate: str) -> tuple[str, ...]:
        return tuple(f"{gate}{n}" for n in range(self.bits + 1))

    def activate(self, sums: Tensor, units: int, draw: Draw | None) -> tuple[Tensor, Tensor]:
        pre = sums.unflatten(1, (self.bits + 1, -1))  # (n, B, D)
        s = pre.relu()
        odds = exp((s - s.amax(1, keepdim=True)).clamp(min=-60))
        weights = odds
        if draw is not None:
            odds = odds / -log(draw(sums.shape[1])).view_as(pre)
        if self.estimator == "gumbel":
            weights = odds if self.temperature == 1 else self._soften(odds)
        weights = weights / _sum(weights).unsqueeze(1)
        choice = (pre if draw is None else odds).argmax(1)  # (n, D)
        columns = torch.where(pre > 0, weights, -weights).flatten(1)
        return columns, self._values(sums)[choice]

    def _soften(self, odds: Tensor) -> Tensor:
        """``a ** (1 / temperature)``, up to a factor."""
        relative = odds / odds.amax(1, keepdim=True)
        return exp(log(relative.clamp(min=2.0**-80)) / self.temperature)

    def _values(self, like: Tensor) -> Tensor:
        """(B,): 1, 1/2, ..., 2**-F."""
        halves = [2.0**-n for n in range(self.bits + 1)]
        return torch.tensor(halves, dtype=like.dtype, device=like.device)

    def amount(self, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        return (chosen * Z_ONE).to(torch.int32)

    def slope(self, d_z: Tensor, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """``d_z w_n (2**-n - sum_j w_j 2**-j)``, over the temperature; 0 where relu is flat."""
        signed: Tensor = columns.unflatten(1, (self.bits + 1, -1))  # (n, B, D)
        values = self._values(columns)[:, None]
        mean = _sum(signed.abs() * values)
        scale = 1 / self.temperature if self.estimator == "gumbel" else 1.0
        away = values - mean.unsqueeze(1)
        d_pre = (d_z * scale).unsqueeze(1) * signed.clamp(min=0) * away
        return d_pre.flatten(1)

    def _record(self, codec: Codec, h: Tensor, z: Tensor) -> Tensor:
        return codec.multiply(rotate_right(h, z), z)

    def _recall(self, codec: Codec, h: Tensor, z: Tensor) -> Tensor:
        return rotate_left(codec.divide(h, z), z)


def _sum(values: Tensor) -> Tensor:
    """(n, B, D) -> (n, D), added up in the order of B."""
    first, *rest = values.unbind(1)
    total = first.clone()
    for part in rest:
        total += part
    return total


def _check_stored(again: Tensor, now: Tensor) -> None:
    """What the stored units lead to must be what they are."""
    wrong = (again != now).any(1)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise ReversalError.because(f"a stored unit of batch row {row} was changed", row)

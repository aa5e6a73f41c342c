"""How units forget: what a forget gate is computed as, and what it does to an integer state.

A state is updated by ``h <- z (*) h + u``. The *rule* of a cell says what z may be:

============  ======================  =================================================
`Fractional`  ``z* / 2**RADIX_Z``     the exact multiplication, ``log2(1 / z)`` bits on the tape
`Retained`    1: nothing is lost      h as it is, nothing on the tape
============  ======================  =================================================

A forget gate has B *columns* a unit among the gates: B blocks of D, side by side. Tensors here are
``columns`` (n, B*D), ``chosen`` (n, D) or, for rules that draw nothing, (n, 0), and all others
(n, D).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from revrnn.activations import sigmoid
from revrnn.errors import ReversalError
from revrnn.exact import multiply_untaped
from revrnn.fixed import Z_ONE, ForgetRange, quantise_forget
from revrnn.tape import Codec


@dataclass(frozen=True)
class Rule(ABC):
    """What the forget gates of a cell do."""

    forgets: ClassVar[bool] = True
    """Whether states are multiplied at all, and so need a tape."""

    @abstractmethod
    def names(self, gate: str) -> tuple[str, ...]:
        """What the columns of a forget gate are called; B of them."""

    @abstractmethod
    def activate(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """``columns`` and ``chosen``, from the pre-activations (n, B*D)."""

    @abstractmethod
    def amount(self, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """``z*``, int32: what the state is multiplied by."""

    def value(self, columns: Tensor, amount: Tensor) -> Tensor:
        """z as a float, for the update ``(1 - z) g`` of a RevGRU."""
        return amount.to(columns.dtype) / Z_ONE

    @abstractmethod
    def slope(self, d_z: Tensor, columns: Tensor, forget: ForgetRange) -> Tensor:
        """Gradients of the pre-activations (n, B*D), from that of z."""

    def multiply(self, codec: Codec, h: Tensor, z: Tensor, stored_units: int) -> Tensor:
        """``z (*) h``, of which the first units only need the value: what they were is stored."""
        if stored_units == 0:
            return codec.multiply(h, z)
        product = torch.empty_like(h)
        product[:, :stored_units] = multiply_untaped(h[:, :stored_units], z[:, :stored_units])
        if stored_units < h.shape[1]:
            product[:, stored_units:] = codec.multiply(h[:, stored_units:], z[:, stored_units:])
        return product

    def divide(self, codec: Codec, h: Tensor, z: Tensor, stored: Tensor | None) -> Tensor:
        """The h that `multiply` was given; ``stored`` (n, K) are its first units.

        Each must lead to what its unit is now: nothing else would notice that it was changed.
        """
        if stored is None:
            return codec.divide(h, z)
        units = stored.shape[1]
        _check_stored(multiply_untaped(stored, z[:, :units]), h[:, :units])
        if units == h.shape[1]:
            return stored
        return torch.cat((stored, codec.divide(h[:, units:], z[:, units:])), dim=1)


@dataclass(frozen=True)
class Fractional(Rule):
    """``s = sigmoid(pre)``, ``z* = round(2**RADIX_Z (a + (1 - a) s))``; the column keeps s."""

    def names(self, gate: str) -> tuple[str, ...]:
        return (gate,)

    def activate(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        return sigmoid(sums), sums[:, :0]

    def amount(self, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        return quantise_forget(columns, forget)

    def slope(self, d_z: Tensor, columns: Tensor, forget: ForgetRange) -> Tensor:
        """``d_z (1 - a) s (1 - s)``."""
        return d_z * ((1 - forget.floor) * columns * (1 - columns))


@dataclass(frozen=True)
class Retained(Rule):
    """No forgetting: h stays as it is, and nothing goes on the tape.

    A RevGRU still has its z, which only says how much of g is added: ``h <- h + (1 - z) g`` with
    ``z = sigmoid(pre)``, not quantised. A RevLSTM has no use for f and p, and no columns for them.
    """

    forgets = False
    gated: bool
    """Whether the cell's update depends on z."""

    def names(self, gate: str) -> tuple[str, ...]:
        return (gate,) if self.gated else ()

    def activate(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        return sigmoid(sums), sums[:, :0]

    def amount(self, columns: Tensor, chosen: Tensor, forget: ForgetRange) -> Tensor:
        """Nothing: there is no multiplication."""
        return chosen

    def value(self, columns: Tensor, amount: Tensor) -> Tensor:
        return columns

    def slope(self, d_z: Tensor, columns: Tensor, forget: ForgetRange) -> Tensor:
        """``d_z s (1 - s)``."""
        return d_z * (columns * (1 - columns)) if self.gated else columns

    def multiply(self, codec: Codec, h: Tensor, z: Tensor, stored_units: int) -> Tensor:
        return h

    def divide(self, codec: Codec, h: Tensor, z: Tensor, stored: Tensor | None) -> Tensor:
        if stored is not None:
            _check_stored(stored, h[:, : stored.shape[1]])
        return h


def _check_stored(again: Tensor, now: Tensor) -> None:
    """What the stored units lead to must be what they are."""
    wrong = (again != now).any(1)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise ReversalError.because(f"a stored unit of batch row {row} was changed", row)

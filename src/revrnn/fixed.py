"""Fixed point: the radices, the range of the state, and the conversions.

A hidden unit is an integer ``h*`` with ``h = h* / 2**RADIX_H``; a forget value is an integer
``z*`` with ``z = z* / 2**RADIX_Z`` and ``1 <= z* <= Z_MAX``.

The radices are written here and nowhere else: the build reads the two lines that assign
``RADIX_H`` and ``RADIX_Z`` and hands them to the C++ kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RADIX_H = 23
RADIX_Z = 10

H_ONE = 1 << RADIX_H
Z_ONE = 1 << RADIX_Z
Z_MAX = Z_ONE - 1

# A state h* must stay strictly inside (-STATE_LIMIT, STATE_LIMIT), that is |h| < 254. One step adds
# less than 2**RADIX_Z of tape information and at most 2**RADIX_H of update to a state in that
# range, so the sum is still below 2**31: a state that leaves the range is seen before int32 wraps.
STATE_LIMIT = (1 << 31) - (2 << RADIX_H)
STATE_LIMIT_VALUE = STATE_LIMIT / H_ONE

MAX_FORGET_BITS = RADIX_Z


@dataclass(frozen=True)
class ForgetRange:
    """The range of a forget gate: a sigmoid ``s`` in (0, 1) becomes ``z = a + (1 - a) s``.

    With ``F = max_forget_bits``, ``a = 2**-F``, so a unit forgets at most F bits a step
    (the paper, section 4.3); ``F = None`` means ``a = 0``.
    """

    floor: float
    """a."""

    z_min: int
    """Smallest integer z*: ceil(2**RADIX_Z * a), but at least 1, so that z never reaches 0."""

    @classmethod
    def from_bits(cls, max_forget_bits: float | None) -> ForgetRange:
        if max_forget_bits is None:
            return cls(floor=0.0, z_min=1)
        floor = 2.0**-max_forget_bits
        return cls(floor=floor, z_min=max(1, math.ceil(Z_ONE * floor)))


def to_fixed(value: Tensor) -> Tensor:
    """``round(2**RADIX_H * value)`` as int32, halves to even. The caller checks the range."""
    return (value * H_ONE).round().to(torch.int32)


def to_float(fixed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``fixed / 2**RADIX_H``. In float32 this rounds where ``|h| >= 2`` (24 bits of mantissa)."""
    return fixed.to(dtype) * (1.0 / H_ONE)


def quantise_forget(gate: Tensor, forget: ForgetRange, share: Tensor | None = None) -> Tensor:
    """``z* = round(2**RADIX_Z z)`` with ``z = a + (1 - a) s``, in ``[z_min, Z_MAX]``, int32.

    With a share w, ``1 - w (1 - z)`` takes the place of z, and ``z*`` may be ``Z_ONE``, where w is
    0.
    """
    z = forget.floor + (1.0 - forget.floor) * gate
    most = Z_MAX
    if share is not None:
        z = 1.0 - share * (1.0 - z)
        most = Z_ONE
    return (z * Z_ONE).round().clamp(forget.z_min, most).to(torch.int32)

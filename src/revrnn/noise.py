"""Random numbers that can be drawn again: each is a function of a seed and of where it is used.

The reverse pass needs the very noise of the forward pass. So nothing is drawn from a generator and
nothing is kept: a number is hashed from its *place* - seed, time step, batch row, group, purpose
and column - whichever pass, chunk or thread asks for it. Integers in every step of it, so that all
kernels get the same bits (`csrc/noise.h` is the twin)::

    key = seed;  for part in (time, row, 2 purpose + group):  key = mix64(key + (part + 1) C64)
    x   = mix32(mix32(column C32 + key mod 2^32) ^ (key div 2^32))
    u   = ((x div 2^9) + 1/2) / 2^23                                in (0, 1)

mix64 is the finaliser of SplitMix64, mix32 that of lowbias32 (both one-to-one); C64 and C32 are the
golden ratio's fractions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


_C64 = _signed(0x9E3779B97F4A7C15)
_C32 = 0x9E3779B9
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """The noise of one group's step: of batch rows ``0 .. rows-1``."""

    seed: int
    """0 <= seed < 2**63; one a call and layer."""
    time: int
    group: int
    rows: int
    device: torch.device

    def uniform(self, purpose: int, width: int, dtype: torch.dtype) -> Tensor:
        """(rows, width) numbers in (0, 1); 2**23 different ones, none of them 0 or 1."""
        device = self.device
        key = torch.tensor([self.seed], dtype=torch.int64, device=device)
        row = torch.arange(self.rows, dtype=torch.int64, device=device)
        for part in (self.time, row, 2 * purpose + self.group):
            key = _mix64(key + (part + torch.ones_like(row)) * _C64)  # (n,)
        key = key.unsqueeze(1)
        column = torch.arange(width, dtype=torch.int64, device=device)
        x = _mix32((column * _C32 + key) & _MASK32)  # (n, width)
        x = _mix32(x ^ _unsigned_shift(key, 32))
        return ((x >> 9).to(dtype) + 0.5) * 2.0**-23


# int64 tensors wrap around, so they serve as unsigned numbers, but for shifts to the right.


def _unsigned_shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _unsigned_shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _unsigned_shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _unsigned_shift(x, 31)


def _mix32(x: Tensor) -> Tensor:
    """Of numbers below 2**32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)

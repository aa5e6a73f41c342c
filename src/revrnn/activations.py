"""Sigmoid and tanh that give the same bits every time.

Reversal needs the very same gates again, whatever the batch and the number of threads. PyTorch's
own sigmoid and tanh do not promise that: they use one routine in the body of a tensor and another
in the tail of each thread's share, and the two differ in the last bit. So both are built from sums,
products and quotients, which IEEE 754 rounds in one way only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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

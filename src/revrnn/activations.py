"""Sigmoid, tanh, exp and log that give the same bits every time.

Reversal needs the very same gates again, whatever the batch and the number of threads. PyTorch's
own functions do not promise that: they use one routine in the body of a tensor and another in the
tail of each thread's share, and the two differ in the last bit. So these are built from sums,
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


def exp(x: Tensor) -> Tensor:
    """``e^x``, which is never 0: x is cut at +-64."""
    power, p = _split_exp(x)
    return power * p + power


def log(x: Tensor) -> Tensor:
    """The natural logarithm of positive normal numbers: with ``x = 2^n m``,
    ``sqrt(1/2) <= m < sqrt(2)`` and ``t = (m - 1) / (m + 1)``,

        log x = n ln 2 + 2 (t + t^3 / 3 + t^5 / 5 + ...)
    """
    mantissa, n = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    m = torch.where(low, 2 * mantissa, mantissa)
    n = n - low.to(n.dtype)
    t = (m - 1) / (m + 1)
    square = t * t
    terms = 7 if x.dtype == torch.float32 else 12  # t^2 < 0.03
    series = torch.full_like(x, 1 / (2 * terms - 1))
    for k in range(terms - 2, -1, -1):
        series.mul_(square).add_(1 / (2 * k + 1))
    return 2 * t * series + n.to(x.dtype) * math.log(2)


def _expm1(x: Tensor) -> Tensor:
    """``e^x - 1``."""
    power, p = _split_exp(x)
    return power * p + (power - 1)


def _split_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """``2^n`` and ``p = expm1(x - n ln 2)``, so that ``e^x = 2^n (1 + p)``, for finite x.

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
    return power, p


_FORMATS = {
    # Integer of the same size, bits of the exponent, degree of the Taylor polynomial, and how many
    # bits of ln 2 its first part has.
    torch.float32: (torch.int32, 8, 7, 15),
    torch.float64: (torch.int64, 11, 13, 40),
}

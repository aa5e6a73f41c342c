"""The exact multiplication: ``h <- z h`` on integers, losing nothing.

``h*`` is an integer state, ``z* / 2**RADIX_Z`` a forget value, ``R = RADIX_Z``; ``div`` and ``mod``
round towards minus infinity, so negative states need no special case.

The algorithm (the paper, Algorithm 1; Maclaurin et al. 2015) keeps what the multiplication would
lose in one unbounded integer B, and uses B to fill in the digits the result is free to choose::

    multiply                                 divide
    B <- B 2^R + (h mod 2^R)                 B <- B z + (h mod z)
    h <- (h div 2^R) z + (B mod z)           h <- (h div z) 2^R + (B mod 2^R)
    B <- B div z                             B <- B div 2^R

It is exact because each line of one column is undone by a line of the other: ``h`` and ``B`` are
split into digits (base 2^R, base z) and put together again, and no digit is dropped. B grows by
``log2(2^R / z)`` bits, exactly the information the multiplication destroys.

Here B is a *lane*: a number ``x`` in ``[L, 256 L)``, ``L = 2^R``, whose low bytes go to a stack
when it would grow beyond (so it is an asymmetric numeral system). With ``r = h mod 2^R``::

    multiply                                 divide
    emit c = (x >= z 2^8) + (x >= z 2^16)    y = x z + (h mod z)
    bytes of x, low byte first               h <- (h div z) 2^R + (y mod 2^R)
    y = (x div 256^c) 2^R + r                x = y div 2^R
    h <- (h div 2^R) z + (y mod z)           take back c = (x < 2^R) + (x < 4) bytes:
    x <- y div z                             x <- x 256 + byte, last byte emitted first

Why this is exact as well:

1. ``x`` stays in ``[L, 256 L)``. After the bytes have gone, ``x < z 2^8`` (c counts just that; two
   bytes are enough as ``x < 2^18``), so ``y < z 2^8 2^R = 256 L z`` and the new ``x < 256 L``. And
   ``x >= z``: a byte goes only from ``x >= z 2^8``, a second only from ``x >= z 2^16``, and an
   ``x`` that sends none is at least ``L >= z``. So ``y >= z 2^R = L z`` and the new ``x >= L``.
2. The reverse knows how many bytes went. Before they did, ``2^10 <= x < 2^18``; so what is left is
   at least ``2^10`` if none went, in ``[2^2, 2^10)`` if one did, and below ``2^2`` if two did.
3. Given c, the rest is the digit argument above.

Every number fits in int32: ``y < 2^28``, ``|h div 2^R| z + z < 2^31``. All of it holds for
``1 <= z <= 2^R``; at ``z = 2^R`` nothing moves.

*Shifting.* With ``z = 2^(R-n)`` the multiplication sends n bits to the lane, the upper n digits of
``h mod 2^R``, and keeps the others. `rotate_right` swaps the two parts first: then the lower n
digits go, and what remains is ``h >> n``, the shift that rounds towards minus infinity. One codec
serves both; `rotate_left` is the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from revrnn.errors import ReversalError
from revrnn.fixed import RADIX_Z, Z_MAX, Z_ONE

LANE_LOW = Z_ONE
"""L: a lane starts at L and stays in [L, 256 L)."""

LANE_BITS = RADIX_Z + 8
"""A lane is below 2**LANE_BITS."""

_QUOTIENT_LIMIT = 1 << (31 - RADIX_Z)
"""``h div 2**RADIX_Z`` of an int32 state stays in [-limit, limit)."""


def oracle_multiply(buffer: int, h: int, z: int) -> tuple[int, int]:
    """Algorithm 1 on Python integers: what every other version is tested against."""
    buffer = (buffer << RADIX_Z) + (h & Z_MAX)
    h = (h >> RADIX_Z) * z + buffer % z
    return buffer // z, h


def oracle_divide(buffer: int, h: int, z: int) -> tuple[int, int]:
    """The inverse of `oracle_multiply`."""
    buffer = buffer * z + h % z
    h = ((h // z) << RADIX_Z) + (buffer & Z_MAX)
    return buffer >> RADIX_Z, h


def multiply(lanes: Tensor, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One multiplication in every lane; all tensors int32 and of one shape.

    Returns the new lanes, the new h, the number of bytes each lane emits (0, 1, 2) and, as a
    tensor with a trailing dimension of 2, the first and the second byte it would emit.
    """
    counts = (lanes >= z << 8).to(torch.int32) + (lanes >= z << 16).to(torch.int32)
    emitted = torch.stack((lanes & 255, (lanes >> 8) & 255), dim=-1).to(torch.uint8)
    y = ((lanes >> (counts << 3)) << RADIX_Z) + (h & Z_MAX)
    quotient = torch.div(y, z, rounding_mode="floor")
    return quotient, (h >> RADIX_Z) * z + (y - quotient * z), counts, emitted


def divide(lanes: Tensor, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `multiply`, up to the bytes: returns the lanes, the old h and how many bytes
    (0, 1, 2) each lane is still short of. `refill` gives them back. An h that no state of 32 bits
    leads to is a `ReversalError`."""
    quotient = torch.div(h, z, rounding_mode="floor")
    outside = (quotient >= _QUOTIENT_LIMIT) | (quotient < -_QUOTIENT_LIMIT)
    if bool(outside.any()):
        row = int(outside.any(-1).int().argmax())
        raise ReversalError.because(
            f"a state of batch row {row} left its range on the way back", row
        )
    y = lanes * z + (h - quotient * z)
    lanes = y >> RADIX_Z
    counts = (lanes < LANE_LOW).to(torch.int32) + (lanes < LANE_LOW >> 8).to(torch.int32)
    return lanes, (quotient << RADIX_Z) + (y & Z_MAX), counts


def refill(lanes: Tensor, counts: Tensor, emitted: Tensor) -> Tensor:
    """Put back the bytes: the second one, where there were two, before the first.

    ``emitted`` is laid out as `multiply` returns it; bytes that ``counts`` does not ask for are
    not looked at.
    """
    first, second = emitted.to(torch.int32).unbind(-1)
    lanes = torch.where(counts == 2, (lanes << 8) + second, lanes)
    return torch.where(counts >= 1, (lanes << 8) + first, lanes)


def rotate_right(h: Tensor, z: Tensor) -> Tensor:
    """For ``z = 2^(R-n)``: the lowest n of the R low digits of h above the R - n others."""
    t = (h & Z_MAX) * z  # the digits, R - n places up
    return (h & ~Z_MAX) | (t >> RADIX_Z) | (t & Z_MAX)


def rotate_left(h: Tensor, z: Tensor) -> Tensor:
    """The inverse of `rotate_right`."""
    t = (h & Z_MAX) * torch.div(Z_ONE, z, rounding_mode="floor")  # n places up
    return (h & ~Z_MAX) | (t >> RADIX_Z) | (t & Z_MAX)


def multiply_untaped(h: Tensor, z: Tensor) -> Tensor:
    """``floor(h z / 2**RADIX_Z)`` without leaving int32, for units whose old value is stored."""
    return (h >> RADIX_Z) * z + (((h & Z_MAX) * z) >> RADIX_Z)

"""Information tapes: where the exact multiplication keeps what it would otherwise destroy.

`EntropyTape` is the one to use: a byte stack for every batch row, at most a few percent above the
entropy limit. `PaperTape` is the paper's buffer (Algorithm 4), for comparison with its figures.

Both live through the same stages: built for the forward pass, `reserve` before every chunk, `seal`
at the end (plain tensors, which autograd keeps), `open` for the backward pass, `recall` before
every chunk of it, `check_rewound` at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from revrnn import exact
from revrnn._sealing import LANES as LANES
from revrnn._sealing import compact, lay_out, pack_lanes, unpack_lanes
from revrnn.errors import ReversalError
from revrnn.fixed import RADIX_Z, Z_MAX


class Codec(Protocol):
    """Exact multiplication of a group of units, and its inverse.

    ``h`` and ``z`` are int32 (n, U): U units of the n active batch rows, which are rows 0 .. n-1.
    Calls are undone last first, and within a call the units are undone last first.
    """

    def multiply(self, h: Tensor, z: Tensor) -> Tensor:
        """``h z / 2**RADIX_Z``, up to less than ``2**RADIX_Z`` of filled-in information."""

    def divide(self, h: Tensor, z: Tensor) -> Tensor:
        """The h that `multiply` was given."""


@dataclass(frozen=True)
class SealedTape:
    """What an `EntropyTape` leaves behind: plain tensors, never changed again."""

    lanes: Tensor
    """uint8 (N, 2 W + W/4), as `pack_lanes` makes them of 18 bits a lane. (N, 0) of a tape that was
    not written: its lanes are where they began."""

    segments: tuple[tuple[Tensor, Tensor], ...]
    """(bytes, fill) in the order of writing. ``bytes``: uint8, the rows' bytes one row after the
    other, nothing between them. ``fill``: int32 (N,), how many bytes each row has in it."""

    def tensors(self) -> list[Tensor]:
        return [self.lanes, *(tensor for segment in self.segments for tensor in segment)]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> Self:
        lanes, *rest = tensors
        return cls(lanes, tuple(zip(rest[0::2], rest[1::2], strict=True)))

    @property
    def tape_bits(self) -> int:
        """The bytes, and the int32 that says how many there are, of every row and segment."""
        return sum(8 * data.numel() + 32 * fill.numel() for data, fill in self.segments)

    @property
    def lane_bits(self) -> int:
        return 8 * self.lanes.numel()


class EntropyTape:
    """A byte stack and W lanes for every batch row (`revrnn.exact` has the arithmetic).

    Rows do not know of each other: a row's lanes, bytes and states are the same whatever batch it
    is in. A call works through its units in blocks of W, unit j of a block in lane j. The bytes a
    block emits are pushed *first bytes of all lanes, ascending, then second bytes of all lanes,
    ascending*; `divide` takes blocks and bytes in the opposite order. Kernels in other languages
    work on the public fields and keep to this order, so tapes are interchangeable byte for byte.
    """

    writing: bool
    """False: `multiply` does the same arithmetic on the lanes but drops the bytes, for passes that
    will not be reversed: states are the same bits with and without a tape."""

    lanes: Tensor
    """int32 (N, W), each in [L, 256 L) with L = `exact.LANE_LOW`; `start` when it is empty."""

    stack: Tensor
    """uint8: the current region of every row."""

    begin: Tensor
    """int64 (N,): where in `stack` the region of a row begins. Regions do not overlap: row i may
    use ``stack[begin[i]]`` up to where row i+1 begins, or the stack ends."""

    fill: Tensor
    """int64 (N,): bytes of a row in its current region; 0 <= fill. Only `fill` says what is valid:
    bytes beyond it are left over."""

    ideal: Tensor
    """float64 (N,): the sum of ``-log2(z* / 2**RADIX_Z)`` over all multiplications of a row, the
    bits that no tape can save. Kept only while writing."""

    start: Tensor
    """int32 (N, W): the lanes the tape began with, and must return to: all L at the beginning of a
    sequence, elsewhere those that the tape of the steps before ended with."""

    def __init__(
        self,
        rows: int,
        *,
        writing: bool,
        device: torch.device | str,
        start: Tensor | None = None,
    ) -> None:
        self.writing = writing
        if start is None:
            start = torch.full((rows, LANES), exact.LANE_LOW, dtype=torch.int32, device=device)
        self.start = start
        self.lanes = start.clone()
        self.stack = torch.empty(0, dtype=torch.uint8, device=device)
        self.begin = torch.zeros(rows, dtype=torch.int64, device=device)
        self.fill = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ideal = torch.zeros(rows, dtype=torch.float64, device=device)
        self._segments: list[tuple[Tensor, Tensor]] = []
        self._capacity = 0  # bytes of a row's working region
        self._room = 0  # multiplications a row may still do in it, counting two bytes for each

    # -- storage ----------------------------------------------------------------------------------

    def reserve(self, steps: int, units: int) -> None:
        """Make room for ``steps`` steps of ``units`` multiplications a row, two bytes for each.

        A working region that is too full becomes a compact segment and a new one is started. Its
        spare room is an eighth of what has been sealed so far, or the needs of one more such
        chunk if that is more: so the number of segments is logarithmic in the length of the tape,
        and a short sequence ends up in one.
        """
        if not self.writing:
            return
        rows = len(self.fill)
        need = 2 * steps * units
        used = int(self.fill.max()) if rows else 0
        if used + need > self._capacity:
            self._seal_region(used)
            used = 0
            sealed = sum(data.numel() for data, _ in self._segments)
            self._capacity = need + max(need, sealed // (8 * max(rows, 1)))
            self.stack = self.stack.new_empty(rows * self._capacity)
            self.begin = torch.arange(rows, device=self.begin.device) * self._capacity
            self.fill.zero_()
        self._room = (self._capacity - used) // 2

    def check_room(self, steps: int, units: int) -> None:
        """Claim room for so many multiplications, which `reserve` must have made: a kernel that
        writes without it would write over another row."""
        self._room -= steps * units
        if self._room < 0:
            raise RuntimeError("reserve() has not made room on the tape for these multiplications")

    def _seal_region(self, used: int) -> None:
        """Copy the working region into a compact segment; ``used`` is the largest fill."""
        if used > 0:
            region = self.stack.view(-1, self._capacity)[:, :used]
            self._segments.append((compact(region, self.fill), self.fill.to(torch.int32)))
        self.stack = self.stack.new_empty(0)

    def seal(self) -> SealedTape:
        """End the forward pass: hand over what was written. The tape is of no use after that.

        A tape that does not write hands over nothing; it can be opened again if nothing was
        multiplied, as in layers that never forget.
        """
        self._seal_region(int(self.fill.max()) if len(self.fill) else 0)
        lanes = pack_lanes(self.lanes)
        return SealedTape(lanes if self.writing else lanes[:, :0].clone(), tuple(self._segments))

    @classmethod
    def open(cls, sealed: SealedTape, start: Tensor | None = None) -> EntropyTape:
        """A tape to reverse from, which began with the lanes ``start`` (None: all L). Bytes are
        popped straight out of the sealed segments, of which nothing is copied or changed."""
        tape = cls(len(sealed.lanes), writing=False, device=sealed.lanes.device, start=start)
        if sealed.lanes.shape[1]:
            tape.lanes = unpack_lanes(sealed.lanes)
        low = (tape.lanes < exact.LANE_LOW).any(1)  # 18 bits hold nothing above the range
        if bool(low.any()):
            row = _first(low)
            raise ReversalError.because(f"a lane of batch row {row} is outside its range", row)
        tape._segments = list(sealed.segments)
        tape.recall()
        return tape

    def recall(self) -> None:
        """Before reversing a chunk: step back to the previous segment if this one is used up.

        Chunks do not straddle segments, and stepping back early is harmless: it is one stack.
        """
        if self._segments and not bool(self.fill.any()):
            self.stack, fill = self._segments.pop()
            found = lay_out(fill, len(self.stack))
            if found is None:
                raise ReversalError.because("the tape says of itself that it has other bytes")
            self.fill, self.begin = found

    def check_rewound(self) -> None:
        """Raise `ReversalError` unless everything is as it was before the forward pass."""
        if not (self._segments or self.fill.any()) and torch.equal(self.lanes, self.start):
            return
        left = self.fill != 0
        if self._segments:
            left = torch.ones_like(left)
        if bool(left.any()):
            row = _first(left)
            raise ReversalError.because(f"the tape of batch row {row} is not used up", row)
        row = _first((self.lanes != self.start).any(1))
        raise ReversalError.because(f"the tape of batch row {row} did not return to its start", row)

    # -- arithmetic -------------------------------------------------------------------------------

    def multiply(self, h: Tensor, z: Tensor) -> Tensor:
        rows, units = h.shape
        blocks = -(-units // LANES)
        product = torch.empty_like(h)
        # What goes on the stack, in its order: (row, block, first or second byte, lane).
        wanted = torch.zeros(rows, blocks, 2, LANES, dtype=torch.bool, device=h.device)
        emitted = torch.zeros(rows, blocks, 2, LANES, dtype=torch.uint8, device=h.device)
        for block in range(blocks):
            own = slice(block * LANES, min((block + 1) * LANES, units))
            width = own.stop - own.start
            lanes, product[:, own], counts, data = exact.multiply(
                self.lanes[:rows, :width], h[:, own], z[:, own]
            )
            self.lanes[:rows, :width] = lanes
            if self.writing:
                torch.ge(counts, 1, out=wanted[:, block, 0, :width])
                torch.ge(counts, 2, out=wanted[:, block, 1, :width])
                emitted[:, block, :, :width] = data.transpose(1, 2)
        if self.writing:
            self.check_room(1, units)
            self._push(wanted.view(rows, -1), emitted.view(rows, -1))
            self.ideal[:rows] += (RADIX_Z - z.double().log2()).sum(1)
        return product

    def divide(self, h: Tensor, z: Tensor) -> Tensor:
        rows, units = h.shape
        quotient = torch.empty_like(h)
        for start in reversed(range(0, units, LANES)):
            own = slice(start, min(start + LANES, units))
            width = own.stop - own.start
            lanes, quotient[:, own], counts = exact.divide(
                self.lanes[:rows, :width], h[:, own], z[:, own]
            )
            wanted = torch.stack((counts >= 1, counts >= 2), dim=1).view(rows, -1)
            data = self._pop(wanted).view(rows, 2, width).transpose(1, 2)
            self.lanes[:rows, :width] = exact.refill(lanes, counts, data)
        return quotient

    def _push(self, wanted: Tensor, data: Tensor) -> None:
        """Push, in each of the first rows, the bytes of ``data`` that are ``wanted``."""
        rows = len(data)
        rank = wanted.cumsum(1)  # 1-based among the wanted bytes of a row
        address = (self.begin + self.fill)[:rows, None] + rank - 1
        self.stack[address[wanted]] = data[wanted]
        self.fill[:rows] += rank[:, -1]

    def _pop(self, wanted: Tensor) -> Tensor:
        """The bytes that were pushed with this ``wanted``; 0 where it is False."""
        rows = len(wanted)
        rank = wanted.cumsum(1)
        self.fill[:rows] -= rank[:, -1]
        short = self.fill[:rows] < 0
        if bool(short.any()):
            row = _first(short)
            raise ReversalError.because(f"the tape of batch row {row} ran empty too early", row)
        address = (self.begin + self.fill)[:rows, None] + rank - 1
        data = torch.zeros(wanted.shape, dtype=torch.uint8, device=wanted.device)
        data[wanted] = self.stack[address[wanted]]
        return data


@dataclass(frozen=True)
class SealedPaperTape:
    """What a `PaperTape` leaves behind: plain tensors, and a few numbers on the host."""

    planes: tuple[Tensor, ...]
    """int64 (N, D), in the order of writing; the last one was the current one."""

    operations: int
    """Multiplications done."""

    positions: tuple[int, ...]
    """How many multiplications had been done when each of the planes but the first was begun."""

    def tensors(self) -> list[Tensor]:
        counts = torch.tensor([self.operations, *self.positions], device="cpu")
        return [counts, *self.planes]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> Self:
        counts, *planes = tensors
        operations, *positions = counts.tolist()
        return cls(tuple(planes), operations, tuple(positions))

    @property
    def tape_bits(self) -> int:
        return sum(64 * plane.numel() for plane in self.planes)

    @property
    def lane_bits(self) -> int:
        return 0


class PaperTape:
    """The paper's buffer (Algorithm 4): int64 planes (N, D), one integer a unit of a group.

    All multiplications of a layer share it: those of both groups and, in a RevLSTM, of c and h.
    When any integer of an active row would overflow, a whole new plane of zeros is begun. The
    integers are signed, so that is at ``B >= 2**(63 - RADIX_Z)``, one bit before the paper's.

    A call with U < D units (the first ones being stored) uses the last U columns, so a unit always
    meets its own integer. A row that does not take part leaves its integers as they are; planes
    begun meanwhile stay zero for it, so it can be reversed before or after the others.

    The states depend on when planes are begun, and so on the whole batch: unlike an `EntropyTape`,
    this one gives a row other low bits in another batch.
    """

    LIMIT = 1 << (63 - RADIX_Z)

    writing: bool
    """False: planes that are full are dropped, for passes that will not be reversed."""

    plane: Tensor
    """int64 (N, D): the current plane; 0 <= B < 2**63."""

    ideal: Tensor
    """float64 (N,): as `EntropyTape.ideal`."""

    def __init__(self, rows: int, units: int, *, writing: bool, device: torch.device | str) -> None:
        self.writing = writing
        self.plane = torch.zeros(rows, units, dtype=torch.int64, device=device)
        self.ideal = torch.zeros(rows, dtype=torch.float64, device=device)
        self._full: list[Tensor] = []
        self._positions: list[int] = []
        self._operations = 0

    def reserve(self, steps: int, units: int) -> None:
        """Nothing: planes are begun as they are needed."""

    def seal(self) -> SealedPaperTape:
        planes = (*self._full, self.plane)
        return SealedPaperTape(planes, self._operations, tuple(self._positions))

    @classmethod
    def open(cls, sealed: SealedPaperTape) -> PaperTape:
        *full, plane = sealed.planes
        tape = cls(*plane.shape, writing=False, device=plane.device)
        tape.plane = plane.clone()
        tape._full = full
        tape._positions = list(sealed.positions)
        tape._operations = sealed.operations
        return tape

    def recall(self) -> None:
        """Nothing: `divide` knows by its count when to step back a plane."""

    def check_rewound(self) -> None:
        """Raise `ReversalError` unless everything is as it was before the forward pass."""
        if self._operations:
            raise ReversalError.because(f"{self._operations} multiplications are still on the tape")
        self._check_empty()

    def _check_empty(self) -> None:
        left = (self.plane != 0).any(1)
        if bool(left.any()):
            row = _first(left)
            raise ReversalError.because(f"the buffer of batch row {row} did not return to 0", row)

    def multiply(self, h: Tensor, z: Tensor) -> Tensor:
        own = (slice(len(h)), slice(self.plane.shape[1] - h.shape[1], None))
        if bool((self.plane[own] >= self.LIMIT).any()):
            if self.writing:
                self._full.append(self.plane)
                self._positions.append(self._operations)
            self.plane = torch.zeros_like(self.plane)
        self._operations += 1
        buffer = (self.plane[own] << RADIX_Z) + (h & Z_MAX)
        self.plane[own] = torch.div(buffer, z, rounding_mode="floor")
        if self.writing:
            self.ideal[: len(h)] += (RADIX_Z - z.double().log2()).sum(1)
        return (h >> RADIX_Z) * z + (buffer % z).to(torch.int32)

    def divide(self, h: Tensor, z: Tensor) -> Tensor:
        if self._operations == 0:
            raise ReversalError.because("nothing is left on the tape to divide by")
        own = (slice(len(h)), slice(self.plane.shape[1] - h.shape[1], None))
        buffer = self.plane[own] * z + h % z
        self.plane[own] = buffer >> RADIX_Z
        self._operations -= 1
        if self._positions and self._positions[-1] == self._operations:
            self._check_empty()
            self._positions.pop()
            self.plane = self._full.pop().clone()
        quotient = torch.div(h, z, rounding_mode="floor")
        return (quotient << RADIX_Z) + (buffer & Z_MAX).to(torch.int32)


def _first(rows: Tensor) -> int:
    """The first row that is True."""
    return int(rows.to(torch.uint8).argmax())

"""Cutting a packed sequence into chunks of consecutive time steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from revrnn.kernels.contract import Steps

ROWS_PER_CHUNK = 512
"""Packed rows of a chunk unless the user says otherwise. Fewer cost time (256: about 5% more), more
gain little and cost memory."""


@dataclass(frozen=True)
class Chunk:
    """A run of time steps, in the order in which the forward pass takes them."""

    first_row: int
    last_row: int
    """The chunk's packed rows are ``first_row .. last_row - 1``; `steps` counts from the first."""

    steps: Steps

    def of(self, packed: Tensor) -> Tensor:
        """The chunk's rows of a packed tensor."""
        return packed[self.first_row : self.last_row]

    def batch_rows(self) -> Tensor:
        """int64 (R,): which batch row each packed row of the chunk belongs to."""
        rows = torch.empty(self.steps.rows, dtype=torch.int64, device="cpu")
        for offset, active in zip(
            self.steps.offsets.tolist(), self.steps.active.tolist(), strict=True
        ):
            rows[offset : offset + active] = torch.arange(active, device="cpu")
        return rows


def default_chunk_size(steps: int, batch: int, rows: int = ROWS_PER_CHUNK) -> int:
    """Steps a chunk, such that chunks have about ``rows`` rows and equal lengths."""
    most = max(1, round(rows / batch))
    chunks = -(-steps // most)
    return -(-steps // chunks)


def dense(first: int, last: int, batch: int) -> Chunk:
    """The chunk of time steps ``first .. last - 1`` of a dense batch."""
    steps = last - first
    offsets = torch.arange(steps, dtype=torch.int64, device="cpu") * batch
    active = torch.full((steps,), batch, dtype=torch.int64, device="cpu")
    rows = Steps(offsets, active, steps * batch, first)
    return Chunk(first * batch, last * batch, rows)


def cut(batch_sizes: Tensor, chunk_size: int, *, backwards: bool) -> Iterator[Chunk]:
    """The chunks of a sequence, first to last; ``backwards`` runs from the last step to the first.

    ``batch_sizes``: int64 (T,), the active rows of every step.
    """
    steps = len(batch_sizes)
    starts = torch.zeros(steps + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(batch_sizes, 0, out=starts[1:])
    bounds = [(low, min(low + chunk_size, steps)) for low in range(0, steps, chunk_size)]
    for low, high in reversed(bounds) if backwards else bounds:
        first_row, last_row = int(starts[low]), int(starts[high])
        offsets = starts[low:high] - first_row
        active = batch_sizes[low:high]
        if backwards:
            offsets, active = offsets.flip(0), active.flip(0)
        first, stride = (high - 1, -1) if backwards else (low, 1)
        rows = last_row - first_row
        yield Chunk(
            first_row,
            last_row,
            Steps(offsets.contiguous(), active.contiguous(), rows, first, stride),
        )

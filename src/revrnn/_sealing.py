"""The bytes of a sealed tape: from the working regions and lanes of a pass, and back.

Each function has two forms, the torch operations that say what is meant and, for CPU tensors where
the C++ kernels are installed, one call that takes a tenth of their time (`csrc/sealing.h`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from revrnn._native import cpu

LANES = 16
"""W: lanes of a batch row. Unit j of a call uses lane j mod W."""

LANE_BYTES = 2 * LANES + LANES // 4
"""Bytes that the lanes of a row take when sealed."""

_LONG_ROW = 2048
"""Bytes from which on rows of a region are copied one by one when it is made compact: for shorter
ones that takes longer than to select the bytes of many rows at once."""

_COMPACT_BLOCK = 1 << 18
"""Bytes that are selected from at once: bounds the memory of the selection."""


def _plain(tensor: Tensor, dtype: torch.dtype, columns: int = 0) -> bool:
    """Whether C++ may read it. What autograd has kept may come back from a hook as anything."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
        and tensor.shape[1:] == ((columns,) if columns else ())
    )


def compact(region: Tensor, fill: Tensor) -> Tensor:
    """The first ``fill[i]`` bytes (int64) of each row i of ``region``, uint8 (N, used), one row
    after another."""
    if cpu is None or region.device.type != "cpu":
        return _compact(region, fill)
    out = torch.empty(int(fill.sum()), dtype=torch.uint8, device="cpu")
    addresses = region.data_ptr(), region.stride(0), fill.data_ptr(), len(fill), out.data_ptr()
    cpu.compact(*addresses)
    return out


def lay_out(sealed: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """Of the fills (N,) of a sealed segment of ``size`` bytes: the same as int64, and where each
    row begins, int64 (N,). None if these are not its fills: below 0, or of another sum."""
    if cpu is None or not _plain(sealed, torch.int32):
        fill = sealed.to(torch.int64, copy=True)
        if bool(((fill < 0) | (fill > size)).any()) or int(fill.sum()) != size:
            return None
        return fill, fill.cumsum(0) - fill
    fill, begin = torch.empty(2, len(sealed), dtype=torch.int64, device="cpu").unbind(0)
    total = cpu.lay_out(sealed.data_ptr(), len(sealed), fill.data_ptr(), begin.data_ptr())
    return (fill, begin) if total == size else None


def pack_lanes(lanes: Tensor) -> Tensor:
    """int32 (N, W), each below 2**18 -> uint8 (N, 2 W + W/4): the two low bytes of every lane, then
    the top two bits of four lanes in each byte."""
    if cpu is None or not _plain(lanes, torch.int32, LANES):
        return _pack_lanes(lanes)
    packed = torch.empty(len(lanes), LANE_BYTES, dtype=torch.uint8, device="cpu")
    cpu.pack_lanes(lanes.data_ptr(), len(lanes), packed.data_ptr())
    return packed


def unpack_lanes(packed: Tensor) -> Tensor:
    """The inverse of `pack_lanes`."""
    if cpu is None or not _plain(packed, torch.uint8, LANE_BYTES):
        return _unpack_lanes(packed)
    lanes = torch.empty(len(packed), LANES, dtype=torch.int32, device="cpu")
    cpu.unpack_lanes(packed.data_ptr(), len(packed), lanes.data_ptr())
    return lanes


def _compact(region: Tensor, fill: Tensor) -> Tensor:
    rows, used = region.shape
    if used >= _LONG_ROW:
        lengths = fill.tolist()
        return torch.cat([row[:n] for row, n in zip(region.unbind(0), lengths, strict=True)])
    column = torch.arange(used, device=region.device)
    step = _COMPACT_BLOCK // used
    return torch.cat(
        [
            torch.masked_select(region[row : row + step], column < fill[row : row + step, None])
            for row in range(0, rows, step)
        ]
    )


def _pack_lanes(lanes: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=lanes.device)
    low = torch.stack((lanes & 255, (lanes >> 8) & 255), dim=-1).flatten(1)
    high = ((lanes >> 16).view(-1, LANES // 4, 4) << shifts).sum(-1)
    return torch.cat((low, high), dim=1).to(torch.uint8)


def _unpack_lanes(packed: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=packed.device)
    values = packed.to(torch.int32)
    low, high = values[:, : 2 * LANES], values[:, 2 * LANES :]
    top = (high[:, :, None] >> shifts) & 3
    return low[:, 0::2] + (low[:, 1::2] << 8) + (top.flatten(1) << 16)

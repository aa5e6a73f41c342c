"""The C++ kernels: hands checked addresses to `revrnn._cpu`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import revrnn._cpu as _cpu
from revrnn import cells, fixed, tape
from revrnn.errors import NonFiniteError, ReversalError, StateOverflowError
from revrnn.forgetting import Discrete, Fractional, Retained, Rule
from revrnn.kernels._openmp import gomp_parallel
from revrnn.kernels.contract import Gradients, Layer, Record, Steps, Weights
from revrnn.tape import Codec, EntropyTape

if (_cpu.RADIX_H, _cpu.RADIX_Z, _cpu.LANES) != (fixed.RADIX_H, fixed.RADIX_Z, tape.LANES):
    raise ImportError(
        "the C++ kernels were built with other radices than this revrnn has: reinstall it"
    )

_cpu.borrow_openmp(gomp_parallel())

_CELLS = {cells.GRU.name: 0, cells.LSTM.name: 1}
_RULES: dict[type[Rule], int] = {Fractional: 0, Retained: 1, Discrete: 2}
GRAIN = 1 << 20
"""Multiplications of a call that are worth a second thread, and so on: waking one takes as long."""

PACKING_GRAIN = 1 << 17
"""Floats to pack that are worth another thread."""

MAPPED_ALONE = 32 << 20
"""Bytes from which on a block is always fresh from the system, which maps it page by page."""

_NO_FAULT, _OVERFLOW, _NOT_FINITE, _REVERSAL = range(4)


def tiers() -> list[str]:
    """The CPU tiers of this machine, best first."""
    return list(_cpu.tiers())


@dataclass
class _Prepared:
    layer: Layer
    shape: _cpu.Shape
    packed: Tensor
    scratch: dict[str, Tensor] = field(default_factory=dict)
    """Reused from chunk to chunk: fresh memory would be mapped and cleared again every time."""

    def take(self, name: str, size: int) -> Tensor:
        tensor = self.scratch.get(name)
        if tensor is None or tensor.numel() < size:
            tensor = self.scratch[name] = torch.empty(size, dtype=torch.float32, device="cpu")
        return tensor


class CpuBackend:
    """One CPU tier of the C++ kernels. Threads: at most ``torch.get_num_threads()``."""

    def __init__(self, tier: str) -> None:
        self.name = f"cpu-{tier}"
        self._tier = tier

    def refusal(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return None
        return f"kernels {self.name!r} work on CPU tensors, got tensors on {device}"

    def prepare(self, layer: Layer, weights: Weights, *, backward: bool) -> _Prepared:
        rows = layer.cell.gates * layer.hidden_size
        rule = layer.cell.rule
        discrete = rule if isinstance(rule, Discrete) else Discrete(1)
        zoneout = rule.zoneout if isinstance(rule, (Fractional, Retained)) else 0.0
        shape = _cpu.Shape(
            _CELLS[layer.cell.name],
            _RULES[type(rule)],
            len(rule.names("")),
            layer.input_size,
            layer.hidden_size,
            layer.stored_units,
            layer.forget.floor,
            layer.forget.z_min,
            discrete.estimator == "gumbel",
            1 / discrete.temperature,
            zoneout,
            layer.hidden_dropout,
            layer.seed is not None,
            layer.seed or 0,
        )
        size = _cpu.packed_floats(self._tier, shape, backward)
        packed = torch.empty(size, dtype=torch.float32, device="cpu")
        if 4 * size >= MAPPED_ALONE:
            _cpu.use_large_pages(packed.data_ptr(), 4 * size)
        _cpu.pack(
            self._tier,
            shape,
            _address(weights.ih, torch.float32, (rows, layer.input_size)),
            _address(weights.hh, torch.float32, (rows, layer.group_size)),
            _address(weights.bias, torch.float32, (rows,)),
            backward,
            packed.data_ptr(),
            max(1, min(torch.get_num_threads(), packed.numel() // PACKING_GRAIN)),
        )
        return _Prepared(layer, shape, packed)

    def forward(
        self,
        prepared: _Prepared,
        x: Tensor,
        steps: Steps,
        state: Tensor,
        codec: Codec,
        *,
        out: Tensor | None = None,
        stored: Tensor | None = None,
        record: Record | None = None,
    ) -> None:
        self._walk(False, prepared, x, steps, state, codec, out, stored, record)

    def reverse(
        self,
        prepared: _Prepared,
        x: Tensor,
        steps: Steps,
        state: Tensor,
        codec: Codec,
        record: Record,
        *,
        out: Tensor | None = None,
        stored: Tensor | None = None,
    ) -> None:
        self._walk(True, prepared, x, steps, state, codec, out, stored, record)

    def _walk(
        self,
        reverse: bool,
        prepared: _Prepared,
        x: Tensor,
        steps: Steps,
        state: Tensor,
        codec: Codec,
        out: Tensor | None,
        stored: Tensor | None,
        record: Record | None,
    ) -> None:
        if not isinstance(codec, EntropyTape):
            raise TypeError(f"the C++ kernels write the entropy tape, got {type(codec).__name__}")
        layer = prepared.layer
        batch = state.shape[1]
        columns = layer.cell.gates * layer.hidden_size
        threads = _threads(layer, steps)
        gates = prepared.take("gates", steps.rows * columns) if record is None else record.gates
        old, mid, extra = _record_addresses(record, layer, steps)
        scratch = _cpu.scratch_floats(self._tier, prepared.shape, batch, threads)
        if codec.writing:
            codec.check_room(len(steps.active), layer.taped_units)
        fault, step, row = _cpu.walk(
            self._tier,
            reverse,
            prepared.shape,
            len(steps.active),
            steps.rows,
            batch,
            _address(steps.offsets, torch.int64, (len(steps.active),)),
            _address(steps.active, torch.int64, (len(steps.active),)),
            steps.first,
            steps.stride,
            prepared.packed.data_ptr(),
            _address(x, torch.float32, (steps.rows, layer.input_size)),
            _address(state, torch.int32, (layer.cell.states, batch, layer.hidden_size)),
            _address(codec.lanes, torch.int32, (batch, tape.LANES)),
            _address(codec.stack, torch.uint8, (codec.stack.numel(),)),
            _address(codec.begin, torch.int64, (batch,)),
            _address(codec.fill, torch.int64, (batch,)),
            _address(codec.ideal, torch.float64, (batch,)),
            codec.writing,
            _address(stored, torch.int32, (steps.rows, layer.stored_units)),
            *_rows_address(out, steps.rows, layer.hidden_size),
            _address(gates[: steps.rows] if record else gates, torch.float32),
            old,
            mid,
            extra,
            prepared.take("rows", scratch).data_ptr(),
            threads,
        )
        if fault == _OVERFLOW:
            forgets = layer.cell.rule.forgets
            raise StateOverflowError.at(layer.name, steps.time(step), row, forgets=forgets)
        if fault == _NOT_FINITE and not reverse:
            raise NonFiniteError.at(layer.name, steps.time(step), row)
        if fault != _NO_FAULT:
            raise ReversalError.because(
                f"{layer.name}: the states of batch row {row} could not be brought back at time "
                f"step {steps.time(step)}"
            )

    def backprop(
        self,
        prepared: _Prepared,
        x: Tensor,
        steps: Steps,
        record: Record,
        d_out: Tensor | None,
        d_state: Tensor,
        gradients: Gradients,
        d_x: Tensor | None,
    ) -> None:
        layer = prepared.layer
        batch = d_state.shape[1]
        rows = layer.cell.gates * layer.hidden_size
        threads = _threads(layer, steps)
        scratch = _cpu.scratch_floats(self._tier, prepared.shape, batch, threads)
        _cpu.backprop(
            self._tier,
            prepared.shape,
            len(steps.active),
            steps.rows,
            batch,
            _address(steps.offsets, torch.int64, (len(steps.active),)),
            _address(steps.active, torch.int64, (len(steps.active),)),
            steps.first,
            steps.stride,
            prepared.packed.data_ptr(),
            _address(x, torch.float32, (steps.rows, layer.input_size)),
            _address(record.gates, torch.float32, (steps.rows, rows)),
            *_record_addresses(record, layer, steps),
            *_rows_address(d_out, steps.rows, layer.hidden_size),
            _address(d_state, torch.float32, (layer.cell.states, batch, layer.hidden_size)),
            _address(d_x, torch.float32, (steps.rows, layer.input_size)),
            _address(gradients.ih, torch.float32, (rows, layer.input_size)),
            _address(gradients.hh, torch.float32, (rows, layer.group_size)),
            _address(gradients.bias, torch.float32, (rows,)),
            prepared.take("rows", scratch).data_ptr(),
            threads,
        )


def _threads(layer: Layer, steps: Steps) -> int:
    """How many threads a chunk is worth. No result depends on it."""
    inputs = layer.input_size + layer.group_size
    work = steps.rows * layer.cell.gates * layer.hidden_size * inputs
    return max(1, min(torch.get_num_threads(), work // GRAIN if GRAIN else work))


def _address(
    tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> int:
    """The address of a contiguous CPU tensor of this dtype and shape; 0 for None."""
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if (
        tensor.device.type != "cpu"
        or tensor.dtype != dtype
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or (shape is not None and tensor.shape != shape)
        or (address == 0 and tensor.numel() > 0)
    ):
        raise ValueError(
            f"a kernel needs a contiguous CPU tensor of {dtype} and shape {shape}, got "
            f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        )
    return address


def _rows_address(tensor: Tensor | None, rows: int, most: int) -> tuple[int, int, int]:
    """Address, distance of rows and columns of a float32 (rows, <= most) tensor."""
    if tensor is None:
        return 0, 0, 0
    columns = tensor.shape[1]
    if (
        tensor.device.type != "cpu"
        or tensor.dtype != torch.float32
        or tensor.shape != (rows, columns)
        or columns > most
        or (tensor.stride(1) != 1 and columns > 1)
    ):
        raise ValueError(
            f"a kernel needs a float32 CPU tensor of {rows} rows of at most {most} adjacent "
            f"values, got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor.data_ptr(), tensor.stride(0), columns


def _record_addresses(record: Record | None, layer: Layer, steps: Steps) -> tuple[int, int, int]:
    """Addresses of old, mid and extra."""
    if record is None:
        return 0, 0, 0
    states = layer.cell.states * layer.hidden_size
    return (
        _address(record.old, torch.float32, (steps.rows, states)),
        _address(record.mid, torch.float32, (steps.rows, layer.group_size)),
        _address(record.extra, torch.float32, (steps.rows, 2 * layer.extra_size)),
    )

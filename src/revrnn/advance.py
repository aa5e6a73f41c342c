"""The forward pass of a stack of layers, chunk by chunk.

A *stack* runs over a packed sequence chunk by chunk, all layers through one chunk before the next
chunk, so nothing between two layers is ever longer than a chunk. Every layer advances its integer
state and, when the pass is to be reversed, writes its tape. `revrnn.reverse` is the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from revrnn.chunks import Chunk, cut
from revrnn.diagnostics import LayerReport
from revrnn.errors import NonFiniteError, StateOverflowError
from revrnn.fixed import STATE_LIMIT_VALUE, to_fixed
from revrnn.kernels import Backend, Layer, Record, Weights
from revrnn.tape import EntropyTape, PaperTape, SealedPaperTape, SealedTape


class Memory(Enum):
    """What a forward pass keeps for a backward pass."""

    NOTHING = "nothing"
    TAPE = "tape"
    STATES = "states"
    """The records of all chunks, states and gates: ``reversible=False``."""


@dataclass(frozen=True)
class Stack:
    """Layers one above the other, and how to run them. ``layers[i+1]`` reads ``layers[i]``'s h."""

    layers: tuple[Layer, ...]
    backend: Backend
    tape: str
    """"entropy" or "paper"."""
    chunk_size: int
    backwards: bool = False
    """From the last time step to the first."""

    def chunks(self, batch_sizes: Tensor) -> list[Chunk]:
        return list(cut(batch_sizes, self.chunk_size, backwards=self.backwards))


def new_record(layer: Layer, rows: int, device: torch.device) -> Record:
    """A record of that many packed rows, to be filled."""

    def floats(columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.float32, device=device)

    hidden = layer.hidden_size
    return Record(
        gates=floats(layer.cell.gates * hidden),
        old=floats(layer.cell.states * hidden),
        mid=floats(layer.group_size),
        extra=floats(2 * layer.extra_size),
    )


def initial_state(layer: Layer, value: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """The integer state (S, N, H) that a float state, or None for zeros, stands for."""
    shape = (layer.cell.states, batch, layer.hidden_size)
    if value is None:
        return torch.zeros(shape, dtype=torch.int32, device=device)
    magnitude = value.detach().abs().amax((0, 2))  # (N,)
    if not bool(torch.isfinite(magnitude).all()):
        row = int(torch.isfinite(magnitude).logical_not().int().argmax())
        raise NonFiniteError(f"{layer.name}: the initial state of batch row {row} is not finite")
    if bool((magnitude >= STATE_LIMIT_VALUE).any()):
        row = int((magnitude >= STATE_LIMIT_VALUE).int().argmax())
        raise StateOverflowError(
            f"{layer.name}: the initial state of batch row {row} is outside the fixed-point range "
            f"|h| < {STATE_LIMIT_VALUE:g}; detach and rescale it"
        )
    # The largest float32 below the limit rounds to an integer below it: both are on a coarser grid.
    return to_fixed(value.detach()).contiguous()


@dataclass(frozen=True)
class Position:
    """Where a forward pass stands between two chunks: enough to go on from there, bit for bit."""

    states: list[Tensor]
    """int32 (S, N, H), a layer each."""
    lanes: list[Tensor | None] | None = None
    """int32 (N, W), a layer each: the coder's lanes; None where there is no tape, and at the
    beginning of a sequence."""

    @classmethod
    def first(
        cls,
        stack: Stack,
        states: Sequence[Tensor | None],  # float32 (S, N, H), a layer each; None for zeros
        batch: int,
        device: torch.device,
    ) -> Position:
        return cls(
            [
                initial_state(layer, state, batch, device)
                for layer, state in zip(stack.layers, states, strict=True)
            ]
        )

    def start(self, index: int) -> Tensor | None:
        """The lanes that one layer's tape goes on from; None: a new one."""
        return None if self.lanes is None else self.lanes[index]

    @property
    def bits(self) -> int:
        tensors = [*self.states, *(self.lanes or [])]
        return 32 * sum(tensor.numel() for tensor in tensors if tensor is not None)


def prepare(stack: Stack, weights: Sequence[Weights], *, backward: bool) -> list[Any]:
    """The weights of all layers as the stack's kernels want them. What is prepared for `Backward`
    serves `Forward` too."""
    return [
        stack.backend.prepare(layer, weight, backward=backward)
        for layer, weight in zip(stack.layers, weights, strict=True)
    ]


class Forward:
    """A forward pass of a stack, chunk after chunk."""

    def __init__(
        self,
        stack: Stack,
        prepared: Sequence[Any],
        position: Position,
        masks: Sequence[Tensor | None],
        memory: Memory,
    ) -> None:
        self._stack = stack
        self._prepared = prepared
        self._memory = memory
        device = self._device = position.states[0].device
        self.states = [state.clone() for state in position.states]
        """The integer states (S, N, H) after the chunks so far, a layer each."""
        writing = memory is Memory.TAPE
        batch = self.states[0].shape[1]
        self.tapes = [
            EntropyTape(
                batch,
                writing=writing and layer.taped_units > 0,
                device=device,
                start=position.start(index),
            )
            if stack.tape == "entropy"
            else PaperTape(batch, layer.group_size, writing=writing, device=device)
            for index, layer in enumerate(stack.layers)
        ]
        self.stored: list[list[Tensor]] = [[] for _ in stack.layers]
        """Of each layer and chunk: the stored units, int32 (R, K); only with a tape."""
        self.records: list[list[Record]] = [[] for _ in stack.layers]
        """Of each layer and chunk; only with `Memory.STATES`."""
        self.rows = 0
        self._between = Between(stack, masks, device)

    def position(self) -> Position:
        """A copy of where the pass stands; entropy tapes only."""
        lanes = [
            cast(EntropyTape, tape).lanes.clone() if layer.taped_units else None
            for layer, tape in zip(self._stack.layers, self.tapes, strict=True)
        ]
        return Position([state.clone() for state in self.states], lanes)

    def advance(self, chunk: Chunk, x: Tensor, out: Tensor | None) -> None:
        """One chunk: ``x`` (R, I); ``out`` (R, k) receives the top layer's first k units of h."""
        self.rows += chunk.steps.rows
        top = len(self._stack.layers) - 1
        for index, layer in enumerate(self._stack.layers):
            target = out if index == top else self._between.buffer(index, chunk)
            stored = record = None
            if self._memory is Memory.TAPE:
                self.tapes[index].reserve(len(chunk.steps.active), layer.taped_units)
                if layer.stored_units:
                    shape = (chunk.steps.rows, layer.stored_units)
                    stored = torch.empty(shape, dtype=torch.int32, device=self._device)
                    self.stored[index].append(stored)
            elif self._memory is Memory.STATES:
                record = new_record(layer, chunk.steps.rows, self._device)
                self.records[index].append(record)
            self._stack.backend.forward(
                self._prepared[index],
                x,
                chunk.steps,
                self.states[index],
                self.tapes[index],
                out=target,
                stored=stored,
                record=record,
            )
            if index < top:
                assert target is not None
                x = self._between.mask(index, chunk, target)

    def reports(self, sealed: Sequence[SealedTape | SealedPaperTape]) -> list[LayerReport]:
        """The account of what is held for the backward pass, a layer each."""
        reports = []
        for index, layer in enumerate(self._stack.layers):
            stored_bits = 32 * sum(part.numel() for part in self.stored[index])
            record_bits = 32 * sum(
                part.numel()
                for record in self.records[index]
                for part in (record.gates, record.old, record.mid, record.extra)
            )
            taped = self._memory is Memory.TAPE
            reports.append(
                LayerReport(
                    name=layer.name,
                    tape_bits=sealed[index].tape_bits if taped else 0,
                    lane_bits=sealed[index].lane_bits if taped else 0,
                    stored_bits=stored_bits + record_bits,
                    ideal_bits=float(self.tapes[index].ideal.sum()) + stored_bits + record_bits,
                    naive_bits=32 * self.rows * layer.cell.states * layer.hidden_size,
                    unit_steps=self.rows * layer.restored_units,
                )
            )
        return reports


class Between:
    """Buffers and dropout masks between a stack's layers."""

    def __init__(self, stack: Stack, masks: Sequence[Tensor | None], device: torch.device) -> None:
        self._stack = stack
        self._masks = masks
        self._device = device
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, index: int, chunk: Chunk) -> Tensor:
        """Where layer ``index`` writes its output of a chunk, (R, H); used for every chunk."""
        rows = chunk.steps.rows
        buffer = self._buffers.get(index)
        if buffer is None or len(buffer) < rows:
            hidden = self._stack.layers[index].hidden_size
            buffer = torch.empty(rows, hidden, dtype=torch.float32, device=self._device)
            self._buffers[index] = buffer
        return buffer[:rows]

    def mask(self, index: int, chunk: Chunk, values: Tensor) -> Tensor:
        """Multiply (R, H) in place by the mask (N, H) above layer ``index``, if there is one."""
        mask = self._masks[index] if index < len(self._masks) else None
        if mask is not None:
            batch = len(mask)
            if chunk.steps.rows == batch * len(chunk.steps.active):  # every row in every step
                values.view(-1, batch, mask.shape[1]).mul_(mask)
            else:
                values.mul_(mask[chunk.batch_rows().to(mask.device)])
        return values

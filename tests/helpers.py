"""Layers to test kernels on, and the round trip that every kernel has to pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from revrnn import kernels
from revrnn.cells import GRU, LSTM, Cell
from revrnn.fixed import ForgetRange, to_fixed
from revrnn.kernels.contract import Backend, Layer, Record, Steps, Weights
from revrnn.tape import EntropyTape, PaperTape, SealedPaperTape, SealedTape


@dataclass(frozen=True)
class Problem:
    """A layer, its weights, and packed sequences to run it on."""

    layer: Layer
    weights: Weights
    x: Tensor  # (R, I)
    active: list[int]  # rows that take part, step by step
    state: Tensor  # (S, N, H) int32

    def chunks(self, size: int | None = None) -> Iterator[tuple[slice, Steps]]:
        """The rows and the steps of each chunk of at most ``size`` steps."""
        size = size or max(len(self.active), 1)
        first = 0
        for time in range(0, len(self.active), size):
            active = torch.tensor(self.active[time : time + size])
            rows = int(active.sum())
            yield (
                slice(first, first + rows),
                Steps(active.cumsum(0) - active, active, rows, first=time),
            )
            first += rows

    def of_row(self, row: int) -> Problem:
        """One batch row of it, alone."""
        first = torch.tensor(self.active).cumsum(0) - torch.tensor(self.active)
        mine = [int(start) + row for start, n in zip(first, self.active, strict=True) if n > row]
        return replace(
            self,
            x=self.x[mine],
            active=[1] * len(mine),
            state=self.state[:, row : row + 1].clone(),
        )


def make_problem(
    cell: Cell,
    active: Sequence[int],
    *,
    inputs: int = 5,
    hidden: int = 12,
    forget_bits: float | None = None,
    stored_units: int = 0,
    bias: bool = True,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """Weights as torch initialises them (times ``scale``), normal input, small initial states."""
    generator = torch.Generator().manual_seed(seed)
    rows, group = cell.gates * hidden, hidden // 2

    def uniform(*shape: int) -> Tensor:
        values = torch.rand(*shape, generator=generator, dtype=dtype)
        return (2 * values - 1) * scale / hidden**0.5

    batch = max(active, default=0)
    state = torch.randn(cell.states, batch, hidden, generator=generator) * 0.3
    return Problem(
        Layer(
            cell,
            inputs,
            hidden,
            ForgetRange.from_bits(forget_bits),
            stored_units,
            name="layer under test",
        ),
        Weights(uniform(rows, inputs), uniform(rows, group), uniform(rows) if bias else None),
        torch.randn(sum(active), inputs, generator=generator, dtype=dtype),
        list(active),
        to_fixed(state),
    )


def ragged(lengths: Sequence[int]) -> list[int]:
    """How many sequences of these lengths are active at each step."""
    return [sum(length > time for length in lengths) for time in range(max(lengths))]


def poisoned_record(layer: Layer, rows: int, dtype: torch.dtype = torch.float32) -> Record:
    """A record full of NaN: what a kernel forgets to fill is seen."""

    def nan(columns: int) -> Tensor:
        return torch.full((rows, columns), torch.nan, dtype=dtype)

    cell, hidden = layer.cell, layer.hidden_size
    return Record(
        gates=nan(cell.gates * hidden),
        old=nan(cell.states * hidden),
        mid=nan(layer.group_size),
        extra=nan(2 * layer.extra_size),
    )


def make_tape(kind: str, layer: Layer, batch: int, *, writing: bool) -> EntropyTape | PaperTape:
    if kind == "paper":
        return PaperTape(batch, layer.group_size, writing=writing, device="cpu")
    return EntropyTape(batch, writing=writing, device="cpu")


@dataclass
class Pass:
    """What a forward pass over all chunks leaves."""

    state: Tensor  # (S, N, H) after the last step
    out: Tensor  # (R, H)
    stored: Tensor | None  # (R, K)
    sealed: SealedTape | SealedPaperTape
    ideal: Tensor  # (N,)


def run_forward(
    backend: Backend,
    problem: Problem,
    *,
    chunk: int | None = None,
    kind: str = "entropy",
    writing: bool = True,
) -> Pass:
    layer, rows = problem.layer, len(problem.x)
    state = problem.state.clone()
    out = torch.full((rows, layer.hidden_size), torch.nan, dtype=problem.x.dtype)
    stored = None
    if layer.stored_units:
        stored = torch.full((rows, layer.stored_units), -(1 << 31), dtype=torch.int32)
    tape = make_tape(kind, layer, state.shape[1], writing=writing)
    prepared = backend.prepare(layer, problem.weights, backward=False)
    for own, steps in problem.chunks(chunk):
        tape.reserve(len(steps.active), layer.taped_units)
        backend.forward(
            prepared,
            problem.x[own],
            steps,
            state,
            tape,
            out=out[own],
            stored=None if stored is None else stored[own],
        )
    ideal = tape.ideal
    return Pass(state, out, stored, tape.seal(), ideal)


def run_reverse(
    backend: Backend, problem: Problem, after: Pass, *, chunk: int | None = None
) -> tuple[Tensor, Tensor, Record]:
    """State before the first step, outputs and record of all chunks; the tape is checked."""
    layer, rows = problem.layer, len(problem.x)
    state = after.state.clone()
    out = torch.full_like(after.out, torch.nan)
    record = poisoned_record(layer, rows, problem.x.dtype)
    tape: EntropyTape | PaperTape
    if isinstance(after.sealed, SealedTape):
        tape = EntropyTape.open(SealedTape.from_tensors(after.sealed.tensors()))
    else:
        tape = PaperTape.open(SealedPaperTape.from_tensors(after.sealed.tensors()))
    prepared = backend.prepare(layer, problem.weights, backward=True)
    for own, steps in reversed(list(problem.chunks(chunk))):
        tape.recall()
        backend.reverse(
            prepared,
            problem.x[own],
            steps,
            state,
            tape,
            Record(record.gates[own], record.old[own], record.mid[own], record.extra[own]),
            out=out[own],
            stored=None if after.stored is None else after.stored[own],
        )
    tape.check_rewound()
    return state, out, record


def check_roundtrip(
    backend: Backend, problem: Problem, *, chunk: int | None = None, kind: str = "entropy"
) -> Pass:
    """Forward and back, tape included: the initial state returns bit for bit, the tape ends empty,
    the sealed tape is not touched, and outputs and record are what the forward pass had."""
    after = run_forward(backend, problem, chunk=chunk, kind=kind)
    kept = [tensor.clone() for tensor in after.sealed.tensors()]
    state, out, record = run_reverse(backend, problem, after, chunk=chunk)
    assert_equal(state, problem.state)
    assert_equal(out, after.out)
    for now, before in zip(after.sealed.tensors(), kept, strict=True):
        assert_equal(now, before)

    without_tape = run_forward(backend, problem, chunk=chunk, kind=kind, writing=False)
    assert_equal(without_tape.state, after.state)
    assert_equal(without_tape.out, after.out)

    again = record_forward(backend, problem, kind=kind)
    for name in ("gates", "old", "mid", "extra"):
        assert_equal(getattr(record, name), getattr(again, name))
    return after


def record_forward(backend: Backend, problem: Problem, *, kind: str = "entropy") -> Record:
    """The record that a forward pass writes when its states are to be stored."""
    record = poisoned_record(problem.layer, len(problem.x), problem.x.dtype)
    prepared = backend.prepare(problem.layer, problem.weights, backward=True)
    state = problem.state.clone()
    tape = make_tape(kind, problem.layer, state.shape[1], writing=False)
    for own, steps in problem.chunks():
        backend.forward(prepared, problem.x[own], steps, state, tape, record=record)
    return record


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Every bit, dtype and shape; NaN equals nothing."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected), f"{int((actual != expected).sum())} elements differ"


def assert_all_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """`assert_equal` for every name, and the same names."""
    assert actual.keys() == expected.keys()
    different = [
        name
        for name, tensor in actual.items()
        if tensor.dtype != expected[name].dtype or not torch.equal(tensor, expected[name])
    ]
    assert not different


def check_way_back(backend: Backend, problem: Problem, *, chunk: int) -> None:
    """As `check_roundtrip`, for sequences of any length: nothing is kept but the tape."""
    layer = problem.layer
    state = problem.state.clone()
    batch = state.shape[1]
    forward = EntropyTape(batch, writing=True, device="cpu")
    prepared = backend.prepare(layer, problem.weights, backward=False)
    chunks = list(problem.chunks(chunk))
    for own, steps in chunks:
        forward.reserve(len(steps.active), layer.taped_units)
        backend.forward(prepared, problem.x[own], steps, state, forward)
    assert not torch.equal(state, problem.state)

    back = EntropyTape.open(forward.seal())
    record = poisoned_record(layer, max(steps.rows for _, steps in chunks))
    for own, steps in reversed(chunks):
        back.recall()
        part = Record(*(values[: steps.rows] for values in vars(record).values()))
        backend.reverse(prepared, problem.x[own], steps, state, back, part)
    assert_equal(state, problem.state)
    back.check_rewound()


def tape_of_row(sealed: SealedTape, row: int) -> tuple[list[int], bytes]:
    """Packed lanes and all bytes of one batch row."""
    data = b""
    for segment, fill in sealed.segments:
        begin = int(fill[:row].sum())
        data += bytes(segment[begin : begin + int(fill[row])].tolist())
    return sealed.lanes[row].tolist(), data


cells = pytest.mark.parametrize("cell", [GRU, LSTM], ids=lambda cell: cell.name)

_distinct = [kernels.get(name) for name in kernels.available() if name != "cpu"]

backends = pytest.mark.parametrize("backend", _distinct, ids=lambda backend: backend.name)
"""All backends of this machine; "cpu" is one of its tiers."""

compiled = _distinct[1:]
"""The tiers of the C++ kernels on this machine, best first; none in a pure-Python install."""

compiled_backends = pytest.mark.parametrize("backend", compiled, ids=lambda backend: backend.name)


def gradients(rnn: Any, x: Any, seed: int = 5, **call: Any) -> dict[str, Tensor]:
    """Outputs, final states and gradients of the sum of their squares, for a sequence that may be
    packed; what the module draws comes from the seed."""
    rnn.zero_grad()
    torch.manual_seed(seed)
    if isinstance(x, Tensor):
        x = x.clone().requires_grad_()
    out, final = rnn(x, **call)
    states = final if isinstance(final, tuple) else (final,)
    values = out if isinstance(out, Tensor) else out.data
    (values.square().sum() + sum(state.square().sum() for state in states)).backward()
    found = {f"final {index}": state.detach() for index, state in enumerate(states)}
    found |= {name: part.grad.clone() for name, part in rnn.named_parameters()}
    if isinstance(x, Tensor) and x.grad is not None:
        found["x"] = x.grad
    return found | {"out": values.detach()}

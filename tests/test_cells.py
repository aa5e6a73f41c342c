import pickle

import pytest
import torch
from helpers import assert_equal
from torch import Tensor

from revrnn.cells import GRU, LSTM, Cell, sigmoid, tanh
from revrnn.fixed import (
    H_ONE,
    Z_ONE,
    ForgetRange,
    quantise_forget,
    to_fixed,
    to_float,
)
from revrnn.tape import EntropyTape

CELLS = [GRU, LSTM]
cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)

ROWS, SIZE = 3, 5  # n, D


def test_sizes_and_names() -> None:
    assert (GRU.gates, GRU.states, GRU.gate_names) == (3, 1, ("z", "r", "g"))
    assert (LSTM.gates, LSTM.states, LSTM.gate_names) == (5, 2, ("f", "i", "o", "p", "g"))


@cells
def test_cells_survive_pickling(cell: Cell) -> None:
    assert pickle.loads(pickle.dumps(cell)) == cell


class Group:
    """One group's step on random numbers; ``recur`` is a plain product."""

    def __init__(self, cell: Cell, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.cell = cell
        self.pre = normal(ROWS, cell.gates * SIZE)
        self.other = normal(ROWS, SIZE)
        self.weight = normal(cell.gates * SIZE, SIZE)
        self.old = tuple(to_fixed(normal(ROWS, SIZE) * 2) for _ in range(cell.states))
        self.d_new = tuple(normal(ROWS, SIZE) for _ in range(cell.states))

    def recur(self, values: Tensor, start: Tensor, gates: slice) -> Tensor:
        return start + values @ self.weight[gates].T

    def recur_back(self, d_pre: Tensor, gates: slice) -> Tensor:
        return d_pre @ self.weight[gates]

    def activate(self) -> Tensor:
        return self.cell.activate(self.pre, self.other, self.recur)


def tape() -> EntropyTape:
    result = EntropyTape(ROWS, writing=True, device="cpu")
    result.reserve(1, 2 * SIZE)
    return result


@cells
@pytest.mark.parametrize("stored_units", [0, 2, SIZE])
@pytest.mark.parametrize("bits", [1, None])
def test_rewind_undoes_advance(cell: Cell, stored_units: int, bits: float | None) -> None:
    group, forget, codec = Group(cell), ForgetRange.from_bits(bits), tape()
    gates = group.activate()
    new, extra = cell.advance(group.old, gates, group.other, forget, codec, stored_units)
    assert not any(torch.equal(a, b) for a, b in zip(new, group.old, strict=True))
    stored = group.old[0][:, :stored_units] if stored_units else None
    back, extra_again = cell.rewind(new, gates, group.other, forget, codec, stored)
    for actual, expected in zip(back, group.old, strict=True):
        assert_equal(actual, expected)
    assert_equal(extra_again, extra)
    codec.check_rewound()


def real_step(
    cell: Cell, group: Group, gates: Tensor, old: tuple[Tensor, ...], forget: ForgetRange
) -> tuple[Tensor, ...]:
    """The update on real numbers (the paper's equations), forget gates within their range."""

    def forget_value(s: Tensor) -> Tensor:
        return forget.floor + (1 - forget.floor) * s

    if cell is GRU:
        s, _, g = gates.chunk(3, 1)
        z = forget_value(s)
        return (z * old[0] + (1 - z) * g,)
    f, i, o, p, g = gates.chunk(5, 1)
    c = forget_value(f) * old[1] + i * g
    return (forget_value(p) * old[0] + o * c.tanh(), c)


@cells
@pytest.mark.parametrize("bits", [2, None])
def test_advance_is_the_real_step_up_to_quantisation(cell: Cell, bits: float | None) -> None:
    group, forget = Group(cell, torch.float64), ForgetRange.from_bits(bits)
    gates = group.activate()
    old = tuple(to_float(state, torch.float64) for state in group.old)
    real = real_step(cell, group, gates, old, forget)
    new, _ = cell.advance(group.old, gates, group.other, forget, tape(), 0)
    for actual, expected, before in zip(new, real, old, strict=True):
        # z is off by half of 2^-R_Z (and times h and g), filled in is less than z*, u is rounded.
        bound = (before.abs() + 1) * 0.5 / Z_ONE + (Z_ONE + 1) / H_ONE
        if cell is LSTM:
            bound = 2 * bound  # h feels the error of c as well
        assert bool(((to_float(actual, torch.float64) - expected).abs() <= bound).all())


@cells
@pytest.mark.parametrize("bits", [2, None])
def test_gradient_is_autograds(cell: Cell, bits: float | None) -> None:
    """Against the same step with its rounding passed straight through."""
    group, forget = Group(cell, torch.float64), ForgetRange.from_bits(bits)
    old_fixed = group.old
    old = tuple(to_float(state, torch.float64) for state in old_fixed)
    gates = group.activate()
    _, extra = cell.advance(old_fixed, gates, group.other, forget, tape(), 0)
    d_pre, d_old, d_other = cell.gradient(
        group.d_new, gates, old, group.other, extra, forget, group.recur_back
    )

    def quantised(s: Tensor) -> Tensor:
        z = forget.floor + (1 - forget.floor) * s
        return z + (quantise_forget(s.detach(), forget).double() / Z_ONE - z).detach()

    pre = group.pre.clone().requires_grad_()
    other = group.other.clone().requires_grad_()
    leaves = tuple(state.clone().requires_grad_() for state in old)
    weight = group.weight
    if cell is GRU:
        zr = torch.sigmoid(pre[:, : 2 * SIZE] + other @ weight[: 2 * SIZE].T)
        z, r = quantised(zr[:, :SIZE]), zr[:, SIZE:]
        g = torch.tanh(pre[:, 2 * SIZE :] + (r * other) @ weight[2 * SIZE :].T)
        new: tuple[Tensor, ...] = (z * leaves[0] + (1 - z) * g,)
    else:
        f, i, o, p, g = (pre + other @ weight.T).chunk(5, 1)
        c = quantised(f.sigmoid()) * leaves[1] + i.sigmoid() * g.tanh()
        # tanh is taken at the quantised c, as in the integer step.
        fixed, _ = cell.advance(old_fixed, gates, group.other, forget, tape(), 0)
        c = c + (to_float(fixed[1], torch.float64) - c).detach()
        new = (quantised(p.sigmoid()) * leaves[0] + o.sigmoid() * c.tanh(), c)
    expected = torch.autograd.grad(new, (pre, other, *leaves), group.d_new)
    torch.testing.assert_close((d_pre, d_other, *d_old), expected, rtol=1e-11, atol=1e-12)


def test_sigmoid_and_tanh_are_accurate() -> None:
    x = torch.cat(
        (
            torch.linspace(-60, 60, 100_001, dtype=torch.float64),
            torch.logspace(-30, 0, 1000, dtype=torch.float64),
            -torch.logspace(-30, 0, 1000, dtype=torch.float64),
        )
    )
    for dtype in (torch.float32, torch.float64):
        values = x.to(dtype)
        expected = values.double()
        tolerance = 4 * torch.finfo(dtype).eps
        if dtype == torch.float64:
            # Far out, the rounding of ln 2 itself shows, and torch's own errors count too.
            tolerance *= 5
        for ours, theirs in ((sigmoid, torch.sigmoid), (tanh, torch.tanh)):
            torch.testing.assert_close(
                ours(values).double(), theirs(expected), rtol=tolerance, atol=0
            )


def test_sigmoid_and_tanh_end_where_they_should() -> None:
    x = torch.tensor([-3e38, -1e4, 0.0, 1e4, 3e38])
    assert tanh(x).tolist() == [-1, -1, 0, 1, 1]
    assert sigmoid(x)[2:].tolist() == [0.5, 1, 1]
    assert bool((sigmoid(x)[:2] < 1e-27).all())


@pytest.mark.parametrize("activation", [sigmoid, tanh])
def test_activations_do_not_depend_on_the_place_in_the_tensor(activation) -> None:  # type: ignore[no-untyped-def]
    """torch.sigmoid fails this: its vector body and its scalar tail differ."""
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 4
    whole = activation(x)
    for size in (1, 7, 33):
        assert_equal(torch.cat([activation(part) for part in x[:3000].split(size)]), whole[:3000])
    assert_equal(activation(x[::3]), whole[::3])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_equal(activation(x), whole)
    finally:
        torch.set_num_threads(threads)

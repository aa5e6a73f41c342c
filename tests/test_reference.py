from collections.abc import Iterator

import pytest
import torch
from helpers import (
    Problem,
    assert_equal,
    check_roundtrip,
    make_problem,
    poisoned_record,
    ragged,
    record_forward,
    run_forward,
    run_reverse,
)
from torch import Tensor

from revrnn.cells import GRU, LSTM, Cell
from revrnn.errors import NonFiniteError, ReversalError, StateOverflowError
from revrnn.fixed import STATE_LIMIT, Z_ONE, quantise_forget, to_float
from revrnn.kernels.contract import Gradients, Record
from revrnn.kernels.reference import ReferenceBackend, fixed_order_matmul

BACKEND = ReferenceBackend()
CELLS = [GRU, LSTM]
cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)

RAGGED = ragged([9, 9, 7, 4, 1])
GROWING = RAGGED[::-1]  # as the direction from the last step to the first sees them


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- exactness ------------------------------------------------------------------------------------


@cells
@pytest.mark.parametrize("bits", [1, 2, 3, 5, None])
@pytest.mark.parametrize("active", [RAGGED, GROWING], ids=["shrinking", "growing"])
@pytest.mark.parametrize("kind", ["entropy", "paper"])
def test_ragged_sequences_come_back(
    cell: Cell, bits: float | None, active: list[int], kind: str
) -> None:
    check_roundtrip(BACKEND, make_problem(cell, active, forget_bits=bits), chunk=4, kind=kind)


@cells
@pytest.mark.parametrize("stored_units", [1, 4, 6])
@pytest.mark.parametrize("kind", ["entropy", "paper"])
def test_stored_units_come_back_and_skip_the_tape(cell: Cell, stored_units: int, kind: str) -> None:
    problem = make_problem(cell, RAGGED, forget_bits=2, stored_units=stored_units)
    after = check_roundtrip(BACKEND, problem, chunk=4, kind=kind)
    everything = run_forward(BACKEND, make_problem(cell, RAGGED, forget_bits=2))
    assert after.ideal.sum() < everything.ideal.sum()


@cells
def test_more_units_than_lanes_and_no_bias(cell: Cell) -> None:
    check_roundtrip(BACKEND, make_problem(cell, [2] * 5, hidden=70, inputs=1, bias=False))


@cells
def test_float64_comes_back(cell: Cell) -> None:
    check_roundtrip(BACKEND, make_problem(cell, RAGGED, dtype=torch.float64), chunk=4)


@cells
def test_a_long_row_comes_back(cell: Cell) -> None:
    check_roundtrip(BACKEND, make_problem(cell, [1] * 700, hidden=4, inputs=2), chunk=64)


@pytest.mark.slow
@cells
@pytest.mark.parametrize("bits", [1, 2, 3, 5, None])
def test_two_thousand_ragged_steps_come_back(cell: Cell, bits: float | None) -> None:
    active = ragged([2000, 1999, 1500, 1000, 640, 100, 1])
    check_roundtrip(BACKEND, make_problem(cell, active, hidden=66, forget_bits=bits), chunk=64)


@cells
@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_states_do_not_depend_on_chunks(cell: Cell, chunk: int) -> None:
    problem = make_problem(cell, RAGGED)
    whole, parts = run_forward(BACKEND, problem), run_forward(BACKEND, problem, chunk=chunk)
    assert_equal(parts.state, whole.state)
    assert_equal(parts.out, whole.out)


@cells
def test_states_do_not_depend_on_the_batch(cell: Cell) -> None:
    problem = make_problem(cell, RAGGED, hidden=66, inputs=37)
    together = run_forward(BACKEND, problem)
    for row in range(max(RAGGED)):
        alone = run_forward(BACKEND, problem.of_row(row))
        assert_equal(alone.state[:, 0], together.state[:, row])


@cells
@pytest.mark.usefixtures("threads")
def test_nothing_depends_on_the_number_of_threads(cell: Cell) -> None:
    # Large enough for torch to split the work: 40 * 5 * 66 * 5 projections.
    problem = make_problem(cell, [40] * 5, hidden=66, inputs=37)
    torch.set_num_threads(1)
    one = run_forward(BACKEND, problem)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert_equal(run_forward(BACKEND, problem).state, one.state)
        state, _, _ = run_reverse(BACKEND, problem, one)
        assert_equal(state, problem.state)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_product_of_a_row_depends_on_nothing_but_the_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(700, 19, generator=generator, dtype=dtype)
    weight_t = torch.randn(19, 101, generator=generator, dtype=dtype)
    start = torch.randn(101, generator=generator, dtype=dtype).expand(700, -1)
    whole = fixed_order_matmul(a, weight_t, start)
    torch.testing.assert_close(whole, start + a @ weight_t)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert_equal(fixed_order_matmul(a, weight_t, start), whole)
    for size in (1, 3, 64):
        parts = [fixed_order_matmul(rows, weight_t, start[: len(rows)]) for rows in a.split(size)]
        assert_equal(torch.cat(parts), whole)
    for columns in (slice(0, 1), slice(3, 10), slice(50, 101)):
        assert_equal(
            fixed_order_matmul(a, weight_t[:, columns], start[:, columns]), whole[:, columns]
        )


def test_plain_floats_do_not_come_back() -> None:
    """The negative control: the same recurrence in float32, and no tape."""
    problem = make_problem(GRU, [4] * 100, hidden=20)
    layer, size = problem.layer, 10
    projected = (problem.x @ problem.weights.ih.T + problem.weights.bias).view(100, 4, 2, 3 * size)
    weights = problem.weights.hh.chunk(2)

    def gates(time: int, group: int, other: Tensor) -> tuple[Tensor, Tensor]:
        s, _, g = layer.cell.activate(
            projected[time, :, group],
            other,
            lambda values, start, own: start + values @ weights[group][own].T,
        ).chunk(3, 1)
        return quantise_forget(s, layer.forget) / Z_ONE, g

    before = h = to_float(problem.state[0]).split(size, 1)
    for time in range(100):
        z, g = gates(time, 0, h[1])
        h = (z * h[0] + (1 - z) * g, h[1])
        z, g = gates(time, 1, h[0])
        h = (h[0], z * h[1] + (1 - z) * g)
    for time in reversed(range(100)):
        z, g = gates(time, 1, h[0])
        h = (h[0], (h[1] - (1 - z) * g) / z)
        z, g = gates(time, 0, h[1])
        h = ((h[0] - (1 - z) * g) / z, h[1])
    assert not bool(((torch.cat(h, 1) - torch.cat(before, 1)).abs() < 0.1).any())

    check_roundtrip(BACKEND, problem)


# -- gradients ------------------------------------------------------------------------------------


def backprop(
    problem: Problem, record: Record, d_out: Tensor | None, d_state: Tensor
) -> tuple[Gradients, Tensor, Tensor]:
    """Weight gradients, d_x and d_state before the first step, in chunks of 4 steps."""
    weights, dtype = problem.weights, problem.x.dtype
    gradients = Gradients(
        torch.zeros_like(weights.ih),
        torch.zeros_like(weights.hh),
        None if weights.bias is None else torch.zeros_like(weights.bias),
    )
    record = Record(*(part.clone() for part in vars(record).values()))
    d_x, d_state = torch.full_like(problem.x, torch.nan), d_state.clone()
    prepared = BACKEND.prepare(problem.layer, weights, backward=True)
    for own, steps in reversed(list(problem.chunks(4))):
        BACKEND.backprop(
            prepared,
            problem.x[own],
            steps,
            Record(record.gates[own], record.old[own], record.mid[own], record.extra[own]),
            None if d_out is None else d_out[own],
            d_state,
            gradients,
            d_x[own],
        )
    assert d_x.dtype == dtype
    return gradients, d_x, d_state


def model(problem: Problem, record: Record, out_units: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """The paper's equations in float64 autograd, evaluated at the recorded (quantised) states.

    Wherever the integer step rounds or fills in, the recorded value is taken and its difference
    passed straight through. Returns the leaves, the outputs and the final state.
    """
    layer, weights = problem.layer, problem.weights
    cell, size, forget = layer.cell, layer.group_size, layer.forget
    batch = problem.state.shape[1]
    leaves = [
        tensor.double().requires_grad_()
        for tensor in (problem.x, weights.ih, weights.hh, weights.bias)
        if tensor is not None
    ]
    x, w_ih, w_hh = leaves[:3]
    pre_all = x @ w_ih.T + (leaves[3] if len(leaves) > 3 else 0)
    start = to_float(problem.state, torch.float64).requires_grad_()
    leaves.append(start)
    # One row of states for each batch row: [h1, h2] or [h1, h2, c1, c2], each (D,).
    rows = [list(start[:, n].reshape(-1, size).unbind(0)) for n in range(batch)]
    after = run_forward(BACKEND, problem)

    def at(real: Tensor, exact: Tensor) -> Tensor:
        return real + (exact.double() - real).detach()

    def quantised(s: Tensor) -> Tensor:
        z = forget.floor + (1 - forget.floor) * s
        return at(z, quantise_forget(s.detach(), forget) / Z_ONE)

    outs = []
    first = 0
    for time, active in enumerate(problem.active):
        for n in range(active):
            following = first + active + n
            if time + 1 < len(problem.active) and n < problem.active[time + 1]:
                new = record.old[following].view(-1, size)
            else:
                new = to_float(after.state[:, n], torch.float64).reshape(-1, size)
            state = rows[n]
            for group in (0, 1):
                width = cell.gates * size
                pre = pre_all[first + n, group * width : (group + 1) * width]
                w = w_hh[group * width : (group + 1) * width]
                other = state[1 - group]
                if cell is GRU:
                    s, r = (pre[: 2 * size] + w[: 2 * size] @ other).sigmoid().chunk(2)
                    g = (pre[2 * size :] + w[2 * size :] @ (r * other)).tanh()
                    z = quantised(s)
                    state[group] = at(z * state[group] + (1 - z) * g, new[group])
                else:
                    f, i, o, p, g = (pre + w @ other).chunk(5)
                    c = quantised(f.sigmoid()) * state[2 + group] + i.sigmoid() * g.tanh()
                    c = state[2 + group] = at(c, new[2 + group])
                    h = quantised(p.sigmoid()) * state[group] + o.sigmoid() * c.tanh()
                    state[group] = at(h, new[group])
            outs.append(torch.cat((state[0], state[1]))[:out_units])
        first += active
    final = torch.stack([torch.stack(row).view(cell.states, -1) for row in rows], dim=1)
    return leaves, torch.stack(outs), final


@cells
@pytest.mark.parametrize("bits", [2, None])
@pytest.mark.parametrize("active", [RAGGED, GROWING], ids=["shrinking", "growing"])
def test_gradients_are_those_of_the_real_model(
    cell: Cell, bits: float | None, active: list[int]
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        problem = make_problem(cell, active, forget_bits=bits, dtype=dtype)
        generator = torch.Generator().manual_seed(1)
        d_out = torch.randn(len(problem.x), 7, generator=generator, dtype=dtype)
        d_state = torch.randn(problem.state.shape, generator=generator, dtype=dtype)
        record = record_forward(BACKEND, problem)
        gradients, d_x, d_start = backprop(problem, record, d_out, d_state)

        leaves, out, final = model(problem, record, 7)
        expected = torch.autograd.grad((out, final), leaves, (d_out.double(), d_state.double()))
        actual = (d_x, gradients.ih, gradients.hh, gradients.bias, d_start)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)


@cells
def test_gradients_of_states_only_and_without_bias(cell: Cell) -> None:
    problem = make_problem(cell, RAGGED, bias=False, dtype=torch.float64)
    record = record_forward(BACKEND, problem)
    d_state = torch.randn(problem.state.shape, dtype=torch.float64)
    gradients, d_x, d_start = backprop(problem, record, None, d_state)
    leaves, _, final = model(problem, record, 1)
    expected = torch.autograd.grad(final, leaves, d_state)
    for mine, theirs in zip((d_x, gradients.ih, gradients.hh, d_start), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@cells
def test_gradients_that_are_not_wanted_are_not_needed(cell: Cell) -> None:
    problem = make_problem(cell, [2, 2])
    ((own, steps),) = problem.chunks()
    record = record_forward(BACKEND, problem)
    prepared = BACKEND.prepare(problem.layer, problem.weights, backward=True)
    d_state = torch.ones(problem.state.shape)
    BACKEND.backprop(
        prepared,
        problem.x[own],
        steps,
        record,
        None,
        d_state,
        Gradients(None, None, None),
        None,
    )
    assert bool(d_state.isfinite().all())


@cells
def test_reversed_and_stored_records_give_equal_gradients(cell: Cell) -> None:
    problem = make_problem(cell, RAGGED, hidden=66, inputs=37)
    d_out = torch.randn(len(problem.x), 66)
    d_state = torch.randn(problem.state.shape)
    _, _, rebuilt = run_reverse(BACKEND, problem, run_forward(BACKEND, problem, chunk=4), chunk=4)
    stored = record_forward(BACKEND, problem)
    results = [backprop(problem, record, d_out, d_state) for record in (rebuilt, stored)]
    for mine, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert_equal(mine, theirs)
    for mine, theirs in zip(*(vars(result[0]).values() for result in results), strict=True):
        assert_equal(mine, theirs)


# -- errors ---------------------------------------------------------------------------------------


def first_row_of(problem: Problem, step: int) -> int:
    return sum(problem.active[:step])


@cells
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_input_that_is_not_finite_is_named(cell: Cell, value: float) -> None:
    problem = make_problem(cell, RAGGED)
    problem.x[first_row_of(problem, 5) + 2, 0] = value
    with pytest.raises(NonFiniteError, match=r"layer under test: .* row 2 .* time step 5\."):
        run_forward(BACKEND, problem, chunk=4)


@cells
def test_a_state_that_leaves_its_range_is_named(cell: Cell) -> None:
    problem = make_problem(cell, RAGGED)
    # Forget nothing, add as much as possible.
    problem.weights.bias.fill_(30.0)
    # The h of a RevGRU is an average of itself and g: only a start beyond the range leaves it.
    problem.state[-1, 1, 3] = STATE_LIMIT - 1 if cell is LSTM else (1 << 31) - 1
    with pytest.raises(StateOverflowError, match=r"layer under test: .* row 1 .* time step 0\."):
        run_forward(BACKEND, problem, chunk=4)


@cells
def test_reversing_with_other_weights_is_an_error(cell: Cell) -> None:
    problem = make_problem(cell, [3] * 20, hidden=40)
    after = run_forward(BACKEND, problem, chunk=4)
    problem.weights.hh[5, 3] += 0.5
    with pytest.raises(ReversalError):
        run_reverse(BACKEND, problem, after, chunk=4)


@cells
def test_a_step_that_cannot_be_reversed_is_named(cell: Cell) -> None:
    problem = make_problem(cell, [3] * 20, hidden=40)
    after = run_forward(BACKEND, problem, chunk=4)
    problem.weights.ih[0, 0] = torch.nan
    with pytest.raises(ReversalError, match=r"layer under test: .* row 0 .* time step 19\."):
        run_reverse(BACKEND, problem, after, chunk=4)


def test_any_device_is_served() -> None:
    assert BACKEND.refusal(torch.device("cpu")) is None
    assert BACKEND.refusal(torch.device("meta")) is None


def test_the_poison_is_poison() -> None:
    record = poisoned_record(make_problem(GRU, [1]).layer, 1)
    assert all(bool(part.isnan().all()) for part in vars(record).values())

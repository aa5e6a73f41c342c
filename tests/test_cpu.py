"""The C++ kernels from close by: their codec, their activations, their threads, their checks."""

from collections.abc import Sequence

import pytest
import torch
from helpers import (
    Pass,
    Problem,
    assert_equal,
    cells,
    compiled,
    compiled_backends,
    make_problem,
    ragged,
    record_forward,
    run_forward,
    run_reverse,
    tape_of_row,
)
from torch import Tensor

from revrnn import exact, kernels
from revrnn._sealing import pack_lanes
from revrnn.cells import GRU, LSTM, Cell
from revrnn.fixed import (
    H_ONE,
    RADIX_Z,
    STATE_LIMIT,
    Z_MAX,
    Z_ONE,
    ForgetRange,
    quantise_forget,
    to_float,
)
from revrnn.kernels import Backend, Layer, Weights
from revrnn.kernels._openmp import gomp_parallel
from revrnn.tape import LANES, EntropyTape, PaperTape, SealedTape

_cpu = pytest.importorskip("revrnn._cpu", reason="needs the C++ kernels")

pytestmark = pytest.mark.usefixtures("poison")


def one_step(
    cell: Cell,
    state: Tensor,
    bias: Tensor,
    *,
    values: Tensor | None = None,
    forget_bits: float | None = None,
) -> Problem:
    """One step from the int32 ``state`` (S, N, H) of a layer without recurrent weights: all its
    pre-activations are ``bias`` (2, G, D) plus, where that is zero, the row's of ``values`` (N,).
    """
    _, gates, size = bias.shape
    batch = state.shape[1]
    return Problem(
        Layer(cell, 1, 2 * size, ForgetRange.from_bits(forget_bits), name="layer under test"),
        Weights(
            (bias.reshape(-1, 1) == 0).float(),
            torch.zeros(2 * gates * size, size),
            bias.flatten(),
        ),
        torch.zeros(batch, 1) if values is None else values[:, None],
        [batch],
        state,
    )


# -- the codec ------------------------------------------------------------------------------------


def multiplications(
    cell: Cell, rows: int, seed: int
) -> tuple[Problem, list[tuple[Tensor, Tensor]]]:
    """A step that does nothing but multiply, and its calls to the codec in order, as (h, z).

    Every z* from 1 to 1023 multiplies some unit. States are of all sizes, and near the limits. The
    updates are zero: g = tanh(0), and for the h of a RevLSTM o = sigmoid(-200).
    """
    generator = torch.Generator().manual_seed(seed)
    size = Z_ONE // 2
    state = torch.randint(
        1 - STATE_LIMIT,
        STATE_LIMIT,
        (cell.states, rows, 2 * size),
        generator=generator,
        dtype=torch.int32,
    )
    state >>= torch.randint(0, 31, state.shape, generator=generator, dtype=torch.int32)
    limits = torch.tensor([1 - STATE_LIMIT, STATE_LIMIT - 1, -1, 0, -Z_ONE, Z_ONE - 1])
    state[torch.rand(state.shape, generator=generator) < 0.01] = 0
    chosen = torch.rand(state.shape, generator=generator) < 0.05
    picks = torch.randint(len(limits), state.shape, generator=generator)
    state = torch.where(chosen, limits.to(torch.int32)[picks], state)

    def forgets() -> Tensor:
        return torch.randperm(2 * size, generator=generator).clamp(min=1).view(2, size)

    bias = torch.zeros(2, cell.gates, size)
    first, second = state[:, :, :size], state[:, :, size:]
    if cell is GRU:
        z = forgets()
        bias[:, 0] = (z / Z_ONE).logit()
        calls = [(first[0], z[0]), (second[0], z[1])]
    else:
        f, p = forgets(), forgets()
        bias[:, 0], bias[:, 3] = (f / Z_ONE).logit(), (p / Z_ONE).logit()
        bias[:, 2] = -200.0
        calls = [(first[1], f[0]), (first[0], p[0]), (second[1], f[1]), (second[0], p[1])]
    return one_step(cell, state, bias), [(h, z.to(torch.int32).expand_as(h)) for h, z in calls]


def products(after: Pass) -> list[Tensor]:
    """What came of `multiplications`, in the same order."""
    first, second = after.state.chunk(2, dim=2)
    if len(after.state) == 1:
        return [first[0], second[0]]
    return [first[1], first[0], second[1], second[0]]


def oracle_row(
    calls: Sequence[tuple[list[int], list[int]]],
) -> tuple[list[int], bytes, list[list[int]]]:
    """Lanes, bytes and products of one row, by Python's integers."""
    lanes = [exact.LANE_LOW] * LANES
    tape = bytearray()
    results = []
    for states, forgets in calls:
        result = []
        for start in range(0, len(states), LANES):
            emitted: tuple[list[int], list[int]] = ([], [])
            block = slice(start, start + LANES)
            for lane, (h, z) in enumerate(zip(states[block], forgets[block], strict=True)):
                x, count = lanes[lane], 0
                while (x << RADIX_Z) + h % Z_ONE >= z * 256 * exact.LANE_LOW:
                    emitted[count].append(x % 256)
                    x, count = x // 256, count + 1
                lanes[lane], product = exact.oracle_multiply(x, h, z)
                result.append(product)
            tape += bytes(emitted[0] + emitted[1])
        results.append(result)
    return lanes, bytes(tape), results


def check_codec(backend: Backend, cell: Cell, rows: int, seed: int) -> int:
    """C++, the torch tape and Python integers: the same states, the same bytes; and back. Returns
    the number of multiplications."""
    problem, calls = multiplications(cell, rows, seed)
    after = run_forward(backend, problem)
    tape = EntropyTape(rows, writing=True, device="cpu")
    tape.reserve(1, problem.layer.taped_units)
    for (h, z), product in zip(calls, products(after), strict=True):
        assert_equal(tape.multiply(h, z), product)
    torch.testing.assert_close(after.ideal, tape.ideal, rtol=1e-6, atol=0)
    for ours, theirs in zip(after.sealed.tensors(), tape.seal().tensors(), strict=True):
        assert_equal(ours, theirs)

    assert isinstance(after.sealed, SealedTape)
    for row in range(rows):
        lanes, data, expected = oracle_row([(h[row].tolist(), z[row].tolist()) for h, z in calls])
        for product, values in zip(products(after), expected, strict=True):
            assert product[row].tolist() == values
        packed = pack_lanes(torch.tensor([lanes], dtype=torch.int32))[0].tolist()
        assert tape_of_row(after.sealed, row) == (packed, data)

    state, _, _ = run_reverse(backend, problem, after)
    assert_equal(state, problem.state)
    # Tapes are interchangeable: the torch tape reads what C++ wrote.
    back = EntropyTape.open(after.sealed)
    for (h, z), product in reversed(list(zip(calls, products(after), strict=True))):
        assert_equal(back.divide(product, z), h)
    back.check_rewound()
    return sum(h.numel() for h, _ in calls)


@compiled_backends
@cells
def test_the_codec_agrees_with_the_oracle(backend: Backend, cell: Cell) -> None:
    assert check_codec(backend, cell, rows=100 // cell.states, seed=0) >= 100_000


@compiled_backends
@cells
def test_tapes_are_those_of_the_reference_where_gates_agree(backend: Backend, cell: Cell) -> None:
    problem, _ = multiplications(cell, 2, seed=7)
    ours = run_forward(backend, problem)
    theirs = run_forward(kernels.get("reference"), problem)
    assert_equal(ours.state, theirs.state)
    for mine, yours in zip(ours.sealed.tensors(), theirs.sealed.tensors(), strict=True):
        assert_equal(mine, yours)
    for backwards, after in ((backend, theirs), (kernels.get("reference"), ours)):
        state, _, _ = run_reverse(backwards, problem, after)
        assert_equal(state, problem.state)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@compiled_backends
@cells
def test_ten_million_products_agree_with_the_oracle(backend: Backend, cell: Cell) -> None:
    done = seed = 0
    while done < 10_000_000:
        seed += 1
        done += check_codec(backend, cell, rows=200, seed=seed)


@compiled_backends
@cells
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 10, None])
def test_gates_are_quantised_as_written(backend: Backend, cell: Cell, bits: float | None) -> None:
    """z* can be read off the product of a state: ``h = 2^20`` becomes ``2^10 z* + e``, e < z*."""
    values = torch.cat((torch.linspace(-90, 90, 500), torch.linspace(-9, 9, 3500)))
    bias = torch.zeros(2, cell.gates, 17)
    if cell is GRU:
        bias[:, 2] = 1e-30  # a g that is as good as zero
    else:
        bias[:, 2] = -200.0  # an o, which makes the update of h zero
        bias[:, 4] = 1e-30
    state = torch.full((cell.states, len(values), 34), 1 << 2 * RADIX_Z, dtype=torch.int32)
    problem = one_step(cell, state, bias, values=values, forget_bits=bits)
    gates = record_forward(backend, problem).gates.view(-1, 2, cell.gates, 17)
    after = run_forward(backend, problem)
    for which, gate in ((-1, 0), (0, 3)) if cell is LSTM else ((0, 0),):
        z = (after.state[which] >> RADIX_Z).view(-1, 2, 17)
        assert_equal(z, quantise_forget(gates[:, :, gate], problem.layer.forget))
        assert int(z.min()) == problem.layer.forget.z_min
        assert int(z.max()) == Z_MAX


# -- activations ----------------------------------------------------------------------------------


def activations(backend: Backend, cell: Cell, values: Tensor) -> Tensor:
    """All gates (N, G) at these pre-activations (N,)."""
    state = torch.zeros(cell.states, len(values), 34, dtype=torch.int32)
    problem = one_step(cell, state, torch.zeros(2, cell.gates, 17), values=values)
    gates = record_forward(backend, problem).gates.view(-1, 2, cell.gates, 17)
    assert bool((gates == gates[:, :1, :, :1]).all())  # whatever the unit
    return gates[:, 0, :, 0]


@compiled_backends
@cells
def test_sigmoid_and_tanh_are_accurate(backend: Backend, cell: Cell) -> None:
    """The exponential is good to 2e-7, 1.7 units of 2^-23; a sum and a quotient round by half a
    unit each, and nothing makes the relative error larger."""
    tiny = torch.logspace(-30, 0, 1000)
    values = torch.cat(
        (
            torch.linspace(-87, 87, 30_000),
            torch.linspace(-4, 4, 30_000),
            torch.linspace(0.6, 0.65, 3000),  # where tanh goes from one formula to the other
            tiny,
            -tiny,
        )
    )
    gates = activations(backend, cell, values).double()
    exact_values = values.double()[:, None]
    sigmoids, tanhs = gates[:, :-1], gates[:, -1:]
    torch.testing.assert_close(
        sigmoids, exact_values.sigmoid().expand_as(sigmoids), rtol=3 * 2**-23, atol=0
    )
    torch.testing.assert_close(tanhs, exact_values.tanh(), rtol=3 * 2**-23, atol=0)


@compiled_backends
@cells
def test_sigmoid_and_tanh_end_where_they_should(backend: Backend, cell: Cell) -> None:
    values = torch.tensor([-3e38, -1e4, -88.0, -0.0, 0.0, 88.0, 1e4, 3e38])
    gates = activations(backend, cell, values)
    assert bool((gates[:3, :-1] < 2e-38).all())
    assert gates[3:, 0].tolist() == [0.5, 0.5, 1, 1, 1]
    assert gates[:, -1].tolist() == [-1, -1, -1, 0, 0, 1, 1, 1]


@compiled_backends
@cells
def test_activations_do_not_depend_on_the_place(backend: Backend, cell: Cell) -> None:
    values = torch.randn(70, generator=torch.Generator().manual_seed(0)) * 4
    by_row = activations(backend, cell, values)
    for size in (1, 7, 33, 70):
        for part, expected in zip(values.split(size), by_row.split(size), strict=True):
            state = torch.zeros(cell.states, 1, 2 * len(part), dtype=torch.int32)
            problem = one_step(cell, state, part.expand(2, cell.gates, -1).contiguous())
            by_unit = record_forward(backend, problem).gates.view(2, cell.gates, -1)
            assert_equal(by_unit, expected.T.expand_as(by_unit))


@compiled_backends
def test_sums_are_those_of_float64(backend: Backend) -> None:
    """Pre-activations of projections and recurrent products, by their sigmoid."""
    problem = make_problem(LSTM, [13], hidden=74, inputs=1001)
    weights = problem.weights
    assert weights.bias is not None
    record = record_forward(backend, problem)
    h1, h2 = to_float(problem.state[0], torch.float64).chunk(2, dim=1)
    pre = problem.x.double() @ weights.ih.double().T + weights.bias.double()
    w1, w2 = weights.hh.double().chunk(2)
    half = pre.shape[1] // 2
    expected = (pre[:, :half] + h2 @ w1.T, pre[:, half:] + record.mid.double() @ w2.T)
    del h1
    for group, values in enumerate(expected):
        # A chain of 1039 sums of terms around 0.1, each rounded by a relative 2^-24 of at most 8.
        actual = record.gates[:, group * half : group * half + 4 * 37].double()
        torch.testing.assert_close(
            actual, values[:, : 4 * 37].sigmoid(), rtol=0, atol=0.25 * 1039 * 2**-24
        )


# -- threads and float modes ----------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
@compiled_backends
@cells
def test_denormals_count_whatever_the_thread_says(backend: Backend, cell: Cell) -> None:
    """The input is denormal and the weights huge: with flushing, every projection would be zero."""
    problem = make_problem(cell, ragged([9, 9, 7, 4, 1]), hidden=44)
    problem.x.mul_(1e-39)
    problem.weights.ih.mul_(3e38)
    kept = run_forward(backend, problem, chunk=4)
    projected = problem.x.double() @ problem.weights.ih.double().T
    assert float(projected.abs().mean()) > 0.01
    assert torch.set_flush_denormal(True)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            flushed = run_forward(backend, problem, chunk=4)
            state, _, _ = run_reverse(backend, problem, kept, chunk=4)
            assert torch.equal(torch.tensor([1e-39]) * 2, torch.zeros(1))  # it is in force
            assert_equal(flushed.state, kept.state)
            assert_equal(state, problem.state)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.usefixtures("threads")
@compiled_backends
@cells
def test_the_kernels_own_threads_give_the_same_bits(backend: Backend, cell: Cell) -> None:
    """Those they use where torch brings no OpenMP runtime to borrow from."""
    problem = make_problem(cell, ragged([9, 9, 7, 4, 4, 1, 1]), hidden=66, inputs=37)
    expected = run_forward(backend, problem, chunk=4)
    _cpu.borrow_openmp(0)
    try:
        for count in (1, 2, 3, 5, 2):
            torch.set_num_threads(count)
            after = run_forward(backend, problem, chunk=4)
            assert_equal(after.out, expected.out)
            state, _, _ = run_reverse(backend, problem, expected, chunk=4)
            assert_equal(state, problem.state)
    finally:
        _cpu.borrow_openmp(gomp_parallel())


# -- checks ---------------------------------------------------------------------------------------


def problem_and_steps() -> tuple[Problem, kernels.Steps]:
    problem = make_problem(GRU, [2] * 3)
    ((_, steps),) = problem.chunks()
    return problem, steps


def silent(batch: int) -> EntropyTape:
    return EntropyTape(batch, writing=False, device="cpu")


@compiled_backends
def test_tensors_that_a_kernel_cannot_use_are_refused(backend: Backend) -> None:
    problem, steps = problem_and_steps()
    prepared = backend.prepare(problem.layer, problem.weights, backward=False)
    bad_inputs = [
        problem.x.double(),
        problem.x[:-1],
        torch.cat((problem.x, problem.x), dim=1)[:, ::2],
        problem.x.to("meta"),
    ]
    for x in bad_inputs:
        with pytest.raises(ValueError, match="a kernel needs a contiguous CPU tensor"):
            backend.forward(prepared, x, steps, problem.state, silent(2))
    for state in (problem.state.long(), problem.state[:, :1], problem.state.transpose(1, 2)):
        with pytest.raises(ValueError, match="a kernel needs a contiguous CPU tensor"):
            backend.forward(prepared, problem.x, steps, state, silent(2))
    for out in (torch.empty(6, 13), torch.empty(5, 3), torch.empty(6, 6)[:, ::2]):
        with pytest.raises(ValueError, match="a kernel needs a float32 CPU tensor of 6 rows"):
            backend.forward(prepared, problem.x, steps, problem.state, silent(2), out=out)


@compiled_backends
def test_outputs_may_be_strided(backend: Backend) -> None:
    problem, steps = problem_and_steps()
    prepared = backend.prepare(problem.layer, problem.weights, backward=False)
    expected = run_forward(backend, problem).out
    wide = torch.full((6, 20), 7.0)
    backend.forward(prepared, problem.x, steps, problem.state, silent(2), out=wide[:, 3:8])
    assert_equal(wide[:, 3:8].contiguous(), expected[:, :5].contiguous())
    assert bool((wide[:, [*range(3), *range(8, 20)]] == 7).all())


@compiled_backends
def test_other_codecs_are_refused(backend: Backend) -> None:
    problem, steps = problem_and_steps()
    prepared = backend.prepare(problem.layer, problem.weights, backward=False)
    paper = PaperTape(2, 6, writing=True, device="cpu")
    with pytest.raises(TypeError, match="write the entropy tape, got PaperTape"):
        backend.forward(prepared, problem.x, steps, problem.state, paper)


@compiled_backends
def test_a_tape_without_room_is_refused(backend: Backend) -> None:
    problem, steps = problem_and_steps()
    prepared = backend.prepare(problem.layer, problem.weights, backward=False)
    tape = EntropyTape(2, writing=True, device="cpu")
    tape.reserve(1, 1)
    with pytest.raises(RuntimeError, match="has not made room"):
        backend.forward(prepared, problem.x, steps, problem.state, tape)


def test_updates_reach_one_and_no_further() -> None:
    """``round(2^23 u)`` at the ends of u: a RevLSTM whose c gains exactly i g = +-1 a step."""
    bias = torch.tensor([0.0, 100.0, -200.0, 0.0, 100.0])[None, :, None].repeat(2, 1, 40)
    bias[1, 4] = -100.0
    for backend in compiled:
        problem = one_step(LSTM, torch.zeros(2, 3, 80, dtype=torch.int32), bias)
        c = run_forward(backend, problem).state[1]
        # What is filled in is below z* = 512.
        assert bool(((c[:, :40] - H_ONE).abs() < 512).all())
        assert bool(((c[:, 40:] + H_ONE).abs() < 512).all())

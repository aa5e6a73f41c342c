"""What every backend promises, whichever is chosen, and how one is chosen."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import (
    Pass,
    Problem,
    assert_all_equal,
    assert_equal,
    backends,
    cells,
    check_roundtrip,
    check_way_back,
    compiled,
    compiled_backends,
    make_problem,
    ragged,
    record_forward,
    run_forward,
    run_reverse,
    tape_of_row,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from revrnn import RevGRU, kernels
from revrnn.cells import LSTM, Cell
from revrnn.errors import NonFiniteError, ReversalError, StateOverflowError
from revrnn.fixed import STATE_LIMIT
from revrnn.kernels import Backend, Gradients, Record
from revrnn.tape import SealedTape

pytestmark = pytest.mark.usefixtures("poison")

RAGGED = ragged([9, 9, 7, 4, 4, 1, 1])
GROWING = RAGGED[::-1]  # as the direction from the last step to the first sees them

forget_bits = pytest.mark.parametrize("bits", [1, 2, 3, 5, None])


def tensors_of(after: Pass) -> dict[str, Tensor]:
    """All that a forward pass leaves, except for how its tape is cut into segments."""
    assert isinstance(after.sealed, SealedTape)
    batch = after.state.shape[1]
    rows = [tape_of_row(after.sealed, row) for row in range(batch)]
    tensors = {"state": after.state, "out": after.out}
    for row, (lanes, data) in enumerate(rows):
        tensors[f"lanes of row {row}"] = torch.tensor(lanes)
        tensors[f"tape of row {row}"] = torch.tensor(list(data))
    return tensors


def gradients(
    backend: Backend,
    problem: Problem,
    record: Record,
    *,
    chunk: int | None = None,
    out_units: int = 0,
) -> dict[str, Tensor]:
    """Of random gradients of the final state and of the first units of the output."""
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(len(problem.x), out_units, generator=generator) if out_units else None
    d_state = torch.randn(problem.state.shape, generator=generator)
    weights = problem.weights
    into = Gradients(
        torch.zeros_like(weights.ih),
        torch.zeros_like(weights.hh),
        None if weights.bias is None else torch.zeros_like(weights.bias),
    )
    record = Record(*(part.clone() for part in vars(record).values()))
    d_x = torch.full_like(problem.x, torch.nan)
    prepared = backend.prepare(problem.layer, weights, backward=True)
    for own, steps in reversed(list(problem.chunks(chunk))):
        part = Record(*(values[own] for values in vars(record).values()))
        backend.backprop(
            prepared,
            problem.x[own],
            steps,
            part,
            None if d_out is None else d_out[own],
            d_state,
            into,
            d_x[own],
        )
    named = {"x": d_x, "state": d_state, **vars(into)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


# -- the way back ---------------------------------------------------------------------------------


@backends
@cells
@forget_bits
@pytest.mark.parametrize("active", [RAGGED, GROWING], ids=["shrinking", "growing"])
def test_ragged_sequences_come_back(
    backend: Backend, cell: Cell, bits: float | None, active: list[int]
) -> None:
    # 22 units a group: a block of lanes, and a part of one.
    check_roundtrip(backend, make_problem(cell, active, hidden=44, forget_bits=bits), chunk=4)


@backends
@cells
@pytest.mark.parametrize("stored_units", [1, 16, 21, 22])
def test_stored_units_come_back(backend: Backend, cell: Cell, stored_units: int) -> None:
    problem = make_problem(cell, RAGGED, hidden=44, forget_bits=2, stored_units=stored_units)
    check_roundtrip(backend, problem, chunk=4)


@backends
@cells
@pytest.mark.parametrize(("hidden", "inputs"), [(2, 1), (30, 3), (32, 16), (34, 17), (130, 33)])
def test_sizes_around_those_of_vectors_come_back(
    backend: Backend, cell: Cell, hidden: int, inputs: int
) -> None:
    problem = make_problem(cell, [3] * 4, hidden=hidden, inputs=inputs, bias=False)
    check_roundtrip(backend, problem, chunk=3)


@compiled_backends
@cells
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(1, 40),
    inputs=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=7),
    bits=st.sampled_from([0.5, 1, 2, 3, 5, 10, None]),
    stored=st.integers(0, 40),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    chunk=st.integers(1, 8),
    seed=st.integers(0, 1 << 30),
)
def test_sequences_of_any_sizes_come_back(
    backend: Backend,
    cell: Cell,
    groups: int,
    inputs: int,
    lengths: list[int],
    bits: float | None,
    stored: int,
    scale: float,
    chunk: int,
    seed: int,
) -> None:
    problem = make_problem(
        cell,
        ragged(lengths),
        hidden=2 * groups,
        inputs=inputs,
        forget_bits=bits,
        stored_units=min(stored, groups),
        scale=scale,
        seed=seed,
    )
    check_roundtrip(backend, problem, chunk=chunk)


@cells
@forget_bits
def test_a_long_row_comes_back_on_the_reference(cell: Cell, bits: float | None) -> None:
    problem = make_problem(cell, [1] * 150, hidden=8, inputs=2, forget_bits=bits)
    check_way_back(kernels.get("reference"), problem, chunk=64)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=pytest.mark.slow if index else (), id=backend.name)
        for index, backend in enumerate(compiled)
    ],
)
@cells
@forget_bits
@pytest.mark.usefixtures("threads")
def test_a_million_steps_come_back(backend: Backend, cell: Cell, bits: float | None) -> None:
    """To the exact initial state, with an empty tape.

    A RevLSTM's state is not bounded by 1: where f and p stay below 1 - e for long it may grow to
    1 / e. With initial weights and F = 1, where the gates lie around 3/4, that is far from the 254
    that fixed point can hold; a state that got there would raise `StateOverflowError` here.
    """
    torch.set_num_threads(1)  # one row is one thread's work
    problem = make_problem(cell, [1] * 1_000_000, hidden=8, inputs=2, forget_bits=bits)
    check_way_back(backend, problem, chunk=512)


@compiled_backends
@cells
@forget_bits
def test_two_thousand_ragged_steps_come_back(
    backend: Backend, cell: Cell, bits: float | None
) -> None:
    active = ragged([2000, 1999, 1500, 1000, 640, 100, 1])
    check_way_back(backend, make_problem(cell, active, hidden=66, forget_bits=bits), chunk=73)


# -- what bits may depend on ----------------------------------------------------------------------


@backends
@cells
@pytest.mark.usefixtures("threads")
def test_no_bit_depends_on_the_number_of_threads(backend: Backend, cell: Cell) -> None:
    problem = make_problem(cell, RAGGED, hidden=66, inputs=37)
    torch.set_num_threads(1)
    one = run_forward(backend, problem, chunk=4)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert_all_equal(tensors_of(run_forward(backend, problem, chunk=4)), tensors_of(one))
        state, out, _ = run_reverse(backend, problem, one, chunk=4)
        assert_equal(state, problem.state)
        assert_equal(out, one.out)


@compiled_backends
@cells
@pytest.mark.usefixtures("threads")
def test_no_bit_of_a_gradient_depends_on_the_number_of_threads(
    backend: Backend, cell: Cell
) -> None:
    # 250 rows and inputs: several tasks of each kind, for any number of threads.
    problem = make_problem(cell, [50] * 5, hidden=202, inputs=250)
    record = record_forward(backend, problem)
    torch.set_num_threads(1)
    one = gradients(backend, problem, record, chunk=3, out_units=7)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert_all_equal(gradients(backend, problem, record, chunk=3, out_units=7), one)


@backends
@cells
def test_no_bit_depends_on_how_the_batch_is_split(backend: Backend, cell: Cell) -> None:
    problem = make_problem(cell, RAGGED, hidden=66, inputs=37)
    together = tensors_of(run_forward(backend, problem))
    for row in range(max(RAGGED)):
        alone = tensors_of(run_forward(backend, problem.of_row(row)))
        assert_equal(alone["state"][:, 0], together["state"][:, row])
        for part in ("lanes", "tape"):
            assert_equal(alone[f"{part} of row 0"], together[f"{part} of row {row}"])


@backends
@cells
def test_no_bit_depends_on_the_chunks(backend: Backend, cell: Cell) -> None:
    problem = make_problem(cell, ragged([40, 40, 25, 17, 3]), hidden=44)
    whole = run_forward(backend, problem)
    for chunk in (1, 7, 16, 40, 50):
        assert_all_equal(tensors_of(run_forward(backend, problem, chunk=chunk)), tensors_of(whole))
        # What one division into chunks wrote in one segment, any other reads back.
        state, out, _ = run_reverse(backend, problem, whole, chunk=chunk)
        assert_equal(state, problem.state)
        assert_equal(out, whole.out)


@backends
@cells
def test_rebuilt_and_stored_records_give_equal_gradients(backend: Backend, cell: Cell) -> None:
    problem = make_problem(cell, RAGGED, hidden=66, inputs=37)
    _, _, rebuilt = run_reverse(backend, problem, run_forward(backend, problem, chunk=4), chunk=4)
    stored = record_forward(backend, problem)
    assert_all_equal(vars(rebuilt), vars(stored))
    assert_all_equal(
        gradients(backend, problem, rebuilt, chunk=4), gradients(backend, problem, stored, chunk=4)
    )


# -- agreement of backends ------------------------------------------------------------------------


@pytest.mark.skipif(
    not {"cpu-avx2", "cpu-avx512"} <= set(kernels.available()), reason="needs AVX2 and AVX-512"
)
@cells
@pytest.mark.parametrize("stored_units", [0, 5])
def test_avx2_and_avx512_give_the_same_bits(cell: Cell, stored_units: int) -> None:
    """Their sums are the same chains of fused operations: states, tapes, records, gradients."""
    problem = make_problem(cell, RAGGED, hidden=130, inputs=37, stored_units=stored_units)
    avx2, avx512 = kernels.get("cpu-avx2"), kernels.get("cpu-avx512")
    after = run_forward(avx2, problem)
    assert_all_equal(tensors_of(after), tensors_of(run_forward(avx512, problem)))
    state, _, record = run_reverse(avx512, problem, after)
    assert_equal(state, problem.state)
    assert_all_equal(vars(record), vars(record_forward(avx2, problem)))
    assert_all_equal(
        gradients(avx2, problem, record, out_units=9),
        gradients(avx512, problem, record, out_units=9),
    )


@compiled_backends
@cells
@pytest.mark.parametrize("bits", [2, None])
def test_compiled_states_are_close_to_the_references(
    backend: Backend, cell: Cell, bits: float | None
) -> None:
    """Gates agree to the last few bits of a float. So do updates; but the lowest bit of a state
    may differ, then what its remainder leaves on the tape does, and then what is filled in: that
    is up to 2^-13 a step. Rarely, z* is rounded to the other side, which moves h by
    ``2^-10 |h - g| < 2^-9``; a few of each within 9 steps stay below 2^-6.
    """
    problem = make_problem(cell, RAGGED, hidden=44, inputs=9, forget_bits=bits)
    ours, theirs = run_forward(backend, problem), run_forward(kernels.get("reference"), problem)
    torch.testing.assert_close(ours.out, theirs.out, rtol=0, atol=2**-6)
    # Most gates agree, and so do most states, to all but the lowest bits.
    assert float((ours.out - theirs.out).abs().median()) < 2**-13
    torch.testing.assert_close(ours.ideal, theirs.ideal, rtol=1e-3, atol=0)


@compiled_backends
@cells
@pytest.mark.parametrize("bits", [2, None])
def test_compiled_gradients_are_close_to_the_references(
    backend: Backend, cell: Cell, bits: float | None
) -> None:
    """Of the same record, so that only the order of sums and the fusing of operations differ."""
    problem = make_problem(cell, RAGGED, hidden=44, inputs=9, forget_bits=bits)
    reference = kernels.get("reference")
    record = record_forward(reference, problem)
    for chunk in (None, 4):
        ours = gradients(backend, problem, record, chunk=chunk, out_units=13)
        theirs = gradients(reference, problem, record, chunk=chunk, out_units=13)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=2e-5)


# -- gradients that are not wanted ----------------------------------------------------------------


@backends
@cells
@pytest.mark.parametrize("missing", ["ih", "hh", "bias"])
def test_any_gradient_may_be_left_out(backend: Backend, cell: Cell, missing: str) -> None:
    problem = make_problem(cell, RAGGED, hidden=44, inputs=9)
    record = record_forward(backend, problem)
    expected = gradients(backend, problem, record)
    prepared = backend.prepare(problem.layer, problem.weights, backward=True)
    ((_, steps),) = problem.chunks()
    into = Gradients(
        *(
            None if name == missing else torch.zeros_like(tensor)
            for name, tensor in vars(problem.weights).items()
        )
    )
    d_state = torch.randn(problem.state.shape, generator=torch.Generator().manual_seed(1))
    backend.backprop(prepared, problem.x, steps, record, None, d_state, into, None)
    assert_equal(d_state, expected["state"])
    for name, tensor in vars(into).items():
        if name != missing:
            assert_equal(tensor, expected[name])


# -- errors ---------------------------------------------------------------------------------------


@backends
@cells
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_input_that_is_not_finite_is_named(backend: Backend, cell: Cell, value: float) -> None:
    problem = make_problem(cell, RAGGED)
    problem.x[sum(RAGGED[:5]) + 2, 0] = value
    with pytest.raises(NonFiniteError, match=r"layer under test: .* row 2 .* time step 5\."):
        run_forward(backend, problem, chunk=4)


@backends
@cells
def test_products_that_are_not_finite_are_named(backend: Backend, cell: Cell) -> None:
    problem = make_problem(cell, RAGGED)
    problem.x[sum(RAGGED[:3]) + 1] = 3e38
    problem.weights.ih.fill_(10.0)
    with pytest.raises(NonFiniteError, match=r"layer under test: .* row 1 .* time step 3\."):
        run_forward(backend, problem, chunk=4)


@backends
@cells
def test_a_state_that_leaves_its_range_is_named(backend: Backend, cell: Cell) -> None:
    problem = make_problem(cell, RAGGED)
    # Forget next to nothing, add as much as possible: a RevLSTM's c grows by almost 1 a step.
    assert problem.weights.bias is not None
    problem.weights.bias.fill_(30.0)
    # From 252 it gets to 252.75, 253.5 and 254.26, as 1/1024 is forgotten even so.
    # The h of a RevGRU is an average of itself and g: only a start beyond the range leaves it.
    start = STATE_LIMIT - (2 << 23) if cell is LSTM else (1 << 31) - 1
    problem.state[-1, 1, 3] = start
    step = 2 if cell is LSTM else 0
    with pytest.raises(StateOverflowError, match=rf"layer under test: .* row 1 .* step {step}\."):
        run_forward(backend, problem, chunk=4)


def change_weight(problem: Problem, after: Pass) -> Problem:
    hh = problem.weights.hh.clone()
    hh[5, 3] += 0.5
    return replace(problem, weights=replace(problem.weights, hh=hh))


def change_input(problem: Problem, after: Pass) -> Problem:
    x = problem.x.clone()
    x[0, 0] += 1
    return replace(problem, x=x)


def make_weight_nan(problem: Problem, after: Pass) -> Problem:
    hh = problem.weights.hh.clone()
    hh[5, 3] = torch.nan
    return replace(problem, weights=replace(problem.weights, hh=hh))


def change_state(problem: Problem, after: Pass) -> Problem:
    after.state[0, 1, 7] ^= 1 << 30
    return problem


@backends
@cells
@pytest.mark.parametrize("change", [change_weight, change_input, make_weight_nan, change_state])
def test_what_was_changed_does_not_come_back(
    backend: Backend, cell: Cell, change: Callable[[Problem, Pass], Problem]
) -> None:
    problem = make_problem(cell, [3] * 20, hidden=40)
    after = run_forward(backend, problem, chunk=4)
    assert comes_back(backend, problem, after)
    assert not comes_back(backend, change(problem, after), after)


def comes_back(backend: Backend, problem: Problem, after: Pass) -> bool:
    """False for either sign of failure: an error, or another state than the initial one."""
    try:
        state, _, _ = run_reverse(backend, problem, after, chunk=4)
    except ReversalError:
        return False
    return torch.equal(state, problem.state)


@compiled_backends
@pytest.mark.usefixtures("threads")
def test_the_first_row_that_is_wrong_is_named_whatever_the_threads(backend: Backend) -> None:
    """Of two rows the second has lost its tape, the first the lower part of it. With little left
    the first is wrong in c of the group that is taken back first, where the second is wrong in h;
    with more only in the other group, after the second."""
    problem = make_problem(LSTM, [2], hidden=200)
    after = run_forward(backend, problem)
    sealed = after.sealed
    assert isinstance(sealed, SealedTape)
    ((data, fill),) = sealed.segments
    whole = int(fill[0])
    named = []
    for left in range(whole):
        fills = torch.tensor([left, 0], dtype=torch.int32)
        cut = SealedTape(sealed.lanes, ((data[whole - left : whole].clone(), fills),))
        messages = set()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with pytest.raises(ReversalError) as caught:
                run_reverse(backend, problem, replace(after, sealed=cut))
            messages.add(str(caught.value))
        (message,) = messages
        found = re.search(r"states of batch row (\d) could not be brought back", message)
        assert found is not None
        named.append(found.group(1))
    assert "".join(named).strip("1").strip("0") == ""
    assert named[0] == "0"
    assert named[-1] == "1"


# -- the table ------------------------------------------------------------------------------------


def test_the_table() -> None:
    names = kernels.available()
    assert "reference" in names
    tiers = [name for name in names if name.startswith("cpu-")]
    assert ("cpu" in names) == bool(tiers)
    for name in names:
        assert kernels.get(name).name == (tiers[0] if name == "cpu" else name)
    with pytest.raises(ValueError, match=r"kernels must be one of reference.*, got 'cuda'"):
        kernels.get("cuda")


CPU = torch.device("cpu")


def default() -> str:
    return compiled[0].name if compiled else "reference"


@pytest.fixture
def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)


@pytest.mark.usefixtures("unforced")
@pytest.mark.skipif(not compiled, reason="needs the C++ kernels")
def test_cpu_tensors_get_the_best_tier() -> None:
    assert kernels.choose(CPU).name == default()
    assert kernels.choose(torch.device("meta")).name == "reference"


@pytest.mark.usefixtures("unforced")
def test_use_forces_a_backend() -> None:
    with kernels.use("reference"):
        assert kernels.choose(CPU).name == "reference"
        with kernels.use(None):
            assert kernels.choose(CPU).name == default()
        assert kernels.choose(CPU).name == "reference"
    assert kernels.choose(CPU).name == default()

    kernels.use("reference")
    try:
        assert kernels.choose(CPU).name == "reference"
    finally:
        kernels.use(None)
    assert kernels.choose(CPU).name == default()


@pytest.mark.usefixtures("unforced")
def test_use_of_an_unknown_name_changes_nothing() -> None:
    with kernels.use("reference"):
        with pytest.raises(ValueError, match="kernels must be one of"):
            kernels.use("fast")
        assert kernels.choose(CPU).name == "reference"


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kernels.available():
        monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, name)
        assert kernels.choose(CPU).name == kernels.get(name).name
        with kernels.use("reference"):
            assert kernels.choose(CPU).name == "reference"
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "fast")
    with pytest.raises(ValueError, match=r"kernels must be one of .*, got 'fast'"):
        kernels.choose(CPU)


@pytest.mark.skipif(not compiled, reason="needs the C++ kernels")
def test_a_forced_backend_refuses_devices_it_does_not_serve() -> None:
    with (
        kernels.use("cpu"),
        pytest.raises(ValueError, match="work on CPU tensors, got tensors on meta"),
    ):
        kernels.choose(torch.device("meta"))


@backends
def test_backward_uses_the_backend_of_forward(backend: Backend) -> None:
    torch.manual_seed(0)
    rnn, x = RevGRU(3, 12), torch.randn(9, 2, 3, requires_grad=True)
    with kernels.use(backend.name):
        rnn(x)[0].sum().backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    with kernels.use(backend.name):
        out, _ = rnn(x)
    with kernels.use("reference"):
        out.sum().backward()
    assert x.grad is not None
    assert_equal(x.grad, expected)

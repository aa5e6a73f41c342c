"""Layers that never forget: ``forget="none"``."""

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import (
    Problem,
    assert_all_equal,
    assert_equal,
    backends,
    check_roundtrip,
    check_way_back,
    compiled,
    compiled_backends,
    gradients,
    make_problem,
    ragged,
    record_forward,
    run_forward,
    run_reverse,
)
from torch import Tensor

from revrnn import RevGRU, RevGRUCell, RevLSTM, RevLSTMCell, kernels, stream
from revrnn.cells import GRU, LSTM, Cell, without_forgetting
from revrnn.errors import ReversalError, StateOverflowError
from revrnn.fixed import STATE_LIMIT
from revrnn.kernels import Backend

RAGGED = ragged([9, 9, 7, 4, 4, 1, 1])
T, N, X, H = 11, 3, 5, 12

retaining = pytest.mark.parametrize(
    "cell", [without_forgetting(GRU), without_forgetting(LSTM)], ids=["RevGRU", "RevLSTM"]
)
kinds = pytest.mark.parametrize("kind", [RevGRU, RevLSTM])


def build(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(3)
    return kind(X, H, forget="none", **settings)


# -- the cells ------------------------------------------------------------------------------------


def test_f_and_p_are_not_there() -> None:
    assert without_forgetting(GRU).gate_names == ("z", "r", "g")
    assert without_forgetting(LSTM).gate_names == ("i", "o", "g")
    assert pickle.loads(pickle.dumps(without_forgetting(LSTM))) == without_forgetting(LSTM)
    assert RevLSTM(X, H, forget="none").weight_hh_l0.shape == (3 * H, H // 2)


@backends
@retaining
@pytest.mark.parametrize("active", [RAGGED, RAGGED[::-1]], ids=["shrinking", "growing"])
@pytest.mark.usefixtures("poison")
def test_sequences_come_back(backend: Backend, cell: Cell, active: list[int]) -> None:
    check_roundtrip(backend, make_problem(cell, active, hidden=66, inputs=7), chunk=4)


@backends
@retaining
@pytest.mark.parametrize("stored_units", [1, 22, 33])
@pytest.mark.usefixtures("poison")
def test_stored_units_do_no_harm(backend: Backend, cell: Cell, stored_units: int) -> None:
    problem = make_problem(cell, RAGGED, hidden=66, stored_units=stored_units)
    after = check_roundtrip(backend, problem, chunk=4)
    assert after.stored is not None
    after.stored[2, 0] += 1
    with pytest.raises(ReversalError):
        run_reverse(backend, problem, after, chunk=4)


@compiled_backends
@retaining
@pytest.mark.parametrize("hidden", [2, 10, 32, 34, 130])
@pytest.mark.usefixtures("poison")
def test_sizes_around_those_of_vectors(backend: Backend, cell: Cell, hidden: int) -> None:
    check_roundtrip(backend, make_problem(cell, RAGGED, hidden=hidden, inputs=3), chunk=4)


def balanced(cell: Cell, steps: int) -> Problem:
    """One row whose state stays in its range for a million steps: input of mean 0 makes it a random
    walk, of steps that small weights keep small, and what it feeds back is smaller still. The h of
    a RevLSTM adds up tanh(c), of which an almost closed o lets little pass."""
    problem = make_problem(cell, [1] * steps, hidden=8, inputs=2, scale=0.02)
    weights = problem.weights
    assert weights.bias is not None
    weights.hh.mul_(1e-4)
    weights.bias.zero_()
    if cell.states == 2:
        weights.bias.view(2, 3, -1)[:, cell.gate_names.index("o")] = -12.0
    problem.state.zero_()
    return problem


@pytest.mark.parametrize("backend", compiled or [kernels.get("reference")], ids=lambda b: b.name)
@retaining
def test_a_long_row_comes_back(backend: Backend, cell: Cell) -> None:
    check_way_back(backend, balanced(cell, 20_000 if compiled else 500), chunk=512)


@pytest.mark.slow
@compiled_backends
@retaining
@pytest.mark.usefixtures("threads")
def test_a_million_steps_come_back(backend: Backend, cell: Cell) -> None:
    torch.set_num_threads(1)
    check_way_back(backend, balanced(cell, 1_000_000), chunk=512)


@compiled_backends
@retaining
def test_compiled_states_are_close_to_the_references(backend: Backend, cell: Cell) -> None:
    """There are no quantised gates and nothing is filled in: updates agree to the last bits of a
    float, and each step may add the difference of the last."""
    problem = make_problem(cell, RAGGED, hidden=44, inputs=9)
    ours, theirs = run_forward(backend, problem), run_forward(kernels.get("reference"), problem)
    torch.testing.assert_close(ours.out, theirs.out, rtol=0, atol=2**-18)


@pytest.mark.skipif(
    not {"cpu-avx2", "cpu-avx512"} <= set(kernels.available()), reason="needs AVX2 and AVX-512"
)
@retaining
def test_avx2_and_avx512_give_the_same_bits(cell: Cell) -> None:
    problem = make_problem(cell, RAGGED, hidden=130, inputs=37)
    avx2, avx512 = kernels.get("cpu-avx2"), kernels.get("cpu-avx512")
    assert_all_equal(vars(record_forward(avx2, problem)), vars(record_forward(avx512, problem)))


# -- overflow -------------------------------------------------------------------------------------


@backends
@retaining
def test_a_state_that_leaves_its_range_is_named(backend: Backend, cell: Cell) -> None:
    problem = make_problem(cell, RAGGED)
    assert problem.weights.bias is not None
    problem.weights.bias.fill_(30.0)
    if cell.states == 1:
        problem.weights.bias.view(2, 3, -1)[:, 0] = -30.0  # 1 - z = 1
    # h (or c) gains 1 a step, from 252.5: 253.5 is inside, 254.5 is not.
    problem.state[-1, 1, 3] = STATE_LIMIT - 3 * (1 << 22)
    with pytest.raises(StateOverflowError, match=r"row 1 .* step 1\. With forget='none'"):
        run_forward(backend, problem, chunk=4)


@backends
@kinds
def test_a_growing_state_ends_in_an_error(backend: Backend, kind: Any) -> None:
    rnn = build(kind)
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            parameter.fill_(3.0 if "bias" in name else 0.0)
        if kind is RevGRU:
            rnn.bias_l0.view(2, 3, -1)[:, 0] = -3.0
    with kernels.use(backend.name), pytest.raises(StateOverflowError, match=r"layer 0: .*'none'"):
        rnn(torch.zeros(400, 1, X))


# -- modules --------------------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bidirectional": True}])
@pytest.mark.parametrize("keep", [None, 4])
def test_gradients_are_those_of_stored_states(
    backend: Backend, kind: Any, settings: dict[str, Any], keep: int | None
) -> None:
    x = torch.randn(T, N, X, generator=torch.Generator().manual_seed(1))
    with kernels.use(backend.name):
        ours = gradients(build(kind, chunk_size=4, **settings), x, keep=keep)
        stored = gradients(build(kind, chunk_size=4, reversible=False, **settings), x, keep=keep)
    assert_all_equal(ours, stored)


@backends
@kinds
def test_nothing_at_all_is_held(backend: Backend, kind: Any) -> None:
    rnn = build(kind, num_layers=2)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with kernels.use(backend.name), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, _ = rnn(torch.randn(50, N, X), keep=H // 2)
        report = rnn.tape_report()
        assert report.held_bits == report.ideal_bits == 0
        assert report.savings == float("inf")
        assert report.unit_steps == 2 * 50 * N * H * rnn._cell.states
        assert "-" in str(report).splitlines()[-1]
        # Input, weights and final states: nothing else.
        known = [(50 * N, X), *(p.shape for p in rnn.parameters()), (rnn._cell.states, N, H)]
        assert all(t.numel() == 0 or tuple(t.shape) in known for t in saved)
        out.sum().backward()


@kinds
def test_a_changed_state_is_noticed(kind: Any) -> None:
    rnn, x = build(kind), torch.randn(T, N, X)
    rnn(x)[0].sum().backward()

    def unpack(tensor: Tensor) -> Tensor:
        if tensor.shape == (rnn._cell.states, N, H) and tensor.is_floating_point():
            tensor = tensor.clone()
            tensor[0, 0, 0] += 0.25
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out, _ = rnn(x)
        with pytest.raises(ReversalError, match="did not arrive at the initial state"):
            out.sum().backward()


@backends
@kinds
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("every", [None, 3, "auto"])
def test_it_streams(backend: Backend, kind: Any, chunk_size: int, every: Any) -> None:
    x = torch.randn(T, N, X, generator=torch.Generator().manual_seed(1))
    found = []
    with kernels.use(backend.name):
        for settings in ({}, {"reversible": False}):
            rnn = build(kind, num_layers=2, **settings)
            loss, _ = stream(
                rnn,
                x,
                head=lambda out: out.square().sum(),
                chunk_size=chunk_size,
                checkpoint_every=every,
            )
            loss.backward()
            found.append({name: part.grad for name, part in rnn.named_parameters()})
            found[-1]["loss"] = loss.detach()
            if every is None and not settings:
                assert rnn.tape_report().held_bits == 0
    assert_all_equal(*found)


@kinds
def test_copies_and_repr(kind: Any) -> None:
    rnn, x = build(kind, num_layers=2), torch.randn(T, N, X)
    assert repr(rnn) == f"{kind.__name__}(5, 12, num_layers=2, forget='none')"
    for copied in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert_equal(copied(x)[0], rnn(x)[0])
    other = kind(X, H, num_layers=2, forget="none")
    other.load_state_dict(rnn.state_dict())
    assert_equal(other(x)[0], rnn(x)[0])


@pytest.mark.parametrize(("kind", "single"), [(RevGRU, RevGRUCell), (RevLSTM, RevLSTMCell)])
def test_single_steps_are_those_of_the_layer(kind: Any, single: Any) -> None:
    """Nothing is filled in; what a state of 2 or more loses as a float between two steps is below
    2^-20, and adds up."""
    rnn = build(kind)
    cell = single(X, H, forget="none")
    assert repr(cell) == f"{single.__name__}(5, 12, forget='none')"
    cell.load_state_dict({name[:-3]: value for name, value in rnn.state_dict().items()})
    x = torch.randn(T, N, X)
    state = None
    for step in x:
        state = cell(step, state)
    _, final = rnn(x)
    pairs = zip(state, final, strict=True) if isinstance(final, tuple) else [(state, final)]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected[0], rtol=0, atol=2**-16)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RevGRU, RevLSTM, RevGRUCell, RevLSTMCell])
def test_arguments_that_make_no_sense_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"forget must be one of 'fractional', .*got 'all'"):
        kind(X, H, forget="all")
    with pytest.raises(ValueError, match="max_forget_bits must be None with forget='none'"):
        kind(X, H, forget="none", max_forget_bits=3)


@kinds
def test_the_papers_buffer_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="tape must be 'entropy' with forget='none'"):
        kind(X, H, forget="none", tape="paper")

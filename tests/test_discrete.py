"""Layers that forget whole bits, chosen at random: ``forget="discrete"``."""

import copy
import pickle
from dataclasses import replace
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
    tape_of_row,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from revrnn import RevGRU, RevGRUCell, RevLSTM, RevLSTMCell, kernels, stream
from revrnn.cells import GRU, LSTM, Cell, with_discrete_forgetting
from revrnn.errors import ReversalError
from revrnn.fixed import to_float
from revrnn.kernels import Backend
from revrnn.noise import Noise
from revrnn.tape import SealedTape

RAGGED = ragged([9, 9, 7, 4, 4, 1, 1])
T, N, X, H = 11, 3, 5, 12
SEED = 12345678901234567

kinds = pytest.mark.parametrize("kind", [RevGRU, RevLSTM])
cells = pytest.mark.parametrize("base", [GRU, LSTM], ids=lambda cell: cell.name)


def problem_of(
    base: Cell, active: list[int] = RAGGED, *, bits: int = 3, seed: int | None = SEED, **more: Any
) -> Problem:
    estimator, temperature = more.pop("estimator", "gumbel"), more.pop("temperature", 1.0)
    cell = with_discrete_forgetting(base, bits, estimator, temperature)
    problem = make_problem(cell, active, scale=2.0, **more)
    return replace(problem, layer=replace(problem.layer, seed=seed))


def build(kind: Any, bits: int = 2, **settings: Any) -> Any:
    torch.manual_seed(3)
    return kind(X, H, forget="discrete", max_forget_bits=bits, **settings)


def given() -> Tensor:
    return torch.randn(T, N, X, generator=torch.Generator().manual_seed(1))


# -- the cells ------------------------------------------------------------------------------------


def test_a_forget_gate_has_a_column_a_choice() -> None:
    assert with_discrete_forgetting(GRU, 2).gate_names == ("z0", "z1", "z2", "r", "g")
    lstm = with_discrete_forgetting(LSTM, 1)
    assert lstm.gate_names == ("f0", "f1", "i", "o", "p0", "p1", "g")
    assert pickle.loads(pickle.dumps(lstm)) == lstm
    assert build(RevGRU, 3).weight_hh_l0.shape == (6 * H, H // 2)
    assert build(RevLSTM, 3).weight_ih_l0.shape == (11 * H, X)


@backends
@cells
@pytest.mark.parametrize("active", [RAGGED, RAGGED[::-1]], ids=["shrinking", "growing"])
@pytest.mark.parametrize(
    ("bits", "more"),
    [
        (1, {}),
        (2, {"seed": None}),
        (3, {"temperature": 0.5}),
        (3, {"estimator": "categorical"}),
        (10, {}),
    ],
)
@pytest.mark.usefixtures("poison")
def test_sequences_come_back(
    backend: Backend, base: Cell, active: list[int], bits: int, more: dict[str, Any]
) -> None:
    problem = problem_of(base, active, bits=bits, hidden=66, inputs=7, **more)
    check_roundtrip(backend, problem, chunk=4)


@backends
@cells
@pytest.mark.parametrize("stored_units", [1, 22, 33])
@pytest.mark.usefixtures("poison")
def test_stored_units_skip_the_tape(backend: Backend, base: Cell, stored_units: int) -> None:
    problem = problem_of(base, hidden=66, stored_units=stored_units)
    after = check_roundtrip(backend, problem, chunk=4)
    assert after.stored is not None
    after.stored[2, 0] += 1 << 20
    with pytest.raises(ReversalError):
        run_reverse(backend, problem, after, chunk=4)


@compiled_backends
@cells
@pytest.mark.parametrize("hidden", [2, 10, 32, 34, 130])
@pytest.mark.usefixtures("poison")
def test_sizes_around_those_of_vectors(backend: Backend, base: Cell, hidden: int) -> None:
    check_roundtrip(backend, problem_of(base, hidden=hidden, inputs=3), chunk=4)


@pytest.mark.parametrize("backend", compiled or [kernels.get("reference")], ids=lambda b: b.name)
@cells
def test_a_long_row_comes_back(backend: Backend, base: Cell) -> None:
    steps = 20_000 if compiled else 300
    check_way_back(backend, problem_of(base, [1] * steps, hidden=8, inputs=2), chunk=512)


@pytest.mark.slow
@compiled_backends
@cells
@pytest.mark.usefixtures("threads")
def test_a_million_steps_come_back(backend: Backend, base: Cell) -> None:
    torch.set_num_threads(1)
    check_way_back(backend, problem_of(base, [1] * 1_000_000, hidden=8, inputs=2), chunk=512)


@backends
@cells
def test_the_tape_takes_the_bits_shifted_out(backend: Backend, base: Cell) -> None:
    """And lanes: 32 bytes a row, which 240 steps of 130 units make little of."""
    problem = problem_of(base, [2] * (240 if compiled else 60), hidden=130)
    after = run_forward(backend, problem)
    assert isinstance(after.sealed, SealedTape)
    record = record_forward(backend, problem)
    choices = problem.layer.cell.choices
    chosen = record.extra.unflatten(1, (2, 1 + choices, -1))[:, :, 1:]  # (R, groups, choices, D)
    shifted = int(-chosen.log2().sum())
    assert shifted == pytest.approx(float(after.ideal.sum()), rel=1e-6)
    held = after.sealed.tape_bits + after.sealed.lane_bits
    assert shifted <= held <= (1.03 if compiled else 1.1) * shifted
    # In reverse the tape gives back what it took: it is empty, or the round trip has failed.
    run_reverse(backend, problem, after)


@cells
@pytest.mark.parametrize("more", [{}, {"temperature": 0.6}, {"estimator": "categorical"}])
def test_kernels_choose_alike(base: Cell, more: dict[str, Any]) -> None:
    """The same noise bit for bit, and logarithms that differ in the last one: with these numbers no
    choice does. States then differ only by what updates round."""
    problem = problem_of(base, hidden=44, inputs=9, **more)
    theirs = record_forward(kernels.get("reference"), problem)
    size = problem.layer.group_size
    for backend in compiled:
        ours = record_forward(backend, problem)
        for group in (0, size * (1 + problem.layer.cell.choices)):
            own = slice(group + size, group + size * (1 + problem.layer.cell.choices))
            assert_equal(ours.extra[:, own].contiguous(), theirs.extra[:, own].contiguous())
        torch.testing.assert_close(ours.old, theirs.old, rtol=0, atol=2**-18)
        torch.testing.assert_close(ours.gates, theirs.gates, rtol=0, atol=2**-16)


@pytest.mark.skipif(
    not {"cpu-avx2", "cpu-avx512"} <= set(kernels.available()), reason="needs AVX2 and AVX-512"
)
@cells
def test_avx2_and_avx512_give_the_same_bits(base: Cell) -> None:
    problem = problem_of(base, hidden=130, inputs=37, temperature=0.5)
    avx2, avx512 = kernels.get("cpu-avx2"), kernels.get("cpu-avx512")
    assert_all_equal(vars(record_forward(avx2, problem)), vars(record_forward(avx512, problem)))


@compiled_backends
@cells
@pytest.mark.usefixtures("threads")
def test_bits_depend_on_neither_threads_nor_chunks(backend: Backend, base: Cell) -> None:
    problem = problem_of(base, hidden=66, inputs=7)
    expected = run_forward(backend, problem)
    assert isinstance(expected.sealed, SealedTape)
    for threads, chunk in ((1, None), (2, 1), (3, 4)):
        torch.set_num_threads(threads)
        after = run_forward(backend, problem, chunk=chunk)
        assert_equal(after.state, expected.state)
        assert isinstance(after.sealed, SealedTape)
        for row in range(RAGGED[0]):
            assert tape_of_row(after.sealed, row) == tape_of_row(expected.sealed, row)


def straight_through(rnn: RevGRU | RevLSTM, x: Tensor, seed: int) -> tuple[Tensor, ...]:
    """The real-valued equations in float64 as autograd differentiates them: h (and c) at the end.
    z is what was chosen, with the gradient of the softmax that it stands for."""
    f64 = {name: p.detach().double().requires_grad_() for name, p in rnn.named_parameters()}
    ih, hh, bias = (f64[f"{name}_l0"].chunk(2) for name in ("weight_ih", "weight_hh", "bias"))
    bits = int(rnn.max_forget_bits or 0)
    lstm, half = isinstance(rnn, RevLSTM), H // 2
    h = [torch.zeros(x.shape[1], half, dtype=torch.float64) for _ in range(2)]
    c = [part.clone() for part in h]

    def z(pre: Tensor, time: int, group: int, purpose: int) -> Tensor:
        s = pre.unflatten(1, (bits + 1, -1)).relu()
        noise = Noise(seed, time, group, x.shape[1], x.device)
        u = noise.uniform(purpose, pre.shape[1], torch.float64).view_as(s)
        noisy = s - (-u.log()).log()
        values = 2.0 ** -torch.arange(bits + 1, dtype=torch.float64)[:, None]
        soft = (torch.softmax(noisy / rnn.temperature, 1) * values).sum(1)
        hard = values.flatten()[noisy.argmax(1)]
        return hard + soft - soft.detach()

    for time, step in enumerate(x.double()):
        for group in (0, 1):
            other, own = h[1 - group], hh[group]
            sums = step @ ih[group].t() + bias[group]
            if lstm:
                sums = sums + other @ own.t()
                f, i, o, p, g = sums.split(
                    [(bits + 1) * half, half, half, (bits + 1) * half, half], 1
                )
                kept = z(f, time, group, 0) * c[group]
                c[group] = kept + i.sigmoid() * g.tanh()
                h[group] = z(p, time, group, 1) * h[group] + o.sigmoid() * c[group].tanh()
            else:
                main = (bits + 2) * half
                forget, r = (sums[:, :main] + other @ own[:main].t()).split(
                    [(bits + 1) * half, half], 1
                )
                reset = r.sigmoid() * other
                g = (sums[:, main:] + reset @ own[main:].t()).tanh()
                amount = z(forget, time, group, 0)
                h[group] = amount * h[group] + (1 - amount) * g
    finals = [torch.cat(h, 1)] + ([torch.cat(c, 1)] if lstm else [])
    sum(final.square().sum() for final in finals).backward()
    return (*(final.detach() for final in finals), *(p.grad for p in f64.values()))


@kinds
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradients_are_those_of_the_straight_through_estimator(
    kind: Any, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnn = build(kind, 2, temperature=temperature)
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.mul_(3)
    x, used = given(), []
    noise = rnn._layer_of

    def layer_of(*arguments: Any) -> Any:
        layer = noise(*arguments)
        used.append(layer.seed)
        return layer

    monkeypatch.setattr(rnn, "_layer_of", layer_of)
    _, final = rnn(x)
    finals = [part[0] for part in (final if isinstance(final, tuple) else (final,))]
    sum(part.square().sum() for part in finals).backward()
    ours = [*(part.detach() for part in finals), *(p.grad for p in rnn.parameters())]
    (seed,) = used
    for found, expected in zip(ours, straight_through(rnn, x, seed), strict=True):
        # Shifting loses less than 2^-23 a step, which 11 steps through these weights keep small.
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


# -- modules --------------------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2, "weight_dropout": 0.3}, {"bidirectional": True}]
)
@pytest.mark.parametrize("keep", [None, 4])
def test_gradients_are_those_of_stored_states(
    backend: Backend, kind: Any, settings: dict[str, Any], keep: int | None
) -> None:
    with kernels.use(backend.name):
        ours = gradients(build(kind, chunk_size=4, **settings), given(), keep=keep)
        stored = gradients(
            build(kind, chunk_size=4, reversible=False, **settings), given(), keep=keep
        )
    assert_all_equal(ours, stored)


@backends
@kinds
def test_packed_sequences(backend: Backend, kind: Any) -> None:
    lengths = (4, 11, 7)
    rows = [part[:steps] for part, steps in zip(given().unbind(1), lengths, strict=True)]
    packed = pack_sequence(rows, enforce_sorted=False)
    with kernels.use(backend.name):
        ours = gradients(build(kind, bidirectional=True), packed)
        stored = gradients(build(kind, bidirectional=True, reversible=False), packed)
    assert_all_equal(ours, stored)


@backends
@kinds
@pytest.mark.parametrize("how", ["eager", "lazy"])
@pytest.mark.parametrize("every", [None, 3, "auto"])
def test_it_streams(backend: Backend, kind: Any, how: Any, every: Any) -> None:
    found = []
    with kernels.use(backend.name):
        for settings in ({}, {"reversible": False}):
            rnn = build(kind, num_layers=2, **settings)
            torch.manual_seed(5)
            loss, _ = stream(
                nn.ModuleList([rnn]),
                given(),
                head=lambda out: out.square().sum(),
                chunk_size=4,
                checkpoint_every=every,
                gradients=how,
            )
            loss.backward()
            found.append({name: part.grad for name, part in rnn.named_parameters()})
            found[-1]["loss"] = loss.detach()
    assert_all_equal(*found)
    # And what is streamed is what the layer itself computes from the same seed.
    with kernels.use(backend.name):
        rnn = build(kind, num_layers=2)
        torch.manual_seed(5)
        out, _ = rnn(given())
    torch.testing.assert_close(out.square().sum(), found[0]["loss"])


@kinds
def test_a_seed_decides_the_run(kind: Any) -> None:
    first = gradients(build(kind), given(), seed=5)
    assert_all_equal(gradients(build(kind), given(), seed=5), first)
    assert not torch.equal(gradients(build(kind), given(), seed=6)["out"], first["out"])
    # Two calls in a row draw different numbers, as dropout does.
    rnn = build(kind)
    assert not torch.equal(rnn(given())[0], rnn(given())[0])


@kinds
def test_eval_takes_the_likeliest_or_draws(kind: Any) -> None:
    rnn = build(kind).eval()
    state = torch.get_rng_state()
    assert_equal(rnn(given())[0], rnn(given())[0])
    assert_equal(torch.get_rng_state(), state)
    assert not torch.equal(rnn(given())[0], rnn.train()(given())[0])
    assert not torch.equal(rnn(given())[0], rnn.eval()(given())[0])
    drawing = build(kind, sample_in_eval=True).eval()
    assert not torch.equal(drawing(given())[0], drawing(given())[0])
    ours = gradients(build(kind).eval(), given())
    assert_all_equal(ours, gradients(build(kind, reversible=False).eval(), given()))


@backends
@kinds
def test_noise_is_not_stored(backend: Backend, kind: Any) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    steps = 100
    rnn = build(kind, num_layers=2)
    with kernels.use(backend.name), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        rnn(torch.randn(steps, N, X), keep=0)
        report = rnn.tape_report()
    large = [tensor for tensor in saved if tensor.numel() >= steps]
    known = [(steps * N, X), *(tuple(p.shape) for p in rnn.parameters())]
    rest = [tensor for tensor in large if tuple(tensor.shape) not in known]
    assert all(tensor.dtype == torch.uint8 for tensor in rest)
    held = sum(8 * tensor.numel() for tensor in rest)
    assert held <= report.total.tape_bits + report.total.lane_bits
    assert report.ideal_bits == int(report.ideal_bits)  # whole bits


@kinds
def test_a_corrupted_tape_is_noticed(kind: Any) -> None:
    def unpack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8 and tensor.numel() > 300:
            tensor = tensor.clone()
            tensor[tensor.numel() // 2] ^= 1
        return tensor

    rnn = kind(X, 64, forget="discrete", max_forget_bits=2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out, _ = rnn(torch.randn(60, 1, X))
        with pytest.raises(ReversalError):
            out.sum().backward()


@kinds
def test_copies_and_repr(kind: Any) -> None:
    rnn = build(kind, num_layers=2, estimator="categorical", sample_in_eval=True)
    assert repr(rnn) == (
        f"{kind.__name__}(5, 12, num_layers=2, max_forget_bits=2, forget='discrete', "
        "estimator='categorical', sample_in_eval=True)"
    )
    expected = gradients(rnn, given())
    for copied in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert_all_equal(gradients(copied, given()), expected)
    other = kind(X, H, 2, forget="discrete", max_forget_bits=2, estimator="categorical")
    other.load_state_dict(rnn.state_dict())
    assert_all_equal(gradients(other, given()), expected)


@pytest.mark.parametrize(("kind", "single"), [(RevGRU, RevGRUCell), (RevLSTM, RevLSTMCell)])
def test_single_steps_are_those_of_the_layer(kind: Any, single: Any) -> None:
    """In eval, where nothing is drawn."""
    rnn = build(kind, temperature=0.5).eval()
    cell = single(X, H, forget="discrete", max_forget_bits=2, temperature=0.5).eval()
    assert repr(cell) == (
        f"{single.__name__}(5, 12, max_forget_bits=2, forget='discrete', temperature=0.5)"
    )
    cell.load_state_dict({name[:-3]: value for name, value in rnn.state_dict().items()})
    state = None
    for step in given():
        state = cell(step, state)
    _, final = rnn(given())
    pairs = zip(state, final, strict=True) if isinstance(final, tuple) else [(state, final)]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected[0], rtol=0, atol=2**-16)


@pytest.mark.parametrize("single", [RevGRUCell, RevLSTMCell])
def test_single_steps_draw_in_training(single: Any) -> None:
    cell = single(X, H, forget="discrete", max_forget_bits=3)
    state = torch.full((N, H), 1.5)
    states = state if single is RevGRUCell else (state, state)
    first, second = (cell(given()[0], states) for _ in range(2))
    if isinstance(first, tuple):
        first, second = torch.cat(first), torch.cat(second)
    assert not torch.equal(first, second)


def test_states_stay_on_the_grid() -> None:
    out, _ = build(RevGRU)(given())
    fixed = (out.double() * (1 << 23)).round().to(torch.int32)
    assert_equal(to_float(fixed), out.detach())


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RevGRU, RevLSTM, RevGRUCell, RevLSTMCell])
def test_arguments_that_make_no_sense_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="max_forget_bits must be given with forget='discrete'"):
        kind(X, H, forget="discrete")
    with pytest.raises(ValueError, match="temperature must be between"):
        kind(X, H, forget="discrete", max_forget_bits=2, temperature=0.0)
    with pytest.raises(TypeError, match="sample_in_eval must be True or False"):
        kind(X, H, forget="discrete", max_forget_bits=2, sample_in_eval=1)


@kinds
def test_the_papers_buffer_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="tape must be 'entropy' with forget='discrete'"):
        kind(X, H, forget="discrete", max_forget_bits=2, tape="paper")

"""Masks that are drawn anew every step, and again in backward: ``hidden_dropout``, ``zoneout``."""

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
from revrnn.cells import (
    FORGET,
    GRU,
    KEEP,
    LSTM,
    SEEN,
    Cell,
    with_discrete_forgetting,
    with_zoneout,
    without_forgetting,
)
from revrnn.errors import ReversalError
from revrnn.kernels import Backend
from revrnn.kernels.contract import Record
from revrnn.noise import Noise
from revrnn.tape import SealedTape

RAGGED = ragged([9, 9, 7, 4, 4, 1, 1])
T, N, X, H = 11, 3, 5, 12
SEED = 12345678901234567

kinds = pytest.mark.parametrize("kind", [RevGRU, RevLSTM])
cells = pytest.mark.parametrize("base", [GRU, LSTM], ids=lambda cell: cell.name)
masks = pytest.mark.parametrize(
    "masks", [{"zoneout": 0.3}, {"dropout": 0.4}, {"zoneout": 0.3, "dropout": 0.4}], ids=str
)


def problem_of(
    cell: Cell,
    active: list[int] = RAGGED,
    *,
    zoneout: float = 0.0,
    dropout: float = 0.0,
    seed: int | None = SEED,
    **more: Any,
) -> Problem:
    cell = with_zoneout(cell, zoneout) if zoneout else cell
    problem = make_problem(cell, active, scale=2.0, **more)
    return replace(problem, layer=replace(problem.layer, seed=seed, hidden_dropout=dropout))


def build(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(3)
    return kind(X, H, **settings)


def given(rows: int = N) -> Tensor:
    return torch.randn(T, rows, X, generator=torch.Generator().manual_seed(1))


# -- kernels --------------------------------------------------------------------------------------


@backends
@cells
@masks
@pytest.mark.parametrize("change", [None, without_forgetting], ids=["fractional", "none"])
@pytest.mark.parametrize("active", [RAGGED, RAGGED[::-1]], ids=["shrinking", "growing"])
@pytest.mark.usefixtures("poison")
def test_sequences_come_back(
    backend: Backend, base: Cell, masks: dict[str, float], change: Any, active: list[int]
) -> None:
    cell = change(base) if change else base
    check_roundtrip(backend, problem_of(cell, active, hidden=66, inputs=7, **masks), chunk=4)


@backends
@cells
@pytest.mark.usefixtures("poison")
def test_dropout_with_discrete_forgetting(backend: Backend, base: Cell) -> None:
    cell = with_discrete_forgetting(base, 2)
    check_roundtrip(backend, problem_of(cell, hidden=66, inputs=7, dropout=0.4), chunk=4)


@backends
@cells
@pytest.mark.usefixtures("poison")
def test_without_a_seed_every_unit_takes_the_mean_step(backend: Backend, base: Cell) -> None:
    problem = problem_of(base, hidden=66, inputs=7, zoneout=0.3, seed=None)
    check_roundtrip(backend, problem, chunk=4)
    record = record_forward(backend, problem)
    chosen = record.extra.unflatten(1, (2, 1 + base.states, -1))[:, :, 1:]
    assert_equal(chosen.unique(), torch.tensor([1 - 0.3]))


@cells
@masks
@pytest.mark.usefixtures("poison")
def test_the_papers_buffer(base: Cell, masks: dict[str, float]) -> None:
    problem = problem_of(base, hidden=12, inputs=7, forget_bits=3, **masks)
    check_roundtrip(kernels.get("reference"), problem, chunk=4, kind="paper")


@backends
@cells
@masks
@pytest.mark.parametrize("stored_units", [1, 22, 33])
@pytest.mark.usefixtures("poison")
def test_stored_units_skip_the_tape(
    backend: Backend, base: Cell, masks: dict[str, float], stored_units: int
) -> None:
    problem = problem_of(base, hidden=66, stored_units=stored_units, **masks)
    after = check_roundtrip(backend, problem, chunk=4)
    assert after.stored is not None
    after.stored[2, 0] += 1 << 20
    with pytest.raises(ReversalError):
        run_reverse(backend, problem, after, chunk=4)


@compiled_backends
@cells
@masks
@pytest.mark.parametrize("hidden", [2, 10, 32, 34, 130])
@pytest.mark.usefixtures("poison")
def test_sizes_around_those_of_vectors(
    backend: Backend, base: Cell, masks: dict[str, float], hidden: int
) -> None:
    check_roundtrip(backend, problem_of(base, hidden=hidden, inputs=3, **masks), chunk=4)


@pytest.mark.parametrize("backend", compiled or [kernels.get("reference")], ids=lambda b: b.name)
@cells
@masks
def test_a_long_row_comes_back(backend: Backend, base: Cell, masks: dict[str, float]) -> None:
    steps = 20_000 if compiled else 300
    check_way_back(backend, problem_of(base, [1] * steps, hidden=8, inputs=2, **masks), chunk=512)


@backends
@cells
def test_units_stay_as_they_were_as_often_as_asked(backend: Backend, base: Cell) -> None:
    """A unit that does is the same integer before and after, and costs no bit."""
    p, steps = 0.3, 60
    problem = problem_of(base, [4] * steps, hidden=64, zoneout=p)
    record = record_forward(backend, problem)
    size, states = 32, base.states
    w = record.extra.view(steps, 4, 2, 1 + states, size)[:, :, :, 1:]
    share = float((w == 0).float().mean())
    # 4 sigma of a binomial share of 60 * 4 * 64 (RevLSTM: * 2) draws.
    assert abs(share - p) < 4 * (p * (1 - p) / w.numel()) ** 0.5
    for state in range(states):  # h, then c; the shares of c stand before those of h
        kept = w[:, :, :, states - 1 - state].flatten(2)  # (T, N, H)
        old = record.old.view(steps, 4, states, 64)[:, :, state]
        stayed = kept[:-1] == 0
        assert_equal(old[1:][stayed], old[:-1][stayed])
        assert bool((old[1:][~stayed] != old[:-1][~stayed]).any())
    plain = run_forward(backend, problem_of(base, [4] * steps, hidden=64))
    zoned = run_forward(backend, problem)
    assert float(zoned.ideal.sum()) < 0.8 * float(plain.ideal.sum())


@cells
@masks
def test_kernels_draw_alike(base: Cell, masks: dict[str, float]) -> None:
    """The same units, bit for bit; what is computed from them differs where another last bit of a
    sigmoid rounds to another z, by 2^-10 of a state."""
    problem = problem_of(base, hidden=44, inputs=9, **masks)
    size, choices = 22, problem.layer.cell.choices

    def drawn(record: Record) -> Tensor:
        parts = record.extra.unflatten(1, (2, -1, size))[:, :, 1:]  # (R, groups, *, D)
        return torch.cat((parts[:, :, :choices], (parts[:, :, choices:] == 0).float()), 2)

    theirs = record_forward(kernels.get("reference"), problem)
    assert 0 < float(drawn(theirs).mean()) < 1
    for backend in compiled:
        ours = record_forward(backend, problem)
        assert_equal(drawn(ours), drawn(theirs))
        torch.testing.assert_close(ours.old, theirs.old, rtol=0, atol=2**-8)


@pytest.mark.skipif(
    not {"cpu-avx2", "cpu-avx512"} <= set(kernels.available()), reason="needs AVX2 and AVX-512"
)
@cells
@masks
def test_avx2_and_avx512_give_the_same_bits(base: Cell, masks: dict[str, float]) -> None:
    problem = problem_of(base, hidden=130, inputs=37, **masks)
    avx2, avx512 = kernels.get("cpu-avx2"), kernels.get("cpu-avx512")
    assert_all_equal(vars(record_forward(avx2, problem)), vars(record_forward(avx512, problem)))


@compiled_backends
@cells
@masks
@pytest.mark.usefixtures("threads")
def test_bits_depend_on_neither_threads_nor_chunks(
    backend: Backend, base: Cell, masks: dict[str, float]
) -> None:
    problem = problem_of(base, hidden=66, inputs=7, **masks)
    expected = run_forward(backend, problem)
    assert isinstance(expected.sealed, SealedTape)
    for threads, chunk in ((1, None), (2, 1), (3, 4)):
        torch.set_num_threads(threads)
        after = run_forward(backend, problem, chunk=chunk)
        assert_equal(after.state, expected.state)
        assert isinstance(after.sealed, SealedTape)
        for row in range(RAGGED[0]):
            assert tape_of_row(after.sealed, row) == tape_of_row(expected.sealed, row)


# -- gradients ------------------------------------------------------------------------------------


def real_valued(
    rnn: RevGRU | RevLSTM, x: Tensor, seed: int | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The real-valued equations in float64 as autograd differentiates them: final states, gradients
    of their squares' sum. Masks from the seed; None: those of eval."""
    f64 = {name: p.detach().double().requires_grad_() for name, p in rnn.named_parameters()}
    ih, hh, bias = (f64[f"{name}_l0"].chunk(2) for name in ("weight_ih", "weight_hh", "bias"))
    lstm, half = isinstance(rnn, RevLSTM), H // 2
    forgets = rnn.forget == "fractional"
    h = [torch.zeros(x.shape[1], half, dtype=torch.float64) for _ in range(2)]
    c = [part.clone() for part in h]
    floor = 0.0 if rnn.max_forget_bits is None else 2.0**-rnn.max_forget_bits

    for time, step in enumerate(x.double()):
        for group in (0, 1):

            def draw(purpose: int, time: int = time, group: int = group) -> Tensor:
                assert seed is not None
                noise = Noise(seed, time, group, x.shape[1], x.device)
                return noise.uniform(purpose, half, torch.float64)

            def share(purpose: int, draw: Any = draw) -> Any:
                return 1 - rnn.zoneout if seed is None else (draw(purpose) >= rnn.zoneout).double()

            other, own = h[1 - group], hh[group]
            if seed is not None and rnn.hidden_dropout:
                p = rnn.hidden_dropout
                other = other * (draw(SEEN) >= p) / (1 - p)
            sums = step @ ih[group].t() + bias[group]
            if lstm:
                sums = sums + other @ own.t()
                columns = sums.chunk(5 if forgets else 3, 1)
                f = p = torch.ones(())
                if forgets:
                    f, i, o, p, g = columns
                    f, p = (floor + (1 - floor) * part.sigmoid() for part in (f, p))
                else:
                    i, o, g = columns
                w = share(FORGET)
                c[group] = (1 - w + w * f) * c[group] + w * i.sigmoid() * g.tanh()
                w = share(KEEP)
                h[group] = (1 - w + w * p) * h[group] + w * o.sigmoid() * c[group].tanh()
            else:
                z, r = (sums[:, : 2 * half] + other @ own[: 2 * half].t()).sigmoid().chunk(2, 1)
                z = floor + (1 - floor) * z if forgets else z
                g = (sums[:, 2 * half :] + (r * other) @ own[2 * half :].t()).tanh()
                w = share(FORGET)
                kept = (1 - w + w * z) if forgets else 1.0
                h[group] = kept * h[group] + w * (1 - z) * g
    finals = [torch.cat(h, 1)] + ([torch.cat(c, 1)] if lstm else [])
    sum(final.square().sum() for final in finals).backward()
    return tuple(f.detach() for f in finals), tuple(
        p.grad for p in f64.values() if p.grad is not None
    )


@backends
@kinds
@pytest.mark.parametrize("forget", ["fractional", "none"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "settings", [{"zoneout": 0.3}, {"hidden_dropout": 0.4}, {"zoneout": 0.3, "hidden_dropout": 0.4}]
)
def test_gradients_are_those_of_the_real_valued_equations(
    backend: Backend,
    kind: Any,
    forget: Any,
    training: bool,
    settings: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rnn = build(kind, forget=forget, **settings).train(training)
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.mul_(2)
    x, used = given(), []
    layer_of = rnn._layer_of

    def spy(*arguments: Any) -> Any:
        layer = layer_of(*arguments)
        used.append(layer.seed)
        return layer

    monkeypatch.setattr(rnn, "_layer_of", spy)
    with kernels.use(backend.name):
        _, final = rnn(x)
        finals = [part[0] for part in (final if isinstance(final, tuple) else (final,))]
        sum(part.square().sum() for part in finals).backward()
    (seed,) = used
    assert (seed is not None) == training
    states, grads = real_valued(rnn, x, seed)
    ours = [p.grad for p in rnn.parameters()]
    for found, expected in zip(finals, states, strict=True):
        # z is rounded to 2^-10, and the tape adds up to 2^-13 a step (docs/exactness.md).
        torch.testing.assert_close(found.detach().double(), expected, rtol=0, atol=1e-2)
    for found, expected in zip(ours, grads, strict=True):
        assert float((found.double() - expected).norm() / expected.norm()) < 1e-2


@backends
@kinds
@pytest.mark.parametrize(
    "settings",
    [
        {"zoneout": 0.3},
        {"hidden_dropout": 0.4},
        {"zoneout": 0.2, "hidden_dropout": 0.4, "num_layers": 2, "weight_dropout": 0.3},
        {"zoneout": 0.2, "hidden_dropout": 0.4, "bidirectional": True},
        {"hidden_dropout": 0.4, "forget": "discrete", "max_forget_bits": 2},
        {"zoneout": 0.3, "hidden_dropout": 0.4, "forget": "none"},
    ],
    ids=str,
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
def test_a_graph_can_be_used_twice(backend: Backend, kind: Any) -> None:
    """Backward changes nothing of what was stored."""
    settings = {"zoneout": 0.2, "hidden_dropout": 0.4}
    for reversible in (True, False):
        rnn = build(kind, reversible=reversible, **settings)
        with kernels.use(backend.name):
            loss = rnn(given())[0].square().sum()
            first = torch.autograd.grad(loss, list(rnn.parameters()), retain_graph=True)
            second = torch.autograd.grad(loss, list(rnn.parameters()))
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)


@backends
@kinds
def test_packed_sequences(backend: Backend, kind: Any) -> None:
    lengths = (4, 11, 7)
    settings: dict[str, Any] = {"zoneout": 0.2, "hidden_dropout": 0.4, "bidirectional": True}
    rows = [part[:steps] for part, steps in zip(given().unbind(1), lengths, strict=True)]
    packed = pack_sequence(rows, enforce_sorted=False)
    with kernels.use(backend.name):
        ours = gradients(build(kind, **settings), packed)
        stored = gradients(build(kind, reversible=False, **settings), packed)
    assert_all_equal(ours, stored)


@backends
@kinds
@pytest.mark.parametrize("how", ["eager", "lazy"])
@pytest.mark.parametrize("every", [None, 3])
def test_it_streams(backend: Backend, kind: Any, how: Any, every: Any) -> None:
    masks = {"zoneout": 0.2, "hidden_dropout": 0.4}
    found = []
    with kernels.use(backend.name):
        for settings in ({}, {"reversible": False}):
            rnn = build(kind, num_layers=2, **masks, **settings)
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
        rnn = build(kind, num_layers=2, **masks)
        torch.manual_seed(5)
        out, _ = rnn(given())
    torch.testing.assert_close(out.square().sum(), found[0]["loss"])


# -- modules --------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("settings", [{"zoneout": 0.3}, {"hidden_dropout": 0.4}], ids=str)
def test_a_seed_decides_the_masks(kind: Any, settings: dict[str, float]) -> None:
    first = gradients(build(kind, **settings), given(), seed=5)
    assert_all_equal(gradients(build(kind, **settings), given(), seed=5), first)
    assert not torch.equal(gradients(build(kind, **settings), given(), seed=6)["out"], first["out"])
    rnn = build(kind, **settings)
    assert not torch.equal(rnn(given())[0], rnn(given())[0])


@kinds
def test_in_eval_nothing_is_drawn(kind: Any) -> None:
    rnn = build(kind, zoneout=0.3, hidden_dropout=0.4).eval()
    state = torch.get_rng_state()
    assert_equal(rnn(given())[0], rnn(given())[0])
    assert_equal(torch.get_rng_state(), state)
    assert_equal(rnn(given())[0], build(kind, zoneout=0.3).eval()(given())[0])
    assert_equal(build(kind, hidden_dropout=0.4).eval()(given())[0], build(kind)(given())[0])
    assert not torch.equal(rnn(given())[0], build(kind)(given())[0])
    ours = gradients(rnn, given())
    assert_all_equal(ours, gradients(build(kind, zoneout=0.3, reversible=False).eval(), given()))


@kinds
def test_eval_is_the_mean_of_training(kind: Any) -> None:
    """Of one step from one state, over many rows that draw masks of their own."""
    rows, p = 20_000, 0.4
    rnn = build(kind, zoneout=p)
    x, h = torch.ones(1, 1, X), torch.full((1, 1, H), 0.5)
    many = (x.expand(1, rows, X), h.expand(1, rows, H).contiguous())
    state = many[1] if kind is RevGRU else (many[1], many[1])
    alone = h if kind is RevGRU else (h, h)
    # The first half of the units alone: the second half reads what the first has become.
    mean = rnn(many[0], state)[0][0, :, : H // 2].mean(0)
    expected = rnn.eval()(x, alone)[0][0, 0, : H // 2]
    if kind is RevLSTM:  # h reads tanh of a c that is zoned too: not linear, so only roughly.
        torch.testing.assert_close(mean, expected, rtol=0, atol=0.05)
    else:  # 5 sigma of a step of at most 1.5, and the noise of rounding z.
        torch.testing.assert_close(mean, expected, rtol=0, atol=5 * 0.75 / rows**0.5 + 2**-10)


@backends
@kinds
def test_masks_are_not_stored(backend: Backend, kind: Any) -> None:
    """What is kept from forward to backward is the tape, as without masks."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    steps = 100
    rnn = build(kind, num_layers=2, zoneout=0.2, hidden_dropout=0.4)
    with kernels.use(backend.name), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        rnn(torch.randn(steps, N, X), keep=0)
        report = rnn.tape_report()
    large = [tensor for tensor in saved if tensor.numel() >= steps]
    known = [(steps * N, X), *(tuple(p.shape) for p in rnn.parameters())]
    rest = [tensor for tensor in large if tuple(tensor.shape) not in known]
    assert all(tensor.dtype == torch.uint8 for tensor in rest)
    assert sum(8 * tensor.numel() for tensor in rest) <= report.held_bits


@kinds
def test_copies_and_repr(kind: Any) -> None:
    rnn = build(kind, zoneout=0.2, hidden_dropout=0.4)
    assert repr(rnn) == f"{kind.__name__}(5, 12, hidden_dropout=0.4, zoneout=0.2)"
    expected = gradients(rnn, given())
    for copied in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert_all_equal(gradients(copied, given()), expected)


@pytest.mark.parametrize(("kind", "single"), [(RevGRU, RevGRUCell), (RevLSTM, RevLSTMCell)])
def test_single_steps_are_those_of_the_layer(kind: Any, single: Any) -> None:
    rnn = build(kind, zoneout=0.2, hidden_dropout=0.4).eval()
    cell = single(X, H, zoneout=0.2, hidden_dropout=0.4).eval()
    cell.load_state_dict({name[:-3]: value for name, value in rnn.state_dict().items()})
    state = None
    for step in given():
        state = cell(step, state)
    _, final = rnn(given())
    pairs = zip(state, final, strict=True) if isinstance(final, tuple) else [(state, final)]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected[0], rtol=0, atol=2**-8)
    cell.train()
    assert not torch.equal(
        *(
            torch.cat([cell(given()[0])], -1) if kind is RevGRU else torch.cat(cell(given()[0]), -1)
            for _ in range(2)
        )
    )


@pytest.mark.parametrize("kind", [RevGRU, RevLSTM, RevGRUCell, RevLSTMCell])
def test_arguments_that_make_no_sense_are_refused(kind: Any) -> None:
    for name in ("zoneout", "hidden_dropout"):
        for value in (-0.1, 1.0, float("nan")):
            with pytest.raises(ValueError, match=rf"{name} must be .*got {value}"):
                kind(X, H, **{name: value})
    with pytest.raises(ValueError, match="zoneout must be 0 with forget='discrete'"):
        kind(X, H, forget="discrete", max_forget_bits=2, zoneout=0.1)

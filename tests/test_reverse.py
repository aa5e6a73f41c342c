"""Backward, from the outside: its gradients, and what happens when it cannot be right."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from helpers import assert_all_equal, backends, compiled
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from revrnn import NonFiniteError, ReversalError, RevGRU, RevLSTM, StateOverflowError, kernels
from revrnn.fixed import H_ONE, Z_MAX, Z_ONE, ForgetRange
from revrnn.kernels import Backend

pytestmark = pytest.mark.usefixtures("poison")

Rnn = RevGRU | RevLSTM
modules = pytest.mark.parametrize("kind", [RevGRU, RevLSTM], ids=lambda kind: kind.__name__)

INPUTS, HIDDEN, STEPS, BATCH = 5, 36, 11, 5


def make(kind: type[Rnn], **options: Any) -> Rnn:
    torch.manual_seed(0)
    return kind(INPUTS, HIDDEN, **{"chunk_size": 4, **options})


@dataclass
class Sample:
    """Leaves to run a module on."""

    x: Tensor  # (T, N, I)
    states: tuple[Tensor, ...]  # (L * directions, N, H) each
    lengths: list[int] | None = None
    sorted: bool = True

    def arguments(self) -> tuple[Tensor | PackedSequence, Any]:
        input: Tensor | PackedSequence = self.x
        if self.lengths is not None:
            input = pack_padded_sequence(
                self.x, torch.tensor(self.lengths), enforce_sorted=self.sorted
            )
        return input, self.states if len(self.states) > 1 else self.states[0]


def sample(rnn: Rnn, *, steps: int = STEPS, batch: int = BATCH, seed: int = 1) -> Sample:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    slots = rnn.num_layers * (2 if rnn.bidirectional else 1)
    return Sample(
        normal(steps, batch, rnn.input_size).requires_grad_(),
        tuple(
            (normal(slots, batch, rnn.hidden_size) / 2).requires_grad_()
            for _ in range(1 if isinstance(rnn, RevGRU) else 2)
        ),
    )


def flat(result: Any) -> list[Tensor]:
    """Output and final states, those there are."""
    output, finals = result
    output = output.data if isinstance(output, PackedSequence) else output
    finals = finals if isinstance(finals, tuple) else (finals,)
    return [tensor for tensor in (output, *finals) if tensor is not None]


def loss_of(results: Sequence[Tensor]) -> Tensor:
    """A sum with random weights."""
    generator = torch.Generator().manual_seed(2)
    return torch.stack(
        [(result * torch.randn(result.shape, generator=generator)).sum() for result in results]
    ).sum()


def gradients(rnn: Rnn, leaves: Sample) -> dict[str, Tensor]:
    """Moves the gradients out of the leaves."""
    named: dict[str, Tensor] = {"x": leaves.x, **dict(rnn.named_parameters())}
    named |= {f"state {i}": state for i, state in enumerate(leaves.states)}
    found = {}
    for name, tensor in named.items():
        assert tensor.grad is not None, name
        found[name], tensor.grad = tensor.grad, None
    return found


def train(rnn: Rnn, leaves: Sample, *, keep: int | None = None) -> dict[str, Tensor]:
    """Results and gradients of one step, by name."""
    torch.manual_seed(3)  # for dropout
    input, states = leaves.arguments()
    results = flat(rnn(input, states, keep=keep))
    loss_of(results).backward()
    named = {f"result {i}": result.detach() for i, result in enumerate(results)}
    return named | gradients(rnn, leaves)


# -- reversible or not ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: list[int] | None = None
    sorted: bool = True
    keep: int | None = None


CASES = [
    Case("plain"),
    Case("forgetting at most 2 bits", {"max_forget_bits": 2}),
    Case("no bias", {"bias": False}),
    Case("weight dropout", {"weight_dropout": 0.5}),
    Case("keep 0", keep=0),
    Case("keep 7", keep=7),
    Case("keep half", keep=18),
    Case("packed", lengths=[11, 11, 7, 4, 1]),
    Case("packed, not sorted", lengths=[4, 11, 1, 7, 11], sorted=False),
    Case("packed, keep 7", lengths=[11, 11, 7, 4, 1], keep=7),
    Case("two layers", {"num_layers": 2}),
    Case("two layers, dropout", {"num_layers": 2, "dropout": 0.4}),
    Case("two layers, packed, keep 7", {"num_layers": 2, "dropout": 0.4}, [11, 9, 7, 4, 1], keep=7),
    Case("bidirectional", {"bidirectional": True}),
    Case("bidirectional, packed", {"bidirectional": True}, [4, 11, 1, 7, 11], sorted=False),
    Case(
        "everything",
        {
            "num_layers": 2,
            "bidirectional": True,
            "dropout": 0.4,
            "weight_dropout": 0.5,
            "max_forget_bits": 3,
        },
        lengths=[4, 11, 1, 7, 11],
        sorted=False,
        keep=7,
    ),
]


@backends
@modules
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reversible_and_stored_gradients_are_equal(
    backend: Backend, kind: type[Rnn], case: Case
) -> None:
    rnn = make(kind, **case.options)
    leaves = sample(rnn)
    leaves.lengths, leaves.sorted = case.lengths, case.sorted
    with kernels.use(backend.name):
        taped = train(rnn, leaves, keep=case.keep)
        rnn.reversible = False
        stored = train(rnn, leaves, keep=case.keep)
    assert_all_equal(taped, stored)
    assert all(bool(tensor.isfinite().all()) for tensor in taped.values())
    assert any(name.startswith("weight_hh") and bool(taped[name].any()) for name in taped)


@modules
def test_the_papers_tape_gives_the_same_gradients_as_stored_states(kind: type[Rnn]) -> None:
    rnn = make(kind, tape="paper", max_forget_bits=2)
    leaves = sample(rnn)
    taped = train(rnn, leaves, keep=7)
    rnn.reversible = False
    assert_all_equal(taped, train(rnn, leaves, keep=7))


@backends
@modules
def test_long_sequences_with_states_beyond_two(backend: Backend, kind: type[Rnn]) -> None:
    """Float32 has 24 bits, so a state beyond 2 is no float: what is saved must hold the rest, which
    is 64 at most, in eight bits more."""
    rnn = make(kind, chunk_size=16)
    leaves = sample(rnn, steps=40, batch=2)
    with torch.no_grad():
        leaves.states[-1].mul_(200)
        leaves.states[-1].clamp_(-240, 240)
        rnn.get_parameter("bias_l0").view(2, -1, HIDDEN // 2)[:, 0] = 6.0  # z, or f: forget slowly
    with kernels.use(backend.name):
        taped = train(rnn, leaves)
        assert float(taped["result 1" if kind is RevGRU else "result 2"].abs().max()) > 100
        rnn.reversible = False
        assert_all_equal(taped, train(rnn, leaves))


@modules
def test_a_result_that_is_not_used_gives_nothing(kind: type[Rnn]) -> None:
    rnn = make(kind)
    leaves = sample(rnn)
    output, *finals = flat(rnn(*leaves.arguments()))
    output.sum().backward()
    alone = gradients(rnn, leaves)
    output, *finals = flat(rnn(*leaves.arguments()))
    zeros = sum(((final * 0).sum() for final in finals), torch.zeros(()))
    (output.sum() + zeros).backward()
    assert_all_equal(alone, gradients(rnn, leaves))


# -- the real model -------------------------------------------------------------------------------


class Noise:
    """Everything by which the fixed-point recurrence differs from the real-valued one, as leaves
    that are zero, each with a bound and a variance."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.bounds: list[Tensor] = []
        self.variances: list[Tensor] = []

    def _add(self, value: Tensor, bound: Tensor | float, variance: Tensor | float) -> Tensor:
        leaf = torch.zeros_like(value, requires_grad=True)
        self.leaves.append(leaf)
        self.bounds.append(torch.zeros_like(value) + bound)
        self.variances.append(torch.zeros_like(value) + variance)
        return value + leaf

    def forget(self, z: Tensor) -> Tensor:
        """z is rounded to a multiple of 2^-10: off by 2^-11 at most, uniformly."""
        assert bool(((z > 0.5 / Z_ONE) & (z < (Z_MAX + 0.5) / Z_ONE)).all())  # not clamped
        return self._add(z, 2**-11, 2**-20 / 12)

    def state(self, value: Tensor) -> Tensor:
        """The exact multiplication loses ``z (h* mod 2^10) / 2^10`` and fills in e, both below z*
        and so below 2^10 of 2^23, uniformly and with opposite signs; the update is rounded, by 1/2
        of 2^23 in fixed point, and a little in float32 before."""
        return self._add(value, 2**-13 + 2**-22, 2 * 2**-26 / 12)

    def start(self, value: Tensor) -> Tensor:
        """Initial states are rounded to fixed point."""
        return self._add(value, 2**-24, 2**-46 / 12)

    def sum(self, value: Tensor, magnitude: Tensor, terms: int) -> Tensor:
        """A float32 sum: every term is rounded once, and then once for each sum it is part of; with
        it the rounding of the activation that follows (slope at most 1, error 3 2^-23)."""
        bound = (terms + 1) * 2**-24 * magnitude.detach() + 3 * 2**-23
        return self._add(value, bound, bound**2)


def real_model(
    kind: type[Rnn], layers: list[list[Tensor]], x: Tensor, states: Sequence[Tensor], floor: float
) -> tuple[Tensor, list[Tensor], Noise]:
    """The paper's equations on real numbers: output (T, N, H), final states (L, N, H), the noise.

    ``layers``: W_ih, W_hh and bias of each. Forget gates are mapped to ``a + (1 - a) z``.
    """
    noise = Noise()
    finals: list[list[Tensor]] = [[] for _ in states]
    for layer, (w_ih, w_hh, bias) in enumerate(layers):
        groups = [list(noise.start(state[layer]).chunk(2, 1)) for state in states]
        ih, hh, b = (tensor.chunk(2) for tensor in (w_ih, w_hh, bias))
        outputs = []
        for x_t in x:

            def pre(group: int, other: Tensor, gates: slice, x_t: Tensor = x_t) -> Tensor:
                w, u, c = ih[group][gates], hh[group][gates], b[group][gates]  # noqa: B023
                magnitude = x_t.abs() @ w.abs().T + other.abs() @ u.abs().T + c.abs()
                terms = w.shape[1] + u.shape[1] + 1
                return noise.sum(x_t @ w.T + other @ u.T + c, magnitude, terms)

            def forget(gate: Tensor) -> Tensor:
                return noise.forget(floor + (1 - floor) * gate.sigmoid())

            for group in (0, 1):
                h, other = groups[0][group], groups[0][1 - group]
                d = h.shape[1]
                if kind is RevGRU:
                    gate_z, gate_r = pre(group, other, slice(0, 2 * d)).chunk(2, 1)
                    z, r = forget(gate_z), gate_r.sigmoid()
                    g = pre(group, r * other, slice(2 * d, 3 * d)).tanh()
                    groups[0][group] = noise.state(z * h + (1 - z) * g)
                else:
                    gate_f, i, o, gate_p, g = pre(group, other, slice(0, 5 * d)).chunk(5, 1)
                    c = forget(gate_f) * groups[1][group] + i.sigmoid() * g.tanh()
                    c = groups[1][group] = noise.state(c)
                    h = forget(gate_p) * h + o.sigmoid() * c.tanh()
                    groups[0][group] = noise.state(h)
            outputs.append(torch.cat(groups[0], 1))
        x = torch.stack(outputs)
        for final, parts in zip(finals, groups, strict=True):
            final.append(torch.cat(parts, 1))
    return x, [torch.stack(final) for final in finals], noise


@dataclass(frozen=True)
class RealResults:
    """What a module should give, and how exactly, each for all results one after the other."""

    names: list[str]
    values: Tensor
    bound: Tensor
    variance: Tensor


def small(kind: type[Rnn], bits: float | None, num_layers: int) -> tuple[Rnn, Sample]:
    torch.manual_seed(0)
    rnn = kind(3, 8, num_layers, max_forget_bits=bits, chunk_size=4)
    return rnn, sample(rnn, steps=5, batch=2)


@cache
def real_results(kind: type[Rnn], bits: float | None, num_layers: int) -> RealResults:
    rnn, leaves = small(kind, bits, num_layers)
    wide = {name: p.detach().double().requires_grad_() for name, p in rnn.named_parameters()}
    x = leaves.x.detach().double().requires_grad_()
    states = [state.detach().double().requires_grad_() for state in leaves.states]
    layers = [
        [wide[f"{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias")]
        for layer in range(num_layers)
    ]
    floor = ForgetRange.from_bits(bits).floor
    output, finals, noise = real_model(kind, layers, x, states, floor)
    results = {f"result {i}": result for i, result in enumerate([output, *finals])}
    named = {"x": x, **wide, **{f"state {i}": state for i, state in enumerate(states)}}
    slopes = torch.autograd.grad(
        loss_of(list(results.values())), list(named.values()), create_graph=True
    )
    allowance = [torch.zeros(result.numel()) for result in results.values()]
    steps, batch, _ = x.shape
    chain = num_layers * steps * 2 * (5 * rnn.hidden_size // 2 + 10) + steps * batch
    for slope in slopes:
        allowance.append((4 * chain * 2**-24 * slope.detach().abs().max()).expand(slope.numel()))
    results |= dict(zip(named, slopes, strict=True))

    values = torch.cat([result.flatten() for result in results.values()])
    by_noise = torch.autograd.grad(
        values, noise.leaves, torch.eye(len(values)).double(), is_grads_batched=True
    )
    bound, variance = torch.zeros(2, len(values)).double()
    for slope, limit, square in zip(by_noise, noise.bounds, noise.variances, strict=True):
        bound += slope.flatten(1).abs() @ limit.flatten()
        variance += slope.flatten(1).square() @ square.flatten()
    return RealResults(list(results), values.detach(), 1.1 * bound + torch.cat(allowance), variance)


@backends
@modules
@pytest.mark.parametrize("bits", [2, None])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_results_are_those_of_the_real_model_up_to_fixed_point(
    backend: Backend, kind: type[Rnn], bits: float | None, num_layers: int
) -> None:
    """Outputs and gradients differ from those of float64 autograd by no more than `Noise` explains.

    The fixed-point recurrence is the real one with small numbers added, and its gradients, rounding
    being passed straight through, are the exact gradients of just that. So a result is off by
    ``sum_k (d result / d noise_k) noise_k`` to first order, with |noise_k| below its bound; what
    dominates is the rounding of z, 2^-11, before that of h, 2^-13, and of float32, 2^-20. The
    neglected order is smaller by the size of the noise itself, which grows to 1% here; 10% are
    allowed for. The float32 sums of the backward pass come on top: along any path from the loss a
    gradient takes part in some G D + 10 roundings a step, layer and group and in a sum over all
    T N rows, each of a relative 2^-24 of what it is a part of; four times the largest gradient is
    allowed for that.

    If the noise is independent and uniform, the mean square of the differences is that of the
    standard deviations; it must be so within a factor of two.
    """
    real = real_results(kind, bits, num_layers)
    rnn, leaves = small(kind, bits, num_layers)
    with kernels.use(backend.name):
        actual = train(rnn, leaves)
    difference = torch.cat([actual[name].double().flatten() for name in real.names]) - real.values
    assert bool((difference.abs() <= real.bound).all())
    assert 0.5 < float((difference.square() / real.variance).mean().sqrt()) < 2
    assert float(real.bound.median()) < 0.02  # the bound says something


# -- the negative control -------------------------------------------------------------------------


@modules
def test_plain_floats_do_not_come_back(kind: type[Rnn]) -> None:
    """The same recurrence in float32, undone by division: without a tape, forgetting is for good.

    With a tape it comes back, or `train` would raise `ReversalError`.
    """
    rnn, leaves = make(kind), sample(make(kind), steps=100)
    w_ih, w_hh, bias = (parameter.detach().chunk(2) for parameter in rnn.parameters())
    d = HIDDEN // 2

    def gates(x: Tensor, other: Tensor, group: int) -> list[Tensor]:
        pre, u = x @ w_ih[group].T + bias[group], w_hh[group]
        if kind is RevGRU:
            z, r = (pre[:, : 2 * d] + other @ u[: 2 * d].T).sigmoid().chunk(2, 1)
            return [z, (pre[:, 2 * d :] + (r * other) @ u[2 * d :].T).tanh()]
        f, i, o, p, g = (pre + other @ u.T).chunk(5, 1)
        return [f.sigmoid(), i.sigmoid() * g.tanh(), p.sigmoid(), o.sigmoid()]

    # [h, c] or [h] of both groups.
    before = [list(state.detach()[0].chunk(2, 1)) for state in leaves.states]
    now = [list(parts) for parts in before]
    for x in leaves.x.detach():
        for group in (0, 1):
            own = gates(x, now[0][1 - group], group)
            if kind is RevGRU:
                z, g = own
                now[0][group] = z * now[0][group] + (1 - z) * g
            else:
                f, update, p, o = own
                now[1][group] = f * now[1][group] + update
                now[0][group] = p * now[0][group] + o * now[1][group].tanh()
    for x in reversed(leaves.x.detach().unbind()):
        for group in (1, 0):
            own = gates(x, now[0][1 - group], group)
            if kind is RevGRU:
                z, g = own
                now[0][group] = (now[0][group] - (1 - z) * g) / z
            else:
                f, update, p, o = own
                now[0][group] = (now[0][group] - o * now[1][group].tanh()) / p
                now[1][group] = (now[1][group] - update) / f
    for parts, starts in zip(now, before, strict=True):
        for part, start in zip(parts, starts, strict=True):
            assert not bool(((part - start).abs() < 1e-3).any())

    train(rnn, leaves)


# -- what may happen between forward and backward --------------------------------------------------


@backends
@modules
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 1), (3, 2), (1, 3)])
def test_the_number_of_threads_may_change(
    backend: Backend, kind: type[Rnn], forward: int, backward: int
) -> None:
    rnn = make(kind)
    leaves = sample(rnn)

    def run(reversible: bool, first: int, second: int) -> dict[str, Tensor]:
        rnn.reversible = reversible
        torch.set_num_threads(first)
        loss = loss_of(flat(rnn(*leaves.arguments())))
        torch.set_num_threads(second)
        loss.backward()
        return gradients(rnn, leaves)

    with kernels.use(backend.name):
        changed = run(True, forward, backward)
        assert_all_equal(changed, run(False, forward, backward))
        if backend in compiled:  # torch's own products, in the reference, may depend on threads
            assert_all_equal(changed, run(True, 1, 1))


@backends
@modules
def test_denormals_may_be_flushed(backend: Backend, kind: type[Rnn]) -> None:
    rnn = make(kind, max_forget_bits=2)
    leaves = sample(rnn)
    with kernels.use(backend.name):
        expected = train(rnn, leaves)
        loss = loss_of(results := flat(rnn(*leaves.arguments())))
        assert torch.set_flush_denormal(True)
        try:
            loss.backward()
        finally:
            torch.set_flush_denormal(False)
    flushed = {f"result {i}": result.detach() for i, result in enumerate(results)}
    assert_all_equal(flushed | gradients(rnn, leaves), expected)


@modules
def test_a_kept_graph_gives_the_same_gradients_again(kind: type[Rnn]) -> None:
    for reversible in (True, False):
        rnn = make(kind, num_layers=2, reversible=reversible)
        leaves = sample(rnn)
        loss = loss_of(flat(rnn(*leaves.arguments())))
        loss.backward(retain_graph=True)
        first = gradients(rnn, leaves)
        loss.backward(retain_graph=True)
        assert_all_equal(gradients(rnn, leaves), first)
        loss.backward()
        assert_all_equal(gradients(rnn, leaves), first)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@modules
@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("power", [1, 2])
def test_there_is_no_second_derivative(kind: type[Rnn], reversible: bool, power: int) -> None:
    """Nor a silent zero, where the gradient that comes in (of a linear loss) needs none itself."""
    rnn = make(kind, reversible=reversible)
    leaves = sample(rnn)
    loss = loss_of(flat(rnn(*leaves.arguments()))) ** power
    (slope,) = torch.autograd.grad(loss, leaves.x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        slope.sum().backward()


# -- what must not happen -------------------------------------------------------------------------


class Tampering:
    """Changes saved tensors on their way into the backward pass."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []
        self.change: tuple[int, Callable[[Tensor], None]] | None = None

    def pack(self, tensor: Tensor) -> int:
        self.saved.append(tensor.detach().clone())
        return len(self.saved) - 1

    def unpack(self, index: int) -> Tensor:
        tensor = self.saved[index].clone()
        if self.change is not None and self.change[0] == index:
            self.change[1](tensor)
        return tensor

    @contextmanager
    def watch(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def indices(self, dtype: torch.dtype, dims: int) -> list[int]:
        return [
            index
            for index, tensor in enumerate(self.saved)
            if tensor.dtype == dtype and tensor.dim() == dims
        ]


def tampered(
    backend: Backend, kind: type[Rnn], keep: int | None = None
) -> tuple[Tampering, Tensor]:
    """A small pass, and the loss at its end; its x and weights do not need hooks."""
    rnn = make(kind, max_forget_bits=3)
    leaves = sample(rnn, steps=6, batch=3)
    tampering = Tampering()
    with kernels.use(backend.name), tampering.watch():
        (_, *finals) = flat(rnn(*leaves.arguments(), keep=keep))
    loss = finals[0].sum()
    loss.backward(retain_graph=True)  # it is all right as it is
    return tampering, loss


def assert_noticed(loss: Tensor) -> None:
    with pytest.raises(ReversalError):
        loss.backward(retain_graph=True)


def flip(position: int, bits: int) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor.view(-1)[position] ^= bits

    return change


@pytest.mark.parametrize("backend", compiled[:1], ids=lambda backend: backend.name)
@modules
def test_any_changed_byte_of_the_tape_is_noticed(backend: Backend, kind: type[Rnn]) -> None:
    """Reversing is one-to-one: from other bytes, no way leads to the same initial state, full
    lanes and an empty stack."""
    tampering, loss = tampered(backend, kind)
    (index,) = tampering.indices(torch.uint8, 1)
    size = tampering.saved[index].numel()
    assert size > 50
    for position in range(size):
        for bits in (1, 0x10, 0xFF):
            tampering.change = (index, flip(position, bits))
            assert_noticed(loss)


@pytest.mark.parametrize("backend", compiled[:1], ids=lambda backend: backend.name)
@modules
def test_any_changed_lane_is_noticed(backend: Backend, kind: type[Rnn]) -> None:
    tampering, loss = tampered(backend, kind)
    (index,) = tampering.indices(torch.uint8, 2)
    for position in range(tampering.saved[index].numel()):
        for bit in range(8):
            tampering.change = (index, flip(position, 1 << bit))
            assert_noticed(loss)


@pytest.mark.parametrize("backend", [*compiled[:1], kernels.get("reference")], ids=lambda b: b.name)
@modules
def test_any_changed_stored_unit_is_noticed(backend: Backend, kind: type[Rnn]) -> None:
    """Also where the product rounds to the same number: the step before finds it out."""
    tampering, loss = tampered(backend, kind, keep=2)
    chunks = tampering.indices(torch.int32, 2)
    places = [(i, at) for i in chunks for at in range(tampering.saved[i].numel())]
    assert len(places) > 20
    for index, position in places:
        for bit in (0, 1, 9, 30):
            tampering.change = (index, flip(position, 1 << bit))
            assert_noticed(loss)


@pytest.mark.parametrize("backend", compiled[:1], ids=lambda backend: backend.name)
@modules
def test_any_changed_state_is_noticed(backend: Backend, kind: type[Rnn]) -> None:
    tampering, loss = tampered(backend, kind)
    states = 1 if kind is RevGRU else 2
    finals = [
        index
        for index in tampering.indices(torch.float32, 3)
        if tampering.saved[index].shape == (states, 3, HIDDEN)
    ]
    for index in finals:  # the initial ones and the final ones
        for position in range(tampering.saved[index].numel()):

            def change(tensor: Tensor, position: int = position) -> None:
                tensor.view(-1)[position] += 2 / H_ONE  # 1 may be lost to rounding to even

            tampering.change = (index, change)
            assert_noticed(loss)
    assert len(finals) == 2


@backends
@modules
def test_a_few_changes_are_noticed_by_every_backend(backend: Backend, kind: type[Rnn]) -> None:
    tampering, loss = tampered(backend, kind)
    (tape,) = tampering.indices(torch.uint8, 1)
    (lanes,) = tampering.indices(torch.uint8, 2)
    size = tampering.saved[tape].numel()
    for position in (0, 1, size // 2, size - 1):
        tampering.change = (tape, flip(position, 1))
        assert_noticed(loss)
        tampering.change = (lanes, flip(position % 108, 1))
        assert_noticed(loss)
    # How many bytes each row has: one more or less, and one moved to another row.
    (fill,) = tampering.indices(torch.int32, 1)
    for row in range(3):
        for change in (1, -1):

            def count(tensor: Tensor, row: int = row, change: int = change) -> None:
                tensor[row] += change

            def move(tensor: Tensor, row: int = row, change: int = change) -> None:
                tensor[row] += change
                tensor[row - 1] -= change

            for what in (count, move):
                tampering.change = (fill, what)
                assert_noticed(loss)

    def cut(tensor: Tensor) -> None:
        tensor.fill_(-1)

    tampering.change = (fill, cut)
    assert_noticed(loss)
    tampering.change = None
    loss.backward()


@backends
@modules
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_l0", "x"])
@pytest.mark.parametrize("behind", [True, False], ids=["behind autograd's back", "in place"])
def test_a_changed_weight_or_input_is_noticed(
    backend: Backend, kind: type[Rnn], name: str, behind: bool
) -> None:
    rnn = make(kind)
    leaves = sample(rnn)
    with kernels.use(backend.name):
        loss = loss_of(flat(rnn(*leaves.arguments())))
    tensor = leaves.x if name == "x" else rnn.get_parameter(name)
    with torch.no_grad():
        changed = tensor.data if behind else tensor
        changed.view(-1)[3] += 0.5
    message = None if behind else "changed in place between forward and backward"
    with pytest.raises(ReversalError, match=message):
        loss.backward()


@backends
@modules
def test_an_optimiser_step_too_early_is_noticed(backend: Backend, kind: type[Rnn]) -> None:
    rnn = make(kind)
    leaves = sample(rnn)
    optimiser = torch.optim.SGD(rnn.parameters(), lr=0.1)
    with kernels.use(backend.name):
        first, second = (loss_of(flat(rnn(*leaves.arguments()))) for _ in range(2))
    first.backward()
    optimiser.step()
    with pytest.raises(ReversalError, match="changed in place between forward and backward"):
        second.backward()


@modules
def test_an_initial_state_may_be_changed_afterwards(kind: type[Rnn]) -> None:
    """The pass keeps its own copy, so carrying a state on in place is safe."""
    rnn = make(kind)
    leaves = sample(rnn)
    expected = train(rnn, leaves)
    results = flat(rnn(*leaves.arguments()))
    with torch.no_grad():
        for state in leaves.states:
            state.zero_()
    loss_of(results).backward()
    named = {f"result {i}": result.detach() for i, result in enumerate(results)}
    assert_all_equal(named | gradients(rnn, leaves), expected)


# -- errors of the forward pass -------------------------------------------------------------------


@backends
@modules
@pytest.mark.parametrize("memory", ["tape", "states", "nothing"])
def test_a_module_is_usable_after_an_error(backend: Backend, kind: type[Rnn], memory: str) -> None:
    rnn = make(kind, num_layers=2, reversible=memory == "tape")
    leaves = sample(rnn)
    with kernels.use(backend.name), torch.set_grad_enabled(memory != "nothing"):
        expected = [result.detach() for result in flat(rnn(*leaves.arguments()))]

        broken = leaves.x.detach().clone()
        broken[6, 2, 1] = torch.nan
        with pytest.raises(NonFiniteError, match=r"layer 0: .* row 2 .* time step 6\b"):
            rnn(broken)

        bias = rnn.get_parameter("bias_l1")
        before = bias.detach().clone()
        with torch.no_grad():
            bias[9] = torch.inf
        with pytest.raises(NonFiniteError, match=r"layer 1: .* row 0 .* time step 0\b"):
            rnn(leaves.x[:, :1].detach())
        with torch.no_grad():
            bias.copy_(before)

        for result, again in zip(expected, flat(rnn(*leaves.arguments())), strict=True):
            assert torch.equal(result, again.detach())
    if memory != "nothing":
        with kernels.use(backend.name):
            train(rnn, leaves)


@backends
def test_overflow_is_named(backend: Backend) -> None:
    rnn = make(RevLSTM, bidirectional=True)
    leaves = sample(rnn)
    bias = rnn.get_parameter("bias_l0_reverse")
    kept = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(30.0)
        leaves.states[1][1, 3, 20] = 252.0  # becomes 252.75, 253.5, 254.26
    with kernels.use(backend.name):
        with pytest.raises(
            StateOverflowError,
            match=r"layer 0 \(reverse\): .* row 3 left .* \|h\| < 254 at time step 8\. Lower",
        ):
            rnn(*leaves.arguments())
        with torch.no_grad():
            bias.copy_(kept)
        train(rnn, leaves)


@backends
@modules
@pytest.mark.parametrize(
    ("value", "error"),
    [(torch.nan, NonFiniteError), (-torch.inf, NonFiniteError), (254.0, StateOverflowError)],
)
def test_initial_states_are_checked(
    backend: Backend, kind: type[Rnn], value: float, error: type[Exception]
) -> None:
    rnn = make(kind, num_layers=2)
    leaves = sample(rnn)
    with torch.no_grad():
        leaves.states[-1][1, 4, 7] = value
    with (
        kernels.use(backend.name),
        pytest.raises(error, match=r"layer 1: the initial state of batch row 4"),
    ):
        rnn(*leaves.arguments())
    with torch.no_grad():
        leaves.states[-1][1, 4, 7] = 253.99998
    with kernels.use(backend.name):
        train(rnn, leaves)

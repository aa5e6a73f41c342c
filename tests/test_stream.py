"""Streaming against the same modules run whole: values, states, gradients, side effects, memory."""

import functools
import gc
import itertools
import re
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor, nn
from torch.nn import functional

import revrnn
from revrnn import EmbeddingDropout, ReversalError, RevGRU, RevLSTM, VariationalDropout
from revrnn.diagnostics import live_bytes

Rnn = RevGRU | RevLSTM
STEPS, BATCH, WORDS, WIDTH, HIDDEN = 29, 3, 11, 6, 8
CHUNKS = (None, 1, 7, 16, STEPS, STEPS + 5)

kinds = pytest.mark.parametrize("kind", [RevGRU, RevLSTM], ids=lambda kind: kind.__name__)
both_gradients = pytest.mark.parametrize("gradients", ["eager", "lazy"])


@pytest.fixture(autouse=True)
def surroundings(threads: None) -> Iterator[None]:
    """One thread, since everything is tiny; and nothing may be left behind."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert revrnn.dropout._current.get() is None


# -- models ---------------------------------------------------------------------------------------


class Head(nn.Module):
    """Attention over the context, logits by the embedding's own weights; loss and hits."""

    def __init__(self, embedding: nn.Embedding, hidden: int = HIDDEN, p: float = 0.0) -> None:
        super().__init__()
        self.embedding = embedding
        self.drop = nn.Dropout(p)
        self.linear = nn.Linear(hidden, WIDTH)
        self.seen: list[Tensor] = []

    def forward(self, h: Tensor, y: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(h.detach().clone())
        query = self.linear(self.drop(h))
        query = query + (query @ context.t()).softmax(-1) @ context
        logits = query @ self.embedding.weight.t()
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        return loss, (logits.argmax(-1) == y).sum()


class Counting(nn.Module):
    """Counts the calls of what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: Tensor) -> Any:
        self.calls += 1
        return self.inner(*args)


@dataclass
class Case:
    rnn: Any
    stem: Callable[..., Tensor]
    head: Callable[..., Any]
    x: Tensor
    y: Tensor
    context: Tensor
    state: Any = None
    extra: list[nn.Module] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.rnn) if isinstance(self.rnn, (list, nn.ModuleList)) else [self.rnn]

    def leaves(self) -> list[Tensor]:
        parts = [*self.modules, self.stem, self.head, *self.extra]
        tensors = [q for part in parts if isinstance(part, nn.Module) for q in part.parameters()]
        tensors += [self.context, *flat(self.state)]
        unique = {id(tensor): tensor for tensor in tensors}
        return [tensor for tensor in unique.values() if tensor.requires_grad]

    def whole(self) -> tuple[Any, Any]:
        """The same modules without streaming."""
        x, finals = self.stem(self.x), []
        states = self.state if isinstance(self.state, list) else [self.state] * len(self.modules)
        states = iter(states)
        for module in self.modules:
            if isinstance(module, VariationalDropout):
                x = module(x)
            else:
                x, final = module(x, next(states))
                finals.append(final)
        result = self.head(x, self.y, self.context)
        return result, finals if len(self.modules) > 1 else finals[0]

    def stream(self, **options: Any) -> tuple[Any, Any]:
        return revrnn.stream(
            self.rnn,
            self.x,
            self.state,
            stem=self.stem,
            head=self.head,
            targets=self.y,
            context=self.context,
            **options,
        )


def flat(state: Any) -> list[Tensor]:
    if state is None:
        return []
    return [state] if isinstance(state, Tensor) else [part for s in state for part in flat(s)]


def start(rnn: Rnn) -> Any:
    """A state with gradients."""
    shape = (rnn.num_layers, BATCH, rnn.hidden_size)
    parts = [torch.randn(shape).div(2).requires_grad_() for _ in range(rnn._cell.states)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def make(kind: type[Rnn], layers: int = 1, *, head_p: float = 0.0, **options: Any) -> Case:
    """A language model with tied embeddings, attention, and all that streaming repeats."""
    embedding = EmbeddingDropout(WORDS, WIDTH, p=0.2)
    rnn = kind(WIDTH, HIDDEN, layers, **{"max_forget_bits": 3, **options})
    return Case(
        rnn,
        nn.Sequential(embedding, VariationalDropout(0.3)),
        Head(embedding, p=head_p),
        torch.randint(WORDS, (STEPS, BATCH)),
        torch.randint(WORDS, (STEPS, BATCH)),
        torch.randn(5, WIDTH, requires_grad=True),
        start(rnn),
    )


def first(losses: Any) -> Tensor:
    return losses if isinstance(losses, Tensor) else losses[0]


@dataclass
class Result:
    loss: Tensor
    state: list[Tensor]
    gradients: list[Tensor]
    random: Tensor


def step(case: Case, run: Callable[[], tuple[Any, Any]], seed: int = 7) -> Result:
    """One training step, from the same random state every time."""
    leaves = case.leaves()
    torch.manual_seed(seed)
    losses, state = run()
    found = torch.autograd.grad(first(losses), leaves)
    finals = [part.detach() for part in flat(state)]
    return Result(first(losses).detach(), finals, list(found), torch.get_rng_state())


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-5):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(float(b.abs().max()), 1e-3))


def assert_same(actual: Result, expected: Result) -> None:
    """States are the same bits, the rest is the same to rounding."""
    for a, b in zip(actual.state, expected.state, strict=True):
        assert_equal(a, b)
    assert_near([actual.loss], [expected.loss])
    assert_near(actual.gradients, expected.gradients)


# -- equal to the whole computation ---------------------------------------------------------------


@both_gradients
@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize(
    ("kind", "layers"), [(RevGRU, 2), (RevLSTM, 1)], ids=["RevGRU-2", "RevLSTM-1"]
)
def test_equal_to_unstreamed(
    kind: type[Rnn], layers: int, reversible: bool, gradients: str
) -> None:
    dropout = {"dropout": 0.2} if layers > 1 else {}
    case = make(kind, layers, weight_dropout=0.5, reversible=reversible, **dropout)
    expected = step(case, case.whole)
    for chunk_size, every in itertools.product(CHUNKS, (None, 5, "auto")):
        options = {"chunk_size": chunk_size, "checkpoint_every": every, "gradients": gradients}
        actual = step(case, lambda options=options: case.stream(**options))
        assert_same(actual, expected)
        assert_equal(actual.random, expected.random)


@kinds
def test_reversible_lazy_and_checkpoints_change_no_bit(kind: type[Rnn]) -> None:
    case = make(kind, 2)
    expected = step(case, lambda: case.stream(chunk_size=5))
    for reversible, gradients, every in itertools.product(
        (True, False), ("eager", "lazy"), (None, 10, "auto")
    ):
        case.rnn.reversible = reversible
        options = {"gradients": gradients, "checkpoint_every": every}
        actual = step(case, lambda options=options: case.stream(chunk_size=5, **options))
        for a, b in zip(
            [actual.loss, *actual.state, *actual.gradients],
            [expected.loss, *expected.state, *expected.gradients],
            strict=True,
        ):
            assert_equal(a, b)


@both_gradients
@pytest.mark.parametrize("every", [None, 8])
def test_head_sees_the_outputs_of_the_module(gradients: str, every: int | None) -> None:
    case = make(RevLSTM, 2)
    step(case, case.whole)
    (output,) = case.head.seen
    case.head.seen.clear()
    step(case, lambda: case.stream(chunk_size=4, checkpoint_every=every, gradients=gradients))
    runs = case.head.seen
    chunks = -(-STEPS // 4)
    if gradients == "lazy":
        assert_equal(torch.cat(runs[:chunks]), output)
        runs = runs[chunks:]
    assert len(runs) == chunks
    assert_equal(torch.cat(runs[::-1]), output)


@both_gradients
@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("reversible", [True, False])
def test_modules_of_different_sizes(gradients: str, between: bool, reversible: bool) -> None:
    def layer(kind: type[Rnn], inputs: int, hidden: int, layers: int = 1) -> Rnn:
        return kind(inputs, hidden, layers, reversible=reversible)

    rnns = [layer(RevGRU, WIDTH, 10), layer(RevLSTM, 10, 4, 2), layer(RevGRU, 4, HIDDEN)]
    sequence: list[nn.Module] = list(rnns)
    if between:
        sequence = [rnns[0], VariationalDropout(0.4), rnns[1], VariationalDropout(0.3), rnns[2]]
    case = make(RevGRU)
    case.rnn = nn.ModuleList(sequence)
    case.state = [start(rnns[0]), None, start(rnns[2])]
    expected = step(case, case.whole)
    for options in ({"chunk_size": 7}, {"checkpoint_every": 6}, {}):
        actual = step(case, lambda options=options: case.stream(gradients=gradients, **options))
        assert_same(actual, expected)
        assert_equal(actual.random, expected.random)
    for rnn in rnns:
        assert len(rnn.tape_report().layers) == rnn.num_layers


def test_sequence_of_one_returns_a_list() -> None:
    case = make(RevLSTM)
    case.rnn, state = [case.rnn], case.state
    case.state = None
    _, single = revrnn.stream(
        case.rnn[0], case.x, stem=case.stem.eval(), head=case.head, targets=case.y,
        context=case.context,
    )  # fmt: skip
    _, listed = case.stream()
    assert isinstance(listed, list)
    assert isinstance(listed[0], tuple)
    for a, b in zip(flat(listed), flat(single), strict=True):
        assert_equal(a, b)
    case.state = [state]
    case.stream()


@both_gradients
def test_one_module_twice_in_the_sequence(gradients: str) -> None:
    case = make(RevGRU)
    shared = RevGRU(HIDDEN, HIDDEN)
    case.rnn = [case.rnn, shared, VariationalDropout(0.2), shared]
    case.state = None
    expected = step(case, case.whole)
    assert_same(step(case, lambda: case.stream(chunk_size=6, gradients=gradients)), expected)


@both_gradients
def test_one_tensor_in_several_roles(gradients: str) -> None:
    rnn = RevGRU(4, 4)
    x = torch.randn(9, 2, 4, requires_grad=True)

    def stem(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def head(h: Tensor, whole: Tensor) -> Tensor:
        return (h.sum(-1) * whole.sum()).sum() + (h @ rnn.weight_hh_l0[:4, :2]).sum()

    leaves = [x, *rnn.parameters()]
    expected = torch.autograd.grad(head(rnn(x * x)[0], x), leaves)
    loss, _ = revrnn.stream(
        rnn, (x, x), stem=stem, head=head, context=x, chunk_size=9, gradients=gradients
    )
    assert_near(torch.autograd.grad(loss, leaves), expected)


@both_gradients
def test_without_stem_inputs_get_gradients(gradients: str) -> None:
    rnn = RevLSTM(4, 6, bias=False)
    x = torch.randn(13, 2, 4, requires_grad=True)
    leaves = [x, *rnn.parameters()]
    output, _ = rnn(x)
    expected = torch.autograd.grad(output.square().sum(), leaves)
    for chunk_size in (None, 5):
        loss, _ = revrnn.stream(
            rnn, x, head=lambda h: h.square().sum(), chunk_size=chunk_size, gradients=gradients
        )
        assert_near(torch.autograd.grad(loss, leaves), expected)
    output, _ = rnn(x * 2)
    expected = torch.autograd.grad(output.square().sum(), leaves)
    loss, _ = revrnn.stream(rnn, x * 2, head=lambda h: h.square().sum(), gradients=gradients)
    assert_near(torch.autograd.grad(loss, leaves), expected)


@both_gradients
@pytest.mark.parametrize("with_stem", [True, False])
def test_inputs_in_any_layout_get_gradients(gradients: str, with_stem: bool) -> None:
    """Also leaves that are views: slices of those do not say that they require gradients."""
    rnn = RevLSTM(4, 6)
    stem = (lambda x: (x.permute(2, 0, 1) * 2).permute(1, 2, 0)) if with_stem else None
    batch_first = torch.randn(3, 9, 4, requires_grad=True)
    for leaf, x in (
        (batch_first, batch_first.transpose(0, 1)),
        *[
            (view, view)
            for view in (
                torch.randn(3, 9, 4).transpose(0, 1).requires_grad_(),
                torch.randn(27, 4).view(9, 3, 4).requires_grad_(),
                torch.randn(1, 3, 4).expand(9, 3, 4).requires_grad_(),
            )
        ],
    ):
        leaves = [leaf, *rnn.parameters()]
        output, _ = rnn(stem(x) if stem else x)
        expected = torch.autograd.grad(output.square().sum(), leaves)
        for chunk_size in (1, 4, 9, 20, None):
            loss, _ = revrnn.stream(
                rnn, x, stem=stem, head=lambda h: h.square().sum(), chunk_size=chunk_size,
                gradients=gradients,
            )  # fmt: skip
            assert_near(torch.autograd.grad(loss, leaves), expected)


@both_gradients
def test_tuples_of_inputs_and_targets(gradients: str) -> None:
    case = make(RevGRU)
    features = torch.randn(STEPS, BATCH, WIDTH, requires_grad=True)
    weights = torch.rand(STEPS, BATCH)
    per_step = torch.rand(STEPS)
    embedding = case.stem

    def stem(words: Tensor, features: Tensor) -> Tensor:
        return embedding(words) + features

    def head(h: Tensor, y: Tensor, weight: Tensor, per_step: Tensor, a: Tensor, b: Tensor):
        logits = h[..., :WIDTH] @ a + b
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return (loss.view_as(weight) * weight * per_step[:, None]).sum()

    a, b = torch.randn(WIDTH, WORDS, requires_grad=True), torch.randn(WORDS, requires_grad=True)
    leaves = [features, a, b, *case.rnn.parameters(), *embedding.parameters()]
    torch.manual_seed(1)
    output, _ = case.rnn(stem(case.x, features))
    expected = torch.autograd.grad(head(output, case.y, weights, per_step, a, b), leaves)
    torch.manual_seed(1)
    loss, _ = revrnn.stream(
        case.rnn,
        (case.x, features),
        stem=stem,
        head=head,
        targets=[case.y, weights, per_step],
        context=(a, b),
        chunk_size=5,
        gradients=gradients,
    )
    assert_near(torch.autograd.grad(loss, leaves), expected)


@both_gradients
def test_frozen_parameters(gradients: str) -> None:
    case = make(RevLSTM)
    case.rnn.weight_ih_l0.requires_grad_(False)
    case.rnn.bias_l0.requires_grad_(False)
    case.head.linear.requires_grad_(False)
    case.context.requires_grad_(False)
    expected = step(case, case.whole)
    assert_same(step(case, lambda: case.stream(chunk_size=6, gradients=gradients)), expected)
    case.stem.requires_grad_(False)
    case.rnn.requires_grad_(False)
    case.state = None
    case.context.requires_grad_(True)
    expected = step(case, case.whole)
    assert_same(step(case, lambda: case.stream(chunk_size=6, gradients=gradients)), expected)


@both_gradients
def test_nothing_to_learn(gradients: str) -> None:
    case = make(RevGRU)
    for leaf in case.leaves():
        leaf.requires_grad_(False)
    (loss, _), state = case.stream(gradients=gradients)
    assert not loss.requires_grad
    assert not state.requires_grad
    loss, _ = revrnn.stream(case.rnn, torch.randn(5, 2, WIDTH), head=torch.sum, gradients=gradients)
    assert not loss.requires_grad


@both_gradients
def test_head_that_needs_no_outputs(gradients: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    rnn = RevGRU(4, 4)
    loss, _ = revrnn.stream(
        rnn, torch.randn(6, 1, 4), head=lambda h: len(h) * weight.sum(), chunk_size=2,
        gradients=gradients,
    )  # fmt: skip
    loss.backward()
    assert_equal(weight.grad, torch.full((3,), 6.0))
    assert all(p.grad is None or not p.grad.any() for p in rnn.parameters())


def test_lazy_gradients_of_scalars_and_state() -> None:
    case = make(RevLSTM, 2)
    case.stem.eval()
    linear = nn.Linear(HIDDEN, 1)
    case.extra = [linear]

    def head(h: Tensor, y: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return linear(h).square().sum(), h.sigmoid().sum() * context.mean(), y.sum(), h.max()

    case.head = head
    leaves = case.leaves()

    def total(results: tuple[Any, Any]) -> Tensor:
        (a, b, _, _), (h, c) = results
        return 2 * a - 3 * b + h.square().sum() + c[0].sin().sum()

    expected = torch.autograd.grad(total(case.whole()), leaves)
    for options in ({"chunk_size": 7}, {"chunk_size": 3, "checkpoint_every": 12}):
        results = case.stream(gradients="lazy", **options)
        assert_near(torch.autograd.grad(total(results), leaves), expected)
    # Only the state: the scalars get no gradient at all.
    expected = torch.autograd.grad(case.whole()[1][1].sum(), leaves, allow_unused=True)
    found = torch.autograd.grad(
        case.stream(gradients="lazy")[1][1].sum(), leaves, allow_unused=True
    )
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
    assert_near([a for a, _ in pairs], [b for _, b in pairs])


def test_metrics_are_detached() -> None:
    case = make(RevGRU)
    case.head = lambda h, y, c: (h.sum(), h.square().sum(), (y > 5).sum(), (y > 5).any(), c.sum())
    for gradients in ("eager", "lazy"):
        (loss, square, count, some, total), state = case.stream(chunk_size=1, gradients=gradients)
        assert loss.requires_grad
        assert square.requires_grad == state.requires_grad == (gradients == "lazy")
        assert total.requires_grad == (gradients == "lazy")
        assert (count.dtype, some.dtype) == (torch.int64, torch.int64)
        assert int(count) == int((case.y > 5).sum())
        assert int(some) == int((case.y > 5).any(1).sum())
    case.head = lambda h, y, c: (h.sum(), h.detach().sum())
    (_, detached), _ = case.stream(gradients="lazy")
    assert not detached.requires_grad


@both_gradients
def test_eval_and_no_grad(gradients: str) -> None:
    case = make(RevLSTM, 2, head_p=0.4, weight_dropout=0.5)
    for module in (case.stem, case.head, case.rnn):
        module.eval()
    expected = step(case, case.whole)
    for chunk_size in CHUNKS:
        options = {"chunk_size": chunk_size, "gradients": gradients}
        assert_same(step(case, lambda options=options: case.stream(**options)), expected)
    del case.rnn._report
    case.rnn._report = None
    for context in (torch.no_grad, torch.inference_mode):
        case.head.seen.clear()
        with context():
            (loss, _), state = case.stream(chunk_size=7, gradients=gradients)
        assert len(case.head.seen) == 5
        assert not loss.requires_grad
        assert_near([loss.clone()], [expected.loss])
        for a, b in zip(flat(state), expected.state, strict=True):
            assert_equal(a.clone(), b)
    with pytest.raises(RuntimeError, match="no tape"):
        case.rnn.tape_report()


@pytest.mark.parametrize("tape", ["paper", "entropy"])
@both_gradients
def test_tapes(tape: Any, gradients: str) -> None:
    case = make(RevGRU, tape=tape)
    expected = step(case, case.whole)
    for reversible in (True, False):
        case.rnn.reversible = reversible
        actual = step(case, lambda: case.stream(chunk_size=8, gradients=gradients))
        assert_same(actual, expected)


@both_gradients
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, gradients: str) -> None:
    tolerance = 1e-5 if dtype == torch.float64 else 0.03
    rnn = RevLSTM(4, 6, 2, dtype=dtype)
    linear = nn.Linear(6, 1, dtype=dtype)
    x = torch.randn(12, 2, 4, dtype=dtype, requires_grad=True)
    leaves = [x, *rnn.parameters(), *linear.parameters()]
    output, (h, c) = rnn(x)
    expected = torch.autograd.grad(linear(output).float().square().sum(), leaves)
    loss, (h2, c2) = revrnn.stream(
        rnn, x, head=lambda h: linear(h).float().square().sum(), chunk_size=5, gradients=gradients
    )
    assert_near(torch.autograd.grad(loss, leaves), expected, tolerance)
    assert_equal(h2.detach(), h.detach())
    assert_equal(c2.detach(), c.detach())


def test_sums_do_not_round_to_the_dtype_of_a_weight() -> None:
    """400 gradients of 1: bfloat16 cannot count beyond 256."""
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    loss, _ = revrnn.stream(
        RevGRU(2, 2), torch.randn(400, 1, 2), head=lambda h: weight.clone(), chunk_size=1
    )
    loss.backward()
    assert float(loss.detach()) == float(weight.grad) == 400


@both_gradients
def test_sparse_gradients(gradients: str) -> None:
    for tied in (False, True):
        embedding = nn.Embedding(WORDS, WIDTH, sparse=True)
        case = make(RevGRU)
        case.stem, case.head = embedding, Head(embedding)
        if not tied:
            case.head.embedding = nn.Embedding(WORDS, WIDTH)
        (loss, _), _ = case.whole()
        (expected,) = torch.autograd.grad(loss, embedding.weight)
        (loss, _), _ = case.stream(chunk_size=7, gradients=gradients)
        loss.backward()
        assert embedding.weight.grad.is_sparse == (not tied)
        assert_near([embedding.weight.grad.to_dense()], [expected.to_dense()])


# -- callables ------------------------------------------------------------------------------------


@both_gradients
def test_any_callable(gradients: str) -> None:
    case = make(RevGRU)
    expected = step(case, case.whole)
    stem, head = case.stem, case.head

    class Owner:
        def stem(self, x: Tensor) -> Tensor:
            return stem(x)

    def scaled(scale: float, h: Tensor, y: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        loss, hits = head(h, y, context)
        return scale * loss, hits

    case.extra = [stem, head]
    leaves = case.leaves()
    for new_stem, new_head, scale in (
        (lambda x: stem(x), lambda h, y, c: head(h, y, c)[0], 1.0),
        (Owner().stem, functools.partial(scaled, 2.0), 2.0),
        (stem.forward, head.forward, 1.0),
    ):
        torch.manual_seed(7)
        losses, _ = revrnn.stream(
            case.rnn, case.x, case.state, stem=new_stem, head=new_head, targets=case.y,
            context=case.context, chunk_size=6, gradients=gradients,
        )  # fmt: skip
        found = torch.autograd.grad(first(losses) / scale, leaves)
        assert_near(found, expected.gradients)


@both_gradients
def test_history_of_a_closure_is_explained(gradients: str) -> None:
    weight = torch.randn(4, requires_grad=True)
    outside = weight.exp()

    def step() -> None:
        loss, _ = revrnn.stream(
            RevGRU(4, 4), torch.randn(6, 1, 4), head=lambda h: (h * outside).sum(), chunk_size=2,
            gradients=gradients,
        )  # fmt: skip
        loss.backward()

    with pytest.raises(RuntimeError, match="a second time") as caught:
        step()
    assert "Pass it as context" in caught.value.__notes__[0]
    outside = weight.exp()
    loss, _ = revrnn.stream(
        RevGRU(4, 4), torch.randn(6, 1, 4), head=lambda h, w: (h * w).sum(), context=outside,
        chunk_size=2, gradients=gradients,
    )  # fmt: skip
    loss.backward()
    assert weight.grad is not None


# -- randomness -----------------------------------------------------------------------------------


@both_gradients
@pytest.mark.parametrize("every", [None, 12])
def test_dropout_repeats(gradients: str, every: int | None) -> None:
    """As if stem and head had run once a piece, and all of it were one graph."""
    case = make(RevGRU, head_p=0.5)
    case.stem.append(nn.Dropout(0.4))
    expected = step(case, lambda: draw_by_piece(case, 4, in_turns=gradients == "lazy"))
    options = {"chunk_size": 4, "checkpoint_every": every, "gradients": gradients}
    actual = step(case, lambda: case.stream(**options))
    assert_same(actual, expected)
    assert_equal(actual.random, expected.random)


def draw_by_piece(case: Case, size: int, *, in_turns: bool) -> tuple[Any, Any]:
    """Draws for stem and head of a piece in turns; or those of the stem, then those of the head
    from the last piece to the first. With these masks, everything whole."""
    embedding, variational, plain = case.stem
    head_p, case.head.drop.p = case.head.drop.p, 0.0
    words, kept = embedding._draw(), variational.draw(torch.empty(BATCH, WIDTH))
    lengths = [min(size, STEPS - i) for i in range(0, STEPS, size)]
    stem, head = [], []

    def draw(p: float, length: int, width: int) -> Tensor:
        return functional.dropout(torch.ones(length, BATCH, width), p)

    for length in lengths:
        stem.append(draw(plain.p, length, WIDTH))
        if in_turns:
            head.append(draw(head_p, length, HIDDEN))
    if not in_turns:
        head = [draw(head_p, length, HIDDEN) for length in reversed(lengths)][::-1]
    x = functional.embedding(case.x, embedding.weight) * words[case.x].unsqueeze(-1) * kept
    output, state = case.rnn(x * torch.cat(stem), case.state)
    result = case.head(output * torch.cat(head), case.y, case.context)
    case.head.drop.p = head_p
    return result, state


@pytest.mark.parametrize("where", ["stem", "head"])
@both_gradients
def test_variational_masks_span_the_sequence(where: str, gradients: str) -> None:
    """With the weights of everything else out of the way, the mask itself is seen."""
    drop = nn.ModuleList([VariationalDropout(0.5), nn.Dropout(0.5), VariationalDropout(0.5)])
    seen: dict[int, list[Tensor]] = {}

    def masked(x: Tensor) -> Tensor:
        ones = torch.ones_like(x)
        first, plain, second, again = drop[0](ones), drop[1](ones), drop[2](ones), drop[0](ones)
        assert not torch.equal(first, second)
        assert not torch.equal(first, again)
        key = len(x)
        for value in (first, second, again):
            assert_equal(value, value[:1].expand_as(value))
        seen.setdefault(0, []).append(torch.stack([first[0], second[0], again[0]]))
        seen.setdefault(key + 100, []).append(plain)
        return x * first * plain

    rnn = RevGRU(16, 16)
    x = torch.randn(11, 2, 16, requires_grad=True)
    loss, _ = revrnn.stream(
        rnn,
        x,
        stem=masked if where == "stem" else None,
        head=(lambda h: masked(h).sum()) if where == "head" else torch.sum,
        chunk_size=4,
        gradients=gradients,
    )
    loss.backward()
    masks = seen[0]
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert len(masks) == (3 if where == "head" and gradients == "eager" else 6)
    if len(masks) == 6:
        (a, b) = seen[103]  # the last piece, of three steps: nn.Dropout repeated
        assert_equal(a, b)
    before = masks[0]
    seen.clear()
    revrnn.stream(rnn, x, stem=masked, head=torch.sum, chunk_size=4)
    assert not torch.equal(seen[0][0], before)


@both_gradients
def test_random_parametrization_is_read_once(gradients: str) -> None:
    class Noise(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + 0.1 * torch.randn_like(weight)

    case = make(RevGRU, 2)
    for name in ("weight_ih_l0", "weight_hh_l1"):
        nn.utils.parametrize.register_parametrization(case.rnn, name, Noise())
    expected = step(case, case.whole)
    actual = step(case, lambda: case.stream(gradients=gradients))
    assert_same(actual, expected)
    assert_equal(actual.random, expected.random)


def test_backward_leaves_the_generator_alone() -> None:
    case = make(RevGRU, head_p=0.5)
    (loss, _), _ = case.stream(gradients="lazy", chunk_size=5)
    before = torch.get_rng_state()
    loss.backward()
    assert_equal(torch.get_rng_state(), before)


# -- ordinary autograd ----------------------------------------------------------------------------


@both_gradients
def test_backward_hooks_and_accumulation(gradients: str) -> None:
    case = make(RevLSTM, 2)
    expected = step(case, case.whole)
    leaves = case.leaves()
    fired: list[tuple[str, int]] = []
    handles = []
    for index, leaf in enumerate(leaves):
        handles.append(leaf.register_hook(lambda g, i=index: fired.append(("grad", i))))
        handles.append(leaf.register_hook(lambda g: 2 * g))
        handles.append(
            leaf.register_post_accumulate_grad_hook(lambda p, i=index: fired.append(("post", i)))
        )
    torch.manual_seed(7)
    (loss, _), _ = case.stream(chunk_size=6, gradients=gradients)
    assert not fired
    loss.backward()
    assert sorted(fired) == sorted((k, i) for k in ("grad", "post") for i in range(len(leaves)))
    assert_near([leaf.grad for leaf in leaves], [2 * g for g in expected.gradients])
    for handle in handles:
        handle.remove()
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(7)
    (loss, _), _ = case.stream(chunk_size=6, gradients=gradients)
    (3 * loss).backward(retain_graph=True)
    assert_near([leaf.grad for leaf in leaves], [3 * g for g in expected.gradients])
    loss.backward()
    torch.manual_seed(7)
    (loss, _), _ = case.stream(checkpoint_every=9, gradients=gradients)
    (-loss).backward()
    assert_near([leaf.grad for leaf in leaves], [3 * g for g in expected.gradients])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    (loss, _), _ = case.stream(gradients=gradients)
    found = torch.autograd.grad(loss.square(), leaves, create_graph=True)
    total = sum(gradient.sum() for gradient in found)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        total.backward()


@both_gradients
def test_a_graph_used_again_is_right_or_an_error(gradients: str) -> None:
    """Eager gradients are scaled in place by the last backward pass, and only by that."""
    case = make(RevGRU)
    leaves = case.leaves()
    expected = step(case, case.whole).gradients

    def run() -> Tensor:
        torch.manual_seed(7)
        return first(case.stream(chunk_size=6, gradients=gradients)[0])

    loss = run()
    some = torch.autograd.grad(3 * loss, leaves[:2], retain_graph=True)
    all_ = torch.autograd.grad(2 * loss, leaves, create_graph=True)
    rest = torch.autograd.grad(5 * loss, leaves[2:])
    assert_near(some, [3 * g for g in expected[:2]])
    assert_near(all_, [2 * g for g in expected])
    assert_near(rest, [5 * g for g in expected[2:]])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves[:1])
    # Hooks that change gradients in place change nothing but what they were given.
    handles = [leaf.register_hook(lambda g: g.mul_(2)) for leaf in leaves]
    loss = run()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_near([leaf.grad for leaf in leaves], [4 * g for g in expected])
    for handle in handles:
        handle.remove()
    # What is saved may be kept elsewhere, and be the same tensor each time.
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        loss = run()
    for factor, retain in ((3, True), (5, False)):
        found = torch.autograd.grad(factor * loss, leaves, retain_graph=retain)
        assert_near(found, [factor * g for g in expected])


@both_gradients
@pytest.mark.parametrize("every", [None, 8])
def test_how_often_stem_and_head_run(gradients: str, every: int | None) -> None:
    case = make(RevGRU)
    stem, head = case.stem, case.head = Counting(case.stem), Counting(case.head)
    (loss, _), _ = case.stream(chunk_size=4, checkpoint_every=every, gradients=gradients)
    chunks = 8
    rebuilt = 6 if every else 0  # all but the last part
    eager = gradients == "eager"
    assert stem.calls == (2 * chunks + rebuilt if eager else chunks)
    assert head.calls == chunks
    loss.backward()
    assert stem.calls == 2 * chunks + rebuilt
    assert head.calls == (chunks if eager else 2 * chunks)


@both_gradients
def test_nested_streams(gradients: str) -> None:
    """A head that streams a model of its own."""
    outer, inner = RevGRU(4, 6), RevGRU(6, 4)
    drop, top = VariationalDropout(0.5), VariationalDropout(0.5)

    def head(h: Tensor) -> Tensor:
        h = top(h)
        loss, _ = revrnn.stream(inner, h, stem=drop, head=lambda o: o.square().sum(), chunk_size=2)
        return loss + top(h).sum()

    def whole(h: Tensor) -> Tensor:
        h = top(h)
        output, _ = inner(drop(h))
        return output.square().sum() + top(h).sum()

    x = torch.randn(5, 2, 4, requires_grad=True)
    leaves = [x, *outer.parameters(), *inner.parameters()]
    torch.manual_seed(3)
    expected = torch.autograd.grad(whole(outer(x)[0]), leaves)
    torch.manual_seed(3)
    loss, _ = revrnn.stream(outer, x, head=head, gradients=gradients)
    assert_near(torch.autograd.grad(loss, leaves), expected)


# -- autocast, buffers ----------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("given_state", [True, False])
def test_autocast(kind: type[Rnn], given_state: bool) -> None:
    case = make(kind, 2)
    linear = nn.Linear(WIDTH, WIDTH)  # its weight is converted, and could be cached
    case.stem.append(linear)
    if not given_state:
        case.state = None
    leaves = case.leaves()

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    torch.manual_seed(7)
    with autocast():
        (loss, _), state = case.whole()
        (output,) = case.head.seen
    expected = torch.autograd.grad(loss, leaves)
    found = {}
    for gradients, inside in (("eager", False), ("eager", True), ("lazy", False), ("lazy", True)):
        case.head.seen.clear()
        torch.manual_seed(7)
        with autocast():
            (actual, _), finals = case.stream(chunk_size=10, gradients=gradients)
            if inside:
                found[gradients, inside] = torch.autograd.grad(actual, leaves)
        if not inside:
            found[gradients, inside] = torch.autograd.grad(actual, leaves)
        assert_near([actual.detach()], [loss.detach()], 1e-2)
        for a, b in zip(flat(finals), flat(state), strict=True):
            assert_equal(a.detach(), b.detach())
        chunks = case.head.seen[:3]
        assert_equal(torch.cat(chunks if gradients == "lazy" else chunks[::-1]), output)
    for gradients in found.values():
        assert_near(gradients, expected, 0.05)
        assert all(torch.equal(a, b) for a, b in zip(gradients, found["eager", False], strict=True))


@both_gradients
def test_batch_norm_is_of_a_chunk_and_updates_every_run(gradients: str) -> None:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(0, 1)).view_as(x)

    stem, norm = Norm(4), Norm(6)
    rnn = RevGRU(4, 6)
    x = torch.randn(12, 2, 4)
    loss, _ = revrnn.stream(
        rnn, x, stem=stem, head=lambda h: norm(h).square().sum(), chunk_size=4, gradients=gradients
    )
    loss.backward()
    runs = 1 if gradients == "eager" else 2
    assert int(norm.norm.num_batches_tracked) == 3 * runs
    assert int(stem.norm.num_batches_tracked) == 6
    # In evaluation the statistics are constants, and all is as if run whole.
    stem.eval(), norm.eval()
    leaves = [*stem.parameters(), *norm.parameters(), *rnn.parameters()]
    expected = torch.autograd.grad(norm(rnn(stem(x))[0]).square().sum(), leaves)
    loss, _ = revrnn.stream(
        rnn, x, stem=stem, head=lambda h: norm(h).square().sum(), chunk_size=4, gradients=gradients
    )
    assert_near(torch.autograd.grad(loss, leaves), expected)


# -- faults ---------------------------------------------------------------------------------------


class CrashError(Exception):
    pass


@both_gradients
@pytest.mark.parametrize("where", ["stem", "head"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("every", [None, 8])
def test_a_crash_in_user_code(gradients: str, where: str, phase: str, every: int | None) -> None:
    case = make(RevLSTM, head_p=0.3)
    expected = step(case, lambda: case.stream(chunk_size=4, gradients=gradients))
    fired: list[int] = []
    for leaf in case.leaves():
        leaf.register_hook(lambda g: fired.append(1))
    good_stem, good_head = case.stem, case.head
    left = 8 + 3 if phase == "backward" else 3
    if gradients == "eager" and where == "head":
        left = 3
    counter = iter(range(1000))

    def crash_here() -> None:
        if next(counter) == left:
            raise CrashError("mine")

    def bad_stem(x: Tensor) -> Tensor:
        x = good_stem(x)
        crash_here()
        return x

    def bad_head(*args: Tensor) -> tuple[Tensor, Tensor]:
        result = good_head(*args)
        crash_here()
        return result

    case.extra = [good_stem, good_head]
    if where == "stem":
        case.stem = bad_stem
    else:
        case.head = bad_head
    before: list[Tensor] = []

    def train() -> None:
        (loss, _), _ = case.stream(chunk_size=4, checkpoint_every=every, gradients=gradients)
        before.append(torch.get_rng_state())
        loss.backward()

    with pytest.raises(CrashError, match="mine") as caught:
        train()
    assert len(before) == (gradients == "lazy" and phase == "backward")
    for state in before:
        assert_equal(torch.get_rng_state(), state)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == [f"bad_{where}", "crash_here"]
    assert not fired
    assert all(leaf.grad is None for leaf in case.leaves())
    case.stem, case.head = good_stem, good_head
    actual = step(case, lambda: case.stream(chunk_size=4, gradients=gradients))
    assert_same(actual, expected)
    assert len(fired) == len(case.leaves())


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize(
    "change", ["rnn", "frozen rnn", "embedding", "linear", "frozen linear", "x", "y", "context"]
)
def test_changes_in_place_before_a_lazy_backward(change: str, reversible: bool) -> None:
    case = make(RevGRU, reversible=reversible)
    if change == "frozen rnn":
        case.rnn.weight_hh_l0.requires_grad_(False)
    if change == "frozen linear":
        case.head.linear.weight.requires_grad_(False)
    (loss, _), _ = case.stream(gradients="lazy", chunk_size=8)
    changed = {
        "rnn": case.rnn.bias_l0,
        "frozen rnn": case.rnn.weight_hh_l0,
        "embedding": case.head.embedding.weight,
        "linear": case.head.linear.weight,
        "frozen linear": case.head.linear.weight,
        "x": case.x,
        "y": case.y,
        "context": case.context,
    }[change]
    with torch.no_grad():
        changed[0] += 1
    with pytest.raises(ReversalError, match="changed in place"):
        loss.backward()
    assert all(leaf.grad is None for leaf in case.leaves())


@pytest.mark.parametrize("every", [None, 8])
def test_changes_that_autograd_cannot_see(every: int | None) -> None:
    case = make(RevLSTM)
    (loss, _), _ = case.stream(gradients="lazy", chunk_size=4, checkpoint_every=every)
    case.rnn.weight_hh_l0.data += 0.5
    with pytest.raises(ReversalError, match="changed between forward and backward"):
        loss.backward()
    step(case, case.stream)


def test_eager_gradients_do_not_mind_changes() -> None:
    case = make(RevGRU)
    expected = step(case, case.stream)
    torch.manual_seed(7)
    (loss, _), _ = case.stream()
    with torch.no_grad():
        for leaf in case.leaves():
            leaf.zero_()
    assert_near(torch.autograd.grad(loss, case.leaves()), expected.gradients)


# -- memory ---------------------------------------------------------------------------------------


def memory_case(steps: int, kind: type[Rnn] = RevGRU) -> Case:
    case = make(kind)
    case.rnn = kind(WIDTH, 32, max_forget_bits=3)
    case.head = Head(case.head.embedding, 32)
    case.head.forward = lambda h, y, c: functional.cross_entropy(
        (case.head.linear(h) @ case.head.embedding.weight.t()).flatten(0, 1),
        y.flatten(),
        reduction="sum",
    )
    case.x, case.y = torch.randint(WORDS, (2, steps, BATCH)).unbind(0)
    case.state = None
    return case


@both_gradients
def test_memory_grows_by_the_tape_alone(gradients: str) -> None:
    peaks, tapes = [], []
    for steps in (64, 256):
        case = memory_case(steps)
        with live_bytes() as memory:
            loss, _ = case.stream(chunk_size=8, gradients=gradients)
            loss.backward()
        peaks.append(memory.peak)
        tapes.append(case.rnn.tape_report().held_bits // 8)
    # The working region of the tape, and its making compact, take some more.
    assert peaks[1] - peaks[0] < 3 * (tapes[1] - tapes[0])
    assert peaks[1] - peaks[0] < (256 - 64) * BATCH * 32 * 4 / 5  # a fifth of the hidden states


def test_memory_of_checkpoints_grows_by_the_root() -> None:
    held = []
    for steps in (256, 1024):
        case = memory_case(steps)
        loss, _ = case.stream(chunk_size=16, checkpoint_every="auto", gradients="lazy")
        held.append(case.rnn.tape_report().held_bits)
        loss.backward()
    assert held[1] < 3 * held[0]
    case.rnn.tape_report()
    plain = memory_case(1024)
    plain.stream(chunk_size=16)
    assert held[1] < 0.8 * plain.rnn.tape_report().held_bits


def test_auto_keeps_few_records_without_a_tape() -> None:
    """Records are many times a state: segments are short."""

    def peak(steps: int, every: Any) -> int:
        case = memory_case(steps)
        case.rnn.reversible = False
        with live_bytes() as memory:
            case.stream(chunk_size=4, checkpoint_every=every)
        assert case.rnn.tape_report().total.tape_bits == 0
        return memory.peak

    base = peak(4, None)
    assert peak(256, "auto") - base < (peak(256, 256) - base) / 8


def test_no_tape_outlives_an_eager_call() -> None:
    case = memory_case(128)
    gc.collect()
    gc.disable()
    try:
        with live_bytes() as memory:
            loss, state = case.stream(chunk_size=8)
            gradients = sum(q.numel() * 4 for q in case.leaves() if q is not case.context)
            small = 4 * (state.numel() + 8)
            assert memory.now <= gradients + small
            loss, state = case.stream(chunk_size=8, gradients="lazy")
            tape = case.rnn.tape_report().held_bits // 8
            assert memory.now > tape
            loss.backward()
            held = sum(q.grad.numel() * 4 for q in case.leaves() if q.grad is not None)
            # Not collected: there are no cycles.
            del loss, state
            assert memory.now <= held + 64
    finally:
        gc.enable()


def test_delivery_makes_no_second_copy_of_the_gradients() -> None:
    case = memory_case(32)
    with live_bytes() as memory:
        loss, _ = case.stream()
        before = memory.now
        memory.reset_peak()
        (loss / 7).backward()
        assert memory.peak - before <= 16
        assert all(leaf.grad is not None for leaf in case.modules[0].parameters())


@pytest.mark.parametrize("every", [None, 7, "auto"])
@both_gradients
def test_tape_report(every: Any, gradients: str) -> None:
    case = make(RevLSTM, 2)
    case.stream(chunk_size=4, checkpoint_every=every, gradients=gradients)
    report = case.rnn.tape_report()
    assert [layer.name for layer in report.layers] == ["layer 0", "layer 1"]
    assert report.naive_bits == 2 * 32 * STEPS * BATCH * 2 * HIDDEN
    assert report.held_bits > 0
    checkpoints = -(-STEPS // 7) - 1 if every == 7 else 0
    assert report.layers[0].stored_bits == checkpoints * BATCH * 32 * (2 * HIDDEN + 16)
    str(report)


def test_code_of_the_document() -> None:
    text = (Path(__file__).parents[1] / "docs" / "streaming.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    assert names["loss"].requires_grad


# -- odd uses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 5, 48, 100, 199, 200, 480, "auto"])
def test_checkpoints_do_not_matter_where_nothing_is_learnt(every: int | str) -> None:
    rnn, x = RevGRU(WIDTH, HIDDEN), torch.randn(200, 2, WIDTH)
    with torch.no_grad():
        expected, _ = revrnn.stream(rnn, x, head=lambda out: out.sum())
        found, _ = revrnn.stream(rnn, x, head=lambda out: out.sum(), checkpoint_every=every)
    assert torch.equal(found, expected)


def test_sums_beyond_16_bits_are_scaled_first() -> None:
    rnn, linear = RevGRU(WIDTH, HIDDEN, dtype=torch.float16), nn.Linear(HIDDEN, 1).half()
    x = torch.randn(3000, 20, WIDTH).half()
    loss, _ = revrnn.stream(rnn, x, head=lambda out: (linear(out).float() * 3).sum())
    (loss / x[..., 0].numel()).backward()
    assert linear.bias.grad is not None
    assert linear.bias.grad.dtype == torch.float16
    assert linear.bias.grad.item() == 3.0


@both_gradients
@kinds
def test_final_states_may_be_changed_in_place(kind: type, gradients: str) -> None:
    rnn = kind(WIDTH, HIDDEN)
    loss, state = revrnn.stream(
        rnn, torch.randn(STEPS, BATCH, WIDTH), head=lambda out: out.sum(), gradients=gradients
    )
    for part in state if isinstance(state, tuple) else (state,):
        part[:, 0] = 0
        part.mul_(0.5)
    loss.backward()


def test_the_loss_does_not_hold_what_it_came_from() -> None:
    rnn, x = RevGRU(WIDTH, HIDDEN), torch.randn(STEPS, BATCH, WIDTH, requires_grad=True)
    copy = x * 1.0
    loss, _ = revrnn.stream(rnn, copy, head=lambda out: out.sum())
    seen = weakref.ref(copy)
    del copy
    loss.backward()
    gc.collect()
    assert seen() is None

"""Running user code again: generators, autocast, leaves of a graph, hooks, sums."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from revrnn._replay import Autocast, RandomStates, Sums, leaves


def test_random_numbers_repeat_and_the_generator_is_put_back() -> None:
    states = RandomStates()
    drawn = {}
    for piece in range(3):
        states.note(piece)
        if piece < 2:
            drawn[piece] = torch.rand(3)
    after = torch.get_rng_state()
    for piece in (1, 0, 1):
        with states.replay(piece):
            assert torch.equal(torch.rand(3), drawn[piece])
            torch.rand(100)
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(KeyError), states.replay(0):
        raise KeyError(torch.rand(1))
    assert torch.equal(torch.get_rng_state(), after)


def test_pieces_that_draw_nothing_share_a_state() -> None:
    states = RandomStates()
    for piece in range(5):
        states.note(piece)
    assert len({id(state) for state in states._states.values()}) == 1
    torch.rand(1)
    states.note(5)
    assert len({id(state) for state in states._states.values()}) == 2


def test_autocast_again() -> None:
    with torch.autocast("cpu", torch.float16):
        inside = Autocast.now("cpu", "cpu")
    outside = Autocast.now("cpu")
    assert len(inside.states) == 1
    with inside.again():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        with outside.again():
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        state = Autocast.now("cpu")
        with state.again(), torch.no_grad():
            linear(x)
        with state.again():
            linear(x).sum().backward()
    assert linear.weight.grad is not None


def test_leaves() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    frozen = torch.ones(2)

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.variable = frozen  # not what AccumulateGrad calls by this name
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    with torch.no_grad():
        hidden = c * 2
    outputs = [Odd.apply(a * frozen) + a, b, frozen, hidden.sum()]
    found = leaves(outputs)
    assert {id(leaf) for leaf in found} == {id(a), id(b)}
    deep = a
    for _ in range(5000):
        deep = deep + 1
    assert leaves([deep])[0] is a


def test_sums() -> None:
    a, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    calls: list[Tensor] = []
    a.register_hook(calls.append)
    a.register_hook(lambda gradient: 100 * gradient)
    hooks = list(a._backward_hooks.items())
    sums = Sums()
    for scale in (1.0, 2.0):
        (d_x,) = sums.backward([(a * x).sum()], [torch.tensor(scale)], [x])
        assert torch.equal(d_x, torch.full((2,), scale))
    assert torch.equal(sums.of(a), torch.full((2,), 3.0))
    assert sums.of(x) is None
    assert [tensor is a for tensor, _ in sums.items()] == [True]
    assert not calls
    assert a.grad is None
    assert list(a._backward_hooks.items()) == hooks

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sums.backward([Bad.apply(a).sum()], [torch.tensor(1.0)])
    assert list(a._backward_hooks.items()) == hooks
    a.sum().backward()
    assert len(calls) == 1
    assert torch.equal(a.grad, torch.full((2,), 100.0))


def test_sums_of_dense_and_sparse() -> None:
    dense = torch.ones(3, 2)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2), (3, 2), check_invariants=True
    )
    total = dense + sparse
    for order in ((dense, sparse), (sparse, dense)):
        sums, tensor = Sums(), torch.zeros(3, 2)
        for gradient in order:
            sums.add(tensor, gradient)
        assert torch.equal(sums.of(tensor), total)
    sums.add(other := torch.zeros(3, 2), sparse)
    sums.add(other, sparse)
    assert torch.equal(sums.of(other).to_dense(), 2 * sparse.to_dense())
    assert torch.equal(dense, torch.ones(3, 2))

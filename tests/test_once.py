"""No second derivative and no vectorized backward pass, whatever way they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from revrnn import RevGRU, RevLSTM, stream

T, N, X, H = 5, 2, 3, 4

Loss = Callable[[Tensor], Tensor]


@pytest.fixture(params=["layer", "stored", "eager", "lazy"])
def loss(request: pytest.FixtureRequest) -> tuple[Loss, nn.Module]:
    """A loss of an input (T, N, X), and what it is computed with."""
    torch.manual_seed(0)
    kind = RevGRU if request.param == "eager" else RevLSTM
    model = nn.ModuleList([kind(X, H, reversible=request.param != "stored"), nn.Linear(H, 1)])
    rnn, linear = model

    def head(out: Tensor) -> Tensor:
        value: Tensor = linear(out).square().sum()
        return value

    def plain(x: Tensor) -> Tensor:
        return head(rnn(x)[0])

    def streamed(x: Tensor) -> Tensor:
        value: Tensor = stream(rnn, x, head=head, gradients=request.param, chunk_size=2)[0]
        return value

    return (streamed if request.param in ("eager", "lazy") else plain), model


def given() -> Tensor:
    return torch.randn(T, N, X, generator=torch.Generator().manual_seed(1))


def penalised(loss: Loss) -> Tensor:
    """With a penalty on the gradient of the input."""
    x = given().requires_grad_()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return value + gradient.square().sum()


once = pytest.raises(RuntimeError, match="differentiated only once")


@pytest.mark.parametrize(
    "derive",
    [
        lambda total, weights: total.backward(),
        lambda total, weights: total.backward(inputs=weights),
        lambda total, weights: torch.autograd.grad(total, weights),
        lambda total, weights: torch.autograd.grad(total, weights[:1]),
    ],
    ids=["backward", "inputs", "grad", "grad of one"],
)
def test_a_penalty_on_the_gradient(loss: tuple[Loss, nn.Module], derive: Any) -> None:
    function, model = loss
    with once:
        derive(penalised(function), list(model.parameters()))


def test_products_with_the_hessian(loss: tuple[Loss, nn.Module]) -> None:
    function, _ = loss
    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with once:
            product(function, given(), given())
    with once:
        torch.autograd.functional.jvp(function, given(), given())  # by two backward passes


def test_a_first_derivative_may_be_recorded(loss: tuple[Loss, nn.Module]) -> None:
    function, model = loss
    weights = list(model.parameters())
    x = given().requires_grad_()
    expected = torch.autograd.grad(function(x), [x, *weights])
    found = torch.autograd.grad(function(x), [x, *weights], create_graph=True)
    for one, other in zip(found, expected, strict=True):
        assert one.requires_grad
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of vmap
def test_several_gradients_at_once(loss: tuple[Loss, nn.Module]) -> None:
    function, _ = loss
    x = given().requires_grad_()
    value = function(x)
    with pytest.raises(RuntimeError, match="one gradient at a time: leave out is_grads_batched"):
        torch.autograd.grad(value, x, torch.ones(3), is_grads_batched=True)
    value = function(x)
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.vmap(lambda d: torch.autograd.grad(value, x, d)[0])(torch.ones(3))

"""RevGRUCell and RevLSTMCell, the single steps."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from revrnn import NonFiniteError, RevGRU, RevGRUCell, RevLSTM, RevLSTMCell

kinds = pytest.mark.parametrize(
    ("kind", "layer", "twin"),
    [(RevGRUCell, RevGRU, nn.GRUCell), (RevLSTMCell, RevLSTM, nn.LSTMCell)],
    ids=["RevGRUCell", "RevLSTMCell"],
)

X, H, N = 5, 8, 3


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states(kind: type, *shape: int) -> Any:
    h, c = 0.5 * data(*shape, seed=1), 0.5 * data(*shape, seed=2)
    return h if kind in (RevGRUCell, nn.GRUCell) else (h, c)


def each(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def build(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(X, H, **settings)


def as_layer(cell: Any, layer: Any, **settings: Any) -> Any:
    """The one-layer module with the weights of the cell."""
    module = layer(X, H, **settings)
    module.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    return module


@kinds
@pytest.mark.parametrize("bits", [None, 2])
def test_steps_follow_the_layer(kind: Any, layer: Any, twin: Any, bits: float | None) -> None:
    """But for the lowest bits, which the layer draws from its tape: 2**-13 a step, and what the
    steps after it make of that."""
    cell = build(kind, max_forget_bits=bits)
    module = as_layer(cell, layer, max_forget_bits=bits)
    x = data(6, N, X)
    out, final = module(x)
    state = None
    for step in range(6):
        state = cell(x[step], state)
        bound = 2**-13 * (step + 1) * 2
        torch.testing.assert_close(each(state)[0], out[step], rtol=0, atol=bound)
    for part, expected in zip(each(state), each(final), strict=True):
        torch.testing.assert_close(part, expected[0], rtol=0, atol=2**-10)


@kinds
def test_the_first_step_is_the_layers_to_the_bit(kind: Any, layer: Any, twin: Any) -> None:
    cell = build(kind)
    x, state = data(N, X), states(kind, N, H)
    expected, _ = as_layer(cell, layer)(
        x.unsqueeze(0),
        state.unsqueeze(0) if kind is RevGRUCell else tuple(part.unsqueeze(0) for part in state),
    )
    assert torch.equal(each(cell(x, state))[0], expected[0])


@kinds
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_shapes_are_those_of_torch(
    kind: Any, layer: Any, twin: Any, batched: bool, given: bool
) -> None:
    rows = (N,) if batched else ()
    x, hx = data(*rows, X), states(kind, *rows, H) if given else None
    found, expected = build(kind)(x, hx), build(twin)(x, hx)
    assert type(found) is type(expected)
    assert [part.shape for part in each(found)] == [part.shape for part in each(expected)]


@kinds
def test_gradients_equal_the_layers(kind: Any, layer: Any, twin: Any) -> None:
    cell = build(kind)
    module = as_layer(cell, layer, reversible=False)
    x = data(N, X).requires_grad_()
    inputs = [x, *cell.parameters()]
    found = torch.autograd.grad(sum(part.square().sum() for part in each(cell(x))), inputs)
    _, final = module(x.unsqueeze(0))
    total = sum(part.square().sum() for part in each(final))
    expected = torch.autograd.grad(total, [x, *module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@kinds
def test_gradients_flow_through_many_steps(kind: Any, layer: Any, twin: Any) -> None:
    cell = build(kind)
    state = states(kind, N, H)
    for part in each(state):
        part.requires_grad_()
    first = state
    for step in range(4):
        state = cell(data(N, X, seed=step), state)
    sum(part.sum() for part in each(state)).backward()
    assert all(bool(part.grad.any()) for part in [*each(first), *cell.parameters()])


@kinds
def test_parameters_and_repr(kind: Any, layer: Any, twin: Any) -> None:
    cell = build(kind)
    gates = cell.weight_ih.shape[0]
    assert {name: tuple(part.shape) for name, part in cell.named_parameters()} == {
        "weight_ih": (gates, X),
        "weight_hh": (gates, H // 2),
        "bias": (gates,),
    }
    assert repr(cell) == f"{kind.__name__}(5, 8)"
    bare = build(kind, bias=False, max_forget_bits=3)
    assert repr(bare) == f"{kind.__name__}(5, 8, bias=False, max_forget_bits=3)"
    assert bare.bias is None
    bare(data(N, X))
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        assert torch.equal(each(other(data(N, X)))[0], each(cell(data(N, X)))[0])
    before = cell.weight_hh.clone()
    cell.reset_parameters()
    assert not torch.equal(before, cell.weight_hh)


@kinds
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_results_have_the_dtype_that_torch_returns(
    kind: Any, layer: Any, twin: Any, weights: torch.dtype, given: bool, autocast: bool
) -> None:
    ours, theirs = build(kind).to(weights), build(twin).to(weights)
    x, hx = data(N, X).to(weights), None
    if given:
        hx = states(kind, N, H)
        hx = hx.to(weights) if kind is RevGRUCell else tuple(part.to(weights) for part in hx)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, expected = ours(x, hx), theirs(x, hx)
    assert [part.dtype for part in each(found)] == [part.dtype for part in each(expected)]


@kinds
def test_bad_input(kind: Any, layer: Any, twin: Any) -> None:
    cell = build(kind)
    with pytest.raises(ValueError, match="input must have 1 or 2 dimensions"):
        cell(data(2, N, X))
    with pytest.raises(ValueError, match="input must have input_size = 5 features"):
        cell(data(N, X + 1))
    with pytest.raises(ValueError, match="at least one time step and one batch row"):
        cell(data(0, X))
    name = "hx" if kind is RevGRUCell else "h_0"
    with pytest.raises(ValueError, match=rf"{name} must have shape \(3, 8\), got \(2, 8\)"):
        cell(data(N, X), states(kind, 2, H))
    state = states(kind, N, H)
    wrong = state.int() if kind is RevGRUCell else (state[0].int(), state[1])
    with pytest.raises(ValueError, match=f"{name} must have the dtype of the weights"):
        cell(data(N, X), wrong)
    with pytest.raises(TypeError):
        cell(data(N, X), 3)
    with pytest.raises(NonFiniteError, match=f"{kind.__name__}: a gate of batch row 1"):
        cell(data(N, X).index_fill(0, torch.tensor([1]), torch.inf))
    with pytest.raises(ValueError, match="hidden_size must be even"):
        kind(X, 7)
    with pytest.raises(TypeError, match="bias must be True or False"):
        kind(X, H, 0.5)


@kinds
def test_states_may_be_changed_in_place(kind: Any, layer: Any, twin: Any) -> None:
    """As decoders do, where a sequence is over."""
    cell = build(kind)
    first = cell(data(N, X))
    for part in each(first):
        part[::2] = 0
        part.detach().mul_(2)
    sum(part.sum() for part in each(cell(data(N, X), first))).backward()
    assert all(bool(part.grad.any()) for part in cell.parameters())

"""Truncated backpropagation: what segments hold and carry."""

import pytest
import torch
from torch import Tensor

from revrnn import RevGRU, RevLSTM, VariationalDropout, stream, truncated


def test_segments() -> None:
    x, y = torch.arange(20).view(10, 2), torch.arange(10)
    segments = list(truncated(x, y, length=4))
    assert [segment.first for segment in segments] == [0, 4, 8]
    assert [len(segment.tensors[0]) for segment in segments] == [4, 4, 2]
    for index, whole in enumerate((x, y)):
        assert torch.equal(torch.cat([segment.tensors[index] for segment in segments]), whole)
    assert all(segment.state is None for segment in segments)


@pytest.mark.parametrize("lengths", [[3, 1, 9], (3, 1, 6, 5), iter([3, 1, 6])])
def test_lengths_from_an_iterable(lengths: object) -> None:
    segments = list(truncated(torch.zeros(10), length=lengths))
    assert [len(segment.tensors[0]) for segment in segments] == [3, 1, 6]


def test_an_iterator_is_read_as_far_as_needed() -> None:
    lengths = iter([5, 5, 7])
    list(truncated(torch.zeros(10), length=lengths))
    assert next(lengths) == 7


def test_state_is_carried_and_detached() -> None:
    first = torch.ones(2, requires_grad=True)
    seen = []
    for segment in truncated(torch.zeros(6), length=2, state=[first, (first, None)]):
        seen.append(segment.state)
        assert isinstance(segment.state, list)
        assert isinstance(segment.state[1], tuple)
        assert not segment.state[0].requires_grad
        segment.state = [2 * part if isinstance(part, Tensor) else part for part in segment.state]
        segment.state[0].requires_grad_()
    assert [float(state[0].detach()[0]) for state in seen] == [1, 2, 4]


@pytest.mark.parametrize("gradients", ["eager", "lazy"])
def test_equals_an_explicit_loop(gradients: str) -> None:
    torch.manual_seed(0)
    rnns = [RevGRU(4, 6), VariationalDropout(0.3), RevLSTM(6, 8)]
    parameters = [p for rnn in rnns for p in rnn.parameters()]
    x, y = torch.randn(20, 2, 4), torch.randn(20, 2, 8)

    def head(h: Tensor, y: Tensor) -> Tensor:
        return (h - y).square().sum()

    torch.manual_seed(1)
    for segment in truncated(x, y, length=7):
        inputs, targets = segment.tensors
        loss, segment.state = stream(
            rnns, inputs, segment.state, head=head, targets=targets, chunk_size=3,
            gradients=gradients,
        )  # fmt: skip
        loss.backward()
    found = [p.grad.clone() for p in parameters]
    final = segment.state

    torch.manual_seed(1)
    for p in parameters:
        p.grad = None
    a = b = None
    for low in range(0, 20, 7):
        h, a = rnns[0](x[low : low + 7], a)
        h, b = rnns[2](rnns[1](h), b)
        head(h, y[low : low + 7]).backward()
        a, b = a.detach(), tuple(part.detach() for part in b)
    for p, gradient in zip(parameters, found, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(final[0], a)
    assert all(torch.equal(one, other) for one, other in zip(final[1], b, strict=True))


ERRORS = [
    ((), {"length": 3}, ValueError, "tensors must hold at least one tensor, .* got none"),
    ((torch.zeros(()),), {"length": 3}, ValueError, "tensors must .* got a scalar"),
    (([1, 2],), {"length": 3}, TypeError, "tensors must hold tensors, got list"),
    (
        (torch.zeros(3), torch.zeros(4)),
        {"length": 3},
        ValueError,
        r"tensors must have 3 time steps .* as the first of them has, got shape \(4,\)",
    ),
    ((torch.zeros(3),), {"length": 0}, ValueError, "length must be a positive int, got 0"),
    ((torch.zeros(3),), {"length": 2.0}, TypeError, "length must be a positive int, got 2.0"),
    ((torch.zeros(3),), {"length": None}, TypeError, "length must be a positive int, got None"),
    ((torch.zeros(3),), {"length": 3, "state": 1}, TypeError, "state must be a tensor, or a tuple"),
]


@pytest.mark.parametrize(("tensors", "options", "error", "message"), ERRORS)
def test_errors_come_with_the_call(
    tensors: tuple[Tensor, ...], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        truncated(*tensors, **options)


def test_errors_on_the_way() -> None:
    segments = truncated(torch.zeros(5), length=[2, 2])
    assert [next(segments).first, next(segments).first] == [0, 2]
    with pytest.raises(ValueError, match=r"length must cover all 5 time steps, .* ends after 4"):
        next(segments)
    with pytest.raises(ValueError, match="length must be a positive int, got -1"):
        list(truncated(torch.zeros(5), length=[2, -1]))

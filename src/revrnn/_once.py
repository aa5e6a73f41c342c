"""Backward passes that can be run, but neither differentiated nor vectorized, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Like torch's decorator of that name, but never silent.

    Torch's lets a second derivative pass, as zero, when the incoming gradient itself needs none (a
    gradient penalty on ``out.sum()``, say). Here, whenever the pass is recorded for a second
    derivative (``create_graph=True``), what it finds depends on all that it was computed from, the
    tensors that ``ctx`` has saved or names as ``ctx.sources``: asking for the derivative by any of
    them is an error.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(part is not None and _is_batched(part) for part in gradients):
            raise RuntimeError(
                "the backward pass of RevGRU and RevLSTM takes one gradient at a time: leave out "
                "is_grads_batched and vectorize"
            )
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        behind = (*gradients, *ctx.saved_tensors, *getattr(ctx, "sources", ()))
        with torch.no_grad():
            found = backward(ctx, *gradients)
        return _Refusal.apply(len(found), *found, *behind)  # type: ignore[no-untyped-call, no-any-return]

    return wrapper


def _is_batched(tensor: Tensor) -> bool:
    kinds = torch._C._functorch
    return kinds.is_batchedtensor(tensor) or kinds.is_legacy_batchedtensor(tensor)


class _Refusal(torch.autograd.Function):
    """``apply(n, *tensors)``: the first n tensors, which depend on all of them, but not in a way
    that could be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if part is None else part.view_as(part) for part in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise RuntimeError(
            "RevGRU and RevLSTM can be differentiated only once: the gradient of a gradient is "
            "not available"
        )

"""What layers and single-step cells share: sizes, forgetting, parameters, and the way to a pass."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from revrnn import _checks, kernels
from revrnn._heap import keep_freed_memory
from revrnn.advance import Memory, Stack
from revrnn.cells import (
    Cell,
    with_discrete_forgetting,
    with_zoneout,
    without_forgetting,
)
from revrnn.diagnostics import LayerReport
from revrnn.fixed import ForgetRange
from revrnn.forgetting import Estimator
from revrnn.kernels import Backend, Layer
from revrnn.reverse import Plan, Recurrence

ForgetName: TypeAlias = Literal["fractional", "none", "discrete"]
Device: TypeAlias = torch.device | str | int | None


class Reversible(nn.Module):
    """What layers and cells share: sizes and parameters."""

    _kind: ClassVar[Cell]
    """With fractional forgetting."""

    _cell: Cell
    """With the forgetting that was asked for."""

    _shapes: list[dict[str, tuple[int, ...]]]
    """Names and shapes of W_ih, W_hh and, unless bias=False, bias: a slot each. A *slot* is a layer
    and direction, in the order of torch.nn."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        max_forget_bits: float | None,
        forget: ForgetName,
        estimator: Estimator,
        temperature: float,
        sample_in_eval: bool,
        hidden_dropout: float,
        zoneout: float,
    ) -> None:
        super().__init__()
        self.input_size = _checks.positive("input_size", input_size)
        self.hidden_size = _checks.even("hidden_size", hidden_size)
        self.max_forget_bits, self.temperature = _checks.forgetting(
            forget, max_forget_bits, estimator, temperature
        )
        self.forget, self.estimator = forget, estimator
        self.sample_in_eval = _checks.flag("sample_in_eval", sample_in_eval)
        self._cell = self._kind
        if forget == "none":
            self._cell = without_forgetting(self._kind)
        elif forget == "discrete":
            bits = cast(int, self.max_forget_bits)
            self._cell = with_discrete_forgetting(self._kind, bits, estimator, self.temperature)
        self.hidden_dropout = _checks.probability("hidden_dropout", hidden_dropout)
        self.zoneout = _checks.zoneout(zoneout, forget)
        if self.zoneout:
            self._cell = with_zoneout(self._cell, self.zoneout)

    def _register(
        self, slots: list[tuple[str, int]], bias: bool, device: Device, dtype: torch.dtype | None
    ) -> None:
        """Make the parameters, from the suffix of their names and the input size of every slot."""
        _checks.flag("bias", bias)
        _checks.parameter_dtype(dtype)
        rows, group = self._cell.gates * self.hidden_size, self.hidden_size // 2
        self._shapes = []
        for suffix, width in slots:
            kinds = {"weight_ih": (rows, width), "weight_hh": (rows, group), "bias": (rows,)}
            names = list(kinds) if bias else list(kinds)[:2]
            self._shapes.append({name + suffix: kinds[name] for name in names})
            for name in names:
                tensor = torch.empty(kinds[name], device=device, dtype=dtype)
                self.register_parameter(name + suffix, nn.Parameter(tensor))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All weights and biases from ``U(-1/sqrt(H), 1/sqrt(H))``, as torch.nn does."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def _changed(self, *apart: str) -> list[str]:
        """The arguments of the constructor that are not their defaults, but for those ``apart`` and
        those of tensors, which do not stay what they were."""
        return [
            f"{name}={getattr(self, name)!r}"
            for name, argument in inspect.signature(type(self).__init__).parameters.items()
            if name not in ("device", "dtype", *apart)
            and argument.default is not argument.empty
            and getattr(self, name, argument.default) != argument.default
        ]

    def _read(self) -> list[list[Tensor]]:
        """The parameters, a slot each. Once a call: a parametrization computes them every time."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            raise RuntimeError(
                "torch.jit.trace cannot follow a reversible recurrence: it is no torch operator"
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "torch.vmap and the transforms of torch.func cannot follow a reversible recurrence"
            )
        found = [[getattr(self, name) for name in shapes] for shapes in self._shapes]
        for tensors, shapes in zip(found, self._shapes, strict=True):
            _checks.weights(tensors, shapes, found[0][0].device)
        return found

    def _layer_of(self, name: str, input_size: int, stored_units: int = 0) -> Layer:
        forget = ForgetRange.from_bits(self.max_forget_bits)
        if not self._cell.rule.forgets:
            stored_units = 0  # they come back without
        dropout = self.hidden_dropout if self.training else 0.0
        draws = self.training or (self.sample_in_eval and self.forget == "discrete")
        seed = None
        if dropout or (draws and self._cell.rule.chooses):
            seed = int(torch.randint(1 << 62, (), device="cpu"))
        return Layer(
            self._cell,
            input_size,
            self.hidden_size,
            forget,
            stored_units,
            name,
            seed,
            dropout,
        )


def recur(
    stack: Stack,
    batch_sizes: Tensor,  # int64 (T,)
    x: Tensor,  # (R, I)
    initial: Sequence[Tensor | None],  # (S, N, H) a layer
    weights: Sequence[Tensor | None],  # W_ih, W_hh and bias a layer
    out_units: int = 0,  # k
    masks: tuple[Tensor | None, ...] = (),
    *,
    reversible: bool,
) -> tuple[Tensor | None, list[Tensor], list[LayerReport]]:
    """The output (R, k) or None, the final states (S, N, H) and the reports, a layer each."""
    keep_freed_memory()
    tensors = [x, *initial, *weights]
    memory = Memory.NOTHING
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors):
        memory = Memory.TAPE if reversible else Memory.STATES
    plan = Plan(stack, batch_sizes, memory, out_units, masks)
    out, *finals = Recurrence.apply(plan, *tensors)  # type: ignore[no-untyped-call]
    return out, finals, plan.reports


def backend_for(tape: str, device: torch.device) -> Backend:
    """The kernels for tensors on that device. The paper's tape is known to the reference only."""
    forced = kernels._forced or os.environ.get(kernels.ENVIRONMENT_VARIABLE)
    if tape == "paper" and not forced:
        return kernels.get("reference")
    backend = kernels.choose(device)
    if tape == "paper" and backend.name != "reference":
        raise ValueError(
            f"tape='paper' needs the reference kernels, got {forced!r} forced by "
            f"revrnn.kernels.use or {kernels.ENVIRONMENT_VARIABLE}"
        )
    return backend

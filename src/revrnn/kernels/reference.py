"""The kernels in plain PyTorch, on any device, in float32 or float64: slow, and meant to be read.

The work of one time step is in `revrnn.cells`; here are the loops over steps and groups, and the
one matrix product whose result can be computed again bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from revrnn.cells import SEEN, RecurBack, Uniform
from revrnn.errors import NonFiniteError, ReversalError, StateOverflowError
from revrnn.fixed import STATE_LIMIT, to_float
from revrnn.kernels.contract import Gradients, Layer, Record, Steps, Weights
from revrnn.noise import Noise
from revrnn.tape import Codec


def fixed_order_matmul(
    a: Tensor, weight_t: Tensor, start: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """``start + a @ weight_t``, summed over k in ascending order: (n, K), (K, m), (n, m) -> (n, m).

    Every output is one chain ``acc <- acc + a[i, k] weight_t[k, j]``, whatever the number of rows,
    of threads, or of columns. Library products do not promise that, and the reverse pass has to
    arrive at the very same floats.
    """
    acc = torch.empty_like(start) if out is None else out
    acc.copy_(start)
    for column, row in zip(a.t().unsqueeze(2).unbind(0), weight_t.unbind(0), strict=True):
        acc.addcmul_(column, row)
    return acc


@dataclass(frozen=True)
class Prepared:
    """A layer's weights, with transposed copies for `fixed_order_matmul`."""

    layer: Layer
    weights: Weights
    ih_t: Tensor  # (I, G*H)
    hh_t: tuple[Tensor, Tensor]  # (D, G*D) of each group

    def gates(self, group: int) -> slice:
        """The gates of a group: rows of the weights, columns of pre-activations."""
        width = self.layer.cell.gates * self.layer.group_size
        return slice(group * width, (group + 1) * width)

    def extras(self, group: int) -> slice:
        """The columns of a group in `Record.extra`."""
        size = self.layer.extra_size
        return slice(group * size, (group + 1) * size)

    def units(self, group: int) -> slice:
        """The units of a group within one state."""
        size = self.layer.group_size
        return slice(group * size, (group + 1) * size)


@dataclass(frozen=True)
class Step:
    """One of the steps of a chunk."""

    time: int  # for messages
    rows: slice  # of the chunk's packed tensors
    active: int  # batch rows 0 .. active-1 take part


class ReferenceBackend:
    """`revrnn.kernels.contract.Backend`, in terms of `revrnn.cells`."""

    name = "reference"

    def refusal(self, device: torch.device) -> str | None:
        return None

    def prepare(self, layer: Layer, weights: Weights, *, backward: bool) -> Prepared:
        first, second = weights.hh.chunk(2)
        return Prepared(
            layer,
            weights,
            weights.ih.t().contiguous(),
            (first.t().contiguous(), second.t().contiguous()),
        )

    def forward(
        self,
        prepared: Prepared,
        x: Tensor,
        steps: Steps,
        state: Tensor,
        codec: Codec,
        *,
        out: Tensor | None = None,
        stored: Tensor | None = None,
        record: Record | None = None,
    ) -> None:
        layer = prepared.layer
        pre = _project(prepared, x, None if record is None else record.gates)
        for step in _each(steps):
            now = state[:, : step.active]  # (S, n, H), a view
            if stored is not None:
                stored[step.rows] = now[0, :, : layer.stored_units]
            if record is not None:
                record.old[step.rows] = _side_by_side(now, x.dtype)
            for group in (0, 1):
                own = now[:, :, prepared.units(group)]  # (S, n, D), a view
                other, gates = _gates(prepared, pre, step, now, group)
                new, extra = layer.cell.advance(
                    tuple(own),
                    gates,
                    other,
                    layer.forget,
                    codec,
                    layer.stored_units if group == 0 else 0,
                )
                own.copy_(torch.stack(new))
                if record is not None:
                    _keep(prepared, record, step, group, other, gates, extra)
                    if group == 0:
                        record.mid[step.rows] = to_float(now[0, :, prepared.units(0)], x.dtype)
            _check_range(now, layer, step)
            if out is not None:
                out[step.rows] = to_float(now[0, :, : out.shape[1]], out.dtype)

    def reverse(
        self,
        prepared: Prepared,
        x: Tensor,
        steps: Steps,
        state: Tensor,
        codec: Codec,
        record: Record,
        *,
        out: Tensor | None = None,
        stored: Tensor | None = None,
    ) -> None:
        layer = prepared.layer
        pre = _project(prepared, x, record.gates)
        for step in reversed(list(_each(steps))):
            now = state[:, : step.active]
            if out is not None:
                out[step.rows] = to_float(now[0, :, : out.shape[1]], out.dtype)
            record.mid[step.rows] = to_float(now[0, :, prepared.units(0)], x.dtype)
            for group in (1, 0):
                own = now[:, :, prepared.units(group)]
                try:
                    other, gates = _gates(prepared, pre, step, now, group)
                    old, extra = layer.cell.rewind(
                        tuple(own),
                        gates,
                        other,
                        layer.forget,
                        codec,
                        stored[step.rows] if stored is not None and group == 0 else None,
                    )
                except (ReversalError, NonFiniteError) as error:
                    raise ReversalError.at(layer.name, step.time, error.row) from error
                own.copy_(torch.stack(old))
                _keep(prepared, record, step, group, other, gates, extra)
            record.old[step.rows] = _side_by_side(now, x.dtype)

    def backprop(
        self,
        prepared: Prepared,
        x: Tensor,
        steps: Steps,
        record: Record,
        d_out: Tensor | None,
        d_state: Tensor,
        gradients: Gradients,
        d_x: Tensor | None,
    ) -> None:
        # The caller may be inside autocast; gradients are computed in the state's own precision.
        with torch.autocast(x.device.type, enabled=False):
            layer = prepared.layer
            for step in reversed(list(_each(steps))):
                d_now = d_state[:, : step.active]  # (S, n, H), a view
                if d_out is not None:
                    d_now[0, :, : d_out.shape[1]] += d_out[step.rows]
                old = record.old[step.rows].view(step.active, layer.cell.states, -1).transpose(0, 1)
                for group in (1, 0):
                    own = prepared.units(group)
                    gates = record.gates[step.rows, prepared.gates(group)]
                    other, extra = _seen(prepared, record, step.rows, group)
                    d_pre, d_old, d_other = layer.cell.gradient(
                        tuple(d_now[:, :, own]),
                        gates,
                        tuple(old[:, :, own]),
                        other,
                        extra,
                        layer.forget,
                        _recur_back(prepared, group),
                    )
                    gates.copy_(d_pre)
                    d_now[:, :, own] = torch.stack(d_old)
                    if layer.hidden_dropout:
                        d_other = d_other * _mask(prepared, step, group, x)
                    d_now[0, :, prepared.units(1 - group)] += d_other
            _add_weight_gradients(prepared, x, record, gradients)
            if d_x is not None:
                torch.matmul(record.gates, prepared.weights.ih, out=d_x)


def _project(prepared: Prepared, x: Tensor, out: Tensor | None) -> Tensor:
    """The input's share of the pre-activations, ``b + W x``: (R, G*H)."""
    rows, width = len(x), prepared.ih_t.shape[1]
    pre = x.new_empty(rows, width) if out is None else out
    bias = prepared.weights.bias
    start = x.new_zeros(width) if bias is None else bias
    return fixed_order_matmul(x, prepared.ih_t, start.expand(rows, -1), out=pre)


def _each(steps: Steps) -> Iterator[Step]:
    """The steps in the order of the forward pass."""
    for i, (first, active) in enumerate(
        zip(steps.offsets.tolist(), steps.active.tolist(), strict=True)
    ):
        yield Step(steps.time(i), slice(first, first + active), active)


def _gates(
    prepared: Prepared, pre: Tensor, step: Step, now: Tensor, group: int
) -> tuple[Tensor, Tensor]:
    """h of the other group as floats (n, D), as the gates see it, and what the cell computes from
    it: the gates (n, G*D) and what was chosen.

    Both directions come here: what one computes, the other computes again.
    """

    def recur(values: Tensor, start: Tensor, gates: slice) -> Tensor:
        acc = fixed_order_matmul(values, prepared.hh_t[group][:, gates], start)
        finite = acc.isfinite().all(1)
        if not bool(finite.all()):
            raise NonFiniteError.at(prepared.layer.name, step.time, int(finite.int().argmin()))
        return acc

    layer = prepared.layer
    other = to_float(now[0, :, prepared.units(1 - group)], pre.dtype)
    if layer.hidden_dropout:
        other = other * _mask(prepared, step, group, pre)
    own = pre[step.rows, prepared.gates(group)]
    uniform = None if layer.seed is None else _uniform(layer.seed, step, group, pre)
    return other, layer.cell.activate(own, other, recur, uniform)


def _uniform(seed: int, step: Step, group: int, like: Tensor) -> Uniform:
    """The noise of one group's step."""
    noise = Noise(seed, step.time, group, step.active, like.device)
    return partial(noise.uniform, dtype=like.dtype)


def _mask(prepared: Prepared, step: Step, group: int, like: Tensor) -> Tensor:
    """What h of the other group is multiplied by, with hidden dropout: 0 or 1 / (1 - p), (n, D)."""
    layer, p = prepared.layer, prepared.layer.hidden_dropout
    draw = _uniform(cast(int, layer.seed), step, group, like)
    return (draw(SEEN, layer.group_size) >= p).to(like.dtype) / (1 - p)


def _recur_back(prepared: Prepared, group: int) -> RecurBack:
    weight = prepared.weights.hh[prepared.gates(group)]  # (G*D, D)
    return lambda d_pre, gates: d_pre @ weight[gates]


def _keep(
    prepared: Prepared,
    record: Record,
    step: Step,
    group: int,
    other: Tensor,
    gates: Tensor,
    extra: Tensor,
) -> None:
    """Record what a group's step computed. The gates take the place of its pre-activations."""
    own = prepared.gates(group)
    record.gates[step.rows, own] = gates[:, : own.stop - own.start]
    if prepared.layer.hidden_dropout:
        extra = torch.cat((extra, other), dim=1)
    record.extra[step.rows, prepared.extras(group)] = extra


def _seen(prepared: Prepared, record: Record, rows: slice, group: int) -> tuple[Tensor, Tensor]:
    """h of the other group as the gates saw it (n, D), and the extra tensor of `Cell.advance`."""
    extra = record.extra[rows, prepared.extras(group)]
    if prepared.layer.hidden_dropout:
        size = prepared.layer.group_size
        return extra[:, -size:], extra[:, :-size]
    return (record.mid[rows] if group else record.old[rows, prepared.units(1)]), extra


def _side_by_side(now: Tensor, dtype: torch.dtype) -> Tensor:
    """The states as floats: (S, n, H) -> (n, S*H)."""
    return to_float(now, dtype).transpose(0, 1).flatten(1)


def _check_range(now: Tensor, layer: Layer, step: Step) -> None:
    beyond = (now.abs() >= STATE_LIMIT).any(2).any(0)
    if bool(beyond.any()):
        row = int(beyond.int().argmax())
        raise StateOverflowError.at(layer.name, step.time, row, forgets=layer.cell.rule.forgets)


def _add_weight_gradients(
    prepared: Prepared, x: Tensor, record: Record, gradients: Gradients
) -> None:
    """Sums over all rows of the chunk; ``record.gates`` now holds d_pre."""
    layer, d_pre = prepared.layer, record.gates
    if gradients.ih is not None:
        gradients.ih.addmm_(d_pre.t(), x)
    if gradients.bias is not None:
        gradients.bias += d_pre.sum(0)
    if gradients.hh is None:
        return
    for group in (0, 1):
        other, extra = _seen(prepared, record, slice(None), group)
        d_own, d_hh = d_pre[:, prepared.gates(group)], gradients.hh[prepared.gates(group)]
        for gates, inputs in layer.cell.recurrent_inputs(other, extra):
            d_hh[gates].addmm_(d_own[:, gates].t(), inputs)

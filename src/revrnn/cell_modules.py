"""RevGRUCell and RevLSTMCell, as ``torch.nn.GRUCell`` and ``torch.nn.LSTMCell``: for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from revrnn import _checks, kernels
from revrnn._base import Device, ForgetName, Reversible, recur
from revrnn._sequence import float32, output_dtype
from revrnn._uncompiled import uncompiled
from revrnn.advance import Stack
from revrnn.cells import GRU, LSTM
from revrnn.forgetting import Estimator


class _ReversibleCell(Reversible):
    """One step at a time, for decoding; parameters named as in ``torch.nn.GRUCell``."""

    _state_names: ClassVar[tuple[str, ...]] = ("h_0", "c_0")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        max_forget_bits: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        forget: ForgetName = "fractional",
        estimator: Estimator = "gumbel",
        temperature: float = 1.0,
        sample_in_eval: bool = False,
        hidden_dropout: float = 0.0,
        zoneout: float = 0.0,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            max_forget_bits,
            forget,
            estimator,
            temperature,
            sample_in_eval,
            hidden_dropout,
            zoneout,
        )
        self._register([("", self.input_size)], bias, device, dtype)
        if not bias:
            self.register_parameter("bias", None)

    def extra_repr(self) -> str:
        bias = ["bias=False"] if "bias" not in self._shapes[0] else []
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *bias, *self._changed("bias")])

    @uncompiled
    def _step(self, input: Tensor, states: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The new states, from the input (N, I) or (I,)."""
        (parameters,) = self._read()
        first = parameters[0]
        _checks.input_tensor(input, first, self.input_size, (1, 2))
        x = float32(input.reshape(-1, self.input_size))  # (N, I)
        _checks.not_empty(input.shape, 1, len(x))
        state: Tensor | None = None
        if states is not None:
            shape = (*input.shape[:-1], self.hidden_size)
            _checks.state_tensors(states, shape, first.device, first.dtype, self._state_names)
            # (S, N, H)
            state = torch.stack([float32(part).view(len(x), -1) for part in states])
        weights: list[Tensor | None] = [float32(parameter) for parameter in parameters]
        layer = self._layer_of(type(self).__name__, self.input_size)
        stack = Stack((layer,), kernels.choose(x.device), "entropy", chunk_size=1)
        weights += [None] * (3 - len(weights))
        # The record of one step is smaller than the bookkeeping of a tape.
        _, (final,), _ = recur(
            stack, torch.tensor([len(x)], device="cpu"), x, [state], weights, reversible=False
        )
        dtype = output_dtype(input, self._cell, states[0] if states else None, single_step=True)
        # Tensors of their own: callers may change them in place.
        return tuple(part.to(dtype, copy=True).view(*input.shape[:-1], -1) for part in final)


class RevGRUCell(_ReversibleCell):
    """One step of a `RevGRU`, as ``torch.nn.GRUCell``: ``h = cell(input, h)``.

    Every step begins a tape of its own, so h agrees with that of a RevGRU in the same state to
    within 2**-13, not to the last bit. Parameters are ``weight_ih``, ``weight_hh`` and ``bias``,
    with the shapes and rows of ``RevGRU``'s ``weight_ih_l0`` and so on.
    """

    _kind = GRU
    _state_names = ("hx",)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """(N, I) or (I,), and h (N, H) or (H,), to the new h."""
        (h,) = self._step(input, None if hx is None else (hx,))
        return h


class RevLSTMCell(_ReversibleCell):
    """One step of a `RevLSTM`, as ``torch.nn.LSTMCell``: ``h, c = cell(input, (h, c))``.

    The lowest bits of h and c are not those of a RevLSTM, see `RevGRUCell`.
    """

    _kind = LSTM

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(N, I) or (I,), and h and c (N, H) or (H,), to the new h and c."""
        h, c = self._step(input, _checks.pair(hx))
        return h, c

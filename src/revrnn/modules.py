"""RevGRU and RevLSTM: drop-ins for ``torch.nn.GRU`` and ``torch.nn.LSTM``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from revrnn import _checks
from revrnn._base import Device, ForgetName, Reversible, backend_for, recur
from revrnn._sequence import InputSequence, float32, output_dtype
from revrnn._uncompiled import uncompiled
from revrnn.advance import Stack
from revrnn.cells import GRU, LSTM
from revrnn.chunks import default_chunk_size
from revrnn.diagnostics import LayerReport, TapeReport
from revrnn.forgetting import Estimator
from revrnn.kernels import Backend, Layer, Weights

TapeName: TypeAlias = Literal["entropy", "paper"]


@dataclass
class _Call:
    """What one call of a module works on."""

    sequence: InputSequence
    keep: int | None
    backend: Backend
    initial: list[Tensor | None]
    """A slot each: float32 (S, N, H), or None for zeros."""
    weights: list[list[Tensor]]
    """A slot each: W_ih, W_hh and, unless bias=False, bias."""


class _ReversibleRNN(Reversible):
    """What RevGRU and RevLSTM share; the cell makes the difference."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        max_forget_bits: float | None = None,
        weight_dropout: float = 0.0,
        reversible: bool = True,
        tape: TapeName = "entropy",
        chunk_size: int | None = None,
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
        self.num_layers = _checks.positive("num_layers", num_layers)
        self.bias = bias
        self.batch_first = bool(batch_first)
        self.dropout = _checks.probability("dropout", dropout)
        self.bidirectional = bool(bidirectional)
        self.weight_dropout = _checks.probability("weight_dropout", weight_dropout)
        self.reversible = bool(reversible)
        self.tape = _checks.tape(tape, forget)
        self.chunk_size = None if chunk_size is None else _checks.positive("chunk_size", chunk_size)
        if self.dropout > 0 and self.num_layers == 1:
            warnings.warn(
                "dropout is applied between layers, so a non-zero dropout expects num_layers "
                f"greater than 1, got dropout={dropout} and num_layers=1",
                stacklevel=2,
            )
        self._report: TapeReport | None = None
        slots = [
            (f"_l{layer}{end}", self.hidden_size * self._directions if layer else self.input_size)
            for layer in range(self.num_layers)
            for end in ("", "_reverse")[: self._directions]
        ]
        self._register(slots, bias, device, dtype)

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def flatten_parameters(self) -> None:
        """Nothing to do; here because code written for ``torch.nn`` calls it."""

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of every layer and direction, as ``torch.nn.GRU.all_weights``."""
        return [[getattr(self, name) for name in slot] for slot in self._shapes]

    def extra_repr(self) -> str:
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *self._changed()])

    def tape_report(self) -> TapeReport:
        """What the last forward pass in training holds for its backward pass, beside the ideal."""
        if self._report is None:
            raise RuntimeError(
                "there is no tape to report on: run a forward pass with gradients enabled first"
            )
        return self._report

    def __getstate__(self) -> dict[str, Any]:
        # A report speaks of a graph that a copy does not have.
        return {**self.__dict__, "_report": None}

    @uncompiled
    def _run(
        self, input: Tensor | PackedSequence, states: Sequence[Tensor] | None, keep: int | None
    ) -> tuple[Tensor | PackedSequence | None, tuple[Tensor, ...]]:
        """The output, and the final states, one (slots, N, H) tensor each."""
        weights = self._read()
        sequence = InputSequence(input, weights[0][0], self.input_size, self.batch_first)
        initial = sequence.initial_states(states, len(weights), self.hidden_size)
        keep = _checks.keep(keep, self.hidden_size)
        backend = backend_for(self.tape, sequence.data.device)
        call = _Call(sequence, keep, backend, initial, weights)
        dtype = output_dtype(sequence.source, self._cell, states[0] if states else None)
        with sequence.rows_explained():
            out, finals, reports = self._layers(call)
        if reports:
            self._report = TapeReport(reports)
        return sequence.output(out, dtype), sequence.final_states(finals, dtype)

    def _layers(self, call: _Call) -> tuple[Tensor | None, list[Tensor], list[LayerReport]]:
        """The output (R, directions * k), and the final states (S, N, H) and reports of all slots.

        One direction: all layers are one stack and share their chunks. Two directions: a layer
        needs the whole output of both directions of the layer below, so each is a stack alone.
        """
        every = range(self.num_layers)
        runs: list[Sequence[int]] = [[layer] for layer in every] if self.bidirectional else [every]
        x, out = call.sequence.data, None
        finals: list[Tensor] = []
        reports: list[LayerReport] = []
        for run in runs:
            outputs = []
            for direction in range(self._directions):
                out, states, parts = self._stack(call, x, run, direction)
                finals += states
                reports += parts
                outputs.append(out)
            if self.bidirectional and out is not None:
                out = torch.cat(cast("list[Tensor]", outputs), dim=1)
            if run[-1] < self.num_layers - 1:
                x = cast(Tensor, out)
                mask = self._mask(call.sequence.batch, x.device)
                if mask is not None:
                    x = x * mask[call.sequence.batch_rows()]
        return out, finals, reports

    def _stack(
        self, call: _Call, x: Tensor, run: Sequence[int], direction: int
    ) -> tuple[Tensor | None, list[Tensor], list[LayerReport]]:
        """Run one direction of the layers of ``run`` over x (R, I)."""
        slots = [layer * self._directions + direction for layer in run]
        keep = call.keep if run[-1] == self.num_layers - 1 else None
        layers, weights = [], []
        for layer, slot in zip(run, slots, strict=True):
            stored_units = keep or 0 if layer == run[-1] else 0
            spec, tensors = self._layer(layer, direction, stored_units, call.weights[slot])
            layers.append(spec)
            weights += [tensors.ih, tensors.hh, tensors.bias]
        initial = [call.initial[slot] for slot in slots]
        batch, steps = call.sequence.batch, len(call.sequence.batch_sizes)
        chunk_size = min(self.chunk_size or default_chunk_size(steps, batch), steps)
        masks = tuple(self._mask(batch, x.device) for _ in run[:-1])
        stack = Stack(tuple(layers), call.backend, self.tape, chunk_size, direction == 1)
        units = self.hidden_size if keep is None else keep
        sizes = call.sequence.batch_sizes
        return recur(stack, sizes, x, initial, weights, units, masks, reversible=self.reversible)

    def _layer(
        self,
        layer: int,
        direction: int = 0,
        stored_units: int = 0,
        parameters: Sequence[Tensor] | None = None,
    ) -> tuple[Layer, Weights]:
        """A slot as a pass needs it, with a new mask of DropConnect. ``parameters`` are what
        `_read` found for it, None reads them."""
        slot = layer * self._directions + direction
        ih, hh, *bias = self._read()[slot] if parameters is None else parameters
        hh = functional.dropout(hh, self.weight_dropout, self.training)
        weights = Weights(float32(ih), float32(hh), float32(bias[0]) if bias else None)
        name = f"layer {layer}" + (" (reverse)" if direction else "")
        return self._layer_of(name, ih.shape[1], stored_units), weights

    def _mask(self, batch: int, device: torch.device) -> Tensor | None:
        """Variational dropout above a layer: one mask (N, directions * H) for the sequence."""
        if not self.training or self.dropout == 0.0:
            return None
        width = self._directions * self.hidden_size
        ones = torch.ones(batch, width, dtype=torch.float32, device=device)
        return functional.dropout(ones, self.dropout)


_ARGUMENTS = """
    Args:
        input_size: features of the input, I.
        hidden_size: units of the state, H; even, since they form two groups.
        num_layers: layers one above the other.
        bias: False leaves the biases out.
        batch_first: input and output are (N, T, *) instead of (T, N, *).
        dropout: probability of dropout between layers; variational, one mask a sequence.
        bidirectional: also run from the last step to the first; outputs are concatenated.
        max_forget_bits: F, at most so many bits are forgotten a unit a step, 0 < F <= 10: forget
            gates stay above 2**-F. None: no limit.
        weight_dropout: probability of DropConnect on the hidden-to-hidden matrices; one mask a
            call.
        reversible: False stores all states instead of a tape: more memory, less time, the same
            bits.
        tape: "entropy", or "paper" for the paper's own buffer, to compare with its figures: slow,
            on the reference kernels only.
        chunk_size: time steps worked on at once; None chooses by the batch size.
        device, dtype: of the parameters; the recurrence itself computes in float32 and fixed point.
        forget: "fractional"; or "none": nothing is ever forgotten, so there is no tape at all, and
            states grow with every step. RevGRU: ``h <- h + (1 - z) g``; RevLSTM: ``c <- c + i g``,
            ``h <- h + o tanh(c)``, with G = 3 gates i, o, g; or "discrete": z, f and p are one of
            1, 1/2, ..., 2**-F, drawn at random in training, and states are shifted; F, which is
            max_forget_bits, is a whole number then, and each of those gates has F + 1 blocks of
            weight rows, one a choice.
        estimator: of the gradient through what forget="discrete" draws: "gumbel", the softmax of
            the noisy logits (Straight-Through Gumbel-Softmax), or "categorical", the softmax of
            the logits.
        temperature: of the gumbel estimator.
        sample_in_eval: whether forget="discrete" draws in eval as well; else it takes the
            likeliest.
        hidden_dropout: probability of dropout on what the gates of one half of the units see of the
            other half's h; a new mask every step, drawn again in backward.
        zoneout: probability that a unit stays as it was in a step; in eval every unit takes the
            mean step. Not with forget="discrete".

    Parameters are ``weight_ih_l{k}`` (G*H, I), ``weight_hh_l{k}`` (G*H, H/2) and ``bias_l{k}``
    (G*H,), with ``_reverse`` behind for the other direction; rows are group 1's gates, then group
    2's, in the order {gates}.
"""


class RevGRU(_ReversibleRNN):
    __doc__ = f"""A GRU that trains without storing its hidden states:
    ``output, h_n = rnn(input, h_0)``.

    As ``torch.nn.GRU``, plus the keyword arguments below. For each of the two groups of units, the
    other one being o::

        [z; r] = sigmoid(W [x; h_o]),  g = tanh(U [x; r h_o]),  h <- z h + (1 - z) g
{_ARGUMENTS.replace("{gates}", "z, r, g (G = 3)")}"""

    _kind = GRU

    def forward(
        self,
        input: Tensor | PackedSequence,
        h_0: Tensor | None = None,
        *,
        keep: int | None = None,
    ) -> tuple[Tensor | PackedSequence | None, Tensor]:
        """``output, h_n``. ``keep=k`` returns (and stores) only the first k units of the top
        layer's h, of either direction, ``k <= H/2``; 0 returns None for the output."""
        output, (h_n,) = self._run(input, None if h_0 is None else (h_0,), keep)
        return output, h_n


class RevLSTM(_ReversibleRNN):
    __doc__ = f"""An LSTM that trains without storing its hidden states:
    ``output, (h_n, c_n) = rnn(input, (h_0, c_0))``.

    As ``torch.nn.LSTM``, plus the keyword arguments below. For each of the two groups of units, the
    other one being o::

        [f, i, o, p] = sigmoid(W [x; h_o]),  g = tanh(U [x; h_o])
        c <- f c + i g,  h <- p h + o tanh(c)
{_ARGUMENTS.replace("{gates}", "f, i, o, p, g (G = 5)")}"""

    _kind = LSTM

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        keep: int | None = None,
    ) -> tuple[Tensor | PackedSequence | None, tuple[Tensor, Tensor]]:
        """``output, (h_n, c_n)``. ``keep=k`` returns (and stores) only the first k units of the top
        layer's h, of either direction, ``k <= H/2``; 0 returns None for the output."""
        output, (h_n, c_n) = self._run(input, _checks.pair(hx), keep)
        return output, (h_n, c_n)

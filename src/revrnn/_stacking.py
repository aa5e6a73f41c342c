"""A module, or several one above the other, as one stack of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revrnn import _checks, _stream_checks
from revrnn._base import backend_for
from revrnn._sequence import float32, output_dtype
from revrnn.advance import Stack
from revrnn.diagnostics import LayerReport, TapeReport
from revrnn.dropout import VariationalDropout
from revrnn.kernels import Layer, Weights
from revrnn.modules import RevGRU, RevLSTM


class Layers:
    """What `revrnn.stream` needs of its ``rnn`` argument."""

    def __init__(self, rnn: nn.Module | Sequence[nn.Module]) -> None:
        self._single = isinstance(rnn, (RevGRU, RevLSTM))
        parts: Any = [rnn] if self._single else rnn
        if not isinstance(parts, (list, tuple, nn.ModuleList, nn.Sequential)):
            raise TypeError(
                f"rnn must be a RevGRU, a RevLSTM or a sequence of them, got {type(rnn).__name__}"
            )
        self.modules: list[RevGRU | RevLSTM] = []
        self._above: list[VariationalDropout | None] = []
        """The dropout between each module and the next."""
        for part in parts:
            if isinstance(part, (RevGRU, RevLSTM)):
                self.modules.append(part)
                self._above.append(None)
            elif isinstance(part, VariationalDropout) and self._above[-1:] == [None]:
                self._above[-1] = part
            else:
                raise TypeError(
                    "rnn must be a sequence of RevGRU and RevLSTM, with VariationalDropout only "
                    f"between them, got {type(part).__name__} out of place"
                )
        if not self.modules or self._above[-1] is not None:
            raise ValueError(
                "rnn must end with a RevGRU or RevLSTM, got "
                + ("an empty sequence" if not self.modules else "a VariationalDropout at its end")
            )
        first = self.modules[0]
        for module in self.modules:
            if module.bidirectional:
                raise ValueError("rnn must run in one direction, got bidirectional=True")
            if module.batch_first:
                raise ValueError("rnn must be time first to be streamed, got batch_first=True")
            if (module.reversible, module.tape) != (first.reversible, first.tape):
                raise ValueError(
                    "all of rnn must have the same reversible and tape settings, got "
                    f"{first.reversible, first.tape} and {module.reversible, module.tape}"
                )
        for below, above in zip(self.modules, self.modules[1:], strict=False):
            if above.input_size != below.hidden_size:
                raise ValueError(
                    f"each of rnn must read the one below: input_size must be {below.hidden_size}, "
                    f"got {above.input_size}"
                )
        self.reversible = first.reversible
        self.tape = first.tape
        self.input_size = first.input_size
        self.parameter = _any_parameter(first)
        for module in self.modules[1:]:
            _stream_checks.tensor("all of rnn", _any_parameter(module), self.parameter)
        self.dtypes: list[torch.dtype] = []
        """What every module would return, once `settle` has seen the input."""

    def build(self, batch: int, chunk_size: int) -> None:
        """Draw this pass's masks and lay out layers and weights."""
        layers: list[Layer] = []
        self.weights: list[Weights] = []
        self.masks: list[Tensor | None] = []
        self.slots: list[int] = []
        """Which module each layer belongs to."""
        device = self.parameter.device
        for slot, module in enumerate(self.modules):
            parameters = module._read()
            for index in range(module.num_layers):
                layer, weights = module._layer(index, parameters=parameters[index])
                layers.append(layer)
                self.weights.append(weights)
                self.slots.append(slot)
            self.masks += [module._mask(batch, device) for _ in range(module.num_layers - 1)]
            between = self._above[slot]
            above = None
            if between is not None and between.training and between.p > 0:
                ones = torch.ones(batch, module.hidden_size, dtype=torch.float32, device=device)
                above = between.draw(ones)
            self.masks.append(above)
        backend = backend_for(self.tape, device)
        self.stack = Stack(tuple(layers), backend, self.tape, chunk_size)

    def settle(self, x: Tensor) -> None:
        """Find the dtypes that the modules would return for an input like x, one from the other."""
        self.dtypes = []
        for module, state in zip(self.modules, self._first_states, strict=True):
            self.dtypes.append(output_dtype(x, module._cell, state))
            x = x.new_empty(0, dtype=self.dtypes[-1])

    def initial(self, state: Any, batch: int) -> list[Tensor | None]:
        """A layer each: (S, N, H) float32 with its history, or None."""
        states = [state] if self._single else state
        if state is None:
            states = [None] * len(self.modules)
        elif not isinstance(states, (list, tuple)) or len(states) != len(self.modules):
            raise ValueError(
                f"state must be a list with one entry for each of the {len(self.modules)} modules "
                f"of rnn, got {_form(state)}"
            )
        found: list[Tensor | None] = []
        self._first_states: list[Tensor | None] = []
        for module, own in zip(self.modules, states, strict=True):
            if own is None:
                found += [None] * module.num_layers
                self._first_states.append(None)
                continue
            count = module._cell.states
            parts = (own,) if isinstance(own, Tensor) else own
            if isinstance(own, Tensor) != (count == 1) or (
                count == 2 and not (isinstance(own, (tuple, list)) and len(own) == 2)
            ):
                kind = "a tensor h_0" if count == 1 else "a pair (h_0, c_0)"
                raise TypeError(
                    f"state must be {kind} for a {type(module).__name__}, got {_form(own)}"
                )
            shape = (module.num_layers, batch, module.hidden_size)
            device, dtype = self.parameter.device, self.parameter.dtype
            names = ("state's h_0", "state's c_0")
            _checks.state_tensors(parts, shape, device, dtype, names)
            stacked = torch.stack([float32(part) for part in parts], dim=1)  # (L, S, N, H)
            found += [layer.contiguous() for layer in stacked.unbind(0)]
            self._first_states.append(parts[0])
        return found

    def returned(self, finals: Sequence[Tensor]) -> Any:
        """Final states (S, N, H) a layer, in the form in which the modules return theirs."""
        states = []
        at = 0
        for module, dtype in zip(self.modules, self.dtypes, strict=True):
            own = torch.stack(list(finals[at : at + module.num_layers]), dim=1)  # (S, L, N, H)
            at += module.num_layers
            # Tensors of their own: callers may change them in place.
            parts = [part.to(dtype, copy=True) for part in own.unbind(0)]
            states.append(parts[0] if module._cell.states == 1 else tuple(parts))
        return states[0] if self._single else states

    def report(self, reports: Sequence[LayerReport]) -> None:
        """Give every module the report of its layers."""
        for slot, module in enumerate(self.modules):
            own = [report for report, at in zip(reports, self.slots, strict=True) if at == slot]
            module._report = TapeReport(own)


def _any_parameter(module: RevGRU | RevLSTM) -> Tensor:
    """One that has the dtype and the device of all. Not read as an attribute where possible: a
    parametrization computes it, and may draw random numbers for that."""
    for parameter in module.parameters():
        return parameter
    return module.all_weights[0][0]


def _form(state: Any) -> str:
    """For messages: what a state that has the wrong form is."""
    if isinstance(state, (tuple, list)):
        return f"a {type(state).__name__} of {len(state)}"
    return type(state).__name__

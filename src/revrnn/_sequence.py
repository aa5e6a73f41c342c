"""From the forms in which torch.nn takes sequences to packed float32 rows, and back.

Letters in shapes: T steps, N batch rows, R packed rows, I input features, H units, S states of the
cell, k output units; "slots" are the layers and directions, in the order of torch.nn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from revrnn import _checks
from revrnn.cells import Cell
from revrnn.errors import NonFiniteError, StateOverflowError


class InputSequence:
    """The input in packed form, and the way back to the form it came in."""

    data: Tensor
    """float32 (R, I), contiguous; the rows of a step lie together, longest sequence first."""

    batch_sizes: Tensor
    """int64 (T,), CPU: how many sequences take part in each step."""

    def __init__(
        self, input: Tensor | PackedSequence, parameter: Tensor, input_size: int, batch_first: bool
    ) -> None:
        self._parameter = parameter
        self._packed = input if isinstance(input, PackedSequence) else None
        if isinstance(input, PackedSequence):
            _checks.input_tensor(input.data, parameter, input_size, (2,))
            _checks.packed(input)
            self.source = input.data
            # A copy: backward needs them too, and nobody would see a change in place.
            self.batch_sizes = input.batch_sizes.clone()
            self.data = float32(input.data)
            return
        _checks.input_tensor(input, parameter, input_size, (2, 3))
        self.source = input
        self._batched = input.dim() == 3
        self._batch_first = batch_first and self._batched
        data = input if self._batched else input.unsqueeze(1)  # (T, I) -> (T, 1, I)
        if self._batch_first:
            data = data.transpose(0, 1)  # (N, T, I) -> (T, N, I)
        self._steps, self._batch = data.shape[:2]
        _checks.not_empty(input.shape, self._steps, self._batch)
        self.batch_sizes = torch.full((self._steps,), self._batch, dtype=torch.int64, device="cpu")
        self.data = float32(data.reshape(-1, input_size))

    @property
    def batch(self) -> int:
        """N."""
        return int(self.batch_sizes[0])

    def batch_rows(self) -> Tensor:
        """int64 (R,): the batch row of each packed row."""
        rows = torch.cat([torch.arange(size, device="cpu") for size in self.batch_sizes.tolist()])
        return rows.to(self.data.device)

    @contextmanager
    def rows_explained(self) -> Iterator[None]:
        """Errors from inside count batch rows as they lie in the packed sequence: say so where that
        is not how the caller counts them."""
        try:
            yield
        except (NonFiniteError, StateOverflowError) as error:
            if self._packed is not None and self._packed.sorted_indices is not None:
                error.add_note(
                    "Batch rows are counted as in the PackedSequence, longest first: its "
                    "sorted_indices say where they were before."
                )
            raise

    def initial_states(
        self, states: Sequence[Tensor] | None, slots: int, hidden_size: int
    ) -> list[Tensor | None]:
        """From S states (slots, N, H) to (S, N, H) a slot, rows as in the packed sequence."""
        if states is None:
            return [None] * slots
        batched = self._packed is not None or self._batched
        shape = (slots, self.batch, hidden_size) if batched else (slots, hidden_size)
        _checks.state_tensors(states, shape, self._parameter.device, self._parameter.dtype)
        stacked = torch.stack([float32(state).view(slots, -1, hidden_size) for state in states], 1)
        if self._packed is not None and self._packed.sorted_indices is not None:
            stacked = stacked.index_select(2, self._packed.sorted_indices)
        return list(stacked.unbind(0))

    def output(self, out: Tensor | None, dtype: torch.dtype) -> Tensor | PackedSequence | None:
        """From (R, k) to the form of the input."""
        if out is None:
            return None
        out = out.to(dtype)
        if self._packed is not None:
            return self._packed._replace(data=out)
        out = out.view(self._steps, self._batch, -1)
        if not self._batched:
            return out.squeeze(1)
        return out.transpose(0, 1) if self._batch_first else out

    def final_states(self, finals: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """From (S, N, H) a slot to S states (slots, N, H), each a tensor of its own: callers may
        change them in place."""
        states = []
        for parts in zip(*finals, strict=True):  # of one state: (N, H) a slot
            state = torch.stack(parts).to(dtype)
            if self._packed is not None and self._packed.unsorted_indices is not None:
                state = state.index_select(1, self._packed.unsorted_indices)
            elif self._packed is None and not self._batched:
                state = state.squeeze(1)
            states.append(state)
        return tuple(states)


def float32(tensor: Tensor) -> Tensor:
    """The kernels compute in float32 whatever the parameters and the input are, and read memory
    as it is: a lazy minus, as in the imaginary part of a conjugate, is carried out."""
    return tensor.to(torch.float32).resolve_neg().contiguous()


def output_dtype(
    data: Tensor, cell: Cell, state: Tensor | None = None, *, single_step: bool = False
) -> torch.dtype:
    """What torch.nn returns for this input and initial state.

    Outside of autocast that is the input's dtype, and autocast leaves float64 alone. What else it
    does depends on who does the work. On the CPU, the kernel that oneDNN has for `torch.nn.LSTM`
    returns the reduced dtype; the other modules compute products in it, and add them to the state
    in the state's own. On CUDA, cuDNN's kernels for whole layers are cast to float16 whatever the
    reduced dtype is; cells return the reduced one, as everything does elsewhere.
    """
    kind = data.device.type
    if not torch.is_autocast_enabled(kind) or data.dtype == torch.float64:
        return data.dtype
    reduced = torch.get_autocast_dtype(kind)
    if kind == "cuda" and not single_step and torch.backends.cudnn.enabled:
        return torch.float16
    fused = cell.name == "RevLSTM" and not single_step and data.dtype in (torch.float32, reduced)
    if kind != "cpu" or (fused and torch.backends.mkldnn.is_available()):
        return reduced
    return torch.promote_types((data if state is None else state).dtype, reduced)

"""What a kernel backend is: the data it works on and the calls it answers.

Every backend works on one *layer* (one direction) and one *chunk* of consecutive time steps at a
time. Sequences are held packed, as ``torch.nn.utils.rnn.PackedSequence`` holds them: the rows of a
step lie together, longest sequence first, so a step with ``n`` active sequences touches batch rows
``0 .. n-1``. A dense (T, N, I) batch is the special case in which every step has N rows.

Letters in shapes: C steps of the chunk, R rows of the chunk (the sum of its active sequences),
N batch rows, I input features, H hidden units, D = H/2 units of one group, G gates, S states
(RevGRU 1: h; RevLSTM 2: h, c), K stored units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from revrnn.cells import Cell
from revrnn.fixed import ForgetRange
from revrnn.tape import Codec


@dataclass(frozen=True)
class Layer:
    """One direction of one layer, apart from its tensors."""

    cell: Cell
    input_size: int
    hidden_size: int
    forget: ForgetRange
    stored_units: int = 0
    """K: the first K units of h are stored at every step and skip the tape; K <= D."""
    name: str = "layer 0"
    """How errors and reports call it."""
    seed: int | None = None
    """Of what is drawn in this pass, 0 <= seed < 2**63; None: nothing is."""
    hidden_dropout: float = 0.0
    """Probability that a group's gates do not see a unit of the other group, with another mask
    every step; above 0 only where there is a seed."""

    @property
    def group_size(self) -> int:
        return self.hidden_size // 2

    @property
    def extra_size(self) -> int:
        """X: columns of `Record.extra` for one group."""
        return (1 + self.cell.choices + (self.hidden_dropout > 0)) * self.group_size

    @property
    def taped_units(self) -> int:
        """Multiplications recorded on the tape by one row in one step."""
        return self.restored_units if self.cell.rule.forgets else 0

    @property
    def restored_units(self) -> int:
        """Units that one row's reverse step has to bring back, since they are not stored."""
        return self.cell.states * self.hidden_size - self.stored_units


@dataclass(frozen=True)
class Weights:
    """float32, contiguous. Rows are group 1's gates in the cell's order, then group 2's."""

    ih: Tensor  # (G*H, I)
    hh: Tensor  # (G*H, D)
    bias: Tensor | None  # (G*H,)


@dataclass(frozen=True)
class Steps:
    """The steps of a chunk, in the order in which the forward pass takes them."""

    offsets: Tensor
    """int64 (C,), CPU: the first row of each step in the chunk's packed tensors."""
    active: Tensor
    """int64 (C,), CPU: how many batch rows take part, always rows 0 .. active-1."""
    rows: int
    """R, the sum of ``active``."""
    first: int = 0
    """The time index of the first of these steps, for error messages."""
    stride: int = 1
    """1, or -1 when the layer runs from the last step to the first."""

    def time(self, index: int) -> int:
        """The time index of one of these steps."""
        return self.first + self.stride * index


@dataclass
class Record:
    """What `backprop` needs of a chunk, a line a packed row. `reverse` rebuilds it bit for bit."""

    gates: Tensor
    """(R, G*H) gate activations, laid out as the weight rows; forget gates as the columns that
    their rule keeps (`revrnn.forgetting`)."""
    old: Tensor
    """(R, S*H) states before the step as floats: h (group 1, group 2), then c."""
    mid: Tensor
    """(R, D) h of group 1 after the step: what group 2's gates were computed from."""
    extra: Tensor
    """(R, 2*X), of each group: r * h_other (RevGRU) or tanh of the new c (RevLSTM), (R, D); behind
    it what was chosen, if anything is, (R, choices*D); then, with hidden dropout, h of the other
    group as the gates saw it, (R, D)."""


@dataclass
class Gradients:
    """Gradients of the weights, summed over chunks; None where they are not wanted."""

    ih: Tensor | None
    hh: Tensor | None
    bias: Tensor | None


class Backend(Protocol):
    """The three kernels and their preparation. State tensors are int32 (S, N, H), contiguous, and
    are changed in place, as the codec is. On an error the backend raises and the caller drops both.
    """

    name: str

    def prepare(self, layer: Layer, weights: Weights, *, backward: bool) -> Any:
        """Repack the weights once a pass. What comes back is handed to the other calls."""

    def forward(
        self,
        prepared: Any,
        x: Tensor,  # (R, I) float32, rows contiguous
        steps: Steps,
        state: Tensor,  # (S, N, H) int32, before the chunk -> after it
        codec: Codec,
        *,
        out: Tensor | None = None,  # (R, k) float32, k <= H: the first k units of h after each step
        stored: Tensor | None = None,  # (R, K) int32: h* of the stored units *before* each step
        record: Record | None = None,  # filled when given: what `reverse` would rebuild
    ) -> None: ...

    def reverse(
        self,
        prepared: Any,
        x: Tensor,
        steps: Steps,
        state: Tensor,  # (S, N, H) int32, after the chunk -> before it
        codec: Codec,
        record: Record,  # filled
        *,
        out: Tensor | None = None,  # filled again, as by `forward`
        stored: Tensor | None = None,  # read
    ) -> None: ...

    def backprop(
        self,
        prepared: Any,
        x: Tensor,
        steps: Steps,
        record: Record,  # gates are overwritten by the gradients of the pre-activations
        d_out: Tensor | None,  # (R, k) float32
        d_state: Tensor,  # (S, N, H) float32: gradient after the chunk -> before it
        gradients: Gradients,  # added to
        d_x: Tensor | None,  # (R, I) float32, filled when given
    ) -> None: ...

    def refusal(self, device: torch.device) -> str | None:
        """None, or why tensors on that device cannot be served."""

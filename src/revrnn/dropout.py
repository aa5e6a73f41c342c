"""Dropout whose mask spans a whole sequence, also when the sequence is worked on in pieces.

Called on a whole sequence, these modules draw one mask a call. Inside `revrnn.stream` a sequence
comes in pieces, each of them twice or more: there the mask is drawn once, at the first piece, and
kept for all others. When the first piece comes again its mask is drawn again, from the generator
state of the first time: the same mask, and the generator moves on as it did then, so that other
draws of that piece repeat too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from revrnn import _checks

Piece = Hashable
"""Names a part of a sequence and the role (stem or head) that works on it."""


class SequenceMasks:
    """The masks of one sequence."""

    def __init__(self) -> None:
        self._masks: dict[tuple[Hashable, nn.Module, int], tuple[Piece, Tensor]] = {}
        """Of each module, role and call within a piece: the piece that drew the mask, the mask."""
        self._role: Hashable = None
        self._piece: Piece = None
        self._calls: dict[nn.Module, int] = {}

    @contextmanager
    def piece(self, role: Hashable, index: int) -> Iterator[None]:
        """All masks asked for inside belong to this piece."""
        self._role, self._piece, self._calls = role, index, {}
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def mask(self, module: nn.Module, draw: Callable[[], Tensor]) -> Tensor:
        call = self._calls.get(module, 0)
        self._calls[module] = call + 1
        key = (self._role, module, call)
        drawn = self._masks.get(key)
        if drawn is not None and drawn[0] != self._piece:
            return drawn[1]
        mask = draw()
        self._masks[key] = (self._piece, mask)
        return mask


_current: ContextVar[SequenceMasks | None] = ContextVar("revrnn_sequence_masks", default=None)


def _sequence_mask(module: nn.Module, draw: Callable[[], Tensor]) -> Tensor:
    masks = _current.get()
    return draw() if masks is None else masks.mask(module, draw)


class VariationalDropout(nn.Module):
    """Dropout with one mask for all time steps: ``(T, N, *)`` with a mask ``(N, *)``.

    Args:
        p: probability of an element to be zeroed.

    Also goes between the layers in the sequence that `revrnn.stream` takes.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = _checks.probability("p", p)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        return input * _sequence_mask(self, lambda: self.draw(input[0]))

    def draw(self, like: Tensor) -> Tensor:
        """A mask in the shape of one time step."""
        return functional.dropout(torch.ones_like(like), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class EmbeddingDropout(nn.Embedding):
    """An embedding that drops whole words: a word is zero wherever it stands in the sequence.

    Args:
        num_embeddings, embedding_dim: as ``torch.nn.Embedding``, like the keyword arguments.
        p: probability of a word to be dropped; the others are scaled by ``1 / (1 - p)``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        p: float = 0.1,
        *,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx=padding_idx, device=device, dtype=dtype
        )
        self.p = _checks.probability("p", p)

    def forward(self, input: Tensor) -> Tensor:
        embedded = super().forward(input)  # (T, N) -> (T, N, E)
        if not self.training or self.p == 0.0:
            return embedded
        mask = _sequence_mask(self, self._draw)
        return embedded * mask[input].unsqueeze(-1)

    def _draw(self) -> Tensor:
        """(V,): one factor a word."""
        weight = self.weight
        ones = torch.ones(self.num_embeddings, dtype=weight.dtype, device=weight.device)
        return functional.dropout(ones, self.p)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"

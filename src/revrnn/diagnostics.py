"""Reports on the tape and on memory: what is held, beside what would have to be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class LayerReport:
    """What one direction of one layer holds for its backward pass, in bits."""

    name: str
    tape_bits: int
    """Bytes of the tape and their counts."""
    lane_bits: int
    """Final states of the coder's lanes."""
    stored_bits: int
    """Stored units (``keep=k``), or all that ``reversible=False`` stores."""
    ideal_bits: float
    """The entropy limit: the sum of -log2 z over taped units, and 32 a stored number."""
    naive_bits: int
    """Storing all hidden states in 32 bits."""
    unit_steps: int
    """What the reverse pass brings back: units that are not stored, times steps times rows."""

    @property
    def held_bits(self) -> int:
        """Everything held."""
        return self.tape_bits + self.lane_bits + self.stored_bits

    @property
    def overhead(self) -> float:
        """Held over ideal; 1 is the entropy limit. NaN where nothing has to be held at all."""
        return self.held_bits / self.ideal_bits if self.ideal_bits else float("nan")

    @property
    def savings(self) -> float:
        """Storing all hidden states over held; infinite where nothing is held."""
        return self.naive_bits / self.held_bits if self.held_bits else float("inf")


@dataclass(frozen=True)
class TapeReport:
    """What a module's last forward pass in training holds for its backward pass.

    Not counted are the input and the weights, and the final states that it starts from: 32 bits a
    unit and row (40 where a state is 2 or more), however long the sequence.
    """

    layers: list[LayerReport] = field(default_factory=list)
    """One a layer and direction, in the order of the state."""

    @property
    def total(self) -> LayerReport:
        """All layers and directions together."""
        return LayerReport(
            name="total",
            tape_bits=sum(layer.tape_bits for layer in self.layers),
            lane_bits=sum(layer.lane_bits for layer in self.layers),
            stored_bits=sum(layer.stored_bits for layer in self.layers),
            ideal_bits=sum(layer.ideal_bits for layer in self.layers),
            naive_bits=sum(layer.naive_bits for layer in self.layers),
            unit_steps=sum(layer.unit_steps for layer in self.layers),
        )

    @property
    def held_bits(self) -> int:
        """Bits held: tape, lanes, stored units, everything."""
        return self.total.held_bits

    @property
    def ideal_bits(self) -> float:
        """The entropy limit: the sum of -log2 z over taped units, and 32 a stored number."""
        return self.total.ideal_bits

    @property
    def naive_bits(self) -> int:
        """Storing all hidden states in 32 bits."""
        return self.total.naive_bits

    @property
    def unit_steps(self) -> int:
        """Units that the reverse pass brings back, times steps times rows."""
        return self.total.unit_steps

    @property
    def overhead(self) -> float:
        """Held over ideal; 1 is the entropy limit."""
        return self.total.overhead

    @property
    def savings(self) -> float:
        """Storing all hidden states over held."""
        return self.total.savings

    def __str__(self) -> str:
        header = (
            f"{'layer':<20}{'held bits':>14}{'tape':>14}{'lanes':>10}{'stored':>14}"
            f"{'ideal':>14}{'32-bit':>14}{'held/ideal':>12}{'savings':>9}"
        )
        rows = self.layers if len(self.layers) == 1 else [*self.layers, self.total]
        lines = [
            f"{row.name:<20}{row.held_bits:>14,}{row.tape_bits:>14,}{row.lane_bits:>10,}"
            f"{row.stored_bits:>14,}{row.ideal_bits:>14,.0f}{row.naive_bits:>14,}"
            f"{_or_dash(row.overhead, '.3f'):>12}{_or_dash(row.savings, '.1f', 'x'):>9}"
            for row in rows
        ]
        return "\n".join([header, *lines])


def _or_dash(ratio: float, form: str, unit: str = "") -> str:
    """A ratio, or a dash where there is nothing to divide by."""
    return f"{ratio:{form}}{unit}" if math.isfinite(ratio) else "-"


class LiveBytes:
    """Bytes of the tensors that came into being in a `live_bytes` block, every storage once."""

    now: int
    """Bytes alive; goes on falling after the block, as tensors are freed."""

    peak: int
    """The most there were at once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        # Of every storage seen: the bytes that are not counted, and those that are.
        self._storages: dict[ref[torch.UntypedStorage], tuple[int, int]] = {}

    def reset_peak(self) -> None:
        """Let `peak` begin again at what is alive now."""
        self.peak = self.now

    def _see(self, tensor: Tensor, *, new: bool) -> None:
        """Count a tensor's storage as it is now. One not seen before is counted if ``new``; of
        one from outside the block only what it grows by is."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        key = ref(storage, self._freed)
        outside, before = self._storages.get(key, (0 if new else size, 0))
        counted = max(0, size - outside)
        self._storages[key] = (outside, counted)
        self.now += counted - before
        self.peak = max(self.peak, self.now)

    def _freed(self, key: ref[torch.UntypedStorage]) -> None:
        _, counted = self._storages.pop(key)
        self.now -= counted


class _Watch(TorchDispatchMode):
    """Shows a `LiveBytes` what every operation takes and returns, those of backward included."""

    def __init__(self, account: LiveBytes) -> None:
        TorchDispatchMode.__init__(self)
        self._account = account

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `torch.tensor` and its like: the argument is where the new tensor is first seen.
        fresh = func is torch.ops.aten.lift_fresh.default
        self._show((args, kwargs), new=fresh)
        result = func(*args, **kwargs)
        self._show(result, new=True)
        return result

    def _show(self, tree: Any, *, new: bool) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._account._see(leaf, new=new)


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Measure the peak of live tensor bytes of what runs inside, kernel scratch included.

    ::

        with live_bytes() as memory:
            loss = model(x).sum()
            loss.backward()
        print(memory.peak)

    Only tensors created inside are counted, and what those from outside grow by; memory that an
    operator of torch uses internally and frees before it returns is not seen (the peak of the
    process shows it).
    """
    account = LiveBytes()
    with _Watch(account):
        yield account

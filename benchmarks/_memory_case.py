"""One training step of a small language model, measured in a process of its own.

Run by `benchmarks.memory`; prints a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import revrnn

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Case:
    """What to measure; sizes as in the shapes of the docs."""

    method: str
    steps: int
    batch: int = 8
    hidden: int = 256
    embedding: int = 256
    vocabulary: int = 10_000
    forget_bits: float = 3.0
    segment: int = 64
    """Steps a checkpointed segment, for the methods that have one."""
    threads: int = 2
    repeats: int = 1


class Model(nn.Module):
    """Embedding, one recurrent layer, softmax over the vocabulary: the loss summed over a batch."""

    def __init__(self, case: Case, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn
        self.stem = nn.Embedding(case.vocabulary, case.embedding)
        self.decoder = nn.Linear(case.hidden, case.vocabulary)

    def head(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.decoder(outputs).flatten(0, 1)  # (C, N, H) -> (C*N, V)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def plain(model: Model, x: Tensor, y: Tensor, case: Case) -> Tensor:
    """The whole sequence at once, as one writes it first."""
    outputs, _ = model.rnn(model.stem(x))
    return model.head(outputs, y)


def checkpointed(model: Model, x: Tensor, y: Tensor, case: Case) -> Tensor:
    """Segments through torch.utils.checkpoint, each with its part of the head."""

    def segment(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs, (h, c) = model.rnn(model.stem(x), (h, c))
        return model.head(outputs, y), h, c

    h = c = torch.zeros(1, case.batch, case.hidden)
    total = torch.zeros(())
    for first in range(0, len(x), case.segment):
        part = slice(first, first + case.segment)
        loss, h, c = checkpoint(segment, x[part], y[part], h, c, use_reentrant=False)
        total = total + loss
    return total


def streamed(model: Model, x: Tensor, y: Tensor, case: Case) -> Tensor:
    loss, _ = revrnn.stream(model.rnn, x, stem=model.stem, head=model.head, targets=y)
    return loss


def streamed_checkpointed(model: Model, x: Tensor, y: Tensor, case: Case) -> Tensor:
    loss, _ = revrnn.stream(
        model.rnn, x, stem=model.stem, head=model.head, targets=y, checkpoint_every="auto"
    )
    return loss


def _torch(kind: type[nn.RNNBase]) -> Callable[[Case], nn.Module]:
    return lambda case: kind(case.embedding, case.hidden)


def _reversible(kind: type[revrnn.RevGRU] | type[revrnn.RevLSTM]) -> Callable[[Case], nn.Module]:
    return lambda case: kind(case.embedding, case.hidden, max_forget_bits=case.forget_bits)


Loss = Callable[[Model, Tensor, Tensor, Case], Tensor]
METHODS: dict[str, tuple[Callable[[Case], nn.Module], Loss]] = {
    "nn.GRU": (_torch(nn.GRU), plain),
    "nn.LSTM": (_torch(nn.LSTM), plain),
    "nn.LSTM checkpointed": (_torch(nn.LSTM), checkpointed),
    "RevGRU drop-in": (_reversible(revrnn.RevGRU), plain),
    "RevLSTM drop-in": (_reversible(revrnn.RevLSTM), plain),
    "RevGRU streamed": (_reversible(revrnn.RevGRU), streamed),
    "RevLSTM streamed": (_reversible(revrnn.RevLSTM), streamed),
    "RevLSTM streamed, auto": (_reversible(revrnn.RevLSTM), streamed_checkpointed),
}


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: the process peak is measured on Linux")


def _give_back() -> None:
    """Have the C library return what it keeps of freed memory, or the step would find there what it
    needs, and nobody would see it take it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def measure(case: Case) -> dict[str, object]:
    """Peak memory of a step above what the process had before it, and seconds a step."""
    torch.manual_seed(0)
    torch.set_num_threads(case.threads)
    build, loss_of = METHODS[case.method]
    model = Model(case, build(case))
    x, y = torch.randint(case.vocabulary, (2, case.steps, case.batch)).unbind(0)

    def step(steps: int) -> None:
        loss = loss_of(model, x[:steps], y[:steps], case)
        (loss / (steps * case.batch)).backward()
        model.zero_grad(set_to_none=True)

    step(min(case.steps, 16))  # libraries load and set up their threads: not the step's memory
    _give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
    base = _status("VmRSS")
    seconds = []
    for _ in range(case.repeats):
        start = perf_counter()
        step(case.steps)
        seconds.append(perf_counter() - start)
    return {**asdict(case), "peak": _status("VmHWM") - base, "seconds": sorted(seconds)}


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))

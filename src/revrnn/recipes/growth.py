"""What a state that never forgets does in a language model (the paper's appendix A): it grows.

Two language models, one without and one with forgetting, with the same weights at first, read the
same text side by side; the norm of their states and their losses are recorded. Nothing is dropped
and weights do not decay.

Letters in shapes: T time steps, N batch rows, E = H units, V words.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from revrnn import RevGRU, StateOverflowError, truncated
from revrnn.recipes import checkpoints, corpora
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.provenance import provenance
from revrnn.recipes.stopping import Signals
from revrnn.recipes.training import seed_of

FORGET: dict[str, Literal["none", "fractional"]] = {"nf-revgru": "none", "revgru": "fractional"}
"""The two models."""


@dataclass(frozen=True)
class Arguments:
    """The text, the models and their training; learning rate, clipping, batch and length are those
    of the paper's language models."""

    data: str = "ptb"
    """ptb, wikitext2, demo, or a folder with train.txt, valid.txt and test.txt."""
    hidden: int = 100
    """Units of the layer, and features of the embedding, which is also the output matrix."""
    batch: int = 20
    """Rows of text."""
    length: int = 70
    """Time steps of a segment; the state is carried from one to the next."""
    steps: int = 300
    """Segments after which it ends."""
    minutes: float | None = None
    """Minutes after which it ends."""
    learning_rate: float = 20.0
    """Of SGD."""
    clip: float = 0.1
    """Largest norm of a gradient."""
    seed: int = 1
    """Of weights."""

    def __post_init__(self) -> None:
        for name in ("hidden", "batch", "length", "steps"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if self.hidden % 2:
            raise RecipeError(f"hidden must be even, got {self.hidden}.")
        for name in ("learning_rate", "clip", "minutes"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise RecipeError(f"{name} must be positive and finite, got {value:g}.")


@dataclass(frozen=True)
class Row:
    """One model after one segment; NaN where the segment was not read to its end."""

    model: str
    step: int
    """Segments before this one."""
    loss: float
    """Nats a word, on this segment."""
    norm: float
    """Of the state after the segment: sqrt(sum of h^2), on average over the rows of text."""
    largest: float
    """Of the state after the segment: the largest |h|."""
    overflow: int
    """1: the state left its range in this segment, so there was no training step, and the next
    segment begins with a state of zeros."""


class _Reader:
    """A language model and its training, a segment at a time."""

    def __init__(self, model: str, words: int, arguments: Arguments) -> None:
        torch.manual_seed(seed_of("weights", arguments.seed))
        size = arguments.hidden
        self.name, self.arguments = model, arguments
        self.embedding = nn.Embedding(words, size)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.rnn = RevGRU(size, size, forget=FORGET[model])
        self.bias = nn.Parameter(torch.zeros(words))
        self.parameters = [self.embedding.weight, *self.rnn.parameters(), self.bias]
        self.optimizer = torch.optim.SGD(self.parameters, lr=arguments.learning_rate)
        self.state: Tensor | None = None

    def read(self, step: int, words: Tensor, targets: Tensor) -> Row:
        """Train on a segment (T, N)."""
        try:
            outputs, state = self.rnn(self.embedding(words), self.state)  # (T, N, H), (1, N, H)
        except StateOverflowError:
            self.state = None
            return Row(self.name, step, math.nan, math.nan, math.nan, overflow=1)
        logits = functional.linear(outputs, self.embedding.weight, self.bias)  # (T, N, V)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.arguments.clip)
        self.optimizer.step()
        self.state = state.detach()
        norm = float(self.state.norm(dim=2).mean())
        return Row(self.name, step, float(loss.detach()), norm, float(self.state.abs().max()), 0)


def run(arguments: Arguments, path: Path) -> list[Row]:
    """Train both models, and write a row a segment and model to a CSV file; beside it, a JSON file
    says how and where."""
    source = provenance()
    corpus = corpora.load(arguments.data)
    table = corpora.columns(corpus.train, arguments.batch, "train")  # (T, N)
    readers = [_Reader(model, len(corpus.vocabulary), arguments) for model in FORGET]
    rows: list[Row] = []
    started = written = time.monotonic()
    minutes = math.inf if arguments.minutes is None else arguments.minutes
    with Signals() as signals, tqdm(total=arguments.steps, unit=" segments", disable=None) as bar:
        for step, (words, targets) in enumerate(_segments(table, arguments.length)):
            rows += [reader.read(step, words, targets) for reader in readers]
            _show(bar, rows[-len(readers) :])
            now = time.monotonic()
            if signals.asked or step + 1 == arguments.steps or now - started > 60 * minutes:
                break
            if now - written > 10:
                _write(path, rows)
                written = now
    _write(path, rows)
    description = {**source, "arguments": asdict(arguments)}
    data = json.dumps(description, indent=2) + "\n"
    checkpoints.write(path.with_suffix(".json"), data.encode())
    signals.raise_if_asked()
    return rows


def _segments(table: Tensor, length: int) -> Iterator[tuple[Tensor, ...]]:
    """Of the text (T, N), over and over: words and targets (length, N)."""
    while True:
        for segment in truncated(table[:-1], table[1:], length=length):
            yield segment.tensors


def _show(bar: tqdm[Any], rows: Sequence[Row]) -> None:
    shown = [
        f"{row.model} overflow"
        if row.overflow
        else f"{row.model} loss {row.loss:.1f} norm {row.norm:.0f}"
        for row in rows
    ]
    bar.set_postfix_str(", ".join(shown), refresh=False)
    bar.update()


def overflows(rows: Sequence[Row], model: str) -> list[int]:
    """The segments in which a model's state left its range."""
    return [row.step for row in rows if row.model == model and row.overflow]


# --------------------------------------------------------------------------------------------- rows


def _write(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, [item.name for item in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in asdict(row).items()})
    checkpoints.write(path, text.getvalue().encode())


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def read(path: Path) -> list[Row]:
    """The rows that `run` wrote."""
    hints = get_type_hints(Row)
    try:
        with path.open(newline="") as file:
            return [
                Row(**{name: hints[name](text or "nan") for name, text in row.items()})
                for row in csv.DictReader(file)
            ]
    except FileNotFoundError as error:
        raise RecipeError(f"{path} is not there: `revrnn toy growth` writes it.") from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read as rows of `revrnn toy growth`.") from error

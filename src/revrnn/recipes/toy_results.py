"""Results on the toy tasks: rows of a CSV file, and the paper's table made from them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from revrnn.recipes import checkpoints, markdown
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.toy import BITS, TOKENS
from revrnn.recipes.toy_training import Arguments, Progress

HIDDEN, LENGTHS = (8, 16, 32), (20, 35, 50)
"""The paper's sizes."""


# -------------------------------------------------------------------------------------- bits a unit


def bits_a_unit(tokens: float, length: int, hidden: int) -> float:
    """``3 (tokens - length / 8) / hidden``: what chance gets right is not counted, and each other
    token right is 3 bits that the state held."""
    return BITS * (tokens - length / TOKENS) / hidden


def bits_shown(loss: float, length: int, hidden: int) -> float:
    """``length (3 - loss / ln 2) / hidden``, with the cross-entropy ``loss`` in nats a token.

    A lower bound of the information about the sequence, in bits a unit, that the final state of an
    NF model on the repeat task holds, or the state of any model on the memorisation task after the
    last token: -log2 of the probability the model gives to the sequence is at least what is left
    of its 3 T bits once the state is known, on average.
    """
    return length * max(0.0, BITS - loss / math.log(2)) / hidden


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's table, as printed."""

    hidden: int
    length: int
    nf_tokens: float
    """NF-RevGRU, repeat."""
    nf_bits: float
    lstm_tokens: float
    """LSTM, memorise."""
    lstm_bits: float


PAPER = (
    PaperRow(8, 20, 7.9, 2.0, 7.4, 1.8),
    PaperRow(8, 35, 13.1, 3.3, 9.7, 2.0),
    PaperRow(8, 50, 18.6, 4.6, 13.0, 2.5),
    PaperRow(16, 20, 19.9, 3.3, 13.7, 2.1),
    PaperRow(16, 35, 25.4, 3.9, 14.3, 1.9),
    PaperRow(16, 50, 27.3, 3.9, 17.2, 2.1),
    PaperRow(32, 20, 20.0, 2.6, 20.0, 2.6),
    PaperRow(32, 35, 35.0, 5.6, 20.6, 2.4),
    PaperRow(32, 50, 47.9, 6.2, 21.5, 2.3),
)


def fits(printed: float, tokens: float, length: int, hidden: int) -> bool:
    """Whether a figure of the paper is what `bits_a_unit` gives; both it and ``tokens`` have one
    decimal."""
    slack = 0.05 + 0.05 * BITS / hidden
    return abs(printed - bits_a_unit(tokens, length, hidden)) <= slack + 1e-9


# --------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Result:
    """A run and what came of it."""

    date: str
    commit: str
    """With a ``+`` behind: sources differed from it."""
    revrnn: str
    kernels: str
    torch: str
    cpu: str
    cores: str
    threads: str
    command: str
    task: str
    model: str
    hidden: int
    length: int
    batch: int
    learning_rate: float
    eval_sequences: int
    seed: int
    steps: int
    """Done; fewer than asked for if every token was right."""
    seconds: float
    tokens: float
    """Right, of ``length``, on average; the best evaluation of the run."""
    best_step: int
    """The step of that evaluation."""
    loss: float
    """The lowest cross-entropy of an evaluation, nats a token."""

    @staticmethod
    def of(arguments: Arguments, progress: Progress, source: dict[str, Any]) -> Result | None:
        """None before the first evaluation."""
        best = progress.best
        if best is None:
            return None
        return Result(
            **source,
            command=command(arguments, progress.step),
            **asdict(arguments),
            steps=progress.step,
            seconds=round(progress.seconds, 1),
            tokens=round(best["tokens"], 4),
            best_step=int(best["step"]),
            loss=round(progress.loss, 6),
        )

    @property
    def run(self) -> tuple[object, ...]:
        """What makes a run, but for how long it is."""
        return tuple(getattr(self, item.name) for item in fields(Arguments))

    def at_least(self, steps: int) -> bool:
        """Whether a run of so many steps could do no better."""
        return self.steps >= steps or self.tokens == self.length


def command(arguments: Arguments, steps: int) -> str:
    """What starts such a run."""
    parts = ["revrnn toy", arguments.task]
    for item in fields(Arguments):
        value = getattr(arguments, item.name)
        named = item.name in ("model", "hidden", "length", "batch", "seed")
        if item.name != "task" and (named or value != item.default):
            parts.append(f"--{item.name.replace('_', '-')} {value}")
    return " ".join([*parts, f"--steps {steps}"])


def read(path: Path) -> list[Result]:
    """The rows of a file that `add` made."""
    hints = get_type_hints(Result)
    try:
        with path.open(newline="") as file:
            return [
                Result(**{name: hints[name](value) for name, value in row.items()})
                for row in csv.DictReader(file)
            ]
    except FileNotFoundError as error:
        raise RecipeError(
            f"{path} is not there: it is where runs of toy tasks leave rows."
        ) from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read as rows of toy tasks.") from error


def add(path: Path, result: Result) -> None:
    """Write a row, in the place of an earlier one of the same run."""
    rows = [row for row in read(path) if row.run != result.run] if path.exists() else []
    text = io.StringIO()
    writer = csv.DictWriter(text, [item.name for item in fields(Result)], lineterminator="\n")
    writer.writeheader()
    for row in sorted([*rows, result], key=lambda row: row.run):
        writer.writerow(asdict(row))
    checkpoints.write(path, text.getvalue().encode())


def find(rows: Iterable[Result], **wanted: Any) -> Result | None:
    """The row with these values that saw the most sequences."""
    there = [
        row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())
    ]
    return max(there, key=lambda row: row.steps * row.batch, default=None)


# -------------------------------------------------------------------------------------------- table

HEADER = (
    ("units", "tokens"),
    ("NF-RevGRU repeats", "bits a unit", "at least", "paper's", "bits a unit"),
    ("LSTM memorises", "bits a unit", "at least", "paper's", "bits a unit"),
    ("RevGRU repeats", "at step"),
)


def table(rows: Sequence[Result]) -> str:
    """The paper's table in Markdown: tokens right, `bits_a_unit` and `bits_shown`, beside the
    paper's; and what a RevGRU that may forget gets right. A ``*`` marks where the paper prints
    another figure than its own tokens give."""
    lines = []
    for paper in PAPER:
        sizes = {"hidden": paper.hidden, "length": paper.length}
        cells = [str(paper.hidden), str(paper.length)]
        for task, model, tokens, printed in (
            ("repeat", "nf-revgru", paper.nf_tokens, paper.nf_bits),
            ("memorise", "lstm", paper.lstm_tokens, paper.lstm_bits),
        ):
            row = find(rows, task=task, model=model, **sizes)
            cells += [""] * 3 if row is None else _figures(row)
            mark = "" if fits(printed, tokens, **_size(paper)) else "*"
            cells += [f"{tokens:.1f}", f"{bits_a_unit(tokens, **_size(paper)):.1f}{mark}"]
        free = find(rows, task="repeat", model="revgru", **sizes)
        cells += [""] * 2 if free is None else [f"{free.tokens:.1f}", f"{free.best_step:,}"]
        lines.append(cells)
    header = [cell for group in HEADER for cell in group]
    return markdown.table(header, lines)


def _size(paper: PaperRow) -> dict[str, int]:
    return {"length": paper.length, "hidden": paper.hidden}


def _figures(row: Result) -> list[str]:
    return [
        f"{row.tokens:.1f}",
        f"{bits_a_unit(row.tokens, row.length, row.hidden):.1f}",
        f"{bits_shown(row.loss, row.length, row.hidden):.1f}",
    ]

"""The table of language-model runs, from what is in their folders, beside the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revrnn.plots import DESCRIPTION, Run
from revrnn.recipes import markdown
from revrnn.recipes.presets import LIMITS, PRESETS, Preset

COUNTERPARTS = {"revgru": "gru", "revlstm": "lstm"}
"""What a reversible model takes the place of."""

HEADER = (
    "run",
    "parameters",
    "epochs",
    "valid perplexity",
    "x torch.nn",
    "paper's",
    "tape, bits a unit a step",
    "ideal",
    "tape / ideal",
    "32-bit / tape",
    "32-bit / paper's buffer",
    "paper's",
)


@dataclass(frozen=True)
class Row:
    """A run: what it was asked for, and its metrics."""

    run: Run
    parameters: int
    arguments: dict[str, Any]

    @staticmethod
    def load(folder: Path, epochs: int | None = None) -> Row:
        """Of its first ``epochs`` epochs, None: of all. Raises a ValueError of one sentence if the
        folder does not hold a run."""
        run = Run.load(folder)
        if epochs is not None:
            run = run.until(epochs)
        try:
            description = json.loads((folder / DESCRIPTION).read_text())
            return Row(run, int(description["parameters"]), dict(description["arguments"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{folder / DESCRIPTION} cannot be read as that of a run.") from error

    @property
    def valid(self) -> float:
        """The best validation perplexity."""
        return min(self.run.points("valid_perplexity")[1])

    def last(self, column: str) -> float | None:
        """Of the last epoch, that is on the most trained weights; None where it is not known."""
        values = self.run.columns.get(column, [])
        return values[-1] if values else None

    def counterpart(self, rows: Sequence[Row]) -> Row | None:
        """The run of torch.nn's layer in its place, among ``rows``: of the same text, sizes, seed,
        recipe and number of epochs."""
        model = COUNTERPARTS.get(self.arguments["model"])
        own = {"max_forget_bits", "forget", "estimator", "temperature", "streaming", "model"}
        epochs = len(self.run.columns["epoch"])
        for row in rows:
            same = all(
                row.arguments.get(name) == value
                for name, value in self.arguments.items()
                if name not in own
            )
            if same and row.arguments["model"] == model and len(row.run.columns["epoch"]) == epochs:
                return row
        return None

    def paper(self) -> Preset | None:
        """The row of the paper's tables with the same corpus, model, layers and limit, at the
        paper's sizes."""
        if self.arguments["forget"] != "fractional":
            return None
        names = {"data", "model", "layers", "max_forget_bits"}
        if len(str(self.arguments["hidden"]).split(",")) > self.arguments["layers"]:
            return None
        limits = LIMITS.values() if self.arguments["model"] in COUNTERPARTS else (None,)
        if self.arguments["max_forget_bits"] not in limits:
            return None
        for preset in PRESETS.values():
            changes = {"max_forget_bits": None, "layers": 1, **preset.changes}
            if all(changes[name] == self.arguments[name] for name in names):
                return preset
        return None

    def cells(self, rows: Sequence[Row]) -> list[str]:
        other, paper = self.counterpart(rows), self.paper()
        tape, ideal = self.last("tape_bits"), self.last("ideal_bits")
        return [
            self.run.name,
            f"{self.parameters:,}",
            str(len(self.run.columns["epoch"])),
            f"{self.valid:.1f}",
            _shown(None if other is None else self.valid / other.valid, 3),
            _shown(paper.perplexity if paper else None, 1),
            _shown(tape, 3),
            _shown(ideal, 3),
            _shown(tape / ideal if tape and ideal else None, 3),
            _shown(self.last("savings"), 1),
            _shown(self.last("paper_savings"), 1),
            _shown(paper.savings if paper else None, 1),
        ]


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def table(folders: Sequence[Path], epochs: int | None = None) -> str:
    """The table in Markdown, of all epochs or of the first so many. What is measured on the tape is
    of the last of them; "32-bit" is storing the hidden states as 32-bit numbers."""
    rows = [Row.load(folder, epochs) for folder in folders]
    return markdown.table(HEADER, [row.cells(rows) for row in rows])

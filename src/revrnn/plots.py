"""Plots of runs, from the metrics.csv in their folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, ScalarFormatter

METRICS, DESCRIPTION = "metrics.csv", "run.json"


@dataclass(frozen=True)
class Run:
    """A run folder's metrics: of each column a number an epoch, None where it is not known."""

    name: str
    columns: dict[str, list[float | None]]
    best: float | None = None
    """The perplexity on the validation text that no model can beat, where it is known."""

    @staticmethod
    def load(folder: Path) -> Run:
        """Raises a ValueError of one sentence if there is nothing to plot."""
        path = folder / METRICS
        try:
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            columns = {
                name: [float(row[name]) if row[name] else None for row in rows]
                for name in (rows[0] if rows else {})
            }
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} has no {METRICS}: it is no run folder, or has finished no epoch yet."
            ) from error
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as metrics of a run.") from error
        if not columns.get("epoch"):
            raise ValueError(f"{path} has no epochs.")
        return Run(folder.resolve().name, columns, _best(folder))

    def until(self, epochs: int) -> Run:
        """The run as it was after so many epochs; all of it, if it has fewer."""
        first = {name: values[:epochs] for name, values in self.columns.items()}
        return replace(self, columns=first)

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """Epochs, and what is known in them."""
        values = self.columns.get(column, [])
        pairs = [
            (epoch, value)
            for epoch, value in zip(self.columns["epoch"], values, strict=False)
            if epoch is not None and value is not None
        ]
        return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def _best(folder: Path) -> float | None:
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        return float(description["best_possible"]["valid"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def curves(runs: Sequence[Run], path: Path) -> None:
    """Perplexity on the training and the validation text, side by side."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, text in ((left, "train"), (right, "valid")):
        for index, run in enumerate(runs):
            _line(axes, run.points(f"{text}_perplexity"), index, "-", run.name)
        for best in {run.best for run in runs} - {None}:
            axes.axhline(best, color="black", linestyle=":", linewidth=1, label="best possible")
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(ScalarFormatter())
        _finish(axes, "perplexity")
    left.set_title("training text")
    right.set_title("validation text")
    right.legend(fontsize="small")
    _write(figure, path)


STYLES: dict[str, Literal["-", "--", ":"]] = {
    "savings": "-",
    "ideal_savings": "--",
    "paper_savings": ":",
}
LABELS = {
    "savings": "entropy tape",
    "ideal_savings": "entropy limit",
    "paper_savings": "the paper's buffer",
}


def savings(runs: Sequence[Run], path: Path) -> None:
    """How many times the memory of the tape hidden states take in 32 bits, over training. Runs
    without a tape are left out; raises a ValueError if none is left."""
    taped = [run for run in runs if run.points("savings")[1]]
    if not taped:
        raise ValueError("none of these runs has a tape, so there are no savings to plot.")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(taped):
        for column, style in STYLES.items():
            _line(axes, run.points(column), index, style)
    axes.set_ylim(bottom=0)
    _finish(axes, "32-bit storage / memory held")
    handles = [Line2D([], [], color=f"C{index}", label=run.name) for index, run in enumerate(taped)]
    handles += [
        Line2D([], [], color="gray", linestyle=style, label=LABELS[column])
        for column, style in STYLES.items()
        if any(run.points(column)[1] for run in taped)
    ]
    axes.set_title("memory for hidden states")
    axes.legend(handles=handles, fontsize="small")
    _write(figure, path)


def _line(
    axes: Axes,
    points: tuple[list[float], list[float]],
    color: int,
    style: str,
    label: str | None = None,
) -> None:
    # A single epoch shows as a dot.
    marker = "o" if len(points[0]) < 15 else None
    axes.plot(*points, color=f"C{color}", linestyle=style, marker=marker, markersize=3, label=label)


def _finish(axes: Axes, what: str) -> None:
    axes.set_xlabel("epoch")
    axes.set_ylabel(what)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(which="both", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _write(figure: Figure, path: Path) -> None:
    """Without pyplot: no display, no state shared with the program around."""
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=150)

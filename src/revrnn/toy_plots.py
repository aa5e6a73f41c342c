"""Plots of runs on the toy tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from revrnn.recipes.growth import Row
from revrnn.recipes.toy import TOKENS
from revrnn.recipes.toy_results import PAPER, Result, bits_a_unit, find

LABELS = {
    ("repeat", "nf-revgru"): "repeat, NF-RevGRU",
    ("memorise", "lstm"): "memorise, LSTM",
}
STYLES = {("repeat", "nf-revgru"): "-", ("memorise", "lstm"): "--"}


def capacity(rows: Sequence[Result], path: Path) -> None:
    """Left, bits a unit against hidden size, beside the paper's; right, tokens right against
    length, with and without forgetting."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bits(left, rows)
    _tokens(right, rows)
    for axes in (left, right):
        axes.grid(which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    write(figure, path)


def _bits(axes: Axes, rows: Sequence[Result]) -> None:
    lengths = sorted({row.length for row in rows})
    hidden = sorted({row.hidden for row in rows})
    for index, length in enumerate(lengths):
        for task, model in LABELS:
            found = [
                find(rows, task=task, model=model, length=length, hidden=size) for size in hidden
            ]
            points = [
                (row.hidden, bits_a_unit(row.tokens, length, row.hidden)) for row in found if row
            ]
            label = f"{LABELS[task, model]}, length {length}"
            style = STYLES[task, model]
            axes.plot(*_columns(points), f"C{index}{style}", marker="o", markersize=4, label=label)
            # The paper's, from its tokens: the bits that it prints do not always fit them.
            paper = [
                (row.hidden, bits_a_unit(tokens, length, row.hidden))
                for row in PAPER
                if row.length == length
                for tokens in [row.nf_tokens if task == "repeat" else row.lstm_tokens]
            ]
            marker = "^" if task == "repeat" else "v"
            axes.plot(*_columns(paper), f"C{index}{marker}", markersize=7, fillstyle="none")
    axes.plot([], [], "k^", fillstyle="none", label="the paper's repeat, NF-RevGRU")
    axes.plot([], [], "kv", fillstyle="none", label="the paper's memorise, LSTM")
    axes.set_xscale("log", base=2)
    axes.set_xticks(hidden)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("hidden units")
    axes.set_ylabel("bits a unit above chance")
    _legend(axes)
    axes.set_title("what the state holds")


def _tokens(axes: Axes, rows: Sequence[Result]) -> None:
    lengths = sorted({row.length for row in rows})
    hidden = sorted({row.hidden for row in rows})
    for index, size in enumerate(hidden):
        # Those with forgetting get everything right: wide lines below narrow ones.
        wide = 2.0 * (len(hidden) - index)
        for model, label, style, width in (
            ("revgru", "with", "--", wide),
            ("nf-revgru", "no", "-", 1.5),
        ):
            found = [
                find(rows, task="repeat", model=model, length=length, hidden=size)
                for length in lengths
            ]
            points = [(row.length, row.tokens) for row in found if row]
            axes.plot(
                *_columns(points),
                f"C{index}{style}",
                linewidth=width,
                marker="o",
                markersize=4,
                label=f"{label} forgetting, {size} units",
            )
    axes.plot(lengths, [length / TOKENS for length in lengths], ":", color="gray", label="chance")
    axes.set_xticks(lengths)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("tokens repeated rightly")
    _legend(axes)
    axes.set_title("repeating with and without forgetting")


NAMES = {"nf-revgru": "NF-RevGRU", "revgru": "RevGRU"}


def growth(rows: Sequence[Row], path: Path) -> None:
    """The norm of the state and the loss over training, of models with and without forgetting; a
    cross where a state left its range."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (model, name) in enumerate(NAMES.items()):
        own = [row for row in rows if row.model == model]
        steps = [float(row.step + 1) for row in own]
        for axes, values in ((left, [row.norm for row in own]), (right, [row.loss for row in own])):
            # NaN, after an overflow, is a gap in the line: a single value in between needs a dot.
            axes.plot(steps, values, f"C{index}.-", markersize=3, linewidth=0.8, label=name)
    lost = [float(row.step + 1) for row in rows if row.overflow]
    for axes in (left, right):
        axes.set_yscale("log")
        if lost:
            top = [0.98] * len(lost)
            label = "state left its range"
            axes.plot(lost, top, "kx", transform=axes.get_xaxis_transform(), ms=4, label=label)
        axes.set_xlabel("segment")
        axes.grid(which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("norm of the state")
    right.set_ylabel("loss, nats a word")
    left.legend(fontsize="small")
    write(figure, path)


def _legend(axes: Axes) -> None:
    """Below, where it hides nothing."""
    axes.legend(
        fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, handlelength=4
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def write(figure: Figure, path: Path) -> None:
    """Without pyplot: no display, no state shared with the program around."""
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=150)

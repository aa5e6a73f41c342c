"""Plots of runs on the toy tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from revrnn.recipes.toy import TOKENS
from revrnn.recipes.toy_results import PAPER, Result, bits_a_unit, find

LABELS = {
    ("repeat", "nf-revgru"): "repeat, NF-RevGRU",
    ("memorise", "lstm"): "memorise, LSTM",
    ("repeat", "revgru"): "repeat, RevGRU",
}
STYLES = {("repeat", "nf-revgru"): "-", ("memorise", "lstm"): "--", ("repeat", "revgru"): ":"}


def capacity(rows: Sequence[Result], path: Path) -> None:
    """Left, bits a unit against hidden size, beside the paper's; right, tokens right against
    length, with and without forgetting."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
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
        for task, model in (("repeat", "nf-revgru"), ("memorise", "lstm")):
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
    axes.legend(fontsize="x-small")
    axes.set_title("what the state holds")


def _tokens(axes: Axes, rows: Sequence[Result]) -> None:
    lengths = sorted({row.length for row in rows})
    hidden = sorted({row.hidden for row in rows})
    for index, size in enumerate(hidden):
        for task, model in (("repeat", "revgru"), ("repeat", "nf-revgru")):
            found = [
                find(rows, task=task, model=model, length=length, hidden=size) for length in lengths
            ]
            points = [(row.length, row.tokens) for row in found if row]
            label = f"{'with' if model == 'revgru' else 'no'} forgetting, {size} units"
            style = "--" if model == "revgru" else "-"
            axes.plot(*_columns(points), f"C{index}{style}", marker="o", markersize=4, label=label)
    axes.plot(lengths, [length / TOKENS for length in lengths], ":", color="gray", label="chance")
    axes.set_xticks(lengths)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("tokens repeated rightly")
    axes.legend(fontsize="x-small")
    axes.set_title("repeating with and without forgetting")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def write(figure: Figure, path: Path) -> None:
    """Without pyplot: no display, no state shared with the program around."""
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=150)

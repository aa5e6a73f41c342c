"""Plots of the toy tasks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("lightning_fabric")

from matplotlib.figure import Figure

from revrnn import toy_plots
from revrnn.recipes.growth import Row
from revrnn.recipes.provenance import provenance
from revrnn.recipes.toy_results import Result, bits_a_unit
from revrnn.recipes.toy_training import Arguments, Progress

PNG = b"\x89PNG"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What was drawn."""
    drawn: list[Figure] = []
    original = toy_plots.write

    def write(figure: Figure, path: Path) -> None:
        drawn.append(figure)
        original(figure, path)

    monkeypatch.setattr(toy_plots, "write", write)
    return drawn


def result(task: str, model: str, hidden: int, length: int, tokens: float) -> Result:
    rows = [{"step": 9.0, "seconds": 1.0, "tokens": tokens, "eval_loss": 1.0}]
    found = Result.of(Arguments(task, model, hidden, length), Progress(9, 1.0, rows), provenance())
    assert found is not None
    return found


def lines(figure: Figure, axes: int) -> dict[str, list[tuple[float, float]]]:
    """Points by label."""
    found = {}
    for line in figure.axes[axes].lines:
        x, y = line.get_data()
        found[str(line.get_label())] = list(zip(map(float, x), map(float, y), strict=True))
    return found


def test_capacity(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [
        result("repeat", "nf-revgru", 8, 20, 7.0),
        result("repeat", "nf-revgru", 16, 20, 12.0),
        result("repeat", "revgru", 8, 20, 20.0),
        result("repeat", "revgru", 8, 50, 50.0),
    ]
    toy_plots.capacity(rows, tmp_path / "out" / "capacity.png")
    assert (tmp_path / "out" / "capacity.png").read_bytes().startswith(PNG)
    left, right = lines(figures[0], 0), lines(figures[0], 1)
    assert left["repeat, NF-RevGRU, length 20"] == [
        (8, bits_a_unit(7, 20, 8)),
        (16, bits_a_unit(12, 20, 16)),
    ]
    assert left["memorise, LSTM, length 20"] == []
    assert right["with forgetting, 8 units"] == [(20, 20), (50, 50)]
    assert right["no forgetting, 16 units"] == [(20, 12)]
    assert right["chance"] == [(20, 2.5), (50, 6.25)]
    # The paper's three sizes, of repeat, length 20.
    papers = [line for line in figures[0].axes[0].lines if line.get_marker() == "^"]
    assert [float(y) for y in papers[0].get_ydata()] == [
        bits_a_unit(tokens, 20, hidden) for hidden, tokens in ((8, 7.9), (16, 19.9), (32, 20.0))
    ]


def test_growth(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [
        Row("nf-revgru", 0, 16.0, 200.0, 50.0, 0),
        Row("revgru", 0, 9.0, 1.0, 0.5, 0),
        Row("nf-revgru", 1, math.nan, math.nan, math.nan, 1),
        Row("revgru", 1, 8.0, 2.0, 0.5, 0),
    ]
    toy_plots.growth(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(PNG)
    norms, losses = lines(figures[0], 0), lines(figures[0], 1)
    assert norms["RevGRU"] == [(1, 1), (2, 2)]
    assert losses["RevGRU"] == [(1, 9), (2, 8)]
    assert norms["NF-RevGRU"][0] == (1, 200)
    assert math.isnan(norms["NF-RevGRU"][1][1])
    assert [x for x, _ in norms["state left its range"]] == [2]
    toy_plots.growth(rows[:2], tmp_path / "growth.png")
    assert "state left its range" not in lines(figures[1], 0)

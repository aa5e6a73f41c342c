"""The state of a language model that never forgets."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning_fabric")

from revrnn.recipes import growth
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.growth import Arguments, Row
from revrnn.recipes.stopping import StoppedError


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    rng = random.Random(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        words = " ".join(f"w{rng.randrange(20)}" for _ in range(1000))
        (folder / f"{split}.txt").write_text(f"{words}\n")
    return Arguments(str(folder), hidden=10, batch=4, length=60, steps=12)


def test_without_forgetting_the_state_grows_and_leaves_its_range(
    arguments: Arguments, tmp_path: Path
) -> None:
    rows = growth.run(arguments, tmp_path / "out" / "growth.csv")
    assert [(row.model, row.step) for row in rows] == [
        (model, step) for step in range(12) for model in ("nf-revgru", "revgru")
    ]
    never, sometimes = ([row for row in rows if row.model == model] for model in growth.FORGET)
    lost = growth.overflows(rows, "nf-revgru")
    # A unit grows by less than 1 a step, and 254 are too many.
    assert 254 // 60 <= lost[0] < 12
    norms = [row.norm for row in never[: lost[0]]]
    assert norms[-1] > 3 * norms[0]
    assert never[lost[0] - 1].largest > 254 - 60
    assert math.isnan(never[lost[0]].loss)
    assert never[lost[0] + 1].largest < 60  # since it began at zero
    assert growth.overflows(rows, "revgru") == []
    assert max(row.largest for row in sometimes) < 2
    assert max(row.loss for row in sometimes) < min(row.loss for row in never[1 : lost[0]])


def test_rows_come_back(arguments: Arguments, tmp_path: Path) -> None:
    path = tmp_path / "growth.csv"
    rows = growth.run(arguments, path)
    again = growth.read(path)
    assert len(again) == len(rows)
    for row, expected in zip(again, rows, strict=True):
        assert (row.model, row.step, row.overflow) == (
            expected.model, expected.step, expected.overflow,
        )  # fmt: skip
        for name in ("loss", "norm", "largest"):
            value = getattr(expected, name)
            assert getattr(row, name) == pytest.approx(value, rel=1e-5, nan_ok=True)
    description = json.loads((tmp_path / "growth.json").read_text())
    assert description["arguments"]["hidden"] == 10
    assert description["cpu"]


def test_a_signal_leaves_what_there_is(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = growth._Reader.read

    def read(self: growth._Reader, step: int, *tensors: torch.Tensor) -> Row:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(growth._Reader, "read", original)
        return original(self, step, *tensors)

    monkeypatch.setattr(growth._Reader, "read", read)
    with pytest.raises(StoppedError, match="SIGINT"):
        growth.run(arguments, tmp_path / "growth.csv")
    assert len(growth.read(tmp_path / "growth.csv")) == 6


def test_the_time_runs_out(arguments: Arguments, tmp_path: Path) -> None:
    rows = growth.run(replace(arguments, steps=10**9, minutes=0.001), tmp_path / "growth.csv")
    assert 2 <= len(rows) < 10**9


def test_the_text_begins_again(arguments: Arguments, tmp_path: Path) -> None:
    """1001 words in 4 rows are 5 segments of 50 or less."""
    rows = growth.run(replace(arguments, length=50, steps=12), tmp_path / "growth.csv")
    assert [row.step for row in rows[::2]] == list(range(12))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 7}, "hidden must be even, got 7"),
        ({"length": 0}, "length must be 1 or more, got 0"),
        ({"clip": 0.0}, "clip must be positive and finite, got 0"),
        ({"minutes": -1.0}, "minutes must be positive and finite, got -1"),
    ],
)
def test_arguments_that_cannot_be(
    changes: dict[str, Any], message: str, arguments: Arguments
) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(arguments, **changes)


def test_files_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "growth.csv"
    with pytest.raises(RecipeError, match="is not there: `revrnn toy growth` writes it"):
        growth.read(path)
    path.write_text("model,step\nrevgru,1\n")
    with pytest.raises(RecipeError, match="cannot be read as rows"):
        growth.read(path)


@pytest.mark.skipif("REVRNN_DATA" not in os.environ, reason="needs the Penn Treebank")
def test_on_the_penn_treebank(tmp_path: Path) -> None:
    """The paper's appendix A, in its first segments."""
    rows = growth.run(Arguments(steps=5), tmp_path / "growth.csv")
    lost = growth.overflows(rows, "nf-revgru")
    assert lost
    losses = [row.loss for row in rows if row.model == "nf-revgru"][: lost[0]]
    assert max(losses) > 100
    assert all(row.loss < 15 for row in rows if row.model == "revgru")

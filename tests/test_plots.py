"""Plots of runs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from revrnn import plots

PNG = b"\x89PNG"


def write(folder: Path, *, taped: bool = True, epochs: int = 3) -> Path:
    folder.mkdir()
    with (folder / "metrics.csv").open("w", newline="") as file:
        columns = ["epoch", "train_perplexity", "valid_perplexity", *plots.STYLES]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for epoch in range(1, epochs + 1):
            row: dict[str, object] = {"epoch": epoch}
            row |= {"train_perplexity": 100 / epoch, "valid_perplexity": 120 / epoch}
            if taped:
                row |= {"savings": 20 - epoch, "ideal_savings": 21 - epoch}
                # Not measured in the last epoch.
                row |= {"paper_savings": 10 if epoch < epochs else ""}
            writer.writerow(row)
    return folder


def test_metrics_are_read_as_numbers(tmp_path: Path) -> None:
    run = plots.Run.load(write(tmp_path / "first"))
    assert run.name == "first"
    assert run.points("savings") == ([1, 2, 3], [19, 18, 17])
    assert run.points("paper_savings") == ([1, 2], [10, 10])
    assert run.points("unheard_of") == ([], [])
    assert run.best is None
    for text, best in (("{}", None), ("[]", None), ('{"best_possible": {"valid": 30}}', 30)):
        (tmp_path / "first" / "run.json").write_text(text)
        assert plots.Run.load(tmp_path / "first").best == best


def test_several_runs_in_one_picture(tmp_path: Path) -> None:
    write(tmp_path / "first")
    (tmp_path / "first" / "run.json").write_text('{"best_possible": {"valid": 30}}')
    runs = [
        plots.Run.load(tmp_path / "first"),
        plots.Run.load(write(tmp_path / "second", taped=False, epochs=1)),
        plots.Run.load(write(tmp_path / "third", epochs=20)),
    ]
    plots.curves(runs, tmp_path / "out" / "curves.png")
    plots.savings(runs, tmp_path / "out" / "savings.png")
    for name in ("curves", "savings"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(PNG)


def test_savings_need_a_tape(tmp_path: Path) -> None:
    run = plots.Run.load(write(tmp_path / "run", taped=False))
    with pytest.raises(ValueError, match="none of these runs has a tape"):
        plots.savings([run], tmp_path / "savings.png")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"has no metrics\.csv: it is no run folder"),
        ("epoch\n", "has no epochs"),
        ("epoch,savings\n1,many\n", "cannot be read as metrics"),
        ("a,b\n1,2\n", "has no epochs"),
    ],
)
def test_folders_without_metrics(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        plots.Run.load(tmp_path)

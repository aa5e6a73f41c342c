"""The table of language-model runs."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("lightning_fabric")

from revrnn import lm_table
from revrnn.recipes.training import Arguments

SMALL = ("gru", "revgru-2bit", "lstm", "revlstm-3bit")
ALL_LIMITS = (
    *("gru", "revgru-2bit", "revgru-5bit", "revgru-nolimit"),
    *("lstm", "revlstm-3bit", "revlstm-5bit", "revlstm-nolimit"),
)


def write(
    folder: Path, valid: list[float], tape: tuple[float, float] | None = None, **changes: Any
) -> Path:
    """A run folder with these validation perplexities and, in the last epoch, bits and ideal."""
    folder.mkdir()
    columns = ["epoch", "valid_perplexity", "tape_bits", "ideal_bits", "savings", "paper_savings"]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for epoch, perplexity in enumerate(valid, start=1):
            row: dict[str, object] = {"epoch": epoch, "valid_perplexity": perplexity}
            if tape is not None and epoch == len(valid):
                row |= {"tape_bits": tape[0], "ideal_bits": tape[1], "savings": 32 / tape[0]}
                row |= {"paper_savings": 13}
            writer.writerow(row)
    arguments = asdict(Arguments(**{"hidden": "200", **changes}))
    (folder / "run.json").write_text(json.dumps({"parameters": 1234567, "arguments": arguments}))
    return folder


def cells(folders: list[Path], epochs: int | None = None) -> list[dict[str, str]]:
    header, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lm_table.table(folders, epochs).splitlines()
    )
    names = [f"{name} {header[:i].count(name)}" for i, name in enumerate(header)]
    return [dict(zip(names, line, strict=True)) for line in lines]


def test_a_row_stands_beside_its_counterpart_and_the_papers(tmp_path: Path) -> None:
    gru = write(tmp_path / "gru", [150, 100], model="gru")
    rev = write(tmp_path / "rev", [160, 99], (1.25, 1.0), model="revgru", max_forget_bits=2)
    plain, reversible = cells([gru, rev])
    assert plain["x torch.nn 0"] == plain["32-bit / tape 0"] == ""
    assert (plain["valid perplexity 0"], plain["paper's 0"]) == ("100.0", "82.2")
    assert reversible["parameters 0"] == "1,234,567"
    assert (reversible["epochs 0"], reversible["valid perplexity 0"]) == ("2", "99.0")
    assert reversible["x torch.nn 0"] == "0.990"
    assert (reversible["paper's 0"], reversible["paper's 1"]) == ("82.2", "13.8")
    assert reversible["tape / ideal 0"] == "1.250"
    assert (reversible["32-bit / tape 0"], reversible["32-bit / paper's buffer 0"]) == (
        "25.6",
        "13.0",
    )


def test_the_first_epochs_of_runs_of_different_lengths(tmp_path: Path) -> None:
    gru = write(tmp_path / "gru", [150, 100, 80], model="gru")
    rev = write(tmp_path / "rev", [160, 110, 99, 70], model="revgru", max_forget_bits=2)
    shown = {}
    for epochs in (None, 1, 2, 3, 4):
        row = cells([gru, rev], epochs)[1]
        shown[epochs] = (row["epochs 0"], row["valid perplexity 0"], row["x torch.nn 0"])
    assert shown == {
        None: ("4", "70.0", ""),
        1: ("1", "160.0", "1.067"),
        2: ("2", "110.0", "1.100"),
        3: ("3", "99.0", "1.238"),
        4: ("4", "70.0", ""),
    }


@pytest.mark.parametrize(
    ("epochs", "changes"),
    [(3, {}), (2, {"seed": 2}), (2, {"batch": 40}), (2, {"model": "lstm"}), (2, {"layers": 2})],
)
def test_runs_that_differ_otherwise_are_no_counterparts(
    tmp_path: Path, epochs: int, changes: dict[str, Any]
) -> None:
    other = write(tmp_path / "other", [100.0] * epochs, **{"model": "gru", **changes})
    own = write(tmp_path / "own", [100, 90], model="revgru", max_forget_bits=2)
    assert cells([other, own])[1]["x torch.nn 0"] == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "revgru", "max_forget_bits": 2, "forget": "discrete"},
        {"model": "revgru", "max_forget_bits": 4.0},
        {"model": "revlstm", "max_forget_bits": 1.0},
        {"model": "gru", "data": "demo"},
        {"model": "gru", "hidden": "300,200"},
    ],
)
def test_what_the_paper_has_no_row_for(tmp_path: Path, changes: dict[str, Any]) -> None:
    (row,) = cells([write(tmp_path / "run", [100], **changes)])
    assert row["paper's 0"] == row["paper's 1"] == ""


@pytest.mark.parametrize("text", ["", "{}", '{"parameters": "many", "arguments": {}}'])
def test_folders_that_say_too_little(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "run", [100], model="gru")
    (folder / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        lm_table.table([folder])


@pytest.mark.parametrize(
    ("folder", "names", "epochs"),
    [("no-dropconnect", SMALL, 8), ("no-dropconnect", ALL_LIMITS, 4), (".", SMALL, None)],
)
def test_the_page_shows_the_committed_runs(
    folder: str, names: tuple[str, ...], epochs: int | None
) -> None:
    root = Path(__file__).resolve().parents[1]
    folders = [root / "results" / "ptb" / folder / name for name in names]
    page = (root / "docs" / "language_models.md").read_text()
    assert lm_table.table(folders, epochs) in page

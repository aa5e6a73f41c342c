"""Rows of toy tasks, and the paper's table."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")

from revrnn.recipes import toy_results
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.provenance import provenance
from revrnn.recipes.toy_results import PAPER, Result, bits_a_unit, bits_shown, find, fits
from revrnn.recipes.toy_training import Arguments, Progress

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "toy"


def result(arguments: Arguments, tokens: float = 7.9, steps: int = 100) -> Result:
    rows = [{"step": float(steps), "seconds": 1.0, "tokens": tokens, "eval_loss": 1.5}]
    found = Result.of(arguments, Progress(steps, 1.0, rows), provenance())
    assert found is not None
    return found


# -- bits a unit ----------------------------------------------------------------------------------


def test_bits_of_chance_and_of_everything() -> None:
    assert bits_a_unit(20 / 8, 20, 8) == 0
    assert bits_a_unit(20, 20, 8) == 3 * 17.5 / 8
    assert bits_shown(math.log(8), 20, 8) == pytest.approx(0, abs=1e-12)
    assert bits_shown(0, 20, 8) == 3 * 20 / 8
    assert bits_shown(99, 20, 8) == 0
    # One answer in two sure and right, the other unknown: half of the bits.
    assert bits_shown(math.log(8) / 2, 20, 8) == pytest.approx(3 * 10 / 8)


def test_the_formula_is_the_papers_for_8_and_16_units() -> None:
    rows = [row for row in PAPER if row.hidden < 32]
    assert len(rows) == 6
    for row in rows:
        assert fits(row.nf_bits, row.nf_tokens, row.length, row.hidden)
        assert fits(row.lstm_bits, row.lstm_tokens, row.length, row.hidden)


def test_the_papers_figures_for_32_units_are_those_of_20() -> None:
    """None of the six fits; five are what 20 units would give, the sixth (5.6) would be 4.6."""
    rows = [row for row in PAPER if row.hidden == 32]
    assert len(rows) == 3
    as_of_20 = []
    for row in rows:
        for bits, tokens in ((row.nf_bits, row.nf_tokens), (row.lstm_bits, row.lstm_tokens)):
            assert not fits(bits, tokens, row.length, 32)
            as_of_20.append(fits(bits, tokens, row.length, 20))
    assert as_of_20 == [True, True, False, True, True, True]
    assert rows[1].nf_bits == 5.6
    assert fits(4.6, rows[1].nf_tokens, rows[1].length, 20)


def test_the_formula_would_not_fit_otherwise() -> None:
    row = PAPER[0]
    assert not fits(3 * row.nf_tokens / 8, row.nf_tokens, row.length, row.hidden)  # with chance
    assert not fits(row.nf_bits, row.nf_tokens, row.length, 16)


# -- rows -----------------------------------------------------------------------------------------


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "runs.csv"
    one, two = result(Arguments()), result(Arguments(model="lstm", learning_rate=0.01))
    toy_results.add(path, one)
    toy_results.add(path, two)
    assert toy_results.read(path) == [two, one]
    better = replace(one, steps=200, tokens=8.5)
    toy_results.add(path, better)
    assert toy_results.read(path) == [two, better]
    assert [file.name for file in path.parent.iterdir()] == ["runs.csv"]


def test_what_a_row_says() -> None:
    arguments = Arguments("memorise", "lstm", 32, 50, learning_rate=0.01)
    rows = [
        {"step": step, "seconds": 1.0, "tokens": tokens, "eval_loss": loss}
        for step, tokens, loss in ((10.0, 6.5, 2.0), (20.0, 7.5, 1.8), (30.0, 7.25, 1.75))
    ]
    found = Result.of(arguments, Progress(30, 3.5, rows), provenance())
    assert found is not None
    assert (found.tokens, found.best_step, found.loss, found.steps) == (7.5, 20, 1.75, 30)
    assert found.command == (
        "revrnn toy memorise --model lstm --hidden 32 --length 50 --batch 100 "
        "--learning-rate 0.01 --seed 1 --steps 30"
    )
    assert found.run == tuple(asdict(arguments).values())
    assert found.at_least(30)
    assert not found.at_least(31)
    assert replace(found, tokens=50.0).at_least(31)
    assert Result.of(arguments, Progress(), provenance()) is None


def test_the_row_with_most_sequences_counts() -> None:
    rows = [
        result(Arguments(batch=100), steps=300),
        result(Arguments(batch=1000), steps=100),
        result(Arguments(batch=100, hidden=32), steps=9000),
    ]
    assert find(rows, hidden=16) is rows[1]
    assert find(rows, hidden=8) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not there: it is where runs of toy tasks leave rows"),
        ("date,commit\n1,2\n", "cannot be read as rows"),
        ("a,b\n1,2\n", "cannot be read as rows"),
    ],
)
def test_files_without_rows(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        toy_results.read(path)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    toy_results.add(path, result(Arguments()))
    path.write_text(path.read_text().replace(",7.9,", ",many,"))
    with pytest.raises(RecipeError, match="cannot be read as rows"):
        toy_results.read(path)


# -- the table ------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_is_beside_the_papers() -> None:
    rows = [
        result(Arguments("repeat", "nf-revgru", 8, 20), tokens=5.5),
        result(Arguments("memorise", "lstm", 32, 35), tokens=20.6),
        result(Arguments("repeat", "revgru", 16, 50), tokens=50.0, steps=1400),
    ]
    lines = toy_results.table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    head, _, *body = map(cells, lines)
    assert head[:3] == ["units", "tokens", "NF-RevGRU repeats"]
    assert len(body) == 9
    assert body[0][:7] == ["8", "20", "5.5", "1.1", "2.1", "7.9", "2.0"]
    assert body[0][7:] == ["", "", "", "7.4", "1.8", "", ""]
    assert body[5][-2:] == ["50.0", "1,400"]
    # Recomputed where the printed figure does not fit.
    assert body[7][:7] == ["32", "35", "", "", "", "35.0", "2.9*"]
    assert body[7][7:] == ["20.6", "1.5", "0.9", "20.6", "1.5*", "", ""]
    assert toy_results.table([]).count("*") == 6


# -- what is committed ----------------------------------------------------------------------------


@pytest.fixture(params=["runs.csv", "rate-0.005.csv"])
def committed(request: pytest.FixtureRequest) -> list[Result]:
    if not RESULTS.exists():
        pytest.skip("not in a checkout")
    return toy_results.read(RESULTS / request.param)


def test_committed_rows_say_where_they_come_from(committed: list[Result]) -> None:
    for row in [*committed, *toy_results.read(RESULTS / "longer.csv")]:
        assert row.date
        assert row.commit
        assert "+" not in row.commit
        assert row.cpu
        values = {item.name: getattr(row, item.name) for item in fields(Arguments)}
        assert toy_results.command(Arguments(**values), row.steps) == row.command


def test_the_documented_tables_are_those_of_the_committed_rows(committed: list[Result]) -> None:
    assert toy_results.table(committed) in (ROOT / "docs" / "forgetting.md").read_text()


def test_the_committed_rows_show_what_is_claimed(committed: list[Result]) -> None:
    """The whole grid, with one budget; and what docs/forgetting.md says of it."""
    longer = toy_results.read(RESULTS / "longer.csv")
    for paper in PAPER:
        sizes = {"hidden": paper.hidden, "length": paper.length}
        forgetting = find(committed, task="repeat", model="revgru", **sizes)
        nothing = find(committed, task="repeat", model="nf-revgru", **sizes)
        lstm = find(committed, task="memorise", model="lstm", **sizes)
        assert forgetting is not None
        assert nothing is not None
        assert lstm is not None
        assert nothing.steps == lstm.steps == 4000
        assert {row.batch for row in (forgetting, nothing, lstm)} == {100}
        assert forgetting.tokens == paper.length
        assert forgetting.steps <= 1600
        assert nothing.tokens < paper.length
        assert nothing.tokens > lstm.tokens - 0.11
        if paper.hidden == 8:
            more = find(longer, task="repeat", model="nf-revgru", **sizes)
            assert more is not None
            assert max(nothing.tokens, more.tokens) < paper.nf_tokens

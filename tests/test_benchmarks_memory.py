"""The benchmark of memory: which cases it runs, and what it makes of their rows."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory
from benchmarks._measure import append_csv
from benchmarks._memory_case import MEBIBYTE, METHODS


def row(method: str, steps: int, peak: int, *, segment: int = 64, batch: int = 8) -> dict[str, Any]:
    sizes = {"batch": batch, "hidden": 4, "embedding": 4, "vocabulary": 9, "forget_bits": 3.0}
    times = {"threads": 1, "peak": peak * MEBIBYTE, "seconds": [2.0 * peak]}
    return {"method": method, "steps": steps, "segment": segment, **sizes, **times}


def test_cases() -> None:
    found = memory.cases(memory.parse(["--steps", "64", "16384"]))
    assert {case.method for case in found if case.steps == 64} == set(METHODS)
    segments = [case.segment for case in found if case.method == "nn.LSTM checkpointed"]
    assert segments == [32, 64]  # those shorter than 64 steps; from 8192 on only one
    whole = ("nn.GRU", "nn.LSTM", "RevGRU drop-in", "RevLSTM drop-in")
    assert not any(case.method in whole for case in found if case.steps == 16384)


def test_best_takes_medians_and_the_segment_of_the_lowest_peak() -> None:
    rows = [row("nn.LSTM", 8, peak) for peak in (90, 100, 120)]
    rows += [row("nn.LSTM checkpointed", 8, peak, segment=peak) for peak in (32, 20)]
    lstm, checkpointed = memory.best(rows)
    assert lstm["peak"] == 100 * MEBIBYTE
    assert (lstm["peak_low"], lstm["peak_high"]) == (90 * MEBIBYTE, 120 * MEBIBYTE)
    assert (lstm["rounds"], lstm["seconds"]) == (3, 200.0)
    assert (checkpointed["segment"], checkpointed["peak"]) == (20, 20 * MEBIBYTE)
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in memory.table([lstm, checkpointed]).splitlines()[2:]
    ]
    assert cells == [
        ["8", "nn.LSTM", "100", "90-120", "1/1.0", "200.00", "1.00"],
        ["8", "nn.LSTM checkpointed every 20", "20", "20-20", "1/5.0", "40.00", "0.20"],
    ]


def test_the_plot_shows_the_latest_rows_of_the_same_sizes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.csv"
    append_csv(file, memory.best([row("nn.LSTM", 8, 10), row("nn.LSTM", 16, 20)]))
    append_csv(file, memory.best([row("nn.LSTM", 8, 11), row("nn.LSTM", 16, 99, batch=1)]))
    found = memory.comparable([row("nn.LSTM", 8, 0)], file)
    assert {row["steps"]: float(str(row["peak"])) / MEBIBYTE for row in found} == {
        "8": 11,
        "16": 20,
    }
    memory.plot(found, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000

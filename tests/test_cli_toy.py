"""The commands ``revrnn toy``."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")

from revrnn import _options, cli, cli_toy
from revrnn.recipes import growth, toy_results
from revrnn.recipes.toy_training import Arguments, Resources

SMALL = ["--hidden", "4", "--length", "4", "--eval-sequences", "50", "--device", "cpu"]
SHORT = [*SMALL, "--batch", "8", "--steps", "4", "--eval-every", "2"]


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    torch.set_num_threads(1)


def revrnn(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    assert (end.value.code or 0) == code


def test_help_has_a_line_for_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {
        "repeat": (Arguments, Resources),
        "memorise": (Arguments, Resources),
        "growth": (growth.Arguments,),
    }
    for command, kinds in commands.items():
        revrnn("toy", command, "--help")
        text = capsys.readouterr().out
        for kind in kinds:
            names = {item.name for item in fields(kind)}
            assert _options.field_help(kind).keys() == names
            for name in names - {"task"}:
                assert f"--{name.replace('_', '-')}" in text
    for command in ("grid", "table", "plot"):
        revrnn("toy", command, "--help")
        assert "--results" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["repeat", "memorise"])
def test_train_and_prolong(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, results = tmp_path / "run", tmp_path / "runs.csv"
    revrnn("toy", task, "--model", "nf-revgru", *SHORT, "--out", out, "--results", results)
    line = capsys.readouterr().out
    assert re.fullmatch(
        rf"{task} nf-revgru 4 units: [\d.]+ of 4 tokens, -?[\d.]+ bits a unit, at step \d of 4, "
        rf"\d+ s: {re.escape(str(out))}\n",
        line,
    )
    (row,) = toy_results.read(results)
    assert (row.task, row.model, row.steps, row.batch) == (task, "nf-revgru", 4, 8)
    revrnn("toy", task, "--resume", out, "--steps", 6, "--results", results, "--device", "cpu")
    (row,) = toy_results.read(results)
    assert row.steps == 6


def test_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    revrnn("toy", "repeat", "--model", "gru", "--preset", "paper", *SHORT, "--seed", 3)
    assert [path.name for path in (tmp_path / "runs" / "toy").iterdir()] == [
        "repeat-gru-4x4-batch8-seed3"
    ]


def test_grid_table_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cli_toy.PRESETS, "scaled", {"batch": 4, "steps": 2, "eval_every": 2})
    runs = ["--runs", "repeat:nf-revgru, memorise:lstm", "--hidden", "2,8", "--length", "20"]
    revrnn("toy", "grid", *runs)
    assert len(capsys.readouterr().out.splitlines()) == 4
    results = tmp_path / "results" / "toy" / "runs.csv"
    assert [(row.task, row.hidden, row.steps) for row in toy_results.read(results)] == [
        ("memorise", 2, 2), ("memorise", 8, 2), ("repeat", 2, 2), ("repeat", 8, 2),
    ]  # fmt: skip
    revrnn("toy", "grid", *runs)
    assert capsys.readouterr().out == ""
    revrnn("toy", "grid", *runs, "--steps", 4)
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert {row.steps for row in toy_results.read(results)} == {4}

    revrnn("toy", "grid", *runs, "--learning-rate", 0.01, "--results", "other.csv")
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert {row.learning_rate for row in toy_results.read(Path("other.csv"))} == {0.01}

    revrnn("toy", "table", "--out", tmp_path / "table.md")
    text = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == text
    assert text == toy_results.table(toy_results.read(results)) + "\n"
    revrnn("toy", "plot")
    assert (results.parent / "capacity.png").read_bytes().startswith(b"\x89PNG")


def test_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    for split in ("train", "valid", "test"):
        words = " ".join(f"w{rng.randrange(20)}" for _ in range(1000))
        (tmp_path / f"{split}.txt").write_text(f"{words}\n")
    out = tmp_path / "out" / "growth.csv"
    revrnn("toy", "growth", "--data", tmp_path, "--hidden", 8, "--batch", 4, "--length", 60,
           "--steps", 12, "--out", out)  # fmt: skip
    text = capsys.readouterr().out
    assert re.search(r"^nf-revgru: 12 segments, [12] overflows, the first in segment \d", text)
    assert re.search(r"^revgru: 12 segments, 0 overflows; the last loss \d", text, re.M)
    assert {path.name for path in out.parent.iterdir()} == {
        "growth.csv", "growth.json", "growth.png",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("toy repeat --model rnn", "there is no model 'rnn': choose gru, lstm, revgru"),
        ("toy repeat --hidden 7", "hidden must be even for a revgru"),
        ("toy memorise --length 0", "length must be 1 or more, got 0"),
        ("toy repeat --learning-rate 0", "learning_rate must be positive"),
        ("toy repeat --steps 0", "steps must be 1 or more, got 0"),
        ("toy repeat --minutes -1", "minutes must be positive, got -1"),
        ("toy repeat --preset huge", "there is no preset 'huge': choose paper or scaled"),
        ("toy repeat --device tpu", "there is no device 'tpu'"),
        ("toy repeat --resume nowhere", "nowhere is no run folder"),
        ("toy repeat --resume nowhere --hidden 8", "leave out --hidden"),
        ("toy repeat --resume nowhere --preset paper", "leave out --preset"),
        ("toy memorise --resume nowhere --out there", "leave out --out"),
        ("toy grid --preset huge", "there is no preset 'huge'"),
        ("toy grid --runs repeat", "runs must be task:model with commas between"),
        ("toy grid --runs learn:gru", "there is no task 'learn'"),
        ("toy grid --hidden many", "hidden must be numbers with commas between, got 'many'"),
        ("toy table", "is not there: it is where runs of toy tasks leave rows"),
        ("toy plot --results nowhere.csv", "nowhere.csv is not there"),
        ("toy growth --data nowhere", "no corpus and no folder 'nowhere'"),
        ("toy growth --hidden 7", "hidden must be even, got 7"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    revrnn(*arguments.split(), code=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("revrnn: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "runs.csv"
    revrnn("toy", "repeat", *SHORT, "--out", tmp_path / "run", "--results", results)
    revrnn("toy", "plot", "--results", results, "--out", results / "plot.png", code=2)
    assert "cannot be written" in capsys.readouterr().err


def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    """From outside, on a process of its own."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "revrnn.cli", "toy", "repeat", *SMALL, "--batch", "8"]
    command += ["--length", "30", "--steps", "1000000", "--eval-every", "5", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 100
    while not (out / "metrics.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    last = errors.splitlines()[-1]
    assert last == "revrnn: stopped by SIGINT; --resume goes on from the checkpoint"
    rows = len((out / "metrics.csv").read_text().splitlines())
    assert rows >= 2
    revrnn("toy", "repeat", "--resume", out, "--minutes", "0.0001", "--device", "cpu")
    assert len((out / "metrics.csv").read_text().splitlines()) == rows + 1

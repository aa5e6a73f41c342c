"""Training on the toy tasks."""

from __future__ import annotations

import csv
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning_fabric")

from revrnn.recipes import checkpoints, toy_training
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.stopping import StoppedError
from revrnn.recipes.toy import MODELS
from revrnn.recipes.toy_training import PRESETS, Arguments, Progress, Resources


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    """At these sizes two threads mostly wait for each other."""
    torch.set_num_threads(1)


SMALL = Arguments(hidden=4, length=4, batch=8, eval_sequences=50)


def train(arguments: Arguments, out: Path, **changes: Any) -> Progress:
    given = {"steps": 6, "eval_every": 3, "device": "cpu"} | changes
    return toy_training.train(arguments, Resources(out, **given))[1]


def numbers(progress: Progress) -> list[dict[str, float]]:
    """Its rows but for the time that they took."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in progress.rows]


def assert_same_weights(one: Path, other: Path) -> None:
    weights = [checkpoints.load(folder / checkpoints.LAST)["model"] for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])


def test_forgetting_learns_to_repeat_and_stops_when_all_is_right(tmp_path: Path) -> None:
    arguments = Arguments(hidden=16, length=12, batch=50, learning_rate=0.01, eval_sequences=500)
    progress = train(arguments, tmp_path / "run", steps=1000, eval_every=50)
    assert progress.best is not None
    assert progress.best["tokens"] == 12
    assert progress.step == progress.best["step"] < 1000
    first, last = progress.rows[0], progress.rows[-1]
    assert last["eval_loss"] < 0.5 * first["eval_loss"]
    assert progress.loss == last["eval_loss"]


def test_without_forgetting_few_units_repeat_little(tmp_path: Path) -> None:
    """The same training as above; 4 units for 36 bits and more."""
    arguments = Arguments(
        model="nf-revgru", hidden=4, length=40, batch=50, learning_rate=0.01, eval_sequences=500
    )
    progress = train(arguments, tmp_path / "run", steps=300, eval_every=50)
    assert progress.best is not None
    assert progress.best["tokens"] < 20


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", ["repeat", "memorise"])
def test_a_few_steps_are_better_than_chance(model: str, task: str, tmp_path: Path) -> None:
    arguments = Arguments(task, model, 8, 3, batch=32, learning_rate=0.02, eval_sequences=500)
    progress = train(arguments, tmp_path / "run", steps=60, eval_every=20)
    losses = [row["eval_loss"] for row in progress.rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * math.log(8)
    assert progress.rows[-1]["tokens"] > 1.5 * 3 / 8


def test_metrics_are_the_rows(tmp_path: Path) -> None:
    progress = train(SMALL, tmp_path / "run", steps=7)
    assert [row["step"] for row in progress.rows] == [3, 6, 7]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "seconds", "train_loss", "eval_loss", "tokens"]
    for row, expected in zip(rows, progress.rows, strict=True):
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-6)
    assert (tmp_path / "run" / "run.json").exists()


def test_the_best_is_the_first_with_most_tokens() -> None:
    rows = [{"step": step, "tokens": float(t), "eval_loss": 9.0 - step} for step, t in
            enumerate([1, 3, 2, 3])]  # fmt: skip
    progress = Progress(4, 1.0, rows)
    assert progress.best == rows[1]
    assert progress.loss == 6
    assert Progress().best is None
    assert not progress.finished(replace(SMALL, length=4), 5)
    assert progress.finished(replace(SMALL, length=4), 4)
    assert progress.finished(replace(SMALL, length=3), 5)


def test_seeds(tmp_path: Path) -> None:
    runs = [
        train(replace(SMALL, seed=seed), tmp_path / name)
        for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    ]
    assert numbers(runs[0]) == numbers(runs[1])
    assert numbers(runs[0]) != numbers(runs[2])
    assert_same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("model", ["revgru", "nf-revgru", "lstm"])
def test_a_run_can_be_prolonged(model: str, tmp_path: Path) -> None:
    arguments = replace(SMALL, model=model)
    whole = train(arguments, tmp_path / "whole", steps=9)
    train(arguments, tmp_path / "parts", steps=3)
    torch.manual_seed(99)  # whatever state the generator is in
    parts = train(replace(arguments, seed=7), tmp_path / "parts", steps=9, resume=True)
    assert numbers(whole) == numbers(parts)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    again = train(arguments, tmp_path / "parts", steps=9, resume=True)
    assert numbers(again) == numbers(parts)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_evaluates_and_writes(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = toy_training._Run._step

    def step(self: toy_training._Run) -> float:
        if self.progress.step == 4:
            os.kill(os.getpid(), number)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(toy_training._Run, "_step", step)
        with pytest.raises(StoppedError) as stopped:
            train(SMALL, tmp_path / "parts", steps=9)
    assert stopped.value.exit_code == code
    saved = Progress(**checkpoints.load(tmp_path / "parts" / "last.pt")["progress"])
    assert [row["step"] for row in saved.rows] == [3, 5]
    assert len((tmp_path / "parts" / "metrics.csv").read_text().splitlines()) == 3
    train(SMALL, tmp_path / "parts", steps=9, resume=True)
    train(SMALL, tmp_path / "whole", steps=9)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_the_time_runs_out(tmp_path: Path) -> None:
    progress = train(SMALL, tmp_path / "run", steps=10**9, eval_every=10**9, minutes=0.005)
    assert progress.step == progress.rows[-1]["step"] < 10**9
    assert progress.seconds > 0.3


def test_folders(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RecipeError, match=r"is no run folder: it has no last\.pt"):
        train(SMALL, out, resume=True)
    train(SMALL, out)
    with pytest.raises(RecipeError, match="holds a run already: resume it"):
        train(SMALL, out)
    checkpoints.save(out / "last.pt", {"arguments": {"data": "ptb"}, "progress": {}})
    with pytest.raises(RecipeError, match="holds no run of a toy task"):
        train(SMALL, out, resume=True)


def test_a_loss_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        toy_training.Model,
        "forward",
        lambda self, x, n: self.scores.bias.expand(n, x.shape[1], 8) * math.nan,
    )
    with pytest.raises(RecipeError, match="the loss is nan at step 0: lower the learning rate"):
        train(SMALL, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "forget"}, "no task 'forget': choose repeat, memorise"),
        ({"model": "rnn"}, "no model 'rnn'"),
        ({"hidden": 5}, "hidden must be even"),
        ({"length": 0}, "length must be 1 or more, got 0"),
        ({"batch": -1}, "batch must be 1 or more, got -1"),
        ({"eval_sequences": 0}, "eval_sequences must be 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0"),
        ({"learning_rate": math.inf}, "learning_rate must be positive and finite, got inf"),
    ],
)
def test_arguments_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"eval_every": 0}, "eval_every must be 1 or more, got 0"),
        ({"minutes": 0.0}, "minutes must be positive, got 0"),
    ],
)
def test_resources_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Resources(Path("run"), **changes)


def test_the_papers_preset() -> None:
    paper = PRESETS["paper"]
    assert (paper["batch"], paper["steps"]) == (20_000, 1_000_000)
    defaults = Arguments()
    assert (defaults.learning_rate, defaults.eval_sequences) == (0.001, 10_000)

"""The command line."""

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

from revrnn import _options, cli
from revrnn.recipes import training
from revrnn.recipes.presets import PRESETS, preset

SMALL = [
    *("--hidden", "8", "--batch", "4", "--length", "20", "--eval-batch", "2"),
    *("--learning-rate", "5", "--device", "cpu"),
]


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    """At these sizes two threads mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = random.Random(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        text = "\n".join(" ".join(f"w{rng.randrange(20)}" for _ in range(10)) for _ in range(lines))
        (folder / f"{split}.txt").write_text(text + "\n")
    return folder


def revrnn(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    assert (end.value.code or 0) == code


def test_help_has_a_line_for_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    revrnn("lm", "train", "--help")
    text = capsys.readouterr().out
    for kind in (training.Arguments, training.Resources):
        lines = _options.field_help(kind)
        assert lines.keys() == {item.name for item in fields(kind)}
        for name in lines.keys() - {"out", "resume"}:
            assert f"--{name.replace('_', '-')}" in text
    assert "[default: 20]" in text
    for command in ("eval", "generate", "plot", "presets"):
        revrnn("lm", command, "--help")
    revrnn("data", "fetch", "--help")
    assert "REVRNN_DATA" in capsys.readouterr().out


def test_train_resume_evaluate_generate_plot(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    revrnn("lm", "train", "--data", data, "--model", "revgru", "--out", out, *SMALL, "--epochs", 1)
    assert re.search(r"best validation perplexity \d+\.\d\d, in epoch 1", capsys.readouterr().out)
    revrnn("lm", "train", "--resume", out, "--epochs", 2, "--device", "cpu")
    captured = capsys.readouterr()
    assert re.search(r"^epoch +2 .* tape .* bits a unit a step, ideal", captured.err, re.M)
    assert "epoch   1" not in captured.err

    revrnn("lm", "eval", out)
    assert re.search(
        r"^valid: perplexity [\d.]+, .*\ntest: perplexity [\d.]+, [\d.]+ bits a word$",
        capsys.readouterr().out,
        re.M,
    )

    texts = []
    for seed in (1, 1, 2):
        revrnn("lm", "generate", out, "--prompt", "w3 w4", "--words", 20, "--seed", seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("w3 w4")

    other = tmp_path / "other"
    revrnn("lm", "train", "--data", data, "--model", "gru", "--out", other, *SMALL, "--epochs", 1)
    pictures = tmp_path / "pictures"
    capsys.readouterr()
    revrnn("lm", "plot", out, other, "--out", pictures)
    assert capsys.readouterr().out.split() == [
        str(pictures / "curves.png"),
        str(pictures / "savings.png"),
    ]
    revrnn("lm", "plot", other)
    assert {path.name for path in other.glob("*.png")} == {"curves.png"}


def test_a_preset_that_is_changed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "wt2-revgru-2l-5bit"
    changes = ["--data", data, *SMALL, "--hidden", "12,8", "--epochs", 1, "--seed", 3]
    revrnn("lm", "train", "--preset", name, *changes)
    assert f"the paper's {name}: 95.3" in capsys.readouterr().out
    trained = training.load(tmp_path / "runs" / f"{name}-seed3")
    assert trained.arguments.max_forget_bits == 5
    assert trained.arguments.sizes() == (12, 8)
    assert trained.arguments.batch == 4


def test_presets_are_the_papers_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert len([name for name in PRESETS if name.startswith("ptb")]) == 22
    assert len([name for name in PRESETS if name.startswith("wt2")]) == 20
    row = preset("ptb-revlstm-2l-3bit")
    assert (row.perplexity, row.savings) == (72.8, 10.0)
    arguments = training.Arguments(**row.changes)
    assert arguments.sizes() == (1150, 650)
    assert (arguments.model, arguments.max_forget_bits, arguments.batch) == ("revlstm", 3, 20)
    assert training.Arguments(**preset("wt2-lstm-1l").changes).data == "wikitext2"
    for model in ("revgru", "revlstm", "gru", "lstm"):
        assert training.Arguments(**preset(f"demo-{model}").changes).model == model
        small = training.Arguments(**preset(f"small-{model}").changes)
        assert (small.model, small.data, small.sizes()) == (model, "ptb", (200,))
    revrnn("lm", "presets")
    assert re.search(r"^ptb-revgru-1l-2bit +82\.2 +13\.8x$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lm train --preset ptb-revgru-1l-4bit", "no preset 'ptb-revgru-1l-4bit', but there is"),
        ("lm train --data nowhere", "no corpus and no folder 'nowhere'"),
        ("lm train --model transformer", "no model 'transformer'"),
        ("lm train --model gru --max-forget-bits 2", "only for revgru and revlstm"),
        ("lm train --device tpu --data demo", "no device 'tpu'"),
        ("lm train --resume nowhere", "nowhere is no run folder"),
        ("lm train --resume nowhere --seed 2", "leave out --seed"),
        ("lm train --resume nowhere --preset ptb-gru-1l", "leave out --preset"),
        ("lm eval nowhere", "nowhere is no run folder"),
        ("lm generate nowhere", "nowhere is no run folder"),
        ("lm plot nowhere", "nowhere has no metrics.csv"),
        ("data fetch imagenet", "no corpus 'imagenet' to fetch"),
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


def test_options_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    revrnn("lm", "train", "--epochs", "many", code=2)
    assert "--epochs" in capsys.readouterr().err


def test_unknown_words_in_a_prompt_and_other_texts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    revrnn("lm", "train", "--data", data, "--model", "lstm", "--out", out, *SMALL, "--epochs", 1)
    revrnn("lm", "generate", out, "--prompt", "w1 zebra", code=2)
    assert "the word 'zebra' is not in the vocabulary of 21 words" in capsys.readouterr().err
    (data / "test.txt").write_text("w1 w2 w3\n")
    revrnn("lm", "eval", out, code=2)
    assert "was trained on another text" in capsys.readouterr().err
    (out / "best.pt").write_bytes(b"not a checkpoint")
    revrnn("lm", "generate", out, code=2)
    assert "best.pt is no checkpoint, or it is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_from_outside_and_resumed(
    data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """A process of its own is stopped, or killed between two checkpoints; it goes on from the last
    one, and ends with the weights of a run that was never stopped."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    command = [sys.executable, "-m", "revrnn.cli", "lm", "train"]
    options = ["--data", data, "--model", "revlstm", *SMALL, "--no-paper-buffer"]
    often = ["--out", out, "--epochs", 100000, "--checkpoint-minutes", 0.001]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *map(str, [*options, *often])],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 100
    # An epoch is in metrics.csv before it is in a checkpoint, and may be the first to be in one.
    written = [out / "metrics.csv", out / "last.pt"]
    while not all(path.exists() for path in written) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        last = errors.splitlines()[-1]
        assert last == f"revrnn: stopped by {number.name}; --resume goes on from the checkpoint"
    stopped = training.checkpoints.load(out / "last.pt")["progress"]
    epochs = stopped["epoch"] + 1
    revrnn("lm", "train", "--resume", out, "--epochs", epochs, "--device", "cpu")
    revrnn("lm", "train", *options, "--out", whole, "--epochs", epochs)
    found, expected = (training.checkpoints.load(run / "last.pt") for run in (out, whole))
    assert found["progress"]["step"] == expected["progress"]["step"] > stopped["step"]
    assert found["progress"]["validations"] == expected["progress"]["validations"]
    for name, weight in expected["model"].items():
        assert torch.equal(found["model"][name], weight)

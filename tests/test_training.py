"""Training: what the paper's schedule says, exact resumption, signals, checkpoints, processes."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

pytest.importorskip("lightning_fabric")

from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision

from revrnn.recipes import checkpoints, corpora, training
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.language_model import MODELS
from revrnn.recipes.stopping import StoppedError
from revrnn.recipes.training import Arguments, Progress, Resources, train

WORDS = 30
NO_DROPOUT = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "output", "weight")}


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    """At these sizes two threads mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Words of which each is likely to follow the one before it in a circle."""
    rng = random.Random(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        word, text = 0, ""
        for _ in range(lines):
            for _ in range(10):
                word = (word + 1) % WORDS if rng.random() < 0.9 else rng.randrange(WORDS)
                text += f"w{word} "
            text += "\n"
        (folder / f"{split}.txt").write_text(text)
    return folder


@pytest.fixture
def arguments(data: Path) -> Arguments:
    """Eight segments an epoch or so."""
    return Arguments(
        data=str(data),
        model="revlstm",
        hidden="12,8",
        layers=2,
        max_forget_bits=3,
        batch=4,
        length=20,
        jitter=2,
        eval_batch=2,
        clip=0.5,
    )


def run(arguments: Arguments, out: Path, **changes: Any) -> Progress:
    return train(arguments, Resources(out, device="cpu", **{"epochs": 2} | changes))


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop as if the time were up, once."""
    original = training._Run._time_is_up

    def time_is_up(self: training._Run) -> bool:
        return self.progress.step == steps or original(self)

    monkeypatch.setattr(training._Run, "_time_is_up", time_is_up)


def flat(tree: Any) -> list[Any]:
    """Leaves of dicts, lists and tuples, but for times."""
    if isinstance(tree, dict):
        tree = [
            part
            for name, part in tree.items()
            if "seconds" not in str(name) and name != "tokens_per_second"
        ]
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in flat(part)]
    return [tree]


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, carried states, losses: every bit."""
    for name in (checkpoints.LAST, checkpoints.BEST):
        leaves = [flat(checkpoints.load(folder / name)) for folder in (one, other)]
        assert len(leaves[0]) == len(leaves[1])
        for a, b in zip(*leaves, strict=True):
            if isinstance(a, Tensor):
                assert torch.equal(a, b)
            else:
                assert a == b or (a != a and b != b)  # NaN: not measured


# -- the schedule ---------------------------------------------------------------------------------


def test_lengths_of_segments_are_the_papers() -> None:
    paper = Arguments()
    lengths = [training.segment_length(paper, step) for step in range(4000)]
    assert lengths == [training.segment_length(paper, step) for step in range(4000)]
    assert lengths[:50] != [training.segment_length(replace(paper, seed=2), s) for s in range(50)]
    long = [length for length in lengths if length > 52]
    assert 1 - len(long) / len(lengths) == pytest.approx(0.05, abs=0.015)
    assert statistics.fmean(long) == pytest.approx(69.5, abs=0.5)  # rounded down
    assert statistics.stdev(long) == pytest.approx(5, abs=0.3)
    assert min(training.segment_length(replace(paper, length=1), s) for s in range(20)) == 5


def test_the_non_monotone_criterion() -> None:
    def falls(losses: list[float]) -> bool:
        return not training.stopped_falling(losses, interval=2)

    assert falls([3.0])
    assert falls([1.0, 2.0, 3.0])
    assert not falls([1.0, 2.0, 2.0, 3.0])
    assert falls([3.0, 1.0, 1.0, 2.0])
    assert not falls([3.0, 1.5, 1.0, 1.0, 2.0])


def test_the_rate_decays_and_training_ends(arguments: Arguments, tmp_path: Path) -> None:
    """With a rate that is far too small to learn, but for noise: weights only decay."""
    arguments = replace(
        arguments, learning_rate=0.5, lowest_rate=0.4, interval=1, clip=1e-9, weight_decay=0.5
    )
    progress = run(arguments, tmp_path / "run", epochs=50)
    assert progress.epoch < 20
    assert progress.learning_rate == 0.125
    *before, last = progress.validations
    assert last > min(before[:-1])


# -- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_models_learn(model: str, arguments: Arguments, tmp_path: Path) -> None:
    bits = 3.0 if model.startswith("rev") else None
    arguments = replace(
        arguments, model=model, max_forget_bits=bits, hidden="16", layers=1, learning_rate=10.0,
        **NO_DROPOUT,
    )  # fmt: skip
    out = tmp_path / "run"
    progress = run(arguments, out, epochs=6)
    assert progress.validations[-1] < 0.9 * math.log(WORDS)
    assert min(progress.validations) == progress.validations[-1]
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    last = rows[-1]
    assert float(last["valid_perplexity"]) == pytest.approx(
        math.exp(progress.validations[-1]), rel=1e-4
    )
    for name in ("tape_bits", "ideal_bits", "savings", "ideal_savings", "paper_savings"):
        assert bool(last[name]) == (bits is not None)
    if bits:
        assert 0 < float(last["ideal_bits"]) < float(last["tape_bits"]) < 3.5
        assert float(last["paper_savings"]) < float(last["ideal_savings"])
    assert list((out / "tensorboard").iterdir())

    trained = training.load(out)
    loss = training.evaluate(
        trained.model, corpora.load(arguments.data).valid, arguments.eval_batch
    )
    assert loss == pytest.approx(progress.validations[-1], rel=1e-3)


def test_evaluation_does_not_depend_on_segments(arguments: Arguments, data: Path) -> None:
    corpus = corpora.load(str(data))
    torch.manual_seed(0)
    model = training.LanguageModel(arguments.model_config(len(corpus.vocabulary)))
    losses = [training.evaluate(model, corpus.test, 2, length=length) for length in (7, 20, 1000)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)
    assert model.training


# -- stopping and going on ------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", [3, 11])
def test_resumed_training_is_the_same_bit_for_bit(
    model: str, steps: int, arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = 3.0 if model.startswith("rev") else None
    arguments = replace(arguments, model=model, max_forget_bits=bits)
    run(arguments, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(steps, patch)
        stopped = run(arguments, tmp_path / "parts")
    assert stopped.step == steps
    torch.manual_seed(99)  # whatever state the generators are in
    run(replace(arguments, seed=7), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_scale_of_16_bit_gradients_is_resumed_too(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fabric(self: Resources, precision: str) -> Fabric:
        """16 bits on the CPU, which Fabric by itself does on CUDA alone; the scale often grows."""
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        return Fabric(accelerator="cpu", plugins=MixedPrecision("16-mixed", "cpu", scaler))

    monkeypatch.setattr(Resources, "fabric", fabric)
    arguments = replace(arguments, model="gru", max_forget_bits=None)
    run(arguments, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        run(arguments, tmp_path / "parts")
    assert checkpoints.load(tmp_path / "parts" / "last.pt")["precision"]["scale"] == 8.0
    run(arguments, tmp_path / "parts", resume=True)
    assert checkpoints.load(tmp_path / "parts" / "last.pt")["precision"]["scale"] > 8.0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_trained_model_is_as_good_as_its_validation_said(
    precision: str, arguments: Arguments, tmp_path: Path
) -> None:
    progress = run(replace(arguments, precision=precision), tmp_path / "run")
    trained = training.load(tmp_path / "run")
    valid = corpora.load(arguments.data).valid
    found = {}
    for name, context in (("own", trained.autocast()), ("32", nullcontext())):
        with context:
            found[name] = training.evaluate(
                trained.model, valid, arguments.eval_batch, length=arguments.length
            )
    assert found["own"] == min(progress.validations)
    assert (found["32"] == found["own"]) == (precision == "32")


def test_a_run_that_had_no_scale_goes_on_with_one(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU after a CPU, where 16 bits are those of bfloat16."""
    arguments = replace(arguments, model="gru", max_forget_bits=None, precision="16")
    with pytest.warns(UserWarning, match="fp16 is not supported on CPU. Using .*bf16"):
        run(arguments, tmp_path / "run", epochs=1)
    assert not training.load(tmp_path / "run").scaled
    scaler = torch.amp.GradScaler("cpu")
    fabric = Fabric(accelerator="cpu", plugins=MixedPrecision("16-mixed", "cpu", scaler))
    monkeypatch.setattr(Resources, "fabric", lambda self, precision: fabric)
    run(arguments, tmp_path / "run", epochs=2, resume=True)
    assert checkpoints.load(tmp_path / "run" / "last.pt")["precision"]["scale"] > 0


def test_a_finished_run_can_be_prolonged(arguments: Arguments, tmp_path: Path) -> None:
    run(arguments, tmp_path / "whole", epochs=3)
    run(arguments, tmp_path / "parts", epochs=1)
    run(arguments, tmp_path / "parts", epochs=3, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def send(number: int, when: Callable[[training._Run], bool], patch: pytest.MonkeyPatch) -> None:
    """A signal, at the first step where ``when`` holds."""
    original = training._Run._step

    def step(self: training._Run, length: int) -> float:
        if when(self):
            os.kill(os.getpid(), number)
        return original(self, length)

    patch.setattr(training._Run, "_step", step)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_and_writes_a_checkpoint(
    number: int, code: int, arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(number)
    run(arguments, tmp_path / "whole")
    with monkeypatch.context() as patch:
        send(number, lambda run: run.progress.step == 5, patch)
        with pytest.raises(StoppedError) as stopped:
            run(arguments, tmp_path / "parts")
    assert stopped.value.exit_code == code
    assert signal.getsignal(number) is handler
    assert checkpoints.load(tmp_path / "parts" / "last.pt")["progress"]["step"] == 6
    run(arguments, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_signal_during_validation(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(arguments, tmp_path / "whole")
    original = training._Run._validate
    with monkeypatch.context() as patch:

        def validate(self: training._Run) -> float:
            os.kill(os.getpid(), signal.SIGTERM)
            return original(self)

        patch.setattr(training._Run, "_validate", validate)
        with pytest.raises(StoppedError, match="SIGTERM"):
            run(arguments, tmp_path / "parts")
    run(arguments, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_time_runs_out(arguments: Arguments, tmp_path: Path) -> None:
    progress = run(arguments, tmp_path / "run", epochs=1000, max_minutes=0.005)
    assert progress.epoch < 1000
    assert checkpoints.load(tmp_path / "run" / "last.pt")["progress"]["step"] == progress.step


def test_checkpoints_within_an_epoch(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run falls back to that is killed."""
    run(arguments, tmp_path / "whole")

    def crash(self: training._Run) -> float:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "_validate", crash)
        with pytest.raises(MemoryError):
            run(arguments, tmp_path / "parts", checkpoint_minutes=0)
    assert checkpoints.load(tmp_path / "parts" / "last.pt")["progress"]["position"] > 100
    run(arguments, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# -- what can go wrong ----------------------------------------------------------------------------


def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "last.pt"
    checkpoints.save(path, {"number": 1})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RecipeError, match=r"last\.pt cannot be written: No space left"):
            checkpoints.save(path, {"number": 2})
    assert checkpoints.load(path)["number"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


def test_folders_that_cannot_be_resumed(arguments: Arguments, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RecipeError, match=r"is no run folder: it has no last\.pt"):
        run(arguments, out, resume=True)
    run(arguments, out, epochs=1)
    with pytest.raises(RecipeError, match="holds a run already: resume it"):
        run(arguments, out)

    content = checkpoints.load(out / "last.pt")
    torch.save({**content, "format": 99}, out / "last.pt")
    with pytest.raises(RecipeError, match=r"another version of revrnn: it has format 99.*reads 2"):
        run(arguments, out, resume=True)
    (out / "last.pt").write_bytes((out / "best.pt").read_bytes()[:1000])
    with pytest.raises(RecipeError, match=r"last\.pt is no checkpoint, or it is damaged"):
        run(arguments, out, resume=True)

    checkpoints.save(out / "last.pt", content)
    (Path(arguments.data) / "valid.txt").write_text("w1 w2 w3 w4 w5\n")
    with pytest.raises(RecipeError, match="was trained on another text"):
        run(arguments, out, resume=True)


def spoil_a_gradient(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the fourth step."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * factor

    forward = training.LanguageModel.forward
    steps = 0

    def spoilt(self: training.LanguageModel, *inputs: Any) -> Any:
        nonlocal steps
        steps += self.training
        loss, state = forward(self, *inputs)
        return (Spoilt.apply(loss) if steps == 4 else loss), state

    monkeypatch.setattr(training.LanguageModel, "forward", spoilt)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_gradient_that_is_no_number(
    factor: float, arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_a_gradient(factor, monkeypatch)
    arguments = replace(arguments, model="gru", max_forget_bits=None)
    with pytest.raises(RecipeError, match="the gradient is nan at step 3: lower the learning rate"):
        run(arguments, tmp_path / "run", checkpoint_minutes=0)
    last = checkpoints.load(tmp_path / "run" / "last.pt")
    assert last["progress"]["step"] == 3
    assert all(bool(weight.isfinite().all()) for weight in last["model"].values())


def test_a_gradient_of_which_only_the_norm_overflows(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_a_gradient(1e30, monkeypatch)
    arguments = replace(arguments, model="gru", max_forget_bits=None)
    progress = run(arguments, tmp_path / "run", epochs=1)
    assert progress.epoch == 2
    assert math.isfinite(progress.validations[0])


def test_a_loss_that_is_no_number(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.LanguageModel, "forward", lambda self, x, y, state: (
        self.head.bias.sum() * math.nan, None
    ))  # fmt: skip
    monkeypatch.setattr(training.LanguageModel, "tape_report", lambda self: None)
    with pytest.raises(RecipeError, match="the loss is nan at step 0: lower the learning rate"):
        run(arguments, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be 1 or more, got 0"),
        ({"batch": 400}, "the train text has 660 tokens, too few for 400 rows"),
        ({"eval_batch": 100}, "the valid text has 132 tokens, too few for 100 rows"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number, got inf"),
        ({"jitter": math.nan}, "jitter must be a finite number, got nan"),
        ({"decay": math.nan}, "decay must be a finite number, got nan"),
        ({"weight_decay": math.nan}, "weight_decay must be a finite number"),
        ({"lowest_rate": math.inf}, "lowest_rate must be a finite number"),
        ({"decay": 1.0}, "decay must be more than 1"),
        ({"short": 1.5}, "short must be a probability"),
        ({"precision": "8"}, "no precision '8': choose 32, bf16, 16"),
        ({"hidden": "many"}, "hidden must be numbers with commas between.*got 'many'"),
        ({"hidden": "8,8,8"}, "a number for each of the 2 layers, got '8,8,8'"),
        ({"model": "rnn"}, "no model 'rnn'"),
    ],
)
def test_arguments_that_cannot_be(
    changes: dict[str, Any], message: str, arguments: Arguments, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        run(replace(arguments, **changes), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be 1 or more, got 0"),
        ({"devices": 0}, "devices must be 1 or more, got 0"),
        ({"nodes": -1}, "nodes must be 1 or more, got -1"),
        ({"max_minutes": math.nan}, "max_minutes must not be negative, got nan"),
        ({"checkpoint_minutes": -1.0}, "checkpoint_minutes must not be negative, got -1"),
    ],
)
def test_resources_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        Resources(tmp_path, **changes)


def test_losses_beyond_all_perplexities(arguments: Arguments, tmp_path: Path) -> None:
    assert training.perplexity(2.0) == math.exp(2.0)
    arguments = replace(
        arguments, learning_rate=1e6, clip=math.inf, model="gru", max_forget_bits=None
    )
    progress = run(arguments, tmp_path / "run", epochs=1)
    assert progress.rows[0]["train_loss"] > 1000
    assert progress.rows[0]["train_perplexity"] == math.inf


def test_a_folder_that_is_a_file(arguments: Arguments, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RecipeError, match="cannot be written to"):
            run(arguments, out)
    with pytest.raises(RecipeError, match=r"run\.json cannot be written: File exists"):
        checkpoints.write(tmp_path / "file" / "run.json", b"")


def test_one_run_at_a_time_in_a_folder(arguments: Arguments, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with checkpoints.alone(out), pytest.raises(RecipeError, match="another run is at work in"):
        run(arguments, out)
    run(arguments, out, epochs=1)
    with checkpoints.alone(out), pytest.raises(RecipeError, match="another run is at work in"):
        run(arguments, out, resume=True)


def test_a_checkpoint_of_another_kind_of_run(arguments: Arguments, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for content in ({}, {"arguments": {"task": "repeat"}}):
        checkpoints.save(out / "last.pt", content)
        with pytest.raises(RecipeError, match="holds another kind of run than a language model's"):
            run(arguments, out, resume=True)
        with pytest.raises(RecipeError, match="holds another kind of run"):
            training.load(out)


def test_random_bytes_are_no_checkpoint(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 10, 100, 1000):
        for _ in range(40):
            data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
            (tmp_path / "last.pt").write_bytes(data.numpy().tobytes())
            with pytest.raises(RecipeError, match="is no checkpoint, or it is damaged"):
                checkpoints.load(tmp_path / "last.pt")


def test_sizes() -> None:
    assert Arguments().sizes() == (650,)
    assert Arguments(layers=2).sizes() == (1150, 650)
    assert Arguments(layers=3).sizes() == (1150, 1150, 650)
    assert Arguments(hidden="200").sizes() == (200,)
    assert Arguments(hidden="200", layers=2).sizes() == (200, 200)
    assert Arguments(hidden="300,200").sizes() == (300, 200)


# -- two processes --------------------------------------------------------------------------------

SCRIPT = """
import sys, json
from pathlib import Path
from revrnn.recipes.training import Arguments, Resources, train
import torch
torch.set_num_threads(1)
arguments = Arguments(**json.loads(sys.argv[1]))
train(arguments, Resources(Path(sys.argv[2]), epochs=int(sys.argv[3]), resume=bool(sys.argv[4]),
      device="cpu"))
"""


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo"
)
def test_two_processes_train_as_one(arguments: Arguments, tmp_path: Path) -> None:
    """The same losses, but for rounding; resumed with the states of all rows."""
    arguments = replace(arguments, learning_rate=1.0, **NO_DROPOUT)
    alone = run(arguments, tmp_path / "alone")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), json.dumps(asdict(arguments)), str(tmp_path / "two")]
    for epochs, resume in ((1, ""), (2, "yes")):
        done = subprocess.run(
            [*command, str(epochs), resume],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
    together = checkpoints.load(tmp_path / "two" / "last.pt")
    assert together["progress"]["validations"] == pytest.approx(alone.validations, rel=1e-4)
    rows = together["progress"]["rows"]
    for row, expected in zip(rows, alone.rows, strict=True):
        assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)

"""Training on the repeat and the memorisation task as the paper does. One file, top to bottom.

As in `training`, every random number comes from the seed and the step, so that a run that was
stopped goes on as if it never had.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm

import revrnn
from revrnn.recipes import checkpoints
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.stopping import Signals
from revrnn.recipes.toy import TASKS, Model, check, draw, evaluate
from revrnn.recipes.training import choose_device, seed_of

METRICS = "metrics.csv"


# -------------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Arguments:
    """What is trained, and how. The defaults are the paper's, but for the batch; the help of the
    command line is what stands under each field."""

    task: str = "repeat"
    """repeat or memorise."""
    model: str = "revgru"
    """revgru, revlstm, nf-revgru, nf-revlstm (no forgetting), gru or lstm."""
    hidden: int = 16
    """Units of the one layer; the paper's: 8, 16, 32."""
    length: int = 20
    """Tokens of a sequence; the paper's: 20, 35, 50."""
    batch: int = 100
    """Sequences a step; the paper's: 20000."""
    learning_rate: float = 0.001
    """Of Adam."""
    eval_sequences: int = 10_000
    """Sequences of the evaluation, the same each time."""
    seed: int = 1
    """Of weights and sequences."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise RecipeError(f"there is no task {self.task!r}: choose {', '.join(TASKS)}.")
        for name in ("length", "batch", "eval_sequences"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise RecipeError(
                f"learning_rate must be positive and finite, got {self.learning_rate:g}."
            )
        check(self.model, self.hidden)

    def build(self) -> Model:
        """The model, with weights from the seed."""
        torch.manual_seed(seed_of("weights", self.seed))
        return Model(self.model, TASKS[self.task].features, self.hidden)


@dataclass(frozen=True)
class Resources:
    """What a run may use; none of it changes what a step computes."""

    out: Path
    """The run folder: checkpoint, metrics."""
    resume: bool = False
    """Go on with the run in that folder."""
    steps: int = 4000
    """Steps after which training ends, unless every token is right before; the paper's: a
    million."""
    minutes: float | None = None
    """Minutes of training after which it ends, those before --resume not counted."""
    eval_every: int = 200
    """Steps between evaluations."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if self.minutes is not None and not self.minutes > 0:
            raise RecipeError(f"minutes must be positive, got {self.minutes:g}.")


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"batch": 20_000, "steps": 1_000_000, "eval_every": 1000},
    "scaled": {"batch": 100, "steps": 4000, "eval_every": 200},
}
"""Budgets: the paper's, and one that takes minutes a run."""


# ---------------------------------------------------------------------------- the state of training


@dataclass
class Progress:
    """Where a run is; with the weights and Adam's averages, all there is to know of it."""

    step: int = 0
    seconds: float = 0.0
    """Spent on steps and evaluations."""
    rows: list[dict[str, float]] = field(default_factory=list)
    """An evaluation each: what metrics.csv says."""

    @property
    def best(self) -> dict[str, float] | None:
        """The evaluation with the most tokens right, the first of those; None before any."""
        return max(self.rows, key=lambda row: row["tokens"], default=None)

    @property
    def loss(self) -> float:
        """The lowest cross-entropy of an evaluation, nats a token."""
        return min((row["eval_loss"] for row in self.rows), default=math.nan)

    def finished(self, arguments: Arguments, steps: int) -> bool:
        """More steps cannot better a best that has every token right."""
        best = self.best
        return self.step >= steps or (best is not None and best["tokens"] == arguments.length)


# --------------------------------------------------------------------------------------- training


def train(arguments: Arguments, resources: Resources) -> tuple[Arguments, Progress]:
    """Train, or go on training; returns what was trained, and where it ended."""
    path = resources.out / checkpoints.LAST
    saved: dict[str, Any] | None = None
    if resources.resume:
        saved = checkpoints.load(path)
        if "progress" not in saved or set(saved["arguments"]) != set(asdict(arguments)):
            raise RecipeError(f"{resources.out} holds no run of a toy task.")
        arguments = Arguments(**saved["arguments"])
    elif path.exists():
        raise RecipeError(
            f"{resources.out} holds a run already: resume it, or name another folder."
        )
    run = _Run(arguments, resources, saved)
    run.train()
    return arguments, run.progress


class _Run:
    def __init__(
        self, arguments: Arguments, resources: Resources, saved: dict[str, Any] | None
    ) -> None:
        self.arguments, self.resources = arguments, resources
        self.device = torch.device(choose_device(resources.device))
        self.task = TASKS[arguments.task]
        self.model = arguments.build().to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=arguments.learning_rate)
        self.progress = Progress()
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.progress = Progress(**saved["progress"])
        # The same for every seed, so that runs of different seeds can be compared.
        self.exam = draw(
            arguments.length, arguments.eval_sequences, seed_of("evaluation", arguments.length)
        ).to(self.device)
        self.losses: list[float] = []

    def train(self) -> None:
        progress, resources = self.progress, self.resources
        self._describe()
        before, started = progress.seconds, time.monotonic()
        minutes = math.inf if resources.minutes is None else resources.minutes
        with Signals() as signals, self._bar() as bar:
            ended = progress.finished(self.arguments, resources.steps)
            while not ended:
                self.losses.append(self._step())
                progress.step += 1
                progress.seconds = before + time.monotonic() - started
                up = progress.seconds - before > 60 * minutes or signals.asked
                last = up or progress.step == resources.steps
                if last or not progress.step % resources.eval_every:
                    self._evaluate(started - before)
                self._show(bar)
                ended = last or progress.finished(self.arguments, resources.steps)
        signals.raise_if_asked()

    def _step(self) -> float:
        """One batch; its cross-entropy, nats a token."""
        arguments, progress = self.arguments, self.progress
        seed = seed_of("batch", arguments.seed, progress.step)
        tokens = draw(arguments.length, arguments.batch, seed).to(self.device)  # (T, N)
        torch.manual_seed(seed_of("noise", arguments.seed, progress.step))
        scores = self.model(self.task.inputs(tokens), arguments.length)  # (T, N, 8)
        loss = functional.cross_entropy(scores.flatten(0, 1), self.task.answers(tokens).flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RecipeError(
                f"the loss is {value} at step {progress.step}: lower the learning rate."
            )
        return value

    def _evaluate(self, start: float) -> None:
        """A row of metrics.csv and a checkpoint; ``start`` is when the clock would have been 0."""
        progress = self.progress
        tokens, loss = evaluate(self.model, self.task, self.exam)
        progress.seconds = time.monotonic() - start
        progress.rows.append(
            {
                "step": progress.step,
                "seconds": progress.seconds,
                "train_loss": sum(self.losses) / len(self.losses),
                "eval_loss": loss,
                "tokens": tokens,
            }
        )
        self.losses = []
        out = self.resources.out
        checkpoints.write(out / METRICS, _csv(progress.rows).encode())
        checkpoints.save(
            out / checkpoints.LAST,
            {
                "arguments": asdict(self.arguments),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(progress),
            },
        )

    # -- showing -----------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Write run.json, for people."""
        description = {
            "revrnn": revrnn.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": str(self.device),
            "parameters": sum(weights.numel() for weights in self.model.parameters()),
            "arguments": asdict(self.arguments),
        }
        data = json.dumps(description, indent=2) + "\n"
        checkpoints.write(self.resources.out / "run.json", data.encode())

    def _bar(self) -> tqdm[Any]:
        arguments = self.arguments
        return tqdm(
            total=self.resources.steps,
            initial=self.progress.step,
            desc=f"{arguments.task} {arguments.model} {arguments.hidden} x {arguments.length}",
            unit=" steps",
            leave=False,
            disable=None,
            file=sys.stderr,
        )

    def _show(self, bar: tqdm[Any]) -> None:
        if not bar.disable:
            rows, best = self.progress.rows, self.progress.best
            loss = self.losses[-1] if self.losses else rows[-1]["train_loss"]
            shown = f"loss {loss:.3f}"
            if best is not None:
                shown += f", tokens {rows[-1]['tokens']:.2f} of {self.arguments.length}"
                shown += f", best {best['tokens']:.2f}"
            bar.set_postfix_str(shown, refresh=False)
            bar.update()


def _csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.7g}" for name, value in row.items()})
    return text.getvalue()

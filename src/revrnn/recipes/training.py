"""Training a language model as the paper does. One file, top to bottom.

Every random number comes from the seed and from where it is used: the length of a segment from
(seed, step), dropout from (seed, step, process). So no generator has a state worth keeping, and a
run that stopped at any step goes on from its checkpoint as if it never had, bit for bit.
"""

from __future__ import annotations

import csv
import gc
import io
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, distributed
from tqdm import tqdm

import revrnn
from revrnn import truncated
from revrnn.recipes import checkpoints, corpora
from revrnn.recipes.board import Board
from revrnn.recipes.corpora import Corpus, Vocabulary
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.language_model import (
    PAPER_SIZES,
    LanguageModel,
    ModelConfig,
    ModelName,
    State,
    paper_report,
    parameter_count,
)
from revrnn.recipes.provenance import provenance
from revrnn.recipes.stopping import Signals, StoppedError

if distributed.is_available():
    # Before a process group exists: its functions would keep it as a default argument.
    import torch.distributed.nn.functional

PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


# -------------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Arguments:
    """What is trained, and how. The defaults are the paper's; the help of the command line is what
    stands under each field."""

    data: str = "ptb"
    """ptb, wikitext2, demo (a corpus made up by seeded rules, of known entropy), or a folder with
    train.txt, valid.txt and test.txt."""
    model: str = "revlstm"
    """revgru, revlstm, gru or lstm."""
    layers: int = 1
    """Recurrent layers."""
    hidden: str = ""
    """Units of each layer, with commas between; the last layer's are also the size of the
    embedding. The paper's: 650 for one layer, 1150,650 for two."""
    max_forget_bits: float | None = None
    """The most bits a unit of a reversible layer may forget a step; without it, no limit."""
    forget: str = "fractional"
    """How units of a reversible layer forget: fractional; discrete, whole bits chosen at random
    (with --max-forget-bits); or none, never."""
    estimator: str = "gumbel"
    """Of the gradient through what discrete forgetting chooses: gumbel or categorical."""
    temperature: float = 1.0
    """Of the gumbel estimator."""
    embedding_dropout: float = 0.1
    """Probability that a word's embedding is dropped."""
    input_dropout: float = 0.3
    """Probability that a feature of the first layer's input is dropped, for a whole segment."""
    output_dropout: float = 0.4
    """Probability that a unit of a layer's output is dropped, for a whole segment."""
    weight_dropout: float = 0.5
    """Probability that a hidden-to-hidden weight is dropped (DropConnect)."""
    streaming: bool = True
    """Train reversible layers chunk by chunk, never holding all logits."""
    batch: int = 20
    """Rows of text worked on at once, over all processes together."""
    length: int = 70
    """Time steps of a segment, on average, that gradients flow through."""
    short: float = 0.05
    """Probability that a segment has half that length."""
    jitter: float = 5.0
    """Standard deviation of a segment's length."""
    learning_rate: float = 20.0
    """Of SGD, for a segment of the average length; in proportion for others."""
    decay: float = 4.0
    """What the learning rate is divided by when the validation loss has stopped falling."""
    interval: int = 5
    """It has, when it is above the best of all epochs but so many before this one."""
    lowest_rate: float = 1e-2
    """Training ends when the learning rate is below this."""
    clip: float = 0.1
    """Largest norm of a gradient."""
    weight_decay: float = 1.2e-6
    """Of SGD."""
    eval_batch: int = 10
    """Rows of the validation text worked on at once."""
    paper_buffer: bool = True
    """Measure once an epoch, on one segment, what the paper's own buffer would hold."""
    precision: str = "32"
    """32, bf16 or 16: of matrix products outside the reversible layers."""
    seed: int = 1
    """Of weights, dropout and segment lengths."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "interval", "eval_batch", "layers"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        for name in ("learning_rate", "clip", "lowest_rate"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{name} must be positive, got {getattr(self, name):g}.")
        for name in ("learning_rate", "lowest_rate", "decay", "jitter", "weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise RecipeError(f"{name} must be a finite number, got {getattr(self, name):g}.")
        if self.decay <= 1:
            raise RecipeError(f"decay must be more than 1, got {self.decay:g}.")
        if not 0 <= self.short <= 1 or self.jitter < 0 or self.weight_decay < 0:
            raise RecipeError(
                "short must be a probability, jitter and weight_decay must not be negative, got "
                f"{self.short:g}, {self.jitter:g} and {self.weight_decay:g}."
            )
        if self.precision not in PRECISIONS:
            raise RecipeError(
                f"there is no precision {self.precision!r}: choose {', '.join(PRECISIONS)}."
            )
        self.model_config(words=1)

    def sizes(self) -> tuple[int, ...]:
        """Units of each layer."""
        if not self.hidden:
            return PAPER_SIZES.get(self.layers, (1150,) * (self.layers - 1) + (650,))
        try:
            sizes = tuple(int(size) for size in self.hidden.split(","))
        except ValueError as error:
            raise RecipeError(
                "hidden must be numbers with commas between, such as 1150,650, got "
                f"{self.hidden!r}."
            ) from error
        if len(sizes) == 1:
            sizes *= self.layers
        if self.layers not in (1, len(sizes)):
            raise RecipeError(
                f"hidden must have a number for each of the {self.layers} layers, got "
                f"{self.hidden!r}."
            )
        return sizes

    def model_config(self, words: int) -> ModelConfig:
        names = {item.name for item in fields(ModelConfig)} & {item.name for item in fields(self)}
        shared = {name: getattr(self, name) for name in names - {"hidden", "model"}}
        model = cast(ModelName, self.model)
        return ModelConfig(model=model, words=words, hidden=self.sizes(), **shared)


@dataclass(frozen=True)
class Resources:
    """What a run may use; none of it changes what it computes."""

    out: Path
    """The run folder: checkpoints, metrics, TensorBoard."""
    resume: bool = False
    """Go on with the run in that folder."""
    epochs: int = 1000
    """Epochs after which training ends."""
    max_minutes: float | None = None
    """Minutes after which it stops; it can be resumed."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints within an epoch; there is one at the end of each."""
    device: str = "auto"
    """auto, cpu or cuda."""
    devices: int = 1
    """Processes on this machine; torchrun's number if it started this one."""
    nodes: int = 1
    """Machines."""

    def __post_init__(self) -> None:
        for name in ("epochs", "devices", "nodes"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        for name in ("max_minutes", "checkpoint_minutes"):
            minutes = getattr(self, name)
            if minutes is not None and not minutes >= 0:
                raise RecipeError(f"{name} must not be negative, got {minutes:g}.")

    def fabric(self, precision: str) -> Fabric:
        """In a process started by torchrun, as many processes as that says."""
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", self.devices))
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", self.nodes))
        return Fabric(
            accelerator=choose_device(self.device),
            devices=devices,
            num_nodes=nodes,
            strategy="ddp" if devices * nodes > 1 else "auto",
            precision=PRECISIONS[precision],  # type: ignore[arg-type]
        )


def choose_device(name: str) -> str:
    """cpu or cuda, from auto or either of them."""
    if name not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"there is no device {name!r}: choose auto, cpu or cuda.")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise RecipeError("there is no CUDA device that torch can use: choose --device cpu.")
    return "cuda" if there and name != "cpu" else "cpu"


# ---------------------------------------------------------------------------- the state of training


@dataclass
class Tally:
    """Sums over the steps of an epoch."""

    loss: float = 0.0
    """Nats."""
    tokens: int = 0
    seconds: float = 0.0
    held_bits: float = 0.0
    ideal_bits: float = 0.0
    naive_bits: float = 0.0
    unit_steps: float = 0.0


@dataclass
class Progress:
    """Where a run is; with weights and carried state, all there is to know of it."""

    learning_rate: float
    epoch: int = 1
    step: int = 0
    """Segments done, of all epochs."""
    position: int = 0
    """Time steps of this epoch done."""
    tally: Tally = field(default_factory=Tally)
    """Of this epoch."""
    validations: list[float] = field(default_factory=list)
    """Nats a word after every epoch."""
    rows: list[dict[str, float]] = field(default_factory=list)
    """What metrics.csv says."""

    @staticmethod
    def restored(saved: dict[str, Any]) -> Progress:
        return Progress(**{**saved, "tally": Tally(**saved["tally"])})

    def finished(self, arguments: Arguments, epochs: int) -> bool:
        return self.epoch > epochs or self.learning_rate < arguments.lowest_rate


def seed_of(*parts: object) -> int:
    """The same for the same parts, whatever the process, machine or version of Python."""
    return random.Random(" ".join(map(str, parts))).getrandbits(63)


def segment_length(arguments: Arguments, step: int) -> int:
    """Half the length now and then, and some noise: so that segments begin elsewhere each epoch."""
    rng = random.Random(seed_of("length", arguments.seed, step))
    base = arguments.length / 2 if rng.random() < arguments.short else arguments.length
    return max(5, int(rng.gauss(base, arguments.jitter)))


def stopped_falling(losses: Sequence[float], interval: int) -> bool:
    """The non-monotone criterion: the last loss is above the best of all but the ``interval``
    before it."""
    *before, last = losses
    return len(before) > interval and last > min(before[:-interval])


# ------------------------------------------------------------------------------------- evaluation


def perplexity(loss: float) -> float:
    """e^loss, of nats a word; infinite where that is no number of 64 bits."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluate(
    model: LanguageModel,
    text: Tensor,
    batch: int,
    *,
    length: int = 70,
    name: str = "text",
    check: Callable[[], None] = lambda: None,
) -> float:
    """Nats a word of a text (tokens,), with the state carried through each of ``batch`` parts.
    ``check`` is called after every segment."""
    device = model.head.bias.device
    table = corpora.columns(text, batch, name).to(device)  # (T, N)
    training = model.training
    model.eval()
    total = 0.0
    try:
        with torch.no_grad():
            for segment in truncated(table[:-1], table[1:], length=length):
                words, targets = segment.tensors
                loss, segment.state = model(words, targets, segment.state)
                total += loss.item() * len(words)
                check()
    finally:
        model.train(training)
    return total / (len(table) - 1)


# --------------------------------------------------------------------------------------- training


def train(arguments: Arguments, resources: Resources) -> Progress:
    """Train, or go on training; returns where it ended."""
    out = resources.out
    saved: dict[str, Any] | None = None
    if resources.resume:
        saved = checkpoints.load(out / checkpoints.LAST)
        arguments = _arguments(saved, out)
    elif (out / checkpoints.LAST).exists():
        raise RecipeError(f"{out} holds a run already: resume it, or name another folder.")
    fabric = resources.fabric(arguments.precision)
    ours = not distributed.is_initialized()
    fabric.launch()
    try:
        corpus = corpora.load(arguments.data)
        return _Run(fabric, arguments, resources, corpus, saved).train()
    finally:
        # Threads of a group that lives on until the process ends abort it now and then. So that
        # nothing keeps the group: the model is collected, and see the import above.
        if ours and distributed.is_initialized():
            gc.collect()
            distributed.destroy_process_group()


class _Run:
    def __init__(
        self,
        fabric: Fabric,
        arguments: Arguments,
        resources: Resources,
        corpus: Corpus,
        saved: dict[str, Any] | None,
    ) -> None:
        self.fabric, self.arguments, self.resources = fabric, arguments, resources
        self.corpus = corpus
        if saved is not None and saved["corpus"] != corpus.fingerprint:
            raise RecipeError(
                f"{resources.out} was trained on another text than {arguments.data} is now."
            )
        if arguments.batch % fabric.world_size:
            raise RecipeError(
                f"batch must be a multiple of the {fabric.world_size} processes, got "
                f"{arguments.batch}."
            )
        # Before anything is computed: an error here must cost no epoch.
        corpora.columns(corpus.valid, arguments.eval_batch, "valid")
        rows = arguments.batch // fabric.world_size
        self.own = slice(fabric.global_rank * rows, (fabric.global_rank + 1) * rows)
        table = corpora.columns(corpus.train, arguments.batch, "train")
        self.text = fabric.to_device(table[:, self.own].contiguous())  # (T, N)
        self.steps = len(self.text) - 1

        torch.manual_seed(seed_of("weights", arguments.seed))
        self.model = LanguageModel(arguments.model_config(len(corpus.vocabulary)))
        optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=arguments.learning_rate,
            weight_decay=arguments.weight_decay,
        )
        self.progress = Progress(arguments.learning_rate)
        self.state: State = None
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            if saved.get("precision"):
                fabric.strategy.precision.load_state_dict(saved["precision"])
            self.progress = Progress.restored(saved["progress"])
            self.state = fabric.to_device(_map(saved["state"], self._own_rows))
        # `wrapped` synchronises gradients between processes; `model` is the same weights.
        self.wrapped, self.optimizer = fabric.setup(self.model, optimizer)
        self.signals = Signals()
        self.started = self.written = time.monotonic()

    # -- the loop ----------------------------------------------------------------------------------

    def train(self) -> Progress:
        first = self.fabric.is_global_zero
        with checkpoints.alone(self.resources.out) if first else nullcontext():
            if first:
                self._describe()
            return self._train()

    def _train(self) -> Progress:
        progress = self.progress
        with self.signals, self._board() as board:
            while not progress.finished(self.arguments, self.resources.epochs):
                if not self._epoch(board):
                    self._save(checkpoints.LAST)
                    return progress
                self._finish_epoch(board)
        return progress

    def _epoch(self, board: Board | None) -> bool:
        """Train to the end of the epoch; False if the time is up before."""
        progress, tally = self.progress, self.progress.tally
        with self._bar() as bar:
            while progress.position < self.steps:
                start = time.perf_counter()
                length = min(
                    segment_length(self.arguments, progress.step), self.steps - progress.position
                )
                loss = self._step(length)
                tokens = length * self.arguments.batch
                tally.loss += loss * tokens
                tally.tokens += tokens
                tally.seconds += time.perf_counter() - start
                progress.position += length
                progress.step += 1
                self._show(bar, board, loss, tokens)
                if self._time_is_up():
                    return False
        return True

    def _step(self, length: int) -> float:
        """One segment; the mean loss of all processes, nats a word."""
        fabric, progress, arguments = self.fabric, self.progress, self.arguments
        first = progress.position
        words = self.text[first : first + length]  # (T, N)
        targets = self.text[first + 1 : first + 1 + length]
        torch.manual_seed(seed_of("dropout", arguments.seed, progress.step, fabric.global_rank))
        self.model.train()
        loss, self.state = self.wrapped(words, targets, self.state)
        self.state = revrnn.truncation.detach(self.state)
        self.optimizer.zero_grad()
        fabric.backward(loss)
        value = float(cast(Tensor, fabric.all_reduce(loss.detach())))
        self._finite("the loss", value)
        norm = fabric.clip_gradients(
            self.wrapped, self.optimizer, max_norm=arguments.clip, error_if_nonfinite=False
        )
        # Of the whole batch, so all processes see the same. Where only the norm overflows, clipping
        # has made the step none; a scaler leaves it out itself.
        scaled = getattr(fabric.strategy.precision, "scaler", None) is not None
        if not (scaled or math.isfinite(float(cast(Tensor, norm)))):
            self._finite("the gradient", self._sum_of_gradients())
        for group in self.optimizer.param_groups:
            group["lr"] = progress.learning_rate * length / arguments.length
        self.optimizer.step()
        self._count_tape()
        return value

    def _sum_of_gradients(self) -> float:
        """A number if they are."""
        gradients = (parameter.grad for parameter in self.model.parameters())
        return sum(float(part.sum()) for part in gradients if part is not None)

    def _finite(self, name: str, value: float) -> None:
        """Before weights that are no numbers, or lead to none, reach a checkpoint."""
        if not math.isfinite(value):
            raise RecipeError(
                f"{name} is {value} at step {self.progress.step}: lower the learning rate; the "
                f"last checkpoint in {self.resources.out} is from before."
            )

    def _count_tape(self) -> None:
        report = self.model.tape_report()
        if report is not None:
            tally, total = self.progress.tally, report.total
            tally.held_bits += total.held_bits
            tally.ideal_bits += total.ideal_bits
            tally.naive_bits += total.naive_bits
            tally.unit_steps += total.unit_steps

    def _finish_epoch(self, board: Board | None) -> None:
        """Validate, log, decay, write checkpoints."""
        progress, tally, arguments = self.progress, self.progress.tally, self.arguments
        valid = self._validate()
        paper = self._paper_savings()
        best = valid < min(progress.validations, default=math.inf)
        progress.validations.append(valid)
        progress.rows.append(
            {
                "epoch": progress.epoch,
                "step": progress.step,
                "seconds": sum(row["epoch_seconds"] for row in progress.rows) + tally.seconds,
                "epoch_seconds": tally.seconds,
                "tokens_per_second": tally.tokens / tally.seconds,
                "learning_rate": progress.learning_rate,
                "train_loss": tally.loss / tally.tokens,
                "train_perplexity": perplexity(tally.loss / tally.tokens),
                "valid_loss": valid,
                "valid_perplexity": perplexity(valid),
                "tape_bits": _ratio(tally.held_bits, tally.unit_steps),
                "ideal_bits": _ratio(tally.ideal_bits, tally.unit_steps),
                "savings": _ratio(tally.naive_bits, tally.held_bits),
                "ideal_savings": _ratio(tally.naive_bits, tally.ideal_bits),
                "paper_savings": paper,
            }
        )
        if stopped_falling(progress.validations, arguments.interval):
            progress.learning_rate /= arguments.decay
        progress.epoch += 1
        progress.position = 0
        progress.tally = Tally()
        self.state = None
        if self.fabric.is_global_zero:
            self._log(board)
        if best:
            self._save(checkpoints.BEST)
        self._save(checkpoints.LAST)

    def _validate(self) -> float:
        """On the first process; the others wait for what it found."""
        found: float | None = None
        if self.fabric.is_global_zero:
            try:
                with self.fabric.autocast():
                    found = evaluate(
                        self.model,
                        self.corpus.valid,
                        self.arguments.eval_batch,
                        length=self.arguments.length,
                        name="valid",
                        check=self.signals.raise_if_asked,
                    )
            except StoppedError:
                pass
        found = self.fabric.broadcast(found)
        if found is None:
            self._save(checkpoints.LAST)
            raise self.signals.stopped()
        return found

    def _paper_savings(self) -> float:
        """32-bit storage over the paper's buffer, on the beginning of the text."""
        if not (self.arguments.paper_buffer and self.fabric.is_global_zero):
            return math.nan
        torch.manual_seed(seed_of("paper", self.arguments.seed, self.progress.epoch))
        report = paper_report(self.model, self.text[: min(self.arguments.length, self.steps)])
        return math.nan if report is None else report.savings

    # -- stopping ----------------------------------------------------------------------------------

    def _time_is_up(self) -> bool:
        """After a step: stop if a signal says so, checkpoint if it is time. All processes agree."""
        now, resources = time.monotonic(), self.resources
        minutes = math.inf if resources.max_minutes is None else resources.max_minutes
        asked = [
            self.signals.asked,
            now - self.started > 60 * minutes,
            now - self.written > 60 * resources.checkpoint_minutes,
        ]
        if self.fabric.world_size > 1:
            flags = self.fabric.to_device(torch.tensor(asked, dtype=torch.float32))
            asked = [bool(flag) for flag in cast(Tensor, self.fabric.all_reduce(flags))]
        stop, up, due = asked
        if stop:
            self._save(checkpoints.LAST)
            raise self.signals.stopped()
        if due and not up:
            self._save(checkpoints.LAST)
        return up

    def _save(self, name: str) -> None:
        """By all processes together, since each has the states of its own rows."""
        state = _map(self.state, self._all_rows)
        if self.fabric.is_global_zero:
            checkpoints.save(
                self.resources.out / name,
                {
                    "version": revrnn.__version__,
                    "arguments": asdict(self.arguments),
                    "corpus": self.corpus.fingerprint,
                    "vocabulary": self.corpus.vocabulary.words,
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    # The scale of the loss, where gradients are of 16 bits.
                    "precision": self.fabric.strategy.precision.state_dict(),
                    "state": state,
                    "progress": asdict(self.progress),
                },
            )
        self.written = time.monotonic()

    def _all_rows(self, state: Tensor) -> Tensor:
        """(L, N, H) of each process to that of all."""
        if self.fabric.world_size == 1:
            return state
        gathered = cast(Tensor, self.fabric.all_gather(state))  # (P, L, N, H)
        return gathered.transpose(0, 1).flatten(1, 2)

    def _own_rows(self, state: Tensor) -> Tensor:
        return state[:, self.own].contiguous()

    # -- showing -----------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Write run.json, for people."""
        description = {
            **provenance(),
            "processes": self.fabric.world_size,
            "device": str(self.fabric.device),
            "parameters": parameter_count(self.model),
            "best_possible": {split: 2**bits for split, bits in self.corpus.entropy.items()},
            "arguments": asdict(self.arguments),
        }
        data = json.dumps(description, indent=2) + "\n"
        checkpoints.write(self.resources.out / "run.json", data.encode())

    @contextmanager
    def _board(self) -> Iterator[Board | None]:
        """TensorBoard's files, by the first process."""
        if not self.fabric.is_global_zero:
            yield None
            return
        folder = self.resources.out / "tensorboard"
        with closing(Board(folder, first_step=self.progress.step)) as board:
            yield board

    def _bar(self) -> tqdm[Any]:
        batch = self.arguments.batch
        return tqdm(
            total=self.steps * batch,
            initial=self.progress.position * batch,
            desc=f"epoch {self.progress.epoch}",
            unit=" words",
            unit_scale=True,
            leave=False,
            disable=None if self.fabric.is_global_zero else True,
        )

    def _show(self, bar: tqdm[Any], board: Board | None, loss: float, tokens: int) -> None:
        tally, step = self.progress.tally, self.progress.step
        mean = tally.loss / tally.tokens
        shown = f"loss {mean:.3f}, perplexity {perplexity(mean):.4g}"
        report = self.model.tape_report()
        if report is not None:
            tape = report.held_bits / report.unit_steps
            ideal = report.ideal_bits / report.unit_steps
            shown += f", tape {tape:.3f} bits a unit a step, ideal {ideal:.3f}"
            if board is not None:
                board.add("tape/bits", tape, step)
                board.add("tape/ideal_bits", ideal, step)
        bar.set_postfix_str(shown, refresh=False)
        bar.update(tokens)
        if board is not None:
            board.add("train/loss", loss, step)

    def _log(self, board: Board | None) -> None:
        """A line, a row of metrics.csv, TensorBoard."""
        row = self.progress.rows[-1]
        line = (
            f"epoch {row['epoch']:>3}  train {row['train_perplexity']:9.2f}  "
            f"valid {row['valid_perplexity']:9.2f}  rate {row['learning_rate']:g}  "
            f"{row['tokens_per_second']:,.0f} words/s"
        )
        if not math.isnan(row["tape_bits"]):
            line += (
                f"  tape {row['tape_bits']:.3f} bits a unit a step, ideal {row['ideal_bits']:.3f}, "
                f"savings {row['savings']:.1f}x"
            )
        print(line, file=sys.stderr, flush=True)
        checkpoints.write(self.resources.out / "metrics.csv", _csv(self.progress.rows).encode())
        if board is not None:
            for name, value in row.items():
                board.add(f"epoch/{name}", value, int(row["step"]))


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan


def _map(state: State, function: Callable[[Tensor], Tensor]) -> State:
    """Of every tensor of a state."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return function(state)
    return type(state)(_map(part, function) for part in state)


def _csv(rows: Sequence[dict[str, float]]) -> str:
    """Numbers that are not known are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        known = {name: value for name, value in row.items() if not math.isnan(value)}
        writer.writerow({name: f"{value:.6g}" for name, value in known.items()})
    return text.getvalue()


# --------------------------------------------------------------------------------- trained models


def _arguments(saved: dict[str, Any], folder: Path) -> Arguments:
    """Those of a checkpoint, if it is one of a language model."""
    found = saved.get("arguments")
    names = {item.name for item in fields(Arguments)}
    if not isinstance(found, dict) or found.keys() != names:
        raise RecipeError(f"{folder} holds another kind of run than a language model's.")
    return Arguments(**found)


@dataclass(frozen=True)
class Trained:
    """A model from a run folder."""

    arguments: Arguments
    model: LanguageModel
    vocabulary: Vocabulary
    progress: Progress
    fingerprint: str
    """Of the corpus it was trained on."""
    scaled: bool
    """Whether its loss was scaled, as in float16: on CPUs 16 bits are those of bfloat16."""

    def autocast(self) -> AbstractContextManager[object]:
        """The precision it was trained in, which its validation had, too."""
        if self.arguments.precision == "32":
            return nullcontext()
        device = self.model.head.bias.device.type
        short = self.scaled and device != "cpu"
        return torch.autocast(device, torch.float16 if short else torch.bfloat16)


def load(folder: Path, device: str = "cpu") -> Trained:
    """The weights of the best epoch; of the last checkpoint, if there is no whole epoch yet."""
    best = folder / checkpoints.BEST
    saved = checkpoints.load(best if best.exists() else folder / checkpoints.LAST)
    arguments = _arguments(saved, folder)
    vocabulary = Vocabulary(saved["vocabulary"])
    model = LanguageModel(arguments.model_config(len(vocabulary)))
    model.load_state_dict(saved["model"])
    progress = Progress.restored(saved["progress"])
    scaled = bool(saved.get("precision"))
    return Trained(
        arguments, model.to(device).eval(), vocabulary, progress, saved["corpus"], scaled
    )

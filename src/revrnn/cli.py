"""The command ``revrnn``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch

try:
    import typer
    from lightning_fabric.utilities import rank_zero_only

    from revrnn import lm_table, plots
    from revrnn._options import SETTINGS, with_options
    from revrnn.cli_toy import toy
    from revrnn.recipes import corpora, training
    from revrnn.recipes.errors import RecipeError
    from revrnn.recipes.presets import PRESETS, Preset, preset
    from revrnn.recipes.stopping import StoppedError
except ModuleNotFoundError as error:
    raise SystemExit(
        f"revrnn: the command line needs {error.name}: pip install 'revrnn[cli]'"
    ) from error

from revrnn.errors import NonFiniteError, StateOverflowError

app = typer.Typer(help="Reversible recurrent nets: experiments and their data.", **SETTINGS)
lm = typer.Typer(help="Language models: train, evaluate, generate, plot.", **SETTINGS)
data = typer.Typer(help="Corpora.", **SETTINGS)
app.add_typer(lm, name="lm")
app.add_typer(data, name="data")
app.add_typer(toy, name="toy")

Folder = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


# -------------------------------------------------------------------------------- language models


@lm.command()
@with_options((training.Arguments, ()), (training.Resources, ("out", "resume")))
def train(
    preset_name: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="A row of the paper's tables, such as ptb-revgru-1l-2bit or ptb-lstm-2l, or "
            "small-revgru (200 units, an hour on a CPU) or demo-revgru (minutes) and the like; "
            "other options change it.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder. [default: one in runs/, named after preset and seed]"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this folder, where it stopped; with --epochs and the "
            "options after it only."
        ),
    ] = None,
    **given: Any,
) -> None:
    """Train a language model.

    The defaults are the paper's. The run folder holds metrics.csv, a row an epoch, checkpoints
    last.pt and best.pt, and what TensorBoard shows. Ctrl-C writes a checkpoint and stops; --resume
    goes on as if it never had. With torchrun in front, several processes share every batch.
    """
    given = {name: value for name, value in given.items() if value is not None}
    names = {item.name for item in fields(training.Arguments)}
    changes = {name: value for name, value in given.items() if name in names}
    resources = {name: value for name, value in given.items() if name not in names}
    row = preset(preset_name) if preset_name else None
    if resume is not None:
        refused = [f"--{name.replace('_', '-')}" for name in changes]
        refused += ["--preset"] * bool(preset_name) + ["--out"] * bool(out)
        if refused:
            raise RecipeError(
                f"a run is resumed with the arguments it began with: leave out {refused[0]}."
            )
        folder = resume
        arguments = training.Arguments()
    else:
        arguments = training.Arguments(**(row.changes if row else {}) | changes)
        name = preset_name or f"{Path(arguments.data).name}-{arguments.model}"
        folder = out or Path("runs") / f"{name}-seed{arguments.seed}"
    progress = training.train(
        arguments, training.Resources(folder, resume=resume is not None, **resources)
    )
    _summary(progress, row, folder)


@rank_zero_only
def _summary(progress: training.Progress, row: Preset | None, folder: Path) -> None:
    """By the first process alone."""
    if progress.validations:
        best = min(progress.validations)
        epoch = progress.validations.index(best) + 1
        print(f"best validation perplexity {training.perplexity(best):.2f}, in epoch {epoch}")
    else:
        print("stopped before the end of the first epoch")
    if row is not None and row.perplexity is not None:
        print(f"the paper's {row.name}: {row.perplexity}")
    print(f"run folder: {folder}")


@lm.command("eval")
def evaluate(
    folder: Folder,
    batch: Annotated[
        int, typer.Option(help="Rows of the test text; the paper's recipe has one.", min=1)
    ] = 1,
    device: Device = "auto",
) -> None:
    """Perplexity of a run's best weights on the validation and the test text."""
    trained = training.load(folder, training.choose_device(device))
    corpus = corpora.load(trained.arguments.data)
    if corpus.fingerprint != trained.fingerprint:
        raise RecipeError(
            f"{folder} was trained on another text than {trained.arguments.data} is now."
        )
    length = trained.arguments.length
    texts = {"valid": (corpus.valid, trained.arguments.eval_batch), "test": (corpus.test, batch)}
    for split, (text, rows) in texts.items():
        with trained.autocast():
            loss = training.evaluate(trained.model, text, rows, length=length, name=split)
        perplexity = training.perplexity(loss)
        line = f"{split}: perplexity {perplexity:.2f}, {loss / math.log(2):.4f} bits a word"
        if split in corpus.entropy:
            bits = corpus.entropy[split]
            line += f" (best possible: {2**bits:.2f}, {bits:.4f} bits)"
        print(line)


@lm.command()
def generate(
    folder: Folder,
    prompt: Annotated[
        str, typer.Option(help="Words that the text begins with.", show_default=False)
    ] = "",
    words: Annotated[int, typer.Option(help="Words to add.", min=1)] = 100,
    temperature: Annotated[
        float, typer.Option(help="Below 1 the likely words are likelier; 0: the likeliest.", min=0)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 1,
    device: Device = "auto",
) -> None:
    """Let a run's best weights write on."""
    place = training.choose_device(device)
    trained = training.load(folder, place)
    before = [corpora.EOS, *prompt.replace("\n", f" {corpora.EOS} ").split()]
    ids = trained.vocabulary.ids(before, strict=True)
    generator = torch.Generator(place).manual_seed(seed)
    after = trained.model.generate(
        ids.to(place), words, temperature=temperature, generator=generator
    )
    print(trained.vocabulary.text([*ids[1:].tolist(), *after]))


@lm.command()
def plot(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, drawn over each other.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the pictures go. [default: the first run folder]")
    ] = None,
) -> None:
    """Draw curves.png, perplexity over training, and savings.png, memory for hidden states."""
    to = out or folders[0]
    try:
        runs = [plots.Run.load(folder) for folder in folders]
        plots.curves(runs, to / "curves.png")
        print(to / "curves.png")
        if any(run.points("savings")[1] for run in runs):
            plots.savings(runs, to / "savings.png")
            print(to / "savings.png")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    except OSError as error:
        raise RecipeError(f"{to} cannot be written to: {error.strerror}.") from error


@lm.command()
def table(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, a row each.", show_default=False)
    ],
    epochs: Annotated[
        int | None,
        typer.Option(help="Only the first so many epochs of each. [default: all]", min=1),
    ] = None,
) -> None:
    """Print a table of runs in Markdown, beside the paper's figures.

    "x torch.nn" is over the run of gru or lstm among them that differs in nothing else and has as
    many epochs; what the tape holds is that of the last epoch. The paper's figures are of its own,
    larger models.
    """
    try:
        print(lm_table.table(folders, epochs))
    except ValueError as error:
        raise RecipeError(str(error)) from error


@lm.command()
def presets() -> None:
    """List the presets, with the paper's validation perplexities and memory savings."""
    for row in PRESETS.values():
        saved = f"{row.savings:6.1f}x" if row.savings else ""
        perplexity = f"{row.perplexity:7.1f}" if row.perplexity else ""
        print(f"{row.name:<26}{perplexity}{saved}".rstrip())


# ------------------------------------------------------------------------------------------- data


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help="ptb or wikitext2.", show_default=False)],
) -> None:
    """Download a corpus and check its SHA-256.

    It goes into the folder that REVRNN_DATA names; without it, into a cache folder of the user. A
    download that broke off goes on where it stopped.
    """
    print(corpora.fetch(name))


# ------------------------------------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, 2 for what the user can put right, 128 + n after signal n."""
    try:
        app(args=arguments, prog_name="revrnn")
    except RecipeError as error:
        sys.exit(_say(str(error), 2))
    except StoppedError as error:
        sys.exit(_say(f"{error}; --resume goes on from the checkpoint", error.exit_code))
    except (NonFiniteError, StateOverflowError) as error:
        sys.exit(_say(str(error), 1))


def _say(text: str, code: int) -> int:
    print(f"revrnn: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()

"""The commands ``revrnn toy``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from revrnn import toy_plots
from revrnn._options import SETTINGS, with_options
from revrnn.recipes import checkpoints, toy_results, toy_training
from revrnn.recipes import growth as growth_recipe
from revrnn.recipes.errors import RecipeError
from revrnn.recipes.provenance import provenance
from revrnn.recipes.toy_training import PRESETS, Arguments, Resources

toy = typer.Typer(help="Repeating and memorising: what a state can hold.", **SETTINGS)

PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="paper (20000 sequences a step, a million steps) or scaled (minutes); other options "
        "change it.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The run folder. [default: one in runs/toy, named after it]"),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        help="Go on with the run in this folder; with the options after it only: more --steps "
        "prolong a run that has ended."
    ),
]
Rows = Annotated[
    Path | None, typer.Option("--results", help="A CSV file that the run's result goes into.")
]
RESULTS = Path("results/toy/runs.csv")
Results = Annotated[Path, typer.Option("--results", help="The CSV file with the rows of runs.")]

_OWN = (Arguments, ("task",)), (Resources, ("out", "resume"))


# ------------------------------------------------------------------------------------------ runs


@toy.command()
@with_options(*_OWN)
def repeat(
    preset_name: PresetName = None,
    out: Out = None,
    resume: Resume = None,
    results: Rows = None,
    **given: Any,
) -> None:
    """Train on the repeat task: answer each token at the step after it.

    The run folder holds metrics.csv, a row an evaluation, and the checkpoint last.pt. Ctrl-C
    evaluates, writes both and stops. Training ends early once all tokens are right.
    """
    _train("repeat", preset_name, out, resume, results, given)


@toy.command()
@with_options(*_OWN)
def memorise(
    preset_name: PresetName = None,
    out: Out = None,
    resume: Resume = None,
    results: Rows = None,
    **given: Any,
) -> None:
    """Train on the memorisation task: after the last token, answer all in reverse order.

    Run folder, stopping and resuming as for `revrnn toy repeat`.
    """
    _train("memorise", preset_name, out, resume, results, given)


def _train(
    task: str,
    preset_name: str | None,
    out: Path | None,
    resume: Path | None,
    results: Path | None,
    given: dict[str, Any],
) -> None:
    source = provenance()
    given = {name: value for name, value in given.items() if value is not None}
    values = _preset(preset_name) | given
    names = {item.name for item in fields(Arguments)}
    if resume is not None:
        refused = [f"--{name.replace('_', '-')}" for name in given if name in names]
        refused += ["--preset"] * bool(preset_name) + ["--out"] * bool(out)
        if refused:
            raise RecipeError(
                f"a run is resumed with the arguments it began with: leave out {refused[0]}."
            )
    arguments = Arguments(task, **{name: values[name] for name in values if name in names})
    rest = {name: value for name, value in values.items() if name not in names}
    folder = resume or out or Path("runs/toy") / _name(arguments)
    resources = Resources(folder, resume=resume is not None, **rest)
    _run(arguments, resources, results, source)


def _preset(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise RecipeError(f"there is no preset {name!r}: choose {' or '.join(PRESETS)}.")
    return PRESETS[name]


def _name(arguments: Arguments) -> str:
    sizes = f"{arguments.hidden}x{arguments.length}-batch{arguments.batch}"
    rate = f"-rate{arguments.learning_rate:g}"
    rate = "" if arguments.learning_rate == Arguments.learning_rate else rate
    return f"{arguments.task}-{arguments.model}-{sizes}{rate}-seed{arguments.seed}"


def _run(
    arguments: Arguments, resources: Resources, results: Path | None, source: dict[str, str]
) -> None:
    arguments, progress = toy_training.train(arguments, resources)
    result = toy_results.Result.of(arguments, progress, source)
    if result is None:  # nothing left to do in a resumed run that never evaluated
        return
    bits = toy_results.bits_a_unit(result.tokens, result.length, result.hidden)
    print(
        f"{arguments.task} {arguments.model} {arguments.hidden} units: {result.tokens:.2f} of "
        f"{result.length} tokens, {bits:.2f} bits a unit, at step {result.best_step} of "
        f"{result.steps}, {result.seconds:.0f} s: {resources.out}"
    )
    if results is not None:
        toy_results.add(results, result)


@toy.command()
def grid(
    preset_name: Annotated[str, typer.Option("--preset", help="scaled or paper.")] = "scaled",
    runs: Annotated[
        str, typer.Option(help="Tasks and models, as task:model with commas between.")
    ] = "repeat:revgru,repeat:nf-revgru,memorise:lstm",
    hidden: Annotated[str, typer.Option(help="Units, with commas between.")] = "8,16,32",
    length: Annotated[str, typer.Option(help="Tokens, with commas between.")] = "20,35,50",
    seed: Annotated[int, typer.Option(help="Of every run.")] = 1,
    steps: Annotated[
        int | None, typer.Option(help="Steps of a run. [default: the preset's]", min=1)
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Of Adam.")] = Arguments.learning_rate,
    folder: Annotated[Path, typer.Option(help="Where the run folders go.")] = Path("runs/toy"),
    results: Results = RESULTS,
) -> None:
    """Train all runs of the paper's table one after another, and write a row for each.

    What has a row already is left alone, unless more steps are asked for: then the run goes on
    from its folder, if that is still there.
    """
    source = provenance()
    preset = dict(_preset(preset_name))
    budget = steps or preset.pop("steps")
    preset.pop("steps", None)
    every = preset.pop("eval_every")
    every_run = [
        Arguments(task, model, units, tokens, learning_rate=learning_rate, seed=seed, **preset)
        for task, model in _pairs(runs)
        for units in _numbers("hidden", hidden)
        for tokens in _numbers("length", length)
    ]
    for arguments in every_run:
        rows = toy_results.read(results) if results.exists() else []
        values = {item.name: getattr(arguments, item.name) for item in fields(Arguments)}
        there = toy_results.find(rows, **values)
        if there is not None and there.at_least(budget):
            continue
        out = folder / _name(arguments)
        resume = (out / checkpoints.LAST).exists()
        resources = Resources(out, resume=resume, steps=budget, eval_every=every)
        _run(arguments, resources, results, source)


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for part in text.split(","):
        task, colon, model = part.strip().partition(":")
        if not colon:
            raise RecipeError(
                f"runs must be task:model with commas between, such as repeat:revgru, got {text!r}."
            )
        pairs.append((task, model))
    return pairs


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RecipeError(f"{name} must be numbers with commas between, got {text!r}.") from error


@toy.command()
@with_options((growth_recipe.Arguments, ()))
def growth(
    out: Annotated[
        Path, typer.Option(help="The CSV file; a JSON file and a picture go beside it.")
    ] = Path("results/toy/growth.csv"),
    **given: Any,
) -> None:
    """Train language models with and without forgetting side by side, and watch their states.

    It ends with a plot of the norms of the states and of the losses. Where a state leaves its
    range, it begins again at zero. Ctrl-C writes what there is and stops.
    """
    given = {name: value for name, value in given.items() if value is not None}
    rows = growth_recipe.run(growth_recipe.Arguments(**given), out)
    for model in growth_recipe.FORGET:
        own = [row for row in rows if row.model == model]
        lost = growth_recipe.overflows(rows, model)
        where = f", the first in segment {lost[0] + 1}" if lost else ""
        read = [row for row in own if not row.overflow]
        last = f"; the last loss {read[-1].loss:.2f}, norm {read[-1].norm:.1f}" if read else ""
        print(f"{model}: {len(own)} segments, {len(lost)} overflows{where}{last}")
    picture = out.with_suffix(".png")
    _drawn(toy_plots.growth, rows, picture)


# --------------------------------------------------------------------------------- table and plot


@toy.command()
def table(
    results: Results = RESULTS,
    out: Annotated[
        Path | None, typer.Option(help="A file that the table is also written to.")
    ] = None,
) -> None:
    """The paper's table from rows of runs, beside the paper's own figures."""
    text = toy_results.table(toy_results.read(results))
    print(text)
    if out is not None:
        checkpoints.write(out, f"{text}\n".encode())


@toy.command()
def plot(
    results: Results = RESULTS,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("results/toy/capacity.png"),
) -> None:
    """Bits a unit against hidden size, and tokens right against length."""
    rows = toy_results.read(results)
    if not rows:
        raise RecipeError(f"{results} has no rows to plot.")
    _drawn(toy_plots.capacity, rows, out)


def _drawn(draw: Callable[[list[Any], Path], None], rows: list[Any], path: Path) -> None:
    try:
        draw(rows, path)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror}.") from error
    print(path)

"""A preset for every row of the paper's tables of language models, with what the paper found; one
for each model on the Penn Treebank at a size that a CPU can train, and one on the generated corpus,
which takes minutes."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from revrnn.recipes.errors import RecipeError


@dataclass(frozen=True)
class Preset:
    """A row of the paper's tables, or a demonstration."""

    name: str
    changes: dict[str, Any]
    """To the defaults of `Arguments`."""
    perplexity: float | None = None
    """On the validation text, in the paper."""
    savings: float | None = None
    """Memory for hidden states, in the paper: 32-bit storage over its buffer."""


CORPORA = {"ptb": {"data": "ptb", "batch": 20}, "wt2": {"data": "wikitext2", "batch": 80}}
"""The batches are those of the recipe that the paper follows."""

LIMITS = {"1bit": 1.0, "2bit": 2.0, "3bit": 3.0, "5bit": 5.0, "nolimit": None}

# By corpus, model and layers; columns in the order of LIMITS, or one for torch's own layers.
_PERPLEXITIES: dict[tuple[str, str, int], tuple[float | None, ...]] = {
    ("ptb", "revgru", 1): (86.0, 82.2, 81.1, 81.1, 81.5),
    ("ptb", "revgru", 2): (87.0, 83.8, 83.8, 82.2, 82.3),
    ("ptb", "revlstm", 1): (None, 79.8, 79.4, 78.4, 78.2),
    ("ptb", "revlstm", 2): (None, 74.7, 72.8, 72.9, 72.9),
    ("ptb", "gru", 1): (82.2,),
    ("ptb", "gru", 2): (81.5,),
    ("ptb", "lstm", 1): (78.0,),
    ("ptb", "lstm", 2): (73.0,),
    ("wt2", "revgru", 1): (None, 97.7, 97.2, 96.3, 97.1),
    ("wt2", "revgru", 2): (None, 95.2, 94.7, 95.3, 95.0),
    ("wt2", "revlstm", 1): (None, 94.8, 94.5, 94.5, 94.1),
    ("wt2", "revlstm", 2): (None, 90.7, 87.7, 87.0, 86.0),
    ("wt2", "gru", 1): (97.8,),
    ("wt2", "gru", 2): (93.6,),
    ("wt2", "lstm", 1): (89.3,),
    ("wt2", "lstm", 2): (82.2,),
}

_SAVINGS: dict[tuple[str, str, int], tuple[float | None, ...]] = {
    ("ptb", "revgru", 1): (None, 13.8, 10.8, 7.4, 6.4),
    ("ptb", "revgru", 2): (None, 14.8, 12.0, 9.4, 4.9),
    ("ptb", "revlstm", 1): (None, 13.8, 10.1, 7.4, 4.9),
    ("ptb", "revlstm", 2): (None, 14.0, 10.0, 7.3, 4.9),
}


# The generated corpus is endless in effect: nothing is to be dropped.
_DEMO: dict[str, Any] = {
    "data": "demo",
    "hidden": "128",
    "learning_rate": 10.0,
    "clip": 0.25,
    **{f"{name}_dropout": 0.0 for name in ("embedding", "input", "output", "weight")},
}

# For machines on which the paper's sizes take days. DropConnect is noise in sums over the units
# that a unit sees, and the fewer they are the larger beside what is summed: 0.5 is for 650 units.
_SMALL: dict[str, Any] = {**CORPORA["ptb"], "hidden": "200", "weight_dropout": 0.0}
_OWN_LIMITS = {"revgru": 2.0, "revlstm": 3.0, "gru": None, "lstm": None}


def _presets() -> dict[str, Preset]:
    found = {}
    for (corpus, model, layers), perplexities in _PERPLEXITIES.items():
        base = CORPORA[corpus] | {"model": model, "layers": layers}
        savings = _SAVINGS.get((corpus, model, layers), (None,) * len(perplexities))
        limits = LIMITS if model.startswith("rev") else {"": None}
        for limit, perplexity, saved in zip(limits, perplexities, savings, strict=True):
            if perplexity is None:
                continue
            name = "-".join(filter(None, (corpus, model, f"{layers}l", limit)))
            changes = base | {"max_forget_bits": limits[limit]}
            found[name] = Preset(name, changes, perplexity, saved)
    for kind, changes in (("small", _SMALL), ("demo", _DEMO)):
        for model, bits in _OWN_LIMITS.items():
            name = f"{kind}-{model}"
            found[name] = Preset(name, changes | {"model": model, "max_forget_bits": bits})
    return found


PRESETS = _presets()


def preset(name: str) -> Preset:
    if name not in PRESETS:
        like = get_close_matches(name, PRESETS, n=1, cutoff=0.0)
        raise RecipeError(
            f"there is no preset {name!r}, but there is {like[0]!r}; `revrnn lm presets` lists all."
        )
    return PRESETS[name]

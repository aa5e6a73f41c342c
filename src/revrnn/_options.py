"""Options of the command line made from the fields of dataclasses."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}
"""Of every group of commands."""


def field_help(kind: type) -> dict[str, str]:
    """What stands under each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for item, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[item.target.id] = " ".join(str(below.value.value).split())
    return found


def options(kind: type, leave_out: Sequence[str] = ()) -> list[inspect.Parameter]:
    """An option for every field; None, the field's default, is what was not given."""
    text, hints = field_help(kind), get_type_hints(kind)
    found = []
    for item in fields(kind):
        if item.name in leave_out:
            continue
        shown = "" if item.default in (MISSING, None, "") else f" [default: {_shown(item.default)}]"
        help_ = text[item.name] + shown
        annotation: Any = Annotated[hints[item.name] | None, typer.Option(help=help_)]
        found.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    return found


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def with_options(*kinds: tuple[type, Sequence[str]]) -> Callable[[Any], Any]:
    """Replace a command's ``**given`` by the options of dataclasses."""

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function, eval_str=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        for kind, leave_out in kinds:
            own += options(kind, leave_out)
        function.__signature__ = signature.replace(parameters=own)
        function.__annotations__ = {item.name: item.annotation for item in own}
        return function

    return decorate

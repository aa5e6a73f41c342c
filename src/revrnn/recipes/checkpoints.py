"""Checkpoints: written aside and renamed, so that there is always a whole one."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from revrnn.recipes.errors import RecipeError

FORMAT = 2
"""Raised whenever what a checkpoint holds changes its meaning."""

LAST, BEST, LOCK = "last.pt", "best.pt", "lock"


def write(path: Path, data: bytes) -> None:
    """Replace a file by another one at once: whenever this stops, the old or the new is there."""
    aside = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            # A rename may reach the disk before the data does.
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RecipeError(
            f"{path} cannot be written: {error.strerror}; what was there before is untouched."
        ) from error


def save(path: Path, content: dict[str, Any]) -> None:
    """Tensors, numbers, strings, and lists, tuples and dicts of them."""
    data = io.BytesIO()
    torch.save({"format": FORMAT, **content}, data)
    write(path, data.getvalue())


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else may be here with the same folder. The system lets go of it when the process ends,
    however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written to: {error.strerror}.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecipeError(
                f"another run is at work in {folder}: wait for it, or name another folder."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield


def load(path: Path) -> dict[str, Any]:
    """What `save` has written; tensors on the CPU."""
    if not path.is_file():
        raise RecipeError(f"{path.parent} is no run folder: it has no {path.name}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler may raise anything
        raise RecipeError(f"{path} is no checkpoint, or it is damaged.") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise RecipeError(
            f"{path} was written by another version of revrnn: it has format {found}, this version "
            f"reads {FORMAT}."
        )
    assert isinstance(content, dict)
    return content

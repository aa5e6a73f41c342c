"""Where a result comes from: the first columns of its row."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

import revrnn


@cache
def provenance() -> dict[str, str]:
    """Date, commit, versions and hardware, when a process first asks: that is the code it runs,
    whatever is checked out afterwards."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit(Path(__file__).resolve().parent),
        "revrnn": revrnn.__version__,
        "kernels": revrnn.kernels.choose(torch.device("cpu")).name,
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "cores": str(os.cpu_count() or 0),
        "threads": str(torch.get_num_threads()),
    }


def commit(folder: Path) -> str:
    """The commit of the checkout that a source folder is in, with a ``+`` behind if what is there
    differs from it; "" where there is no checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may lie inside the checkout of something else.
        if not git("ls-files", "--", "."):
            return ""
        changed = git("status", "--porcelain", "--", ":/src", ":/csrc", ":/benchmarks/*.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_model() -> str:
    """The name of the CPU, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in lines:
        field, _, value = line.partition(":")
        fields[field.strip()] = value.strip()
    name = fields.get("model name") or platform.machine()
    # Virtual machines hide the model behind a bare brand; family and model say which it is.
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name

"""Lends the C++ kernels the threads that torch has anyway.

torch's CPU builds bring an OpenMP runtime, whose threads keep spinning for a while after each of
torch's parallel loops. Kernels with threads of their own would have to fight them for the cores:
measured on two cores, a training step between torch operations took up to 1.5 times as long. So
the kernels run their loops on the same threads, through the runtime's ``GOMP_parallel`` (libomp and
libiomp5 have it too). Where no such runtime is found they use their own.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_NAMES = ("libgomp", "libiomp5", "libomp")


def gomp_parallel() -> int:
    """The address of ``GOMP_parallel`` in the OpenMP runtime that torch loaded; 0 if there is none.

    Only a runtime from torch's own folders counts: another library's would be other threads.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return 0
    for path in dict.fromkeys(line.rpartition(" ")[2] for line in maps.splitlines()):
        folders = Path(path).parts
        if Path(path).name.startswith(_NAMES) and {"torch", "torch.libs"} & set(folders):
            try:
                function = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):
                continue
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0

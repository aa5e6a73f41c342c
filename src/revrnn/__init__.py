"""Recurrent nets that train without storing their hidden states.

`RevGRU` and `RevLSTM` take the place of ``torch.nn.GRU`` and ``torch.nn.LSTM``: in the backward
pass the recurrence runs in reverse and gets every state back bit for bit.
"""

from importlib.metadata import version

from revrnn import diagnostics, kernels
from revrnn.cell_modules import RevGRUCell, RevLSTMCell
from revrnn.dropout import EmbeddingDropout, VariationalDropout
from revrnn.errors import NonFiniteError, ReversalError, StateOverflowError
from revrnn.modules import RevGRU, RevLSTM
from revrnn.stream import stream
from revrnn.truncation import truncated

__version__ = version("revrnn")

# Loads the C++ kernels, if they are there: a process forked from this one must find that they know
# of forks.
kernels.available()

__all__ = [
    "EmbeddingDropout",
    "NonFiniteError",
    "RevGRU",
    "RevGRUCell",
    "RevLSTM",
    "RevLSTMCell",
    "ReversalError",
    "StateOverflowError",
    "VariationalDropout",
    "__version__",
    "diagnostics",
    "kernels",
    "stream",
    "truncated",
]

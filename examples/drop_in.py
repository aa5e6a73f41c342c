"""A model with an nn.LSTM, changed in one line:

    -        self.rnn = nn.LSTM(hidden, hidden, num_layers=2)
    +        self.rnn = revrnn.RevLSTM(hidden, hidden, num_layers=2)

Prints what the layers keep from the forward pass for the backward pass, before and after.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import revrnn

WORDS, TAGS = 1000, 12


class Tagger(nn.Module):
    """Words (T, N) to the logits of their tags (T, N, TAGS)."""

    def __init__(self, hidden: int, layers: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, hidden)
        self.rnn = layers(hidden, hidden, num_layers=2)
        self.head = nn.Linear(hidden, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(words))
        return self.head(states)


def kept_bytes(model: Tagger, words: Tensor, tags: Tensor) -> int:
    """Train a step; returns the bytes that the recurrent layers saved for their backward pass.

    Their parameters, input and output are not counted: they exist anyway.
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = model.embedding(words)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states, _ = model.rnn(x)
    for tensor in (x, states, *model.rnn.parameters()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    loss = functional.cross_entropy(model.head(states).flatten(0, 1), tags.flatten())
    loss.backward()
    return sum(saved.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="T (default: 200)")
    parser.add_argument("--batch", type=int, default=16, help="N (default: 16)")
    parser.add_argument("--hidden", type=int, default=256, help="H, even (default: 256)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    words = torch.randint(WORDS, (options.steps, options.batch))
    tags = torch.randint(TAGS, (options.steps, options.batch))
    for layers in (nn.LSTM, revrnn.RevLSTM):
        kept = kept_bytes(Tagger(options.hidden, layers), words, tags)
        print(f"{layers.__name__:<8} keeps {kept / 2**20:8.2f} MiB")


if __name__ == "__main__":
    main()

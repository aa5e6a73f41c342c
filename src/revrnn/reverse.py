"""What happens in backward: the one place that knows.

For each chunk, last first:

1. bottom to top, every layer is run in reverse: its tape gives back the states and with them the
   gates of the chunk (its `Record`) and its output, which is the next layer's input;
2. top to bottom, gradients are propagated through the records; weight gradients are added up.

At the end every state must be the initial state again, and every tape empty, or `ReversalError`.
`Backward` does this; `Recurrence` is the autograd function around it and `revrnn.advance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from revrnn._once import once_differentiable
from revrnn.advance import Between, Forward, Memory, Position, Stack, new_record, prepare
from revrnn.chunks import Chunk
from revrnn.diagnostics import LayerReport
from revrnn.errors import ReversalError
from revrnn.fixed import to_fixed, to_float
from revrnn.kernels import Gradients, Record, Weights
from revrnn.tape import EntropyTape, PaperTape, SealedPaperTape, SealedTape


class Backward:
    """The backward pass of a stack: reverses and propagates chunk after chunk, last first."""

    def __init__(
        self,
        stack: Stack,
        weights: Sequence[Weights],
        prepared: Sequence[Any],
        masks: Sequence[Tensor | None],
        d_states: Sequence[Tensor],  # float32 (S, N, H), gradients of the final states; changed
        wanted: Sequence[tuple[bool, bool, bool]],  # gradients of W_ih, W_hh, bias, a layer each
    ) -> None:
        self._stack = stack
        self._prepared = prepared
        self.d_states = d_states
        self.states: Sequence[Tensor] = []
        """Integers (S, N, H), a layer each, after the chunks that are still to be taken back."""
        self._tapes: Sequence[EntropyTape | PaperTape] = []
        self.gradients = [
            Gradients(
                ih=torch.zeros_like(weight.ih) if ih else None,
                hh=torch.zeros_like(weight.hh) if hh else None,
                bias=torch.zeros_like(weight.bias) if bias and weight.bias is not None else None,
            )
            for weight, (ih, hh, bias) in zip(weights, wanted, strict=True)
        ]
        device = d_states[0].device
        self._device = device
        self._between = Between(stack, masks, device)
        self._after: dict[int, Tensor] = {}
        self._records: dict[int, Record] = {}
        self._inputs: list[Tensor] = []
        self._chunk_records: list[Record] = []

    def load(
        self,
        states: Sequence[Tensor],  # integers (S, N, H), as the forward pass left them; changed
        tapes: Sequence[EntropyTape | PaperTape],  # none: `restore` brings the records
    ) -> None:
        """Take over from a forward pass, of the whole sequence or of a part of it."""
        self.states = states
        self._tapes = tapes
        self._after = {}

    def reverse(
        self, chunk: Chunk, x: Tensor, stored: Sequence[Tensor | None], out: Tensor | None
    ) -> None:
        """Take the states back through a chunk and rebuild its records.

        ``out``, when given, receives the top layer's output once more.
        """
        self._inputs, self._chunk_records = [], []
        top = len(self._stack.layers) - 1
        for index in range(len(self._stack.layers)):
            target = out if index == top else self._between.buffer(index, chunk)
            record = self._record(index, chunk.steps.rows)
            self._tapes[index].recall()
            self._stack.backend.reverse(
                self._prepared[index],
                x,
                chunk.steps,
                self.states[index],
                self._tapes[index],
                record,
                out=target,
                stored=stored[index],
            )
            self._keep(x, record)
            if index < top:
                assert target is not None
                x = self._between.mask(index, chunk, target)

    def restore(
        self, chunk: Chunk, x: Tensor, records: Sequence[Record], out: Tensor | None
    ) -> None:
        """The same from records that the forward pass kept. They are copied: `propagate` overwrites
        gates, and a graph may be used twice."""
        self._inputs, self._chunk_records = [], []
        rows = chunk.steps.rows
        top = len(records) - 1
        for index, kept in enumerate(records):
            record = Record(self._record(index, rows).gates, kept.old, kept.mid, kept.extra)
            record.gates.copy_(kept.gates)
            self._keep(x, record)
            target = out if index == top else self._between.buffer(index, chunk)
            if target is not None:
                if index not in self._after:
                    self._after[index] = to_float(self.states[index][0])
                _outputs(kept, chunk, self._after[index], target)
                if index < top:
                    x = self._between.mask(index, chunk, target)

    def propagate(self, chunk: Chunk, d_out: Tensor | None, d_x: Tensor | None) -> None:
        """From the gradient of the top layer's output (R, k) to that of the chunk's input (R, I),
        which is filled when given."""
        for index in reversed(range(len(self._stack.layers))):
            # The buffer below held this layer's input, which backprop still reads: not reused.
            d_input = d_x if index == 0 else torch.empty_like(self._inputs[index])
            self._stack.backend.backprop(
                self._prepared[index],
                self._inputs[index],
                chunk.steps,
                self._chunk_records[index],
                d_out,
                self.d_states[index],
                self.gradients[index],
                d_input,
            )
            if index > 0:
                assert d_input is not None
                d_out = self._between.mask(index - 1, chunk, d_input)

    def check(self, position: Position) -> None:
        """Raise `ReversalError` unless states and tapes are what the forward pass began with."""
        for layer, tape, state, start in zip(
            self._stack.layers, self._tapes, self.states, position.states, strict=True
        ):
            if not torch.equal(state, start):
                wrong = (state != start).any(2).any(0)
                raise ReversalError.because(
                    f"{layer.name}: the reverse pass of batch row {int(wrong.int().argmax())} did "
                    "not arrive at the initial state"
                )
            tape.check_rewound()

    def _record(self, index: int, rows: int) -> Record:
        """This layer's record, used again for every chunk."""
        record = self._records.get(index)
        if record is None or len(record.gates) < rows:
            record = new_record(self._stack.layers[index], rows, self._device)
            self._records[index] = record
        return _first_rows(record, rows)

    def _keep(self, x: Tensor, record: Record) -> None:
        self._inputs.append(x)
        self._chunk_records.append(record)


def _outputs(record: Record, chunk: Chunk, after: Tensor, out: Tensor) -> None:
    """A layer's output over a chunk, from its record: h after a step is h before the next one.

    ``after`` (N, H) is h after the chunk, and becomes h before it.
    """
    hidden = after.shape[1]
    for offset, active in zip(
        reversed(chunk.steps.offsets.tolist()), reversed(chunk.steps.active.tolist()), strict=True
    ):
        rows = slice(offset, offset + active)
        out[rows] = after[:active]
        after[:active] = record.old[rows, :hidden]


def _first_rows(record: Record, rows: int) -> Record:
    return Record(record.gates[:rows], record.old[:rows], record.mid[:rows], record.extra[:rows])


@dataclass(frozen=True)
class Plan:
    """Everything `Recurrence` needs that is not a tensor to differentiate."""

    stack: Stack
    batch_sizes: Tensor
    memory: Memory
    out_units: int
    """Columns of the output: the first so many units of the top layer's h; 0 for none."""
    masks: tuple[Tensor | None, ...] = ()
    """Dropout between layers, (N, H) above each layer but the top one."""
    reports: list[LayerReport] = field(default_factory=list)
    """Filled by a forward pass that keeps something."""


class Recurrence(torch.autograd.Function):
    """``apply(plan, x, *states, *weights) -> (out, *final_states)``.

    ``x`` (R, I) packed; ``states`` a layer each, float32 (S, N, H) or None; ``weights`` three a
    layer: W_ih, W_hh, bias or None. ``out`` (R, k) is None when k = 0.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, *tensors: Tensor | None) -> Any:
        stack, batch = plan.stack, int(plan.batch_sizes[0])
        states, weights = _split(stack, tensors)
        position = Position.first(stack, states, batch, x.device)
        prepared = prepare(stack, weights, backward=False)
        run = Forward(stack, prepared, position, plan.masks, plan.memory)
        out = x.new_empty(len(x), plan.out_units) if plan.out_units else None
        for chunk in stack.chunks(plan.batch_sizes):
            run.advance(chunk, chunk.of(x), None if out is None else chunk.of(out))
        finals = [to_float(state) for state in run.states]
        if plan.memory is not Memory.NOTHING:
            _save(ctx, plan, run, x, tensors, finals)
        ctx.set_materialize_grads(False)
        return (out, *finals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, *d_finals: Tensor | None) -> Any:
        plan = cast(Plan, ctx.plan)
        kept = _Kept.load(ctx)
        stack = kept.stack
        needs = ctx.needs_input_grad[2:]
        count = len(stack.layers)
        d_states = [
            torch.zeros(state.shape, dtype=torch.float32, device=state.device)
            if gradient is None
            else gradient.clone(memory_format=torch.contiguous_format)
            for state, gradient in zip(kept.finals, d_finals, strict=True)
        ]
        run = Backward(
            stack,
            kept.weights,
            prepare(stack, kept.weights, backward=True),
            kept.masks,
            d_states,
            [tuple(needs[count + 3 * i : count + 3 * i + 3]) for i in range(count)],
        )
        run.load(kept.finals, kept.tapes)
        need_x = bool(ctx.needs_input_grad[1])
        d_x = torch.empty_like(kept.x) if need_x else None
        chunks = stack.chunks(plan.batch_sizes)
        for index in reversed(range(len(chunks))):
            chunk = chunks[index]
            x = chunk.of(kept.x)
            if plan.memory is Memory.STATES:
                run.restore(chunk, x, [layer[index] for layer in kept.records], None)
            else:
                stored = [layer[index] if layer else None for layer in kept.stored]
                run.reverse(chunk, x, stored, None)
            # A broadcast gradient, as of a sum, becomes dense a chunk at a time.
            d_chunk = None if d_out is None else chunk.of(d_out).resolve_neg().contiguous()
            run.propagate(chunk, d_chunk, None if d_x is None else chunk.of(d_x))
        if plan.memory is Memory.TAPE:
            batch = int(plan.batch_sizes[0])
            run.check(Position.first(stack, kept.states, batch, kept.x.device))
        d_initial = [
            gradient if wanted else None
            for gradient, wanted in zip(run.d_states, needs[:count], strict=True)
        ]
        d_weights = [part for g in run.gradients for part in (g.ih, g.hh, g.bias)]
        return (None, d_x, *d_initial, *d_weights)


def _split(
    stack: Stack, tensors: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], list[Weights]]:
    count = len(stack.layers)
    weights = []
    for index in range(count):
        ih, hh, bias = tensors[count + 3 * index : count + 3 * index + 3]
        weights.append(Weights(cast(Tensor, ih), cast(Tensor, hh), bias))
    return list(tensors[:count]), weights


def _save(
    ctx: Any,
    plan: Plan,
    run: Forward,
    x: Tensor,
    tensors: Sequence[Tensor | None],
    finals: Sequence[Tensor],
) -> None:
    """Hand all that the backward pass needs to autograd, so that hooks and memory trackers see it.
    So are masks and seeds: where the forward pass is run again to get at what it saved
    (`torch.utils.checkpoint`), with other random numbers if the user says so, they have to come
    from the same run as the rest.

    The final states are saved as the floats that the caller gets anyway; float32 has 24 bits, so
    where ``|h| >= 2`` what it rounds off is kept beside it: below 2^31 at most 2^6, so in 8 bits.
    """
    ctx.plan = plan
    sealed = [tape.seal() for tape in run.tapes] if plan.memory is Memory.TAPE else []
    plan.reports.extend(run.reports(sealed))
    rests = [_rest(state, final) for state, final in zip(run.states, finals, strict=True)]
    seeds = [layer.seed for layer in plan.stack.layers]
    drawn = None
    if any(seed is not None for seed in seeds):
        drawn = torch.tensor([-1 if seed is None else seed for seed in seeds], device="cpu")
    tape_tensors = [tape.tensors() for tape in sealed]
    record_tensors = [
        part
        for layer in run.records
        for record in layer
        for part in (record.gates, record.old, record.mid, record.extra)
    ]
    stored_tensors = [part for layer in run.stored for part in layer]
    ctx.tape_counts = [len(part) for part in tape_tensors]
    ctx.save_for_backward(
        x,
        *tensors,
        *finals,
        *rests,
        drawn,
        *plan.masks,
        *(tensor for part in tape_tensors for tensor in part),
        *stored_tensors,
        *record_tensors,
    )


def _rest(state: Tensor, value: Tensor) -> Tensor | None:
    """What of the integers (S, N, H) their float32 rounds off, int8; None: nothing."""
    low, high = (int(end) for end in state.aminmax())
    if max(-low, high) <= 1 << 24:
        return None
    rest = (state - to_fixed(value)).to(torch.int8)
    return rest if bool(rest.any()) else None


def saved_tensors(ctx: Any) -> Sequence[Tensor]:
    """What was saved for backward, or an error that says what is wrong with it."""
    try:
        return cast("Sequence[Tensor]", ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise ReversalError.because(
            "a weight, input, target, context or state was changed in place between forward and "
            "backward"
        ) from error


def open_tapes(
    kind: str, tensors: Sequence[Sequence[Tensor]], position: Position | None
) -> list[EntropyTape | PaperTape]:
    """Tapes to reverse from, a layer each, that began at ``position`` (None: with the sequence)."""
    tapes: list[EntropyTape | PaperTape] = []
    for index, parts in enumerate(tensors):
        if kind == "entropy":
            start = None if position is None else position.start(index)
            tapes.append(EntropyTape.open(SealedTape.from_tensors(parts), start))
        else:
            tapes.append(PaperTape.open(SealedPaperTape.from_tensors(parts)))
    return tapes


@dataclass
class _Kept:
    """What `_save` kept, back in shape."""

    stack: Stack
    masks: tuple[Tensor | None, ...]
    x: Tensor
    states: list[Tensor | None]
    weights: list[Weights]
    finals: list[Tensor]
    """Integers (S, N, H)."""
    tapes: list[EntropyTape | PaperTape]
    stored: list[list[Tensor]]
    records: list[list[Record]]

    @classmethod
    def load(cls, ctx: Any) -> _Kept:
        plan = cast(Plan, ctx.plan)
        layers = plan.stack.layers
        count = len(layers)
        saved: Iterator[Tensor] = iter(saved_tensors(ctx))
        x = next(saved)
        states, weights = _split(plan.stack, [next(saved) for _ in range(4 * count)])
        values = [next(saved) for _ in range(count)]
        rests = [cast("Tensor | None", next(saved)) for _ in range(count)]
        finals = [
            to_fixed(value) if rest is None else to_fixed(value) + rest
            for value, rest in zip(values, rests, strict=True)
        ]
        drawn = cast("Tensor | None", next(saved))
        masks = tuple(cast("Tensor | None", next(saved)) for _ in plan.masks)
        stack = plan.stack
        if drawn is not None:
            seeds = [None if seed < 0 else seed for seed in drawn.tolist()]
            again = [replace(layer, seed=s) for layer, s in zip(layers, seeds, strict=True)]
            stack = replace(stack, layers=tuple(again))
        tapes: list[EntropyTape | PaperTape] = []
        if plan.memory is Memory.TAPE:
            parts = [[next(saved) for _ in range(size)] for size in ctx.tape_counts]
            tapes = open_tapes(plan.stack.tape, parts, None)
        rest_of = list(saved)
        chunks = -(-len(plan.batch_sizes) // plan.stack.chunk_size)
        stored: list[list[Tensor]] = [[] for _ in layers]
        records: list[list[Record]] = [[] for _ in layers]
        for index, layer in enumerate(layers):
            if plan.memory is Memory.TAPE and layer.stored_units:
                stored[index], rest_of = rest_of[:chunks], rest_of[chunks:]
        if plan.memory is Memory.STATES:
            for index in range(count):
                records[index] = [Record(*rest_of[4 * i : 4 * i + 4]) for i in range(chunks)]
                rest_of = rest_of[4 * chunks :]
        return cls(stack, masks, x, states, weights, finals, tapes, stored, records)

"""One streamed pass: forward, and the reverse pass with stem and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from revrnn import _stream_checks
from revrnn._heap import gather_offcuts
from revrnn._replay import Autocast, RandomStates, Sums, leaves, unchanged
from revrnn._sequence import float32
from revrnn._stacking import Layers
from revrnn._values import Values
from revrnn.advance import Forward, Memory, Position, new_record, prepare
from revrnn.chunks import Chunk, default_chunk_size, dense
from revrnn.diagnostics import LayerReport
from revrnn.dropout import SequenceMasks
from revrnn.fixed import to_float
from revrnn.kernels import Weights
from revrnn.reverse import Backward, open_tapes
from revrnn.tape import LANES

ROWS_PER_CHUNK = 96
"""Rows (time steps times batch) that the head sees at once by default. Its logits, and the fresh
gradient of its weights that is then added to the sum, are what a chunk costs. With 10,000 words and
H = 256: the peak of the process was 60 to 63 MiB with 64 rows, 48 to 62 with 96 and 66 to 69 with
128; the CPU time of a step with 64 rows was a tenth more than with 96, with 128 a tenth less."""

CHUNKS_PER_PIECE = 10
"""Chunks whose input the stem makes in one go by default. An embedding's gradient is as large as
the embedding whatever the number of rows: fewer, larger pieces cost less time."""


@dataclass(frozen=True)
class Piece:
    """What the stem works on at once: one chunk or a few."""

    first: int
    last: int
    """Time steps ``first .. last - 1``."""
    batch: int
    chunk_size: int

    def chunks(self) -> list[Chunk]:
        """In order; made when asked for: on long sequences they are as large as a tape."""
        return [
            dense(step, min(step + self.chunk_size, self.last), self.batch)
            for step in range(self.first, self.last, self.chunk_size)
        ]

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor (T, ...)."""
        return tensor[self.first : self.last]

    def rows(self, chunk: Chunk, tensor: Tensor) -> Tensor:
        """A chunk's rows of a tensor that holds the piece's rows."""
        start = self.first * self.batch
        return tensor[chunk.first_row - start : chunk.last_row - start]


@dataclass
class Part:
    """Time steps that share a tape: the whole sequence, or what lies between two checkpoints."""

    first: int
    last: int
    position: Position | None = None
    """Where the forward pass stood before it."""


class Run:
    """One call of `revrnn.stream`, whose arguments come checked."""

    def __init__(
        self,
        layers: Layers,
        inputs: tuple[Tensor, ...],
        state: Any,
        *,
        stem: Callable[..., Tensor] | None,
        head: Callable[..., Any],
        targets: tuple[Tensor, ...],
        context: tuple[Tensor, ...],
        chunk_size: int | None,
        checkpoint_every: int | str | None,
        lazy: bool,
    ) -> None:
        self._layers, self._stem, self._head = layers, stem, head
        self._inputs, self._targets, self._context = inputs, targets, context
        self._lazy = lazy
        self._steps, self._batch = inputs[0].shape[:2]
        self._initial = layers.initial(state, self._batch)
        self._autocast = Autocast.now("cpu", layers.parameter.device.type)
        self._chunk = min(
            chunk_size or default_chunk_size(self._steps, self._batch, ROWS_PER_CHUNK), self._steps
        )
        self._piece = self._chunk * (1 if chunk_size else CHUNKS_PER_PIECE)
        self._every = checkpoint_every
        if not layers.reversible and checkpoint_every is None and layers.tape != "paper":
            # States are stored at the beginning of every piece; the rest is computed again. (The
            # paper's buffer cannot start midway, so there everything is computed again at once.)
            self._every = self._piece
        self._masks = SequenceMasks()
        self._stem_random, self._head_random = RandomStates(), RandomStates()
        self._leaves: dict[int, Tensor] = {}
        self._sums = Sums()
        self._tapes: list[list[Tensor]] = []
        """Tensors of the last part's sealed tapes, a list a layer."""
        self._prepared: Sequence[Any] = []
        self.values = Values()
        self.learns = self._needs_gradients()

    def _needs_gradients(self) -> bool:
        """Whether anything that the pass reads wants a gradient. A stem or head that is not a
        module may have parameters for all that is known, and counts as if it had."""
        if not torch.is_grad_enabled():
            return False
        tensors = [*self._inputs, *self._context]
        tensors += [state for state in self._initial if state is not None]
        for part in (*self._layers.modules, self._stem, self._head):
            if isinstance(part, nn.Module):
                tensors += part.parameters()
            elif part is not None:
                return True
        return any(tensor.requires_grad for tensor in tensors)

    # -- layout -----------------------------------------------------------------------------------

    def _pieces(self, part: Part) -> list[Piece]:
        return [
            Piece(first, min(first + self._piece, part.last), self._batch, self._chunk)
            for first in range(part.first, part.last, self._piece)
        ]

    def _first_piece(self) -> Piece:
        checkpoints = self.learns and isinstance(self._every, int)
        most = cast(int, self._every) if checkpoints else self._steps
        return self._pieces(Part(0, min(most, self._steps)))[0]

    def _steps_per_part(self, piece: Piece, x: Tensor) -> int:
        if self._every is None or not self.learns:
            return self._steps
        if isinstance(self._every, int):
            return self._every
        # T/K checkpoints of P bits and K steps of r bits a step are smallest together at
        # K = sqrt(T P / r).
        stack = self._layers.stack
        bits = self._start.bits + 32 * LANES * self._batch * len(stack.layers)
        every = math.sqrt(self._steps * bits / max(self._rate(piece, x), 1.0))
        return max(1, round(every / self._piece)) * self._piece

    def _rate(self, piece: Piece, x: Tensor) -> float:
        """Bits a step that reversing a part needs: of its tape, measured on the first chunk, or of
        its records."""
        stack = self._layers.stack
        if not self._layers.reversible:
            meta = torch.device("meta")
            records = [new_record(layer, self._batch, meta) for layer in stack.layers]
            return 32.0 * sum(sum(part.numel() for part in vars(r).values()) for r in records)
        chunk = piece.chunks()[0]
        probe = Forward(stack, self._prepared, self._start, self._layers.masks, Memory.TAPE)
        probe.advance(chunk, piece.rows(chunk, x), None)
        return sum(float(tape.ideal.sum()) for tape in probe.tapes) / len(chunk.steps.active)

    # -- stem and head ----------------------------------------------------------------------------

    @contextmanager
    def _surroundings(
        self, role: str, first: int, random: RandomStates | None, *, again: bool
    ) -> Iterator[None]:
        """What stem and head find around them: the same random numbers and sequence masks every
        time they run on the steps from ``first``, and the autocast state of the call. ``random``
        is None when they run once."""
        with ExitStack() as stack:
            stack.enter_context(self._autocast.again())
            stack.enter_context(self._masks.piece(role, first))
            if random is not None and again:
                stack.enter_context(random.replay(first))
            elif random is not None:
                random.note(first)
            yield

    def _run_stem(self, piece: Piece, inputs: Sequence[Tensor], *, again: bool) -> Tensor:
        """The layers' input (C, N, I) on a piece, with its history."""
        random = self._stem_random if self.learns and self._stem is not None else None
        with (
            self._surroundings("stem", piece.first, random, again=again),
            unchanged("stem", inputs),
        ):
            x = inputs[0] if self._stem is None else self._stem(*inputs)
            self._check_input(x, piece.last - piece.first)
        return x

    def _check_input(self, x: Any, steps: int) -> None:
        name = "inputs" if self._stem is None else "the stem's output"
        layers = self._layers
        expected = (steps, self._batch, layers.input_size)
        if self._stem is None and not x.is_floating_point():
            raise ValueError(
                f"inputs must be floating-point when there is no stem, got {x.dtype}; an embedding "
                "may be the stem"
            )
        _stream_checks.tensor(name, x, layers.parameter)
        if x.shape != expected:
            raise ValueError(
                f"{name} must have shape {expected} (a piece's time steps, batch rows, "
                f"input_size), got {tuple(x.shape)}"
            )

    def _run_head(
        self, chunk: Chunk, outputs: Tensor, context: Sequence[Tensor], *, again: bool
    ) -> list[Tensor]:
        """The head's scalars on one chunk, from the layers' output (C, N, H)."""
        first = chunk.steps.first
        targets = [target[first : first + len(outputs)] for target in self._targets]
        random = self._head_random if self.learns and self._lazy else None
        with (
            self._surroundings("head", first, random, again=again),
            unchanged("head", [*targets, *context]),
        ):
            return self.values.check(self._head(outputs, *targets, *context))

    def _as_output(self, out: Tensor) -> Tensor:
        """(R, H) float32 -> (C, N, H) as the module would return it."""
        return out.view(-1, self._batch, out.shape[1]).to(self._layers.dtypes[-1])

    def _rows(self, x: Tensor) -> Tensor:
        """(C, N, I) -> (R, I) float32, without its history."""
        return float32(x.detach()).view(-1, self._layers.input_size)

    # -- forward ----------------------------------------------------------------------------------

    def forward(self, *, head: bool) -> None:
        """Run stem and layers, and with ``head`` the head, for its values."""
        with self._autocast.off():
            self._forward(head=head)

    def _forward(self, *, head: bool) -> None:
        layers = self._layers
        # Random numbers in the order of plain modules: stem, then the layers' masks, then head.
        piece = self._first_piece()
        x = self._forward_input(piece)
        layers.build(self._batch, self._chunk)
        self._plain = [_detached(weights) for weights in layers.weights]
        with torch.no_grad():
            both = self.learns and not self._lazy
            self._prepared = prepare(layers.stack, self._plain, backward=both)
            device = layers.parameter.device
            self._start = Position.first(layers.stack, self._initial, self._batch, device)
            every = self._steps_per_part(piece, x)
        self._parts = [
            Part(first, min(first + every, self._steps)) for first in range(0, self._steps, every)
        ]
        run: Forward | None = None
        for part in self._parts:
            part.position = self._start if run is None else run.position()
            taped = self.learns and layers.reversible and part is self._parts[-1]
            memory = Memory.TAPE if taped else Memory.NOTHING
            run = Forward(layers.stack, self._prepared, part.position, layers.masks, memory)
            for piece in self._pieces(part):
                if piece.first > 0:
                    x = self._forward_input(piece)
                for chunk in piece.chunks():
                    self._advance(run, chunk, piece.rows(chunk, x), head=head)
        assert run is not None
        self._finals = run.states
        if self._lazy:
            self._prepared = []
        if self.learns:
            sealed = [tape.seal() for tape in run.tapes] if layers.reversible else []
            layers.report(self._reports(run.reports(sealed)))
            self._tapes = [tape.tensors() for tape in sealed]

    def _inputs_of(self, piece: Piece) -> list[Tensor]:
        """The piece of every input, as leaves. Whether they require gradients only the whole inputs
        say: a slice taken without gradients enabled may have lost it."""
        return [piece.of(part).detach().requires_grad_(part.requires_grad) for part in self._inputs]

    def _forward_input(self, piece: Piece) -> Tensor:
        inputs = self._inputs_of(piece)
        with torch.set_grad_enabled(self._lazy and self.learns):
            x = self._run_stem(piece, inputs, again=False)
        if piece.first == 0:
            with self._autocast.again():
                self._layers.settle(x)
        self._discover([x], inputs)
        return self._rows(x)

    def _advance(self, run: Forward, chunk: Chunk, x: Tensor, *, head: bool) -> None:
        with torch.no_grad():
            width = self._layers.stack.layers[-1].hidden_size
            out = x.new_empty(len(x), width) if head else None
            run.advance(chunk, x, out)
        if out is None:
            return
        outputs = self._as_output(out)
        context = [_cut_off(part) for part in self._context]
        with torch.set_grad_enabled(self._lazy and self.learns):
            outputs.requires_grad_(torch.is_grad_enabled())
            values = self._run_head(chunk, outputs, context, again=False)
        self._discover(values, [outputs, *context])
        self.values.add(values)
        gather_offcuts()

    def _discover(self, outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Note which parameters stem and head use: with lazy gradients autograd must know them
        before it knows their gradients."""
        if self._lazy and self.learns:
            own = {id(tensor) for tensor in known}
            self._leaves |= {id(leaf): leaf for leaf in leaves(outputs) if id(leaf) not in own}

    def _reports(self, reports: Sequence[LayerReport]) -> list[LayerReport]:
        """Of the whole sequence: one part's tape, and the checkpoints before it."""
        found = []
        for index, report in enumerate(reports):
            layer = self._layers.stack.layers[index]
            checkpoints = 0
            for part in self._parts[1:]:
                assert part.position is not None
                held = [part.position.states[index], part.position.start(index)]
                checkpoints += 32 * sum(tensor.numel() for tensor in held if tensor is not None)
            states = self._steps * self._batch * layer.cell.states * layer.hidden_size
            found.append(
                replace(
                    report,
                    stored_bits=checkpoints,
                    ideal_bits=report.ideal_bits + checkpoints,
                    naive_bits=32 * states,
                )
            )
        return found

    def finals(self) -> list[Tensor]:
        """The final states as floats (S, N, H), a layer each."""
        return [to_float(state) for state in self._finals]

    # -- reverse ----------------------------------------------------------------------------------

    def reverse(
        self,
        d_values: Sequence[Tensor | None] | None,  # None: eager, one for the first value
        d_finals: Sequence[Tensor | None] | None,
        tapes: Sequence[Sequence[Tensor]],
    ) -> Sums:
        """Take the layers back, differentiating stem and head on the way: all gradients."""
        with self._autocast.off():
            return self._reverse(d_values, d_finals, tapes)

    def _reverse(
        self,
        d_values: Sequence[Tensor | None] | None,
        d_finals: Sequence[Tensor | None] | None,
        tapes: Sequence[Sequence[Tensor]],
    ) -> Sums:
        layers, stack = self._layers, self._layers.stack
        self._sums = Sums()
        with torch.no_grad():
            prepared = self._prepared
            if self._lazy:
                prepared = prepare(stack, self._plain, backward=True)
            gradients = d_finals or [None] * len(self._finals)
            d_states = [
                torch.zeros(state.shape, dtype=torch.float32, device=state.device)
                if gradient is None
                else gradient.clone(memory_format=torch.contiguous_format)
                for state, gradient in zip(self._finals, gradients, strict=True)
            ]
            wanted = [_wanted(weights) for weights in layers.weights]
            back = Backward(stack, self._plain, prepared, layers.masks, d_states, wanted)
            d_inputs = [
                torch.zeros_like(part) if part.requires_grad else None for part in self._inputs
            ]
            for part in reversed(self._parts):
                assert part.position is not None
                run: Forward | None = None
                if layers.reversible and part is self._parts[-1]:
                    opened = open_tapes(stack.tape, tapes, part.position)
                    back.load([state.clone() for state in self._finals], opened)
                else:
                    run = self._run_again(part, prepared)
                    opened = []
                    if layers.reversible:
                        sealed = [tape.seal().tensors() for tape in run.tapes]
                        opened = open_tapes(stack.tape, sealed, part.position)
                    back.load(run.states, opened)
                records = None if layers.reversible or run is None else run.records
                for piece in reversed(self._pieces(part)):
                    self._take_back(back, piece, records, d_values, d_inputs)
                if layers.reversible:
                    back.check(part.position)
        self._collect(back, d_inputs)
        sums, self._sums = self._sums, Sums()
        return sums

    def _run_again(self, part: Part, prepared: Sequence[Any]) -> Forward:
        """The forward pass of one part, from its checkpoint."""
        memory = Memory.TAPE if self._layers.reversible else Memory.STATES
        assert part.position is not None
        stack, masks = self._layers.stack, self._layers.masks
        run = Forward(stack, prepared, part.position, masks, memory)
        for piece in self._pieces(part):
            inputs = self._inputs_of(piece)
            x = self._rows(self._run_stem(piece, inputs, again=True))
            for chunk in piece.chunks():
                run.advance(chunk, piece.rows(chunk, x), None)
        return run

    def _take_back(
        self,
        back: Backward,
        piece: Piece,
        records: list[list[Any]] | None,
        d_values: Sequence[Tensor | None] | None,
        d_inputs: Sequence[Tensor | None],
    ) -> None:
        inputs = self._inputs_of(piece)
        with torch.enable_grad():
            with_history = self._run_stem(piece, inputs, again=True)
        x = self._rows(with_history)
        d_x = torch.empty_like(x) if with_history.requires_grad else None
        for chunk in reversed(piece.chunks()):
            rows = piece.rows(chunk, x)
            out = rows.new_empty(len(rows), self._layers.stack.layers[-1].hidden_size)
            if records is None:
                back.reverse(chunk, rows, [None] * len(self._plain), out)
            else:
                back.restore(chunk, rows, [layer.pop() for layer in records], out)
            d_out = self._differentiate_head(chunk, out, d_values)
            back.propagate(chunk, d_out, None if d_x is None else piece.rows(chunk, d_x))
            gather_offcuts()
        if d_x is None:
            return
        gradient = d_x.view(with_history.shape).to(with_history.dtype)
        wanted = [index for index, part in enumerate(inputs) if part.requires_grad]
        found = self._sums.backward([with_history], [gradient], [inputs[i] for i in wanted])
        for index, d_input in zip(wanted, found, strict=True):
            total = d_inputs[index]
            if total is not None and d_input is not None:
                piece.of(total).copy_(d_input)

    def _differentiate_head(
        self, chunk: Chunk, out: Tensor, d_values: Sequence[Tensor | None] | None
    ) -> Tensor | None:
        """The gradient (R, H) of a chunk's output."""
        context = [_cut_off(part) for part in self._context]
        with torch.enable_grad():
            outputs = self._as_output(out).requires_grad_()
            values = self._run_head(chunk, outputs, context, again=d_values is not None)
        if d_values is None:
            self.values.add(values)
            first = values[0]
            if not first.is_floating_point():
                raise ValueError(f"head's first scalar must be floating-point, got {first.dtype}")
            pairs = [(first, torch.ones_like(first))]
        else:
            pairs = [
                (value, gradient.to(value.dtype))
                for value, gradient in zip(values, d_values, strict=True)
                if gradient is not None
            ]
        pairs = [(value, gradient) for value, gradient in pairs if value.requires_grad]
        if not pairs:
            return None
        wanted = [index for index, part in enumerate(context) if part.requires_grad]
        gather_offcuts()  # what the head has freed can hold the like once more
        d_output, *d_context = self._sums.backward(
            [value for value, _ in pairs],
            [gradient for _, gradient in pairs],
            [outputs, *(context[index] for index in wanted)],
        )
        for index, gradient in zip(wanted, d_context, strict=True):
            if gradient is not None:
                self._sums.add(self._context[index], gradient)
        return None if d_output is None else float32(d_output).view(out.shape)

    def _collect(self, back: Backward, d_inputs: Sequence[Tensor | None]) -> None:
        """Add the gradients of weights, states and inputs to those of stem and head."""
        pairs: list[tuple[Tensor | None, Tensor | None]] = []
        for weights, own in zip(self._layers.weights, back.gradients, strict=True):
            pairs += [(weights.ih, own.ih), (weights.hh, own.hh), (weights.bias, own.bias)]
        pairs += zip(self._initial, back.d_states, strict=True)
        pairs += zip(self._inputs, d_inputs, strict=True)
        for tensor, gradient in pairs:
            if tensor is not None and gradient is not None and tensor.requires_grad:
                self._sums.add(tensor, gradient, owned=True)

    # -- for the autograd functions ---------------------------------------------------------------

    def tape_tensors(self) -> list[list[Tensor]]:
        """The last part's tapes, a list a layer; handed over, not kept."""
        tapes, self._tapes = self._tapes, []
        return tapes

    def differentiable(self) -> list[Tensor]:
        """Every tensor that may get a gradient, once; lazy gradients only."""
        tensors = [part for part in self._layer_tensors() if part.requires_grad]
        tensors += [part for part in self._given() if part.requires_grad]
        return list({id(tensor): tensor for tensor in [*tensors, *self._leaves.values()]}.values())

    def read_only(self) -> list[Tensor]:
        """What else must not change between forward and backward."""
        tensors = [*self._layer_tensors(), *self._given(), *self._targets]
        for part in (self._stem, self._head):
            if isinstance(part, nn.Module):
                tensors += part.parameters()
        return [tensor for tensor in tensors if not tensor.requires_grad]

    def _layer_tensors(self) -> list[Tensor]:
        tensors = [
            part for w in self._layers.weights for part in (w.ih, w.hh, w.bias) if part is not None
        ]
        return tensors + [state for state in self._initial if state is not None]

    def _given(self) -> list[Tensor]:
        return [*self._inputs, *self._context]


def _cut_off(tensor: Tensor) -> Tensor:
    """The same values as a leaf of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _detached(weights: Weights) -> Weights:
    bias = None if weights.bias is None else weights.bias.detach()
    return Weights(weights.ih.detach(), weights.hh.detach(), bias)


def _wanted(weights: Weights) -> tuple[bool, bool, bool]:
    bias = weights.bias is not None and weights.bias.requires_grad
    return weights.ih.requires_grad, weights.hh.requires_grad, bias

"""Streaming: a stem, a stack of reversible layers and a head, trained chunk by chunk.

What a recurrent model keeps for its backward pass besides hidden states is larger still: embeddings
(T, N, E), outputs (T, N, H), logits (T, N, V). `stream` keeps none of them. Forward runs stem and
layers chunk by chunk and keeps tapes; the reverse pass takes the layers back chunk by chunk, runs
stem and head again on each, and adds up the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from revrnn import _checks, _stream_checks
from revrnn._once import once_differentiable
from revrnn._stacking import Layers
from revrnn._streaming import Run
from revrnn._uncompiled import uncompiled
from revrnn.reverse import saved_tensors
from revrnn.truncation import State

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Losses: TypeAlias = Tensor | tuple[Tensor, ...]


@uncompiled
def stream(
    rnn: nn.Module | Sequence[nn.Module],
    inputs: Tensors,
    state: State = None,
    *,
    stem: Callable[..., Tensor] | None = None,
    head: Callable[..., Losses],
    targets: Tensors = (),
    context: Tensors = (),
    chunk_size: int | None = None,
    checkpoint_every: int | Literal["auto"] | None = None,
    gradients: Literal["eager", "lazy"] = "eager",
) -> tuple[Any, State]:
    """``losses, state``: the sum over chunks of what ``head`` returns, and the final state.

    ::

        loss, state = revrnn.stream(rnn, tokens, state, stem=embed, head=head, targets=targets)
        (loss / tokens.numel()).backward()

    Gradients reach the parameters of stem, head and layers, ``state``, ``context`` and floating
    ``inputs`` through ordinary autograd, once. ``stem`` and ``head`` may be modules or any other
    callables; they run more than once a chunk, with the same random numbers every time.

    Args:
        rnn: a RevGRU or RevLSTM (one direction, any number of layers), or a sequence of them, one
            above the other, with `VariationalDropout` between where wanted.
        inputs: tensors (T, N, ...), time first, cut into chunks along time.
        state: as the module takes it; for a sequence of modules a list, one for each.
        stem: ``stem(*inputs_chunk)`` gives the layers' input (C, N, I); None: the input itself.
        head: ``head(outputs_chunk, *targets_chunk, *context)`` gives a scalar or a tuple of
            scalars.
        targets: tensors (T, ...), cut along time like the inputs.
        context: tensors that every chunk sees whole, for example annotations to attend to.
        chunk_size: time steps a chunk; None chooses by the batch size.
        checkpoint_every: K keeps the states every K steps and only one segment's tape at a time;
            "auto" chooses K for the lowest peak. None: one tape for the whole sequence.
        gradients: "eager" runs the reverse pass in this call and lets ``backward`` only deliver:
            the head runs once and no tape outlives the call; the first of the head's scalars is
            differentiated, the others and the final state are detached. "lazy" waits for
            ``backward``: every scalar and the state may get gradients; the head runs twice.
    """
    _checks.one_of("gradients", gradients, ("eager", "lazy"))
    layers = Layers(rnn)
    input_parts = _stream_checks.tensors("inputs", inputs)
    target_parts = _stream_checks.tensors("targets", targets)
    context_parts = _stream_checks.tensors("context", context)
    steps, _ = _stream_checks.sequence("inputs", input_parts)
    _stream_checks.same_steps("targets", target_parts, steps, "inputs have")
    _stream_checks.no_gradients("targets", target_parts)
    for part in context_parts:
        _stream_checks.tensor("context", part, layers.parameter, floating=False)
    if stem is None and len(input_parts) != 1:
        raise ValueError(f"inputs must be one tensor when there is no stem, got {len(input_parts)}")
    _stream_checks.function("stem", stem, optional=True)
    _stream_checks.function("head", head)
    if chunk_size is not None:
        _checks.positive("chunk_size", chunk_size)
    _stream_checks.checkpoint_every(checkpoint_every, layers.tape)
    run = Run(
        layers,
        input_parts,
        state,
        stem=stem,
        head=head,
        targets=target_parts,
        context=context_parts,
        chunk_size=chunk_size,
        checkpoint_every=checkpoint_every,
        lazy=gradients == "lazy",
    )
    if run.learns and gradients == "eager":
        run.forward(head=False)
        pairs = run.reverse(None, None, run.tape_tensors()).items()
        totals = run.values.totals()
        if pairs:
            tensors, sums = [tensor for tensor, _ in pairs], [total for _, total in pairs]
            totals[0] = _Deliver.apply(  # type: ignore[no-untyped-call]
                totals[0], len(tensors), *tensors, *sums
            )
        finals = run.finals()
    else:
        run.forward(head=True)
        totals, finals = run.values.totals(), run.finals()
        tensors = run.differentiable() if run.learns else []
        if tensors:
            results = _Lazy.apply(run, *tensors)  # type: ignore[no-untyped-call]
            totals, finals = list(results[: len(totals)]), list(results[len(totals) :])
    return run.values.returned(totals), layers.returned(finals)


class _Deliver(torch.autograd.Function):
    """``apply(value, n, *tensors, *sums)``: the value, whose gradients are known already: for a
    unit loss, that of each of the n tensors is the sum that belongs to it. The sums are nobody
    else's: the last backward pass scales and delivers them without a copy. They are float32 where
    a tensor is of 16 bits, which might not hold them before they are scaled."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        # Not saved: their values are not needed, and may change before backward.
        ctx.sources = tensors[:count]
        ctx.save_for_backward(*tensors[count:])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        last = not _graph_is_kept()
        scaled = []
        for tensor, total in zip(ctx.sources, ctx.saved_tensors, strict=True):
            factor = gradient.to(total.dtype)
            # A sparse sum over a single chunk is what the user's code returned, and not ours.
            in_place = last and not total.is_sparse
            part = total.mul_(factor) if in_place else total * factor
            scaled.append(part.to(tensor.dtype))
        if last:
            ctx.sources = ()  # who holds on to the loss need not hold on to these
        return (None, None, *scaled, *(None for _ in scaled))


def _graph_is_kept() -> bool:
    """Whether what the running backward pass has saved may be asked for again. If not, it is freed
    when the pass returns, and may be changed and given away."""
    known = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return known is None or bool(known())


class _Lazy(torch.autograd.Function):
    """``apply(run, *tensors) -> (*values, *finals)`` of a run whose forward pass is done."""

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> Any:
        ctx.run = run
        tapes = run.tape_tensors()
        ctx.tape_counts = [len(tape) for tape in tapes]
        ctx.tensors = len(tensors) + len(run.read_only())
        # Saved, not just referred to: autograd sees changes in place, and hooks see the tapes.
        flat = [part for tape in tapes for part in tape]
        ctx.save_for_backward(*tensors, *run.read_only(), *flat)
        totals = run.values.totals()
        ctx.mark_non_differentiable(*run.values.constant(totals))
        ctx.set_materialize_grads(False)
        return (*totals, *run.finals())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        run = cast(Run, ctx.run)
        tensors = saved_tensors(ctx)[ctx.tensors :]
        tapes = []
        for count in ctx.tape_counts:
            tapes.append(tensors[:count])
            tensors = tensors[count:]
        count = len(gradients) - len(run.finals())
        sums = run.reverse(gradients[:count], gradients[count:], tapes)
        return (None, *(sums.of(tensor) for tensor in run.differentiable()))

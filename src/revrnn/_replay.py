"""Running user code again as it ran before, and differentiating it by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The states of the CPU generator and of all CUDA generators."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), tuple(cuda))

    def same_as(self, other: RandomState) -> bool:
        return (
            torch.equal(self.cpu, other.cpu)
            and len(self.cuda) == len(other.cuda)
            and all(torch.equal(a, b) for a, b in zip(self.cuda, other.cuda, strict=True))
        )

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


class RandomStates:
    """The generator states before each piece of a sequence. Pieces that draw nothing share one."""

    def __init__(self) -> None:
        self._states: dict[int, RandomState] = {}
        self._latest: RandomState | None = None

    def note(self, piece: int) -> None:
        """This piece begins now."""
        now = RandomState.now()
        if self._latest is None or not now.same_as(self._latest):
            self._latest = now
        self._states[piece] = self._latest

    @contextmanager
    def replay(self, piece: int) -> Iterator[None]:
        """Inside, the generators go on as they did from that piece; then they are put back."""
        before = RandomState.now()
        self._states[piece].restore()
        try:
            yield
        finally:
            before.restore()


@dataclass(frozen=True)
class Autocast:
    """The autocast state of some device types."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    """Device type, whether it is enabled, its dtype."""

    @classmethod
    def now(cls, *devices: str) -> Autocast:
        return cls(
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in dict.fromkeys(devices)
            )
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was, but for its cache of converted weights: one filled without gradients enabled
        would cut off the gradients of a later run."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.states:
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Without it, for what is not the user's."""
        states = tuple((device, False, dtype) for device, _, dtype in self.states)
        with Autocast(states).again():
            yield


@contextmanager
def unchanged(name: str, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Raise when what ``name`` is given, and needs again, is changed in place."""
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    versions = [tensor._version for tensor in tracked]
    yield
    if [tensor._version for tensor in tracked] != versions:
        raise ValueError(
            f"{name} must not change its arguments in place, since it runs on them again"
        )


def leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that the graph behind ``outputs`` would give gradients to."""
    found: dict[int, Tensor] = {}
    seen: set[object] = set()
    todo = []
    for output in outputs:
        if output.grad_fn is not None:
            todo.append(output.grad_fn)
        elif output.requires_grad:
            found[id(output)] = output
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if "AccumulateGrad" in node.name():
            variable = cast(Any, node).variable
            found[id(variable)] = variable
        todo += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hooks of these tensors rest: they are due once, when the whole gradient is delivered."""
    with ExitStack() as stack:
        for tensor in tensors:
            hooks = tensor._backward_hooks
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


@contextmanager
def _explain_shared_history() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "through the graph a second time" in str(error):
            error.add_note(
                "Inside revrnn.stream: stem or head used a tensor with a history of its own. Pass "
                "it as context, so that its history is differentiated once, after all chunks."
            )
        raise


class Sums:
    """Gradients of tensors, added up over pieces."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def backward(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        others: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Differentiate ``outputs``: returns the gradients of ``others``, and adds those of all
        other leaves to the sums."""
        own = {id(other) for other in others}
        inputs = [leaf for leaf in leaves(outputs) if id(leaf) not in own]
        with _without_hooks(inputs), _explain_shared_history():
            found = torch.autograd.grad(outputs, [*others, *inputs], gradients, allow_unused=True)
        for leaf, gradient in zip(inputs, found[len(others) :], strict=True):
            if gradient is not None:
                self.add(leaf, gradient)
        return list(found[: len(others)])

    def add(self, tensor: Tensor, gradient: Tensor, *, owned: bool = False) -> None:
        """``owned``: nobody else has this gradient; it may become the sum."""
        known = self._sums.get(id(tensor))
        if gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = gradient.float()  # there may be thousands of pieces
        if known is None:
            # A copy: what autograd returns may be expanded or shared.
            if owned or gradient.is_sparse:
                total = gradient
            else:
                total = gradient.clone(memory_format=torch.contiguous_format)
        elif known[1].is_sparse:
            sparse = gradient.is_sparse
            total = (known[1] + gradient).coalesce() if sparse else gradient + known[1]
        else:
            total = known[1].add_(gradient)
        self._sums[id(tensor)] = (tensor, total)

    def items(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors and the sums of their gradients, in the order in which they were met; of tensors
        of 16 bits in float32."""
        return list(self._sums.values())

    def of(self, tensor: Tensor) -> Tensor | None:
        known = self._sums.get(id(tensor))
        return None if known is None else known[1].to(tensor.dtype)

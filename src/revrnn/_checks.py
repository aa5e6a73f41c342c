"""Checks of arguments: each returns the value or raises one sentence that names it, says what it
was and what it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from revrnn.fixed import MAX_FORGET_BITS, Z_MAX, ForgetRange

Name = TypeVar("Name", bound=str)

_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)
"""Autocast brings these to one dtype; float64 it leaves alone."""


# -- arguments of a module ------------------------------------------------------------------------


def positive(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a positive int, got {value}")
    return value


def even(name: str, value: object) -> int:
    value = positive(name, value)
    if value % 2:
        raise ValueError(f"{name} must be even, since the units form two groups, got {value}")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def probability(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number in [0, 1), got {value!r}")
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {value}")
    return float(value)


def _forget_bits(value: object, forget: str) -> float | None:
    if value is None and forget == "discrete":
        raise ValueError(
            "max_forget_bits must be given with forget='discrete': the most bits that a unit may "
            "forget a step, from which it chooses"
        )
    if value is None:
        return None
    if forget == "none":
        raise ValueError(
            f"max_forget_bits must be None with forget='none', which forgets nothing, got {value!r}"
        )
    if forget == "discrete":
        bits = positive("max_forget_bits", value)
        if bits > MAX_FORGET_BITS:
            raise ValueError(
                f"max_forget_bits must be at most {MAX_FORGET_BITS} with forget='discrete', got "
                f"{bits}"
            )
        return bits
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"max_forget_bits must be None or a number of bits, got {value!r}")
    if not 0 < value <= MAX_FORGET_BITS:
        raise ValueError(
            f"max_forget_bits must be in (0, {MAX_FORGET_BITS}], the bits that a forget value can "
            f"hold, or None for no limit, got {value}"
        )
    if ForgetRange.from_bits(value).z_min > Z_MAX:
        raise ValueError(
            f"max_forget_bits must allow for the {Z_MAX}/{Z_MAX + 1} of the largest forget value, "
            f"about 0.0015 bits, got {value}"
        )
    return value


def one_of(name: str, value: Name, choices: Sequence[str]) -> Name:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _temperature(value: object, estimator: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"temperature must be a positive number, got {value!r}")
    if not 2**-6 <= value <= 2**6:
        raise ValueError(f"temperature must be between 1/64 and 64, got {value}")
    if value != 1 and estimator != "gumbel":
        raise ValueError(
            f"temperature is that of estimator='gumbel', and must be 1 with {estimator!r}, got "
            f"{value}"
        )
    return float(value)


def forgetting(
    forget: str, max_forget_bits: object, estimator: str, temperature: object
) -> tuple[float | None, float]:
    """max_forget_bits and temperature as numbers; all four are found to agree."""
    one_of("forget", forget, ("fractional", "none", "discrete"))
    one_of("estimator", estimator, ("gumbel", "categorical"))
    return _forget_bits(max_forget_bits, forget), _temperature(temperature, estimator)


def zoneout(value: object, forget: str) -> float:
    p = probability("zoneout", value)
    if p and forget == "discrete":
        raise ValueError(
            f"zoneout must be 0 with forget='discrete', which can only forget whole bits, got {p}"
        )
    return p


def tape(value: Name, forget: str) -> Name:
    value = one_of("tape", value, ("entropy", "paper"))
    if value == "paper" and forget != "fractional":
        raise ValueError(
            f"tape must be 'entropy' with forget={forget!r}: the paper's buffer is that of "
            f"fractional forgetting, got {value!r}"
        )
    return value


def parameter_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a real floating-point dtype, got {dtype}")


def keep(value: object, hidden_size: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"keep must be None or an int, got {value!r}")
    if not 0 <= value <= hidden_size // 2:
        raise ValueError(
            f"keep must be between 0 and half of hidden_size, {hidden_size // 2}, got {value}"
        )
    return value


# -- tensors --------------------------------------------------------------------------------------


def _dense(name: str, value: object, expected: str = "a dense tensor") -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ValueError(f"{name} must be {expected}, got a {kind} tensor")
    return value


def _on(name: str, value: Tensor, device: torch.device, of: str) -> None:
    if value.device != device:
        raise ValueError(f"{name} must be on the device of {of}, {device}, got {value.device}")
    if device.type == "meta":
        raise ValueError(f"{name} must hold values, got a tensor on the meta device")


def _dtype(name: str, value: Tensor, expected: torch.dtype) -> None:
    """That of the weights, as torch.nn has it; under autocast any that autocast would cast."""
    if value.dtype == expected:
        return
    autocast = torch.is_autocast_enabled(value.device.type)
    if autocast and value.dtype in _AUTOCAST and expected in _AUTOCAST:
        return
    raise ValueError(
        f"{name} must have the dtype of the weights, {expected}, got {value.dtype}; convert it or "
        "the module"
    )


def weights(
    tensors: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> None:
    """Parameters may have been replaced or moved one by one since the module was built."""
    for value, (name, shape) in zip(tensors, shapes.items(), strict=True):
        weight = _dense(name, value)
        if weight.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(weight.shape)}")
        if not weight.dtype.is_floating_point:
            raise ValueError(f"{name} must be of a real floating-point dtype, got {weight.dtype}")
        _on(name, weight, device, "the other weights")


def input_tensor(data: object, parameter: Tensor, input_size: int, dims: tuple[int, ...]) -> None:
    data = _dense("input", data, "a dense tensor or a PackedSequence")
    if data.dim() not in dims:
        expected = " or ".join(map(str, dims))
        raise ValueError(f"input must have {expected} dimensions, got shape {tuple(data.shape)}")
    if data.shape[-1] != input_size:
        raise ValueError(
            f"input must have input_size = {input_size} features in its last dimension, got shape "
            f"{tuple(data.shape)}"
        )
    _on("input", data, parameter.device, "the weights")
    _dtype("input", data, parameter.dtype)


def not_empty(shape: Sequence[int], steps: int, batch: int) -> None:
    if steps < 1 or batch < 1:
        raise ValueError(
            f"input must have at least one time step and one batch row, got shape {tuple(shape)}"
        )


def packed(sequence: PackedSequence) -> None:
    """One made by hand may say anything of itself, and kernels take its word for it."""
    sizes: object = sequence.batch_sizes
    if not isinstance(sizes, Tensor) or sizes.dtype != torch.int64 or sizes.dim() != 1:
        raise ValueError(f"batch_sizes of the input must be a 1-D int64 tensor, got {sizes!r}")
    if len(sizes) == 0:
        raise ValueError("input must have at least one time step, got a PackedSequence of none")
    if int(sizes[-1]) < 1 or bool((sizes[1:] > sizes[:-1]).any()):
        raise ValueError(
            "batch_sizes of the input must be positive and must not grow from step to step, got "
            f"{sizes.tolist() if len(sizes) <= 20 else [*sizes[:20].tolist(), '...']}"
        )
    if int(sizes[0]) > len(sequence.data) or int(sizes.sum()) != len(sequence.data):
        raise ValueError(
            "batch_sizes of the input must add up to its number of rows, got a sum of "
            f"{int(sizes.sum())} for {len(sequence.data)} rows; are there lengths beyond the end "
            "of the padded batch?"
        )
    there, back = sequence.sorted_indices, sequence.unsorted_indices
    if (there is None and back is None) or _undo_each_other(there, back, sequence):
        return
    raise ValueError(
        "sorted_indices and unsorted_indices of the input must be int64 permutations of its "
        f"{int(sizes[0])} batch rows, on its device, that undo each other, got {there} and {back}"
    )


def _undo_each_other(there: object, back: object, sequence: PackedSequence) -> bool:
    if not isinstance(there, Tensor) or not isinstance(back, Tensor):
        return False
    rows = torch.arange(int(sequence.batch_sizes[0]), device=sequence.data.device)
    for indices in (there, back):
        if (indices.dtype, indices.device, indices.shape) != (rows.dtype, rows.device, rows.shape):
            return False
    ordered, inverse = there.sort()
    return torch.equal(ordered, rows) and torch.equal(inverse, back)


def pair(hx: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...] | None:
    if hx is None:
        return None
    if not isinstance(hx, (tuple, list)):
        raise TypeError(f"hx must be a pair (h_0, c_0), got {type(hx).__name__}")
    if len(hx) != 2:
        raise ValueError(f"hx must be a pair (h_0, c_0), got {len(hx)} items")
    return tuple(hx)


def state_tensors(
    states: Sequence[Tensor],
    shape: tuple[int, ...],
    device: torch.device,
    parameter_dtype: torch.dtype,
    names: Sequence[str] = ("h_0", "c_0"),
) -> None:
    for name, value in zip(names, states, strict=False):
        state = _dense(name, value)
        if state.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(state.shape)}")
        _on(name, state, device, "the weights")
        _dtype(name, state, parameter_dtype)

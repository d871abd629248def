"""Real values for the few small tensors whose contents steer the program: timesteps, sigmas, masks, lengths.

A fake tensor has a shape but no contents, and schedulers and pipelines look values up (`.item()`, `.nonzero()`, boolean
masks). So each small fake tensor that comes from known numbers carries them along as a real tensor; what is computed
from such tensors only is computed on them too. Everything else (weights, noise, activations) stays without contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

LIMIT = 4096
"""Elements up to which contents are carried: enough for 1000 timesteps and a mask of 1024 tokens."""

aten = torch.ops.aten

_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_CONSTANT_LIKE = {
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
    aten.new_zeros.default: torch.zeros,
    aten.new_ones.default: torch.ones,
}


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The contents of a tensor, as a real tensor on the CPU that must not be changed; None where they are unknown."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.numel() <= LIMIT and tensor.device.type == "cpu" else None
    value: torch.Tensor | None = tensor.__dict__.get("known_value")
    if value is None or getattr(value.untyped_storage(), "outdated", False):
        return None
    return value


def contents(value: torch.Tensor) -> tuple[Any, ...]:
    """The numbers of a real tensor."""
    with _disable_current_modes():
        return tuple(value.flatten().tolist())


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            for item in arg:
                if isinstance(item, torch.Tensor):
                    yield item


def evaluate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on real values, or None where any operand is unknown or the result would be random."""
    if func in _EMPTY or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    values = []
    for tensor in tensors_in(args, kwargs):
        value = value_of(tensor)
        if value is None:
            return None
        values.append(value)
    queue = iter(values)
    real_args = tuple(_real(arg, queue) for arg in args)
    real_kwargs = {
        name: torch.device("cpu") if name == "device" else _real(arg, queue)
        for name, arg in kwargs.items()
        if name not in ("pin_memory", "non_blocking")
    }
    if func is torch.ops.prims.device_put.default:
        return values[0].clone()
    with _disable_current_modes():
        return func(*real_args, **real_kwargs)


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Give the result of an operation its contents, where they can be known."""
    outs = out if isinstance(out, list | tuple) else (out,)
    if not all(isinstance(o, FakeTensor) and o.numel() <= LIMIT for o in outs):
        return
    constant = _CONSTANT_LIKE.get(func)
    if constant is not None:
        with _disable_current_modes():
            outs[0].known_value = constant(outs[0].shape, dtype=outs[0].dtype)
        return
    values = evaluate(func, args, kwargs)
    if values is None:
        return
    for fake, value in zip(outs, values if isinstance(values, list | tuple) else (values,), strict=True):
        fake.known_value = value


def follow_mutation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Repeat an in-place operation on the contents of its target, or mark them outdated, views of it included."""
    target = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("out")
    if target is None or not isinstance(target, FakeTensor):
        return
    value = value_of(target)
    if value is not None and evaluate(func, args, kwargs) is None:
        value.untyped_storage().outdated = True  # type: ignore[attr-defined]


def _real(arg: Any, queue: Iterator[torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        return next(queue)
    if isinstance(arg, list | tuple):
        items = [_real(item, queue) for item in arg]
        return items if isinstance(arg, list) else tuple(items)
    return arg

"""What happens before and after a component works: its `forward`, and a VAE's `encode` and `decode`.

Hooks of nn.Module see `forward` only, but pipelines call a VAE's `decode`; both are wrapped here, and undone.
Not covered: methods that a pipeline calls past these (`text_encoder.generate`); they end in a `forward` of the
component or fail with a device mismatch before anything was computed.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from accelerate.utils import send_to_device
from torch.utils.weak import WeakTensorKeyDictionary

METHODS = ("encode", "decode")


class Around(Protocol):
    """What is done around each call of a component."""

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the component gets."""
        ...

    def after(self, result: Any) -> Any:
        """What the caller gets."""
        ...


def wrap(module: torch.nn.Module, around: Around, exits: ExitStack) -> None:
    """From now on `around` has each call of `module`; closing `exits` undoes it."""

    def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return around.before(args, kwargs)

    def after(_module: torch.nn.Module, _args: Any, result: Any) -> Any:
        return around.after(result)

    exits.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
    exits.callback(module.register_forward_hook(after).remove)
    for name in METHODS:
        if hasattr(module, name):
            # frames stay where they were decoded: pipelines only take them to the CPU, and the main card may be full
            wrap_method(module, name, _Before(around) if name == "decode" else around, exits)


class _Before:
    """Only the first half of another one."""

    def __init__(self, around: Around) -> None:
        self.before = around.before

    @staticmethod
    def after(result: Any) -> Any:
        return result


def wrap_method(module: torch.nn.Module, name: str, around: Around, exits: ExitStack) -> None:
    """The same for one method of the instance."""
    stock, own = getattr(module, name), module.__dict__.get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = around.before(args, kwargs)
        return around.after(stock(*args, **kwargs))

    def undo() -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    module.__dict__[name] = call
    exits.callback(undo)


def moved(value: Any, device: torch.device) -> Any:
    """The same value with its tensors on `device`.

    diffusers wraps what a VAE's `encode` finds into a distribution, an object that accelerate leaves where it is.
    """
    distribution = getattr(value, "latent_dist", None)
    if distribution is not None:
        for name, tensor in vars(distribution).items():
            if isinstance(tensor, torch.Tensor):
                setattr(distribution, name, tensor.to(device))
    return send_to_device(value, device)


class Copies:
    """What was sent to a device already: a rotary table is the same tensor for each block, and travels once.

    Keyed by the tensor itself and weakly, so that hidden states, new at each block, are not kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, value: Any) -> Any:
        """Tensors anywhere inside tuples, lists and dicts; all else as it is."""
        if isinstance(value, torch.Tensor):
            if value.device == self._device:
                return value
            found = self._known.get(value)
            # a tensor that was written to since is another one
            if found is None or found[0] != version_of(value):
                found = (version_of(value), value.to(self._device))
                self._known[value] = found
            return found[1]
        if isinstance(value, dict):
            return {key: self.of(one) for key, one in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self.of(one) for one in value)
        return send_to_device(value, self._device)

    def clear(self) -> None:
        self._known.clear()


def version_of(tensor: torch.Tensor) -> int:
    """Grows each time the tensor is written to in place; torch does not count that for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version

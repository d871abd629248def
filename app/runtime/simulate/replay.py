"""Do the same work once: a layer or decoder that is called again with inputs of the same shapes takes the same memory.

A transformer has dozens of equal blocks, a tiled VAE decodes dozens of equal tiles. The first call of each kind runs
operation by operation; later ones only repeat its highest point and its results. Allocated peaks stay what they were
to the byte (tested). Reserved memory is then only a lower bound: how later calls fragment the blocks is not replayed.

A call is replayed only if that is safe: its arguments are tensors, plain values and lists or dicts of them; nothing
below it carries an offloading hook; and the first call left nothing behind but its results (so a layer that fills a
key-value cache is never replayed).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from app.runtime.simulate import known
from app.runtime.simulate.devices import Held, SimulatedMachine
from app.runtime.simulate.ledger import Label

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass
class Result:
    """One tensor of a result: a view of one of the inputs' storages, or of one of the call's own."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    input: int | None
    own: int | None


@dataclass
class Recording:
    """What a call did to each memory, and what came out of it."""

    rises: dict[str, tuple[dict[Label, int], str]]
    """By device: what the highest point had more than the start, and the operation that reached it."""
    results: list[Any]
    spec: Any


@contextmanager
def replaying(machine: SimulatedMachine, modules: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Inside, equal calls of layers in lists, and of VAEs' `decoder` and `encoder`, are replayed."""
    recordings: dict[Any, Recording | None] = {}
    wrapped: list[torch.nn.Module] = []
    for component in modules.values():
        for module in _candidates(component):
            if not _hooked(module):
                module.forward = _replayed(machine, module, recordings)
                wrapped.append(module)
    try:
        yield
    finally:
        for module in wrapped:
            module.__dict__.pop("forward", None)


def _candidates(component: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for name, child in component.named_children():
        if isinstance(child, torch.nn.ModuleList) and len(child) > 1:
            yield from child
        elif name in ("decoder", "encoder") and hasattr(component, "decode"):
            yield child
        elif not isinstance(child, torch.nn.ModuleList):
            yield from _candidates(child)


def _hooked(module: torch.nn.Module) -> bool:
    """Offloading moves weights at each call; a layer at or below a hook must really run."""
    marks = ("_hf_hook", "_diffusers_hook")
    return any(hasattr(m, mark) for m in module.modules() for mark in marks)


def _replayed(
    machine: SimulatedMachine, module: torch.nn.Module, recordings: dict[Any, Recording | None]
) -> Callable[..., Any]:
    stock = module.forward
    signature = (type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters()))

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        inputs = _key(leaves)
        del leaves  # or inputs would live longer than in the stock call
        if inputs is None:
            return stock(*args, **kwargs)
        where = next((p.device for p in module.parameters()), None)
        key = (signature, where, inputs, str(spec))
        if key not in recordings:
            result, recordings[key] = _record(machine, stock, args, kwargs)
            return result
        recording = recordings[key]
        if recording is None:
            return stock(*args, **kwargs)
        return _repeat(machine, recording, args, kwargs)

    return forward


def _key(leaves: list[Any]) -> Any:
    """All that the memory of a call can depend on; None where that cannot be told."""
    parts: list[Any] = []
    storages: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            serial = _serial(leaf)
            if serial is None:
                return None
            shared = storages.setdefault(serial, len(storages))
            value = known.value_of(leaf)
            content = None if value is None else known.contents(value)
            parts.append((leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, shared, content))
        elif isinstance(leaf, _PLAIN):
            parts.append((type(leaf), leaf))
        else:
            return None
    return tuple(parts)


def _serial(tensor: torch.Tensor) -> int | None:
    held: Held | None = getattr(tensor.untyped_storage(), "held", None)
    return None if held is None else held.serial


def _lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
    """Lists among the arguments: a call may change what is in them (Wan's caches of earlier frames)."""
    return [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _record(
    machine: SimulatedMachine, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Recording | None]:
    """Run the call, and write down what it did, if that is all it did."""
    ledgers = machine.ledgers()
    lists = _lists(args, kwargs)
    numbers = {_serial(tensor): n for n, tensor in enumerate(_tensors((args, kwargs)))}
    replaceable = [(weakref.ref(h), h.charged) for h in _held(lists)]
    starts = {device: (ledger.total, dict(ledger.shares)) for device, ledger in ledgers.items()}
    marks = {device: ledger.set_mark() for device, ledger in ledgers.items()}
    result = stock(*args, **kwargs)
    for device, mark in marks.items():
        ledgers[device].close(mark)
    leaves, spec = tree_flatten((result, lists))
    results = _describe(leaves, numbers)
    if results is None:
        return result, None
    made = {h.serial: h.charged for h in _held(leaves) if h.serial not in numbers}
    freed = sum(size for reference, size in replaceable if reference() is None)
    grown = sum(ledgers[device].total - total for device, (total, _) in starts.items())
    if grown != sum(made.values()) - freed:
        return result, None  # something else stays behind, or went
    rises = {
        device: (_rise(machine, starts[device][1], mark.shares, mark.peak - mark.start), mark.operation)
        for device, mark in marks.items()
    }
    return result, Recording(rises, results, spec)


def _held(tree: Any) -> list[Held]:
    """Places of the storages in a tree, each once."""
    found = {id(t.untyped_storage()): getattr(t.untyped_storage(), "held", None) for t in _tensors(tree)}
    return [held for held in found.values() if held is not None]


def _describe(leaves: list[Any], numbers: dict[int | None, int]) -> list[Any] | None:
    """Results as they can be made again; None where they cannot."""
    described: list[Any] = []
    own: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            serial = _serial(leaf)
            if serial is None or known.value_of(leaf) is not None:
                return None
            of_input = numbers.get(serial)
            described.append(
                Result(
                    shape=leaf.shape,
                    stride=leaf.stride(),
                    offset=int(leaf.storage_offset()),
                    dtype=leaf.dtype,
                    device=leaf.device,
                    nbytes=leaf.untyped_storage().nbytes(),
                    input=of_input,
                    own=own.setdefault(serial, len(own)) if of_input is None else None,
                )
            )
        elif isinstance(leaf, _PLAIN):
            described.append(leaf)
        else:
            return None
    return described


def _rise(
    machine: SimulatedMachine, before: dict[Label, int], at_peak: dict[Label, int], rise: int
) -> dict[Label, int]:
    shares = {label: n - before.get(label, 0) for label, n in at_peak.items()}
    shares = {label: n for label, n in shares.items() if n > 0}
    # where something was freed before the peak, the shares that grew are more than the rise
    return shares if sum(shares.values()) == rise else {machine.label(): rise}


def _repeat(machine: SimulatedMachine, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The highest point again, then results of the same shapes."""
    for device, (rise, operation) in recording.rises.items():
        machine.touch(device, rise, operation)
    inputs = _tensors((args, kwargs))
    own: dict[int, torch.Tensor] = {}
    leaves: list[Any] = []
    for entry in recording.results:
        if not isinstance(entry, Result):
            leaves.append(entry)
            continue
        if entry.input is not None:
            base = inputs[entry.input]
        elif entry.own in own:
            base = own[entry.own]
        else:
            base = torch.empty(entry.nbytes // entry.dtype.itemsize, dtype=entry.dtype, device=entry.device)
            own[entry.own or 0] = base
        base = base if base.dtype is entry.dtype else base.view(entry.dtype)
        leaves.append(base.as_strided(entry.shape, entry.stride, entry.offset))
    result, contents = tree_unflatten(leaves, recording.spec)
    for target, content in zip(_lists(args, kwargs), contents, strict=True):
        target[:] = content
    return result

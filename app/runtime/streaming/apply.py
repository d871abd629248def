"""Put a module on the device with its blocks streamed, or leave it as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook

from app.errors import PlanError
from app.runtime.streaming.engine import Streamed
from app.runtime.streaming.layout import lay_out
from app.runtime.streaming.sources import PinnedSource, Source
from app.runtime.streaming.units import HOOK, Weight, blocks_of, castable, refuse, units_of, weights_of


def stream(
    module: torch.nn.Module,
    device: torch.device | str,
    *,
    block_modules: Sequence[str] | None = None,
    resident_blocks: int = 0,
    slots: int = 2,
    storage_dtype: torch.dtype | None = None,
    source: Source | None = None,
    keep_originals: bool = True,
) -> Streamed:
    """Stream the module's blocks to `device`, until `remove` is called on what is returned.

    `block_modules` names the block lists as diffusers does (dots are allowed); the default is what the class says, or
    its own lists, or else the outermost ones inside. The first `resident_blocks` stay on the device.

    `storage_dtype`: layers that diffusers' layerwise casting would cast travel in that type, and all are rounded to it:
    the output is that of `enable_layerwise_casting(storage_dtype)`, exactly. Parameters compute in the dtype they have.
    The unrounded ones are kept in RAM for `remove`, unless `keep_originals` is False.

    Raises:
        PlanError: no blocks, offloaded or streamed already, quantized, or weights on meta without a source for them.
        ModelNotUsable: the source lacks a weight.
    """
    device = torch.device(device)
    if slots < 1 or resident_blocks < 0:
        raise PlanError(f"Streaming needs a slot at least, and cannot keep {resident_blocks} blocks.")
    refuse(module)
    everything = weights_of(module)
    if source is None and any(weight.parameter.is_meta for weight in everything):
        raise PlanError(
            f"{type(module).__name__} was made without its weights, so they cannot come from RAM: "
            "stream it from its checkpoint."
        )
    blocks = blocks_of(module, block_modules)[resident_blocks:]
    units = units_of(blocks, everything)
    in_units = {id(weight) for unit in units for weight in unit.weights}
    rest = [weight for weight in everything if id(weight) not in in_units]
    cast = castable(module) if storage_dtype is not None else frozenset()

    def transport(weight: Weight) -> torch.dtype:
        dtype = weight.parameter.dtype
        return storage_dtype if storage_dtype is not None and id(weight.parameter) in cast else dtype

    layouts = [
        lay_out(unit.name, [(weight.names, weight.parameter, transport(weight)) for weight in unit.weights])
        for unit in units
    ]
    rest_types = [transport(weight) for weight in rest]
    source = source if source is not None else PinnedSource()
    streamed = Streamed(device, units, layouts, source)
    try:
        with torch.no_grad():
            source.bind(layouts, [[weight.parameter for weight in unit.weights] for unit in units], device)
            if not keep_originals:
                for unit, layout in zip(units, layouts, strict=True):
                    for weight, entry in zip(unit.weights, layout.entries, strict=True):
                        if entry.transport is not entry.dtype:
                            weight.forget()
            for weight, travels in zip(rest, rest_types, strict=True):
                _settle(streamed, weight, travels, keep_originals)
            _move_buffers(streamed, module)
            if units:
                streamed.allocate(slots)
        for index, unit in enumerate(units):
            _hook(streamed, index, unit.block)
        streamed.undo.append(lambda: _forget_registries(module))
        _forget_registries(module)
    except BaseException:
        streamed.remove()
        raise
    return streamed


def _settle(streamed: Streamed, weight: Weight, travels: torch.dtype, keep_originals: bool) -> None:
    """Put a weight that is in no unit on the device."""
    parameter = weight.parameter
    found = streamed.source.read(weight.names, parameter)
    data = parameter.detach() if found is None else found
    rounded = travels is not parameter.dtype
    if rounded:
        data = data.to(travels).to(parameter.dtype)
    if rounded and not keep_originals:
        weight.forget()
    streamed.undo.append(weight.bring_back)
    # plain ones leave RAM, and come back by a copy; one that is replaced by other values has to stay
    weight.place(data.to(streamed.device), keep=found is not None or rounded)


def _move_buffers(streamed: Streamed, module: torch.nn.Module) -> None:
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            found = None
            if name not in owner._non_persistent_buffers_set:
                found = streamed.source.read([f"{path}.{name}" if path else name], buffer)
            before, home = (buffer.data, None) if found is not None else (None, buffer.device)
            buffer.data = (buffer.data if found is None else found).to(streamed.device)
            streamed.undo.append(lambda o=owner, n=name, b=before, h=home: _bring_back_buffer(o, n, b, h))  # type: ignore[misc]


def _bring_back_buffer(
    owner: torch.nn.Module, name: str, before: torch.Tensor | None, home: torch.device | None
) -> None:
    buffer = owner._buffers.get(name)  # the one of now: some forwards replace theirs
    if buffer is not None:
        buffer.data = before if before is not None else buffer.data.to(home)


def _hook(streamed: Streamed, index: int, block: torch.nn.Module) -> None:
    had_registry, own_forward = hasattr(block, "_diffusers_hook"), "forward" in vars(block)
    registry = HookRegistry.check_if_exists_or_initialize(block)

    def unhook() -> None:
        registry.remove_hook(HOOK, recurse=False)
        if not registry.hooks:
            if not own_forward:
                vars(block).pop("forward", None)  # remove_hook leaves a bound method behind
            if not had_registry:
                vars(block).pop("_diffusers_hook", None)

    streamed.undo.append(unhook)
    registry.register_hook(_StreamingHook(streamed, index), HOOK)


def _forget_registries(module: torch.nn.Module) -> None:
    registry = getattr(module, "_diffusers_hook", None)
    if registry is not None:  # it remembers which of its modules have hooks
        registry.invalidate_child_registries_cache()


class _StreamingHook(ModelHook):  # type: ignore[misc]
    def __init__(self, streamed: Streamed, index: int) -> None:
        super().__init__()
        self._streamed = streamed
        self._index = index

    def pre_forward(self, _module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        self._streamed.before(self._index)
        return args, kwargs

    def post_forward(self, _module: torch.nn.Module, output: Any) -> Any:
        self._streamed.after(self._index)
        return output

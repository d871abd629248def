"""Placements made by diffusers and accelerate: found, whoever made them, and taken off again.

Private state of diffusers' hooks (the registry of a module, the stream and the folder of a group) is read here and
nowhere else in the guard: diffusers has no public call that ends group offloading or layerwise casting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook, remove_hook_from_module
from accelerate.hooks import LayerwiseCastingHook as AccelerateCastingHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, set_module_tensor_to_device
from diffusers.hooks.group_offloading import (
    GroupOffloadingHook,
    LayerExecutionTrackerHook,
    LazyPrefetchGroupOffloadingHook,
)
from diffusers.hooks.layerwise_casting import LayerwiseCastingHook, PeftInputAutocastDisableHook
from torch import nn

from app.errors import NotTrainable, OffloadActive

_PLACING: Final = (
    GroupOffloadingHook,
    LazyPrefetchGroupOffloadingHook,
    LayerExecutionTrackerHook,
    LayerwiseCastingHook,
    PeftInputAutocastDisableHook,
)
_LISTED: Final = 6
"""How many names a message lists before it counts the rest."""


def active(part: nn.Module) -> Iterator[str]:
    """The placements that hook into this module itself, not its children, in words."""
    if any(type(hook).__module__.startswith("app.runtime.") for hook in _registered(part).values()):
        yield "streaming by Pocketreel"  # whoever made it must take it off
    for _, hook in _diffusers_hooks(part):
        if isinstance(hook, GroupOffloadingHook):
            config = hook.config
            home = config.offload_to_disk_path or config.offload_device
            stream = ", stream" if config.stream is not None else ""
            kind = str(config.offload_type.value)
            yield f"group offload ({kind}, computes on {config.onload_device}, weights on {home}{stream})"
        elif isinstance(hook, LayerwiseCastingHook):
            yield f"layerwise casting (stored as {word(hook.storage_dtype)})"
    for hook in _accelerate_hooks(part):
        if isinstance(hook, CpuOffload):
            yield f"model offload (computes on {hook.execution_device})"
        elif isinstance(hook, AlignDevicesHook) and hook.offload:
            yield f"sequential offload (computes on {hook.execution_device})"
        elif isinstance(hook, AlignDevicesHook) and hook.execution_device is not None:
            yield f"dispatch to {hook.execution_device}"
        elif isinstance(hook, AccelerateCastingHook):
            yield f"layerwise casting (stored as {word(hook.storage_dtype)})"


def refuse_lost(name: str, module: nn.Module) -> None:
    """Nothing, if `take_off` can bring all weights back.

    Raises:
        OffloadActive: the only copy of some weights lies in files that offloading wrote.
        NotTrainable: some weights are nowhere.
    """
    homes: set[str] = set()
    for path, part in module.named_modules():
        for _, hook in _group_hooks(part):
            if hook.config.offload_to_disk_path is not None:
                raise _only_on_disk(name, hook.config.offload_to_disk_path)
        for hook in _accelerate_hooks(part):
            if isinstance(hook, AlignDevicesHook) and hook.offload:
                folder = _copies_on_disk(hook)
                if folder is not None:
                    raise _only_on_disk(name, folder)
                homes |= {f"{path}.{tensor}".lstrip(".") for tensor in hook.original_devices}
    nowhere = [tensor for tensor, value in named_tensors(module) if value.is_meta and tensor not in homes]
    if nowhere:
        raise NotTrainable(
            f"{name} has weights that are not in memory (device meta): {listed(nowhere)}. "
            "Load the model again, all of it, before training."
        )


def _only_on_disk(name: str, folder: Any) -> OffloadActive:
    # diffusers names these files by the group, accelerate by the parameter; both reuse or overwrite what is there
    return OffloadActive(
        f"{name} is offloaded to the disk, and its weights are only in {folder}. Nothing there says which model they "
        "belong to, so they are not trained. Load the model again without offloading it to the disk."
    )


def _copies_on_disk(hook: AlignDevicesHook) -> str | None:
    """The folder of copies that the hook reads from; None: memory, or the checkpoint's own safetensors files."""
    prefix, reader = _reader(hook)
    copied = reader is not None and any(
        key.startswith(prefix) and key not in reader.state_dict and where.get("safetensors_file") is None
        for key, where in reader.index.items()
    )
    return str(reader.save_folder) if copied else None


def _reader(hook: AlignDevicesHook) -> tuple[str, Any]:
    """What begins the hook's names, and accelerate's reader of files; None: its weights are in memory."""
    weights, prefix = hook.weights_map, ""
    if isinstance(weights, PrefixedDataset):
        weights, prefix = weights.dataset, weights.prefix
    return prefix, weights if isinstance(weights, OffloadedWeightsLoader) and weights.index else None


def take_off(module: nn.Module) -> bool:
    """Remove all hooks that place this module; its weights are then where they were kept, in what they computed in.

    Returns: whether layerwise casting had rounded weights, which cannot be undone.
    """
    rounded = replaced = False
    homes = [hook.config.offload_device for part in module.modules() for _, hook in _group_hooks(part)]
    for part in list(module.modules()):
        # both wrap `forward`; the outer wrapper must go first, else the inner one stays at work
        forward = getattr(part.__dict__.get("forward"), "func", None)
        if getattr(forward, "__module__", "").startswith("diffusers."):
            rounded |= _unhook_diffusers(part)
            replaced |= _unhook_accelerate(part)
        else:
            replaced |= _unhook_accelerate(part)
            rounded |= _unhook_diffusers(part)
    if replaced:
        _tie_again(module)
    if homes:  # a run that was stopped within a group leaves that one on the card
        nn.Module.to(module, device=homes[0])
    if getattr(module, "hf_device_map", None) is not None:
        del module.hf_device_map
    return rounded


def _unhook_diffusers(part: nn.Module) -> bool:
    """Returns: weights were rounded."""
    registry: Any = getattr(part, "_diffusers_hook", None)
    rounded = False
    for name, hook in _diffusers_hooks(part):
        if isinstance(hook, GroupOffloadingHook) and hook.group.stream is not None:
            hook.group.stream.synchronize()  # a copy may still be on its way into the weights
        if isinstance(hook, LayerwiseCastingHook):
            # its own method refuses, because the lost precision does not come back; the caller is told so instead
            hook.deinitalize_hook = lambda module: module
            nn.Module.to(part, dtype=hook.compute_dtype)
            rounded = True
        registry.remove_hook(name, recurse=False)
    return rounded


def _unhook_accelerate(part: nn.Module) -> bool:
    """Returns: parameters were replaced."""
    hooks = _accelerate_hooks(part)
    offloads = [hook for hook in hooks if isinstance(hook, AlignDevicesHook) and hook.offload]
    # accelerate returns to the device before, and that is meta for what was loaded straight from files
    unread = {
        name: value
        for hook in offloads
        for name, device in hook.original_devices.items()
        if device.type == "meta" and (value := hook.weights_map.get(name)) is not None
    }
    files = any(_reader(hook)[1] is not None for hook in offloads)
    if hooks:
        remove_hook_from_module(part)
    for name, value in unread.items():
        set_module_tensor_to_device(part, name, "cpu", value=value)
    if files:  # mapped into memory, not read: whoever replaces the file would change the weights
        for weight in part.parameters(recurse=False):
            weight.data = weight.data.clone()
    for hook in hooks:
        if isinstance(hook, AccelerateCastingHook):
            nn.Module.to(part, dtype=hook.compute_dtype)
    return bool(offloads)


def _tie_again(module: nn.Module) -> None:
    """Parameters that were one before accelerate made one of each name are one again."""
    first: dict[Any, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.numel() > 0:
                place = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device)
                part._parameters[name] = first.setdefault(place, weight)
    tie = getattr(module, "tie_weights", None)
    if callable(tie):
        tie()


def forget_placement(pipe: Any) -> None:
    """Clear what a pipeline itself remembers of its placement, so that it can be placed anew."""
    if hasattr(pipe, "remove_all_hooks"):
        pipe.remove_all_hooks()
    if getattr(pipe, "hf_device_map", None) is not None:
        pipe.hf_device_map = None  # not `reset_device_map()`: that takes all components to the CPU


def _registered(part: nn.Module) -> dict[str, Any]:
    return dict(getattr(getattr(part, "_diffusers_hook", None), "hooks", {}))


def _diffusers_hooks(part: nn.Module) -> list[tuple[str, Any]]:
    return [(name, hook) for name, hook in _registered(part).items() if isinstance(hook, _PLACING)]


def _group_hooks(part: nn.Module) -> list[tuple[str, Any]]:
    return [(name, hook) for name, hook in _diffusers_hooks(part) if isinstance(hook, GroupOffloadingHook)]


def _accelerate_hooks(part: nn.Module) -> list[Any]:
    hook = getattr(part, "_hf_hook", None)
    if isinstance(hook, SequentialHook):
        return list(hook.hooks)
    return [] if hook is None else [hook]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def word(dtype: torch.dtype) -> str:
    """`float32`, as plans name it."""
    return str(dtype).removeprefix("torch.")


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"

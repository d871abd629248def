"""Hold the components of a simulated pipeline as a `Setup` says, with the libraries' own calls.

This is the simulator's yardstick. The worker's placement (`app.runtime.placement`) can be simulated instead:
`simulate(..., apply=lambda pipe: placement.apply(pipe, plan))`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.hooks import add_hook_to_module
from diffusers.hooks import apply_group_offloading

from app.errors import PlanError
from app.runtime.simulate.values import ComponentSetup, Hold, Setup


def apply(pipe: Any, setup: Setup) -> list[Any]:
    """Place every component. Returns accelerate's hooks whose `offload()` is to be called after each run.

    Raises:
        PlanError: a setup that the libraries cannot do.
        torch.OutOfMemoryError: the weights alone do not fit.
    """
    modules: dict[str, Any] = {n: m for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    unknown = sorted(set(setup.components) - set(modules))
    if unknown:
        raise PlanError(f"{type(pipe).__name__} has no component {', '.join(unknown)}; it has {', '.join(modules)}.")
    for name, module in modules.items():
        one = setup.of(name)
        if one.storage_dtype is not None:  # before offloading, or the large type would travel
            compute = getattr(torch, one.dtype) if one.dtype is not None else module.dtype
            module.enable_layerwise_casting(storage_dtype=getattr(torch, one.storage_dtype), compute_dtype=compute)
    vae = modules.get("vae")
    if vae is not None and setup.vae_tiling:
        vae.enable_tiling()
    if vae is not None and setup.vae_slicing:
        vae.enable_slicing()
    if all(setup.of(name).hold is Hold.MODEL_OFFLOAD for name in modules):
        device = torch.device(next(iter(setup.of(name).device for name in modules)))
        pipe.enable_model_cpu_offload(gpu_id=device.index or 0, device=device.type)
        return []
    return _one_by_one(pipe, modules, setup)


def _one_by_one(pipe: Any, modules: dict[str, torch.nn.Module], setup: Setup) -> list[Any]:
    main = _main_device(modules, setup)
    hooks: list[Any] = []
    sequence = pipe.model_cpu_offload_seq.split("->")
    # in the order of their work, so that each can send its predecessor away
    for name in sorted(modules, key=lambda n: sequence.index(n) if n in sequence else -1):
        module = modules[name]
        one = setup.of(name)
        device = torch.device(one.device)
        match one.hold:
            case Hold.RESIDENT:
                module.to(device)
            case Hold.BLOCK | Hold.LEAF:
                _offload_groups(name, module, one)
            case Hold.SEQUENTIAL:
                accelerate.cpu_offload(module, device, offload_buffers=len(module._parameters) > 0)
            case Hold.MODEL_OFFLOAD:
                previous = hooks[-1] if hooks else None
                _, hook = accelerate.cpu_offload_with_hook(module, device, prev_module_hook=previous)
                hooks.append(hook)
            case Hold.CPU:
                pass
        if hooks and one.hold is not Hold.MODEL_OFFLOAD:
            _send_away_before(module, hooks[-1])
        home = torch.device("cpu") if one.hold is Hold.CPU else device
        if home != main and one.hold in (Hold.RESIDENT, Hold.CPU):
            _bridge(module, home)
    if any(setup.of(name).hold is not Hold.RESIDENT or setup.of(name).device != str(main) for name in modules):
        _pin_execution_device(pipe, main)
    return hooks


def _main_device(modules: dict[str, torch.nn.Module], setup: Setup) -> torch.device:
    """Where latents and embeddings live: the device of the denoiser."""
    name = next((n for n in ("transformer", "unet") if n in modules), next(iter(modules)))
    one = setup.of(name)
    return torch.device("cpu") if one.hold is Hold.CPU else torch.device(one.device)


def _offload_groups(name: str, module: torch.nn.Module, one: ComponentSetup) -> None:
    options: dict[str, Any] = {}
    if one.block_modules is not None:
        options["block_modules"] = list(one.block_modules)
    if one.offload_to_disk:
        folder = Path(tempfile.gettempdir()) / "pocketreel-simulated" / name
        options["offload_to_disk_path"] = str(folder)  # nothing is written there: patches.SimulatedDisk
    apply_group_offloading(
        module,
        onload_device=torch.device(one.device),
        offload_device=torch.device("cpu"),
        offload_type="block_level" if one.hold is Hold.BLOCK else "leaf_level",
        num_blocks_per_group=one.num_blocks_per_group if one.hold is Hold.BLOCK else None,
        use_stream=one.use_stream,
        record_stream=one.record_stream,
        low_cpu_mem_usage=one.low_cpu_mem_usage,
        **options,
    )


def _bridge(module: torch.nn.Module, home: torch.device) -> None:
    """Inputs go to where the module is, outputs of `forward` back to where they came from: what `device_map` does.

    Hooks see `forward` only, but pipelines call a VAE's `decode`; its result may stay where it is.
    """
    hook = accelerate.hooks.AlignDevicesHook(execution_device=home, io_same_device=True, place_submodules=False)
    add_hook_to_module(module, hook)
    for method in ("encode", "decode"):
        if hasattr(module, method):
            setattr(module, method, _sending(getattr(module, method), home))


def _send_away_before(module: torch.nn.Module, hook: Any) -> None:
    """accelerate's hook goes when the next hooked component comes; beside components held otherwise it would stay."""

    def after(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            hook.offload()
            return stock(*args, **kwargs)

        return call

    for method in ("forward", "encode", "decode"):
        if hasattr(module, method):
            setattr(module, method, after(getattr(module, method)))


def _sending(stock: Callable[..., Any], home: torch.device) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return stock(*accelerate.utils.send_to_device(args, home), **accelerate.utils.send_to_device(kwargs, home))

    return call


def _pin_execution_device(pipe: Any, device: torch.device) -> None:
    """`_execution_device` is guessed by diffusers from any hook it finds; say it instead."""
    cls = type(pipe)
    pipe.__class__ = type(cls.__name__, (cls,), {"_execution_device": property(lambda _self: device)})

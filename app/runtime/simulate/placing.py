"""Hold the components of a simulated pipeline as a `Setup` says: with the program's own placement, where it can.

What it refuses on purpose is held with the libraries' own calls, to reproduce old figures and their traps: accelerate's
sequential offload, group offload to disk, `record_stream`. Then all components are held with the libraries' calls, on
one device.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
from diffusers.hooks import apply_group_offloading

from app.errors import PlanError
from app.runtime import placement
from app.runtime.simulate.values import ComponentSetup, Hold, Setup
from app.schema import Arrangement, Placement, Strategy

_STRATEGIES = {
    Hold.RESIDENT: Strategy.RESIDENT,
    Hold.MODEL_OFFLOAD: Strategy.MODEL_OFFLOAD,
    Hold.BLOCK: Strategy.BLOCK,
    Hold.LEAF: Strategy.LEAF,
    Hold.CPU: Strategy.CPU,
}


def apply(pipe: Any, setup: Setup) -> None:
    """Place every component.

    Raises:
        PlanError: a setup that cannot be held.
        torch.OutOfMemoryError: the weights alone do not fit.
    """
    modules = placement.modules_of(pipe)
    unknown = sorted(set(setup.components) - set(modules))
    if unknown:
        raise PlanError(f"{type(pipe).__name__} has no component {', '.join(unknown)}; it has {', '.join(modules)}.")
    vae: Any = modules.get("vae")
    if vae is not None and setup.vae_slicing:
        vae.enable_slicing()
    if any(_stock_only(setup.of(name)) for name in modules):
        _with_stock_calls(modules, setup)
        return
    placement.place(pipe, arrangement(modules, setup))


def arrangement(modules: dict[str, torch.nn.Module], setup: Setup) -> Arrangement:
    """The setup as a plan: without predictions."""
    main = setup.of(next((name for name in ("transformer", "unet") if name in modules), next(iter(modules))))
    return Arrangement(
        device="cpu" if main.hold is Hold.CPU else main.device,
        dtype="bfloat16",
        strategy=_STRATEGIES[main.hold],
        placements=tuple(_placement(name, module, setup.of(name)) for name, module in modules.items()),
        vae_tiling=setup.vae_tiling,
        predicted_ram_bytes=0,
    )


def _placement(name: str, module: Any, one: ComponentSetup) -> Placement:
    return Placement(
        component=name,
        strategy=_STRATEGIES[one.hold],
        device="cpu" if one.hold is Hold.CPU else one.device,
        dtype=one.dtype or str(module.dtype).removeprefix("torch."),
        weight_bytes=0,
        num_blocks_per_group=one.num_blocks_per_group if one.hold is Hold.BLOCK else None,
        use_stream=one.use_stream,
        low_cpu_mem_usage=one.low_cpu_mem_usage,
        storage_dtype=one.storage_dtype,
    )


# ------------------------------------------------------------------------------------------- the libraries' own calls


def _stock_only(one: ComponentSetup) -> bool:
    return one.hold is Hold.SEQUENTIAL or one.offload_to_disk or one.record_stream or one.block_modules is not None


def _with_stock_calls(modules: dict[str, torch.nn.Module], setup: Setup) -> None:
    vae: Any = modules.get("vae")
    if vae is not None and setup.vae_tiling:
        vae.enable_tiling()
    for name, module in modules.items():
        one = setup.of(name)
        device = torch.device(one.device)
        match one.hold:
            case Hold.RESIDENT:
                module.to(device)
            case Hold.BLOCK | Hold.LEAF:
                _offload_groups(name, module, one)
            case Hold.SEQUENTIAL:
                accelerate.cpu_offload(module, device, offload_buffers=len(module._parameters) > 0)
            case Hold.MODEL_OFFLOAD | Hold.CPU:
                raise PlanError(f"{name} cannot be held {one.hold} beside components that only the libraries can hold.")


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

"""How much of each memory a run may use: what is free, less what is left to others, within the preset's limits."""

from __future__ import annotations

from itertools import combinations
from typing import Final, NamedTuple

from app.errors import PlanError
from app.estimate import GPU_CONTEXT_BYTES
from app.presets import format_bytes
from app.schema import GIB, Backend, Gpu, Hardware, HardwarePreset

RAM_FLOOR_BYTES: Final = 1 * GIB
"""Left to the system: a PC that swaps for twenty minutes is what people hate most."""
PINNED_SHARE: Final = 0.5
"""Page-locked RAM is at most this share of what can be used: the system can neither move nor swap it."""
MAX_GPUS: Final = 4
"""Cards that one plan is spread over at most; more make the search long and the run no faster."""


class Budget(NamedTuple):
    """Bytes that may be used by memory: `cuda:N` (context included), `ram`, `pinned`; and why so much, in words."""

    bytes: dict[str, int]
    words: dict[str, str]


def usable_gpus(hardware: Hardware, preset: HardwarePreset) -> tuple[Gpu, ...]:
    """The cards that torch can drive and the preset allows; none is no mistake, unless the preset wants one.

    Raises:
        PlanError: the preset is for a GPU and there is none.
    """
    if preset.device == "cpu":
        return ()
    usable = tuple(gpu for gpu in hardware.gpus if gpu.backend in (Backend.CUDA, Backend.ROCM))
    if preset.device == "gpu" and not usable:
        raise PlanError(
            f"The preset {preset.title} wants a GPU and none was found. `pocketreel doctor` says why; "
            "the preset CPU works without one."
        )
    return usable


def gpu_sets(gpus: tuple[Gpu, ...], preset: HardwarePreset) -> tuple[tuple[Gpu, ...], ...]:
    """The sets of cards to plan for: all of them, or every choice of as many as the preset allows."""
    most = min(preset.max_gpus or MAX_GPUS, MAX_GPUS, len(gpus))
    return tuple(combinations(gpus, most)) if gpus else ()


def budget_of(hardware: Hardware, preset: HardwarePreset) -> Budget:
    """What the run may use. Never over: the RAM floor, other programs' VRAM, the preset's limits."""
    limits, words = {}, {}
    for gpu in hardware.gpus:
        name = f"cuda:{gpu.index}"
        limits[name] = gpu.free_bytes - preset.vram_keep_free_bytes
        words[name] = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
        if preset.vram_keep_free_bytes:
            words[name] += f", {format_bytes(preset.vram_keep_free_bytes)} left to other programs"
        if preset.vram_limit_bytes is not None and preset.vram_limit_bytes < limits[name]:
            limits[name] = preset.vram_limit_bytes
            words[name] += f", at most {format_bytes(preset.vram_limit_bytes)} by the preset {preset.title}"
        limits[name] = max(limits[name], 0)
    limits["ram"] = max(hardware.ram_available_bytes - RAM_FLOOR_BYTES, 0)
    words["ram"] = f"limit: {hardware.ram_limit.source}; {format_bytes(RAM_FLOOR_BYTES)} are left to the system"
    if preset.ram_limit_bytes is not None and preset.ram_limit_bytes < limits["ram"]:
        limits["ram"] = preset.ram_limit_bytes
        words["ram"] = f"limit: the preset {preset.title}"
    limits["pinned"] = int(limits["ram"] * PINNED_SHARE)
    words["pinned"] = f"{PINNED_SHARE:.0%} of the RAM that can be used"
    return Budget(limits, words)


def worth_using(gpus: tuple[Gpu, ...], budget: Budget) -> tuple[Gpu, ...]:
    """The cards on which more fits than a CUDA context."""
    return tuple(gpu for gpu in gpus if budget.bytes[f"cuda:{gpu.index}"] > GPU_CONTEXT_BYTES)

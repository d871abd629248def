"""What this machine has right now: GPUs, RAM and what limits it, swap, disks, CPU. No torch, no CUDA context.

    sources   where everything is read from; tests hand in a folder that looks like / and a fake NVML
    visible   CUDA_VISIBLE_DEVICES, as the driver and torch read it
    nvidia    NVML
    others    AMD (ROCm) and Intel (XPU) from sysfs, Apple (MPS) from sysctl
    memory    RAM: physical, cgroup v1 and v2, WSL, Windows' commit limit; swap; memory pressure
    machine   CPU, disks
    measured  what `pocketreel bench link` measured and keeps

What cannot be read becomes a sentence in `Hardware.notes`; nothing here raises because of the machine it runs on.
Not covered: GPUs of other makers.
"""

from __future__ import annotations

from pathlib import Path

from app.config import Settings, hub_folder
from app.hardware.machine import cpu_count, cpu_name, disk, system_name
from app.hardware.measured import Measured, read_measured
from app.hardware.memory import ram, swap
from app.hardware.nvidia import nvidia_gpus
from app.hardware.others import apple_gpus, intel_gpus, rocm_gpus
from app.hardware.sources import Sources
from app.quantization import installed
from app.schema import Disk, Gpu, Hardware

__all__ = ["Sources", "probe", "spill_folder"]


def probe(settings: Settings, sources: Sources | None = None) -> Hardware:
    """What this machine has at this moment. Never raises for something unreadable: see `Hardware.notes`.

    Takes some milliseconds without an NVIDIA driver, some tens with one.
    """
    here = sources if sources is not None else Sources()
    notes: list[str] = []
    memory = ram(here, notes)
    swap_total, swap_free = swap(here, notes)
    gpus = (
        *nvidia_gpus(here, memory, notes),
        *rocm_gpus(here, notes),
        *intel_gpus(here, memory, notes),
        *apple_gpus(here, memory, notes),
    )
    if not gpus:
        notes.append("No GPU that torch could use was found; everything runs on the CPU.")
    elif not all(gpu.verified for gpu in gpus):
        names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus if not gpu.verified))
        notes.append(f"Not verified: Pocketreel was never measured on {names}.")
    known = read_measured(settings, notes)
    return Hardware(
        system=system_name(here),
        cpu_name=cpu_name(here),
        cpu_count=cpu_count(here, notes),
        gpus=tuple(_with_link(gpu, known) for gpu in gpus),
        ram_total_bytes=memory.physical_bytes,
        ram_available_bytes=memory.available_bytes,
        ram_limit=memory.limit,
        swap_total_bytes=swap_total,
        swap_free_bytes=swap_free,
        memory_pressure=memory.pressure,
        packages=installed(),
        copy_bytes_per_second=known.copy_bytes_per_second,
        data_disk=_with_speed(disk(settings.data_dir, notes), known),
        spill_disk=_with_speed(disk(spill_folder(settings), notes), known),
        download_disk=_with_speed(disk(hub_folder(), notes), known),
        notes=tuple(dict.fromkeys(notes)),
    )


def spill_folder(settings: Settings) -> Path:
    """Where weights go that fit neither VRAM nor RAM. It may not exist yet."""
    return settings.data_dir / "spill"


def _with_link(gpu: Gpu, known: Measured) -> Gpu:
    link = known.links.get(gpu.uuid)
    if link is None:
        return gpu
    return gpu.model_copy(update={"pinned_bytes_per_second": link.pinned, "pageable_bytes_per_second": link.pageable})


def _with_speed(where: Disk, known: Measured) -> Disk:
    return where.model_copy(update={"read_bytes_per_second": known.disks.get(str(where.path))})

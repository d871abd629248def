"""AMD cards (ROCm), Intel GPUs (XPU) and Apple chips (MPS). Recognised, never measured: `verified` stays False.

Sources: the kernel's amdgpu documentation (mem_info_vram_total, mem_info_vram_used) and kfd topology
(/sys/class/kfd/kfd/topology/nodes/N/properties: simd_count, cpu_cores_count, drm_render_minor, gfx_target_version,
unique_id); i915's lmem_total_bytes and lmem_avail_bytes, xe's tileN/physical_vram_size_bytes; sysctl hw.memsize.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from app.hardware.memory import Ram
from app.hardware.nvidia import process_name
from app.hardware.sources import Sources
from app.hardware.visible import select
from app.schema import Backend, Gpu, GpuProcess

_KFD = "/sys/class/kfd/kfd"
_DRM = "/sys/class/drm"
_PCI_AMD, _PCI_INTEL = "0x1002", "0x8086"


def rocm_gpus(sources: Sources, notes: list[str]) -> tuple[Gpu, ...]:
    """AMD GPUs that ROCm can use, in its order, after ROCR_, HIP_ and CUDA_VISIBLE_DEVICES."""
    nodes = sources.path(f"{_KFD}/topology/nodes")
    found: list[Gpu] = []
    for node in _numbered(nodes, r"\d+"):
        text = sources.text(f"{_KFD}/topology/nodes/{node}/properties", notes) or ""
        properties = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
        if properties.get("simd_count", 0) == 0:
            continue  # a CPU
        gpu = _rocm_gpu(sources, node, properties, notes)
        if gpu is not None:
            found.append(gpu)
    if not found and any(
        sources.text(f"{_DRM}/{card}/device/vendor", []) == _PCI_AMD
        for card in _numbered(sources.path(_DRM), r"card\d+")
    ):
        notes.append("An AMD GPU is built in, but ROCm's kernel driver (kfd) does not show it; torch cannot use it so.")
    gpus = _visible(found, sources.environ.get("ROCR_VISIBLE_DEVICES"))
    hip = sources.environ.get("HIP_VISIBLE_DEVICES", sources.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = _visible(gpus, hip)
    if len(gpus) < len(found):
        notes.append(f"ROCR_, HIP_ or CUDA_VISIBLE_DEVICES hides {len(found) - len(gpus)} of {len(found)} AMD GPUs.")
    return tuple(gpu.model_copy(update={"index": index}) for index, gpu in enumerate(gpus))


def _visible(gpus: list[Gpu], value: str | None) -> list[Gpu]:
    return [gpus[i] for i in select(value, [(gpu.uuid,) for gpu in gpus])]


def _rocm_gpu(sources: Sources, node: str, properties: dict[str, int], notes: list[str]) -> Gpu | None:
    device = f"{_DRM}/renderD{properties.get('drm_render_minor', 0)}/device"
    version = properties.get("gfx_target_version", 0)
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    gfx = f"gfx{major}{minor:x}{stepping:x}"
    name = sources.text(f"{device}/product_name", notes) or f"AMD GPU ({gfx})"
    total = sources.number(f"{device}/mem_info_vram_total", notes)
    if total is None:
        notes.append(f"{name} does not tell its memory, so it is left out.")
        return None
    used = sources.number(f"{device}/mem_info_vram_used", notes)
    if used is None:
        notes.append(f"{name} does not tell how much of its memory is in use; all of it counts as free.")
    gpu_id = sources.text(f"{_KFD}/topology/nodes/{node}/gpu_id", notes) or ""
    return Gpu(
        index=0,
        uuid=f"GPU-{properties.get('unique_id', 0):016x}",
        name=name,
        backend=Backend.ROCM,
        compute_capability=(major, minor),
        total_bytes=total,
        free_bytes=max(0, total - (used or 0)),
        processes=tuple(_rocm_processes(sources, gpu_id, notes)),
        driver=sources.text("/sys/module/amdgpu/version", notes),
        pcie_generation=_generation(sources.text(f"{device}/max_link_speed", notes)),
        pcie_width=_width(sources.text(f"{device}/current_link_width", notes)),
        integrated=properties.get("cpu_cores_count", 0) > 0,
    )


def _rocm_processes(sources: Sources, gpu_id: str, notes: list[str]) -> list[GpuProcess]:
    found = []
    for pid in _numbered(sources.path(f"{_KFD}/proc"), r"\d+"):
        used = sources.number(f"{_KFD}/proc/{pid}/vram_{gpu_id}", notes)
        if used and int(pid) != sources.pid:
            name = process_name(sources, int(pid)) or f"unknown program (process {pid})"
            found.append(GpuProcess(pid=int(pid), name=name, used_bytes=used))
    return sorted(found, key=lambda process: -(process.used_bytes or 0))


def intel_gpus(sources: Sources, ram: Ram, notes: list[str]) -> tuple[Gpu, ...]:
    """Intel GPUs of the kernel's i915 and xe drivers, in the order of their cards."""
    gpus: list[Gpu] = []
    for card in _numbered(sources.path(_DRM), r"card\d+"):
        device = f"{_DRM}/{card}/device"
        if sources.text(f"{device}/vendor", notes) != _PCI_INTEL:
            continue
        total = sources.number(f"{_DRM}/{card}/lmem_total_bytes", notes) or _tiles(sources, device, notes)
        free = sources.number(f"{_DRM}/{card}/lmem_avail_bytes", notes)
        identity = sources.text(f"{device}/device", notes) or "unknown"
        name = f"Intel {'Arc or Data Center GPU' if total else 'integrated graphics'} ({identity})"
        if total and free is None:
            notes.append(f"{name}: the driver does not tell how much memory is in use; all of it counts as free.")
        gpus.append(
            Gpu(
                index=len(gpus),
                uuid=f"XPU-{_address(sources, device)}",
                name=name,
                backend=Backend.XPU,
                total_bytes=total or ram.physical_bytes,
                free_bytes=min(total, total if free is None else free) if total else ram.available_bytes,
                pcie_generation=_generation(sources.text(f"{device}/max_link_speed", notes)) if total else None,
                pcie_width=_width(sources.text(f"{device}/current_link_width", notes)) if total else None,
                integrated=not total,
            )
        )
    if gpus and sources.environ.get("ZE_AFFINITY_MASK"):
        notes.append("ZE_AFFINITY_MASK is set: torch may see fewer Intel GPUs than are listed here.")
    return tuple(gpus)


def _tiles(sources: Sources, device: str, notes: list[str]) -> int:
    """VRAM as the xe driver tells it, summed over the card's tiles; 0 where it tells none (integrated)."""
    tiles = _numbered(sources.path(device), r"tile\d+")
    return sum(sources.number(f"{device}/{tile}/physical_vram_size_bytes", notes) or 0 for tile in tiles)


def apple_gpus(sources: Sources, ram: Ram, notes: list[str]) -> tuple[Gpu, ...]:
    """The GPU of an Apple chip. It has no memory of its own: total and free are the machine's."""
    if sources.system != "Darwin" or sources.machine != "arm64":
        return ()
    try:
        total = int(sources.sysctl("hw.memsize"))
        name = sources.sysctl("machdep.cpu.brand_string")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        notes.append(f"sysctl does not tell this Mac's chip and memory ({error}).")
        total, name = ram.physical_bytes, "Apple GPU"
    return (
        Gpu(
            index=0,
            uuid="MPS-0",
            name=name,
            backend=Backend.MPS,
            total_bytes=total,
            free_bytes=min(ram.available_bytes, total),
            integrated=True,
        ),
    )


def _numbered(folder: Path, pattern: str) -> list[str]:
    """Names in a folder that fit, by their number; none when it is not there or closed to us."""
    try:
        names = [child.name for child in folder.iterdir() if re.fullmatch(pattern, child.name)]
    except OSError:
        return []
    return sorted(names, key=lambda name: int(re.sub(r"\D", "", name)))


def _address(sources: Sources, device: str) -> str:
    """The PCI address, e.g. 0000:03:00.0: the name of the folder that the link `device` leads to."""
    return sources.path(device).resolve().name


def _generation(speed: str | None) -> int | None:
    """PCIe generation from a link speed such as `16.0 GT/s PCIe`."""
    found = re.match(r"([0-9.]+) GT/s", speed or "")
    return {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(float(found[1])) if found else None


def _width(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) > 0 else None

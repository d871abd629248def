"""What the machine lacks or holds back: RAM and its limits, swap, disks, VRAM in use by others, drivers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from app.config import Settings
from app.doctor.finding import DRIVERS, Finding, nvidia_gpus, ok, on_windows, problem, set_variable, warning
from app.hardware.nvidia import DRIVER_MISSING, OWN_WORKER
from app.presets import format_bytes
from app.schema import GIB, Gpu, Hardware

_LITTLE_DISK: Final = 1 * GIB
_SOME_DISK: Final = 20 * GIB
"""A model of two billion parameters with its text encoders takes about 20 GiB on disk (facts/memory.md)."""
_LITTLE_RAM: Final = 16 * GIB
_SWAP_WITH_LITTLE_RAM: Final = 8 * GIB
_HELD_BY_OTHERS: Final = 0.15
_HIGH_PRESSURE: Final = 10.0
_DESKTOP: Final = re.compile(
    r"xorg|xwayland|gnome-shell|kwin_\w+|plasmashell|sway|hyprland|mutter|cinnamon|xfwm4|weston"
    r"|(dwm|explorer|csrss|\w*host|lockapp|systemsettings)\.exe",
    re.IGNORECASE,
)
"""Parts of the desktop: they hold VRAM, but ending them ends the session."""


def examine_machine(settings: Settings, hardware: Hardware) -> Iterable[Finding]:
    """Checks on what the probe found; nothing is read anew."""
    yield from _ram(hardware)
    yield from _swap(hardware)
    yield from _disk(settings, hardware)
    for gpu in hardware.gpus:
        yield from _held_by_others(gpu, windows=on_windows(hardware))
    if DRIVER_MISSING in hardware.notes:
        yield problem(
            "An NVIDIA card is built in, but its driver does not run",
            "Without the driver nothing can use the card, so everything runs on the CPU.",
            DRIVERS,
        )
    elif not hardware.gpus:
        yield ok("No GPU: everything runs on the CPU.")
    elif nvidia_gpus(hardware):
        yield ok(f"NVIDIA's driver {nvidia_gpus(hardware)[0].driver or 'of unknown version'} answers.")


def _ram(hardware: Hardware) -> Iterable[Finding]:
    limit = hardware.ram_limit
    total, available = format_bytes(hardware.ram_total_bytes), format_bytes(hardware.ram_available_bytes)
    if hardware.memory_pressure is not None and hardware.memory_pressure >= _HIGH_PRESSURE:
        yield warning(
            f"The machine is short of RAM right now ({hardware.memory_pressure:.0f} % of the time something waits)",
            "Programs slow each other down. This lists the largest; close what is not needed.",
            "ps axo rss,comm --sort=-rss | head",
        )
    if "WSL" in limit.source:
        # by default WSL takes half of Windows' RAM, so what it sees is half of what is there
        there = hardware.ram_total_bytes * 2 // GIB
        yield warning(
            f"Windows gives this Linux {total} of RAM",
            "By default WSL sees half of what is built in. Paste this into the file .wslconfig in your Windows user "
            f"folder (the number assumes {there} GB built in), then run `wsl --shutdown`.",
            f"[wsl2]\nmemory={max(1, there * 3 // 4)}GB\nswap={max(16, there // 2)}GB",
        )
    elif limit.source.startswith("cgroup") and limit.value_bytes < hardware.ram_total_bytes * 0.9:
        yield warning(
            f"RAM is limited to {format_bytes(limit.value_bytes)} of {total}",
            f"Set by {limit.source}. Who needs more is ended by the kernel (exit 137). This lifts it.",
            _lift_cgroup(limit.source),
        )
    elif limit.source.startswith("Windows"):
        yield warning(
            f"Windows has only {available} left to promise, less than the free RAM",
            'RAM and pagefile together are nearly used up; loading then ends with "os error 1455". In the window that '
            "this opens: Advanced, Virtual memory, let Windows manage the size.",
            "SystemPropertiesPerformance.exe",
        )
    else:
        yield ok(f"RAM: {available} of {total} available.")


def _lift_cgroup(source: str) -> str:
    found = re.search(r"([^/]+\.(?:service|scope|slice))/memory\.", source)
    if found and not found[1].startswith("docker-"):
        user = "--user " if "user@" in source else ""
        privilege = "" if user else "sudo "
        return f"{privilege}systemctl {user}set-property --runtime {found[1]} MemoryMax=infinity MemoryHigh=infinity"
    return 'docker update --memory 0 --memory-swap 0 "$(hostname)"'


def _swap(hardware: Hardware) -> Iterable[Finding]:
    swap, ram = hardware.swap_total_bytes, hardware.ram_total_bytes
    if on_windows(hardware):
        if swap < ram:
            yield warning(
                f"The pagefile is small ({format_bytes(swap)})",
                'Windows promises memory before it is used; with a small pagefile loading ends with "os error 1455". '
                "In the window that this opens: Advanced, Virtual memory, let Windows manage the size.",
                "SystemPropertiesPerformance.exe",
            )
    elif hardware.system.startswith("Linux") and not hardware.ram_limit.source.startswith("cgroup"):
        short = ram < _LITTLE_RAM and swap < _SWAP_WITH_LITTLE_RAM
        if short and "WSL" not in hardware.system:  # there the lines for .wslconfig bring swap along
            yield warning(
                f"Little RAM ({format_bytes(ram)}) and {format_bytes(swap)} of swap",
                "The kernel ends a program that needs more than both. This makes a swap file of 16 GiB.",
                "sudo fallocate -l 16G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && "
                "sudo swapon /swapfile",
            )


def _disk(settings: Settings, hardware: Hardware) -> Iterable[Finding]:
    free = hardware.data_disk.free_bytes
    elsewhere = set_variable("POCKETREEL_DATA_DIR", "PATH_ON_A_LARGER_DISK", windows=on_windows(hardware))
    if hardware.data_disk.total_bytes == 0:
        yield problem(
            f"The disk of {settings.data_dir} cannot be read",
            "Pocketreel keeps its history and videos there. This chooses another folder.",
            elsewhere,
        )
    elif free < _LITTLE_DISK:
        yield problem(
            f"Only {format_bytes(free)} free where videos and history go ({settings.data_dir})",
            "A run could not be saved. This chooses another folder.",
            elsewhere,
        )
    elif free < _SOME_DISK:
        yield warning(
            f"{format_bytes(free)} free where videos and history go ({settings.data_dir})",
            "Enough for videos, too little for weights that are spilled to the disk. This chooses another folder.",
            elsewhere,
        )
    else:
        yield ok(f"{format_bytes(free)} free in {settings.data_dir}.")


def _held_by_others(gpu: Gpu, *, windows: bool) -> Iterable[Finding]:
    held = max(0, gpu.total_bytes - gpu.free_bytes)
    others = [process for process in gpu.processes if process.name != OWN_WORKER]
    closable = [process for process in others if not _DESKTOP.fullmatch(process.name)]
    if gpu.integrated or not closable or held < gpu.total_bytes * _HELD_BY_OTHERS:
        return
    named = [f"{p.name} {format_bytes(p.used_bytes)}" if p.used_bytes is not None else p.name for p in others[:5]]
    if len(others) > 5:
        named.append(f"{len(others) - 5} more")
    largest = closable[0]
    yield warning(
        f"{format_bytes(held)} of {format_bytes(gpu.total_bytes)} on {gpu.name} are in use: {', '.join(named)}",
        f"Plans are made for what is left. This asks {largest.name} to end, so save your work in it first.",
        f"taskkill /PID {largest.pid}" if windows else f"kill {largest.pid}",
    )

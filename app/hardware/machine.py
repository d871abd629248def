"""CPU, disks and the name of the system."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

from app.hardware.memory import cgroup_folders, is_wsl
from app.hardware.sources import Sources
from app.schema import Disk


def system_name(sources: Sources) -> str:
    """`Linux 6.8.0 x86_64`, `Linux 5.15 x86_64 (WSL)`, `Windows 11 AMD64`, ..."""
    release = sources.text("/proc/sys/kernel/osrelease", []) if sources.system == "Linux" else None
    name = f"{sources.system} {release or platform.release()} {sources.machine}"
    return f"{name} (WSL)" if is_wsl(sources) else name


def cpu_name(sources: Sources) -> str:
    """The CPU's name as its maker wrote it, else the architecture."""
    text = sources.text("/proc/cpuinfo", []) or ""
    found = re.search(r"^(?:model name|Model|Hardware|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return re.sub(r"\s+", " ", found[1]).strip()
    if sources.system == "Darwin":
        try:
            return sources.sysctl("machdep.cpu.brand_string")
        except (OSError, subprocess.SubprocessError):  # a name is nice to have; the architecture will do
            return sources.machine
    return platform.processor() or sources.machine or "unknown CPU"


def cpu_count(sources: Sources, notes: list[str]) -> int:
    """CPUs that this process can keep busy: its affinity, and the CPU time its cgroups grant, rounded down."""
    count = max(1, sources.affinity())
    for version, folder in cgroup_folders(sources, "cpu", notes):
        quota = _quota(sources, version, folder, notes)
        if quota is not None and quota < count:
            count = max(1, int(quota))
            notes.append(f"CPU time is limited to {quota:g} CPUs by cgroup v{version} ({folder}).")
    return count


def _quota(sources: Sources, version: int, folder: str, notes: list[str]) -> float | None:
    """CPUs' worth of time per period; None without a limit."""
    if version == 2:
        quota, _, period = (sources.text(f"{folder}/cpu.max", notes) or "max").partition(" ")
    else:
        quota = sources.text(f"{folder}/cpu.cfs_quota_us", notes) or "-1"
        period = sources.text(f"{folder}/cpu.cfs_period_us", notes) or ""
    if not (quota.isdecimal() and period.isdecimal() and int(period) > 0):
        return None  # "max" in v2, -1 in v1
    return int(quota) / int(period)


def disk(folder: Path, notes: list[str]) -> Disk:
    """Room where the folder lies, or would lie: a folder that does not exist yet counts at its nearest parent."""
    place = folder
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        usage = shutil.disk_usage(place)
    except OSError as error:
        notes.append(f"The disk of {folder} could not be read ({error.strerror or error}), so no room is counted on.")
        return Disk(path=folder, free_bytes=0, total_bytes=0)
    return Disk(path=folder, free_bytes=usage.free, total_bytes=usage.total)

"""RAM that may really be used: the smallest of what is free and what each limit on the way leaves.

Sources: /proc/meminfo; https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.high, memory.current,
memory.stat) and cgroup-v1/memory.html (memory.limit_in_bytes, memory.usage_in_bytes, memory.stat);
https://docs.kernel.org/accounting/psi.html. Page cache that nothing has touched for a while (inactive_file) counts as
available: the kernel drops it before it ends a process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from app.hardware.sources import Sources
from app.schema import Limit


@dataclass(frozen=True)
class Ram:
    """RAM in bytes. `limit` is what is shortest at the moment: its size, and in words what sets it."""

    physical_bytes: int
    available_bytes: int
    limit: Limit
    pressure: float | None


@dataclass(frozen=True)
class _Candidate:
    limit: Limit
    available_bytes: int


def ram(sources: Sources, notes: list[str]) -> Ram:
    """Physical RAM, what is available of it, and the limit that is binding now."""
    total, available = _physical(sources, notes)
    name = "physical memory"
    if is_wsl(sources):
        name = r"the WSL virtual machine (memory= in %UserProfile%\.wslconfig)"
        notes.append(
            "This is Linux inside Windows (WSL): it sees only the RAM that .wslconfig gives it, half by default."
        )
    candidates = [
        _Candidate(Limit(value_bytes=total, source=name), available),
        *_cgroup_limits(sources, notes),
        *_commit_limit(sources, notes),
    ]
    tightest = min(candidates, key=lambda candidate: candidate.available_bytes)
    return Ram(total, tightest.available_bytes, tightest.limit, _pressure(sources, notes))


def swap(sources: Sources, notes: list[str]) -> tuple[int, int]:
    """Total and free bytes of swap, or of the pagefile."""
    fields = _meminfo(sources, notes)
    if "SwapTotal" in fields:
        return fields["SwapTotal"], fields.get("SwapFree", 0)
    try:
        return sources.swap_memory()
    except (OSError, RuntimeError) as error:
        notes.append(f"Swap could not be read ({error}).")
        return 0, 0


def is_wsl(sources: Sources) -> bool:
    """Linux in the virtual machine of Windows: its kernel says so in its name, a self-made one has WSLInterop."""
    if sources.system != "Linux":
        return False
    release = sources.text("/proc/sys/kernel/osrelease", []) or ""
    return "microsoft" in release.lower() or sources.path("/proc/sys/fs/binfmt_misc/WSLInterop").exists()


def cgroup_folders(sources: Sources, controller: str, notes: list[str]) -> Iterable[tuple[int, str]]:
    """(version, folder) of this process's cgroup and all above it that have that controller, the innermost first.

    The folder in /proc/self/cgroup counts from the root of the hierarchy; a container often sees only a part of it,
    which mountinfo tells in its fourth field (man 5 proc_pid_mountinfo, man 7 cgroups).
    """
    groups = sources.text("/proc/self/cgroup", notes) or ""
    mounts = sources.text("/proc/self/mountinfo", notes) or ""
    for line in groups.splitlines():
        number, controllers, inside = (*line.split(":", 2), "", "")[:3]
        unified = number == "0" and controllers == ""
        if not unified and controller not in controllers.split(","):
            continue
        for root, mount_point, kind, options in _cgroup_mounts(mounts):
            fits = kind == "cgroup2" if unified else kind == "cgroup" and controller in options.split(",")
            if fits:
                for folder in _upwards(inside, root, mount_point):
                    yield (2 if unified else 1), folder
                break  # the same hierarchy mounted twice says the same twice


def _upwards(inside: str, root: str, mount_point: str) -> Iterable[str]:
    """Folders from the process's own cgroup up to the mount point."""
    relative = PurePosixPath(inside)
    if ".." in relative.parts:  # outside of what this namespace shows: only the mount point itself is known
        relative = PurePosixPath(root)
    if root != "/" and (relative == PurePosixPath(root) or PurePosixPath(root) in relative.parents):
        relative = relative.relative_to(root)
    parts = [part for part in relative.parts if part != "/"]
    for count in range(len(parts), -1, -1):
        yield "/".join([mount_point.rstrip("/"), *parts[:count]])


def _cgroup_mounts(mountinfo: str) -> Iterable[tuple[str, str, str, str]]:
    """(root, mount point, cgroup or cgroup2, super options) of each cgroup mount."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 5 and len(right) >= 3 and right[0] in ("cgroup", "cgroup2"):
            root, mount_point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), part) for part in left[3:5])
            yield root, mount_point, right[0], right[2]


def _cgroup_limits(sources: Sources, notes: list[str]) -> Iterable[_Candidate]:
    for version, folder in cgroup_folders(sources, "memory", notes):
        files = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        usage, cache = (
            ("memory.current", "inactive_file") if version == 2 else ("memory.usage_in_bytes", "total_inactive_file")
        )
        for file in files:
            text = sources.text(f"{folder}/{file}", notes)
            if text is None or text == "max":  # v1 writes "no limit" as nearly 2**63, which is never the smallest
                continue
            limit = sources.number(f"{folder}/{file}", notes)
            if limit is None:
                continue
            used = sources.number(f"{folder}/{usage}", notes)
            if used is None:
                notes.append(f"{folder}/{usage} is missing, so the limit in {file} counts as wholly free.")
                used = 0
            droppable = _stat(sources.text(f"{folder}/memory.stat", notes) or "").get(cache, 0)
            held = max(0, used - droppable)
            source = f"cgroup v{version} ({folder}/{file})"
            yield _Candidate(Limit(value_bytes=limit, source=source), max(0, limit - held))


def _commit_limit(sources: Sources, notes: list[str]) -> Iterable[_Candidate]:
    try:
        found = sources.commit()
    except OSError as error:
        notes.append(f"Windows' commit limit could not be read ({error}).")
        return
    if found is not None:
        yield _Candidate(Limit(value_bytes=found[0], source="Windows' commit limit (RAM and pagefile)"), found[1])


def _physical(sources: Sources, notes: list[str]) -> tuple[int, int]:
    fields = _meminfo(sources, notes)
    if "MemTotal" in fields:
        available = fields.get("MemAvailable")
        if available is None:  # kernels before 3.14, and some sandboxes
            available = fields.get("MemFree", 0) + fields.get("Cached", 0) + fields.get("Buffers", 0)
            notes.append("The kernel does not tell MemAvailable; free memory and page cache were added up instead.")
        return fields["MemTotal"], min(available, fields["MemTotal"])
    try:
        return sources.virtual_memory()
    except (OSError, RuntimeError) as error:
        notes.append(f"RAM could not be read ({error}), so none is counted on.")
        return 0, 0


def _meminfo(sources: Sources, notes: list[str]) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    text = sources.text("/proc/meminfo", notes) or ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _stat(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def _pressure(sources: Sources, notes: list[str]) -> float | None:
    """Percent of the last ten seconds in which something waited for memory; None where the kernel does not count it."""
    text = sources.text("/proc/pressure/memory", notes)
    found = re.search(r"^some avg10=([0-9.]+)", text or "", re.MULTILINE)
    return float(found[1]) if found else None

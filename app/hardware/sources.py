"""Where the probe reads from. A test builds a folder that looks like / and hands it in as `root`."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil


def _import_nvml() -> Any:
    return importlib.import_module("pynvml")


def _sysctl(name: str) -> str:
    """One value of macOS' sysctl.

    Raises:
        OSError, subprocess.SubprocessError: no such program or value.
    """
    done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()


def _affinity() -> int:
    """CPUs this process may run on, as os.process_cpu_count of Python 3.13."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _virtual_memory() -> tuple[int, int]:
    found = psutil.virtual_memory()
    return found.total, found.available


def _swap_memory() -> tuple[int, int]:
    found = psutil.swap_memory()
    return found.total, found.free


if sys.platform == "win32":

    class _MemoryStatus(ctypes.Structure):
        """MEMORYSTATUSEX of Windows' API."""

        _fields_ = (
            ("dwLength", ctypes.c_uint32),
            ("dwMemoryLoad", ctypes.c_uint32),
            ("ullTotalPhys", ctypes.c_uint64),
            ("ullAvailPhys", ctypes.c_uint64),
            ("ullTotalPageFile", ctypes.c_uint64),
            ("ullAvailPageFile", ctypes.c_uint64),
            ("ullTotalVirtual", ctypes.c_uint64),
            ("ullAvailVirtual", ctypes.c_uint64),
            ("ullAvailExtendedVirtual", ctypes.c_uint64),
        )

    def _commit() -> tuple[int, int] | None:
        """Bytes of the commit limit (RAM and pagefile) and what is left of it.

        Raises:
            OSError: Windows does not tell.
        """
        status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            raise ctypes.WinError()
        return int(status.ullTotalPageFile), int(status.ullAvailPageFile)

else:

    def _commit() -> tuple[int, int] | None:
        """Only Windows has a commit limit that is lower than what there is."""
        return None


@dataclass(frozen=True)
class Sources:
    """Everything outside this program that the probe asks. The defaults are the real machine."""

    root: Path = Path("/")
    """/proc and /sys are read below it."""
    system: str = field(default_factory=platform.system)
    machine: str = field(default_factory=platform.machine)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    pid: int = field(default_factory=os.getpid)
    nvml: Callable[[], Any] = _import_nvml
    """Returns the module pynvml, or raises ImportError."""
    sysctl: Callable[[str], str] = _sysctl
    affinity: Callable[[], int] = _affinity
    virtual_memory: Callable[[], tuple[int, int]] = _virtual_memory
    """Total and available bytes, where there is no /proc/meminfo."""
    swap_memory: Callable[[], tuple[int, int]] = _swap_memory
    commit: Callable[[], tuple[int, int] | None] = _commit

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str, notes: list[str]) -> str | None:
        """The file's text; None when there is no such file, and when it cannot be read, which is noted."""
        try:
            return self.path(absolute).read_text("utf-8", errors="replace").strip("\0\n ")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            notes.append(f"{absolute} could not be read ({error.strerror or error}).")
            return None

    def number(self, absolute: str, notes: list[str]) -> int | None:
        """The file's whole number of 0 or more; None when there is none. Something else is noted."""
        text = self.text(absolute, notes)
        if text is None:
            return None
        try:
            number = int(text, 0)
        except ValueError:
            number = -1
        if number < 0:
            notes.append(f"{absolute} holds {text[:40]!r} where a number was expected.")
            return None
        return number

"""What a stage really used: seconds, peak RAM, peak VRAM by device, bytes read and written.

Peak RAM is the worker's resident set. On Linux the kernel keeps the exact peak and lets it be reset per stage
(`/proc/self/clear_refs`, see proc(5)); elsewhere it is sampled every 50 ms and a shorter spike can be missed.
Not counted: ffmpeg, a process of its own (some 50 MB), and pages that only the disk cache holds.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from app.schema import Progress, Stage, StageReport

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_SAMPLE_SECONDS = 0.05


def is_ram_error(error: BaseException) -> bool:
    """Whether host memory ran out, in the words of Python, of torch on Linux and Windows, and of Windows itself."""
    said = str(error)
    words = ("an't allocate memory", "annot allocate memory", "CPUAllocator: not enough memory", "os error 1455")
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, MemoryError) or any(word in said for word in words)


def is_vram_error(error: BaseException) -> bool:
    """Whether a card's memory ran out, in torch's words and in those of the libraries that it calls."""
    words = (
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "HIP out of memory",
    )
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def is_driver_error(error: BaseException) -> bool:
    """Whether a card or its driver failed: this process cannot use it any more, a new one often can."""
    words = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "HIP error", "unspecified launch failure")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


class RamPeak:
    """Peak resident bytes of this process since the last `reset`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._sampled = 0
        self._exact = self._reset_kernel_peak()
        if not self._exact:
            threading.Thread(target=self._sample, name="ram-peak", daemon=True).start()

    def reset(self) -> None:
        with self._lock:
            self._sampled = self.now()
        if self._exact:
            self._reset_kernel_peak()

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    def read(self) -> int:
        if self._exact:
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return max(self._sampled, self.now())

    @staticmethod
    def _reset_kernel_peak() -> bool:
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:  # not Linux, or a container that forbids it
            return False
        return True

    def _sample(self) -> None:
        while True:
            with self._lock:
                self._sampled = max(self._sampled, self.now())
            time.sleep(_SAMPLE_SECONDS)


@cache
def ram_peak() -> RamPeak:
    """The one of this process: where it samples, it has a thread."""
    return RamPeak()


class StageClock:
    """Goes through the stages in order and keeps a report of each; `enter` ends the one before."""

    def __init__(self, on_progress: Callable[[Progress], None], *, started: float | None = None) -> None:
        self.reports: list[StageReport] = []
        self._on_progress = on_progress
        self._ram = ram_peak()
        self._process = psutil.Process()
        self._stage: Stage | None = None
        self._began = started if started is not None else time.monotonic()
        self._steps: list[float] = []
        self._io = self._disk_bytes()

    @property
    def stage(self) -> Stage | None:
        return self._stage

    def enter(self, stage: Stage, total: int = 0) -> None:
        """Begin `stage` (a second call for the same stage is ignored). `total` is its number of steps, 0 if none."""
        if stage is self._stage:
            return
        if self._stage is not None:
            self.close()
            self._began = time.monotonic()
        self._stage = stage
        self._steps = [time.monotonic()]
        self._ram.reset()
        self._io = self._disk_bytes()
        for index in _cuda_devices():
            torch.cuda.reset_peak_memory_stats(index)
        self._on_progress(Progress(stage=stage, step=0, total=total))

    def step(self, done: int, total: int) -> None:
        """`done` of `total` steps of the present stage have ended."""
        if self._stage is None:
            return
        done = min(done, total)  # schedulers of second order call back more often than there are steps
        self._steps.append(time.monotonic())
        eta = None
        if len(self._steps) > 2:
            recent = self._steps[-6:]
            eta = (recent[-1] - recent[0]) / (len(recent) - 1) * (total - done)
        self._on_progress(Progress(stage=self._stage, step=done, total=total, eta_seconds=eta))

    def close(self) -> None:
        """End the present stage, if any; its figures say how far it came."""
        if self._stage is None:
            return
        allocated, reserved = {}, {}
        for index in _cuda_devices():
            torch.cuda.synchronize(index)  # the stage ends when its kernels have, not when they were queued
            allocated[f"cuda:{index}"] = torch.cuda.max_memory_allocated(index)
            reserved[f"cuda:{index}"] = torch.cuda.max_memory_reserved(index)
        before, after = self._io, self._disk_bytes()
        self.reports.append(
            StageReport(
                stage=self._stage,
                seconds=time.monotonic() - self._began,
                peak_ram_bytes=self._ram.read(),
                peak_vram_allocated_bytes=allocated,
                peak_vram_reserved_bytes=reserved,
                read_bytes=None if before is None or after is None else after[0] - before[0],
                written_bytes=None if before is None or after is None else after[1] - before[1],
            )
        )
        self._stage = None

    def _disk_bytes(self) -> tuple[int, int] | None:
        with suppress(psutil.Error, AttributeError, OSError):  # not counted on macOS and in some containers
            counters = self._process.io_counters()
            return counters.read_bytes, counters.write_bytes
        return None


def _cuda_devices() -> range:
    """Devices that this process uses; asking for statistics must not wake a GPU for a run on the CPU."""
    return range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)  # type: ignore[no-untyped-call]

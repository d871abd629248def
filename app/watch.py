"""What the parent watches a run for: its time limits, progress that has stopped, and RAM that runs out.

All of it from outside, so that it holds whatever the worker does. A run counts as moving while stages or steps end; as
long as no usual step is known (loading, decoding, a first step) also while its process computes, reads or writes: there
a loop without an end is left to the time limits. A computer that sleeps does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from app import events
from app.hardware.memory import ram
from app.hardware.sources import Sources
from app.schema import ErrorKind, Progress, Stage

LOOK_SECONDS = 1.0
"""Between two looks at the system."""
LOW_LOOKS = 3
"""So many looks in a row must find RAM short: a moment's shortage passes."""
MOVING_BYTES, BUSY_SHARE = 1 << 20, 0.1
"""Read or written, or of a core used, between two looks: it goes on. Counted where no usual step is known."""
ASLEEP_SECONDS = 60.0
"""So long between two looks the computer slept."""
CAUSE_SECONDS = 1.0


def available_ram() -> int:
    """Bytes that this process may still take, by the tightest limit."""
    return ram(Sources(), []).available_bytes


class Watch:
    """Over one run. `look` says what is wrong, if anything is."""

    def __init__(
        self,
        run: events.Run,
        pid: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        available: Callable[[], int] = available_ram,
    ) -> None:
        self.progress = Progress(stage=Stage.LOAD)
        """Where the run is, as far as it has told."""
        self._run, self._pid, self._clock, self._available = run, pid, clock, available
        self._began = self._stage_began = self._moved = self._step_began = self._looked = clock()
        self._steps: list[float] = []
        self._low = 0
        self._seen = _activity(pid)

    def saw(self, progress: Progress) -> None:
        """The worker told where it is."""
        now = self._clock()
        if progress.stage is not self.progress.stage:
            self._stage_began, self._steps = now, []
        elif progress.step == self.progress.step + 1:  # after a resume the first one tells many at once
            self._steps.append(now - self._step_began)
        self.progress, self._step_began, self._moved = progress, now, now

    def look(self) -> tuple[ErrorKind, str] | None:
        """What ends the run now, with words for the person; None while all is well."""
        now, limits, stage = self._clock(), self._run.limits, self.progress.stage
        if now - self._looked > ASLEEP_SECONDS:  # on Windows this clock runs on while the computer sleeps
            self._forgive(now - self._looked)
        whole = self._run.request.timeout_seconds
        if limits.spent_seconds + now - self._began > whole:
            return ErrorKind.TIMEOUT, (
                f"The time limit of {whole:g} s passed during the stage {stage}, so the run was stopped. Resume it "
                "(it gets as long again), or choose fewer steps, fewer frames or a smaller size."
            )
        own = limits.stage_seconds.get(stage)
        if own is not None and now - self._stage_began > own:
            return ErrorKind.TIMEOUT, (
                f"The stage {stage} took longer than its time limit of {own:g} s (stage_timeout_seconds in "
                "config.toml), so the run was stopped. Raise that limit and resume it."
            )
        if now - self._looked < LOOK_SECONDS:
            return None
        self._looked = now
        return self._look_at_ram() or self._look_at_progress(now)

    def _forgive(self, seconds: float) -> None:
        self._began += seconds
        self._stage_began += seconds
        self._step_began += seconds
        self._moved += seconds
        self._looked += seconds

    def patience(self) -> float | None:
        """Seconds without progress that are too many now; None: this stage is not watched."""
        limits = self._run.limits
        least = limits.stall_seconds.get(self.progress.stage)
        if least is None:
            return None
        return max(least, limits.stall_factor * statistics.median(self._steps)) if self._steps else least

    def _look_at_ram(self) -> tuple[ErrorKind, str] | None:
        floor = self._run.limits.ram_floor_bytes
        available = self._available() if floor else 0
        self._low = self._low + 1 if floor and available < floor else 0
        if self._low < LOW_LOOKS:
            return None
        return ErrorKind.RAM, (
            f"Only {available / 2**20:.0f} MiB of RAM were left in the whole system during the stage "
            f"{self.progress.stage}, so the run was stopped before the system would have ended some program. Close "
            "other programs, or choose a smaller size or fewer frames."
        )

    def _look_at_progress(self, now: float) -> tuple[ErrorKind, str] | None:
        if not self._steps:  # nobody knows yet how long a step takes, or there are none
            before, self._seen = self._seen, _activity(self._pid)
            busy = self._seen.cpu_seconds - before.cpu_seconds > BUSY_SHARE * LOOK_SECONDS
            if busy or abs(self._seen.bytes - before.bytes) > MOVING_BYTES:
                self._moved = now
        patience = self.patience()
        if patience is None or now - self._moved <= patience:
            return None
        where = f"the stage {self.progress.stage}"
        if self.progress.total:
            where = f"step {self.progress.step + 1} of {self.progress.total} of {where}"
        return ErrorKind.STALL, (
            f"Nothing moved for {now - self._moved:.0f} s in {where}, so the run was stopped. {cause(self._pid)} "
            "The log shows where it hung. What was computed is kept: resume it once the cause is gone."
        )


class Activity(NamedTuple):
    """What a process has done so far."""

    cpu_seconds: float
    bytes: int


def _activity(pid: int) -> Activity:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return Activity(0.0, 0)
    return Activity(times.user + times.system, _traffic(pid))


def cause(pid: int) -> str:
    """Why a process probably stands still, in words. Takes `CAUSE_SECONDS`."""
    try:
        process = psutil.Process(pid)
        before = (sum(process.cpu_times()[:2]), _traffic(pid), _swapped())
        states = []
        until = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < until:
            states.append(process.status())
            time.sleep(CAUSE_SECONDS / 20)
        after = (sum(process.cpu_times()[:2]), _traffic(pid), _swapped())
    except psutil.Error:
        return "Its process has ended."
    busy = (after[0] - before[0]) / CAUSE_SECONDS
    if after[2] - before[2] > MOVING_BYTES:
        return "Likely the computer was swapping: RAM is short. Close other programs or choose a smaller size."
    if states.count(psutil.STATUS_DISK_SLEEP) > len(states) / 2 or after[1] - before[1] > MOVING_BYTES:
        return "It was waiting for a disk (or a network drive) the whole time: is it slow, full or gone?"
    if psutil.STATUS_STOPPED in states:
        return "Its process was paused (stopped by a signal or a debugger)."
    if busy > 0.5:
        return (
            "It was computing all the while: a step far slower than those before. On Windows a driver that moves VRAM "
            "into RAM looks like this (see CUDA Sysmem Fallback Policy in the NVIDIA control panel)."
        )
    return "It computed nothing and read nothing: likely a deadlock, or a driver that no longer answers."


def oom_kills() -> int | None:
    """How many processes this system has ended for want of memory, in whatever group; None where it doesn't count."""
    try:
        for line in Path("/proc/vmstat").read_text("ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _traffic(pid: int) -> int:
    """Bytes that a process has read and written so far, by files and by the network; 0 where nobody counts."""
    try:
        counts = psutil.Process(pid).io_counters()
    except (psutil.Error, AttributeError, OSError):
        return 0
    names = ("read_chars", "write_chars", "read_bytes", "write_bytes")
    return sum(getattr(counts, name, 0) for name in names)


def _swapped() -> int:
    try:
        swap = psutil.swap_memory()
    except (OSError, RuntimeError):
        return 0
    return int(swap.sin + swap.sout)

"""What finished jobs on this machine teach about predictions: factors, bounded, learned from the history alone.

Each plan carries the factors it was made with, so what a run really needed can be told apart from what they added.
Memory: the working part alone is scaled, for weights are known to the byte; the largest factor of the last runs counts,
since one underestimate costs a job and an overestimate some speed. Time: the median by stage. Nothing is learned from
runs that did not end well, from another machine, or from before a reset; a card and the CPU are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Final, NamedTuple

from app import __version__
from app.coefficients import Coefficients
from app.plans import OUTSIDE_TORCH, SCALED, Estimate, Factors, Learned, Stage
from app.schema import Hardware, Job, JobStatus, Report
from app.store import Store

RESET_FACT: Final = "calibration_reset_at"
"""Name in the store: runs that finished before that moment teach nothing."""
LOOKED_THROUGH: Final = 200
"""The newest jobs among which runs are looked for."""
RUNS: Final = 5
"""The newest runs of a model that count."""
MEMORY_BOUNDS: Final = (0.85, 1.6)
TIME_BOUNDS: Final = (0.02, 50.0)
"""Wide: the assumed speeds of unknown hardware may be off by far, and a wrong time costs nothing but patience."""
MEMORY_BAND: Final = (1.0, 1.10)
"""Predicted over measured, for memory to count as well predicted: never less, at most a tenth more."""
TIME_BAND: Final = (0.8, 1.25)
_LEAST_SHARE: Final = 0.05
"""Working memory below this share of a stage's memory tells nothing: the rest's own error is larger."""


class Compared(NamedTuple):
    """One number of one run: what it is of, what was predicted, what was measured."""

    what: str
    """`seconds`, `ram`, or a device."""
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def inside(self) -> bool:
        """Within the band."""
        low, high = TIME_BAND if self.what == "seconds" else MEMORY_BAND
        return low <= self.ratio <= high


def machine_key(hardware: Hardware) -> str:
    """Names this machine and the speeds that predictions start from: what was learned on others does not count here.

    The program's version is part of it, because a new one may predict otherwise.
    """
    speeds = [hardware.copy_bytes_per_second, hardware.data_disk.read_bytes_per_second]
    for gpu in hardware.gpus:
        speeds += [gpu.total_bytes, gpu.pinned_bytes_per_second, gpu.pageable_bytes_per_second]
    names = [__version__, hardware.cpu_name, str(hardware.cpu_count), *(gpu.name for gpu in hardware.gpus)]
    return "|".join([*names, *(f"{speed:.3g}" if speed else "-" for speed in speeds)])


def learned(store: Store, coefficients: Coefficients, machine: str) -> Learned:
    """What this data folder's history teaches about a model on this machine.

    Raises:
        StoreError: the history cannot be read.
    """
    reset = store.fact(RESET_FACT)
    since = datetime.fromisoformat(reset) if reset is not None else None
    jobs = [
        job
        for job in store.list(limit=LOOKED_THROUGH)
        if since is None or (job.finished_at is not None and job.finished_at > since)
    ]
    model = coefficients.fingerprint
    return Learned(
        cpu=factors_from((job for job in jobs if job.plan.device == "cpu"), model, machine),
        gpu=factors_from((job for job in jobs if job.plan.device != "cpu"), model, machine),
    )


def revision(store: Store) -> tuple[str | None, int]:
    """Changes whenever `learned` may: with each job that ends well, in whatever process, and with a reset."""
    return store.fact(RESET_FACT), store.completed_count()


def forget(store: Store) -> None:
    """From now on only runs that finish later teach. The history itself stays."""
    store.keep_fact(RESET_FACT, datetime.now(UTC).isoformat())


def factors_from(jobs: Iterable[Job], model: str, machine: str) -> Factors:
    """What the newest runs of a model on this machine teach.

    Args:
        jobs: newest first, as `Store.list` gives them.
        model: the fingerprint of its coefficients.
    """
    runs: list[tuple[Estimate, Factors, Report]] = []
    for job in jobs:
        used = job.plan.factors
        if job.status is not JobStatus.COMPLETED or job.report is None or job.plan.estimate is None or used is None:
            continue
        if job.attempts:  # its stages were cut in pieces, and a part was done by another plan
            continue
        if (used.model, used.machine) == (model, machine):
            runs.append((job.plan.estimate, used, job.report))
        if len(runs) == RUNS:
            break
    return Factors(
        model=model,
        machine=machine,
        runs=len(runs),
        vram=_bounded([_working_factor(*run, ram=False) for run in runs]),
        ram=_bounded([_working_factor(*run, ram=True) for run in runs]),
        seconds=_time_factors(runs),
    )


def _bounded(found: Sequence[float | None]) -> float:
    known = [factor for factor in found if factor is not None]
    low, high = MEMORY_BOUNDS
    return min(max(*known, low), high) if known else 1.0


def _working_factor(estimate: Estimate, used: Factors, report: Report, *, ram: bool) -> float | None:
    """How many times the predicted working memory a run took, where each memory was fullest; None: nothing tells.

    Only there, because a stage begins with what the one before still holds: with model offload the last component
    leaves the card after the next stage's count has begun.
    """
    needed = []
    for memory, stage, size in _peaks(report, ram=ram):
        parts = [
            part
            for part in estimate.memory
            if part.memory == memory and part.stage is stage and (ram or part.kind not in OUTSIDE_TORCH)
        ]
        scaled = sum(part.bytes for part in parts if part.kind in SCALED)
        fixed = sum(part.bytes for part in parts) - scaled
        raw = scaled / used.of_memory(memory)
        if raw > _LEAST_SHARE * (fixed + raw):
            needed.append((size - fixed) / raw)
    return max(needed, default=None)


def _peaks(report: Report, *, ram: bool) -> list[tuple[str, Stage, int]]:
    """Each memory with the stage in which it was fullest, and how full."""
    best: dict[str, tuple[str, Stage, int]] = {}
    for stage in report.stages:
        measured = {"ram": stage.peak_ram_bytes} if ram else stage.peak_vram_allocated_bytes
        for memory, size in measured.items():
            if memory not in best or size > best[memory][2]:
                best[memory] = (memory, stage.stage, size)
    return list(best.values())


def _counts(report: Report, stage: Stage) -> bool:
    """Whether a stage's seconds can be compared: predicted is a run with the model and the libraries loaded anew."""
    return stage is not Stage.LOAD or (report.fresh and not report.warm)


def _time_factors(runs: Sequence[tuple[Estimate, Factors, Report]]) -> dict[Stage, float]:
    low, high = TIME_BOUNDS
    found: dict[Stage, list[float]] = {}
    for estimate, used, report in runs:
        for stage in report.stages:
            predicted = estimate.seconds(stage.stage) / used.seconds.get(stage.stage, 1.0)
            if predicted > 0 and stage.seconds > 0 and _counts(report, stage.stage):
                found.setdefault(stage.stage, []).append(stage.seconds / predicted)
    return {stage: min(max(median(ratios), low), high) for stage, ratios in found.items()}


def compare(job: Job) -> tuple[Compared, ...]:
    """Predicted against measured of one finished job; nothing where either is missing."""
    estimate, report = job.plan.estimate, job.report
    if estimate is None or report is None or job.status is not JobStatus.COMPLETED:
        return ()
    stages = [stage.stage for stage in report.stages if _counts(report, stage.stage)]
    seconds = sum(stage.seconds for stage in report.stages if stage.stage in stages)
    pairs = [("seconds", sum(estimate.seconds(stage) for stage in stages), seconds)]
    pairs.append(("ram", estimate.peak("ram"), report.peak_ram_bytes))
    pairs += [
        (device, estimate.peak(device, allocated=True), size)
        for device, size in report.peak_vram().items()
        if device in estimate.memories
    ]
    return tuple(Compared(what, predicted, measured) for what, predicted, measured in pairs if measured > 0)

"""How long a cancel takes, at random moments of real runs of the built-in model; and that it changes no later video.

    python -m tests.cancel_latency --moments 200

One in ten of the moments is in a worker that has just been started, where importing and loading take most of the time.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from app.config import Settings
from app.jobs import JobService
from app.schema import Draft, JobStatus
from tests.test_jobs import ME, finish

CLIP = Draft(prompt="a green star rotating on a white background", seed=1)
COLD_EVERY = 10
BOUND_SECONDS = 1.5
"""No cancel takes longer: the grace, and what ending a process and its memory takes."""


class Cancel(NamedTuple):
    stage: str
    seconds: float
    forced: bool


def frames(service: JobService) -> str:
    job = finish(service, service.submit(CLIP, owner=ME))
    if job.report is None or job.report.output is None:
        raise AssertionError(f"an undisturbed job failed: {job.error}")
    return job.report.output.frames_sha256


def measure(service: JobService, moments: int, *, seed: int = 0, compare_every: int = 20) -> list[Cancel]:
    """Cancel so many jobs. Raises AssertionError where one ends otherwise, leaves something, or changes another."""
    chance = random.Random(seed)
    wanted = frames(service)
    began = time.monotonic()
    if frames(service) != wanted:
        raise AssertionError("the same seed gave other frames")
    warm, cold = time.monotonic() - began, 12.0
    found: list[Cancel] = []
    while len(found) < moments:
        if len(found) % COLD_EVERY == COLD_EVERY - 1:
            service._worker.kill()
        length = warm if service._worker.alive else cold
        job = service.submit(CLIP, owner=ME)
        time.sleep(chance.uniform(0, length))
        progress = service.progress(job.id)
        asked = time.monotonic()
        service.cancel(job.id, owner=ME)
        job = finish(service, job)
        seconds = time.monotonic() - asked
        if job.status is JobStatus.COMPLETED:  # it had ended before
            continue
        if job.status is not JobStatus.CANCELED or job.output_path.exists():
            raise AssertionError(f"canceled, it ended as {job.status}: {job.error}")
        if list(job.output_path.parent.glob(".pocketreel-*")) or (service.settings.checkpoints / job.id).exists():
            raise AssertionError("something is left of it")
        stage = str(progress.stage) if progress is not None else "waiting"
        found.append(Cancel(stage, seconds, job.receipt is not None and job.receipt.forced))
        if len(found) % compare_every == 0 and frames(service) != wanted:
            raise AssertionError("the job after a cancel gave other frames")
    return found


def quantile(found: list[Cancel], share: float) -> float:
    """Of the seconds."""
    ordered = sorted(one.seconds for one in found)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    """Measure and print; 1 if it took longer than stated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        service = JobService(Settings(data_dir=Path(folder)))
        try:
            found = measure(service, options.moments, seed=options.seed)
        finally:
            service.close()
    for stage in dict.fromkeys(one.stage for one in found):
        here = [one for one in found if one.stage == stage]
        print(  # noqa: T201
            f"{stage}: {len(here)} cancels, p50 {quantile(here, 0.5):.2f} s, max {quantile(here, 1):.2f} s, "
            f"{sum(one.forced for one in here)} by force"
        )
    p50, p99, most = (quantile(found, share) for share in (0.5, 0.99, 1))
    print(f"all {len(found)}: p50 {p50:.2f} s, p99 {p99:.2f} s, max {most:.2f} s")  # noqa: T201
    return 0 if p50 <= 0.3 and p99 <= 1 and most <= BOUND_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

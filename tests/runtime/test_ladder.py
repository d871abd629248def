"""Memory falls short on a card: the job goes on by itself under smaller plans, and the video is the same.

The worker runs on a simulated card that computes and really refuses what does not fit; the planner is told of a larger
one, as it is when another program takes the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.config import Settings
from app.jobs import JobService
from app.schema import GIB, Draft, ErrorKind, Job, JobStatus, Stage
from app.worker import Worker
from tests import values
from tests.test_jobs import ME, finish, only_the_video

CARD_WORKER = Path(__file__).with_name("card_worker.py")
CLIP = Draft(prompt="a red ball on a blue background", num_frames=17, num_inference_steps=2, seed=1)
MIB = 2**20

Make = Callable[[int], Job]


@pytest.fixture
def make(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    found = values.hardware(gpus=(values.gpu(total_bytes=4 * GIB, free_bytes=4 * GIB),))
    monkeypatch.setattr("app.own_machine.hardware.probe", lambda settings: found)
    services: list[JobService] = []

    def made(capacity: int) -> Job:
        worker = Worker(
            settings.logs, cancel_grace_seconds=1.0, command=[sys.executable, "-P", str(CARD_WORKER), str(capacity)]
        )
        service = JobService(settings.model_copy(update={"checkpoint_seconds": 0.0}), worker=worker)
        services.append(service)
        job = finish(service, service.submit(CLIP, owner=ME))
        if job.status is JobStatus.COMPLETED:
            only_the_video(service, job)
        return job

    yield made
    for service in services:
        service.close()


@pytest.mark.slow  # a worker is started for each try
def test_the_job_goes_on_under_smaller_plans(make: Make) -> None:
    whole = make(4 * GIB)
    assert whole.status is JobStatus.COMPLETED, whole.error
    assert whole.attempts == ()
    needed = whole.report.peak_vram()["cuda:0"]
    decoding = make(needed * 2 // 3)
    assert decoding.status is JobStatus.COMPLETED, decoding.error
    assert {attempt.kind for attempt in decoding.attempts} == {ErrorKind.OOM}
    assert {attempt.progress.stage for attempt in decoding.attempts} == {Stage.DECODE}
    assert decoding.report.resumed_at == CLIP.num_inference_steps, "only the decoding was done again"
    none = make(4 * MIB)
    assert none.status is JobStatus.COMPLETED, none.error
    assert none.plan.device == "cpu", "where no plan for the card is left, the CPU does it"
    assert whole.report.output.frames_sha256 == none.report.output.frames_sha256
    assert decoding.plan.vae_tile_divisor > 1
    # tiles are blended into each other, so these frames are not the same to the last bit
    assert decoding.report.output.mean_luma == pytest.approx(whole.report.output.mean_luma, abs=2)

"""On a real card: the built-in model through service and worker, with VRAM measured. Run with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app import hardware
from app.config import Settings
from app.jobs import JobService
from app.schema import Backend, Draft, JobStatus

pytestmark = pytest.mark.gpu


@pytest.fixture
def service(settings: Settings) -> Iterator[JobService]:
    if not any(gpu.backend in (Backend.CUDA, Backend.ROCM) for gpu in hardware.probe(settings).gpus):
        pytest.fail("no GPU found: run these tests on a machine with one")
    service = JobService(settings)
    yield service
    service.close()


def test_vram_is_measured_and_within_the_prediction(service: JobService) -> None:
    job = service.submit(Draft(prompt="a red ball bouncing on a blue background", seed=1), owner="local")
    assert job.plan.device.startswith("cuda")
    while not job.status.final:
        job = service.wait(job.id, owner="local", timeout=1.0)
    assert job.status is JobStatus.COMPLETED, job.error
    allocated = job.report.peak_vram()
    assert allocated[job.plan.device] > 10 * 2**20
    assert job.report.peak_vram(reserved=True)[job.plan.device] >= allocated[job.plan.device]
    assert allocated[job.plan.device] <= job.plan.predicted_vram_bytes[job.plan.device]

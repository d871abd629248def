"""A thousand jobs through the real service, whose worker pretends: none is lost, none is made twice, nothing grows."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.config import Settings
from app.errors import InvalidRequest
from app.jobs import JobService
from app.process import LOG_BYTES
from app.schema import Draft, ErrorKind, JobStatus
from app.store import Store
from app.worker import Worker
from tests import values
from tests.stub_worker import CRASH, FAIL

STUB = [sys.executable, "-P", str(Path(__file__).with_name("stub_worker.py"))]
CLIP = Draft(prompt="a red ball", num_frames=5, num_inference_steps=2, height=64, width=64)


def stub(settings: Settings) -> Worker:
    return Worker(settings.logs, cancel_grace_seconds=settings.cancel_grace_seconds, command=STUB)


@pytest.fixture
def service(settings: Settings) -> Iterator[JobService]:
    service = JobService(settings, worker=stub(settings))
    yield service
    service.close()


def submit(service: JobService, owner: str, seed: int) -> str:
    while True:
        try:
            return service.submit(CLIP.model_copy(update={"seed": seed}), owner=owner).id
        except InvalidRequest:  # the queue of one owner is bounded
            time.sleep(0.01)


def crowd(service: JobService, count: int, *, kill_every: float) -> dict[str, tuple[str, int]]:
    """Two submitters, random cancels, a worker that is killed now and then; returns owner and seed by job."""
    jobs: dict[str, tuple[str, int]] = {}
    done = threading.Event()

    def submitter(owner: str, first: int) -> None:
        chance = random.Random(first)
        for seed in range(first, first + count // 2):
            job_id = submit(service, owner, seed)
            jobs[job_id] = (owner, seed)
            if chance.random() < 0.1:
                service.cancel(
                    chance.choice([one for one, (whose, _) in list(jobs.items()) if whose == owner]), owner=owner
                )

    def killer() -> None:
        while not done.wait(kill_every):
            pid = service._worker.pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    threads = [threading.Thread(target=submitter, args=arguments) for arguments in (("ann", 1000), ("bob", 50_000))]
    death = threading.Thread(target=killer)
    for thread in (*threads, death):
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + 600
    while service.store.unfinished():
        assert time.monotonic() < until
        time.sleep(0.1)
    done.set()
    death.join()
    return jobs


def check(service: JobService, jobs: dict[str, tuple[str, int]]) -> None:
    kept = service.store.list(limit=10_000)
    assert sorted(job.id for job in kept) == sorted(jobs), "each is on record once"
    videos = {path.name for path in service.settings.outputs.glob("*.mp4")}
    for job in kept:
        owner, seed = jobs[job.id]
        assert (job.owner, job.request.seed) == (owner, seed)
        assert job.status.final
        assert (job.output_path.name in videos) == (job.status is JobStatus.COMPLETED), job
        if job.status is JobStatus.COMPLETED:
            assert job.output_path.read_bytes() == f"video {job.id}".encode(), "its own video"
            assert seed % CRASH != 0
            assert seed % FAIL != 0
        if job.status is JobStatus.FAILED:
            assert job.error_kind in ({ErrorKind.CRASH} if seed % FAIL else {ErrorKind.INVALID, ErrorKind.CRASH})
    assert not list(service.settings.outputs.glob(".pocketreel-*"))
    assert {path.name for path in service.settings.checkpoints.glob("*")} <= {job.id for job in kept if job.resumable}


def test_twenty_jobs_of_two_people(service: JobService) -> None:
    check(service, crowd(service, 20, kill_every=1.5))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_jobs_and_the_server_stays_as_it_is(service: JobService) -> None:
    jobs = crowd(service, 200, kill_every=3.0)
    process = psutil.Process()
    before = (process.memory_info().rss, process.num_fds(), process.num_threads())
    jobs |= crowd(service, 800, kill_every=3.0)
    after = (process.memory_info().rss, process.num_fds(), process.num_threads())
    check(service, jobs)
    assert after[0] - before[0] < 40 * 2**20, "flat, but for what Python's allocator keeps"
    assert after[1] - before[1] <= 4
    assert after[2] - before[2] <= 4


def test_ten_thousand_jobs_stay_fast(settings: Settings) -> None:
    store = Store(settings.database)
    document = values.job("j", owner="ann").model_dump_json()
    with store._transaction() as db:
        db.executemany(
            "INSERT INTO jobs (id, owner, status, runner, document) VALUES (?, ?, ?, ?, ?)",
            (
                (f"j{n}", "ann" if n % 2 else "bob", "completed", "r", document.replace('"id":"j"', f'"id":"j{n}"'))
                for n in range(10_000)
            ),
        )
    store.close()
    began = time.monotonic()
    service = JobService(settings, worker=stub(settings))
    try:
        assert time.monotonic() - began < 2.0, "opening"
        began = time.monotonic()
        for _ in range(20):
            assert len(service.list(owner="ann", limit=12)) == 12
            service.store.unfinished()
            service.store.completed_count()
        assert (time.monotonic() - began) / 20 < 0.05, "one look of a page"
    finally:
        service.close()


def test_a_worker_is_replaced_after_so_many_jobs(settings: Settings) -> None:
    settings = settings.model_copy(update={"worker_max_jobs": 2})
    service = JobService(settings, worker=stub(settings))
    pids = []
    try:
        for seed in (1, 2, 3):
            job = service.get(submit(service, "ann", seed), owner="ann")
            while not job.status.final:
                job = service.wait(job.id, owner="ann", timeout=1.0)
                pids.append(service._worker.pid)
    finally:
        service.close()
    assert len({pid for pid in pids if pid is not None}) == 2


def test_a_worker_that_has_grown_is_replaced(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [0]
    worker = stub(settings)
    monkeypatch.setattr(worker, "rss_bytes", lambda: held[0])
    stopped: list[int] = []
    stop = worker.stop
    monkeypatch.setattr(worker, "stop", lambda: (stopped.append(1), stop()))
    service = JobService(settings.model_copy(update={"worker_growth_bytes": 50}), worker=worker)
    try:
        for seed, held[0], times in ((1, 10, 0), (2, 20, 0), (3, 100, 1)):
            job = service.get(submit(service, "ann", seed), owner="ann")
            while not job.status.final:
                job = service.wait(job.id, owner="ann", timeout=1.0)
            until = time.monotonic() + 5
            while len(stopped) < times and time.monotonic() < until:
                time.sleep(0.01)
            assert len(stopped) == times
    finally:
        service.close()


def test_a_long_log_is_cut_between_jobs(settings: Settings) -> None:
    worker = stub(settings)
    log = worker.ensure_started()
    try:
        with log.open("ab") as file:
            file.write(b"x" * (LOG_BYTES + 10) + b"the end")
        worker.ensure_started()
        text = log.read_bytes()
        assert len(text) < LOG_BYTES // 2
        assert text.endswith(b"the end")
        assert text.startswith(b"[what was before is cut]")
    finally:
        worker.stop()

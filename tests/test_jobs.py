"""The service with real workers and the built-in model: every stage is canceled, killed and timed out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.config import Settings
from app.errors import InvalidRequest, NotFound, OutputExists, StoreError
from app.jobs import MAX_PENDING_PER_OWNER, JobService
from app.mp4 import read_metadata
from app.outputs import scratch_of
from app.runner import Planned
from app.schema import GIB, Draft, ErrorKind, GpuProcess, Job, JobStatus, ModelCard, Request, Stage
from app.worker import Worker
from tests import values

ME = "local"
SMALL = Draft(
    prompt="a red ball on a blue background", num_frames=5, num_inference_steps=4, seed=1, height=64, width=64
)
HELD = Path(__file__).parent / "runtime" / "held_worker.py"
POINTS = ["load", "encode", "denoise:1", "denoise:3", "decode", "export"]


def finish(service: JobService, job: Job, seconds: float = 120) -> Job:
    until = time.monotonic() + seconds
    while not job.status.final:
        assert time.monotonic() < until, f"the job hangs: {job}"
        job = service.wait(job.id, owner=job.owner, timeout=1.0)
    return job


def reach(service: JobService, job: Job, point: str, seconds: float = 120) -> None:
    """Wait until the job is at `STAGE[:STEP]`; "" is anywhere."""
    stage, _, step = point.partition(":")
    until = time.monotonic() + seconds
    while True:
        progress = service.progress(job.id)
        if progress is not None and (not stage or (progress.stage == stage and progress.step >= int(step or 0))):
            return
        now = service.get(job.id, owner=job.owner)
        assert not now.status.final, f"ended before {point}: {now.error}"
        assert time.monotonic() < until, f"never came to {point}"
        time.sleep(0.01)


def nothing_left(job: Job) -> None:
    assert not job.output_path.exists()
    assert not scratch_of(job).exists()
    assert not list(job.output_path.parent.glob(".pocketreel-*"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    """One service with a warm worker, for tests that leave it usable."""
    service = JobService(Settings(data_dir=tmp_path_factory.mktemp("shared données")))
    yield service
    service.close()


class Held:
    """A service whose workers do MODE when they come to POINT; without orders they are ordinary."""

    def __init__(self, settings: Settings) -> None:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        self._orders = settings.data_dir / "orders"
        self.worker = Worker(
            settings.logs,
            cancel_grace_seconds=settings.cancel_grace_seconds,
            command=[sys.executable, "-P", str(HELD), str(self._orders)],
        )
        settings = settings.model_copy(update={"checkpoint_seconds": 0.0, "resume_by_itself": True})
        self.service = JobService(settings, worker=self.worker)

    def order(self, point: str, mode: str) -> JobService:
        self._orders.write_text(f"{point} {mode}")
        return self.service

    def ordinary(self) -> JobService:
        self._orders.unlink(missing_ok=True)
        return self.service


@pytest.fixture
def held(settings: Settings) -> Iterator[Held]:
    held = Held(settings)
    yield held
    held.service.close()


@pytest.fixture(scope="module")
def shared_held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One for tests that may follow each other on it: importing torch anew takes seconds."""
    held = Held(Settings(data_dir=tmp_path_factory.mktemp("held données")))
    yield held
    held.service.close()


def test_a_video_is_made_measured_and_kept(shared: JobService) -> None:
    job = finish(shared, shared.submit(SMALL, owner=ME))
    assert job.status is JobStatus.COMPLETED, job.error
    assert job.report is not None
    assert [stage.stage for stage in job.report.stages] == list(Stage)
    assert all(stage.seconds > 0 for stage in job.report.stages)
    assert job.report.total_seconds == pytest.approx(job.seconds, rel=0.1, abs=1.5)
    assert 200 * 2**20 < job.report.peak_ram_bytes < 4 * 2**30
    assert job.report.peak_vram() == {}
    assert job.report.versions["diffusers"].startswith("0.42")
    output = job.report.output
    assert output is not None
    assert (output.width, output.height, output.num_frames) == (64, 64, 5)
    assert output.path.is_file()
    embedded = read_metadata(output.path)
    assert embedded["request"]["prompt"] == SMALL.prompt
    assert embedded["request"]["seed"] == 1
    assert embedded["plan"]["device"] == "cpu"
    assert [stage["stage"] for stage in embedded["report"]["stages"]] == ["load", "encode", "denoise", "decode"]
    assert not scratch_of(job).exists()
    assert shared.list(owner=ME)[0] == job


def test_same_seed_same_frames_and_the_worker_stays_warm(shared: JobService) -> None:
    first, second, other = (
        finish(shared, shared.submit(SMALL.model_copy(update={"seed": seed}), owner=ME)) for seed in (5, 5, 6)
    )
    assert second.report.warm
    digests = [job.report.output.frames_sha256 for job in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]


def test_somebody_elses_job_does_not_exist(shared: JobService) -> None:
    job = shared.submit(SMALL, owner="ann")
    for act in (shared.get, shared.cancel):
        with pytest.raises(NotFound):
            act(job.id, owner="bob")
    assert job.id not in {listed.id for listed in shared.list(owner="bob")}
    assert finish(shared, job).status is JobStatus.COMPLETED


def test_waiting_jobs_can_be_canceled_and_owners_take_turns(shared: JobService) -> None:
    slow = SMALL.model_copy(update={"num_inference_steps": 60})
    running = shared.submit(slow, owner="ann")
    reach(shared, running, "")
    anns = [shared.submit(SMALL, owner="ann") for _ in range(2)]
    bobs = shared.submit(SMALL, owner="bob")
    assert shared.queue_position(bobs.id) < shared.queue_position(anns[1].id)
    canceled = shared.cancel(anns[1].id, owner="ann")
    assert canceled.status is JobStatus.CANCELED
    shared.cancel(running.id, owner="ann")
    assert finish(shared, running).status is JobStatus.CANCELED
    assert finish(shared, bobs).status is JobStatus.COMPLETED
    assert finish(shared, anns[0]).status is JobStatus.COMPLETED
    assert shared.get(bobs.id, owner="bob").started_at < shared.get(anns[0].id, owner="ann").started_at


def test_one_owner_cannot_fill_the_queue(shared: JobService) -> None:
    running = shared.submit(SMALL.model_copy(update={"num_inference_steps": 100}), owner="ann")
    reach(shared, running, "")
    jobs = [shared.submit(SMALL, owner="ann") for _ in range(MAX_PENDING_PER_OWNER)]
    with pytest.raises(InvalidRequest, match="wait already"):
        shared.submit(SMALL, owner="ann")
    for job in [*jobs, running]:
        shared.cancel(job.id, owner="ann")
    assert finish(shared, running).status is JobStatus.CANCELED


def test_an_existing_output_is_refused_before_anything_runs(shared: JobService, tmp_path: Path) -> None:
    target = tmp_path / "mine.mp4"
    target.write_bytes(b"precious")
    with pytest.raises(OutputExists):
        shared.submit(SMALL, owner=ME, output_path=target)
    job = shared.submit(SMALL, owner=ME, output_path=tmp_path / "other.mp4")
    (tmp_path / "other.mp4").write_bytes(b"came in between")
    job = finish(shared, job)
    assert job.status is JobStatus.COMPLETED
    assert (tmp_path / "other.mp4").read_bytes() == b"came in between"
    assert job.output_path == job.report.output.path == tmp_path / f"other-{job.id}.mp4"
    assert job.output_path.is_file()
    assert job.output_path.name in job.notices[-1].text
    assert finish(shared, shared.submit(SMALL, owner=ME, output_path=target, overwrite=True)).error is None


@pytest.mark.parametrize(
    ("point", "mode"),
    # the forced path is the same in every stage, and each use of it costs a new import of torch
    [
        *((point, "soft") for point in POINTS),
        ("denoise:3", "hard"),
        *(pytest.param(point, "hard", marks=pytest.mark.slow) for point in POINTS if point != "denoise:3"),
    ],
)
def test_cancel_in_every_stage(shared_held: Held, point: str, mode: str) -> None:
    service = shared_held.order(point, mode)
    job = service.submit(SMALL, owner=ME)
    reach(service, job, point)
    began = time.monotonic()
    service.cancel(job.id, owner=ME)
    job = finish(service, job)
    assert time.monotonic() - began < 2.0
    assert job.status is JobStatus.CANCELED
    nothing_left(job)
    assert shared_held.worker.alive == (mode == "soft"), "a soft cancel keeps the model warm"


def test_after_cancels_the_next_job_is_unchanged(shared_held: Held, shared: JobService) -> None:
    service = shared_held.order("denoise:3", "soft")
    job = service.submit(SMALL, owner=ME)
    reach(service, job, "denoise:3")
    service.cancel(job.id, owner=ME)
    finish(service, job)
    service = shared_held.ordinary()
    after = finish(service, service.submit(SMALL, owner=ME))
    assert after.report.warm
    untouched = finish(shared, shared.submit(SMALL, owner=ME))
    assert untouched.report.output.frames_sha256 == after.report.output.frames_sha256


@pytest.mark.parametrize(
    "point",
    [point if point == "denoise:3" else pytest.param(point, marks=pytest.mark.slow) for point in POINTS],
)
def test_kill_9_in_every_stage(shared_held: Held, shared: JobService, point: str) -> None:
    """A worker that was ended by mistake costs nothing but the time since the last step that was kept."""
    service = shared_held.order(point, "hard")
    job = service.submit(SMALL, owner=ME)
    reach(service, job, point)
    os.kill(shared_held.worker.pid, signal.SIGKILL)
    job = finish(service, job)
    assert job.status is JobStatus.COMPLETED, job.error
    (attempt,) = job.attempts
    assert attempt.kind is ErrorKind.CRASH
    assert "SIGKILL" in attempt.message
    assert attempt.progress.stage == point.partition(":")[0]
    assert job.report.resumed_at == {"denoise:1": 1, "denoise:3": 3, "decode": 4, "export": 4}.get(point, 0)
    assert job.report.output.frames_sha256 == frames_of(shared)
    only_the_video(service, job)


def test_without_the_setting_a_killed_worker_fails_the_job_which_can_be_resumed(settings: Settings) -> None:
    service = JobService(settings.model_copy(update={"checkpoint_seconds": 0.0}))
    try:
        job = service.submit(SMALL.model_copy(update={"num_inference_steps": 40}), owner=ME)
        reach(service, job, "denoise:3")
        os.kill(service._worker.pid, signal.SIGKILL)
        job = finish(service, job)
        assert (job.status, job.error_kind, job.attempts) == (JobStatus.FAILED, ErrorKind.CRASH, ())
        assert "SIGKILL" in job.error
        assert "denoise" in job.error
        nothing_left(job)
        other = finish(service, service.submit(SMALL, owner=ME))
        assert other.status is JobStatus.COMPLETED, "the next job succeeds"
        job = finish(service, service.resume(job.id, owner=ME))
        assert job.status is JobStatus.COMPLETED
        assert job.report.resumed_at >= 3
    finally:
        service.close()


def frames_of(service: JobService) -> str:
    """Of SMALL, made without any disturbance."""
    return finish(service, service.submit(SMALL, owner=ME)).report.output.frames_sha256


def only_the_video(service: JobService, job: Job) -> None:
    assert job.output_path.is_file()
    assert not scratch_of(job).exists()
    assert not (service.settings.checkpoints / job.id).exists()
    assert not list(job.output_path.parent.glob("*.half"))


def test_a_second_crash_ends_it_and_it_can_be_resumed(shared_held: Held, shared: JobService) -> None:
    service = shared_held.order("decode", "EXIT")
    job = finish(service, service.submit(SMALL, owner=ME))
    assert (job.error_kind, "status 7" in job.error) == (ErrorKind.CRASH, True)
    assert "happened twice" in job.error
    assert str(job.log_path) in job.error
    assert job.resumable
    nothing_left(job)
    service = shared_held.ordinary()
    job = finish(service, service.resume(job.id, owner=ME))
    assert job.status is JobStatus.COMPLETED
    assert job.report.resumed_at == 4
    assert [attempt.then for attempt in job.attempts] == ["the same again in a fresh process", "resumed"]
    assert job.report.output.frames_sha256 == frames_of(shared)
    only_the_video(service, job)


@pytest.mark.parametrize(
    ("point", "mode", "kind", "resumable"),
    [
        ("denoise:3", "nan", "black", False),
        pytest.param("decode", "BLACK", "black", False, marks=pytest.mark.slow),
        ("denoise:3", "oom", "oom", True),
        pytest.param("denoise:3", "ram", "ram", True, marks=pytest.mark.slow),
        pytest.param("denoise:3", "bug", "invalid", False, marks=pytest.mark.slow),
        ("export", "full", "disk", True),
    ],
)
def test_failures_have_a_kind_and_words(shared_held: Held, point: str, mode: str, kind: str, resumable: bool) -> None:
    service = shared_held.order(point, mode)
    job = finish(service, service.submit(SMALL, owner=ME))
    assert (job.status, job.error_kind, job.resumable) == (JobStatus.FAILED, kind, resumable)
    assert len(job.error) > 30
    nothing_left(job)
    assert (service.settings.checkpoints / job.id).exists() == resumable
    if not resumable:
        shared_held.ordinary()
        with pytest.raises(InvalidRequest, match="same way") as refused:
            service.resume(job.id, owner=ME)
        assert str(service.settings.data_dir) not in str(refused.value), "it may be somebody else who reads it"
    shared_held.worker.kill()  # its disk may be full


def test_a_black_picture_is_decoded_again_otherwise(shared_held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = shared_held.service._runner
    usual = runner._planner

    def in_half(request: Request, card: ModelCard, **limits: int) -> Planned:
        planned = usual(request, card, **limits)
        held = tuple(
            one.model_copy(update={"dtype": "bfloat16"}) if one.component == "vae" else one
            for one in planned.plan.placements
        )
        return planned._replace(plan=planned.plan.model_copy(update={"placements": held}))

    monkeypatch.setattr(runner, "_planner", in_half)
    service = shared_held.order("decode", "black")
    job = finish(service, service.submit(SMALL, owner=ME))
    assert job.status is JobStatus.COMPLETED, job.error
    (attempt,) = job.attempts
    assert (attempt.kind, attempt.then) == (ErrorKind.BLACK, "the frames are decoded in float32")
    assert job.report.resumed_at == SMALL.num_inference_steps
    only_the_video(service, job)


def test_a_time_limit_that_is_none_is_refused_and_the_job_stays(held: Held) -> None:
    service = held.order("denoise:3", "oom")
    job = finish(service, service.submit(SMALL, owner=ME))
    for seconds in (-1.0, 0.0, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest):
            service.resume(job.id, owner=ME, timeout_seconds=seconds)
    assert service.get(job.id, owner=ME).resumable


def test_a_database_that_is_locked_between_two_tries_does_not_end_the_job(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = held.order("denoise:3", "exit")

    def locked(*_: object, **__: object) -> None:
        raise StoreError("database is locked")

    monkeypatch.setattr(service.store, "unfinished", locked)
    monkeypatch.setattr(service.store, "note", locked)
    job = finish(service, service.submit(SMALL, owner=ME))
    assert job.status is JobStatus.COMPLETED, job.error
    assert job.report.resumed_at == 3


def test_the_time_limit_holds_from_outside(shared_held: Held) -> None:
    service = shared_held.ordinary()
    assert finish(service, service.submit(SMALL, owner=ME)).status is JobStatus.COMPLETED  # warm: the limit is short
    shared_held.order("denoise:1", "hard")
    job = finish(service, service.submit(SMALL.model_copy(update={"timeout_seconds": 4.0}), owner=ME))
    assert (job.status, job.error_kind) == (JobStatus.FAILED, ErrorKind.TIMEOUT)
    assert "denoise" in job.error
    assert 3.5 < job.seconds < 6
    nothing_left(job)


def test_the_worker_ends_when_its_parent_is_killed(data_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom app.config import load_settings\nfrom app.jobs import JobService\n"
        "from app.schema import Draft\n"
        "service = JobService(load_settings())\n"
        "job = service.submit(Draft(prompt='a red ball', num_inference_steps=200), owner='local')\n"
        "while service.progress(job.id) is None or service.progress(job.id).stage != 'denoise': time.sleep(0.05)\n"
        "print(service._worker.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _gone, alive = psutil.wait_procs([worker], timeout=10)
    assert not alive
    service = JobService(Settings(data_dir=data_dir))
    try:
        (job,) = service.list(owner=ME)
        assert (job.status, job.error_kind) == (JobStatus.FAILED, ErrorKind.INTERRUPTED)
        nothing_left(job)
        assert len(list(service.settings.locks.glob("*.lock"))) == 1
    finally:
        service.close()


def test_a_second_process_neither_steals_nor_buries_running_jobs(held: Held, settings: Settings) -> None:
    first = held.order("denoise:1", "soft")
    job = first.submit(SMALL, owner=ME)
    reach(first, job, "denoise:1")
    second = JobService(settings)
    try:
        assert second.get(job.id, owner=ME).status is JobStatus.RUNNING
        second.cancel(job.id, owner=ME)
        assert finish(first, job).status is JobStatus.CANCELED
    finally:
        second.close()


def test_a_store_that_fails_for_a_while_loses_nothing(shared: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shared.submit(SMALL, owner=ME)
    save, failures = shared.store.finish, []

    def fail_once(*arguments: object, **changes: object) -> object:
        if not failures:
            failures.append(changes)
            raise StoreError("The disk is full")
        return save(*arguments, **changes)

    monkeypatch.setattr(shared.store, "finish", fail_once)
    job = finish(shared, job)
    assert failures
    assert job.status is JobStatus.COMPLETED


def test_a_store_that_stays_broken_does_not_stop_the_service(
    shared: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("The disk is full")

    monkeypatch.setattr("app.records.SAVE_PAUSES", (0.01,))
    with monkeypatch.context() as patch:
        patch.setattr(shared.store, "finish", fail)
        job = finish(shared, shared.submit(SMALL, owner=ME))
        assert job.status is JobStatus.COMPLETED
        assert job.output_path.is_file()
        assert shared.list(owner=ME)[0].status is JobStatus.COMPLETED
        assert shared.store.get(job.id).status is JobStatus.RUNNING
    shared._records.save_again()
    assert shared.store.get(job.id).status is JobStatus.COMPLETED, "saved once it could be"
    assert finish(shared, shared.submit(SMALL, owner=ME)).status is JobStatus.COMPLETED


def test_a_video_in_place_is_completed_whatever_died_afterwards(shared: JobService, settings: Settings) -> None:
    """The moment between the rename and the record: a restart reads in the file whose it is."""
    done = finish(shared, shared.submit(SMALL, owner=ME))
    first = JobService(settings)
    first.store.add(done.model_copy(update={"status": JobStatus.RUNNING, "report": None}), runner="of a dead process")
    first.close()
    second = JobService(settings)
    try:
        found = second.get(done.id, owner=ME)
        assert found.status is JobStatus.COMPLETED
        assert found.report.peak_ram_bytes > 0
        assert done.output_path.is_file()
    finally:
        second.close()


def test_the_warm_worker_s_own_memory_is_free_for_the_next_job(shared: JobService) -> None:
    finish(shared, shared.submit(SMALL, owner=ME))
    pid = shared._worker.pid
    assert pid is not None
    held = (GpuProcess(pid=pid, name="x", used_bytes=6 * GIB), GpuProcess(pid=1, name="y", used_bytes=GIB))
    gpu = values.gpu(free_bytes=4 * GIB, processes=held)
    found = values.hardware(gpus=(gpu,), ram_available_bytes=2 * GIB)
    free = shared._plan.with_own_worker(found)
    assert free.gpus[0].free_bytes == 10 * GIB
    assert 200 * 2**20 < free.ram_available_bytes - 2 * GIB < 4 * GIB


def test_where_the_driver_tells_no_amounts_the_workers_own_word_counts(
    shared: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    finish(shared, shared.submit(SMALL, owner=ME))
    assert shared._worker._beat is not None
    told = shared._worker._beat.model_copy(update={"vram_bytes": {"cuda:0": 5 * GIB}})
    monkeypatch.setattr(shared._worker, "_beat", told)
    held = (GpuProcess(pid=shared._worker.pid, name="x", used_bytes=None),)
    found = values.hardware(gpus=(values.gpu(free_bytes=4 * GIB, processes=held),))
    assert shared._plan.with_own_worker(found).gpus[0].free_bytes == 9 * GIB


def test_what_was_interrupted_is_taken_up_at_the_start_but_not_for_ever(held: Held, settings: Settings) -> None:
    service = held.order("denoise:1", "soft")
    job = service.submit(SMALL, owner=ME)
    reach(service, job, "denoise:1")
    service.close()
    for _ in range(2):  # it ends the program each time
        again = JobService(settings, worker=held.worker, adopt=True)
        held.order("encode", "soft")
        assert again.get(job.id, owner=ME).status in (JobStatus.PENDING, JobStatus.RUNNING)
        reach(again, job, "")
        again.close()
    last = JobService(settings, worker=held.worker, adopt=True)
    held.service = last
    held.ordinary()
    assert last.get(job.id, owner=ME).error_kind is ErrorKind.INTERRUPTED
    assert finish(last, last.resume(job.id, owner=ME)).status is JobStatus.COMPLETED


def test_a_canceled_job_of_a_dead_process_is_canceled(settings: Settings) -> None:
    first = JobService(settings)
    job = values.job("of the dead", status=JobStatus.RUNNING, output_path=settings.outputs / "x.mp4")
    first.store.add(job, runner="of a dead process")
    first.store.request_cancel(job.id)
    first.close()
    second = JobService(settings)
    assert second.get(job.id, owner=ME).status is JobStatus.CANCELED
    second.close()


def test_a_video_that_could_not_be_moved_is_only_moved_when_resumed(
    shared: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("app.records.publish_somehow", full)
        job = finish(shared, shared.submit(SMALL, owner=ME))
    assert job.error_kind is ErrorKind.DISK
    assert (scratch_of(job) / "video.mp4").is_file()
    began = time.monotonic()
    job = finish(shared, shared.resume(job.id, owner=ME))
    assert job.status is JobStatus.COMPLETED, job.error
    assert time.monotonic() - began < 5
    only_the_video(shared, job)


def test_closing_says_what_became_of_the_jobs(held: Held, settings: Settings) -> None:
    service = held.order("denoise:1", "soft")
    running = service.submit(SMALL, owner=ME)
    waiting = service.submit(SMALL, owner=ME)
    reach(service, running, "denoise:1")
    service.close()
    after = JobService(settings)
    try:
        kinds = [after.get(job.id, owner=ME).error_kind for job in (running, waiting)]
        assert kinds == [ErrorKind.INTERRUPTED, ErrorKind.INTERRUPTED]
    finally:
        after.close()


def test_an_idle_worker_gives_its_memory_back(settings: Settings) -> None:
    service = JobService(settings.model_copy(update={"worker_idle_seconds": 0.1}))
    try:
        assert finish(service, service.submit(SMALL, owner=ME)).status is JobStatus.COMPLETED
        until = time.monotonic() + 10
        while service._worker.alive:
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        service.close()


def test_a_folder_of_ones_own_is_a_model(shared: JobService, tmp_path: Path) -> None:
    from app.config import bundled

    folder = tmp_path / "mon modèle"
    shutil.copytree(bundled("assets", "demo"), folder)
    job = finish(shared, shared.submit(SMALL.model_copy(update={"model": str(folder)}), owner=ME))
    assert job.status is JobStatus.COMPLETED, job.error
    assert read_metadata(job.output_path)["request"]["model"] == str(folder)


def test_two_submitters_at_once(shared: JobService) -> None:
    jobs: list[Job] = []

    def submit(owner: str) -> None:
        jobs.extend(shared.submit(SMALL, owner=owner) for _ in range(3))

    threads = [threading.Thread(target=submit, args=(owner,)) for owner in ("ann", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = [finish(shared, job) for job in jobs]
    assert {job.status for job in ended} == {JobStatus.COMPLETED}
    assert len({job.output_path for job in ended}) == 6


def test_the_worker_counts_gpus_as_the_probe_does(shared: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (values.gpu(uuid="GPU-b"), values.gpu(uuid="GPU-a", index=1))
    monkeypatch.setattr("app.own_machine.hardware.probe", lambda settings: values.hardware(gpus=gpus))
    assert shared.preview(SMALL).plan.device == "cuda:0"
    assert shared._worker.environment == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}
    monkeypatch.undo()
    shared._worker.environment = {}

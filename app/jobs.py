"""The service: submit, cancel, list. Jobs live in the store; a page or a terminal only shows them.

One runner thread with one warm worker takes jobs one by one, fairly between owners. Each service instance holds a lock
file while it lives; jobs of an instance whose lock is free were interrupted by a crash and are marked so at the next
start, their half-written folders removed. Two processes on one data folder (the page and a command line) thus share it.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from app import __version__, events, hardware, planner, presets
from app.config import Settings
from app.errors import InvalidRequest, NotFound, OutputExists
from app.resolve import resolve
from app.schema import Draft, ErrorKind, Job, JobStatus, ModelCard, Notice, Plan, Progress, Request, Value
from app.store import Store
from app.worker import Outcome, Worker

STORE_POLL_SECONDS = 0.3
MAX_PENDING_PER_OWNER = 20
"""One person of a household cannot fill the queue for the others."""


class Preview(Value):
    """What would happen: the request as it would run, what was changed and why, and the plan."""

    request: Request
    notices: tuple[Notice, ...]
    plan: Plan


class JobService:
    """All that the page and the command line do with jobs. Thread-safe."""

    def __init__(self, settings: Settings, *, worker: Worker | None = None) -> None:
        """Open the data folder and recover what a crash left. `worker` None makes the program's own.

        Raises:
            StoreError: the data folder cannot be used.
            PresetError: a bundled preset is broken.
        """
        self.settings = settings
        self.catalogue = presets.load_catalogue(settings)
        self.store = Store(settings.database)
        self._instance = secrets.token_hex(8)
        settings.locks.mkdir(parents=True, exist_ok=True)
        self._instance_lock = FileLock(self._lock_file(self._instance))
        self._instance_lock.acquire()
        self._recover()
        self._worker = worker or Worker(
            settings.logs,
            cancel_grace_seconds=settings.cancel_grace_seconds,
            log_files_kept=settings.log_files_kept,
        )
        self._changed = threading.Condition()
        self._pending: list[tuple[Job, ModelCard]] = []
        self._running: str | None = None
        self._canceled = threading.Event()
        self._progress: dict[str, Progress] = {}
        self._served: dict[str, float] = {}
        self._closing = False
        self._runner = threading.Thread(target=self._serve, name="runner", daemon=True)
        self._runner.start()

    # ------------------------------------------------------------------------------------------------ for callers

    def preview(self, draft: Draft) -> Preview:
        """What `submit` would do, without doing it. Fast: no torch, no worker.

        Raises:
            BadInput: something asked for is wrong.
            PlanError: it does not fit this machine.
        """
        return self._prepare(draft)[0]

    def submit(self, draft: Draft, *, owner: str, output_path: Path | None = None, overwrite: bool = False) -> Job:
        """Queue a job and return it at once.

        Raises:
            BadInput: something asked for is wrong, or the output exists and `overwrite` is False.
            PlanError: it does not fit this machine.
        """
        preview, card = self._prepare(draft)
        job_id = f"{datetime.now():%y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        if output_path is None:
            self.settings.outputs.mkdir(parents=True, exist_ok=True)
            output_path = self.settings.outputs / f"{job_id}.mp4"
        job = Job(
            id=job_id,
            owner=owner,
            status=JobStatus.PENDING,
            request=preview.request,
            plan=preview.plan,
            notices=preview.notices,
            output_path=check_output(output_path, overwrite=overwrite),
            overwrite=overwrite,
            created_at=datetime.now(UTC),
        )
        with self._changed:
            if sum(waiting.owner == owner for waiting, _ in self._pending) >= MAX_PENDING_PER_OWNER:
                raise InvalidRequest(
                    f"{MAX_PENDING_PER_OWNER} of your videos wait already. Let one finish or cancel one."
                )
            self.store.add(job, runner=self._instance)
            self._pending.append((job, card))
            self._changed.notify_all()
        return job

    def cancel(self, job_id: str, *, owner: str) -> Job:
        """Ask for the end of a pending or running job; returns at once. A job that has ended is left as it is.

        Raises:
            NotFound: no such job, or somebody else's.
        """
        self.get(job_id, owner=owner)
        with self._changed:
            if self._running == job_id:
                self._canceled.set()
            else:
                self._pending = [(job, card) for job, card in self._pending if job.id != job_id]
                if self._is_mine(job_id):
                    self.store.finish(job_id, JobStatus.CANCELED, at=datetime.now(UTC))
                else:
                    self.store.request_cancel(job_id)
            self._changed.notify_all()
        return self.get(job_id, owner=owner)

    def get(self, job_id: str, *, owner: str) -> Job:
        """Raises NotFound for an unknown job and for somebody else's alike."""
        job = self.store.get(job_id)
        if job is None or job.owner != owner:
            raise NotFound(f"There is no job {job_id}. `pocketreel history` lists yours.")
        return job

    def list(self, *, owner: str, limit: int = 50) -> Sequence[Job]:
        """The owner's jobs, newest first."""
        return self.store.list(owner=owner, limit=limit)

    def progress(self, job_id: str) -> Progress | None:
        """Of a running job; None before and after."""
        return self._progress.get(job_id)

    def queue_position(self, job_id: str) -> int:
        """How many jobs are before it: 0 when it runs, is next on an idle worker, or is not waiting."""
        with self._changed:
            waiting = [job.id for job, _ in self._in_order()]
            if job_id not in waiting:
                return 0
            return waiting.index(job_id) + (self._running is not None)

    def wait(self, job_id: str, *, owner: str, timeout: float) -> Job:
        """The job as it is after at most `timeout` seconds, earlier if anything about any job changed."""
        with self._changed:
            self._changed.wait(timeout)
        return self.get(job_id, owner=owner)

    def close(self) -> None:
        """End the running job (as interrupted) and the worker, release the data folder. Waits for it."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._canceled.set()
            self._changed.notify_all()
        self._runner.join()
        self._worker.stop()
        self._instance_lock.release()
        self._lock_file(self._instance).unlink(missing_ok=True)
        self.store.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _prepare(self, draft: Draft) -> tuple[Preview, ModelCard]:
        card = presets.find_card(self.catalogue, draft.model)
        preset = self.catalogue.hardware.get(draft.preset)
        if preset is None:
            raise InvalidRequest(
                f"There is no preset {draft.preset!r}. Choose one of: {', '.join(self.catalogue.hardware)}.",
                field="preset",
            )
        request, notices = resolve(draft, card, preset)
        found = hardware.probe(self.settings)  # anew each time: other programs come and go
        plan = planner.plan(found, card, request, preset, presets.weight_bytes(card))
        return Preview(request=request, notices=notices, plan=plan), card

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait(1.0)
                    if self._worker.alive and self._idle_seconds() > self.settings.worker_idle_seconds:
                        self._worker.stop()
                if self._closing:
                    break
                job, card = self._in_order()[0]
                self._pending.remove((job, card))
                self._running = job.id
                self._served[job.owner] = time.monotonic()
                self._canceled.clear()
            try:
                self._run(job, card)
            except Exception as error:  # noqa: BLE001 - the runner must outlive any one job
                self._fail(job, ErrorKind.INVALID, f"Pocketreel itself failed: {type(error).__name__}: {error}")
            finally:
                with self._changed:
                    self._running = None
                    self._progress.pop(job.id, None)
                    self._changed.notify_all()
        for job, _ in self._pending:
            self._fail(job, ErrorKind.INTERRUPTED, "Pocketreel was closed before this job began. Submit it again.")

    def _run(self, job: Job, card: ModelCard) -> None:
        log = self._worker.ensure_started()
        started = self.store.start(job.id, at=datetime.now(UTC), log_path=log)
        if started is None:
            return  # canceled while it waited
        self._notify()
        run = events.Run(
            job_id=job.id,
            request=job.request,
            plan=job.plan,
            card=card,
            output_path=job.output_path,
            scratch=scratch_of(job),
            overwrite=job.overwrite,
            metadata={
                "pocketreel": __version__,
                "job": job.id,
                "model": card.model_dump(
                    mode="json", include={"id", "title", "repo_id", "revision", "license", "pipeline"}
                ),
                "request": job.request.model_dump(mode="json"),
                "plan": job.plan.model_dump(mode="json"),
            },
        )

        def on_progress(progress: Progress) -> None:
            self._progress[job.id] = progress
            self._notify()

        self._record(job, self._worker.run(run, canceled=self._cancel_watch(job.id), on_progress=on_progress))

    def _cancel_watch(self, job_id: str) -> Callable[[], bool]:
        """Whether a cancel came: by this process at once, by another one on the same data folder from the store."""
        looked_at = time.monotonic()

        def canceled() -> bool:
            nonlocal looked_at
            if not self._canceled.is_set() and time.monotonic() - looked_at > STORE_POLL_SECONDS:
                looked_at = time.monotonic()
                if self.store.cancel_requested(job_id):
                    self._canceled.set()
            return self._canceled.is_set()

        return canceled

    def _record(self, job: Job, outcome: Outcome) -> None:
        now = datetime.now(UTC)
        if isinstance(outcome, events.Completed):
            self.store.finish(job.id, JobStatus.COMPLETED, at=now, report=outcome.report)
        elif isinstance(outcome, events.Failed):
            self.store.finish(
                job.id, JobStatus.FAILED, at=now, error_kind=outcome.kind, error=outcome.message, report=outcome.report
            )
        elif self._closing:
            self._fail(job, ErrorKind.INTERRUPTED, "Pocketreel was closed while this job ran. Submit it again.")
        else:
            self.store.finish(job.id, JobStatus.CANCELED, at=now)

    def _fail(self, job: Job, kind: ErrorKind, message: str) -> None:
        self.store.finish(job.id, JobStatus.FAILED, at=datetime.now(UTC), error_kind=kind, error=message)

    def _recover(self) -> None:
        """Mark what dead instances left, remove their half-written folders and lock files."""
        dead: dict[str, bool] = {}
        for job, runner in self.store.unfinished():
            if runner not in dead:
                dead[runner] = runner != self._instance and self._is_free(runner)
            if dead[runner]:
                shutil.rmtree(scratch_of(job), ignore_errors=True)
                self._fail(
                    job,
                    ErrorKind.INTERRUPTED,
                    "Pocketreel ended (crash, power cut or kill) before this job did. Submit it again.",
                )
        for path in self.settings.locks.glob("*.lock"):
            if path.stem != self._instance and self._is_free(path.stem):
                path.unlink(missing_ok=True)

    def _is_free(self, instance: str) -> bool:
        lock = FileLock(self._lock_file(instance))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        lock.release()
        return True

    def _lock_file(self, instance: str) -> Path:
        return self.settings.locks / f"{instance}.lock"

    def _is_mine(self, job_id: str) -> bool:
        return any(job.id == job_id and runner == self._instance for job, runner in self.store.unfinished())

    def _in_order(self) -> Sequence[tuple[Job, ModelCard]]:
        """Owners take turns; each owner's own jobs in the order they came."""
        turns: dict[str, int] = {}
        keyed = []
        for index, (job, card) in enumerate(self._pending):
            turn = turns.get(job.owner, 0)
            turns[job.owner] = turn + 1
            keyed.append((turn, self._served.get(job.owner, 0.0), index, (job, card)))
        return [item for *_, item in sorted(keyed, key=lambda entry: entry[:3])]

    def _idle_seconds(self) -> float:
        return time.monotonic() - self._worker.idle_since

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def scratch_of(job: Job) -> Path:
    """Where a job's half-written files lie: beside the target, so that the last rename stays on one file system."""
    return job.output_path.parent / f".pocketreel-{job.id}"


def check_output(path: Path, *, overwrite: bool) -> Path:
    """An absolute target that can be written, known before minutes are spent.

    Raises:
        OutputExists: it exists and `overwrite` is False.
        InvalidRequest: not an .mp4 name, a folder, or in a folder that is missing or not writable.
    """
    path = path.expanduser().absolute()
    if path.suffix.lower() != ".mp4":
        raise InvalidRequest(f"The output must be named *.mp4, not {path.name!r}.", field="output")
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder. Give a file name ending in .mp4.", field="output")
    if not path.parent.is_dir():
        raise InvalidRequest(f"The folder {path.parent} does not exist. Create it, or choose another.", field="output")
    if path.exists() and not overwrite:
        raise OutputExists(f"{path} exists already. Give another name, or --overwrite.")
    probe = path.parent / f".pocketreel-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise InvalidRequest(f"The folder {path.parent} cannot be written: {error.strerror}.", field="output") from None
    return path

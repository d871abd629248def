"""The service: submit, cancel, list. Jobs live in the store; a page or a terminal only shows them.

One runner thread with one warm worker takes jobs one by one, fairly between owners. How they end is `records`' matter:
two processes on one data folder (the page and a command line) share it, and what a crash left is settled at the start.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from app import presets
from app.config import Settings
from app.errors import InvalidRequest, NotFound, PocketreelError, StoreError
from app.fallback import RESUMED
from app.outputs import check_output
from app.own_machine import OwnMachine
from app.records import Instance, Records
from app.resolve import check_timeout, resolve
from app.runner import Runner, Watcher
from app.schema import (
    Attempt,
    Draft,
    ErrorKind,
    Job,
    JobStatus,
    ModelCard,
    Notice,
    Plan,
    Progress,
    Request,
    Value,
)
from app.store import Store
from app.worker import Worker

ADOPTIONS = 2
"""A job that was interrupted so often in a row is not taken up again without being asked for."""
STORE_POLL_SECONDS = 0.3
"""Between two looks for a cancel that another process left in the store."""
RECOVER_SECONDS = 30.0
"""Between two looks for jobs of processes that died."""
MAX_PENDING_PER_OWNER = 20
"""One person of a household cannot fill the queue for the others."""


_log = logging.getLogger(__name__)


class Preview(Value):
    """What would happen: the request as it would run, what was changed and why, and the plan."""

    request: Request
    notices: tuple[Notice, ...]
    plan: Plan


class JobService:
    """All that the page and the command line do with jobs. Thread-safe."""

    def __init__(self, settings: Settings, *, worker: Worker | None = None, adopt: bool = False) -> None:
        """Open the data folder and recover what a crash left.

        Args:
            worker: None makes the program's own.
            adopt: take up again at once what a crash has interrupted; else it waits for `resume`.

        Raises:
            StoreError: the data folder cannot be used.
            PresetError: a bundled preset is broken.
        """
        self.settings = settings
        self.catalogue = presets.load_catalogue(settings)
        self.store = Store(settings.database)
        try:
            self._instance = Instance(settings.locks)
        except OSError as error:
            self.store.close()
            raise StoreError(
                f"The data folder {settings.data_dir} cannot be used: {error}. Check that you may write there, or "
                "choose another with POCKETREEL_DATA_DIR."
            ) from error
        self._closing = False
        self._records = Records(self.store, impatient=lambda: self._closing)
        self._records.recover(self._instance)
        self._recovered_at = time.monotonic()
        self._worker = worker or Worker(
            settings.logs,
            cancel_grace_seconds=settings.cancel_grace_seconds,
            log_files_kept=settings.log_files_kept,
        )
        self._changed = threading.Condition()
        self._pending: list[tuple[Job, ModelCard]] = []
        self._running: str | None = None
        self._canceled = threading.Event()
        self._canceled_by_owner = self._interrupted = False
        self._plan = OwnMachine(settings, self.catalogue, self.store, self._worker)
        self._runner = Runner(settings, self.store, self._records, self._worker, self._plan)
        self._progress: dict[str, Progress] = {}
        self._served: dict[str, float] = {}
        self._thread = threading.Thread(target=self._serve, name="runner", daemon=True)
        if adopt:
            self._adopt()
        self._sweep()
        self._thread.start()

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
            self._check_room(owner)
            self.store.add(job, runner=self._instance.name)
            self._pending.append((job, card))
            self._changed.notify_all()
        return job

    def cancel(self, job_id: str, *, owner: str) -> Job:
        """Ask for the end of a pending or running job; returns at once. A job that has ended is left as it is.

        Raises:
            NotFound: no such job, or somebody else's.
        """
        job = self.get(job_id, owner=owner)
        with self._changed:
            if self._running == job_id:
                self._canceled_by_owner = True
                self._canceled.set()
            elif any(waiting.id == job_id for waiting, _ in self._pending):
                self._records.finish(job, JobStatus.CANCELED)
                self._pending = [(waiting, card) for waiting, card in self._pending if waiting.id != job_id]
            elif not job.status.final:
                self.store.request_cancel(job_id)
                self._records.recover(self._instance)  # its process may be dead
            self._changed.notify_all()
        return self.get(job_id, owner=owner)

    def interrupt(self, job_id: str) -> None:
        """End a running job so that it can be resumed: the computer shuts down. One that waits stays as it is."""
        with self._changed:
            if self._running == job_id:
                self._interrupted = True
                self._canceled.set()

    def resume(self, job_id: str, *, owner: str, timeout_seconds: float | None = None) -> Job:
        """Queue a job again that failed for a reason that may have passed; it goes on from what was kept of it.

        Raises:
            NotFound: no such job, or somebody else's.
            BadInput: it cannot be resumed, or its model or folder is not there any more.
            PlanError: it does not fit this machine.
        """
        job = self.get(job_id, owner=owner)
        if not job.resumable or job.error_kind is None:
            if job.error_kind is None:
                raise InvalidRequest(f"The job {job_id} is {job.status}, so there is nothing to resume.")
            raise InvalidRequest(
                f"The job {job_id} would fail again in the same way. Change a setting and make it anew."
            )
        card = presets.find_card(self.catalogue, job.request.model)
        request = job.request
        if timeout_seconds is not None:
            check_timeout(timeout_seconds)
            request = request.model_copy(update={"timeout_seconds": timeout_seconds})
        plan = self._plan(request, card).plan
        # that a file has come to be there since is no reason to refuse hours of work: it gets another name then
        check_output(job.output_path, overwrite=True)
        attempt = Attempt(at=datetime.now(UTC), kind=job.error_kind, message=job.error or "", then=RESUMED)
        self._records.save_again()
        with self._changed:
            self._check_room(owner)
            resumed = self.store.resume(
                job_id, runner=self._instance.name, request=request, plan=plan, attempts=(*job.attempts, attempt)
            )
            if resumed is None:
                raise InvalidRequest(f"The job {job_id} is being resumed already.")
            self._pending.append((resumed, card))
            self._changed.notify_all()
        return resumed

    def get(self, job_id: str, *, owner: str) -> Job:
        """Raises NotFound for an unknown job and for somebody else's alike."""
        job = self._records.get(job_id)
        if job is None or job.owner != owner:
            raise NotFound(f"There is no job {job_id}. `pocketreel history` lists yours.")
        return job

    def list(self, *, owner: str, limit: int = 50) -> Sequence[Job]:
        """The owner's jobs, newest first."""
        return self._records.list(owner=owner, limit=limit)

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
        self._thread.join()
        self._worker.stop()
        self._instance.release()
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
        return Preview(request=request, notices=notices, plan=self._plan(request, card).plan), card

    def _check_room(self, owner: str) -> None:
        if sum(waiting.owner == owner for waiting, _ in self._pending) >= MAX_PENDING_PER_OWNER:
            raise InvalidRequest(f"{MAX_PENDING_PER_OWNER} of your videos wait already. Let one finish or cancel one.")

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            job, card = taken
            try:
                self._runner.run(job, card, self._watcher(job.id))
            except Exception as error:  # noqa: BLE001 - the runner must outlive any one job
                _log.exception("job %s", job.id)
                kind = ErrorKind.DISK if isinstance(error, OSError | StoreError) else ErrorKind.CRASH
                self._records.fail(job, kind, f"Pocketreel itself failed: {type(error).__name__}: {error}")
            finally:
                with self._changed:
                    self._running = None
                    self._progress.pop(job.id, None)
                    self._changed.notify_all()
        for job, _ in self._pending:
            self._records.fail(job, ErrorKind.INTERRUPTED, "Pocketreel was closed before this job began. Resume it.")

    def _take(self) -> tuple[Job, ModelCard] | None:
        """The next job, which counts as running from now on; None when the service closes."""
        while True:
            with self._changed:
                if self._closing:
                    return None
                if self._pending:
                    job, card = self._in_order()[0]
                    self._pending.remove((job, card))
                    self._running = job.id
                    self._served[job.owner] = time.monotonic()
                    self._canceled_by_owner = self._interrupted = False
                    self._canceled.clear()
                    return job, card
                self._changed.wait(1.0)
                idle = not self._pending and not self._closing
            if idle:  # without the lock: it may take a while, and nobody must wait for it
                self._tidy()

    def _tidy(self) -> None:
        """Once a second while nothing runs."""
        now = time.monotonic()
        if self._worker.alive and now - self._worker.idle_since > self.settings.worker_idle_seconds:
            self._worker.stop()
        if now - self._recovered_at > RECOVER_SECONDS:
            self._recovered_at = now
            self._records.save_again()
            try:
                self._records.recover(self._instance)
            except StoreError:
                _log.exception("looking for jobs of dead processes")
            self._sweep()

    def _sweep(self) -> None:
        """What is kept for nobody goes."""
        try:
            self._runner.sweep()
        except StoreError:
            _log.exception("looking for what is kept for nobody")

    def _adopt(self) -> None:
        """Take up again what was interrupted, but not what was so each time: it may be what ends the program."""
        for job in self.store.interrupted():
            if [attempt.kind for attempt in job.attempts[-ADOPTIONS:]] == [ErrorKind.INTERRUPTED] * ADOPTIONS:
                continue
            try:
                self.resume(job.id, owner=job.owner)
            except PocketreelError as error:  # its model or the memory is not there any more: the person decides
                _log.warning("job %s cannot be resumed: %s", job.id, error)

    def _watcher(self, job_id: str) -> Watcher:
        def on_progress(progress: Progress | None) -> None:
            with self._changed:
                if progress is None:
                    self._progress.pop(job_id, None)
                else:
                    self._progress[job_id] = progress
                self._changed.notify_all()

        return Watcher(
            canceled=self._cancel_watch(job_id),
            closing=lambda: (self._closing or self._interrupted) and not self._canceled_by_owner,
            on_progress=on_progress,
        )

    def _cancel_watch(self, job_id: str) -> Callable[[], bool]:
        """Whether a cancel came: by this process at once, by another one on the same data folder from the store."""
        looked_at = time.monotonic()

        def canceled() -> bool:
            nonlocal looked_at
            if not self._canceled.is_set() and time.monotonic() - looked_at > STORE_POLL_SECONDS:
                looked_at = time.monotonic()
                try:
                    requested = self.store.cancel_requested(job_id)
                except StoreError:  # no news; the run goes on
                    requested = False
                if requested:
                    self._canceled_by_owner = True
                    self._canceled.set()
            return self._canceled.is_set()

        return canceled

    def _in_order(self) -> Sequence[tuple[Job, ModelCard]]:
        """Owners take turns; each owner's own jobs in the order they came."""
        turns: dict[str, int] = {}
        keyed = []
        for index, (job, card) in enumerate(self._pending):
            turn = turns.get(job.owner, 0)
            turns[job.owner] = turn + 1
            keyed.append((turn, self._served.get(job.owner, 0.0), index, (job, card)))
        return [item for *_, item in sorted(keyed, key=lambda entry: entry[:3])]

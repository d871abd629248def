"""The service: submit, cancel, list. Jobs live in the store; a page or a terminal only shows them.

One runner thread with one warm worker takes jobs one by one, fairly between owners. Each service instance holds a lock
file while it lives; jobs of an instance whose lock is free were interrupted by a crash and are marked so at the next
start, their half-written folders removed. Two processes on one data folder (the page and a command line) thus share it.

If the end of a job cannot be saved (disk full, database locked), it is kept in memory and shown from there; the video
is in place before anything is recorded, and names its job, so that a restart finds out.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from app import __version__, calibration, events, hardware, planner, presets
from app.config import Settings
from app.errors import BadInput, InvalidRequest, NotFound, PlanError, StoreError
from app.mp4 import read_metadata
from app.outputs import check_output, publish_somehow, scratch_of
from app.resolve import resolve
from app.schema import (
    Backend,
    Draft,
    ErrorKind,
    Factors,
    Gpu,
    Hardware,
    Job,
    JobStatus,
    ModelCard,
    Notice,
    Plan,
    Progress,
    Report,
    Request,
    Value,
)
from app.store import Store
from app.worker import Outcome, Worker

STORE_POLL_SECONDS = 0.3
"""Between two looks for a cancel that another process left in the store."""
RECOVER_SECONDS = 30.0
"""Between two looks for jobs of processes that died."""
SAVE_PAUSES = (0.2, 1.0, 5.0)
"""Between attempts to save how a job ended: a full disk or a lock often passes."""
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
        try:
            settings.locks.mkdir(parents=True, exist_ok=True)
            # not thread-local: `close` may come from another thread
            self._instance_lock = FileLock(self._lock_file(self._instance), thread_local=False)
            self._instance_lock.acquire()
        except OSError as error:
            self.store.close()
            raise StoreError(
                f"The data folder {settings.data_dir} cannot be used: {error}. Check that you may write there, or "
                "choose another with POCKETREEL_DATA_DIR."
            ) from error
        self._recover()
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
        self._canceled_by_owner = False
        self._unsaved: dict[str, Job] = {}
        self._last_report: Report | None = None
        self._factors: dict[tuple[str, str], Factors] = {}
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
        job = self.get(job_id, owner=owner)
        with self._changed:
            if self._running == job_id:
                self._canceled_by_owner = True
                self._canceled.set()
            elif any(waiting.id == job_id for waiting, _ in self._pending):
                self._finish(job, JobStatus.CANCELED)
                self._pending = [(waiting, card) for waiting, card in self._pending if waiting.id != job_id]
            elif not job.status.final:
                self.store.request_cancel(job_id)
                self._recover()  # its process may be dead
            self._changed.notify_all()
        return self.get(job_id, owner=owner)

    def get(self, job_id: str, *, owner: str) -> Job:
        """Raises NotFound for an unknown job and for somebody else's alike."""
        job = self._unsaved.get(job_id) or self.store.get(job_id)
        if job is None or job.owner != owner:
            raise NotFound(f"There is no job {job_id}. `pocketreel history` lists yours.")
        return job

    def list(self, *, owner: str, limit: int = 50) -> Sequence[Job]:
        """The owner's jobs, newest first."""
        return [self._unsaved.get(job.id, job) for job in self.store.list(owner=owner, limit=limit)]

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
        return Preview(request=request, notices=notices, plan=self._plan(request, card)), card

    def _plan(self, request: Request, card: ModelCard) -> Plan:
        """Against the machine as it is now: other programs come and go."""
        found = self._with_own_worker(hardware.probe(self.settings))
        if nvidia := [gpu.uuid for gpu in found.gpus if gpu.backend is Backend.CUDA]:
            # by UUID, so that torch counts them as the probe does whatever CUDA_DEVICE_ORDER says
            self._worker.environment = {"CUDA_VISIBLE_DEVICES": ",".join(nvidia)}
        preset = self.catalogue.hardware[request.preset]
        return planner.plan(
            found,
            card,
            request,
            preset,
            presets.tensor_counts(card),
            allowed=planner.RUNTIME,  # what the planner knows beyond it, `pocketreel plan` shows
            factors=self._learned(card, found),
            presets=self.catalogue.hardware.values(),
        )

    def _learned(self, card: ModelCard, found: Hardware) -> Factors | None:
        """From the history; kept until a job ends, because a preview comes with every key that is pressed."""
        if card.coefficients is None:
            return None
        key = (card.coefficients.model, calibration.machine_key(found))
        if key not in self._factors:
            try:
                self._factors[key] = calibration.learned(self.store, *key)
            except StoreError:  # plain predictions are better than none
                _log.exception("reading what earlier runs taught")
                return Factors(model=key[0], machine=key[1])
        return self._factors[key]

    def _with_own_worker(self, found: Hardware) -> Hardware:
        """What the warm worker holds is free for the next job: it gives back what that does not need."""
        pid = self._worker.pid
        if pid is None:
            return found
        try:
            held_ram = int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:  # it has just ended
            return found
        reserved = self._last_report.peak_vram(reserved=True) if self._last_report is not None else {}

        def free(gpu: Gpu) -> int:
            told = [process.used_bytes for process in gpu.processes if process.pid == pid]
            # Windows tells no amounts per process: then what the last job reserved
            held = sum(amount if amount is not None else reserved.get(f"cuda:{gpu.index}", 0) for amount in told)
            return min(gpu.free_bytes + held, gpu.total_bytes)

        return found.model_copy(
            update={
                "ram_available_bytes": min(found.ram_available_bytes + held_ram, found.ram_limit.value_bytes),
                "gpus": tuple(gpu.model_copy(update={"free_bytes": free(gpu)}) for gpu in found.gpus),
            }
        )

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            job, card = taken
            try:
                self._run(job, card)
            except Exception as error:  # noqa: BLE001 - the runner must outlive any one job
                _log.exception("job %s", job.id)
                self._fail(job, ErrorKind.INVALID, f"Pocketreel itself failed: {type(error).__name__}: {error}")
            finally:
                with self._changed:
                    self._running = None
                    self._progress.pop(job.id, None)
                    self._changed.notify_all()
        for job, _ in self._pending:
            self._fail(job, ErrorKind.INTERRUPTED, "Pocketreel was closed before this job began. Submit it again.")

    def _take(self) -> tuple[Job, ModelCard] | None:
        """The next job, which counts as running from now on; None when the service closes."""
        with self._changed:
            while not self._pending and not self._closing:
                self._changed.wait(1.0)
                self._tidy()
            if self._closing:
                return None
            job, card = self._in_order()[0]
            self._pending.remove((job, card))
            self._running = job.id
            self._served[job.owner] = time.monotonic()
            self._canceled_by_owner = False
            self._canceled.clear()
            return job, card

    def _tidy(self) -> None:
        """Once a second while nothing runs."""
        now = time.monotonic()
        if self._worker.alive and now - self._worker.idle_since > self.settings.worker_idle_seconds:
            self._worker.stop()
        if now - self._recovered_at > RECOVER_SECONDS:
            self._recovered_at = now
            try:
                self._recover()
            except StoreError:
                _log.exception("looking for jobs of dead processes")

    def _run(self, job: Job, card: ModelCard) -> None:
        try:
            plan = self._plan(job.request, card)
            log = self._worker.ensure_started()
        except PlanError as error:  # it did fit when it was submitted
            self._fail(job, ErrorKind.RAM if re.search(r"\bRAM\b", str(error)) else ErrorKind.OOM, str(error))
            return
        except OSError as error:
            where = self.settings.data_dir
            self._fail(job, ErrorKind.DISK, f"No worker could be started: {error}. Check the disk that holds {where}.")
            return
        started = self.store.start(job.id, at=datetime.now(UTC), log_path=log, plan=plan)
        if started is None:
            return  # canceled while it waited
        self._notify()
        run = events.Run(
            job_id=job.id,
            request=job.request,
            plan=plan,
            card=card,
            output_path=job.output_path,
            scratch=scratch_of(job),
            metadata={
                "pocketreel": __version__,
                "job": job.id,
                "model": card.model_dump(
                    mode="json", include={"id", "title", "repo_id", "revision", "license", "pipeline"}
                ),
                "request": job.request.model_dump(mode="json"),
                # how it was held and why; the ladder and the parts of the estimate stay in the history
                "plan": plan.model_dump(mode="json", exclude={"ladder", "estimate"}),
            },
        )

        def on_progress(progress: Progress) -> None:
            self._progress[job.id] = progress
            self._notify()

        outcome = self._worker.run(run, canceled=self._cancel_watch(job.id), on_progress=on_progress)
        self._record(job, outcome, log)

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

    def _record(self, job: Job, outcome: Outcome, log: Path) -> None:
        if isinstance(outcome, events.Completed):
            self._last_report = outcome.report
            self._complete(job, outcome.report)
        elif isinstance(outcome, events.Failed):
            message = outcome.message if str(log) in outcome.message else f"{outcome.message} The log: {log}"
            self._fail(job, outcome.kind, message, report=outcome.report)
        elif self._closing and not self._canceled_by_owner:
            self._fail(job, ErrorKind.INTERRUPTED, "Pocketreel was closed while this job ran. Submit it again.")
        else:
            self._finish(job, JobStatus.CANCELED)

    def _complete(self, job: Job, report: Report) -> None:
        """Put the checked file into place, then record it."""
        scratch, wanted = scratch_of(job), job.output_path
        try:
            path = publish_somehow(scratch / events.VIDEO_NAME, wanted, overwrite=job.overwrite, job_id=job.id)
        except OSError as error:
            # the video stays where it is: it cost too much to be deleted
            self._fail(
                job,
                ErrorKind.DISK,
                f"The finished video could not be moved to {wanted}: {error.strerror or error}. "
                f"It lies at {scratch / events.VIDEO_NAME}.",
                report=report,
            )
            return
        shutil.rmtree(scratch, ignore_errors=True)
        notices = job.notices
        if path != wanted:
            notices = (
                *notices,
                Notice(field=None, text=f"{wanted.name} could not be replaced, so this is {path.name}."),
            )
        output = report.output.model_copy(update={"path": path}) if report.output is not None else None
        report = report.model_copy(update={"output": output})
        self._finish(job, JobStatus.COMPLETED, report=report, output_path=path, notices=notices)

    def _fail(self, job: Job, kind: ErrorKind, message: str, report: Report | None = None) -> None:
        self._finish(job, JobStatus.FAILED, error_kind=kind, error=message, report=report)

    def _finish(self, job: Job, status: JobStatus, **changes: Any) -> None:
        """Save how a job ended; never raises. What cannot be saved now is shown from memory."""
        changes = {"status": status, "at": datetime.now(UTC), **changes}
        self._factors.clear()
        for pause in (*SAVE_PAUSES, None):
            try:
                self.store.finish(job.id, **changes)
            except StoreError:
                _log.exception("saving the end of job %s", job.id)
                if pause is None or self._closing:
                    changes["finished_at"] = changes.pop("at")
                    self._unsaved[job.id] = job.model_copy(update=changes)
                    return
                time.sleep(pause)
            else:
                return

    def _recover(self) -> None:
        """Settle what dead instances left, remove their half-written folders and lock files."""
        dead: dict[str, bool] = {}
        for job, runner in self.store.unfinished():
            if runner not in dead:
                dead[runner] = runner != self._instance and self._is_free(runner)
            if dead[runner]:
                self._settle(job)
        for path in self.settings.locks.glob("*.lock"):
            if path.stem != self._instance and self._is_free(path.stem):
                with suppress(OSError):
                    path.unlink()

    def _settle(self, job: Job) -> None:
        """A job whose process died: completed if its video is in place, else interrupted."""
        shutil.rmtree(scratch_of(job), ignore_errors=True)
        try:
            found = read_metadata(job.output_path)
        except BadInput:
            found = {}
        if found.get("job") == job.id:
            self._finish(job, JobStatus.COMPLETED, report=Report.model_validate(found["report"]))
        else:
            message = "Pocketreel ended (crash, power cut or kill) before this job did. Submit it again."
            self._fail(job, ErrorKind.INTERRUPTED, message)

    def _is_free(self, instance: str) -> bool:
        lock = FileLock(self._lock_file(instance))
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            return False
        lock.release()
        return True

    def _lock_file(self, instance: str) -> Path:
        return self.settings.locks / f"{instance}.lock"

    def _in_order(self) -> Sequence[tuple[Job, ModelCard]]:
        """Owners take turns; each owner's own jobs in the order they came."""
        turns: dict[str, int] = {}
        keyed = []
        for index, (job, card) in enumerate(self._pending):
            turn = turns.get(job.owner, 0)
            turns[job.owner] = turn + 1
            keyed.append((turn, self._served.get(job.owner, 0.0), index, (job, card)))
        return [item for *_, item in sorted(keyed, key=lambda entry: entry[:3])]

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

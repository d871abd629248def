"""How jobs end on record: videos put into place, ends saved, jobs of dead processes settled.

Each service instance holds a lock file while it lives. If the end of a job cannot be saved (disk full, database
locked), it is kept in memory and shown from there; a video is in place before anything is recorded, and names its job,
so that a restart finds out.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from app import events, flight
from app.errors import BadInput, StoreError
from app.mp4 import read_metadata
from app.outputs import publish_somehow, scratch_of
from app.schema import ErrorKind, Job, JobStatus, Notice, Report
from app.store import Store

SAVE_PAUSES = (0.2, 1.0, 5.0)
"""Between attempts to save how a job ended: a full disk or a lock often passes."""

TIMELINE_KEPT = 24
"""Samples of a run's memory that the history keeps."""

_log = logging.getLogger(__name__)


class Instance:
    """This service among others on the data folder, alive while its lock is held."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where the folder cannot be written."""
        self.name = secrets.token_hex(8)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # not thread-local: `release` may come from another thread
        self._lock = FileLock(self._file(self.name), thread_local=False)
        self._lock.acquire()

    def release(self) -> None:
        """Nothing of this instance is left afterwards."""
        self._lock.release()
        self._file(self.name).unlink(missing_ok=True)

    def is_dead(self, name: str) -> bool:
        """Whether an instance has ended, however it did."""
        if name == self.name:
            return False
        lock = FileLock(self._file(name))
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            return False
        lock.release()
        return True

    def sweep(self) -> None:
        """Remove the lock files of the dead."""
        for path in self._folder.glob("*.lock"):
            if self.is_dead(path.stem):
                with suppress(OSError):
                    path.unlink()

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.lock"


class Records:
    """The store, and beside it what could not be saved."""

    def __init__(self, store: Store, *, impatient: Callable[[], bool]) -> None:
        """`impatient` says whether the program closes: then nothing is waited for."""
        self._store = store
        self._impatient = impatient
        self._unsaved: dict[str, tuple[Job, dict[str, Any]]] = {}

    def get(self, job_id: str) -> Job | None:
        return self._unsaved[job_id][0] if job_id in self._unsaved else self._store.get(job_id)

    def list(self, *, owner: str, limit: int) -> Sequence[Job]:
        """The owner's jobs, newest first."""
        jobs = self._store.list(owner=owner, limit=limit)
        return [self._unsaved[job.id][0] if job.id in self._unsaved else job for job in jobs]

    def save_again(self) -> None:
        """What could not be saved: the disk may have room now."""
        for job_id, (_, changes) in list(self._unsaved.items()):
            with suppress(StoreError):
                self._store.finish(job_id, **changes)
                self._unsaved.pop(job_id, None)

    def finish(self, job: Job, status: JobStatus, **changes: Any) -> None:
        """Save how a job ended; never raises. What cannot be saved now is shown from memory."""
        changes = {"status": status, "at": datetime.now(UTC), **changes}
        for pause in (*SAVE_PAUSES, None):
            try:
                self._store.finish(job.id, **changes)
            except StoreError:
                _log.exception("saving the end of job %s", job.id)
                if pause is None or self._impatient():
                    shown = {"finished_at" if name == "at" else name: value for name, value in changes.items()}
                    shown.pop("of", None)
                    self._unsaved[job.id] = (job.model_copy(update=shown), changes)
                    return
                time.sleep(pause)
            else:
                return

    def fail(self, job: Job, kind: ErrorKind, message: str, report: Report | None = None, **changes: Any) -> None:
        """It ended badly; `message` says what to do."""
        thinned = thin(report) if report is not None else None
        self.finish(job, JobStatus.FAILED, error_kind=kind, error=message, report=thinned, **changes)

    def complete(self, job: Job, report: Report) -> None:
        """Put the checked file into place, then record it."""
        scratch, wanted = scratch_of(job), job.output_path
        try:
            path = publish_somehow(scratch / events.VIDEO_NAME, wanted, overwrite=job.overwrite, job_id=job.id)
        except OSError as error:
            # the video stays where it is: it cost too much to be deleted
            self.fail(
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
        changes = {"output_path": path, "notices": notices, "attempts": job.attempts, "plan": job.plan}
        now = job.model_copy(update={**changes, "report": report, "status": JobStatus.COMPLETED})
        flight.write_beside(path, flight.record(now.model_copy(update={"finished_at": datetime.now(UTC)})))
        self.finish(job, JobStatus.COMPLETED, report=thin(report), **changes)

    def recover(self, instance: Instance) -> None:
        """Settle what dead instances left, remove their half-written folders and lock files.

        Raises:
            StoreError: the store cannot be read.
        """
        dead: dict[str, bool] = {}
        for job, runner in self._store.unfinished():
            if runner not in dead:
                dead[runner] = instance.is_dead(runner)
            if dead[runner]:
                self._settle(job, runner)
        instance.sweep()

    def _settle(self, job: Job, runner: str) -> None:
        """A job whose process died: completed if its video is in place, canceled if that was asked, or interrupted."""
        shutil.rmtree(scratch_of(job), ignore_errors=True)
        try:
            found = read_metadata(job.output_path)
        except BadInput:
            found = {}
        if found.get("job") == job.id:
            self.finish(job, JobStatus.COMPLETED, report=thin(Report.model_validate(found["report"])), of=runner)
            return
        if self._store.cancel_requested(job.id):
            self.finish(job, JobStatus.CANCELED, of=runner)
            return
        message = (
            "Pocketreel ended (crash, power cut or kill) before this job did. Resume it: it goes on from what was kept."
        )
        self.fail(job, ErrorKind.INTERRUPTED, message, of=runner)


def thin(report: Report) -> Report:
    """With less of the timeline: the history is read again and again, the whole lies beside the video."""
    every = -(-len(report.timeline) // TIMELINE_KEPT) or 1
    return report.model_copy(update={"timeline": report.timeline[::-1][::every][::-1]})

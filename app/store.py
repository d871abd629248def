"""The history: every job in one SQLite file (WAL), so that a crash, a reboot or a second process loses none.

A job's whole document is one JSON column; what is searched by stands beside it. Transitions are guarded in SQL: a job
that has ended stays as it ended, whoever comes second. Migrations are numbered and only ever appended.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.errors import StoreError
from app.schema import RESUMABLE, ErrorKind, Job, JobStatus

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE jobs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        runner TEXT NOT NULL,
        cancel_requested INTEGER NOT NULL DEFAULT 0,
        document TEXT NOT NULL
    );
    CREATE INDEX jobs_by_owner ON jobs (owner, seq);
    CREATE INDEX jobs_by_status ON jobs (status);
    """,
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    """,
)
"""Migration k takes the schema from version k to k + 1. Never edit one that was released; append."""

_log = logging.getLogger(__name__)
_OPEN = (JobStatus.PENDING, JobStatus.RUNNING)


class Store:
    """The database of one data folder. Safe to use from several threads and several processes."""

    def __init__(self, path: Path) -> None:
        """Open, create or migrate.

        Raises:
            StoreError: not writable, damaged, locked for long, or written by a newer version.
        """
        self._path = path
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, job: Job, *, runner: str) -> None:
        """A new job; `runner` is the service instance that will run it."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO jobs (id, owner, status, runner, document) VALUES (?, ?, ?, ?, ?)",
                (job.id, job.owner, job.status, runner, job.model_dump_json()),
            )

    def get(self, job_id: str) -> Job | None:
        rows = self._query("SELECT document FROM jobs WHERE id = ?", (job_id,))
        return next((job for job, _ in self._read(rows)), None)

    def list(self, *, owner: str | None = None, limit: int = 50) -> Sequence[Job]:
        """Newest first; `owner` None is everyone's."""
        where, values = ("WHERE owner = ?", (owner,)) if owner is not None else ("", ())
        rows = self._query(f"SELECT document FROM jobs {where} ORDER BY seq DESC LIMIT ?", (*values, limit))  # noqa: S608 - a fixed text
        return [job for job, _ in self._read(rows)]

    def unfinished(self) -> Sequence[tuple[Job, str]]:
        """Jobs that have not ended, oldest first, each with its runner."""
        rows = self._query("SELECT document, runner FROM jobs WHERE status IN (?, ?) ORDER BY seq", _OPEN)
        return self._read(rows)

    def request_cancel(self, job_id: str) -> None:
        """Leave word for whichever process runs the job."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET cancel_requested = 1 WHERE id = ?", (job_id,))

    def cancel_requested(self, job_id: str) -> bool:
        return bool(self._query("SELECT 1 FROM jobs WHERE id = ? AND cancel_requested = 1", (job_id,)))

    def completed_count(self) -> int:
        """How many jobs have ended well."""
        count: int = self._query("SELECT COUNT(*) FROM jobs WHERE status = ?", (JobStatus.COMPLETED,))[0][0]
        return count

    def fact(self, name: str) -> str | None:
        """A single value kept under a name; None where none was."""
        rows = self._query("SELECT value FROM facts WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def keep_fact(self, name: str, value: str) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, value))

    def start(self, job_id: str, *, at: datetime, **changes: Any) -> Job | None:
        """pending -> running; None if it is not pending any more (canceled meanwhile)."""
        return self._change(job_id, (JobStatus.PENDING,), {"status": JobStatus.RUNNING, "started_at": at, **changes})

    def note(self, job_id: str, **changes: Any) -> Job | None:
        """Something about a job that runs; None if it has ended."""
        return self._change(job_id, (JobStatus.RUNNING,), changes)

    def resume(self, job_id: str, *, runner: str, **changes: Any) -> Job | None:
        """failed -> pending, for a runner of its own; None if it has not failed (any more)."""
        anew = {"status": JobStatus.PENDING, "started_at": None, "finished_at": None, "error_kind": None, "error": None}
        return self._change(job_id, (JobStatus.FAILED,), {**anew, **changes}, runner=runner)

    def interrupted(self) -> Sequence[Job]:
        """Jobs that have failed because the program ended, oldest first."""
        rows = self._query(
            "SELECT document FROM jobs WHERE status = ? AND json_extract(document, '$.error_kind') = ? ORDER BY seq",
            (JobStatus.FAILED, ErrorKind.INTERRUPTED),
        )
        return [job for job, _ in self._read(rows)]

    def in_need(self) -> set[str]:
        """Of all jobs that have not ended, or can be resumed: at one moment, so that none is missed in between."""
        marks = ", ".join("?" * len(RESUMABLE))
        rows = self._query(
            "SELECT id FROM jobs WHERE status IN (?, ?) OR "  # noqa: S608 - a fixed text
            f"(status = ? AND json_extract(document, '$.error_kind') IN ({marks}))",
            (*_OPEN, JobStatus.FAILED, *sorted(RESUMABLE)),
        )
        return {row[0] for row in rows}

    def finish(
        self, job_id: str, *, status: JobStatus, at: datetime, of: str | None = None, **changes: Any
    ) -> Job | None:
        """To a final status; None if it had ended already, which then stands, or is another runner's than `of`."""
        return self._change(job_id, _OPEN, {"status": status, "finished_at": at, **changes}, of=of)

    def _change(
        self,
        job_id: str,
        allowed: tuple[JobStatus, ...],
        changes: dict[str, Any],
        *,
        runner: str | None = None,
        of: str | None = None,
    ) -> Job | None:
        with self._transaction() as db:
            row = db.execute("SELECT document, runner FROM jobs WHERE id = ?", (job_id,)).fetchone()
            if row is None:
                return None
            job = self._valid(row[0])
            if job.status not in allowed or (of is not None and row[1] != of):
                return None
            job = job.model_copy(update=changes)
            db.execute(
                "UPDATE jobs SET status = ?, document = ? WHERE id = ?", (job.status, job.model_dump_json(), job_id)
            )
            if runner is not None:  # it begins anew there, as the newest, and what was asked before does not count
                db.execute(
                    "UPDATE jobs SET runner = ?, cancel_requested = 0, seq = (SELECT MAX(seq) FROM jobs) + 1 "
                    "WHERE id = ?",
                    (runner, job_id),
                )
            return job

    def _valid(self, document: str) -> Job:
        try:
            return Job.model_validate_json(document)
        except ValidationError as error:
            raise StoreError(f"{self._path} holds a job that cannot be read: {error}") from error

    def _read(self, rows: Sequence[Any]) -> Sequence[tuple[Job, Any]]:
        """Jobs with each row's second column. A document that is damaged stays where it is and hides no other."""
        found = []
        for row in rows:
            try:
                found.append((Job.model_validate_json(row[0]), row[1] if len(row) > 1 else None))
            except ValidationError as error:
                _log.warning("%s holds a job that cannot be read: %s", self._path, error)
        return found

    def _prepare(self) -> None:
        try:
            self._switch_to_wal()
            self._db.execute("PRAGMA synchronous = FULL")  # a power cut must not take back what was said to be done
            with self._transaction() as db:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version > len(MIGRATIONS):
                    raise StoreError(
                        f"{self._path} was written by a newer Pocketreel (schema {version}, this one knows "
                        f"{len(MIGRATIONS)}). Update Pocketreel, or choose another folder with POCKETREEL_DATA_DIR."
                    )
                for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
                    for statement in filter(str.strip, script.split(";")):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {number}")
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def _switch_to_wal(self) -> None:
        """Two processes that create the file at once: this switch does not wait by the connection's timeout."""
        until = time.monotonic() + 10
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return

    def _query(self, sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")  # not deferred: an upgrade of the lock in mid-way cannot wait
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # on some errors (disk full) SQLite has rolled back already
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> StoreError:
        text = str(error)
        if "locked" in text:
            hint = "Another program holds it; close it and try again."
        elif "full" in text:
            hint = "The disk is full; free some space. What was saved before is intact."
        elif "malformed" in text or "not a database" in text:
            hint = "The file is damaged: move it away (a new one is made), or put a backup in its place."
        else:
            hint = (
                "Check that the folder exists and that you may write there, or choose another with POCKETREEL_DATA_DIR."
            )
        return StoreError(f"The history {self._path} cannot be used: {text}. {hint}")

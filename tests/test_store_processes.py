"""The store under several processes at once, some of which are killed in the middle: what was said to be done is done.

Each process writes down what the store told it, in a file of its own and before it goes on. Afterwards these files and
the database must tell one story.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.errors import StoreError
from app.schema import ErrorKind, Job, JobStatus
from app.store import Store
from tests import values

ROOT = Path(__file__).resolve().parent.parent
FINAL = (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELED)


def act(folder: Path, name: str, seed: int, seconds: float) -> None:
    """Random operations, until the time is up or the process is killed."""
    chance, store = random.Random(seed), Store(folder / "db.sqlite3")
    until, count = time.monotonic() + seconds, 0
    with (folder / f"{name}.said").open("ab", buffering=0) as said:

        def note(what: str, job_id: str, **more: object) -> None:
            said.write(json.dumps({"what": what, "job": job_id, **more}).encode() + b"\n")

        while time.monotonic() < until:
            at = datetime.now(UTC)
            known = [job.id for job in store.list(limit=30)]
            kind = chance.random()
            if kind < 0.2 or not known:
                job_id = f"{name}-{count}"
                count += 1
                store.add(values.job(job_id), runner=name)
                note("added", job_id)
            elif kind < 0.4:
                store.start(chance.choice(known), at=at, log_path=Path("log"))
            elif kind < 0.6:
                job_id, status = chance.choice(known), chance.choice(FINAL)
                error = ErrorKind.CRASH if status is JobStatus.FAILED else None
                if store.finish(job_id, status=status, at=at, error_kind=error) is not None:
                    note("finished", job_id, status=status)
            elif kind < 0.7:
                job_id = chance.choice(known)
                if store.resume(job_id, runner=name) is not None:
                    note("resumed", job_id)
            elif kind < 0.8:
                store.note(chance.choice(known), log_path=Path(f"log {count}"))
            elif kind < 0.9:
                store.request_cancel(chance.choice(known))
            else:
                for job, _ in store.unfinished():
                    assert not job.status.final
    store.close()


def story(folder: Path) -> tuple[set[str], dict[str, list[JobStatus]]]:
    """What the processes were told: jobs added, and the ends of each."""
    added, ends = set(), dict[str, list[JobStatus]]()
    for path in folder.glob("*.said"):
        for line in path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # its writer was killed in the middle
                continue
            if entry["what"] == "added":
                added.add(entry["job"])
            elif entry["what"] == "finished":
                ends.setdefault(entry["job"], []).append(JobStatus(entry["status"]))
            else:
                ends.setdefault(entry["job"], []).append(JobStatus.PENDING)
    return added, ends


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_processes_that_die_leave_one_story(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.test_store_processes", str(tmp_path), f"p{n}", str(seed + n), "4"], cwd=ROOT
        )
        for n in range(4)
    ]
    time.sleep(2.5)
    for process in chance.sample(processes, 2):
        time.sleep(chance.random() * 0.5)
        process.send_signal(signal.SIGKILL)
    codes = [process.wait(60) for process in processes]
    assert sorted(codes) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    with sqlite3.connect(tmp_path / "db.sqlite3") as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = db.execute("SELECT id, status, document FROM jobs").fetchall()
    db.close()
    jobs = {job_id: Job.model_validate_json(document) for job_id, _, document in rows}
    assert len(jobs) == len(rows) > 20
    assert all(jobs[job_id].status == status for job_id, status, _ in rows), "column and document agree"
    added, ends = story(tmp_path)
    assert added <= set(jobs), "what was said to be added is there"
    # one that was killed between the commit and its note left at most one thing untold
    assert len(set(jobs) - added) <= 2
    untold = 0
    for job_id, told in ends.items():
        finishes = sum(status.final for status in told)
        resumes = len(told) - finishes
        untold += max(0, finishes - resumes - 1, resumes - finishes)
        if resumes == 0 and jobs[job_id].status.final:
            assert [status for status in told if status.final] == [jobs[job_id].status]
    assert untold <= 2, "an end is told once only, unless the job was taken up again in between"
    assert any(len(told) > 1 for told in ends.values())


def test_a_locked_database_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "db.sqlite3")
    store._db.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(tmp_path / "db.sqlite3", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="Another program holds it"):
            store.add(values.job(), runner="r")
        assert store.list() == [], "reading goes on"
        other.execute("ROLLBACK")
        store.add(values.job(), runner="r")
        assert len(store.list()) == 1
    finally:
        other.close()
        store.close()


if __name__ == "__main__":
    os.chdir(ROOT)
    act(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))

from __future__ import annotations

import sqlite3
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.errors import StoreError
from app.schema import ErrorKind, JobStatus
from app.store import MIGRATIONS, Store
from tests import values

NOW = datetime.now(UTC)


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path / "a folder" / "db.sqlite3")
    yield store
    store.close()


def test_a_job_survives_the_process(tmp_path: Path) -> None:
    first = Store(tmp_path / "db.sqlite3")
    first.add(values.job(), runner="r")
    first.close()
    second = Store(tmp_path / "db.sqlite3")
    assert second.get("j1") == second.list(owner="local")[0]
    assert second.get("j1").request.prompt == "a red ball"
    assert second.get("unknown") is None
    second.close()


def test_owners_see_only_theirs_newest_first(store: Store) -> None:
    for number, owner in enumerate(["ann", "bob", "ann"]):
        store.add(values.job(f"j{number}", owner=owner), runner="r")
    assert [job.id for job in store.list(owner="ann")] == ["j2", "j0"]
    assert [job.id for job in store.list(owner="ann", limit=1)] == ["j2"]
    assert [job.id for job in store.list()] == ["j2", "j1", "j0"]


def test_transitions_are_guarded(store: Store) -> None:
    store.add(values.job(), runner="r")
    assert store.start("j1", at=NOW, log_path=Path("log")).status is JobStatus.RUNNING
    assert store.start("j1", at=NOW, log_path=Path("log")) is None
    failed = store.finish("j1", status=JobStatus.FAILED, at=NOW, error_kind=ErrorKind.CRASH, error="gone")
    assert failed.error_kind is ErrorKind.CRASH
    assert store.finish("j1", status=JobStatus.COMPLETED, at=NOW) is None
    assert store.get("j1").status is JobStatus.FAILED
    assert store.finish("unknown", status=JobStatus.FAILED, at=NOW) is None


def test_one_of_many_finishers_wins(store: Store) -> None:
    store.add(values.job(), runner="r")
    won: list[str] = []

    def finish(error: str) -> None:
        if store.finish("j1", status=JobStatus.FAILED, at=NOW, error=error):
            won.append(error)

    threads = [threading.Thread(target=finish, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("j1").error == won[0]


def test_unfinished_names_the_runner(store: Store) -> None:
    store.add(values.job("j1"), runner="r1")
    store.add(values.job("j2"), runner="r2")
    store.finish("j1", status=JobStatus.CANCELED, at=NOW)
    assert [(job.id, runner) for job, runner in store.unfinished()] == [("j2", "r2")]


def test_cancel_is_left_for_another_process(store: Store, tmp_path: Path) -> None:
    store.add(values.job(), runner="r")
    assert not store.cancel_requested("j1")
    store.request_cancel("j1")
    assert store.cancel_requested("j1")


def test_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite3"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StoreError, match="newer Pocketreel"):
        Store(path)


def test_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite3"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="move it away"):
        Store(path)
    assert path.read_bytes().startswith(b"not a database")


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="POCKETREEL_DATA_DIR"):
        Store(tmp_path / "file" / "db.sqlite3")


def test_failed_transaction_leaves_nothing(store: Store) -> None:
    store.add(values.job(), runner="r")
    with pytest.raises(StoreError):
        store.add(values.job(), runner="r")  # the same id
    store.add(values.job("j2"), runner="r")  # no transaction was left open
    assert len(store.list()) == 2


def test_written_durably(store: Store) -> None:
    assert store._query("PRAGMA journal_mode", ()) == [("wal",)]
    assert store._query("PRAGMA synchronous", ()) == [(2,)]


def test_a_damaged_job_hides_no_other(store: Store, tmp_path: Path) -> None:
    store.add(values.job("good"), runner="r")
    store.add(values.job("bad"), runner="r")
    with sqlite3.connect(tmp_path / "a folder" / "db.sqlite3") as db:
        db.execute("UPDATE jobs SET document = '{\"id\": 1}' WHERE id = 'bad'")
    db.close()
    assert [job.id for job in store.list()] == ["good"]
    assert [job.id for job, _ in store.unfinished()] == ["good"]
    assert store.get("bad") is None


def test_facts_are_kept(store: Store) -> None:
    assert store.fact("a") is None
    store.keep_fact("a", "1")
    store.keep_fact("a", "2")
    assert store.fact("a") == "2"


def test_a_history_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite3"
    with sqlite3.connect(path) as db:
        for statement in filter(str.strip, MIGRATIONS[0].split(";")):
            db.execute(statement)
        db.execute("PRAGMA user_version = 1")
        row = ("j1", "local", "pending", "r", values.job().model_dump_json())
        db.execute("INSERT INTO jobs (id, owner, status, runner, document) VALUES (?, ?, ?, ?, ?)", row)
    db.close()
    store = Store(path)
    assert store.get("j1") is not None
    store.keep_fact("a", "1")
    store.close()

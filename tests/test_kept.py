"""What unfinished jobs keep: within the quota, and only as long as somebody may need it."""

from __future__ import annotations

import os
import time
from typing import Any

from app.config import Settings
from app.kept import Kept


def kept(settings: Settings, **changes: Any) -> Kept:
    return Kept(settings.model_copy(update=changes))


def put(settings: Settings, job_id: str, size: int, *, age: float = 0.0) -> None:
    folder = settings.checkpoints / job_id
    folder.mkdir(parents=True)
    (folder / "steps.safetensors").write_bytes(bytes(size))
    then = time.time() - age
    os.utime(folder / "steps.safetensors", (then, then))


def names(settings: Settings) -> set[str]:
    return {path.name for path in settings.checkpoints.iterdir()}


def test_a_run_gets_what_the_others_leave_of_the_quota(settings: Settings) -> None:
    put(settings, "other", 300)
    put(settings, "own", 500)
    order = kept(settings, checkpoint_quota_bytes=1000).order("own", resume=True, unfinished={"own"})
    assert (order.folder, order.quota_bytes, order.resume) == (settings.checkpoints / "own", 700, True)


def test_room_is_made_by_what_was_left_longest(settings: Settings) -> None:
    put(settings, "old", 400, age=100)
    put(settings, "older", 400, age=200)
    put(settings, "waits", 400, age=300)
    order = kept(settings, checkpoint_quota_bytes=1700).order("own", resume=False, unfinished={"own", "waits"})
    assert names(settings) == {"old", "waits"}
    assert order.quota_bytes == 900


def test_without_a_quota_nothing_is_kept(settings: Settings) -> None:
    assert kept(settings, checkpoint_quota_bytes=0).order("own", resume=False, unfinished=()).quota_bytes == 0


def test_what_nobody_can_resume_is_removed(settings: Settings) -> None:
    for job_id, days in (
        ("gone", 0.0),
        ("failed", 1.0),
        ("long ago", 3.0),
        ("clock was wrong", 9000.0),
        ("future", -9.0),
    ):
        put(settings, job_id, 1, age=days * 86400)
    needed = {"failed", "long ago", "clock was wrong", "future"}
    kept(settings, checkpoint_days=2.0).sweep(needed=needed)
    assert names(settings) == {"failed", "clock was wrong", "future"}


def test_a_folder_that_is_not_there_is_no_error(settings: Settings) -> None:
    assert not kept(settings).any
    kept(settings).sweep(needed=())
    kept(settings).forget("nobody")

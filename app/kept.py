"""What unfinished jobs keep to be resumed from: one folder a job, within a quota, removed when nobody needs it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from app import events
from app.config import Settings

MOST_DAYS = 366


class Kept:
    """The folder `checkpoints` of the data folder. What lies in it is `app.runtime.resume`'s matter."""

    def __init__(self, settings: Settings) -> None:
        self._root = settings.checkpoints
        self._quota = settings.checkpoint_quota_bytes
        self._days = settings.checkpoint_days
        self._seconds = settings.checkpoint_seconds

    def order(self, job_id: str, *, resume: bool, unfinished: Collection[str] | None) -> events.Keep:
        """What a run is told. Makes room by removing what was left longest by jobs that have ended.

        `unfinished`: jobs that have not; None where that is not known, so that no room can be made.
        """
        others = sorted((path for path in self._folders() if path.name != job_id), key=_changed)
        sizes = {path: _size(path) for path in others}
        for path in others:
            if unfinished is None or sum(sizes.values()) <= self._quota // 2:
                break
            if path.name not in unfinished:
                self.forget(path.name)
                del sizes[path]
        return events.Keep(
            folder=self._root / job_id,
            quota_bytes=max(0, self._quota - sum(sizes.values())),
            resume=resume,
            seconds=self._seconds,
        )

    @property
    def any(self) -> bool:
        """Whether anything is kept at all."""
        return bool(self._folders())

    def sweep(self, *, needed: Collection[str]) -> None:
        """Remove what belongs to no job that runs, waits or could be resumed, or was left for too long."""
        for path in self._folders():
            days = (time.time() - _changed(path)) / 86400
            # a clock that jumped by years says nothing of the age
            if path.name not in needed or self._days < days < self._days + MOST_DAYS:
                self.forget(path.name)

    def forget(self, job_id: str) -> None:
        """Remove what a job kept."""
        shutil.rmtree(self._root / job_id, ignore_errors=True)

    def _folders(self) -> list[Path]:
        try:
            return [path for path in self._root.iterdir() if path.is_dir()]
        except OSError:  # nothing was ever kept
            return []


def _changed(folder: Path) -> float:
    try:
        return max((path.stat().st_mtime for path in folder.iterdir()), default=folder.stat().st_mtime)
    except OSError:  # it was removed meanwhile
        return 0.0


def _size(folder: Path) -> int:
    total = 0
    with suppress(OSError):
        for path in folder.rglob("*"):
            with suppress(OSError):
                total += path.stat().st_size
    return total

"""How a run is stopped from inside: a flag, set by the thread that reads commands, looked at by the one that computes.

No torch here: the flag must exist before the seconds that importing torch takes.
"""

from __future__ import annotations

import threading


class Interrupted(BaseException):
    """Raised inside a run that was canceled. A BaseException, so that no library's `except Exception` swallows it."""


class Control:
    """The job that this worker has, and whether it was canceled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._canceled = False
        self._job_id: str | None = None

    @property
    def job_id(self) -> str | None:
        return self._job_id

    def begin(self, job_id: str) -> None:
        """The job was received; a cancel counts from now on, also while it still waits for the imports."""
        with self._lock:
            self._job_id, self._canceled = job_id, False

    def end(self, job_id: str) -> None:
        """The next job may have been received already, right after this one's last event; then this changes nothing."""
        with self._lock:
            if job_id == self._job_id:
                self._job_id, self._canceled = None, False

    def cancel(self, job_id: str) -> None:
        """Ignored for any other job than the present one: that one has just ended."""
        with self._lock:
            if job_id == self._job_id:
                self._canceled = True

    def check(self) -> None:
        """Raise `Interrupted` if the present job was canceled."""
        if self._canceled:
            raise Interrupted

"""Parent side of a worker process: spawn, stream its events, cancel, enforce the time limit, end it, replace it.

The worker is `app.runtime.loop` in a process group of its own, so that it and its ffmpeg are ended together. Each wait
looks at death first, then at the deadline, then at a cancel. A run always ends with exactly one of Completed, Failed
and Canceled, whatever the process does.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

import psutil

from app import events
from app.errors import WorkerCrashed
from app.schema import ErrorKind, JsonObject, Progress, Stage

Outcome = events.Completed | events.Failed | events.Canceled

TERMINATE_SECONDS = 0.3
"""Between asking a process to end and ending it by force. It holds nothing that is worth a longer wait."""
_TICK_SECONDS = 0.05
_ROOT = str(Path(__file__).resolve().parent.parent)
# -P and an explicit root: `-m` would put the working folder first, where any folder called `app` would shadow ours
_BOOT = "import sys; sys.path.insert(0, {root!r}); from app.runtime.{module} import main; main()"


def command_line(module: str) -> list[str]:
    """How a module of `app.runtime` is run in a process of its own."""
    return [sys.executable, "-P", "-c", _BOOT.format(root=_ROOT, module=module)]


def torch_view() -> JsonObject:
    """What the worker's torch sees of the GPUs (`app.runtime.view`); takes the seconds that importing torch takes.

    Raises:
        WorkerCrashed: torch cannot even be imported; the message carries its last words.
    """
    ran = subprocess.run(command_line("view"), capture_output=True, text=True, timeout=120, check=False)
    if ran.returncode != 0:
        words = ran.stderr.strip().splitlines() or [f"status {ran.returncode}"]
        raise WorkerCrashed(f"torch cannot be used: {words[-1]}. Install Pocketreel again as the README says.")
    document: JsonObject = json.loads(ran.stdout)
    return document


class Worker:
    """One worker process, started on demand and kept warm. Not for use by two threads at once."""

    def __init__(
        self,
        logs: Path,
        *,
        cancel_grace_seconds: float,
        log_files_kept: int = 20,
        command: Sequence[str] | None = None,
    ) -> None:
        """`command` starts the process that speaks `app.events`; None is this program's own."""
        self._command = list(command or command_line("loop"))
        self._logs = logs
        self._grace = cancel_grace_seconds
        self._kept = log_files_kept
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.Queue[events.Event | None] = queue.Queue()
        self._listener: threading.Thread | None = None
        self._log: Path | None = None
        self.idle_since = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def ensure_started(self) -> Path:
        """Start a process unless one runs; returns the log file of the one that runs."""
        if self.alive and self._log is not None:
            return self._log
        self.stop()
        self._logs.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._logs.glob("worker-*.log"))[: -self._kept + 1 or None]:
            old.unlink(missing_ok=True)
        self._log = self._logs / f"worker-{datetime.now():%Y%m%d-%H%M%S-%f}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"},
                start_new_session=os.name == "posix",
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
                | getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        self._events = queue.Queue()
        self._listener = threading.Thread(
            target=_listen, args=(self._process.stdout, self._events), name="worker-events", daemon=True
        )
        self._listener.start()
        return self._log

    def run(
        self,
        run: events.Run,
        *,
        canceled: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> Outcome:
        """Have one video made. Returns how it ended; after a forced end the scratch folder is removed here.

        The time limit `run.request.timeout_seconds` counts from this call and holds even when the worker hangs.
        """
        log = self.ensure_started()
        deadline = time.monotonic() + run.request.timeout_seconds
        stage, asked_at = Stage.LOAD, None
        self._send(run)
        try:
            while True:
                try:
                    event = self._events.get(timeout=_TICK_SECONDS)
                except queue.Empty:
                    event = events.Heartbeat(job_id=run.job_id, rss_bytes=0)
                if event is None:
                    return self._ended(run, stage, log, was_canceled=asked_at is not None)
                if isinstance(event, Outcome) and event.job_id == run.job_id:
                    if isinstance(event, events.Failed) and not event.usable:
                        self.stop()
                    return event
                if isinstance(event, events.Progressed) and event.job_id == run.job_id:
                    stage = event.progress.stage
                    on_progress(event.progress)
                now = time.monotonic()
                if now > deadline:
                    self.kill()
                    return self._failed(
                        run,
                        ErrorKind.TIMEOUT,
                        f"The time limit of {run.request.timeout_seconds:g} s passed during the stage {stage}, so the "
                        "run was stopped. Raise the limit, or choose fewer steps, fewer frames or a smaller size.",
                    )
                if asked_at is None and canceled():
                    asked_at = now
                    self._send(events.Cancel(job_id=run.job_id))
                if asked_at is not None and now - asked_at > self._grace:
                    self.kill()
                    return events.Canceled(job_id=run.job_id)
        finally:
            if not self.alive:
                shutil.rmtree(run.scratch, ignore_errors=True)
            self.idle_since = time.monotonic()

    def kill(self) -> None:
        """End the process group now: asked first, then by force."""
        process = self._process
        if process is None:
            return
        members: list[psutil.Process] = []
        if process.poll() is None:
            members = _members(process.pid)
            _signal(process, members, hard=False)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TERMINATE_SECONDS)
        _signal(process, members, hard=True)  # also when it died by itself: its ffmpeg may live on
        process.wait()
        if self._listener is not None:
            self._listener.join(1.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close(pipe)
        self._process = None

    def stop(self) -> None:
        """Let an idle process end by itself, by force if it doesn't; its memory returns to the system."""
        if self.alive and self._process is not None and self._process.stdin is not None:
            _close(self._process.stdin)  # the end of its stdin tells it that nobody is left
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TERMINATE_SECONDS)
        self.kill()

    def _send(self, command: events.Run | events.Cancel) -> None:
        assert self._process is not None  # noqa: S101 - run() has started it
        assert self._process.stdin is not None  # noqa: S101
        with suppress(OSError):  # it has just died: the end of its events says so
            self._process.stdin.write(events.encode(command))
            self._process.stdin.flush()

    def _ended(self, run: events.Run, stage: Stage, log: Path, *, was_canceled: bool) -> Outcome:
        process = self._process
        status = process.wait() if process is not None else 0
        self.kill()
        if was_canceled:
            return events.Canceled(job_id=run.job_id)
        how = f"status {status}"
        if status < 0:
            how = f"signal {signal.Signals(-status).name}"
        hint = "Generate again; if it happens again, the log says more"
        if status == -getattr(signal, "SIGKILL", 9):
            hint = (
                "Often the system does this when memory (RAM) runs out: close other programs or choose a smaller size"
            )
        return self._failed(
            run, ErrorKind.CRASH, f"The worker process ended by itself ({how}) during the stage {stage}. {hint}: {log}"
        )

    @staticmethod
    def _failed(run: events.Run, kind: ErrorKind, message: str) -> events.Failed:
        return events.Failed(job_id=run.job_id, kind=kind, message=message, usable=False)


def _listen(stream: IO[bytes], inbox: queue.Queue[events.Event | None]) -> None:
    """Events into the queue until the pipe ends, which None marks; a broken last line (a kill) ends it too."""
    try:
        for line in stream:
            inbox.put(events.EVENTS.validate_json(line))
    except (OSError, ValueError):
        pass  # closed by kill(), or half a line: what follows is the same either way
    finally:
        inbox.put(None)


def _members(pid: int) -> list[psutil.Process]:
    """The worker's children, seen before it dies: on Windows no process group would find them afterwards."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _signal(process: subprocess.Popen[bytes], members: list[psutil.Process], *, hard: bool) -> None:
    if os.name == "posix":
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL if hard else signal.SIGTERM)
        return
    for member in members:
        with suppress(psutil.Error):
            member.kill()
    if hard and process.poll() is None:
        process.kill()


def _close(pipe: IO[bytes]) -> None:
    with suppress(OSError):
        pipe.close()

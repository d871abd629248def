"""Parent side of a worker process: spawn, stream its events, cancel, enforce the time limit, end it, replace it.

The worker is `app.runtime.loop` in a process group of its own, so that it and its ffmpeg are ended together. Each wait
looks at death first, then at what `watch` finds (deadlines, standstill, RAM), then at a cancel. A run always ends with
exactly one of Completed, Failed and Canceled, whatever the process does.
"""

from __future__ import annotations

import json
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from app import events
from app.errors import WorkerCrashed
from app.process import TERMINATE_SECONDS, Process
from app.schema import ErrorKind, JsonObject, Progress, Receipt
from app.watch import Watch, oom_kills

Outcome = events.Completed | events.Failed | events.Canceled

KILLED = 9
"""SIGKILL, which Windows has no name for."""
_TICK_SECONDS = 0.05
_ROOT = str(Path(__file__).resolve().parent.parent)
# -P and an explicit root: `-m` would put the working folder first, where any folder called `app` would shadow ours
_BOOT = "import sys; sys.path.insert(0, {root!r}); from app.runtime.{module} import main; sys.exit(main())"


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
    """One worker process, started on demand and kept warm. Only `run`'s caller may use it, one thread at a time."""

    def __init__(
        self,
        logs: Path,
        *,
        cancel_grace_seconds: float,
        log_files_kept: int = 20,
        command: Sequence[str] | None = None,
    ) -> None:
        """`command` starts the process that speaks `app.events`; None is this program's own."""
        self.command = list(command or command_line("loop"))
        self.environment: dict[str, str] = {}
        """For the next process that is started, on top of this process's own."""
        self._logs = logs
        self._grace = cancel_grace_seconds
        self._kept = log_files_kept
        self._process: Process | None = None
        self._beat: events.Heartbeat | None = None
        self.idle_since = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        """Of the process that lives, else None."""
        process = self._process
        return process.pid if process is not None and process.alive else None

    def ensure_started(self) -> Path:
        """Start a process unless one lives; returns its log file.

        Raises:
            OSError: the log folder cannot be written, or the system starts no more processes.
        """
        if self._process is not None and self._process.alive:
            self._process.shorten_log()
            return self._process.log
        self._beat = None
        self._logs.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._logs.glob("worker-*.log"))[: -self._kept + 1 or None]:
            with suppress(OSError):  # on Windows that of another living worker cannot be removed
                old.unlink()
        self._process = Process(
            self.command, self._logs / f"worker-{datetime.now():%Y%m%d-%H%M%S-%f}.log", self.environment
        )
        return self._process.log

    def run(
        self,
        run: events.Run,
        *,
        canceled: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> Outcome:
        """Have one video made. Returns how it ended; unless it is completed, the scratch folder is gone afterwards.

        The time limit `run.request.timeout_seconds` counts from this call and holds even when the worker hangs.

        Raises:
            OSError: no process could be started.
        """
        self.ensure_started()
        assert self._process is not None  # noqa: S101 - for the type checker
        outcome: Outcome | None = None
        try:
            self._process.send(run)
            outcome = self._follow(run, self._process, canceled, on_progress)
        finally:
            if outcome is None or (isinstance(outcome, events.Failed) and not outcome.usable):
                self.stop() if outcome is not None else self.kill()
            if not isinstance(outcome, events.Completed):
                _remove(run.scratch)
            self.idle_since = time.monotonic()
        return outcome

    def kill(self) -> None:
        """End the process and its children now."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def stop(self) -> None:
        """Let an idle process end by itself, by force if it doesn't; its memory returns to the system."""
        if self._process is not None and self._process.alive:
            self._process.end_input()
            self._process.wait(TERMINATE_SECONDS)
        self.kill()

    def _follow(
        self,
        run: events.Run,
        process: Process,
        canceled: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> Outcome:
        watch = Watch(run, process.pid)
        kills = oom_kills()
        asked_at: float | None = None
        while True:
            with suppress(queue.Empty):
                event = process.events.get(timeout=_TICK_SECONDS)
                if event is None:
                    return self._ended(run, process, watch, kills, asked_at)
                if isinstance(event, Outcome) and event.job_id == run.job_id:
                    return _told(event, watch, asked_at)
                if isinstance(event, events.Progressed) and event.job_id == run.job_id:
                    watch.saw(event.progress)
                    on_progress(event.progress)
                elif isinstance(event, events.Heartbeat):
                    self._beat = event
            if (found := watch.look()) is not None:
                kind, message = found
                if kind is ErrorKind.STALL:
                    process.dump()
                self.kill()
                return _failed(run, kind, message, watch)
            now = time.monotonic()
            if asked_at is None and canceled():
                asked_at = now
                process.send(events.Cancel(job_id=run.job_id))
            if asked_at is not None and now - asked_at > self._grace:
                return self._forced(run, asked_at)

    def _forced(self, run: events.Run, asked_at: float) -> events.Canceled:
        """It did not stop by itself: its process does."""
        held, vram = self.rss_bytes(), self.vram_bytes
        self.kill()
        receipt = Receipt(
            seconds=time.monotonic() - asked_at,
            forced=True,
            ram_before_bytes=held,
            ram_after_bytes=0,
            vram_before_bytes=vram,
            vram_after_bytes=dict.fromkeys(vram, 0),
        )
        return events.Canceled(job_id=run.job_id, receipt=receipt)

    @property
    def vram_bytes(self) -> dict[str, int]:
        """What torch has reserved in the process, by device, as it last told."""
        return self._beat.vram_bytes if self._beat is not None else {}

    def rss_bytes(self) -> int:
        """What the process holds of RAM; 0 without one."""
        pid = self.pid
        try:
            return int(psutil.Process(pid).memory_info().rss) if pid is not None else 0
        except psutil.Error:  # it has just ended
            return 0

    def _ended(
        self, run: events.Run, process: Process, watch: Watch, kills: int | None, asked_at: float | None
    ) -> Outcome:
        status = process.wait(1.0)
        stage = watch.progress.stage
        if asked_at is not None:
            return self._forced(run, asked_at)
        self.kill()
        now_killed = oom_kills()
        if status in (-KILLED, 128 + KILLED) and kills is not None and now_killed != kills:
            return _failed(
                run,
                ErrorKind.RAM,
                f"The system ended the worker process during the stage {stage} because memory (RAM) ran out. Close "
                "other programs, or choose a smaller size or fewer frames.",
                watch,
            )
        hint = "If it happens again, the log says more"
        if status is None:
            how = "spoke nonsense and was ended"
        elif status < 0:
            how = f"ended by itself (signal {_signal_name(-status)})"
        else:
            how = f"ended by itself (status {status})"
        if status == -KILLED and now_killed is None:
            hint = (
                "Often the system does this when memory (RAM) runs out: close other programs or choose a smaller size"
            )
        message = f"The worker process {how} during the stage {stage}. {hint}."
        return _failed(run, ErrorKind.CRASH, message, watch)


def _told(event: Outcome, watch: Watch, asked_at: float | None) -> Outcome:
    """The worker's own word, with what only the parent knows."""
    if isinstance(event, events.Failed) and event.progress is None:
        return event.model_copy(update={"progress": watch.progress})
    if isinstance(event, events.Canceled) and event.receipt is not None and asked_at is not None:
        receipt = event.receipt.model_copy(update={"seconds": time.monotonic() - asked_at})
        return event.model_copy(update={"receipt": receipt})
    return event


def _failed(run: events.Run, kind: ErrorKind, message: str, watch: Watch) -> events.Failed:
    return events.Failed(job_id=run.job_id, kind=kind, message=message, usable=False, progress=watch.progress)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return str(number)


def _remove(folder: Path) -> None:
    """Also on Windows, where an ffmpeg that is just ending still holds its file for a moment."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)

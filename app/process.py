"""A worker process and its pipes, as the parent sees them. `worker` decides what it does; this is how it is reached."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from app import events
from app.schema import Value

TERMINATE_SECONDS = 0.3
"""Between asking a process to end and ending it by force. It holds nothing that is worth a longer wait."""
DUMP_SECONDS = 0.5
"""For the stacks of a worker that hangs to come into its log."""
LOG_BYTES = 4 * 2**20
"""A log that is longer is cut to its last quarter before the next job."""


class Process:
    """One worker process with its two pipes, each owned by a thread, so that no caller ever blocks on one."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self.events: queue.Queue[events.Event | None] = queue.Queue()
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        with log.open("ab") as stderr:  # each write at the end, wherever that is: `shorten_log` may have moved it
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"},
                start_new_session=os.name == "posix",
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
                | getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None  # noqa: S101 - for the type checker; PIPE was asked for
        assert self._popen.stdout is not None  # noqa: S101
        for target, arguments in (
            (_listen, (self._popen.stdout, self.events)),
            (_write, (self._popen.stdin, self._outbox)),
        ):
            threading.Thread(target=target, args=arguments, name=f"worker{target.__name__}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """On finding it dead, its process group is ended too: its ffmpeg may live on."""
        if self._popen.returncode is not None:
            return False
        if not self._exited():
            return True
        self.kill()
        return False

    def send(self, command: Value) -> None:
        """Never blocks; to a process that has just died, nothing is sent, and the end of its events says so."""
        self._outbox.put(events.encode(command))

    def dump(self) -> None:
        """Have the stacks of all its threads written to the log."""
        if hasattr(signal, "SIGUSR1"):  # also when no Python runs in it, which a command could not reach
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
        else:
            self.send(events.Dump())
        self.wait(DUMP_SECONDS)

    def shorten_log(self) -> None:
        """A worker may live for weeks, and some libraries write much."""
        with suppress(OSError):  # on Windows its writer may forbid it; the next worker has a new one
            if self.log.stat().st_size > LOG_BYTES:
                with self.log.open("rb+") as file:
                    file.seek(-LOG_BYTES // 4, os.SEEK_END)
                    end = file.read()
                    file.seek(0)
                    file.truncate()
                    file.write(b"[what was before is cut]\n" + end)

    def wait(self, seconds: float) -> int | None:
        """Its exit status (negative: the signal), None if it still lives after `seconds`."""
        until = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > until:
                return None
            time.sleep(0.01)
        return self._popen.returncode

    def end_input(self) -> None:
        """The end of its stdin tells it that nobody is left."""
        self._outbox.put(None)

    def kill(self) -> None:
        """End the process group now: asked first, then by force."""
        if self._popen.returncode is not None:
            return
        if os.name == "posix":
            # not reaped yet, so the group's number cannot be anybody else's
            _signal_group(self.pid, signal.SIGTERM)
            until = time.monotonic() + TERMINATE_SECONDS
            while not self._exited() and time.monotonic() < until:
                time.sleep(0.01)
            _signal_group(self.pid, signal.SIGKILL)
        else:
            for child in _children(self.pid):
                with suppress(psutil.Error):
                    child.kill()
            self._popen.kill()
        self._popen.wait()
        self.end_input()

    def _exited(self) -> bool:
        """Whether it has ended; on POSIX without reaping it, see `kill`."""
        if os.name != "posix":
            return self._popen.poll() is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has just reaped it
            return True


def _listen(stream: IO[bytes], inbox: queue.Queue[events.Event | None]) -> None:
    """Events into the queue until the pipe ends, which None marks; a broken line ends it too."""
    with suppress(OSError, ValueError), stream:
        for line in stream:
            inbox.put(events.EVENTS.validate_json(line))
    inbox.put(None)


def _write(stream: IO[bytes], outbox: queue.Queue[bytes | None]) -> None:
    """Commands into the pipe until None, or until nobody reads any more."""
    with suppress(OSError, ValueError), stream:
        while (data := outbox.get()) is not None:
            stream.write(data)
            stream.flush()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: not permitted for a group of zombies
        os.killpg(pid, number)

"""A time limit that holds on every system: the work runs in a process of its own, which is ended from outside.

An alarm signal does not exist on Windows, and no thread can stop a call into C. Should the watching process itself be
killed, the work notices by the end of its stdin (`end_with_parent`). Not covered: processes that the work starts in a
further group of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

import psutil

from app.errors import TimedOut


def run_limited(command: Sequence[str], seconds: float) -> int:
    """Run a command that calls `end_with_parent`, and end it and all that it started when the time is up.

    Returns: its exit status; 128 and the signal's number if a signal ended it.

    Raises:
        TimedOut: after `seconds`; nothing of it runs any more.
    """
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # nothing is written to it: its end is the message
        start_new_session=os.name == "posix",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    try:
        status = child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimedOut(f"The time limit of {seconds:g} s passed, so it was stopped.") from None
    finally:  # an interrupt from the keyboard reaches this process only
        _end(child)
    return status if status >= 0 else 128 - status


def end_with_parent() -> None:
    """From now on this process ends when the one that holds the other end of its stdin has ended."""

    def watch() -> None:
        # not sys.stdin: a thread that waits in it makes the interpreter's own end fail
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is None:
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):  # macOS: not permitted for a group of zombies
                os.killpg(child.pid, signal.SIGKILL)  # not reaped yet, so the number cannot be anybody else's
        else:
            with suppress(psutil.Error):
                for process in psutil.Process(child.pid).children(recursive=True):
                    process.kill()
            child.kill()
        child.wait()
    if child.stdin is not None:
        child.stdin.close()

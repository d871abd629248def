"""The time limit: it ends everything that was started, also when nobody is left to watch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.demo.limit import run_limited
from app.errors import TimedOut

REPOSITORY = Path(__file__).parents[2]
# a process that starts another and writes both numbers; neither listens to a polite request
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
if hasattr(signal, "SIGTERM"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
path = pathlib.Path(sys.argv[1])
path.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".tmp").replace(path)
time.sleep(120)
"""
WATCHED = "import sys, time; from app.demo.limit import end_with_parent; end_with_parent(); time.sleep(120)"
WATCHING = """
import sys
from app.demo.limit import run_limited
run_limited([sys.executable, "-c", sys.argv[1]], 120)
"""


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_passed_on(status: int) -> None:
    assert run_limited([sys.executable, "-c", f"raise SystemExit({status})"], 60) == status


@pytest.mark.skipif(os.name != "posix", reason="no signals")
def test_a_signal_becomes_a_status_as_shells_say_it() -> None:
    assert run_limited([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"], 60) == 143


def test_when_the_time_is_up_all_of_it_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(TimedOut, match="The time limit of 3 s passed"):
        run_limited([sys.executable, "-c", STUBBORN, str(tmp_path / "pids")], 3)
    assert time.monotonic() - started < 30
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_it_ends_when_the_watching_process_is_killed() -> None:
    watching = subprocess.Popen([sys.executable, "-c", WATCHING, WATCHED], cwd=REPOSITORY)
    until = time.monotonic() + 30
    while not (children := psutil.Process(watching.pid).children()) and time.monotonic() < until:
        time.sleep(0.05)
    watching.kill()
    watching.wait()
    assert [gone(child.pid, 30) for child in children] == [True]


@pytest.mark.slow
def test_the_trainer_says_that_its_time_was_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.demo.train", "--smoke", "--out", str(tmp_path / "out"), "--time-limit", "0.5"]
    ran = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 124
    assert "The time limit of 0.5 s passed" in ran.stderr
    assert str(tmp_path / "out.work") in ran.stderr
    assert not (tmp_path / "out").exists()

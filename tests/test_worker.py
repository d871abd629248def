"""The process boundary: what a worker does when it is spoken to badly, and what is left when it ends."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app import events
from app.worker import Worker, command_line, torch_view
from tests import values

RUN = events.Run(
    job_id="j",
    request=values.request(timeout_seconds=60.0),
    plan=values.plan(),
    card=values.card(),
    output_path=Path("/nowhere/clip.mp4"),
    scratch=Path("/nowhere/.scratch"),
    metadata={},
)


def speaking(tmp_path: Path, code: str) -> Worker:
    """A worker that is a few lines of Python instead of ours."""
    return Worker(tmp_path / "logs", cancel_grace_seconds=0.3, command=[sys.executable, "-c", code])


def run(worker: Worker, canceled: bool = False) -> events.Completed | events.Failed | events.Canceled:
    try:
        return worker.run(RUN, canceled=lambda: canceled, on_progress=lambda progress: None)
    finally:
        worker.stop()


def test_messages_survive_the_pipe() -> None:
    assert events.COMMANDS.validate_json(events.encode(RUN)) == RUN
    cancel = events.Cancel(job_id="j")
    assert events.COMMANDS.validate_json(events.encode(cancel)) == cancel


@pytest.mark.parametrize(
    "code",
    [
        "",
        "print('hello')",
        "print('hello', flush=True); import time; time.sleep(60)",
        "import os, time; os.close(1); time.sleep(60)",
        "print('{\"type\": \"comp', end='')",
        "import os; os.abort()",
    ],
)
def test_a_process_that_speaks_nonsense_or_dies_is_a_crash(tmp_path: Path, code: str) -> None:
    outcome = run(speaking(tmp_path, code))
    assert isinstance(outcome, events.Failed)
    assert outcome.kind == "crash"
    assert "during the stage load" in outcome.message


def test_a_deaf_process_is_ended_after_the_grace(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    worker = speaking(tmp_path, deaf)
    began = time.monotonic()
    assert isinstance(run(worker, canceled=True), events.Canceled)
    assert time.monotonic() - began < 2
    assert not worker.alive


def test_a_process_that_does_not_listen_cannot_hold_us_up(tmp_path: Path) -> None:
    """The longest prompts make a message larger than a pipe holds."""
    worker = speaking(tmp_path, "import time; time.sleep(60)")
    long = RUN.model_copy(
        update={"request": values.request(prompt="🎈" * 5000, timeout_seconds=1.0), "metadata": {"again": "🎈" * 20000}}
    )
    began = time.monotonic()
    outcome = worker.run(long, canceled=lambda: False, on_progress=lambda progress: None)
    assert outcome.kind == "timeout"
    assert time.monotonic() - began < 3


def test_an_error_of_the_caller_ends_the_run_too(tmp_path: Path) -> None:
    """Else the worker would go on with a job that counts as failed, and publish it."""
    worker = speaking(tmp_path, "import time; time.sleep(60)")

    def canceled() -> bool:
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError):
        worker.run(RUN, canceled=canceled, on_progress=lambda progress: None)
    assert not worker.alive


@pytest.mark.skipif(os.name != "posix", reason="process groups")
@pytest.mark.parametrize("by_itself", [False, True])
def test_children_of_the_worker_are_ended_with_it(tmp_path: Path, by_itself: bool) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\ntime.sleep(60)"
    )
    worker = speaking(tmp_path, code)
    worker.ensure_started()
    until = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    if by_itself:  # found dead, its group is swept
        os.kill(worker.pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while worker.alive:
            assert time.monotonic() < until
    else:
        worker.kill()
    assert not psutil.wait_procs([child], timeout=5)[1] or child.status() == psutil.STATUS_ZOMBIE


def test_old_logs_are_removed(tmp_path: Path) -> None:
    worker = Worker(tmp_path, cancel_grace_seconds=0.1, log_files_kept=3, command=[sys.executable, "-c", ""])
    for _ in range(6):
        worker.ensure_started()
        worker.kill()
    assert len(list(tmp_path.glob("worker-*.log"))) == 3


def test_the_real_worker_keeps_its_channel_clean_and_ends_with_its_stdin() -> None:
    process = subprocess.Popen(
        command_line("loop"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        for line in process.stdout:
            event = events.EVENTS.validate_json(line)
            if isinstance(event, events.Ready):
                assert event.pid == process.pid
                break
        process.stdin.close()
        assert process.wait(10) == 0


def test_garbage_on_stdin_ends_the_real_worker() -> None:
    process = subprocess.run(command_line("loop"), input=b"garbage\n", capture_output=True, timeout=60, check=False)
    assert b"Invalid JSON" in process.stderr


def test_torch_view_is_plain_data() -> None:
    view = torch_view()
    assert view["torch"]
    assert isinstance(view["devices"], list)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGUSR1"])
def test_no_signal_is_used_that_windows_lacks(name: str) -> None:
    """But behind a question for the system or for the signal itself."""
    for path in sorted((Path(__file__).parents[1] / "app").rglob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr == name and ast.unparse(node.value) == "signal":
                before = "\n".join(source.splitlines()[max(0, node.lineno - 8) : node.lineno])
                assert 'os.name == "posix"' in before or f'hasattr(signal, "{name}")' in before, f"{path}:{node.lineno}"

"""What ends a run from outside, on a clock that the test turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from app import events, watch
from app.schema import GIB, ErrorKind, Progress, Stage
from app.watch import Watch
from tests.test_worker import RUN


class Run:
    """A watch with a clock and a RAM of its own."""

    def __init__(self, **limits: Any) -> None:
        self.now, self.ram = 0.0, 4 * GIB
        run = RUN.model_copy(update={"limits": events.Limits(**limits)})
        self.watch = Watch(run, os.getpid(), clock=lambda: self.now, available=lambda: self.ram)

    def at(self, seconds: float, stage: Stage | None = None, step: int = 0, total: int = 0) -> Any:
        self.now = seconds
        if stage is not None:
            self.watch.saw(Progress(stage=stage, step=step, total=total))
        found = self.watch.look()
        return found[0] if found is not None else None


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> list[watch.Activity]:
    """What the watched process has done, for the test to change; nothing by itself."""
    monkeypatch.setattr(watch, "CAUSE_SECONDS", 0.05)
    done = [watch.Activity(0.0, 0)]
    monkeypatch.setattr(watch, "_activity", lambda pid: done[-1])
    return done


def test_the_jobs_time_limit_counts_what_earlier_tries_took() -> None:
    run = Run()
    assert run.at(59) is None
    assert run.at(61) is ErrorKind.TIMEOUT
    run = Run(spent_seconds=30.0)
    assert run.at(29) is None
    assert run.at(31) is ErrorKind.TIMEOUT


def test_a_stage_has_a_limit_of_its_own() -> None:
    run = Run(stage_seconds={Stage.DECODE: 5.0})
    assert run.at(20, Stage.DENOISE) is None
    assert run.at(25, Stage.DECODE) is None
    assert run.at(31) is ErrorKind.TIMEOUT
    assert "decode" in run.watch.look()[1]


def test_no_progress_for_many_usual_steps_is_a_stall() -> None:
    run = Run(stall_seconds=dict.fromkeys(Stage, 4.0), stall_factor=3.0)
    run.at(1, Stage.DENOISE, 0, 9)
    for step in (1, 2, 3):
        assert run.at(1 + 2 * step, Stage.DENOISE, step, 9) is None
    assert run.watch.patience() == 6.0, "three times the two seconds of a usual step"
    assert run.at(12) is None
    assert run.at(14) is ErrorKind.STALL
    run.now = 20
    kind, words = run.watch.look()
    assert kind is ErrorKind.STALL
    assert "step 4 of 9" in words


def test_a_first_step_has_the_stages_patience() -> None:
    run = Run(stall_seconds={Stage.DENOISE: 10.0})
    assert run.at(1, Stage.DENOISE, 0, 9) is None
    assert run.at(10) is None
    assert run.at(12) is ErrorKind.STALL


def test_stages_that_are_not_watched_may_take_their_time() -> None:
    assert Run(stall_seconds={Stage.DENOISE: 1.0}).at(50, Stage.DECODE) is None


@pytest.mark.parametrize("stage", [Stage.LOAD, Stage.DECODE])
@pytest.mark.parametrize("more", [watch.Activity(0.0, 2 * watch.MOVING_BYTES), watch.Activity(1.0, 0)])
def test_what_reads_or_computes_without_steps_is_no_stall(
    still: list[watch.Activity], stage: Stage, more: watch.Activity
) -> None:
    run = Run(stall_seconds={stage: 5.0})
    run.at(1, stage)
    for second in range(2, 30, 2):
        still[0] = watch.Activity(still[0].cpu_seconds + more.cpu_seconds, still[0].bytes + more.bytes)
        assert run.at(second) is None
    assert run.at(36) is ErrorKind.STALL


def test_computing_in_a_step_of_known_length_is_a_stall(still: list[watch.Activity]) -> None:
    run = Run(stall_seconds={Stage.DENOISE: 4.0}, stall_factor=3.0)
    for step in range(3):
        run.at(1 + step, Stage.DENOISE, step, 9)
    for second in range(4, 8):
        still[0] = watch.Activity(float(second), 0)
        found = run.at(second)
    assert found is None
    assert run.at(9) is ErrorKind.STALL


def test_the_first_step_after_a_resume_is_not_taken_for_many() -> None:
    run = Run(stall_seconds={Stage.DENOISE: 4.0}, stall_factor=3.0)
    run.at(1, Stage.DENOISE, 0, 9)
    run.at(7, Stage.DENOISE, 6, 9)
    assert run.watch.patience() == 4.0
    run.at(13, Stage.DENOISE, 7, 9)
    assert run.watch.patience() == 18.0


def test_a_computer_that_slept_does_not_count() -> None:
    run = Run(stall_seconds=dict.fromkeys(Stage, 10.0))
    assert run.at(1, Stage.DENOISE, 0, 9) is None
    assert run.at(4000) is None, "an hour with the lid closed"
    assert run.at(4008) is None
    assert run.at(4011) is ErrorKind.STALL


def test_ram_must_be_short_several_times() -> None:
    run = Run(ram_floor_bytes=GIB)
    run.ram = GIB // 2
    assert run.at(2) is None
    assert run.at(4) is None
    run.ram = 2 * GIB
    assert run.at(6) is None
    run.ram = GIB // 2
    assert [run.at(second) for second in (8, 10, 12)] == [None, None, ErrorKind.RAM]


def test_available_ram_is_known() -> None:
    assert 0 < watch.available_ram() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "deadlock"),
        ("while True: pass", "computing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "paused"),
    ],
)
def test_causes_in_words(code: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CAUSE_SECONDS", 0.5)
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        until = time.monotonic() + 20
        while words not in watch.cause(process.pid):
            assert time.monotonic() < until, watch.cause(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_ended_has_no_cause() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert watch.cause(process.pid) == "Its process has ended."


@pytest.mark.parametrize(("counter", "words"), [("_swapped", "swapping"), ("_traffic", "waiting for a disk")])
def test_the_system_tells_the_cause(counter: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([0, 2 * watch.MOVING_BYTES])
    monkeypatch.setattr(watch, counter, lambda *_: next(seen))
    assert words in watch.cause(os.getpid())

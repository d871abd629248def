"""Weights that are read from the disk while they compute, and a process that is killed at any moment.

Nothing is ever written, so nothing can be wrong afterwards: the folder is byte for byte as it was, and the next worker
makes the same video from it. For two models: the built-in one, and a tiny Wan 2.2 with two transformers.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app import events
from app.schema import ModelCard, Plan, Progress, Strategy
from app.worker import Worker
from tests import values
from tests.runtime.families import DEMO, FAMILIES

PARTS = {
    "built-in": ("text_encoder", "text_encoder_2", "transformer", "vae"),
    "wan_two_transformers": ("text_encoder", "transformer", "transformer_2", "vae"),
}


def digest(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and time of each file, and that there are no others."""
    return {
        path.relative_to(folder).as_posix(): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def plan(model: str) -> Plan:
    disk = {key: {"strategy": Strategy.DISK} for key in set(PARTS[model]) - {"vae"}}
    held = values.on_cpu(PARTS[model], **disk)
    return values.plan(placements=held, strategy=Strategy.DISK)


def order(model: str, folder: Path, scratch: Path) -> events.Run:
    pipeline = "Kandinsky5T2VPipeline" if model == "built-in" else "WanPipeline"
    card: ModelCard = values.card(folder=folder, repo_id=None, pipeline=pipeline)
    size: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 4}
    return events.Run(
        job_id="j",
        request=values.request(prompt="a red ball", seed=1, **size),
        plan=plan(model),
        card=card,
        output_path=scratch.parent / "clip.mp4",
        scratch=scratch,
        metadata={},
    )


class Killer:
    """Ends the worker so many seconds after its first word."""

    def __init__(self, worker: Worker, delay: float) -> None:
        self._worker, self._began = worker, False
        self.timer = threading.Timer(delay, self._kill)

    def __call__(self, progress: Progress) -> None:
        if not self._began:
            self._began = True
            self.timer.start()

    def _kill(self) -> None:
        if self._worker.pid is not None:
            os.kill(self._worker.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("model", PARTS)
def test_a_kill_at_any_moment_leaves_nothing_wrong(model: str, tmp_path: Path) -> None:
    folder = DEMO
    if model != "built-in":
        folder = tmp_path / "model"
        FAMILIES[model]().save_pretrained(folder)
    before = digest(folder)
    chance = random.Random(7)
    worker = Worker(tmp_path / "logs", cancel_grace_seconds=1.0)
    frames, seconds = [], 3.0
    try:
        for turn in range(6):
            run = order(model, folder, tmp_path / "scratch")
            began = time.monotonic()
            killer = Killer(worker, chance.uniform(0, seconds)) if turn % 2 else None  # then one that is let alone
            outcome = worker.run(run, canceled=lambda: False, on_progress=killer or (lambda progress: None))
            if killer is not None:
                killer.timer.cancel()
            else:
                assert isinstance(outcome, events.Completed), outcome
                assert outcome.report.output is not None
                frames.append(outcome.report.output.frames_sha256)
                seconds = min(seconds, time.monotonic() - began)
            assert digest(folder) == before, "nothing was written, nothing was touched"
            assert not psutil.Process().children(recursive=True) or worker.alive
    finally:
        worker.stop()
    assert len(frames) == 3
    assert len(set(frames)) == 1

"""The real worker, made to wait at a chosen point, so that tests can hit a stage that lasts only milliseconds.

`python held_worker.py FILE`; FILE holds `STAGE[:STEP] MODE` and is read anew at each point; MODE is one of
  soft   waits up to 60 s and looks at the cancel flag, as code between blocks does
  hard   waits up to 60 s deaf to the flag, as a long kernel or an import is
  oom, ram, bug, nan, black, exit   raises, spoils the frames, or ends the process there
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
ORDERS = Path(sys.argv[1])

from app.runtime import control, loop  # noqa: E402

controls: list[control.Control] = []


class SeenControl(control.Control):
    def __init__(self) -> None:
        super().__init__()
        controls.append(self)


loop.Control = SeenControl  # type: ignore[misc]


def orders() -> tuple[str, str]:
    point, _, mode = (ORDERS.read_text() if ORDERS.exists() else "").partition(" ")
    return point, mode


def act(point: str) -> None:
    import torch

    wanted, mode = orders()
    if wanted != point:
        return
    if mode == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if mode == "ram":
        raise MemoryError
    if mode == "bug":
        raise KeyError("something unforeseen")
    if mode == "exit":
        os._exit(7)
    if mode not in ("soft", "hard"):
        return
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if mode == "soft":
            controls[0].check()
        time.sleep(0.01)


def patch() -> None:
    from app.runtime import memory, pipeline

    enter, step_ended, check = memory.StageClock.enter, memory.StageClock.step, pipeline.check_frames

    def held_enter(self: memory.StageClock, stage: Any, total: int = 0) -> None:
        new = stage is not self.stage
        enter(self, stage, total)
        if new:
            act(str(stage))

    def held_step(self: memory.StageClock, done: int, total: int) -> None:
        step_ended(self, done, total)
        act(f"{self.stage}:{done}")

    def spoiled(frames: Any) -> None:
        factor = {"nan": float("nan"), "black": 0.0}.get(orders()[1], 1.0)
        check(frames * factor)

    memory.StageClock.enter, memory.StageClock.step = held_enter, held_step  # type: ignore[method-assign]
    pipeline.check_frames = spoiled


if __name__ == "__main__":
    patch()
    loop.main()

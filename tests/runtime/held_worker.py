"""The real worker, made to fail or to wait at a chosen point, so that tests can hit a stage of milliseconds.

`python held_worker.py FILE`; FILE holds `STAGE[:STEP] MODE` and is read anew at each point. What it orders happens
once, and the file is gone then; with MODE in capitals it happens each time. MODE is one of
  soft     waits up to 60 s and looks at the cancel flag, as code between blocks does
  hard     waits up to 60 s deaf to the flag, as a long kernel or an import is
  stuck    the same with the GIL held, as a driver that never returns
  kill     SIGKILL to itself
  damage   spoils the checkpoint, then the same
  full     the disk is full from here on; `unkept`: for checkpoints only
  exit, oom, ram, bug      ends the process, or raises there
  nan      the result of that step is NaN
  black    the frames are black
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
ORDERS = Path(sys.argv[1])

from app.runtime import control, loop  # noqa: E402

controls: list[control.Control] = []
running: list[Any] = []


class SeenControl(control.Control):
    def __init__(self) -> None:
        super().__init__()
        controls.append(self)


loop.Control = SeenControl  # type: ignore[misc]


def ordered(point: str, *modes: str) -> str | None:
    """The mode that is ordered for a point, if it is one of `modes`."""
    try:
        wanted, _, mode = ORDERS.read_text().partition(" ")
    except OSError:
        return None
    if wanted != point or mode.lower() not in modes:
        return None
    if mode.islower():
        ORDERS.unlink()
    return mode.lower()


def act(point: str) -> None:
    import torch

    mode = ordered(point, "soft", "hard", "stuck", "kill", "damage", "full", "unkept", "exit", "oom", "ram", "bug")
    if mode == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if mode == "ram":
        raise MemoryError
    if mode == "bug":
        raise KeyError("something unforeseen")
    if mode == "exit":
        os._exit(7)
    if mode == "damage":
        for path in running[-1].keep.folder.glob("*.safetensors"):
            data = path.read_bytes()
            path.write_bytes(data[:-4] + b"\0\1\2\3")
    if mode in ("kill", "damage"):
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("full", "unkept"):
        fill_the_disk(export=mode == "full")
    if mode not in ("soft", "hard", "stuck"):
        return
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if mode == "stuck":
            ctypes.PyDLL(None).sleep(60)  # a signal ends it early
        if mode == "soft":
            controls[0].check()
        time.sleep(0.01)


def fill_the_disk(*, export: bool) -> None:
    """No checkpoint, and with `export` no video, goes to the disk any more."""
    from app.runtime import checkpoint
    from app.runtime import export as exporting

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint.write = full
    if export:
        exporting._encode = full


def patch() -> None:
    from app.runtime import memory, pipeline, resume

    enter, step_ended, check = memory.StageClock.enter, memory.StageClock.step, pipeline.check_frames
    kept, run = resume.Keeper.step_ended, loop.Loop.run

    def held_run(self: loop.Loop, order: Any, received: float) -> None:
        running.append(order)
        run(self, order, received)

    def held_enter(self: memory.StageClock, stage: Any, total: int = 0) -> None:
        new = stage is not self.stage
        enter(self, stage, total)
        if new:
            act(str(stage))

    def held_step(self: memory.StageClock, done: int, total: int) -> None:
        step_ended(self, done, total)
        act(f"{self.stage}:{done}")

    def spoiled_step(self: resume.Keeper, done: int, total: int) -> None:
        if not self.skipping and ordered(f"denoise:{done}", "nan"):
            self._results = [(result[0] * float("nan"), *result[1:]) for result in self._results]
        kept(self, done, total)

    def spoiled_frames(frames: Any) -> None:
        check(frames * 0.0 if ordered("decode", "black") else frames)

    loop.Loop.run = held_run  # type: ignore[method-assign]
    memory.StageClock.enter, memory.StageClock.step = held_enter, held_step  # type: ignore[method-assign]
    resume.Keeper.step_ended = spoiled_step  # type: ignore[method-assign]
    pipeline.check_frames = spoiled_frames


if __name__ == "__main__":
    patch()
    loop.main()

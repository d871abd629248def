"""A worker that plays its part without a model: real events, real pace, a real MP4. Run as a process of its own.

The word `crash` in a prompt ends the process, `fail` fails the run, `card` reports VRAM, `slow` takes
half a second a step.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np

from app import events
from app.runtime.export import export
from app.schema import GIB, ErrorKind, Progress, Report, Stage, StageReport

STEP_SECONDS = 0.05
SLOW_STEP_SECONDS = 1.5


class Stopped(Exception):
    """The run was canceled."""


class Actor:
    def __init__(self) -> None:
        self._canceled: set[str] = set()
        self._lock = threading.Lock()

    def main(self) -> None:
        self._emit(events.Ready(pid=os.getpid(), versions={}))
        for line in sys.stdin.buffer:
            command = events.COMMANDS.validate_json(line)
            if isinstance(command, events.Run):
                threading.Thread(target=self._run, args=(command,), daemon=True).start()
            elif isinstance(command, events.Cancel):
                self._canceled.add(command.job_id)

    def _emit(self, event: events.Event) -> None:
        with self._lock:
            sys.stdout.buffer.write(events.encode(event))
            sys.stdout.buffer.flush()

    def _run(self, run: events.Run) -> None:
        try:
            self._play(run)
        except Stopped:
            self._emit(events.Canceled(job_id=run.job_id))
        except Exception as error:  # noqa: BLE001 - the test that started it must not wait for the time limit
            failed = events.Failed(job_id=run.job_id, kind=ErrorKind.INVALID, message=repr(error), usable=False)
            self._emit(failed)

    def _step(self, run: events.Run, stage: Stage, step: int = 0, total: int = 0) -> None:
        if run.job_id in self._canceled:
            raise Stopped
        seconds = SLOW_STEP_SECONDS if "slow" in run.request.prompt else STEP_SECONDS
        eta = (total - step) * seconds if step > 1 else None
        self._emit(
            events.Progressed(
                job_id=run.job_id, progress=Progress(stage=stage, step=step, total=total, eta_seconds=eta)
            )
        )
        time.sleep(seconds)

    def _play(self, run: events.Run) -> None:
        request = run.request
        for stage in (Stage.LOAD, Stage.ENCODE):
            self._step(run, stage)
        if "crash" in request.prompt:
            os._exit(1)
        if "fail" in request.prompt:
            failed = events.Failed(job_id=run.job_id, kind=ErrorKind.OOM, message="VRAM <b>ran out</b>.", usable=True)
            self._emit(failed)
            return
        for step in range(request.num_inference_steps + 1):
            self._step(run, Stage.DENOISE, step, request.num_inference_steps)
        self._step(run, Stage.DECODE)
        pixels = np.zeros((request.num_frames, request.height, request.width, 3), np.uint8)
        pixels[:] = (50, 80, 200)
        for index in range(request.num_frames):
            edge = index * request.width // request.num_frames
            pixels[index, :, edge : edge + 16] = (230, 50, 50)
        output = export(
            pixels,
            fps=request.fps,
            target=run.output_path,
            scratch=run.scratch,
            metadata=run.metadata,
            on_frame=lambda done, total: None,
        )
        vram = {"cuda:0": 5 * GIB} if "card" in request.prompt else {}
        stages = tuple(
            StageReport(
                stage=stage,
                seconds=0.5,
                peak_ram_bytes=GIB,
                peak_vram_allocated_bytes=vram,
                peak_vram_reserved_bytes={name: value + GIB for name, value in vram.items()},
                read_bytes=2**20,
                written_bytes=None,
            )
            for stage in Stage
        )
        report = Report(stages=stages, device="CPU (an actor)", warm=False, versions={}, output=output)
        self._emit(events.Completed(job_id=run.job_id, report=report))


if __name__ == "__main__":
    Actor().main()

"""A worker that pretends, as quickly as the protocol allows: `python stub_worker.py`. It writes real files.

By the seed of the request: most jobs complete, some fail, crash, or wait for a cancel.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app import events
from app.schema import ErrorKind, OutputReport, Progress, Report, Stage

CRASH, FAIL, WAIT = 13, 17, 11
"""Seeds that these divide end like that."""


class Stub:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._canceled: dict[str, threading.Event] = {}

    def emit(self, event: events.Event) -> None:
        with self._lock:
            sys.stdout.buffer.write(events.encode(event))
            sys.stdout.buffer.flush()

    def main(self) -> None:
        self.emit(events.Ready(pid=os.getpid(), versions={}))
        for line in sys.stdin.buffer:
            command = events.COMMANDS.validate_json(line)
            if isinstance(command, events.Run):
                self._canceled[command.job_id] = threading.Event()
                threading.Thread(target=self._run, args=(command,), daemon=True).start()
            elif isinstance(command, events.Cancel) and command.job_id in self._canceled:
                self._canceled[command.job_id].set()

    def _run(self, run: events.Run) -> None:
        seed, canceled = run.request.seed, self._canceled[run.job_id]
        for stage in Stage:
            self.emit(events.Progressed(job_id=run.job_id, progress=Progress(stage=stage)))
        if seed % CRASH == 0:
            os._exit(3)
        if seed % FAIL == 0:
            self.emit(events.Failed(job_id=run.job_id, kind=ErrorKind.INVALID, message="It was to fail.", usable=True))
        elif (seed % WAIT == 0 and canceled.wait(0.2)) or canceled.is_set():
            self.emit(events.Canceled(job_id=run.job_id))
        else:
            run.scratch.mkdir(parents=True, exist_ok=True)
            (run.scratch / events.VIDEO_NAME).write_bytes(f"video {run.job_id}".encode())
            output = OutputReport(
                path=run.output_path,
                size_bytes=1,
                sha256="",
                frames_sha256=f"{seed}",
                width=run.request.width,
                height=run.request.height,
                num_frames=run.request.num_frames,
                fps=run.request.fps,
                mean_luma=1.0,
            )
            report = Report(stages=(), device="a stub", warm=True, versions={}, output=output)
            self.emit(events.Completed(job_id=run.job_id, report=report))


if __name__ == "__main__":
    Stub().main()

"""The worker process: receive (request, plan), emit events. Run as `python -m app.runtime.loop`.

Three threads: the main one computes; one reads commands from stdin, so that a cancel arrives in mid-run and the end
of the pipe (the parent died, however it died) ends this process; one sends a heartbeat. stdout carries events only:
whatever a library prints goes to stderr, which the parent keeps in a log file.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import platform
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from app import __version__, events, quantization
from app.errors import GenerationFailed, PocketreelError
from app.runtime.control import Control, Interrupted
from app.schema import (
    TIMELINE_SAMPLES,
    ErrorKind,
    Progress,
    Receipt,
    Report,
    Sample,
    Stage,
    StageReport,
    Strategy,
    Value,
)

if TYPE_CHECKING:
    from app.runtime.memory import StageClock
    from app.runtime.resume import Keeper

HEARTBEAT_SECONDS = 1.0


class Channel:
    """Events to the parent. A parent that no longer listens ends this process: nobody is left to work for."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def emit(self, event: Value) -> None:
        with self._lock:
            try:
                self._stream.write(events.encode(event))
                self._stream.flush()
            except OSError:
                os._exit(1)


def claim_stdout() -> BinaryIO:
    """Keep the real stdout for events and point file descriptor 1 at stderr, for libraries and their C code alike."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return channel


class Loop:
    """The state of one worker: the pipeline that is loaded, the job that runs."""

    def __init__(self, channel: Channel, control: Control, timeline: Timeline) -> None:
        self.channel = channel
        self.control = control
        self._timeline = timeline
        self._keeper: Keeper | None = None
        self._pipe: Any = None
        self._loaded: str | None = None
        self._warm = False
        self._jobs = 0

    def run(self, run: events.Run, received: float) -> None:
        """Do one job and say how it ended. `received` is the monotonic time at which it arrived. Never raises."""
        from app.runtime import pipeline  # noqa: PLC0415 - imports torch
        from app.runtime.memory import StageClock  # noqa: PLC0415

        def on_progress(progress: Progress) -> None:
            self._timeline.stage = progress.stage
            self.channel.emit(events.Progressed(job_id=run.job_id, progress=progress))

        self._timeline.begin(received)
        clock = StageClock(on_progress, started=received)
        self._warm = False
        self._jobs += 1
        try:
            report = self._generate(run, clock)
        except Interrupted:
            before = _held()
            self._clean(run)
            pipeline.collect()
            after = _held()
            receipt = Receipt(
                seconds=0.0,  # the parent knows when it was asked for
                forced=False,
                model_kept=self._pipe is not None,
                ram_before_bytes=before[0],
                ram_after_bytes=after[0],
                vram_before_bytes=before[1],
                vram_after_bytes=after[1],
            )
            self.channel.emit(events.Canceled(job_id=run.job_id, receipt=receipt))
        except Exception as error:  # noqa: BLE001 - the border of the process: every failure becomes an event
            traceback.print_exc()
            self._clean(run)
            kind, message = _explain(error)
            self.channel.emit(
                events.Failed(
                    job_id=run.job_id,
                    kind=kind,
                    message=message,
                    usable=isinstance(error, PocketreelError),
                    report=self._report_of_failed(run, clock),
                )
            )
        else:
            self.channel.emit(events.Completed(job_id=run.job_id, report=report))

    def _generate(self, run: events.Run, clock: StageClock) -> Report:
        from app.runtime import export, pipeline, resume  # noqa: PLC0415

        self._keeper = None
        key = self._let_go(run)  # before the peaks begin to count: the last job's model is none of this one's
        clock.enter(Stage.LOAD)
        self._ensure_loaded(run, key)
        self.control.check()
        if run.keep is not None:
            facts = resume.facts_of(run.job_id, run.card, run.request, run.plan.dtype, versions())
            self._keeper = resume.Keeper(run.keep, facts)
        pixels = pipeline.generate(self._pipe, run.request, self.control, clock, self._keeper, calls=run.card.calls)
        clock.enter(Stage.EXPORT, total=len(pixels))

        def on_frame(done: int, total: int) -> None:
            self.control.check()
            if done % max(1, total // 20) == 0:
                clock.step(done, total)

        so_far = self._report(run, clock.reports)
        output = export.export(
            pixels,
            fps=run.request.fps,
            target=run.output_path,
            scratch=run.scratch,
            metadata={**run.metadata, "report": so_far.model_dump(mode="json")},
            on_frame=on_frame,
        )
        clock.close()
        self.control.check()
        return self._report(run, clock.reports).model_copy(update={"output": output})

    @staticmethod
    def _clean(run: events.Run) -> None:
        shutil.rmtree(run.scratch, ignore_errors=True)

    def _let_go(self, run: events.Run) -> str:
        """Give back what the last job left, unless this one needs the same; returns what this one needs."""
        from app.runtime import pipeline, placement  # noqa: PLC0415

        formats = {
            one.component: (one.dtype, one.strategy is Strategy.DISK, one.quantization) for one in run.plan.placements
        }
        key = f"{run.card.model_dump_json()} {run.plan.dtype} {sorted(formats.items())}"
        now = placement.placed(self._pipe) if self._loaded == key else None
        self._warm = now is not None and now.plan.held_like(run.plan)
        if now is None or (now.lossy and not self._warm):
            self._loaded, self._pipe = None, None
            pipeline.collect()
        return key

    def _ensure_loaded(self, run: events.Run, key: str) -> None:
        """Load and place the pipeline unless the last job left the same one; one held otherwise is only held anew."""
        from app.runtime import pipeline, placement, view  # noqa: PLC0415

        if self._warm:
            return
        # asking wakes the cards, which a run on the CPU must not do
        if run.plan.device.startswith("cuda") and (why := view.unusable(run.plan.device, view.view())) is not None:
            raise GenerationFailed(why, kind=ErrorKind.INVALID)
        pipe, self._pipe, self._loaded = self._pipe, None, None  # a failure must not leave half of it for the next job
        if pipe is None:
            pipe = pipeline.load(run.card, run.plan)
            self.control.check()
            placement.place_or_fall_back(pipe, run.plan)
        else:
            placement.switch(pipe, run.plan, placement.place_or_fall_back)
        self._pipe, self._loaded = pipe, key

    def _report(self, run: events.Run, stages: list[StageReport]) -> Report:
        import torch  # noqa: PLC0415

        from app.runtime import placement  # noqa: PLC0415
        from app.runtime.placement import attention  # noqa: PLC0415

        if run.plan.device.startswith("cuda") and torch.cuda.is_available():
            device = torch.cuda.get_device_name(run.plan.device)
        else:
            device = f"CPU ({torch.get_num_threads()} threads)"
        now = placement.placed(self._pipe)
        notices = tuple(dict.fromkeys(now.notices)) if now is not None else ()
        replaced = bool(notices)
        notices += tuple(self._keeper.notes) if self._keeper is not None else ()
        wanted = now.plan.attention_backend if now is not None else attention.NATIVE
        return Report(
            stages=tuple(stages),
            device=device,
            warm=self._warm,
            fresh=self._jobs == 1,
            versions=versions(),
            attention=attention.words(run.plan.device) if wanted == attention.NATIVE or replaced else wanted,
            notices=notices,
            resumed_at=self._keeper.resumed_at if self._keeper is not None else 0,
            timeline=self._timeline.samples,
        )

    def _report_of_failed(self, run: events.Run, clock: StageClock) -> Report | None:
        try:
            clock.close()
            return self._report(run, clock.reports)
        except Exception:  # noqa: BLE001 - a GPU after an illegal access refuses every call; the first error counts
            traceback.print_exc()
            return None


def _held() -> tuple[int, dict[str, int]]:
    """RAM and reserved VRAM of this process."""
    return int(psutil.Process().memory_info().rss), _vram("memory_reserved")


def versions() -> dict[str, str]:
    """What was installed when the video was made."""
    found = {"pocketreel": __version__, "python": platform.python_version()}
    found["system"] = f"{platform.system()} {platform.release()}"
    for name in ("torch", "diffusers", "transformers", "accelerate"):
        found[name] = metadata.version(name)
    return found | quantization.installed()


def _explain(error: Exception) -> tuple[ErrorKind, str]:
    from app.runtime.memory import is_driver_error, is_ram_error, is_vram_error  # noqa: PLC0415

    if isinstance(error, GenerationFailed):
        return error.kind, str(error)
    if isinstance(error, PocketreelError):
        return ErrorKind.INVALID, str(error)
    if is_vram_error(error):
        return ErrorKind.OOM, (
            "The graphics card ran out of memory. Choose a preset for a smaller card, fewer frames or a smaller size, "
            "or close other programs that use the card."
        )
    if is_ram_error(error):
        return ErrorKind.RAM, (
            "The computer ran out of memory (RAM). Close other programs, choose a smaller size or fewer frames"
            + (", or make the Windows pagefile larger." if os.name == "nt" else ".")
        )
    if is_driver_error(error):
        return ErrorKind.CRASH, (
            f"The graphics card or its driver failed ({str(error).splitlines()[0]}). Resume it; if it happens again, "
            "update the driver, and undo any overclocking."
        )
    return ErrorKind.INVALID, f"The model's code failed: {type(error).__name__}: {error}"


def _read_commands(inbox: queue.Queue[tuple[events.Run, float] | None], control: Control) -> None:
    """Until stdin ends; then the parent is gone, and so is this process with the half-written folder of its job."""
    scratch: Path | None = None
    try:
        for line in sys.stdin.buffer:
            command = events.COMMANDS.validate_json(line)
            if isinstance(command, events.Run):
                scratch = command.scratch
                control.begin(command.job_id)
                inbox.put((command, time.monotonic()))
            elif isinstance(command, events.Cancel):
                control.cancel(command.job_id)
            elif isinstance(command, events.Dump):
                faulthandler.dump_traceback()
            else:
                inbox.put(None)
    except Exception:  # noqa: BLE001 - a parent that speaks nonsense cannot be served; the log says what it said
        traceback.print_exc()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stderr.flush()
    os._exit(0)


def _beat(channel: Channel, control: Control, timeline: Timeline) -> None:
    while True:
        ram, reserved = _held()
        timeline.note(ram, _vram("memory_allocated"))
        channel.emit(events.Heartbeat(job_id=control.job_id, rss_bytes=ram, vram_bytes=reserved))
        time.sleep(HEARTBEAT_SECONDS)


def _vram(name: str) -> dict[str, int]:
    """By device, of those that torch has used; asking it must not be what wakes a card."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # while it is being imported it has none
    if cuda is None or not hasattr(cuda, name) or not cuda.is_initialized():
        return {}
    return {f"cuda:{index}": getattr(cuda, name)(index) for index in range(cuda.device_count())}


class Timeline:
    """Memory over a run, a sample with each heartbeat; of a long run every second, fourth, ... only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(time.monotonic())

    def begin(self, now: float) -> None:
        with self._lock:
            self.stage: Stage | None = None
            self._began, self._samples, self._every, self._count = now, list[Sample](), 1, 0

    def note(self, ram_bytes: int, vram_bytes: dict[str, int]) -> None:
        with self._lock:
            self._count += 1
            if self._count % self._every:
                return
            seconds = time.monotonic() - self._began
            self._samples.append(Sample(seconds=seconds, stage=self.stage, ram_bytes=ram_bytes, vram_bytes=vram_bytes))
            if len(self._samples) > TIMELINE_SAMPLES:
                self._samples = self._samples[1::2]
                self._every *= 2

    @property
    def samples(self) -> tuple[Sample, ...]:
        with self._lock:
            return tuple(self._samples)


def main() -> None:
    """Serve jobs until told to stop or the parent is gone."""
    faulthandler.enable()  # a crash in C code leaves its stack in the log
    if hasattr(signal, "SIGUSR1"):  # and so does a standstill, when the parent asks
        faulthandler.register(signal.SIGUSR1)
    channel, control, timeline = Channel(claim_stdout()), Control(), Timeline()
    inbox: queue.Queue[tuple[events.Run, float] | None] = queue.Queue()
    threading.Thread(target=_read_commands, args=(inbox, control), name="commands", daemon=True).start()
    threading.Thread(target=_beat, args=(channel, control, timeline), name="heartbeat", daemon=True).start()
    gc.disable()  # importing makes a million objects that stay: looking through them again and again cost 1.4 of 8 s
    import app.runtime.pipeline  # noqa: F401, PLC0415 - seconds of torch and diffusers, with the threads already up

    gc.freeze()
    gc.enable()
    loop = Loop(channel, control, timeline)
    channel.emit(events.Ready(pid=os.getpid(), versions=versions()))
    while (item := inbox.get()) is not None:
        loop.run(*item)
        control.end(item[0].job_id)


if __name__ == "__main__":
    main()

"""Ways to hold a pipeline, compared on this machine: the process behind `pocketreel bench offload`.

Reads an `EngineRun` from stdin, prints an `EngineOutcome` as its last line. Each engine has a process, loads the model
and makes the same clip twice; the second is measured. The frames are compared with those of the first that got through.

On a large card a small one is imitated by a ballast: memory that is taken and never used, so that whatever allocates
beyond the rest fails as it would there. Not covered: what an engine of another project thinks of the card's size, when
it asks for the whole of it instead of what is free; a CPU has no streams and nothing to be offloaded from, so only our
own ways without them are compared there.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from statistics import median
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from app.events import OTHERS, Engine, EngineOutcome, EngineRun
from app.runtime import other_engines, pipeline, placement
from app.runtime.control import Control
from app.runtime.memory import StageClock, is_ram_error
from app.runtime.packed import quantization_of
from app.runtime.streaming.sources import registered
from app.schema import Arrangement, Placement, Plan, Progress, Stage, Strategy

_DENOISERS: dict[Engine, dict[str, Any]] = {
    Engine.RESIDENT: {"strategy": Strategy.RESIDENT},
    Engine.MODEL_OFFLOAD: {"strategy": Strategy.MODEL_OFFLOAD},
    Engine.BLOCK: {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1},
    Engine.BLOCK_STREAM: {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1, "use_stream": True},
    Engine.LEAF: {"strategy": Strategy.LEAF},
    Engine.LEAF_STREAM: {"strategy": Strategy.LEAF, "use_stream": True},
    Engine.LEAF_STREAM_LOW: {"strategy": Strategy.LEAF, "use_stream": True, "low_cpu_mem_usage": True},
    Engine.STREAM: {"strategy": Strategy.STREAM},
    Engine.STREAM_HALF: {"strategy": Strategy.STREAM},
    Engine.DISK: {"strategy": Strategy.DISK},
}


def plan_of(pipe: Any, engine: Engine, device: str, dtype: str) -> Arrangement:
    """The denoisers held by the engine; the rest visits the card, or is resident where the denoiser is."""
    placements = []
    for name, module in placement.modules_of(pipe).items():
        fields = dict(_DENOISERS[engine])
        if not name.startswith(("transformer", "unet")):
            fields = {"strategy": Strategy.RESIDENT if engine is Engine.RESIDENT else Strategy.MODEL_OFFLOAD}
        elif engine is Engine.STREAM_HALF:
            fields["resident_blocks"] = sum(len(blocks) for _, blocks in placement.sharding.block_lists(module)) // 2
        fields |= {"quantization": quantization_of(module)}
        placements.append(Placement(component=name, device=device, dtype=dtype, weight_bytes=0, **fields))
    return Arrangement(
        device=device,
        dtype=dtype,
        strategy=_DENOISERS[engine]["strategy"],
        placements=tuple(placements),
        predicted_ram_bytes=0,
    )


def load(run: EngineRun) -> Any:
    """The run's pipeline, held by its engine. Raises as `compare`."""
    engine = run.engine
    if engine in OTHERS:
        return other_engines.load(run)
    disk = {
        name: Placement(component=name, strategy=Strategy.DISK, device=run.device, dtype=run.dtype, weight_bytes=0)
        for name in (run.denoisers if engine is Engine.DISK else ())
    }
    loaded = Plan(
        device=run.device, dtype=run.dtype, strategy=Strategy.RESIDENT, placements=tuple(disk.values()),
        predicted_ram_bytes=0,
    )  # fmt: skip
    pipe = pipeline.load(run.card, loaded)
    placement.place(pipe, plan_of(pipe, engine, run.device, run.dtype))
    return pipe


def compare(run: EngineRun, wanted: pipeline.Pixels | None) -> tuple[EngineOutcome, pipeline.Pixels]:
    """Make the clip with one engine, twice.

    Raises:
        PlanError: the engine cannot hold this model here.
        ModelNotUsable: nor load it.
        torch.OutOfMemoryError: it does not fit beside the ballast.
    """
    engine, pipe = run.engine, load(run)
    steps: list[float] = []

    def on_progress(progress: Progress) -> None:
        if progress.stage is Stage.DENOISE:
            _finish(run.device)
            steps.append(time.perf_counter())

    for _ in range(2):
        steps.clear()
        clock = StageClock(on_progress)
        began = time.perf_counter()
        pixels = pipeline.generate(pipe, run.request, Control(), clock, calls=run.card.calls)
        clock.close()
        seconds = time.perf_counter() - began
    between = [later - earlier for earlier, later in pairwise(steps)]
    allocated = [report.peak_vram_allocated_bytes.get(run.device, 0) for report in clock.reports]
    reserved = [report.peak_vram_reserved_bytes.get(run.device, 0) for report in clock.reports]
    reads = [report.read_bytes for report in clock.reports if report.read_bytes is not None]
    difference = None
    if wanted is not None:
        difference = int(np.abs(pixels.astype(np.int16) - wanted.astype(np.int16)).max())
    outcome = EngineOutcome(
        engine=engine,
        seconds=seconds,
        step_seconds=median(between) if between else None,
        vram_allocated_bytes=max(allocated),
        vram_reserved_bytes=max(reserved),
        ram_bytes=max(report.peak_ram_bytes for report in clock.reports),
        pinned_bytes=_pinned_bytes() if run.device.startswith("cuda") else None,
        read_bytes=sum(reads) if reads else None,
        difference=difference,
    )
    placement.remove(pipe)
    return outcome, pixels


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _pinned_bytes() -> int:
    """What PyTorch page-locked at most, and what our own streams did, past its allocator."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)) + registered.peak


def main() -> int:
    """Answer the one document on stdin; 0."""
    run = EngineRun.model_validate_json(sys.stdin.read())
    # engines greet their users, and compilers that they start write where we do
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answer.write("\n" + answer_to(run).model_dump_json())
    return 0


def answer_to(run: EngineRun) -> EngineOutcome:
    """What the engine took, or why it did not get through. The first to do so makes the reference."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    ballast = None
    if run.vram_bytes is not None:
        free, _ = torch.cuda.mem_get_info(run.device)
        ballast = torch.empty(max(0, free - run.vram_bytes), dtype=torch.uint8, device=run.device)
    wanted: pipeline.Pixels | None = np.load(run.reference) if run.reference.is_file() else None
    try:
        outcome, pixels = compare(run, wanted)
    except torch.OutOfMemoryError:
        return EngineOutcome(engine=run.engine, error="does not fit on the card")
    except Exception as error:  # noqa: BLE001 - others' engines raise what they like, and it is told
        words = "RAM ran out" if is_ram_error(error) else f"{type(error).__name__}: {error}"
        return EngineOutcome(engine=run.engine, error=words)
    if wanted is None:
        np.save(run.reference, pixels)
    if ballast is None:
        return outcome
    return outcome.model_copy(
        update={
            "vram_allocated_bytes": outcome.vram_allocated_bytes - ballast.nbytes,
            "vram_reserved_bytes": outcome.vram_reserved_bytes - ballast.nbytes,
        }
    )


if __name__ == "__main__":
    sys.exit(main())

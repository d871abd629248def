"""A plan of the planner, placed by the worker's own code on simulated cards; and a process that runs many of them.

    python -m app.runtime.simulate plans < jobs.jsonl > results.jsonl

Each line in is a `PlannedRun`, each line out its `PlannedOutcome`: the process is a partner for
`pocketreel bench matrix`, which must not import torch itself.
"""

from __future__ import annotations

import sys
from typing import TextIO

import torch

from app.errors import PlanError, PocketreelError
from app.plans import SIMULATED, Arrangement, PlannedOutcome, PlannedRun
from app.runtime import placement
from app.runtime.simulate.run import simulate
from app.runtime.simulate.values import ComponentSetup, GpuSpec, MachineSpec, Setup, Shape


def setup_of(plan: Arrangement) -> Setup:
    """The formats in which a plan's components are loaded.

    Raises:
        PlanError: it reads from the disk or spreads blocks over cards, which the simulator cannot hold.
    """
    for one in plan.placements:
        if one.strategy not in SIMULATED.strategies or (one.shards and not SIMULATED.shards):
            how = "spread over several cards" if one.shards else one.strategy
            raise PlanError(f"The simulator cannot hold {one.component} {how}.")
    return Setup(components={one.component: ComponentSetup(dtype=one.dtype) for one in plan.placements})


def run_planned(run: PlannedRun) -> PlannedOutcome:
    """Simulate one plan on cards of the given sizes. What does not fit, or cannot be held, is told, not raised."""
    machine = MachineSpec(
        gpus=tuple(GpuSpec(capacity_bytes=size, context_bytes=run.context_bytes) for size in run.vram_bytes)
        or (GpuSpec(),)
    )
    shape = Shape(height=run.height, width=run.width, num_frames=run.num_frames, guidance_scale=run.guidance_scale)
    try:
        result = simulate(
            run.model, shape, setup_of(run.plan), machine, apply=lambda pipe: placement.place(pipe, run.plan)
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        where = " ".join(getattr(error, "__notes__", ()))
        return PlannedOutcome(error=f"does not fit: {error} ({where})")
    except (PocketreelError, RuntimeError, ValueError) as error:
        return PlannedOutcome(error=f"{type(error).__name__}: {error}")
    return PlannedOutcome(
        vram_bytes={f"cuda:{index}": result.peak(f"cuda:{index}") for index in range(len(run.vram_bytes))},
        ram_bytes=result.peak("ram"),
        pinned_bytes=result.pinned_bytes,
        seconds=result.seconds,
    )


def serve(lines: TextIO, answers: TextIO) -> int:
    """Answer each line until there are no more; 0."""
    for line in lines:
        answers.write(run_planned(PlannedRun.model_validate_json(line)).model_dump_json() + "\n")
        answers.flush()
    return 0


def main() -> int:
    """Of `python -m app.runtime.simulate plans`."""
    return serve(sys.stdin, sys.stdout)

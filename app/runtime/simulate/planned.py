"""A plan of the planner, placed by the worker's own code on simulated cards; and a process that runs many of them.

    python -m app.runtime.simulate plans < jobs.jsonl > results.jsonl

Each line in is a `PlannedRun`, each line out its `PlannedOutcome`: the process is a partner for
`pocketreel bench matrix`, which must not import torch itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

import torch

from app.errors import PocketreelError
from app.plans import Arrangement, PlannedOutcome, PlannedRun
from app.runtime import placement
from app.runtime.simulate.run import simulate
from app.runtime.simulate.values import ComponentSetup, GpuSpec, MachineSpec, Setup, Shape
from app.runtime.streaming import Layout


def setup_of(plan: Arrangement) -> Setup:
    """The formats in which a plan's components are loaded."""
    return Setup(components={one.component: ComponentSetup(dtype=one.dtype) for one in plan.placements})


class SimulatedFiles:
    """A source for `app.runtime.streaming` that has the buffers of one that reads files, and nothing in them."""

    prompt = False
    ahead = 2

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._turn = 0

    @property
    def host_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def bind(self, layouts: Sequence[Layout], _weights: object, _device: object) -> None:
        size = max((layout.host_bytes for layout in layouts), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(min(self.ahead, len(layouts)))]

    @staticmethod
    def read(_names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def start(self, unit: int) -> None:
        """Nothing to read."""

    def fetch(self, _unit: int) -> torch.Tensor:
        self._turn += 1
        return self._buffers[self._turn % len(self._buffers)]

    def done(self, unit: int, copied: object) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        self._buffers = []


def run_planned(run: PlannedRun) -> PlannedOutcome:
    """Simulate one plan on cards of the given sizes. What does not fit, or cannot be held, is told, not raised."""
    machine = MachineSpec(
        gpus=tuple(GpuSpec(capacity_bytes=size, context_bytes=run.context_bytes) for size in run.vram_bytes)
        or (GpuSpec(),)
    )
    shape = Shape(height=run.height, width=run.width, num_frames=run.num_frames, guidance_scale=run.guidance_scale)
    try:
        result = simulate(
            run.model,
            shape,
            setup_of(run.plan),
            machine,
            apply=lambda pipe: placement.place(pipe, run.plan, lambda _name, _module: SimulatedFiles()),
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

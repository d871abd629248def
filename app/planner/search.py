"""One model, one request, one machine: the fastest plan that fits, the nearest one that does not, the ladder."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from app.coefficients import Coefficients
from app.errors import PlanError
from app.estimate import add_up, base_cost, cost_of, denoisers_of, devices_of
from app.planner.budget import Budget, budget_of, gpu_sets, usable_gpus, worth_using
from app.planner.options import Space, as_bytes, space_of
from app.planner.solve import Choice, fastest, least_over
from app.plans import stage_of
from app.schema import (
    Estimate,
    Factors,
    Gpu,
    Hardware,
    HardwarePreset,
    Learned,
    ModelCard,
    Placement,
    Request,
    Stage,
)
from app.speed import Machine, machine
from app.workload import Task, task_of

RUNG_STEP: Final = 0.85
"""Each rung of the ladder has at most this share of the VRAM of the one above."""
RUNGS: Final = 4


class Found(NamedTuple):
    """A choice on a set of cards (none: the CPU), with all that explains it."""

    choice: Choice
    space: Space
    gpus: tuple[Gpu, ...]
    limits: tuple[int, ...]
    """The budget by slot."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """In the order of the stages, however they were searched."""
        every = [placement for option in self.choice.options for placement in option.placements]
        return tuple(sorted(every, key=lambda placement: list(Stage).index(stage_of(placement.component))))

    @property
    def tiling(self) -> bool:
        return any(option.tiling for option in self.choice.options)

    @property
    def shortage(self) -> tuple[str, Stage, int]:
        """The memory and stage that is most over budget, and by how much."""
        over, place = max(zip(self.choice.over, self.space.slots, strict=True), key=lambda pair: pair[0])
        return (*place, over)


class Search:
    """All choices for one request. Pure and deterministic: same inputs, same answers."""

    def __init__(
        self,
        hardware: Hardware,
        card: ModelCard,
        request: Request,
        preset: HardwarePreset,
        learned: Learned | None = None,
    ) -> None:
        """Prepare the options.

        Raises:
            PlanError: the preset wants a GPU and there is none; or the card has no coefficients.
        """
        if card.coefficients is None:
            raise PlanError(f"{card.title} was not measured by the simulator, so it cannot be planned exactly.")
        self.coefficients: Coefficients = card.coefficients
        self.hardware, self.card, self.preset, self.request = hardware, card, preset, request
        self.budget: Budget = budget_of(hardware, preset)
        self.usable = usable_gpus(hardware, preset)
        self.learned = learned
        self._tasks: dict[str, Task] = {
            device: task_of(
                self.coefficients, request, learned.of(device) if learned is not None else None, card.stored
            )
            for device in ("cpu", "gpu")
        }
        self.machine: Machine = machine(hardware, self.usable)
        self._spaces: list[tuple[tuple[Gpu, ...], Space, tuple[int, ...], tuple[int, ...]]] = []
        for gpus in self._sets():
            task = self._task(gpus)
            space = space_of(task, self.machine, gpus, preset, hardware.packages)
            names = tuple(f"cuda:{gpu.index}" for gpu in gpus)
            base = as_bytes([base_cost(task, names)], space.slots)
            limits = tuple(self.budget.bytes[memory] for memory, _ in space.slots)
            self._spaces.append((gpus, space, base, limits))

    def other(self, preset: HardwarePreset | None = None, /, **changes: int) -> Search:
        """The same with another preset or other numbers in the request. Raises as the constructor does."""
        request = self.request.model_copy(update=changes)
        return Search(self.hardware, self.card, request, preset or self.preset, self.learned)

    def _task(self, gpus: tuple[Gpu, ...]) -> Task:
        return self._tasks["gpu" if gpus else "cpu"]

    def factors(self, found: Found) -> Factors | None:
        """What the prediction of a choice was multiplied by."""
        return self.learned.of("gpu" if found.gpus else "cpu") if self.learned is not None else None

    def _sets(self) -> list[tuple[Gpu, ...]]:
        cards = worth_using(self.usable, self.budget)
        return [*gpu_sets(cards, self.preset), *([()] if self.preset.device != "gpu" else [])]

    def best(self) -> Found | None:
        """The fastest that fits. Beside a GPU the CPU counts only where it ends within the time limit."""
        found: Found | None = None
        for gpus, space, base, limits in self._spaces:
            choice = fastest(space, base, limits)
            if choice is None or (self.usable and not gpus and choice.seconds > self.request.timeout_seconds):
                continue
            if found is None or choice.seconds < found.choice.seconds:
                found = Found(choice, space, gpus, limits)
        return found

    def unlimited(self) -> float:
        """Seconds that the run would take here with endless memory: what a shortage costs is measured against it."""
        whole = [space.groups for _, space, _, _ in self._spaces if all(space.groups)]
        return min((sum(options[0].seconds for options in groups) for groups in whole), default=math.inf)

    def nearest(self) -> Found | None:
        """What is least over budget: on the cards where there are any, for the CPU is no answer to a small card."""
        found: Found | None = None
        for gpus, space, base, limits in self._spaces:
            choice = least_over(space, base, limits)
            if choice is None or (found is not None and not gpus):
                continue
            if found is None or sum(choice.over) < sum(found.choice.over):
                found = Found(choice, space, gpus, limits)
        return found

    def ladder(self, above: Found) -> list[Found]:
        """Smaller plans on the same cards, each with at most `RUNG_STEP` of the VRAM of the one before."""
        rungs: list[Found] = []
        _, space, base, limits = next(entry for entry in self._spaces if entry[0] == above.gpus)
        used = above.choice.bytes
        while above.gpus and len(rungs) < RUNGS:
            peaks: dict[str, int] = {}
            for (memory, _), size in zip(space.slots, used, strict=True):
                peaks[memory] = max(peaks.get(memory, 0), size)
            tighter = tuple(
                min(limit, int(peaks[memory] * RUNG_STEP)) if memory.startswith("cuda") else limit
                for (memory, _), limit in zip(space.slots, limits, strict=True)
            )
            choice = fastest(space, base, tighter)
            if choice is None:
                break
            rungs.append(Found(choice, space, above.gpus, limits))
            used = choice.bytes
        return rungs

    def estimate(self, found: Found) -> Estimate:
        """The parts of a choice. Their sums are the numbers that it was chosen by, or less where several cards work:
        while choosing, an encoder's answer is counted on each of them, as any may become the denoiser's."""
        placements = found.placements
        task = self._task(found.gpus)
        devices, denoisers = devices_of(placements), denoisers_of(placements)
        costs = [cost_of(task, self.machine, placement, denoisers, tiling=found.tiling) for placement in placements]
        return add_up([base_cost(task, devices), *costs])

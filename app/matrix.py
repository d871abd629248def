"""`pocketreel bench matrix`: plans for many machines, each run in the simulator and compared with its own prediction.

The simulator runs in processes of its own, one plan at a time each; this one only plans and compares.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, Self

from pydantic import ValidationError

from app import hardware, planner, presets
from app.config import Settings
from app.errors import GenerationFailed, PlanError
from app.estimate import GPU_CONTEXT_BYTES
from app.planner.imagine import imagine
from app.planner.table import how_words
from app.plans import Plan, PlannedOutcome, PlannedRun
from app.presets import format_bytes
from app.resolve import resolve
from app.schema import GIB, Draft, Hardware, HardwarePreset, ModelCard, Request
from app.worker import command_line

CARDS: Final = ((4,), (6,), (8,), (12,), (16,), (24,), (8, 8), (6, 12))
"""GiB of VRAM by machine."""
RAMS: Final = (16, 32, 64)
SIZES: Final = ("small", "default", "largest")
LIBRARIES: Final = ("torch", "diffusers", "transformers", "accelerate")
"""On which a simulation depends."""
_PLENTY: Final = 10_000 * GIB


class Case(NamedTuple):
    """Cells of the matrix with one plan; of their machines the smallest."""

    model: str
    cards: tuple[int, ...]
    ram: int
    size: str
    request: Request
    plan: Plan
    run: PlannedRun
    cells: int = 1

    @property
    def title(self) -> str:
        cards = "+".join(map(str, self.cards))
        return f"{self.model}, {cards} GB, {self.ram} GB RAM, {self.size}"


class Row(NamedTuple):
    """A case with what the simulator saw."""

    case: Case
    outcome: PlannedOutcome

    @property
    def shares(self) -> list[float]:
        """By how much the prediction exceeds the simulated peak, on each card that was used."""
        predicted = self.case.plan.predicted_vram_bytes
        return [predicted.get(device, 0) / peak - 1 for device, peak in self.outcome.vram_bytes.items() if peak]

    @property
    def excess(self) -> float | None:
        """On the card where it does so least."""
        return min(self.shares, default=None)


class Explored(NamedTuple):
    """The plans of a matrix, and what became of its cells without one."""

    cases: list[Case]
    refused: int
    """Cells in which nothing fits, as the planner says beforehand."""
    on_cpu: int
    """Cells in which the CPU computes all: no card is there to look at."""

    def words(self) -> str:
        """One sentence for people."""
        cells = sum(case.cells for case in self.cases)
        return (
            f"{cells + self.refused + self.on_cpu} cells: {cells} with a plan for cards ({len(self.cases)} different "
            f"ones), {self.on_cpu} on the CPU alone, {self.refused} in which nothing fits, as the planner says."
        )


def explore(
    settings: Settings,
    models: Sequence[str] = (),
    cards: Sequence[tuple[int, ...]] = CARDS,
    rams: Sequence[int] = RAMS,
    sizes: Sequence[str] = SIZES,
) -> Explored:
    """Plan every cell that the simulator can hold. `models` empty: all fitted ones.

    Equal plans of a model for the same size are one case, that of the smallest machine: on a larger card the same plan
    takes the same, and RAM that a plan does not use changes nothing.
    """
    catalogue = presets.load_catalogue(settings)
    preset = presets.find_hardware(catalogue, "auto")
    here = hardware.probe(settings)
    found: dict[str, Case] = {}
    refused = on_cpu = 0
    for card in catalogue.models.values():
        name = card.simulated_as or (str(card.folder) if card.folder else None)
        if card.coefficients is None or name is None or (models and card.id not in models):
            continue
        for gpus, ram, size in product(sorted(cards, key=sum), sorted(rams), sizes):
            request = _request(card, preset, size)
            try:
                plan = planner.plan(_machine(here, gpus, ram), card, request, preset, None)
            except PlanError:
                refused += 1
                continue
            if not plan.predicted_vram_bytes:
                on_cpu += 1
                continue
            run = PlannedRun(
                model=name,
                plan=plan.model_copy(update={"estimate": None, "ladder": (), "reasons": (), "factors": None}),
                height=request.height,
                width=request.width,
                num_frames=request.num_frames,
                guidance_scale=request.guidance_scale,
                vram_bytes=tuple(one * GIB for one in gpus),
                context_bytes=GPU_CONTEXT_BYTES,
            )
            key = f"{card.id} {len(gpus)} {gpus if len(gpus) > 1 else ''} {_same(run)}"
            before = found.setdefault(key, Case(card.id, gpus, ram, size, request, plan, run, 0))
            found[key] = before._replace(cells=before.cells + 1)
    return Explored(list(found.values()), refused, on_cpu)


def _same(run: PlannedRun) -> str:
    """What tells runs apart on cards that are large enough."""
    predictions = {"predicted_seconds", "predicted_ram_bytes", "predicted_vram_bytes"}
    return run.model_dump_json(exclude={"vram_bytes": True, "plan": predictions})


def _machine(here: Hardware, gpus: tuple[int, ...], ram: int) -> Hardware:
    machine = imagine(here, vram=[one * GIB for one in gpus], ram_bytes=ram * GIB)
    disk = machine.data_disk.model_copy(update={"free_bytes": _PLENTY, "total_bytes": _PLENTY})
    return machine.model_copy(update={"data_disk": disk, "download_disk": disk})


def _request(card: ModelCard, preset: HardwarePreset, size: str) -> Request:
    """`small`: half of the default's sides and a quarter of its frames; `largest`: the largest size it was trained on
    and twice the frames, as far as it can."""
    usual, lattice = card.defaults, card.lattice
    width, height, frames = usual.width, usual.height, usual.num_frames
    if size == "small":
        width, height, frames = width // 2, height // 2, max(1, frames // 4)
    elif size == "largest":
        trained = [tuple(map(int, text.split("x"))) for text in lattice.trained_sizes]
        width, height = max([(width, height), *trained], key=lambda pair: pair[0] * pair[1])[:2]
        frames = min(lattice.max_num_frames, 2 * frames)
    draft = Draft(
        model=card.id,
        prompt="a red ball",
        width=max(width, lattice.min_side),
        height=max(height, lattice.min_side),
        num_frames=frames,
        seed=0,
    )
    # a model that starts from a picture is planned too, although this version refuses to run it
    return resolve(draft, card.model_copy(update={"tasks": ("t2v",)}), preset)[0]


def run_all(
    found: Sequence[Case],
    processes: int,
    on_row: Callable[[Row], None] = lambda _row: None,
    keep: Path | None = None,
) -> list[Row]:
    """Simulate all cases, in that many processes; rows in the order of the cases.

    Args:
        keep: a file that takes each outcome at once; what an earlier call has put there is not simulated again.

    Raises:
        GenerationFailed: a simulator ended early.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    known = _kept(keep)
    rows = {index: Row(case, known[_key(case)]) for index, case in enumerate(found) if _key(case) in known}
    for index in range(len(found)):
        if index not in rows:
            waiting.put(index)
    failed: list[str] = []

    def work() -> None:
        try:
            with _Simulator() as simulator:
                while not failed:
                    try:
                        index = waiting.get_nowait()
                    except queue.Empty:
                        return
                    rows[index] = Row(found[index], simulator.run(found[index]))
                    if keep is not None:
                        line = json.dumps({"run": _key(found[index]), "outcome": rows[index].outcome.model_dump()})
                        with keep.open("a", encoding="utf-8") as file:
                            file.write(line + "\n")
                    on_row(rows[index])
        except Exception as error:  # noqa: BLE001 - a thread that ends early must not look like one that is done
            failed.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(min(processes, waiting.qsize()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        done = f" {len(rows)} of {len(found)} plans were simulated before." if rows else ""
        raise GenerationFailed(f"{failed[0]}{done}")
    return [rows[index] for index in sorted(rows)]


def _key(case: Case) -> str:
    """Of a run and of what simulates it: other libraries may take other memory."""
    versions = [importlib.metadata.version(name) for name in LIBRARIES]
    return hashlib.sha256(f"{_same(case.run)} {case.run.vram_bytes} {versions}".encode()).hexdigest()


def _kept(keep: Path | None) -> dict[str, PlannedOutcome]:
    """Outcomes in a file; a line that was cut off, because the program ended while it wrote, is left out."""
    found: dict[str, PlannedOutcome] = {}
    for line in keep.read_text("utf-8").splitlines() if keep is not None and keep.is_file() else ():
        with suppress(ValueError, KeyError):
            entry = json.loads(line)
            found[entry["run"]] = PlannedOutcome.model_validate(entry["outcome"])
    return found


class _Simulator:
    """A process of the simulator's own. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*command_line("simulate.command"), "plans"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what it did not read before it ended
                if stream is not None:
                    stream.close()
        self._process.wait()

    def run(self, case: Case) -> PlannedOutcome:
        """Raises GenerationFailed when the process ends or answers nonsense."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101 - for the type checker
        assert stdout is not None  # noqa: S101
        try:
            stdin.write(case.run.model_dump_json().encode() + b"\n")
            stdin.flush()
            return PlannedOutcome.model_validate_json(stdout.readline())
        except (OSError, ValidationError) as error:
            raise GenerationFailed(
                f"The simulator ended while it ran {case.title}; its message stands above."
            ) from error


def row_words(row: Row) -> str:
    """One line for people."""
    if row.outcome.error is not None:
        return row.outcome.error
    excess = "no VRAM used" if row.excess is None else f"prediction {row.excess:+.1%}"
    return f"{excess}, simulated in {row.outcome.seconds:.0f} s"


class Summary(NamedTuple):
    """Of all rows: how far the predictions are off."""

    runs: int
    failed: int
    over: int
    """Runs that took more than was predicted."""
    median_excess: float
    largest_excess: float
    smallest_excess: float


def summary(rows: Sequence[Row]) -> Summary:
    """Of the rows that ran; those that did not are counted."""
    shares = [row.excess for row in rows if row.outcome.error is None and row.excess is not None]
    return Summary(
        runs=len(rows),
        failed=sum(row.outcome.error is not None for row in rows),
        over=sum(share < 0 for share in shares),
        median_excess=median(shares) if shares else 0.0,
        largest_excess=max((share for row in rows if row.outcome.error is None for share in row.shares), default=0.0),
        smallest_excess=min(shares, default=0.0),
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a run, for the docs."""
    heads = ("model", "cards", "RAM", "size", "cells", "held", "predicted", "simulated", "excess")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, outcome in rows:
        cards = "+".join(map(str, case.cards))
        request = case.request
        size = f"{request.width}x{request.height}x{request.num_frames}"
        start = (
            f"| {case.model} | {cards} GB | {case.ram} GB | {size} | {case.cells} | {how_words(case.plan.placements)} "
        )
        predicted = case.plan.predicted_vram_bytes
        wanted = ", ".join(format_bytes(size) for size in predicted.values())
        if outcome.error is not None:
            lines.append(f"{start}| {wanted} | {outcome.error} | |")
            continue
        seen = ", ".join(format_bytes(outcome.vram_bytes.get(device, 0)) for device in predicted)
        excess = Row(case, outcome).excess
        lines.append(f"{start}| {wanted} | {seen} | {'' if excess is None else f'{excess:+.1%}'} |")
    return "\n".join(lines)


def document(found: Explored, rows: Sequence[Row]) -> str:
    """The Markdown page for the docs."""
    installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    return f"""# Plans against the simulator

What the planner predicts of a card's memory (allocated by torch, peak of the run) beside what the worker's own
placement takes on a simulated card. Simulated: nothing here was measured on a real GPU. `excess` is by how much the
prediction exceeds the peak; `cells` is how many combinations of cards, RAM and size get the same plan, of which the
smallest machine was run. Written by `pocketreel bench matrix --to assets/matrix.md` (options narrow it down,
`--keep FILE` goes on another time) with {installed}.

{found.words()}

{summary_words(summary(rows))}

{table(rows)}
"""


def summary_words(found: Summary) -> str:
    """One paragraph for people."""
    return (
        f"{found.runs} plans simulated; {found.failed} did not run; {found.over} took more VRAM than predicted. The "
        f"prediction exceeds the peak by {found.median_excess:.1%} (median), {found.smallest_excess:.1%} to "
        f"{found.largest_excess:.1%}."
    )

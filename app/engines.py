"""`pocketreel bench offload`: ways to hold one model, ours and others', compared on this machine. No torch here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from app import hardware, presets
from app.config import Settings
from app.errors import InvalidRequest
from app.events import ON_GPU_ONLY, OTHERS, Engine, EngineOutcome, EngineRun
from app.planner.options import card_dtype
from app.plans import stage_of
from app.presets import format_bytes
from app.resolve import resolve
from app.schema import Draft, Stage
from app.worker import command_line


def compare(
    settings: Settings,
    draft: Draft,
    engines: Sequence[Engine],
    vram_bytes: int | None = None,
    on_outcome: Callable[[EngineOutcome], None] = lambda _outcome: None,
) -> tuple[EngineOutcome, ...]:
    """Make the draft's clip with each engine; on the first GPU, else on the CPU.

    `engines` empty: all that can run here, those of other projects where they are installed.

    Raises:
        BadInput: an unknown model or size, a ballast without a GPU.
    """
    catalogue = presets.load_catalogue(settings)
    card = presets.find_card(catalogue, draft.model)
    request, _ = resolve(draft, card, presets.find_hardware(catalogue, draft.preset))
    gpus = hardware.probe(settings).gpus
    if vram_bytes is not None and not gpus:
        raise InvalidRequest("There is no GPU here whose memory could be made smaller.", field="vram")
    obstacles = {engine: _obstacle(engine, has_gpu=bool(gpus)) for engine in Engine}
    wanted = tuple(engines) or tuple(engine for engine in Engine if obstacles[engine] is None)
    names = {**(presets.tensor_counts(card) or {"transformer": {}}), **card.gguf}
    outcomes: list[EngineOutcome] = []
    with tempfile.TemporaryDirectory(prefix="pocketreel-engines-") as folder:
        run = EngineRun(
            card=card,
            request=request,
            engine=Engine.RESIDENT,
            device="cuda:0" if gpus else "cpu",
            dtype=card_dtype(gpus[0]) if gpus else "float32",
            denoisers=tuple(name for name in names if stage_of(name) is Stage.DENOISE),
            vram_bytes=vram_bytes,
            reference=Path(folder) / "frames.npy",
        )
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        environment |= {"CUDA_VISIBLE_DEVICES": gpus[0].uuid} if gpus else {}
        # each in a process of its own: what one leaves behind (blocks that PyTorch keeps) is not the next one's
        for engine in dict.fromkeys([Engine.RESIDENT, *wanted]):
            obstacle = obstacles[engine]
            outcome = (
                EngineOutcome(engine=engine, error=obstacle)
                if obstacle is not None
                else _run(run.model_copy(update={"engine": engine}), environment)
            )
            outcomes.append(outcome)
            on_outcome(outcome)
    return tuple(outcomes)


def _obstacle(engine: Engine, *, has_gpu: bool) -> str | None:
    """Why it cannot run here, in words."""
    if engine in ON_GPU_ONLY and not has_gpu:
        return "needs a GPU, and there is none here"
    package = OTHERS.get(engine)
    if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
        return f"is not installed; paste: {sys.executable} -m pip install {package}"
    return None


def _run(run: EngineRun, environment: Mapping[str, str]) -> EngineOutcome:
    """In a process of its own."""
    done = subprocess.run(
        command_line("engines"), input=run.model_dump_json(), stdout=subprocess.PIPE, text=True, encoding="utf-8",
        errors="replace", env=environment, check=False,
    )  # fmt: skip
    try:
        return EngineOutcome.model_validate_json(done.stdout.rpartition("\n")[2])
    except ValidationError:
        return EngineOutcome(engine=run.engine, error="its process ended early; its message stands above")


def words(outcome: EngineOutcome) -> str:
    """One line for people."""
    if outcome.error is not None:
        return f"{outcome.engine}: {outcome.error}"
    step = "" if outcome.step_seconds is None else f", {outcome.step_seconds:.3f} s a step"
    vram = (
        f", VRAM {format_bytes(outcome.vram_allocated_bytes)} (reserved {format_bytes(outcome.vram_reserved_bytes)})"
        if outcome.vram_reserved_bytes
        else ""
    )
    same = {None: ", its frames are what the others' are compared with", 0: ", same frames"}.get(
        outcome.difference, f", frames differ by {outcome.difference} of 255"
    )
    pinned = f", pinned {format_bytes(outcome.pinned_bytes)}" if outcome.pinned_bytes else ""
    read = "" if not outcome.read_bytes else f", read {format_bytes(outcome.read_bytes)}"
    ram = f", RAM {format_bytes(outcome.ram_bytes)}{pinned}"
    return f"{outcome.engine}: {outcome.seconds:.2f} s{step}{vram}{ram}{read}{same}"

"""`pocketreel bench offload`: ways to hold one model, compared on this machine. No torch in this process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence

from app import hardware, presets
from app.config import Settings
from app.errors import GenerationFailed, InvalidRequest
from app.events import WITH_STREAMS, Engine, EngineOutcome, EngineRun
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
    """Make the draft's clip with each engine; on the first GPU, else on the CPU, where streams are left out.

    Raises:
        BadInput: an unknown model or size, a ballast without a GPU.
        GenerationFailed: the process ended early.
    """
    catalogue = presets.load_catalogue(settings)
    card = presets.find_card(catalogue, draft.model)
    request, _ = resolve(draft, card, presets.find_hardware(catalogue, draft.preset))
    gpus = hardware.probe(settings).gpus
    if vram_bytes is not None and not gpus:
        raise InvalidRequest("There is no GPU here whose memory could be made smaller.", field="vram")
    wanted = [engine for engine in engines or Engine if gpus or engine not in WITH_STREAMS]
    names = {**(presets.tensor_counts(card) or {"transformer": {}}), **card.gguf}
    run = EngineRun(
        card=card,
        request=request,
        engines=tuple(dict.fromkeys([Engine.RESIDENT, *wanted])),
        device="cuda:0" if gpus else "cpu",
        dtype=card_dtype(gpus[0]) if gpus else "float32",
        denoisers=tuple(name for name in names if stage_of(name) is Stage.DENOISE),
        vram_bytes=vram_bytes,
    )
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus[0].uuid} if gpus else {})}
    with subprocess.Popen(
        command_line("engines"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
        env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None  # noqa: S101 - for the type checker
        assert process.stdout is not None  # noqa: S101
        process.stdin.write(run.model_dump_json())
        process.stdin.close()
        outcomes = []
        for line in process.stdout:
            outcomes.append(EngineOutcome.model_validate_json(line))
            on_outcome(outcomes[-1])
    if len(outcomes) < len(run.engines):
        raise GenerationFailed(
            f"The comparison ended early, at {run.engines[len(outcomes)]}; its message stands above."
        )
    return tuple(outcomes)


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
    same = {None: "", 0: ", same frames"}.get(outcome.difference, f", frames differ by {outcome.difference} of 255")
    read = "" if not outcome.read_bytes else f", read {format_bytes(outcome.read_bytes)}"
    return f"{outcome.engine}: {outcome.seconds:.2f} s{step}{vram}, RAM {format_bytes(outcome.ram_bytes)}{read}{same}"

"""Pure: (Hardware, ModelCard, Request, HardwarePreset) -> Plan with reasons and a ladder, or PlanError.

The plan is the fastest of all that fit, found exactly. What fits is decided by
`estimate` and a stated margin (`estimate.WORKING_RESERVE`), what is fastest by `timing`, whose constants are assumed.

`budget` what may be used, `imagine` another machine, `options` how parts can be held, `solve` the search, `search` both
together, `words` the reasons, `nearest` what would fit instead, `table` many models at once and the cliffs, `coarse`
the rule for models that were not fitted. Not covered: keeping some blocks resident without our own streaming engine,
attention backends.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.errors import PlanError
from app.estimate import devices_of
from app.planner.budget import PINNED_SHARE, RAM_FLOOR_BYTES
from app.planner.coarse import COARSE, coarse_plan
from app.planner.nearest import plan_error
from app.planner.search import Found, Search
from app.planner.words import held_words, learned_words, reasons_of, titles_of
from app.plans import stage_of
from app.presets import format_bytes
from app.quantization import missing, unsupported
from app.schema import (
    Arrangement,
    Estimate,
    Hardware,
    HardwarePreset,
    Learned,
    ModelCard,
    Placement,
    Plan,
    Request,
    Stage,
)
from app.workload import download_bytes

__all__ = ["COARSE", "PINNED_SHARE", "RAM_FLOOR_BYTES", "plan"]


def plan(
    hardware: Hardware,
    card: ModelCard,
    request: Request,
    preset: HardwarePreset,
    counts: dict[str, dict[str, int]] | None,
    *,
    learned: Learned | None = None,
    presets: Iterable[HardwarePreset] = (),
) -> Plan:
    """The fastest plan that fits.

    Args:
        counts: numbers by component and stored dtype, None when the model is not on this machine.
        learned: what earlier runs of this model on this machine taught; None: nothing.
        presets: tried as changes to propose when nothing fits.

    Raises:
        PlanError: names the memory that is short, by how much and in which stage, and the nearest change that fits; or
            the model lies quantized on the disk and cannot be used so here.
    """
    check_stored(hardware, card)
    if card.coefficients is None:
        return coarse_plan(hardware, card, request, preset, counts)
    search = Search(hardware, card, request, preset, learned)
    if counts is None and card.repo_id is not None:
        _check_disk(hardware, card)
    found = search.best()
    if found is None:
        raise plan_error(search, presets)
    estimate = search.estimate(found)
    factors = search.factors(found)
    fields = _fields(hardware, found, estimate, preset.attention_backend)
    rungs = [(rung, search.estimate(rung)) for rung in search.ladder(found)]
    kernel = preset.attention_backend
    return Plan(
        **fields,
        reasons=(
            *reasons_of(search, found, estimate, sure=card.coefficients.sure),
            *learned_words(factors),
        ),
        estimate=estimate,
        factors=factors,
        ladder=tuple(
            Arrangement(**_fields(hardware, rung, parts, kernel), reasons=_changes(search, above, rung))
            for (rung, parts), above in zip(rungs, [found, *(rung for rung, _ in rungs)], strict=False)
        ),
    )


def check_stored(hardware: Hardware, card: ModelCard) -> None:
    """What lies quantized must be readable here, before anything is downloaded or loaded.

    Raises:
        PlanError: an unknown method, a missing package (with the line to paste), or a card that cannot compute with it.
    """
    for name, stored in card.stored.items():
        if stored.method is None:
            raise PlanError(
                f"The {name} of {card.title} is quantized by {stored.title}, which Pocketreel cannot read. It reads "
                "bitsandbytes' folders and GGUF files; or take the unquantized model and a preset with `quantization`."
            )
        why = missing(stored.method, hardware.packages)
        if why is not None:
            raise PlanError(f"The {name} of {card.title} is quantized ({stored.title}), and {why}")
        wrong = [words for gpu in hardware.gpus if (words := unsupported(stored.method, gpu)) is not None]
        if wrong and len(wrong) == len(hardware.gpus):
            raise PlanError(
                f"The {name} of {card.title} is quantized ({stored.title}): {wrong[0]}. Take the unquantized model, or "
                "a GGUF file."
            )


def _fields(hardware: Hardware, found: Found, estimate: Estimate, attention: str) -> dict[str, object]:
    main = next(p for p in found.placements if stage_of(p.component) is Stage.DENOISE)
    return {
        "device": main.device,
        "dtype": main.dtype,
        "strategy": main.strategy,
        "placements": found.placements,
        "vae_tiling": found.tiling,
        "attention_backend": attention if found.gpus else "native",
        "threads": None if found.gpus else hardware.cpu_count,
        "predicted_ram_bytes": estimate.peak("ram"),
        "predicted_vram_bytes": {
            device: estimate.peak(device, allocated=True) for device in devices_of(found.placements)
        },
        "predicted_seconds": estimate.seconds(),
    }


def _changes(search: Search, above: Found, rung: Found) -> tuple[str, ...]:
    """What a rung does otherwise than the one above it."""
    titles = titles_of(search)
    before: dict[str, Placement] = {placement.component: placement for placement in above.placements}
    changes = [
        f"{placement.component}: {held_words(placement, titles)}"
        for placement in rung.placements
        if placement != before[placement.component]
    ]
    if rung.tiling and not above.tiling:
        changes.append("the frames are decoded in tiles")
    return tuple(changes)


def _check_disk(hardware: Hardware, card: ModelCard) -> None:
    """The download must fit: what is not on this machine is fetched in 16 bit at least."""
    assert card.coefficients is not None  # noqa: S101 - for the type checker
    needed = download_bytes(card.coefficients, card.stored)
    disk = hardware.download_disk or hardware.data_disk
    if needed > disk.free_bytes:
        raise PlanError(
            f"{card.title} must be downloaded first, about {format_bytes(needed)}; the disk of {disk.path} has "
            f"{format_bytes(disk.free_bytes)} free, {format_bytes(needed - disk.free_bytes)} short. Free some, or let "
            "HF_HOME name a folder on another disk."
        )

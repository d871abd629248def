"""What is tried next, case by case: never the same twice, never without an end."""

from __future__ import annotations

from typing import Any

import pytest

from app import fallback
from app.errors import PlanError
from app.events import Failed
from app.schema import GIB, Attempt, ErrorKind, Placement, Plan, Progress, Stage, Strategy
from tests import values


def failure(kind: ErrorKind, stage: Stage | None = Stage.DENOISE) -> Failed:
    progress = Progress(stage=stage) if stage is not None else None
    return Failed(job_id="j", kind=kind, message="It failed.", usable=False, progress=progress)


def plan(**changes: Any) -> Plan:
    held = [
        Placement(component=name, strategy=Strategy.RESIDENT, device="cuda:0", dtype="bfloat16", weight_bytes=GIB)
        for name in ("text_encoder", "transformer", "vae")
    ]
    usual = {
        "device": "cuda:0",
        "dtype": "bfloat16",
        "strategy": Strategy.RESIDENT,
        "placements": tuple(held),
        "predicted_ram_bytes": 4 * GIB,
        "predicted_vram_bytes": {"cuda:0": 10 * GIB},
        "predicted_seconds": 10.0,
    }
    return values.plan(**{**usual, **changes})


def nothing_fits(limits: dict[str, int]) -> Plan:
    raise PlanError(f"It needs more than {limits}. 17 frames would fit.")


def all_tries(
    kind: ErrorKind, stage: Stage, first: Plan, replan: fallback.Replan = nothing_fits
) -> tuple[list[str], str]:
    """Every try after `first`, each failing in the same way, and the words at the end."""
    tried, attempts, words = [first], [], []
    while True:
        try:
            step = fallback.after(failure(kind, stage), tried[-1], tried, attempts, replan)
        except PlanError as error:
            return words, str(error)
        words.append(step.words)
        attempts.append(Attempt(at="2026-11-30T00:00:00Z", kind=kind, message="", then=step.words))
        tried.append(step.plan)
        assert len(tried) < 50


def rung(vram: int, ram: int, **changes: Any) -> Plan:
    return plan(
        strategy=Strategy.LEAF,
        predicted_vram_bytes={"cuda:0": vram},
        predicted_ram_bytes=ram,
        reasons=(f"{vram // GIB} GiB",),
        threads=vram // GIB,
        **changes,
    )


LADDER = (rung(8 * GIB, 4 * GIB), rung(6 * GIB, 2 * GIB))


def test_out_of_vram_goes_down_the_ladder_and_ends_with_what_would_fit() -> None:
    words, end = all_tries(ErrorKind.OOM, Stage.DENOISE, plan(ladder=LADDER))
    assert words == ["less VRAM: 8 GiB", "less VRAM: 6 GiB"]
    assert "17 frames would fit" in end


def test_below_the_ladder_a_plan_for_less_is_made() -> None:
    asked: list[dict[str, int]] = []

    def replan(limits: dict[str, int]) -> Plan:
        asked.append(limits)
        if len(asked) == 2:
            raise PlanError("Nothing fits.")
        return rung(3 * GIB, GIB)

    words, end = all_tries(ErrorKind.OOM, Stage.DENOISE, plan(ladder=LADDER[1:]), replan)
    assert words == ["less VRAM: 6 GiB", "a plan for less VRAM"]
    assert asked == [
        {"vram_limit_bytes": int(6 * GIB * fallback.LESS)},
        {"vram_limit_bytes": int(3 * GIB * fallback.LESS)},
    ]
    assert end == "Nothing fits."


def test_out_of_vram_in_decoding_changes_the_decoding_first() -> None:
    first = plan(ladder=LADDER)
    words, _ = all_tries(ErrorKind.OOM, Stage.DECODE, first)
    assert words[:4] == [
        "the frames are decoded in tiles",
        "the frames are decoded in smaller tiles, blended where they meet",
        "the frames are decoded in smaller tiles, blended where they meet",
        "the frames are decoded on the CPU",
    ]
    step = fallback.after(failure(ErrorKind.OOM, Stage.DECODE), first, [first], [], nothing_fits)
    assert step.plan.placements == first.placements
    assert step.plan.vae_tiling


def test_a_model_of_unknown_size_goes_down_by_strategy() -> None:
    first = plan(ladder=(), predicted_seconds=None)
    words, _ = all_tries(ErrorKind.OOM, Stage.DENOISE, first)
    assert words == ["one part at a time on the card", "layer by layer on the card"]


def test_out_of_ram_wants_less_ram_and_not_less_vram() -> None:
    words, end = all_tries(ErrorKind.RAM, Stage.DENOISE, plan(ladder=LADDER))
    assert words == ["less RAM: 6 GiB"]
    assert "ram_limit_bytes" in end


def test_out_of_ram_on_the_cpu_in_decoding_makes_tiles() -> None:
    cpu = plan(device="cpu", predicted_vram_bytes={}, ladder=())
    words, _ = all_tries(ErrorKind.RAM, Stage.DECODE, cpu)
    assert words[0] == "the frames are decoded in tiles"
    assert not any("CPU" in word for word in words)


def test_a_black_picture_is_decoded_again_in_every_way() -> None:
    words, end = all_tries(ErrorKind.BLACK, Stage.DECODE, plan(vae_tiling=True))
    assert words == [
        "the frames are decoded in float32",
        "the frames are decoded in float32, in one piece",
        "the frames are decoded on the CPU in float32",
    ]
    assert end == "No smaller plan is left."


def test_invalid_numbers_in_a_step_are_not_decoded_again() -> None:
    assert all_tries(ErrorKind.BLACK, Stage.DENOISE, plan())[0] == []


def test_a_crash_is_tried_once_more() -> None:
    words, end = all_tries(ErrorKind.CRASH, Stage.DENOISE, plan())
    assert words == ["the same again in a fresh process"]
    assert "twice" in end


@pytest.mark.parametrize("kind", [ErrorKind.TIMEOUT, ErrorKind.STALL, ErrorKind.INVALID, ErrorKind.DISK])
def test_what_would_end_in_the_same_way_ends_the_job(kind: ErrorKind) -> None:
    assert all_tries(kind, Stage.DENOISE, plan(ladder=LADDER))[0] == []


def test_what_a_person_resumed_counts_anew() -> None:
    crash = Attempt(at="2026-11-30T00:00:00Z", kind=ErrorKind.CRASH, message="", then="again")
    resumed = crash.model_copy(update={"then": fallback.RESUMED})
    with pytest.raises(PlanError, match="twice"):
        fallback.after(failure(ErrorKind.CRASH), plan(), [], [crash], nothing_fits)
    assert fallback.after(failure(ErrorKind.CRASH), plan(), [], [crash, resumed], nothing_fits).plan == plan()


def test_there_is_an_end_however_many_plans_there_are() -> None:
    count = iter(range(1, 1000))
    words, end = all_tries(
        ErrorKind.OOM, Stage.DENOISE, plan(ladder=LADDER), lambda limits: rung(GIB, GIB, vae_tile_divisor=next(count))
    )
    assert len(words) == fallback.TRIES - 1
    assert end == f"It was tried {fallback.TRIES} times."


def test_the_vae_of_a_plan_without_placements_can_be_held_otherwise() -> None:
    step = fallback.after(failure(ErrorKind.BLACK, Stage.DECODE), plan(placements=()), [], [], nothing_fits)
    (vae,) = step.plan.placements
    assert (vae.component, vae.dtype, vae.device) == ("vae", "float32", "cuda:0")

"""Models without coefficients: the coarse rule, and that it is said to be coarse."""

from __future__ import annotations

import pytest

from app.errors import PlanError
from app.planner import COARSE, RAM_FLOOR_BYTES, plan
from app.schema import GIB, Backend, Limit, Strategy
from tests import values

CARD, REQUEST, AUTO = values.card(), values.request(), values.preset()


def counts(**weights: int) -> dict[str, dict[str, int]]:
    """Components by their bytes in a 16-bit format."""
    return {name: {"BF16": size // 2} for name, size in weights.items()}


WEIGHTS = counts(transformer=4 * GIB, text_encoder=2 * GIB, vae=GIB // 4)


def test_a_machine_without_gpu_is_a_first_class_case() -> None:
    made = plan(values.hardware(), CARD, REQUEST, AUTO, counts(transformer=10 * 2**20))
    assert (made.device, made.dtype) == ("cpu", "float32")
    assert {placement.strategy for placement in made.placements} == {Strategy.RESIDENT}
    assert made.placements[0].weight_bytes == 20 * 2**20
    assert "no GPU was found" in made.reasons[0]
    assert made.reasons[-1] == COARSE


def test_resident_when_all_fits_else_one_part_at_a_time() -> None:
    big = values.hardware(gpus=(values.gpu(free_bytes=11 * GIB),), ram_available_bytes=32 * GIB)
    assert {p.strategy for p in plan(big, CARD, REQUEST, AUTO, WEIGHTS).placements} == {Strategy.RESIDENT}
    small = values.hardware(gpus=(values.gpu(free_bytes=7 * GIB),), ram_available_bytes=32 * GIB)
    made = plan(small, CARD, REQUEST, AUTO, WEIGHTS)
    assert {p.strategy for p in made.placements} == {Strategy.MODEL_OFFLOAD}
    assert made.vae_tiling
    assert made.reasons[-1] == COARSE
    assert made.estimate is None
    assert made.predicted_vram_bytes["cuda:0"] <= 7 * GIB


def test_preset_limits_hold() -> None:
    hardware = values.hardware(gpus=(values.gpu(),), ram_available_bytes=32 * GIB)
    limited = plan(hardware, CARD, REQUEST, values.preset(vram_limit_bytes=7 * GIB), WEIGHTS)
    assert limited.predicted_vram_bytes["cuda:0"] <= 7 * GIB
    shared = plan(hardware, CARD, REQUEST, values.preset(vram_keep_free_bytes=5 * GIB), WEIGHTS)
    assert {p.strategy for p in shared.placements} == {Strategy.MODEL_OFFLOAD}
    assert plan(hardware, CARD, REQUEST, values.preset(device="cpu"), counts(vae=GIB)).device == "cpu"


def test_vram_too_small_names_the_shortage() -> None:
    hardware = values.hardware(gpus=(values.gpu(free_bytes=3 * GIB),), ram_available_bytes=32 * GIB)
    with pytest.raises(PlanError, match=r"needs about 5\.\d GiB of VRAM.*GiB short"):
        plan(hardware, CARD, REQUEST, AUTO, WEIGHTS)


def test_ram_floor_and_its_source() -> None:
    tight = values.hardware(
        ram_available_bytes=RAM_FLOOR_BYTES + GIB, ram_limit=Limit(value_bytes=2 * GIB, source="cgroup v2")
    )
    with pytest.raises(PlanError, match=r"of RAM; 1\.0 GiB can be used \(limit: cgroup v2"):
        plan(tight, CARD, REQUEST, AUTO, WEIGHTS)
    with pytest.raises(PlanError, match="the preset Little"):
        plan(values.hardware(), CARD, REQUEST, values.preset(title="Little", ram_limit_bytes=GIB // 2), WEIGHTS)


def test_a_gpu_preset_without_gpu_is_refused() -> None:
    with pytest.raises(PlanError, match="doctor"):
        plan(values.hardware(), CARD, REQUEST, values.preset(device="gpu"), WEIGHTS)


def test_unknown_sizes_are_said_to_be_unchecked() -> None:
    for hardware in (values.hardware(), values.hardware(gpus=(values.gpu(),))):
        assert any(
            "unknown until it is downloaded" in reason for reason in plan(hardware, CARD, REQUEST, AUTO, None).reasons
        )


def test_number_format_by_card() -> None:
    turing = values.hardware(gpus=(values.gpu(compute_capability=(7, 5)),), ram_available_bytes=32 * GIB)
    assert plan(turing, CARD, REQUEST, AUTO, WEIGHTS).dtype == "float16"
    ampere = values.hardware(gpus=(values.gpu(),), ram_available_bytes=32 * GIB)
    assert plan(ampere, CARD, REQUEST, AUTO, WEIGHTS).dtype == "bfloat16"


def test_cards_that_torch_cannot_drive_here_are_left_alone() -> None:
    hardware = values.hardware(gpus=(values.gpu(backend=Backend.XPU),))
    assert plan(hardware, CARD, REQUEST, AUTO, counts(vae=GIB)).device == "cpu"


def test_what_the_files_hold_does_not_matter_only_what_is_loaded() -> None:
    hardware = values.hardware(gpus=(values.gpu(),), ram_available_bytes=32 * GIB)
    stored_wide = {"transformer": {"F32": GIB}}
    made = plan(hardware, CARD, REQUEST, AUTO, stored_wide)
    assert made.placements[0].weight_bytes == 2 * GIB
    assert plan(values.hardware(), CARD, REQUEST, AUTO, stored_wide).placements[0].weight_bytes == 4 * GIB


def test_what_a_preset_wants_and_this_rule_cannot_do_is_said() -> None:
    wants = values.preset(max_gpus=2, prefer_disk=True)
    reasons = plan(values.hardware(), CARD, REQUEST, wants, counts(vae=GIB)).reasons
    assert sum("without measured sizes" in reason for reason in reasons) == 2
    usual = plan(values.hardware(), CARD, REQUEST, AUTO, counts(vae=GIB)).reasons
    assert not any("without measured sizes" in reason for reason in usual)

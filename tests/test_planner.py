"""Plans of fitted models; `test_planner_coarse.py` has the rule for the others."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import PlanError
from app.estimate import GPU_CONTEXT_BYTES, WORKER_START_SECONDS
from app.planner import PINNED_SHARE, RAM_FLOOR_BYTES, plan
from app.planner.options import card_dtype
from app.planner.search import Search
from app.schema import (
    GIB,
    Disk,
    GpuProcess,
    Hardware,
    HardwarePreset,
    Limit,
    ModelCard,
    Plan,
    Stage,
    Strategy,
)
from tests import models, values

AUTO = values.preset()
CPU = values.preset(id="cpu", title="CPU only", device="cpu")
CARDS = {"lite": models.LITE, "wan": models.WAN, "cogvideox": models.COGVIDEOX, "pro": models.PRO}


def machine(*vram: float, ram: float = 32, **changes: Any) -> Hardware:
    """Cards with so many GiB free, and RAM of which so much is available."""
    gpus = tuple(
        values.gpu(index=i, uuid=f"GPU-{i}", total_bytes=int(v * GIB), free_bytes=int(v * GIB), **changes)
        for i, v in enumerate(vram)
    )
    size = int(ram * GIB)
    return values.hardware(
        gpus=gpus, ram_total_bytes=size, ram_available_bytes=size, ram_limit=Limit(value_bytes=size, source="a test")
    )


def made(card: ModelCard, hardware: Hardware, preset: HardwarePreset = AUTO, **asked: Any) -> Plan:
    return plan(hardware, card, request_for(card, **asked), preset, {})


def request_for(card: ModelCard, **asked: Any) -> Any:
    defaults = card.defaults
    fields = {
        "height": defaults.height, "width": defaults.width, "num_frames": defaults.num_frames,
        "num_inference_steps": 50, "guidance_scale": 5.0, "timeout_seconds": 8 * 3600.0,
    }  # fmt: skip
    return values.request(**{**fields, **asked})


def strategy(found: Plan, component: str = "transformer") -> Strategy:
    return next(placement.strategy for placement in found.placements if placement.component == component)


# ------------------------------------------------------------------------------------------------------- what is chosen


def test_a_large_card_holds_everything() -> None:
    found = made(models.LITE, machine(80, ram=64))
    assert found.strategies == (Strategy.RESIDENT,)
    assert not found.vae_tiling
    assert found.dtype == "bfloat16"


def test_a_smaller_card_holds_less_and_says_why() -> None:
    found = made(models.WAN, machine(12, ram=64))
    assert strategy(found) in (Strategy.BLOCK, Strategy.LEAF)
    transformer = next(p for p in found.placements if p.component == "transformer")
    assert transformer.use_stream
    assert not transformer.record_stream
    reasons = " | ".join(found.reasons)
    assert "text_encoder, transformer: in RAM, passing through the NVIDIA GeForce RTX 3060 layer by layer" in reasons
    assert "most VRAM on the NVIDIA GeForce RTX 3060 is needed while" in reasons
    assert "margin" in reasons
    assert "assumed" in reasons


def test_little_ram_reads_from_the_disk() -> None:
    found = made(models.WAN, machine(12, ram=16))
    assert strategy(found) is Strategy.DISK
    assert found.predicted_ram_bytes < 15 * GIB
    assert "read from the disk at each pass" in " | ".join(found.reasons)


def test_prefer_disk_leaves_the_ram_alone() -> None:
    usual = made(models.WAN, machine(12, ram=64))
    spared = made(models.WAN, machine(12, ram=64), values.preset(prefer_disk=True))
    assert strategy(usual) is not Strategy.DISK
    assert strategy(spared) is Strategy.DISK
    assert spared.predicted_ram_bytes < usual.predicted_ram_bytes


def test_eight_bit_storage_only_where_preset_and_card_allow_it() -> None:
    small = machine(22, ram=28)  # too little RAM for all weights in 16 bit
    eight = values.preset(fp8_storage=True)

    def stored(preset: HardwarePreset, hardware: Hardware) -> set[str | None]:
        return {placement.storage_dtype for placement in made(models.WAN, hardware, preset).placements}

    assert stored(AUTO, small) == {None}
    assert stored(eight, small) == {None, "float8_e4m3fn"}
    assert stored(eight, machine(80, ram=64)) == {None}, "the exact weights when they fit as well"
    assert stored(eight, machine(22, ram=28, compute_capability=(6, 1))) == {None}


def test_number_format_by_card() -> None:
    assert card_dtype(values.gpu(compute_capability=(8, 6))) == "bfloat16"
    assert card_dtype(values.gpu(compute_capability=(7, 5))) == "float16"
    assert card_dtype(values.gpu(compute_capability=(6, 1))) == "float32"
    turing = machine(24, ram=64, compute_capability=(7, 5))
    dtypes = {placement.component: placement.dtype for placement in made(models.LITE, turing).placements}
    assert dtypes["transformer"] == "float16"
    assert dtypes["vae"] == "float32", "a VAE in float16 turns black"
    wan = {placement.component: placement.dtype for placement in made(models.WAN, machine(48, ram=64)).placements}
    assert (wan["transformer"], wan["vae"]) == ("bfloat16", "float32"), "it was made for float32"


def test_the_cpu_is_a_first_class_case() -> None:
    found = made(models.LITE, machine(ram=64))
    assert (found.device, found.dtype, found.threads) == ("cpu", "float32", 4)
    assert found.strategies == (Strategy.CPU,)
    assert found.predicted_vram_bytes == {}
    assert found.reasons[0] == "no GPU was found: the CPU computes"
    assert "longer than the time limit" in found.reasons[-1]
    assert made(models.LITE, machine(24, ram=64), CPU).reasons[0] == "no GPU is used: the preset says so"


# ------------------------------------------------------------------------------------------------------- several cards


def test_two_cards_share_the_blocks_of_a_transformer_that_fits_neither() -> None:
    found = made(models.WAN, machine(24, 24, ram=64))
    transformer = next(p for p in found.placements if p.component == "transformer")
    assert [shard.device for shard in transformer.shards] == ["cuda:0", "cuda:1"]
    first, second = transformer.shards
    assert (first.first_block, first.count + second.count, second.first_block) == (0, 40, first.count)
    assert set(found.predicted_vram_bytes) == {"cuda:0", "cuda:1"}
    assert "spread over the cards in blocks: " in " | ".join(found.reasons)


def test_unequal_cards_use_the_one_that_is_faster_or_has_room() -> None:
    slow, quick = (
        values.gpu(index=0, uuid="a", name="NVIDIA GeForce RTX 3060", free_bytes=12 * GIB),
        values.gpu(index=1, uuid="b", name="NVIDIA GeForce RTX 4090", free_bytes=24 * GIB, total_bytes=24 * GIB),
    )
    hardware = machine(ram=64).model_copy(update={"gpus": (slow, quick)})
    found = made(models.COGVIDEOX, hardware)
    assert next(p for p in found.placements if p.component == "transformer").device == "cuda:1"
    one = made(models.COGVIDEOX, hardware, values.preset(max_gpus=1))
    assert {p.device for p in one.placements} <= {"cuda:1", "cpu"}


def test_a_card_without_room_is_left_alone() -> None:
    found = made(models.COGVIDEOX, machine(0.4, 24, ram=64))
    assert set(found.predicted_vram_bytes) == {"cuda:1"}


# ------------------------------------------------------------------------------------------------ what it never exceeds


@pytest.mark.parametrize("engine", [False, True], ids=["", "engine"])
@pytest.mark.parametrize("ram", [16, 32, 64])
@pytest.mark.parametrize("vram", [(4,), (8,), (12,), (24,), (6, 12), (24, 24)], ids=str)
@pytest.mark.parametrize("name", CARDS)
def test_a_plan_stays_within_every_budget(name: str, vram: tuple[int, ...], ram: int, engine: bool) -> None:
    try:
        found = made(
            CARDS[name], machine(*vram, ram=ram), values.preset(vram_keep_free_bytes=GIB // 2, streaming_engine=engine)
        )
    except PlanError:
        return
    estimate = found.estimate
    assert estimate is not None
    for index, size in enumerate(vram):
        if f"cuda:{index}" in estimate.memories:
            assert estimate.peak(f"cuda:{index}") <= (size - 0.5) * GIB
            assert found.predicted_vram_bytes[f"cuda:{index}"] <= estimate.peak(f"cuda:{index}") - GPU_CONTEXT_BYTES
    assert estimate.peak("ram") == found.predicted_ram_bytes <= ram * GIB - RAM_FLOOR_BYTES
    assert estimate.peak("pinned") <= PINNED_SHARE * (ram * GIB - RAM_FLOOR_BYTES)
    assert found.predicted_seconds == estimate.seconds()


def test_what_the_search_adds_up_is_what_the_estimate_adds_up() -> None:
    for vram in ((8,), (24,), (12, 24)):
        search = Search(machine(*vram, ram=64), models.WAN, request_for(models.WAN), AUTO)
        found = search.best()
        assert found is not None
        estimate = search.estimate(found)
        for (memory, stage), size in zip(found.space.slots, found.choice.bytes, strict=True):
            unused = memory.startswith("cuda") and memory not in estimate.memories
            # of several cards the search does not know yet which one gets the encoder's answer
            spare = models.WAN_14B.answer_bytes if (stage, len(vram)) == (Stage.ENCODE, 2) and "cuda" in memory else 0
            assert 0 <= (0 if unused else size) - estimate.bytes(memory, stage) <= spare
        others = estimate.seconds(Stage.EXPORT) + WORKER_START_SECONDS
        assert found.choice.seconds + others == pytest.approx(estimate.seconds())


def test_other_programs_keep_their_memory() -> None:
    busy = machine(12, ram=64)
    gpu = busy.gpus[0].model_copy(
        update={"free_bytes": 6 * GIB, "processes": (GpuProcess(pid=1, name="a game", used_bytes=6 * GIB),)}
    )
    found = made(models.WAN, busy.model_copy(update={"gpus": (gpu,)}))
    assert found.predicted_vram_bytes["cuda:0"] < 6 * GIB
    assert "in use by a game (6 GiB)" in found.reasons[0]


# ----------------------------------------------------------------------------------------------------------- the ladder


def test_each_rung_needs_less_vram_and_time_only_grows() -> None:
    found = made(models.LITE, machine(48, ram=64))
    assert len(found.ladder) >= 2
    peaks = [one.predicted_vram_bytes["cuda:0"] for one in (found, *found.ladder)]
    assert all(after < before for before, after in pairwise(peaks))
    times = [one.predicted_seconds or 0 for one in (found, *found.ladder)]
    assert times == sorted(times)
    assert all(rung.reasons for rung in found.ladder)
    second = found.rung(0)
    assert second.placements == found.ladder[0].placements
    assert second.ladder == found.ladder[1:]
    assert Plan.model_validate_json(found.model_dump_json()) == found


# ---------------------------------------------------------------------------------------------------- what does not fit


def test_an_error_names_memory_stage_shortage_and_a_change_that_fits() -> None:
    hardware = machine(4, ram=64)
    with pytest.raises(PlanError) as caught:
        plan(hardware, models.WAN, request_for(models.WAN), AUTO, {}, presets=(AUTO, CPU))
    message = str(caught.value)
    assert "of VRAM on NVIDIA GeForce RTX 3060 while making the video; 4 GiB can be used" in message
    assert "GiB short" in message
    proposed = re.search(r"It fits with (\d+) frames, or (\d+)x(\d+) with all frames", message)
    assert proposed is not None
    frames, width, height = map(int, proposed.groups())
    assert frames % 4 == 1
    assert made(models.WAN, hardware, num_frames=frames)
    assert made(models.WAN, hardware, width=width, height=height)
    with pytest.raises(PlanError):
        made(models.WAN, hardware, num_frames=frames + 4)
    with pytest.raises(PlanError):
        made(models.WAN, hardware, width=width + 48, height=height + 32)


def test_ram_is_named_with_the_source_of_its_limit() -> None:
    small = machine(24, ram=3).model_copy(update={"ram_limit": Limit(value_bytes=3 * GIB, source="cgroup v2")})
    with pytest.raises(PlanError, match=r"of RAM while .*limit: cgroup v2; 1 GiB are left to the system"):
        made(models.WAN, small)
    with pytest.raises(PlanError, match="limit: the preset Little"):
        made(models.WAN, machine(24), values.preset(title="Little", ram_limit_bytes=GIB))


def test_a_preset_that_fits_is_proposed() -> None:
    tight = values.preset(id="tight", title="Tight", vram_limit_bytes=3 * GIB)
    with pytest.raises(PlanError, match="the preset Automatic"):
        plan(
            machine(24, ram=64), models.WAN, request_for(models.WAN), tight, {},
            presets=(AUTO, tight, values.preset(id="gpu", title="A GPU", device="gpu")),
        )  # fmt: skip


def test_a_gpu_preset_without_gpu_is_refused() -> None:
    with pytest.raises(PlanError, match="doctor"):
        made(models.WAN, machine(ram=64), values.preset(device="gpu"))


def test_a_download_that_does_not_fit_the_disk_is_refused_beforehand() -> None:
    hardware = machine(24, ram=64)
    tight = Disk(path=hardware.data_disk.path, free_bytes=10 * GIB, total_bytes=100 * GIB)
    with pytest.raises(PlanError, match=r"downloaded first, about 37.*10 GiB free, 27.* GiB short.*HF_HOME"):
        plan(hardware.model_copy(update={"data_disk": tight}), models.WAN, request_for(models.WAN), AUTO, None)
    elsewhere = hardware.model_copy(update={"data_disk": tight, "download_disk": hardware.spill_disk})
    assert plan(elsewhere, models.WAN, request_for(models.WAN), AUTO, None)


# ----------------------------------------------------------------------------------------------------------- properties

SIZES = st.floats(0.3, 50)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["lite", "wan"]),
    vram=st.lists(SIZES, max_size=2),
    ram=st.floats(2, 100),
    more=st.lists(st.floats(0, 20), min_size=3, max_size=3),
    engine=st.booleans(),
    fp8=st.booleans(),
)
def test_more_memory_never_makes_it_slower_or_fail(
    name: str, vram: list[float], ram: float, more: list[float], engine: bool, fp8: bool
) -> None:
    card, preset = CARDS[name], values.preset(fp8_storage=fp8, streaming_engine=engine)
    request = request_for(card)
    less = Search(machine(*vram, ram=ram), card, request, preset).best()
    larger = machine(*(v + extra for v, extra in zip(vram, more, strict=False)), ram=ram + more[2])
    greater = Search(larger, card, request, preset).best()
    if less is not None:
        assert greater is not None
        assert greater.choice.seconds <= less.choice.seconds


@settings(max_examples=15, deadline=None)
@given(vram=st.lists(SIZES, max_size=2), ram=st.floats(2, 100))
def test_same_inputs_same_plan(vram: list[float], ram: float) -> None:
    def outcome() -> str:
        try:
            return made(models.WAN, machine(*vram, ram=ram)).model_dump_json()
        except PlanError as error:
            return str(error)

    assert outcome() == outcome()


def test_a_plan_takes_under_20_ms_of_processor_time() -> None:
    # processor time, not wall time: a busy machine must not turn this red
    for hardware in (machine(12, ram=64), machine(12, 24, ram=64)):
        spent = []
        for _ in range(5):
            began = time.process_time()
            made(models.WAN, hardware)
            spent.append(time.process_time() - began)
        assert min(spent) < 0.020

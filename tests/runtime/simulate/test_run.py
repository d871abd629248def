"""Whole pipelines of real classes at tiny sizes, under each way of holding their components."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from app.errors import ModelNotUsable, PlanError
from app.runtime.simulate import (
    ComponentSetup,
    GpuSpec,
    Hold,
    MachineSpec,
    Setup,
    Shape,
    SimulatedMachine,
    Simulation,
    find,
    names,
    simulate,
)
from app.runtime.simulate.families import build_part
from app.runtime.simulate.inspection import inspect_component
from app.schema import Stage
from tests.runtime.simulate import tiny

EXACT = MachineSpec(caching_allocator=False)
GROUPS = {
    "block": ComponentSetup(hold=Hold.BLOCK),
    "block_stream": ComponentSetup(hold=Hold.BLOCK, use_stream=True),
    "leaf": ComponentSetup(hold=Hold.LEAF),
    "leaf_stream": ComponentSetup(hold=Hold.LEAF, use_stream=True),
    "leaf_low": ComponentSetup(hold=Hold.LEAF, use_stream=True, low_cpu_mem_usage=True),
    "leaf_disk": ComponentSetup(hold=Hold.LEAF, use_stream=True, offload_to_disk=True),
}


def transformer_as(setup: ComponentSetup, **others: ComponentSetup) -> Setup:
    return Setup(components={"transformer": setup, **others})


def without_clock(result: Simulation) -> dict[str, Any]:
    return result.model_dump(exclude={"seconds"})


@pytest.fixture(scope="module")
def resident() -> Simulation:
    return simulate(tiny.kandinsky(), machine=EXACT)


def test_stages_shares_and_frames_of_a_resident_run(resident: Simulation) -> None:
    assert resident.output_shape == (1, 9, 64, 96, 3)
    assert [p.stage for p in resident.peaks if p.device == "cuda:0"] == [
        Stage.LOAD,
        Stage.ENCODE,
        Stage.DENOISE,
        Stage.DECODE,
    ]
    for peak in resident.peaks:
        assert sum(share.bytes for share in peak.shares) == peak.peak_bytes
    denoise = next(p for p in resident.peaks if p.device == "cuda:0" and p.stage is Stage.DENOISE)
    owners = {(share.component, share.kind) for share in denoise.shares}
    assert {("transformer", "weights"), ("transformer", "activations"), ("vae", "weights")} <= owners
    calls = [(m.component, m.number) for m in resident.timeline if m.component == "transformer"]
    assert calls == [("transformer", n) for n in (1, 2, 3, 4)]  # two steps, each with and without the prompt
    assert resident.guesses == ()


def test_the_same_run_gives_the_same_bytes(resident: Simulation) -> None:
    again = simulate(tiny.kandinsky(), machine=EXACT)
    assert without_clock(again) == without_clock(resident)
    assert Simulation.model_validate_json(again.model_dump_json()) == again


@pytest.mark.slow
def test_replaying_changes_no_allocated_byte() -> None:
    shape = Shape(height=320, width=384, num_frames=9)
    setup = Setup(vae_tiling=True)
    real = simulate(tiny.wan(), shape, setup, EXACT, replay=False)
    replayed = simulate(tiny.wan(), shape, setup, EXACT)
    assert replayed.operations < real.operations
    assert [(p.device, p.stage, p.peak_bytes, p.shares) for p in replayed.peaks] == [
        (p.device, p.stage, p.peak_bytes, p.shares) for p in real.peaks
    ]
    assert replayed.timeline == real.timeline


def test_model_offload_holds_one_component_at_a_time(resident: Simulation) -> None:
    result = simulate(tiny.kandinsky(), setup=Setup(default=ComponentSetup(hold=Hold.MODEL_OFFLOAD)), machine=EXACT)
    second = next(m for m in result.timeline if m.component == "transformer" and m.number == 2)
    weights = next(s.bytes for s in resident.peaks[0].shares if s.component == "transformer")
    assert second.start_bytes["cuda:0"] == pytest.approx(weights, rel=0.2)  # and latents and embeddings
    assert result.timeline[-1].end_bytes["cuda:0"] < resident.timeline[-1].end_bytes["cuda:0"]
    assert result.peak("cuda:0") < resident.peak("cuda:0")


@cache
def grouped(name: str) -> Simulation:
    return simulate(tiny.kandinsky(), setup=transformer_as(GROUPS[name]), machine=EXACT)


@pytest.mark.parametrize(
    "name",
    [name if name in ("leaf_stream", "leaf_disk") else pytest.param(name, marks=pytest.mark.slow) for name in GROUPS],
)
def test_group_offloading_keeps_the_transformer_off_the_gpu(name: str, resident: Simulation) -> None:
    result = grouped(name)
    weights = next(s.bytes for s in resident.peaks[0].shares if s.component == "transformer")
    assert result.output_shape == resident.output_shape
    assert result.peak("cuda:0", Stage.DENOISE) < resident.peak("cuda:0", Stage.DENOISE) - weights / 4
    if name in ("leaf_stream", "block_stream"):
        assert result.pinned_bytes >= result.pinned_requested_bytes > 0
    if name == "leaf_disk":
        assert result.disk_bytes > weights / 2
    if name == "leaf_low":
        assert result.pinned_requested_bytes < weights / 2


def test_streams_take_one_block_more() -> None:
    with SimulatedMachine():
        transformer = build_part(tiny.kandinsky().parts["transformer"])
        block = inspect_component(transformer, torch.bfloat16).blocks[0].bytes
        del transformer
    more = grouped("block_stream").peak("cuda:0", Stage.DENOISE) - grouped("block").peak("cuda:0", Stage.DENOISE)
    assert block * 0.5 < more < block * 1.2


def test_fp8_storage_halves_the_layers(resident: Simulation) -> None:
    setup = transformer_as(ComponentSetup(storage_dtype="float8_e4m3fn"))
    result = simulate(tiny.kandinsky(), setup=setup, machine=EXACT)
    stored, usual = (
        next(s.bytes for s in r.peaks[0].shares if s.component == "transformer") for r in (result, resident)
    )
    assert usual * 0.4 < stored < usual * 0.9  # norms, embeddings and modulation keep their type
    assert result.output_shape == resident.output_shape


def test_two_gpus_share_the_work() -> None:
    other = ComponentSetup(device="cuda:1")
    setup = Setup(components={"text_encoder": other, "text_encoder_2": other, "vae": other})
    result = simulate(tiny.kandinsky(), setup=setup, machine=MachineSpec(gpus=(GpuSpec(), GpuSpec())))
    held = {
        device: {s.component for p in result.peaks if p.device == device for s in p.shares if s.kind == "weights"}
        for device in ("cuda:0", "cuda:1")
    }
    assert held == {"cuda:0": {"transformer"}, "cuda:1": {"text_encoder", "text_encoder_2", "vae"}}


def test_the_cpu_alone_is_a_machine() -> None:
    result = simulate(
        tiny.wan("float32"), setup=Setup(default=ComponentSetup(hold=Hold.CPU)), machine=MachineSpec(gpus=())
    )
    assert result.output_shape == (1, 9, 64, 96, 3)
    assert {p.device for p in result.peaks} == {"ram"}
    assert result.peak("ram") > 0


def test_too_small_a_gpu_raises_and_says_where(resident: Simulation) -> None:
    weights = resident.peak("cuda:0", Stage.LOAD)
    tight = MachineSpec(gpus=(GpuSpec(capacity_bytes=weights + 65536),), caching_allocator=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        simulate(tiny.kandinsky(), machine=tight)
    assert "in stage encode, text_encoder" in caught.value.__notes__[0]


def test_ram_too_small_raises() -> None:
    with pytest.raises(MemoryError, match="RAM"):
        simulate(tiny.wan(), setup=Setup(default=GROUPS["leaf_stream"]), machine=MachineSpec(ram_bytes=1024))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="no component unet"):
        simulate(tiny.wan(), setup=Setup(components={"unet": ComponentSetup()}))
    with pytest.raises(ModelNotUsable, match="nor one of kandinsky5-t2v-lite"):
        simulate("no-such-model")


def test_the_catalogue_is_complete() -> None:
    for name in names():
        family = find(name)
        assert "transformer" in family.parts
        assert "vae" in family.parts
        assert family.scheduler["class"]

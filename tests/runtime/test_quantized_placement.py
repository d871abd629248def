"""The same packed weights give the same video however they are held, bit for bit; what cannot be held so is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig

from app.errors import ModelNotUsable, OffloadActive, PlanError
from app.runtime import placement
from app.runtime.packed import quantization_of
from app.schema import GIB, Strategy
from tests.runtime.families import FAMILIES, Frames, frames
from tests.runtime.packed import METHODS, bytes_of, pipeline
from tests.runtime.simulated import SimulatedMachine
from tests.runtime.test_placement import STRATEGIES, arrangement, everything

Hold = Callable[[str, Any], dict[str, Any]]
HELD = [name for name in STRATEGIES if name != "disk"]
SAMPLE = [
    ("gguf", "leaf_stream_low"),
    ("bitsandbytes_4bit", "block_stream"),
    ("bitsandbytes_4bit", "stream"),
    ("bitsandbytes_8bit", "model_offload"),
    ("torchao_int8", "leaf"),
]


def packed(hold: Hold) -> Hold:
    """The same, as the modules are packed."""
    return lambda name, module: {**hold(name, module), "quantization": quantization_of(module)}


def simulated_frames(method: str, strategy: str) -> Frames:
    pipe = pipeline(method)
    with SimulatedMachine(gpus=[4 * GIB] * 3) as machine:
        machine.adopt(pipe)
        placement.place(pipe, arrangement(pipe, packed(STRATEGIES[strategy])))
        try:
            video = frames(pipe, "wan")
        finally:
            placement.rest(pipe)
        assert machine.hazards == []
        placement.remove(pipe)
        assert max(machine.used_bytes(f"cuda:{number}") for number in range(3)) <= 512
        assert machine.pinned_bytes == 0
    return video


@cache
def wanted(method: str) -> Frames:
    """On the CPU, placed by nobody."""
    return frames(pipeline(method), "wan")


@pytest.mark.parametrize(("method", "strategy"), SAMPLE)
def test_a_packed_video_is_the_same_however_it_is_held(method: str, strategy: str) -> None:
    """The whole matrix is the slow test."""
    assert (simulated_frames(method, strategy) == wanted(method)).all()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", HELD)
@pytest.mark.parametrize("method", METHODS)
def test_every_packed_video_is_the_same_however_it_is_held(method: str, strategy: str) -> None:
    assert (simulated_frames(method, strategy) == wanted(method)).all()


@pytest.mark.parametrize("method", ["gguf", "bitsandbytes_4bit"])
def test_a_card_holds_the_packed_bytes_only(method: str) -> None:
    pipe = pipeline(method)
    size = bytes_of(pipe.transformer)
    with SimulatedMachine(gpus=[4 * GIB]) as machine:
        machine.adopt(pipe)
        hold = packed(lambda name, _: {} if name == "transformer" else {"strategy": Strategy.MODEL_OFFLOAD})
        placement.place(pipe, arrangement(pipe, hold))
        tensors = sum(1 for _ in pipe.transformer.parameters())
        assert size <= machine.used_bytes("cuda:0") <= size + 512 * (tensors + 16)


def test_from_one_strategy_to_another() -> None:
    """A warm worker holds the model anew; nothing is packed again."""
    pipe = pipeline("bitsandbytes_4bit")
    with SimulatedMachine(gpus=[4 * GIB] * 2) as machine:
        machine.adopt(pipe)
        for strategy in ("leaf", "model_offload"):
            plan = arrangement(pipe, packed(STRATEGIES[strategy]))
            (placement.switch if placement.placed(pipe) else placement.place)(pipe, plan)
            assert (frames(pipe, "wan") == wanted("bitsandbytes_4bit")).all()
            placement.rest(pipe)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", METHODS)
def test_reading_blocks_from_the_disk_is_refused(method: str) -> None:
    pipe = pipeline(method)
    hold: Hold = lambda name, _: {"strategy": Strategy.DISK if name == "transformer" else Strategy.MODEL_OFFLOAD}  # noqa: E731
    with SimulatedMachine(gpus=[4 * GIB]) as machine:
        machine.adopt(pipe)
        with pytest.raises(PlanError, match="quantized, and blocks are read from the disk as they lie there"):
            placement.place(pipe, arrangement(pipe, packed(hold)))
        assert placement.held(pipe) == dict.fromkeys(placement.modules_of(pipe), ("cpu",))


@pytest.mark.parametrize("method", METHODS)
def test_eight_bit_storage_on_top_is_refused(method: str) -> None:
    pipe = pipeline(method)
    hold: Hold = lambda name, _: {"storage_dtype": "float8_e4m3fn"} if name == "transformer" else {}  # noqa: E731
    with SimulatedMachine(gpus=[4 * GIB]) as machine:
        machine.adopt(pipe)
        with pytest.raises(PlanError, match="quantized already"):
            placement.place(pipe, arrangement(pipe, packed(hold)))


def test_eight_bit_storage_would_round_the_scales() -> None:
    module = pipeline("bitsandbytes_4bit").transformer
    with pytest.raises(ModelNotUsable, match="cannot be cast"):
        module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


@pytest.mark.parametrize(("loaded", "planned"), [("gguf", None), (None, "torchao_int8"), ("gguf", "torchao_int8")])
def test_a_plan_for_other_weights_is_refused(loaded: str | None, planned: str | None) -> None:
    pipe = pipeline(loaded) if loaded is not None else FAMILIES["wan"]()
    cpu = {"strategy": Strategy.CPU, "device": "cpu"}

    def hold(name: str, _: Any) -> dict[str, Any]:
        return {**cpu, "quantization": planned} if name == "transformer" else cpu

    with pytest.raises(PlanError, match=r"transformer is planned .*, but was loaded"):
        placement.place(pipe, arrangement(pipe, hold))


def test_layers_of_the_library_are_refused() -> None:
    """`Params4bit` leaves its scales behind when its `.data` is moved."""
    pipe = FAMILIES["wan"]()
    layer = pipe.transformer.blocks[0].ffn.net[2]
    theirs = bnb.nn.Linear4bit(layer.in_features, layer.out_features, device="meta")
    theirs.weight = bnb.nn.Params4bit(layer.weight.detach(), requires_grad=False, module=theirs).to("cpu")
    theirs.bias = layer.bias
    pipe.transformer.blocks[0].ffn.net[2] = theirs
    with pytest.raises(PlanError, match="quantized by its library's own classes"):
        placement.place(pipe, arrangement(pipe, everything(Strategy.CPU, device="cpu")))


def test_a_component_without_a_placement_of_its_own_is_held_as_it_is_packed() -> None:
    """Of a model that was downloaded only now, sizes and components were unknown when the plan was made."""
    pipe = pipeline("gguf")
    plan = arrangement(pipe, everything(Strategy.CPU, device="cpu")).model_copy(
        update={"placements": (), "strategy": Strategy.CPU, "device": "cpu"}
    )
    placement.place(pipe, plan)
    assert placement.placed(pipe).placements["transformer"].quantization == "gguf"


def test_training_a_placed_one_is_refused_at_its_forward() -> None:
    pipe = pipeline("torchao_int8")
    with SimulatedMachine(gpus=[4 * GIB]) as machine:
        machine.adopt(pipe)
        placement.place(pipe, arrangement(pipe, packed(STRATEGIES["model_offload"])))
        with pytest.raises(OffloadActive):
            pipe.transformer.train()


# ----------------------------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("method", METHODS)
def test_a_lora_works_beside_packed_weights_and_is_not_fused_into_them(method: str) -> None:
    pipe = pipeline(method)
    before = frames(pipe, "wan")
    torch.manual_seed(0)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["net.2"], init_lora_weights=False))
    beside = frames(pipe, "wan")
    assert abs(beside - before).mean() > 0.01
    state = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    with pytest.raises((RuntimeError, ValueError, AttributeError)):
        pipe.fuse_lora()
    assert all(torch.equal(value, state[name]) for name, value in pipe.transformer.state_dict().items())

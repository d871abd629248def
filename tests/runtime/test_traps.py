"""Ways in which diffusers' offloading gives a wrong video, a crash or a memory peak, each beside what Pocketreel does.

Each test named `..._library` shows the behaviour of the installed diffusers, so that an upgrade that mends it is seen;
the one below it shows that Pocketreel is not affected. Source: facts/diffusers-0.42-traps.md, row by row. Rows about
training are in test_guard.py, about files in test_checkpoint_files.py and test_streaming.py. Rows that only cost time
(weights moved both ways, nothing prefetched across forwards) have no test here: `pocketreel bench offload` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from diffusers.hooks import HookRegistry, apply_group_offloading
from diffusers.pipelines.pipeline_loading_utils import _assign_components_to_devices

from app.errors import PlanError
from app.runtime import placement
from app.schema import GIB, Strategy
from tests.runtime.families import FAMILIES, frames
from tests.runtime.simulated import SimulatedMachine
from tests.runtime.test_placement import STRATEGIES, VISITS, arrangement, by_stage, everything, resident_frames

CARD, HOME = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture
def machine() -> Iterator[SimulatedMachine]:
    with SimulatedMachine(gpus=[4 * GIB, 4 * GIB]) as one:
        yield one


def stock(module: Any, level: str = "block_level", **options: Any) -> None:
    """diffusers' own call as its documentation shows it."""
    if level == "block_level":
        options = {"num_blocks_per_group": 1, **options}
    apply_group_offloading(module, **{"onload_device": CARD, "offload_device": HOME, "offload_type": level, **options})


def transformer(seed: int = 1) -> tuple[Any, Any]:
    """A tiny Wan transformer and the arguments of a forward; on the CPU, no machine needed."""
    module = FAMILIES["wan"]().transformer
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(1000 * seed + number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    inputs = {
        "hidden_states": torch.randn(1, module.config.in_channels, 2, 8, 8, generator=torch.Generator().manual_seed(0)),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.ones(1, 4, module.config.text_dim),
    }
    return module, inputs


def run(module: Any, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = module(**inputs, return_dict=False)[0]
    return result


# ------------------------------------------------------------------------------------------------ group offload to disk


def to_disk(module: Any, folder: Path, level: str = "block_level") -> None:
    stock(module, level, onload_device=HOME, offload_to_disk_path=str(folder))


def test_two_models_in_one_folder_library(tmp_path: Path) -> None:
    (first, inputs), (second, _) = transformer(1), transformer(2)
    wanted = run(first, inputs), run(second, inputs)
    to_disk(first, tmp_path)
    to_disk(second, tmp_path)
    assert torch.equal(run(first, inputs), wanted[0])
    assert torch.equal(run(second, inputs), wanted[0])  # the first one's weights, without a word
    assert not torch.equal(wanted[0], wanted[1])


def test_a_file_that_a_killed_process_left_library(tmp_path: Path) -> None:
    module, inputs = transformer()
    to_disk(module, tmp_path)
    victim = next(iter(sorted(tmp_path.glob("*.safetensors"))))
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    again, inputs = transformer()
    to_disk(again, tmp_path)
    with pytest.raises(safetensors.SafetensorError):
        run(again, inputs)


def test_a_file_with_a_zeroed_tail_library(tmp_path: Path) -> None:
    module, inputs = transformer()
    wanted = run(module, inputs)
    to_disk(module, tmp_path)
    for victim in tmp_path.glob("*.safetensors"):
        data = bytearray(victim.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        victim.write_bytes(data)
    again, inputs = transformer()
    to_disk(again, tmp_path)
    assert not torch.equal(run(again, inputs), wanted)


def test_weights_after_disk_offload_library(tmp_path: Path) -> None:
    module, inputs = transformer()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    to_disk(module, tmp_path)
    after = module.state_dict()
    assert sum(not torch.equal(after[name], tensor) for name, tensor in before.items()) > len(before) // 2
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.remove_hook("group_offloading", recurse=True)
    wanted, _ = transformer()
    assert not torch.equal(run(module, inputs), run(wanted, inputs))  # hooks off, weights gone


def test_a_fused_lora_is_lost_library(tmp_path: Path) -> None:
    module, inputs = transformer()
    wanted = run(module, inputs)
    to_disk(module, tmp_path)
    with torch.no_grad():
        module.blocks[0].attn1.to_q.weight += 1.0  # what fusing does
    assert torch.equal(run(module, inputs), wanted)


@pytest.mark.parametrize("strategy", ["model_offload", "leaf_stream", pytest.param("block", marks=pytest.mark.slow)])
def test_a_fused_lora_is_kept(strategy: str, machine: SimulatedMachine) -> None:
    pipe, plain = FAMILIES["wan"](), FAMILIES["wan"]()
    placement.place(pipe, arrangement(pipe, STRATEGIES[strategy]))
    frames(pipe, "wan")
    for one in (pipe, plain):
        with torch.no_grad():
            one.transformer.blocks[0].attn1.to_q.weight += 0.5
    wanted = frames(plain, "wan")
    assert (frames(pipe, "wan") == wanted).all()
    placement.remove(pipe)
    assert (frames(pipe, "wan") == wanted).all()


def test_what_is_written_to_while_it_visits_is_kept(machine: SimulatedMachine) -> None:
    """A LoRA that is fused between two steps, on the card."""
    pipe = FAMILIES["wan"]()
    placement.place(pipe, arrangement(pipe, everything(Strategy.MODEL_OFFLOAD)))
    weight = pipe.transformer.blocks[0].attn1.to_q.weight

    def fuse(_module: Any, _args: Any) -> None:
        with torch.no_grad():
            weight.fill_(0.25)

    handle = pipe.transformer.blocks[3].register_forward_pre_hook(fuse)
    frames(pipe, "wan")
    handle.remove()
    placement.rest(pipe)
    assert str(weight.device) == "cpu"
    assert bool((weight.detach() == 0.25).all())


# ---------------------------------------------------------------------------------------------- group offload in memory


@pytest.mark.parametrize("family", ["hunyuan", "ltx", "cogvideox"])
def test_block_groups_of_a_vae_library(family: str, machine: SimulatedMachine) -> None:
    pipe = FAMILIES[family]()
    pipe.transformer.to(CARD)
    for name in ("text_encoder", "text_encoder_2"):
        if getattr(pipe, name, None) is not None:
            getattr(pipe, name).to(CARD)
    stock(pipe.vae)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        frames(pipe, family)


@pytest.mark.parametrize("family", ["hunyuan", "ltx", "cogvideox", "mochi", "kandinsky"])
def test_block_groups_of_a_vae(family: str, machine: SimulatedMachine) -> None:
    wanted = resident_frames(family)
    pipe = FAMILIES[family]()
    blocks = {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1}
    placement.place(pipe, arrangement(pipe, by_stage(decode=blocks, encode=VISITS)))
    assert abs(frames(pipe, family) - wanted).max() == 0


def test_kandinskys_own_call_library(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["kandinsky"]()
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    pipe.enable_group_offload(onload_device=CARD, offload_device=HOME, **options)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        frames(pipe, "kandinsky")


def peak_of(machine: SimulatedMachine, module: Any, call: Any) -> int:
    machine.reset_peaks()
    with torch.no_grad():
        call(module)
    return machine.peak_bytes("cuda:0")


def weight_bytes(module: Any) -> int:
    return sum(t.numel() * t.element_size() for t in module.parameters())


def encode(module: Any) -> Any:
    return module(torch.ones(1, 8, dtype=torch.int64, device=CARD))


def test_block_groups_of_a_text_encoder_library(machine: SimulatedMachine) -> None:
    module = FAMILIES["cogvideox"]().text_encoder
    stock(module)
    assert peak_of(machine, module, encode) > weight_bytes(module)  # all of it is one group


def test_block_groups_of_a_text_encoder(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["cogvideox"]()
    blocks = {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1}
    placement.place(pipe, arrangement(pipe, by_stage(encode=blocks, denoise=VISITS, decode=VISITS)))
    blocks_bytes = max(weight_bytes(block) for block in pipe.text_encoder.encoder.block)
    everything_else = weight_bytes(pipe.text_encoder) - sum(map(weight_bytes, pipe.text_encoder.encoder.block))
    peak = peak_of(machine, pipe.text_encoder, encode)
    assert peak < weight_bytes(pipe.text_encoder) + 10_000
    assert peak < everything_else + blocks_bytes + 40_000


def test_a_class_whose_blocks_are_not_found_is_refused(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["kandinsky"]()
    before = {name: module.state_dict() for name, module in placement.modules_of(pipe).items()}
    blocks = {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1}
    with pytest.raises(PlanError, match="layers"):
        placement.place(pipe, arrangement(pipe, everything(**blocks)))  # the transformer is hooked before the encoder
    assert placement.placed(pipe) is None
    assert placement.held(pipe) == dict.fromkeys(before, ("cpu",))
    assert not any(placement.groups.hooked(module) for module in placement.modules_of(pipe).values())
    assert (frames(pipe, "kandinsky") == resident_frames("kandinsky")).all()


def order_kept(vae: Any) -> int:
    """Calls that the library's tracing remembers."""
    hooks = [getattr(part, "_diffusers_hook", None) for part in vae.modules()]
    lazy = [hook.get_hook("lazy_prefetch_group_offloading") for hook in hooks if hook is not None]
    return sum(len(hook.execution_order) for hook in lazy if hook is not None)


def decode(vae: Any) -> Any:
    return vae.decode(torch.zeros(1, vae.config.latent_channels, 2, 8, 8, device=CARD))


def test_layers_of_a_vae_with_streams_library(machine: SimulatedMachine) -> None:
    vae = FAMILIES["hunyuan"]().vae
    stock(vae, "leaf_level", use_stream=True)
    with torch.no_grad():
        decode(vae)
        first = order_kept(vae)
        decode(vae)
    assert order_kept(vae) == 2 * first > 0  # it grows with every clip, and nothing is ever prefetched


def test_layers_of_a_vae_with_streams(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["hunyuan"]()
    layers = {"strategy": Strategy.LEAF, "use_stream": True}
    placement.place(pipe, arrangement(pipe, by_stage(decode=layers)))
    with torch.no_grad():
        decode(pipe.vae)
        decode(pipe.vae)
    assert order_kept(pipe.vae) == 0


def test_page_locked_memory_is_rounded_up_library(machine: SimulatedMachine) -> None:
    module = FAMILIES["wan"]().transformer
    stock(module, "leaf_level", use_stream=True)
    assert machine.pinned_bytes > 1.1 * weight_bytes(module)


def test_enabling_twice_library(machine: SimulatedMachine, tmp_path: Path) -> None:
    module = FAMILIES["wan"]().transformer
    stock(module)
    stock(module, "leaf_level")  # both are in force now
    depths = [len(part._diffusers_hook.hooks) for part in module.modules() if hasattr(part, "_diffusers_hook")]
    assert len(depths) > len(module.blocks) + 1
    other = FAMILIES["wan"]().transformer
    stock(other)
    stock(other, offload_to_disk_path=str(tmp_path))
    registry = other.blocks[0]._diffusers_hook
    assert registry.get_hook("group_offloading").group.offload_to_disk_path is None  # ignored


def test_placing_twice_is_refused_and_switching_leaves_one_plan_in_force(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["wan"]()
    wanted = resident_frames("wan")
    placement.place(pipe, arrangement(pipe, STRATEGIES["block"]))
    with pytest.raises(PlanError, match="placed already"):
        placement.place(pipe, arrangement(pipe, STRATEGIES["leaf"]))
    for strategy in ("leaf_stream", "model_offload", "two_cards"):
        placement.switch(pipe, arrangement(pipe, STRATEGIES[strategy]))
        assert (frames(pipe, "wan") == wanted).all(), strategy
        hooks = [part._diffusers_hook.hooks for part in pipe.transformer.modules() if hasattr(part, "_diffusers_hook")]
        assert max((len(names) for names in hooks), default=0) <= 1
    with pytest.raises(PlanError, match="has 4"):
        placement.switch(pipe, too_few_blocks(pipe))
    assert (frames(pipe, "wan") == wanted).all()  # the old plan is in force again


def too_few_blocks(pipe: Any) -> Any:
    plan = arrangement(pipe, STRATEGIES["sharded"])
    wrong = [one.model_copy(update={"shards": one.shards[:1]}) if one.shards else one for one in plan.placements]
    return plan.model_copy(update={"placements": tuple(wrong)})


def test_a_component_that_takes_no_groups_library(machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = FAMILIES["wan"]()
    monkeypatch.setattr(type(pipe.transformer), "_supports_group_offloading", False)
    with pytest.raises(ValueError, match="does not support group offloading"):
        pipe.enable_group_offload(onload_device=CARD, offload_device=HOME, offload_type="leaf_level")
    hooked = [name for name, module in placement.modules_of(pipe).items() if placement.groups.hooked(module)]
    assert hooked  # half of it stays offloaded


def test_the_execution_device_is_a_guess_library(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["wan"]()
    stock(pipe.vae, "leaf_level", onload_device=torch.device("cuda:1"))
    assert str(pipe._execution_device) == "cuda:1"  # although all else is on the CPU


def test_the_execution_device_is_the_plans(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["wan"]()
    layers = {"strategy": Strategy.LEAF, "device": "cuda:1"}
    placement.place(pipe, arrangement(pipe, by_stage(decode=layers)))
    assert str(pipe._execution_device) == "cuda:0"


def test_what_was_placed_can_be_moved_library(machine: SimulatedMachine) -> None:
    module = FAMILIES["wan"]().transformer
    stock(module, "leaf_level")
    module.to(torch.bfloat16)  # nobody objects
    assert module.blocks[0].attn1.to_q.weight.dtype is torch.bfloat16
    encoder = FAMILIES["wan"]().text_encoder
    stock(encoder, "leaf_level")
    encoder.to(CARD)  # and transformers' models can go anywhere
    assert encoder.shared.weight.device.type == "cuda"


def test_what_was_placed_cannot_be_moved_or_is_found_out(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["wan"]()
    placement.place(pipe, arrangement(pipe, STRATEGIES["leaf"]))
    for move in (
        lambda: pipe.to(0),
        lambda: pipe.to("cuda:1"),
        pipe.enable_model_cpu_offload,
        pipe.enable_sequential_cpu_offload,
        lambda: pipe.enable_group_offload(onload_device=CARD),
    ):
        with pytest.raises(PlanError, match="placed by a plan"):
            move()
    placement.assert_runnable(pipe)
    pipe.text_encoder.to("cuda:1")
    with pytest.raises(PlanError, match=r"text_encoder should be on cpu.*cuda:1"):
        placement.assert_runnable(pipe)


def test_eight_bits_travel(machine: SimulatedMachine) -> None:
    """Casting comes before offloading: what waits in RAM, and what is copied, has eight bits."""
    pipe = FAMILIES["wan"]()
    hold = {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1, "storage_dtype": "float8_e4m3fn"}
    placement.place(pipe, arrangement(pipe, by_stage(denoise=hold, encode=VISITS, decode=VISITS)))
    weight = pipe.transformer.blocks[0].attn1.to_q.weight
    assert (weight.dtype, weight.device.type) == (torch.float8_e4m3fn, "cpu")
    frames(pipe, "wan")
    assert weight.dtype is torch.float8_e4m3fn
    with pytest.raises(PlanError, match="load it again"):
        placement.remove(pipe)


class Broken(Exception):
    """In the middle of a block."""


def break_in(pipe: Any, block: int = 2) -> Any:
    def fail(_module: Any, _args: Any) -> None:
        raise Broken

    return pipe.transformer.blocks[block].register_forward_pre_hook(fail)


def test_after_an_error_the_card_is_not_empty_library(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["wan"]()
    pipe.enable_model_cpu_offload(device=CARD)
    break_in(pipe)
    with pytest.raises(Broken):
        frames(pipe, "wan")
    assert pipe.transformer.device.type == "cuda"


AFTER_AN_ERROR = ("model_offload", "block_stream", "leaf_stream", "visits_to_the_small_card", "stream")
OTHERS = set(STRATEGIES) - {*AFTER_AN_ERROR, "sharded_over_three", "disk"}


@pytest.mark.parametrize(
    "strategy", [*AFTER_AN_ERROR, *(pytest.param(one, marks=pytest.mark.slow) for one in sorted(OTHERS))]
)
def test_after_an_error_in_a_block_the_card_is_empty_and_the_next_video_right(
    strategy: str, machine: SimulatedMachine
) -> None:
    pipe = FAMILIES["wan"]()
    placement.place(pipe, arrangement(pipe, STRATEGIES[strategy]))
    placement.rest(pipe)
    before = machine.used_bytes("cuda:0")
    handle = break_in(pipe)
    with pytest.raises(Broken):
        frames(pipe, "wan")
    placement.rest(pipe)
    handle.remove()
    largest = max(weight_bytes(block) for block in pipe.transformer.blocks)
    assert machine.used_bytes("cuda:0") <= before + 3 * largest + 20_000  # a group or two may stay; no component
    assert (frames(pipe, "wan") == resident_frames("wan")).all()
    assert machine.hazards == []


# -------------------------------------------------------------------------------------------------------- several cards


def test_balanced_drops_components_library() -> None:
    sizes = {"transformer": 28 * GIB, "text_encoder": 11 * GIB, "vae": GIB // 2}
    assert _assign_components_to_devices(sizes, {0: 8 * GIB}) == {"cpu": ["text_encoder"], 0: ["vae"]}


def test_no_component_is_dropped(machine: SimulatedMachine) -> None:
    """What the plan does not name is held as its denoiser; what the pipeline does not have is refused."""
    pipe = FAMILIES["wan"]()
    plan = arrangement(pipe, everything(Strategy.RESIDENT))
    only = plan.model_copy(update={"placements": tuple(p for p in plan.placements if p.component == "transformer")})
    placement.place(pipe, only)
    assert placement.held(pipe) == dict.fromkeys(placement.modules_of(pipe), ("cuda:0",))
    placement.remove(pipe)
    strange = plan.placements[0].model_copy(update={"component": "refiner"})
    with pytest.raises(PlanError, match="refiner"):
        placement.place(pipe, plan.model_copy(update={"placements": (*plan.placements, strange)}))


def test_cards_that_do_not_work_together_are_no_reason_to_fail(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["wan"]()
    placement.place_or_fall_back(pipe, too_few_blocks(pipe))
    (notice,) = placement.placed(pipe).notices
    assert "could not share" in notice
    assert "has 4" in notice
    assert (frames(pipe, "wan") == resident_frames("wan")).all()
    placement.rest(pipe)
    placement.remove(pipe)
    wrong = arrangement(pipe, everything(Strategy.RESIDENT, device="cuda:9"))
    with pytest.raises(PlanError, match="cuda:9"):
        placement.place_or_fall_back(pipe, wrong)
    placement.place(pipe, arrangement(pipe, STRATEGIES["leaf"]))
    placement.switch(pipe, too_few_blocks(pipe), placement.place_or_fall_back)  # a model that is loaded already
    assert "could not share" in placement.placed(pipe).notices[0]
    assert (frames(pipe, "wan") == resident_frames("wan")).all()


def test_a_component_that_was_forgotten_is_found_before_the_run(machine: SimulatedMachine) -> None:
    """Also of a pipeline that others placed."""
    pipe = FAMILIES["wan"]()
    for name in ("transformer", "text_encoder"):
        getattr(pipe, name).to(CARD)
    with pytest.raises(PlanError, match="vae is on cpu"):
        placement.assert_runnable(pipe)
    pipe.vae.to(CARD)
    placement.assert_runnable(pipe)


def test_the_second_choice_of_a_card_is_ignored_library(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["wan"]()
    pipe.enable_model_cpu_offload(gpu_id=1)
    pipe.enable_model_cpu_offload(gpu_id=0)
    assert pipe._offload_gpu_id == 1


def vae_while_denoising(pipe: Any, family: str) -> str:
    seen: list[str] = []
    handle = pipe.transformer.register_forward_pre_hook(lambda *_: seen.append(str(pipe.vae.device)))
    frames(pipe, family)
    handle.remove()
    return seen[-1]


def test_the_vae_of_a_picture_to_video_model_stays_library(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["kandinsky_i2v"]()
    pipe.enable_model_cpu_offload(device=CARD)
    assert vae_while_denoising(pipe, "kandinsky_i2v") == "cuda:0"


def test_the_vae_of_a_picture_to_video_model_leaves(machine: SimulatedMachine) -> None:
    pipe = FAMILIES["kandinsky_i2v"]()
    placement.place(pipe, arrangement(pipe, everything(Strategy.MODEL_OFFLOAD)))
    assert vae_while_denoising(pipe, "kandinsky_i2v") == "cpu"


def test_what_a_vae_encodes_on_another_card_comes_back(machine: SimulatedMachine) -> None:
    """It comes as a distribution, an object that accelerate does not look into."""
    pipe = FAMILIES["hunyuan"]()
    placement.place(pipe, arrangement(pipe, by_stage(decode={"device": "cuda:1"})))
    with torch.no_grad():
        found = pipe.vae.encode(torch.zeros(1, 3, 5, 64, 64, device=CARD)).latent_dist
    assert {str(found.mode().device), str(found.sample(torch.Generator("cpu")).device)} == {"cuda:0"}

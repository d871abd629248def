"""Simulated devices with real numbers: memories, devices, streams and their hazards, the CPU's own video."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import accelerate.hooks
import numpy as np
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from safetensors.torch import load_file, save_file

from tests.runtime.families import FAMILIES, Frames, draw_weights, frames, load
from tests.runtime.machine.ordering import READING, WRITING, Access, Uses
from tests.runtime.simulated import SimulatedMachine

MIB = 1024**2


def one(capacity: int | None = None) -> SimulatedMachine:
    return SimulatedMachine(gpus=[capacity])


# ------------------------------------------------------------------------------------------------------------ devices


def test_operands_on_different_devices_raise() -> None:
    with SimulatedMachine(gpus=[None, None]):
        here, there, host = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1"), torch.ones(2, 2)
        for other in (there, host):
            for operation in (torch.add, torch.matmul, lambda a, b: torch.cat([a, b]), torch.Tensor.mul_):
                with pytest.raises(RuntimeError, match="same device"):
                    operation(here, other)
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.functional.scaled_dot_product_attention(*(t.view(1, 1, 2, 2) for t in (here, there, there)))
        with pytest.raises(RuntimeError, match="same device"):
            torch.tensor(1.0).add_(torch.tensor(1.0, device="cuda"))
        with pytest.raises(RuntimeError, match="indexed tensor"):
            here[torch.tensor([0], device="cuda:1")]
        with pytest.raises(RuntimeError, match="same device"):
            here[torch.tensor([0])] = there[:1]
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            here.to("cuda:2")


def test_results_live_where_their_operands_do() -> None:
    with SimulatedMachine(gpus=[None, None]) as machine:
        second = torch.device("cuda:1")
        x = torch.arange(6.0, device="cuda:1")
        with torch.device("cuda:1"):
            made = torch.zeros(3)
        results = (made, x * torch.tensor(2.0), x[torch.tensor([0, 1])], x.view(2, 3).t(), x.new_ones(1), x.double())
        assert {result.device for result in (*results, torch.tensor([1.0], device=second))} == {second}
        assert (x.cpu() * 2).tolist() == (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6, 8, 10]
        assert x.to("cuda").device == torch.device("cuda:0")
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
            assert x.to("cuda").device == second
        assert torch.cuda.current_device() == 0
        x.data = torch.ones(2)
        assert (x.device.type, x.tolist()) == ("cpu", [1, 1])
        assert x.unsqueeze_(0).shape == (1, 2)
        with pytest.raises(TypeError, match="cuda:1"):
            made.numpy()
        for resize in (lambda: made.resize_(5), lambda: torch.add(x, x, out=torch.empty(0))):
            with pytest.raises(NotImplementedError, match="size"):
                resize()
        assert not machine.hazards


def test_torch_and_threads_believe_in_the_cards() -> None:
    with SimulatedMachine(gpus=[64 * MIB, None]):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 2
        assert torch.cuda.get_device_name(1)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda:1")))
        thread.start()
        thread.join()
        assert found[0].device == torch.device("cuda:1")


def test_nothing_stays_behind() -> None:
    before = {name: vars(torch.cuda)[name] for name in ("Stream", "Event", "stream", "synchronize", "device_count")}
    left: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), one():
        left.append(1 / torch.ones(2, device="cuda") * (1 / len(left)))
    with one():
        left.append(torch.ones(2, device="cuda"))
    assert before == {name: vars(torch.cuda)[name] for name in before}
    assert type(torch.ones(2)) is torch.Tensor
    with pytest.raises(RuntimeError, match="cannot be used after it"):
        left[0] + 1
    with one(), pytest.raises(RuntimeError, match="one at a time"), one():
        pass
    with one():
        pass


# ----------------------------------------------------------------------------------------------------------- capacity


def test_bytes_are_charged_by_storage_and_given_back() -> None:
    with one() as machine:
        a = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        view = a[10:]
        assert machine.used_bytes("cuda:0") == torch.cuda.memory_allocated() == MIB
        b = a + 1
        del a, b
        assert machine.used_bytes("cuda:0") == MIB
        del view
        assert machine.used_bytes("cuda:0") == 0
        assert machine.peak_bytes("cuda:0") == torch.cuda.max_memory_allocated() == 2 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert (torch.cuda.max_memory_allocated(), machine.peak_bytes("cuda:0")) == (0, 2 * MIB)
        machine.reset_peaks()
        assert machine.peak_bytes("cuda:0") == 0


def test_nothing_waits_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        with one() as machine:
            x = torch.zeros(MIB, device="cuda")
            for _ in range(3):
                x = torch.stack([x, x]).chunk(2)[0].view(-1) + 1
            assert machine.used_bytes("cuda:0") == 4 * MIB
    finally:
        gc.enable()


def test_too_much_raises_what_real_hardware_raises() -> None:
    with SimulatedMachine(gpus=[8 * MIB, 64 * MIB]) as machine:
        kept = torch.empty(6 * MIB, dtype=torch.uint8, device="cuda:0")
        assert torch.cuda.mem_get_info(0) == (2 * MIB, 8 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match="cuda:0"):
            kept.clone()
        assert machine.used_bytes("cuda:0") == 6 * MIB
        assert kept.to("cuda:1").device.index == 1
        del kept
        torch.empty(8 * MIB, dtype=torch.uint8, device="cuda:0")


def test_modules_move_and_are_adopted() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    plain[1].weight = plain[0].weight
    x = torch.ones(1, 64)
    expected = plain(x).detach().numpy()
    with one() as machine:
        assert machine.adopt(plain) is plain
        assert plain[1].weight is plain[0].weight
        used = machine.used_bytes("cpu")
        plain.to("cuda")
        assert machine.used_bytes("cpu") < used
        assert machine.used_bytes("cuda:0") == 64 * 64 * 4 + 2 * 512
        assert np.array_equal(plain(x.to("cuda")).detach().cpu().numpy(), expected)
        twin = copy.deepcopy(plain)
        assert isinstance(twin[0].weight, torch.nn.Parameter)
        twin.to("meta")
        assert twin[0].weight.device.type == "meta"


def test_gradients_are_those_of_the_cpu() -> None:
    def attend(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 48).view(1, 2, 3, 8).to(device).requires_grad_()
        return x, torch.nn.functional.scaled_dot_product_attention(x, x, torch.nn.functional.gelu(x))

    def gradient() -> Any:
        x, y = attend("cpu")
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad.numpy()

    plain, expected = attend("cpu")[1].detach().numpy(), gradient()
    with one():
        assert np.array_equal(gradient(), expected)
        on_card = attend("cuda")[1]
        assert on_card.requires_grad
        assert np.allclose(on_card.detach().cpu().numpy(), plain, atol=1e-6)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    with one():
        save_file({"x": torch.arange(3.0, device="cuda")}, tmp_path / "x.safetensors")
        loaded = load_file(tmp_path / "x.safetensors", device="cuda")["x"]
        assert (loaded.device.type, loaded.tolist()) == ("cuda", [0, 1, 2])


# ------------------------------------------------------------------------------------------------- streams and hazards


class Lab:
    """A side stream, a pinned source, and its copy on the way to the card."""

    def __init__(self, machine: SimulatedMachine, *, pinned: bool = True, dtype: torch.dtype = torch.float32) -> None:
        self.machine = machine
        self.side = torch.cuda.Stream()
        self.source = torch.ones(4, dtype=dtype)
        if pinned:
            self.source = self.source.pin_memory()
        with torch.cuda.stream(self.side):
            self.copy = self.source.to("cuda", non_blocking=True)
            self.event = self.side.record_event()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_nobody_waited_for_holds_garbage(pinned: bool, dtype: torch.dtype) -> None:
    with one() as machine:
        lab = Lab(machine, pinned=pinned, dtype=dtype)
        read = lab.copy.to(torch.float64).tolist()
        assert read == [-1] * 4 if dtype is torch.int64 else np.isnan(read).all()
        assert "reads what stream 2 of cuda:0 may still be writing" in machine.hazards[0]


WAYS: dict[str, Callable[[Lab], Any]] = {
    "stream": lambda lab: lab.side.synchronize(),
    "event": lambda lab: lab.event.synchronize(),
    "query": lambda lab: lab.event.query(),
    "device": lambda lab: torch.cuda.synchronize(),
    "accelerator": lambda lab: torch.accelerator.synchronize(),
    "wait_stream": lambda lab: torch.cuda.current_stream().wait_stream(lab.side),
    "wait_event": lambda lab: torch.cuda.current_stream().wait_event(lab.event),
    "event.wait": lambda lab: lab.event.wait(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_was_waited_for_holds_the_numbers(way: str) -> None:
    with one() as machine:
        lab = Lab(machine)
        WAYS[way](lab)
        assert (lab.copy + 1).tolist() == [2] * 4
        assert not machine.hazards


def test_the_stream_itself_needs_not_wait() -> None:
    with one() as machine:
        lab = Lab(machine)
        with lab.side:
            again = lab.copy + 1
        lab.side.synchronize()
        assert again.tolist() == [2] * 4
        assert not machine.hazards


def test_waiting_before_the_copy_is_not_waiting_for_it() -> None:
    with one() as machine:
        lab = Lab(machine)
        torch.cuda.current_stream().wait_event(lab.event)
        with torch.cuda.stream(lab.side):
            lab.copy.copy_(lab.source, non_blocking=True)
        assert np.isnan((lab.copy + 1).tolist()).all()
        assert machine.hazards


def test_a_pinned_source_overwritten_in_flight_is_a_hazard() -> None:
    with one() as machine:
        lab = Lab(machine)
        lab.source.fill_(7)
        assert "overwrites what stream 2 of cuda:0 may still be reading" in machine.hazards[0]
    with one() as machine:
        lab = Lab(machine)
        lab.side.synchronize()
        lab.source.fill_(7)
        assert lab.copy.tolist() == [1] * 4
        assert not machine.hazards
    with one() as machine:  # from pageable memory CUDA takes the numbers before it returns
        lab = Lab(machine, pinned=False)
        lab.source.fill_(7)
        assert not machine.hazards


def test_a_buffer_overwritten_while_it_is_read_is_a_hazard() -> None:
    def prefetch(*, ordered: bool) -> list[str]:
        with one() as machine:
            lab = Lab(machine)
            torch.cuda.current_stream().wait_event(lab.event)
            result = lab.copy * 3
            if ordered:
                lab.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lab.side):
                lab.copy.copy_(lab.source, non_blocking=True)
            assert result.tolist() == [3] * 4
            return machine.hazards

    assert "overwrites what stream 1 of cuda:0 may still be reading" in prefetch(ordered=False)[0]
    assert prefetch(ordered=True) == []


def test_slots_of_one_buffer_are_told_apart() -> None:
    with one() as machine:
        slots = torch.zeros(8, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        slots[4:] * 2
        with torch.cuda.stream(side):
            slots[:4].copy_(torch.ones(4).pin_memory(), non_blocking=True)
        assert not machine.hazards
        with torch.cuda.stream(side):
            slots[:5].copy_(torch.ones(5).pin_memory(), non_blocking=True)
        assert len(machine.hazards) == 1
        torch.cuda.synchronize()
        assert slots.tolist() == [1] * 5 + [0] * 3


def test_memory_given_again_while_another_stream_uses_it_is_a_hazard() -> None:
    def free(finish: Callable[[Lab], Any], after: Callable[[], Any] = lambda: None) -> list[str]:
        with one() as machine:
            lab = Lab(machine)
            torch.cuda.current_stream().wait_event(lab.event)
            lab.copy * 3
            finish(lab)
            del lab.copy
            assert not machine.hazards
            after()
            with torch.cuda.stream(lab.side):
                torch.empty(4, device="cuda")
            return machine.hazards

    assert "given memory again that was freed while stream 1 of cuda:0" in free(lambda lab: None)[0]
    assert free(lambda lab: None, lambda: torch.cuda.synchronize(0)) == []
    assert free(lambda lab: torch.cuda.current_stream().synchronize()) == []
    assert free(lambda lab: lab.side.wait_stream(torch.cuda.current_stream())) == []
    assert free(lambda lab: lab.copy.record_stream(torch.cuda.current_stream())) == []


def test_memory_of_one_stream_used_on_another_must_wait_for_the_first() -> None:
    with one() as machine:
        torch.zeros(4, device="cuda")
        buffer = torch.empty(4, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            buffer.zero_()
        assert "it was allocated there" in machine.hazards[0]


def test_recorded_memory_is_kept_until_the_host_waited() -> None:
    with SimulatedMachine(gpus=[3 * MIB]) as machine:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        tensor.sum()
        tensor.record_stream(torch.cuda.current_stream())
        del tensor
        assert machine.used_bytes("cuda:0") >= 2 * MIB
        side.synchronize()
        assert machine.used_bytes("cuda:0") >= 2 * MIB
        torch.cuda.current_stream().synchronize()
        assert machine.used_bytes("cuda:0") == 0
        with torch.cuda.stream(side):
            tensor = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
        tensor.record_stream(torch.cuda.current_stream())
        torch.ones(1, device="cuda")
        del tensor
        torch.empty(2 * MIB, device="cuda", dtype=torch.uint8)  # before it gives up, the allocator waits
        assert not machine.hazards


def test_copies_to_the_host_must_be_waited_for() -> None:
    with one() as machine:
        x = torch.ones(4, device="cuda")
        late = x.to("cpu", non_blocking=True)
        assert late.is_pinned()
        assert np.isnan(late.numpy()).all()
        assert len(machine.hazards) == 1
        torch.cuda.current_stream().synchronize()
        assert late.numpy().sum() == 4
        assert x.cpu().tolist() == [1] * 4
        assert len(machine.hazards) == 1


def test_lists_of_copies_are_copies() -> None:
    with one() as machine:
        sources = [torch.ones(2).pin_memory(), torch.ones(3).pin_memory()]
        into = [torch.zeros(2, device="cuda"), torch.zeros(3, device="cuda")]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch._foreach_copy_(into, sources, non_blocking=True)
        assert np.isnan(into[1].tolist()).all()
        side.synchronize()
        assert into[1].tolist() == [1] * 3
        assert len(machine.hazards) == 1


def test_uses_stay_few() -> None:
    uses = Uses()
    for start in range(1000):
        uses.note(Access(start, start + 2, 1, start, READING))
    assert len(uses.accesses) <= 65
    uses.note(Access(0, 2000, 2, 1, WRITING))
    assert len(uses.accesses) == 1


# ------------------------------------------------------------------------------------------------------ pinned memory


@pytest.mark.parametrize(("power_of_two", "size"), [(True, 8 * MIB), (False, 5 * MIB)])
def test_pinned_memory_is_counted_as_it_is_rounded(power_of_two: bool, size: int) -> None:
    with SimulatedMachine(gpus=[None], pinned_power_of_two=power_of_two) as machine:
        tensor = torch.zeros(5 * MIB, dtype=torch.uint8)
        pinned = tensor.pin_memory()
        assert pinned.is_pinned()
        assert not tensor.is_pinned()
        assert pinned.pin_memory() is pinned
        assert machine.pinned_bytes == size
        assert torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True).is_pinned()
        assert (machine.pinned_bytes, machine.pinned_peak_bytes) == (size, 2 * size)
        with pytest.raises(RuntimeError, match="cannot pin"):
            tensor.to("cuda").pin_memory()
        with torch.cuda.stream(torch.cuda.Stream()):
            pinned.to("cuda", non_blocking=True)
        del pinned
        assert machine.pinned_bytes == size  # the copy still reads it
        torch.cuda.synchronize()
        assert machine.pinned_bytes == 0


# ---------------------------------------------------------------------------------------------------------- pipelines


@cache
def on_cpu(family: str) -> Frames:
    return frames(FAMILIES[family](), family)


def grouped(**options: Any) -> Callable[[Any], None]:
    """The transformer in groups, the rest resident."""

    def place(pipe: Any) -> None:
        for name, component in pipe.components.items():
            if isinstance(component, torch.nn.Module) and not name.startswith("transformer"):
                component.to("cuda:0")
        for name in ("transformer", "transformer_2"):
            if getattr(pipe, name, None) is not None:
                apply_group_offloading(getattr(pipe, name), onload_device=torch.device("cuda:0"), **options)

    return place


PLACED: dict[str, Callable[[Any], Any]] = {
    "resident": lambda pipe: pipe.to("cuda:0"),
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "leaf": grouped(offload_type="leaf_level"),
    "leaf_stream": grouped(offload_type="leaf_level", use_stream=True),
    "leaf_stream_record": grouped(offload_type="leaf_level", use_stream=True, record_stream=True),
    "leaf_stream_low": grouped(offload_type="leaf_level", use_stream=True, low_cpu_mem_usage=True),
    "block": grouped(offload_type="block_level", num_blocks_per_group=1),
    "block_stream": grouped(offload_type="block_level", num_blocks_per_group=1, use_stream=True),
}


@cache
def simulated(family: str, way: str) -> tuple[Frames, int, int, list[str]]:
    """The video, the peak on the card, the peak of pinned memory, and the hazards."""
    with one() as machine:
        pipe = FAMILIES[family]()
        PLACED[way](pipe)
        machine.reset_peaks()
        video = frames(pipe, family)
        return video, machine.peak_bytes("cuda:0"), machine.pinned_peak_bytes, machine.hazards


@pytest.mark.parametrize(
    "way", [way if way in ("resident", "leaf_stream") else pytest.param(way, marks=pytest.mark.slow) for way in PLACED]
)
def test_the_built_in_model_gives_the_same_video(way: str) -> None:
    video, _, pinned, hazards = simulated("kandinsky", way)
    assert np.array_equal(video, on_cpu("kandinsky"))
    assert hazards == []
    assert (pinned > 0) == ("stream" in way)


@pytest.mark.slow
def test_offloading_takes_less_memory() -> None:
    peaks = {way: simulated("kandinsky", way)[1] for way in PLACED}
    assert peaks["leaf"] < peaks["resident"]
    assert peaks["block"] < peaks["resident"]
    assert peaks["model"] < peaks["resident"]
    assert simulated("kandinsky", "leaf_stream_low")[2] < simulated("kandinsky", "leaf_stream")[2]


@pytest.mark.slow  # tests/runtime/test_placement.py has a sample of the same
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "kandinsky"])
def test_other_families_give_the_same_video(family: str) -> None:
    video, _, _, hazards = simulated(family, "block_stream")
    assert np.array_equal(video, on_cpu(family))
    assert hazards == []


def test_a_missing_synchronisation_in_the_library_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    with one() as machine:
        pipe = FAMILIES["wan"]()
        PLACED["block_stream"](pipe)
        stream = pipe.transformer.blocks[0]._diffusers_hook.get_hook("group_offloading").group.stream
        monkeypatch.setattr(type(stream), "synchronize", lambda stream: None)
        video = frames(pipe, "wan")
        assert machine.hazards
    assert np.isnan(video).any()


def test_layerwise_casting_is_cast_as_on_the_cpu() -> None:
    def run(device: str) -> Frames:
        pipe = FAMILIES["wan"]()
        pipe.to(device)
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        return frames(pipe, "wan")

    plain = run("cpu")
    assert not np.array_equal(plain, on_cpu("wan"))
    with one():
        assert np.array_equal(run("cuda"), plain)


def test_a_pipeline_from_outside_can_be_adopted_and_hooked_by_accelerate() -> None:
    pipe = FAMILIES["wan"]()
    with one() as machine:
        machine.adopt(pipe)
        pipe.enable_sequential_cpu_offload()
        assert np.array_equal(frames(pipe, "wan"), on_cpu("wan"))
        assert machine.hazards == []
        accelerate.hooks.remove_hook_from_module(pipe.transformer, recurse=True)


# ----------------------------------------------------------------------------------------------------------- families


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_the_same_when_saved_and_loaded(family: str, tmp_path: Path) -> None:
    pipe = FAMILIES[family]()
    pipe.save_pretrained(tmp_path)
    assert np.array_equal(frames(load(tmp_path), family), on_cpu(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "kandinsky"])  # that one is trained
def test_every_block_of_a_transformer_shows_in_the_video(family: str) -> None:
    """Or a strategy that computes a block wrongly would go unseen."""
    pipe = FAMILIES[family]()
    for name in ("transformer", "transformer_2"):
        children = pipe.components[name].children() if pipe.components.get(name) is not None else ()
        blocks = [block for child in children if isinstance(child, torch.nn.ModuleList) for block in child]
        assert len(blocks) >= 4 or name == "transformer_2"
        for block in blocks:
            kept = copy.deepcopy(block.state_dict())
            draw_weights(block, seed=99)
            assert not np.array_equal(frames(pipe, family), on_cpu(family))
            block.load_state_dict(kept)
    assert np.array_equal(frames(pipe, family), on_cpu(family))

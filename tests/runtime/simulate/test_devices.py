"""Simulated machines: capacity, devices, streams, pinned memory, values; and nothing of it stays behind."""

from __future__ import annotations

import copy
import sys
from typing import Any

import accelerate.hooks
import accelerate.utils.modeling
import diffusers.hooks.group_offloading
import pytest
import torch
from diffusers.utils.torch_utils import TorchDeviceBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from app.runtime.simulate import GpuSpec, MachineSpec, SimulatedMachine
from app.runtime.simulate.allocator import DeviceMemory, HostMemory
from app.runtime.simulate.ledger import Label

MIB = 1024**2
LABEL = Label("x", "activations")


def device_memory(capacity: int | None = None, *, caching: bool = True) -> DeviceMemory:
    spec = GpuSpec(capacity_bytes=capacity)
    return DeviceMemory("cuda:0", spec, caching=caching, before_failing=lambda: None)


# --------------------------------------------------------------------------------------------------------- allocators


def test_sizes_are_rounded_to_512_bytes_and_blocks_to_2_and_20_mib() -> None:
    memory = device_memory()
    memory.allocate(1, LABEL, "op")
    assert (memory.ledger.total, memory.ledger.reserved) == (512, 2 * MIB)
    memory.allocate(2 * MIB, LABEL, "op")
    assert memory.ledger.reserved == 22 * MIB
    memory.allocate(30 * MIB + 1, LABEL, "op")
    assert memory.ledger.reserved == 54 * MIB


def test_freed_pieces_merge_and_are_used_again() -> None:
    memory = device_memory()
    pieces = [memory.allocate(4 * MIB, LABEL, "op") for _ in range(5)]
    assert memory.ledger.reserved == 20 * MIB
    for piece in (pieces[1], pieces[3], pieces[2]):
        memory.release(piece, LABEL)
    memory.allocate(12 * MIB, LABEL, "op")
    assert memory.ledger.reserved == 20 * MIB
    assert memory.ledger.total == 20 * MIB


def test_rests_up_to_1_mib_are_not_split_off_large_blocks() -> None:
    memory = device_memory()
    memory.allocate(11 * MIB + 512, LABEL, "op")
    assert memory.ledger.total == memory.ledger.reserved == 12 * MIB


def test_unused_blocks_are_given_back_before_failing() -> None:
    memory = device_memory(64 * MIB)
    memory.release(memory.allocate(40 * MIB, LABEL, "op"), LABEL)
    memory.allocate(50 * MIB, LABEL, "op")
    assert memory.retries == 1
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20"):
        memory.allocate(20 * MIB, LABEL, "op")


def test_pinned_memory_comes_in_powers_of_two_and_is_kept() -> None:
    host = HostMemory(None, power_of_two=True)
    host.allocate_pinned(5 * MIB, LABEL, "op")
    assert (host.pinned, host.ledger.total) == (8 * MIB, 8 * MIB)
    host.release_pinned(5 * MIB, LABEL)
    assert host.ledger.total == 8 * MIB
    host.allocate_pinned(7 * MIB, LABEL, "op")
    assert host.pinned == 8 * MIB
    assert HostMemory(None, power_of_two=False).pinned_size(5 * MIB) == 5 * MIB


def test_shares_at_the_peak_are_kept_though_they_go_later() -> None:
    memory = device_memory(caching=False)
    mark = memory.ledger.set_mark()
    first = memory.allocate(1024, LABEL, "first")
    second = memory.allocate(2048, Label("y", "weights"), "second")
    memory.release(first, LABEL)
    memory.release(second, Label("y", "weights"))
    memory.ledger.close(mark)
    assert mark.peak == 3072
    assert mark.operation == "second"
    assert mark.shares == {LABEL: 1024, Label("y", "weights"): 2048}


# ------------------------------------------------------------------------------------------------------------ devices


def test_memory_lives_as_long_as_its_tensors() -> None:
    with SimulatedMachine() as machine:
        a = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        view = a[10:]
        assert torch.cuda.memory_allocated() == machine.gpus[0].ledger.total == MIB
        del a
        assert torch.cuda.memory_allocated() == MIB
        del view
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0


def test_too_much_raises_what_real_hardware_raises() -> None:
    spec = MachineSpec(gpus=(GpuSpec(capacity_bytes=64 * MIB, context_bytes=16 * MIB),), ram_bytes=8 * MIB)
    with SimulatedMachine(spec):
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info() == (8 * MIB, 64 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(MemoryError):
            torch.empty(9 * MIB, dtype=torch.uint8)
        del kept
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")


def test_operands_on_different_devices_raise() -> None:
    with SimulatedMachine(MachineSpec(gpus=(GpuSpec(), GpuSpec()))):
        here, there, host = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            here + there
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.functional.linear(here.view(1, 3), host.view(1, 3))
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.functional.scaled_dot_product_attention(*(t.view(1, 1, 1, 3) for t in (here, there, there)))
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            here.to("cuda:2")
        assert (here + there.to("cuda:0")).device == torch.device("cuda:0")


def test_small_known_values_are_followed() -> None:
    with SimulatedMachine() as machine:
        steps = torch.linspace(0, 1, 11, device="cuda")
        steps[0] = 5.0
        assert steps.max().item() == 5.0
        assert (steps > 0.45).nonzero().shape == (7, 1)
        assert steps[steps > 0.45].tolist()[0] == 5.0
        assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))
        assert steps.cpu().numpy()[1] == pytest.approx(0.1)
        assert not machine.guesses
        steps.mul_(torch.randn(11, device="cuda"))
        steps.max().item()
        assert len(machine.guesses) == 1


def test_numpy_arrays_of_unknown_contents_take_no_real_memory() -> None:
    with SimulatedMachine() as machine:
        frames = torch.empty(1000, 1000, 1000, 3).numpy()
        assert frames.shape == (1000, 1000, 1000, 3)
        assert machine.host.ledger.total == frames.size * 4
        with pytest.raises(TypeError, match="cuda"):
            torch.empty(3, device="cuda").numpy()
        with pytest.raises(TypeError, match="BFloat16"):
            torch.empty(5000, dtype=torch.bfloat16).numpy()


def test_pinned_copies_are_charged_rounded() -> None:
    with SimulatedMachine() as machine:
        tensor = torch.empty(5 * MIB, dtype=torch.uint8)
        pinned = tensor.pin_memory()
        assert pinned.is_pinned()
        assert not tensor.is_pinned()
        assert pinned.pin_memory() is pinned
        assert machine.host.ledger.total == 13 * MIB


@pytest.mark.parametrize("lagging", [False, True])
def test_recorded_memory_waits_for_a_gpu_that_lags(lagging: bool) -> None:
    with SimulatedMachine(MachineSpec(lagging_gpu=lagging)) as machine:
        copies = torch.cuda.Stream()
        with torch.cuda.stream(copies):
            tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        tensor.record_stream(torch.cuda.current_stream())
        del tensor
        assert machine.gpus[0].ledger.total == (MIB if lagging else 0)
        copies.synchronize()
        assert machine.gpus[0].ledger.total == (MIB if lagging else 0)
        torch.cuda.current_stream().synchronize()
        assert machine.gpus[0].ledger.total == 0


def test_each_stream_has_blocks_of_its_own() -> None:
    with SimulatedMachine():
        del_me = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        del del_me
        with torch.cuda.stream(torch.cuda.Stream()):
            kept = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 40 * MIB
        del kept


def test_attention_takes_the_kernel_that_cuda_would_take() -> None:
    def peak(dtype: torch.dtype, mask: bool) -> int:
        with SimulatedMachine(MachineSpec(caching_allocator=False)):
            q, k, v = (torch.empty(1, 2, 1024, 64, dtype=dtype, device="cuda") for _ in range(3))
            attn_mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool, device="cuda") if mask else None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
            return torch.cuda.max_memory_allocated() - before

    out = 2 * 1024 * 64
    assert peak(torch.bfloat16, mask=False) < 2 * out + 32 * 1024  # flash: the result and a row of sums
    assert peak(torch.bfloat16, mask=True) > 2 * 1024 * 1024  # a mask of numbers as large as the scores of one head
    assert peak(torch.float32, mask=False) < 4 * out + 32 * 1024  # efficient


# ------------------------------------------------------------------------------------------------- nothing stays behind


def _state() -> dict[str, Any]:
    owners: list[Any] = [
        torch.cuda,
        torch.accelerator,
        torch.nn.functional,
        torch.nn.Module,
        torch.Tensor,
        FakeTensor,
        FakeTensorMode,
        sys.modules["torch._subclasses.fake_tensor"],
        accelerate.hooks,
        accelerate.utils,
        accelerate.utils.modeling,
        diffusers.hooks.group_offloading,
    ]
    names = ("__doc__", "__annotations__")
    return {f"{owner}.{k}": v for owner in owners for k, v in vars(owner).items() if k not in names}


def test_everything_is_put_back() -> None:
    with SimulatedMachine():  # what is imported or cached at the first use is there before
        pass
    before = _state()
    with SimulatedMachine():
        assert torch.cuda.is_available()
        assert _state() != before
    assert _state() == before
    with pytest.raises(ZeroDivisionError), SimulatedMachine():
        1 / 0  # noqa: B018
    assert _state() == before
    assert SimulatedMachine.running is None
    assert torch.ones(2).sum().item() == 2
    assert type(torch.ones(2)) is torch.Tensor
    assert TorchDeviceBackend._detect_device_type() == ("cuda" if torch.cuda.is_available() else "cpu")


def test_one_machine_at_a_time() -> None:
    with SimulatedMachine(), pytest.raises(RuntimeError, match="one at a time"), SimulatedMachine():
        pass
    with SimulatedMachine():
        pass


def test_a_known_mask_picks_what_it_says_from_unknown_numbers() -> None:
    with SimulatedMachine():
        mask = torch.tensor([True, False, True])
        assert torch.randn(3, 4, device="cuda")[mask].shape == (2, 4)


def test_a_copy_of_a_scheduler_keeps_its_numbers() -> None:
    """LTX-2 copies its scheduler for the sound."""
    with SimulatedMachine():
        held = {"sigmas": torch.tensor([1.0, 0.5, 0.0])}
        copied = copy.deepcopy(held)["sigmas"]
        assert copied is not held["sigmas"]
        assert copied.tolist() == [1.0, 0.5, 0.0]

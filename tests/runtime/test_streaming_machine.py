"""The streaming engine on simulated cards, with real numbers: order of copies and kernels, and device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.runtime.streaming import CheckpointSource, HostBuffer, engine, stream
from app.runtime.streaming.layout import ALIGNMENT
from tests.runtime import families
from tests.runtime.simulated import SimulatedMachine
from tests.runtime.test_streaming import run, wan

MIB = 2**20
CARD = torch.device("cuda:0")


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated driver has no call that registers memory: let PyTorch pin it."""

    def make(self: HostBuffer, size: int, device: torch.device, memory: torch.Tensor | None = None) -> None:
        plain = torch.empty(size, dtype=torch.uint8) if memory is None else memory[:size]
        self.tensor = plain.pin_memory()
        self.pinned = True
        self.unpin = lambda: None

    monkeypatch.setattr(HostBuffer, "__init__", make)


def forward(module: Any, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return module(
        hidden_states=torch.randn(1, 4, 3, 8, 12, generator=draw).to(module.dtype).to(CARD),
        timestep=torch.tensor([500.0]).to(CARD),
        encoder_hidden_states=torch.randn(1, 8, 32, generator=draw).to(module.dtype).to(CARD),
        return_dict=False,
    )[0].cpu()


def plain(tensor: torch.Tensor) -> list[Any]:
    return tensor.float().flatten().tolist()


def aligned(tensors: Any) -> int:
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


@pytest.fixture(scope="module")
def expected() -> list[list[Any]]:
    module = wan(torch.bfloat16)
    with torch.no_grad():
        return [plain(run(module, seed)) for seed in range(3)]


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize(("slots", "resident"), [(1, 0), (2, 0), (3, 0), (2, 1), (2, 4)])
def test_exact_without_hazards_and_within_the_memory_that_was_promised(
    slots: int, resident: int, expected: list[list[Any]]
) -> None:
    with SimulatedMachine(gpus=[None]) as machine, torch.no_grad():
        module = machine.adopt(wan(torch.bfloat16))
        rest = aligned([p for n, p in module.named_parameters() if not n.startswith("blocks.")])
        rest += aligned(module.buffers())
        block = aligned(module.blocks[0].parameters())
        module.to(CARD)
        assert plain(forward(module, 0)) == expected[0]
        machine.reset_peaks()
        forward(module, 0)
        working = machine.peak_bytes("cuda:0") - rest - 4 * block
        module.to("cpu")
        streamed = stream(module, CARD, slots=slots, resident_blocks=resident)
        promised = rest + resident * block + (min(slots, 4 - resident) * block)
        assert machine.used_bytes("cuda:0") == promised
        machine.reset_peaks()
        for seed in range(3):
            assert plain(forward(module, seed)) == expected[seed]
        assert machine.peak_bytes("cuda:0") <= promised + working
        assert machine.hazards == []
        streamed.remove()
        assert machine.used_bytes("cuda:0") == 0
        assert all(p.device.type == "cpu" for p in module.parameters())
        assert machine.hazards == []


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("storage_dtype", [None, torch.float8_e4m3fn])
def test_from_the_disk(
    pin: bool,
    storage_dtype: torch.dtype | None,
    tmp_path: Path,
    expected: list[list[Any]],
    request: pytest.FixtureRequest,
) -> None:
    if pin:
        request.getfixturevalue("pinning")
    module = wan(torch.bfloat16)
    module.save_pretrained(tmp_path)
    if storage_dtype is not None:
        module.enable_layerwise_casting(storage_dtype, torch.bfloat16)
        with torch.no_grad():
            want = [plain(run(module, seed)) for seed in range(3)]
        assert want != expected
    else:
        want = expected
    with SimulatedMachine(gpus=[None]) as machine, torch.no_grad():
        module = machine.adopt(wan(torch.bfloat16))
        streamed = stream(module, CARD, source=CheckpointSource(tmp_path), storage_dtype=storage_dtype)
        assert [plain(forward(module, seed)) for seed in range(3)] == want
        streamed.remove()
        assert machine.hazards == []


@pytest.mark.usefixtures("pinning")
def test_exceptions_and_orders(expected: list[list[Any]]) -> None:
    with SimulatedMachine(gpus=[None]) as machine, torch.no_grad():
        module = machine.adopt(wan(torch.bfloat16))
        streamed = stream(module, CARD)

        def fail(*_: Any) -> None:
            raise ValueError("in mid-block")

        for index in (0, 2, 3, 1):
            handle = module.blocks[index].ffn.net[0].register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="mid-block"):
                forward(module, 0)
            handle.remove()
            assert plain(forward(module, 0)) == expected[0]
        streamed.remove()
        assert machine.hazards == []


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_a_whole_pipeline_on_a_card(family: str) -> None:
    want = families.frames(families.FAMILIES[family](), family)
    with SimulatedMachine(gpus=[None]) as machine, torch.no_grad():
        pipe = machine.adopt(families.FAMILIES[family]())
        transformer = pipe.transformer
        others = {name: part for name, part in pipe.components.items() if name != "transformer"}
        for part in others.values():
            if isinstance(part, torch.nn.Module):
                part.to(CARD)
        streamed = stream(transformer, CARD)
        assert (families.frames(pipe, family) == want).all()
        assert machine.hazards == []
        streamed.remove()


@pytest.mark.usefixtures("pinning")
def test_slots_may_lie_where_something_else_was_being_computed() -> None:
    with SimulatedMachine(gpus=[None]) as machine, torch.no_grad():
        streamed = stream(machine.adopt(wan(torch.bfloat16)), CARD)
        for _ in range(2):
            for index in range(4):
                streamed.before(index)
                streamed.after(index)
        assert machine.hazards == []
        streamed.remove()


# -------------------------------------------------------------------------------- what holds the numbers together


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize("guard", ["arrival", "overwriting", "allocation"])
def test_each_event_is_needed(guard: str, expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the simulated card computes wrongly or notes a hazard: the tests above can fail."""
    with SimulatedMachine(gpus=[None]) as machine, torch.no_grad():
        module = machine.adopt(wan(torch.bfloat16))
        never = torch.cuda.Event()  # waiting for one that was not recorded waits for nothing
        if guard == "arrival":
            stock = engine.Streamed._load

            def load(self: Any, *args: Any) -> Any:
                slot = stock(self, *args)
                slot.ready = never
                return slot

            monkeypatch.setattr(engine.Streamed, "_load", load)
        if guard == "overwriting":

            def release(self: Any, slot: Any) -> None:
                slot.working, slot.free = False, never

            monkeypatch.setattr(engine.Streamed, "_release", release)
        streamed = stream(module, CARD)
        if guard == "allocation":
            for slot in streamed.slots:
                slot.free = never
            streamed.before(0)  # without the host having waited for anything
            assert machine.hazards
            return
        got = [plain(forward(module, seed)) for seed in range(3)]
        assert got != expected or machine.hazards

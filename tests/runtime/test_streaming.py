"""The streaming engine: the same numbers as resident, whatever happens between the blocks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from torch import nn

from app.errors import GenerationFailed, PlanError
from app.runtime import pipeline
from app.runtime.control import Control, Interrupted
from app.runtime.streaming import CheckpointSource, HostBuffer, PinnedSource, sources, stream
from app.runtime.streaming.layout import ALIGNMENT
from tests.runtime import families
from tests.runtime.simulate import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def wan(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    module = diffusers.WanTransformer3DModel.from_config({**tiny.WAN_TRANSFORMER, **changes})
    families.draw_weights(module, seed)
    return module.eval().to(dtype)


def run(module: Any, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return module(
        hidden_states=torch.randn(1, 4, 3, 8, 12, generator=draw).to(module.dtype),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 8, 32, generator=draw).to(module.dtype),
        return_dict=False,
    )[0]


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        left[n].dtype is right[n].dtype and left[n].stride() == right[n].stride() and torch.equal(left[n], right[n])
        for n in left
    )


class Blocks(nn.Module):
    """Linear blocks that run in the order given at each call."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.order: list[int] = list(range(len(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return x


def linears(count: int = 5) -> Blocks:
    torch.manual_seed(0)
    return Blocks([nn.Linear(8, 8) for _ in range(count)]).eval()


X = torch.linspace(-1, 1, 16).reshape(2, 8)


# ------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("family", ["kandinsky", "wan", "cogvideox", "ltx", "hunyuan", "mochi"])
def test_frames_are_those_of_the_resident_pipeline(family: str, tmp_path: Path) -> None:
    pipe = families.FAMILIES[family]()
    expected = families.frames(pipe, family)
    transformer = pipe.transformer
    before, parameters = state(transformer), dict(transformer.named_parameters())
    transformer.save_pretrained(tmp_path)
    for source in (PinnedSource(), CheckpointSource(tmp_path)):
        streamed = stream(transformer, CPU, source=source)
        assert np.array_equal(families.frames(pipe, family), expected)
        assert streamed.copies > len(streamed._units), "each forward copies"
        # guesses go wrong only until the order is known
        assert streamed.late <= 2
        streamed.remove()
    assert {name: id(p) for name, p in transformer.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert same(state(transformer), before)


def test_all_components_of_a_pipeline_at_once() -> None:
    """Text encoders have their lists further inside, VAEs run `decode`, HunyuanVideo has two lists."""
    pipe = families.hunyuan()
    expected = families.frames(pipe, "hunyuan")
    modules = [module for module in pipe.components.values() if isinstance(module, nn.Module)]
    streamed = [stream(module, CPU) for module in modules]
    assert all(len(one._units) > 1 for one in streamed)
    assert np.array_equal(families.frames(pipe, "hunyuan"), expected)
    assert all(one.copies for one in streamed)


def test_two_transformers_of_one_class_from_two_folders(tmp_path: Path) -> None:
    pipe = families.wan_two_transformers()
    expected = families.frames(pipe, "wan_two_transformers", num_inference_steps=4)
    streamed = []
    for name in ("transformer", "transformer_2"):
        module = getattr(pipe, name)
        module.save_pretrained(tmp_path / name)
        streamed.append(stream(module, CPU, source=CheckpointSource(tmp_path / name)))
    got = families.frames(pipe, "wan_two_transformers", num_inference_steps=4)
    assert np.array_equal(got, expected)
    assert all(one.copies for one in streamed)
    for one in streamed:
        one.remove()


@pytest.mark.parametrize(("slots", "resident"), [(1, 0), (2, 0), (3, 0), (9, 0), (2, 1), (2, 3), (2, 4), (2, 9)])
def test_slots_and_resident_blocks(slots: int, resident: int) -> None:
    module = wan(torch.bfloat16)
    expected = [run(module, seed) for seed in range(3)]
    streamed = stream(module, CPU, slots=slots, resident_blocks=resident)
    assert all(torch.equal(run(module, seed), expected[seed]) for seed in range(3))
    travelling = max(0, 4 - resident)
    assert len(streamed._units) == travelling
    block = sum(-(-p.nbytes // ALIGNMENT) * ALIGNMENT for p in module.blocks[3].parameters())
    assert streamed.slot_bytes == min(slots, travelling) * block
    assert streamed.host_bytes == travelling * block
    if slots < travelling:
        assert streamed.copies >= 3 * (travelling - slots)
    else:
        assert streamed.copies == travelling, "what has room for all is copied once"
    streamed.remove()


def test_the_first_forward_already_knows_what_comes_and_the_next_one_starts_warm() -> None:
    module = linears()
    streamed = stream(module, CPU)
    module(X)
    assert streamed.late == 1
    assert streamed._slot_of(0) is not None, "the first block is there before the next forward begins"
    for _ in range(3):
        module(X)
    assert (streamed.late, streamed.copies) == (1, 4 * 5 + 1)


# ------------------------------------------------------------------------------------------------- order, exceptions


@pytest.mark.parametrize("from_disk", [False, True])
def test_any_order(from_disk: bool, tmp_path: Path) -> None:
    module = linears()
    if from_disk:
        save(module, tmp_path)
    source = CheckpointSource(tmp_path) if from_disk else PinnedSource()
    orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 0, 1, 1, 2], [2], [0, 2, 4], [1, 0, 1, 0, 3, 3, 3, 1], [], [4, 0]]
    draw = np.random.default_rng(0)
    orders += [list(draw.integers(0, 5, size=12)) for _ in range(20)]
    expected = [_ordered(module, order) for order in orders]
    streamed = stream(module, CPU, source=source)
    for order, want in zip(orders, expected, strict=True):
        assert torch.equal(_ordered(module, order), want), order
    streamed.remove()


def _ordered(module: Blocks, order: list[int]) -> torch.Tensor:
    module.order = [int(index) for index in order]
    return module(X)


def save(module: nn.Module, folder: Path) -> None:
    import safetensors.torch

    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(module.state_dict(), folder / "model.safetensors")


@pytest.mark.parametrize("where", ["before_block", "in_block"])
@pytest.mark.parametrize("from_disk", [False, True])
def test_a_cancel_in_any_block_leaves_the_next_forward_right(where: str, from_disk: bool, tmp_path: Path) -> None:
    module = wan()
    expected, before = run(module), state(module)
    module.save_pretrained(tmp_path)
    streamed = stream(module, CPU, source=CheckpointSource(tmp_path) if from_disk else None)
    for index in range(4):
        block = module.blocks[index]
        inner = block if where == "before_block" else block.ffn.net[0]

        def cancel(*_: Any) -> None:
            raise Interrupted

        handle = inner.register_forward_pre_hook(cancel)
        with pytest.raises(Interrupted):
            run(module)
        handle.remove()
        # even now all weights that can be seen are right
        assert same(state(module), before)
        assert torch.equal(run(module), expected)
        assert torch.equal(run(module), expected)
        handle = inner.register_forward_pre_hook(cancel)
        with pytest.raises(Interrupted):
            run(module)
        handle.remove()
    streamed.remove()
    assert same(state(module), before)
    assert torch.equal(run(module), expected)


def test_a_block_that_was_canceled_is_not_seen_with_the_weights_of_another() -> None:
    module = wan()
    before = state(module)
    streamed = stream(module, CPU)

    def cancel(*_: Any) -> None:
        raise Interrupted

    for index in (3, 0, 2, 1):  # the next forward takes the slot of the block where the last one ended
        handle = module.blocks[index].ffn.net[0].register_forward_pre_hook(cancel)
        with pytest.raises(Interrupted):
            run(module)
        handle.remove()
        assert same(state(module), before)
    streamed.remove()
    assert same(state(module), before)


def test_canceling_a_job_works_between_blocks() -> None:
    module, control = wan(), Control()
    expected = run(module)
    streamed = stream(module, CPU)
    control.begin("j")
    with pipeline.interruptible({"transformer": module}, control):
        module.blocks[1].register_forward_hook(lambda *_: control.cancel("j"))
        with pytest.raises(Interrupted):
            run(module)
    assert torch.equal(run(module), expected)
    streamed.remove()


@pytest.mark.parametrize("times", [1, 2])
def test_a_slot_is_not_overwritten_while_its_block_computes(times: int) -> None:
    """A block that calls the ones after it: refused, not wrong."""
    module = linears(3)

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = module.blocks[2](module.blocks[1](x))
            return x * self.weight

    module.blocks[0] = Calling()
    expected = module(X)
    streamed = stream(module, CPU)
    with pytest.raises(GenerationFailed, match="another block"):
        module(X)
    streamed.remove()
    assert torch.equal(module(X), expected)


def test_weights_replaced_while_streaming_are_noticed() -> None:
    module = linears()
    streamed = stream(module, CPU)
    module(X)
    replaced = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    module.blocks[3].weight = replaced
    with pytest.raises(GenerationFailed, match="replaced"):
        module(X)
    streamed.remove()


def test_a_backward_pass_raises_and_is_never_wrong() -> None:
    module = linears()
    x = X.clone().requires_grad_()
    streamed = stream(module, CPU)
    with torch.enable_grad():
        out = module(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    streamed.remove()


def test_slots_can_be_given_back_between_forwards() -> None:
    module = linears()
    expected, before = module(X), state(module)
    streamed = stream(module, CPU)
    for _ in range(2):
        assert torch.equal(module(X), expected)
        streamed.release()
        assert streamed.slot_bytes == 0
        assert same(state(module), before)
        assert torch.equal(module(X), expected)
        streamed.release()
        streamed.allocate()
    streamed.remove()


def test_inference_mode_and_back() -> None:
    module = linears()
    expected = module(X)
    with torch.inference_mode():
        streamed = stream(module, CPU)
        assert torch.equal(module(X), expected)
    assert torch.equal(module(X), expected)
    with torch.inference_mode():
        assert torch.equal(module(X), expected)
    streamed.remove()
    assert torch.equal(module(X), expected)


# ------------------------------------------------------------------------------------------------------------ removal


def test_remove_leaves_nothing_behind() -> None:
    module = wan()
    expected, before = run(module), state(module)
    parameters = list(module.parameters())
    buffers = list(module.buffers())
    untouched = {name: p.data_ptr() for name, p in module.named_parameters() if not name.startswith("blocks.")}
    streamed = stream(module, CPU)
    run(module)
    slots = [weakref.ref(slot.memory) for slot in streamed.slots]
    streamed.remove()
    streamed.remove()
    gc.collect()
    assert [ref() for ref in slots] == [None] * len(slots)
    assert all(left is right for left, right in zip(module.parameters(), parameters, strict=True))
    assert all(left is right for left, right in zip(module.buffers(), buffers, strict=True))
    assert all(p.requires_grad for p in module.parameters())
    assert {n: p.data_ptr() for n, p in module.named_parameters() if n in untouched} == untouched
    assert same(state(module), before)
    for inner in module.modules():
        assert "forward" not in vars(inner)
        assert not hasattr(inner, "_diffusers_hook")
    assert torch.equal(run(module), expected)


def test_apply_remove_apply_again(tmp_path: Path) -> None:
    module = wan()
    expected = run(module)
    module.save_pretrained(tmp_path)
    for source in (None, None, CheckpointSource(tmp_path), None, CheckpointSource(tmp_path)):
        streamed = stream(module, CPU, source=source)
        assert len(streamed._units) == 4
        assert streamed.copies == 0
        assert torch.equal(run(module), expected)
        assert streamed.copies > 4
        streamed.remove()
        assert torch.equal(run(module), expected)


def test_ram_holds_the_weights_once() -> None:
    module = linears()
    source = PinnedSource()
    streamed = stream(module, CPU, source=source)
    for index, block in enumerate(module.blocks):
        buffer = source.fetch(index).untyped_storage()
        assert {p.untyped_storage().data_ptr() for p in block.parameters()} == {buffer.data_ptr()}
        assert buffer.nbytes() == 2 * ALIGNMENT, "a matrix of 256 bytes and a bias of 32, each aligned"
    assert source.host_bytes == 5 * 2 * ALIGNMENT
    streamed.remove()


def test_other_hooks_stay() -> None:
    module = linears()
    seen: list[int] = []

    class Counting(diffusers.hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return args, kwargs

    registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(module.blocks[0])
    registry.register_hook(Counting(), "counting")
    streamed = stream(module, CPU)
    module(X)
    streamed.remove()
    module(X)
    assert len(seen) == 2
    assert list(module.blocks[0]._diffusers_hook.hooks) == ["counting"]


@pytest.mark.parametrize("at", [0, 3])
def test_a_failure_half_way_leaves_the_module_as_it_was(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.runtime.streaming import apply

    module = linears()
    expected, before = module(X), state(module)
    stock = apply._hook

    def failing(streamed: Any, index: int, block: nn.Module) -> None:
        if index == at:
            raise MemoryError
        stock(streamed, index, block)

    monkeypatch.setattr(apply, "_hook", failing)
    with pytest.raises(MemoryError):
        stream(module, CPU)
    assert same(state(module), before)
    assert not any(hasattr(inner, "_diffusers_hook") for inner in module.modules())
    assert torch.equal(module(X), expected)
    monkeypatch.undo()
    stream(module, CPU).remove()


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_streamed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="no list of blocks"):
        stream(nn.Linear(2, 2), CPU)
    with pytest.raises(PlanError, match="has no layers"):
        stream(linears(), CPU, block_modules=["layers"])
    with pytest.raises(PlanError, match="a slot at least"):
        stream(linears(), CPU, slots=0)
    module = linears()
    streamed = stream(module, CPU)
    with pytest.raises(PlanError, match="already"):
        stream(module, CPU)
    streamed.remove()
    offloaded = linears()
    apply_group_offloading(offloaded, CPU, offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(PlanError, match="group_offloading"):
        stream(offloaded, CPU)
    cast = wan(torch.bfloat16)
    cast.enable_layerwise_casting()
    with pytest.raises(PlanError, match="layerwise_casting"):
        stream(cast, CPU)
    dispatched = linears()
    dispatched.first._hf_hook = object()
    with pytest.raises(PlanError, match="accelerate"):
        stream(dispatched, CPU)
    quantized = linears()
    quantized.quantization_method = "bitsandbytes"
    with pytest.raises(PlanError, match="quantized"):
        stream(quantized, CPU)
    with torch.device("meta"):
        empty = linears()
    with pytest.raises(PlanError, match="without its weights"):
        stream(empty, CPU)


def test_a_tensor_of_several_is_refused() -> None:
    class Two(torch.Tensor):
        def __tensor_flatten__(self) -> Any: ...

        @classmethod
        def __tensor_unflatten__(cls, *_: Any) -> Any: ...

    module = linears()
    module.blocks[0]._parameters["weight"] = torch.zeros(8, 8).as_subclass(Two)
    with pytest.raises(PlanError, match="quantized"):
        stream(module, CPU)


# -------------------------------------------------------------------------------------------------- unusual parameters


class Odd(nn.Module):
    """Parameters of all kinds, and buffers of both."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared = shared
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.last = nn.Parameter(torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last))
        self.gaps = nn.Parameter(torch.randn(8, 16)[:, ::2])
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.whole = nn.Parameter(torch.arange(8), requires_grad=False)
        self.again = self.turned
        self.register_buffer("kept", torch.randn(8))
        self.register_buffer("computed", torch.randn(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.again is self.turned
        x = x @ self.shared * self.scalar + self.kept - self.computed + self.empty.sum()
        x = x @ self.turned + x @ self.gaps + self.whole
        picture = torch.nn.functional.conv2d(x.reshape(1, 8, 2, 1), self.last, padding=1)
        return x + picture.mean() + self.wide.float()


def odd() -> Blocks:
    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(8, 8))
    module = Blocks([Odd(shared) for _ in range(4)]).eval()
    module.blocks.append(nn.Linear(8, 8))
    module.blocks[4].weight = nn.Parameter(module.first.weight.data[:8])  # another parameter in the same memory
    module.blocks.append(module.blocks[0])  # twice in the list
    module.order = list(range(6))
    return module


def test_unusual_parameters() -> None:
    module = odd()
    expected, before = module(X), state(module)
    streamed = stream(module, CPU)
    names = [name for unit in streamed._units for weight in unit.weights for name in weight.names]
    assert not any("shared" in name for name in names), "what several blocks have stays on the device"
    assert "blocks.4.weight" not in names, "what lies in another one's memory does, too"
    assert "blocks.4.bias" in names
    assert len(streamed._units) == 5
    assert torch.equal(module(X), expected)
    # bit-exactness of convolutions and products needs the same strides
    with torch.no_grad():
        streamed.before(0)
        assert module.blocks[0].turned.stride() == (1, 8)
        assert module.blocks[0].last.is_contiguous(memory_format=torch.channels_last)
        streamed.after(0)
    streamed.remove()
    assert module.blocks[0].again is module.blocks[0].turned
    assert module.blocks[0].shared is module.blocks[3].shared
    after = state(module)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after["blocks.0.turned"].stride() == before["blocks.0.turned"].stride()


def test_every_parameter_is_aligned_as_the_allocator_aligns() -> None:
    module = wan(torch.bfloat16)
    streamed = stream(module, CPU)
    for layout in streamed._layouts:
        for entry in layout.entries:
            assert entry.slot_offset % ALIGNMENT == 0
            assert entry.host_offset % ALIGNMENT == 0
    streamed.remove()


def test_block_modules_as_diffusers_names_them() -> None:
    encoder = families.wan().text_encoder
    for names in (["encoder"], ["encoder.block"], None):
        streamed = stream(encoder, CPU, block_modules=names)
        assert [unit.name for unit in streamed._units] == ["encoder.block.0", "encoder.block.1"]
        streamed.remove()
    vae = families.wan().vae
    streamed = stream(vae, CPU)
    assert {"quant_conv", "post_quant_conv"} <= {unit.name for unit in streamed._units}
    streamed.remove()
    transformer = families.hunyuan().transformer
    streamed = stream(transformer, CPU)
    assert [unit.name.split(".")[0] for unit in streamed._units] == 2 * ["transformer_blocks"] + 4 * [
        "single_transformer_blocks"
    ]
    streamed.remove()


# ---------------------------------------------------------------------------------------------------------------- fp8


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch, of a slower layer norm
@pytest.mark.parametrize(
    ("family", "resident"),
    [
        pytest.param("kandinsky", 0, marks=pytest.mark.slow),
        ("wan", 0),
        ("wan", 2),
        pytest.param("hunyuan", 0, marks=pytest.mark.slow),
    ],
)
def test_fp8_transport_is_diffusers_layerwise_casting(family: str, resident: int) -> None:
    def transformer() -> Any:
        module = families.FAMILIES[family]().transformer.to(torch.bfloat16)
        for name, inner in module.named_modules():  # as loading keeps them
            if set(module._keep_in_fp32_modules or ()) & set(name.split(".")):
                inner.float()
        return module

    pipe = families.FAMILIES[family]().to(torch.bfloat16)
    pipe.transformer = transformer()
    exact = families.frames(pipe, family)
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    expected = families.frames(pipe, family)
    assert not np.array_equal(expected, exact)
    module = pipe.transformer = transformer()
    before = state(module)
    streamed = stream(module, CPU, storage_dtype=torch.float8_e4m3fn, resident_blocks=resident)
    assert np.array_equal(families.frames(pipe, family), expected)
    assert streamed.host_bytes < 0.9 * sum(layout.slot_bytes for layout in streamed._layouts)
    streamed.remove()
    assert same(state(module), before), "the unrounded weights are back"
    assert np.array_equal(families.frames(pipe, family), exact)


def test_fp8_without_originals_never_passes_for_them() -> None:
    module = wan(torch.bfloat16)
    streamed = stream(module, CPU, storage_dtype=torch.float8_e4m3fn, keep_originals=False)
    run(module)
    assert module.blocks[0].ffn.net[2].weight.is_meta, "RAM holds fp8 only"
    streamed.remove()
    assert module.blocks[0].ffn.net[2].weight.is_meta
    assert not module.blocks[0].norm2.weight.is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        run(module)


# ------------------------------------------------------------------------------------------------------------- memory


class Cudart:
    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        if self.code == 0:
            self.registered[pointer] = size
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        del self.registered[pointer]
        return 0


def test_pages_are_locked_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(sources, "registered", sources.Registered())
    size = 5 * 4096 + 100
    buffers = [HostBuffer(size, torch.device("cuda")) for _ in range(2)]
    assert [buffer.tensor.numel() for buffer in buffers] == [size, size]
    assert all(buffer.pinned for buffer in buffers)
    pointers = sorted(cudart.registered)
    assert all(pointer % 4096 == 0 for pointer in pointers)
    assert set(cudart.registered.values()) == {6 * 4096}, "to whole pages, not to a power of two"
    assert pointers[0] + 6 * 4096 <= pointers[1]
    buffers[0].unpin()
    assert len(cudart.registered) == 1
    buffers[0].unpin()
    del buffers
    gc.collect()
    assert not cudart.registered, "memory that is freed may not stay registered"
    assert (sources.registered.now, sources.registered.peak) == (0, 12 * 4096)


def test_without_page_locking_it_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not HostBuffer(100, torch.device("cuda")).pinned  # no driver on this machine, or it was taken away
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(2))
    assert not HostBuffer(100, torch.device("cuda")).pinned
    assert not HostBuffer(100, CPU).pinned

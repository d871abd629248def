"""What assert_trainable finds, what offloading_of says, and what becomes of whole pipelines and of devices."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from torch import nn

from app.demo import transformer as trainer
from app.demo import vae as decoder
from app.demo.vocabulary import ATTRIBUTES
from app.errors import NotTrainable
from app.runtime.guard import assert_trainable, forbid_training, offloading_of, prepare_for_training
from app.runtime.simulate import GpuSpec, MachineSpec, SimulatedMachine
from tests.runtime import families

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))


def refused(module: Any, optimizer: Any = None, **options: Any) -> str:
    with pytest.raises(NotTrainable) as found:
        assert_trainable(module, optimizer, **options)
    return str(found.value)


# ----------------------------------------------------------------------------------------------------------- agreement


def test_modules_that_agree_pass() -> None:
    module = small()
    module[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert_trainable(module, optimizer)


@pytest.mark.parametrize("dtype", [FP8, torch.float16])
def test_a_dtype_that_cannot_be_trained_is_named(dtype: torch.dtype) -> None:
    module = small()
    module[2].to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert f"Sequential: {name}, in which nothing can be trained: 2.weight, 2.bias\n" in refused(module)


def test_frozen_weights_may_be_narrow_but_not_too_narrow_to_compute() -> None:
    module = small()
    module[2].to(torch.float16).requires_grad_(False)
    assert_trainable(module)
    module[2].to(FP8)
    assert "float8_e4m3fn, in which nothing can be computed: 2.weight" in refused(module)


def test_weights_and_buffers_that_are_not_in_memory_are_named() -> None:
    module = small()
    module[2].to("meta")
    module.register_buffer("scale", torch.ones(1, device="meta"))
    assert "not in memory (device meta): 2.weight, 2.bias, scale\n" in refused(module)


def test_devices_that_differ_are_named() -> None:
    with SimulatedMachine(MachineSpec(gpus=(GpuSpec(capacity_bytes=None),))):
        module = small()
        module[2].to("cuda:0")
        assert "on several devices: cpu: 0.weight, 0.bias; cuda:0: 2.weight, 2.bias" in refused(module)
        module.to("cuda:0")
        module.register_buffer("scale", torch.ones(1))
        assert "cpu: scale" in refused(module)


def test_a_module_all_of_whose_weights_are_frozen_is_refused() -> None:
    assert "Sequential: no parameter requires gradients" in refused(small().requires_grad_(False))


def test_weights_made_under_inference_mode_are_named() -> None:
    module = small()
    with torch.inference_mode():
        module[2].weight.data = module[2].weight.data.clone()
    assert "made under inference_mode, which autograd does not accept: 2.weight\n" in refused(module)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    module, before = small(), small()
    text = refused(module, torch.optim.SGD(before.parameters()))
    assert "optimizer: holds parameters that are of none of these modules (any more), of shape (4, 4), (4,)," in text
    assert "optimizer: lacks parameters that require gradients: Sequential.0.weight, Sequential.0.bias," in text
    both = nn.ModuleList([module, before])
    assert_trainable(both, torch.optim.SGD(both.parameters()))


def test_an_optimizer_of_frozen_parameters_is_refused() -> None:
    module = small()
    optimizer = torch.optim.SGD(module.parameters())
    module[0].requires_grad_(False)
    assert "require no gradients: Sequential.0.weight, Sequential.0.bias\n" in refused(module, optimizer)


@pytest.mark.parametrize("change", [{"dtype": torch.bfloat16}, {"device": "meta"}])
def test_an_optimizer_whose_state_lies_elsewhere_is_refused(change: dict[str, Any]) -> None:
    module = small()
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state[module[0].weight]
    state["exp_avg"] = state["exp_avg"].to(**change)
    where = f"{change.get('device', 'cpu')}, {'bfloat16' if 'dtype' in change else 'float32'}"
    assert f"lies elsewhere than the parameter: Sequential.0.weight (exp_avg on {where})\n" in refused(
        module, optimizer
    )


def test_a_pipeline_is_asked_for_components_that_it_has() -> None:
    pipe = families.FAMILIES["wan"]()
    assert "WanPipeline has no component unet. It has" in refused(pipe, components=("transformer", "unet"))
    assert "no component to train given" in refused(pipe, components=())
    assert_trainable(pipe)


# ------------------------------------------------------------------------------------------- preparing: dtypes and ties


def test_bfloat16_leaves_in_float32_what_the_class_keeps_in_it() -> None:
    model = families.load(families.DEMO).transformer
    model.register_buffer("table", torch.ones(2, dtype=torch.float16))
    model.register_buffer("wide", torch.ones(2, dtype=torch.float64))
    prepare_for_training(model, CPU, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        kept = set(model._keep_in_fp32_modules) & set(name.split("."))
        assert weight.dtype is (torch.float32 if kept else torch.bfloat16), name
    assert (model.table.dtype, model.wide.dtype) == (torch.float16, torch.float64)
    prepare_for_training(model, CPU)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert (model.table.dtype, model.wide.dtype) == (torch.float32, torch.float64)


def test_frozen_weights_in_eval_mode_with_old_gradients_become_trainable() -> None:
    module = small()
    module(torch.ones(1, 4)).sum().backward()
    prepare_for_training(module.eval().requires_grad_(False), CPU)
    assert all(weight.requires_grad and weight.grad is None for weight in module.parameters())
    assert all(part.training for part in module.modules())


def test_called_under_inference_mode_it_makes_ordinary_weights() -> None:
    module = small().to(torch.bfloat16)
    with torch.inference_mode():
        prepare_for_training(module, CPU)
    module(torch.ones(1, 4)).sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())


def test_weights_born_under_inference_mode_are_replaced_once_for_all_their_names() -> None:
    module = small()
    with torch.inference_mode():
        module[0].weight = nn.Parameter(torch.eye(4))
    module.again = module[0]
    module[2] = nn.Linear(4, 4)
    module[2].weight = module[0].weight
    prepare_for_training(module, CPU)
    assert module[2].weight is module[0].weight
    module(torch.ones(1, 4)).sum().backward()


def test_float16_is_no_dtype_to_train_in() -> None:
    with pytest.raises(ValueError, match="float16 cannot be trained: choose one of float32, bfloat16, float64"):
        prepare_for_training(small(), CPU, dtype=torch.float16)


def test_quantized_weights_are_refused() -> None:
    module = small()
    module[2].weight = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(NotTrainable, match=r"Sequential is quantized: 2\.weight"):
        prepare_for_training(module, CPU)
    module = small()
    module.hf_quantizer = object()
    with pytest.raises(NotTrainable, match="Sequential is quantized"):
        prepare_for_training(module, CPU)


@pytest.mark.parametrize(("known", "files"), [(True, False), (False, False), (True, True)])
def test_weights_that_were_one_are_one_again(known: bool, files: bool, tmp_path: Path) -> None:
    """Sequential offload makes one parameter of each name; then each would get a part of the gradient."""
    encoder: Any = families.FAMILIES["wan"]().text_encoder
    if not known:  # by its class: then only the common memory tells
        encoder.tie_weights = None
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    ids = torch.tensor([[3, 4, 5]])
    reference = copy.deepcopy(encoder)
    if files:
        encoder.save_pretrained(tmp_path)
        file = {"safetensors_file": str(tmp_path / "model.safetensors")}
        index = {name: {**file, "weight_name": name} for name in encoder.state_dict()}
        index["encoder.embed_tokens.weight"]["weight_name"] = "shared.weight"  # stored once
        accelerate.dispatch_model(encoder, {"": "disk"}, offload_index=index)
    else:
        accelerate.cpu_offload(encoder, CPU)
    prepare_for_training(encoder, CPU)
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    for trained in (encoder, reference.train()):
        torch.manual_seed(0)  # dropout
        trained(ids).last_hidden_state.sum().backward()
    assert torch.equal(encoder.shared.weight.grad, reference.shared.weight.grad)


def test_a_cast_says_that_the_values_stay_rounded() -> None:
    model = families.load(families.DEMO).transformer
    model.enable_layerwise_casting(FP8, torch.float32)
    with pytest.warns(UserWarning, match="the weights of Kandinsky5Transformer3DModel in a narrower type"):
        prepare_for_training(model, CPU)


# ----------------------------------------------------------------------------------------------------- whole pipelines


def group(pipe: Any) -> None:
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        apply_group_offloading(getattr(pipe, name), CPU, offload_type="leaf_level")


def model_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def sequential(pipe: Any) -> None:
    """What `enable_sequential_cpu_offload` does, but it insists on `cpu:0`, on which accelerate makes no Parameters."""
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        module = getattr(pipe, name)
        accelerate.cpu_offload(module, CPU, offload_buffers=len(module._parameters) > 0)


PIPELINES = {
    "group": (group, "group offload (leaf_level, computes on cpu, weights on cpu)"),
    "model": (model_offload, "model offload (computes on cpu:0)"),
    "sequential": (sequential, "sequential offload (computes on cpu)"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_whole_pipeline_is_prepared_and_placed_again(name: str) -> None:
    place, words = PIPELINES[name]
    pipe = families.FAMILIES["kandinsky"]()
    resident = families.frames(pipe, "kandinsky")
    place(pipe)
    parts = ("text_encoder", "text_encoder_2", "transformer", "vae")
    assert sorted(offloading_of(pipe)) == [f"{part}: {words}" for part in parts]
    text = refused(pipe)
    assert all(f"- {part}: {words} is active\n" in text for part in parts)
    families.frames(pipe, "kandinsky")
    prepare_for_training(pipe, CPU)
    assert offloading_of(pipe) == ()
    assert pipe.transformer.training
    assert not pipe.vae.training
    assert_trainable(pipe, torch.optim.SGD(pipe.transformer.parameters()))
    pipe.transformer.eval()
    assert np.array_equal(families.frames(pipe, "kandinsky"), resident)
    assert offloading_of(pipe) == ()  # after a run, pipelines put model offload on again if they remember it
    place(pipe)
    assert np.array_equal(families.frames(pipe, "kandinsky"), resident)


def test_a_device_map_is_forgotten() -> None:
    pipe = families.FAMILIES["wan"]()
    accelerate.dispatch_model(pipe.transformer, {"": "cpu"}, force_hooks=True)
    pipe.hf_device_map = {"transformer": "cpu"}
    pipe.text_encoder.hf_device_map = {"shared": 0, "encoder": 1}
    assert offloading_of(pipe) == (
        "pipeline: device map {'transformer': 'cpu'}",
        "text_encoder: device map over 0, 1",
        "transformer: dispatch to cpu",
    )
    prepare_for_training(pipe, CPU)
    assert offloading_of(pipe) == ()
    assert not hasattr(pipe.transformer, "hf_device_map")
    pipe.to("cpu")  # refused while there is a map


def test_both_transformers_are_trained_when_both_are_named() -> None:
    pipe = families.FAMILIES["wan_two_transformers"]()
    forbid_training(pipe)
    assert len(offloading_of(pipe)) == 4
    prepare_for_training(pipe, CPU, components=("transformer", "transformer_2"))
    assert pipe.transformer.training
    assert pipe.transformer_2.training
    assert offloading_of(pipe) == ()


# -------------------------------------------------------------------------------------------------------------- devices


class Stop(Exception):
    pass


class Stoppable(nn.Linear):
    stopped = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.stopped:
            raise Stop
        return super().forward(value)


class Pair:
    """What the guard needs of a pipeline."""

    def __init__(self, transformer: nn.Module, vae: nn.Module) -> None:
        self.components = {"transformer": transformer, "vae": vae}


def on(module: nn.Module) -> set[str]:
    return {str(weight.device) for weight in module.parameters()}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_stream": True}, {"use_stream": True, "low_cpu_mem_usage": True}])
def test_from_groups_on_a_card_to_the_device_that_was_asked_for(options: dict[str, Any], stopped: bool) -> None:
    """Also after a cancel in the middle of a block, whose weights are on the card then."""
    with SimulatedMachine(MachineSpec(gpus=(GpuSpec(capacity_bytes=None),))):
        trained, other = (nn.Sequential(nn.Linear(4, 4), Stoppable(4, 4), nn.Linear(4, 4)) for _ in range(2))
        for module in (trained, other):
            apply_group_offloading(module, torch.device("cuda:0"), offload_type="leaf_level", **options)
            with torch.no_grad():
                for module[1].stopped in (False, False, stopped):
                    with pytest.raises(Stop) if module[1].stopped else nullcontext():
                        module(torch.ones(1, 4))
            module[1].stopped = False
        assert on(other) == ({"cpu", "cuda:0"} if stopped else {"cpu"})
        pipe = Pair(trained, other)
        prepare_for_training(pipe, "cuda:0")
        assert (on(trained), on(other)) == ({"cuda:0"}, {"cpu"})
        trained(torch.ones(1, 4, device="cuda:0"))
        prepare_for_training(pipe, "cpu")
        assert on(trained) == {"cpu"}


def test_copies_on_their_way_are_waited_for() -> None:
    class Stream:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    module, stream = small(), Stream()
    apply_group_offloading(module, CPU, offload_type="leaf_level")
    module[0]._diffusers_hook.get_hook("group_offloading").group.stream = stream
    prepare_for_training(module, CPU)
    assert stream.waited == 1


def test_model_offload_leaves_nothing_behind_on_a_card() -> None:
    with SimulatedMachine(MachineSpec(gpus=(GpuSpec(capacity_bytes=None),))):
        first, second = small(), small()
        _, hook = accelerate.cpu_offload_with_hook(first, torch.device("cuda:0"))
        accelerate.cpu_offload_with_hook(second, torch.device("cuda:0"), prev_module_hook=hook)
        with torch.no_grad():
            first(torch.ones(1, 4))
        prepare_for_training(Pair(first, second), "cuda:0")
        second(torch.ones(1, 4))  # would send the first to the CPU
        assert on(first) == {"cuda:0"}


# ------------------------------------------------------------------------------------------------------ the own trainer


def test_the_decoder_is_trained_also_when_it_comes_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = decoder.make_vae

    def offloaded() -> Any:
        vae = make()
        apply_group_offloading(vae.decoder, CPU, offload_type="leaf_level")
        forbid_training(vae)
        return vae

    monkeypatch.setattr(decoder, "make_vae", offloaded)
    monkeypatch.setattr(decoder, "assert_trainable", spy := Spy())
    before = make().encoder.state_dict()
    vae = decoder.train_decoder(tmp_path / "decoder.pt", 1, 0)
    assert offloading_of(vae.decoder) == ()
    assert len(spy.calls) == 1
    assert all(torch.equal(value, before[name]) for name, value in vae.encoder.state_dict().items())


def test_the_transformer_is_trained_also_when_it_comes_offloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = trainer.make_transformer

    def offloaded() -> Any:
        model = make()
        apply_group_offloading(model, CPU, offload_type="leaf_level")
        forbid_training(model)
        return model

    rows = 4
    cache = trainer.CaptionCache(
        {
            "attributes": torch.zeros(rows, len(ATTRIBUTES), dtype=torch.long),
            "pooled": torch.randn(rows + 2, 128),
            "tokens": torch.randn(12 * (rows + 2), 128),
            "starts": torch.arange(0, 12 * (rows + 2), 12),
            "lengths": torch.full((rows + 2,), 8),
        }
    )
    monkeypatch.setattr(trainer, "assert_trainable", spy := Spy())
    monkeypatch.setattr(trainer, "make_transformer", offloaded)
    monkeypatch.setattr(trainer, "averaged_transformer", lambda path: path.exists())
    course = trainer.Course(1, ((1.0, 2, 2),), loose=0.0, peak=1.0, hold=0.3)
    assert trainer.train_transformer(tmp_path / "transformer.pt", cache, course)
    assert len(spy.calls) == 1


class Spy:
    """assert_trainable, which is called with the optimizer."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, module: Any, optimizer: Any) -> None:
        assert_trainable(module, optimizer)
        self.calls.append(optimizer)

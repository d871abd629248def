"""Training after offloading: refused while it is active, exact once it is off, and it can be put on again.

Placements are made by plain calls of diffusers and accelerate. On a CPU they exchange parameters as they do on a card,
but nothing changes its device; test_guard_agreement.py looks at devices, on a simulated card without numbers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import set_module_tensor_to_device
from diffusers import WanTransformer3DModel
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from torch import nn

from app.demo.clips import KEYFRAMES, random_attributes, render_keyframes
from app.demo.stages import StepRandom
from app.demo.transformer import predict
from app.demo.vae import CHANNELS, LATENTS, pack
from app.errors import NotTrainable, OffloadActive
from app.runtime.guard import allow_training, assert_trainable, forbid_training, offloading_of, prepare_for_training
from tests.runtime import families
from tests.runtime.simulate import tiny

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
Place = Callable[[Any, Path], object]


@pytest.fixture(scope="module")
def shipped() -> Any:
    """The built-in model's transformer, resident; tests change copies of it."""
    return families.load(families.DEMO).transformer.eval()


@pytest.fixture
def model(shipped: Any) -> Any:
    return copy.deepcopy(shipped)


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """Two drawn clips with noise, as the trainer makes them, and text that says nothing."""
    rng, keys = StepRandom(5, 0), [0, KEYFRAMES - 1]
    drawn = render_keyframes([random_attributes(rng.python) for _ in range(2)], rng.python, keys)
    picture = pack(torch.from_numpy(drawn.rgb))
    clean = torch.cat([picture, torch.zeros(*picture.shape[:-1], LATENTS - CHANNELS)], -1)
    noise, sigma = torch.randn(clean.shape, generator=rng.torch), torch.tensor([0.4, 0.8])
    text = torch.randn(2, 6, 128, generator=rng.torch), torch.randn(2, 128, generator=rng.torch)
    return {"clean": clean, "noise": noise, "sigma": sigma, "keys": keys, "text": text}


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Flow matching: the velocity from clean to noise, between them."""
    level = batch["sigma"].view(-1, 1, 1, 1, 1)
    velocity = predict(model, batch["clean"].lerp(batch["noise"], level), batch["sigma"], batch["keys"], batch["text"])
    return ((velocity - (batch["noise"] - batch["clean"])) ** 2).mean()


def group(kind: str, **options: Any) -> Place:
    if kind == "block_level":
        options["num_blocks_per_group"] = 1
    return lambda module, _folder: apply_group_offloading(module, CPU, offload_type=kind, **options)


def on_disk(kind: str) -> Place:
    return lambda module, folder: group(kind, offload_to_disk_path=str(folder))(module, folder)


def cast(module: Any, _folder: Path) -> None:
    module.enable_layerwise_casting(FP8, torch.float32)


def model_offload(module: Any, _folder: Path) -> None:
    accelerate.cpu_offload_with_hook(module, CPU)


def sequential(module: Any, _folder: Path) -> None:
    accelerate.cpu_offload(module, CPU, offload_buffers=True)


def dispatch(module: Any, _folder: Path) -> None:
    accelerate.dispatch_model(module, {"": "cpu"}, force_hooks=True)


def checkpoint_files(module: Any, folder: Path, save: bool = True) -> None:
    """Weights on meta, read from the checkpoint's own files at each forward."""
    if save:
        module.save_pretrained(folder)
    file = next(folder.glob("*.safetensors"))
    index = {name: {"safetensors_file": str(file), "weight_name": name} for name in module.state_dict()}
    accelerate.dispatch_model(module, {"": "disk"}, offload_index=index)


def never_loaded(module: Any, folder: Path) -> None:
    module.save_pretrained(folder)
    for name, _ in list(module.named_parameters()):
        set_module_tensor_to_device(module, name, "meta")
    checkpoint_files(module, folder, save=False)


def both(first: Place, second: Place) -> Place:
    def place(module: Any, folder: Path) -> None:
        first(module, folder)
        second(module, folder)

    return place


PLACED: dict[str, Place] = {
    "nothing": lambda module, _folder: None,
    "block": group("block_level"),
    "leaf": group("leaf_level"),
    "fp8": cast,
    "fp8, then leaf": both(cast, group("leaf_level")),
    "model offload": model_offload,
    "fp8, then model offload": both(cast, model_offload),
    "sequential": sequential,
    "fp8, then sequential": both(cast, sequential),
    "sequential, then fp8": both(sequential, cast),
    "dispatch": dispatch,
    "dispatch, then fp8": both(dispatch, cast),
    "checkpoint files": checkpoint_files,
    "checkpoint files, never loaded": never_loaded,
}


def prepared(module: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Layerwise casting had stored")
        prepare_for_training(module, CPU, **options)
    return module


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", PLACED)
def test_gradients_are_those_of_a_copy_never_offloaded(
    shipped: Any, model: Any, batch: dict[str, Any], place: str, inference: Any, tmp_path: Path
) -> None:
    PLACED[place](model, tmp_path)
    with inference():
        loss_of(model, batch)
    prepared(model)
    reference = copy.deepcopy(shipped).train()
    if place.startswith(("fp8", "dispatch, then fp8")):
        rounded = copy.deepcopy(shipped)
        cast(rounded, tmp_path)
        reference.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    for trained in (reference, model):
        loss_of(trained, batch).backward()
    wrong = [
        name
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True)
        if mine.grad is None or not torch.equal(mine.grad, theirs.grad)
    ]
    assert wrong == []
    assert offloading_of(model) == ()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}  # no hook is left that casts them


@pytest.mark.parametrize("place", PLACED)
def test_a_few_steps_lower_the_loss_and_the_new_weights_are_used(
    model: Any, batch: dict[str, Any], place: str, tmp_path: Path
) -> None:
    PLACED[place](model, tmp_path)
    prepared(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    assert_trainable(model, optimizer)
    losses = []
    for _ in range(4):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert_trainable(model, optimizer)
    with torch.no_grad():
        assert float(loss_of(model, batch)) < losses[-1] < losses[0]


@pytest.mark.parametrize("place", ["block", "leaf", "model offload", "sequential"])
def test_after_training_it_can_be_offloaded_again(
    model: Any, batch: dict[str, Any], place: str, tmp_path: Path
) -> None:
    PLACED[place](model, tmp_path)
    prepared(model)
    loss_of(model, batch).backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    with torch.no_grad():
        resident = loss_of(model, batch)
        PLACED[place](model, tmp_path)
        assert offloading_of(model) != ()
        for _ in range(2):
            assert torch.equal(loss_of(model, batch), resident)


@pytest.mark.parametrize("place", ["checkpoint files", "checkpoint files, never loaded"])
def test_weights_read_from_files_do_not_change_with_them(shipped: Any, model: Any, place: str, tmp_path: Path) -> None:
    PLACED[place](model, tmp_path)
    prepared(model)
    file = next(tmp_path.glob("*.safetensors"))
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    pairs = zip(model.parameters(), shipped.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


# ---------------------------------------------------------------------------------------- the trap, and what refuses it


WAN_INPUT: dict[str, Any] = {"timestep": torch.tensor([300.0]), "return_dict": False}


def wan(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return WanTransformer3DModel(**tiny.WAN_TRANSFORMER).eval()


def wan_forward(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 4, 2, 4, 4, generator=generator)
    text = torch.randn(1, 5, 32, generator=generator)
    return model(hidden_states=hidden, encoder_hidden_states=text, **WAN_INPUT)[0]


def wan_gradients(model: Any) -> list[torch.Tensor | None]:
    wan_forward(model).square().mean().backward()
    return [weight.grad for weight in model.parameters()]


def test_the_library_computes_wrong_gradients_from_the_disk_and_loses_the_step(tmp_path: Path) -> None:
    expected = wan_gradients(wan())
    model = wan()
    on_disk("block_level")(model, tmp_path)
    found = wan_gradients(model)  # not a word
    wrong = sum(mine is None or not torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert (wrong, len(expected)) == (110, 123)
    with torch.no_grad():
        before = wan_forward(model)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert torch.equal(wan_forward(model), before)


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_weights_that_are_only_on_the_disk_are_not_trained(tmp_path: Path, kind: str) -> None:
    """A second model of the class uses the first one's files: what is read back may be another model's weights."""
    first, second = wan(0), wan(1)
    with torch.no_grad():
        expected = wan_forward(first)
    on_disk(kind)(first, tmp_path)
    on_disk(kind)(second, tmp_path)
    for model in (first, second):
        with pytest.raises(OffloadActive, match=f"only in {tmp_path}.*Load the model again"):
            prepare_for_training(model, CPU)
        with pytest.raises(OffloadActive, match=rf"group offload \({kind}, computes on cpu, weights on {tmp_path}"):
            assert_trainable(model)
        with torch.no_grad():  # nothing was changed: also the wrong one computes as it did
            assert torch.allclose(wan_forward(model), expected, atol=1e-4)  # unaligned files add up in another order


def test_copies_that_accelerate_wrote_are_not_trained_either(model: Any, tmp_path: Path) -> None:
    places = {name: "disk" if name == "out_layer" else "cpu" for name, _ in model.named_children()}
    accelerate.dispatch_model(model, places, offload_dir=str(tmp_path))
    assert (tmp_path / "out_layer.out_layer.weight.dat").exists()
    with pytest.raises(OffloadActive, match=f"only in {tmp_path}"):
        prepare_for_training(model, CPU)
    assert offloading_of(model) != ()


def test_weights_that_are_nowhere_are_not_trained(model: Any) -> None:
    model.out_layer.to("meta")
    with pytest.raises(NotTrainable, match=r"not in memory \(device meta\): out_layer"):
        prepare_for_training(model, CPU)


@pytest.mark.parametrize("place", ["nothing", "leaf", "model offload"])
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_forbidden_inference_is_the_same_and_training_is_refused(
    model: Any, batch: dict[str, Any], place: str, inference: Any, tmp_path: Path
) -> None:
    with inference():
        resident = loss_of(model, batch)
    PLACED[place](model, tmp_path)
    forbid_training(model)
    with inference():
        assert torch.equal(loss_of(model.eval(), batch), resident)
    with pytest.raises(OffloadActive, match="Kandinsky5Transformer3DModel is offloaded"):
        model.train()
    with pytest.raises(OffloadActive, match="is offloaded, which serves inference only"):
        nn.ModuleList([model]).train()
    with pytest.raises(OffloadActive, match=r"gradients through its .* could be wrong"):
        loss_of(model, batch).backward()
    assert not model.training


def test_parts_called_past_the_component_refuse_too() -> None:
    vae = families.load(families.DEMO).vae.requires_grad_(True)
    forbid_training(vae)
    latents = torch.zeros(1, LATENTS, 1, 2, 2)
    with torch.no_grad():
        vae.decode(latents)
    with pytest.raises(OffloadActive, match=r"AutoencoderKLHunyuanVideo is offloaded.*through its Conv3d"):
        vae.decode(latents)


def test_gradients_that_only_pass_through_are_refused(model: Any, batch: dict[str, Any]) -> None:
    """As textual inversion does it: the offloaded weights are frozen, but what goes in requires gradients."""
    forbid_training(model.requires_grad_(False))
    tokens, pooled = batch["text"]
    loss_of(model, batch)
    with pytest.raises(OffloadActive):
        loss_of(model, {**batch, "text": (tokens.clone().requires_grad_(), pooled)})


def test_allowed_again_nothing_is_left(model: Any, batch: dict[str, Any]) -> None:
    forbid_training(model)
    forbid_training(model)
    assert len(model._forward_pre_hooks) == 1
    allow_training(model)
    allow_training(model)
    assert not any(part._forward_pre_hooks or part._forward_pre_hooks_with_kwargs for part in model.modules())
    assert "train" not in model.__dict__
    loss_of(model.train(), batch).backward()


def test_a_plan_is_taken_off_by_its_own_undo(model: Any, batch: dict[str, Any]) -> None:
    """Placements of this program are no hooks of diffusers; they say how they are undone."""
    handle = model.register_forward_pre_hook(lambda module, args: pytest.fail("still placed"))
    forbid_training(model, handle.remove)
    assert offloading_of(model) == ("Kandinsky5Transformer3DModel: offloading by a plan of Pocketreel",)
    prepared(model)
    loss_of(model, batch).backward()


def test_weights_that_the_undo_brings_back_are_not_lost(model: Any) -> None:
    """A plan that reads from the disk leaves little in memory."""
    layer = model.out_layer
    state = copy.deepcopy(layer.state_dict())
    layer.to("meta")
    forbid_training(model, lambda: layer.load_state_dict(state, assign=True))
    prepared(model)
    assert torch.equal(layer.out_layer.weight, state["out_layer.weight"])
    layer.to("meta")
    forbid_training(model, lambda: None)
    with pytest.raises(NotTrainable, match="not in memory"):
        prepare_for_training(model, CPU)


def test_the_own_streams_are_seen_without_a_plan(model: Any) -> None:
    hook = type("Streaming", (ModelHook,), {"__module__": "app.runtime.streaming.apply"})()
    HookRegistry.check_if_exists_or_initialize(model.out_layer).register_hook(hook, "streaming")
    with pytest.raises(OffloadActive, match="Kandinsky5Transformer3DModel: streaming by Pocketreel is active"):
        prepare_for_training(model, CPU)

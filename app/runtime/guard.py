"""Offloading and training exclude each other: what is offloaded refuses to be trained, and can be made trainable.

Offloading exchanges the data of parameters behind autograd's back. With diffusers' disk offload a backward pass then
computes wrong gradients without a word, and the optimizer's step is overwritten by the next forward. So everything is
taken off before training; afterwards a plan can be applied again.

Works for pipelines placed by others too: diffusers' group offload and layerwise casting, accelerate's model offload,
sequential offload and dispatch, device maps. Not covered: `module.forward(...)` called past `module(...)`, FSDP,
DeepSpeed, tensor parallelism, diffusers' caches between steps (`disable_cache()` turns those off).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from app.errors import NotTrainable, OffloadActive
from app.runtime.offloads import active, forget_placement, listed, named_tensors, refuse_lost, take_off, word

TRAINABLE: Final = (torch.float32, torch.bfloat16, torch.float64)
"""Not float16: its gradients underflow, and torch's GradScaler refuses to unscale them."""
_PREPARE: Final = "`app.runtime.guard.prepare_for_training` takes every offload off."


def prepare_for_training(
    pipe_or_module: Any,
    device: torch.device | str,
    *,
    components: Sequence[str] = ("transformer",),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Take every offload, cast and device map off, and make the trained modules ready for gradients.

    Afterwards all parameters of the trained modules are on `device` in `dtype` (in bfloat16 those that their class
    keeps in float32 stay in it), require gradients, and have none yet; the modules are in train mode. Buffers are on
    `device`, as wide as before or wider. What else the pipeline holds is no longer offloaded and stays on the device
    where its weights were kept. Make the optimizer afterwards: some placements replace parameters.

    Args:
        components: what is trained of a pipeline; of no meaning for a module, all of which is.

    Warns:
        UserWarning: layerwise casting had stored weights in a narrower type, so training starts from rounded ones.

    Raises:
        OffloadActive: the weights are only in files that may be another model's.
        NotTrainable: weights that are quantized or not in memory, or no such component.
            After both errors a plan of this program may be off; nothing else was changed.
        ValueError: `dtype` is not one of TRAINABLE.
    """
    if dtype not in TRAINABLE:
        raise ValueError(f"{word(dtype)} cannot be trained: choose one of {', '.join(map(word, TRAINABLE))}")
    device = torch.device(device)
    parts, trained = _components(pipe_or_module), _trained(pipe_or_module, components)
    for name, module in trained.items():
        _refuse_quantized(name, module)
    # the caller's inference mode would make tensors that autograd never accepts
    with torch.inference_mode(mode=False), torch.no_grad():
        for module in parts.values():
            for undo in _undos(module):
                undo()
        for name, module in parts.items():  # not before: a plan of this program brings back what it holds elsewhere
            refuse_lost(name, module)
        allow_training(pipe_or_module)
        rounded = [name for name, module in parts.items() if take_off(module)]
        if not isinstance(pipe_or_module, nn.Module):
            forget_placement(pipe_or_module)
        for module in trained.values():
            _settle(module, device, dtype)
    for module in trained.values():
        module.requires_grad_(True)
        module.train()
    if rounded:
        warnings.warn(
            f"Layerwise casting had stored the weights of {', '.join(rounded)} in a narrower type, and they keep those "
            "rounded values. Load the model again to begin with its full precision.",
            stacklevel=2,
        )
    assert_trainable(pipe_or_module, components=components)


def assert_trainable(
    pipe_or_module: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    components: Sequence[str] = ("transformer",),
) -> None:
    """Check that a training step would change the weights that are used, by the right gradients.

    A pipeline must have no offload at all: accelerate's model offload moves one component when another is called.
    Parameters may be frozen, as long as some are not. With an `optimizer`, it must hold exactly the parameters that
    require gradients, its state lying with them; modules that it trains beside (probes, adapters) are given together,
    in an `nn.ModuleList`.

    Raises:
        OffloadActive: some placement is active; the message names each.
        NotTrainable: the message names each module or parameter that does not agree with the others.
    """
    found = [f"{words} is active" for words in offloading_of(pipe_or_module)]
    trained = _trained(pipe_or_module, components)
    problems = [*found, *(line for name, module in trained.items() for line in _disagreements(name, module))]
    if optimizer is not None:
        problems += _optimizer_disagreements(trained, optimizer)
    if problems:
        lines = "".join(f"\n- {problem}" for problem in problems)
        error = OffloadActive if found else NotTrainable
        raise error(f"This cannot be trained as it is:{lines}\n{_PREPARE} Make the optimizer after that.")


def offloading_of(pipe_or_module: Any) -> tuple[str, ...]:
    """What is offloaded, cast or spread, by whomever, in words such as `vae: model offload (computes on cuda:0)`."""
    words: list[str] = []
    if not isinstance(pipe_or_module, nn.Module) and getattr(pipe_or_module, "hf_device_map", None):
        words.append(f"pipeline: device map {pipe_or_module.hf_device_map}")
    for name, module in _components(pipe_or_module).items():
        words += dict.fromkeys(f"{name}: {kind}" for part in module.modules() for kind in active(part))
        if _refuses(module):
            words.append(f"{name}: offloading by a plan of Pocketreel")
        spread = getattr(module, "hf_device_map", None) or {}
        if len(set(spread.values())) > 1:
            words.append(f"{name}: device map over {', '.join(sorted({str(place) for place in spread.values()}))}")
    return tuple(words)


def forbid_training(pipe_or_module: Any, undo: Callable[[], object] | None = None) -> None:
    """From now on `.train()` raises `OffloadActive`, and so does a forward pass that autograd would record.

    What runs under `torch.no_grad()` or `torch.inference_mode()` is as before. The pass is refused, not only the
    backward: the memory of its graph would be wasted, and the message comes at the line that is wrong.

    Args:
        undo: takes the placement off again; `prepare_for_training` calls it, once for each component that has it.
    """
    allow_training(pipe_or_module)
    for name, module in _components(pipe_or_module).items():
        refusal = _Refusal(name, undo)
        # pipelines call a VAE's `decode`, so its own forward is not enough
        for part in module.modules():
            if part is module or any(True for _ in part.parameters(recurse=False)):
                part.register_forward_pre_hook(refusal, with_kwargs=True)
        module.__dict__["train"] = MethodType(_refuse_train, module)


def allow_training(pipe_or_module: Any) -> None:
    """Take off what `forbid_training` put on; where nothing is, nothing happens."""
    for module in _components(pipe_or_module).values():
        for part in module.modules():
            for key, _ in _refusals(part):
                del part._forward_pre_hooks[key]
                part._forward_pre_hooks_with_kwargs.pop(key, None)
            if _refuses(part):
                del part.__dict__["train"]


class _Refusal:
    """Forward pre-hook of every part of an offloaded component that has parameters."""

    def __init__(self, component: str, undo: Callable[[], object] | None) -> None:
        self.component, self.undo = component, undo

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad for tensor in (*module.parameters(), *_tensors((args, kwargs)))):
            raise OffloadActive(
                f"{self.component} is offloaded, which serves inference only: gradients through its {_class(module)} "
                f"could be wrong. Run inference under `torch.no_grad()`; to train, begin with this: {_PREPARE}"
            )


def _refuse_train(self: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        raise OffloadActive(
            f"This {_class(self)} is offloaded, which serves inference only. To train, begin with this: {_PREPARE}"
        )
    return type(self).train(self, mode)


# ------------------------------------------------------------------------------------------------------- what there is


def _components(pipe_or_module: Any) -> dict[str, nn.Module]:
    if isinstance(pipe_or_module, nn.Module):
        return {_class(pipe_or_module): pipe_or_module}
    return {name: part for name, part in pipe_or_module.components.items() if isinstance(part, nn.Module)}


def _trained(pipe_or_module: Any, components: Sequence[str]) -> dict[str, nn.Module]:
    """
    Raises:
        NotTrainable: the pipeline lacks one of them.
    """
    found = _components(pipe_or_module)
    if isinstance(pipe_or_module, nn.Module):
        return found
    missing = [name for name in components if name not in found]
    if missing or not components:
        raise NotTrainable(
            f"{type(pipe_or_module).__name__} has no component {' and '.join(missing) or 'to train given'}. "
            f"It has {', '.join(found)}: name one of them in `components`."
        )
    return {name: found[name] for name in components}


def _refusals(part: nn.Module) -> list[tuple[int, _Refusal]]:
    return [(key, hook) for key, hook in part._forward_pre_hooks.items() if isinstance(hook, _Refusal)]


def _refuses(part: nn.Module) -> bool:
    return getattr(part.__dict__.get("train"), "__func__", None) is _refuse_train


def _undos(module: nn.Module) -> list[Callable[[], object]]:
    return [refusal.undo for _, refusal in _refusals(module) if refusal.undo is not None]


# --------------------------------------------------------------------------------------------------- what is in the way


def _refuse_quantized(name: str, module: nn.Module) -> None:
    """
    Raises:
        NotTrainable: some weights are integers, or belong to a quantization method.
    """
    whole = _packed(module)
    if whole or getattr(module, "hf_quantizer", None) is not None:
        raise NotTrainable(
            f"{name} is quantized{': ' + listed(whole) if whole else ''}, and rounded numbers have no gradients. "
            "Load the model again without quantization."
        )


def _packed(module: nn.Module) -> list[str]:
    return [name for name, weight in module.named_parameters() if not weight.is_floating_point()]


def _settle(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Every parameter on `device` in `dtype`, without a gradient; every buffer on `device`, never narrower."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    settled: dict[nn.Parameter, nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, weight in part._parameters.items():
            if weight is None:
                continue
            if weight not in settled:
                narrow = dtype.itemsize < torch.float32.itemsize
                wanted = torch.float32 if narrow and kept & {*path.split("."), name} else dtype
                values = weight.data.to(device=device, dtype=wanted)
                if weight.is_inference():  # made under inference_mode: autograd never accepts it again
                    settled[weight] = nn.Parameter(values.clone(), requires_grad=weight.requires_grad)
                else:
                    weight.data = values
                    settled[weight] = weight
                settled[weight].grad = None
            part._parameters[name] = settled[weight]
        for name, value in part._buffers.items():
            if value is not None:
                wide = value.is_floating_point() and value.dtype.itemsize < dtype.itemsize
                moved = value.to(device=device, dtype=dtype if wide else value.dtype)
                part._buffers[name] = moved.clone() if moved.is_inference() else moved


# ------------------------------------------------------------------------------------------------------------ agreement


def _disagreements(name: str, module: nn.Module) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    weights = dict(module.named_parameters())
    devices: dict[str, list[str]] = {}
    for path, value in named_tensors(module):
        devices.setdefault(str(value.device), []).append(path)
        if value.is_inference():
            found.setdefault("made under inference_mode, which autograd does not accept", []).append(path)
    if "meta" in devices:
        found["not in memory (device meta)"] = devices.pop("meta")
    for path, weight in weights.items():
        if weight.requires_grad and weight.dtype not in TRAINABLE:
            found.setdefault(f"{word(weight.dtype)}, in which nothing can be trained", []).append(path)
        elif weight.is_floating_point() and weight.dtype.itemsize < 2:
            found.setdefault(f"{word(weight.dtype)}, in which nothing can be computed", []).append(path)
    if packed := _packed(module):
        yield f"{name}: quantized, and rounded numbers have no gradients: {listed(packed)}"
    if not any(weight.requires_grad for weight in weights.values()):
        yield f"{name}: no parameter requires gradients"
    if len(devices) > 1:
        yield f"{name}: on several devices: " + "; ".join(f"{on}: {listed(paths)}" for on, paths in devices.items())
    for what, paths in found.items():
        yield f"{name}: {what}: {listed(paths)}"


def _optimizer_disagreements(trained: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[str]:
    names = {weight: f"{name}.{path}" for name, module in trained.items() for path, weight in module.named_parameters()}
    held: list[nn.Parameter] = [weight for group in optimizer.param_groups for weight in group["params"]]
    foreign = [str(tuple(weight.shape)) for weight in held if weight not in names]
    if foreign:
        yield f"optimizer: holds parameters that are of none of these modules (any more), of shape {listed(foreign)}"
    frozen = [names[weight] for weight in held if weight in names and not weight.requires_grad]
    if frozen:
        yield f"optimizer: holds parameters that require no gradients: {listed(frozen)}"
    known = set(held)
    left_out = [name for weight, name in names.items() if weight.requires_grad and weight not in known]
    if left_out:
        yield f"optimizer: lacks parameters that require gradients: {listed(left_out)}"
    strayed = [
        f"{names[weight]} ({key} on {value.device}, {word(value.dtype)})"
        for weight, state in optimizer.state.items()
        if isinstance(weight, nn.Parameter) and weight in names
        for key, value in state.items()
        # a count of steps is a single number, on the CPU; only what is as large as the weight computes with it
        if isinstance(value, torch.Tensor) and value.shape == weight.shape and value.dim() > 0
        if value.device != weight.device or value.dtype not in (weight.dtype, torch.float32)
    ]
    if strayed:
        yield f"optimizer: its state lies elsewhere than the parameter: {listed(strayed)}"


# ---------------------------------------------------------------------------------------------------------------- words


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _class(module: nn.Module) -> str:
    return type(module).__name__

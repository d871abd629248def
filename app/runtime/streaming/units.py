"""Which parameters of a module travel together: blocks, what only one of them has, and what is cast on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from diffusers.hooks._common import _GO_LC_SUPPORTED_PYTORCH_LAYERS as CASTABLE_LAYERS
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from app.errors import GenerationFailed, PlanError

HOOK = "pocketreel_streaming"
_FOREIGN_HOOKS = ("group_offloading", "lazy_prefetch_group_offloading", "layerwise_casting", HOOK)


@dataclass
class Weight:
    """A parameter, and all places of the module where it is."""

    parameter: torch.nn.Parameter
    names: list[str] = field(default_factory=list)
    sites: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    before: torch.Tensor | None = None
    """Its data before it went to the device, where they are kept."""
    home: torch.device | None = None
    """The device to go back to, where they are not."""

    def show(self, parameter: torch.nn.Parameter) -> None:
        for owner, name in self.sites:
            owner._parameters[name] = parameter

    def hide(self) -> None:
        self.show(self.parameter)

    def intact(self) -> bool:
        return all(owner._parameters.get(name) is self.parameter for owner, name in self.sites)

    def forget(self) -> None:
        """Let go of the values: what is left is a parameter without any."""
        empty = torch.empty_like(self.parameter, device="meta")
        self.parameter = torch.nn.Parameter(empty, requires_grad=False)
        self.hide()

    def place(self, data: torch.Tensor, *, keep: bool) -> None:
        """Let the module compute with `data`, which lie on the device."""
        parameter = self.parameter
        if not torch._has_compatible_shallow_copy_type(parameter, data):  # from meta
            self.show(torch.nn.Parameter(data, requires_grad=False))
            return
        if keep:
            self.before = parameter.data
        else:
            self.home = parameter.device
        parameter.data = data

    def bring_back(self) -> None:
        if self.before is not None:
            self.parameter.data = self.before
        elif self.home is not None:
            self.parameter.data = self.parameter.data.to(self.home)
        self.before = self.home = None
        self.hide()


@dataclass
class Unit:
    name: str
    block: torch.nn.Module
    weights: list[Weight]
    shown: bool = False

    def __post_init__(self) -> None:
        self._size = self._modules()

    def _modules(self) -> int:
        return sum(1 for _ in self.block.modules())

    def check_layers(self) -> None:
        """Raises GenerationFailed where layers were added to the block: nobody would bring their weights."""
        if self._modules() != self._size:
            raise self._changed("Layers of")

    def show(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if not self.shown and not all(weight.intact() for weight in self.weights):
            raise self._changed("Weights of")
        for weight, parameter in zip(self.weights, parameters, strict=True):
            weight.show(parameter)
        self.shown = True

    def _changed(self, what: str) -> GenerationFailed:
        return GenerationFailed(
            f"{what} {self.name} were replaced or added while the model was being streamed (a LoRA, perhaps). "
            "Stop the streaming before changing a model, and start it again afterwards."
        )

    def hide(self) -> None:
        if self.shown:
            for weight in self.weights:
                weight.hide()
        self.shown = False


def refuse(module: torch.nn.Module) -> None:
    name = type(module).__name__
    for inner in module.modules():
        registry = getattr(inner, "_diffusers_hook", None)
        hooks = [hook for hook in _FOREIGN_HOOKS if registry is not None and registry.get_hook(hook) is not None]
        if hooks or hasattr(inner, "_hf_hook"):
            raise PlanError(f"{name} is offloaded already ({', '.join(hooks) or 'accelerate'}): remove that first.")
    quantized = getattr(module, "quantization_method", None) is not None or getattr(module, "is_quantized", False)
    if quantized or any(is_traceable_wrapper_subclass(parameter) for parameter in module.parameters()):
        raise PlanError(f"{name} is quantized, and quantized weights cannot be streamed: choose another strategy.")


def weights_of(module: torch.nn.Module) -> list[Weight]:
    """Each parameter once, with all its names."""
    found: dict[int, Weight] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                weight = found.setdefault(id(parameter), Weight(parameter))
                weight.names.append(f"{path}.{name}" if path else name)
                weight.sites.append((owner, name))
    return list(found.values())


def blocks_of(module: torch.nn.Module, block_modules: Sequence[str] | None) -> list[tuple[str, torch.nn.Module]]:
    """Name and module of each block, in the order of the lists."""
    names = block_modules if block_modules is not None else getattr(module, "_group_offload_block_modules", None)
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    if names is not None:
        for name in names:
            try:
                inner = module.get_submodule(name)
            except AttributeError as error:
                raise PlanError(f"{type(module).__name__} has no {name} to take blocks from.") from error
            entries = list(_entries(name, inner)) or [(name, inner)]
            found.update((id(block), (path, block)) for path, block in entries)
    else:
        children = list(module.named_children())
        own = [(name, child) for name, child in children if isinstance(child, torch.nn.ModuleList)]
        for name, inner in own or children:
            found.update((id(block), (path, block)) for path, block in _entries(name, inner))
    if not found:
        raise PlanError(
            f"{type(module).__name__} has no list of blocks: it cannot be streamed, choose another strategy."
        )
    return list(found.values())


def _entries(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The entries of the outermost lists; a list that is an entry has no forward of its own, so its entries instead."""
    for name, child in module._modules.items():
        if child is None:  # VAEs keep None for attentions they lack
            continue
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and not isinstance(child, torch.nn.ModuleList):
            yield f"{path}.{name}", child
        else:
            yield from _entries(f"{path}.{name}", child)


def units_of(blocks: list[tuple[str, torch.nn.Module]], everything: list[Weight]) -> list[Unit]:
    """The weights that one block has and nobody else. A block inside another one goes with it."""
    owners: dict[int, set[int]] = {}
    outermost: list[tuple[str, torch.nn.Module]] = []
    for name, block in blocks:
        if any(block is inner for _, other in blocks if other is not block for inner in other.modules()):
            continue
        for inner in block.modules():
            owners.setdefault(id(inner), set()).add(len(outermost))
        outermost.append((name, block))
    overlapping = _overlapping(everything)
    units = [Unit(name, block, []) for name, block in outermost]
    for weight in everything:
        where: set[int | None] = set()
        for owner, _ in weight.sites:
            where |= owners.get(id(owner), {None})
        home = next(iter(where))
        if len(where) == 1 and home is not None and id(weight) not in overlapping:
            units[home].weights.append(weight)
    return [unit for unit in units if unit.weights]


def _overlapping(everything: list[Weight]) -> set[int]:
    """`id`s of those that share bytes with another one, as views of the same memory do."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for weight in everything:
        tensor = weight.parameter
        if not tensor.is_meta and tensor.numel():
            first = int(tensor.storage_offset()) * tensor.itemsize
            steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            last = first + int(steps) * tensor.itemsize
            spans.setdefault(tensor.untyped_storage()._cdata, []).append((first, last, id(weight)))
    found: set[int] = set()
    for in_one in spans.values():
        reach, owner = -1, 0
        for first, last, weight_id in sorted(in_one):
            if first <= reach:
                found |= {owner, weight_id}
            if last > reach:
                reach, owner = last, weight_id
    return found


def castable(module: torch.nn.Module) -> frozenset[int]:
    """`id`s of the parameters that diffusers' layerwise casting casts."""
    patterns = [*DEFAULT_SKIP_MODULES_PATTERN]
    for attribute in ("_keep_in_fp32_modules", "_skip_layerwise_casting_patterns"):
        patterns += getattr(module, attribute, None) or ()

    def walk(path: str, inner: torch.nn.Module) -> Iterator[int]:
        if path and any(re.search(pattern, path) for pattern in patterns):
            return
        if isinstance(inner, CASTABLE_LAYERS):
            yield from (id(parameter) for parameter in inner.parameters() if parameter.is_floating_point())
            return
        for name, child in inner.named_children():
            yield from walk(f"{path}.{name}" if path else name, child)

    return frozenset(walk("", module))

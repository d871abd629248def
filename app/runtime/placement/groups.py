"""diffusers' group offloading, made right: per component, with the block lists that its class really runs through.

Why not `pipe.enable_group_offload`: it passes one set of arguments to all components, fails on Kandinsky 5 and leaves
the components before the one that it fails at hooked (facts/diffusers-0.42-traps.md). Never used: `exclude_modules`,
`offload_to_disk_path` (files named by nothing but the group), `record_stream` (no bound on its memory).
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any, Final

import torch
from diffusers.hooks import apply_group_offloading

from app.errors import PlanError
from app.schema import Placement, Strategy

HOOKS: Final = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
"""Names under which diffusers 0.42 registers what group offloading needs; it has no public call that removes them."""
NESTED_BLOCKS: Final = {"T5EncoderModel": ("encoder",), "UMT5EncoderModel": ("encoder",)}
"""Where the blocks hang one level deeper than diffusers looks: without this, the whole encoder is one group."""


def offload(module: torch.nn.Module, placement: Placement, exits: ExitStack) -> None:
    """Hook a component whose weights are on the CPU; closing `exits` takes the hooks off and the weights home.

    Raises:
        PlanError: block groups of a class whose blocks diffusers does not find.
    """
    name, by_block = type(module).__name__, placement.strategy is Strategy.BLOCK
    device = torch.device(placement.device)
    options: dict[str, Any] = {}
    if by_block:
        blocks = block_modules(module)
        if blocks is not None:
            options["block_modules"] = list(blocks)
        if not _finds_blocks(module, blocks):
            raise PlanError(
                f"{placement.component} ({name}) has no list of blocks where diffusers looks for one: all of it would "
                "be one group. Plan it in layers (leaf) instead."
            )
        options["num_blocks_per_group"] = placement.num_blocks_per_group or 1
    # the order of a VAE's layers differs from call to call (tiles, cached frames), so diffusers never ends tracing it
    stream = placement.use_stream and not is_vae(module)
    exits.callback(_take_home, module, device)
    apply_group_offloading(
        module,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level" if by_block else "leaf_level",
        use_stream=stream,
        low_cpu_mem_usage=placement.low_cpu_mem_usage and stream,
        **options,
    )


def is_vae(module: torch.nn.Module) -> bool:
    """Whether pipelines call its `decode`, which hooks on `forward` do not see."""
    return callable(getattr(module, "decode", None)) and callable(getattr(module, "encode", None))


def block_modules(module: torch.nn.Module) -> tuple[str, ...] | None:
    """diffusers' `block_modules` for this class; None: its block lists are the component's own children.

    For a VAE it is every child with weights: of what hangs on the VAE itself `decode` would not bring anything.
    """
    known = getattr(module, "_group_offload_block_modules", None)
    if known is not None:
        return tuple(known)
    if is_vae(module):
        return tuple(name for name, child in module.named_children() if any(True for _ in child.parameters()))
    return NESTED_BLOCKS.get(type(module).__name__)


def hooked(module: torch.nn.Module) -> bool:
    """Whether any part of it is group-offloaded, by whomever."""
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    return any(registry is not None and registry.get_hook(HOOKS[0]) is not None for registry in registries)


def _finds_blocks(module: torch.nn.Module, blocks: tuple[str, ...] | None) -> bool:
    looked_at = [module] if blocks is None else [getattr(module, name, None) for name in blocks]
    return any(
        isinstance(child, torch.nn.ModuleList | torch.nn.Sequential)
        for parent in looked_at
        if parent is not None
        for child in parent.children()
    )


def _take_home(module: torch.nn.Module, device: torch.device) -> None:
    """Hooks off, weights on the CPU: also after a failure in the middle of a block, or half way through hooking."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)  # a copy may still be on its way into a block
    for part in list(module.modules()):
        registry = getattr(part, "_diffusers_hook", None)
        if registry is not None:
            for hook in HOOKS:
                registry.remove_hook(hook, recurse=False)
    module.to("cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        if device.type != "cpu" and tensor.is_pinned():
            tensor.data = tensor.data.clone()  # page-locked memory is short, and nobody streams from it any more
    gc.collect()  # diffusers' hooks refer to each other in circles, and to the page-locked copies

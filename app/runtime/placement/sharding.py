"""One component over several cards: consecutive blocks on each, all that is in no block on the main one.

Each block finds its arguments on its own card; the last block of each list gives its result back to the main card,
where the code between the lists computes. What all blocks get (rotary tables, the text) travels once per forward.
Why not accelerate's `dispatch_model`: it sends every argument at every block, and its hooks run over anything that
diffusers hangs on the same modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from app.errors import PlanError
from app.runtime.placement.calls import Around, Copies, moved, wrap
from app.schema import Placement, Shard


def shard(module: torch.nn.Module, placement: Placement, exits: ExitStack) -> None:
    """Spread a component whose weights are on the CPU; closing `exits` takes all home.

    Raises:
        PlanError: the shards do not cover its blocks.
    """
    main = torch.device(placement.device)
    lists = [blocks for _, blocks in block_lists(module)]
    devices = _by_block(placement, sum(map(len, lists)))
    exits.callback(module.to, "cpu")
    places: dict[torch.nn.Module, torch.device] = {}
    for block in (block for blocks in lists for block in blocks):
        places[block] = next(devices)
        block.to(places[block])
    _rest_to(module, set(places), main)
    copies = {device: Copies(device) for device in {*places.values(), main}}
    for blocks in lists:
        for block in blocks:
            last = block is blocks[-1]
            wrap(block, _Block(copies[places[block]], main if last and places[block] != main else None), exits)
    wrap(module, _Whole(list(copies.values())), exits)


def block_lists(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, list[torch.nn.Module]]]:
    """Outermost lists of at least two layers that hold at least a tenth of `module`, with their paths, in its order.

    `Shard` counts over these, and `python -m app.runtime.simulate fit` writes them down.
    """
    whole = _bytes(module)
    for name, child in module.named_children():
        # a list may hold None where a layer is left out, e.g. the attention of a VAE's middle block
        layers = [layer for layer in child if layer is not None] if isinstance(child, torch.nn.ModuleList) else []
        if len(layers) > 1 and sum(map(_bytes, layers)) >= whole / 10:
            yield f"{prefix}{name}", layers
        elif not isinstance(child, torch.nn.ModuleList):
            yield from block_lists(child, f"{prefix}{name}.")


def _bytes(module: torch.nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _by_block(placement: Placement, count: int) -> Iterator[torch.device]:
    shards: Sequence[Shard] = sorted(placement.shards, key=lambda one: one.first_block)
    devices = [torch.device(one.device) for one in shards for _ in range(one.count)]
    ends = [one.first_block + one.count for one in shards]
    if len(devices) != count or [one.first_block for one in shards] != [0, *ends[:-1]]:
        raise PlanError(
            f"The plan spreads {len(devices)} blocks of {placement.component} over the cards, but it has {count}. "
            "The model was fitted with another version: report it, and choose a preset for one card meanwhile."
        )
    return iter(devices)


def _rest_to(module: torch.nn.Module, placed: set[torch.nn.Module], main: torch.device) -> None:
    """All that hangs outside of the placed blocks."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            tensor.data = tensor.data.to(main)
    for child in module.children():
        if child not in placed:
            _rest_to(child, placed, main)


class _Block(Around):
    """Arguments to the block's card; results to `back`, if the caller computes elsewhere."""

    def __init__(self, copies: Copies, back: torch.device | None) -> None:
        self._copies, self._back = copies, back

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._copies.of(args), self._copies.of(kwargs)

    def after(self, result: Any) -> Any:
        return result if self._back is None else moved(result, self._back)


class _Whole(Around):
    """Copies live for one forward."""

    def __init__(self, copies: list[Copies]) -> None:
        self._copies = copies

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def after(self, result: Any) -> Any:
        for one in self._copies:
            one.clear()
        return result

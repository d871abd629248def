"""Facts of a component that follow from its configuration alone: parameters, bytes, blocks, leaves, pinned size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from app.coefficients import Blocks, ComponentFacts
from app.runtime.placement.sharding import block_lists
from app.runtime.quantized import layers_of
from app.runtime.simulate.allocator import HostMemory
from app.runtime.simulate.families import kept_in_fp32

_LEAVES = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd, torch.nn.GroupNorm, torch.nn.LayerNorm)


def inspect_component(module: torch.nn.Module, dtype: torch.dtype) -> ComponentFacts:
    """Facts of a component as it is in memory now."""
    tensors = list(_tensors(module))
    blocks = tuple(sorted(_blocks(module), key=lambda b: -b.total_bytes))
    keep = kept_in_fp32(module, dtype)
    host = HostMemory(None, power_of_two=True)
    weight_bytes = _bytes(tensors)
    return ComponentFacts(
        class_name=type(module).__name__,
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in module.parameters()),
        weight_bytes=weight_bytes,
        fp32_bytes=_bytes([t for t in tensors if t.dtype is torch.float32]) if dtype is not torch.float32 else 0,
        kept_in_fp32=keep,
        tensors=len(tensors),
        blocks=blocks,
        other_bytes=weight_bytes - sum(b.total_bytes for b in blocks),
        largest_leaf_bytes=max((_bytes(_tensors(m)) for m in module.modules() if isinstance(m, _LEAVES)), default=0),
        largest_table_bytes=max((_own_bytes(m) for m in module.modules() if not isinstance(m, _LEAVES)), default=0),
        pinned_bytes=sum(host.pinned_size(t.numel() * t.element_size()) for t in tensors),
    )


def _blocks(module: torch.nn.Module) -> Iterator[Blocks]:
    packable = {id(layer) for _, _, layer in layers_of(module)}
    for path, layers in block_lists(module):
        sizes = [_bytes(_tensors(layer)) for layer in layers]
        largest = layers[sizes.index(max(sizes))]
        linear = [part for part in largest.modules() if isinstance(part, torch.nn.Linear) and id(part) in packable]
        yield Blocks(
            path=path,
            count=len(sizes),
            bytes=max(sizes),
            total_bytes=sum(sizes),
            linear_parameters=sum(part.weight.numel() for part in linear),
            linear_rows=sum(part.out_features for part in linear),
            largest_linear=max((part.weight.numel() for part in linear), default=0),
        )


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, shared ones once."""
    yield from module.parameters()
    seen: set[Any] = set()
    for buffer in module.buffers():
        if id(buffer) not in seen:
            seen.add(id(buffer))
            yield buffer


def _own_bytes(module: torch.nn.Module) -> int:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return _bytes([tensor for tensor in own if tensor is not None])


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)

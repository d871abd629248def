"""How the parameters of a unit lie in flat buffers: on the host as they travel, in a slot as they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 512
"""Bytes. What torch's CUDA allocator gives: kernels choose their variant by alignment, and results must not change."""


@dataclass(frozen=True)
class Entry:
    """Where one parameter lies in its unit."""

    names: tuple[str, ...]
    """Under which the module knows it; several if it is tied within the unit."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    """It computes in this one."""
    transport: torch.dtype
    """It travels in this one."""
    host_offset: int
    slot_offset: int

    def host_view(self, buffer: torch.Tensor, *, base: int = 0) -> torch.Tensor:
        """The parameter as it travels, in a flat uint8 buffer that begins at byte `base` of the unit's."""
        return self._view(buffer, self.host_offset - base, self.transport)

    def slot_view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter as it computes, in a flat uint8 slot."""
        return self._view(buffer, self.slot_offset, self.dtype)

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def contiguous(self) -> bool:
        return self.stride == _contiguous(self.shape)

    def _view(self, buffer: torch.Tensor, offset: int, dtype: torch.dtype) -> torch.Tensor:
        flat = buffer[offset : offset + self.count * dtype.itemsize].view(dtype)
        return flat.view(self.shape) if self.contiguous else flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """A unit's parameters in its flat buffer: first those that travel as they compute, then those that are cast."""

    name: str
    entries: tuple[Entry, ...]
    plain_bytes: int
    """The same bytes on the host and in the slot; the rest of each differs."""
    host_bytes: int
    slot_bytes: int


def lay_out(name: str, parts: Sequence[tuple[Sequence[str], torch.Tensor, torch.dtype]]) -> Layout:
    """Of each parameter of the unit: its names, itself (or any tensor like it), and the type that it travels in."""
    host = slot = plain = 0
    entries: dict[int, Entry] = {}
    for cast in (False, True):
        for index, (names, parameter, travels) in enumerate(parts):
            if (travels is not parameter.dtype) is not cast:
                continue
            entries[index] = Entry(
                names=tuple(names),
                shape=tuple(parameter.shape),
                # as it was (kernels choose by it), unless it has gaps or overlaps
                stride=parameter.stride() if _dense(parameter) else _contiguous(parameter.shape),
                dtype=parameter.dtype,
                transport=travels,
                host_offset=host,
                slot_offset=slot,
            )
            host += _aligned(parameter.numel() * travels.itemsize)
            slot += _aligned(parameter.numel() * parameter.dtype.itemsize)
        plain = plain if cast else host
    return Layout(name, tuple(entries[index] for index in range(len(parts))), plain, host, slot)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, each in one place, in whatever order."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True

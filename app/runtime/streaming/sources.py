"""Where units wait for their turn: what a source is, and the one that holds them in page-locked RAM."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from app.runtime.streaming.layout import Layout


class Source(Protocol):
    """Where the units' weights come from. One thread calls it."""

    ahead: int
    """So many units beyond those in slots are worth a `start`."""
    prompt: bool
    """`fetch` returns at once, and copying from its result does not hold up the calling thread."""

    @property
    def host_bytes(self) -> int:
        """RAM that it holds, in bytes, after `bind`."""

    def bind(self, layouts: Sequence[Layout], weights: Sequence[Sequence[torch.nn.Parameter]], device: Any) -> None:
        """Once, before all else: the units, and the module's parameters in the order of their entries.

        Raises:
            ModelNotUsable: it cannot deliver one of them.
        """

    def read(self, names: Sequence[str], like: torch.Tensor) -> torch.Tensor | None:
        """A tensor that is in no unit, with the shape and dtype of `like`, on the CPU; None: the module has its value.

        Raises:
            ModelNotUsable: it is not there.
        """

    def start(self, unit: int) -> None:
        """`unit` will be fetched soon. Does not wait."""

    def fetch(self, unit: int) -> torch.Tensor:
        """The unit's flat host buffer, uint8, at least `host_bytes` of its layout; stays as it is until `done`.

        Raises:
            ModelNotUsable: reading failed.
        """

    def done(self, unit: int, copied: Any) -> None:
        """The buffer may be used otherwise, once the event `copied` has happened (None: it has)."""

    def close(self) -> None:
        """Give back what it holds besides the parameters' values. May be called twice."""


class HostBuffer:
    """Flat RAM, page-locked where the device is a GPU and the system allows it.

    The memory is registered with the driver where it lies: `pin_memory` would round it up to a power of two.
    """

    def __init__(self, size: int, device: torch.device, memory: torch.Tensor | None = None) -> None:
        page = mmap.PAGESIZE
        lock = device.type == "cuda" and size > 0
        if memory is None:
            # whole pages of its own: the driver refuses a page that another registration has
            whole = torch.empty(-(-size // page) * page + page if lock else size, dtype=torch.uint8)
            first = -whole.data_ptr() % page if lock else 0
            memory = whole[first : first + size]
        self.tensor = memory
        whole_pages = -(-size // page) * page
        self.pinned = lock and _register(memory, whole_pages, device)
        self.unpin: Callable[[], Any] = (
            weakref.finalize(self, _unregister, memory.data_ptr(), whole_pages) if self.pinned else _nothing
        )


def _nothing() -> None:
    """Was never page-locked."""


def _register(memory: torch.Tensor, size: int, device: torch.device) -> bool:
    pointer = memory.data_ptr()
    if pointer == 0:  # a simulated tensor
        return False
    try:
        failed = int(torch.cuda.cudart().cudaHostRegister(pointer, size, 0))  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError, AttributeError):  # no driver, or a torch without CUDA
        return False
    if failed:
        with contextlib.suppress(RuntimeError):  # the driver remembers the failure and blames the next kernel: be it
            torch.zeros(1, device=device)
    else:
        registered.add(size)
    return not failed


def _unregister(pointer: int, size: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]
    registered.add(-size)


class Registered:
    """Bytes that this process page-locked past PyTorch's own allocator, which knows nothing of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.peak = 0

    def add(self, size: int) -> None:
        with self._lock:
            self.now += size
            self.peak = max(self.peak, self.now)


registered: Final = Registered()


class PinnedSource:
    """All units in RAM, each in one flat page-locked buffer (pageable where that fails).

    The parameters move into the buffers, so RAM holds the weights once. They stay there when streaming ends.
    """

    ahead = 0

    def __init__(self) -> None:
        self._buffers: list[HostBuffer] = []
        self.prompt = True

    @property
    def host_bytes(self) -> int:
        return sum(buffer.tensor.numel() for buffer in self._buffers)

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.tensor.numel() for buffer in self._buffers if buffer.pinned)

    def bind(
        self, layouts: Sequence[Layout], weights: Sequence[Sequence[torch.nn.Parameter]], device: torch.device
    ) -> None:
        for layout, parameters in zip(layouts, weights, strict=True):
            buffer = HostBuffer(layout.host_bytes, device)
            for entry, parameter in zip(layout.entries, parameters, strict=True):
                view = entry.host_view(buffer.tensor)
                view.copy_(parameter.detach())
                if entry.transport is entry.dtype:
                    parameter.data = view
            self._buffers.append(buffer)
        # copies from pageable memory hold up the thread: they go after the block's kernels, not before
        self.prompt = device.type == "cpu" or all(buffer.pinned for buffer in self._buffers)

    def read(self, names: Sequence[str], like: torch.Tensor) -> None:  # noqa: ARG002
        return None

    def start(self, unit: int) -> None:
        """All is there."""

    def fetch(self, unit: int) -> torch.Tensor:
        return self._buffers[unit].tensor

    def done(self, unit: int, copied: Any) -> None:
        """A buffer is never used otherwise."""

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.unpin()
        self._buffers = []

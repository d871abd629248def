"""The slots on the device, and which unit is copied into which of them when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from app.errors import GenerationFailed
from app.runtime.streaming.layout import Layout
from app.runtime.streaming.sources import Source
from app.runtime.streaming.units import Unit


class Slot:
    """Room for one unit on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.unit: int | None = None
        self.parameters: dict[int, list[torch.nn.Parameter]] = {}
        """Views of the memory, by the unit that they belong to."""
        self.working = False
        """A block began to compute from it, and was not seen to end."""
        self.used = 0
        self.free: Any = None
        """Event: nobody computes from it any more."""
        self.ready: Any = None
        """Event: the unit's weights have arrived."""


class Streamed:
    """A module whose blocks are being streamed, until `remove`. Made by `stream`."""

    def __init__(self, device: torch.device, units: list[Unit], layouts: list[Layout], source: Source) -> None:
        self.device = device
        self.copies = 0
        """Units copied to the device so far."""
        self.late = 0
        """Of them, those that nobody had foreseen: the block waited for them."""
        self.slots: list[Slot] = []
        self._units = units
        self._layouts = layouts
        self.source = source
        self._count = 0
        self._staging: torch.Tensor | None = None
        self._backend: Any = torch.get_device_module(device) if device.type in ("cuda", "xpu") else None
        self._copy_stream: Any = None
        self._next: dict[int, int] = {}
        self._last: int | None = None
        self._clock = 0
        self.undo: list[Callable[[], Any]] = []

    @property
    def host_bytes(self) -> int:
        """RAM of the streamed units' buffers."""
        return self.source.host_bytes

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots, and of what arrives in another type."""
        staging = 0 if self._staging is None else self._staging.numel()
        return staging + sum(slot.memory.numel() for slot in self.slots)

    def release(self) -> None:
        """Give the slots back until `allocate` is called; the blocks wait. Works twice."""
        if self._backend is not None and self.slots:
            self._backend.synchronize(self.device)
        for slot in self.slots:
            if slot.unit is not None:
                self._units[slot.unit].hide()
        self.slots = []
        self._staging = None

    def remove(self) -> None:
        """Put the module back: hooks gone, and the same parameters, on the CPU, with the same values. Works twice.

        The streamed blocks' parameters stay in the source's flat buffers, if they are there: copying them back would
        need RAM for two. After `keep_originals=False` all that was cast is without values, on `meta`.
        """
        self.release()
        while self.undo:
            self.undo.pop()()
        self.source.close()

    # -- what the hooks call

    def before(self, index: int) -> None:
        """Block `index` is about to compute.

        Raises:
            ModelNotUsable: its weights cannot be read.
            GenerationFailed: somebody else replaced them.
        """
        if self._last is not None and self._last != index:
            self._next[self._last] = index
        self._last = index
        if not self.slots:  # they were given back
            self.allocate()
        for slot in self.slots:
            if slot.working:  # its block ended with an exception
                self._release(slot)
        found = self._slot_of(index)
        if found is None:
            self.late += 1
            found = self._load(index, self._oldest(frozenset()))
        if self._backend is not None:
            self._compute_stream().wait_event(found.ready)
        self._units[index].show(found.parameters[index])
        found.working = True
        found.used = self._tick()
        self._look_ahead(index, load=self.source.prompt)

    def after(self, index: int) -> None:
        """Block `index` has computed (its kernels are queued).

        Raises:
            GenerationFailed: a block called another one, which may have taken its place.
        """
        found = self._slot_of(index)
        if found is None or not found.working:
            raise GenerationFailed(
                f"{self._units[index].name} ran another block while it was running itself, so its weights may have "
                "been overwritten. This model cannot be streamed: choose another strategy."
            )
        self._units[index].hide()
        self._release(found)
        self._look_ahead(index, load=True)

    # -- parts of it

    def _compute_stream(self) -> Any:
        return self._backend.current_stream(self.device)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _slot_of(self, index: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.unit == index), None)

    def _oldest(self, keep: frozenset[int]) -> Slot:
        """Never one that is being computed from; ValueError: there is no other."""
        return min(
            (slot for slot in self.slots if not slot.working and slot.unit not in keep), key=lambda slot: slot.used
        )

    def _release(self, slot: Slot) -> None:
        slot.working = False
        if self._backend is not None:
            slot.free = self._compute_stream().record_event()

    def _expected(self, index: int, count: int) -> list[int]:
        """The next `count` units after `index`, as far as is known; after the last comes the first."""
        found: list[int] = []
        for _ in range(count):
            index = self._next.get(index, (index + 1) % len(self._units))
            if index not in found:
                found.append(index)
        return found

    def _look_ahead(self, index: int, *, load: bool) -> None:
        room = max(1, len(self.slots) - 1)
        near = self._expected(index, room)
        if load:
            for unit in near:
                if self._slot_of(unit) is None and any(
                    not slot.working and slot.unit not in near for slot in self.slots
                ):
                    self._load(unit, self._oldest(frozenset(near)))
        for unit in self._expected(index, room + self.source.ahead):
            if self._slot_of(unit) is None:
                self.source.start(unit)

    def _load(self, index: int, slot: Slot) -> Slot:
        """Queue the copy of a unit into a slot."""
        if slot.unit is not None:
            self._units[slot.unit].hide()
            slot.unit = None  # until all is well
        host = self.source.fetch(index)
        try:
            with self._on_copy_stream(slot), torch.no_grad():
                self._copy(self._layouts[index], host, slot.memory)
        finally:
            if self._backend is not None:
                slot.ready = self._copy_stream.record_event()
            self.source.done(index, slot.ready)
        if index not in slot.parameters:
            slot.parameters[index] = [
                torch.nn.Parameter(entry.slot_view(slot.memory), requires_grad=False)
                for entry in self._layouts[index].entries
            ]
        slot.unit = index
        slot.used = self._tick()
        self.copies += 1
        return slot

    @contextlib.contextmanager
    def _on_copy_stream(self, slot: Slot) -> Iterator[None]:
        if self._backend is None:
            yield
            return
        self._copy_stream.wait_event(slot.free)
        with self._backend.stream(self._copy_stream):
            yield

    def _copy(self, layout: Layout, host: torch.Tensor, slot: torch.Tensor) -> None:
        plain = layout.plain_bytes
        if plain:
            slot[:plain].copy_(host[:plain], non_blocking=True)
        if layout.host_bytes == plain:
            return
        assert self._staging is not None  # noqa: S101 (made for the largest in `allocate`)
        # one for all slots: copies and casts follow each other on one stream
        self._staging[: layout.host_bytes - plain].copy_(host[plain : layout.host_bytes], non_blocking=True)
        for entry in layout.entries:
            if entry.transport is not entry.dtype:
                entry.slot_view(slot).copy_(entry.host_view(self._staging, base=plain))

    def allocate(self, count: int | None = None) -> None:
        """Make slots; None: as many as before. Nothing to do where there are no units.

        Raises:
            torch.OutOfMemoryError: they do not fit.
            GenerationFailed: layers were added to a block since.
        """
        for unit in self._units:  # here, once a visit, and not at each block of each step
            unit.check_layers()
        count = self._count if count is None else count
        self._count = count
        if not self._units:
            return
        size = max(layout.slot_bytes for layout in self._layouts)
        staged = max(layout.host_bytes - layout.plain_bytes for layout in self._layouts)
        with torch.inference_mode(mode=False):  # else they could not be written to outside of it
            self.slots = [Slot(size, self.device) for _ in range(min(count, len(self._units)))]
            if staged:
                self._staging = torch.empty(staged, dtype=torch.uint8, device=self.device)
        if self._backend is not None:
            self._copy_stream = self._backend.Stream(device=self.device)
            # what the slots' memory was used for before may still be running
            allocated = self._compute_stream().record_event()
            for slot in self.slots:
                slot.free = allocated

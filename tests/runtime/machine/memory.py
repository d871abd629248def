"""The memories of a simulated machine with real numbers: what lies where, and who may still be using it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from app.runtime.simulate.allocator import DeviceMemory, HostMemory, Piece
from app.runtime.simulate.ledger import Label
from app.runtime.simulate.values import GpuSpec
from tests.runtime.machine.ordering import ALLOCATING, READING, WRITING, Access, Deferred, Timeline, Uses

_LABEL = Label("tensors", "activations")


class Place:
    """A storage's place in a memory. It hangs on the storage, so that it goes exactly when the storage goes."""

    __slots__ = ("device", "memory", "piece", "pinned", "recorded", "size", "stream", "uses")

    def __init__(self, memory: Memory, device: torch.device, size: int, *, pinned: bool) -> None:
        self.memory = memory
        self.device = device
        self.size = size
        self.pinned = pinned
        self.uses = Uses()
        self.recorded: set[int] = set()
        self.piece: Piece | None = None
        self.stream: Timeline | None = None
        """Where it was allocated; its memory goes back to that stream, and to no other."""

    def __del__(self) -> None:
        if not self.memory.ended:
            self.memory.leave(self)


class Tally:
    """Bytes that live, and the most there were."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0

    def add(self, size: int) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)

    def remove(self, size: int) -> None:
        self.used -= size


class Memory:
    """The cards' memories and the host's, and the streams that work on them."""

    def __init__(self, gpus: Sequence[int | None], *, pinned_power_of_two: bool) -> None:
        self.gpus = tuple(
            DeviceMemory(
                f"cuda:{index}",
                GpuSpec(capacity_bytes=capacity, context_bytes=0),
                caching=False,
                before_failing=self._wait_for_recorded,
            )
            for index, capacity in enumerate(gpus)
        )
        self.ram, self.pinned = Tally(), Tally()
        self._pinned_size = HostMemory(None, power_of_two=pinned_power_of_two).pinned_size
        self.hazards: list[str] = []
        self.ended = False
        self.lock = threading.RLock()
        self.host = Timeline("the host", 0)
        self.timelines = {0: self.host}
        self._default = [self.new_timeline(index) for index in range(len(self.gpus))]
        self._here = threading.local()
        self._deferred: list[Deferred] = []
        self._freed: dict[int, dict[int, int]] = {}
        """Number of a stream -> of others that used memory that was freed there, the last tick at which they did."""

    # -- bytes

    def place(self, elem: torch.Tensor, device: torch.device, *, pinned: bool = False) -> Place:
        """Where the storage of a plain tensor lies; a new one is charged.

        Raises:
            torch.OutOfMemoryError: over the card's capacity.
        """
        storage = elem.untyped_storage()
        found: Place | None = getattr(storage, "place", None)
        # a storage never changes its device: another one's place is left over from a storage that died
        if found is not None and found.memory is self and found.device == device:
            return found
        place = Place(self, device, storage.nbytes(), pinned=pinned)
        with self.lock:
            if device.type == "cuda":
                stream = self.current(device.index)
                self._check_reuse(stream)
                place.piece = self.gpus[device.index].allocate(place.size, _LABEL, "", stream.number)
                place.stream = stream
                place.uses.note(Access(0, place.size, stream.number, stream.tick, ALLOCATING))
            else:
                place.size = self._pinned_size(place.size) if pinned else place.size
                self.ram.add(place.size)
                if pinned:
                    self.pinned.add(place.size)
        storage.place = place  # type: ignore[attr-defined]
        return place

    def leave(self, place: Place) -> None:
        """A storage dies: its memory goes back, at once, or when those have ended who were promised it."""
        with self.lock:
            needs: dict[int, int] = {}
            if place.device.type == "cuda":
                if place.stream is None:
                    return  # it never had any memory: the card was full
                needs = self._check_release(place, place.stream)
            elif place.pinned:
                needs = place.uses.open_for(self.host)
            device, size, pinned, piece = place.device, place.size, place.pinned, place.piece
            if needs:
                self._deferred.append(Deferred(needs, lambda: self._give_back(device, size, pinned, piece)))
            else:
                self._give_back(device, size, pinned, piece)

    def _check_release(self, place: Place, stream: Timeline) -> dict[int, int]:
        """What the release must wait for because of `record_stream`. Other streams that are at work are remembered."""
        unknown = place.uses.open_for(self.host)
        for number, tick in place.uses.open_for(stream).items():
            if number in unknown and number not in place.recorded:
                self._freed.setdefault(stream.number, {})[number] = tick
        ticks = {number: self.timelines[number].tick for number in place.recorded}
        return {number: tick for number, tick in ticks.items() if not self.host.after(number, tick)}

    def _check_reuse(self, stream: Timeline) -> None:
        """A stream's next allocation may get what was freed on it: then what others did there must have ended."""
        freed = self._freed.get(stream.number, {})
        for number, tick in list(freed.items()):
            if not stream.after(number, tick) and not self.host.after(number, tick):
                self.hazards.append(
                    f"{stream.name} may be given memory again that was freed while {self.timelines[number].name} may "
                    "still use it."
                )
            del freed[number]

    def _give_back(self, device: torch.device, size: int, pinned: bool, piece: Piece | None) -> None:
        if piece is not None:
            self.gpus[device.index].release(piece, _LABEL)
            return
        self.ram.remove(size)
        if pinned:
            self.pinned.remove(size)

    def _wait_for_recorded(self) -> None:
        """What the allocator does before it gives up: it waits for the streams that memory was recorded on."""
        waiting, self._deferred = self._deferred, []
        for deferred in waiting:
            deferred.give_back()

    # -- order

    def new_timeline(self, index: int) -> Timeline:
        number = len(self.timelines)
        timeline = Timeline(f"stream {number} of cuda:{index}", number)
        self.timelines[number] = timeline
        return timeline

    def default(self, index: int) -> Timeline:
        return self._default[index]

    def current(self, index: int) -> Timeline:
        """The stream of that card on which this thread's work is enqueued."""
        found: Timeline = self._here.__dict__.get(str(index), self._default[index])
        return found

    def set_stream(self, timeline: Timeline, index: int) -> None:
        self._here.__dict__[str(index)] = timeline

    def enqueue(self, device: torch.device) -> Timeline:
        """Who does new work on that device: the card's current stream, one tick further, or the host."""
        if device.type != "cuda":
            return self.host
        timeline = self.current(device.index)
        timeline.enqueue(self.host)
        return timeline

    def synchronize(self, index: int) -> None:
        """The host waits for all streams of a card."""
        for timeline in list(self.timelines.values()):
            if timeline.name.endswith(f"of cuda:{index}"):
                self.host.follow(timeline.behind)
        self.wait({})

    def wait(self, behind: dict[int, int]) -> None:
        """The host waits for all that; what was kept back until then is free."""
        with self.lock:
            self.host.follow(behind)
            waiting, self._deferred = self._deferred, []
            for deferred in waiting:
                if all(self.host.after(number, tick) for number, tick in deferred.needs.items()):
                    deferred.give_back()
                else:
                    self._deferred.append(deferred)

    def use(self, elem: torch.Tensor, device: torch.device, timeline: Timeline, what: str, *, write: bool) -> None:
        """Work on `timeline` uses these bytes: copies land that it waited for; what it did not wait for is a hazard."""
        uses = self.place(elem, device).uses
        if timeline is self.host and not uses.accesses:
            return
        if uses.arrivals:
            with _disable_current_modes():
                uses.land(timeline, elem.untyped_storage())
        start, end = _extent(elem)
        for access in uses.conflicts(timeline, start, end, write=write):
            verb = "overwrites" if write else "reads"
            other = self.timelines[access.number].name
            self.hazards.append(f"{what} on {timeline.name} {verb} what {other} may still be {access.doing}.")
        if timeline is not self.host:
            uses.note(Access(start, end, timeline.number, timeline.tick, WRITING if write else READING))


def _extent(elem: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that a tensor occupies in its storage."""
    if elem.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(elem.shape, elem.stride(), strict=True))
    size = elem.element_size()
    start = int(elem.storage_offset()) * size
    return start, start + (reach + 1) * size

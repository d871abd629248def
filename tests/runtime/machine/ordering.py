"""What runs before what on a simulated machine: streams and events as logical clocks, and who used which bytes when.

Work that is enqueued on a stream has a tick. A timeline (a stream, or the host) carries for every other stream the
last tick that it is certainly behind: waiting for a stream, for an event, or synchronising raises it, nothing else
does. So the worst order that a real machine may choose is what is checked, whatever the order in which it happens here.

Not covered: priorities, timing (`elapsed_time` is 0), graphs, events between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Timeline:
    """A stream's or the host's place in the order of things."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.tick = 0
        self.behind: dict[int, int] = {}
        """Number of a stream -> the last of its ticks that has certainly ended before what comes here next."""

    def enqueue(self, host: Timeline) -> int:
        """The tick of new work on this stream. It starts after all that the host has waited for."""
        self.follow(host.behind)
        self.tick += 1
        self.behind[self.number] = self.tick
        return self.tick

    def follow(self, behind: Mapping[int, int]) -> None:
        """What comes here next runs after all that."""
        for number, tick in behind.items():
            if tick > self.behind.get(number, 0):
                self.behind[number] = tick

    def after(self, number: int, tick: int) -> bool:
        return number == self.number or self.behind.get(number, 0) >= tick


READING, WRITING = "reading", "writing"
ALLOCATING = "using: it was allocated there, and what lay there before may not be done with"


class Access(NamedTuple):
    """Bytes `start` to `end` of a storage, used by a stream's work of that tick."""

    start: int
    end: int
    number: int
    tick: int
    doing: str

    @property
    def write(self) -> bool:
        return self.doing != READING


@dataclass(eq=False)
class Arrival:
    """A copy on its way: until somebody is ordered behind it, its destination holds garbage."""

    number: int
    tick: int
    value: torch.Tensor
    """What the source held when the copy was enqueued."""
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def land(self, storage: torch.UntypedStorage) -> None:
        into = torch.empty(0, dtype=self.value.dtype).set_(storage, self.offset, self.size, self.stride)
        into.copy_(self.value)


_MANY = 64


@dataclass(eq=False)
class Uses:
    """Which streams used which bytes of one storage, as far as somebody may still have to wait for them."""

    accesses: list[Access] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def conflicts(self, timeline: Timeline, start: int, end: int, *, write: bool) -> Iterator[Access]:
        """Earlier uses of these bytes that `timeline` is not ordered behind, of which one side writes."""
        for access in self.accesses:
            if (
                (write or access.write)
                and access.start < end
                and start < access.end
                and not timeline.after(access.number, access.tick)
            ):
                yield access

    def note(self, new: Access) -> None:
        """Remember a use; what lies within a write, or within a later read of the same stream, is not needed again."""
        self.accesses = [
            old
            for old in self.accesses
            if not (
                new.start <= old.start
                and old.end <= new.end
                and (new.write or (not old.write and old.number == new.number))
            )
        ]
        self.accesses.append(new)
        if len(self.accesses) > _MANY:
            self._merge_reads()

    def _merge_reads(self) -> None:
        kept = [access for access in self.accesses if access.write]
        reads: dict[int, Access] = {}
        for access in self.accesses:
            if not access.write:
                old = reads.get(access.number, access)
                start, end = min(old.start, access.start), max(old.end, access.end)
                reads[access.number] = Access(start, end, access.number, max(old.tick, access.tick), READING)
        self.accesses = [*kept, *reads.values()]

    def land(self, timeline: Timeline, storage: torch.UntypedStorage) -> None:
        """Let the copies land that `timeline` is ordered behind."""
        waiting = []
        for arrival in self.arrivals:
            if timeline.after(arrival.number, arrival.tick):
                arrival.land(storage)
            else:
                waiting.append(arrival)
        self.arrivals = waiting

    def open_for(self, timeline: Timeline) -> dict[int, int]:
        """Number of each stream whose use `timeline` is not ordered behind -> the tick of the last such use."""
        found: dict[int, int] = {}
        for access in self.accesses:
            if not timeline.after(access.number, access.tick):
                found[access.number] = max(access.tick, found.get(access.number, 0))
        return found


@dataclass(eq=False)
class Deferred:
    """Memory that is given back when the host knows that all this has ended."""

    needs: dict[int, int]
    give_back: Callable[[], None]

"""`torch.cuda.Stream` and `torch.cuda.Event` of a simulated machine with real numbers. Times are not simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.runtime.machine.ordering import Timeline
    from tests.runtime.simulated import SimulatedMachine


def make_stream_class(machine: SimulatedMachine) -> Any:
    """A class for `torch.cuda.Stream`."""

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, *, timeline: Timeline | None = None) -> None:
            index = machine.operations.index(device)
            self.device = torch.device("cuda", index)
            self.priority = priority
            self.timeline = machine.memory.new_timeline(index) if timeline is None else timeline
            self._contexts: list[Any] = []

        @property
        def cuda_stream(self) -> int:
            return self.timeline.number

        @property
        def stream_id(self) -> int:
            return self.timeline.number

        def synchronize(self) -> None:
            machine.memory.wait(self.timeline.behind)

        def wait_stream(self, stream: Stream) -> None:
            self.timeline.follow(stream.timeline.behind)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = torch.cuda.Event() if event is None else event  # type: ignore[no-untyped-call]
            event.record(self)
            return event

        def query(self) -> bool:
            """True: the program has looked, and found the work done."""
            self.synchronize()
            return True

        def __enter__(self) -> Stream:
            context = on_stream(machine, self)
            context.__enter__()
            self._contexts.append(context)
            return self

        def __exit__(self, *exception: object) -> None:
            self._contexts.pop().__exit__(None, None, None)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.timeline is self.timeline

        def __hash__(self) -> int:
            return self.timeline.number

    return Stream


def make_event_class(machine: SimulatedMachine) -> Any:
    """A class for `torch.cuda.Event`. As in CUDA, waiting for an event that was never recorded waits for nothing."""

    class Event:
        def __init__(self, *_: object, **__: object) -> None:
            self._behind: dict[int, int] = {}

        def record(self, stream: Any = None) -> None:
            timeline = machine.memory.current(machine.operations.index()) if stream is None else stream.timeline
            self._behind = dict(timeline.behind)

        def wait(self, stream: Any = None) -> None:
            timeline = machine.memory.current(machine.operations.index()) if stream is None else stream.timeline
            timeline.follow(self._behind)

        def synchronize(self) -> None:
            machine.memory.wait(self._behind)

        def query(self) -> bool:
            """True: the program has looked, and found the work done."""
            self.synchronize()
            return True

        def elapsed_time(self, _other: Event) -> float:
            return 0.0

    return Event


@contextlib.contextmanager
def on_stream(machine: SimulatedMachine, stream: Any) -> Iterator[None]:
    """`torch.cuda.stream(stream)`: work inside goes to that stream, on its device. None changes nothing."""
    if stream is None:
        yield
        return
    index = stream.device.index
    stream_before, device_before = machine.memory.current(index), machine.device_index
    machine.memory.set_stream(stream.timeline, index)
    machine.device_index = index
    try:
        yield
    finally:
        machine.memory.set_stream(stream_before, index)
        machine.device_index = device_before

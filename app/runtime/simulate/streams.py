"""Streams and events of a simulated machine. Everything runs at once and in order; only memory tells them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from app.runtime.simulate.devices import SimulatedMachine


def make_stream_class(machine: SimulatedMachine) -> Any:
    """A class for `torch.cuda.Stream`. Each stream has a pool of blocks of its own, as in the real allocator."""

    class Stream:
        made = 0

        def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **_: object) -> None:
            if number is None:
                Stream.made += 1
                number = Stream.made
            self.number = number
            self.priority = priority
            self.device = torch.device("cuda", machine.device_index) if device is None else torch.device(device)

        @classmethod
        def current(cls) -> Stream:
            return cls(number=machine.stream_id)

        @property
        def cuda_stream(self) -> int:
            return self.number

        def synchronize(self) -> None:
            if self.number == 0:  # the compute stream: what it held back by `record_stream` is free now
                machine.free_what_lags()

        def wait_stream(self, stream: Stream) -> None:
            """Orders work on the GPU; takes no memory."""

        def wait_event(self, event: Any) -> None:
            """Orders work on the GPU; takes no memory."""

        def record_event(self, event: Any = None) -> Any:
            return event if event is not None else make_event_class(machine)()

        def query(self) -> bool:
            return True

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return self.number

    return Stream


def make_event_class(machine: SimulatedMachine) -> Any:
    """A class for `torch.cuda.Event`."""

    class Event:
        def __init__(self, *_: object, **__: object) -> None:
            self._stream = 0

        def record(self, stream: Any = None) -> None:
            self._stream = machine.stream_id if stream is None else stream.number

        def wait(self, stream: Any = None) -> None:
            """Orders work on the GPU; takes no memory."""

        def synchronize(self) -> None:
            if self._stream == 0:
                machine.free_what_lags()

        def query(self) -> bool:
            return True

        def elapsed_time(self, _other: Event) -> float:
            return 0.0

    return Event


@contextlib.contextmanager
def on_stream(machine: SimulatedMachine, stream: Any) -> Iterator[None]:
    """`torch.cuda.stream(stream)`: allocations inside come from the stream's own blocks. None changes nothing."""
    before = machine.stream_id
    if stream is not None:
        machine.stream_id = stream.number
    try:
        yield
    finally:
        machine.stream_id = before

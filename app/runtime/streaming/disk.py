"""Units straight from the checkpoint's files: a thread reads ahead into a few buffers, and nothing is written."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch

from app.errors import ModelNotUsable
from app.runtime.checkpoint_files import AGAIN, CheckpointFiles, Rename, Stored
from app.runtime.streaming.layout import ALIGNMENT, Entry, Layout
from app.runtime.streaming.sources import HostBuffer


class _State(Enum):
    FREE = auto()
    """May be filled again once what was copied from it has arrived; may still hold its unit."""
    FILLING = auto()
    FULL = auto()
    LENT = auto()


class _Buffer:
    def __init__(self, size: int, device: torch.device) -> None:
        # memory of the system's, in whole pages, so that all of it goes back when it is closed
        self.memory = HostBuffer(size, device, torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8))
        self.state = _State.FREE
        self.unit: int | None = None
        self.copied: Any = None


class CheckpointSource:
    """A source for `stream` that reads each unit from the files again whenever it is needed.

    A thread reads ahead into `buffers` host buffers of the size of the largest unit; RAM is that, and 4 MiB where the
    files' type differs. One source serves one module.

    Raises:
        ModelNotUsable: as `CheckpointFiles`; in `bind` for a weight that is missing.
    """

    prompt = False

    def __init__(
        self,
        folder: Path | CheckpointFiles,
        *,
        rename: Rename | None = None,
        variant: str | None = None,
        buffers: int = 2,
    ) -> None:
        self.files = (
            folder if isinstance(folder, CheckpointFiles) else CheckpointFiles(folder, rename=rename, variant=variant)
        )
        self.ahead = max(1, buffers)
        self.read_bytes = 0
        """From the files, of units, so far."""
        self._layouts: list[tuple[tuple[Entry, Stored], ...]] = []
        self._names: list[str] = []
        self._buffers: list[_Buffer] = []
        self._queue: deque[int] = deque()
        self._failed: dict[int, Exception] = {}
        self._turn = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def host_bytes(self) -> int:
        return sum(buffer.memory.tensor.numel() for buffer in self._buffers)

    def bind(
        self,
        layouts: Sequence[Layout],
        weights: Sequence[Sequence[torch.nn.Parameter]],  # noqa: ARG002
        device: torch.device,
    ) -> None:
        for layout in layouts:
            self._names.append(layout.name)
            self._layouts.append(
                tuple((entry, self.files.find(entry.names, entry.shape, entry.dtype)) for entry in layout.entries)
            )
        size = max((layout.host_bytes for layout in layouts), default=0)
        self._buffers = [_Buffer(size, device) for _ in range(min(self.ahead, len(layouts)))]

    def read(self, names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
        stored = self.files.find(names, like.shape, like.dtype)
        found = torch.empty(like.shape, dtype=like.dtype)
        self.files.read(stored, found, like.dtype)
        return found

    def start(self, unit: int) -> None:
        with self._turn:
            if unit not in self._queue and self._holding(unit) is None:
                self._queue.append(unit)
                self._work()

    def fetch(self, unit: int) -> torch.Tensor:
        with self._turn:
            self._failed.pop(unit, None)  # it failed when it was read ahead: once more, now that it is needed
            while True:
                if self._closed:
                    raise ModelNotUsable("The model's files were closed while they were needed. Start the video again.")
                if unit in self._failed:
                    raise self._failed.pop(unit)
                buffer = self._holding(unit)
                if buffer is not None and buffer.state is not _State.FILLING:
                    buffer.state = _State.LENT
                    return buffer.memory.tensor
                if buffer is None:
                    self._hurry(unit)
                self._turn.wait()

    def done(self, unit: int, copied: Any) -> None:
        with self._turn:
            buffer = self._holding(unit)
            if buffer is not None:
                buffer.state, buffer.copied = _State.FREE, copied
            self._turn.notify_all()

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        for buffer in self._buffers:
            buffer.memory.unpin()
        self._buffers = []
        self.files.close()

    # -- with `_turn` held

    def _holding(self, unit: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.unit == unit), None)

    def _free(self) -> _Buffer | None:
        free = [buffer for buffer in self._buffers if buffer.state is _State.FREE]
        return min(free, key=lambda buffer: buffer.unit is not None, default=None)

    def _hurry(self, unit: int) -> None:
        """Nobody foresaw this unit: what was to be read before it is not needed, and what was read ahead makes room."""
        while self._queue and self._queue[0] != unit:
            self._queue.popleft()
        if not self._queue:
            self._queue.append(unit)
        if self._free() is None:
            for buffer in self._buffers:
                if buffer.state is _State.FULL:
                    buffer.state = _State.FREE
        self._work()

    def _work(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_ahead, name="checkpoint-reader", daemon=True)
            self._thread.start()
        self._turn.notify_all()

    # -- the thread

    def _read_ahead(self) -> None:
        while True:
            with self._turn:
                while not self._closed and not (self._queue and self._free()):
                    self._turn.wait()
                buffer = self._free()
                if self._closed or buffer is None:
                    return
                unit = self._queue.popleft()
                buffer.unit, buffer.state = unit, _State.FILLING
                copied, buffer.copied = buffer.copied, None
            error: Exception | None = None
            try:
                if copied is not None:
                    copied.synchronize()
                self._fill(unit, buffer.memory.tensor)
            except Exception as caught:  # noqa: BLE001 (whatever it is, the thread that waits must hear of it)
                error = caught
            with self._turn:
                if error is not None:
                    self._failed[unit] = error
                    buffer.unit = None
                buffer.state = _State.FREE if error is not None else _State.FULL
                self._turn.notify_all()

    def _fill(self, unit: int, memory: torch.Tensor) -> None:
        found = False
        for entry, stored in self._layouts[unit]:
            self.files.read(stored, entry.host_view(memory), entry.dtype)
            self.read_bytes += stored.size
            if not found:
                raw = memory[entry.host_offset : entry.host_offset + entry.count * entry.transport.itemsize]
                found = bool(raw[:ALIGNMENT].any()) or bool(raw.any())  # the beginning is nearly always enough
        if not found and any(entry.count for entry, _ in self._layouts[unit]):
            # one layer may have been trained to zeros, but not its norms with it
            raise ModelNotUsable(
                f"All weights of {self._names[unit]} are zeros in {self.files.folder}: the files are damaged. {AGAIN}"
            )

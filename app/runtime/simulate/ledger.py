"""Books of one memory: how many bytes live there, whose they are, and what lived there at the highest point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from app.runtime.simulate.values import Kind


class Label(NamedTuple):
    """Whose bytes, and what for."""

    component: str
    kind: Kind


@dataclass
class Mark:
    """The highest point since the mark was set, and the shares of it."""

    start: int
    peak: int
    reserved: int
    operation: str = ""
    shares: dict[Label, int] = field(default_factory=dict)
    stale: bool = True
    """The shares are older than the peak: they are copied only when the memory begins to shrink."""


class Ledger:
    """Counts by label. Several marks can be set at once (a stage, and a call within it); each keeps its own peak."""

    def __init__(self) -> None:
        self.total = 0
        self.reserved = 0
        self.shares: dict[Label, int] = {}
        self._marks: list[Mark] = []

    def add(self, label: Label, size: int, operation: str) -> None:
        self.total += size
        self.shares[label] = self.shares.get(label, 0) + size
        for mark in self._marks:
            if self.total > mark.peak:
                mark.peak, mark.operation, mark.stale = self.total, operation, True
            mark.reserved = max(mark.reserved, self.reserved)

    def remove(self, label: Label, size: int) -> None:
        for mark in self._marks:
            if mark.stale:
                self._copy(mark)
        self.total -= size
        left = self.shares[label] - size
        if left:
            self.shares[label] = left
        else:
            del self.shares[label]

    def relabel(self, old: Label, new: Label, size: int) -> None:
        """The same bytes turn out to be something else: what was copied has become a weight."""
        left = self.shares[old] - size
        if left:
            self.shares[old] = left
        else:
            del self.shares[old]
        self.shares[new] = self.shares.get(new, 0) + size

    @contextmanager
    def marked(self) -> Iterator[Mark]:
        """A mark that runs while the block does."""
        mark = self.set_mark()
        try:
            yield mark
        finally:
            self.close(mark)

    def set_mark(self) -> Mark:
        mark = Mark(start=self.total, peak=self.total, reserved=self.reserved)
        self._marks.append(mark)
        return mark

    def close(self, mark: Mark) -> Mark:
        if mark.stale:
            self._copy(mark)
        self._marks = [m for m in self._marks if m is not mark]
        return mark

    def _copy(self, mark: Mark) -> None:
        mark.shares = dict(self.shares)
        mark.stale = False

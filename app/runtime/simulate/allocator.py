"""Memories with PyTorch's allocators in front: what is asked for, what it takes, and when it is too much.

`DeviceMemory` follows c10/cuda/CUDACachingAllocator.cpp (native backend, default options): sizes rounded to 512 B;
requests up to 1 MiB come from blocks of 2 MiB, below 10 MiB from blocks of 20 MiB, larger ones get a block rounded
to 2 MiB; best fit, splitting and merging; one pool per stream; cached blocks are given back before giving up.
`HostMemory` follows CachingHostAllocator: pinned sizes rounded up to a power of two, never given back.

Not modelled: expandable segments, `max_split_size_mb`, graph pools, fragmentation inside the driver.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.runtime.simulate.ledger import Label, Ledger
from app.runtime.simulate.values import GpuSpec

KIB, MIB, GIB = 1024, 1024**2, 1024**3

_GRAIN = 512
_SMALL_LIMIT = MIB
_SMALL_BLOCK = 2 * MIB
_LARGE_BLOCK = 20 * MIB
_OWN_BLOCK_FROM = 10 * MIB
_OWN_BLOCK_GRAIN = 2 * MIB

ROUNDING = Label("pinned", "rounding")


def round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of a block taken from the driver. Neighbours within the block are linked, so that merging is quick."""

    order: int
    """Breaks ties of equal sizes, so that runs repeat exactly."""
    pool: tuple[int, bool]
    """Stream id, and whether small requests come from it."""
    size: int
    free: bool = True
    before: Piece | None = None
    after: Piece | None = None

    @property
    def whole(self) -> bool:
        return self.before is None and self.after is None

    def key(self) -> tuple[int, int]:
        return self.size, self.order


class FreeList:
    """Free pieces of one pool, smallest first."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._pieces: dict[tuple[int, int], Piece] = {}

    def add(self, piece: Piece) -> None:
        bisect.insort(self._keys, piece.key())
        self._pieces[piece.key()] = piece

    def remove(self, piece: Piece) -> None:
        del self._keys[bisect.bisect_left(self._keys, piece.key())]
        del self._pieces[piece.key()]

    def best_fit(self, size: int) -> Piece | None:
        at = bisect.bisect_left(self._keys, (size, -1))
        return self._pieces[self._keys[at]] if at < len(self._keys) else None

    def whole(self) -> list[Piece]:
        return [piece for piece in self._pieces.values() if piece.whole]


class DeviceMemory:
    """Memory of one GPU."""

    def __init__(self, name: str, spec: GpuSpec, *, caching: bool, before_failing: Callable[[], None]) -> None:
        """`before_failing` is called once when memory is short; it may free what waits for a synchronisation."""
        self.name = name
        self.spec = spec
        self.ledger = Ledger()
        self.torch_peak = self.ledger.set_mark()
        """What `torch.cuda.max_memory_allocated` reads and `reset_peak_memory_stats` resets."""
        self.retries = 0
        self._caching = caching
        self._before_failing = before_failing
        self._pools: dict[tuple[int, bool], FreeList] = {}
        self._pieces = 0

    @property
    def free_bytes(self) -> int:
        """What the driver would report; the capacity must be known."""
        capacity = self.spec.capacity_bytes
        assert capacity is not None  # noqa: S101 (callers ask only where there is a limit)
        return max(0, capacity - self.spec.context_bytes - self.ledger.reserved)

    def reset_peak(self) -> None:
        self.ledger.close(self.torch_peak)
        self.torch_peak = self.ledger.set_mark()

    def allocate(self, size: int, label: Label, operation: str, stream: int = 0) -> Piece:
        """A piece of at least `size` bytes.

        Raises:
            torch.OutOfMemoryError: over capacity even with all unused blocks given back.
        """
        want = max(_GRAIN, round_up(size, _GRAIN))
        if not self._caching:
            self._reserve(want)
            piece = self._new_piece((stream, False), want)
            piece.free = False
        else:
            piece = self._from_pool(want, (stream, want <= _SMALL_LIMIT))
        self.ledger.add(label, piece.size, operation)
        return piece

    def release(self, piece: Piece, label: Label) -> None:
        self.ledger.remove(label, piece.size)
        if not self._caching:
            self.ledger.reserved -= piece.size
            return
        pool = self._pools[piece.pool]
        after, before = piece.after, piece.before
        if after is not None and after.free:
            pool.remove(after)
            piece.size += after.size
            piece.after = after.after
            if piece.after is not None:
                piece.after.before = piece
        if before is not None and before.free:
            pool.remove(before)
            before.size += piece.size
            before.after = piece.after
            if before.after is not None:
                before.after.before = before
            piece = before
        piece.free = True
        pool.add(piece)

    def make_room(self, size: int) -> None:
        """See to it that reserved memory could hold `size` more bytes, if it were not fragmented.

        Raises:
            torch.OutOfMemoryError: over capacity.
        """
        missing = self.ledger.total + size - self.ledger.reserved
        if missing > 0:
            block = round_up(missing, _OWN_BLOCK_GRAIN)
            self._reserve(block)
            if self._caching:
                key = (0, False)
                self._pools.setdefault(key, FreeList()).add(self._new_piece(key, block))
            else:
                self.ledger.reserved -= block

    def empty_cache(self) -> None:
        """Give blocks back that are wholly unused, as `torch.cuda.empty_cache`."""
        for pool in self._pools.values():
            for piece in pool.whole():
                pool.remove(piece)
                self.ledger.reserved -= piece.size

    def _from_pool(self, want: int, key: tuple[int, bool]) -> Piece:
        pool = self._pools.setdefault(key, FreeList())
        piece = pool.best_fit(want)
        if piece is not None:
            pool.remove(piece)
        else:
            if key[1]:
                block = _SMALL_BLOCK
            else:
                block = _LARGE_BLOCK if want < _OWN_BLOCK_FROM else round_up(want, _OWN_BLOCK_GRAIN)
            self._reserve(block)
            piece = self._new_piece(key, block)
        rest = piece.size - want
        if rest >= _GRAIN if key[1] else rest > _SMALL_LIMIT:
            tail = self._new_piece(key, rest)
            tail.before, tail.after = piece, piece.after
            if tail.after is not None:
                tail.after.before = tail
            piece.after, piece.size = tail, want
            pool.add(tail)
        piece.free = False
        return piece

    def _new_piece(self, key: tuple[int, bool], size: int) -> Piece:
        self._pieces += 1
        return Piece(self._pieces, key, size)

    def _reserve(self, size: int) -> None:
        if not self._has_room(size):
            self.retries += 1
            self._before_failing()
            self.empty_cache()
            if not self._has_room(size):
                capacity = self.spec.capacity_bytes or 0
                raise torch.OutOfMemoryError(
                    f"[simulated] CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. {self.name} has a total "
                    f"capacity of {capacity / GIB:.2f} GiB of which {self.free_bytes / MIB:.2f} MiB is free; "
                    f"{self.ledger.total / GIB:.2f} GiB is allocated."
                )
        self.ledger.reserved += size

    def _has_room(self, size: int) -> bool:
        return self.spec.capacity_bytes is None or size <= self.free_bytes


class HostMemory:
    """RAM. Pageable memory is exact; pinned memory comes in powers of two and is kept for reuse when it is freed."""

    def __init__(self, capacity_bytes: int | None, *, power_of_two: bool) -> None:
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger()
        self.pinned_requested = 0
        self.pinned_requested_peak = 0
        self.pinned = 0
        self._power_of_two = power_of_two
        self._cached: dict[int, int] = {}

    def allocate(self, size: int, label: Label, operation: str) -> None:
        """Raises:
        MemoryError: over capacity.
        """
        self.check(size)
        self.ledger.reserved += size
        self.ledger.add(label, size, operation)

    def release(self, size: int, label: Label) -> None:
        self.ledger.remove(label, size)
        self.ledger.reserved -= size

    def pinned_size(self, size: int) -> int:
        # below a page the allocator rounds as well; `pinned_max_round_threshold_mb:1` spares only what is above 1 MiB
        if self._power_of_two or size <= MIB:
            return 1 << max(0, (max(size, 1) - 1).bit_length())
        return size

    def allocate_pinned(self, size: int, label: Label, operation: str) -> None:
        """Raises:
        MemoryError: over capacity.
        """
        block = self.pinned_size(size)
        if self._cached.get(block, 0):
            self._cached[block] -= 1
            self.ledger.remove(ROUNDING, size)
        else:
            self.check(block)
            self.pinned += block
            self.ledger.reserved += block
            if block > size:
                self.ledger.add(ROUNDING, block - size, operation)
        self.ledger.add(label, size, operation)
        self.pinned_requested += size
        self.pinned_requested_peak = max(self.pinned_requested_peak, self.pinned_requested)

    def release_pinned(self, size: int, label: Label) -> None:
        block = self.pinned_size(size)
        self._cached[block] = self._cached.get(block, 0) + 1
        self.pinned_requested -= size
        self.ledger.relabel(label, ROUNDING, size)

    def check(self, size: int) -> None:
        if self.capacity_bytes is not None and self.ledger.total + size > self.capacity_bytes:
            raise MemoryError(
                f"[simulated] RAM: {(self.ledger.total + size) / GIB:.2f} GiB wanted, "
                f"{self.capacity_bytes / GIB:.2f} GiB there."
            )

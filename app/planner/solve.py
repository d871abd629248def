"""Exact search: the fastest choice of one option per group that fits, or the choice that is least over.

Depth first with a bound: options come fastest first, and a branch is left once what is chosen so far, with the least
that the other groups can add, is over budget or no better than the best found.
"""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from app.planner.options import Option, Space


class Choice(NamedTuple):
    """One option of each group. `over` are bytes above the budget by slot, all zero when it fits."""

    seconds: float
    options: tuple[Option, ...]
    bytes: tuple[int, ...]
    over: tuple[int, ...]


def fastest(space: Space, base: tuple[int, ...], budget: tuple[int, ...]) -> Choice | None:
    """The fastest choice within the budget, None when nothing fits. `base` is what every choice needs besides."""
    if any(not options for options in space.groups):
        return None
    rest_bytes, rest_seconds = _bounds(space)
    best: list[Choice] = []

    def go(level: int, seconds: float, used: tuple[int, ...], chosen: tuple[Option, ...]) -> None:
        if level == len(space.groups):
            best[:] = [Choice(seconds, chosen, used, (0,) * len(used))]
            return
        least, quickest = rest_bytes[level + 1], rest_seconds[level + 1]
        for option in space.groups[level]:
            total = seconds + option.seconds
            if best and total + quickest >= best[0].seconds:
                return  # the options behind are slower still
            after = tuple(map(add, used, option.bytes))
            if all(a + b <= c for a, b, c in zip(after, least, budget, strict=True)):
                go(level + 1, total, after, (*chosen, option))

    go(0, 0.0, base, ())
    return best[0] if best else None


def least_over(space: Space, base: tuple[int, ...], budget: tuple[int, ...]) -> Choice | None:
    """The choice whose memories are over budget by the fewest bytes in all, counted at each memory's worst stage."""
    if any(not options for options in space.groups):
        return None
    rest_bytes, _ = _bounds(space)
    memories = [memory for memory, _ in space.slots]
    best: list[tuple[int, Choice]] = []

    def score(used: tuple[int, ...]) -> int:
        worst: dict[str, int] = {}
        for memory, size, limit in zip(memories, used, budget, strict=True):
            worst[memory] = max(worst.get(memory, 0), size - limit)
        return sum(worst.values())

    def go(level: int, seconds: float, used: tuple[int, ...], chosen: tuple[Option, ...]) -> None:
        if level == len(space.groups):
            over = tuple(max(0, size - limit) for size, limit in zip(used, budget, strict=True))
            best[:] = [(score(used), Choice(seconds, chosen, used, over))]
            return
        for option in space.groups[level]:
            after = tuple(map(add, used, option.bytes))
            if not best or score(tuple(map(add, after, rest_bytes[level + 1]))) < best[0][0]:
                go(level + 1, seconds + option.seconds, after, (*chosen, option))

    go(0, 0.0, base, ())
    return best[0][1] if best else None


def _bounds(space: Space) -> tuple[list[tuple[int, ...]], list[float]]:
    """For each level the least bytes by slot and the fewest seconds that the groups from there on add."""
    nothing = (0,) * len(space.slots)
    rest_bytes, rest_seconds = [nothing], [0.0]
    for options in reversed(space.groups):
        least = tuple(min(column) for column in zip(*(option.bytes for option in options), strict=True))
        rest_bytes.append(tuple(map(add, least, rest_bytes[-1])))
        rest_seconds.append(options[0].seconds + rest_seconds[-1])
    return rest_bytes[::-1], rest_seconds[::-1]

"""CUDA_VISIBLE_DEVICES as the CUDA driver and torch read it (torch/cuda/__init__.py: _parse_visible_devices)."""

from __future__ import annotations

import re
from collections.abc import Sequence


def select(value: str | None, names: Sequence[Sequence[str]]) -> list[int]:
    """Positions of the devices that are left visible, in the order in which torch counts them.

    `names` holds, per device in the driver's order, the ids it answers to (its UUID; older MIG ids beside it). Numbers
    and ids cannot be mixed; the first entry that names no device ends the list, and one that is given twice empties it.
    """
    if value is None:
        return list(range(len(names)))
    if value.startswith(("GPU-", "MIG-")):
        return _by_id(value, names)
    chosen: list[int] = []
    given: list[int] = []
    for entry in value.split(","):
        number = _leading_number(entry.strip())
        if number in given:
            return []
        if number < 0:
            break
        given.append(number)
    for number in given:
        if number >= len(names):
            break
        chosen.append(number)
    return chosen


def _by_id(value: str, names: Sequence[Sequence[str]]) -> list[int]:
    chosen: list[int] = []
    prefix = value[:4]
    entries = value.split(",")
    ids = [entry for i, entry in enumerate(entries) if all(e.startswith(prefix) for e in entries[: i + 1])]
    if len(set(ids)) != len(ids):
        return []
    for entry in ids:
        found = [i for i, known in enumerate(names) if any(name.startswith(entry) for name in known)]
        if len(found) != 1:
            break  # none, or the beginning of several
        if found[0] in chosen:
            return []
        chosen.append(found[0])
    return chosen


def _leading_number(entry: str) -> int:
    """C's strtoul, as the driver uses it: "1gpu" is 1; -1 for what begins with no number."""
    found = re.match(r"[+-]?[0-9]+", entry)
    return int(found[0]) if found else -1

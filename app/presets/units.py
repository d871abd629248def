"""Sizes and durations as a person writes them in a preset file or on the command line: "8 GiB", "512 MiB", "2 min".

"8 GB" is refused on purpose, not guessed at: makers of cards print GB and mean 1024**3, makers of disks mean 1000**3,
and a limit that is 7 % off either wastes a card or runs out of it. The error says what to write for both meanings.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from app.schema import GIB

_SIZES: Final = {"b": 1, "kib": 1024, "mib": 1024**2, "gib": GIB, "tib": 1024**4}
_DECIMAL_SIZES: Final = {"kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_DURATIONS: Final = {"s": 1, "min": 60, "h": 3600}
_NUMBER: Final = re.compile(r"(?P<sign>[-+]?)(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")
_LARGEST_BYTES: Final = 2**63 - 1  # what SQLite and every C API downstream can hold


def parse_bytes(text: str) -> int:
    """Bytes in a size such as "8 GiB", "7.5GiB", "512 MiB" or "0 B"; a fraction of a byte is dropped.

    Raises:
        ValueError: no size; the message says what is wrong and what to write instead.
    """
    sign, number, unit = _split(text, example="8 GiB")
    if unit in _DECIMAL_SIZES:
        binary = unit[0].upper() + "iB"
        exact = (number * _DECIMAL_SIZES[unit] / _SIZES[binary.lower()]).quantize(Decimal("0.001")).normalize()
        raise ValueError(
            f'"{text}" has two meanings; write "{number:f} {binary}" for what makers of cards and memory call '
            f'{number:f} {unit.upper()}, or "{exact:f} {binary}" for exactly {number:f} decimal {unit.upper()}'
        )
    if unit not in _SIZES:
        raise ValueError(f'"{text}" {_unit_problem(unit)}; write B, KiB, MiB, GiB or TiB after the number: "8 GiB"')
    if sign == "-":
        raise ValueError(f'"{text}" is negative; write a size of 0 or more: "{number:f} {_proper(unit)}"')
    value = int(number * _SIZES[unit])
    if value > _LARGEST_BYTES:
        raise ValueError(f'"{text}" is more than any machine has; write a smaller size: "8 GiB"')
    return value


def parse_seconds(text: str) -> float:
    """Seconds in a duration such as "120 s", "2 min" or "1.5 h".

    Raises:
        ValueError: no duration; the message says what is wrong and what to write instead.
    """
    sign, number, unit = _split(text, example="120 s")
    if unit not in _DURATIONS:
        raise ValueError(f'"{text}" {_unit_problem(unit)}; write s, min or h after the number: "120 s"')
    if sign == "-":
        raise ValueError(f'"{text}" is negative; write a duration of 0 or more: "{number:f} {unit}"')
    return float(number * _DURATIONS[unit])


def format_bytes(value: int) -> str:
    """A size for the screen: GiB from 1 GiB on, MiB and KiB below; one decimal where it says something."""
    if value >= GIB:
        return f"{value / GIB:.1f}".removesuffix(".0") + " GiB"
    if 0 < value < 1024**2:
        return f"{max(1, round(value / 1024))} KiB"
    return f"{value / 1024**2:.0f} MiB"


def _split(text: str, *, example: str) -> tuple[str, Decimal, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'"{text}" is not a number with a unit; write for example "{example}"')
    return match["sign"], Decimal(match["number"]), match["unit"].lower()


def _unit_problem(unit: str) -> str:
    return f'has the unknown unit "{unit}"' if unit else "has no unit"


def _proper(unit: str) -> str:
    return unit[0].upper() + unit[1:-1] + "B" if len(unit) > 1 else "B"

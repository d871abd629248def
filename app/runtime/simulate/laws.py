"""Least squares that find the law of `app.coefficients` from a few simulated runs."""

from __future__ import annotations

from typing import Final

import numpy as np

from app.coefficients import TokenLaw

_STRAIGHT: Final = 0.002
"""Points that miss one line by no more lie on it."""
_LINE_POINTS: Final = 2


def fit_tokens(tokens: list[int], working: list[int]) -> TokenLaw:
    """The law through two or more points. Where one line misses them, the better of two shapes: a line each for small
    and large videos, or one that is bent by the pairs of tokens."""
    points = sorted(zip(tokens, working, strict=True))
    line = _with_error(_line(points), points)
    if line.max_error <= _STRAIGHT or len(points) < 2 * _LINE_POINTS:
        return line
    short, long = _line(points[:_LINE_POINTS]), _line(points[-_LINE_POINTS:])
    two = TokenLaw(**{**long.model_dump(), "short": short})
    return min((_with_error(law, points) for law in (two, _line(points, pairs=True))), key=lambda law: law.max_error)


def _line(points: list[tuple[int, int]], *, pairs: bool = False) -> TokenLaw:
    rows = [[1.0, float(n), float(n) ** 2] if pairs else [1.0, float(n)] for n, _ in points]
    constant, slope, *bend = _least_squares(rows, [size for _, size in points])
    return TokenLaw(
        constant_bytes=constant, bytes_per_token=slope, bytes_per_pair=bend[0] if bend else 0.0, max_error=0
    )


def _with_error(law: TokenLaw, points: list[tuple[int, int]]) -> TokenLaw:
    return law.model_copy(update={"max_error": max(abs(law.bytes(n) / size - 1) for n, size in points)})


def _least_squares(rows: list[list[float]], values: list[int]) -> list[float]:
    """Coefficients with the least relative error.

    Columns that do not vary are told apart by the smallest solution, so that no coefficient explodes.
    """
    weight = 1.0 / np.asarray(values, float)
    matrix = np.asarray(rows) * weight[:, None]
    scale = np.abs(matrix).max(axis=0)
    solution, *_ = np.linalg.lstsq(matrix / scale, np.ones(len(values)), rcond=1e-9)
    return [float(x) for x in solution / scale]

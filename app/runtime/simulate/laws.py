"""Least squares that find the laws of `app.coefficients` from a few simulated runs."""

from __future__ import annotations

import numpy as np

from app.coefficients import TiledLaw, TokenLaw, VideoLaw, filled


def fit_tokens(tokens: list[int], working: list[int]) -> TokenLaw:
    """The law through two or more points."""
    (constant, slope), error = _least_squares([[1.0, float(n)] for n in tokens], working)
    return TokenLaw(constant_bytes=constant, bytes_per_token=slope, max_error=error)


def fit_video(sizes: list[tuple[int, int, int]], working: list[int], window: int | None = None) -> VideoLaw:
    """The law through three or more points (height, width, num_frames) that differ in size and in length.

    Args:
        window: frames that the VAE decodes at a time; None: no matter.
    """
    rows = [[1.0, h * w * filled(f, window), float(h * w * f)] for h, w, f in sizes]
    (constant, pixel, video), error = _least_squares(rows, working)
    return VideoLaw(
        window_frames=window,
        constant_bytes=constant,
        bytes_per_pixel=pixel,
        bytes_per_video_pixel=video,
        max_error=error,
    )


def fit_tiled(sizes: list[tuple[int, int, int]], working: list[int], tile: tuple[int, int, int | None]) -> TiledLaw:
    """The law through three or more points, for a VAE with the given tile (height, width, frames or None)."""
    rows = [list(_tiled_features(size, (tile[0], tile[1], tile[2] or size[2]))) for size in sizes]
    (constant, inside, video), error = _least_squares(rows, working)
    return TiledLaw(
        tile_height=tile[0],
        tile_width=tile[1],
        tile_frames=tile[2],
        constant_bytes=constant,
        bytes_per_tile_pixel=inside,
        bytes_per_video_pixel=video,
        max_error=error,
    )


def _tiled_features(size: tuple[int, int, int], tile: tuple[int, int, int]) -> tuple[float, float, float]:
    height, width, frames = size
    return 1.0, float(min(height, tile[0]) * min(width, tile[1]) * min(frames, tile[2])), float(height * width * frames)


def _least_squares(rows: list[list[float]], values: list[int]) -> tuple[list[float], float]:
    """Coefficients with the least relative error, and the largest relative error left.

    Columns that do not vary are told apart by the smallest solution, so that no coefficient explodes.
    """
    weight = 1.0 / np.asarray(values, float)
    matrix = np.asarray(rows) * weight[:, None]
    scale = np.abs(matrix).max(axis=0)
    solution, *_ = np.linalg.lstsq(matrix / scale, np.ones(len(values)), rcond=1e-9)
    error = float(np.abs(matrix / scale @ solution - 1.0).max())
    return [float(x) for x in solution / scale], error

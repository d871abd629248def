"""How memory grows with what is asked for: laws with few coefficients, and least squares to find them.

Working memory is what a stage needs besides the weights. All laws are in bytes; `max_error` is the largest relative
deviation among the points a law was fitted to, so 0.01 is one per cent.
"""

from __future__ import annotations

import numpy as np

from app.runtime.simulate.values import Value
from app.schema import Bytes


class Lattice(Value):
    """How pixels and frames become tokens of the denoiser."""

    spatial_scale: int
    """Pixels per latent, each way."""
    temporal_scale: int
    """Frames per latent frame, the first frame apart."""
    patch: int
    """Latents per token, each way."""
    temporal_patch: int

    def latent_frames(self, num_frames: int) -> int:
        return (num_frames - 1) // self.temporal_scale + 1

    def tokens(self, height: int, width: int, num_frames: int) -> int:
        side = self.spatial_scale * self.patch
        return -(-self.latent_frames(num_frames) // self.temporal_patch) * (height // side) * (width // side)


class TokenLaw(Value):
    """Denoising: constant + a for each token of the video."""

    constant_bytes: float
    bytes_per_token: float
    max_error: float

    def bytes(self, tokens: int) -> int:
        return max(0, round(self.constant_bytes + self.bytes_per_token * tokens))


class VideoLaw(Value):
    """Untiled decoding: constant + a for each pixel of a frame + b for each pixel of the video.

    Source: facts/memory.md; with the last term alone the error is up to 46 %, because much of a decoder works on a
    fixed number of frames.
    """

    constant_bytes: float
    bytes_per_pixel: float
    bytes_per_video_pixel: float
    max_error: float

    def bytes(self, height: int, width: int, num_frames: int) -> int:
        pixels = height * width
        video = pixels * num_frames
        return max(0, round(self.constant_bytes + self.bytes_per_pixel * pixels + self.bytes_per_video_pixel * video))


class TiledLaw(Value):
    """Tiled decoding: a tile's work + what has been decoded so far.

    constant + a for each pixel of a tile's video (a tile is the whole picture where that is smaller; all frames, where
    the VAE does not tile in time) + b for each pixel of the whole video.
    """

    tile_height: int
    tile_width: int
    tile_frames: int | None
    """None: a tile has all frames."""
    constant_bytes: float
    bytes_per_tile_pixel: float
    bytes_per_video_pixel: float
    max_error: float

    def features(self, height: int, width: int, num_frames: int) -> tuple[float, float, float]:
        return _tiled_features(
            (height, width, num_frames), (self.tile_height, self.tile_width, self.tile_frames or num_frames)
        )

    def bytes(self, height: int, width: int, num_frames: int) -> int:
        _, tile, video = self.features(height, width, num_frames)
        return max(
            0, round(self.constant_bytes + self.bytes_per_tile_pixel * tile + self.bytes_per_video_pixel * video)
        )


class TextLaw(Value):
    """Encoding: working memory at some numbers of tokens; between them a straight line (the curve bends upwards)."""

    tokens: tuple[int, ...]
    working_bytes: tuple[Bytes, ...]

    def bytes(self, tokens: int) -> int:
        return round(float(np.interp(tokens, self.tokens, self.working_bytes)))


def fit_tokens(tokens: list[int], working: list[int]) -> TokenLaw:
    """The law through two or more points."""
    (constant, slope), error = _least_squares([[1.0, float(n)] for n in tokens], working)
    return TokenLaw(constant_bytes=constant, bytes_per_token=slope, max_error=error)


def fit_video(sizes: list[tuple[int, int, int]], working: list[int]) -> VideoLaw:
    """The law through three or more points (height, width, num_frames) that differ in size and in length."""
    rows = [[1.0, float(h * w), float(h * w * f)] for h, w, f in sizes]
    (constant, pixel, video), error = _least_squares(rows, working)
    return VideoLaw(constant_bytes=constant, bytes_per_pixel=pixel, bytes_per_video_pixel=video, max_error=error)


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

"""What the simulator found out about a model: the sizes of its components, and how memory grows with what is asked for.

Frozen values and plain arithmetic, for the planner and the worker alike. `python -m app.runtime.simulate fit MODEL`
writes them to presets/models/coefficients/MODEL.toml, nobody by hand. Working memory is what a stage needs besides the
weights; `max_error` is the largest relative deviation among the points a law was fitted to, so 0.01 is one per cent.
All sizes are bytes in the number format in which the model was loaded for the fit.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import pairwise

from pydantic import Field, model_validator

from app.value import Bytes, Value


class Lattice(Value):
    """How pixels and frames become tokens of the denoiser."""

    spatial_scale: int = Field(ge=1)
    """Pixels per latent, each way."""
    temporal_scale: int = Field(ge=1)
    """Frames per latent frame, the first frame apart."""
    patch: int = Field(ge=1)
    """Latents per token, each way."""
    temporal_patch: int = Field(ge=1)

    def latent_frames(self, num_frames: int) -> int:
        return (num_frames - 1) // self.temporal_scale + 1

    def tokens(self, height: int, width: int, num_frames: int) -> int:
        side = self.spatial_scale * self.patch
        return -(-self.latent_frames(num_frames) // self.temporal_patch) * (height // side) * (width // side)


class TokenLaw(Value):
    """Denoising: constant + a for each token of the video."""

    constant_bytes: float
    bytes_per_token: float
    max_error: float = Field(ge=0)

    def bytes(self, tokens: int) -> int:
        return max(0, round(self.constant_bytes + self.bytes_per_token * tokens))


def filled(num_frames: int, window_frames: int | None) -> float:
    """Which share of a window of frames a video fills."""
    return 1.0 if window_frames is None else min(num_frames, window_frames) / window_frames


class VideoLaw(Value):
    """Untiled decoding: constant + a for each pixel of a frame + b for each pixel of the video.

    A VAE that decodes some frames at a time has less of the first work where the video is shorter than that.
    """

    window_frames: int | None = Field(None, ge=1)
    """Frames that it decodes at a time; None: the work on a frame does not depend on how many there are."""
    constant_bytes: float
    bytes_per_pixel: float
    bytes_per_video_pixel: float
    max_error: float = Field(ge=0)

    def bytes(self, height: int, width: int, num_frames: int) -> int:
        pixels = height * width
        video = pixels * num_frames
        worked_on = pixels * filled(num_frames, self.window_frames)
        return max(
            0, round(self.constant_bytes + self.bytes_per_pixel * worked_on + self.bytes_per_video_pixel * video)
        )


class TiledLaw(Value):
    """Tiled decoding: constant + a for each pixel of a tile's video + b for each pixel of the whole video.

    A tile is the whole picture where that is smaller, and has all frames where the VAE does not tile in time.
    """

    tile_height: int = Field(ge=1)
    tile_width: int = Field(ge=1)
    tile_frames: int | None = Field(None, ge=1)
    """None: a tile has all frames."""
    constant_bytes: float
    bytes_per_tile_pixel: float
    bytes_per_video_pixel: float
    max_error: float = Field(ge=0)

    def bytes(self, height: int, width: int, num_frames: int) -> int:
        frames = num_frames if self.tile_frames is None else min(num_frames, self.tile_frames)
        tile = min(height, self.tile_height) * min(width, self.tile_width) * frames
        video = height * width * num_frames
        return max(
            0, round(self.constant_bytes + self.bytes_per_tile_pixel * tile + self.bytes_per_video_pixel * video)
        )


class TextLaw(Value):
    """Encoding: working memory at some numbers of tokens, straight lines between them and the outer values outside."""

    tokens: tuple[int, ...] = Field(min_length=1)
    working_bytes: tuple[Bytes, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _paired(self) -> TextLaw:
        if len(self.tokens) != len(self.working_bytes) or any(a >= b for a, b in pairwise(self.tokens)):
            raise ValueError("tokens must rise and have one working_bytes each; fit the model again")
        return self

    def bytes(self, tokens: int) -> int:
        if tokens <= self.tokens[0]:
            return self.working_bytes[0]
        points = list(zip(self.tokens, self.working_bytes, strict=True))
        for (low, below), (high, above) in pairwise(points):
            if tokens <= high:
                return round(below + (above - below) * (tokens - low) / (high - low))
        return self.working_bytes[-1]


class Blocks(Value):
    """A list of equal layers, e.g. `transformer_blocks`."""

    path: str
    """Where it hangs below the component. With a dot in it, diffusers' block offloading needs `block_modules`."""
    count: int = Field(ge=1)
    bytes: Bytes
    """Of the largest one."""
    total_bytes: Bytes
    linear_parameters: int = Field(0, ge=0)
    """Weights of the largest one that quantization packs (`runtime.quantized.layers_of`); 0: none, or not known."""
    linear_rows: int = Field(0, ge=0)
    """Output features of those layers together."""
    largest_linear: int = Field(0, ge=0)
    """Weights of the largest of them."""


class ComponentFacts(Value):
    """What a component weighs, in the type it is loaded in."""

    class_name: str
    dtype: str
    parameters: int = Field(ge=0)
    weight_bytes: Bytes
    """Parameters and buffers."""
    fp32_bytes: Bytes
    """Part of them that stays float32 whatever type is asked for."""
    kept_in_fp32: tuple[str, ...] = ()
    tensors: int = Field(ge=0)
    blocks: tuple[Blocks, ...] = ()
    other_bytes: Bytes
    """What is in no block list."""
    largest_leaf_bytes: Bytes
    pinned_bytes: Bytes
    """RAM that it takes page-locked: each tensor rounded up to a power of two."""

    @cached_property  # asked for thousands of times in one table of plans
    def block_count(self) -> int:
        return sum(blocks.count for blocks in self.blocks)

    @cached_property
    def largest_block_bytes(self) -> int:
        return max((blocks.bytes for blocks in self.blocks), default=0)


class Coefficients(Value):
    """What the planner needs to predict memory without torch."""

    model: str
    """Its name in the simulator's catalogue; several model cards may share it."""
    pipeline: str
    sure: bool
    """False: some component's sizes are class defaults that were compared with nothing."""
    versions: dict[str, str]
    lattice: Lattice
    components: dict[str, ComponentFacts] = Field(min_length=1)
    text: dict[str, TextLaw]
    """By text encoder."""
    encode_bytes: Bytes
    """Working memory of the whole stage ENCODE at the default size and the longest prompt."""
    denoise_guided: TokenLaw | None = None
    """With guidance above 1 (some pipelines then run a batch of two); None: the model has no such argument."""
    denoise: TokenLaw
    decode: VideoLaw
    decode_tiled: TiledLaw | None = None
    """None: the VAE has no tiling, or it was left out."""

    @cached_property
    def fingerprint(self) -> str:
        """Tells one fit from another: name and a few digits of a hash over everything in it."""
        # what earlier runs taught stays true: these came later, and no law depends on them
        later = {
            "components": {"__all__": {"blocks": {"__all__": {"linear_parameters", "linear_rows", "largest_linear"}}}}
        }
        return f"{self.model}-{hashlib.sha256(self.model_dump_json(exclude=later).encode()).hexdigest()[:8]}"

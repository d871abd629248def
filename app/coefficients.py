"""What the simulator found out about a model: the sizes of its components, and how memory grows with what is asked for.

Frozen values and plain arithmetic, for the planner and the worker alike. `python -m app.runtime.simulate fit MODEL`
writes them to presets/models/coefficients/MODEL.toml, nobody by hand. Working memory is what a stage needs besides the
weights; `max_error` is a relative deviation, so 0.01 is one per cent.
All sizes are bytes in the number format in which the model was loaded for the fit.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Self

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


class TokenLine(Value):
    """A constant + so much for each token of the video (+ so much for each pair of them)."""

    constant_bytes: float
    bytes_per_token: float
    bytes_per_pair: float = 0.0
    """Where a mask says of each token which others it attends to."""

    def at(self, tokens: int) -> float:
        return self.constant_bytes + self.bytes_per_token * tokens + self.bytes_per_pair * tokens**2


class TokenLaw(TokenLine):
    """Denoising: the line of the blocks that work on the video."""

    short: TokenLine | None = None
    """The line of small videos, where blocks that work on the prompt take more; None: they never do."""
    max_error: float = Field(ge=0)
    """The largest among the points that it was fitted to."""

    def bytes(self, tokens: int) -> int:
        return max(0, round(max(line.at(tokens) for line in (self, self.short) if line is not None)))


class VideoGrid(Value):
    """Work on the frames of a video: what was simulated at some sizes and lengths, straight lines between them.

    No law of one formula holds for all VAEs: they decode some frames at a time, keep others, cut pictures into tiles.
    Beyond the outer points the last line goes on, but a shorter video than the shortest one takes what that takes.
    """

    pixels: tuple[int, ...] = Field(min_length=2)
    """Of a frame, rising."""
    num_frames: tuple[int, ...] = Field(min_length=2)
    """Rising."""
    working_bytes: tuple[tuple[Bytes, ...], ...]
    """One row for each of `num_frames`, with one entry for each of `pixels`."""
    max_error: float = Field(ge=0)
    """By how much too little it says at most, as a share, of the sizes that were simulated to check it."""

    @model_validator(mode="after")
    def _paired(self) -> Self:
        rising = all(a < b for axis in (self.pixels, self.num_frames) for a, b in pairwise(axis))
        if not rising or [len(row) for row in self.working_bytes] != [len(self.pixels)] * len(self.num_frames):
            raise ValueError("pixels and num_frames must rise and have one working_bytes each; fit the model again")
        return self

    def bytes(self, height: int, width: int, num_frames: int) -> int:
        of_lengths = [_along(self.pixels, row, height * width) for row in self.working_bytes]
        return max(0, round(_along(self.num_frames, of_lengths, max(num_frames, self.num_frames[0]))))


class TiledGrid(VideoGrid):
    """The same where the VAE works on tiles of a picture one after another.

    Where a picture is smaller than a tile, one way or both, the work is that on less than a tile: the lines run through
    the work on each pixel of a tile.
    """

    tile_height: int = Field(ge=1)
    tile_width: int = Field(ge=1)
    tile_pixels: tuple[int, ...]
    """Of the largest tile in a frame of each of `pixels`."""

    @model_validator(mode="after")
    def _tiles_paired(self) -> Self:
        if len(self.tile_pixels) != len(self.pixels) or min(self.tile_pixels) < 1:
            raise ValueError("each of pixels must have one tile_pixels; fit the model again")
        return self

    def bytes(self, height: int, width: int, num_frames: int) -> int:
        tile = min(height, self.tile_height) * min(width, self.tile_width)
        of_lengths = [
            tile
            * _along(self.pixels, [size / of for size, of in zip(row, self.tile_pixels, strict=True)], height * width)
            for row in self.working_bytes
        ]
        return max(0, round(_along(self.num_frames, of_lengths, max(num_frames, self.num_frames[0]))))


def _along(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """The value at a place, on straight lines through the points."""
    after = min(max(bisect_left(places, place), 1), len(places) - 1)
    low, high = places[after - 1], places[after]
    return values[after - 1] + (values[after] - values[after - 1]) * (place - low) / (high - low)


class TextLaw(Value):
    """Encoding: working memory at some numbers of tokens, straight lines between them and the outer values outside."""

    tokens: tuple[int, ...] = Field(min_length=1)
    working_bytes: tuple[Bytes, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _paired(self) -> Self:
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


class LayersLaw(Value):
    """Offloading by layers: what is on the card beside the working memory where memory peaks, as simulated.

    The largest layer works early, when there is little else. The peak is the largest of many sums of a layer and a part
    of the work, so what it has beside the work is convex: straight lines between simulated points are never too low.
    Only as long as the work is of one kind: with guidance other parts of it are there at once, so that has its own law.
    """

    working_bytes: tuple[Bytes, ...] = Field(min_length=1)
    """Rising."""
    brought_bytes: tuple[Bytes, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _paired(self) -> Self:
        rising = all(a < b for a, b in pairwise(self.working_bytes))
        if not rising or len(self.working_bytes) != len(self.brought_bytes):
            raise ValueError("working_bytes must rise and have one brought_bytes each; fit the model again")
        return self

    def bytes(self, working: float, at_rest: int) -> float:
        """Args: `at_rest`, what is brought where nothing else is there."""
        if working >= self.working_bytes[-1]:
            return self.brought_bytes[-1]
        return _along((0, *self.working_bytes), (at_rest, *self.brought_bytes), working)


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
    largest_table_bytes: Bytes = 0
    """The most that a module has beside its layers, e.g. a table of positions: it comes with all of it at once."""
    pinned_bytes: Bytes
    """RAM that it takes page-locked: each tensor rounded up to a power of two."""

    @cached_property  # asked for thousands of times in one table of plans
    def block_count(self) -> int:
        return sum(blocks.count for blocks in self.blocks)

    @cached_property
    def nested_bytes(self) -> int:
        """In lists below other parts of a component that has lists of its own: diffusers does not offload those."""
        own = [blocks for blocks in self.blocks if "." not in blocks.path]
        return sum(blocks.total_bytes for blocks in self.blocks if "." in blocks.path) if own else 0

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
    encode_bytes: dict[str, Bytes]
    """By component that encodes: working memory of its calls for the longest prompt (and, for its own encoder, the
    picture to start from), with what the components before it answered."""
    answer_bytes: Bytes
    """What they answer takes at most: it goes to the denoiser's card."""
    kept_bytes: Bytes = 0
    """What of it is left when decoding begins; the figures of `decode` contain it."""
    layers: dict[str, LayersLaw] = Field(default_factory=dict)
    """By component that encodes, or denoises without guidance."""
    layers_guided: dict[str, LayersLaw] = Field(default_factory=dict)
    """By denoiser, with guidance above 1; empty: the model has no such argument."""
    denoise_guided: TokenLaw | None = None
    """With guidance above 1 (some pipelines then run a batch of two); None: the model has no such argument."""
    denoise: TokenLaw
    decode: VideoGrid
    decode_tiled: TiledGrid | None = None
    """None: the VAE has no tiling, or it was left out."""
    encode_image: VideoGrid | None = None
    """The VAE's work on the picture that a video starts from; None: the model takes none."""
    encode_image_tiled: TiledGrid | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Tells one fit from another: name and a few digits of a hash over everything in it."""
        return f"{self.model}-{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]}"

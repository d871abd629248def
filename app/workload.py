"""What a request means to a model: its tokens, forwards and working memory, and what its components weigh as held."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from app.coefficients import Coefficients, ComponentFacts, LayersLaw, VideoGrid
from app.quantization import Quantization, Stored, itemsize, packed_bytes
from app.schema import Factors, Request

FRAME_COPIES: Final = 3
"""ASSUMED: float32 copies of all frames at once on the way from the VAE to the file."""
FP8_UNCAST: Final = {
    "CogVideoXTransformer3DModel": 0.145,
    "WanTransformer3DModel": 0.02,
    "Kandinsky5Transformer3DModel": 0,
}
"""Share of the 16-bit weights that layerwise casting leaves alone (norms, embeddings), from facts/memory.md's table."""
FP8_UNCAST_OTHERS: Final = 0.1
"""ASSUMED for transformers that are not in the table."""
FP16_KEPT: Final = {"T5EncoderModel": 0.2113, "UMT5EncoderModel": 0.1772}
"""Share of the weights that transformers keeps in float32 when it loads in float16, and only then (T5's `wo`): of the
XXL encoders, by their sizes in coefficients/cogvideox-2b.toml, which was fitted in float16, and cogvideox-5b.toml."""
FP8_PINNED: Final = 1.1
"""Page-locked rounding is worse for half-sized tensors: Kandinsky 5 Pro 1.27 instead of 1.17 (facts/memory.md)."""
UNPACKED_COPIES: Final[dict[Quantization, float]] = {
    "bitsandbytes_4bit": 1,
    "bitsandbytes_8bit": 1,
    "torchao_int8": 1,
    "gguf": 6,
}
"""Of the largest matrix, while it is unpacked. GGUF is unpacked in steps by plain operations in float32: ASSUMED."""
BATCHED_GUIDANCE: Final = ("CogVideoX", "LTX", "Mochi")
"""Pipelines (by the beginning of their name) that run guidance as one batch of two; the others run two forwards."""
EMBEDDED_GUIDANCE: Final = ("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline")
"""Pipelines whose guidance scale is an input of the model: one forward a step."""


class Task(NamedTuple):
    """What is asked of the model, in the numbers that all laws use."""

    coefficients: Coefficients
    pixels: int
    """Of a frame."""
    num_frames: int
    steps: int
    tokens: int
    forwards: int
    """Of the denoiser in one step: how often its weights are needed."""
    batch: int
    """Videos in one forward."""
    prompts: int
    """Texts to encode."""
    guided: bool
    """Whether the model runs with its guidance, where it has a choice."""
    denoise_bytes: int
    decode_bytes: int
    """The VAE's, the picture to start from included."""
    tiled_bytes: int | None
    factors: Factors | None = None
    """What earlier runs here taught; None: nothing."""
    stored: Mapping[str, Stored] = MappingProxyType({})
    """Components that lie quantized on the disk."""

    def layers_of(self, component: str) -> LayersLaw | None:
        """Its law where layers pass through, for this guidance; None: it was not fitted."""
        guided = self.coefficients.layers_guided.get(component) if self.guided else None
        return guided or self.coefficients.layers.get(component)

    @property
    def frame_bytes(self) -> int:
        """The finished frames, [num_frames, height, width, 3] in float32, in all their copies."""
        return self.num_frames * self.pixels * 3 * 4 * FRAME_COPIES


class Sizes(NamedTuple):
    """A component in the number format in which it is held."""

    weights: int
    block: int
    other: int
    leaf: int
    pinned: int
    unpacked: int = 0
    """Beside it while it works: the largest packed matrix, made an ordinary one."""


def task_of(
    coefficients: Coefficients,
    request: Request,
    factors: Factors | None = None,
    stored: Mapping[str, Stored] = MappingProxyType({}),
) -> Task:
    """The request in the model's own numbers. Working memory includes the fits' own largest error."""
    size = (request.height, request.width, request.num_frames)
    guided = request.guidance_scale > 1 and coefficients.denoise_guided is not None
    if coefficients.pipeline in EMBEDDED_GUIDANCE:
        passes = 1
    else:  # a guider object runs guidance whatever the request says
        passes = 2 if guided or coefficients.denoise_guided is None else 1
    batched = coefficients.pipeline.startswith(BATCHED_GUIDANCE)
    law = coefficients.denoise_guided if guided and coefficients.denoise_guided is not None else coefficients.denoise
    tokens, tiled = coefficients.lattice.tokens(*size), coefficients.decode_tiled
    one_tile = tiled is not None and request.height <= tiled.tile_height and request.width <= tiled.tile_width
    return Task(
        coefficients=coefficients,
        pixels=request.height * request.width,
        num_frames=request.num_frames,
        steps=request.num_inference_steps,
        tokens=tokens,
        forwards=1 if batched else passes,
        batch=passes if batched else 1,
        prompts=passes,
        guided=guided,
        denoise_bytes=round(law.bytes(tokens) * (1 + law.max_error)),
        decode_bytes=_of_frames(size, coefficients.decode, coefficients.encode_image),
        tiled_bytes=None  # nothing is saved where the picture is one tile
        if tiled is None or one_tile
        else _of_frames(size, tiled, coefficients.encode_image_tiled or coefficients.encode_image),
        factors=factors if factors is not None and factors.runs else None,
        stored=stored,
    )


def _of_frames(size: tuple[int, int, int], *grids: VideoGrid | None) -> int:
    """The VAE's work: encoding the first picture counts as decoding, because it must fit into the same place."""
    return max(round(grid.bytes(*size) * (1 + grid.max_error)) for grid in grids if grid is not None)


def sizes_of(
    facts: ComponentFacts,
    dtype: str,
    storage_dtype: str | None = None,
    quantization: Quantization | None = None,
    stored: Stored | None = None,
) -> Sizes:
    """Bytes of a component held in `dtype`, whatever it was fitted in; with 8-bit storage what is not kept shrinks.

    Packed, the matrices in its blocks shrink: by the method's own arithmetic, or to what its files hold.
    """
    if quantization is not None:
        return _packed_sizes(facts, dtype, quantization, stored)
    kept = _kept_bytes(facts, dtype)
    weights = stored_bytes(facts) + kept // 2 if dtype != "float32" else float32_bytes(facts)
    scale = weights / max(facts.weight_bytes, 1)
    pinned = facts.pinned_bytes * scale
    if storage_dtype is not None:
        uncast = FP8_UNCAST.get(facts.class_name, FP8_UNCAST_OTHERS)
        cast = kept + (weights - kept) * (1 + uncast) / 2
        pinned *= cast / max(weights, 1) * FP8_PINNED
        weights = round(cast)
    block = facts.largest_block_bytes * weights / max(facts.weight_bytes, 1)
    # in 8 bits, what is in no block is left alone for the most part, and a layer is cast up when it works
    other, leaf = facts.other_bytes * scale, facts.largest_leaf_bytes * scale
    if facts.class_name in FP16_KEPT and storage_dtype is None:
        # what float16 keeps in float32 is in the blocks: the embedding, largest of all layers, is as wide as asked for
        width = itemsize(dtype) / itemsize(facts.dtype)
        other = facts.other_bytes * width
        block = facts.largest_block_bytes * (weights - other) / max(facts.weight_bytes - facts.other_bytes, 1)
        leaf = facts.largest_leaf_bytes * (width if facts.largest_leaf_bytes <= facts.other_bytes else scale)
    return Sizes(weights, round(block), round(other), round(leaf), round(pinned))


def _packed_sizes(facts: ComponentFacts, dtype: str, method: Quantization, stored: Stored | None) -> Sizes:
    plain = sizes_of(facts, dtype)
    largest = max((blocks.largest_linear for blocks in facts.blocks), default=0)
    if stored is not None and stored.exact:
        weights = stored.bytes(dtype)
        largest = max(largest, stored.largest_parameters)
        other = min(plain.other, weights)
        shrunk = (weights - other) / max(plain.weights - plain.other, 1)
        block = plain.block * shrunk
    else:
        saved, block = 0.0, 0.0
        for blocks in facts.blocks:
            was = blocks.linear_parameters * itemsize(dtype)
            less = was - packed_bytes_of(method, blocks.linear_parameters, blocks.linear_rows, stored)
            saved += less * blocks.total_bytes / max(blocks.bytes, 1)
            block = max(block, blocks.bytes * plain.weights / max(facts.weight_bytes, 1) - less)
        weights, other = round(plain.weights - saved), plain.other
    pinned = max(weights, plain.pinned * weights / max(plain.weights, 1) * FP8_PINNED)
    unpacked = largest * UNPACKED_COPIES[method] * itemsize(dtype)
    return Sizes(weights, round(block), other, plain.leaf, round(pinned), round(unpacked))


def packed_bytes_of(method: Quantization, parameters: int, rows: int, stored: Stored | None) -> int:
    """Of matrices in memory; of a GGUF file that is not here yet by the bits that its name tells."""
    if method == "gguf":
        return round(parameters * (stored.bits if stored is not None else 16) / 8)
    return packed_bytes(method, parameters, rows)


def packable(facts: ComponentFacts) -> bool:
    """Whether quantization finds anything to pack in it."""
    return any(blocks.linear_parameters for blocks in facts.blocks)


def disk_bytes(facts: ComponentFacts, stored: Stored | None) -> int:
    """What is read to load it: in 16 bit, unless it lies there quantized."""
    return stored.on_disk_bytes if stored is not None and stored.on_disk_bytes else stored_bytes(facts)


def _kept_bytes(facts: ComponentFacts, dtype: str) -> int:
    """Bytes in float32 of what stays float32 although the rest is loaded in 16 bit."""
    if facts.class_name in FP16_KEPT:
        return round(2 * FP16_KEPT[facts.class_name] * stored_bytes(facts)) if dtype == "float16" else 0
    return facts.fp32_bytes


def stored_bytes(facts: ComponentFacts) -> int:
    """All of it in 16 bit, as on the disk."""
    if facts.dtype == "float32":
        return -(-facts.weight_bytes // 2)
    return facts.weight_bytes - facts.fp32_bytes // 2


def download_bytes(coefficients: Coefficients, stored: Mapping[str, Stored] = MappingProxyType({})) -> int:
    """About what is fetched for a model that is not here: 16 bit at least, GGUF files by the bits of their name."""
    components = coefficients.components
    needed = sum(stored_bytes(facts) for name, facts in components.items() if name not in stored)
    return needed + sum(
        round(components[name].parameters * one.bits / 8)
        for name, one in stored.items()
        if not one.exact and name in components
    )


def float32_bytes(facts: ComponentFacts) -> int:
    """In 32 bit: twice of all that is not kept in it anyway."""
    return facts.weight_bytes if facts.dtype == "float32" else 2 * facts.weight_bytes - facts.fp32_bytes

"""Coefficients of real models, built from the numbers in facts/memory.md (simulated on 2026-11-30, checked on no card).

What the facts do not state is derived here and said so; the catalogue's own files are written by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.coefficients import (
    Blocks,
    Coefficients,
    ComponentFacts,
    Lattice,
    TextLaw,
    TiledGrid,
    TokenLaw,
    VideoGrid,
)
from app.schema import GIB, Defaults, ModelCard
from app.schema import Lattice as Sizes
from tests import values

KIB, MIB = 1024, 1024**2


def gib(size: float) -> int:
    return round(size * GIB)


def facts(
    weights: float, parameters: float, pinned: float, leaf: float, blocks: tuple[Blocks, ...] = (), **more: Any
) -> ComponentFacts:
    """Sizes in GiB, parameters in 1e9, `pinned` as the factor of page-locked rounding."""
    fields: dict[str, Any] = {
        "class_name": "A",
        "dtype": "bfloat16",
        "parameters": round(parameters * 1e9),
        "weight_bytes": gib(weights),
        "fp32_bytes": 0,
        "tensors": 1000,
        "blocks": blocks,
        "other_bytes": gib(weights) - sum(block.total_bytes for block in blocks),
        "largest_leaf_bytes": gib(leaf),
        "pinned_bytes": gib(weights * pinned),
    }
    return ComponentFacts(**{**fields, **more})


def listed(path: str, count: int, weights: float, rest: float) -> tuple[Blocks, ...]:
    """`count` equal blocks that hold all of `weights` but `rest` (GiB)."""
    total = gib(weights - rest)
    return (Blocks(path=path, count=count, bytes=total // count, total_bytes=total // count * count),)


# Text encoders: weights, leaf = the token embedding (from the classes' configs), pinned overhead from the facts
QWEN = facts(15.49, 8.29, 1.89, 1.02, listed("model.language_model.layers", 28, 15.49, 3.3))
CLIP_L = facts(0.24, 0.123, 1.3, 0.07)
T5_XXL = facts(8.87, 4.76, 1.38, 0.25, listed("encoder.block", 24, 8.87, 0.25))
UMT5_XXL = facts(10.58, 5.68, 1.32, 1.96, listed("encoder.block", 24, 10.58, 1.96))
VAE_HUNYUAN = facts(0.47, 0.25, 1.2, 0.03)
VAE_WAN = facts(0.48, 0.127, 1.2, 0.03, dtype="float32")
VAE_COGVIDEOX = facts(0.41, 0.22, 1.2, 0.03)
TEXT = TextLaw(tokens=(128, 512), working_bytes=(70 * MIB, gib(0.28)))


def grid(law: Callable[[int, int], float], max_error: float) -> dict[str, Any]:
    """Fields of a `VideoGrid` from a law of pixels and num_frames."""
    pixels, frames = (90_000, 400_000, 1_000_000), (5, 17, 61, 121)
    return {
        "pixels": pixels,
        "num_frames": frames,
        "working_bytes": tuple(tuple(round(law(p, n)) for p in pixels) for n in frames),
        "max_error": max_error,
    }


# (512x768x121: 21.50 untiled, 3.89 tiled); the laws' shape from coeffs.json of the prototype
DECODE_HUNYUAN = VideoGrid(**grid(lambda p, n: 20_421_521 + 57_620.6 * p + 8.424 * p * n, 0.0005))
TILE: dict[str, Any] = {"tile_height": 256, "tile_width": 256, "tile_pixels": (256**2,) * 3}
TILED_HUNYUAN = TiledGrid(**TILE, **grid(lambda p, n: n * (470 * 256**2 + 9 * p), 0.02))
DECODE_WAN = VideoGrid(**grid(lambda p, n: 1_963_500 + 19_458.6 * p + 12.44 * p * n, 0.0005))
TILED_WAN = TiledGrid(**TILE, **grid(lambda p, n: n * (115 * 256**2 + 12 * p), 0.02))


def coefficients(
    transformer: ComponentFacts,
    law: TokenLaw,
    encoders: dict[str, ComponentFacts],
    vae: ComponentFacts = VAE_HUNYUAN,
    **changes: Any,
) -> Coefficients:
    fields: dict[str, Any] = {
        "model": "from the facts",
        "pipeline": "Kandinsky5T2VPipeline",
        "sure": True,
        "versions": {"diffusers": "0.42.1"},
        "lattice": Lattice(spatial_scale=8, temporal_scale=4, patch=2, temporal_patch=1),
        "components": {**encoders, "transformer": transformer, "vae": vae},
        "text": dict.fromkeys(encoders, TEXT),
        "encode_bytes": dict.fromkeys(encoders, gib(0.28)),
        "answer_bytes": 64 * MIB,
        "denoise": law,
        "denoise_guided": law,
        "decode": DECODE_HUNYUAN,
        "decode_tiled": TILED_HUNYUAN,
    }
    return Coefficients(**{**fields, **changes})


def _law(constant_mib: float, kib_a_token: float) -> TokenLaw:
    return TokenLaw(constant_bytes=constant_mib * MIB, bytes_per_token=kib_a_token * KIB, max_error=0.012)


# fp32 shares of Kandinsky from weights and parameters: 4 x + 2 (p - x) bytes
KANDINSKY_LITE = coefficients(
    facts(
        4.277, 2.01, 1.24, 0.025, listed("visual_transformer_blocks", 34, 4.277, 0.02),
        fp32_bytes=gib(1.065), class_name="Kandinsky5Transformer3DModel",
    ),
    _law(3.2, 46.27),
    {"text_encoder": QWEN, "text_encoder_2": CLIP_L},
)  # fmt: skip
KANDINSKY_PRO = coefficients(
    facts(
        40.41, 19.31, 1.17, 0.125, listed("visual_transformer_blocks", 63, 40.41, 0.081),
        fp32_bytes=gib(8.88), class_name="Kandinsky5Transformer3DModel",
    ),
    _law(4.9, 105.24),
    {"text_encoder": QWEN, "text_encoder_2": CLIP_L},
)  # fmt: skip
WAN_14B = coefficients(
    facts(26.67, 14.29, 1.53, 0.132, listed("blocks", 40, 26.67, 0.486), class_name="WanTransformer3DModel"),
    _law(9.3, 111.16),
    {"text_encoder": UMT5_XXL},
    vae=VAE_WAN,
    pipeline="WanPipeline",
    decode=DECODE_WAN,
    decode_tiled=TILED_WAN,
)
COGVIDEOX_5B = coefficients(
    facts(
        10.375, 5.57, 1.78, 0.07, listed("transformer_blocks", 42, 10.375, 0.04),
        class_name="CogVideoXTransformer3DModel",
    ),
    _law(14.8, 78.45),  # of one video; guidance runs two at once
    {"text_encoder": T5_XXL},
    vae=VAE_COGVIDEOX,
    pipeline="CogVideoXPipeline",
    denoise_guided=_law(23, 156.66),
)  # fmt: skip


def card_of(found: Coefficients, height: int, width: int, num_frames: int, **changes: Any) -> ModelCard:
    """A card with these coefficients and a default size."""
    fields: dict[str, Any] = {
        "pipeline": found.pipeline,
        "coefficients": found,
        "defaults": Defaults(
            height=height, width=width, num_frames=num_frames, fps=16, num_inference_steps=50, guidance_scale=5.0
        ),
        "lattice": Sizes(spatial_multiple=16, temporal_multiple=4, min_side=256, max_side=1280, max_num_frames=241),
        "timeout_seconds": 8 * 3600.0,
    }
    return values.card(**{**fields, **changes})


LITE = card_of(KANDINSKY_LITE, 512, 768, 121)
PRO = card_of(KANDINSKY_PRO, 512, 768, 121)
WAN = card_of(WAN_14B, 480, 832, 81)
COGVIDEOX = card_of(COGVIDEOX_5B, 480, 720, 49)

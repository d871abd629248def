"""Fit a model's memory laws from a few simulated runs, for its card in the catalogue.

    python -m app.runtime.simulate fit wan2.1-t2v-1.3b --out presets/models/coefficients/wan2.1-t2v-1.3b.toml

Everything is measured on whole pipeline runs, resident on one simulated GPU without limit, minus the weights: so
latents, embeddings, guidance and the scheduler's history are in the figures. Nothing is written by hand.

Not fitted: encoding a picture (image-to-video models; it is in `encode_bytes` at one size only).
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import torch

from app.coefficients import Coefficients, Lattice, TextLaw, TiledLaw, TokenLaw, VideoLaw
from app.errors import ModelNotUsable
from app.runtime.simulate import laws
from app.runtime.simulate.families import Family
from app.runtime.simulate.inspection import inspect_component
from app.runtime.simulate.run import Session, versions
from app.runtime.simulate.values import GpuSpec, MachineSpec, Shape
from app.schema import Stage

_DEVICE = "cuda:0"
_LEAST_POINTS = 4
"""For a law of three coefficients whose error is to be seen."""


def fit(model: str | Path | Family, *, tiled: bool = True) -> Coefficients:
    """Fit all laws of a model. Takes one to ten minutes; most of it is tiled decoding.

    Raises:
        ModelNotUsable: no such model.
    """
    # the caching allocator leaves small rests unsplit, which would put jitter of up to 1 MiB a tensor into the laws
    machine = MachineSpec(gpus=(GpuSpec(),), caching_allocator=False)
    with Session(model, machine=machine) as session:
        facts = {
            name: inspect_component(module, _loaded_dtype(session, name))
            for name, module in session.pipe.components.items()
            if isinstance(module, torch.nn.Module)
        }
        lattice = lattice_of(session.pipe)
        weights = session.machine.gpus[0].ledger.total
        guided, plain, encode = _fit_denoising(session, lattice, weights)
        text = _fit_text(session, lattice)
        decode = _fit_decoding(session, lattice, weights)
        return Coefficients(
            model=session.family.model,
            pipeline=session.family.pipeline,
            sure=session.family.sure,
            versions=versions(),
            lattice=lattice,
            components=facts,
            text=text,
            encode_bytes=encode,
            denoise_guided=guided,
            denoise=plain,
            decode=decode,
            decode_tiled=_fit_tiled(session, lattice, weights) if tiled else None,
        )


def lattice_of(pipe: Any) -> Lattice:
    """Scales of a pipeline's VAE and patches of its denoiser, by the names that diffusers' classes use for them."""
    vae, config = pipe.vae, pipe.transformer.config
    names = ("scale_factor_{}", "{}_compression_ratio", "vae_scale_factor_{}", "vae_{}_compression_ratio")
    spatial = _first(vae.config, vae, pipe, names=tuple(name.format("spatial") for name in names))
    temporal = _first(vae.config, vae, pipe, names=tuple(name.format("temporal") for name in names))
    patch = config.get("patch_size", 1)
    if isinstance(patch, list | tuple):
        temporal_patch, patch = patch[0], patch[1]
    else:
        temporal_patch = config.get("patch_size_t") or 1
    return Lattice(spatial_scale=spatial, temporal_scale=temporal, patch=patch, temporal_patch=temporal_patch)


def _first(*owners: Any, names: tuple[str, ...]) -> int:
    for owner, name in itertools.product(owners, names):
        value = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        if value is not None:
            return int(value)
    raise ValueError(f"None of {', '.join(names)} is known of this pipeline")


def _loaded_dtype(session: Session, name: str) -> torch.dtype:
    return getattr(torch, session.setup.of(name).dtype or session.family.parts[name].dtype)  # type: ignore[no-any-return]


def snap(session: Session, lattice: Lattice, scale: float, length: float) -> Shape:
    """The default size and length times a factor, on the model's lattice."""
    family = session.family
    side = math.lcm(lattice.spatial_scale * lattice.patch, 32)
    height = max(1, round(family.height * scale / side)) * side
    width = max(1, round(family.width * scale / side)) * side
    step = lattice.temporal_scale * lattice.temporal_patch
    frames = max(1, round((family.num_frames - 1) * length / step)) * step + 1
    return Shape(height=height, width=width, num_frames=frames)


def _fit_denoising(session: Session, lattice: Lattice, weights: int) -> tuple[TokenLaw | None, TokenLaw, int]:
    shapes = [snap(session, lattice, *factors) for factors in ((0.6, 0.4), (1, 0.5), (1, 1), (1.4, 1))]
    tokens = [lattice.tokens(s.height, s.width, s.num_frames) for s in shapes]
    encode = 0
    found: dict[bool, TokenLaw] = {}
    for guided in (False, True):
        if guided and session.family.guidance_scale is None:
            continue
        scale = max(session.family.guidance_scale or 0, 1.5) if guided else 1.0
        working = []
        for shape in shapes:
            result = session.run(shape.model_copy(update={"guidance_scale": scale}), "latent")
            working.append(result.peak(_DEVICE, Stage.DENOISE) - weights)
            encode = max(encode, result.peak(_DEVICE, Stage.ENCODE) - weights)
        found[guided] = laws.fit_tokens(tokens, working)
    return found.get(True), found[False], encode


def _fit_text(session: Session, lattice: Lattice) -> dict[str, TextLaw]:
    """Working memory of each text encoder's own calls at a quarter, half and all of its tokens."""
    shape = snap(session, lattice, 0, 0)
    points: dict[str, dict[int, int]] = {}
    tokenizers = [getattr(session.pipe, name) for name in session.family.tokenizers]
    full = [tokenizer.tokens for tokenizer in tokenizers]
    for share in (0.25, 0.5, 1.0):
        for tokenizer, most in zip(tokenizers, full, strict=True):
            tokenizer.tokens = max(2, round(most * share))
        for moment in session.run(shape, "latent").timeline:
            if moment.component.startswith("text_encoder"):
                second = moment.component.endswith("_2") and len(tokenizers) > 1
                tokens = tokenizers[1 if second else 0].tokens
                working = moment.peak_bytes[_DEVICE] - moment.start_bytes[_DEVICE]
                of_one = points.setdefault(moment.component, {})
                of_one[tokens] = max(of_one.get(tokens, 0), working)
    return {
        name: TextLaw(tokens=tuple(sorted(p)), working_bytes=tuple(p[n] for n in sorted(p)))
        for name, p in points.items()
    }


def _fit_decoding(session: Session, lattice: Lattice, weights: int) -> VideoLaw:
    factors = ((0.6, 0.25), (1, 0.25), (1, 0.5), (0.6, 1), (1.4, 0.5), (0.8, 0))
    shapes = [snap(session, lattice, *f) for f in factors]
    sizes, working = [], []
    for shape in shapes:
        try:
            working.append(_decoding(session, shape) - weights)
        except RuntimeError:  # CogVideoX cuts large convolutions into pieces too short for their kernel
            continue
        sizes.append((shape.height, shape.width, shape.num_frames))
    if len(sizes) < _LEAST_POINTS:
        raise ModelNotUsable(
            f"{session.family.model} cannot decode at {len(shapes) - len(sizes)} of {len(shapes)} sizes."
        )
    # whether it decodes some frames at a time differs by VAE: the data say
    frames = getattr(session.pipe.vae, "tile_sample_min_num_frames", None)
    step = lattice.temporal_scale * lattice.temporal_patch
    windows = [None, *(count * step + 1 for count in (2, 3, 4, 6)), *([] if frames is None else [frames + 1])]
    return min((laws.fit_video(sizes, working, window) for window in windows), key=lambda law: law.max_error)


def _fit_tiled(session: Session, lattice: Lattice, weights: int) -> TiledLaw | None:
    vae = session.pipe.vae
    tile = tile_of(vae)
    if tile is None:
        return None
    shapes = [snap(session, lattice, *f) for f in ((1, 0.25), (1, 0.5), (1, 1), (1.4, 0.5))]
    sizes = [(s.height, s.width, s.num_frames) for s in shapes]
    vae.enable_tiling()
    try:
        working = [_decoding(session, shape) - weights for shape in shapes]
    finally:
        vae.disable_tiling()
    # whether a tile's work grows with the video's length differs by VAE (tiles in time, frame batches): the data say
    of_some_frames = laws.fit_tiled(sizes, working, (*tile, 1))
    of_all_frames = laws.fit_tiled(sizes, working, (*tile, None))
    return min(of_some_frames, of_all_frames, key=lambda law: law.max_error)


def tile_of(vae: Any) -> tuple[int, int] | None:
    """Height and width in pixels of a VAE's tiles; None where it has no tiling."""
    if not hasattr(vae, "enable_tiling") or not hasattr(vae, "tile_sample_min_height"):
        return None
    return int(vae.tile_sample_min_height), int(vae.tile_sample_min_width)


def _decoding(session: Session, shape: Shape) -> int:
    # two steps: the schedule of LTX-Video stretches its last one, which is no number where there is only one
    quick = shape.model_copy(update={"num_inference_steps": 2, "guidance_scale": 1.0})
    return session.run(quick).peak(_DEVICE, Stage.DECODE)

"""Fit a model's memory laws from a few simulated runs, for its card in the catalogue.

    python -m app.runtime.simulate fit wan2.1-t2v-1.3b --out presets/models/coefficients/wan2.1-t2v-1.3b.toml

Everything is measured on whole pipeline runs on one simulated GPU without limit, minus the weights that rest there: so
latents, embeddings, guidance and the scheduler's history are in the figures. All is resident, but for what offloading
by layers brings. Nothing is written by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from app.coefficients import Coefficients, Lattice, LayersLaw, TextLaw, TiledGrid, TokenLaw, VideoGrid
from app.errors import ModelNotUsable
from app.plans import Stage, stage_of
from app.runtime.simulate import families, laws
from app.runtime.simulate.families import Family
from app.runtime.simulate.inspection import inspect_component
from app.runtime.simulate.run import Session, versions
from app.runtime.simulate.values import ComponentSetup, GpuSpec, Hold, MachineSpec, Setup, Shape

_DEVICE = "cuda:0"
# the caching allocator leaves small rests unsplit, which would put jitter of up to 1 MiB a tensor into the laws
_MACHINE = MachineSpec(gpus=(GpuSpec(),), caching_allocator=False)
_LEAST_SIZES = 2
"""For a line."""


def fit(model: str | Path | Family, *, tiled: bool = True) -> Coefficients:
    """Fit all that a model's card needs. Takes two to ten minutes; most of it is tiled decoding.

    Raises:
        ModelNotUsable: no such model.
    """
    family = model if isinstance(model, Family) else families.find(model)
    quick = fit_quick(family)
    with Session(family, machine=_MACHINE) as session:
        facts = {
            name: inspect_component(module, _loaded_dtype(session, name))
            for name, module in session.pipe.components.items()
            if isinstance(module, torch.nn.Module)
        }
        lattice = lattice_of(session.pipe)
        weights = session.machine.gpus[0].ledger.total
        guided, plain = _fit_denoising(session, lattice, weights)
        text = _fit_text(session, lattice)
        decode, encode_image = _fit_frames(session, lattice, weights, _plain)
        tile = tile_of(session.pipe.vae) if tiled else None
        decode_tiled, encode_tiled = None, None
        if tile is not None:
            session.pipe.vae.enable_tiling()
            decode_tiled, encode_tiled = _fit_frames(session, lattice, weights, _in_tiles(*tile))
        return Coefficients(
            model=family.model,
            pipeline=family.pipeline,
            sure=family.sure,
            versions=versions(),
            lattice=lattice,
            components=facts,
            text=text,
            **quick,
            denoise_guided=guided,
            denoise=plain,
            decode=decode,
            decode_tiled=decode_tiled,
            encode_image=encode_image,
            encode_image_tiled=encode_tiled,
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


def _fit_denoising(session: Session, lattice: Lattice, weights: int) -> tuple[TokenLaw | None, TokenLaw]:
    shapes = [snap(session, lattice, *factors) for factors in ((0.6, 0.4), (1, 0.5), (1, 1), (1.2, 1), (1.6, 1))]
    tokens = [lattice.tokens(s.height, s.width, s.num_frames) for s in shapes]
    found: dict[bool, TokenLaw] = {}
    for guided, scale in _guidance_scales(session).items():
        runs = [session.run(shape.model_copy(update={"guidance_scale": scale}), "latent") for shape in shapes]
        found[guided] = laws.fit_tokens(tokens, [run.peak(_DEVICE, Stage.DENOISE) - weights for run in runs])
    return found.get(True), found[False]


def _guidance_scales(session: Session) -> dict[bool, float]:
    """Without guidance, and with it where the model knows it."""
    usual = session.family.guidance_scale
    return {False: 1.0} if usual is None else {False: 1.0, True: max(usual, 1.5)}


class _Seen(NamedTuple):
    """Of the components that encode and denoise, beside what rests on the card."""

    encoding: dict[str, int]
    """Highest point of each encoder's own calls. What a picture to start from adds, noise and tables of positions
    depend on the size: the first is fitted apart, and the others are in the denoiser's law."""
    answer: int
    kept: int
    denoising: dict[bool, list[int]]
    """With guidance and without: the smallest size, half the sides and a quarter of the frames, the usual size."""


def _see(family: Family, setup: Setup) -> _Seen:
    with Session(family, setup, _MACHINE) as session:
        lattice = lattice_of(session.pipe)
        rests = session.machine.gpus[0].ledger.total
        smallest = snap(session, lattice, 0, 0)
        encoding: dict[str, int] = {}
        answer = kept = 0
        denoising: dict[bool, list[int]] = {}
        for guided, scale in _guidance_scales(session).items():
            result = session.run(smallest.model_copy(update={"guidance_scale": scale}), "latent")
            denoising[guided] = [result.peak(_DEVICE, Stage.DENOISE) - rests]
            for of in result.timeline:
                left = of.end_bytes[_DEVICE] - rests
                if of.stage is Stage.ENCODE and of.component != "vae":
                    encoding[of.component] = max(encoding.get(of.component, 0), of.peak_bytes[_DEVICE] - rests)
                    answer = max(answer, left)
                elif of.stage is Stage.DENOISE and not guided:
                    kept = left
            denoising[guided] += _denoising(session, scale, ((0.5, 0.25), (1, 1)))
        return _Seen(encoding, answer, kept, denoising)


def _denoising(session: Session, scale: float, sizes: tuple[tuple[float, float], ...]) -> list[int]:
    """Peaks beside what rests on the card, with that guidance, at parts of the usual sides and length."""
    rests = session.machine.gpus[0].ledger.total
    found = []
    for factors in sizes:
        shape = snap(session, lattice_of(session.pipe), *factors).model_copy(update={"guidance_scale": scale})
        found.append(session.run(shape, "latent").peak(_DEVICE, Stage.DENOISE) - rests)
    return found


_BEND = 0.1
"""Of the work at the second largest size. Where layers bring that much less at the largest one, a straight line between
the two is too high by up to as much, and sizes between are simulated too."""


def _bends(whole: list[int], layered: list[int]) -> bool:
    (second, brought), (_, last) = [(size, most - size) for size, most in zip(whole, layered, strict=True)][-2:]
    return brought - last > _BEND * second


def fit_quick(model: str | Path | Family) -> dict[str, Any]:
    """Fields of `Coefficients` that take seconds to fit: what encoding takes, and offloading by layers.

    Raises:
        ModelNotUsable: no such model.
    """
    family = model if isinstance(model, Family) else families.find(model)
    in_layers = ComponentSetup(hold=Hold.LEAF, use_stream=True)
    held = {name: in_layers if stage_of(name) is not Stage.DECODE else ComponentSetup() for name in family.parts}
    setups = (Setup(), Setup(components=held))
    whole, layered = (_see(family, setup) for setup in setups)
    if any(_bends(whole.denoising[guided], layered.denoising[guided]) for guided in whole.denoising):
        for seen, setup in zip((whole, layered), setups, strict=True):
            with Session(family, setup, _MACHINE) as session:
                for guided, scale in _guidance_scales(session).items():
                    seen.denoising[guided].extend(_denoising(session, scale, ((0.5, 0.5), (0.75, 0.5))))
    # one law each: guided and plain work of one size differ in what else is there when memory peaks
    encoding = {name: _layers([size], [layered.encoding[name]]) for name, size in whole.encoding.items()}
    found = {guided: _layers(whole.denoising[guided], layered.denoising[guided]) for guided in whole.denoising}
    denoisers = [name for name in family.parts if stage_of(name) is Stage.DENOISE]
    return {
        "encode_bytes": whole.encoding,
        "answer_bytes": whole.answer,
        "kept_bytes": whole.kept,
        "layers": encoding | dict.fromkeys(denoisers, found[False]),
        "layers_guided": dict.fromkeys(denoisers, found[True]) if True in found else {},
    }


def _layers(whole: list[int], layered: list[int]) -> LayersLaw:
    """From peaks at the same sizes, all on the card and in layers."""
    points: dict[int, int] = {}
    for size, most in zip(whole, layered, strict=True):
        points[size] = max(points.get(size, 0), most - size)
    return LayersLaw(working_bytes=tuple(sorted(points)), brought_bytes=tuple(points[size] for size in sorted(points)))


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


_SIDES = (0.5, 1.0, 1.6)
"""Of the default size: from a quarter of its pixels to 720p where 480p is usual."""
_STEPS = (1, 2, 4, 5)
"""Short videos by steps of the lattice: VAEs that work on some frames at a time change there."""
_LENGTHS = (0.5, 1.0)
"""Longer ones by the default length."""
_CHECKS = ((1.0, 0.3), (0.8, 0.8), (1.3, 0.7))
"""Sizes and lengths between, to see how far straight lines are off."""


_Grid = TypeVar("_Grid", bound=VideoGrid)
_Make = Callable[[dict[str, Any], list[Shape]], _Grid]
"""The fields of a `VideoGrid` and its sizes -> the grid."""


def _plain(fields: dict[str, Any], _sizes: list[Shape]) -> VideoGrid:
    return VideoGrid(**fields)


def _in_tiles(height: int, width: int) -> _Make[TiledGrid]:
    def make(fields: dict[str, Any], sizes: list[Shape]) -> TiledGrid:
        pixels = tuple(min(size.height, height) * min(size.width, width) for size in sizes)
        return TiledGrid(**fields, tile_height=height, tile_width=width, tile_pixels=pixels)

    return make


def _fit_frames(session: Session, lattice: Lattice, weights: int, make: _Make[_Grid]) -> tuple[_Grid, _Grid | None]:
    """The VAE's work at a grid of sizes and lengths, as it is set: decoding, and encoding a first picture."""
    step = lattice.temporal_scale * lattice.temporal_patch
    usual = snap(session, lattice, 1, 1)
    lengths = {count * step + 1 for count in _STEPS} | {
        snap(session, lattice, 1, share).num_frames for share in _LENGTHS
    }
    frames = sorted(length for length in lengths if length <= usual.num_frames)
    sizes: list[Shape] = []
    rows: list[list[dict[Stage, int]]] = [[] for _ in frames]
    for side in _SIDES:
        size = snap(session, lattice, side, 1)
        try:
            column = [_work(session, size.model_copy(update={"num_frames": n}), weights) for n in frames]
        except RuntimeError as error:
            # CogVideoX cuts large convolutions into pieces too short for their kernel: there is no such decoding
            if "Kernel size can't be greater" not in str(error):
                raise
            continue
        sizes.append(size)
        for row, found in zip(rows, column, strict=True):
            row.append(found)
    if len(sizes) < _LEAST_SIZES:
        raise ModelNotUsable(f"{session.family.model} can decode at {len(sizes)} of {len(_SIDES)} sizes only.")
    largest = sizes[-1].height * sizes[-1].width
    checks = [
        shape for shape in (snap(session, lattice, *at) for at in _CHECKS) if shape.height * shape.width <= largest
    ]
    seen = [_work(session, shape, weights) for shape in checks]

    def grid(stage: Stage) -> _Grid:
        fields = {
            "pixels": tuple(size.height * size.width for size in sizes),
            "num_frames": tuple(frames),
            "working_bytes": tuple(tuple(max(0, of[stage]) for of in row) for row in rows),
            "max_error": 0.0,
        }
        exact = make(fields, sizes)
        shares = [
            of[stage] / exact.bytes(s.height, s.width, s.num_frames) - 1 for s, of in zip(checks, seen, strict=True)
        ]
        return exact.model_copy(update={"max_error": max(0.0, *shares)})

    return grid(Stage.DECODE), grid(Stage.ENCODE) if session.family.image else None


def _work(session: Session, shape: Shape, weights: int) -> dict[Stage, int]:
    # two steps: the schedule of LTX-Video stretches its last one, which is no number where there is only one
    quick = shape.model_copy(update={"num_inference_steps": 2, "guidance_scale": 1.0})
    result = session.run(quick)
    return {stage: result.peak(_DEVICE, stage) - weights for stage in (Stage.ENCODE, Stage.DECODE)}


def tile_of(vae: Any) -> tuple[int, int] | None:
    """Height and width in pixels of a VAE's tiles; None where it has no tiling."""
    if not hasattr(vae, "enable_tiling") or not hasattr(vae, "tile_sample_min_height"):
        return None
    return int(vae.tile_sample_min_height), int(vae.tile_sample_min_width)

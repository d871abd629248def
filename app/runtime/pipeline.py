"""ModelCard -> diffusers pipeline: safetensors only, never a repository's own code; and one call of it, staged.

The stock pipeline's `__call__` runs unchanged, so its frames are those of a ten-line script (`pocketreel bench
overhead` compares them). Stages are seen from outside: the first forward of the denoiser, the first `vae.decode`.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import hf_hub_download

from app.errors import InvalidOutput, ModelNotUsable
from app.quantization import hub_file, method_of
from app.runtime import placement, quantized
from app.runtime.checkpoint_files import load_empty
from app.runtime.control import Control
from app.runtime.memory import StageClock, is_ram_error
from app.runtime.resume import Keeper
from app.schema import Argument, ModelCard, Placement, Plan, Request, Stage, Strategy

DENOISERS = ("transformer", "transformer_2", "unet")

Frames = npt.NDArray[np.float32]
"""[num_frames, height, width, 3], RGB from 0 to 1."""
Pixels = npt.NDArray[np.uint8]
"""The same as 8-bit RGB, what a video file holds."""


def load(card: ModelCard, plan: Plan) -> Any:
    """The card's pipeline with its weights, on the CPU, in the plan's dtype.

    Raises:
        ModelNotUsable: no safetensors weights, a pipeline class diffusers doesn't have, a broken or missing file, a
            package that quantized weights need and that is not there.
    """
    found = getattr(diffusers, card.pipeline, None)
    if not (isinstance(found, type) and issubclass(found, DiffusionPipeline)):
        raise ModelNotUsable(
            f"{card.title} wants the pipeline {card.pipeline}, which diffusers {diffusers.__version__} does not have. "
            "Choose another model, or update Pocketreel."
        )
    cls: Any = found
    source = str(card.folder) if card.folder is not None else card.repo_id
    try:
        if card.folder is None and (card.gguf or any(_needs_folder(one) for one in plan.placements)):
            # what a GGUF file replaces is not downloaded: given parts are left out, whatever they are
            given = dict.fromkeys(card.gguf, True)
            source = cls.download(
                card.repo_id, revision=card.revision, use_safetensors=True, trust_remote_code=False, **given
            )
            _fetch_configs(card)
        parts = _parts(card, plan, Path(str(source))) if Path(str(source)).is_dir() else {}
        # dtype must be given: without it text encoders come as fp16 and the rest as fp32
        pipe = cls.from_pretrained(
            source,
            revision=card.revision,
            dtype=_dtypes(plan),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=card.folder is not None,
            **parts,
        )
        return attending_in_full(pipe)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or is_ram_error(error):
            raise
        where = f"The model folder {card.folder}" if card.folder is not None else f"The model {card.repo_id} of the Hub"
        raise ModelNotUsable(
            f"{where} cannot be loaded: {_first_line(error)} "
            "Check that it is a complete diffusers folder with .safetensors weights"
            + ("." if card.folder is not None else f", that you are online{_access_words(card)}.")
        ) from error


def attending_in_full(pipe: Any) -> Any:
    """A model that is made for sparse attention attends to everything instead; returns it.

    Kandinsky's 10 s models say which keys to leave out in a mask that only flex attention takes: their stock call fails
    with any other backend, and flex attention that Triton has not compiled holds all scores at once. What is left out
    is a tenth of the attention at most, so all of it is what the mask approximates.
    """
    transformer: Any = getattr(pipe, "transformer", None)
    if getattr(getattr(transformer, "config", None), "attention_type", None) == "nabla":
        transformer.register_to_config(attention_type="regular")
    return pipe


def _access_words(card: ModelCard) -> str:
    page = f"https://huggingface.co/{card.repo_id}"
    if card.gated:
        return f", and that you have accepted its license at {page} and logged in here with `hf auth login`"
    return f", and that {page} does not ask you to accept a license first (then log in here with `hf auth login`)"


def _needs_folder(placement: Placement) -> bool:
    """Whether we read it ourselves, so that it must lie in a folder."""
    return placement.strategy is Strategy.DISK or placement.quantization is not None


def _parts(card: ModelCard, plan: Plan, folder: Path) -> dict[str, Any]:
    """The components that the libraries do not load: without weights, packed, or from a GGUF file."""
    planned = {one.component: one for one in plan.placements}
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    parts: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list) or entry[0] not in ("diffusers", "transformers"):
            if name in planned and _needs_folder(planned[name]):
                raise ModelNotUsable(f"{name} comes from the library {entry[0]}: it is only loaded as a whole.")
            continue
        cls: Any = getattr(importlib.import_module(entry[0]), str(entry[1]), None)
        one = planned.get(name)
        dtype = getattr(torch, one.dtype if one is not None else plan.dtype)
        if name in card.gguf:
            parts[name] = quantized.load_gguf(cls, _gguf_file(card.gguf[name]), folder / name, dtype)
        elif _is_quantized(folder / name):
            parts[name] = quantized.load_stored(cls, folder / name, dtype)
        elif one is not None and one.quantization is not None:
            if one.quantization == "gguf":
                raise ModelNotUsable(f"{name} is planned from a GGUF file, which its card does not name.")
            on = torch.device("cpu" if one.strategy is Strategy.CPU else one.device)
            parts[name] = quantized.load(cls, folder / name, dtype, one.quantization, on)
        elif one is not None and one.strategy is Strategy.DISK:
            # its blocks are read from the disk while it works: loading it would need the RAM for all
            parts[name] = load_empty(cls, folder / name, dtype)
    return parts


def _fetch_configs(card: ModelCard) -> None:
    """Of parts that a GGUF file replaces: the download leaves their folders out altogether."""
    for name in card.gguf:
        hf_hub_download(str(card.repo_id), f"{name}/config.json", revision=card.revision)


def _gguf_file(where: str) -> Path:
    """The file on this machine, downloaded where it is named as one of the Hub."""
    on_hub = hub_file(where)
    return Path(where if on_hub is None else hf_hub_download(*on_hub))


def _is_quantized(component: Path) -> bool:
    config = component / "config.json"
    return config.is_file() and method_of(json.loads(config.read_text("utf-8"))) is not None


def _dtypes(plan: Plan) -> Any:
    """What diffusers' `dtype` takes: one for all, or one by component."""
    found = {one.component: getattr(torch, one.dtype) for one in plan.placements}
    main = getattr(torch, plan.dtype)
    return {**found, "default": main} if set(found.values()) - {main} else main


def generate(
    pipe: Any,
    request: Request,
    control: Control,
    clock: StageClock,
    keeper: Keeper | None = None,
    *,
    calls: Mapping[str, Argument] | None = None,
) -> Pixels:
    """Run the pipeline: text to frames of shape [num_frames, height, width, 3], 8-bit RGB.

    `keeper` answers what an earlier run of the same job has computed, and keeps what this one does. `calls` are the
    card's.

    Raises:
        InvalidOutput: NaN or infinite values, or frames that are black throughout.
        Interrupted: the job was canceled.
        ModelNotUsable: the pipeline has no argument of a name in `calls`.
    """
    arguments = {**_arguments(pipe, request), **_of_card(pipe, request, calls or {})}
    _guide(pipe, request)

    def step_ended(_pipe: Any, index: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        control.check()
        computed = keeper is None or not keeper.skipping
        if keeper is not None:
            keeper.step_ended(index + 1, request.num_inference_steps)
        if computed:
            clock.step(index + 1, request.num_inference_steps)
        return tensors

    pipe.set_progress_bar_config(disable=True)
    torch.manual_seed(request.seed)  # some schedulers draw noise without asking for the generator
    clock.enter(Stage.ENCODE)
    try:
        with ExitStack() as around:
            around.enter_context(interruptible(pipe.components, control))
            around.enter_context(_staged(pipe, request, control, clock))
            if keeper is not None:
                around.enter_context(keeper.watching(pipe, denoisers(pipe), arguments["generator"]))
            output = pipe(**arguments, callback_on_step_end=step_ended)
    finally:
        # the stock call skips this when it raises, which would leave the last component on the GPU
        placement.rest(pipe)
    frames: Frames = np.asarray(output.frames[0], dtype=np.float32)
    check_frames(frames)
    return to_pixels(frames)


def check_frames(frames: Frames) -> None:
    """Refuse a video that is certainly wrong.

    Raises:
        InvalidOutput: kind `black`.
    """
    if not all(np.isfinite(frame).all() for frame in frames):
        raise InvalidOutput(
            "The model produced invalid numbers (NaN) instead of a picture, so no video was written. This is usually "
            "a number format the card cannot handle: choose the CPU preset or another model."
        )
    if float(frames.max()) < 4 / 255:
        raise InvalidOutput(
            "The model produced a black picture, so no video was written. Try another seed or prompt; if it stays "
            "black, the number format does not suit the card: choose the CPU preset."
        )
    if max(float(np.ptp(frame, axis=(0, 1)).max()) for frame in frames) < 2 / 255:
        raise InvalidOutput(
            "The model produced frames of a single colour without any picture, so no video was written. Try another "
            "seed or prompt; if it stays so, the number format does not suit the card: choose the CPU preset."
        )


def to_pixels(frames: Frames) -> Pixels:
    """Rounded to 8 bit, frame by frame: of a long video, one more copy in float32 would be gigabytes."""
    pixels = np.empty(frames.shape, np.uint8)
    for frame, into in zip(frames, pixels, strict=True):
        into[:] = (np.clip(frame, 0, 1) * 255).round()
    return pixels


def collect() -> None:
    """Give the memory of a pipeline that is no longer referenced back to the system and the driver."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing while CUDA was never used


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """What works once or more in each step."""
    found = {name: getattr(pipe, name, None) for name in DENOISERS}
    return {name: module for name, module in found.items() if isinstance(module, torch.nn.Module)}


def blocks(component: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every entry of every `ModuleList`: the finest units that all architectures share."""
    for module in component.modules():
        if isinstance(module, torch.nn.ModuleList):
            yield from (entry for entry in module if entry is not None)  # VAEs keep None for attentions they lack


@contextmanager
def interruptible(components: dict[str, Any], control: Control) -> Iterator[None]:
    """Inside, each block of each component looks at `control` before it runs.

    A cancel must not wait for the end of a step, which takes minutes on a small card. Not covered: a library call
    without a block inside (imports, reading weights, one long kernel); the parent ends those from outside.
    """

    def look(_module: torch.nn.Module, _args: tuple[Any, ...]) -> None:
        control.check()

    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        for component in components.values():
            if isinstance(component, torch.nn.Module):
                handles.extend(block.register_forward_pre_hook(look) for block in blocks(component))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _arguments(pipe: Any, request: Request) -> dict[str, Any]:
    """The request as arguments of this pipeline's `__call__`; ones that it doesn't know are left out."""
    known = inspect.signature(pipe.__call__).parameters
    wanted: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "height": request.height,
        "width": request.width,
        "num_frames": request.num_frames,
        "frame_rate": request.fps,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        # on the CPU: the same seed gives the same noise on every machine
        "generator": torch.Generator("cpu").manual_seed(request.seed),
        "output_type": "np",
    }
    return {name: value for name, value in wanted.items() if name in known and value is not None}


def _of_card(pipe: Any, request: Request, calls: Mapping[str, Argument]) -> dict[str, Any]:
    """What the card adds."""
    known = inspect.signature(pipe.__call__).parameters
    if unknown := [name for name in calls if name not in known]:
        raise ModelNotUsable(
            f"The model's card sets {', '.join(unknown)}, which {type(pipe).__name__} of diffusers "
            f"{diffusers.__version__} does not take. Take it out of the card's [calls]."
        )
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in calls.items()
        if not (name == "timesteps" and isinstance(value, tuple) and len(value) != request.num_inference_steps)
    }


def _guide(pipe: Any, request: Request) -> None:
    """Pipelines with a guider take the strength from it, not from an argument."""
    guider = getattr(pipe, "guider", None)
    if guider is not None and hasattr(guider, "guidance_scale"):
        pipe.guider = guider.new(guidance_scale=request.guidance_scale)


@contextmanager
def _staged(pipe: Any, request: Request, control: Control, clock: StageClock) -> Iterator[None]:
    """Inside, the clock enters DENOISE with the denoiser's first forward and DECODE with the VAE's first decode."""

    def denoising(_module: torch.nn.Module, _args: tuple[Any, ...]) -> None:
        control.check()
        clock.enter(Stage.DENOISE, total=request.num_inference_steps)

    handles = [
        module.register_forward_pre_hook(denoising, prepend=True)  # what is brought for it counts there
        for module in denoisers(pipe).values()
    ]
    vae = getattr(pipe, "vae", None)
    own_decode = vae.__dict__.get("decode") if vae is not None else None
    if vae is not None:
        decode = vae.decode

        def decoding(*args: Any, **kwargs: Any) -> Any:
            control.check()
            clock.enter(Stage.DECODE)
            return decode(*_as_held(pipe, args), **kwargs)

        vae.decode = decoding
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if vae is not None:
            if own_decode is None:
                del vae.decode
            else:
                vae.decode = own_decode


def _as_held(pipe: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Latents in the number format that the VAE is planned in: some pipelines take it for the denoiser's."""
    now = placement.placed(pipe)
    held = now.placements.get("vae") if now is not None else None
    if held is None or not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return args
    return (args[0].to(getattr(torch, held.dtype)), *args[1:])


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0].strip()
    return line if line.endswith((".", "!", "?")) else line + "."

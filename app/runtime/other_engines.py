"""Other projects' ways to hold a pipeline, for `pocketreel bench offload`: each as its own documentation begins.

    pipe = load(run)    # as loaded by us, but held by accelerate

Nothing is tuned but one thing: none may quantize, so that all compute the same numbers in the same format. mmgp,
diffusers-mm and aircanvas are imported here only, and are no dependency. They change the process they run in (a default
device, patched classes), so each is to have one of its own.

Not covered: what each could do with settings made for a model; aircanvas for models that it has no adapter for. Version
0.1.0 of it does not get past decoding with diffusers 0.42.1, which sends latents to where the VAE is before aircanvas
moves that; its error is what is told then.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from app.errors import ModelNotUsable
from app.events import Engine, EngineRun
from app.runtime import pipeline
from app.schema import Plan, Strategy

_MMGP_PROFILE = 4
"""`LowRAM_LowVRAM_Slow`, which it names as the default for consumer cards; without its 8-bit quantization."""


def load(run: EngineRun) -> Any:
    """The pipeline of the run's card, held by the run's engine on its device.

    Raises:
        ModelNotUsable: it cannot be loaded, or not by that engine.
        ImportError: the engine is not installed.
    """
    if run.engine is Engine.AIRCANVAS:
        return _aircanvas(run)
    plan = Plan(device=run.device, dtype=run.dtype, strategy=Strategy.RESIDENT, placements=(), predicted_ram_bytes=0)
    pipe = pipeline.load(run.card, plan)
    return hold(pipe, run.engine, run.device)


def hold(pipe: Any, engine: Engine, device: str) -> Any:
    """A pipeline on the CPU, held by `engine`; the same object."""
    _HOLD[engine](pipe, torch.device(device))
    return pipe


def _leaf(pipe: Any, device: torch.device) -> None:
    pipe.enable_group_offload(onload_device=device, offload_type="leaf_level")


def _leaf_stream(pipe: Any, device: torch.device) -> None:
    pipe.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=True)


def _accelerate_model(pipe: Any, device: torch.device) -> None:
    pipe.enable_model_cpu_offload(device=device)


def _accelerate_sequential(pipe: Any, device: torch.device) -> None:
    pipe.enable_sequential_cpu_offload(device=device)


def _mmgp(pipe: Any, _device: torch.device) -> None:
    offload: Any = importlib.import_module("mmgp.offload")
    # its own default would cast what the model keeps in float32
    options = {"quantizeTransformer": False, "extraModelsToQuantize": [], "convertWeightsFloatTo": None}
    pipe._mmgp = offload.profile(pipe, _MMGP_PROFILE, verboseLevel=0, **options)


def _diffusers_mm(pipe: Any, device: torch.device) -> None:
    importlib.import_module("diffusers_mm").managed(pipe, device=device)


_HOLD: dict[Engine, Callable[[Any, torch.device], None]] = {
    Engine.DIFFUSERS_LEAF: _leaf,
    Engine.DIFFUSERS_LEAF_STREAM: _leaf_stream,
    Engine.ACCELERATE_MODEL: _accelerate_model,
    Engine.ACCELERATE_SEQUENTIAL: _accelerate_sequential,
    Engine.MMGP: _mmgp,
    Engine.DIFFUSERS_MM: _diffusers_mm,
}


def _aircanvas(run: EngineRun) -> Any:
    """It splits a checkpoint into files of its own first, beside the run's reference, whose folder is the parent's."""
    if run.card.gguf:
        raise ModelNotUsable("aircanvas cannot read a GGUF file.")
    if run.card.folder is None:
        raise ModelNotUsable("aircanvas is compared on diffusers folders only: of the Hub it would read pickled files.")
    cls: Any = importlib.import_module("aircanvas").AirPipeline
    try:
        made = cls.from_pretrained(
            str(run.card.folder), compression=None, shard_cache=str(run.reference.parent / "aircanvas"),
            device=run.device, compute_dtype=run.dtype, cache_embeddings=False,
        )  # fmt: skip
    except (KeyError, AttributeError, ImportError, LookupError) as error:
        raise ModelNotUsable(f"aircanvas cannot hold this model: {type(error).__name__}: {error}") from error
    pipeline.attending_in_full(made.pipeline)
    return _as_pipeline(made)


def _as_pipeline(made: Any) -> Any:
    """aircanvas' object, which is called like a pipeline, with all else that is asked of one."""
    inner = made.pipeline

    class Held:
        def __call__(self, **arguments: Any) -> Any:
            return made(arguments.pop("prompt"), **arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(inner, name, value)

    call: Any = Held.__call__
    call.__signature__ = inspect.signature(type(inner).__call__)
    return Held()

"""Apply a plan to a loaded pipeline, check it, take it off again. Prices of each strategy stand in `schema.Strategy`.

    place(pipe, plan)   a pipeline on the CPU -> placed as planned; or, if anything fails, exactly as it was, but for
                        weights that were cast to eight bits: such a pipeline is to be loaded again
    place_or_fall_back  the same, but cards that do not work together are no reason to fail: one does it all then
    switch(pipe, plan)  from one plan to another; if the new one cannot be had, the old one is in force again
    remove(pipe)        on the CPU again, without hooks
    rest(pipe)          after a run: what only visits a card leaves it

`calls` what happens around a component's work, `visiting` model offload, `groups` diffusers' group offloading,
`reading` blocks from the disk and our own streams, `sharding` several cards. The stock pipeline is not changed, but a
placed one is of a subclass that knows where latents live: diffusers guesses that from any hook that it finds. What is
quantized is held by all strategies but `disk`; see `quantization.refusal`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapped

from app.errors import PlanError
from app.quantization import WORDS, Quantization, refusal
from app.runtime import guard
from app.runtime.packed import quantization_of
from app.runtime.placement import attention, groups, sharding
from app.runtime.placement.calls import wrap
from app.runtime.placement.reading import Reading, SourceOf, Streaming, from_files, say_device
from app.runtime.placement.visiting import Turn, Visitor, Visitors, Whole
from app.schema import Arrangement, Placement, Strategy

__all__ = ["assert_runnable", "held", "place", "place_or_fall_back", "placed", "remove", "rest", "switch"]


DENOISERS = ("transformer", "unet")
"""How the names of the components begin whose attention costs the time."""


class Placed(NamedTuple):
    """What a placed pipeline knows of its placement."""

    plan: Arrangement
    placements: dict[str, Placement]
    """Of every component that is a module, planned or filled in."""
    visitors: Visitors
    exits: ExitStack
    """Closing it undoes everything."""
    notices: list[str]
    """What went otherwise than planned, in words."""
    lossy: bool
    """Weights were cast to eight bits: taking the plan off cannot bring back what they were."""


def placed(pipe: Any) -> Placed | None:
    """How `pipe` was placed by `place`; None: it was not."""
    return getattr(pipe, "_placed", None)


def place(pipe: Any, plan: Arrangement, source: SourceOf | None = None) -> None:
    """Place the components as planned.

    Args:
        source: where `disk` reads blocks from; None: the files that the pipeline was loaded from.

    Raises:
        PlanError: the pipeline is placed already, by us or by others; the plan names a device that this worker does not
            see, or a strategy that the component cannot take; or afterwards something is not where it was planned.
        torch.OutOfMemoryError: weights that are to stay on a card do not fit. The pipeline is as it was before.
    """
    if placed(pipe) is not None:
        raise PlanError("This pipeline is placed already: use `switch`, or `remove` the old plan first.")
    modules = modules_of(pipe)
    placements = _complete(modules, plan)
    _check(pipe, modules, placements, plan)
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    with ExitStack() as exits:
        visitors = Visitors()
        main = torch.device(plan.device)
        for name, placement in placements.items():
            _hold(modules[name], placement, main, visitors, source or from_files(pipe), lambda: _take_off(pipe), exits)
        notices: list[str] = []
        for name in modules:
            if name.startswith(DENOISERS):
                attention.use(name, modules[name], plan.attention_backend, notices, exits)
        vae: Any = modules.get("vae")
        if plan.vae_tiling and vae is not None and hasattr(vae, "enable_tiling"):
            vae.enable_tiling()
            exits.callback(vae.disable_tiling)
            _shorten_tiles(vae, plan.vae_tile_divisor, exits)
        lossy = any(placement.storage_dtype is not None for placement in placements.values())
        exits.callback(setattr, pipe, "__class__", type(pipe))
        pipe.__class__ = _subclass(type(pipe), main, Placed(plan, placements, visitors, exits, notices, lossy))
        assert_runnable(pipe)
        held_open = exits.pop_all()
    pipe.__class__._placed = pipe._placed._replace(exits=held_open)


def place_or_fall_back(pipe: Any, plan: Arrangement) -> None:
    """Place as planned; where several cards do not work together, on the main one, with a notice.

    Raises as `place`, if that cannot be had either.
    """
    try:
        place(pipe, plan)
    except PlanError as error:
        cards = {one.device for one in plan.placements} - {"cpu"}
        cards |= {shard.device for one in plan.placements for shard in one.shards}
        cast = any(one.storage_dtype is not None for one in plan.placements)  # already: it cannot be cast again
        if len(cards) < 2 or plan.device == "cpu" or cast:
            raise
        alone = [
            one.model_copy(update={"strategy": Strategy.MODEL_OFFLOAD, "device": plan.device, "shards": ()})
            if one.strategy is not Strategy.CPU
            else one
            for one in plan.placements
        ]
        place(pipe, plan.model_copy(update={"placements": tuple(alone), "strategy": Strategy.MODEL_OFFLOAD}))
        pipe._placed.notices.append(f"The cards could not share the model, so {plan.device} did all of it: {error}")


def _shorten_tiles(vae: Any, divisor: int, exits: ExitStack) -> None:
    """Divide the sides of a VAE's tiles and the steps between them. Its classes keep both as plain attributes."""
    ratio = int(getattr(vae, "spatial_compression_ratio", 8))
    for name, value in list(vars(vae).items()):
        what = re.fullmatch(r"tile_(sample|latent)_(min|stride)_(height|width)", name)
        if what is not None and divisor > 1:
            unit = ratio if what[1] == "sample" else 1
            exits.callback(setattr, vae, name, value)
            setattr(vae, name, max(value // divisor // unit * unit, unit))


def remove(pipe: Any) -> None:
    """Take the plan off: weights on the CPU, no hooks. Does nothing to a pipeline that is not placed.

    Raises:
        PlanError: its weights were cast to eight bits; load the pipeline again.
    """
    now = placed(pipe)
    if now is not None and now.lossy:
        raise PlanError("This pipeline's weights were cast to 8 bits; to hold it otherwise, load it again.")
    _take_off(pipe)


def _take_off(pipe: Any) -> None:
    """For training, which says itself that what was cast to eight bits stays rounded."""
    now = placed(pipe)
    if now is not None:
        now.exits.close()


def switch(pipe: Any, plan: Arrangement, how: Callable[[Any, Arrangement], None] = place) -> None:
    """Hold a pipeline by another plan, placed by `how`. Raises as that and `remove`; the old plan is in force then."""
    before = placed(pipe)
    remove(pipe)
    try:
        how(pipe, plan)
    except BaseException:
        if before is not None:
            place(pipe, before.plan)
        raise


def rest(pipe: Any) -> None:
    """After a run, however it ended: what only visits a card leaves it. Safe for any pipeline.

    The scheduler begins anew: multistep ones keep the last outputs on the card, and would go on from a run that broke
    off in the middle.
    """
    now = placed(pipe)
    if now is None:
        pipe.maybe_free_model_hooks()
    else:
        now.visitors.rest()
    if hasattr(type(pipe.scheduler), "from_config"):
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)


def held(pipe: Any) -> dict[str, tuple[str, ...]]:
    """Where the weights of each component are now: names of devices, without repetition."""
    return {name: tuple(sorted(_devices(module))) for name, module in modules_of(pipe).items()}


def assert_runnable(pipe: Any) -> None:
    """Every component and every hook agree about devices, before minutes are spent.

    Also for a pipeline that others placed: there a component without hooks must be where the pipeline computes.

    Raises:
        PlanError: names the first component that does not.
    """
    now = placed(pipe)
    modules = modules_of(pipe)
    if now is None:
        _assert_foreign(pipe, modules)
        return
    missing = sorted(set(modules) ^ set(now.placements))
    if missing:
        raise PlanError(f"{', '.join(missing)}: in the pipeline but not in its plan, or the other way round.")
    for name, module in modules.items():
        wanted = _expected(now.placements[name])
        found = _devices(module)
        if wanted is not None and not found <= wanted:
            raise PlanError(
                f"{name} should be on {', '.join(sorted(wanted))}, but part of it is on "
                f"{', '.join(sorted(found - wanted))}. Something else moved it; load the model again."
            )
        grouped = now.placements[name].strategy in (Strategy.BLOCK, Strategy.LEAF)
        if grouped and not groups.hooked(module):
            raise PlanError(f"{name} is planned in groups, but nothing would bring its weights to the card.")


def guarded(placement: Placement) -> bool:
    """Whether a backward pass through it would give wrong gradients, or none."""
    whole = placement.strategy in (Strategy.RESIDENT, Strategy.CPU)
    return not whole or bool(placement.shards) or placement.storage_dtype is not None


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """The components that hold weights, by name."""
    return {name: module for name, module in pipe.components.items() if isinstance(module, torch.nn.Module)}


# --------------------------------------------------------------------------------------------------- before it is done


def _complete(modules: dict[str, torch.nn.Module], plan: Arrangement) -> dict[str, Placement]:
    """A placement for each component, in the pipeline's order; one the plan does not name is held as its denoiser."""
    named = {placement.component: placement for placement in plan.placements}
    if unknown := sorted(set(named) - set(modules)):
        raise PlanError(f"The plan places {', '.join(unknown)}, which the pipeline does not have.")
    return {
        name: named.get(name)
        or Placement(
            component=name, strategy=plan.strategy, device=plan.device, dtype=plan.dtype, weight_bytes=0,
            num_blocks_per_group=1 if plan.strategy is Strategy.BLOCK else None,
            quantization=quantization_of(modules[name]),
        )
        for name in modules
    }  # fmt: skip


def _check(pipe: Any, modules: dict[str, torch.nn.Module], placements: dict[str, Placement], plan: Arrangement) -> None:
    seen = torch.cuda.device_count()
    names = [plan.device, *(p.device for p in placements.values())]
    names += [one.device for p in placements.values() for one in p.shards]
    for device in map(torch.device, dict.fromkeys(names)):
        if device.type == "cuda" and (device.index or 0) >= seen:
            raise PlanError(
                f"The plan uses {device}, but the worker's torch sees {seen} CUDA devices. "
                "Run `pocketreel doctor`: it compares the driver with the installed torch."
            )
    if getattr(pipe, "hf_device_map", None):
        raise PlanError("This pipeline was loaded with a device_map; load it without one to place it as planned.")
    for name, module in modules.items():
        if groups.hooked(module) or any(hasattr(part, "_hf_hook") for part in module.modules()):
            raise PlanError(f"{name} is offloaded by other hooks already; load the pipeline again to place it.")
        if (placements[name].use_stream or placements[name].record_stream) and placements[name].device == "cpu":
            raise PlanError(f"{name} is planned with streams on the CPU, which has none.")
        _check_quantized(module, placements[name])
        if placements[name].record_stream:
            raise PlanError(
                f"{name} is planned with record_stream, whose memory has no bound when the card lags behind."
            )


def _check_quantized(module: torch.nn.Module, placement: Placement) -> None:
    """The weights are packed as planned, by us, and can be held so.

    bitsandbytes' own tensors leave their scales behind when they are moved, and torchao's ignore `.data`: a pipeline
    that was loaded with diffusers' quantizers would compute wrong numbers, or fail, in the middle of the run.
    """
    found, wanted = quantization_of(module), placement.quantization
    if found is None and any(not weight.is_floating_point() or is_wrapped(weight) for weight in module.parameters()):
        raise PlanError(
            f"{placement.component} was quantized by its library's own classes, which cannot be moved by a plan. Load "
            "it with `app.runtime.pipeline.load`."
        )
    if found != wanted:
        raise PlanError(
            f"{placement.component} is planned {_stored_words(wanted)}, but was loaded {_stored_words(found)}. "
            "Load the model again."
        )
    why = refusal(placement.strategy, placement.storage_dtype) if found is not None else None
    if why is not None:
        raise PlanError(f"{placement.component} {why}.")


def _stored_words(method: Quantization | None) -> str:
    return "unquantized" if method is None else f"in {WORDS[method]}"


def _hold(
    module: torch.nn.Module,
    placement: Placement,
    main: torch.device,
    visitors: Visitors,
    source: SourceOf,
    undo: Callable[[], None],
    exits: ExitStack,
) -> None:
    device = torch.device("cpu" if placement.strategy is Strategy.CPU else placement.device)
    if placement.storage_dtype is not None:  # before offloading, or the large type would travel
        cast: Any = module
        cast.enable_layerwise_casting(
            storage_dtype=getattr(torch, placement.storage_dtype), compute_dtype=getattr(torch, placement.dtype)
        )
    visitor: Visitor | None = None
    if guarded(placement):
        guard.forbid_training(module, undo)
        exits.callback(guard.allow_training, module)
    if placement.shards:
        sharding.shard(module, placement, exits)
    elif placement.strategy is Strategy.RESIDENT:
        exits.callback(module.to, "cpu")
        module.to(device)
    elif placement.strategy is Strategy.MODEL_OFFLOAD:
        visitor = Whole(module, device)
    elif placement.strategy in (Strategy.BLOCK, Strategy.LEAF):
        groups.offload(module, placement, exits)
    elif placement.strategy is Strategy.DISK:
        visitor = Reading(placement.component, module, device, source)
        visitor.come()  # what is wrong with the files shows now
        exits.callback(say_device(module, device))
    elif placement.strategy is Strategy.STREAM:
        visitor = streaming = Streaming(module, device, placement.resident_blocks)
        exits.callback(streaming.streamed.remove)
    if visitor is not None:
        visitors.add(device, visitor)
        exits.callback(visitor.leave)
        visitor.leave()
    others = {torch.device(shard.device) for shard in placement.shards} - {device}
    turn = Turn(visitors, (device, *sorted(others, key=str)), main, visitor)
    wrap(module, turn, exits)  # last, so first at each call


def _subclass(cls: type[Any], main: torch.device, now: Placed) -> type[Any]:
    """The pipeline's class, with what a placement must answer for itself."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise PlanError("This pipeline is placed by a plan; `remove` it first to move or offload it otherwise.")

    def prepare_latents(self: Any, *args: Any, **kwargs: Any) -> Any:
        # prompts are encoded by now, and a picture to start from is made as long as the video, where no Turn sees it
        self._placed.visitors.rest()
        return cls.prepare_latents(self, *args, **kwargs)

    names = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload", "reset_device_map")
    return type(
        cls.__name__,
        (cls,),
        {
            "__module__": cls.__module__,
            "_placed": now,
            "_execution_device": property(lambda _self: main),
            "maybe_free_model_hooks": lambda self: self._placed.visitors.rest(),
            "to": refuse,
            **({"prepare_latents": prepare_latents} if hasattr(cls, "prepare_latents") else {}),
            **dict.fromkeys(names, refuse),
        },
    )


# -------------------------------------------------------------------------------------------------------- afterwards


def _devices(module: torch.nn.Module) -> set[str]:
    return {str(tensor.device) for tensor in (*module.parameters(), *module.buffers())}


def _expected(placement: Placement) -> set[str] | None:
    """Where its weights rest; None: that is its engine's own affair."""
    if placement.shards:
        return {placement.device, *(one.device for one in placement.shards)}
    if placement.strategy is Strategy.RESIDENT:
        return {placement.device}
    if placement.strategy in (Strategy.DISK, Strategy.STREAM):
        return None
    # a list of blocks that streams keeps what is in no block at home too
    return {"cpu"}


def _assert_foreign(pipe: Any, modules: dict[str, torch.nn.Module]) -> None:
    """One that others placed, or nobody did."""
    main = str(pipe._execution_device)
    for name, module in modules.items():
        if groups.hooked(module) or any(hasattr(part, "_hf_hook") for part in module.modules()):
            continue
        if (found := _devices(module)) - {main}:
            raise PlanError(
                f"{name} is on {', '.join(sorted(found))}, but the pipeline computes on {main}, and nothing would "
                "bring the two together. Load the pipeline again without a device_map."
            )

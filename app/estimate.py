"""Pure arithmetic: bytes by memory and seconds by stage of (coefficients, request, placements, machine).

Memory follows the laws that the simulator confirmed (facts/memory.md): resident; model offload; block groups = what is
in no block + n blocks, one more with a stream; leaf = the largest layer; page-locked RAM rounded up where streams pin;
8-bit storage halves what is not kept in float32; packed matrices are unpacked one at a time. Time is `timing`'s. An
estimate is nothing but the sum of its parts; of components that work one after another in a stage the largest counts.

Not covered: torch.compile, step caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from app.coefficients import Coefficients, ComponentFacts
from app.plans import MemoryKind, MemoryPart, TimePart
from app.schema import GIB, Estimate, Factors, Placement, Request, Stage, Stored, Strategy
from app.speed import Machine
from app.timing import Seconds, times
from app.workload import Sizes, Task, disk_bytes, sizes_of, stage_of, task_of

WORKER_BASE_BYTES: Final = int(0.9 * GIB)
"""A worker with torch and diffusers imported and no model: 0.75 GiB seen in a job that failed to load; rounded up."""
WORKER_START_SECONDS: Final = 6.0
"""Importing torch and diffusers: 5 to 7 s on the two cores of the README's figures; other machines ASSUMED alike."""
SMALL_BYTES: Final = 2 * 2**20
"""On each card, what passes between components: embeddings, masks, tables. `pocketreel bench matrix` showed 1 MiB more
than predicted on a card that holds a text encoder only."""
GPU_CONTEXT_BYTES: Final = int(0.5 * GIB)
"""The CUDA context, outside of torch's own count (about 450 MiB assumed, facts/memory.md)."""
CUDA_RAM_BYTES: Final = 1 * GIB
"""ASSUMED: RAM of the CUDA libraries once a worker uses a card."""
WORKING_RESERVE: Final = 0.38
"""Room for fragmentation, as a share of working memory: cards of allocated peak + 15 to 31 % were the smallest on which
simulated runs survived (facts/memory.md); with 0.30 CogVideoX did not on one of 6 GB (`pocketreel bench matrix`)."""
TILED_RESERVE: Final = 0.45
"""The same where a VAE decodes in tiles, whose sizes vary."""
ROUNDING: Final = 0.02
"""The part of both that torch itself counts as allocated, since it counts whole blocks: without it `pocketreel bench
matrix` showed 0.2 to 1.4 % more than predicted, most for short clips, where many small tensors weigh more."""
WEIGHTS_RESERVE: Final = 0.02
"""ASSUMED: the same for weights, whose blocks are large and stay."""
EXPORT_PIXELS_PER_SECOND: Final = 20e6
"""ASSUMED: coding and checking the file on the CPU."""
TRAVELLING_LEAVES: Final = 1 * GIB
"""Page-locked at once with `low_cpu_mem_usage` beside two of the largest layers: the prototype of facts/memory.md
showed 0.4 to 1.0 GiB in all for transformers, and for blocks one and a half of them."""
BESIDE_TABLE: Final = 0.6
"""Of the working memory, what there is while a module's own table is on the card: 0.44 in short clips of CogVideoX-2b,
the only model with a large one (`pocketreel bench matrix`), rounded up."""
RESTING: Final = tuple(Stage)


class Bytes(NamedTuple):
    """What one component holds in one memory during some stages."""

    memory: str
    stages: tuple[Stage, ...]
    component: str
    kind: MemoryKind
    size: int


class Cost(NamedTuple):
    """A component's share. `held` adds up with everything; of `active` in one stage and memory only the largest counts,
    because the components of a stage work one after another."""

    held: tuple[Bytes, ...]
    active: tuple[Bytes, ...]
    time: tuple[Seconds, ...]


# ---------------------------------------------------------------------------------------------------- one component


def cost_of(
    task: Task,
    machine: Machine,
    placement: Placement,
    devices: Sequence[str],
    *,
    tiling: bool,
    sizes: Sizes | None = None,
) -> Cost:
    """Memory and time of one component. `devices` are all cards of the run, `tiling` is the VAE's; `sizes` saves
    looking them up where they are known."""
    facts = task.coefficients.components[placement.component]
    if sizes is None:
        sizes = sizes_of(
            facts,
            placement.dtype,
            placement.storage_dtype,
            placement.quantization,
            task.stored.get(placement.component),
        )
    stage = stage_of(placement.component)
    working = _working(task, placement, facts, stage, tiling=tiling)
    if task.factors is not None:
        working = round(working * task.factors.of_memory("ram" if placement.device == "cpu" else placement.device))
    tiles = tiling and stage is Stage.DECODE
    held, active = _memory(placement, facts, sizes, stage, working, TILED_RESERVE if tiles else WORKING_RESERVE)
    if stage is Stage.ENCODE:
        # the denoiser's card gets the answer, wherever it is: on others nothing else happens meanwhile
        answer, others = task.coefficients.answer_bytes, (device for device in devices if device != placement.device)
        active += [Bytes(device, (stage,), placement.component, "working", answer) for device in others]
    on_disk = _weights(placement, "disk", RESTING, disk_bytes(facts, task.stored.get(placement.component)))
    seconds = _learned(times(task, machine, placement, facts, sizes, tiling=tiling), task.factors)
    return Cost((*held, on_disk), tuple(active), seconds)


def _learned(parts: Iterable[Seconds], factors: Factors | None) -> tuple[Seconds, ...]:
    """Times what earlier runs taught."""
    if factors is None:
        return tuple(parts)
    return tuple(part._replace(seconds=part.seconds * factors.seconds.get(part.stage, 1.0)) for part in parts)


def _working(task: Task, placement: Placement, facts: ComponentFacts, stage: Stage, *, tiling: bool) -> int:
    if stage is Stage.ENCODE:
        working = task.coefficients.encode_bytes.get(placement.component, 0)  # some pipelines have one too many
    elif stage is Stage.DENOISE:
        working = task.denoise_bytes
    elif placement.component == "vae":
        working = task.tiled_bytes if tiling and task.tiled_bytes is not None else task.decode_bytes
    else:
        working = 0  # a vocoder's is in the VAE's figure, which was fitted on the whole stage
    # laws fitted in 16 bit double in float32; the other way they stay, as 16-bit convolutions need workspace
    return working * 2 if placement.dtype == "float32" and facts.dtype != "float32" else working


def _memory(
    placement: Placement, facts: ComponentFacts, sizes: Sizes, stage: Stage, working: int, reserve: float
) -> tuple[list[Bytes], list[Bytes]]:
    device = placement.device
    while_loading = _weights(placement, "ram", (Stage.LOAD,), sizes.weights)
    in_ram = _weights(placement, "ram", RESTING, sizes.weights)
    brought = 0
    held: list[Bytes] = []
    if placement.shards:
        return _sharded(placement, facts, sizes, stage, working)
    match placement.strategy:
        case Strategy.RESIDENT:
            held = [while_loading, *_on_card(placement, device, RESTING, sizes.weights)]
            brought = 2 * sizes.leaf if placement.storage_dtype is not None else 0
        case Strategy.MODEL_OFFLOAD:
            held, brought = [in_ram], sizes.weights
        case Strategy.BLOCK:
            blocks = (placement.num_blocks_per_group or 1) + placement.use_stream
            nested = round(facts.nested_bytes * sizes.weights / max(facts.weight_bytes, 1))
            held, brought = _offloaded(placement, sizes, sizes.block), sizes.other + nested + blocks * sizes.block
        case Strategy.LEAF:
            # with streams too: where memory peaks no layer is at work
            table = facts.largest_table_bytes - round((1 - BESIDE_TABLE) * working)
            held, brought = _offloaded(placement, sizes, sizes.leaf), max(sizes.leaf, table)
        case Strategy.DISK:
            brought = sizes.other + 2 * sizes.block  # one works, the next is on its way
            held = [_weights(placement, "ram", RESTING, 2 * sizes.block + sizes.leaf)]
        case Strategy.STREAM:
            stays = sizes.other + placement.resident_blocks * sizes.block
            waits = max(0, sizes.weights - stays)
            held = [*_on_card(placement, device, RESTING, stays), while_loading]
            held += [_weights(placement, memory, RESTING, waits) for memory in ("ram", "pinned")]
            brought = 2 * sizes.block
        case Strategy.CPU:
            held, device = [in_ram], "ram"
    working += sizes.unpacked
    active = [Bytes(device, (stage,), placement.component, "working", working)]
    if device != "ram":
        active += _margin(placement, device, (stage,), working, reserve)
        active += _on_card(placement, device, (stage,), brought) if brought else []
    return held, active


def _sharded(
    placement: Placement, facts: ComponentFacts, sizes: Sizes, stage: Stage, working: int
) -> tuple[list[Bytes], list[Bytes]]:
    """Every card holds its blocks and, while they compute, the whole working memory."""
    in_blocks = sizes.weights - sizes.other
    working += sizes.unpacked
    held, active = [_weights(placement, "ram", (Stage.LOAD,), sizes.weights)], []
    for shard in placement.shards:
        share = round(in_blocks * shard.count / max(facts.block_count, 1))
        weights = share + (sizes.other if shard.device == placement.device else 0)
        held += _on_card(placement, shard.device, RESTING, weights)
        active.append(Bytes(shard.device, (stage,), placement.component, "working", working))
        active += _margin(placement, shard.device, (stage,), working, WORKING_RESERVE)
    return held, active


def _offloaded(placement: Placement, sizes: Sizes, unit: int) -> list[Bytes]:
    """RAM of a group-offloaded component: page-locked for streams, or for two groups at a time while they travel."""
    name = placement.component
    if placement.use_stream and not placement.low_cpu_mem_usage:
        return [
            _weights(placement, "ram", RESTING, max(sizes.pinned, sizes.weights)),
            _weights(placement, "pinned", RESTING, max(sizes.pinned, sizes.weights)),
        ]
    held = [_weights(placement, "ram", RESTING, sizes.weights)]
    if placement.use_stream:
        travelling = 2 * unit if placement.strategy is Strategy.BLOCK else min(8 * unit, 2 * unit + TRAVELLING_LEAVES)
        held += [Bytes(memory, RESTING, name, "weights", travelling) for memory in ("ram", "pinned")]
    return held


def _weights(placement: Placement, memory: str, stages: tuple[Stage, ...], size: int) -> Bytes:
    return Bytes(memory, stages, placement.component, "weights", size)


def _on_card(placement: Placement, device: str, stages: tuple[Stage, ...], size: int) -> list[Bytes]:
    return [_weights(placement, device, stages, size), *_margin(placement, device, stages, size, WEIGHTS_RESERVE)]


def _margin(
    placement: Placement, device: str, stages: tuple[Stage, ...], size: int, share: float
) -> tuple[Bytes, Bytes]:
    """A share of a size, in the part that torch counts and the part that it does not."""
    name = placement.component
    return (
        Bytes(device, stages, name, "rounding", round(ROUNDING * size)),
        Bytes(device, stages, name, "reserve", round((share - ROUNDING) * size)),
    )


# ------------------------------------------------------------------------------------------------------ the whole run


def base_cost(task: Task, devices: Sequence[str]) -> Cost:
    """What a run needs whatever its placements: the worker, the frames, the context of each card used, the file."""
    worker, frames = WORKER_BASE_BYTES + (CUDA_RAM_BYTES if devices else 0), task.frame_bytes
    if task.factors is not None:
        worker, frames = (round(size * task.factors.ram) for size in (worker, frames))
    held = (
        Bytes("ram", RESTING, "", "worker", worker),
        Bytes("ram", (Stage.DECODE, Stage.EXPORT), "", "frames", frames),
        *(Bytes(device, RESTING, "", "context", GPU_CONTEXT_BYTES) for device in devices),
        *(Bytes(device, RESTING, "", "rounding", SMALL_BYTES) for device in devices),
    )
    time = (
        Seconds(Stage.LOAD, "", "overhead", WORKER_START_SECONDS),
        Seconds(Stage.EXPORT, "", "compute", task.pixels * task.num_frames / EXPORT_PIXELS_PER_SECOND),
    )
    return Cost(held, (), _learned(time, task.factors))


def estimate(
    coefficients: Coefficients,
    request: Request,
    placements: Sequence[Placement],
    machine: Machine,
    *,
    tiling: bool,
    factors: Factors | None = None,
    stored: Mapping[str, Stored] = MappingProxyType({}),
) -> Estimate:
    """Predicted bytes and seconds of a run with the model loaded anew, from parts that add up."""
    task = task_of(coefficients, request, factors, stored)
    devices = devices_of(placements)
    costs = [cost_of(task, machine, placement, devices, tiling=tiling) for placement in placements]
    return add_up([base_cost(task, devices), *costs])


def devices_of(placements: Sequence[Placement]) -> tuple[str, ...]:
    """The cards that placements use, in their order."""
    used = {shard.device for placement in placements for shard in placement.shards}
    used |= {placement.device for placement in placements if placement.strategy is not Strategy.CPU}
    return tuple(sorted(used - {"cpu"}))


def add_up(costs: Sequence[Cost]) -> Estimate:
    """All that is held, and of what is active in one stage and memory the component with the most."""
    memory = [part for cost in costs for part in cost.held]
    by_place: dict[tuple[str, Stage], dict[int, list[Bytes]]] = {}
    for number, cost in enumerate(costs):
        for part in cost.active:
            for stage in part.stages:
                by_place.setdefault((part.memory, stage), {}).setdefault(number, []).append(part)
    for (_, stage), of_costs in by_place.items():
        largest = max(of_costs.values(), key=lambda parts: sum(part.size for part in parts))
        memory += [part._replace(stages=(stage,)) for part in largest]
    return Estimate(
        memory=tuple(
            MemoryPart(memory=part.memory, stage=stage, component=part.component, kind=part.kind, bytes=part.size)
            for part in memory
            for stage in part.stages
            if part.size
        ),
        time=tuple(
            TimePart(stage=part.stage, component=part.component, kind=part.kind, seconds=part.seconds)
            for cost in costs
            for part in cost.time
            if part.seconds
        ),
    )

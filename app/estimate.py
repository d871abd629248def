"""Pure arithmetic: bytes by memory and seconds by stage of (coefficients, request, placements, machine).

Memory follows the laws that the simulator confirmed (facts/memory.md): resident; model offload; block groups = what is
in no block + n blocks, one more with a stream; leaf = the layer that is there at the peak (`LayersLaw`; where it was
not simulated, the largest one); page-locked RAM rounded up where streams pin;
8-bit storage halves what is not kept in float32; packed matrices are unpacked one at a time. Time is `timing`'s. An
estimate is nothing but the sum of its parts; of components that work one after another in a stage the largest counts.

Not covered: torch.compile, step caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from app.coefficients import Coefficients, ComponentFacts, LayersLaw
from app.plans import MemoryKind, MemoryPart, TimePart, stage_of
from app.schema import GIB, Estimate, Factors, Placement, Request, Stage, Stored, Strategy
from app.speed import Machine
from app.timing import Seconds, times
from app.workload import Sizes, Task, disk_bytes, sizes_of, task_of

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
WORKING_RESERVE: Final = 0.5
"""Room for fragmentation, as a share of working memory: cards of allocated peak + 15 to 31 % were the smallest on which
simulated runs survived (facts/memory.md), but with 0.38 Wan 14B did not at 81 frames of 720p on one of 12 GB, whose
smallest was 0.43 to 0.47 (`pocketreel bench matrix`)."""
TILED_RESERVE: Final = 0.45
"""The same where a VAE decodes in tiles, whose sizes vary."""
WHOLE_RESERVE: Final = 0.6
"""The same where it decodes whole pictures: CogVideoX on one of 24 GB needed 0.53 to 0.57."""
ROUNDING: Final = 0.02
"""The part of both that torch itself counts as allocated, since it counts whole blocks: without it `pocketreel bench
matrix` showed 0.2 to 1.4 % more than predicted, most for short clips, where many small tensors weigh more."""
WEIGHTS_RESERVE: Final = 0.06
"""The same for weights: with 0.02 Wan 1.3B did not survive on one of 4 GB, nor LTX-Video 2B on one of 6 GB."""
EXPORT_PIXELS_PER_SECOND: Final = 20e6
"""ASSUMED: coding and checking the file on the CPU."""
TRAVELLING_LEAVES: Final = 1 * GIB
"""Page-locked at once with `low_cpu_mem_usage` beside two of the largest layers: the prototype of facts/memory.md
showed 0.4 to 1.0 GiB in all for transformers, and for blocks one and a half of them."""
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
    denoisers: Sequence[str],
    *,
    tiling: bool,
    sizes: Sizes | None = None,
) -> Cost:
    """Memory and time of one component. `denoisers` are the cards of which one is the denoiser's, `tiling` is the
    VAE's; `sizes` saves looking them up where they are known."""
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
    if placement.component == "vae" and denoisers and placement.device not in denoisers:
        working = max(0, working - task.coefficients.kept_bytes)
    if task.factors is not None:
        working = round(working * task.factors.of_memory("ram" if placement.device == "cpu" else placement.device))
    of_frames = TILED_RESERVE if tiling else WHOLE_RESERVE
    reserve = of_frames if stage is Stage.DECODE else WORKING_RESERVE
    law = task.layers_of(placement.component)
    held, active = _memory(placement, facts, law, sizes, stage, working, reserve)
    if stage is Stage.ENCODE:
        answer, others = task.coefficients.answer_bytes, (card for card in denoisers if card != placement.device)
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
    placement: Placement,
    facts: ComponentFacts,
    law: LayersLaw | None,
    sizes: Sizes,
    stage: Stage,
    working: int,
    reserve: float,
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
            held, brought = _offloaded(placement, sizes, sizes.leaf), _brought(placement, facts, law, sizes, working)
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


def _brought(placement: Placement, facts: ComponentFacts, law: LayersLaw | None, sizes: Sizes, working: int) -> int:
    """What offloading by layers has on the card at the peak."""
    largest = max(facts.largest_leaf_bytes, facts.largest_table_bytes)
    scale = sizes.leaf / max(facts.largest_leaf_bytes, 1)  # from the number format of the fit to this one
    if law is None:
        return round(scale * largest)
    at_rest = 2 * largest if placement.use_stream else largest  # the next one is on its way
    return round(scale * law.bytes(working / scale, at_rest)) if scale else 0


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
    devices, denoisers = devices_of(placements), denoisers_of(placements)
    costs = [cost_of(task, machine, placement, denoisers, tiling=tiling) for placement in placements]
    return add_up([base_cost(task, devices), *costs])


def devices_of(placements: Sequence[Placement]) -> tuple[str, ...]:
    """The cards that placements use, in their order."""
    used = {shard.device for placement in placements for shard in placement.shards}
    used |= {placement.device for placement in placements if placement.strategy is not Strategy.CPU}
    return tuple(sorted(used - {"cpu"}))


def denoisers_of(placements: Sequence[Placement]) -> tuple[str, ...]:
    """The card where the pipeline computes between its components' calls; none if that is the CPU."""
    found = {one.device for one in placements if stage_of(one.component) is Stage.DENOISE}
    return tuple(sorted(found - {"cpu"}))


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

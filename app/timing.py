"""How long a component takes: operations over the card's rate, transfers over the link; a roofline, not a measurement.

Transfers hide behind the computation with streams and add to it without. The constants are assumptions, named so here
and in `speed`; what was measured on this machine (link, disk) comes in through `speed.Machine`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from app.coefficients import ComponentFacts
from app.plans import stage_of
from app.quantization import Quantization
from app.schema import Placement, Stage, Strategy
from app.speed import FP32_SHARE, Machine
from app.workload import Sizes, Task, disk_bytes

BLOCK_WIDTHS: Final = 14.0
"""ASSUMED: a transformer block has about 14 d**2 parameters (Wan 13.4), so its width is d, for attention's cost."""
GROUP_SECONDS: Final = 1e-4
"""ASSUMED: launching one group's transfer."""
LEAF_SECONDS: Final = 4e-5
"""ASSUMED: the same for a leaf, for each of its tensors."""
DECODE_FLOPS: Final = 0.04
"""ASSUMED: operations per VAE parameter and pixel of video, by counting the convolutions of HunyuanVideo's decoder."""
DISK_EXPOSED: Final = 0.25
"""ASSUMED: share of reading weights from the disk that no computation hides, however long it takes."""
TILING_COST: Final = 1.6
"""ASSUMED: tiles overlap by a quarter each way."""
FP8_COST: Final = 1.03
"""ASSUMED: casting weights up before each use."""
UNPACKED_PER_SECOND: Final[dict[Quantization, float]] = {
    "bitsandbytes_4bit": 7e10,
    "bitsandbytes_8bit": 7e10,
    "torchao_int8": 7e10,
    "gguf": 5e9,
}
"""ASSUMED: weights that a card makes ordinary again, in each forward: about 4 bytes of traffic for each in its memory
at 300 GB/s, and 60 for GGUF, which plain operations unpack in float32. Seen on no card."""
UNPACKED_PER_SECOND_CPU: Final = 2e8
"""ASSUMED: the same on a CPU."""
PACKED_PER_SECOND: Final = 5e8
"""ASSUMED: weights packed while loading, each matrix on the card and back; two cores of a CPU did 25 to 80 million."""
CPU_16BIT_COST: Final = 2.0
"""ASSUMED: most CPUs compute 16-bit formats slower than float32."""
TEXT_TOKENS: Final = 512
"""ASSUMED prompt length where no law of the text encoder tells its longest."""


class Seconds(NamedTuple):
    """What one component adds to one stage."""

    stage: Stage
    component: str
    kind: Literal["read", "transfer", "compute", "overhead"]
    seconds: float


def times(
    task: Task, machine: Machine, placement: Placement, facts: ComponentFacts, sizes: Sizes, *, tiling: bool
) -> Iterable[Seconds]:
    """Seconds that one component adds to the stages, in parts."""
    name, stage = placement.component, stage_of(placement.component)
    forwards, flops = _work(task, facts, name, stage, tiling=tiling)
    compute = flops / _rate(machine, placement)
    if placement.storage_dtype is not None:
        compute *= FP8_COST
    stored = task.stored.get(name)
    if placement.quantization is not None:
        on_cpu = placement.device not in machine.devices
        compute += facts.parameters / (
            UNPACKED_PER_SECOND_CPU if on_cpu else UNPACKED_PER_SECOND[placement.quantization]
        )
        if stored is None:
            yield Seconds(Stage.LOAD, name, "overhead", facts.parameters / PACKED_PER_SECOND)
    yield Seconds(stage, name, "compute", forwards * compute)
    if placement.strategy is not Strategy.DISK:
        yield Seconds(Stage.LOAD, name, "read", disk_bytes(facts, stored) / machine.disk)
    if (placement.use_stream and not placement.low_cpu_mem_usage) or placement.strategy is Strategy.STREAM:
        yield Seconds(Stage.LOAD, name, "overhead", sizes.weights / machine.copy)
    transfer, overhead = _transfer(machine, placement, facts, sizes, compute)
    if placement.strategy is Strategy.RESIDENT and placement.device in machine.devices:
        yield Seconds(Stage.LOAD, name, "transfer", transfer)
    elif placement.strategy is Strategy.MODEL_OFFLOAD:
        yield Seconds(stage, name, "transfer", transfer)
    elif placement.strategy is not Strategy.CPU:
        kind: Literal["read", "transfer"] = "read" if placement.strategy is Strategy.DISK else "transfer"
        yield Seconds(stage, name, kind, forwards * transfer)
        yield Seconds(stage, name, "overhead", forwards * overhead)


def _transfer(
    machine: Machine, placement: Placement, facts: ComponentFacts, sizes: Sizes, compute: float
) -> tuple[float, float]:
    """Seconds that bringing the weights adds to a forward (resident, model offload: to the run), and launching them."""
    device = machine.devices.get(placement.device)
    if device is None or placement.strategy is Strategy.CPU:
        return 0.0, 0.0
    leaf = placement.strategy is Strategy.LEAF
    groups = facts.block_count / (placement.num_blocks_per_group or 1)
    overhead = facts.tensors * LEAF_SECONDS if leaf else groups * GROUP_SECONDS
    if placement.strategy is Strategy.RESIDENT:
        return sizes.weights / device.pageable, 0.0
    if placement.strategy is Strategy.DISK:
        reading = sizes.weights / min(machine.disk, device.pageable)
        return max(DISK_EXPOSED * reading, reading - compute), overhead
    if placement.strategy is Strategy.STREAM:  # the first block of the next forward is on its way while the last works
        waits = max(0, sizes.weights - sizes.other - placement.resident_blocks * sizes.block)
        return max(0.0, waits / device.pinned - compute), overhead
    if not placement.use_stream:  # in before, out after: diffusers copies the weights back although they did not change
        return 2 * sizes.weights / device.pageable, overhead
    copying = sizes.weights / machine.copy if placement.low_cpu_mem_usage else 0.0
    # nothing prefetches into the next forward, and what is in no block goes both ways unstreamed (diffusers 0.42)
    first = sizes.leaf if leaf else sizes.block
    exposed = first / device.pinned + (0.0 if leaf else 2 * sizes.other / device.pageable)
    return max(exposed, sizes.weights / device.pinned - compute) + copying, overhead


def _work(task: Task, facts: ComponentFacts, name: str, stage: Stage, *, tiling: bool) -> tuple[float, float]:
    """How many forwards a component makes in the run, and the operations of one."""
    if stage is Stage.ENCODE:
        law = task.coefficients.text.get(name)
        tokens = law.tokens[-1] if law is not None else TEXT_TOKENS
        return task.prompts, 2.0 * facts.parameters * tokens
    if stage is Stage.DENOISE:
        denoisers = sum(stage_of(other) is Stage.DENOISE for other in task.coefficients.components)
        return task.forwards * task.steps / denoisers, task.batch * (
            2.0 * facts.parameters * task.tokens + _attention(facts, task.tokens)
        )
    pixels = task.pixels * task.num_frames
    return 1, DECODE_FLOPS * facts.parameters * pixels * (TILING_COST if tiling and name == "vae" else 1.0)


def _attention(facts: ComponentFacts, tokens: int) -> float:
    """Operations of attention over the video: 4 tokens**2 width for each block."""
    bytes_per_parameter = facts.weight_bytes / max(facts.parameters, 1)
    total = 0.0
    for blocks in facts.blocks:
        if blocks.total_bytes * 5 >= facts.weight_bytes:  # smaller lists refine the text only
            width = (blocks.bytes / bytes_per_parameter / BLOCK_WIDTHS) ** 0.5
            total += 4.0 * tokens**2 * width * blocks.count
    return total


def _rate(machine: Machine, placement: Placement) -> float:
    """Operations a second: of the card, or of the cards that share the blocks, or of the CPU."""
    share = FP32_SHARE if placement.dtype == "float32" else 1.0
    if placement.shards:
        total = sum(shard.count for shard in placement.shards)
        seconds = sum(shard.count / machine.devices[shard.device].flops_16bit for shard in placement.shards)
        return share * total / seconds
    device = machine.devices.get(placement.device)
    if device is None:
        return machine.cpu_flops if placement.dtype == "float32" else machine.cpu_flops / CPU_16BIT_COST
    return device.flops_16bit * share

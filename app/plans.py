"""What a plan is made of: where each component lives, what is predicted of it and from which parts."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Literal

from pydantic import Field

from app.quantization import Quantization
from app.value import Bytes, Seconds, Value


class Stage(StrEnum):
    """The stages of a run, in their order."""

    LOAD = "load"
    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"
    EXPORT = "export"


@cache  # asked for thousands of times in one table of plans
def stage_of(component: str) -> Stage:
    """When a component of a diffusers pipeline works."""
    if component.startswith(("text_encoder", "image_encoder", "connectors")):
        return Stage.ENCODE
    return Stage.DENOISE if component.startswith(("transformer", "unet")) else Stage.DECODE


class Strategy(StrEnum):
    """Where a component lives. Prices in VRAM / RAM: w = its weights, b = its largest block, l = its largest leaf,
    o = what is in no block, n = blocks per group. Working memory comes on top.

    resident        w / 0                fastest
    model_offload   w while used / w     one copy in and out per stage
    block           o + n b / w          copied in and out at each forward; with a stream one b more, copies hidden
    leaf            l / w                the same, layer by layer: least VRAM, most overhead
    stream          o + r b + 2 b / w    Pocketreel's own engine: r blocks stay; opt-in until it was seen on a card
    disk            o + 2 b / 2 b        read from the checkpoint's own files at each forward, nothing is written
    cpu             0 / w                computes on the CPU

    With `use_stream` the weights lie page-locked in RAM, each tensor rounded up to a power of two, unless
    `low_cpu_mem_usage` pins them one by one while they travel.
    """

    RESIDENT = "resident"
    MODEL_OFFLOAD = "model_offload"
    BLOCK = "block"
    LEAF = "leaf"
    STREAM = "stream"
    DISK = "disk"
    CPU = "cpu"


class Shard(Value):
    """Consecutive blocks of a component on one device, counted over its block lists in their order."""

    device: str
    first_block: int = Field(ge=0)
    count: int = Field(ge=1)


class Placement(Value):
    """How one component of the pipeline is held."""

    component: str
    strategy: Strategy
    device: str
    """torch device it computes on, e.g. `cuda:0` or `cpu`; of a sharded one the device of all that is in no block."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    weight_bytes: Bytes
    num_blocks_per_group: int | None = None
    """Of `block` only."""
    resident_blocks: int = Field(0, ge=0)
    """Of `stream` only: so many of the first blocks stay on the card."""
    use_stream: bool = False
    record_stream: bool = False
    """Never planned: its peak has no bound when the GPU lags behind the copies."""
    low_cpu_mem_usage: bool = False
    storage_dtype: str | None = None
    """`float8_e4m3fn`: weights are stored in it and cast to `dtype` before use. None: stored in `dtype`."""
    quantization: Quantization | None = None
    """How the matrices of its blocks are packed. None: they are not."""
    shards: tuple[Shard, ...] = ()


MemoryKind = Literal["weights", "working", "rounding", "context", "reserve", "worker", "frames"]
"""`rounding` is what torch counts beyond what was asked for, because it counts whole blocks."""


class MemoryPart(Value):
    """One contribution to what a memory holds in a stage."""

    memory: str
    """`cuda:0`, ..., `ram`, `pinned` (page-locked RAM, which is counted in `ram` too), or `disk` (its files)."""
    stage: Stage
    component: str
    kind: MemoryKind
    bytes: Bytes


class TimePart(Value):
    """One contribution to the seconds of a stage. Transfers count only as far as no computation hides them."""

    stage: Stage
    component: str
    kind: Literal["read", "transfer", "compute", "overhead"]
    seconds: Seconds


OUTSIDE_TORCH = ("context", "reserve")
"""Kinds of VRAM that torch's count of allocated bytes does not show: the CUDA context, and room for fragmentation."""


class Estimate(Value):
    """Predicted bytes and seconds: nothing but the sums of its parts."""

    memory: tuple[MemoryPart, ...]
    time: tuple[TimePart, ...]

    @property
    def memories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.memory for part in self.memory))

    def bytes(self, memory: str, stage: Stage, *, allocated: bool = False) -> int:
        """Held in that memory at the stage's peak; `allocated` leaves out what torch does not count."""
        return sum(
            part.bytes
            for part in self.memory
            if part.memory == memory
            and part.stage is stage
            and not (allocated and memory not in ("ram", "pinned") and part.kind in OUTSIDE_TORCH)
        )

    def peak(self, memory: str, *, allocated: bool = False) -> int:
        """The largest of the stages."""
        return max(self.bytes(memory, stage, allocated=allocated) for stage in Stage)

    def seconds(self, stage: Stage | None = None) -> float:
        """Of a stage, or of the whole run."""
        return sum(part.seconds for part in self.time if stage is None or part.stage is stage)


SCALED = ("working", "worker", "frames")
"""Kinds of memory that factors scale, and with working memory its margin. Weights and contexts are known."""


class Factors(Value):
    """What a plan's predictions were multiplied by, learned from earlier runs of the model on this machine."""

    model: str
    """Name of its coefficients."""
    machine: str
    """`calibration.machine_key`."""
    runs: int = Field(0, ge=0)
    """How many runs taught them; 0: none, all are 1."""
    vram: float = Field(1.0, gt=0)
    """Of working memory on cards."""
    ram: float = Field(1.0, gt=0)
    """Of working memory, the worker itself and the frames in RAM."""
    seconds: dict[Stage, float] = Field(default_factory=dict)

    def of_memory(self, memory: str) -> float:
        """Of the kinds SCALED in that memory."""
        return self.ram if memory == "ram" else self.vram


class Learned(Value):
    """Factors by what computes: a card's speed says nothing of the CPU's."""

    cpu: Factors
    gpu: Factors

    def of(self, device: str) -> Factors:
        return self.cpu if device == "cpu" else self.gpu


HELD = {"device", "dtype", "strategy", "placements", "vae_tiling", "vae_tile_divisor", "threads", "attention_backend"}


class Arrangement(Value):
    """How the whole pipeline is held, and what is predicted of it."""

    device: str
    """Where latents live and most is computed."""
    dtype: str
    strategy: Strategy
    """Of the denoiser, and of every component without a placement of its own: of all, where sizes were unknown when the
    plan was made."""
    placements: tuple[Placement, ...]
    vae_tiling: bool = False
    vae_tile_divisor: int = Field(1, ge=1)
    """Tiles have sides so many times shorter than the VAE's own; not planned, but tried when those do not fit."""
    attention_backend: str = "native"
    """diffusers' name: `native` (PyTorch's own), `flash`, `sage`. Where it is missing, PyTorch's own is used."""
    threads: int | None = None
    """CPU threads torch may use; None leaves torch's choice."""
    predicted_ram_bytes: Bytes
    predicted_vram_bytes: dict[str, int] = Field(default_factory=dict)
    """Peak that torch will count as allocated, by device name; empty when no GPU is used."""
    predicted_seconds: Seconds | None = None
    """Of the whole run with the model loaded anew; None where the rule is too coarse to say."""
    reasons: tuple[str, ...] = ()

    def held_like(self, other: Arrangement) -> bool:
        """Whether placing by the one is placing by the other: predictions and reasons do not matter."""
        return self.model_dump(include=HELD) == other.model_dump(include=HELD)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(dict.fromkeys(placement.strategy for placement in self.placements))


class Plan(Arrangement):
    """What the worker will do, and why. Made by `planner.plan`, applied by `runtime.placement`."""

    estimate: Estimate | None = None
    """None: no coefficients are known of this model, so the coarse rule was used."""
    factors: Factors | None = None
    """What the estimate was multiplied by; None without an estimate."""
    ladder: tuple[Arrangement, ...] = ()
    """Smaller plans to fall back to, each with less VRAM than the one before."""

    def rung(self, number: int) -> Plan:
        """The plan of one rung, with the rungs below it as its ladder; without an estimate."""
        fields = {name: getattr(self.ladder[number], name) for name in Arrangement.model_fields}
        return Plan(**fields, ladder=self.ladder[number + 1 :])


class PlannedRun(Value):
    """A plan to be run by the simulator: what is asked, and cards of which sizes."""

    model: str
    """Name in the simulator's catalogue, or the path of a model folder."""
    plan: Arrangement
    height: int
    width: int
    num_frames: int
    guidance_scale: float | None = None
    vram_bytes: tuple[Bytes, ...] = ()
    """Of each card."""
    context_bytes: Bytes = 0
    """Of each card, taken before anything else."""


class PlannedOutcome(Value):
    """What the simulator saw."""

    error: str | None = None
    """Why there are no figures."""
    vram_bytes: dict[str, int] = Field(default_factory=dict)
    """Peak allocated by card."""
    ram_bytes: Bytes = 0
    pinned_bytes: Bytes = 0
    seconds: Seconds = 0.0
    """That the simulation took."""

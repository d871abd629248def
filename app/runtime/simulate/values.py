"""What goes into a simulation and what comes out of it: frozen, JSON-ready values. Sizes in bytes, times in seconds."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from app.schema import Bytes, Stage
from app.value import Value

Kind = Literal["weights", "activations", "workspace", "rounding"]


# ------------------------------------------------------------------------------------------------------ the machine


class GpuSpec(Value):
    """One simulated GPU. `capacity_bytes` None: without limit, to find out how much a run would like to have."""

    capacity_bytes: Bytes | None = None
    context_bytes: Bytes = 0
    """Held by the CUDA context, outside torch's statistics (about 450 MiB on real cards; assumed, not measured)."""
    compute_capability: tuple[int, int] = (8, 9)
    name: str = "simulated GPU"


class Attention(StrEnum):
    """Which scaled-dot-product kernel the card has. `flash` falls back to `efficient` where flash cannot run (masks,
    fp32, heads above 256), as CUDA does; `math` is the one that holds the whole score matrix, as on a V100."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


class MachineSpec(Value):
    """The machine to simulate. No GPU at all is a machine too."""

    gpus: tuple[GpuSpec, ...] = (GpuSpec(),)
    ram_bytes: Bytes | None = None
    """Limit of pageable + pinned host memory; None: without limit."""
    caching_allocator: bool = True
    """Model PyTorch's blocks: capacity is then compared with reserved memory, as on a card; else with allocated."""
    pinned_power_of_two: bool = True
    """PyTorch's host allocator rounds each pinned tensor up to a power of two."""
    lagging_gpu: bool = False
    """The GPU is slower than the copies: memory handed over by `record_stream` is freed at synchronisation only."""
    attention: Attention = Attention.FLASH
    conv3d_workspace: bool = True
    """Half-precision conv3d takes input + output + weight bytes of workspace (layout change for tensor cores)."""


# -------------------------------------------------------------------------------------------------------- placement


class Hold(StrEnum):
    """Where the weights of a component are. w = its weights, b = its largest block, l = its largest leaf:

    resident       VRAM w, RAM 0
    model_offload  VRAM w while it works, RAM w; accelerate's hooks
    block          VRAM rest + n blocks, RAM w; diffusers' group offloading, `block_level`
    leaf           VRAM l, RAM w; the same, `leaf_level`
    sequential     VRAM l, RAM w; accelerate's hooks, one transfer a tensor (slow; only for old figures)
    cpu            computes on the CPU
    """

    RESIDENT = "resident"
    MODEL_OFFLOAD = "model_offload"
    BLOCK = "block"
    LEAF = "leaf"
    SEQUENTIAL = "sequential"
    CPU = "cpu"


class ComponentSetup(Value):
    """How one component is held. The fields from `num_blocks_per_group` to `block_modules` matter for `block` and
    `leaf` only."""

    hold: Hold = Hold.RESIDENT
    device: str = "cuda:0"
    num_blocks_per_group: int = Field(1, ge=1)
    use_stream: bool = False
    record_stream: bool = False
    low_cpu_mem_usage: bool = False
    offload_to_disk: bool = False
    block_modules: tuple[str, ...] | None = None
    dtype: str | None = None
    """`bfloat16`, `float16` or `float32`; None: what the model is usually loaded in."""
    storage_dtype: str | None = None
    """e.g. `float8_e4m3fn`: layerwise casting, weights stored small and cast before use."""


class Setup(Value):
    """How a whole pipeline is held: `default` for every component not named in `components`."""

    default: ComponentSetup = ComponentSetup()
    components: dict[str, ComponentSetup] = Field(default_factory=dict)
    vae_tiling: bool = False
    vae_slicing: bool = False

    def of(self, component: str) -> ComponentSetup:
        return self.components.get(component, self.default)


class Shape(Value):
    """What is asked of the model: pixels, frames, denoising steps."""

    height: int
    width: int
    num_frames: int
    num_inference_steps: int = Field(2, ge=1)
    """Two show everything: with streams, prefetching begins with the second forward."""
    guidance_scale: float | None = None
    """None: the model's default. Above 1 some pipelines run batches of two."""
    prompt_tokens: int | None = None
    """None: the most the text encoders take."""


# ----------------------------------------------------------------------------------------------------------- result


class Share(Value):
    """Part of what lives in a memory at its peak."""

    component: str
    kind: Kind
    bytes: Bytes


class Peak(Value):
    """The highest point of one memory in one stage."""

    device: str
    """`cuda:N`, or `ram` for pageable + pinned host memory."""
    stage: Stage
    start_bytes: Bytes
    peak_bytes: Bytes
    reserved_bytes: Bytes
    """Blocks taken from the driver at most (pinned memory: with rounding); equals the peak without that model."""
    operation: str
    """The operation that reached the peak, e.g. `aten.convolution.default`."""
    shares: tuple[Share, ...]


class Moment(Value):
    """One call of one component: what was there before, at most, and after, by device (`ram` is the host)."""

    stage: Stage
    component: str
    number: int
    """1 for the first call of the component, and so on."""
    start_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    end_bytes: dict[str, int]


class Simulation(Value):
    """The result of one simulated run of a whole pipeline."""

    model: str
    pipeline: str
    machine: MachineSpec
    setup: Setup
    shape: Shape
    peaks: tuple[Peak, ...]
    """Per device and stage, `load` first: what placing the weights took."""
    timeline: tuple[Moment, ...]
    pinned_requested_bytes: Bytes
    pinned_bytes: Bytes
    """Pinned host memory at its most, with the rounding; it is part of `ram`."""
    disk_bytes: Bytes
    output_shape: tuple[int, ...]
    operations: int
    guesses: tuple[str, ...]
    """Where the program asked for contents that nobody knows and went on with made-up ones."""
    seconds: float
    versions: dict[str, str]

    def peak(self, device: str, stage: Stage | None = None, *, reserved: bool = False) -> int:
        """Highest bytes on a device, over the run after loading or in one stage; 0 for an unknown device."""
        found = [
            p.reserved_bytes if reserved else p.peak_bytes
            for p in self.peaks
            if p.device == device and (p.stage is stage or (stage is None and p.stage is not Stage.LOAD))
        ]
        return max(found, default=0)

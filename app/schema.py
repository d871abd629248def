"""The values that flow through the program: frozen, validated, JSON-ready. Sizes in bytes, times in seconds.

Names are diffusers' argument names where diffusers has one. Predicted against measured is derived, never stored.
The base and the units are in `value`, machines in `devices`, what a plan is made of in `plans`, what happened to a job
in `attempts`; their names are names of this module too.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from app.attempts import RESUMABLE, Attempt, ErrorKind, Progress, Receipt, Sample
from app.coefficients import Coefficients
from app.devices import Backend, Disk, Gpu, GpuProcess, Hardware, Limit
from app.plans import Arrangement, Estimate, Factors, Learned, Placement, Plan, Shard, Stage, Strategy
from app.quantization import Quantization, Stored, WhileLoading
from app.value import GIB, Bytes, Seconds, Value

__all__ = [
    "GIB",
    "RESUMABLE",
    "Arrangement",
    "Attempt",
    "Backend",
    "Bytes",
    "Coefficients",
    "Defaults",
    "Disk",
    "Draft",
    "ErrorKind",
    "Estimate",
    "Factors",
    "Gpu",
    "GpuProcess",
    "Hardware",
    "HardwarePreset",
    "Job",
    "JobStatus",
    "JsonObject",
    "Lattice",
    "Learned",
    "Limit",
    "ModelCard",
    "Notice",
    "OutputReport",
    "Placement",
    "Plan",
    "Progress",
    "Quantization",
    "Receipt",
    "Report",
    "Request",
    "Sample",
    "Seconds",
    "Shard",
    "Stage",
    "StageReport",
    "Stored",
    "Strategy",
    "Value",
]

JsonObject = dict[str, Any]

# ---------------------------------------------------------------------------------------------- catalogue (presets/)


class Defaults(Value):
    """What the model wants when the person says nothing; argument names of its pipeline's `__call__`."""

    height: int
    width: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    negative_prompt: str | None = None
    """None leaves the pipeline's own default in force."""


class Lattice(Value):
    """Which sizes and frame counts the model can make, and how far.

    height and width are multiples of `spatial_multiple`; num_frames = k * `temporal_multiple` + 1.
    """

    spatial_multiple: int = Field(16, ge=1)
    temporal_multiple: int = Field(4, ge=1)
    min_side: int = Field(64, ge=1)
    max_side: int = Field(4096, ge=1)
    max_num_frames: int = Field(1025, ge=1)
    max_num_inference_steps: int = Field(200, ge=1)
    trained_sizes: tuple[str, ...] = ()
    """'768x512' (width x height), the sizes the model was trained on; others work but may look odd."""


Argument = bool | int | float | str | tuple[float, ...]
"""A value in a card's `calls`."""


class ModelCard(Value):
    """One model of the catalogue. Exactly one of `repo_id` (Hub) and `folder` (on this disk) names its weights."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str
    summary: str = ""
    tasks: tuple[Literal["t2v", "i2v"], ...] = ("t2v",)
    repo_id: str | None = None
    folder: Path | None = None
    revision: str | None = None
    license: str
    gated: bool = False
    """The Hub gives its files only to people who have accepted the license there."""
    pipeline: str
    """Class name in diffusers, e.g. `Kandinsky5T2VPipeline`."""
    defaults: Defaults
    lattice: Lattice = Lattice()
    vocabulary: Literal["demo"] | None = None
    """The built-in model knows few words; `demo` makes unknown ones be named on the page."""
    coefficients: Coefficients | None = None
    """Sizes and memory laws, fitted by the simulator. None: the planner falls back to a coarse rule."""
    max_sequence_length: int | None = Field(None, ge=1)
    """Tokens of the prompt that it reads; the rest is cut off. None: not known."""
    calls: dict[str, Argument] = Field(default_factory=dict)
    """Further arguments of the pipeline's `__call__`, by their names there. `timesteps` counts only where as many steps
    are asked for as it lists."""
    simulated_as: str | None = None
    """Its name in the simulator's catalogue; None: the simulator does not know it."""
    timeout_seconds: Seconds = 3600.0
    gguf: dict[str, str] = Field(default_factory=dict)
    """By component (`transformer`, `transformer_2`) the GGUF file that it is read from: a path, or
    `owner/repo/file.gguf` of the Hub. All else comes from `repo_id` or `folder`; there, its config.json is enough."""
    stored: dict[str, Stored] = Field(default_factory=dict)
    """What of it lies quantized on this disk; found out by `presets.as_stored`, never written in a card."""


class HardwarePreset(Value):
    """A named intent. `auto` sets nothing; the others only set limits and preferences over the same planner."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    summary: str
    device: Literal["auto", "cpu", "gpu"] = "auto"
    vram_limit_bytes: Bytes | None = None
    """VRAM to use at most per GPU."""
    ram_limit_bytes: Bytes | None = None
    vram_keep_free_bytes: Bytes = 0
    """VRAM to leave to other programs."""
    max_gpus: int | None = Field(None, ge=1)
    """GPUs to use at most; None: as many as help."""
    fp8_storage: bool = False
    """Weights may be stored in 8 bits where that helps: half the memory, but not quite the same video."""
    quantization: WhileLoading | None = None
    """Weights of the denoiser and of large text encoders may be packed while they are loaded where that helps: a half
    or a quarter of the memory, but not quite the same video. Wants the package of that name."""
    streaming_engine: bool = False
    """The denoiser's blocks travel by Pocketreel's own engine, which keeps some of them on the card. Not the default
    until it was seen to run and win on a real card."""
    attention_backend: Literal["native", "flash", "sage"] = "native"
    """On cards; `flash` and `sage` are packages of others, and not quite the same video."""
    prefer_disk: bool = False
    """Weights that do not fit RAM beside the rest are read from the disk again and again: slow, but little RAM."""
    timeout_seconds: Seconds | None = None
    """None: the model card's."""


# ------------------------------------------------------------------------------------------------- request


class Draft(Value):
    """What a person typed: anything left None is filled from the model card. Comes from the page, the CLI or HTTP."""

    model: str = "built-in"
    """Card id, path of a diffusers folder, or Hub id `owner/name`."""
    preset: str = "auto"
    prompt: str
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    timeout_seconds: float | None = None


class Request(Value):
    """A resolved generation: every number final, on the model's lattice, the seed drawn. History can replay it."""

    model: str
    preset: str
    prompt: str
    negative_prompt: str | None
    height: int
    width: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    timeout_seconds: Seconds


class Notice(Value):
    """Something the person should know before the run: a snapped value, an unknown word, a cut prompt."""

    field: str | None
    text: str


# ------------------------------------------------------------------------------------------------ job and its report


class JobStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def final(self) -> bool:
        return self in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELED)


TIMELINE_SAMPLES = 240


class StageReport(Value):
    """Measured in one stage. VRAM maps device name to peak bytes; empty on a CPU."""

    stage: Stage
    seconds: Seconds
    peak_ram_bytes: Bytes
    peak_vram_allocated_bytes: dict[str, int] = Field(default_factory=dict)
    peak_vram_reserved_bytes: dict[str, int] = Field(default_factory=dict)
    read_bytes: Bytes | None = None
    """From disk, by the worker; None where the system does not count it."""
    written_bytes: Bytes | None = None


class OutputReport(Value):
    """The finished file, as it was read back from the disk."""

    path: Path
    size_bytes: Bytes
    sha256: str
    frames_sha256: str
    """Of the frames as 8-bit RGB before coding: two runs made the same video when these are equal."""
    width: int
    height: int
    num_frames: int
    fps: int
    padded: bool = False
    """An odd size was padded by one row or column: H.264 yuv420p needs even ones."""
    mean_luma: float
    """0 black .. 255 white, over all frames, decoded from the file."""


class Report(Value):
    """What a finished run measured; shown beside the video, stored, printed and embedded in the MP4."""

    stages: tuple[StageReport, ...]
    device: str
    """What computed, in words: `CPU (AMD EPYC, 2 threads)` or the GPU's name."""
    warm: bool
    """The model was already loaded by an earlier job."""
    fresh: bool = False
    """It was the worker's first job: importing the libraries is in the seconds of its first stage."""
    versions: dict[str, str]
    attention: str = ""
    """What computed attention, in words."""
    notices: tuple[str, ...] = ()
    """What went otherwise than planned, in words; the video is as it should be."""
    resumed_at: int = 0
    """Denoising steps that an earlier try had done; they are not in the seconds."""
    timeline: tuple[Sample, ...] = ()
    """Memory from the beginning to the end, at most `TIMELINE_SAMPLES` moments."""
    output: OutputReport | None = None

    @property
    def total_seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def peak_ram_bytes(self) -> int:
        return max((stage.peak_ram_bytes for stage in self.stages), default=0)

    def peak_vram(self, *, reserved: bool = False) -> dict[str, int]:
        """Peak bytes by device over all stages; empty when no GPU was used."""
        peaks: dict[str, int] = {}
        for stage in self.stages:
            by_device = stage.peak_vram_reserved_bytes if reserved else stage.peak_vram_allocated_bytes
            for device, value in by_device.items():
                peaks[device] = max(peaks.get(device, 0), value)
        return peaks


class Job(Value):
    """One row of the history."""

    id: str
    owner: str
    status: JobStatus
    request: Request
    plan: Plan
    notices: tuple[Notice, ...] = ()
    output_path: Path
    """Where the video is, or will be."""
    overwrite: bool = False
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error_kind: ErrorKind | None = None
    error: str | None = None
    report: Report | None = None
    log_path: Path | None = None
    facts: JsonObject = Field(default_factory=dict)
    """Of the model and the machine, from when it began (`flight.facts_of`)."""
    attempts: tuple[Attempt, ...] = ()
    """Tries before the present or last one."""
    receipt: Receipt | None = None
    """Of a cancel that stopped it while it ran."""

    @property
    def resumable(self) -> bool:
        """Whether it can be taken up again, from what was kept of it or else from the start."""
        return self.status is JobStatus.FAILED and self.error_kind in RESUMABLE

    @property
    def seconds(self) -> float | None:
        """Wall time from start to end, None while it has not ended."""
        if self.started_at is None or self.finished_at is None:
            return None
        return max(0.0, (self.finished_at - self.started_at).total_seconds())  # somebody may set the clock back

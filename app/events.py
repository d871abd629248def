"""The messages that cross the process boundary, one JSON document a line; no tensors and no pickle ever do.

Commands go down the worker's stdin, events come up its stdout. A worker whose stdin ends has lost its parent and exits.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from app.schema import (
    Bytes,
    ErrorKind,
    JsonObject,
    ModelCard,
    Plan,
    Progress,
    Receipt,
    Report,
    Request,
    Seconds,
    Stage,
    Value,
)

VIDEO_NAME = "video.mp4"

# ------------------------------------------------------------------------------------------------- parent -> worker


class Keep(Value):
    """Where a run leaves what a later one can go on from (`app.runtime.resume`)."""

    folder: Path
    quota_bytes: Bytes
    """More is not written; the run goes on without."""
    resume: bool = False
    """Go on from what lies there. What is damaged or of something else is not used, with a notice."""
    seconds: Seconds | None = None
    """Between two writings; None: as the length of the steps suggests."""


class Limits(Value):
    """What the parent watches for while a run is on its way."""

    spent_seconds: Seconds = 0.0
    """Of the job's time limit, by tries before this one."""
    stage_seconds: dict[Stage, Seconds] = Field(default_factory=dict)
    """Time limits of single stages; those that are missing have none but the job's."""
    stall_seconds: dict[Stage, Seconds] = Field(default_factory=dict)
    """Without any progress for so long, it hangs. Stages that are missing are not watched."""
    stall_factor: float = 20.0
    """The same in times of a usual step, where that is longer."""
    ram_floor_bytes: Bytes = 0
    """With less RAM than this available in the whole system the run is ended, before the system picks what to end."""


class Run(Value):
    """Make one video and leave it, checked, as `scratch/VIDEO_NAME`. The parent moves it to `output_path`."""

    type: Literal["run"] = "run"
    job_id: str
    request: Request
    plan: Plan
    card: ModelCard
    output_path: Path
    scratch: Path
    metadata: JsonObject
    """Embedded in the MP4 beside the report."""
    keep: Keep | None = None
    """None: nothing is kept on the way."""
    limits: Limits = Limits()


class Cancel(Value):
    """Raise inside the run at the next chance. A job that is not running is ignored: it may just have ended."""

    type: Literal["cancel"] = "cancel"
    job_id: str


class Dump(Value):
    """Write the stacks of all threads to the log: the parent wants to know where it hangs."""

    type: Literal["dump"] = "dump"


class Shutdown(Value):
    """Finish and exit."""

    type: Literal["shutdown"] = "shutdown"


Command = Annotated[Run | Cancel | Dump | Shutdown, Field(discriminator="type")]

# ------------------------------------------------------------------------------------------------- worker -> parent


class Ready(Value):
    """The libraries are imported, commands are being read."""

    type: Literal["ready"] = "ready"
    pid: int
    versions: dict[str, str]


class Progressed(Value):
    """A stage began or a step ended."""

    type: Literal["progressed"] = "progressed"
    job_id: str
    progress: Progress


class Heartbeat(Value):
    """Sent every second by a thread of its own: the process lives and Python runs."""

    type: Literal["heartbeat"] = "heartbeat"
    job_id: str | None
    rss_bytes: int
    vram_bytes: dict[str, int] = Field(default_factory=dict)
    """Reserved by torch, by device."""


class Completed(Value):
    type: Literal["completed"] = "completed"
    job_id: str
    report: Report


class Failed(Value):
    """The run raised. `usable` says whether the worker may take the next job or must be replaced."""

    type: Literal["failed"] = "failed"
    job_id: str
    kind: ErrorKind
    message: str
    usable: bool
    report: Report | None = None
    """The stages that had ended by then."""
    progress: Progress | None = None
    """Where it was."""


class Canceled(Value):
    type: Literal["canceled"] = "canceled"
    job_id: str
    receipt: Receipt | None = None
    """None: it had not begun."""


Event = Annotated[Ready | Progressed | Heartbeat | Completed | Failed | Canceled, Field(discriminator="type")]

# ------------------------------------------------------------------------------------- bench offload <-> its process


class Engine(StrEnum):
    """What holds the denoiser in `pocketreel bench offload`."""

    RESIDENT = "resident"
    MODEL_OFFLOAD = "model_offload"
    BLOCK = "block"
    BLOCK_STREAM = "block_stream"
    LEAF = "leaf"
    LEAF_STREAM = "leaf_stream"
    LEAF_STREAM_LOW = "leaf_stream_low"
    STREAM = "stream"
    STREAM_HALF = "stream_half"
    """Half of the blocks stay on the card."""
    DISK = "disk"
    DIFFUSERS_LEAF = "diffusers_leaf"
    """The stock `pipe.enable_group_offload`, and so on: other projects' own ways, each with its defaults."""
    DIFFUSERS_LEAF_STREAM = "diffusers_leaf_stream"
    ACCELERATE_MODEL = "accelerate_model"
    ACCELERATE_SEQUENTIAL = "accelerate_sequential"
    MMGP = "mmgp"
    DIFFUSERS_MM = "diffusers_mm"
    AIRCANVAS = "aircanvas"


OTHERS: Final = {
    Engine.DIFFUSERS_LEAF: "diffusers",
    Engine.DIFFUSERS_LEAF_STREAM: "diffusers",
    Engine.ACCELERATE_MODEL: "accelerate",
    Engine.ACCELERATE_SEQUENTIAL: "accelerate",
    Engine.MMGP: "mmgp",
    Engine.DIFFUSERS_MM: "diffusers-mm",
    Engine.AIRCANVAS: "aircanvas",
}
"""Engines of other projects, and the package that brings each. They hold whole pipelines in ways of their own, so each
runs in a process of its own; those that are no dependency of ours are compared where somebody has installed them."""
ON_GPU_ONLY: Final = frozenset((Engine.BLOCK_STREAM, Engine.LEAF_STREAM, Engine.LEAF_STREAM_LOW, *OTHERS))


class EngineRun(Value):
    """What one process makes: a clip, with one engine."""

    card: ModelCard
    request: Request
    engine: Engine
    device: str
    dtype: str
    denoisers: tuple[str, ...]
    vram_bytes: Bytes | None = None
    """Left free by a ballast; None: no ballast."""
    reference: Path
    """A .npy file of the frames to compare with; who finds none there writes its own."""


class EngineOutcome(Value):
    """What one engine took for the second of two clips."""

    engine: Engine
    error: str | None = None
    """Why there are no figures."""
    seconds: Seconds = 0.0
    step_seconds: Seconds | None = None
    """Median time between the ends of two steps; None with a single one."""
    vram_allocated_bytes: int = 0
    vram_reserved_bytes: int = 0
    ram_bytes: Bytes = 0
    pinned_bytes: Bytes | None = None
    """Page-locked at most; None without a GPU."""
    read_bytes: Bytes | None = None
    difference: int | None = None
    """Largest of a pixel from the clip of the first engine that got through (`resident`, where it fits), of 255; None
    for that one."""


COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


def encode(message: Value) -> bytes:
    """One line, ready for the pipe."""
    return message.model_dump_json().encode() + b"\n"

"""What happened to a job on its way: attempts that ended badly, a cancel's receipt, memory over time."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from app.plans import Stage
from app.value import Bytes, Seconds, Value


class ErrorKind(StrEnum):
    """Why a job failed. The page and `--json` name it; the message beside it says what to do."""

    OOM = "oom"
    RAM = "ram"
    TIMEOUT = "timeout"
    STALL = "stall"
    CRASH = "crash"
    INTERRUPTED = "interrupted"
    INVALID = "invalid"
    BLACK = "black"
    DISK = "disk"


RESUMABLE = frozenset(set(ErrorKind) - {ErrorKind.INVALID, ErrorKind.BLACK})
"""After these another try may well succeed; after the others it would end in the same way."""


class Progress(Value):
    """Where a running job is. `step` counts finished steps of the stage, `total` is 0 where a stage has no steps."""

    stage: Stage
    step: int = 0
    total: int = 0
    eta_seconds: Seconds | None = None
    """To the end of the stage; None until two steps are known."""


class Attempt(Value):
    """A try that did not end with the video, and what was done about it."""

    at: datetime
    kind: ErrorKind
    message: str
    progress: Progress | None = None
    """Where it was; None: before it began."""
    then: str
    """What the next try does otherwise, in words."""
    predicted_vram_bytes: dict[str, int] = Field(default_factory=dict)
    """Of the plan that failed."""
    predicted_ram_bytes: Bytes = 0


class Sample(Value):
    """Memory at one moment of a run."""

    seconds: Seconds
    """Since the run was received."""
    stage: Stage | None
    ram_bytes: Bytes
    """Resident set of the worker."""
    vram_bytes: dict[str, int] = Field(default_factory=dict)
    """Allocated by torch, by device."""


class Receipt(Value):
    """What a cancel gave back, measured after it."""

    seconds: Seconds
    """From the request to the end of the run."""
    forced: bool
    """It did not stop by itself within the grace, so its process was ended."""
    model_kept: bool = False
    """The model stays loaded for the next job."""
    ram_before_bytes: Bytes
    ram_after_bytes: Bytes
    """Resident set of the worker; 0 where it was ended."""
    vram_before_bytes: dict[str, int] = Field(default_factory=dict)
    """Reserved by torch, by device."""
    vram_after_bytes: dict[str, int] = Field(default_factory=dict)

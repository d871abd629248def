"""Numbers, times and names as a person reads them. Pure; everything that goes into HTML is escaped by the caller."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from app.schema import GIB, Attempt, ErrorKind, Job, JobStatus, Receipt, Report, Stage

MIB = 1024**2

STAGES = {
    Stage.LOAD: "Loading the model",
    Stage.ENCODE: "Reading the prompt",
    Stage.DENOISE: "Drawing",
    Stage.DECODE: "Turning it into frames",
    Stage.EXPORT: "Writing the video",
}
SHORT_STAGES = {
    Stage.LOAD: "Load",
    Stage.ENCODE: "Read",
    Stage.DENOISE: "Draw",
    Stage.DECODE: "Frames",
    Stage.EXPORT: "Write",
}
STATUSES = {
    JobStatus.PENDING: "waiting",
    JobStatus.RUNNING: "running",
    JobStatus.COMPLETED: "finished",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELED: "canceled",
}
ERRORS = {
    ErrorKind.OOM: "The graphics card ran out of memory (VRAM)",
    ErrorKind.RAM: "The computer ran out of memory (RAM)",
    ErrorKind.TIMEOUT: "The time limit passed",
    ErrorKind.STALL: "It stopped making progress",
    ErrorKind.CRASH: "The worker process ended unexpectedly",
    ErrorKind.INTERRUPTED: "It was interrupted",
    ErrorKind.INVALID: "The run failed",
    ErrorKind.BLACK: "The video would have been black or broken, so it was not saved",
    ErrorKind.DISK: "The video could not be saved to disk",
}
FIELDS = {
    "model": "Model",
    "preset": "Hardware",
    "prompt": "Prompt",
    "negative_prompt": "Leave out",
    "height": "Height",
    "width": "Width",
    "num_frames": "Frames",
    "fps": "Frames per second",
    "num_inference_steps": "Steps",
    "guidance_scale": "Prompt strength",
    "seed": "Seed",
    "timeout_seconds": "Time limit in seconds",
}
"""diffusers' argument names -> the labels of the form."""


@dataclass(frozen=True)
class Titles:
    """What people call the models and presets of the catalogue; anything else is called by its id."""

    models: dict[str, str]
    presets: dict[str, str]

    def model(self, model: str) -> str:
        return self.models.get(model, model)

    def preset(self, preset: str) -> str:
        return self.presets.get(preset, preset)


def attempt_words(attempt: Attempt) -> str:
    """A try that failed: where, why, and what the next one did otherwise."""
    where = ""
    if attempt.progress is not None:
        where = f" ({STAGES[attempt.progress.stage].lower()}"
        where += f", step {attempt.progress.step} of {attempt.progress.total})" if attempt.progress.total else ")"
    return f"{ERRORS[attempt.kind]}{where}. Then: {attempt.then}."


def receipt_words(receipt: Receipt) -> str:
    """What a cancel gave back."""
    ram = max(0, receipt.ram_before_bytes - receipt.ram_after_bytes)
    vram = sum(
        max(0, before - receipt.vram_after_bytes.get(device, 0)) for device, before in receipt.vram_before_bytes.items()
    )
    back = [f"{memory(ram)} of RAM", *([f"{memory(vram)} of VRAM"] if receipt.vram_before_bytes else [])]
    model = "the model stays loaded" if receipt.model_kept else "the model must be loaded again"
    return f"It stopped within {receipt.seconds:.1f} s and gave back {' and '.join(back)}; {model}."


def in_form_words(text: str) -> str:
    """A message of the core with the form's labels in place of diffusers' argument names."""
    words = text.split(" ")
    return " ".join(FIELDS.get(word, word) if "_" in word or index == 0 else word for index, word in enumerate(words))


def memory(value: int) -> str:
    """Bytes as GiB, below one as MiB."""
    if value >= GIB:
        return f"{value / GIB:.1f} GiB"
    return f"{value / MIB:.0f} MiB" if value >= MIB else f"{value / 1024:.0f} KiB"


def size(width: int, height: int) -> str:
    """Width and height with the times sign."""
    return f"{width} \u00d7 {height}"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def moment(when: datetime, *, now: datetime | None = None) -> str:
    """The local time; with the date when it was not today."""
    local = when.astimezone()
    today = (now or datetime.now(UTC)).astimezone().date()
    return f"{local:%H:%M}" if local.date() == today else f"{local:%Y-%m-%d %H:%M}"


def elapsed(job: Job, *, now: datetime | None = None) -> float:
    """Seconds since the job started, 0 before."""
    if job.started_at is None:
        return 0.0
    return max(0.0, ((now or datetime.now(UTC)) - job.started_at).total_seconds())


def device_name(device: str) -> str:
    """A torch device as a person calls it."""
    if device == "cpu":
        return "the processor (CPU)"
    kind, _, index = device.partition(":")
    return f"graphics card {index}" if index else f"the graphics card ({kind})"


def peak(report: Report) -> str:
    """The one number for a line of the history: VRAM when a GPU was used, else RAM."""
    vram = report.peak_vram(reserved=True)
    if vram:
        return f"{memory(max(vram.values()))} VRAM"
    return f"{memory(report.peak_ram_bytes)} RAM"

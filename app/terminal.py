"""What the command line prints for people: summaries, tables and the progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from app.presets import format_bytes
from app.schema import Hardware, Job, JobStatus, Report, Stage
from app.schema import Progress as JobProgress

if TYPE_CHECKING:
    from app.doctor import Finding

STAGE_WORDS = {
    Stage.LOAD: "Loading the model",
    Stage.ENCODE: "Reading the prompt",
    Stage.DENOISE: "Making the video",
    Stage.DECODE: "Decoding the frames",
    Stage.EXPORT: "Writing and checking the file",
}


def summary(job: Job) -> str:
    """A finished job in a few lines; a failed one without its message, which the caller prints."""
    request = job.request
    lines = []
    if job.status is JobStatus.COMPLETED and job.report is not None and job.report.output is not None:
        output = job.report.output
        lines += [
            f"Done: {output.path}",
            f"  {output.width}x{output.height}, {output.num_frames} frames at {output.fps} fps "
            f"({output.num_frames / output.fps:.1f} s), {format_bytes(output.size_bytes)}"
            + (", padded to even sides" if output.padded else ""),
        ]
    lines.append(
        f"  model {request.model}, {request.num_inference_steps} steps, guidance {request.guidance_scale:g}, "
        f"seed {request.seed}"
    )
    lines.append(f"  plan: {'; '.join(job.plan.reasons)}")
    for attempt in job.attempts:
        at = f" during {attempt.progress.stage}" if attempt.progress is not None else ""
        lines.append(f"  a try before ended{at} ({attempt.kind}): {plain(attempt.message)} Then: {attempt.then}")
    if job.report is not None:
        lines += [f"  {line}" for line in report_lines(job.report)]
    if job.receipt is not None:
        back = max(0, job.receipt.ram_before_bytes - job.receipt.ram_after_bytes)
        lines.append(f"  canceled within {job.receipt.seconds:.1f} s; {format_bytes(back)} of RAM came back")
    return "\n".join(lines)


def report_lines(report: Report) -> list[str]:
    """Seconds per stage and the peaks, in words."""
    stages = ", ".join(f"{stage.stage} {stage.seconds:.1f} s" for stage in report.stages)
    lines = [
        f"{report.total_seconds:.1f} s on {report.device}, model {'already loaded' if report.warm else 'loaded anew'}",
        stages,
        f"peak RAM {format_bytes(report.peak_ram_bytes)}",
    ]
    if report.resumed_at:
        lines.append(f"{report.resumed_at} steps were done by an earlier try")
    if report.attention:
        lines.append(f"attention by {report.attention}")
    lines += report.notices
    reserved = report.peak_vram(reserved=True)
    for device, allocated in report.peak_vram().items():
        lines.append(
            f"peak VRAM {device}: {format_bytes(allocated)} allocated, {format_bytes(reserved[device])} reserved"
        )
    if not report.peak_vram():
        lines.append("no GPU was used, so there is no VRAM to report")
    read = [stage.read_bytes for stage in report.stages if stage.read_bytes is not None]
    written = [stage.written_bytes for stage in report.stages if stage.written_bytes is not None]
    if read:
        lines.append(f"disk: {format_bytes(sum(read))} read, {format_bytes(sum(written))} written by the worker")
    else:
        lines.append("disk: not counted on this system")
    return lines


def metadata_summary(document: dict[str, Any]) -> str:
    """What `history --from` prints: the JSON embedded in an MP4."""
    lines = [f"Made by Pocketreel {document['pocketreel']}, job {document.get('job', 'unknown')}"]
    request = document.get("request")
    if isinstance(request, dict):
        lines += [f"  {key}: {value}" for key, value in request.items()]
    try:
        lines += [f"  {line}" for line in report_lines(Report.model_validate(document.get("report")))]
    except ValidationError:
        lines.append("  the report was written by another version; --json shows it as it is")
    return "\n".join(plain(line) for line in lines)


def job_table(jobs: Iterable[Job]) -> Table:
    """The history, newest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "status", "seconds", "peak RAM", "model", "prompt"):
        # an id that is cut could not be given to `resume` and `history show`
        table.add_column(column, overflow="fold" if column == "prompt" else "ellipsis", no_wrap=column == "id")
    for job in jobs:
        status = job.status if job.error_kind is None else f"{job.status} ({job.error_kind})"
        seconds = "" if job.seconds is None else f"{job.seconds:.1f}"
        peak = format_bytes(job.report.peak_ram_bytes) if job.report is not None else ""
        table.add_row(job.id, status, seconds, peak, Text(plain(job.request.model)), Text(plain(job.request.prompt)))
    return table


def hardware_summary(found: Hardware) -> str:
    """What `probe` prints."""
    lines = [f"{found.system}; {found.cpu_name}, {found.cpu_count} usable cores"]
    for gpu in found.gpus:
        formats = ", ".join(name for name, has in gpu.supports.items() if has)
        lines.append(
            f"GPU {gpu.index}: {gpu.name} ({gpu.backend}{'' if gpu.verified else ', not verified'}), "
            f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free; {formats or 'formats unknown'}"
        )
        lines += [
            f"  held by {process.name} (pid {process.pid}): "
            + (format_bytes(process.used_bytes) if process.used_bytes is not None else "amount unknown")
            for process in gpu.processes
        ]
    if not found.gpus:
        lines.append("GPU: none found; the CPU computes")
    lines += [
        f"RAM: {format_bytes(found.ram_available_bytes)} of {format_bytes(found.ram_total_bytes)} available "
        f"(limit: {found.ram_limit.source}, {format_bytes(found.ram_limit.value_bytes)})",
        f"Swap: {format_bytes(found.swap_free_bytes)} of {format_bytes(found.swap_total_bytes)} free",
        f"Data folder {found.data_disk.path}: {format_bytes(found.data_disk.free_bytes)} free",
    ]
    lines += [f"Note: {note}" for note in found.notes]
    return "\n".join(lines)


def findings_summary(findings: Iterable[Finding]) -> str:
    """What `doctor` prints: each finding with its one fix."""
    marks = {"ok": "ok      ", "warning": "warning ", "problem": "PROBLEM "}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.level]} {finding.title}")
        if finding.level != "ok":
            lines.append(f"          {finding.explanation}")
            if finding.fix:
                lines.append(f"          fix: {finding.fix}")
    return "\n".join(lines)


class ProgressBar:
    """Stage, step and ETA of one job."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID = bar.add_task("Waiting", total=None, eta="")

    def show(self, progress: JobProgress | None) -> None:
        if progress is None:
            return
        eta = "" if progress.eta_seconds is None else f"about {_duration(progress.eta_seconds)} left in this stage"
        self._bar.update(
            self._task,
            description=STAGE_WORDS[progress.stage],
            completed=progress.step,
            total=progress.total or None,
            eta=eta,
        )


@contextmanager
def progress_bar(console: Console) -> Iterator[ProgressBar]:
    """A bar on `console` that vanishes at the end; plain silence where there is no terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}"),
        console=console,
        transient=True,
    ) as bar:
        yield ProgressBar(bar)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )


def plain(text: str) -> str:
    """Without control characters: a prompt, or the metadata of a foreign file, must not drive the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)

"""A job followed from the command line: submitted, watched, canceled by Ctrl-C, told, and its exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import typer

from app import terminal
from app.config import LOCAL_OWNER, load_settings
from app.errors import GenerationCanceled, GenerationFailed, PocketreelError, TimedOut
from app.jobs import JobService
from app.schema import Draft, ErrorKind, Job, JobStatus
from app.shell import err, out, print_json


def opened_service() -> closing[JobService]:
    """The service of this process, for a `with` block."""
    return closing(JobService(load_settings()))


@contextmanager
def _stop_signals(stop: threading.Event, shutdown: threading.Event) -> Iterator[None]:
    """Ctrl-C asks once for a cancel, a second one ends at once; SIGTERM (a shutdown) only interrupts."""

    def on_signal(number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        (shutdown if number == signal.SIGTERM else stop).set()

    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.signal(name, on_signal) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def submit(service: JobService, draft: Draft, output: Path, *, overwrite: bool) -> Job:
    """Queue it and print what was changed. Raises as `JobService.submit`."""
    job = service.submit(draft, owner=LOCAL_OWNER, output_path=output, overwrite=overwrite)
    for notice in job.notices:
        err.print(f"Note: {notice.text}", markup=False)
    return job


def follow(service: JobService, job: Job) -> Job:
    """Show its progress until it has ended."""
    stop, shutdown = threading.Event(), threading.Event()
    told = len(job.attempts)
    with _stop_signals(stop, shutdown), terminal.progress_bar(err) as bar:
        while not job.status.final:
            job = service.wait(job.id, owner=LOCAL_OWNER, timeout=0.2)
            bar.show(service.progress(job.id) if job.status is JobStatus.RUNNING else None)
            for attempt in job.attempts[told:]:
                err.print(f"Note: {attempt.message} Trying again: {attempt.then}.", markup=False)
            told = len(job.attempts)
            if stop.is_set():
                service.cancel(job.id, owner=LOCAL_OWNER)
            elif shutdown.is_set():
                service.interrupt(job.id)
    return job


def tell(job: Job, *, as_json: bool) -> None:
    """Print how it ended. Raises the error that carries the exit code, unless it ended well."""
    if as_json:
        print_json(document(job))
    else:
        out.print(terminal.summary(job), markup=False)
    if job.status is JobStatus.COMPLETED:
        return
    again = f" `pocketreel resume {job.id}` takes it up again." if job.resumable else ""
    error: PocketreelError
    if job.status is JobStatus.CANCELED:
        error = GenerationCanceled("Nothing was written.")
    elif job.error_kind is ErrorKind.INTERRUPTED:
        error = GenerationCanceled(f"It was interrupted.{again}")
    elif job.error_kind is ErrorKind.TIMEOUT:
        error = TimedOut((job.error or "") + again)
    else:
        error = GenerationFailed((job.error or "It is not known why.") + again, kind=job.error_kind)
    if as_json:  # the job's document is out already
        raise typer.Exit(error.exit_code)
    raise error


def document(job: Job) -> dict[str, Any]:
    """A job as `--json` prints it."""
    found = job.model_dump(mode="json")
    if job.report is not None:
        found["report"]["total_seconds"] = job.report.total_seconds
        found["report"]["peak_ram_bytes"] = job.report.peak_ram_bytes
        found["report"]["peak_vram_allocated_bytes"] = job.report.peak_vram()
        found["report"]["peak_vram_reserved_bytes"] = job.report.peak_vram(reserved=True)
    return found

"""The command line: serve, generate, plan, history, probe, doctor, bench.

People read the human output first; with `--json` exactly one JSON document goes to stdout and all else to stderr.
Exit codes: 0 done, 2 bad input, 3 does not fit, 4 failed, 124 timed out, 130 canceled.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console

from app import __version__
from app.errors import BadInput, GenerationCanceled, GenerationFailed, InvalidRequest, PocketreelError, TimedOut

if TYPE_CHECKING:
    from app.jobs import JobService
    from app.schema import Draft, Job

OWNER = "local"
"""Who works at this machine itself: the command line, and the page when it is bound to the loopback address."""

app = typer.Typer(
    name="pocketreel",
    help="Make video with open diffusion models on the GPU you own. Without a command, the page opens.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console(highlight=False, soft_wrap=True, emoji=False)
_err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

P = ParamSpec("P")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout, all else to stderr.")]


def _guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Our own errors become a message (a document with `--json`) and an exit code; anything else shows as a bug."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except PocketreelError as error:
            if kwargs.get("as_json"):
                kind = error.kind if isinstance(error, GenerationFailed) else None
                _print_json({"error": str(error), "kind": kind, "exit_code": error.exit_code})
            else:
                _err.print(f"[bold red]{_title(error)}[/] ", end="")
                _err.print(str(error), markup=False)
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:  # `pocketreel history | head`
            sys.stderr.close()
            raise typer.Exit(0) from None

    return run


def _title(error: PocketreelError) -> str:
    if isinstance(error, BadInput):
        return "Not started:"
    if isinstance(error, GenerationCanceled):
        return "Canceled."
    return "Does not fit:" if error.exit_code == 3 else "Failed:"


def _print_json(document: Any) -> None:
    json.dump(document, sys.stdout, ensure_ascii=False, indent=2, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Make video with open diffusion models on the GPU you own."""
    if version:
        typer.echo(f"pocketreel {__version__}")
    elif context.invoked_subcommand is None:
        serve()


@app.command()
@_guarded
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 shares the page on your LAN.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the page.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name the page is asked for by (a proxy's, a router's); repeatable."),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in your browser.")] = True,
) -> None:
    """Open the page (default: http://127.0.0.1:7860, for this machine only)."""
    from app.config import load_settings
    from app.jobs import JobService
    from app.web import server

    settings = load_settings(host=host, port=port, allowed_hosts=tuple(allow_host) if allow_host else None)
    service = JobService(settings)
    try:
        server.serve(
            service,
            host=settings.host,
            port=settings.port,
            open_browser=browser,
            allowed_hosts=settings.allowed_hosts,
        )
    finally:
        service.close()


@app.command()
@_guarded
def generate(
    prompt: Annotated[str, typer.Argument(help="What the video should show.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The MP4 to write.")] = Path("clip.mp4"),
    model: Annotated[str, typer.Option(help="Model id, a diffusers folder, or a Hub id owner/name.")] = "built-in",
    preset: Annotated[str, typer.Option(help="Hardware preset.")] = "auto",
    negative_prompt: Annotated[str | None, typer.Option(help="What it should not show.")] = None,
    size: Annotated[str | None, typer.Option(help="Width x height, e.g. 768x512.")] = None,
    frames: Annotated[int | None, typer.Option(help="Number of frames.")] = None,
    fps: Annotated[int | None, typer.Option(help="Frames per second of the video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; the same seed gives the same video.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Stop after that many seconds.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make one video without the page."""
    from app.schema import Draft

    width, height = _size(size)
    draft = Draft(
        model=model,
        preset=preset,
        prompt=prompt,
        negative_prompt=negative_prompt,
        width=width,
        height=height,
        num_frames=frames,
        fps=fps,
        num_inference_steps=steps,
        guidance_scale=guidance,
        seed=seed,
        timeout_seconds=timeout,
    )
    with _service() as service:
        job = _generate(service, draft, output, overwrite=overwrite)
    if as_json:
        _print_json(_document(job))
    else:
        from app.terminal import summary

        _out.print(summary(job), markup=False)
    _raise_for(job, quiet=as_json)


@app.command()
@_guarded
def history(
    from_file: Annotated[
        Path | None, typer.Option("--from", help="Read the settings and the report out of an MP4 instead.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs at most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the jobs, or read what an MP4 says of itself."""
    from app import terminal

    if from_file is not None:
        from app.mp4 import read_metadata

        document = read_metadata(from_file)
        if as_json:
            _print_json(document)
        else:
            _out.print(terminal.metadata_summary(document), markup=False)
        return
    from app.config import load_settings
    from app.store import Store

    store = Store(load_settings().database)
    try:
        jobs = store.list(owner=OWNER, limit=limit)
    finally:
        store.close()
    if as_json:
        _print_json([_document(job) for job in jobs])
    elif not jobs:
        _out.print(
            'No videos yet. Make one: pocketreel generate "a red ball bouncing on a blue background" -o clip.mp4'
        )
    else:
        _out.print(terminal.job_table(jobs))


@app.command()
@_guarded
def probe(as_json: AsJson = False) -> None:
    """Show what this machine has: GPUs, RAM and its limits, disks."""
    from app import hardware, terminal
    from app.config import load_settings

    found = hardware.probe(load_settings())
    if as_json:
        _print_json(found.model_dump(mode="json"))
    else:
        _out.print(terminal.hardware_summary(found), markup=False)


@app.command()
@_guarded
def doctor(
    worker: Annotated[bool, typer.Option(help="Also start a worker and ask its torch; takes seconds.")] = True,
    as_json: AsJson = False,
) -> None:
    """Check the installation, and name one fix for each problem."""
    from app import doctor as checks
    from app import hardware, terminal
    from app.config import load_settings
    from app.worker import torch_view

    settings = load_settings()
    found = hardware.probe(settings)
    findings = list(checks.examine(settings, found))
    if worker:
        findings += checks.compare(found, torch_view())
        findings = list(dict.fromkeys(findings))  # some show both in the files and in the worker
    if as_json:
        _print_json([finding.model_dump(mode="json") for finding in findings])
    else:
        _out.print(terminal.findings_summary(findings), markup=False)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(4)


@app.command()
@_guarded
def plan(
    model: Annotated[str, typer.Argument(help="Model id, a diffusers folder, or a Hub id owner/name.")] = "built-in",
    every: Annotated[bool, typer.Option("--all", help="Show what fits of every model.")] = False,
    cliff: Annotated[bool, typer.Option("--cliff", help="Find where a little more makes it much slower.")] = False,
    size: Annotated[str | None, typer.Option(help="Width x height, e.g. 768x512.")] = None,
    frames: Annotated[int | None, typer.Option(help="Number of frames.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    preset: Annotated[str, typer.Option(help="Hardware preset.")] = "auto",
    vram: Annotated[str | None, typer.Option(help="Plan for a card of that size instead, e.g. 8GiB.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Plan for several cards instead, e.g. 6GiB,12GiB.")] = None,
    ram: Annotated[str | None, typer.Option(help="Plan for that much RAM instead, e.g. 16GiB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say beforehand whether it fits, how, and how long it takes; nothing is started."""
    from app import tables
    from app.config import load_settings
    from app.planning import Asked

    width, height = _size(size)
    asked = Asked(
        model=model, preset=preset, width=width, height=height, num_frames=frames, num_inference_steps=steps,
        vram=vram, ram=ram, gpus=gpus,
    )  # fmt: skip
    answer = tables.answer(load_settings(), asked, every=every, cliff=cliff)
    if as_json:
        _print_json(answer.document)
        return
    for part in answer.parts:
        _out.print(part, markup=False) if isinstance(part, str) else _out.print(part)


bench = typer.Typer(help="Measure this installation; the figures in the README come from here.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
@_guarded
def startup(
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each, alternating.")] = 5, as_json: AsJson = False
) -> None:
    """Time from process start to the page answering, against a bare Gradio page of the same version."""
    from app import bench as benches

    result = benches.startup(rounds)
    _print_json(result) if as_json else _out.print(benches.startup_text(result), markup=False)


@bench.command()
@_guarded
def overhead(
    rounds: Annotated[int, typer.Option(min=1, help="Warm clips of each, alternating.")] = 5, as_json: AsJson = False
) -> None:
    """Warm time of a built-in clip against a ten-line diffusers script, and whether the frames are identical."""
    from app import bench as benches

    result = benches.overhead(rounds)
    _print_json(result) if as_json else _out.print(benches.overhead_text(result), markup=False)


def _size(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    width, x, height = text.lower().replace("*", "x").partition("x")
    if not (x and width.strip().isdecimal() and height.strip().isdecimal() and len(text) < 30):
        raise InvalidRequest(f"The size {text!r} is not WIDTHxHEIGHT, e.g. 768x512.", field="size")
    return int(width), int(height)


@contextmanager
def _service() -> Iterator[JobService]:
    from app.config import load_settings
    from app.jobs import JobService

    service = JobService(load_settings())
    try:
        yield service
    finally:
        service.close()


@contextmanager
def _stop_signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask once for a cancel; a second Ctrl-C ends at once."""

    def on_signal(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.signal(name, on_signal) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _generate(service: JobService, draft: Draft, output: Path, *, overwrite: bool) -> Job:
    from app import terminal
    from app.schema import JobStatus

    job = service.submit(draft, owner=OWNER, output_path=output, overwrite=overwrite)
    for notice in job.notices:
        _err.print(f"Note: {notice.text}", markup=False)
    stop = threading.Event()
    with _stop_signals(stop), terminal.progress_bar(_err) as bar:
        while not job.status.final:
            job = service.wait(job.id, owner=OWNER, timeout=0.2)
            bar.show(service.progress(job.id) if job.status is JobStatus.RUNNING else None)
            if stop.is_set():
                service.cancel(job.id, owner=OWNER)
    return job


def _document(job: Job) -> dict[str, Any]:
    document = job.model_dump(mode="json")
    if job.report is not None:
        document["report"]["total_seconds"] = job.report.total_seconds
        document["report"]["peak_ram_bytes"] = job.report.peak_ram_bytes
        document["report"]["peak_vram_allocated_bytes"] = job.report.peak_vram()
        document["report"]["peak_vram_reserved_bytes"] = job.report.peak_vram(reserved=True)
    return document


def _raise_for(job: Job, *, quiet: bool) -> None:
    """The exit code of a job that ended otherwise than well."""
    from app.schema import ErrorKind, JobStatus

    if job.status is JobStatus.COMPLETED:
        return
    error: PocketreelError
    if job.status is JobStatus.CANCELED:
        error = GenerationCanceled("Nothing was written.")
    elif job.error_kind is ErrorKind.TIMEOUT:
        error = TimedOut(job.error or "")
    else:
        error = GenerationFailed(job.error or "It is not known why.", kind=job.error_kind)
    if quiet:  # the job's document is out already
        raise typer.Exit(error.exit_code)
    raise error


def main() -> None:
    """Entry point of `pocketreel` and `python -m app`."""
    for stream in (sys.stdout, sys.stderr):
        # Windows writes to a pipe in an old code page, in which most prompts cannot be written
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    app()

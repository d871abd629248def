"""The command line: serve, generate, probe, doctor; `cli_history` adds history, resume and replay, `cli_models` models,
`cli_plan` the rest.

People read the human output first; with `--json` exactly one JSON document goes to stdout and all else to stderr.
Exit codes: 0 done, 2 bad input, 3 does not fit, 4 failed, 124 timed out, 130 canceled.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from app import __version__
from app.cli_history import history, replay, resume
from app.cli_models import models
from app.cli_plan import PASSED_ON, bench, plan, simulate
from app.following import follow, opened_service, submit, tell
from app.shell import AsJson, guarded, out, parse_size, print_json

app = typer.Typer(
    name="pocketreel",
    help="Make video with open diffusion models on the GPU you own. Without a command, the page opens.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
@guarded
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
    service = JobService(settings, adopt=settings.resume_by_itself)
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
@guarded
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

    width, height = parse_size(size)
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
    with opened_service() as service:
        job = follow(service, submit(service, draft, output, overwrite=overwrite))
    tell(job, as_json=as_json)


@app.command()
@guarded
def probe(as_json: AsJson = False) -> None:
    """Show what this machine has: GPUs, RAM and its limits, disks."""
    from app import hardware, terminal
    from app.config import load_settings

    found = hardware.probe(load_settings())
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        out.print(terminal.hardware_summary(found), markup=False)


@app.command()
@guarded
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
        print_json([finding.model_dump(mode="json") for finding in findings])
    else:
        out.print(terminal.findings_summary(findings), markup=False)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(4)


app.add_typer(history, name="history")
app.command()(resume)
app.command()(replay)
app.command()(plan)
app.command(**PASSED_ON)(simulate)
app.add_typer(bench, name="bench")
app.add_typer(models, name="models")


def main() -> None:
    """Entry point of `pocketreel` and `python -m app`."""
    for stream in (sys.stdout, sys.stderr):
        # Windows writes to a pipe in an old code page, in which most prompts cannot be written
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    app()

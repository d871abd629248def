"""Measurements of this installation, each against the simplest thing that does the same. No torch in this process.

`startup`: process start to the page answering, against a bare Gradio "hello" page with the same Gradio.
`overhead`: a warm built-in clip through service, worker and export, against a ten-line diffusers script that makes and
writes the same clip; the frames must be identical. Runs alternate, so that a busy machine disturbs both alike.
`link`: bandwidths of this machine, kept for the planner.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app import hardware
from app.config import Settings, bundled
from app.errors import GenerationFailed
from app.hardware.measured import Link, Measured, disk_read_rate, keep_measured
from app.jobs import JobService
from app.presets import format_bytes
from app.schema import Backend, Draft, JobStatus
from app.worker import command_line

_BARE_PAGE = """
import sys
import gradio as gr
with gr.Blocks() as page:
    gr.Markdown("hello")
page.launch(server_name="127.0.0.1", server_port=int(sys.argv[1]), ssr_mode=False, quiet=True, inbrowser=False)
"""

_TEN_LINES = """
import hashlib, json, sys, time
import numpy, torch
from diffusers import DiffusionPipeline
from imageio_ffmpeg import write_frames
folder, target, a = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(a.pop("threads"))
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
fps, seed = a.pop("fps"), a.pop("seed")
for line in sys.stdin:
    began = time.perf_counter()
    frames = pipe(**a, generator=torch.Generator("cpu").manual_seed(seed), output_type="np").frames[0]
    writer = write_frames(target, (a["width"], a["height"]), fps=fps, macro_block_size=1, ffmpeg_log_level="error")
    writer.send(None)
    pixels = numpy.ascontiguousarray((frames * 255).round().astype(numpy.uint8))
    for frame in pixels:
        writer.send(frame)
    writer.close()
    print(json.dumps([time.perf_counter() - began, hashlib.sha256(pixels.tobytes()).hexdigest()]), flush=True)
"""

_PROMPT = "a red ball bouncing on a blue background"


def startup(rounds: int) -> dict[str, Any]:
    """Seconds until the page answers, `rounds` starts of each; medians and their ratio."""
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            port = _free_port()
            bare.append(_until_answer([sys.executable, "-c", _BARE_PAGE, str(port)], port, folder))
            port = _free_port()
            ours.append(
                _until_answer([sys.executable, "-m", "app", "serve", "--no-browser", "--port", str(port)], port, folder)
            )
    return _compared(bare, ours)


def startup_text(result: dict[str, Any]) -> str:
    return (
        f"page up after {result['ours_seconds']:.2f} s; a bare Gradio page after {result['bare_seconds']:.2f} s "
        f"(medians of {result['rounds']}): {result['ratio']:.2f}x"
    )


def overhead(rounds: int) -> dict[str, Any]:
    """Warm seconds of a built-in clip, end to end with the file written; and whether the frames are the same."""
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        service = JobService(Settings(data_dir=Path(folder)))
        try:
            draft = Draft(prompt=_PROMPT, seed=7)
            preview = service.preview(draft)
            request = preview.request
            arguments = request.model_dump(
                include={
                    "prompt",
                    "height",
                    "width",
                    "num_frames",
                    "num_inference_steps",
                    "guidance_scale",
                    "fps",
                    "seed",
                }
            )
            if request.negative_prompt is not None:
                arguments["negative_prompt"] = request.negative_prompt
            arguments["threads"] = preview.plan.threads or os.cpu_count() or 1
            target = str(Path(folder) / "bare.mp4")
            script = subprocess.Popen(
                [sys.executable, "-c", _TEN_LINES, str(bundled("assets", "demo")), target, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            same = True
            with script:
                for turn in range(rounds + 1):  # the first of each is cold and not counted
                    seconds, digest = _one_bare(script)
                    began = time.perf_counter()
                    frames_digest = _one_of_ours(service, draft)
                    if turn > 0:
                        bare.append(seconds)
                        ours.append(time.perf_counter() - began)
                    same = same and digest == frames_digest
        finally:
            service.close()
    return {**_compared(bare, ours), "frames_identical": same}


def overhead_text(result: dict[str, Any]) -> str:
    return (
        f"a warm clip takes {result['ours_seconds']:.2f} s; ten lines of diffusers {result['bare_seconds']:.2f} s "
        f"(medians of {result['rounds']}): {result['ratio']:.3f}x; frames "
        + ("identical" if result["frames_identical"] else "DIFFERENT")
    )


def link(settings: Settings, seconds: float = 30.0) -> Measured:
    """Measure in about that long, and keep for this machine: RAM to each GPU, RAM to RAM, reading from the disks.

    Raises:
        GenerationFailed: torch did not start; its message is in the error.
        BadInput: the data folder cannot be written.
    """
    found = hardware.probe(settings)
    environment = dict(os.environ)
    if nvidia := [gpu.uuid for gpu in found.gpus if gpu.backend is Backend.CUDA]:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(nvidia)  # so that torch counts them as the probe does
    command = [*command_line("link"), str(seconds / 2)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 120, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise GenerationFailed("torch did not answer in time. `pocketreel doctor` may tell why.") from None
    if answer.returncode != 0:
        raise GenerationFailed(
            f"torch could not be asked: {answer.stderr.strip()[-500:]} `pocketreel doctor` may help."
        )
    told = json.loads(answer.stdout.splitlines()[-1])
    folders = {disk.path for disk in (found.data_disk, found.spill_disk, found.download_disk) if disk is not None}
    disks: dict[str, float] = {}
    by_device: dict[int, float | None] = {}
    for folder in sorted(folders):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        device = place.stat().st_dev
        if device not in by_device:  # folders on one disk are measured once
            by_device[device] = disk_read_rate(place, seconds / 4)
        if (rate := by_device[device]) is not None:
            disks[str(folder)] = rate
    measured = Measured(
        at=datetime.now(UTC),
        links={
            gpu.uuid: Link.model_validate(told["links"][str(gpu.index)])
            for gpu in found.gpus
            if gpu.backend in (Backend.CUDA, Backend.ROCM) and str(gpu.index) in told["links"]
        },
        disks=disks,
        copy_bytes_per_second=told["copy"],
    )
    keep_measured(settings, measured)
    return measured


def link_text(measured: Measured, names: dict[str, str]) -> str:
    """For people; `names` are the GPUs' by UUID."""
    lines = [
        f"{names.get(uuid, uuid)}: {format_bytes(int(one.pinned))}/s from page-locked RAM, "
        f"{format_bytes(int(one.pageable))}/s from ordinary RAM"
        for uuid, one in measured.links.items()
    ] or ["no GPU that torch can use: no link to measure"]
    if measured.copy_bytes_per_second:
        lines.append(f"RAM to RAM, one thread: {format_bytes(int(measured.copy_bytes_per_second))}/s")
    lines += [f"reading from {folder}: {format_bytes(int(rate))}/s" for folder, rate in measured.disks.items()]
    return "\n".join([*lines, "Kept: plans on this machine use these figures from now on."])


def _one_bare(script: subprocess.Popen[str]) -> tuple[float, str]:
    assert script.stdin is not None  # noqa: S101 - for the type checker
    assert script.stdout is not None  # noqa: S101
    script.stdin.write("\n")
    script.stdin.flush()
    answer = script.stdout.readline()
    if not answer:
        raise GenerationFailed("The ten-line script ended early; its message stands above.")
    seconds, digest = json.loads(answer)
    return seconds, digest


def _one_of_ours(service: JobService, draft: Draft) -> str:
    job = service.submit(draft, owner="bench")
    while not job.status.final:
        job = service.wait(job.id, owner="bench", timeout=1.0)
    if job.status is not JobStatus.COMPLETED or job.report is None or job.report.output is None:
        raise GenerationFailed(job.error or "The clip was not made.")
    return job.report.output.frames_sha256


def _until_answer(command: list[str], port: int, folder: str) -> float:
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "POCKETREEL_DATA_DIR": folder}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                    answer.read()
                return time.perf_counter() - began
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None or time.perf_counter() - began > 120:
                    raise GenerationFailed(f"The page of `{' '.join(command[:4])} ...` did not come up.") from None
                time.sleep(0.02)
    finally:
        process.terminate()
        process.wait(10)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _compared(bare: list[float], ours: list[float]) -> dict[str, Any]:
    bare_median, ours_median = statistics.median(bare), statistics.median(ours)
    return {
        "rounds": len(bare),
        "bare_seconds": bare_median,
        "ours_seconds": ours_median,
        "ratio": ours_median / bare_median,
        "bare_all": bare,
        "ours_all": ours,
    }

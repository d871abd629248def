"""The videos themselves: only the owner's, only finished ones, only the file that the job's row names."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import FileResponse, PlainTextResponse, Response

from app.config import LOCAL_OWNER
from app.errors import NotFound
from app.schema import Job, JobStatus

if TYPE_CHECKING:
    from app.jobs import JobService


def media_url(job: Job, *, download: bool = False) -> str:
    """Where the page finds the video of a job."""
    return f"/media/{job.id}.mp4" + ("?download=1" if download else "")


def file_name(job: Job) -> str:
    """A name for a downloaded video: the first words of the prompt, and the seed."""
    words = re.findall(r"[a-z0-9]+", job.request.prompt.lower())[:6]
    return "-".join([*words, str(job.request.seed)])[:80] + ".mp4"


def video_gone(job: Job) -> str | None:
    """Why the video cannot be shown, in one word for the caller's sentence; None when it can."""
    return _gone(job.output_path, job)


def _gone(path: Path, job: Job) -> str | None:
    try:
        found = path.stat()
    except OSError:
        return "moved or deleted"
    if not stat.S_ISREG(found.st_mode):
        return "replaced by something that is not a file"
    if job.report and job.report.output and found.st_size != job.report.output.size_bytes:
        # `--overwrite` of a later run: this row's report would be shown beside another video
        return "replaced by another one"
    return None


def media_response(service: JobService, job_id: str, *, owner: str, download: bool) -> Response:
    """The video with support for ranges (seeking), or a plain 404 that gives nothing away to others."""
    try:
        job = service.get(job_id, owner=owner)
    except NotFound:
        return PlainTextResponse("There is no such video, or it is not yours.", 404)
    if job.status is not JobStatus.COMPLETED:
        return PlainTextResponse(f"This job has no video: it is {job.status}.", 404)
    if gone := video_gone(job):
        # a path on this machine is for the person who sits at it
        where = f": {job.output_path}" if owner == LOCAL_OWNER else "."
        return PlainTextResponse(f"The file was {gone}{where}", 404)
    return FileResponse(
        job.output_path,
        media_type="video/mp4",
        filename=file_name(job) if download else None,
        headers={"cache-control": "private, no-cache"},
    )

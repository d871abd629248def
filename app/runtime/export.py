"""Frames -> MP4: H.264 yuv420p, read back and checked; the settings travel in the file.

Everything is written in a scratch folder beside the target, so that the parent's rename is atomic and a stopped run
leaves one folder to delete. The report inside the file lacks the stage EXPORT, which ends after the file is written.
 Colours are tagged BT.709: players guess wrongly for untagged files. ffmpeg is imageio-ffmpeg's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from imageio_ffmpeg import get_ffmpeg_exe

from app.errors import InvalidOutput, OutputNotWritten
from app.events import VIDEO_NAME
from app.schema import JsonObject, OutputReport

METADATA_KEY = "comment"
"""The MP4 tag that holds the JSON; `ffprobe -show_format` prints it, `pocketreel history --from` reads it."""

_LUMA_TOLERANCE = 5.0
"""Mean brightness (of 255) by which the written file may differ from the frames; lossy coding stays below 2."""


def export(
    pixels: npt.NDArray[np.uint8],
    *,
    fps: int,
    target: Path,
    scratch: Path,
    metadata: JsonObject,
    on_frame: Callable[[int, int], None],
) -> OutputReport:
    """Write `pixels` ([num_frames, height, width, 3], RGB) to `scratch/VIDEO_NAME` and check what was written.

    The parent moves it to `target`, which the report names already, once this process has nothing more to do with it.
    `on_frame(done, total)` is called per frame written and may raise to stop. The scratch folder is the caller's to
    remove.

    Raises:
        OutputNotWritten: the disk is full, read-only or gone.
        InvalidOutput: the file that was written does not hold these frames.
    """
    even = _even(pixels)
    count, height, width = even.shape[:3]
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        video, tags = scratch / VIDEO_NAME, scratch / "tags.txt"
        tags.write_text(f";FFMETADATA1\n{METADATA_KEY}={_escape(json.dumps(metadata, ensure_ascii=False))}\n", "utf-8")
        _encode(even, fps, video, tags, on_frame)
        mean_luma = _check(video, even, lambda: on_frame(count, count))
        with video.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        return OutputReport(
            path=target,
            size_bytes=video.stat().st_size,
            sha256=digest,
            frames_sha256=hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest(),
            width=width,
            height=height,
            num_frames=count,
            fps=fps,
            padded=even.shape != pixels.shape,
            mean_luma=mean_luma,
        )
    except OSError as error:
        raise _not_written(target, error) from error


def _encode(
    pixels: npt.NDArray[np.uint8], fps: int, video: Path, tags: Path, on_frame: Callable[[int, int], None]
) -> None:
    count, height, width = pixels.shape[:3]
    arguments = [
        *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "pipe:0"),
        *("-f", "ffmetadata", "-i", str(tags), "-map", "0:v", "-map_metadata", "1"),
        *("-vf", "scale=out_color_matrix=bt709:out_range=tv:flags=accurate_rnd+full_chroma_int,format=yuv420p"),
        *("-c:v", "libx264", "-preset", "medium", "-crf", "16"),
        *("-color_primaries", "bt709", "-color_trc", "bt709", "-colorspace", "bt709", "-color_range", "tv"),
        *("-movflags", "+faststart", "-f", "mp4", "-y", str(video)),
    ]
    with _ffmpeg(arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None  # noqa: S101 - for the type checker; PIPE was asked for
        for index in range(count):
            on_frame(index, count)
            process.stdin.write(pixels[index].tobytes())
        process.stdin.close()
    on_frame(count, count)


def _check(video: Path, pixels: npt.NDArray[np.uint8], check: Callable[[], None]) -> float:
    """Decode the file again; returns its mean luma (0..255)."""
    count, height, width = pixels.shape[:3]
    # as it is stored: a conversion to grey is done with weights of ffmpeg's own choice
    arguments = ["-i", str(video), "-f", "rawvideo", "-pix_fmt", "yuv420p", "pipe:1"]
    size, luma = width * height * 3 // 2, width * height
    means: list[float] = []
    with _ffmpeg(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None  # noqa: S101 - as above
        while frame := process.stdout.read(size):
            check()
            if len(frame) < size:
                break
            means.append((float(np.frombuffer(frame, np.uint8, luma).mean()) - 16) * 255 / 219)
    if len(means) != count:
        raise InvalidOutput(
            f"The written video holds {len(means)} frames of {width}x{height} instead of {count}; it was discarded."
        )
    wanted = pixels.reshape(count, -1, 3).mean(axis=1) @ np.array([0.2126, 0.7152, 0.0722])
    worst = float(np.abs(np.array(means) - wanted).max())
    if worst > _LUMA_TOLERANCE:
        raise InvalidOutput(
            f"The written video differs from the frames (brightness by {worst:.0f} of 255); it was discarded."
        )
    return max(0.0, float(np.mean(means)))


@contextmanager
def _ffmpeg(
    arguments: list[str], *, stdin: int | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A running ffmpeg; ended by force when the block raises. A bad exit becomes an OSError with ffmpeg's own words."""
    process = subprocess.Popen(
        [get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", *arguments],
        stdin=stdin if stdin is not None else subprocess.DEVNULL,
        stdout=stdout if stdout is not None else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
    words: list[bytes] = []
    assert process.stderr is not None  # noqa: S101 - as above
    listener = threading.Thread(target=lambda pipe=process.stderr: words.append(pipe.read()), daemon=True)
    listener.start()
    try:
        yield process
    except BrokenPipeError:  # ffmpeg ended early: its exit and its words say why
        pass
    except BaseException:
        process.kill()
        raise
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()
        status = process.wait()
        listener.join()
        process.stderr.close()
    if status != 0:
        said = b"".join(words).decode("utf-8", "replace").strip()
        number = errno.ENOSPC if "No space left" in said else errno.EROFS if "Read-only" in said else errno.EIO
        raise OSError(number, said.splitlines()[-1] if said else f"ffmpeg ended with status {status}")


def _even(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """yuv420p halves the colour planes, so sides must be even: repeat the last row or column of an odd one."""
    height, width = pixels.shape[1:3]
    if height % 2 == 0 and width % 2 == 0:
        return pixels
    return np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _escape(text: str) -> str:
    """For ffmpeg's metadata format: `=`, `;`, `#`, backslash and newline are escaped with a backslash."""
    for character in ("\\", "=", ";", "#", "\n"):
        text = text.replace(character, "\\" + character)
    return text


def _not_written(target: Path, error: OSError) -> OutputNotWritten:
    if error.errno == errno.ENOSPC:
        return OutputNotWritten(f"The disk that holds {target.parent} is full. Free some space and generate again.")
    return OutputNotWritten(
        f"{target} could not be written: {error.strerror or error}. Check that {target.parent} exists and is writable."
    )

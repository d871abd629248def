"""What `pocketreel bench link` measured on this machine and keeps: bandwidths by GPU, and of the disks.

A file in the data folder, read at each probe. One that cannot be read counts as nothing measured, with a note.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from app.config import Settings
from app.errors import BadInput
from app.schema import Value

FILE: Final = "measured.json"
_CHUNK: Final = 16 * 1024**2
_MOST_BYTES: Final = 2 * 1024**3
_LEAST_BYTES: Final = 128 * 1024**2


class Link(Value):
    """Bytes a second from RAM to one GPU."""

    pinned: float = Field(gt=0)
    pageable: float = Field(gt=0)


class Measured(Value):
    """Everything that was measured, with when."""

    at: datetime | None = None
    links: dict[str, Link] = Field(default_factory=dict)
    """By the GPU's UUID."""
    disks: dict[str, float] = Field(default_factory=dict)
    """Bytes a second when reading, by folder."""
    copy_bytes_per_second: float | None = Field(None, gt=0)
    """Within RAM, on one thread."""


def read_measured(settings: Settings, notes: list[str]) -> Measured:
    """What is kept of this machine; nothing where nothing was measured."""
    path = settings.data_dir / FILE
    try:
        return Measured.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Measured()
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        notes.append(f"{path} cannot be read ({why}); `pocketreel bench link` measures anew.")
        return Measured()


def keep_measured(settings: Settings, measured: Measured) -> Path:
    """Write it so that a crash leaves the old file or the new one.

    Raises:
        BadInput: the data folder cannot be written.
    """
    path = settings.data_dir / FILE
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(measured.model_dump_json(indent=1) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise BadInput(
            f"{path} cannot be written: {error.strerror or error}. Check that you may write there and that the disk "
            "has room, or choose another folder with POCKETREEL_DATA_DIR."
        ) from error
    return path


def disk_read_rate(folder: Path, seconds: float = 8.0) -> float | None:
    """Bytes a second when reading a large file front to back; None where there is no room or no right to write one.

    The file is written first and, where the system has a way (Linux), dropped from its cache before it is read.
    Elsewhere the cache may flatter the figure.
    """
    size = _room(folder)
    if size < _LEAST_BYTES:
        return None
    path = folder / f".pocketreel-speed-{os.getpid()}"
    half = time.monotonic() + seconds / 2
    block = os.urandom(_CHUNK)  # a disk or file system that compresses must not win by it
    try:
        with path.open("wb", buffering=0) as file:
            written = 0
            while written < size and (written < _LEAST_BYTES or time.monotonic() < half):
                written += file.write(block)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _timed_read(path, seconds / 2)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            path.unlink()


def _room(folder: Path) -> int:
    """Bytes that a passing file may take: a tenth of what is free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return min(_MOST_BYTES, shutil.disk_usage(folder).free // 10)
    except OSError:
        return 0


def _timed_read(path: Path, seconds: float) -> float:
    began, done = time.perf_counter(), 0
    buffer = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while (count := file.readinto(buffer)) and time.perf_counter() - began < seconds:
            done += count
    return done / (time.perf_counter() - began)

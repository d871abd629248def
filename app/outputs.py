"""Where videos go: checked before minutes are spent, and put into place so that nothing is ever lost or overwritten."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from app.errors import InvalidRequest, OutputExists
from app.schema import Job


def scratch_of(job: Job) -> Path:
    """Where a job's half-written files lie: beside the target, so that the last rename stays on one file system."""
    return job.output_path.parent / f".pocketreel-{job.id}"


def check_output(path: Path, *, overwrite: bool) -> Path:
    """An absolute target that can be written.

    Raises:
        OutputExists: it exists and `overwrite` is False.
        InvalidRequest: not an .mp4 name, a folder, or in a folder that is missing or not writable.
    """
    try:
        path = path.expanduser().absolute()
        os.fsencode(path).decode("utf-8")  # it travels as JSON
        if path.suffix.lower() != ".mp4":
            raise InvalidRequest(f"The output must be named *.mp4, not {path.name!r}.", field="output")
        if path.is_dir():
            raise InvalidRequest(f"{path} is a folder. Give a file name ending in .mp4.", field="output")
        if not path.parent.is_dir():
            raise InvalidRequest(
                f"The folder {path.parent} does not exist. Create it, or choose another.", field="output"
            )
        if os.path.lexists(path) and not overwrite:
            raise OutputExists(f"{path} exists already. Give another name, or --overwrite.")
        # both names at their full length: a name that is too long fails here, not after an hour
        probe = path.parent / f".pocketreel-{secrets.token_hex(12)}"
        probe.mkdir()
        try:
            (probe / path.name).touch()
            (probe / path.name).unlink()
        finally:
            probe.rmdir()
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written: {error.strerror or error}. Choose another.", field="output"
        ) from None
    except (ValueError, RuntimeError) as error:  # NUL or surrogates in the name; ~somebody that does not exist
        raise InvalidRequest(f"The output {str(path)!r} is not a file name: {error}.", field="output") from None
    return path


def publish(source: Path, target: Path, *, overwrite: bool) -> None:
    """Move a finished file into place in one step; without `overwrite` an existing target is never touched.

    Raises:
        OutputExists: the target exists.
        OSError: the file system refused; `source` is still there and nothing else is.
    """
    if overwrite:
        source.replace(target)
    else:
        try:
            _move_if_free(source, target)
        except FileExistsError:
            raise OutputExists(
                f"{target} exists already and was left as it is. Give another name, or --overwrite."
            ) from None
    _make_durable(target.parent)


def publish_somehow(source: Path, target: Path, *, overwrite: bool, job_id: str) -> Path:
    """As `publish`, but hours of work are never thrown away for a name: then it becomes `NAME-JOBID.mp4`.

    Returns where the video is. Raises OSError if the folder cannot be written at all.
    """
    try:
        publish(source, target, overwrite=overwrite)
    except (OutputExists, PermissionError):  # it came in between; or on Windows a player has it open
        other = target.with_name(f"{target.stem}-{job_id}{target.suffix}")
        publish(source, other, overwrite=False)
        return other
    return target


def _move_if_free(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # fails if the target exists, also when two processes try at once
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links (exFAT, some network shares)
        with target.open("xb"):  # claims the name, or fails
            pass
        try:
            source.replace(target)
        except OSError:
            target.unlink(missing_ok=True)
            raise
    else:
        with suppress(OSError):  # it lies in the scratch folder, which goes anyway
            source.unlink()


def _make_durable(folder: Path) -> None:
    """A power cut must not take the name back that the history says is there."""
    if os.name != "posix":
        return
    with suppress(OSError):  # some network file systems do not sync folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

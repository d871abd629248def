"""Everything that can go wrong, as types. The message of each says what to do next.

    PocketreelError
    |- BadInput                  2   what was asked for is wrong; nothing was started
    |  |- InvalidRequest             prompt, size, frames, seed, ...
    |  |- ConfigError                config.toml, POCKETREEL_* or a flag
    |  |- PresetError                a file in presets/ (names file and line)
    |  |- ModelNotUsable             folder or Hub id that cannot be loaded safely
    |  |- OutputExists               the target exists and --overwrite was not given
    |  `- NotFound                   no such job, model or file (or not yours)
    |- PlanError                 3   it does not fit; names the memory that is short and the nearest change that fits
    |- GenerationFailed          4   it was started and failed; `kind` says how
    |  |- OutOfMemory                kind oom (device) or ram (host)
    |  |- WorkerCrashed              kind crash
    |  |- InvalidOutput              kind black or invalid: the video would be wrong, so none is exported
    |  |- OutputNotWritten           kind disk
    |  `- TimedOut             124   kind timeout
    |- GenerationCanceled      130
    |- NotTrainable              4   weights, optimizer or hooks disagree; names each module
    |  `- OffloadActive              offloading serves inference only: it must be taken off before training
    `- StoreError                4   the data folder or its database cannot be used

Recoverable and fatal differ by type: `BadInput` and `PlanError` come before anything runs, `GenerationFailed` after.
"""

from __future__ import annotations

from typing import ClassVar

from app.schema import ErrorKind


class PocketreelError(Exception):
    """Base of all errors that are shown to a person. `exit_code` is the process's exit code on the command line."""

    exit_code: ClassVar[int] = 4


class BadInput(PocketreelError):
    """Asked for something that cannot be; nothing was started."""

    exit_code = 2


class InvalidRequest(BadInput):
    """A field of the request is out of range. `field` is its diffusers name, for the page to point at."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(BadInput):
    """A setting (flag, environment, config.toml) is wrong."""


class PresetError(BadInput):
    """A file of the catalogue is wrong; the message begins with `file:line:`."""


class ModelNotUsable(BadInput):
    """A model folder or Hub id that cannot be loaded, or not safely."""


class OutputExists(BadInput):
    """The output file exists and overwriting was not asked for."""


class NotFound(BadInput):
    """No such job, model or file, or it belongs to somebody else."""


class PlanError(PocketreelError):
    """The request does not fit this machine."""

    exit_code = 3


class GenerationFailed(PocketreelError):
    """A run that had started did not end with a video."""

    kind: ErrorKind = ErrorKind.INVALID

    def __init__(self, message: str, *, kind: ErrorKind | None = None) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind


class OutOfMemory(GenerationFailed):
    """VRAM (kind `oom`) or RAM (kind `ram`) ran out during the run."""

    kind = ErrorKind.OOM


class WorkerCrashed(GenerationFailed):
    """The worker process ended by itself or was killed from outside."""

    kind = ErrorKind.CRASH


class InvalidOutput(GenerationFailed):
    """The frames or the written file are wrong (black, NaN, truncated), so nothing is exported."""

    kind = ErrorKind.BLACK


class OutputNotWritten(GenerationFailed):
    """The finished video could not be written: disk full, folder gone or read-only."""

    kind = ErrorKind.DISK


class TimedOut(GenerationFailed):
    """The time limit passed; the worker was stopped from outside."""

    exit_code = 124
    kind = ErrorKind.TIMEOUT


class GenerationCanceled(PocketreelError):
    """Somebody canceled the run."""

    exit_code = 130


class NotTrainable(PocketreelError):
    """A training step would fail, or change other weights than those that are used."""


class OffloadActive(NotTrainable):
    """Something is offloaded, cast layer by layer or spread over devices: its gradients could be wrong silently."""


class StoreError(PocketreelError):
    """The data folder or its database cannot be used."""

"""Components whose blocks travel by our own engine: from the model's files (`disk`) or page-locked RAM (`stream`).

What is read from the files is on the card only while it works, like all that visits it, and is read anew for the next
visit. What waits in RAM keeps what is in no block, and the blocks that are to stay, on the card; only its slots go.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.errors import PlanError
from app.runtime.checkpoint_files import renaming
from app.runtime.placement.sharding import block_lists
from app.runtime.streaming import CheckpointSource, Source, Streamed, stream

SourceOf = Callable[[str, torch.nn.Module], Source]
"""A component's name and itself -> where its blocks are read from."""


def from_files(pipe: Any) -> SourceOf:
    """The files that the pipeline was loaded from.

    Raises (the function):
        PlanError: it was not loaded from a folder.
        ModelNotUsable: files that are missing, incomplete or damaged.
    """

    def source(name: str, module: torch.nn.Module) -> Source:
        folder = Path(str(getattr(pipe.config, "_name_or_path", "") or ""), name)
        if not folder.is_dir():
            raise PlanError(f"{name} is to be read from the disk, but the model was not loaded from a folder on it.")
        return CheckpointSource(folder, rename=renaming(module))

    return source


def say_device(module: torch.nn.Module, device: torch.device) -> Callable[[], None]:
    """Have `module.device` tell where it computes, not where its weights wait; returns what undoes it.

    Weights that were never loaded are on `meta` between visits, and Wan's pipeline asks where to send the prompt.
    """
    cls = type(module)

    def undo() -> None:
        module.__class__ = cls

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "device": property(lambda _self: device)}
    module.__class__ = type(cls.__name__, (cls,), names)
    return undo


def _planned(module: torch.nn.Module) -> list[str] | None:
    """The lists that the planner counts on, nested ones too; None: whatever the engine finds."""
    return [path for path, _ in block_lists(module)] or None


class Reading:
    """A visitor whose blocks are read from the disk."""

    def __init__(self, name: str, module: torch.nn.Module, device: torch.device, source: SourceOf) -> None:
        self._name, self._module, self._device, self._source = name, module, device, source
        self._streamed: Streamed | None = None

    def come(self) -> None:
        if self._streamed is None:
            source = self._source(self._name, self._module)
            self._streamed = stream(self._module, self._device, block_modules=_planned(self._module), source=source)

    def leave(self) -> None:
        if self._streamed is not None:
            self._streamed.remove()
            self._streamed = None


class Streaming:
    """A visitor whose slots are on the card while it works."""

    def __init__(self, module: torch.nn.Module, device: torch.device, resident_blocks: int) -> None:
        self.streamed = stream(module, device, block_modules=_planned(module), resident_blocks=resident_blocks)
        self.streamed.release()

    def come(self) -> None:
        if not self.streamed.slots:
            self.streamed.allocate()

    def leave(self) -> None:
        self.streamed.release()

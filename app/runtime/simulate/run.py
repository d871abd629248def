"""Run the whole pipeline of a model on a simulated machine under a given setup, and report what lived where, and when.

    result = simulate("wan2.1-t2v-1.3b", Shape(height=480, width=832, num_frames=81), Setup(...), MachineSpec(...))
    result.peak("cuda:0")

The stock `pipe(...)` runs, with the library's own offloading hooks. Stages are seen from outside, as the worker sees
them: ENCODE until the denoiser's first forward, DENOISE until the VAE's first decode after that, DECODE to the end.
"""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from app.runtime import placement
from app.runtime.simulate import families, placing
from app.runtime.simulate.devices import SimulatedMachine
from app.runtime.simulate.families import Family
from app.runtime.simulate.replay import replaying
from app.runtime.simulate.values import MachineSpec, Peak, Setup, Shape, Simulation
from app.runtime.simulate.watch import Watch
from app.schema import Stage

Apply = Callable[[Any], None]
"""Places the components of a pipeline, e.g. `lambda pipe: app.runtime.placement.place(pipe, plan)`."""


class Session:
    """A pipeline, built and placed on a simulated machine; it can be run as often as wanted. A context manager."""

    def __init__(
        self,
        model: str | Path | Family,
        setup: Setup | None = None,
        machine: MachineSpec | None = None,
        *,
        apply: Apply | None = None,
        prompt_tokens: int | None = None,
        replay: bool = True,
    ) -> None:
        """Args as of `simulate`."""
        self.family = model if isinstance(model, Family) else families.find(model)
        self.setup = setup if setup is not None else Setup()
        self.spec = machine if machine is not None else MachineSpec()
        # loading streams weights from disk in their final type, so what building takes here does not count
        self.machine = SimulatedMachine(self.spec.model_copy(update={"ram_bytes": None}))
        self.pipe: Any = None
        self._apply = apply
        self._prompt_tokens = prompt_tokens
        self._replay = replay
        self._load_peaks: tuple[Peak, ...] = ()
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        """Raises: as `simulate`, if the weights alone are too much or the model is unknown."""
        families.load_classes(self.family)
        with ExitStack() as exits:
            exits.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # hints about speed, and about kernels that are not run
            exits.enter_context(self.machine)
            exits.callback(setattr, self, "pipe", None)  # its tensors must go while the machine is there
            self.pipe = families.build_pipeline(self.family, self.setup, self._prompt_tokens)
            self.machine.host.capacity_bytes = self.spec.ram_bytes
            watch = Watch(self.machine)
            with watch.stage(Stage.LOAD), self._explained(watch):
                if self._apply is None:
                    placing.apply(self.pipe, self.setup)
                else:
                    self._apply(self.pipe)
            self._load_peaks = tuple(watch.peaks)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def run(self, shape: Shape | None = None, output_type: str = "np") -> Simulation:
        """One run. Raises: as `simulate`."""
        began, running = time.monotonic(), self.machine
        shape = shape if shape is not None else default_shape(self.family)
        operations = running.operations
        running.guesses.clear()
        arguments = call_arguments(self.pipe, self.family, shape, output_type)
        watch = Watch(running)
        modules = {name: m for name, m in self.pipe.components.items() if isinstance(m, torch.nn.Module)}
        with ExitStack() as exits:
            exits.enter_context(_no_garbage_collection())
            if self._replay:
                exits.enter_context(replaying(running, modules))
            exits.enter_context(watch.stages(self.pipe))
            exits.enter_context(self._explained(watch))
            try:
                output = self.pipe(**arguments)
            finally:
                placement.rest(self.pipe)  # the stock call skips this when it raises
            output_shape = _shape_of(output)
            del output
        return Simulation(
            model=self.family.model,
            pipeline=self.family.pipeline,
            machine=self.spec,
            setup=self.setup,
            shape=shape,
            peaks=(*self._load_peaks, *watch.peaks),
            timeline=tuple(watch.timeline),
            pinned_requested_bytes=running.host.pinned_requested_peak,
            pinned_bytes=running.host.pinned,
            disk_bytes=running.disk_bytes,
            output_shape=output_shape,
            operations=running.operations - operations,
            guesses=tuple(f"{where} ({count}x)" for where, count in running.guesses.items()),
            seconds=time.monotonic() - began,
            versions=versions(),
        )

    @contextmanager
    def _explained(self, watch: Watch) -> Iterator[None]:
        """Memory errors say when they came."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            error.add_note(f"in stage {watch.current}, {'/'.join(dict.fromkeys(self.machine.scope)) or 'pipeline'}")
            raise


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Tensors in reference cycles would go at moments that depend on all that ran before in the process."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def simulate(
    model: str | Path | Family,
    shape: Shape | None = None,
    setup: Setup | None = None,
    machine: MachineSpec | None = None,
    *,
    apply: Apply | None = None,
    output_type: str = "np",
    replay: bool = True,
) -> Simulation:
    """One run of a model.

    Args:
        model: a name of the catalogue, a folder in diffusers' layout, or a `Family`.
        shape: None: the model's defaults.
        setup: how the components are held; its dtypes count even when `apply` is given.
        apply: places the components instead of `setup`: a way to run the program's own code of placement.
        output_type: `np` as the worker asks for; `latent` leaves the decoding out.
        replay: see `replay.py`; False is slower and makes `reserved_bytes` exact.

    Raises:
        torch.OutOfMemoryError: a GPU is too small; a note says in which stage.
        MemoryError: RAM is too small; likewise.
        RuntimeError: operands of an operation on different devices, as on real hardware.
        ModelNotUsable: no such model.
    """
    tokens = shape.prompt_tokens if shape is not None else None
    with Session(model, setup, machine, apply=apply, prompt_tokens=tokens, replay=replay) as session:
        return session.run(shape, output_type)


def default_shape(family: Family) -> Shape:
    return Shape(height=family.height, width=family.width, num_frames=family.num_frames)


def call_arguments(pipe: Any, family: Family, shape: Shape, output_type: str) -> dict[str, Any]:
    """Arguments of this pipeline's `__call__`; ones that it does not know are left out, as the worker does."""
    known = inspect.signature(pipe.__call__).parameters
    guidance = shape.guidance_scale if shape.guidance_scale is not None else family.guidance_scale
    wanted: dict[str, Any] = {
        "prompt": "a cat",
        "height": shape.height,
        "width": shape.width,
        "num_frames": shape.num_frames,
        "num_inference_steps": shape.num_inference_steps,
        "guidance_scale": guidance,
        "generator": torch.Generator("cpu"),
        "output_type": output_type,
        **family.calls,
    }
    if family.image:
        wanted["image"] = Image.fromarray(np.zeros((shape.height, shape.width, 3), np.uint8))
    return {name: value for name, value in wanted.items() if name in known and value is not None}


def versions() -> dict[str, str]:
    """What a result depends on."""
    return {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers", "accelerate")}


def _shape_of(output: Any) -> tuple[int, ...]:
    frames = output.frames if hasattr(output, "frames") else output[0]
    return tuple(int(n) for n in np.shape(frames)) if not isinstance(frames, torch.Tensor) else tuple(frames.shape)

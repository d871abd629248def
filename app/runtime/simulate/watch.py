"""Watch a run from outside: a pipeline's stages, its components' calls, and the peak of each memory in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from app.runtime.simulate.devices import SimulatedMachine
from app.runtime.simulate.ledger import Mark
from app.runtime.simulate.values import Moment, Peak, Share
from app.schema import Stage

DENOISERS = ("transformer", "transformer_2", "unet")
DECODERS = ("vae", "audio_vae", "vocoder")


class Watch:
    """Keeps the peaks of stages and of each call of a component, by memory."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.peaks: list[Peak] = []
        self.timeline: list[Moment] = []
        self.current: Stage | None = None
        self._machine = machine
        self._ledgers = machine.ledgers()
        self._marks: dict[str, Mark] = {}
        self._calls: dict[str, int] = {}
        self._open: list[tuple[str, Stage, dict[str, Mark]]] = []

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """The stage ends with the block, also by an exception."""
        self.enter(stage)
        try:
            yield
        finally:
            self.leave()

    def enter(self, stage: Stage) -> None:
        if stage is self.current:
            return
        self.leave()
        self.current = stage
        self._marks = {device: ledger.set_mark() for device, ledger in self._ledgers.items()}

    def leave(self) -> None:
        if self.current is None:
            return
        for device, mark in self._marks.items():
            self._ledgers[device].close(mark)
            shares = sorted(mark.shares.items(), key=lambda item: (-item[1], item[0]))
            self.peaks.append(
                Peak(
                    device=device,
                    stage=self.current,
                    start_bytes=mark.start,
                    peak_bytes=mark.peak,
                    reserved_bytes=mark.reserved,
                    operation=mark.operation,
                    shares=tuple(Share(component=label.component, kind=label.kind, bytes=n) for label, n in shares),
                )
            )
        self.current = None

    @contextmanager
    def stages(self, pipe: Any) -> Iterator[None]:
        """Inside, the stages of a run of `pipe` are told apart and the calls of its components recorded."""
        handles = []
        wrapped: list[tuple[torch.nn.Module, str, Any]] = []
        modules = {name: m for name, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
        for name, module in modules.items():
            # children too: some pipelines call `text_encoder.model(...)`
            for part in (module, *module.children()):
                # first of all: what is brought for a call belongs to it
                handles.append(part.register_forward_pre_hook(self._begin_hook(name), prepend=True))
                handles.append(part.register_forward_hook(self._end_hook(name)))
            for method in ("encode", "decode"):
                if hasattr(module, method):
                    wrapped.append((module, method, module.__dict__.get(method)))
                    setattr(module, method, self._watched(name, method, getattr(module, method)))
        with self.stage(Stage.ENCODE):
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                for module, method, before in wrapped:
                    del module.__dict__[method]
                    if before is not None:
                        module.__dict__[method] = before

    def _begin_hook(self, name: str) -> Callable[..., None]:
        def begin(_module: torch.nn.Module, _args: Any) -> None:
            if name in DENOISERS:
                self.enter(Stage.DENOISE)
            elif name == "vocoder":
                self.enter(Stage.DECODE)
            self._begin(name)

        return begin

    def _end_hook(self, name: str) -> Callable[..., None]:
        def end(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
            self._end(name)

        return end

    def _watched(self, name: str, method: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if method == "decode" and name in DECODERS:
                self.enter(Stage.DECODE)
            self._begin(name)
            result = stock(*args, **kwargs)
            self._end(name)
            return result

        return call

    def _begin(self, name: str) -> None:
        self._machine.scope.append(name)
        if self._machine.scope.count(name) == 1:
            self._calls[name] = self._calls.get(name, 0) + 1
            marks = {device: ledger.set_mark() for device, ledger in self._ledgers.items()}
            self._open.append((name, self.current or Stage.ENCODE, marks))

    def _end(self, name: str) -> None:
        self._machine.scope.pop()
        if name in self._machine.scope:
            return
        _, stage, marks = self._open.pop()
        for device, mark in marks.items():
            self._ledgers[device].close(mark)
        self.timeline.append(
            Moment(
                stage=stage,
                component=name,
                number=self._calls[name],
                start_bytes={device: mark.start for device, mark in marks.items()},
                peak_bytes={device: mark.peak for device, mark in marks.items()},
                end_bytes={device: ledger.total for device, ledger in self._ledgers.items()},
            )
        )

"""Model offload: a component is on the card only while it works, and the whole of it.

accelerate's hooks do this too, but each of them knows its predecessor only: the VAE of an image-to-video pipeline,
which encodes first, stays on the card while the transformer denoises, and a component offloaded as a whole stays beside
one that is held otherwise. Here all that visit a card know of each other and of everybody else who begins to work on
it. Weights did not change by being used, so nothing is copied back: the copy on the card is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from app.runtime.placement.calls import moved, version_of


class Visitor(Protocol):
    """A component, or part of it, that is on a card only while it works. Both calls may come twice."""

    def come(self) -> None: ...

    def leave(self) -> None: ...


class Whole:
    """A component whose weights rest on the CPU and come to `device` for its work."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._resting: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """Of what is on the card: the parameter or buffer, its data on the CPU, its version when it came."""

    def come(self) -> None:
        """Bring the weights. One that does not fit any more takes back those that came before it."""
        if self._resting:
            return
        try:
            for tensor in _tensors(self._module):
                data = tensor.data
                if data.device != self._device:
                    tensor.data = data.to(self._device)
                    self._resting.append((tensor, data, version_of(tensor)))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Let go of the copies. What was written to meanwhile (a LoRA that is fused) is copied back instead."""
        known = set()
        for tensor, data, version in self._resting:
            known.add(id(tensor))
            if tensor.device == self._device:
                tensor.data = data if version_of(tensor) == version else tensor.data.to(data.device)
        if self._resting:
            for tensor in _tensors(self._module):
                if id(tensor) not in known and tensor.device == self._device:  # came while it was here: a LoRA
                    tensor.data = tensor.data.to("cpu")
        self._resting.clear()


class Visitors:
    """Everyone who visits a card. Who begins to work on it sends the others away first."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, list[Visitor]] = {}
        self._worker: dict[torch.device, object] = {}
        """Who worked last."""

    def add(self, device: torch.device, visitor: Visitor) -> None:
        self._by_device.setdefault(device, []).append(visitor)

    def make_room(self, device: torch.device, worker: object, coming: Visitor | None = None) -> None:
        """`worker` begins to work on `device`, and comes if it is a visitor."""
        for visitor in self._by_device.get(device, ()):
            if visitor is not coming:
                visitor.leave()
        if self._worker.get(device) is not worker:
            # it asks for other sizes: in blocks of memory that were cut for another one, it would not find room
            torch.cuda.empty_cache()
            self._worker[device] = worker
        if coming is not None:
            coming.come()

    def rest(self) -> None:
        """All leave."""
        for visitors in self._by_device.values():
            for visitor in visitors:
                visitor.leave()


class Turn:
    """Around each call of a component: visitors of its devices leave, it comes if it is one, its arguments follow it.

    `devices` are all that it works on; the first one takes its arguments, and is where it comes as a visitor. Arguments
    move even on the main device: a pipeline may ask a component that rests on the CPU where it is, and send them there.
    Results go back to `main`, where the pipeline computes.
    """

    def __init__(
        self, visitors: Visitors, devices: Sequence[torch.device], main: torch.device, visitor: Visitor | None = None
    ) -> None:
        self._visitors, self._main, self._visitor = visitors, main, visitor
        self._device, *self._others = devices

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for other in self._others:
            self._visitors.make_room(other, self)
        self._visitors.make_room(self._device, self, self._visitor)
        return moved(args, self._device), moved(kwargs, self._device)

    def after(self, result: Any) -> Any:
        return result if self._device == self._main else moved(result, self._main)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, shared ones once."""
    yield from module.parameters()
    yield from module.buffers()

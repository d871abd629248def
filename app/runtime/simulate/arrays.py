"""numpy arrays that stand for host memory of a simulated machine without taking any real memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

if TYPE_CHECKING:
    from app.runtime.simulate.devices import SimulatedMachine


class SimulatedArray(np.ndarray[Any, Any]):
    """Zeros of any shape over one element. Pipelines stack finished frames, so `np.stack` gives another one."""

    machine: SimulatedMachine | None
    held: object
    """What keeps the simulated bytes charged: the tensor it came from, or the place it was given."""

    @classmethod
    def of(cls, machine: SimulatedMachine, tensor: torch.Tensor) -> Self:
        """The array of a CPU tensor: same bytes, not charged again."""
        return cls._make(machine, tuple(tensor.shape), np.dtype(str(tensor.dtype).removeprefix("torch.")), tensor)

    @classmethod
    def _make(cls, machine: SimulatedMachine, shape: tuple[int, ...], dtype: np.dtype[Any], held: object) -> Self:
        array = np.broadcast_to(np.zeros((), dtype), shape).view(cls)
        array.machine, array.held = machine, held
        return array

    def __array_finalize__(self, source: object) -> None:
        self.machine = getattr(source, "machine", None)
        self.held = getattr(source, "held", None)

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        operands = tuple(args)
        if func is np.stack and self.machine is not None and not kwargs and len(operands) == 1:
            arrays = list(operands[0])
            shape, dtype = (len(arrays), *arrays[0].shape), arrays[0].dtype
            with_tensor = torch.empty(shape, dtype=getattr(torch, dtype.name))  # charged to the host
            return self._make(self.machine, shape, dtype, with_tensor)
        return super().__array_function__(func, types, operands, kwargs)

"""The tensors of a simulated machine with real numbers. `tests/runtime/simulated.py` says what they are good for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from tests.runtime.simulated import SimulatedMachine


class DeviceTensor(torch.Tensor):
    """A tensor that says it lives on a simulated device. `elem` is the CPU tensor with its numbers."""

    elem: torch.Tensor
    running: ClassVar[SimulatedMachine | None] = None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[DeviceTensor], data: torch.Tensor, requires_grad: bool = False, **_: object) -> Any:
        # accelerate rebuilds parameters as type(parameter)(data, **parameter.__dict__)
        return torch.nn.Parameter(data, requires_grad=requires_grad)

    @classmethod
    def wrap(cls, elem: torch.Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=device,
        )
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _running().operations.dispatch(func, args, kwargs or {})

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.elem!r}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    @property
    def data(self) -> Any:
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, DeviceTensor):
            new = _running().tensor(new)
        torch._C.TensorBase.data.__set__(self, new)  # type: ignore[attr-defined]
        self.elem = new.elem

    def numpy(self, *, force: bool = False) -> Any:
        """Raises:
        TypeError: the tensor is on a GPU.
        RuntimeError: it requires gradients.
        """
        if force:
            return self.detach().cpu().numpy()
        if self.device.type != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        _running().operations.read_on_host(self)
        with _disable_current_modes():
            return self.elem.numpy()

    def tolist(self) -> Any:
        here: DeviceTensor = self.detach().cpu()  # type: ignore[assignment]
        _running().operations.read_on_host(here)
        with _disable_current_modes():
            return here.elem.tolist()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        index = _running().operations.index
        if args and isinstance(
            args[0], str | torch.device
        ):  # torch takes a bare "cuda" for cuda:0, whatever is current
            device = torch.device(args[0])
            if device.type == "cuda":
                args = (torch.device("cuda", index(device)), *args[1:])
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return self.to(torch.device("cuda", _running().operations.index(device)), **kwargs)

    def data_ptr(self) -> int:
        if self.device.type == "cpu":
            _running().operations.read_on_host(self)  # whoever asks for the address may read there
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()

    def is_pinned(self, *_: object) -> bool:
        return _running().memory.place(self.elem, self.device).pinned

    def pin_memory(self, *_: object) -> torch.Tensor:
        return _running().operations.pin(self)

    def record_stream(self, stream: Any) -> None:
        _running().memory.place(self.elem, self.device).recorded.add(stream.timeline.number)


def _running() -> SimulatedMachine:
    if DeviceTensor.running is None:
        raise RuntimeError("This tensor was made on a simulated machine and cannot be used after it.")
    return DeviceTensor.running

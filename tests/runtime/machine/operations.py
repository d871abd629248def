"""Carrying out torch's operations on a simulated machine with real numbers: where they run, and in what order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from tests.runtime.machine.memory import Memory, Place
from tests.runtime.machine.ordering import Arrival, Timeline
from tests.runtime.machine.tensor import DeviceTensor

aten = torch.ops.aten
CPU = torch.device("cpu")

_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Here indices may lie on the CPU."""
_CONTENTS_UNUSED = {
    getattr(aten, name).default
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
} | {getattr(aten, name).default for name in ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")}
_WITHOUT_CONTENTS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Their result is memory that nobody has written yet."""


_RESIZING = {aten.resize_.default, aten.resize_as_.default, aten.set_.source_Tensor}


class Operation:
    """What the schema of an operator says about its arguments."""

    def __init__(self, func: Any) -> None:
        arguments = func._schema.arguments
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        self.written_positions = {i for i, flag in enumerate(written) if flag}
        self.written_names = {argument.name for argument, flag in zip(arguments, written, strict=True) if flag}
        self.mutates = bool(self.written_names)
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        self.is_view = any(not alias.is_write for alias in aliases)
        self.changes_shape = torch.Tag.inplace_view in func.tags
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        self.waits = any(tag in func.tags for tag in tags)
        """The host needs the result, so it waits for it."""
        self.only_looks = self.is_view or self.changes_shape
        """Nothing runs on the device."""
        self.reads_or_writes = not self.only_looks and func not in _CONTENTS_UNUSED


class Operands:
    """The arguments of one operation, and the plain tensors within them."""

    def __init__(self, known: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.outer_args, self.outer_kwargs = args, kwargs
        self.tensors: list[tuple[torch.Tensor, bool]] = []
        """Each with whether the operation writes to it."""
        self.by_elem: dict[int, torch.Tensor] = {}
        self.meta = False
        self.args = [self._plain(value, i in known.written_positions) for i, value in enumerate(args)]
        self.kwargs = {name: self._plain(value, name in known.written_names) for name, value in kwargs.items()}
        wanted = kwargs.get("device")
        if wanted is not None:
            self.meta = torch.device(wanted).type == "meta"

    def _plain(self, value: Any, write: bool) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "meta":
                self.meta = True
                return value
            self.tensors.append((value, write))
            elem = value.elem if isinstance(value, DeviceTensor) else value
            self.by_elem[id(elem)] = value
            return elem
        if isinstance(value, list | tuple):
            return type(value)([self._plain(entry, write) for entry in value])
        return value


class Operations:
    """What `__torch_dispatch__` calls, for modes and for tensors."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.device_index = 0
        """The current card."""
        self.count = 0
        self._known: dict[Any, Operation] = {}

    def index(self, device: object = None) -> int:
        """The number of the card that torch would take `device` for.

        Raises:
            RuntimeError: there is none of that number.
        """
        if isinstance(device, int):
            index = device
        elif device is None:
            index = self.device_index
        else:
            given = torch.device(device) if isinstance(device, str) else device
            found = getattr(given, "index", None)
            index = self.device_index if found is None else found
        if not 0 <= index < len(self.memory.gpus):
            raise RuntimeError(
                f"[simulated] CUDA error: invalid device ordinal {index} of {len(self.memory.gpus)} GPUs"
            )
        return index

    def tensor(self, plain: torch.Tensor) -> DeviceTensor:
        """A CPU tensor that was made elsewhere, as one of this machine. It shares the memory."""
        with _disable_current_modes():
            elem = plain.detach()
        self.memory.place(elem, CPU)
        return DeviceTensor.wrap(elem, CPU)

    def pin(self, tensor: DeviceTensor) -> torch.Tensor:
        """Raises:
        RuntimeError: not a CPU tensor.
        """
        if self.memory.place(tensor.elem, tensor.device).pinned:
            return tensor
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.device}' tensor: only dense CPU tensors can be pinned")
        self.read_on_host(tensor)
        with _disable_current_modes():
            elem = tensor.elem.clone(memory_format=torch.contiguous_format)
        self.memory.place(elem, CPU, pinned=True)
        return DeviceTensor.wrap(elem, CPU)

    def read_on_host(self, tensor: DeviceTensor) -> None:
        with self.memory.lock:
            self.memory.use(tensor.elem, tensor.device, self.memory.host, "reading", write=False)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one operation of torch on the devices of its operands.

        Raises:
            RuntimeError: operands on different devices, or a card that is not there.
            torch.OutOfMemoryError: no room for the result.
        """
        with self.memory.lock:
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += 1
        if func is aten.is_pinned.default:
            return False  # of a plain tensor; a simulated one has a method of its own
        if func is aten._pin_memory.default:
            return self.pin(self.tensor(args[0]))
        if func is aten._foreach_copy_.default:
            for into, source in zip(args[0], args[1], strict=True):
                self._dispatch(aten.copy_.default, (into, source), {"non_blocking": _non_blocking(func, args, kwargs)})
            return None
        if func in _RESIZING or (func.overloadpacket is aten.set_ and args[0].device.type == "cuda"):
            raise _resizing(func)
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = Operation(func)
        operands = Operands(known, args, kwargs)
        if operands.meta:
            return func(*operands.args, **operands.kwargs)
        device = self._device_of(func, operands)
        if func is aten.copy_.default and isinstance(args[0], DeviceTensor):
            source = args[1]
            if source.device != device:
                self._transfer(args[0].elem, device, source, _non_blocking(func, args, kwargs))
                return args[0]
        if func is aten._to_copy.default and device != args[0].device:
            return self._moved(args[0], device, operands.kwargs)
        return self._compute(func, known, operands, device)

    def _compute(self, func: Any, known: Operation, operands: Operands, device: torch.device) -> Any:
        name = str(func)
        pinned = bool(operands.kwargs.pop("pin_memory", False)) and device.type == "cpu"
        timeline = self.memory.host if known.only_looks else self.memory.enqueue(device)
        if known.reads_or_writes:
            for tensor, write in operands.tensors:
                if isinstance(tensor, DeviceTensor):
                    self.memory.use(tensor.elem, tensor.device, timeline, name, write=write)
        out = func(*operands.args, **operands.kwargs)
        if known.mutates:
            self._follow_shapes(func, known, operands)
        fresh = known.is_view or func in _WITHOUT_CONTENTS
        result = self._wrap(out, operands, device, pinned, None if fresh else timeline, name)
        if known.waits and timeline is not self.memory.host:
            self.memory.wait(timeline.behind)
        return result

    def _wrap(
        self, value: Any, operands: Operands, device: torch.device, pinned: bool, writer: Timeline | None, name: str
    ) -> Any:
        """What an operation gave, as tensors of that device. (Not a closure: it would refer to itself, and keep every
        operand until the garbage collector comes.)
        """
        if isinstance(value, list | tuple):
            return type(value)([self._wrap(entry, operands, device, pinned, writer, name) for entry in value])
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in operands.by_elem and name != "aten.lift_fresh.default":
            return operands.by_elem[id(value)]  # changed in place
        self.memory.place(value, device, pinned=pinned)
        if writer is not None:
            self.memory.use(value, device, writer, name, write=True)
        return DeviceTensor.wrap(value, device)

    def _follow_shapes(self, func: Any, known: Operation, operands: Operands) -> None:
        for tensor, write in operands.tensors:
            if not (write and isinstance(tensor, DeviceTensor)):
                continue
            if known.changes_shape:
                with no_dispatch():
                    func(*operands.outer_args, **operands.outer_kwargs)
            if tensor.shape != tensor.elem.shape or tensor.stride() != tensor.elem.stride():
                raise _resizing(func)

    def _device_of(self, func: Any, operands: Operands) -> torch.device:
        """Where an operation runs and its result will be."""
        found = {tensor.device for tensor, _ in operands.tensors if tensor.dim() or tensor.device.type != "cpu"}
        wanted = operands.kwargs.get("device")
        if wanted is not None:
            wanted = torch.device(wanted)
            operands.kwargs["device"] = CPU
            if wanted.type == "cuda":
                wanted = torch.device("cuda", self.index(wanted))
        if func is aten.copy_.default:
            return operands.tensors[0][0].device
        if func in _INDEXING:
            self._check_indices(operands)
            return operands.tensors[0][0].device
        if len(found) > 1:
            raise _mismatch(found)
        device = next(iter(found), CPU)
        for tensor, write in operands.tensors:
            if write and tensor.device != device:
                raise _mismatch({tensor.device, device})
        return device if wanted is None else wanted

    def _check_indices(self, operands: Operands) -> None:
        base = operands.outer_args[0]
        for index in operands.outer_args[1]:
            if index is not None and index.device not in (CPU, base.device):
                raise RuntimeError(
                    f"indices should be either on cpu or on the same device as the indexed tensor ({base.device})"
                )
        values = operands.outer_args[2] if len(operands.outer_args) > 2 else None
        if isinstance(values, torch.Tensor) and values.dim() and values.device != base.device:
            raise _mismatch({values.device, base.device})

    # -- copies between devices

    def _moved(self, source: torch.Tensor, device: torch.device, kwargs: dict[str, Any]) -> DeviceTensor:
        non_blocking = bool(kwargs.get("non_blocking"))
        plain = source.elem if isinstance(source, DeviceTensor) else source
        memory_format = kwargs.get("memory_format") or torch.preserve_format
        elem = torch.empty_like(plain, dtype=kwargs.get("dtype") or plain.dtype, memory_format=memory_format)
        # a copy to the host that does not block goes to pinned memory (ATen/native/TensorConversions.cpp)
        self.memory.place(elem, device, pinned=non_blocking and device.type == "cpu")
        self._transfer(elem, device, source, non_blocking)
        return DeviceTensor.wrap(elem, device)

    def _transfer(self, into: torch.Tensor, device: torch.device, source: torch.Tensor, non_blocking: bool) -> None:
        """Copy between devices, on the GPU's current stream. Blocking, the host waits for that stream.

        Source: ATen/native/cuda/Copy.cu. From or to memory that is not pinned, the host's side is done on return.
        """
        start, memory = source.device, self.memory
        given = source.elem if isinstance(source, DeviceTensor) else source
        if start.type == device.type:
            self._transfer_between_cards(into, device, given, start)
            return
        timeline = memory.enqueue(device if device.type == "cuda" else start)
        place = getattr((given if start.type == "cpu" else into).untyped_storage(), "place", None)
        pinned = isinstance(place, Place) and place.pinned
        host_side = timeline if pinned else memory.host
        if isinstance(source, DeviceTensor):
            memory.use(given, start, timeline if start.type == "cuda" else host_side, "a copy", write=False)
        memory.use(into, device, timeline if device.type == "cuda" else host_side, "a copy", write=True)
        if not non_blocking or (device.type == "cpu" and not pinned):
            into.copy_(given)
            memory.wait(timeline.behind)
            return
        value = given.to(into.dtype, copy=True).expand(into.shape).clone()
        region = int(into.storage_offset()), into.shape, into.stride()
        arrival = Arrival(timeline.number, timeline.tick, value, *region)
        into.copy_(_garbage(into.dtype))
        memory.place(into, device).uses.arrivals.append(arrival)

    def _transfer_between_cards(
        self, into: torch.Tensor, device: torch.device, given: torch.Tensor, start: torch.device
    ) -> None:
        """On the source's stream; both cards' streams wait for each other before and after."""
        here = self.memory.current(device.index)
        self.memory.current(start.index).follow(here.behind)
        timeline = self.memory.enqueue(start)
        self.memory.use(given, start, timeline, "a copy", write=False)
        self.memory.use(into, device, timeline, "a copy", write=True)
        into.copy_(given)
        here.follow(timeline.behind)

    def attention(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any) -> Any:
        """The CPU's own kernel on the numbers; torch would look for a CUDA kernel by the device's name.

        Raises:
            RuntimeError: operands on different devices.
        """
        operands = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
        if differentiable or not isinstance(query, DeviceTensor):
            # on a card torch would take a CUDA kernel; of sums and products it has the gradients
            with sdpa_kernel(SDPBackend.MATH) if query.device.type == "cuda" else contextlib.nullcontext():
                return _STOCK_ATTENTION(query, key, value, attn_mask, *rest, **options)
        devices = {tensor.device for tensor in operands}
        if len(devices) > 1:
            raise _mismatch(devices)
        device = devices.pop()
        with self.memory.lock, _disable_current_modes():
            timeline = self.memory.enqueue(device)
            for tensor in operands:
                if isinstance(tensor, DeviceTensor):
                    self.memory.use(tensor.elem, device, timeline, "attention", write=False)
            elems = [tensor.elem if isinstance(tensor, DeviceTensor) else tensor for tensor in operands]
            out = _STOCK_ATTENTION(*elems, *([None] if attn_mask is None else []), *rest, **options)
            self.memory.use(out, device, timeline, "attention", write=True)
            return DeviceTensor.wrap(out, device)


_STOCK_ATTENTION: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention


def _non_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`non_blocking` of a copy, which may be given by its place."""
    names = [argument.name for argument in func._schema.arguments]
    return bool(dict(zip(names, args, strict=False)).get("non_blocking", kwargs.get("non_blocking")))


def _garbage(dtype: torch.dtype) -> torch.Tensor:
    """All bits set: NaN in every floating type, -1 or the largest number in integers."""
    return torch.full((dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)


def _resizing(func: Any) -> NotImplementedError:
    return NotImplementedError(f"{func} changes the size of its argument's memory; not simulated.")


def _mismatch(devices: set[torch.device]) -> RuntimeError:
    names = sorted(map(str, devices), reverse=True)
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {names[0]} and {names[1]}!"
    )

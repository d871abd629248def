"""Simulated GPUs that compute: any number of cards of any size on a machine that has none, with real numbers.

    with SimulatedMachine(gpus=[8 * GIB, None]) as machine:
        pipe = FAMILIES["wan"]()                   # or machine.adopt(pipe), for one that was built before
        pipe.to("cuda:0")                          # raises torch.OutOfMemoryError where it does not fit
        video = pipe(...).frames                   # the numbers of the CPU, to the last bit
        machine.peak_bytes("cuda:0"), machine.hazards

Every tensor inside is a `DeviceTensor`: it says where it lives and holds a plain CPU tensor that does the arithmetic.
Memory is charged by storage, in steps of 512 bytes as CUDA does, and given back when the storage dies. A copy between
host and GPU that does not block leaves NaN (-1 in integers) at its destination until what reads it is ordered behind
the copy; and every use, overwrite or release of bytes that another stream may still be using is put on
`machine.hazards`. The order is the worst that the synchronisation allows (`machine/ordering.py`).

`app.runtime.simulate` has the same devices without numbers, for models of real size; its replacements of `torch.cuda`
and of accelerate serve here too.

Not covered: backward passes on a card (autograd's engine wants a driver; on the CPU they work); the caching allocator's
blocks and fragmentation; workspace inside kernels; `torch.Generator("cuda")`, `torch.Stream`, `torch.Event`, CUDA
graphs, `torch.compile`; `resize_`, and `set_` on a card; operations in which CUDA refuses a 0-dim CPU
tensor (here all take one); pickling; numpy arrays of pinned memory, whose use nobody sees. Pinned memory is what lives,
without the blocks that PyTorch keeps for later. One machine at a time per process; what was made in it cannot be used
after it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import accelerate.big_modeling
import accelerate.hooks
import accelerate.utils
import accelerate.utils.modeling
import torch
from diffusers.utils.torch_utils import TorchDeviceBackend
from torch.utils._python_dispatch import TorchDispatchMode

from app.runtime.simulate import patches
from app.runtime.simulate.allocator import DeviceMemory
from tests.runtime.machine.memory import Memory
from tests.runtime.machine.operations import Operations
from tests.runtime.machine.streams import make_event_class, make_stream_class, on_stream
from tests.runtime.machine.tensor import DeviceTensor


class SimulatedMachine:
    """A machine with the given cards. Inside the `with` block torch believes in them; threads started there do too."""

    def __init__(self, gpus: Sequence[int | None], *, pinned_power_of_two: bool = True) -> None:
        """`gpus`: each card's capacity in bytes, None for one without limit.

        `pinned_power_of_two`: round pinned allocations up, as PyTorch does; False stands for
        `PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1`, which spares what is above 1 MiB.
        """
        self.memory = Memory(gpus, pinned_power_of_two=pinned_power_of_two)
        self.operations = Operations(self.memory)
        self.hazards = self.memory.hazards
        """Uses of memory in an order that nothing guarantees, in words."""
        self._peaks = [gpu.ledger.set_mark() for gpu in self.gpus]
        self._exits = contextlib.ExitStack()

    # -- life

    def __enter__(self) -> Self:
        """Raises:
        RuntimeError: another machine is being simulated in this process.
        """
        if DeviceTensor.running is not None:
            raise RuntimeError("Another machine is being simulated in this process; simulate one at a time.")
        with contextlib.ExitStack() as exits:
            exits.callback(self._end)
            DeviceTensor.running = self
            torch._C._ensureCUDADeviceGuardSet()  # CUDA's device guard, without a driver
            only_cpu = torch._C._only_lift_cpu_tensors()
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes it on the CPU first
            exits.callback(torch._C._set_only_lift_cpu_tensors, only_cpu)
            detect = TorchDeviceBackend._detect_device_type
            detect.cache_clear()
            exits.callback(detect.cache_clear)
            for owner, name, new in self._replacements():
                exits.enter_context(patches._replaced(owner, name, new))
            exits.enter_context(_Mode(self))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def _end(self) -> None:
        DeviceTensor.running = None
        self.memory.ended = True

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        cuda = patches._cuda(self) | self._streams()  # type: ignore[arg-type]
        yield from ((torch.cuda, name, new) for name, new in cuda.items())
        accelerator = patches._accelerator(self)  # type: ignore[arg-type]
        accelerator |= {name: cuda[name] for name in ("synchronize", "empty_cache", "current_stream")}
        yield from ((torch.accelerator, name, new) for name, new in accelerator.items())
        move = patches._set_module_tensor_to_device_for(self)  # type: ignore[arg-type]
        for module in (accelerate.hooks, accelerate.utils, accelerate.utils.modeling, accelerate.big_modeling):
            if hasattr(module, "set_module_tensor_to_device"):
                yield module, "set_module_tensor_to_device", move
        yield torch.nn.functional, "scaled_dot_product_attention", self.operations.attention
        yield torch.nn.Module, "_apply", self._adopting(torch.nn.Module._apply)
        yield threading.Thread, "run", self._with_mode(threading.Thread.run)

    def _streams(self) -> dict[str, Any]:
        memory, index = self.memory, self.operations.index
        stream_class = make_stream_class(self)

        def current_stream(device: object = None) -> Any:
            return stream_class(index(device), timeline=memory.current(index(device)))

        def default_stream(device: object = None) -> Any:
            return stream_class(index(device), timeline=memory.default(index(device)))

        def exchange_device(device: int) -> int:
            before = self.device_index
            if device >= 0:
                self.device_index = index(device)
            return before

        return {
            "Stream": stream_class,
            "Event": make_event_class(self),
            "stream": lambda stream: on_stream(self, stream),
            "set_stream": lambda stream: memory.set_stream(stream.timeline, stream.device.index),
            "current_stream": current_stream,
            "default_stream": default_stream,
            "synchronize": lambda device=None: memory.synchronize(index(device)),
            "empty_cache": lambda: None,  # blocks that nobody uses are not simulated
            "_exchange_device": exchange_device,
            "_maybe_exchange_device": exchange_device,
        }

    def _adopting(self, stock: Any) -> Any:
        def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
            self._adopt_own(module, {})
            return stock(module, fn, recurse)

        return _apply

    def _with_mode(self, stock: Any) -> Any:
        def run(thread: threading.Thread) -> None:
            with _Mode(self):  # dispatch modes belong to a thread
                stock(thread)

        return run

    # -- what `patches` asks a machine for

    @property
    def gpus(self) -> tuple[DeviceMemory, ...]:
        return self.memory.gpus

    def gpu(self, device: object = None) -> DeviceMemory:
        return self.gpus[self.operations.index(device)]

    @property
    def device_index(self) -> int:
        return self.operations.device_index

    @device_index.setter
    def device_index(self, index: int) -> None:
        self.operations.device_index = index

    def free_what_lags(self) -> None:
        """Nothing: only waiting frees what `record_stream` keeps."""

    # -- memory

    def used_bytes(self, device: str) -> int:
        """What lives on `cuda:N`, or on the `cpu` (of the tensors made or adopted here)."""
        return self.memory.ram.used if device == "cpu" else self.gpu(device).ledger.total

    def peak_bytes(self, device: str) -> int:
        """The most that lived there since the start or `reset_peaks`."""
        return self.memory.ram.peak if device == "cpu" else self._peaks[self.operations.index(device)].peak

    def reset_peaks(self) -> None:
        for index, gpu in enumerate(self.gpus):
            gpu.ledger.close(self._peaks[index])
            self._peaks[index] = gpu.ledger.set_mark()
        for tally in (self.memory.ram, self.memory.pinned):
            tally.peak = tally.used

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory, each allocation rounded as asked for; part of the `cpu`'s bytes."""
        return self.memory.pinned.used

    @property
    def pinned_peak_bytes(self) -> int:
        return self.memory.pinned.peak

    def tensor(self, plain: torch.Tensor) -> DeviceTensor:
        """A CPU tensor that was made elsewhere, as one of this machine. It shares the memory."""
        return self.operations.tensor(plain)

    def adopt(self, module_or_pipe: Any) -> Any:
        """Make the parameters and buffers of a module, or of a pipeline's components, this machine's. Returns it."""
        if isinstance(module_or_pipe, torch.nn.Module):
            components = [module_or_pipe]
        else:
            components = [c for c in module_or_pipe.components.values() if isinstance(c, torch.nn.Module)]
        known: dict[int, Any] = {}
        for component in components:
            for module in component.modules():
                self._adopt_own(module, known)
        return module_or_pipe

    def _adopt_own(self, module: torch.nn.Module, known: dict[int, Any]) -> None:
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None or isinstance(old, DeviceTensor) or old.device.type != "cpu":
                    continue
                if id(old) not in known:
                    new: Any = self.tensor(old)
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    known[id(old)] = (new, old)  # with the old one, so that its id is not used again
                tensors[name] = known[id(old)][0]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every operation of a thread to the machine, also those without a simulated operand."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DeviceTensor.running is not self.machine:
            return func(*args, **(kwargs or {}))  # a thread that outlives its machine
        return self.machine.operations.dispatch(func, args, kwargs or {})

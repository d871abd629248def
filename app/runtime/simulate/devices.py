"""Simulated devices: the program's own tensors, without their contents, charged to memories of any number and size.

    with SimulatedMachine(MachineSpec(gpus=(GpuSpec(capacity_bytes=8 * GIB),))) as machine:
        model = WanTransformer3DModel(...)      # takes no RAM
        model.to("cuda")                        # raises torch.OutOfMemoryError when it does not fit
        machine.gpus[0].ledger.total            # what torch.cuda.memory_allocated() would say

Two modes are stacked: PyTorch's `FakeTensorMode` gives every operation its result's shape, type and device (and raises
on operands from different devices); above it `_Charging` charges each new storage to its device and refunds it when
the storage dies. Storages die when Python and C++ let go of them, exactly as on real hardware.

Not covered: memory that libraries take outside torch's allocator (cuBLAS and cuDNN handles, NCCL), kernels' own
workspace except convolutions (`kernels.py`), time, and custom CUDA extensions.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from app.runtime.simulate import kernels, known
from app.runtime.simulate.allocator import DeviceMemory, HostMemory, Piece
from app.runtime.simulate.ledger import Label, Ledger
from app.runtime.simulate.values import GpuSpec, MachineSpec

aten = torch.ops.aten


class Held:
    """A storage's place in a memory. It hangs on the storage, so that it goes exactly when the storage goes."""

    __slots__ = (
        "__weakref__",
        "forgotten",
        "label",
        "lagging",
        "machine",
        "memory",
        "piece",
        "pinned",
        "serial",
        "size",
    )

    def __init__(self, machine: SimulatedMachine, memory: DeviceMemory | HostMemory, size: int, label: Label) -> None:
        self.machine = machine
        self.memory = memory
        self.size = size
        self.label = label
        self.piece: Piece | None = None
        self.pinned = False
        self.lagging = False
        self.forgotten = False
        machine.storages += 1
        self.serial = machine.storages

    @property
    def charged(self) -> int:
        """Bytes it takes, with the allocator's rounding."""
        return self.size if self.piece is None else self.piece.size

    def __del__(self) -> None:
        if self.forgotten:
            return
        if self.lagging and self.machine.spec.lagging_gpu:
            self.machine.lagging.append((self.memory, self.piece, self.label))
        else:
            self.give_back()

    def give_back(self) -> None:
        if isinstance(self.memory, DeviceMemory):
            if self.piece is not None:
                self.memory.release(self.piece, self.label)
        elif self.pinned:
            self.memory.release_pinned(self.size, self.label)
        else:
            self.memory.release(self.size, self.label)

    def relabel(self, label: Label) -> None:
        if label != self.label and not self.forgotten:
            self.memory.ledger.relabel(self.label, label, self.charged)
            self.label = label


class SimulatedMachine:
    """A machine with the given GPUs and RAM. Inside the `with` block torch believes in them, outside nothing stays.

    One at a time per process, on one thread: torch's functions are replaced for the whole process (`patches.py`),
    and dispatch modes belong to a thread.
    """

    running: SimulatedMachine | None = None

    def __init__(self, spec: MachineSpec | None = None) -> None:
        self.spec = spec if spec is not None else MachineSpec()
        self.gpus = tuple(
            DeviceMemory(f"cuda:{index}", gpu, caching=self.spec.caching_allocator, before_failing=self.free_what_lags)
            for index, gpu in enumerate(self.spec.gpus)
        )
        self.host = HostMemory(self.spec.ram_bytes, power_of_two=self.spec.pinned_power_of_two)
        self.lagging: list[tuple[Any, Piece | None, Label]] = []
        self.scope: list[str] = []
        """Names of the components at work, innermost last."""
        self.stream_id = 0
        self.device_index = 0
        self.operations = 0
        self.storages = 0
        self.disk_bytes = 0
        self.charging = True
        self.follow_values = True
        self.guesses: dict[str, int] = {}
        """Where the program asked for a value that nobody knows, and how often; it got a made-up one."""
        self._exits = contextlib.ExitStack()

    # -- life

    def __enter__(self) -> Self:
        """Raises:
        RuntimeError: another machine is being simulated in this process.
        """
        from app.runtime.simulate.patches import patched  # noqa: PLC0415 (patches needs this module)

        if SimulatedMachine.running is not None:
            raise RuntimeError("Another machine is being simulated in this process; simulate one at a time.")
        with contextlib.ExitStack() as exits:
            exits.callback(self._end)
            SimulatedMachine.running = self
            exits.enter_context(patched(self))
            exits.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            exits.enter_context(_Charging(self))
            exits.enter_context(torch.no_grad())
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    @staticmethod
    def _end() -> None:
        SimulatedMachine.running = None

    # -- memories

    def gpu(self, device: object = None) -> DeviceMemory:
        """The GPU that torch would take `device` for.

        Raises:
            RuntimeError: there is none of that number.
        """
        index = self.device_index
        if isinstance(device, int):
            index = device
        elif device is not None:
            given = torch.device(device) if isinstance(device, str) else device
            index = self.device_index if getattr(given, "index", None) is None else given.index  # type: ignore[attr-defined]
        if not 0 <= index < len(self.gpus):
            raise RuntimeError(f"[simulated] CUDA error: invalid device ordinal {index} of {len(self.gpus)} GPUs")
        return self.gpus[index]

    def label(self) -> Label:
        return Label(self.scope[-1] if self.scope else "pipeline", "activations")

    def charge(self, out: Any, func: Any, args: tuple[Any, ...]) -> None:
        """Charge the storages of an operation's results that were not there before."""
        if not self.charging:
            return
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if getattr(storage, "held", None) is not None:
                continue
            device = tensor.device
            size, label, operation = storage.nbytes(), self.label(), str(func)
            if device.type == "cuda":
                gpu = self.gpu(device)
                held = Held(self, gpu, size, label)
                held.piece = gpu.allocate(size, label, operation, self.stream_id)
                extra = kernels.workspace_bytes(func, args, tensor, conv3d=self.spec.conv3d_workspace)
                storage.held = held  # type: ignore[attr-defined]
                if extra:
                    self._use_workspace(gpu, extra, label, operation)
            elif device.type == "cpu":
                self.host.allocate(size, label, operation)
                storage.held = Held(self, self.host, size, label)  # type: ignore[attr-defined]
                extra = kernels.cpu_workspace_bytes(func, args, tensor)
                if extra:
                    self.host.allocate(extra, label, operation)
                    self.host.release(extra, label)

    def _use_workspace(self, gpu: DeviceMemory, size: int, label: Label, operation: str) -> None:
        label = Label(label.component, "workspace")
        try:
            piece = gpu.allocate(size, label, operation, self.stream_id)
        except torch.OutOfMemoryError:
            return  # cuDNN's plans are tried in turn; the next one needs less (ATen/native/cudnn/Conv_v8.cpp)
        gpu.release(piece, label)

    def ledgers(self) -> dict[str, Ledger]:
        """The books of each memory: `cuda:N` and `ram`."""
        return {**{gpu.name: gpu.ledger for gpu in self.gpus}, "ram": self.host.ledger}

    def touch(self, device: str, rise: dict[Label, int], operation: str) -> None:
        """Let a memory rise by so much and fall back at once, without taking part in the allocator's blocks.

        Raises:
            torch.OutOfMemoryError, MemoryError: there is no room for it.
        """
        size = sum(rise.values())
        if device == "ram":
            self.host.check(size)
        else:
            self.gpu(device).make_room(size)
        ledger = self.ledgers()[device]
        for label, n in rise.items():
            ledger.add(label, n, operation)
        for label, n in rise.items():
            ledger.remove(label, n)

    def own(self, tensor: torch.Tensor, owner: str) -> None:
        """From now on this tensor's storage is a weight of a component."""
        held = getattr(tensor.untyped_storage(), "held", None)
        if held is not None:
            held.relabel(Label(owner, "weights"))

    def forget(self, tensor: torch.Tensor) -> None:
        """This tensor's memory is never touched, so the system never backs it with any."""
        held = getattr(tensor.untyped_storage(), "held", None)
        if held is not None and not held.forgotten:
            held.give_back()
            held.forgotten = True

    # -- streams and pinned memory

    def record_stream(self, tensor: torch.Tensor) -> None:
        held = getattr(tensor.untyped_storage(), "held", None)
        if held is not None:
            held.lagging = True

    def free_what_lags(self) -> None:
        """The compute stream has caught up: what `record_stream` kept back is free."""
        waiting, self.lagging = self.lagging, []
        for memory, piece, label in waiting:
            memory.release(piece, label)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        held = getattr(tensor.untyped_storage(), "held", None)
        return held is not None and held.pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory, or the tensor itself where it lies there already."""
        if self.is_pinned(tensor):
            return tensor
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.type()}': only dense CPU tensors can be pinned")
        self.charging = False
        try:
            copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        finally:
            self.charging = True
        storage = copy.untyped_storage()
        label = self.label()
        self.host.allocate_pinned(storage.nbytes(), label, "pin_memory")
        held = Held(self, self.host, storage.nbytes(), label)
        held.pinned = True
        storage.held = held  # type: ignore[attr-defined]
        return copy

    # -- values

    def scalar(self, tensor: torch.Tensor) -> bool | int | float:
        """`.item()`: the true value where it is known, else a guess (True, 1 or 0.5), which is put on record."""
        self.free_what_lags()  # reading a value waits for the GPU
        value = known.value_of(tensor)
        if value is None and isinstance(tensor, FakeTensor):
            value = tensor.constant
        if value is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                return value.item()
        self.guess("a value")
        if tensor.dtype is torch.bool:
            return True
        return 0.5 if tensor.dtype.is_floating_point else 1

    def guess(self, what: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            "/torch/" in frame.f_code.co_filename or "/simulate/" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        where = f"{what} at {'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
        self.guesses[where] = self.guesses.get(where, 0) + 1


class _Charging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation before `FakeTensorMode` does, and charges what comes out of it."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine
        self._mutable: dict[Any, bool] = {}
        self._special = {
            aten._pin_memory.default: lambda args, _: machine.pin(args[0]),
            aten.is_pinned.default: lambda args, _: machine.is_pinned(args[0]),
            aten.record_stream.default: lambda args, _: machine.record_stream(args[0]),
            aten._local_scalar_dense.default: lambda args, _: machine.scalar(args[0]),
            aten.equal.default: self._equal,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        machine = self.machine
        special = self._special.get(func)
        if special is not None:
            return special(args, kwargs)
        machine.operations += 1
        if torch.Tag.dynamic_output_shape in func.tags:
            out = self._of_unknown_size(func, args, kwargs)
            if out is not None:
                machine.charge(out, func, args)
                return out
        out = func(*args, **kwargs)
        mutable = self._mutable.get(func)
        if mutable is None:
            mutable = self._mutable[func] = func._schema.is_mutable
        if not mutable:
            machine.charge(out, func, args)
            if machine.follow_values:
                known.follow(func, args, kwargs, out)
        elif machine.follow_values:
            known.follow_mutation(func, args, kwargs)
        return out

    def _equal(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
        left, right = known.value_of(args[0]), known.value_of(args[1])
        if left is None or right is None:
            if args[0].shape != args[1].shape:
                return False
            self.machine.guess("equality")
            return True
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.equal(left, right)

    def _of_unknown_size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Results whose size depends on contents: true where they are known, else the largest they can be."""
        value = known.evaluate(func, args, kwargs)
        if isinstance(value, torch.Tensor):
            out = torch.empty(value.shape, dtype=value.dtype, device=args[0].device)
            if out.numel() <= known.LIMIT:
                out.known_value = value  # type: ignore[attr-defined]
            return out
        if func is aten.nonzero.default:
            self.machine.guess("nonzero elements")
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=args[0].device)
        if func is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype is torch.bool:
            mask = known.value_of(args[1][0])
            if mask is None:
                self.machine.guess("a mask")
            count = args[1][0].numel() if mask is None else sum(map(bool, known.contents(mask)))
            rest = args[0].shape[args[1][0].dim() :]
            return torch.empty(count, *rest, dtype=args[0].dtype, device=args[0].device)
        return None


def unlimited(count: int = 1) -> MachineSpec:
    """`count` GPUs without limit: to find out what a run would like to have."""
    return MachineSpec(gpus=tuple(GpuSpec() for _ in range(count)))

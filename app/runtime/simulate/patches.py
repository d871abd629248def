"""Everything that is replaced so that torch, diffusers, transformers and accelerate believe in simulated devices.

One context manager; on leaving, by whatever way, every attribute is what it was before. What is replaced, and why:
- queries, streams and events of `torch.cuda` and `torch.accelerator`: they would wake a driver that is not there;
- `FakeTensorMode.avoid_device_init` and `init_gpu_context`: keep PyTorch from touching a device for a fake tensor;
- the setter of `FakeTensor.data`: the stock one leaves the old device, which breaks group offloading silently;
- `nn.Module._apply`: the stock one swaps parameters in ways fake tensors refuse; plain `.data` is what CUDA does;
- `pin_memory`, `is_pinned`, `record_stream`, `numpy`, `tolist`, `deepcopy`: they read memory that does not exist;
- `scaled_dot_product_attention`: see `kernels.attention`;
- accelerate's `set_module_tensor_to_device`: it rebuilds parameters as `type(old)(...)` and compares addresses;
- safetensors in diffusers' group offloading: files of a simulated disk;
- HunyuanVideo 1.5's mask, which the library fills row by row, in tens of thousands of operations;
- the blending of tiles, which is done row by row too: each row takes the same memory, so one shows all;
- diffusers' cached answer to "which accelerator is there".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate.big_modeling
import accelerate.hooks
import accelerate.utils
import accelerate.utils.modeling
import diffusers.hooks.group_offloading
import diffusers.models.autoencoders
import numpy as np
import torch
import torch._subclasses.fake_tensor
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.utils.torch_utils import TorchDeviceBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from app.runtime.simulate import kernels, known
from app.runtime.simulate.allocator import GIB
from app.runtime.simulate.arrays import SimulatedArray
from app.runtime.simulate.streams import make_event_class, make_stream_class, on_stream

if TYPE_CHECKING:
    from app.runtime.simulate.devices import SimulatedMachine

_UNLIMITED = 1024 * GIB
"""What a GPU without limit says about its size."""

_MISSING = object()


@contextlib.contextmanager
def patched(machine: SimulatedMachine) -> Iterator[None]:
    """Replace all of the above for the time of the block."""
    with contextlib.ExitStack() as exits:
        detect = TorchDeviceBackend._detect_device_type
        detect.cache_clear()
        exits.callback(detect.cache_clear)
        for owner, name, new in _replacements(machine):
            exits.enter_context(_replaced(owner, name, new))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    old = vars(owner).get(name, _MISSING)  # not getattr: it would bind, and see what is only inherited
    setattr(owner, name, new)
    try:
        yield
    finally:
        if old is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


def _replacements(machine: SimulatedMachine) -> Iterator[tuple[Any, str, Any]]:
    fake = torch._subclasses.fake_tensor
    yield FakeTensorMode, "avoid_device_init", property(lambda _: True)
    yield fake, "init_gpu_context", lambda _device: None
    yield from _tensor_replacements(machine)
    yield torch.nn.Module, "_apply", _apply_for(machine)
    stock = torch.nn.functional.scaled_dot_product_attention
    yield torch.nn.functional, "scaled_dot_product_attention", kernels.attention(machine.spec.attention, stock)
    yield from ((torch.cuda, name, new) for name, new in _cuda(machine).items())
    yield from ((torch.accelerator, name, new) for name, new in _accelerator(machine).items())
    move = _set_module_tensor_to_device_for(machine)
    for module in (accelerate.hooks, accelerate.utils, accelerate.utils.modeling, accelerate.big_modeling):
        if hasattr(module, "set_module_tensor_to_device"):
            yield module, "set_module_tensor_to_device", move
    yield diffusers.hooks.group_offloading, "safetensors", SimulatedDisk(machine)
    yield from _blends()
    yield HunyuanVideo15AttnBlock, "prepare_causal_attention_mask", staticmethod(_causal_mask)
    group = diffusers.hooks.group_offloading.ModuleGroup
    yield group, "_offload_to_disk", _offload_to_disk_for(machine, group._offload_to_disk)


# ------------------------------------------------------------------------------------------------------- torch.cuda


class _Properties:
    """What `torch.cuda.get_device_properties` says."""

    multi_processor_count = 128
    warp_size = 32
    gcnArchName = ""  # noqa: N815 (torch's name)
    is_integrated = False

    def __init__(self, name: str, capability: tuple[int, int], total: int) -> None:
        self.name = name
        self.major, self.minor = capability
        self.total_memory = total


def _cuda(machine: SimulatedMachine) -> dict[str, Any]:
    gpu = machine.gpu
    there = bool(machine.gpus)

    def total(device: object = None) -> int:
        return gpu(device).spec.capacity_bytes or _UNLIMITED

    def free(device: object = None) -> int:
        return gpu(device).free_bytes if gpu(device).spec.capacity_bytes is not None else _UNLIMITED

    def empty_cache() -> None:
        machine.free_what_lags()
        for memory in machine.gpus:
            memory.empty_cache()

    def set_device(device: object) -> None:
        machine.device_index = machine.gpus.index(gpu(device))

    def nothing(*_: object, **__: object) -> None:
        """Has no effect on memory."""

    def properties(device: object = None) -> _Properties:
        return _Properties(gpu(device).spec.name, gpu(device).spec.compute_capability, total(device))

    stream_class = make_stream_class(machine)
    default = stream_class(number=0)
    return {
        "is_available": lambda: there,
        "is_initialized": lambda: there,
        "device_count": lambda: len(machine.gpus),
        "_lazy_init": nothing,
        "init": nothing,
        "current_device": lambda: machine.device_index,
        "set_device": set_device,
        "synchronize": lambda _device=None: machine.free_what_lags(),
        "empty_cache": empty_cache,
        "ipc_collect": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "memory_allocated": lambda device=None: gpu(device).ledger.total,
        "memory_reserved": lambda device=None: gpu(device).ledger.reserved,
        "max_memory_allocated": lambda device=None: gpu(device).torch_peak.peak,
        "max_memory_reserved": lambda device=None: gpu(device).torch_peak.reserved,
        "reset_peak_memory_stats": lambda device=None: gpu(device).reset_peak(),
        "mem_get_info": lambda device=None: (free(device), total(device)),
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: gpu(device).spec.compute_capability,
        "get_device_name": lambda device=None: gpu(device).spec.name,
        "is_bf16_supported": lambda *_, **__: gpu().spec.compute_capability >= (8, 0),
        "Stream": stream_class,
        "Event": make_event_class(machine),
        "stream": lambda stream: on_stream(machine, stream),
        "current_stream": lambda _device=None: stream_class.current(),
        "default_stream": lambda _device=None: default,
    }


def _accelerator(machine: SimulatedMachine) -> dict[str, Any]:
    cuda = _cuda(machine)
    there = bool(machine.gpus)
    return {
        "is_available": cuda["is_available"],
        "device_count": cuda["device_count"],
        "current_accelerator": lambda *_, **__: torch.device("cuda") if there else None,
        "current_device_index": cuda["current_device"],
        "set_device_index": cuda["set_device"],
        "current_stream": cuda["current_stream"],
        "synchronize": cuda["synchronize"],
        "empty_cache": cuda["empty_cache"],
        "memory_allocated": cuda["memory_allocated"],
        "memory_reserved": cuda["memory_reserved"],
        "max_memory_allocated": cuda["max_memory_allocated"],
        "max_memory_reserved": cuda["max_memory_reserved"],
        "reset_peak_memory_stats": cuda["reset_peak_memory_stats"],
        "get_memory_info": cuda["mem_get_info"],
    }


# ----------------------------------------------------------------------------------------------------------- tensors


def _tensor_replacements(machine: SimulatedMachine) -> Iterator[tuple[Any, str, Any]]:
    stock_data = torch.Tensor.data

    def get_data(tensor: torch.Tensor) -> Any:
        return stock_data.__get__(tensor)  # type: ignore[attr-defined]

    def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
        owner = getattr(tensor, "owner", None)
        if owner is not None:
            machine.own(new, owner)  # before the old storage goes: at a peak the new one counts as what it is
        stock_data.__set__(tensor, new)  # type: ignore[attr-defined]
        if isinstance(new, FakeTensor) and isinstance(tensor, FakeTensor):
            tensor.fake_device = new.fake_device
            tensor.__dict__.pop("known_value", None)
            if "known_value" in new.__dict__:
                tensor.__dict__["known_value"] = new.__dict__["known_value"]

    def numpy(tensor: torch.Tensor, **_: object) -> Any:
        """Contents where they are known, else zeros that take no memory.

        Raises:
            TypeError: bfloat16, or a tensor on a GPU, as the real method.
        """
        if tensor.device.type != "cpu":
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() first.")
        if tensor.dtype is torch.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        value = known.value_of(tensor)
        if value is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                return value.clone().numpy()
        return SimulatedArray.of(machine, tensor)

    def tolist(tensor: torch.Tensor) -> Any:
        value = known.value_of(tensor)
        if value is None:
            machine.guess("a list of values")
            return np.zeros(tuple(tensor.shape)).tolist()
        with torch.utils._python_dispatch._disable_current_modes():
            return value.tolist()

    yield FakeTensor, "data", property(get_data, set_data)
    yield FakeTensor, "record_stream", lambda tensor, _stream: machine.record_stream(tensor)
    yield FakeTensor, "is_pinned", lambda tensor, *_: machine.is_pinned(tensor)
    yield FakeTensor, "pin_memory", lambda tensor, *_: machine.pin(tensor)
    yield FakeTensor, "numpy", numpy
    yield FakeTensor, "tolist", tolist
    yield FakeTensor, "__deepcopy__", lambda tensor, _memo: tensor.detach().clone()


# ----------------------------------------------------------------------------------------------------------- modules


def _apply_for(machine: SimulatedMachine) -> Any:
    def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in module.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            new = fn(parameter.data)
            if isinstance(parameter, FakeTensor):
                parameter.data = new
            else:  # a plain or meta parameter meets a simulated one
                module._parameters[name] = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _inherit(machine, fn(buffer), buffer)
        return module

    return _apply


def _inherit(machine: SimulatedMachine, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` takes the place of `old` in a module, so it belongs to the same component."""
    owner = getattr(old, "owner", None)
    if owner is not None:
        new.owner = owner  # type: ignore[attr-defined]
        machine.own(new, owner)
    return new


def _set_module_tensor_to_device_for(machine: SimulatedMachine) -> Any:
    def set_module_tensor_to_device(
        module: torch.nn.Module,
        tensor_name: str,
        device: Any,
        value: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        *_: object,
        **__: object,
    ) -> None:
        *path, name = tensor_name.split(".")
        for part in path:
            module = getattr(module, part)
        is_buffer = name in module._buffers
        old: Any = module._buffers[name] if is_buffer else module._parameters[name]
        if old is None:
            return
        if str(device) == "meta":
            # a fake tensor of no size stands for it: FakeTensorMode refuses real meta tensors
            new = torch.empty(old.shape, dtype=old.dtype, device="meta")
        else:
            wanted = dtype if value is not None and dtype is not None else old.dtype
            source = old if value is None else value
            new = source.detach().to(device=device, dtype=wanted)
        if is_buffer:
            module._buffers[name] = _inherit(machine, new, old)
        else:
            parameter = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            module._parameters[name] = _inherit(machine, parameter, old)  # type: ignore[assignment]

    return set_module_tensor_to_device


def _blends() -> Iterator[tuple[Any, str, Any]]:
    for vae in vars(diffusers.models.autoencoders).values():
        for name in ("blend_v", "blend_h", "blend_t"):
            if isinstance(vae, type) and name in vars(vae):
                yield vae, name, _one_row(vars(vae)[name])


def _one_row(stock: Any) -> Any:
    def blend(vae: Any, a: torch.Tensor, b: torch.Tensor, blend_extent: int) -> torch.Tensor:
        return stock(vae, a, b, min(blend_extent, 1))  # type: ignore[no-any-return]

    return blend


def _causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> torch.Tensor:
    """The mask's memory; nobody reads what is in it."""
    mask = torch.full((n_frame * n_hw, n_frame * n_hw), float("-inf"), dtype=dtype, device=device)
    return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)


# -------------------------------------------------------------------------------------------------------------- disk


def _offload_to_disk_for(machine: SimulatedMachine, stock: Any) -> Any:
    def _offload_to_disk(group: Any) -> None:
        stock(group)
        for tensor in group.tensor_to_key:  # empty placeholders as large as the weights: address space, not RAM
            machine.forget(tensor)

    return _offload_to_disk


class SimulatedDisk:
    """Stands for `safetensors` where diffusers offloads groups to disk: shapes are kept, bytes only counted."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.torch = self
        self._machine = machine
        self._files: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}

    def save_file(self, tensors: dict[str, torch.Tensor], path: str | Path) -> None:
        self._files[str(path)] = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        self._machine.disk_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def load_file(self, path: str | Path, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Raises:
        FileNotFoundError: nothing was saved there.
        """
        if str(path) not in self._files:
            raise FileNotFoundError(f"[simulated] No such file: {path}")
        return {
            key: torch.empty(shape, dtype=dtype, device=device)
            for key, (shape, dtype) in self._files[str(path)].items()
        }

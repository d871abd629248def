"""Components with packed weights: made while unquantized files are read, or read from files that hold them packed.

    module = load(cls, folder, torch.bfloat16, "bitsandbytes_4bit")   # unquantized files, tensor by tensor
    module = load_stored(cls, folder, torch.bfloat16)                 # a folder whose config.json says quantized
    module = load_gguf(cls, file, config_folder, torch.bfloat16)

The libraries' arithmetic packs and unpacks; the modules that hold the numbers are ours, for three reasons. Their
tensors are plain ones, so that everything that moves weights (visits, groups, streams, shards) moves these too, where
bitsandbytes' `Params4bit` leaves its scales behind and torchao's tensors ignore `.data`. All is made on the CPU, where
diffusers' quantizer for bitsandbytes refuses to work and loads onto the first card. And RAM holds the packed model and
one layer, never the unpacked model.

Not covered: torchao's and others' quantized folders (refused), double-packed scales (they are unpacked), backward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from app.errors import ModelNotUsable
from app.quantization import NF4_BLOCK, Quantization, WhileLoading, installed, method_of, missing
from app.runtime.checkpoint_files import CheckpointFiles, load_empty, renaming
from app.runtime.packed import (
    Packed,
    Packed4bit,
    Packed8bit,
    PackedGguf,
    PackedInt8,
    quantization_of,
    unpacked_gguf,
)
from app.runtime.placement.sharding import block_lists
from app.runtime.streaming.units import castable, weights_of

_CPU = torch.device("cpu")


# ----------------------------------------------------------------------------------------------------- what is packed


def layers_of(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Owner, name and layer of each Linear layer that is packed: of those in its block lists what 8-bit storage casts.

    What diffusers or transformers keep in float32 stays, in every number format: T5 casts its activations to the type
    of `wo`'s weight, whatever that is.
    """
    wanted = castable(module)
    seen: set[int] = set()
    for _, blocks in block_lists(module):
        for block in blocks:
            for owner in block.modules():
                for name, layer in owner.named_children():
                    if type(layer) is torch.nn.Linear and id(layer.weight) in wanted and id(layer) not in seen:
                        seen.add(id(layer))
                        yield owner, name, layer


def require(method: Quantization) -> None:
    """Raises:
    ModelNotUsable: its package is missing or too old; with the line to paste.
    """
    why = missing(method, installed())
    if why is not None:
        raise ModelNotUsable(f"Weights packed by {method} cannot be used: {why}")


def pack(method: WhileLoading, layer: torch.nn.Linear, weight: torch.Tensor, on: torch.device = _CPU) -> Packed:
    """A layer with the given weight (on the CPU), packed; a card (`on`) does it much faster."""
    weight = weight.to(on)
    shape = (layer.out_features, layer.in_features)
    with torch.no_grad():
        if method == "torchao_int8":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415 - seconds, and an extra

            alone = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            alone.weight = torch.nn.Parameter(weight, requires_grad=False)
            quantize_(alone, Int8WeightOnlyConfig())
            tensor: Any = alone.weight
            return PackedInt8(shape, tensor.qdata.cpu(), tensor.scale.cpu(), layer.bias)
        import bitsandbytes.functional as bnb  # noqa: PLC0415 - seconds, and an extra

        if method == "bitsandbytes_4bit":
            packed, state = bnb.quantize_4bit(
                weight.contiguous(), blocksize=NF4_BLOCK, compress_statistics=False, quant_type="nf4"
            )
            return Packed4bit(shape, packed.cpu(), state.absmax.cpu(), layer.bias)
        rows, scale, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
        return Packed8bit(shape, rows.cpu(), scale.cpu(), layer.bias)


# ------------------------------------------------------------------------------------------------------------ loading


def load(cls: Any, folder: Path, dtype: torch.dtype, method: WhileLoading, on: torch.device = _CPU) -> Any:
    """A component of a folder of unquantized safetensors, on the CPU, its weights packed one by one as they are read.

    `on` does the packing.

    Raises:
        ModelNotUsable: the package is missing; files missing, damaged or quantized already; nothing to pack in it.
    """
    require(method)
    module = load_empty(cls, folder, dtype)
    chosen = {id(layer.weight): (owner, name, layer) for owner, name, layer in layers_of(module)}
    if not chosen:
        raise ModelNotUsable(f"{cls.__name__} has no layers that could be quantized: choose a preset without.")
    files = CheckpointFiles(folder, rename=renaming(module))
    try:
        _fill(module, files, chosen, method, on)
    finally:
        files.close()
    return module


def _fill(module: Any, files: CheckpointFiles, chosen: dict[int, Any], method: WhileLoading, on: torch.device) -> None:
    everything = weights_of(module)
    for weight in everything:
        parameter = weight.parameter
        stored = files.find(weight.names, parameter.shape, parameter.dtype)
        found = torch.empty(parameter.shape, dtype=parameter.dtype)
        files.read(stored, found, parameter.dtype)
        if id(parameter) in chosen:
            owner, name, layer = chosen[id(parameter)]
            owner._modules[name] = pack(method, layer, found, on)
        else:
            weight.show(torch.nn.Parameter(found, requires_grad=False))
    for owner, name, layer in chosen.values():  # the bias may have been read after the weight
        owner._modules[name].bias = layer.bias
    _fill_buffers(module, files)


def _fill_buffers(module: torch.nn.Module, files: CheckpointFiles) -> None:
    """Those that the files hold; the rest was computed when the module was made."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set:
                continue
            full = f"{path}.{name}" if path else name
            found = torch.empty(buffer.shape, dtype=buffer.dtype)
            files.read(files.find([full], buffer.shape, buffer.dtype), found, buffer.dtype)
            owner._buffers[name] = found


def load_stored(cls: Any, folder: Path, dtype: torch.dtype) -> Any:
    """A component whose files hold packed weights, by the `quantization_config` of its config.json.

    Raises:
        ModelNotUsable: a method that is not known here, its package is missing, or damaged files.
    """
    quantized = method_of(json.loads((folder / "config.json").read_bytes()))
    method, title = quantized if quantized is not None else (None, "nothing")
    if method not in ("bitsandbytes_4bit", "bitsandbytes_8bit"):
        raise ModelNotUsable(
            f"{folder} is quantized by {title}, which Pocketreel cannot read. It reads bitsandbytes' folders and GGUF "
            "files; or take the unquantized model, and a preset with `quantization`."
        )
    require(method)
    module = load_empty(cls, folder, dtype, quantized=True)
    files = CheckpointFiles(folder, rename=renaming(module))
    try:
        names = set(files.names())
        for path, layer in list(module.named_modules()):
            kind = f"{path}.weight.absmax" if method == "bitsandbytes_4bit" else f"{path}.SCB"
            if isinstance(layer, torch.nn.Linear) and kind in names:
                read = _read_4bit if method == "bitsandbytes_4bit" else _read_8bit
                owner_path, _, name = path.rpartition(".")
                packed = read(files, path, layer)
                keeps = set(getattr(module, "_keep_in_fp32_modules", None) or ()) & set(path.split("."))
                module.get_submodule(owner_path)._modules[name] = _ordinary(packed, dtype) if keeps else packed
        for weight in weights_of(module):
            if weight.parameter.is_meta:
                parameter = weight.parameter
                found = torch.empty(parameter.shape, dtype=parameter.dtype)
                files.read(files.find(weight.names, parameter.shape, parameter.dtype), found, parameter.dtype)
                weight.show(torch.nn.Parameter(found, requires_grad=False))
        _fill_buffers(module, files)
    finally:
        files.close()
    if quantization_of(module) is None:
        raise ModelNotUsable(f"{folder} says that it is quantized by {title}, but none of its weights is.")
    return module


def _ordinary(packed: Packed, dtype: torch.dtype) -> torch.nn.Linear:
    """Unpacked for good: T5 would cast its activations to the integers of a packed `wo`, without a word."""
    layer = torch.nn.Linear(packed.in_features, packed.out_features, device="meta")
    layer.weight = torch.nn.Parameter(packed.unpacked(dtype), requires_grad=False)
    layer.register_parameter("bias", packed.bias)
    return layer


def _read_4bit(files: CheckpointFiles, path: str, layer: torch.nn.Linear) -> Packed:
    import bitsandbytes.functional as bnb  # noqa: PLC0415 - seconds, and an extra

    prefix = f"{path}.weight."
    state = {name: _whole(files, name) for name in files.names() if name.startswith(prefix)}
    found = bnb.QuantState.from_dict(qs_dict=state, device=torch.device("cpu"))
    scale = found.absmax
    if found.nested:
        scale = bnb.dequantize_blockwise(found.absmax, found.state2) + found.offset
    module = Packed4bit(
        (layer.out_features, layer.in_features), _whole(files, f"{path}.weight"), scale.float(), layer.bias
    )
    module.blocksize, module.quant_type = int(found.blocksize), str(found.quant_type)
    return module


def _read_8bit(files: CheckpointFiles, path: str, layer: torch.nn.Linear) -> Packed:
    scale = _whole(files, f"{path}.SCB").float()
    return Packed8bit((layer.out_features, layer.in_features), _whole(files, f"{path}.weight"), scale, layer.bias)


def _whole(files: CheckpointFiles, name: str) -> torch.Tensor:
    stored = files.stored(name)
    found = torch.empty(stored.shape, dtype=stored.dtype)
    files.read(stored, found, stored.dtype)
    return found


def load_gguf(cls: Any, file: Path, config: Path, dtype: torch.dtype) -> Any:
    """A transformer from a GGUF file, by diffusers' own reader, which knows the names of original checkpoints.

    Args:
        config: the component's folder in the model's repository, for its config.json.

    Raises:
        ModelNotUsable: the package is missing.
        ValueError: (by diffusers) the file is of another model.
    """
    require("gguf")
    from diffusers import GGUFQuantizationConfig  # noqa: PLC0415 - an extra
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter  # noqa: PLC0415

    module = cls.from_single_file(
        str(file),
        config=str(config),
        quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
        torch_dtype=dtype,
        local_files_only=True,
    )
    for path, layer in list(module.named_modules()):
        weight = layer._parameters.get("weight")
        if isinstance(layer, GGUFLinear) and isinstance(weight, GGUFParameter):
            packed = PackedGguf((layer.out_features, layer.in_features), weight.as_tensor(), None, layer.bias)
            packed.quant_type = weight.quant_type
            owner, _, name = path.rpartition(".")
            module.get_submodule(owner)._modules[name] = packed
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, GGUFParameter):  # convolutions, biases and tables are used as they are
                plain = unpacked_gguf(parameter.as_tensor(), parameter.quant_type).to(dtype)
                owner._parameters[name] = torch.nn.Parameter(plain, requires_grad=False)
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):  # they refuse moves that are fine with ours
        module.__dict__.pop(name, None)
    if quantization_of(module) is None:
        raise ModelNotUsable(f"{file} holds no quantized matrices: use the model's folder without it.")
    return module.requires_grad_(False).eval()

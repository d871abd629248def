"""Tensors and plain values in one file, written so that a reader finds it whole and right, or refuses it.

    write(path, tree, facts, device)   the new file, or the old one as it was
    read(path, facts, device)          the tree, or CheckpointRefused

The file is safetensors: the tensors, and in its header a JSON of the tree's shape, the facts and a checksum. A tree is
made of tensors, numpy arrays, numbers, strings, None, lists, tuples, dictionaries and diffusers' output classes; other
things cannot be kept (no pickle). Tensors that were where the pipeline computes come back to where it computes then.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from app.errors import PocketreelError
from app.schema import JsonObject

FORMAT = 1
_KEY = "pocketreel"


UNREADABLE = (
    OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError
)  # fmt: skip


class CheckpointRefused(PocketreelError):
    """The file is missing, damaged, or belongs to something else; the message says which."""


class NotKept(PocketreelError):
    """The tree holds something that has no place in a file."""


class _Packed(NamedTuple):
    shape: Any
    """The tree with a name in place of each tensor."""
    tensors: dict[str, torch.Tensor]


def size_of(tree: Any) -> int:
    """Bytes of the tensors in a tree."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(map(size_of, tree.values()))
    return sum(map(size_of, tree)) if isinstance(tree, list | tuple) else 0


def write(path: Path, tree: Any, facts: JsonObject, device: torch.device) -> None:
    """Put `tree` into the file `path`, whole or not at all.

    Args:
        facts: what it belongs to; `read` wants the same.
        device: where the pipeline computes: tensors that are there come back to where it computes when it is read.

    Raises:
        NotKept: something in the tree cannot be kept.
        OSError: the disk is full, read-only or gone.
    """
    packed = pack(tree, device)
    header = {"format": FORMAT, "facts": facts, "tree": packed.shape}
    header["sha256"] = _digest(header, packed.tensors)
    data = save(packed.tensors, metadata={_KEY: json.dumps(header)})
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    try:
        with half.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
        half.replace(path)
    except OSError:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        raise


def read(path: Path, facts: JsonObject, device: torch.device) -> Any:
    """The tree that `write` put there.

    Raises:
        CheckpointRefused: not there, not whole, not ours, or of other facts.
    """
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        if header["format"] != FORMAT:
            raise CheckpointRefused(f"{path.name} was written by another version of Pocketreel.")
        if header.pop("sha256") != _digest(header, tensors):
            raise CheckpointRefused(f"{path.name} is damaged (its checksum does not match).")
        others = sorted(name for name in {**facts, **header["facts"]} if facts.get(name) != header["facts"].get(name))
        if others:
            raise CheckpointRefused(f"{path.name} belongs to something else ({', '.join(others)} differ).")
        return unpack(header["tree"], tensors, device)
    except (*UNREADABLE, NotKept) as error:
        raise CheckpointRefused(f"{path.name} cannot be read ({type(error).__name__}).") from error


def pack(tree: Any, device: torch.device) -> _Packed:
    """The tree in a form that JSON can hold, and its tensors apart, on the CPU.

    Raises:
        NotKept: something in it is of none of the kinds above.
    """
    tensors: dict[str, torch.Tensor] = {}

    def put(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            name = f"t{len(tensors)}"
            # a copy: two names of one storage would be written once, and a view would bring all that it views
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            layout = list(value.stride()) if not value.is_contiguous() and 0 not in value.stride() else None
            return {"tensor": name, "travels": value.device.type == device.type, "stride": layout}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            return {"array": put(torch.from_numpy(np.array(value))), "scalar": isinstance(value, np.generic)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, list):
            return [put(entry) for entry in value]
        if isinstance(value, tuple) and type(value) is tuple:
            return {"tuple": [put(entry) for entry in value]}
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise NotKept(f"A dictionary with keys other than text cannot be kept: {list(value)[:3]}")
            inside = [[key, put(entry)] for key, entry in value.items()]
            kind = None if type(value) is dict else _name_of(type(value))
            return {"dict": inside, "class": kind}
        raise NotKept(f"A {type(value).__module__}.{type(value).__name__} cannot be kept.")

    return _Packed(put(tree), tensors)


def unpack(shape: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    """What `pack` took apart. Raises KeyError, ValueError or NotKept where the parts do not belong together."""

    def get(value: Any) -> Any:
        if isinstance(value, list):
            return [get(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            stored = tensors[value["tensor"]]
            # laid out in memory as it was, and aligned: kernels choose by both, and add up in another order then
            strides = value["stride"] or torch.empty(stored.shape, device="meta").stride()
            tensor = torch.empty_strided(stored.shape, strides, dtype=stored.dtype).copy_(stored)
            return tensor.to(device) if value["travels"] else tensor
        if "array" in value:
            array = get(value["array"]).numpy()
            return array[()] if value["scalar"] else array
        if "dtype" in value:
            return _dtype(value["dtype"])
        if "tuple" in value:
            return tuple(get(entry) for entry in value["tuple"])
        inside = {key: get(entry) for key, entry in value["dict"]}
        return inside if value["class"] is None else _class_of(value["class"])(**inside)

    return get(shape)


def _name_of(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    _class_of(name)
    return name


def _class_of(name: str) -> Any:
    """An output class by its name; a file must not be able to name anything else."""
    from diffusers.utils import BaseOutput  # noqa: PLC0415 - the file format itself needs no diffusers

    module, _, qualname = name.partition(":")
    found = getattr(importlib.import_module(module), qualname, None) if module.startswith("diffusers.") else None
    if not (isinstance(found, type) and issubclass(found, BaseOutput)):
        raise NotKept(f"A {name} cannot be kept.")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise NotKept(f"{name} is no number format.")
    return found


def _digest(header: JsonObject, tensors: dict[str, torch.Tensor]) -> str:
    """Of all that the file says: a wrong step count would spoil the frames as a wrong tensor does."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()

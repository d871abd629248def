"""Tiny models whose weights are packed, by each method, and the files they come from. All on the CPU.

folder(family)                       saved by diffusers, unquantized
transformer("gguf", family)          its transformer, loaded by `app.runtime.quantized`
pipeline("torchao_int8", family)     the whole pipeline around it
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import gguf
import torch

from app.runtime import quantized
from tests.runtime.families import FAMILIES

METHODS = ("gguf", "bitsandbytes_4bit", "bitsandbytes_8bit", "torchao_int8")
Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


@cache
def folder(family: str = "wan") -> Path:
    """Of the whole test process, which removes it."""
    root = Path(tempfile.mkdtemp(prefix="pocketreel-packed-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    FAMILIES[family]().save_pretrained(root / family)
    return root / family


def write_gguf(path: Path, state: dict[str, torch.Tensor], kind: Any = Q8_0, blocks: str = "blocks") -> Path:
    """A GGUF file as people share them: matrices of the blocks packed, all else in 16 or 32 bits."""
    writer = gguf.GGUFWriter(str(path), "wan")
    writer.add_string("general.name", "a tiny model")
    writer.add_array("general.tags", ["video", "tiny"])
    for name, tensor in state.items():
        values = tensor.detach().float().numpy()
        if blocks in name and name.endswith("weight") and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def gguf_file(family: str = "wan", kind: Any = Q8_0) -> Path:
    state = FAMILIES[family]().transformer.state_dict()
    return write_gguf(folder(family).parent / f"tiny-{family}-{kind.name}.gguf", state, kind)


def transformer(method: Any, family: str = "wan", dtype: torch.dtype = torch.float32) -> Any:
    cls, place = type(FAMILIES[family]().transformer), folder(family) / "transformer"
    if method == "gguf":
        return quantized.load_gguf(cls, gguf_file(family), place, dtype)
    return quantized.load(cls, place, dtype, method)


def pipeline(method: Any, family: str = "wan", **parts: Any) -> Any:
    """With its weights copied out of the mapped files, as `families.load` does and for the same reason."""
    cls = getattr(diffusers, diffusers.DiffusionPipeline.load_config(folder(family))["_class_name"])
    # not DiffusionPipeline.from_pretrained: it takes no notice of a given part that the class could do without
    parts = {"transformer": transformer(method, family), **parts}
    pipe = cls.from_pretrained(folder(family), dtype=torch.float32, **parts)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            for tensor in (*component.parameters(), *component.buffers()):
                tensor.data = tensor.data.clone()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def bytes_of(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))

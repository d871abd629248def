"""Weights of fewer bits: the methods, what each needs, what it is known not to do, and bytes of packed weights.

Only the matrices of the Linear layers inside a component's block lists are packed; norms, embeddings and the first and
last layers stay as they are, because little is saved there and much lost. All methods keep the packed weights and their
scales in plain tensors (`runtime.packed`), so they are held, moved and streamed like any others; what is left of
known limits is in `refusal`. Pure: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from packaging.version import InvalidVersion, Version

from app.devices import Backend, Gpu
from app.pip import pip_install
from app.value import Bytes, Value

Quantization = Literal["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao_int8", "gguf"]
"""`bitsandbytes_4bit` is NF4 in blocks of 64 weights, `bitsandbytes_8bit` LLM.int8(), `torchao_int8` weight-only."""
WhileLoading = Literal["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao_int8"]
"""What a preset can ask for: made of unquantized files while they are read."""

PACKAGES: Final[dict[Quantization, str]] = {
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "torchao_int8": "torchao",
    "gguf": "gguf",
}
OLDEST: Final = {"bitsandbytes": "0.50", "torchao": "0.18", "gguf": "0.19"}
"""Versions that were tried; the same numbers stand in pyproject's extras, which are named like the packages."""
WORDS: Final[dict[Quantization, str]] = {
    "bitsandbytes_4bit": "4 bits (bitsandbytes)",
    "bitsandbytes_8bit": "8 bits (bitsandbytes)",
    "torchao_int8": "8 bits (torchao)",
    "gguf": "the bits of its GGUF file",
}
NF4_BLOCK: Final = 64
"""Weights that share one float32 scale."""
WORTH_PACKING_BYTES: Final = 2**30
"""Text encoders below are left alone: CLIP's 0.25 GiB are no shortage, and small models lose more by rounding."""
GGUF_PIPELINES: Final = ("Wan", "LTX", "HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline", "Mochi")
"""How the pipelines begin whose transformer diffusers reads from a single file (`from_single_file`)."""


_HUB_FILE: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(.+\.gguf)")


class Stored(Value):
    """A component that lies quantized on this disk, or is named by its card as a GGUF file."""

    method: Quantization | None
    """None: in a way that this program cannot read."""
    title: str
    """For people: `GGUF Q4_K_M`, `bitsandbytes, 4 bit`, ..."""
    packed_bytes: Bytes = 0
    """Packed weights and their scales, the same whatever the rest is loaded in."""
    plain_parameters: int = 0
    """All others."""
    largest_parameters: int = 0
    """Of the largest packed matrix."""
    on_disk_bytes: Bytes = 0
    exact: bool = True
    """False: the file is not on this machine yet, so only its `bits` are known."""
    bits: float = 16.0
    """Of a weight, by the file's name; of no meaning where the bytes are known."""

    def bytes(self, dtype: str) -> int:
        """Once loaded, the rest in that number format."""
        return self.packed_bytes + self.plain_parameters * itemsize(dtype)


def itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def packed_bytes(method: Quantization, parameters: int, rows: int) -> int:
    """Bytes of matrices with so many weights and output features in all, scales included.

    Raises:
        ValueError: GGUF, whose bytes only its file knows.
    """
    if method == "bitsandbytes_4bit":
        return -(-parameters // 2) + 4 * -(-parameters // NF4_BLOCK)
    if method in ("bitsandbytes_8bit", "torchao_int8"):
        return parameters + 4 * rows
    raise ValueError("the bytes of a GGUF file are in its header")


def installed() -> dict[str, str]:
    """Versions of the packages that are there, by name. Nothing is imported."""
    found = {}
    for name in OLDEST:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def missing(method: Quantization, packages: Mapping[str, str]) -> str | None:
    """Why the method cannot be used with these packages, with the line to paste; None: it can."""
    package = PACKAGES[method]
    version, oldest = packages.get(package), OLDEST[package]
    paste = install_line(package)
    if version is None:
        return f"the package {package} is not installed; paste: {paste}"
    try:
        if Version(version) >= Version(oldest):
            return None
    except InvalidVersion:  # somebody's own build: let it show what it can
        return None
    return f"{package} {version} is older than {oldest}; paste: {paste}"


def install_line(package: str) -> str:
    """What to paste to get it, in the version that this program was tried with."""
    return pip_install(f"'pocketreel[{package}]'")


def unsupported(method: Quantization, gpu: Gpu) -> str | None:
    """Why a card is known not to compute with the method; None: nothing is known against it. By the packages' docs."""
    if method == "gguf":
        return None  # unpacked by plain torch operations
    if gpu.backend is not Backend.CUDA:
        return f"{PACKAGES[method]} was tried with NVIDIA's cards only, and {gpu.name} is none"
    capability = gpu.compute_capability or (0, 0)
    needed = {"bitsandbytes_4bit": (6, 0), "bitsandbytes_8bit": (7, 5), "torchao_int8": (8, 0)}[method]
    if capability >= needed:
        return None
    why = "computes in bfloat16" if method == "torchao_int8" else "needs it"
    have = ".".join(map(str, capability))
    return f"{method} {why}: compute capability {'.'.join(map(str, needed))} or newer, and {gpu.name} has {have}"


def refusal(strategy: str, storage_dtype: str | None) -> str | None:
    """Why a quantized component cannot be held so; None: it can. In words that follow the component's name."""
    if strategy == "disk":
        return (
            "is quantized, and blocks are read from the disk as they lie there: unpacked, or packed as one file. "
            "Choose another strategy"
        )
    if storage_dtype is not None:
        return "is quantized already: 8-bit floats on top would only round its scales"
    return None


def hub_file(where: str) -> tuple[str, str] | None:
    """`owner/repo/file.gguf` -> the repository and the file in it; None: a path."""
    match = None if Path(where).is_absolute() else _HUB_FILE.fullmatch(where)
    return (match[1], match[2]) if match else None


def method_of(config: Mapping[str, Any]) -> tuple[Quantization | None, str] | None:
    """How a component is quantized by the `quantization_config` of its config.json, and in words; None: it is not."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    name = str(found.get("quant_method") or "an unknown method")
    if name == "bitsandbytes":
        if found.get("load_in_4bit"):
            return "bitsandbytes_4bit", "bitsandbytes, 4 bit"
        return "bitsandbytes_8bit", "bitsandbytes, 8 bit"
    return None, name

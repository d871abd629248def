"""What lies in a GGUF file, read from its header in plain Python: no torch, no gguf package, no weights loaded.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, number of tensors and of pairs; the
pairs; for each tensor its name, dimensions (the innermost first), type and offset; then the data, aligned. Versions 2
and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from app.errors import ModelNotUsable

TYPES: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}  # fmt: skip
"""The types that diffusers 0.42 unpacks, by number: name, weights in a block, bytes of a block."""
PLAIN: Final = ("F32", "F16")
"""Types that are loaded as ordinary weights."""
_SCALARS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MOST: Final = 10_000_000
"""Of anything that is counted: beyond, the file is damaged."""
_AGAIN: Final = "copy or download the file again"


class GgufTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    """The outermost first, as torch has it."""
    type: str

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        block, size = next((block, size) for name, block, size in TYPES.values() if name == self.type)
        return self.parameters // block * size


def read_gguf(path: Path) -> tuple[GgufTensor, ...]:
    """The tensors of a GGUF file.

    Raises:
        ModelNotUsable: no GGUF file, damaged, cut short, or of a type that diffusers cannot unpack.
    """
    try:
        state = path.stat()
        return _read(path, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise ModelNotUsable(f"{path} cannot be read: {error.strerror or error}.") from error


@lru_cache(maxsize=16)  # a preview comes with every key that is pressed
def _read(path: Path, size: int, _mtime_ns: int) -> tuple[GgufTensor, ...]:
    with path.open("rb") as file:
        try:
            found, end = _header(path, file)
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ModelNotUsable(f"{path} is cut short or damaged: its header is not whole; {_AGAIN}.") from error
    if end > size:
        raise ModelNotUsable(f"{path} is cut short: {end - size} of its {end} bytes are missing; {_AGAIN}.")
    return found


def _header(path: Path, file: BinaryIO) -> tuple[tuple[GgufTensor, ...], int]:
    """The tensors, and where the last one ends."""
    magic, version = file.read(4), _number(file, "I")
    if magic != b"GGUF":
        raise ModelNotUsable(f"{path} is no GGUF file; {_AGAIN}, or name the right one.")
    if version not in (2, 3):
        raise ModelNotUsable(f"{path} is a GGUF file of version {version}; versions 2 and 3 can be read.")
    tensors, pairs = _count(file), _count(file)
    alignment = 32
    for _ in range(pairs):
        key = _text(file)
        value = _value(file, _number(file, "I"))
        if key == "general.alignment" and isinstance(value, int) and value > 0:
            alignment = value
    found, end = [], 0
    for _ in range(tensors):
        name = _text(file)
        shape = tuple(_number(file, "Q") for _ in range(min(_number(file, "I"), 8)))[::-1]
        kind, offset = _number(file, "I"), _number(file, "Q")
        if kind not in TYPES:
            known = ", ".join(name for name, _, _ in TYPES.values())
            raise ModelNotUsable(
                f"{path} holds {name} in the GGUF type {kind}, which diffusers cannot unpack. Choose a file of one of "
                f"the types {known}."
            )
        found.append(GgufTensor(name, shape, TYPES[kind][0]))
        end = max(end, offset + found[-1].bytes)
    start = -(-file.tell() // alignment) * alignment
    return tuple(found), start + end


def _number(file: BinaryIO, kind: str) -> int:
    return int(struct.unpack("<" + kind, file.read(struct.calcsize("<" + kind)))[0])


def _count(file: BinaryIO) -> int:
    count = _number(file, "Q")
    if count > _MOST:
        raise OverflowError(count)
    return count


def _text(file: BinaryIO) -> str:
    length = _count(file)
    raw = file.read(length)
    if len(raw) < length:
        raise struct.error("text")
    return raw.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> int | None:
    """The value, where it is one of the unsigned numbers that an alignment is; all others are passed over."""
    if kind in (4, 10):
        return _number(file, "I" if kind == 4 else "Q")
    if kind == _STRING:
        _text(file)
    elif kind == _ARRAY:
        inner, count = _number(file, "I"), _count(file)
        if inner in _SCALARS:
            file.seek(_SCALARS[inner] * count, 1)
        else:
            for _ in range(count):
                _value(file, inner)
    elif kind in _SCALARS:
        file.seek(_SCALARS[kind], 1)
    else:
        raise struct.error("type")
    return None

"""Weights straight from a component's own safetensors files: nothing is written, and RAM is bounded.

    module = load_empty(WanTransformer3DModel, folder / "transformer", torch.bfloat16)      # no weights at all
    streamed = stream(module, device, source=CheckpointSource(folder / "transformer"))

All headers and sizes are checked when the files are opened, every weight of the module is looked up when streaming
begins: what is wrong shows before minutes are spent. The files stay open, so one that is replaced goes on being read as
it was; one that is changed in place is refused. The bytes pass through the system's file cache, which gives way to
programs and so is not counted.

Not covered: damage that leaves sizes and headers right and is not zeros (no checksums; the download's hash is for
that), files whose weights must be computed and not only renamed and cast (quantized, merged experts: refused).
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch

from app.errors import ModelNotUsable

Rename = Callable[[str], str | None]
"""A name in the files -> the module's name for it; None: not wanted."""

AGAIN = "Delete the model's folder and download it again."
_NAMES = ("diffusion_pytorch_model", "model")
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
_CHUNK_BYTES = 4 * 2**20
_PAGE = 4096
"""What a power cut leaves empty comes in pages of the file system."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NUMBER_BYTES = 16
"""The last number before the zeros may end in some itself."""
_PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# -------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies. `offset` and `size` in bytes of the file."""

    file: _File
    name: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _File:
    """One safetensors file, open for reading until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()
        try:
            self._raw = path.open("rb", buffering=0)
        except OSError as error:
            raise ModelNotUsable(f"{path} cannot be read: {error.strerror}. {AGAIN}") from error
        try:
            self._seen = self._state()
            self.stored = tuple(self._header())
            self._refuse_empty_tail()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._turn:  # not in the middle of a read
            self._raw.close()

    def check(self) -> None:
        """Raises:
        ModelNotUsable: the file was written to since it was opened.
        """
        if self._state() != self._seen:
            raise ModelNotUsable(f"{self.path} was changed while it was in use. Start the video again.")

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` on.

        Raises:
            ModelNotUsable: there are not that many bytes, or the disk fails.
        """
        with self._turn:
            try:
                self._raw.seek(offset)
                done = 0
                while done < len(into):
                    count = self._raw.readinto(into[done:])
                    if not count:
                        raise ModelNotUsable(f"{self.path} ends too early. {AGAIN}")
                    done += count
            except (OSError, ValueError) as error:  # ValueError: closed meanwhile
                raise ModelNotUsable(
                    f"{self.path} cannot be read: {error}. Check that its disk is connected and healthy."
                ) from error

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._raw.fileno())
        return found.st_size, found.st_mtime_ns

    def _header(self) -> Iterator[Stored]:
        size, _ = self._seen
        length_bytes = bytearray(8)
        if size < 8:
            raise ModelNotUsable(f"{self.path} is {'empty' if size == 0 else 'cut short'}. {AGAIN}")
        self.read_into(0, memoryview(length_bytes))
        length = int.from_bytes(length_bytes, "little")
        no = f"{self.path} is no safetensors file, or is damaged"
        if length > min(size - 8, _LONGEST_HEADER):
            raise ModelNotUsable(f"{no}: its header would be {length} bytes long. {AGAIN}")
        header = bytearray(length)
        self.read_into(8, memoryview(header))
        try:
            tensors = {n: facts for n, facts in json.loads(header).items() if n != "__metadata__"}
            found = [
                (*map(int, facts["data_offsets"]), name, facts["dtype"], tuple(map(int, facts["shape"])))
                for name, facts in tensors.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelNotUsable(f"{no}: its header cannot be understood. {AGAIN}") from error
        position = 0
        for begin, end, name, type_name, shape in sorted(found):
            dtype = _DTYPES.get(type_name)
            if dtype is None:
                raise ModelNotUsable(f"{self.path} holds {name} as {type_name}, which cannot be streamed.")
            if begin != position or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise ModelNotUsable(f"{no}: {name} does not lie where its header says. {AGAIN}")
            position = end
            yield Stored(self, name, 8 + length + begin, end - begin, shape, dtype)
        if size != 8 + length + position:
            raise ModelNotUsable(
                f"{self.path} should be {8 + length + position} bytes long and is {size}: "
                f"its download was not finished, or it was damaged. {AGAIN}"
            )

    def _refuse_empty_tail(self) -> None:
        """A power cut can leave a file with its full size and zeros at the end."""
        end = self._seen[0]
        start = end
        floor = self.stored[0].offset if self.stored else end
        while start > floor:
            part = bytearray(min(_PAGE, start - floor))
            self.read_into(start - len(part), memoryview(part))
            kept = len(part.rstrip(b"\0"))
            start -= len(part) - kept
            if kept:
                break
        if end - start < _PAGE:
            return
        matrices = [stored for stored in self.stored if len(stored.shape) > 1 and stored.offset + stored.size > start]
        # trained models do end in zeros at times (a VAE's unused channels), but hardly just where a page begins
        torn = -start % _PAGE < _NUMBER_BYTES and bool(matrices)
        if torn or sum(stored.offset >= start for stored in matrices) > 1:
            raise ModelNotUsable(
                f"The last {end - start} bytes of {self.path} are zeros, as after a power cut or a full disk. {AGAIN}"
            )


class CheckpointFiles:
    """All tensors of a component's folder, by the module's names.

    Reads `diffusion_pytorch_model.safetensors` or `model.safetensors`, or what the index beside it lists; of a
    `variant`, e.g. `fp16`, the files that carry it in their names.

    Raises:
        ModelNotUsable: none there, damaged, cut short, or no safetensors.
    """

    def __init__(self, folder: Path, *, rename: Rename | None = None, variant: str | None = None) -> None:
        self.folder = folder
        self._files: list[_File] = []
        self._stored: dict[str, Stored] = {}
        paths, index = _paths(folder, variant)
        try:
            for path in paths:
                file = _File(path)
                self._files.append(file)
                for stored in file.stored:
                    if index is not None and index.get(stored.name) != path.name:
                        continue  # the index says which of two to take
                    name = stored.name if rename is None else rename(stored.name)
                    if name is not None:
                        self._stored[name] = stored
            self._refuse_incomplete(index)
        except BaseException:
            self.close()
            raise

    def _refuse_incomplete(self, index: dict[str, str] | None) -> None:
        there = {(stored.name, file.path.name) for file in self._files for stored in file.stored}
        missing = sorted(set((index or {}).items()) - there)
        if missing:
            name, file_name = missing[0]
            raise ModelNotUsable(f"{self.folder / file_name} lacks {name}, which its index lists. {AGAIN}")

    def close(self) -> None:
        for file in self._files:
            file.close()

    def names(self) -> list[str]:
        """What the files hold, in the module's names."""
        return list(self._stored)

    def stored(self, name: str) -> Stored:
        """Where that tensor lies, whatever its shape and type.

        Raises:
            ModelNotUsable: it is not there.
        """
        if name not in self._stored:
            raise ModelNotUsable(f"The files in {self.folder} have no {name}. {AGAIN}")
        return self._stored[name]

    def find(self, names: Sequence[str], shape: Sequence[int], dtype: torch.dtype) -> Stored:
        """The tensor that the module knows by one of these names, to be used in `dtype`.

        Raises:
            ModelNotUsable: it is not there, has another shape, or a type that casting alone does not turn into `dtype`.
        """
        stored = next((self._stored[name] for name in names if name in self._stored), None)
        if stored is None:
            raise ModelNotUsable(
                f"The files in {self.folder} have no weight {names[0]}. They belong to another version of the model, "
                "or not all were downloaded: download it again, or update Pocketreel."
            )
        if stored.shape != tuple(shape):
            raise ModelNotUsable(
                f"{names[0]} has the shape {list(stored.shape)} in {stored.file.path}, but {list(shape)} by the "
                f"model's config.json. {AGAIN}"
            )
        if stored.dtype is not dtype and not (stored.dtype in _PLAIN_FLOATS and dtype.is_floating_point):
            raise ModelNotUsable(
                f"{names[0]} is stored as {stored.dtype} in {stored.file.path}: it is quantized, and cannot be read "
                "block by block. Choose another strategy, or the model's unquantized files."
            )
        return stored

    def read(self, stored: Stored, into: torch.Tensor, via: torch.dtype) -> None:
        """Fill `into` (on the CPU, of the stored shape), cast from the file's type to `via` and from that to its own.

        Raises:
            ModelNotUsable: the file is damaged or was changed.
        """
        stored.file.check()
        if into.is_contiguous():
            self._read_flat(stored, into.view(-1), via)
        else:
            whole = torch.empty(stored.shape, dtype=into.dtype)
            self._read_flat(stored, whole.view(-1), via)
            into.copy_(whole)

    @staticmethod
    def _read_flat(stored: Stored, into: torch.Tensor, via: torch.dtype) -> None:
        if stored.size == 0:
            return
        if stored.dtype is via is into.dtype:
            raw = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]
            stored.file.read_into(stored.offset, raw)
            return
        width = stored.dtype.itemsize
        count = _CHUNK_BYTES // width
        chunk = torch.empty(min(count, into.numel()), dtype=stored.dtype)
        raw = memoryview(chunk.view(torch.uint8).numpy())  # type: ignore[arg-type]
        for first in range(0, into.numel(), count):
            size = min(count, into.numel() - first)
            stored.file.read_into(stored.offset + first * width, raw[: size * width])
            into[first : first + size] = chunk[:size].to(via)


def _paths(folder: Path, variant: str | None) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and which tensor is in which where an index says so."""
    middle = f".{variant}" if variant else ""
    for name in _NAMES:
        index = folder / f"{name}.safetensors.index{middle}.json"
        single = folder / f"{name}{middle}.safetensors"
        # where both are there, diffusers reads what the index lists, and transformers the single file
        if index.is_file() and not (name == "model" and single.is_file()):
            return _indexed(folder, index)
        if single.is_file():
            return [single], None
    raise ModelNotUsable(
        f"{folder} has no weights as .safetensors{f' of the variant {variant}' if variant else ''}. "
        "Download the model again, or choose another strategy."
    )


def _indexed(folder: Path, index: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        places = {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotUsable(f"{index} cannot be understood. {AGAIN}") from error
    files = sorted(set(places.values()))
    if not all(Path(file).name == file and file.endswith(".safetensors") for file in files):
        raise ModelNotUsable(f"{index} lists files that are not safetensors of its own folder, so it is not trusted.")
    return [folder / file for file in files], places


# ------------------------------------------------------------------------------------------------------------ modules


def load_empty(cls: Any, folder: Path, dtype: torch.dtype, *, quantized: bool = False) -> Any:
    """A component as `cls.from_pretrained(folder, dtype=dtype)` would make it, but its parameters are on meta.

    Buffers that no file holds are real. `renaming` says how the files call the weights. Of diffusers and transformers
    classes; the latter without generation settings. `quantized`: the caller knows, and packs the layers itself.

    Raises:
        ModelNotUsable: no such class, no readable config, or quantized.
    """
    if not (issubclass(cls, diffusers.ModelMixin) or (hasattr(cls, "config_class") and hasattr(cls, "_from_config"))):
        raise ModelNotUsable(f"{cls.__name__} is not a model of diffusers or transformers, so it cannot be streamed.")
    # what from_pretrained does: buffers are computed in the wanted dtype
    before = torch.get_default_dtype()
    try:
        if not quantized and "quantization_config" in json.loads((folder / "config.json").read_bytes()):
            raise ModelNotUsable(f"{folder} is quantized, and cannot be read block by block. Choose another strategy.")
        if issubclass(cls, diffusers.ModelMixin):
            config = cls.load_config(folder, local_files_only=True)
            torch.set_default_dtype(dtype)
            with accelerate.init_empty_weights():
                module = cls.from_config(config)
            kept = set(module._keep_in_fp32_modules or ())
            _set_dtypes(module, lambda name, _: torch.float32 if kept & set(name.split(".")) else dtype)
            module.register_to_config(_name_or_path=str(folder))
        else:
            config = cls.config_class.from_pretrained(folder, local_files_only=True)
            with accelerate.init_empty_weights():
                module = cls._from_config(config, dtype=dtype)
            module.tie_weights()  # init_empty_weights makes two parameters of one
            patterns = [re.compile(pattern.replace("*", ".*")) for pattern in module._get_dtype_plan(dtype)]
            _set_dtypes(module, lambda n, t: torch.float32 if any(p.search(n) for p in patterns) else t.dtype)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotUsable(f"{folder} has no readable config.json for {cls.__name__}: {error} {AGAIN}") from error
    finally:
        torch.set_default_dtype(before)
    return module.eval()


def _set_dtypes(module: torch.nn.Module, wanted: Callable[[str, torch.Tensor], torch.dtype]) -> None:
    """As loading does, for all floating parameters and buffers that the files hold. Ties stay ties."""
    seen: dict[int, torch.nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None or name in owner._non_persistent_buffers_set:
                continue
            dtype = wanted(f"{path}.{name}", tensor) if tensor.is_floating_point() else tensor.dtype
            if name in owner._buffers:
                owner._buffers[name] = tensor.to(dtype)
            else:
                parameter = seen.setdefault(id(tensor), torch.nn.Parameter(tensor.to(dtype), requires_grad=False))
                owner._parameters[name] = parameter


def renaming(module: Any) -> Rename | None:
    """How the files of a transformers model call its weights; None for diffusers models: as the module does.

    Raises:
        ModelNotUsable: (from the function) a weight that transformers computes from several.
    """
    if isinstance(module, diffusers.ModelMixin) or not hasattr(module, "base_model_prefix"):
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 (seconds)
    from transformers.core_model_loading import WeightRenaming, rename_source_key  # noqa: PLC0415

    changes = get_model_conversion_mapping(module)
    names = [change for change in changes if isinstance(change, WeightRenaming)]
    others = [change for change in changes if not isinstance(change, WeightRenaming)]
    state = module.state_dict()

    def rename(name: str) -> str:
        found, computed = rename_source_key(name, names, others, module.base_model_prefix, state)
        if computed is not None:
            raise ModelNotUsable(
                f"{name} is converted when {type(module).__name__} is loaded, so it cannot be read block by block. "
                "Choose another strategy."
            )
        return str(found)

    return rename

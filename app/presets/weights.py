"""What lies in safetensors files, read from their headers in plain Python: no torch, no weights loaded.

Format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian length N, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data; offsets count from the end of the header.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any, Final

from app.config import hub_folder
from app.errors import ModelNotUsable
from app.schema import ModelCard

_BITS: Final = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_WITHOUT_WEIGHTS: Final = re.compile(r"(Tokenizer|TokenizerFast|Processor|Scheduler|Extractor|Guidance|Guider)$")
_LONGEST_HEADER: Final = 100_000_000  # the limit of the safetensors library itself
_FETCH_AGAIN: Final = "copy or download the file again"


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of one safetensors file by name, each with `dtype`, `shape` and `data_offsets`.

    Raises:
        ModelNotUsable: no safetensors file, or one that was cut short or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if 8 + length > size:
                raise ModelNotUsable(
                    f"{path} is cut short ({size} bytes): not even its header is whole; {_FETCH_AGAIN}."
                )
            if length > _LONGEST_HEADER:
                raise ModelNotUsable(
                    f"{path} is not a safetensors file: its header would be {length} bytes; {_FETCH_AGAIN}."
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelNotUsable(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelNotUsable(f"{path} is not a safetensors file: its header is not JSON; {_FETCH_AGAIN}.") from error
    if not isinstance(header, dict):
        raise ModelNotUsable(f"{path} is not a safetensors file: its header holds no tensors; {_FETCH_AGAIN}.")
    header.pop("__metadata__", None)
    _check_offsets(path, header, size - 8 - length)
    return header


def _check_offsets(path: Path, header: dict[str, Any], data_bytes: int) -> None:
    """The tensors must fill the data part exactly, one after another, each as long as its shape says."""
    end = 0
    try:
        for name, tensor in sorted(header.items(), key=lambda item: tuple(map(int, item[1]["data_offsets"]))):
            begin, stop = map(int, tensor["data_offsets"])
            bits = _BITS.get(tensor["dtype"])
            wanted = None if bits is None else -(-math.prod(tensor["shape"]) * bits // 8)
            if begin != end or (wanted is not None and stop - begin != wanted):
                raise ModelNotUsable(
                    f'{path} is damaged: its tensor "{name}" has the wrong length or place; {_FETCH_AGAIN}.'
                )
            end = stop
    except (KeyError, TypeError, ValueError) as error:
        raise ModelNotUsable(f"{path} is not a safetensors file: its header does not fit; {_FETCH_AGAIN}.") from error
    if end > data_bytes:
        raise ModelNotUsable(
            f"{path} is cut short: {end - data_bytes} of its {end} bytes of weights are missing; {_FETCH_AGAIN}."
        )
    if end < data_bytes:
        raise ModelNotUsable(f"{path} has {data_bytes - end} bytes too many at its end; {_FETCH_AGAIN}.")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that `from_pretrained` reads in a component's folder: one file, or the shards of its index.

    Files of a variant (`*.fp16.safetensors`) are not counted: without `variant=` the library does not read them.

    Raises:
        ModelNotUsable: a shard of the index is missing, or the index cannot be read.
    """
    for stem in ("diffusion_pytorch_model", "model"):
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.is_file():
            return (single,)
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelNotUsable(f"{index} cannot be read: {error}; {_FETCH_AGAIN}.") from error
            missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
            if missing:
                raise ModelNotUsable(f"{folder} is not complete: {', '.join(missing)} is missing; {_FETCH_AGAIN}.")
            return tuple(folder / name for name in names)
    return ()


def weighted_components(folder: Path) -> list[str]:
    """The components of a diffusers folder that have weights, in the order of its model_index.json.

    Raises:
        ModelNotUsable: model_index.json cannot be read.
    """
    path = folder / "model_index.json"
    try:
        index = json.loads(path.read_text("utf-8"))
        return [
            name
            for name, entry in index.items()
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str) and has_weights(entry[1])
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise ModelNotUsable(f"{path} cannot be read: {error}; {_FETCH_AGAIN}.") from error


def has_weights(class_name: str) -> bool:
    """Whether a component of that class has weights: tokenizers, processors, schedulers and the like have none."""
    return _WITHOUT_WEIGHTS.search(class_name) is None


def tensor_counts(card: ModelCard) -> dict[str, dict[str, int]] | None:
    """Numbers by component and storage dtype ("F16", "BF16", "F32", ...): {"transformer": {"F16": 3_400_000}}.

    What a component takes once loaded is the count times the size of the dtype it is loaded in, which may differ from
    the one on disk. None when the weights are not on this machine. Components without weights are left out,
    and those that the card reads from a GGUF file (`stored.as_stored`).

    Raises:
        ModelNotUsable: a weights file of a folder is damaged or missing. What the Hub's cache lacks of a model can
            still be downloaded, so that counts as not on this machine.
    """
    folder = card_folder(card)
    if folder is None:
        return None
    counts: dict[str, dict[str, int]] = {}
    for component in weighted_components(folder):
        if component in card.gguf:
            continue
        try:
            files = weight_files(folder / component)
        except ModelNotUsable:
            if card.repo_id is None:
                raise
            return None
        if not files and card.repo_id is not None:
            return None
        for file in files:
            by_dtype = counts.setdefault(component, {})
            for tensor in read_header(file).values():
                dtype = str(tensor["dtype"])
                by_dtype[dtype] = by_dtype.get(dtype, 0) + math.prod(tensor["shape"])
    return counts


def weight_bytes(card: ModelCard) -> dict[str, int] | None:
    """Bytes of the weights on disk by component; None when they are not on this machine. See `tensor_counts`.

    Raises:
        ModelNotUsable: a weights file is damaged.
    """
    counts = tensor_counts(card)
    if counts is None:
        return None
    return {
        component: sum(-(-count * _BITS.get(dtype, 8) // 8) for dtype, count in by_dtype.items())
        for component, by_dtype in counts.items()
    }


def card_folder(card: ModelCard) -> Path | None:
    """Where the card's files lie on this machine: its folder, or the Hub's cache; None when they do not."""
    folder = card.folder if card.folder is not None else cached_snapshot(card.repo_id or "", card.revision)
    return folder if folder is not None and folder.joinpath("model_index.json").is_file() else None


def cached_snapshot(repo_id: str, revision: str | None = None) -> Path | None:
    """The folder of a model in the Hub's cache, found without importing huggingface_hub; None when it is not there."""
    repo = hub_folder() / f"models--{repo_id.replace('/', '--')}"
    reference = repo / "refs" / (revision or "main")
    commit = reference.read_text("ascii").strip() if reference.is_file() else revision
    snapshot = repo / "snapshots" / commit if commit else None
    return snapshot if snapshot is not None and snapshot.is_dir() else None

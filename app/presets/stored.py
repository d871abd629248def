"""Which components of a model lie quantized on this disk, and their true sizes: from headers, without torch."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Final

from app.errors import ModelNotUsable
from app.presets.gguf import PLAIN, TYPES, read_gguf
from app.presets.weights import cached_snapshot, card_folder, read_header, weight_files, weighted_components
from app.quantization import Stored, hub_file, method_of
from app.schema import ModelCard

_TYPE_IN_NAME: Final = re.compile(r"(?:^|[-_.])(I?Q\d(?:_[01]|_K|_NL|_XS)|BF16|F16|F32)(?=[-_.]|$)", re.IGNORECASE)
_USUAL_BITS: Final = 8.5
"""ASSUMED where neither the file nor its name tells: Q8_0's, the largest usual type."""
_MIXED: Final = 1.06
"""ASSUMED: files of `Q4_K_M` and the like keep some layers in larger types."""
_EXTRAS: Final = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")


def as_stored(card: ModelCard) -> ModelCard:
    """The card with what is quantized of it: by its table `gguf`, and by the config.json of the folder's components.

    Raises:
        ModelNotUsable: a GGUF file is missing or damaged.
    """
    found = {component: _gguf(where) for component, where in card.gguf.items()}
    folder = card_folder(card)
    if folder is not None:
        for component in weighted_components(folder):
            if component not in found and (stored := _by_config(folder / component)) is not None:
                found[component] = stored
    return card.model_copy(update={"stored": found}) if found else card


def gguf_path(where: str) -> Path | None:
    """Where the file is on this machine; None: in the Hub only.

    Raises:
        ModelNotUsable: a path, and there is no such file.
    """
    on_hub = hub_file(where)
    if on_hub is None:
        if not Path(where).is_file():
            raise ModelNotUsable(f"There is no file {where}. Correct the table [gguf] of the model's card.")
        return Path(where)
    snapshot = cached_snapshot(on_hub[0])
    path = snapshot / on_hub[1] if snapshot is not None else None
    return path if path is not None and path.is_file() else None


def _gguf(where: str) -> Stored:
    path = gguf_path(where)
    name = _TYPE_IN_NAME.search(Path(where).stem)
    title = f"GGUF {name[1].upper()}" if name else "GGUF"
    if path is None:
        return Stored(method="gguf", title=title, exact=False, bits=bits_by_name(title))
    tensors = read_gguf(path)
    # only matrices stay packed: what is packed besides is unpacked while it is loaded
    packed = [one for one in tensors if one.type not in PLAIN and len(one.shape) == 2]
    return Stored(
        method="gguf",
        title=title,
        packed_bytes=sum(one.bytes for one in packed),
        plain_parameters=sum(one.parameters for one in tensors) - sum(one.parameters for one in packed),
        largest_parameters=max((one.parameters for one in packed), default=0),
        on_disk_bytes=path.stat().st_size,
    )


def bits_by_name(title: str) -> float:
    """Bits of a weight in a GGUF file whose name says so much: 4.5 and a little for `GGUF Q4_K`."""
    for name, block, size in TYPES.values():
        if title.upper().endswith(f" {name}"):
            return 8 * size / block * (_MIXED if name.endswith("_K") else 1)
    return _USUAL_BITS


def _by_config(folder: Path) -> Stored | None:
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelNotUsable(f"{path} cannot be read: {error}; copy or download the file again.") from error
    quantized = method_of(config if isinstance(config, dict) else {})
    if quantized is None:
        return None
    method, title = quantized
    packed = plain = largest = size = 0
    for file in weight_files(folder):
        size += file.stat().st_size
        for name, tensor in read_header(file).items():
            count, kind = math.prod(tensor["shape"]), tensor["dtype"]
            if name.endswith(".absmax"):
                packed += 4 * count  # scales that are packed themselves are unpacked while they are loaded
            elif name.endswith(".SCB"):
                packed += 4 * count
            elif name.endswith(_EXTRAS) or ".quant_state." in name:
                continue
            elif kind in ("U8", "I8"):
                packed += count
                largest = max(largest, 2 * count if method == "bitsandbytes_4bit" else count)
            else:
                plain += count
    return Stored(
        method=method,
        title=title,
        packed_bytes=packed,
        plain_parameters=plain,
        largest_parameters=largest,
        on_disk_bytes=size,
    )

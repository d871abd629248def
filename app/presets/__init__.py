"""The catalogue: presets/models/*.toml and presets/hardware/*.toml, and any other diffusers folder or Hub id.

`units` sizes with units, `files` one TOML file -> one value with file and line in each error, `catalogue` all of them,
`folder` a diffusers folder -> ModelCard, `weights` and `gguf` what lies in their files,
`stored` which components are quantized. Nothing here imports torch.
"""

from app.presets.catalogue import Catalogue, find_card, find_hardware, load_catalogue
from app.presets.folder import card_for_folder, card_for_repo
from app.presets.stored import as_stored
from app.presets.units import format_bytes, parse_bytes, parse_seconds
from app.presets.weights import cached_snapshot, card_folder, read_header, tensor_counts, weight_bytes

__all__ = [
    "Catalogue",
    "as_stored",
    "cached_snapshot",
    "card_folder",
    "card_for_folder",
    "card_for_repo",
    "find_card",
    "find_hardware",
    "format_bytes",
    "load_catalogue",
    "parse_bytes",
    "parse_seconds",
    "read_header",
    "tensor_counts",
    "weight_bytes",
]

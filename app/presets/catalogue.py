"""All model cards and hardware presets: the ones that ship and a person's own, and how a name finds one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from app.config import Settings, bundled
from app.errors import InvalidRequest, NotFound, PresetError
from app.presets.files import Problems, V, load_value, parse_toml, read_text, suggestion, tell_problems
from app.presets.fitted import FOLDER, find_coefficients, missing_words, read_coefficients
from app.presets.folder import card_for_folder, card_for_repo
from app.quantization import GGUF_PIPELINES, hub_file
from app.schema import Coefficients, Defaults, HardwarePreset, Lattice, ModelCard, Value

_REPO_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SIZE: Final = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")


class Catalogue(Value):
    """What can be chosen, by id: the built-in model and `auto` first, then by name with numbers in their order."""

    models: dict[str, ModelCard]
    hardware: dict[str, HardwarePreset]
    problems: tuple[str, ...] = ()
    """A person's own files that were left out, one `file:line: what is wrong; what instead` each."""


def load_catalogue(settings: Settings) -> Catalogue:
    """Read presets/ and the person's own files in `settings.user_presets`.

    A mistake in a person's own file leaves that file out and is told in `problems`: it must not stop the program.

    Raises:
        PresetError: a file that ships with the program is wrong or missing.
    """
    models: dict[str, ModelCard] = {}
    hardware: dict[str, HardwarePreset] = {}
    problems: list[str] = []
    shipped = bundled("presets")
    for path in _toml_files(shipped / "models"):
        _add(models, path, lambda path: read_model_card(path, shipped=True))
    for path in _toml_files(shipped / "hardware"):
        _add(hardware, path, read_hardware_preset)
    for path in _toml_files(settings.user_presets / "models", problems):
        _add(models, path, read_model_card, problems)
    for path in _toml_files(settings.user_presets / "hardware", problems):
        _add(hardware, path, read_hardware_preset, problems)
    for kind, found, first in (("models", models, "built-in"), ("hardware", hardware, "auto")):
        if first not in found:
            raise PresetError(f"{shipped / kind}:1: {first}.toml is missing; install Pocketreel again")
    return Catalogue(models=_sorted(models, "built-in"), hardware=_sorted(hardware, "auto"), problems=tuple(problems))


def read_model_card(path: Path, *, shipped: bool = False) -> ModelCard:
    """One model card. A relative `folder` counts from the program's own files, in a person's card from the file.

    Raises:
        PresetError: lists every mistake as `file:line: what is wrong; what to write instead`.
    """
    text = read_text(path)
    card = load_value(path, text, ModelCard, drop=("coefficients", "simulated_as"))
    _refuse(path, text, [*_id_problems(path, card.id), *_card_problems(card)])
    named, found = _coefficients(path, text, card.id, shipped=shipped)
    if named is None and found is not None and card.folder is None:
        named = found.model
    gguf = {name: _beside(path, where) for name, where in card.gguf.items()}
    card = card.model_copy(update={"coefficients": found, "simulated_as": named, "gguf": gguf})
    _refuse(path, text, _missing_gguf(card))
    if card.folder is None:
        return card
    expanded = card.folder.expanduser()
    folder = expanded if expanded.is_absolute() else bundled(*expanded.parts) if shipped else path.parent / expanded
    return card.model_copy(update={"folder": folder})


def _beside(path: Path, where: str) -> str:
    """An absolute path, or a file of the Hub as it is; a relative path that exists beside the card wins over it."""
    here = path.parent / Path(where).expanduser()
    return where if hub_file(where) is not None and not here.is_file() else str(here)


def _missing_gguf(card: ModelCard) -> Problems:
    """Named files that are not there. Absolute paths by now; of the Hub nothing is asked."""
    return [
        (("gguf", name), f"gguf.{name}: there is no file {where}; write its path, or owner/repo/file.gguf of the Hub")
        for name, where in card.gguf.items()
        if hub_file(where) is None and not Path(where).is_file()
    ]


def _coefficients(path: Path, text: str, card_id: str, *, shipped: bool) -> tuple[str | None, Coefficients | None]:
    """The card's key `coefficients` and the file of that name, else of the card's; beside the card or among ours.

    A card of ours may name a file that the simulator has not written yet: its model is then planned coarsely.
    """
    named = parse_toml(path, text).get("coefficients")
    if named is not None and not (isinstance(named, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", named)):
        what = f'coefficients: {named!r} does not fit; write the name of a file in {FOLDER}/ without ".toml"'
        _refuse(path, text, [(("coefficients",), what)])
    folders = tuple(dict.fromkeys((path.parent / FOLDER, bundled("presets", "models", FOLDER))))
    file = find_coefficients(named or card_id, folders)
    if file is not None:
        return named, read_coefficients(file)
    if named is not None and not shipped:
        _refuse(path, text, [(("coefficients",), missing_words(named, folders))])
    return named, None


def read_hardware_preset(path: Path) -> HardwarePreset:
    """One hardware preset.

    Raises:
        PresetError: lists every mistake as `file:line: what is wrong; what to write instead`.
    """
    text = read_text(path)
    preset = load_value(path, text, HardwarePreset)
    _refuse(path, text, _id_problems(path, preset.id))
    return preset


def find_card(catalogue: Catalogue, name: str) -> ModelCard:
    """The model that a person named: a card's id, a diffusers folder on this disk, or a Hub id `owner/name`.

    Raises:
        NotFound: nothing has that name; the message tells the nearest.
        ModelNotUsable: there is such a folder or Hub id, but it cannot be loaded, or not safely.
    """
    wanted = name.strip()
    if wanted in catalogue.models:
        return catalogue.models[wanted]
    folder = Path(wanted).expanduser()
    looks_like_path = wanted.startswith((".", "~", "/", "\\")) or "\\" in wanted or folder.is_absolute()
    if (
        wanted
        and folder.exists()
        and (looks_like_path or "/" in wanted or folder.joinpath("model_index.json").exists())
    ):
        for card in catalogue.models.values():
            if card.folder is not None and card.folder.exists() and card.folder.samefile(folder):
                return card  # it knows more about the folder than the folder does
        return card_for_folder(folder)
    if _REPO_ID.fullmatch(wanted):
        for card in catalogue.models.values():
            if card.repo_id is not None and card.repo_id.lower() == wanted.lower():
                return card
        return card_for_repo(wanted)
    if looks_like_path or "/" in wanted:
        raise NotFound(f'There is no model folder "{wanted}". Give the folder that holds model_index.json.')
    raise NotFound(
        f'There is no model "{wanted}"; {suggestion(wanted, catalogue.models)} '
        "A folder on this disk (./my-model) or a Hub id (owner/name) can be given too."
    )


def find_hardware(catalogue: Catalogue, name: str) -> HardwarePreset:
    """The hardware preset with that id.

    Raises:
        InvalidRequest: there is none (field `preset`); the message tells the nearest.
    """
    preset = catalogue.hardware.get(name.strip())
    if preset is None:
        raise InvalidRequest(f'There is no preset "{name}"; {suggestion(name, catalogue.hardware)}', field="preset")
    return preset


def _toml_files(folder: Path, problems: list[str] | None = None) -> list[Path]:
    """The presets in a folder; none when there is no such folder. With `problems`, a closed one is noted there."""
    try:  # not glob: it passes over a folder that may not be read without a word
        if not folder.exists():
            return []
        return sorted(path for path in folder.iterdir() if path.suffix == ".toml" and not path.name.startswith("."))
    except OSError as error:
        message = f"{folder}:1: cannot be listed: {error.strerror or error}; correct its permissions"
        if problems is None:
            raise PresetError(message) from error
        problems.append(message)
        return []


def _add(found: dict[str, V], path: Path, read: Callable[[Path], V], problems: list[str] | None = None) -> None:
    """Read one file into `found`. With `problems`, a mistake is noted there instead of raised."""
    try:
        value = read(path)
        key = str(getattr(value, "id"))  # noqa: B009 - both kinds have one, their base has not
        if key in found:
            text = read_text(path)
            _refuse(
                path,
                text,
                [(("id",), f'the id "{key}" is taken already; write another one and name the file after it')],
            )
        found[key] = value
    except PresetError as error:
        if problems is None:
            raise
        problems.append(str(error))


def _refuse(path: Path, text: str, problems: Problems) -> None:
    if problems:
        raise PresetError(tell_problems(path, text, problems))


def _id_problems(path: Path, found: str) -> Problems:
    if found == path.stem:
        return []
    return [
        (("id",), f'id "{found}" and the file name differ; write id = "{path.stem}" or rename the file {found}.toml')
    ]


def _card_problems(card: ModelCard) -> Problems:
    """What the schema alone cannot see: numbers and names that do not fit each other."""
    found: Problems = []
    if (card.repo_id is None) == (card.folder is None):
        where = ("id",) if card.repo_id is None else ("repo_id",)
        found.append((where, "a card has either repo_id or folder; write exactly one of them"))
    if card.repo_id is not None and not _REPO_ID.fullmatch(card.repo_id):
        found.append((("repo_id",), f'repo_id "{card.repo_id}" is no Hub id; write "owner/name"'))
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*Pipeline", card.pipeline):
        found.append((("pipeline",), f'"{card.pipeline}" is no pipeline class; write for example "WanPipeline"'))
    if card.timeout_seconds == 0:
        found.append((("timeout",), 'timeout is 0, so every run would be ended at once; write for example "1 h"'))
    if card.stored:
        found.append((("stored",), "stored is found out, not written; leave it out, and write a table [gguf]"))
    return [
        *found,
        *_gguf_problems(card),
        *_default_problems(card.defaults, card.lattice),
        *_trained_size_problems(card),
    ]


def _gguf_problems(card: ModelCard) -> Problems:
    found: Problems = []
    for name, where in card.gguf.items():
        if name not in ("transformer", "transformer_2"):
            what = f"gguf.{name}: only denoisers are read from GGUF files; write transformer or transformer_2"
            found.append((("gguf", name), what))
        elif not where.endswith(".gguf"):
            found.append((("gguf", name), f'gguf.{name}: "{where}" is no GGUF file; write a name that ends in .gguf'))
        elif not card.pipeline.startswith(GGUF_PIPELINES):
            what = (
                f"gguf.{name}: diffusers reads no GGUF file for the {card.pipeline}; leave the table out, and choose a "
                "hardware preset with `quantization`"
            )
            found.append((("gguf", name), what))
    return found


def _default_problems(defaults: Defaults, lattice: Lattice) -> Problems:
    """The defaults must lie on the lattice and within its limits."""
    found: Problems = []
    grid = lattice.spatial_multiple
    for name, side in (("height", defaults.height), ("width", defaults.width)):
        if side % grid:
            nearest = max(1, round(side / grid)) * grid
            found.append(
                (("defaults", name), f"{name} {side} is no multiple of spatial_multiple {grid}; write {nearest}")
            )
    steps = lattice.temporal_multiple
    if (defaults.num_frames - 1) % steps:
        nearest = max(0, round((defaults.num_frames - 1) / steps)) * steps + 1
        what = f"num_frames {defaults.num_frames} is no multiple of temporal_multiple {steps}, plus 1; write {nearest}"
        found.append((("defaults", "num_frames"), what))
    for name, value, low, high in (
        ("height", defaults.height, lattice.min_side, lattice.max_side),
        ("width", defaults.width, lattice.min_side, lattice.max_side),
        ("num_frames", defaults.num_frames, 1, lattice.max_num_frames),
        ("num_inference_steps", defaults.num_inference_steps, 1, lattice.max_num_inference_steps),
        ("fps", defaults.fps, 1, 240),
        ("guidance_scale", defaults.guidance_scale, 0, 100),
    ):
        if not low <= value <= high:
            found.append((("defaults", name), f"{name} {value} is outside {low} to {high}; write a number in between"))
    return found


def _trained_size_problems(card: ModelCard) -> Problems:
    found: Problems = []
    grid = card.lattice.spatial_multiple
    for i, size in enumerate(card.lattice.trained_sizes):
        sides = _SIZE.fullmatch(size)
        if sides is None or any(int(side) % grid for side in sides.groups()):
            example = f"{card.defaults.width}x{card.defaults.height}"
            what = f'"{size}" is no size of this model; write width x height in multiples of {grid}: "{example}"'
            found.append((("lattice", "trained_sizes", i), what))
    return found


def _sorted(found: dict[str, V], first: str) -> dict[str, V]:
    def key(name: str) -> tuple[bool, list[tuple[int, str]]]:
        return name != first, [(int(n or 0), word) for n, word in re.findall(r"(\d+)|(\D+)", name)]

    return {name: found[name] for name in sorted(found, key=key)}

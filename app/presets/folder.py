"""Any diffusers folder on this disk, or a Hub id -> ModelCard, refused with the reason when it is not safe to load.

Safe means: weights in safetensors only (a .bin, .pt or .ckpt file is a pickle, and a pickle runs code when it is
opened), classes only from diffusers and transformers, and every weights file as long as its own header says.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Final

from app.errors import ModelNotUsable
from app.presets.families import FAMILIES, derive
from app.presets.files import suggestion
from app.presets.weights import cached_snapshot, has_weights, read_header, weight_files
from app.schema import ModelCard

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_REPO_FILES: Final = ("model_index.json", "*/config.json")


def card_for_folder(path: Path) -> ModelCard:
    """A card for a diffusers folder; its id is `folder-` and the folder's name.

    Raises:
        ModelNotUsable: not a folder of diffusers, not complete, damaged, not safe, or a pipeline that is not for video.
    """
    folder = path.expanduser().absolute()
    index = _model_index(folder)
    pipeline = _pipeline(folder, index)
    for component, (library, class_name) in _components(folder, index).items():
        _check_component(folder, component, library, class_name)
    family = FAMILIES[pipeline]
    defaults, lattice = derive(family, _config(folder / "vae"), _config(folder / "transformer"))
    return ModelCard(
        id="folder-" + (re.sub(r"[^a-z0-9._-]+", "-", folder.name.lower()).strip("-.") or "model"),
        title=folder.name,
        summary=f"A folder on this disk: {folder}",
        tasks=family.tasks,
        folder=folder,
        license="see the folder",
        pipeline=pipeline,
        defaults=defaults,
        lattice=lattice,
        timeout_seconds=family.timeout_seconds,
    )


def card_for_repo(repo_id: str) -> ModelCard:
    """A card for a model on the Hub: from the Hub's cache on this disk, else from its small config files online.

    Raises:
        ModelNotUsable: not reachable, no such model, or not a pipeline for video that is safe to load.
    """
    snapshot = cached_snapshot(repo_id)
    if snapshot is None or not (snapshot / "model_index.json").is_file():
        snapshot = _fetch_configs(repo_id)
    index = _model_index(snapshot)
    pipeline = _pipeline(snapshot, index)
    for component, (library, class_name) in _components(snapshot, index).items():
        _check_code(snapshot, component, library, class_name)
    family = FAMILIES[pipeline]
    defaults, lattice = derive(family, _config(snapshot / "vae"), _config(snapshot / "transformer"))
    return ModelCard(
        id="hub-" + re.sub(r"[^a-z0-9._-]+", "-", repo_id.lower()),
        title=repo_id,
        summary=f"From the Hub: https://huggingface.co/{repo_id}",
        tasks=family.tasks,
        repo_id=repo_id,
        license=f"see https://huggingface.co/{repo_id}",
        pipeline=pipeline,
        defaults=defaults,
        lattice=lattice,
        timeout_seconds=family.timeout_seconds,
    )


def _fetch_configs(repo_id: str) -> Path:
    """Download model_index.json and the components' config.json, a few kB, into the Hub's cache."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second, and only needed here
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_REPO_FILES), etag_timeout=10))
    except GatedRepoError as error:
        raise ModelNotUsable(
            f"{repo_id} asks you to accept its terms first: open https://huggingface.co/{repo_id}, accept, then run "
            "`hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotUsable(
            f'There is no model "{repo_id}" on the Hub, or it is private. Check the spelling.'
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotUsable(
            f'"{repo_id}" is neither a folder here nor on this disk already, and the Hub cannot be reached '
            f"({type(error).__name__}). Go online, or give the path of a folder."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelNotUsable(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelNotUsable(f"{path} is not JSON: {error}. Copy or download it again.") from error
    if not isinstance(data, dict):
        raise ModelNotUsable(f"{path} does not hold a JSON object. Copy or download it again.")
    return data


def _config(component: Path) -> dict[str, Any]:
    path = component / "config.json"
    return _read_json(path) if path.is_file() else {}


def _model_index(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        raise ModelNotUsable(
            f"{folder} is a file. Give the folder of a diffusers model, the one with model_index.json."
        )
    if not folder.joinpath("model_index.json").is_file():
        inside = sorted(found.parent.name for found in folder.glob("*/model_index.json"))
        hint = f" Did you mean {folder / inside[0]}?" if inside else " Give the folder that holds model_index.json."
        raise ModelNotUsable(f"{folder} is not a model of diffusers: it has no model_index.json.{hint}")
    return _read_json(folder / "model_index.json")


def _pipeline(folder: Path, index: dict[str, Any]) -> str:
    name = index.get("_class_name")
    if isinstance(name, list):
        raise ModelNotUsable(
            f"{folder} brings its own pipeline code ({'.'.join(map(str, name))}), which Pocketreel never runs. "
            "Use a version of the model whose pipeline is part of diffusers."
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelNotUsable(
            f"{folder} is made for the pipeline {name!r}, which Pocketreel cannot run; "
            f"{suggestion(str(name), FAMILIES)}"
        )
    return name


def _components(folder: Path, index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Component -> (library, class) of model_index.json. Entries that are off ([null, null]) are left out."""
    components: dict[str, tuple[str, str]] = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list):
            continue  # plain values are arguments of the pipeline, e.g. boundary_ratio
        if len(entry) == 2 and all(isinstance(part, str) for part in entry) and Path(name).name == name:
            components[name] = (entry[0], entry[1])
        elif any(part is not None for part in entry):
            raise ModelNotUsable(f"{folder / 'model_index.json'}: the entry {name} = {entry} is not one of diffusers.")
    return components


def _check_code(folder: Path, component: str, library: str, class_name: str) -> None:
    """Refuse what would make the libraries import code from the model instead of from themselves."""
    own_module = folder / component / f"{library}.py"
    known = library in ("diffusers", "transformers") or _is_pipeline_module(library)
    remote = _config(folder / component).get("auto_map")
    if not known or own_module.exists() or remote:
        raise ModelNotUsable(
            f"{folder}: its {component} ({library}.{class_name}) brings code of its own, which Pocketreel never runs. "
            "Use a version of the model whose classes are part of diffusers or transformers."
        )


def _is_pipeline_module(library: str) -> bool:
    """Some pipelines keep models beside themselves: ["ltx2", "LTX2Vocoder"]. Found without importing diffusers."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None or not library.isidentifier():
        return False
    return Path(spec.origin).parent.joinpath("pipelines", library, "__init__.py").is_file()


def _check_component(folder: Path, component: str, library: str, class_name: str) -> None:
    _check_code(folder, component, library, class_name)
    place = folder / component
    if not place.is_dir():
        raise ModelNotUsable(f"{folder} is not complete: the folder {component} is missing. Copy or download it again.")
    if not has_weights(class_name):
        return
    if not (place / "config.json").is_file():
        raise ModelNotUsable(
            f"{folder} is not complete: {component}/config.json is missing. Copy or download it again."
        )
    files = weight_files(place)
    if not files:
        raise ModelNotUsable(_why_no_weights(folder, component))
    for file in files:
        read_header(file)


def _why_no_weights(folder: Path, component: str) -> str:
    place = folder / component
    names = sorted(child.name for child in place.iterdir() if child.is_file())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{place / pickles[0]} is a pickle, and pickle files can run code when they are opened, so Pocketreel "
            "loads .safetensors only. If you trust the file, convert it once: load the model with diffusers, then "
            "save_pretrained(folder) writes safetensors."
        )
    variants = [name for name in names if re.fullmatch(r"(diffusion_pytorch_model|model)\.\w+\.safetensors", name)]
    if variants:
        plain = re.sub(r"\.\w+\.safetensors$", ".safetensors", variants[0])
        return f"{place} holds only the variant {variants[0]}. Rename that file to {plain}."
    return f"{folder} is not complete: {component} has no .safetensors file. Copy or download it again."

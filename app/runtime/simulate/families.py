"""Which models can be simulated, and how their real pipelines are built from configurations alone.

A model is a name of the catalogue (configs/models.toml, at full scale), or a folder in diffusers' layout, of which only
model_index.json and the config.json files are read. Parameters are created without contents, in the types that
`from_pretrained(torch_dtype=...)` would give them.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin, SchedulerMixin
from pydantic import Field
from transformers.initialization import no_init_weights

from app.errors import ModelNotUsable
from app.runtime.simulate.devices import SimulatedMachine
from app.runtime.simulate.standins import SimulatedTokenizer
from app.runtime.simulate.values import Setup
from app.value import Value

_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "processor")


class Part(Value):
    """A component with weights: its class and what its configuration says."""

    class_path: str
    """Where the class is, e.g. `diffusers.WanTransformer3DModel`."""
    config: dict[str, Any] = Field(default_factory=dict)
    dtype: str = "bfloat16"
    sure: bool = True
    """False: the sizes are the class's defaults and were compared with nothing."""


class Family(Value):
    """A model without its weights: everything that building its pipeline needs."""

    model: str
    pipeline: str
    parts: dict[str, Part]
    tokenizers: dict[str, int]
    """Tokens that each tokenizer gives a long prompt, its template included."""
    scheduler: dict[str, Any]
    guider: dict[str, Any] | None = None
    image_processor: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the pipeline's constructor."""
    calls: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the pipeline's `__call__`."""
    image: bool = False
    """Needs a picture to start from."""
    height: int = Field(512, ge=1)
    width: int = Field(768, ge=1)
    num_frames: int = Field(121, ge=1)
    guidance_scale: float | None = None

    @property
    def sure(self) -> bool:
        return all(part.sure for part in self.parts.values())


# ----------------------------------------------------------------------------------------------------------- finding


def names() -> tuple[str, ...]:
    """The models of the catalogue."""
    return tuple(_tables()[1])


def find(model: str | Path) -> Family:
    """A model by its name in the catalogue, or by the path of its folder.

    Raises:
        ModelNotUsable: neither; or a folder without a readable model_index.json or with classes of its own.
    """
    components, models = _tables()
    if str(model) in models:
        table = dict(models[str(model)])
        shape = table.pop("shape")
        dtypes = table.pop("dtypes", {})
        parts = {}
        for name, key in table.pop("components").items():
            entry = dict(components[key])
            parts[name] = Part(class_path=entry.pop("class"), dtype=dtypes.get(name, "bfloat16"), **entry)
        return Family(model=str(model), parts=parts, **table, **shape)
    if (Path(model) / "model_index.json").is_file():
        return _from_folder(Path(model))
    raise ModelNotUsable(
        f"Nothing to simulate: {model} is neither a folder with a model_index.json nor one of {', '.join(names())}."
    )


@cache
def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    folder = resources.files("app.runtime.simulate") / "configs"
    components = tomllib.loads((folder / "components.toml").read_text("utf-8"))
    return components, tomllib.loads((folder / "models.toml").read_text("utf-8"))


def _from_folder(folder: Path) -> Family:
    index = _read_json(folder / "model_index.json")
    like = next((find(name) for name in names() if find(name).pipeline == index["_class_name"]), None)
    parts: dict[str, Part] = {}
    tokenizers: dict[str, int] = {}
    scheduler: dict[str, Any] = {}
    options: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_") or entry is None:
            continue
        if not isinstance(entry, list):
            options[name] = entry
        elif name in _TOKENIZERS:
            tokenizers[name] = like.tokenizers.get(name, 512) if like is not None else 512
        elif name == "scheduler":
            scheduler = {"class": entry[1], **_public(_read_json(folder / name / "scheduler_config.json"))}
        elif name == "guider":
            rest["guider"] = {"class": entry[1], **_public(_read_json(folder / name / "guider_config.json"))}
        elif name in ("image_processor", "feature_extractor"):
            rest["image_processor"] = entry[1]
        elif entry[1] is not None:
            config = _read_json(folder / name / "config.json")
            parts[name] = Part(class_path=_class_path(entry, folder), config=_public(config), dtype="float32")
    if like is not None:
        rest |= {"image": like.image, "calls": like.calls, "guidance_scale": like.guidance_scale}
        rest |= {"height": like.height, "width": like.width, "num_frames": like.num_frames}
    return Family(
        model=str(folder),
        pipeline=index["_class_name"],
        parts=parts,
        tokenizers=tokenizers,
        scheduler=scheduler,
        options=options,
        **rest,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotUsable(f"{path} cannot be read: {error}. Check that the model folder is complete.") from error
    return content


def _public(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _class_path(entry: list[str], folder: Path) -> str:
    library, name = entry
    if library in ("diffusers", "transformers"):
        return f"{library}.{name}"
    if hasattr(diffusers.pipelines, library):  # a class that stands beside its pipeline, e.g. LTX-2's connectors
        return f"diffusers.pipelines.{library}.{name}"
    raise ModelNotUsable(
        f"{folder} wants {library}.{name}, a class that is not diffusers' or transformers' own; it is not loaded."
    )


# ---------------------------------------------------------------------------------------------------------- building


def load_class(path: str) -> Any:
    """The class at a dotted path.

    Raises:
        ModelNotUsable: the installed library does not have it.
    """
    module_name, class_name = path.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelNotUsable(f"{path} is not in the installed libraries: {error}") from error


def load_classes(family: Family) -> None:
    """Import all that building will need. Call it before a `SimulatedMachine` starts: the libraries import lazily, and
    tensors that a module makes while it is imported would be fake, and stay so.

    Raises:
        ModelNotUsable: an installed library lacks a class.
    """
    paths = [f"diffusers.{family.pipeline}", f"diffusers.{family.scheduler['class']}"]
    paths += [part.class_path for part in family.parts.values()]
    if family.guider is not None:
        paths.append(f"diffusers.{family.guider['class']}")
    if family.image_processor is not None:
        paths.append(f"transformers.{family.image_processor}")
    for path in paths:
        load_class(path)


def build_part(part: Part, dtype: str | None = None) -> torch.nn.Module:
    """One component, on the CPU. Call it inside a `SimulatedMachine`, or its parameters are real.

    Raises:
        ModelNotUsable: the installed library does not have the class.
    """
    cls = load_class(part.class_path)
    with no_init_weights():
        if issubclass(cls, ModelMixin):
            module = cls.from_config(part.config)
        else:
            module = cls(cls.config_class.from_dict(part.config))
    if not issubclass(cls, ModelMixin):
        module.tie_weights()  # part of the initialisation that was left out
    _cast_as_loaded(module, getattr(torch, dtype or part.dtype))
    built: torch.nn.Module = module.eval().requires_grad_(False)
    return built


def build_pipeline(family: Family, setup: Setup, prompt_tokens: int | None = None) -> Any:
    """The real pipeline of a family, every component on the CPU. Call it inside a `SimulatedMachine`.

    Raises:
        ModelNotUsable: the installed library lacks a class.
    """
    cls = load_class(f"diffusers.{family.pipeline}")
    machine = SimulatedMachine.running
    given: dict[str, Any] = {}
    if machine is not None:
        machine.follow_values = False  # of thousands of parameters nobody asks for the contents
    for name, part in family.parts.items():
        given[name] = build_part(part, setup.of(name).dtype)
        if machine is not None:
            adopt(machine, name, given[name])
    if machine is not None:
        machine.follow_values = True
    for name, tokens in family.tokenizers.items():
        given[name] = SimulatedTokenizer(tokens if prompt_tokens is None else min(tokens, prompt_tokens))
    given["scheduler"] = _scheduler(family.scheduler)
    if family.guider is not None:
        options = dict(family.guider)
        given["guider"] = load_class(f"diffusers.{options.pop('class')}")(**options)
    if family.image_processor is not None:
        given["image_processor"] = load_class(f"transformers.{family.image_processor}")()
    pipe = cls(**given, **family.options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def adopt(machine: SimulatedMachine, name: str, module: torch.nn.Module) -> None:
    """From now on the module's parameters and buffers are this component's weights, wherever they move."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.owner = name  # type: ignore[attr-defined]
        machine.own(tensor, name)


def _scheduler(config: dict[str, Any]) -> SchedulerMixin:
    options = dict(config)
    return load_class(f"diffusers.{options.pop('class')}").from_config(options)


def kept_in_fp32(module: torch.nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Name parts of the parameters that stay float32. diffusers keeps its lists for fp16 and bf16, transformers one
    list for fp16 only and one, the strict one, for both."""
    if dtype is torch.float32:
        return ()
    keep = list(getattr(module, "_keep_in_fp32_modules", None) or [])
    if isinstance(module, ModelMixin):
        return tuple(keep)
    strict = list(getattr(module, "_keep_in_fp32_modules_strict", None) or [])
    return tuple((keep if dtype is torch.float16 else []) + strict)


def _cast_as_loaded(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """What `from_pretrained` does: parameters and saved buffers get the type, buffers made by the code keep theirs."""
    keep = kept_in_fp32(module, dtype)
    saved = set(module.state_dict())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in saved or not tensor.is_floating_point():
            continue
        wanted = torch.float32 if any(part in keep for part in name.split(".")) else dtype
        if tensor.dtype is not wanted:
            tensor.data = tensor.data.to(wanted)

"""The form: what a person typed <-> Draft. Nothing that a browser sends is trusted; the service checks again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from app.errors import InvalidRequest
from app.presets import Catalogue
from app.schema import Draft, ModelCard, Request
from app.web.words import FIELDS

# "768x512", and what people paste: \u00d7 (the times sign), an asterisk, a comma, a blank
_SIZE = re.compile("\\s*([0-9]{1,6})\\s*(?:[x\u00d7*,;]|\\s)\\s*([0-9]{1,6})\\s*", re.IGNORECASE)
_MAX_TEXT = 20_000
_DEFAULT_MODEL = "built-in"
_DEFAULT_PRESET = "auto"


class Form(NamedTuple):
    """The values of the form's components, in their order on the page. Any: they come from a browser."""

    model: Any = _DEFAULT_MODEL
    preset: Any = _DEFAULT_PRESET
    prompt: Any = ""
    negative_prompt: Any = ""
    size: Any = None
    num_frames: Any = None
    fps: Any = None
    num_inference_steps: Any = None
    guidance_scale: Any = None
    seed: Any = ""
    minutes: Any = None


def form_for_card(card: ModelCard, *, form: Form | None = None) -> Form:
    """The form with a card's defaults; prompt, preset and time limit of `form` are kept."""
    defaults = card.defaults
    return (form or Form())._replace(
        model=card.id,
        size=f"{defaults.width}x{defaults.height}",
        num_frames=defaults.num_frames,
        fps=defaults.fps,
        num_inference_steps=defaults.num_inference_steps,
        guidance_scale=defaults.guidance_scale,
    )


def form_for_request(request: Request, catalogue: Catalogue) -> Form:
    """The form that makes `request` again. A model or preset that is not in the catalogue becomes the default one."""
    card = catalogue.models.get(request.model)
    usual = catalogue.hardware[request.preset].timeout_seconds if request.preset in catalogue.hardware else None
    usual = usual or (card.timeout_seconds if card else None)
    default_negative = card.defaults.negative_prompt if card else None
    return Form(
        model=request.model if card else _first(catalogue.models, _DEFAULT_MODEL),
        preset=request.preset if request.preset in catalogue.hardware else _first(catalogue.hardware, _DEFAULT_PRESET),
        prompt=request.prompt,
        negative_prompt="" if request.negative_prompt == default_negative else request.negative_prompt or "",
        size=f"{request.width}x{request.height}",
        num_frames=request.num_frames,
        fps=request.fps,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        seed=str(request.seed),
        # left empty when it is the usual one, so that a later change of model or preset takes its own
        minutes=None if request.timeout_seconds == usual else round(request.timeout_seconds / 60, 2),
    )


def form_from_browser(saved: Any, catalogue: Catalogue) -> Form | None:
    """The form as this browser kept it, or None when it kept nothing usable."""
    if not isinstance(saved, dict) or not _on_offer(saved.get("model"), catalogue.models):
        return None
    texts = ("prompt", "negative_prompt", "size", "seed")
    values: dict[str, Any] = {"model": saved["model"]}
    if _on_offer(saved.get("preset"), catalogue.hardware):
        values["preset"] = saved["preset"]
    for name in texts:
        values[name] = saved[name][:_MAX_TEXT] if isinstance(saved.get(name), str) else ""
    for name in set(Form._fields) - {*texts, "model", "preset"}:
        value: Any = saved.get(name)
        values[name] = value if _is_number(value) and math.isfinite(value) else None
    return Form(**values)


def draft_of(form: Form, catalogue: Catalogue) -> Draft:
    """What the service is asked for.

    Raises:
        InvalidRequest: a value that is no number, no size, or not on offer; says what to type instead.
    """
    # The page offers the catalogue only: a folder on this machine's disk is for its own person to name (`--model`).
    if card_of(form, catalogue) is None:
        raise InvalidRequest("Choose a model from the list.", field="model")
    if not _on_offer(form.preset, catalogue.hardware):
        raise InvalidRequest("Choose a hardware preset from the list.", field="preset")
    width, height = _size(form.size)
    minutes = _number(form.minutes, "Time limit")
    try:
        return Draft(
            model=form.model,
            preset=form.preset,
            prompt=_text(form.prompt, "prompt"),
            negative_prompt=_text(form.negative_prompt, "negative_prompt") or None,
            width=width,
            height=height,
            num_frames=_whole(form.num_frames, "num_frames"),
            fps=_whole(form.fps, "fps"),
            num_inference_steps=_whole(form.num_inference_steps, "num_inference_steps"),
            guidance_scale=_number(form.guidance_scale, FIELDS["guidance_scale"]),
            seed=_whole(form.seed, "seed"),
            timeout_seconds=None if minutes is None else minutes * 60,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise InvalidRequest(f"{FIELDS.get(name, name)}: {first['msg']}.", field=name) from None


def card_of(form: Form, catalogue: Catalogue) -> ModelCard | None:
    """The chosen model, or None when the browser sent something else."""
    return catalogue.models[form.model] if _on_offer(form.model, catalogue.models) else None


def _on_offer(value: Any, table: Mapping[str, Any]) -> bool:
    return isinstance(value, str) and value in table  # anything may come, also what cannot be a key


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first(known: dict[str, Any], wanted: str) -> str:
    return wanted if wanted in known else next(iter(known))


def _text(value: Any, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequest(f"{FIELDS[field]} must be text.", field=field)
    return value


def _size(value: Any) -> tuple[int | None, int | None]:
    if value is None or value == "":
        return None, None
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidRequest("Size must be width x height in pixels, like 768x512.", field="width")
    return int(match[1]), int(match[2])


def _number(value: Any, label: str) -> float | None:
    if value is None or value == "":
        return None
    if not _is_number(value) and not isinstance(value, str):
        raise InvalidRequest(f"{label} must be a number.")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{label} must be a number, like 5.")
    return number


def _whole(value: Any, field: str) -> int | None:
    # int() of the text, not of a float: a seed of 19 digits must stay exact
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,30}\s*", value):
        return int(value)
    number = _number(value, FIELDS[field])
    if number is None:
        return None
    if number != int(number):
        raise InvalidRequest(f"{FIELDS[field]} must be a whole number, like {round(number)}.", field=field)
    return int(number)

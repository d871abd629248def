"""Pure: (Draft, ModelCard, HardwarePreset) -> Request, with a notice for everything that was changed on the way.

The one gate through which input of the page, the command line and HTTP passes; what comes out is safe to run.
"""

from __future__ import annotations

import math
import secrets

from app.demo.vocabulary import unknown_words
from app.errors import InvalidRequest
from app.schema import Draft, HardwarePreset, Lattice, ModelCard, Notice, Request

MAX_PROMPT_CHARACTERS = 5000
CHARACTERS_A_TOKEN = 4
"""Of English text, about: what T5's, Qwen's and CLIP's tokenizers make of it. Only a notice depends on it."""
MAX_SEED = 2**63 - 1
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600


def resolve(draft: Draft, card: ModelCard, preset: HardwarePreset) -> tuple[Request, tuple[Notice, ...]]:
    """Fill, check and snap.

    Raises:
        InvalidRequest: a value that cannot be meant; the message says what is allowed.
    """
    defaults, lattice = card.defaults, card.lattice
    notices: list[Notice] = []
    if "t2v" not in card.tasks:
        raise InvalidRequest(
            f"{card.title} needs a start image, which this version cannot take. Choose a model that works from text.",
            field="model",
        )
    prompt = _text("prompt", draft.prompt)
    if not prompt:
        raise InvalidRequest("The prompt is empty. Say what the video should show.", field="prompt")
    if card.vocabulary == "demo" and (unknown := unknown_words(prompt)):
        words = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        notices.append(
            Notice(
                field="prompt",
                text=f"The built-in model knows shapes, colours and motions; it does not know: {words}.",
            )
        )
    reads = card.max_sequence_length
    if reads is not None and len(prompt) > reads * CHARACTERS_A_TOKEN:
        notices.append(
            Notice(
                field="prompt",
                text=f"{card.title} reads about {reads * CHARACTERS_A_TOKEN} characters of a prompt ({reads} tokens); "
                f"this one has {len(prompt)}, and its end may be cut off.",
            )
        )
    height = _side("height", draft.height, defaults.height, lattice, notices)
    width = _side("width", draft.width, defaults.width, lattice, notices)
    if lattice.trained_sizes and f"{width}x{height}" not in lattice.trained_sizes:
        sizes = ", ".join(lattice.trained_sizes)
        notices.append(Notice(field="width", text=f"The model was trained on {sizes}; {width}x{height} may look odd."))
    steps = _or(draft.num_inference_steps, defaults.num_inference_steps)
    fps = _or(draft.fps, defaults.fps)
    guidance = draft.guidance_scale if draft.guidance_scale is not None else defaults.guidance_scale
    timeout = (
        draft.timeout_seconds if draft.timeout_seconds is not None else preset.timeout_seconds or card.timeout_seconds
    )
    _between("num_inference_steps", steps, 1, lattice.max_num_inference_steps)
    _between("fps", fps, 1, 120)
    _between("guidance_scale", guidance, 0, 50)
    check_timeout(timeout)
    if draft.seed is not None and draft.seed != -1:  # -1 means "draw one" in every other program of the field
        _between("seed", draft.seed, 0, MAX_SEED)
        seed = draft.seed
    else:
        seed = secrets.randbelow(2**32)
    negative = _text("negative_prompt", draft.negative_prompt) if draft.negative_prompt is not None else None
    request = Request(
        model=draft.model,
        preset=preset.id,
        prompt=prompt,
        negative_prompt=negative if negative is not None else defaults.negative_prompt,
        height=height,
        width=width,
        num_frames=_frames(draft.num_frames, defaults.num_frames, lattice, notices),
        fps=fps,
        num_inference_steps=steps,
        guidance_scale=guidance,
        seed=seed,
        timeout_seconds=timeout,
    )
    return request, tuple(notices)


def check_timeout(seconds: float) -> None:
    """Raises InvalidRequest for a time limit that is none."""
    _between("timeout_seconds", seconds, 1, MAX_TIMEOUT_SECONDS)


def _text(field: str, text: str) -> str:
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequest(
            f"The {field.replace('_', ' ')} has {len(text)} characters; {MAX_PROMPT_CHARACTERS} are allowed.",
            field=field,
        )
    if any(ord(character) < 32 and character not in "\n\r\t" for character in text):
        raise InvalidRequest(f"The {field.replace('_', ' ')} holds control characters. Type it again.", field=field)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"The {field.replace('_', ' ')} is not valid text. Type it again.", field=field) from None
    return text.strip()


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _between(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not; no float() here, integers may have hundreds of digits
        shown = "far too large" if abs(value) > 1e20 else value
        raise InvalidRequest(f"{field} is {shown}; it must lie between {low} and {high}.", field=field)


def _side(field: str, value: int | None, default: int, lattice: Lattice, notices: list[Notice]) -> int:
    wanted = _or(value, default)
    multiple = lattice.spatial_multiple
    _between(field, wanted, 1, 10**6)
    # nearest multiple inside the limits; ties go up
    low = math.ceil(lattice.min_side / multiple) * multiple
    high = lattice.max_side // multiple * multiple
    snapped = min(max((wanted + multiple // 2) // multiple * multiple, low), high)
    if snapped != wanted:
        why = f"this model makes multiples of {multiple}"
        if wanted > high or wanted < low:
            why = f"this model makes {low} to {high}"
        notices.append(Notice(field=field, text=f"{field} {wanted} -> {snapped}: {why}."))
    return snapped


def _frames(value: int | None, default: int, lattice: Lattice, notices: list[Notice]) -> int:
    wanted = _or(value, default)
    _between("num_frames", wanted, 1, 10**6)
    multiple = lattice.temporal_multiple
    high = (lattice.max_num_frames - 1) // multiple * multiple + 1
    snapped = min(max((wanted - 1 + multiple // 2) // multiple * multiple + 1, 1), high)
    if snapped != wanted:
        why = f"this model makes {multiple}k+1 frames" if wanted <= high else f"this model makes at most {high} frames"
        notices.append(Notice(field="num_frames", text=f"{wanted} frames -> {snapped}: {why}."))
    return snapped

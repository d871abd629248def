"""Coefficients that the simulator wrote: presets/models/coefficients/NAME.toml -> Coefficients, with file and line.

These files are written by a command and carry plain bytes, so unlike cards their keys have no units in their values.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from app.coefficients import Coefficients
from app.errors import PresetError
from app.presets.files import parse_toml, read_text, suggestion, tell_problems

FOLDER: Final = "coefficients"
_AGAIN: Final = "do not edit it: write it again with `python -m app.runtime.simulate fit`"


def read_coefficients(path: Path) -> Coefficients:
    """One file of coefficients.

    Raises:
        PresetError: lists every mistake as `file:line: what is wrong; what to do`.
    """
    return _checked(path, read_text(path))


@lru_cache(maxsize=64)
def _checked(path: Path, text: str) -> Coefficients:
    """Cards that differ in their training only share a file, so it is checked once."""
    data = parse_toml(path, text)
    try:
        return Coefficients.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            where = item["loc"]
            name = ".".join(map(str, where)) or "the file"
            if item["type"] == "missing":
                what = f'the key "{name}" is missing'
            elif item["type"] == "extra_forbidden":
                what = f'unknown key "{name}"'
            else:
                what = f"{name}: {item['msg'][:1].lower()}{item['msg'][1:]}"
            problems.append((where, f"{what}; {_AGAIN}"))
        raise PresetError(tell_problems(path, text, problems)) from None


def find_coefficients(name: str, folders: tuple[Path, ...]) -> Path | None:
    """The file of that name in the first folder that has it."""
    return next((path for folder in folders if (path := folder / f"{name}.toml").is_file()), None)


def missing_words(name: str, folders: tuple[Path, ...]) -> str:
    """What to say when a card names coefficients that are nowhere."""
    known = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.toml")})
    there = suggestion(name, known) if known else f"there are none in {folders[0]}"
    return f'there are no coefficients "{name}"; {there}'

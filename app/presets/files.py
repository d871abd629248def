"""One TOML file of the catalogue -> one checked value; every mistake is told as `file:line: what; what instead`.

In the files, fields of the schema that end in `_bytes` or `_seconds` are written without that ending and with a unit:
`vram_limit = "8 GiB"`, `timeout = "2 min"`.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from app.errors import PresetError
from app.presets.units import parse_bytes, parse_seconds
from app.schema import Value

V = TypeVar("V", bound=Value)
KeyPath = tuple[str | int, ...]
Problems = list[tuple[KeyPath, str]]

_EXPECTED = {
    "int_type": "a whole number without quotes",
    "int_from_float": "a whole number",
    "float_type": "a number without quotes",
    "string_type": 'text in quotes, "like this"',
    "bool_type": "true or false",
    "tuple_type": 'a list in brackets, ["like", "this"]',
    "path_type": 'a path in quotes, "like/this"',
    "model_type": "a table with keys of its own",
    "model_attributes_type": "a table with keys of its own",
}


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        PresetError: it cannot be read, or is not UTF-8 (names the line).
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PresetError(f"{path}:1: cannot be read: {error.strerror or error}; correct its permissions") from error
    try:
        return raw.decode("utf-8-sig")  # editors on Windows put a byte order mark in front, tomllib refuses it
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise PresetError(f"{path}:{line}: is not UTF-8 text; save the file again with the encoding UTF-8") from error


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """The file's keys and values.

    Raises:
        PresetError: not TOML; names the line.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        reason, line, column = found.groups() if found else (str(error), None, None)
        where = f" in column {column}" if column else " at the end of the file"
        lines = max(1, len(text.splitlines()))
        raise PresetError(
            f"{path}:{line or lines}: is not valid TOML: {reason[:1].lower()}{reason[1:]}{where}; "
            'write each setting as `key = value`, text in "quotes", and each key once'
        ) from error


class _Mistakes:
    """The mistakes of one file. `told` are the keys that need not be told again, e.g. as missing."""

    def __init__(self) -> None:
        self.problems: Problems = []
        self.told: set[KeyPath] = set()

    def add(self, where: KeyPath, what: str, *, meant: str | None = None) -> None:
        """`meant` is the key that a misspelt one stands for."""
        self.problems.append((where, what))
        self.told |= {where} if meant is None else {where, (*where[:-1], meant)}


def load_value(path: Path, text: str, model: type[V], *, drop: Iterable[str] = ()) -> V:
    """Check the text of one file against the schema. Keys in `drop` are left to the caller.

    Raises:
        PresetError: lists every mistake of the file, one a line.
    """
    data = parse_toml(path, text)
    for key in drop:
        data.pop(key, None)
    mistakes = _Mistakes()
    fields = _translate(data, model, (), mistakes)
    value: V | None = None
    try:
        # JSON in strict mode: "96" is no number and true is no 1, but a list may become a tuple and text a path
        value = model.model_validate_json(json.dumps(fields, default=str), strict=True)
    except ValidationError as error:
        for item in error.errors():
            where = tuple(_file_key(part) for part in item["loc"])
            if where not in mistakes.told:
                mistakes.add(where, _tell(where, item["type"], item["msg"], item["input"]))
    if mistakes.problems or value is None:
        raise PresetError(tell_problems(path, text, mistakes.problems))
    return value


def tell_problems(path: Path, text: str, problems: Problems) -> str:
    """One `file:line: ...` per problem, in the order of the lines."""
    lines = key_lines(text)
    told = sorted((_line_of(where, lines), what) for where, what in problems)
    return "\n".join(f"{path}:{line}: {what}" for line, what in told)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line on which each key, table and list item of a valid TOML text is set, counted from 1.

    tomllib tells no positions, so it is asked about every prefix of whole lines: a prefix parses exactly when it ends
    between two statements, and what it knows more than the prefix before was set by the statement in between. This
    takes one parse a line, and is only done for a file with a mistake.
    """
    found: dict[KeyPath, int] = {}
    lines = text.split("\n")
    start = 1
    for count in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue  # inside a list or a text of several lines: the statement is not over
        for where in _walk(data, ()):
            found.setdefault(where, start)
        start = count + 1
    return found


def suggestion(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?'-like text, or the known words when none is near."""
    names = sorted(known)
    near = nearest(word, names)
    return f'did you mean "{near}"?' if near is not None else "known are: " + ", ".join(names)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else None


def _walk(data: object, where: KeyPath) -> Iterable[KeyPath]:
    if where:
        yield where
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for key, value in items:
        yield from _walk(value, (*where, key))


def _line_of(where: KeyPath, lines: Mapping[KeyPath, int]) -> int:
    while where and where not in lines:
        where = where[:-1]  # a key that is missing is told at its table
    return lines.get(where, 1)


def _file_key(part: str | int) -> str | int:
    if isinstance(part, str):
        for ending in ("_bytes", "_seconds"):
            part = part.removesuffix(ending)
    return part


def _translate(data: Mapping[str, Any], model: type[BaseModel], where: KeyPath, mistakes: _Mistakes) -> dict[str, Any]:
    """File keys -> schema fields, sizes and durations parsed. What is wrong goes to `mistakes` and is left out."""
    by_key = {str(_file_key(name)): name for name in model.model_fields}
    fields: dict[str, Any] = {}
    for key, value in data.items():
        here = (*where, key)
        name = by_key.get(key)
        if name is None:
            meant = str(_file_key(key)) if key in model.model_fields else nearest(key, by_key)
            mistakes.add(here, _unknown_key(key, model, by_key), meant=meant)
        elif name != key:
            try:
                fields[name] = _with_unit(key, value, parse_bytes if name.endswith("_bytes") else parse_seconds)
            except ValueError as error:
                mistakes.add(here, f"{key}: {error}")
        else:
            fields[name] = _translate_nested(value, model.model_fields[name].annotation, here, mistakes)
    return fields


def _with_unit(key: str, value: object, parse: Callable[[str], float]) -> float:
    if isinstance(value, str):
        return parse(value)
    example = "8 GiB" if parse is parse_bytes else "120 s"
    raise ValueError(f'{value!r} has no unit; write text in quotes: {key} = "{example}"')


def _translate_nested(value: Any, annotation: Any, where: KeyPath, mistakes: _Mistakes) -> Any:
    """Go into fields that are values themselves: `Model`, `Model | None`, `tuple[Model, ...]`, `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _translate(value, annotation, where, mistakes) if isinstance(value, dict) else value
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return _translate_nested(value, inner[0], where, mistakes) if len(inner) == 1 else value
    if origin is tuple and isinstance(value, list):
        return [_translate_nested(item, arguments[0], (*where, i), mistakes) for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _translate_nested(item, arguments[1], (*where, key), mistakes) for key, item in value.items()}
    return value


def _unknown_key(key: str, model: type[BaseModel], by_key: Mapping[str, str]) -> str:
    if key in model.model_fields:
        plain = _file_key(key)
        example = "8 GiB" if key.endswith("_bytes") else "120 s"
        return f'unknown key "{key}"; write it without that ending and with a unit: {plain} = "{example}"'
    return f'unknown key "{key}"; {suggestion(key, by_key)}'


def _tell(where: KeyPath, kind: str, message: str, given: object) -> str:
    name = ".".join(map(str, where))
    if kind == "missing":
        return f'the key "{name}" is missing; add {where[-1]} = ...'
    if kind == "string_pattern_mismatch":
        return (
            f"{name}: {given!r} does not fit; write small letters, digits and hyphens, beginning with a letter or digit"
        )
    expected = _EXPECTED.get(kind)
    said = f"write {expected}" if expected else message[:1].lower() + message[1:]
    return f"{name}: {given!r} does not fit; {said}"

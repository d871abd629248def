"""Values as TOML, for the catalogue. Only what coefficients need: tables, lists, strings, numbers, booleans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from app.value import Value

_HEAD = "# Written by `python -m app.runtime.simulate fit {model}`. Do not edit: run the command again.\n\n"


def to_toml(value: Value) -> str:
    """A document that `tomllib` reads back to `value.model_dump(mode="json")`, less the entries that are None."""
    content = value.model_dump(mode="json")
    return _HEAD.format(model=content.get("model", "MODEL")) + "\n".join(_table(content, "")) + "\n"


def _table(content: dict[str, Any], path: str) -> Iterator[str]:
    plain = {key: item for key, item in content.items() if item is not None and not _nested(item)}
    if path and (plain or not content):
        yield f"\n[{path}]"
    for key, item in plain.items():
        yield f"{_key(key)} = {_inline(item)}"
    for key, item in content.items():
        below = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(item, dict):
            yield from _table(item, below)
        elif _nested(item):
            for entry in item:
                yield f"\n[[{below}]]"
                yield from (f"{_key(k)} = {_inline(v)}" for k, v in entry.items() if v is not None)


def _nested(item: Any) -> bool:
    return isinstance(item, dict) or (isinstance(item, list) and bool(item) and isinstance(item[0], dict))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _inline(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, list):
        return "[" + ", ".join(_inline(i) for i in item) + "]"
    if isinstance(item, float):
        return repr(round(item, 6))
    return json.dumps(item)

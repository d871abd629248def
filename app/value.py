"""The base of all values, and the units they count in. Sizes in bytes, times in seconds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

GIB = 1024**3

Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Value(BaseModel):
    """Base of all values: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

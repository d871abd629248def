"""The shipped coefficients are what the command gives: two models are fitted again. Minutes each."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import load_settings
from app.presets import load_catalogue
from app.runtime.simulate.fit import fit

MODELS = {"wan2.1-t2v-1.3b": "wan-2.1-t2v-1.3b", "kandinsky5-t2v-lite": "kandinsky-5-t2v-lite-sft-5s"}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: entry for key, inner in value.items() for name, entry in flat(inner, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {name: entry for n, inner in enumerate(value) for name, entry in flat(inner, f"{path}/{n}").items()}
    return {path: value}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "card"), MODELS.items())
def test_a_model_that_is_fitted_again_gives_the_same(model: str, card: str) -> None:
    shipped = load_catalogue(load_settings()).models[card].coefficients
    assert shipped is not None
    wanted = flat(shipped.model_dump(mode="json", exclude={"versions"}))
    found = flat(fit(model).model_dump(mode="json", exclude={"versions"}))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        assert found[name] == (pytest.approx(value, rel=1e-4, abs=1e-6) if number else value), name

"""On a real card: packed weights compute what the CPU does, and are packed there alike. Run with `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.runtime import placement, quantized
from app.runtime.packed import Packed, quantization_of
from app.schema import Strategy
from tests.runtime.families import FAMILIES, frames
from tests.runtime.packed import METHODS, bytes_of, folder, pipeline
from tests.runtime.test_placement import STRATEGIES, arrangement

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def card() -> None:
    if not torch.cuda.is_available():
        pytest.fail("no GPU found: run these tests on a machine with one")


@pytest.mark.parametrize("strategy", ["resident", "model_offload", "block_stream", "leaf_stream_low", "stream"])
@pytest.mark.parametrize("method", METHODS)
def test_the_video_is_nearly_the_cpus_and_the_same_however_it_is_held(method: str, strategy: str) -> None:
    def hold(name: str, module: Any) -> dict[str, Any]:
        return {**STRATEGIES[strategy](name, module), "quantization": quantization_of(module)}

    def resident(name: str, module: Any) -> dict[str, Any]:
        return {"strategy": Strategy.RESIDENT, "quantization": quantization_of(module)}

    pipe = pipeline(method)
    on_cpu = frames(pipe, "wan")
    placement.place(pipe, arrangement(pipe, resident))
    wanted = frames(pipe, "wan")
    assert np.abs(wanted - on_cpu).mean() < 0.02
    placement.switch(pipe, arrangement(pipe, hold))
    assert (frames(pipe, "wan") == wanted).all()


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_card_packs_as_the_cpu_does(method: Any) -> None:
    """But for ties: at most one number in a hundred is rounded the other way."""
    cls, place = type(FAMILIES["wan"]().transformer), folder() / "transformer"
    there = quantized.load(cls, place, torch.float32, method, torch.device("cuda:0"))
    here = quantized.load(cls, place, torch.float32, method)
    assert bytes_of(there) == bytes_of(here)
    for one, other in zip(there.modules(), here.modules(), strict=True):
        if isinstance(one, Packed):
            assert one.weight.device.type == "cpu"
            assert (one.weight != other.weight).float().mean() <= 0.01

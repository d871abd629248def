"""Attention by another kernel: used where it runs, else PyTorch's own, with a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffusers.models.attention_dispatch as dispatch
import pytest
import torch

from app.runtime import placement
from app.runtime.placement import attention
from app.schema import Strategy
from tests.runtime.families import FAMILIES, frames
from tests.runtime.test_placement import arrangement, everything, resident_frames

BLOCKS = {"strategy": Strategy.BLOCK, "device": "cpu", "num_blocks_per_group": 1}


@pytest.fixture
def sage(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package that is installed; it computes as PyTorch does until `broken` is asked for."""
    asked: list[str] = []
    stock = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]

    def compute(*args: Any, **kwargs: Any) -> Any:
        asked.append("sage")
        if "broken" in asked:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")
        return stock(*args, **kwargs)

    monkeypatch.setattr(dispatch, "_CAN_USE_SAGE_ATTN", True)
    monkeypatch.setitem(dispatch._AttentionBackendRegistry._backends, dispatch.AttentionBackendName.SAGE, compute)
    arguments = dispatch._AttentionBackendRegistry._supported_arg_names
    monkeypatch.setitem(arguments, dispatch.AttentionBackendName.SAGE, arguments[dispatch.AttentionBackendName.NATIVE])
    yield asked
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def placed(backend: str, **hold: Any) -> Any:
    pipe = FAMILIES["wan"]()
    fields = {"strategy": Strategy.CPU, "device": "cpu", **hold}
    placement.place(pipe, arrangement(pipe, everything(**fields), attention_backend=backend))
    return pipe


def test_it_is_used_where_it_runs(sage: list[str]) -> None:
    pipe = placed("sage")
    assert (frames(pipe, "wan") == resident_frames("wan")).all()
    assert len(sage) > 4
    assert placement.placed(pipe).notices == []
    placement.remove(pipe)
    sage.clear()
    frames(pipe, "wan")
    assert sage == []


@pytest.mark.parametrize("hold", [{}, {**BLOCKS}], ids=["resident", "blocks"])
def test_a_kernel_that_the_card_lacks_is_found_out_in_the_first_forward(sage: list[str], hold: dict[str, Any]) -> None:
    sage.append("broken")
    pipe = placed("sage", **hold)
    assert (frames(pipe, "wan") == resident_frames("wan")).all()
    (notice,) = placement.placed(pipe).notices
    assert "no kernel image" in notice
    assert sage.count("sage") == 1
    placement.remove(pipe)
    assert (frames(pipe, "wan") == resident_frames("wan")).all()


def test_a_package_that_is_missing_is_told() -> None:
    pipe = placed("flash")
    (notice,) = placement.placed(pipe).notices
    assert "flash" in notice
    assert (frames(pipe, "wan") == resident_frames("wan")).all()


def test_memory_that_runs_out_is_no_reason_for_another_kernel(sage: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setitem(dispatch._AttentionBackendRegistry._backends, dispatch.AttentionBackendName.SAGE, full)
    pipe = placed("sage")
    with pytest.raises(torch.OutOfMemoryError):
        frames(pipe, "wan")
    assert placement.placed(pipe).notices == []


def test_pytorchs_own_is_named() -> None:
    assert attention.words("cuda:0").startswith("PyTorch (")
    assert attention.words("cpu") == "PyTorch"

"""The worker's torch against the device of a plan, before minutes go into loading a model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from app import events
from app.errors import GenerationFailed
from app.runtime.control import Control
from app.runtime.loop import Channel, Loop, Timeline
from app.runtime.view import unusable, view
from tests import values

CARD = {"name": "RTX 5090", "uuid": "GPU-1", "total_bytes": 1, "capability": [12, 0]}


def seen(**changes: Any) -> dict[str, Any]:
    usual = {"torch": "2.14", "cuda": "13.0", "hip": None, "arch_list": ["sm_75", "sm_86", "sm_120"]}
    return {**usual, "cuda_available": True, "devices": [CARD], **changes}


def run_on(device: str, tmp_path: Path) -> events.Run:
    """A job for a model that is not there."""
    return events.Run(
        job_id="j1",
        request=values.request(),
        plan=values.plan(device=device),
        card=values.card(repo_id=None, folder=tmp_path / "nothing here"),
        output_path=tmp_path / "clip.mp4",
        scratch=tmp_path / "scratch",
        metadata={},
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cuda": None, "cuda_available": False, "devices": []}, "can only use the CPU"),
        ({"cuda_available": False, "devices": []}, "cannot start"),
        ({"devices": []}, r"finds 0 graphics card\(s\)"),
        ({"arch_list": ["sm_75", "sm_86", "sm_90"]}, r"no kernels for RTX 5090 \(compute capability 12.0\)"),
    ],
)
def test_what_torch_cannot_use_is_told_with_a_way_out(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(unusable("cuda:0", seen(**changes)))
    assert "pocketreel doctor" in (unusable("cuda:0", seen(**changes)) or "")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"arch_list": ["sm_86", "compute_90"]},  # PTX is compiled for later cards
        {"devices": [{**CARD, "capability": [8, 9]}]},  # sm_86 runs on 8.9
        {"cuda": None, "hip": "6.4", "arch_list": ["gfx1100"]},
    ],
)
def test_what_it_can_use_passes(changes: dict[str, Any]) -> None:
    assert unusable("cuda:0", seen(**changes)) is None


def test_the_cpu_always_passes() -> None:
    assert unusable("cpu", seen(cuda=None, cuda_available=False, devices=[])) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_a_plan_for_a_card_on_a_torch_without_one_fails_before_loading(tmp_path: Path) -> None:
    run = run_on("cuda:0", tmp_path)
    stream = io.BytesIO()
    loop = Loop(Channel(stream), Control(), Timeline())
    with pytest.raises(GenerationFailed, match="pocketreel doctor"):
        loop._ensure_loaded(run, "key")
    loop.run(run, 0.0)
    event = events.EVENTS.validate_json(stream.getvalue().splitlines()[-1])
    assert isinstance(event, events.Failed)
    assert "pocketreel doctor" in event.message
    assert set(view()) >= {"torch", "cuda", "arch_list", "devices"}


def test_a_plan_for_the_cpu_wakes_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("app.runtime.view.view", lambda: asked.append(True))
    run = run_on("cpu", tmp_path)
    stream = io.BytesIO()
    Loop(Channel(stream), Control(), Timeline()).run(run, 0.0)
    event = events.EVENTS.validate_json(stream.getvalue().splitlines()[-1])
    assert isinstance(event, events.Failed)  # there is no model in that folder
    assert asked == []

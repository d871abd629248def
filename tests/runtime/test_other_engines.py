"""Other projects' engines hold a pipeline on a simulated card, and make the clip that the resident one makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import ModelNotUsable
from app.events import OTHERS, Engine, EngineRun
from app.runtime import other_engines
from app.schema import GIB
from tests import values
from tests.runtime.families import FAMILIES, Frames, frames
from tests.runtime.simulated import SimulatedMachine
from tests.runtime.test_placement import resident_frames

STOCK = [engine for engine, package in OTHERS.items() if package in ("accelerate", "diffusers")]


def held_frames(engine: Engine) -> tuple[Frames, int]:
    """The clip, and the peak on the card."""
    with SimulatedMachine(gpus=[4 * GIB]) as machine:
        pipe = other_engines.hold(FAMILIES["wan"](), engine, "cuda:0")
        video = frames(pipe, "wan")
        return video, machine.peak_bytes("cuda:0")


@pytest.mark.parametrize("engine", STOCK)
def test_stock_engines_make_the_same_clip_on_a_card(engine: Engine) -> None:
    video, peak = held_frames(engine)
    assert (video == resident_frames("wan")).all()
    assert peak > 0  # it was the card that worked


@pytest.mark.parametrize("engine", [Engine.MMGP, Engine.DIFFUSERS_MM])
def test_engines_that_somebody_installed_make_it_too(engine: Engine) -> None:
    pytest.importorskip(OTHERS[engine].replace("-", "_"))
    video, peak = held_frames(engine)
    assert (video == resident_frames("wan")).all()
    assert peak > 0


def test_the_card_is_loaded_by_us_and_then_held(tmp_path: Path) -> None:
    FAMILIES["wan"]().save_pretrained(tmp_path / "model")
    run = EngineRun(
        card=values.card(repo_id=None, folder=tmp_path / "model", pipeline="WanPipeline"),
        request=values.request(),
        engine=Engine.ACCELERATE_MODEL,
        device="cuda:0",
        dtype="float32",
        denoisers=("transformer",),
        reference=tmp_path / "frames.npy",
    )
    with SimulatedMachine(gpus=[4 * GIB]) as machine:
        pipe = other_engines.load(run)
        machine.adopt(pipe)
        assert (frames(pipe, "wan") == resident_frames("wan")).all()
        assert machine.peak_bytes("cuda:0") > 0
    broken = run.model_copy(update={"card": run.card.model_copy(update={"folder": tmp_path / "none"})})
    with pytest.raises(ModelNotUsable):
        other_engines.load(broken)

"""Ways to hold one model, compared by the command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from app import engines
from app.events import Engine, EngineOutcome, EngineRun
from tests import values
from tests.test_cli import run


@pytest.mark.slow  # loads the model for each
def test_engines_are_compared_and_make_the_same_frames() -> None:
    ran = run(
        "bench", "offload", "--engine", "stream_half", "--engine", "disk", "--frames", "5", "--steps", "2", "--json",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout)
    assert [one["engine"] for one in outcomes] == ["resident", "stream_half", "disk"]
    assert [one["difference"] for one in outcomes] == [None, 0, 0]
    assert all(one["error"] is None and one["seconds"] > 0 and one["step_seconds"] > 0 for one in outcomes)


def test_what_cannot_be_compared_is_told() -> None:
    unknown = run("bench", "offload", "--engine", "magic")
    assert (unknown.returncode, "stream_half" in unknown.stderr) == (2, True)
    small = run("bench", "offload", "--vram", "8GiB")
    assert (small.returncode, "no GPU" in small.stderr) == (2, True)


def test_what_cannot_run_here_is_told_beside_what_can() -> None:
    ran = run(
        "bench", "offload", "--engine", "leaf_stream", "--engine", "mmgp", "--frames", "5", "--steps", "2", "--json"
    )
    assert ran.returncode == 0, ran.stderr
    errors = {one["engine"]: one["error"] for one in json.loads(ran.stdout)}
    assert errors.pop("resident") is None
    assert set(errors) == {"leaf_stream", "mmgp"}
    assert all("needs a GPU" in error for error in errors.values())


def test_an_engine_of_others_that_is_not_installed_is_named_with_the_line_to_paste(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "diffusers_mm" else object())
    assert engines._obstacle(Engine.ACCELERATE_MODEL, has_gpu=True) is None
    assert str(engines._obstacle(Engine.DIFFUSERS_MM, has_gpu=True)).endswith("-m pip install diffusers-mm")


@pytest.mark.parametrize(
    "program", ["import sys; sys.stdin.read(); print('a greeting'); sys.exit(9)", "import sys; sys.exit(9)"]
)
def test_an_engine_that_kills_its_process_is_told_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    """After it knows what to do, or before: then what it is to do does not fit into the pipe."""
    monkeypatch.setattr(engines, "command_line", lambda _module: [sys.executable, "-c", program])
    run = EngineRun(
        card=values.card(title="long " * 50_000), request=values.request(), engine=Engine.MMGP, device="cuda:0",
        dtype="float32", denoisers=("transformer",), reference=tmp_path / "frames.npy",
    )  # fmt: skip
    found = engines._run(run, os.environ)
    assert found.engine is Engine.MMGP
    assert "ended early" in str(found.error)


def test_what_an_engine_prints_does_not_hide_its_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = f"print('a greeting'); print({EngineOutcome(engine=Engine.MMGP, seconds=2).model_dump_json()!r}, end='')"
    monkeypatch.setattr(engines, "command_line", lambda _module: [sys.executable, "-c", program])
    run = EngineRun(
        card=values.card(), request=values.request(), engine=Engine.MMGP, device="cuda:0", dtype="float32",
        denoisers=("transformer",), reference=tmp_path / "frames.npy",
    )  # fmt: skip
    assert engines._run(run, os.environ) == EngineOutcome(engine=Engine.MMGP, seconds=2)

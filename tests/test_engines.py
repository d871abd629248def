"""Ways to hold one model, compared by the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from app import engines, hardware
from app.config import Settings
from app.events import Engine
from app.schema import Draft
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


@pytest.mark.parametrize("read", ["sys.stdin.read()", "sys.exit(9)"])
def test_an_engine_that_kills_its_process_spoils_nothing_else(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """As on a machine with a card: one process dies, before or after it knows what to do, and the others go on."""
    here = hardware.probe(settings)
    monkeypatch.setattr(hardware, "probe", lambda _settings: here.model_copy(update={"gpus": (values.gpu(),)}))
    program = settings.data_dir / "engine.py"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        "import os, sys\nfrom app.events import Engine, EngineOutcome, EngineRun\n"
        f"dies = os.path.exists({str(settings.data_dir / 'second')!r})\n"
        f"open({str(settings.data_dir / 'second')!r}, 'a').close()\n"
        f"text = {read} if dies else sys.stdin.read()\n"
        "run = EngineRun.model_validate_json(text)\n"
        "if run.engines[0] is Engine.ACCELERATE_MODEL: sys.exit(9)\n"
        "print('a greeting')\nprint(EngineOutcome(engine=run.engines[0]).model_dump_json())\n",
        "utf-8",
    )
    monkeypatch.setattr(engines, "command_line", lambda _module: [sys.executable, str(program)])
    monkeypatch.setenv("PYTHONPATH", str(Path(engines.__file__).parents[1]))
    found = engines.compare(settings, Draft(model="built-in", prompt="a red ball"), [Engine.ACCELERATE_MODEL])
    assert [(one.engine, one.error is None) for one in found] == [
        (Engine.RESIDENT, True),
        (Engine.ACCELERATE_MODEL, False),
    ]
    assert "ended early" in str(found[-1].error)

"""`pocketreel plan`: this machine or an imagined one, one model or all, and what is printed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app import hardware, tables
from app.config import Settings
from app.errors import InvalidRequest, PlanError
from app.planner.imagine import imagine
from app.planner.table import cliffs, fit_table
from app.planning import Asked, Planning
from app.schema import GIB, Coefficients, Hardware, ModelCard, Placement, Request, Strategy
from tests import models, values
from tests.test_coefficients import CARD, write
from tests.test_planner import machine, request_for

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def catalogue(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Two measured models of a person's own, on a machine without a card and with much free disk."""
    folder = settings.user_presets / "models"
    for name, found in (("my-wan", models.WAN_14B), ("my-cog", models.COGVIDEOX_5B)):
        write(folder, name, found)
        (folder / f"{name}.toml").write_text(CARD.format(id=name, more='timeout = "9 h"'), "utf-8")
    monkeypatch.setattr(hardware, "probe", lambda settings: values.hardware(ram_available_bytes=64 * GIB))
    return settings


def text_of(answer: tables.Answer) -> str:
    out = StringIO()
    console = Console(file=out, width=160)
    for part in answer.parts:
        console.print(part)
    return out.getvalue()


def test_a_plan_shows_components_stages_reasons_and_ladder(catalogue: Settings) -> None:
    answer = tables.answer(catalogue, Asked(model="my-wan", vram="24GiB"))
    shown = text_of(answer)
    assert "832x480, 81 frames, 50 steps, about" in shown
    assert "transformer   leaf+stream" in shown
    for word in ("load", "encode", "denoise", "decode", "export", "peak", "VRAM cuda:0", "RAM", "Why:", "  1. "):
        assert word in shown
    assert answer.document["plan"]["ladder"]
    assert answer.document["runs"] is True
    json.dumps(answer.document)


def test_sizes_frames_and_steps_count(catalogue: Settings) -> None:
    small = Asked(model="my-cog", vram="24GiB", width=416, height=240, num_frames=17, num_inference_steps=20)
    planned = tables.answer(catalogue, small).document
    usual = tables.answer(catalogue, Asked(model="my-cog", vram="24GiB")).document
    assert planned["request"]["num_frames"] == 17
    assert planned["plan"]["predicted_seconds"] < usual["plan"]["predicted_seconds"] / 5
    snapped = tables.answer(catalogue, Asked(model="my-cog", vram="24GiB", num_frames=18))
    assert "18 frames -> 17" in text_of(snapped)


def test_another_machine_is_imagined() -> None:
    here = values.hardware(gpus=(values.gpu(name="NVIDIA GeForce RTX 4090", pcie_generation=4, pcie_width=16),))
    other = imagine(here, vram=(6 * GIB, 12 * GIB), ram_bytes=16 * GIB)
    assert [(gpu.index, gpu.free_bytes) for gpu in other.gpus] == [(0, 6 * GIB), (1, 12 * GIB)]
    assert {gpu.name for gpu in other.gpus} == {"NVIDIA GeForce RTX 4090"}
    assert (other.ram_available_bytes, other.ram_limit.source) == (16 * GIB, "as asked for")
    assert imagine(values.hardware(), vram=(8 * GIB,)).gpus[0].supports["bf16"]
    assert imagine(here) == here


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"vram": "8"}, "--vram: .*has no unit"),
        ({"ram": "lots"}, "--ram: "),
        ({"gpus": "6GiB,x"}, "--gpus: "),
        ({"gpus": "6GiB", "vram": "8GiB"}, "not both"),
        ({"preset": "vram-13"}, "no preset"),
    ],
)
def test_wrong_sizes_and_presets_are_told(catalogue: Settings, asked: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Planning(catalogue, Asked(**asked))


def test_the_table_says_of_every_model_whether_it_fits(catalogue: Settings) -> None:
    shown = text_of(tables.answer(catalogue, Asked(vram="4GiB", ram="48GiB"), every=True))
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "not measured" in lines["mochi-1"] or "fit" in lines["mochi-1"]
    assert "does not fit" in lines["my-wan"]
    assert " frames" in lines["my-wan"]
    rows = {row["model"]: row for row in tables.answer(catalogue, Asked(vram="80GiB"), every=True).document}
    assert rows["my-wan"]["verdict"] == "comfortable"
    assert rows["my-wan"]["vram_bytes"] < 80 * GIB


def test_a_model_that_starts_from_a_picture_is_planned_but_not_run(catalogue: Settings) -> None:
    folder = catalogue.user_presets / "models"
    card = CARD.format(id="my-i2v", more='tasks = ["i2v"]\ncoefficients = "my-cog"')
    (folder / "my-i2v.toml").write_text(card, "utf-8")
    planned = tables.answer(catalogue, Asked(model="my-i2v", vram="80GiB", ram="128GiB"))
    assert planned.document["runs"] is False
    assert "needs a start image" in text_of(planned)
    rows = {
        row["model"]: row for row in tables.answer(catalogue, Asked(vram="80GiB", ram="128GiB"), every=True).document
    }
    assert (rows["my-cog"]["runs"], rows["my-i2v"]["runs"]) == (True, False)


def test_cliffs_are_where_a_step_costs_more_than_it_adds(catalogue: Settings) -> None:
    answer = tables.answer(catalogue, Asked(model="my-wan", vram="10GiB", ram="48GiB"), cliff=True)
    assert answer.document
    for cliff in answer.document:
        if cliff["after_seconds"] is not None:
            assert cliff["after_seconds"] > 1.25 * cliff["before_seconds"] or cliff["after_how"] != cliff["before_how"]
    assert "Up to " in text_of(answer)
    with pytest.raises(PlanError, match="not measured"):
        cliffs(machine(8), values.card(), values.request(), values.preset())


def test_a_card_large_enough_has_no_cliff() -> None:
    card = models.LITE.model_copy(
        update={"lattice": models.LITE.lattice.model_copy(update={"max_num_frames": 41, "max_side": 512})}
    )
    assert cliffs(machine(400, ram=400), card, request_for(card), values.preset()) == ()


def _many() -> list[tuple[ModelCard, Request]]:
    """A catalogue of 33 models as large as the real ones, no two with the same coefficients."""
    found: list[tuple[ModelCard, Request]] = []
    cards = (models.LITE, models.PRO, models.WAN, models.COGVIDEOX)
    for number in range(33):
        card = cards[number % 4]
        assert card.coefficients is not None
        own: Coefficients = card.coefficients.model_copy(update={"model": f"m{number}"})
        found.append((card.model_copy(update={"id": f"m{number}", "coefficients": own}), request_for(card)))
    return found


def slowness() -> float:
    """How much slower than usual this machine is now: two cores of an EPYC (Zen 3), when left alone, make these 5000
    values in 0.027 s."""
    began = time.process_time()
    for size in range(5000):
        Placement(component="vae", strategy=Strategy.BLOCK, device="cuda:0", dtype="bfloat16", weight_bytes=size)
    return max(1.0, (time.process_time() - began) / 0.027)


@pytest.mark.parametrize("here", [machine(12, ram=32), machine(4, ram=16), machine(12, 24, ram=64)], ids=str)
def test_the_whole_table_takes_under_half_a_second_of_processor_time(here: Hardware) -> None:
    many, spent = _many(), []
    gc.disable()  # it would look through all that other tests imported; the program's front has a tenth of it
    try:
        before = slowness()
        for _ in range(5):
            began = time.process_time()
            rows = fit_table(here, many, values.preset())
            taken, after = time.process_time() - began, slowness()
            spent.append(taken / max(before, after))
            before = after
    finally:
        gc.enable()
    assert len(rows) == 33
    assert min(spent) < 0.5


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "app", "plan", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_on_the_command_line() -> None:
    for_people = run("built-in", "--frames", "9")
    assert for_people.returncode == 0, for_people.stderr
    assert "Built-in demo model: 96x96, 9 frames" in for_people.stdout
    document = json.loads(run("built-in", "--json").stdout)
    assert document["plan"]["device"] == "cpu"
    assert document["runs"] is True
    nowhere = run("built-in", "--ram", "64 MiB", "--json")
    assert nowhere.returncode == 3
    assert "RAM" in json.loads(nowhere.stdout)["error"]
    assert run("built-in", "--vram", "8").returncode == 2
    rows = json.loads(run("--all", "--json").stdout)
    assert {"built-in", "wan-2.1-t2v-14b"} <= {row["model"] for row in rows}

"""The flight record: what it holds, what it tells nobody, and what it says of another machine."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app import flight
from app.errors import BadInput, NotFound
from app.records import TIMELINE_KEPT, thin
from app.schema import (
    GIB,
    Attempt,
    ErrorKind,
    GpuProcess,
    Job,
    JobStatus,
    OutputReport,
    Progress,
    Report,
    Sample,
    Stage,
    StageReport,
)
from tests import values

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "stages": (StageReport(stage=Stage.LOAD, seconds=1.0, peak_ram_bytes=GIB),),
        "device": "CPU",
        "warm": False,
        "versions": {"torch": "2.14.1"},
        "timeline": tuple(Sample(seconds=n, stage=Stage.DENOISE, ram_bytes=n) for n in range(100)),
    }
    return Report(**{**fields, **changes})


def job(**changes: Any) -> Job:
    gpu = values.gpu(processes=(GpuProcess(pid=1, name="secret-game.exe", used_bytes=GIB),))
    fields: dict[str, Any] = {
        "status": JobStatus.COMPLETED,
        "facts": flight.facts_of(values.card(), values.hardware(gpus=(gpu,))),
        "report": report(),
        "started_at": NOW,
        "finished_at": NOW + timedelta(seconds=5),
        "output_path": Path("/home/ann/videos/clip.mp4"),
        "log_path": Path("/home/ann/logs/worker.log"),
        "attempts": (
            Attempt(
                at=NOW, kind=ErrorKind.OOM, message="short", progress=Progress(stage=Stage.DECODE), then="in tiles"
            ),
        ),
    }
    return values.job("j", **{**fields, **changes})


def test_it_tells_the_run_and_nothing_of_the_person() -> None:
    output = OutputReport(
        path=Path("/home/ann/videos/clip.mp4"), size_bytes=1, sha256="", frames_sha256="", width=1, height=1,
        num_frames=1, fps=1, mean_luma=1.0,
    )  # fmt: skip
    document = flight.record(job(report=report(output=output), error="It ended. The log: /home/ann/logs/worker.log"))
    assert document["request"]["prompt"] == "a red ball"
    assert document["attempts"][0]["then"] == "in tiles"
    assert document["hardware"]["gpus"][0]["name"] == "NVIDIA GeForce RTX 3060"
    assert len(document["report"]["timeline"]) == 100
    text = json.dumps(document)
    assert "/home/ann" not in text
    assert "secret-game" not in text


def test_it_lies_beside_the_video_and_takes_nobodys_place(tmp_path: Path) -> None:
    video = tmp_path / "clip.mp4"
    first = flight.write_beside(video, flight.record(job()))
    assert first == tmp_path / "clip.pocketreel.json"
    assert flight.read_record(first)["job"] == "j"
    assert flight.write_beside(video, flight.record(job())) == first, "its own is replaced"
    first.write_text("a shopping list")
    second = flight.write_beside(video, flight.record(job()))
    assert second == tmp_path / "clip-j.pocketreel.json"
    assert first.read_text() == "a shopping list"
    assert flight.write_beside(tmp_path / "missing" / "clip.mp4", flight.record(job())) is None
    assert flight.write_beside(tmp_path / f"{'長' * 80}.mp4", flight.record(job())) is None, "a name that is too long"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pocketreel": 1}', "\0"])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="no record"):
        flight.read_record(path)
    with pytest.raises(NotFound):
        flight.read_record(tmp_path / "y.json")


def test_the_same_intent_can_be_made_again() -> None:
    draft = flight.draft_from(flight.record(job()))
    assert (draft.prompt, draft.seed, draft.num_inference_steps) == ("a red ball", 1, 10)
    with pytest.raises(BadInput, match="no settings that this version understands") as refused:
        flight.draft_from({"pocketreel": "1", "request": {"prompt": 3}})
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="holds no settings"):
        flight.draft_from({"pocketreel": "1"})


def test_what_differs_is_named() -> None:
    before = flight.record(job())
    assert flight.differences(before, job()) == []
    facts = flight.facts_of(values.card(), values.hardware(cpu_name="Another CPU"))
    other = job(facts=facts, plan=values.plan(device="cuda:0"), report=report(versions={"torch": "3.0"}))
    assert flight.differences(before, other) == [
        "plan: device was cpu, is cuda:0",
        "machine: cpu_name was A CPU, is Another CPU",
        "machine: gpus was NVIDIA GeForce RTX 3060, is none",
        "version: torch was 2.14.1, is 3.0",
    ]
    assert flight.differences({"pocketreel": before["pocketreel"]}, job()) == [], "of the unknown nothing is said"


def test_the_history_keeps_less_of_the_timeline() -> None:
    kept = thin(report()).timeline
    assert len(kept) <= TIMELINE_KEPT
    assert kept[-1].ram_bytes == 99, "the end is what is looked at first"
    assert thin(report(timeline=())).timeline == ()


def test_a_clock_that_was_set_back_makes_no_negative_time() -> None:
    assert job(finished_at=NOW - timedelta(hours=1)).seconds == 0

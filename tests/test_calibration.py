"""What finished jobs teach: bounded, from this machine and model only, forgotten on demand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app import calibration
from app.calibration import MEMORY_BOUNDS, RUNS, compare, factors_from, forget, learned, machine_key, revision
from app.estimate import estimate
from app.planner import plan
from app.plans import SCALED, Learned
from app.schema import GIB, Factors, Job, JobStatus, Plan, Report, Stage, StageReport
from app.speed import machine
from app.store import Store
from tests import models, values

MACHINE = machine_key(values.hardware(gpus=(values.gpu(),)))
LITE = models.LITE.coefficients
assert LITE is not None
MODEL = LITE.fingerprint
ASKED = values.request(width=768, height=512, num_frames=121, num_inference_steps=50, guidance_scale=5.0)


def planned(**factors: Any) -> Plan:
    """A plan of the Lite model on a card that holds all of it, made with these factors."""
    card = values.gpu(total_bytes=64 * GIB, free_bytes=64 * GIB)
    hardware = values.hardware(gpus=(card,), ram_total_bytes=64 * GIB, ram_available_bytes=60 * GIB)
    used = Factors(model=MODEL, machine=MACHINE, **factors)
    learned_here = Learned(cpu=Factors(model=MODEL, machine=MACHINE), gpu=used)
    return plan(hardware, models.LITE, ASKED, values.preset(), None, learned=learned_here)


def finished(
    made: Plan, *, working: float = 1.0, slower: float = 1.0, number: int = 0, warm: bool = False, **changes: Any
) -> Job:
    """A job that took `working` times the plain working memory and `slower` times the plain time of its plan."""
    estimate, factors = made.estimate, made.factors
    assert estimate is not None
    assert factors is not None
    stages = []
    for stage in Stage:
        sizes = {}
        for memory in ("cuda:0", "ram"):
            parts = [p for p in estimate.memory if p.memory == memory and p.stage is stage]
            counted = [p for p in parts if memory == "ram" or p.kind not in ("context", "reserve")]
            fixed = sum(p.bytes for p in counted if p.kind not in SCALED)
            scaled = sum(p.bytes / factors.of_memory(memory) for p in counted if p.kind in SCALED)
            sizes[memory] = round(fixed + working * scaled)
        stages.append(
            StageReport(
                stage=stage,
                seconds=slower * estimate.seconds(stage) / factors.seconds.get(stage, 1.0),
                peak_ram_bytes=sizes["ram"],
                peak_vram_allocated_bytes={"cuda:0": sizes["cuda:0"]},
            )
        )
    fields: dict[str, Any] = {
        "status": JobStatus.COMPLETED,
        "plan": made,
        "report": Report(stages=tuple(stages), device="a card", warm=warm, fresh=not warm, versions={}),
        "finished_at": datetime.now(UTC),
    }
    return values.job(f"j{number}", **{**fields, **changes})


def test_nothing_is_learned_from_nothing() -> None:
    factors = factors_from([], MODEL, MACHINE)
    assert (factors.runs, factors.vram, factors.ram, factors.seconds) == (0, 1.0, 1.0, {})


def test_a_run_teaches_what_it_took() -> None:
    factors = factors_from([finished(planned(), working=1.2, slower=3.0)], MODEL, MACHINE)
    assert factors.runs == 1
    assert factors.vram == pytest.approx(1.2, rel=0.01)
    assert factors.ram == pytest.approx(1.2, rel=0.01)
    assert factors.seconds[Stage.DENOISE] == pytest.approx(3.0, rel=0.01)


def test_what_was_learned_makes_the_next_prediction_right() -> None:
    first = finished(planned(), working=1.2, slower=3.0)
    again = factors_from([first], MODEL, MACHINE)
    made = planned(**again.model_dump(exclude={"model", "machine"}))
    assert made.estimate is not None
    second = finished(made, working=1.2, slower=3.0)
    assert all(one.inside for one in compare(second)), compare(second)
    # and teaches the same again, instead of 1.2 times 1.2
    assert factors_from([second, first], MODEL, MACHINE).vram == pytest.approx(1.2, rel=0.01)
    assert any("the last run" in reason for reason in made.reasons)


def test_the_worst_of_the_last_runs_counts_and_old_ones_do_not() -> None:
    needs = [1.0, 1.3, 1.1, 1.0, 1.0, 1.5]  # newest first; the last one is too old
    jobs = [finished(planned(), working=need, number=i) for i, need in enumerate(needs)]
    factors = factors_from(jobs, MODEL, MACHINE)
    assert factors.runs == RUNS
    assert factors.vram == pytest.approx(1.3, rel=0.01)


@pytest.mark.parametrize(("working", "bound"), [(9.0, MEMORY_BOUNDS[1]), (0.1, MEMORY_BOUNDS[0])])
def test_factors_are_bounded(working: float, bound: float) -> None:
    assert factors_from([finished(planned(), working=working)], MODEL, MACHINE).vram == bound


@pytest.mark.parametrize(
    "changes",
    [
        {"status": JobStatus.FAILED},
        {"report": None},
        {"plan": values.plan()},
        {"plan": planned().model_copy(update={"factors": Factors(model=MODEL, machine="another")})},
        {"plan": planned().model_copy(update={"factors": Factors(model="another", machine=MACHINE)})},
    ],
)
def test_only_good_runs_of_this_model_here_teach(changes: dict[str, Any]) -> None:
    assert factors_from([finished(planned(), working=1.2, **changes)], MODEL, MACHINE).runs == 0


def test_a_warm_run_teaches_nothing_about_loading() -> None:
    factors = factors_from([finished(planned(), slower=2.0, warm=True)], MODEL, MACHINE)
    assert Stage.LOAD not in factors.seconds
    assert factors.seconds[Stage.DENOISE] == pytest.approx(2.0, rel=0.01)


def test_factors_change_the_scaled_parts_and_their_margin_only() -> None:
    placements = planned().placements
    speeds = machine(values.hardware(gpus=(values.gpu(),)), (values.gpu(),))
    used = Factors(model=MODEL, machine=MACHINE, runs=1, vram=1.5, ram=1.2, seconds={Stage.DENOISE: 2.0})
    plain = estimate(LITE, ASKED, placements, speeds, tiling=False)
    adjusted = estimate(LITE, ASKED, placements, speeds, tiling=False, factors=used)
    seen = set()
    for before, after in zip(plain.memory, adjusted.memory, strict=True):
        assert (before.memory, before.stage, before.kind) == (after.memory, after.stage, after.kind)
        expected = used.of_memory(before.memory) if before.kind in SCALED else 1.0
        if before.kind not in ("reserve", "rounding"):
            assert after.bytes == pytest.approx(before.bytes * expected, rel=1e-6)
        seen.add((before.kind, expected != 1.0))
    assert {("working", True), ("worker", True), ("weights", False), ("context", False)} <= seen
    margins = [sum(p.bytes for p in one.memory if p.kind == "reserve") for one in (plain, adjusted)]
    assert margins[1] > margins[0]
    for part, again in zip(plain.time, adjusted.time, strict=True):
        assert again.seconds == pytest.approx(part.seconds * (2.0 if part.stage is Stage.DENOISE else 1.0))


def test_what_the_stage_before_left_on_the_card_teaches_nothing() -> None:
    # model offload: decoding begins while the transformer is still there (accelerate moves it out a moment later)
    job = finished(planned())
    assert job.report is not None
    full = job.report.peak_vram()["cuda:0"]
    stages = tuple(
        stage.model_copy(update={"peak_vram_allocated_bytes": {"cuda:0": full - 1}})
        if stage.stage is Stage.EXPORT
        else stage
        for stage in job.report.stages
    )
    late = job.model_copy(update={"report": job.report.model_copy(update={"stages": stages})})
    assert factors_from([late], MODEL, MACHINE).vram == pytest.approx(1.0, rel=0.01)


def test_the_cpu_and_the_card_are_told_apart(tmp_path: Path) -> None:
    store = Store(tmp_path / "db.sqlite3")
    try:
        on_card = finished(planned(), slower=2.0, number=1)
        on_cpu = finished(planned(), slower=9.0, number=2)
        on_cpu = on_cpu.model_copy(update={"plan": on_cpu.plan.model_copy(update={"device": "cpu"})})
        before = revision(store)
        store.add(on_card, runner="r")
        store.add(on_cpu, runner="r")
        assert revision(store) != before
        found = learned(store, LITE, MACHINE)
        assert found.of("cuda:0").seconds[Stage.DENOISE] == pytest.approx(2.0, rel=0.01)
        assert found.of("cpu").seconds[Stage.DENOISE] == pytest.approx(9.0, rel=0.01)
    finally:
        store.close()


def test_new_speeds_make_another_machine() -> None:
    plain = values.hardware(gpus=(values.gpu(),))
    assert machine_key(plain) != machine_key(values.hardware(gpus=(values.gpu(pinned_bytes_per_second=2e10),)))
    assert machine_key(plain) != machine_key(plain.model_copy(update={"copy_bytes_per_second": 5e9}))
    assert machine_key(plain) == machine_key(plain.model_copy(update={"ram_available_bytes": 1}))


def test_reset_forgets_and_the_history_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "db.sqlite3")
    try:
        store.add(finished(planned(), working=1.2, number=1), runner="r")
        assert learned(store, LITE, MACHINE).gpu.vram == pytest.approx(1.2, rel=0.01)
        forget(store)
        assert learned(store, LITE, MACHINE).gpu.runs == 0
        assert len(store.list()) == 1
        later = datetime.now(UTC) + timedelta(seconds=1)
        store.add(finished(planned(), working=1.1, number=2, finished_at=later), runner="r")
        assert learned(store, LITE, MACHINE).gpu.vram == pytest.approx(1.1, rel=0.01)
    finally:
        store.close()


def test_the_band() -> None:
    right = calibration.Compared("cuda:0", 10.5, 10.0)
    assert right.inside
    assert not calibration.Compared("cuda:0", 9.9, 10.0).inside
    assert not calibration.Compared("ram", 11.5, 10.0).inside
    assert calibration.Compared("seconds", 9.0, 10.0).inside
    assert not calibration.Compared("seconds", 5.0, 10.0).inside


def test_nothing_to_compare_without_a_prediction() -> None:
    assert compare(finished(planned(), plan=values.plan())) == ()
    assert compare(finished(planned(), status=JobStatus.FAILED)) == ()

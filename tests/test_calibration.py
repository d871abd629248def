"""What finished jobs teach: bounded, from this machine and model only, forgotten on demand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app import calibration
from app.calibration import MEMORY_BOUNDS, RUNS, compare, factors_from, forget, learned, machine_key
from app.planner import plan
from app.schema import GIB, Factors, Job, JobStatus, Plan, Report, Stage, StageReport
from app.store import Store
from tests import models, values

MACHINE = machine_key(values.hardware(gpus=(values.gpu(),)))
MODEL = models.LITE.coefficients.model  # type: ignore[union-attr]
ASKED = values.request(width=768, height=512, num_frames=121, num_inference_steps=50, guidance_scale=5.0)


def planned(**factors: Any) -> Plan:
    """A plan of the Lite model on a 24 GB card, made with these factors."""
    card = values.gpu(total_bytes=24 * GIB, free_bytes=24 * GIB)
    hardware = values.hardware(gpus=(card,), ram_total_bytes=64 * GIB, ram_available_bytes=60 * GIB)
    used = Factors(model=MODEL, machine=MACHINE, **factors)
    return plan(hardware, models.LITE, ASKED, values.preset(), None, factors=used)


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
            fixed = sum(p.bytes for p in counted if p.kind not in factors.scaled)
            scaled = sum(p.bytes / factors.of_memory(memory, p.kind) for p in counted if p.kind in factors.scaled)
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
        "report": Report(stages=tuple(stages), device="a card", warm=warm, versions={}),
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


def test_factors_change_the_parts_and_the_sum_stays_the_sum() -> None:
    plain, adjusted = planned(), planned(runs=1, vram=1.2, ram=1.1, seconds={Stage.DENOISE: 2.0})
    assert plain.estimate is not None
    assert adjusted.estimate is not None
    if plain.placements == adjusted.placements:
        assert adjusted.estimate.seconds(Stage.DENOISE) == pytest.approx(2 * plain.estimate.seconds(Stage.DENOISE))
    assert adjusted.estimate.seconds() == pytest.approx(sum(part.seconds for part in adjusted.estimate.time))
    assert adjusted.predicted_vram_bytes["cuda:0"] == adjusted.estimate.peak("cuda:0", allocated=True)


def test_reset_forgets_and_the_history_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "db.sqlite3")
    try:
        store.add(finished(planned(), working=1.2, number=1), runner="r")
        assert learned(store, MODEL, MACHINE).vram == pytest.approx(1.2, rel=0.01)
        forget(store)
        assert learned(store, MODEL, MACHINE).runs == 0
        assert len(store.list()) == 1
        later = datetime.now(UTC) + timedelta(seconds=1)
        store.add(finished(planned(), working=1.1, number=2, finished_at=later), runner="r")
        assert learned(store, MODEL, MACHINE).vram == pytest.approx(1.1, rel=0.01)
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

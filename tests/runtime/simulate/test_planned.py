"""A plan in the simulator: held as it says, and what it cannot hold is told."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import pytest

from app.plans import PlannedOutcome, PlannedRun, Shard
from app.runtime.simulate.planned import run_planned, serve, setup_of
from app.schema import GIB, Placement, Strategy
from tests import values

BUILT_IN = str(Path(__file__).resolve().parents[3] / "assets" / "demo")


def placement(component: str, strategy: Strategy = Strategy.RESIDENT, **changes: object) -> Placement:
    fields = {"device": "cpu" if strategy is Strategy.CPU else "cuda:0", "dtype": "float32", "weight_bytes": 1}
    return Placement.model_validate({"component": component, "strategy": strategy, **fields, **changes})


def plan_of(strategy: Strategy, **changes: object) -> PlannedRun:
    names = ("transformer", "text_encoder", "text_encoder_2", "vae")
    plan = values.plan(
        device="cuda:0",
        strategy=strategy,
        placements=tuple(placement(name, strategy, **(changes if name == "transformer" else {})) for name in names),
    )
    return PlannedRun(
        model=BUILT_IN, plan=plan, height=64, width=64, num_frames=5, vram_bytes=(4 * GIB,), context_bytes=GIB // 2
    )


@cache
def resident() -> PlannedOutcome:
    """The usual run, simulated once."""
    return run_planned(plan_of(Strategy.RESIDENT))


def test_components_are_loaded_in_the_planned_formats() -> None:
    plan = values.plan(placements=(placement("transformer", dtype="bfloat16"), placement("vae")))
    setup = setup_of(plan)
    assert (setup.of("transformer").dtype, setup.of("vae").dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("strategy", [Strategy.DISK, Strategy.STREAM])
def test_blocks_that_come_one_by_one_take_the_room_of_two(strategy: Strategy) -> None:
    whole = plan_of(Strategy.RESIDENT)
    transformer, *others = whole.plan.placements
    plan = whole.plan.model_copy(update={"placements": (placement(transformer.component, strategy), *others)})
    one, two = resident(), run_planned(whole.model_copy(update={"plan": plan}))
    assert two.error is None
    assert one.vram_bytes["cuda:0"] - two.vram_bytes["cuda:0"] > 6_000_000


def test_blocks_are_spread_over_two_cards() -> None:
    shards = (Shard(device="cuda:0", first_block=0, count=3), Shard(device="cuda:1", first_block=3, count=3))
    spread = plan_of(Strategy.RESIDENT, shards=shards).model_copy(update={"vram_bytes": (4 * GIB, 4 * GIB)})
    one, two = resident(), run_planned(spread)
    assert two.error is None
    assert two.vram_bytes["cuda:1"] > 6_000_000  # half of the transformer's 15.1 MB
    assert one.vram_bytes["cuda:0"] - two.vram_bytes["cuda:0"] > 6_000_000
    wrong = plan_of(Strategy.RESIDENT, shards=shards[:1])
    assert "has 6" in (run_planned(wrong).error or "")


def test_plans_are_answered_line_by_line() -> None:
    runs = [
        plan_of(Strategy.RESIDENT),
        plan_of(Strategy.MODEL_OFFLOAD),
        plan_of(Strategy.LEAF, use_stream=True),
        plan_of(Strategy.RESIDENT).model_copy(update={"vram_bytes": (GIB // 2 + 1_000_000,)}),
        plan_of(Strategy.RESIDENT).model_copy(update={"model": "no such model"}),
    ]
    answers = io.StringIO()
    assert serve(io.StringIO("".join(run.model_dump_json() + "\n" for run in runs)), answers) == 0
    resident, offloaded, leaf, small, unknown = map(PlannedOutcome.model_validate_json, answers.getvalue().splitlines())
    assert resident.error is None
    assert resident.vram_bytes["cuda:0"] > offloaded.vram_bytes["cuda:0"] > 0
    assert resident.vram_bytes["cuda:0"] > leaf.vram_bytes["cuda:0"] > 0
    assert leaf.pinned_bytes > 0
    assert "does not fit" in (small.error or "")
    assert "Nothing to simulate" in (unknown.error or "")


def test_what_is_offloaded_as_a_whole_leaves_for_what_stays() -> None:
    resident = plan_of(Strategy.RESIDENT)
    placements = tuple(
        placement(one.component, Strategy.MODEL_OFFLOAD) if one.component == "transformer" else one
        for one in resident.plan.placements
    )
    mixed = resident.model_copy(update={"plan": resident.plan.model_copy(update={"placements": placements})})
    both = [run_planned(run.model_copy(update={"num_frames": 33})) for run in (resident, mixed)]
    # decoding is where both are fullest; the transformer weighs 15.1 MB
    assert both[0].vram_bytes["cuda:0"] - both[1].vram_bytes["cuda:0"] > 14_000_000

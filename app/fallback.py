"""What to try next when a try failed: pure, so that each case can be tested without a card.

    VRAM    the next rung of the plan's ladder, then a plan for less VRAM; in decoding the VAE alone: tiles, smaller
            tiles, the CPU. What was computed is kept, so only the rest is done again.
    RAM     a rung with less RAM, then a plan for less
    black   decoded again in float32, without tiles, on the CPU
    crash   the same once more where the settings want it (`resume_by_itself`); a second crash ends it

Each try runs in a fresh worker (after a black picture a warm one will do), never by a plan that was tried before, and
there are at most `TRIES`. All else (a bug, a full disk, a time limit) would end in the same way, and ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from app.errors import PlanError
from app.events import Failed
from app.schema import Attempt, ErrorKind, Placement, Plan, Stage, Strategy

TRIES = 10
RESUMED = "resumed"
"""What was done by a person, who may have mended something: the tries count anew from there."""
LESS = 0.85
"""A plan for less memory has at most this share of what was predicted for the one that failed."""
TILE_DIVISORS = (2, 4)

Replan = Callable[[dict[str, int]], Plan]
"""Given `vram_limit_bytes` or `ram_limit_bytes`, the best plan within it. Raises PlanError."""


class Next(NamedTuple):
    plan: Plan
    words: str
    """What is done otherwise."""


def after(
    failure: Failed,
    plan: Plan,
    tried: Sequence[Plan],
    attempts: Sequence[Attempt],
    replan: Replan,
    *,
    crashes: int = 1,
) -> Next:
    """What to try after `plan` failed.

    Args:
        tried: all plans so far, `plan` too.
        attempts: those before this failure.
        crashes: a job may crash so often and is tried again by itself.

    Raises:
        PlanError: nothing is left to try; says why, and for memory what would fit.
    """
    ends = [number for number, attempt in enumerate(attempts, start=1) if attempt.then == RESUMED]
    attempts = attempts[ends[-1] if ends else 0 :]
    if len(attempts) + 1 >= TRIES:
        raise PlanError(f"It was tried {TRIES} times.")
    if failure.kind is ErrorKind.CRASH:
        before = sum(attempt.kind is ErrorKind.CRASH for attempt in attempts)
        if before >= crashes:
            raise PlanError("It happened twice, so it was not tried again." if before else "It was not tried again.")
        return Next(plan, "the same again in a fresh process")
    for choice in _choices(failure, plan, replan):
        if not any(choice.plan.held_like(other) for other in tried):
            return choice
    raise PlanError("No smaller plan is left.")


def _choices(failure: Failed, plan: Plan, replan: Replan) -> Iterator[Next]:
    decoding = failure.progress is not None and failure.progress.stage is Stage.DECODE
    if failure.kind is ErrorKind.BLACK and decoding:
        yield from _other_decoding(plan)
    elif failure.kind is ErrorKind.OOM:
        if decoding:
            yield from _smaller_decoding(plan)
        for number, rung in enumerate(plan.ladder):
            yield Next(plan.rung(number), "less VRAM: " + ("; ".join(rung.reasons) or "a smaller plan"))
        used = max(plan.predicted_vram_bytes.values(), default=0)
        if plan.predicted_seconds is None:  # by the coarse rule, which knows no sizes
            yield from _coarser(plan)
        elif used:
            yield Next(replan({"vram_limit_bytes": int(used * LESS)}), "a plan for less VRAM")
    elif failure.kind is ErrorKind.RAM:
        if decoding:
            yield from _smaller_tiles(plan)
        for number, rung in enumerate(plan.ladder):
            if rung.predicted_ram_bytes < plan.predicted_ram_bytes * 0.95:
                yield Next(plan.rung(number), "less RAM: " + ("; ".join(rung.reasons) or "a smaller plan"))
        yield Next(replan({"ram_limit_bytes": int(plan.predicted_ram_bytes * LESS)}), "a plan for less RAM")


def _smaller_decoding(plan: Plan) -> Iterator[Next]:
    yield from _smaller_tiles(plan)
    if plan.device != "cpu":
        usual = plan.model_copy(update={"vae_tile_divisor": 1, "estimate": None})  # of its time nothing is known
        on_cpu = _vae(usual, strategy=Strategy.CPU, device="cpu", dtype="float32")
        yield Next(on_cpu, "the frames are decoded on the CPU")


def _smaller_tiles(plan: Plan) -> Iterator[Next]:
    if not plan.vae_tiling:
        yield Next(plan.model_copy(update={"vae_tiling": True}), "the frames are decoded in tiles")
    for divisor in TILE_DIVISORS:
        if divisor > plan.vae_tile_divisor:
            changes = {"vae_tiling": True, "vae_tile_divisor": divisor}
            yield Next(
                plan.model_copy(update=changes), "the frames are decoded in smaller tiles, blended where they meet"
            )


def _other_decoding(plan: Plan) -> Iterator[Next]:
    exact = _vae(plan, dtype="float32")
    yield Next(exact, "the frames are decoded in float32")
    whole = exact.model_copy(update={"vae_tiling": False, "vae_tile_divisor": 1})
    yield Next(whole, "the frames are decoded in float32, in one piece")
    on_cpu = _vae(whole, strategy=Strategy.CPU, device="cpu", dtype="float32")
    yield Next(on_cpu, "the frames are decoded on the CPU in float32")


def _coarser(plan: Plan) -> Iterator[Next]:
    """Of a model whose sizes nobody has measured: less on the card at once."""
    order = [Strategy.RESIDENT, Strategy.MODEL_OFFLOAD, Strategy.LEAF]
    words = {Strategy.MODEL_OFFLOAD: "one part at a time on the card", Strategy.LEAF: "layer by layer on the card"}
    if plan.strategy not in order:
        return
    for strategy in order[order.index(plan.strategy) + 1 :]:
        held = [
            one if one.strategy is Strategy.CPU else one.model_copy(update={"strategy": strategy})
            for one in plan.placements
        ]
        yield Next(
            plan.model_copy(update={"strategy": strategy, "placements": tuple(held), "vae_tiling": True}),
            words[strategy],
        )


def _vae(plan: Plan, **changes: object) -> Plan:
    """The plan with the VAE held otherwise."""
    usual = Placement(component="vae", strategy=plan.strategy, device=plan.device, dtype=plan.dtype, weight_bytes=0)
    now = next((one for one in plan.placements if one.component == "vae"), usual)
    plain = {"storage_dtype": None, "use_stream": False, "low_cpu_mem_usage": False, "num_blocks_per_group": None}
    other = now.model_copy(update={**(plain if "strategy" in changes else {}), **changes})
    rest = tuple(one for one in plan.placements if one.component != "vae")
    return plan.model_copy(update={"placements": (*rest, other)})

"""What `pocketreel plan` prints for people: a plan by component and stage, the fit table, the cliffs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from app import calibration
from app.config import LOCAL_OWNER, Settings
from app.errors import PlanError
from app.planner.table import Cliff, FitRow, how_words, short_how
from app.planner.words import duration
from app.planning import Asked, Planning
from app.presets import format_bytes
from app.schema import Arrangement, Hardware, Plan, Request, Stage
from app.store import Store

VERDICTS = {
    "comfortable": "fits comfortably",
    "slow": "fits slowly",
    "no": "does not fit",
    "unchecked": "not measured",
}


ACCURACY_RUNS = 20
"""The newest runs that `plan --accuracy` shows."""


class Answer(NamedTuple):
    """What the command prints: for people, or as one JSON document."""

    parts: list[RenderableType]
    document: Any


def answer(settings: Settings, asked: Asked, *, every: bool = False, cliff: bool = False) -> Answer:
    """The plan of a model, or with `every` the table of all models, or with `cliff` the model's cliffs.

    Raises:
        BadInput: something asked for is wrong.
        PlanError: it does not fit, or (cliffs) the model was not measured.
    """
    planning = Planning(settings, asked)
    if every:
        rows = planning.table()
        return Answer(fit_view(rows, planning.hardware), [row.model_dump(mode="json") for row in rows])
    if cliff:
        title, found = planning.cliffs()
        return Answer(cliff_view(found, title), [one.model_dump(mode="json") for one in found])
    outlook = planning.outlook()
    if outlook.plan is None:
        raise PlanError(outlook.error or "")
    notes = [f"Note: {notice.text}" for notice in outlook.notices]
    view = plan_view(outlook.plan, outlook.request, outlook.title, runs=outlook.runs_words)
    return Answer([*notes, *view], {**outlook.model_dump(mode="json"), "runs_words": outlook.runs_words})


def accuracy(settings: Settings) -> Answer:
    """Predicted against measured of the last runs, and how many fell inside the band."""
    store = Store(settings.database)
    try:
        newest = store.list(owner=LOCAL_OWNER, limit=calibration.LOOKED_THROUGH)
    finally:
        store.close()
    jobs = [job for job in newest if calibration.compare(job)]
    rows = [(job, one) for job in jobs[:ACCURACY_RUNS] for one in calibration.compare(job)]
    document = [{"job": job.id, "model": job.request.model, **one._asdict(), "inside": one.inside} for job, one in rows]
    if not rows:
        return Answer(["Nothing to compare yet: no finished run had a prediction. Make a video."], document)
    table = _table("job", "model", "of", "predicted", "measured", "predicted / measured", "")
    for job, one in rows:
        show = duration if one.what == "seconds" else lambda size: format_bytes(int(size))
        inside = "" if one.inside else "outside"
        what = {"seconds": "time", "ram": "RAM"}.get(one.what, f"VRAM {one.what}")
        numbers = (show(one.predicted), show(one.measured), f"{one.ratio:.2f}")
        table.add_row(job.id, job.request.model, what, *numbers, inside)
    count = sum(one.inside for _, one in rows)
    low, high = calibration.TIME_BAND
    return Answer(
        [
            table,
            "",
            f"{count} of {len(rows)} inside the band: memory predicted not below what was measured and at most "
            f"{calibration.MEMORY_BAND[1] - 1:.0%} above, time within {low:g} to {high:g} of it.",
        ],
        document,
    )


def reset(settings: Settings) -> Answer:
    """Forget what earlier runs taught."""
    store = Store(settings.database)
    try:
        calibration.forget(store)
    finally:
        store.close()
    return Answer(["Predictions are plain again; runs from now on teach them anew."], {"reset": True})


def plan_view(plan: Plan, request: Request, title: str, *, runs: str) -> list[RenderableType]:
    """One plan: what is asked, each component, each stage, the reasons, the ladder. `runs`: why it cannot be run."""
    seconds = f", about {duration(plan.predicted_seconds)}" if plan.predicted_seconds is not None else ""
    head = (
        f"{title}: {request.width}x{request.height}, {request.num_frames} frames, {request.num_inference_steps} steps"
        f"{seconds}"
    )
    parts: list[RenderableType] = [head, "", component_table(plan)]
    if plan.estimate is not None:
        parts += ["", stage_table(plan)]
    parts += ["", "Why:", *(f"  - {reason}" for reason in plan.reasons)]
    if plan.ladder:
        parts += ["", "If memory runs out after all, in this order:"]
        parts += [f"  {number}. {_rung(rung)}" for number, rung in enumerate(plan.ladder, start=1)]
    return [*parts, "", runs] if runs else parts


def component_table(plan: Plan) -> Table:
    """How each component is held."""
    table = _table("component", "held", "where", "format", "weights")
    for placement in plan.placements:
        where = ", ".join(shard.device for shard in placement.shards) or placement.device
        dtype = placement.dtype + (" from fp8" if placement.storage_dtype else "")
        table.add_row(placement.component, short_how(placement), where, dtype, format_bytes(placement.weight_bytes))
    return table


def stage_table(plan: Plan) -> Table:
    """Seconds of each stage, and what each memory holds at its peak, margin and context included."""
    estimate = plan.estimate
    assert estimate is not None  # noqa: S101 - the caller looked
    memories = sorted(
        estimate.memories, key=lambda name: (not name.startswith("cuda"), name != "ram", name != "pinned", name)
    )
    names = {"ram": "RAM", "pinned": "of it page-locked", "disk": "disk"}
    table = _table("stage", "time", *(names.get(memory, f"VRAM {memory}") for memory in memories))
    for stage in Stage:
        sizes = [format_bytes(estimate.bytes(memory, stage)) for memory in memories]
        table.add_row(str(stage), duration(estimate.seconds(stage)), *sizes)
    table.add_row("peak", duration(estimate.seconds()), *(format_bytes(estimate.peak(memory)) for memory in memories))
    return table


def fit_view(rows: Iterable[FitRow], hardware: Hardware) -> list[RenderableType]:
    """Every model on this machine."""
    table = _table("model", "at", "verdict", "time", "VRAM", "RAM", "how, or what would fit")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.width}x{row.height}x{row.num_frames}",
            VERDICTS[row.verdict] + ("" if row.runs or row.seconds is None else " *"),
            "" if row.seconds is None else duration(row.seconds),
            "" if row.vram_bytes is None else format_bytes(row.vram_bytes),
            "" if row.ram_bytes is None else format_bytes(row.ram_bytes),
            row.how or (f"fits with {row.largest}" if row.largest else ""),
        )
    cards = ", ".join(f"{gpu.name} {format_bytes(gpu.free_bytes)} free" for gpu in hardware.gpus) or "no GPU"
    return [
        f"On {cards}; {format_bytes(hardware.ram_available_bytes)} of RAM available:",
        "",
        table,
        "",
        "Times are reckoned, not measured. * needs a start image, which this version cannot take.",
    ]


def cliff_view(found: Iterable[Cliff], title: str) -> list[RenderableType]:
    """Where one step more costs much."""
    lines: list[RenderableType] = []
    for cliff in found:
        after = "does not fit" if cliff.after_seconds is None else f"takes {duration(cliff.after_seconds)}"
        lines.append(f"Up to {cliff.before}: {duration(cliff.before_seconds)} ({cliff.before_how}).")
        lines.append(f"  {cliff.after} {after}" + (f" ({cliff.after_how})." if cliff.after_how else "."))
    return lines or [f"{title} has no cliff here: the time grows with the size of the video and nothing else."]


def _rung(rung: Arrangement) -> str:
    vram = ", ".join(f"{format_bytes(size)} on {device}" for device, size in rung.predicted_vram_bytes.items())
    seconds = "" if rung.predicted_seconds is None else f", about {duration(rung.predicted_seconds)}"
    return f"{vram or 'no VRAM'}{seconds}: {'; '.join(rung.reasons) or how_words(rung.placements)}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

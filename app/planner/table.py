"""Many plans at once: every model on a machine, and the cliffs of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal, TypeVar

from app.errors import PlanError
from app.planner.nearest import Case, smaller_sizes
from app.planner.search import Found, Search
from app.schema import Hardware, HardwarePreset, Learned, ModelCard, Placement, Request, Strategy, Value

T = TypeVar("T")

COMFORTABLE: Final = 1.5
"""Up to this many times of what the same cards would take with endless memory, a model fits comfortably."""
CLIFF: Final = 1.25
"""A step to the next size is a cliff when it costs this many times more than the larger size explains."""
CLIFF_POINTS: Final = 48
"""Numbers of frames, and sizes, that are tried at most."""


class FitRow(Value):
    """One model on one machine."""

    model: str
    title: str
    width: int
    height: int
    num_frames: int
    verdict: Literal["comfortable", "slow", "no", "unchecked"]
    """`unchecked`: the model was not measured by the simulator."""
    seconds: float | None = None
    vram_bytes: int | None = None
    """Of the fullest card, margin and context included."""
    ram_bytes: int | None = None
    how: str = ""
    largest: str | None = None
    """What would fit, where the defaults do not."""
    runs: bool = False
    """False: it fits, but starts from a picture, which this version cannot take."""


class Cliff(Value):
    """Where a small step makes a run much slower, or impossible."""

    what: Literal["frames", "size"]
    before: str
    before_seconds: float
    before_how: str
    after: str
    after_seconds: float | None
    """None: it does not fit."""
    after_how: str = ""


def how_words(placements: Iterable[Placement]) -> str:
    """`transformer leaf+stream, text_encoder disk, vae resident`."""
    return ", ".join(f"{placement.component} {short_how(placement)}" for placement in placements)


def short_how(placement: Placement) -> str:
    """`block x4`, `leaf+stream+low_cpu`, `resident+fp8`, `block+gguf`, `sharded 25+15`."""
    if placement.shards:
        words = "sharded " + "+".join(str(shard.count) for shard in placement.shards)
    else:
        words = str(placement.strategy)
    if placement.strategy is Strategy.BLOCK and placement.num_blocks_per_group not in (None, 1):
        words += f" x{placement.num_blocks_per_group}"
    words += f" {placement.resident_blocks} stay" if placement.resident_blocks else ""
    words += "+stream" if placement.use_stream else ""
    words += "+low_cpu" if placement.low_cpu_mem_usage else ""
    words += f"+{placement.quantization}" if placement.quantization else ""
    return words + ("+fp8" if placement.storage_dtype else "")


def fit_table(
    hardware: Hardware,
    requests: Sequence[tuple[ModelCard, Request]],
    preset: HardwarePreset,
    learned: Callable[[ModelCard], Learned | None] = lambda _card: None,
) -> tuple[FitRow, ...]:
    """What fits of all these models. Cards that differ in their weights only are reckoned once."""
    known: dict[tuple[object, ...], FitRow] = {}
    rows = []
    for card, request in requests:
        # the same object where cards share a file; a model that was not measured is known by its id
        measured = id(card.coefficients) if card.coefficients is not None else card.id
        key = (
            measured,
            repr(card.stored),
            request.model_copy(update={"model": "", "negative_prompt": None}),
            card.lattice,
            card.tasks,
        )
        if key not in known:
            known[key] = _row(hardware, card, request, preset, learned(card))
        rows.append(known[key].model_copy(update={"model": card.id, "title": card.title}))
    return tuple(rows)


def _row(
    hardware: Hardware, card: ModelCard, request: Request, preset: HardwarePreset, learned: Learned | None
) -> FitRow:
    size = {"width": request.width, "height": request.height, "num_frames": request.num_frames}
    row = FitRow(model=card.id, title=card.title, verdict="unchecked", **size)
    if card.coefficients is None:
        return row
    search = Search(hardware, card, request, preset, learned)
    found = search.best()
    if found is None:
        return row.model_copy(update={"verdict": "no", "largest": _largest(search)})
    ideal = search.unlimited()
    slow = found.choice.seconds > min(COMFORTABLE * ideal, request.timeout_seconds)
    peaks: dict[str, int] = {}
    for (memory, _), used in zip(found.space.slots, found.choice.bytes, strict=True):
        peaks[memory] = max(peaks.get(memory, 0), used)
    return row.model_copy(
        update={
            "verdict": "slow" if slow else "comfortable",
            "seconds": found.choice.seconds,
            "vram_bytes": max((size for memory, size in peaks.items() if memory.startswith("cuda")), default=None),
            "ram_bytes": peaks["ram"],
            "how": how_words(found.placements),
            "runs": "t2v" in card.tasks,
        }
    )


def _largest(search: Search) -> str | None:
    case = Case(search)
    if (frames := case.fewer_frames()) is not None:
        return f"{frames} frames"
    size = case.smaller_size()
    return None if size is None else f"{size[0]}x{size[1]}"


def cliffs(
    hardware: Hardware, card: ModelCard, request: Request, preset: HardwarePreset, learned: Learned | None = None
) -> tuple[Cliff, ...]:
    """Steps in frames at this size, and in size at these frames, that cost much more than they add.

    Raises:
        PlanError: the model was not measured by the simulator, so there is nothing to reckon with.
    """
    if card.coefficients is None:
        raise PlanError(f"{card.title} was not measured by the simulator, so its cliffs are not known.")

    search = Search(hardware, card, request, preset, learned)

    def at(**changes: int) -> tuple[Found | None, float]:
        other = search.other(**changes)
        return other.best(), other.unlimited()

    lattice = card.lattice
    counts = _spread(range(1, lattice.max_num_frames + 1, lattice.temporal_multiple))
    largest = request.model_copy(
        update={
            "width": lattice.max_side * request.width // max(request.width, request.height) + lattice.spatial_multiple,
            "height": lattice.max_side * request.height // max(request.width, request.height)
            + lattice.spatial_multiple,
        }
    )
    sizes = _spread([size for size in smaller_sizes(card, largest) if max(size) <= lattice.max_side])
    by_frames = [(f"{count} frames", *at(num_frames=count)) for count in counts]
    by_size = [(f"{width}x{height}", *at(width=width, height=height)) for width, height in sizes]
    return (*_cliffs("frames", by_frames), *_cliffs("size", by_size))


def _cliffs(what: Literal["frames", "size"], points: Sequence[tuple[str, Found | None, float]]) -> Iterable[Cliff]:
    for (before, found, ideal), (after, next_found, next_ideal) in pairwise(points):
        if found is None:
            return
        grown = None if next_found is None else next_found.choice.seconds / next_ideal
        if grown is None or grown > CLIFF * found.choice.seconds / ideal:
            yield Cliff(
                what=what,
                before=before,
                before_seconds=found.choice.seconds,
                before_how=how_words(found.placements),
                after=after,
                after_seconds=None if next_found is None else next_found.choice.seconds,
                after_how="" if next_found is None else how_words(next_found.placements),
            )


def _spread(values: Sequence[T]) -> list[T]:
    """At most `CLIFF_POINTS` of them, evenly, the first and the last among them."""
    if len(values) <= CLIFF_POINTS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (CLIFF_POINTS - 1))] for i in range(CLIFF_POINTS)]

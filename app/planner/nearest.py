"""What does not fit, in which memory and stage and by how much; and the nearest changes that fit, computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from app.errors import PlanError
from app.planner.options import unused
from app.planner.search import Found, Search
from app.planner.words import STAGE_DOING
from app.presets import format_bytes
from app.schema import HardwarePreset, ModelCard, Request

T = TypeVar("T")


class Case:
    """A search that found nothing, and what would be found otherwise."""

    def __init__(self, search: Search) -> None:
        self.search, self.card, self.request = search, search.card, search.request

    def fits(self, **changes: int) -> bool:
        """Whether the request would fit with other numbers."""
        return self.search.other(**changes).best() is not None

    def fewer_frames(self) -> int | None:
        """The most frames that fit at this size; None when not even one does."""
        step = self.card.lattice.temporal_multiple
        counts = range(1, self.request.num_frames, step)
        return largest(counts, lambda count: self.fits(num_frames=count))

    def smaller_size(self) -> tuple[int, int] | None:
        """The largest width and height of about this shape that fit with all frames; None when none does."""
        sizes = list(smaller_sizes(self.card, self.request))
        return largest(sizes, lambda size: self.fits(width=size[0], height=size[1]))

    def other_preset(self, presets: Iterable[HardwarePreset]) -> HardwarePreset | None:
        """The preset under which it runs fastest."""
        best: tuple[float, HardwarePreset] | None = None
        for preset in presets:
            if preset.id == self.search.preset.id:
                continue
            try:
                found = self.search.other(preset).best()
            except PlanError:  # it wants a GPU and there is none
                continue
            if found is not None and (best is None or found.choice.seconds < best[0]):
                best = (found.choice.seconds, preset)
        return best[1] if best else None


def plan_error(search: Search, presets: Iterable[HardwarePreset]) -> PlanError:
    """The error for a request that does not fit."""
    case, nearest = Case(search), search.nearest()
    request, card = case.request, case.card
    what = f"{card.title} at {request.width}x{request.height}, {request.num_frames} frames"
    if nearest is None:
        return PlanError(f"{what} cannot be run here: no card has room for more than its driver's own memory.")
    why = unused(search.preset, search.usable, search.hardware.packages)
    also = "" if why is None else f" The preset's {search.preset.quantization} was not used: {why}."
    return PlanError(f"{_shortage(search, nearest, what)} {_advice(case, presets)}{also}")


def _shortage(search: Search, nearest: Found, what: str) -> str:
    memory, stage, over = nearest.shortage
    limit = search.budget.bytes[memory]
    need, short = format_bytes(limit + over), format_bytes(over)
    names = {f"cuda:{gpu.index}": f"VRAM on {gpu.name}" for gpu in search.usable}
    name = names.get(memory, {"ram": "RAM", "pinned": "page-locked RAM"}.get(memory, memory))
    return (
        f"{what} needs about {need} of {name} while {STAGE_DOING[stage]}; {format_bytes(limit)} can be used "
        f"({search.budget.words[memory]}), {short} short."
    )


def _advice(case: Case, presets: Iterable[HardwarePreset]) -> str:
    fits = []
    if (frames := case.fewer_frames()) is not None:
        fits.append(f"{frames} frames")
    if (size := case.smaller_size()) is not None:
        fits.append(f"{size[0]}x{size[1]} with all frames")
    if (preset := case.other_preset(presets)) is not None:
        fits.append(f"the preset {preset.title}")
    if fits:
        return f"It fits with {', or '.join(fits)}."
    return "No number of frames, no size and no preset makes it fit: choose a smaller model, or close other programs."


def smaller_sizes(card: ModelCard, request: Request) -> Iterator[tuple[int, int]]:
    """Widths and heights of about the same shape on the model's lattice, below the request's, smallest first."""
    step, lowest = card.lattice.spatial_multiple, card.lattice.min_side
    longer, shorter = max(request.width, request.height), min(request.width, request.height)
    seen: set[tuple[int, int]] = set()
    for side in range(-(-lowest // step) * step, shorter, step):
        other = round(longer * side / shorter / step) * step
        size = (other, side) if request.width >= request.height else (side, other)
        if size not in seen and other >= lowest:
            seen.add(size)
            yield size


def largest(candidates: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """The last of rising candidates that fits, by bisection: memory grows with each of them."""
    if not candidates or not fits(candidates[0]):
        return None  # most often it is the weights that do not fit: one look instead of half a dozen
    low, high = 1, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1]

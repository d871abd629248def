"""Plans in plain words: the reasons, what each part is held by, how long things take."""

from __future__ import annotations

from collections.abc import Sequence

from app.planner.options import unused
from app.planner.search import Found, Search
from app.plans import Estimate, stage_of
from app.presets import format_bytes
from app.quantization import WORDS
from app.schema import Factors, ModelCard, Placement, Stage, Strategy

STAGE_DOING = {
    Stage.LOAD: "loading the model",
    Stage.ENCODE: "reading the prompt",
    Stage.DENOISE: "making the video",
    Stage.DECODE: "decoding the frames",
    Stage.EXPORT: "writing the file",
}
_HELD = {
    Strategy.RESIDENT: "on {device} all the time",
    Strategy.MODEL_OFFLOAD: "in RAM, on {device} as a whole while at work",
    Strategy.BLOCK: "in RAM, passing through {device} block by block",
    Strategy.LEAF: "in RAM, passing through {device} layer by layer",
    Strategy.STREAM: "in RAM, passing through {device} in our own streams",
    Strategy.DISK: "read from the disk at each pass, through {device}",
    Strategy.CPU: "computing on the CPU",
}


def held_words(placement: Placement, titles: dict[str, str]) -> str:
    """`in RAM, passing through the RTX 3060 block by block, copies hidden behind the computation, stored in 8 bits`."""
    device = titles.get(placement.device, placement.device)
    words = _HELD[placement.strategy].format(device=device)
    if placement.shards:
        spread = " and ".join(
            f"{shard.count} on {titles.get(shard.device, shard.device)}" for shard in placement.shards
        )
        words = f"spread over the cards in blocks: {spread}"
    if placement.strategy is Strategy.BLOCK and (placement.num_blocks_per_group or 1) > 1:
        words += f", {placement.num_blocks_per_group} at a time"
    if placement.resident_blocks:
        words += f", {placement.resident_blocks} blocks staying there"
    if placement.use_stream:
        words += ", copies hidden behind the computation"
        words += " (weights pinned as they travel)" if placement.low_cpu_mem_usage else " (weights page-locked in RAM)"
    if placement.storage_dtype is not None:
        words += ", stored in 8 bits"
    if placement.quantization is not None:
        words += f", packed in {WORDS[placement.quantization]}"
    return words


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`: as exact as a prediction deserves."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def titles_of(search: Search) -> dict[str, str]:
    """Device names as people know them; with the number where two cards have the same name."""
    names = [gpu.name for gpu in search.usable]
    return {
        f"cuda:{gpu.index}": f"the {gpu.name}" + (f" (cuda:{gpu.index})" if names.count(gpu.name) > 1 else "")
        for gpu in search.usable
    }


def reasons_of(search: Search, found: Found, estimate: Estimate, *, sure: bool) -> tuple[str, ...]:
    """Why this plan: the room there is, how each part is held, the tightest moment, the format, the time."""
    titles, budget = titles_of(search), search.budget
    reasons = []
    if not found.gpus:
        preset_says = search.preset.device == "cpu"
        why = "no GPU is used: the preset says so" if preset_says else "no GPU was found: the CPU computes"
        reasons.append("nothing fits the GPU's memory: the CPU computes" if search.usable and not preset_says else why)
    for gpu in found.gpus:
        name = f"cuda:{gpu.index}"
        held = [process for process in gpu.processes if process.used_bytes]
        others = "; in use by " + ", ".join(
            f"{process.name} ({format_bytes(process.used_bytes or 0)})" for process in held[:3]
        )
        reasons.append(f"{titles[name].removeprefix('the ')}: {budget.words[name]}{others if held else ''}")
    if found.gpus:
        reasons += [f"{', '.join(names)}: {words}" for words, names in _together(found, titles).items()]
    reasons += quantization_words(found.placements, search.card)
    if (unmet := unused(search.preset, found.gpus, search.hardware.packages)) is not None:
        reasons.append(f"the preset's {search.preset.quantization} is not used: {unmet}")
    elif search.preset.quantization is not None and not any(one.quantization for one in found.placements):
        reasons.append(f"the preset's {search.preset.quantization} is not used: without it, it fits and is no slower")
    if found.tiling:
        reasons.append("the frames are decoded in tiles: that takes less memory and a little longer")
    for name in (*(f"cuda:{gpu.index}" for gpu in found.gpus), "ram"):
        if name in estimate.memories:
            reasons.append(_tightest(name, titles, estimate, budget.bytes[name]))
    dtypes = list(dict.fromkeys(placement.dtype for placement in found.placements))
    main = next(placement for placement in found.placements if stage_of(placement.component) is Stage.DENOISE)
    where = "most CPUs compute 16-bit formats slowly" if main.device == "cpu" else "what the card computes fast"
    rest = ", ".join(dtype for dtype in dtypes if dtype != main.dtype)
    reasons.append(f"{main.dtype}: {where}" + (f"; {rest} for parts that want it" if rest else ""))
    reasons.append(_time_words(search, estimate))
    if not sure:
        reasons.append("some sizes of this model are its class's defaults, compared with nothing: they may be off")
    return tuple(reasons)


def quantization_words(placements: Sequence[Placement], card: ModelCard) -> tuple[str, ...]:
    """What packed weights mean for the video, and what a number that is not known yet means for the plan."""
    made = [one.component for one in placements if one.quantization is not None and one.component not in card.stored]
    words = []
    if made:
        words.append(f"{', '.join(made)}: packed while it is loaded, so the video is not quite the unquantized model's")
    for name, stored in card.stored.items():
        words.append(f"{name}: as it lies there, {stored.title}, so the video is not quite the unquantized model's")
        if not stored.exact:
            words.append(f"the size of {card.gguf.get(name, name)} is reckoned by its name until it is downloaded")
    return tuple(words)


def learned_words(factors: Factors | None) -> tuple[str, ...]:
    """What earlier runs changed about the prediction."""
    if factors is None or not factors.runs:
        return ()
    runs = "the last run" if factors.runs == 1 else f"the last {factors.runs} runs"
    memory = [f"{name} x{one:.2f}" for name, one in (("VRAM", factors.vram), ("RAM", factors.ram)) if one != 1.0]
    changed = f": working memory {', '.join(memory)}" if memory else ""
    return (f"adjusted to {runs} of this model here{changed} (`pocketreel plan --accuracy`)",)


def _together(found: Found, titles: dict[str, str]) -> dict[str, list[str]]:
    """Components by how they are held, so that one sentence tells of all that are held alike."""
    groups: dict[str, list[str]] = {}
    for placement in found.placements:
        groups.setdefault(held_words(placement, titles), []).append(placement.component)
    return groups


def _tightest(memory: str, titles: dict[str, str], estimate: Estimate, limit: int) -> str:
    stage = max(Stage, key=lambda stage: estimate.bytes(memory, stage))
    need = estimate.bytes(memory, stage)
    name = "RAM" if memory == "ram" else f"VRAM on {titles.get(memory, memory)}"
    words = f"most {name} is needed while {STAGE_DOING[stage]}: {format_bytes(need)} of {format_bytes(limit)} usable"
    reserve = sum(
        part.bytes for part in estimate.memory
        if part.memory == memory and part.stage is stage and part.kind in ("reserve", "context")
    )  # fmt: skip
    return words + (f", {format_bytes(reserve)} of it margin and the driver's own" if reserve else "")


def _time_words(search: Search, estimate: Estimate) -> str:
    total, longest = estimate.seconds(), max(Stage, key=estimate.seconds)
    words = f"about {duration(total)}, {duration(estimate.seconds(longest))} of it {STAGE_DOING[longest]}"
    hidden = sum(part.seconds for part in estimate.time if part.kind in ("transfer", "read") and part.stage is longest)
    if hidden > 0.05 * total and longest is not Stage.LOAD:
        words += f" ({duration(hidden)} waiting for weights)"
    words += f"; reckoned from {'; '.join(search.machine.sources) if search.usable else 'an assumed CPU speed'}"
    if total > search.request.timeout_seconds:
        words += f"; that is longer than the time limit of {duration(search.request.timeout_seconds)}"
    return words

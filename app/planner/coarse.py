"""The coarse rule for models that were not fitted: one device, all of the pipeline resident, or one component at a time
on the GPU (model offload), or the CPU.

Memory is estimated from the sizes of the weights and a rule of thumb for working memory; where sizes are unknown (a Hub
model that was not downloaded) nothing is promised. The reasons say that the rule is coarse.
"""

from __future__ import annotations

from app.errors import PlanError
from app.estimate import GPU_CONTEXT_BYTES, WORKER_BASE_BYTES
from app.planner.budget import RAM_FLOOR_BYTES, usable_gpus
from app.planner.words import quantization_words
from app.quantization import itemsize
from app.schema import GIB, Gpu, Hardware, HardwarePreset, ModelCard, Placement, Plan, Request, Strategy

COARSE = "reckoned by a coarse rule: this model was not measured by the simulator yet"
WEIGHTS_MARGIN = 1.25


def _unmet(preset: HardwarePreset) -> list[str]:
    """What the preset wants and this rule cannot plan."""
    unmet = []
    if (preset.max_gpus or 1) > 1:
        unmet.append("without measured sizes one card is used: the others stay free")
    if preset.prefer_disk:
        unmet.append("without measured sizes nothing is read from the disk while it computes: only the RAM limit holds")
    if preset.quantization is not None:
        unmet.append(f"without measured sizes {preset.quantization} is not used: it is not known what it would save")
    return unmet


def coarse_plan(
    hardware: Hardware,
    card: ModelCard,
    request: Request,
    preset: HardwarePreset,
    counts: dict[str, dict[str, int]] | None,
) -> Plan:
    """Choose device, dtype and placement. `counts` are numbers by component and stored dtype, None when unknown.

    Raises:
        PlanError: names the memory that is short, by how much, and what would fit.
    """
    gpu: Gpu | None = max(usable_gpus(hardware, preset), key=lambda gpu: gpu.free_bytes, default=None)
    if gpu is None:
        # most CPUs have no fast 16-bit arithmetic, so they compute in 32 whatever the files hold
        return _on_cpu(hardware, card, request, preset, _bytes(counts, "float32", card))
    weights = _bytes(counts, "bfloat16", card)
    dtype = "bfloat16" if gpu.supports["bf16"] else "float16"
    device = f"cuda:{gpu.index}"
    budget = gpu.free_bytes - preset.vram_keep_free_bytes - GPU_CONTEXT_BYTES
    reason = f"{gpu.name}: {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free"
    if preset.vram_limit_bytes is not None:
        budget = min(budget, preset.vram_limit_bytes - GPU_CONTEXT_BYTES)
        reason += f", at most {_gib(preset.vram_limit_bytes)} by the preset {preset.title}"
    working = _working_bytes(request)
    ram_needed = WORKER_BASE_BYTES + sum((weights or {}).values()) + _frame_bytes(request) * 3
    _check_ram(hardware, preset, ram_needed, card)
    if weights is None:
        strategy, needed = Strategy.MODEL_OFFLOAD, 0
        why = "the sizes of this model are unknown until it is downloaded: one part at a time on the card, unchecked"
    elif (needed := int(sum(weights.values()) * WEIGHTS_MARGIN) + working) <= budget:
        strategy, why = Strategy.RESIDENT, f"the whole model fits ({_gib(needed)} with working memory)"
    elif (needed := int(max(weights.values()) * WEIGHTS_MARGIN) + working) <= budget:
        strategy, why = Strategy.MODEL_OFFLOAD, f"one part at a time on the card ({_gib(needed)})"
    else:
        raise PlanError(
            f"{card.title} at {request.width}x{request.height}x{request.num_frames} needs about {_gib(needed)} of VRAM "
            f"for its largest part; {_gib(max(budget, 0))} can be used on {gpu.name} ({_gib(needed - budget)} short). "
            "Choose fewer frames, a smaller size or a smaller model, or the preset for the CPU."
        )
    return Plan(
        device=device,
        dtype=dtype,
        strategy=strategy,
        placements=_placements(weights, strategy, device, dtype, card),
        vae_tiling=strategy is Strategy.MODEL_OFFLOAD,
        predicted_ram_bytes=ram_needed,
        predicted_vram_bytes={device: needed} if needed else {},
        reasons=(
            reason,
            why,
            f"{dtype}: what {gpu.name} computes fast",
            *quantization_words((), card),
            COARSE,
            *_unmet(preset),
        ),
    )


def _on_cpu(
    hardware: Hardware, card: ModelCard, request: Request, preset: HardwarePreset, weights: dict[str, int] | None
) -> Plan:
    needed = WORKER_BASE_BYTES + sum((weights or {}).values()) + _working_bytes(request)
    _check_ram(hardware, preset, needed, card)
    reasons = ["no GPU is used: the preset says so" if preset.device == "cpu" else "no GPU was found: the CPU computes"]
    reasons.append(
        f"about {_gib(needed)} of RAM of {_gib(hardware.ram_available_bytes)} available"
        if weights is not None
        else "the sizes of this model are unknown until it is downloaded: memory is unchecked"
    )
    reasons += [
        "float32: most CPUs compute 16-bit formats slowly",
        *quantization_words((), card),
        COARSE,
        *_unmet(preset),
    ]
    return Plan(
        device="cpu",
        dtype="float32",
        strategy=Strategy.RESIDENT,
        placements=_placements(weights, Strategy.RESIDENT, "cpu", "float32", card),
        threads=hardware.cpu_count,
        predicted_ram_bytes=needed,
        reasons=tuple(reasons),
    )


def _check_ram(hardware: Hardware, preset: HardwarePreset, needed: int, card: ModelCard) -> None:
    available = hardware.ram_available_bytes - RAM_FLOOR_BYTES
    source = hardware.ram_limit.source
    if preset.ram_limit_bytes is not None and preset.ram_limit_bytes < available:
        available, source = preset.ram_limit_bytes, f"the preset {preset.title}"
    if needed > available:
        raise PlanError(
            f"{card.title} needs about {_gib(needed)} of RAM; {_gib(max(available, 0))} can be used (limit: {source}; "
            f"{_gib(RAM_FLOOR_BYTES)} are left to the system), {_gib(needed - available)} short. "
            "Close other programs, or choose fewer frames, a smaller size or a smaller model."
        )


def _placements(
    weights: dict[str, int] | None, strategy: Strategy, device: str, dtype: str, card: ModelCard
) -> tuple[Placement, ...]:
    return tuple(
        Placement(
            component=name,
            strategy=strategy,
            device=device,
            dtype=dtype,
            weight_bytes=size,
            quantization=card.stored[name].method if name in card.stored else None,
        )
        for name, size in (weights or {}).items()
    )


def _bytes(counts: dict[str, dict[str, int]] | None, dtype: str, card: ModelCard) -> dict[str, int] | None:
    """Bytes by component once loaded in that number format; of what lies quantized on the disk as it is held."""
    if counts is None or not all(stored.exact for stored in card.stored.values()):
        return None
    plain = {name: sum(by_dtype.values()) * itemsize(dtype) for name, by_dtype in counts.items()}
    return plain | {name: stored.bytes(dtype) for name, stored in card.stored.items()}


def _frame_bytes(request: Request) -> int:
    """The finished frames, [num_frames, height, width, 3] in float32."""
    return request.num_frames * request.height * request.width * 3 * 4


def _working_bytes(request: Request) -> int:
    """Coarse: a VAE decode holds some 40 float32 channels per pixel of a tile of 17 frames, beside the frames."""
    return min(request.num_frames, 17) * request.height * request.width * 4 * 40 + _frame_bytes(request) * 3


def _gib(value: int) -> str:
    return f"{value / GIB:.1f} GiB"

"""Another machine than this one: so many cards of such sizes, so much RAM. The rest stays as it was found."""

from __future__ import annotations

from collections.abc import Sequence

from app.schema import Gpu, Hardware, Limit

_NAME = "imagined card"
_CAPABILITY = (8, 6)
"""Of an imagined card on a machine that has none: the least that computes bf16 on a desktop (GeForce 30)."""


def imagine(found: Hardware, *, vram: Sequence[int] = (), ram_bytes: int | None = None) -> Hardware:
    """The machine with cards of these sizes, all free, and that much RAM available.

    Cards are copies of the first one of the machine, so that its speed counts; without one their speed is assumed.
    """
    changes: dict[str, object] = {}
    if vram:
        first = found.gpus[0] if found.gpus else None
        changes["gpus"] = tuple(
            Gpu(
                index=index,
                uuid=f"imagined-{index}",
                name=first.name if first is not None else _NAME,
                compute_capability=first.compute_capability if first is not None else _CAPABILITY,
                pcie_generation=first.pcie_generation if first is not None else None,
                pcie_width=first.pcie_width if first is not None else None,
                pinned_bytes_per_second=first.pinned_bytes_per_second if first is not None else None,
                pageable_bytes_per_second=first.pageable_bytes_per_second if first is not None else None,
                total_bytes=size,
                free_bytes=size,
            )
            for index, size in enumerate(vram)
        )
    if ram_bytes is not None:
        changes["ram_total_bytes"] = changes["ram_available_bytes"] = ram_bytes
        changes["ram_limit"] = Limit(value_bytes=ram_bytes, source="as asked for")
    return found.model_copy(update=changes)

"""How fast RAM copies to each GPU: `python -m app.runtime.link`, run by `pocketreel bench link` in its own process.

Prints one JSON document: `links` by device number with `pinned` and `pageable` in bytes a second, `copy` within RAM.
"""

from __future__ import annotations

import json
import sys
import time

import torch

BYTES = 256 * 1024**2
"""Of one copy: far above any cache, and small beside the smallest card."""


def copy_rate(source: torch.Tensor, target: torch.Tensor, seconds: float) -> float:
    """Bytes a second of copying `source` into `target` again and again for about that long; the best of five rounds.

    The best, because whatever else the machine does can only slow a copy down.
    """
    best, until = 0.0, time.perf_counter() + seconds
    for _ in range(5):
        count, began = 0, time.perf_counter()
        while True:
            target.copy_(source, non_blocking=source.is_pinned())
            count += 1
            _finish(target)
            now = time.perf_counter()
            if now - began > seconds / 5 or now > until:
                break
        best = max(best, count * source.nbytes / (now - began))
    return best


def _finish(tensor: torch.Tensor) -> None:
    """Copies from page-locked RAM return before they are done."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def measure(seconds: float) -> dict[str, object]:
    """Every GPU's link and the RAM's own speed, in about `seconds`."""
    torch.set_num_threads(1)
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    each = seconds / (2 * cards + 1)
    pageable = torch.ones(BYTES, dtype=torch.uint8)
    links = {}
    for index in range(cards):
        target = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{index}")
        pinned = pageable.pin_memory()
        links[index] = {"pinned": copy_rate(pinned, target, each), "pageable": copy_rate(pageable, target, each)}
        del target, pinned
    return {"links": links, "copy": copy_rate(pageable, torch.empty_like(pageable), each)}


def main() -> None:
    """Print the document; the first argument is the time to take in seconds."""
    json.dump(measure(float(sys.argv[1]) if len(sys.argv) > 1 else 15.0), sys.stdout)


if __name__ == "__main__":
    main()

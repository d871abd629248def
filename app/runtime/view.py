"""What the worker's torch sees, as JSON on stdout; `pocketreel doctor` compares it with what the driver reports."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch


def view() -> dict[str, Any]:
    """torch version, its CUDA (None for a CPU wheel), the architectures it has kernels for, the devices it finds."""
    available = torch.cuda.is_available()
    devices = []
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "uuid": f"GPU-{properties.uuid}",
                "total_bytes": properties.total_memory,
                "capability": [properties.major, properties.minor],
            }
        )
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "arch_list": torch.cuda.get_arch_list() if available else [],
        "cuda_available": available,
        "devices": devices,
    }


def unusable(device: str, seen: Mapping[str, Any]) -> str | None:
    """Why this torch cannot compute on a device that was planned for; None where nothing speaks against it.

    The driver shows a card to the planner even where torch has no kernels for it, or was built without CUDA.
    """
    if not device.startswith("cuda"):
        return None
    fix = "Run `pocketreel doctor`: it names the fix to paste. The preset CPU works meanwhile."
    if not seen["cuda"] and not seen["hip"]:
        return f"The installed torch {seen['torch']} can only use the CPU, but the plan uses the graphics card. {fix}"
    if not seen["cuda_available"]:
        return f"torch {seen['torch']} cannot start the graphics card, although its driver shows it. {fix}"
    index = int(device.partition(":")[2] or 0)
    if index >= len(seen["devices"]):
        return f"The plan uses {device}, but torch finds {len(seen['devices'])} graphics card(s). {fix}"
    found = seen["devices"][index]
    major, minor = found["capability"]
    # binaries run on later cards of the same generation, PTX (compute_XY) on all later ones
    kernels = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in seen["arch_list"]]
    fitting = [
        (kind == "compute" and (int(a), int(b)) <= (major, minor)) or (int(a) == major and int(b) <= minor)
        for kind, a, b in (match.groups() for match in kernels if match)
    ]
    if seen["cuda"] and fitting and not any(fitting):
        return (
            f"The installed torch {seen['torch']} has no kernels for {found['name']} (compute capability "
            f"{major}.{minor}). {fix}"
        )
    return None


def main() -> None:
    """Print the view."""
    json.dump(view(), sys.stdout)


if __name__ == "__main__":
    main()

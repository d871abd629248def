"""What the worker's torch sees, as JSON on stdout; `pocketreel doctor` compares it with what the driver reports."""

from __future__ import annotations

import json
import sys
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


def main() -> None:
    """Print the view."""
    json.dump(view(), sys.stdout)


if __name__ == "__main__":
    main()

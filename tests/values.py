"""Small valid values that tests vary."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.schema import (
    GIB,
    Defaults,
    Disk,
    Gpu,
    Hardware,
    HardwarePreset,
    Job,
    JobStatus,
    Lattice,
    Limit,
    ModelCard,
    Placement,
    Plan,
    Request,
    Strategy,
)


def card(**changes: Any) -> ModelCard:
    values: dict[str, Any] = {
        "id": "tiny",
        "title": "Tiny",
        "repo_id": "someone/tiny",
        "license": "apache-2.0",
        "pipeline": "Kandinsky5T2VPipeline",
        "defaults": Defaults(height=96, width=96, num_frames=33, fps=16, num_inference_steps=10, guidance_scale=3.0),
        "lattice": Lattice(spatial_multiple=16, temporal_multiple=4, min_side=64, max_side=192, max_num_frames=33),
        "timeout_seconds": 120.0,
    }
    return ModelCard(**{**values, **changes})


def preset(**changes: Any) -> HardwarePreset:
    return HardwarePreset(**{"id": "auto", "title": "Automatic", "summary": "", **changes})


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "model": "tiny",
        "preset": "auto",
        "prompt": "a red ball",
        "negative_prompt": None,
        "height": 96,
        "width": 96,
        "num_frames": 33,
        "fps": 16,
        "num_inference_steps": 10,
        "guidance_scale": 3.0,
        "seed": 1,
        "timeout_seconds": 120.0,
    }
    return Request(**{**values, **changes})


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "strategy": Strategy.RESIDENT,
        "placements": (),
        "predicted_ram_bytes": GIB,
        "reasons": ("a test",),
    }
    return Plan(**{**values, **changes})


def on_cpu(names: Iterable[str], **others: dict[str, Any]) -> tuple[Placement, ...]:
    """Placements of those components on the CPU in float32; keyword arguments say what is otherwise of which."""
    usual = {"strategy": Strategy.CPU, "device": "cpu", "dtype": "float32", "weight_bytes": 0}
    return tuple(Placement(**{"component": name, **usual, **others.get(name, {})}) for name in names)


def job(job_id: str = "j1", **changes: Any) -> Job:
    values: dict[str, Any] = {
        "id": job_id,
        "owner": "local",
        "status": JobStatus.PENDING,
        "request": request(),
        "plan": plan(),
        "output_path": Path("/nowhere/clip.mp4"),
        "created_at": datetime.now(UTC),
    }
    return Job(**{**values, **changes})


def gpu(**changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "index": 0,
        "uuid": "GPU-1",
        "name": "NVIDIA GeForce RTX 3060",
        "compute_capability": (8, 6),
        "total_bytes": 12 * GIB,
        "free_bytes": 11 * GIB,
    }
    return Gpu(**{**values, **changes})


def hardware(**changes: Any) -> Hardware:
    disk = Disk(path=Path("/data"), free_bytes=100 * GIB, total_bytes=200 * GIB)
    values: dict[str, Any] = {
        "system": "Linux",
        "cpu_name": "A CPU",
        "cpu_count": 4,
        "ram_total_bytes": 16 * GIB,
        "ram_available_bytes": 12 * GIB,
        "ram_limit": Limit(value_bytes=16 * GIB, source="physical memory"),
        "data_disk": disk,
        "spill_disk": disk,
    }
    return Hardware(**{**values, **changes})

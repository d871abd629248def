"""The front process stays light, and imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "diffusers", "transformers", "accelerate"}
# schema, errors <- events, config, presets, ... <- planner, worker, models <- jobs <- web <- cli
LAYERS = [
    {"value"},
    {"coefficients", "devices", "pip"},
    {"quantization"},
    {"attempts", "plans"},
    {"schema"},
    {"errors"},
    {"speed", "workload", "timing", "estimate"},
    {"events", "config", "presets", "hardware", "store", "mp4", "demo"},
    {"resolve", "planner", "doctor", "outputs", "calibration", "flight", "fallback", "kept", "watch", "shelf"},
    {"process"},
    {"worker"},
    {"records"},
    {"runner"},
    {"own_machine"},
    {"jobs", "planning"},
    {"terminal", "tables", "bench", "engines", "web", "shell", "matrix"},
    {"following"},
    {"cli_plan", "cli_history", "cli_models"},
    {"cli"},
]


def test_front_process_has_no_torch() -> None:
    code = (
        "import sys, app.cli, app.jobs, app.planner, app.web, app.web.server, app.doctor, app.bench, app.terminal\n"
        "import app.tables, app.planning\n"
        f"found = sorted({HEAVY!r} & set(sys.modules))\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_reading_settings_and_planning_need_no_torch() -> None:
    code = (
        "import sys\nfrom app.config import load_settings\nfrom app.jobs import JobService\n"
        "from app.schema import Draft\n"
        "service = JobService(load_settings())\n"
        "service.preview(Draft(prompt='a red ball'))\nservice.close()\n"
        f"found = sorted({HEAVY!r} & set(sys.modules))\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _part(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == "app" and len(names) > 1 else None


@pytest.mark.parametrize("path", sorted((ROOT / "app").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = path.relative_to(ROOT / "app").parts[0].removesuffix(".py")
    used = {_part(module) for module in _imports(path)} - {None, part}
    if part == "runtime":
        values = {"value", "coefficients", "plans", "attempts", "devices", "quantization", "schema"}
        assert used <= values | {"errors", "events", "runtime", "__version__"}, used
        return
    if part.startswith("__") or part == "demo":  # __init__, __main__; the model's trainer is a program of its own
        return
    assert not {module.split(".")[0] for module in _imports(path)} & HEAVY
    layer = next(index for index, names in enumerate(LAYERS) if part in names)
    allowed = set().union(*LAYERS[: layer + 1]) | {"__version__"}
    assert used <= allowed, f"{part} imports {used - allowed}"

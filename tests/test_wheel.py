"""The wheel, installed far from the checkout, finds its presets and the built-in model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", target, ROOT],
        check=True,
    )
    (found,) = target.glob("*.whl")
    return found


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "app/_bundled/presets/models/built-in.toml" in names
    assert "app/_bundled/assets/demo/model_index.json" in names
    assert "app/web/server.py" in names
    assert not [name for name in names if name.startswith(("tests", "assets", ".ci"))]
    assert not [name for name in names if name.endswith((".bin", ".pt", ".ckpt", ".pkl"))]
    assert wheel.stat().st_size < 20 * 2**20


def test_generate_from_a_strange_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "Программы é ü" / "site packages"
    elsewhere = tmp_path / "où je travaille"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from app.cli import main; main()"
    arguments = ["generate", "a red ball", "-o", "clip é.mp4", "--frames", "5", "--steps", "2", "--json"]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        cwd=elsewhere,
        env={**os.environ},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    document = json.loads(ran.stdout)
    assert document["status"] == "completed"
    assert (elsewhere / "clip é.mp4").is_file()

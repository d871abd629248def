"""Shared by all tests: no test ever touches the person's own data folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from app.config import Settings

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# test processes and their workers share the cores: threads that wait must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own, with a space and an accent in its path, as on many a real machine."""
    folder = tmp_path / "données de test"
    monkeypatch.setenv("POCKETREEL_DATA_DIR", str(folder))
    for name in ("POCKETREEL_HOST", "POCKETREEL_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """What a test in this process sets them to is no matter of the next one's: some sums depend on their number."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else os.cpu_count() or 1
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def settings(data_dir: Path) -> Settings:
    return Settings(data_dir=data_dir)


@pytest.fixture(scope="session", autouse=True)
def no_leftover_processes() -> Iterator[None]:
    """Whatever the suite started has ended when it ends, orphans too: all of them inherit a mark."""
    import secrets

    import psutil

    mark = secrets.token_hex(8)
    os.environ["POCKETREEL_TEST_MARK"] = mark
    yield
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("POCKETREEL_TEST_MARK") == mark:
                left.append(" ".join(process.cmdline())[:200])
    assert not left, f"left running: {left}"

"""The trainer: its loop resumes where it was, and a smoke run makes a folder that loads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from app.demo.muon import Muon, orthogonalise, split_parameters
from app.demo.stages import StepRandom, load_checkpoint, run_steps, seconds_spent

REPOSITORY = Path(__file__).parents[2]


class _Stop(Exception):
    pass


def _run(path: Path, total: int, fail_at: int | None = None) -> tuple[nn.Module, list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = Muon(*split_parameters(model), rate=1e-2, adam_rate=1e-2)
    seen: list[int] = []

    def step(index: int) -> float:
        if index == fail_at:
            raise _Stop
        seen.append(index)
        inputs = torch.randn(16, 4, generator=StepRandom(3, index).torch)
        loss = (model(inputs) - inputs[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    run_steps(path, {"model": model, "optimizer": optimizer}, total, step, save_seconds=0)
    return model, seen


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole, _ = _run(tmp_path / "whole.pt", 12)
    with pytest.raises(_Stop):
        _run(tmp_path / "parts.pt", 12, fail_at=7)
    assert load_checkpoint(tmp_path / "parts.pt")["step"] == 7
    parts, seen = _run(tmp_path / "parts.pt", 12)
    assert seen == [7, 8, 9, 10, 11]
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)
    assert seconds_spent(tmp_path / "parts.pt") > 0
    assert not list(tmp_path.glob("*.tmp"))
    # A finished stage does nothing more.
    assert _run(tmp_path / "parts.pt", 12)[1] == []


def test_muon_orthogonalises_and_learns(tmp_path: Path) -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 12, 30, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.5
    assert values.max() < 1.3
    model, _ = _run(tmp_path / "learn.pt", 150)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    assert (model(inputs) - inputs[:, :2]).square().mean() < 0.2


@pytest.mark.slow
def test_smoke_run_trains_everything_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.demo.train", "--smoke", "--out", str(tmp_path / "out"), "--threads", "2"]
    first = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert first.returncode == 0, first.stderr[-2000:]
    assert "held-out prompts" in first.stdout
    out, work = tmp_path / "out", tmp_path / "out.work"
    assert {"model_index.json", "README.md", "vae", "transformer"} <= {path.name for path in out.iterdir()}
    before = {path.name: load_checkpoint(path)["step"] for path in (work / "text.pt", work / "transformer.pt")}
    second = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert second.returncode == 0, second.stderr[-2000:]
    assert before == {path.name: load_checkpoint(path)["step"] for path in (work / "text.pt", work / "transformer.pt")}

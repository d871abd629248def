"""Copy rates, on what every machine has: RAM to RAM."""

from __future__ import annotations

import json
import subprocess
import time

import torch

from app.runtime.link import copy_rate
from app.worker import command_line


def test_a_copy_is_made_and_timed() -> None:
    source, target = torch.ones(4_000_000, dtype=torch.uint8), torch.zeros(4_000_000, dtype=torch.uint8)
    began = time.perf_counter()
    rate = copy_rate(source, target, 0.05)
    assert time.perf_counter() - began < 5
    assert torch.equal(source, target)
    assert 1e7 < rate < 1e13


def test_the_process_prints_one_document() -> None:
    ran = subprocess.run([*command_line("link"), "0.2"], capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)
    assert told["copy"] > 1e7
    assert set(told) == {"links", "copy"}

"""What the worker keeps from one job to the next."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app import events
from app.errors import OutputNotWritten
from app.runtime import pipeline, placement
from app.runtime.control import Control
from app.runtime.loop import Channel, Loop, Timeline, _explain
from app.runtime.memory import StageClock
from app.schema import ErrorKind, Plan, Strategy
from tests import values
from tests.runtime.families import CALLS, DEMO, FAMILIES, frames

NAMES = ("transformer", "text_encoder", "text_encoder_2", "vae")


def plan(**strategies: dict[str, Any]) -> Plan:
    """On the CPU; keyword arguments say how a component is held."""
    placements = values.on_cpu(NAMES, **strategies)
    return values.plan(placements=placements, strategy=Strategy.CPU)


BLOCKS = {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1}
DISK = {"strategy": Strategy.DISK}


class Worker:
    """A loop without its process."""

    def __init__(self, folder: Path) -> None:
        self.said = io.BytesIO()
        self.control = Control()
        self.loop = Loop(Channel(self.said), self.control, Timeline())
        self.folder = folder

    def make(self, plan: Plan, number: int) -> dict[str, Any]:
        scratch = self.folder / str(number)
        scratch.mkdir()
        run = events.Run(
            job_id=str(number),
            request=values.request(height=64, width=64, num_frames=5, num_inference_steps=2, seed=1),
            plan=plan,
            card=values.card(folder=DEMO, pipeline="Kandinsky5T2VPipeline"),
            output_path=self.folder / f"{number}.mp4",
            scratch=scratch,
            metadata={},
        )
        self.said.seek(0)
        self.said.truncate()
        self.control.begin(run.job_id)
        self.loop.run(run, 0.0)
        self.control.end(run.job_id)
        last: dict[str, Any] = json.loads(self.said.getvalue().splitlines()[-1])
        assert last["type"] == "completed", last
        return last["report"]  # type: ignore[no-any-return]


def test_a_model_that_is_held_otherwise_is_not_loaded_again(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    first = worker.make(plan(), 1)
    pipe = worker.loop._pipe
    same = worker.make(plan(), 2)
    otherwise = worker.make(plan(transformer=BLOCKS), 3)
    assert worker.loop._pipe is pipe
    assert [report["warm"] for report in (first, same, otherwise)] == [False, True, False]
    assert placement.groups.hooked(pipe.transformer)
    worker.make(plan(), 4)
    assert worker.loop._pipe is pipe
    assert not placement.groups.hooked(pipe.transformer)
    shas = {report["output"]["frames_sha256"] for report in (first, same, otherwise)}
    assert len(shas) == 1


def test_from_the_disk_no_weight_is_ever_loaded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything written into the model's folder."""
    before = {path: path.stat().st_mtime_ns for path in DEMO.rglob("*")}
    worker = Worker(tmp_path)
    usual = worker.make(plan(), 1)
    report = worker.make(plan(transformer=DISK, text_encoder=DISK), 2)
    for name in ("transformer", "text_encoder"):
        module = getattr(worker.loop._pipe, name)
        assert all(parameter.is_meta for parameter in module.parameters()), name
    assert report["output"]["frames_sha256"] == usual["output"]["frames_sha256"]
    assert {path: path.stat().st_mtime_ns for path in DEMO.rglob("*")} == before
    assert torch.get_num_threads() > 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), ErrorKind.OOM),
        (RuntimeError("CUDA error: out of memory"), ErrorKind.OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), ErrorKind.OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), ErrorKind.OOM),
        (MemoryError(), ErrorKind.RAM),
        (OSError(12, "Cannot allocate memory"), ErrorKind.RAM),
        (RuntimeError("unable to mmap 5 bytes from file <x>: Cannot allocate memory (12)"), ErrorKind.RAM),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), ErrorKind.RAM),
        (RuntimeError("CUDA error: unspecified launch failure"), ErrorKind.CRASH),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors"), ErrorKind.CRASH),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED"), ErrorKind.CRASH),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ErrorKind.INVALID),
        (KeyError("x"), ErrorKind.INVALID),
        (OutputNotWritten("The disk is full."), ErrorKind.DISK),
    ],
)
def test_what_failed_has_a_kind(error: Exception, kind: ErrorKind) -> None:
    found, words = _explain(error)
    assert found is kind
    assert words.endswith((".", "!")) or ":" in words
    assert "\n" not in words


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi asks for float32, which it gets anyway
@pytest.mark.parametrize("family", ["cogvideox", "mochi", "wan"])
def test_latents_come_to_the_vae_in_its_own_number_format(family: str) -> None:
    """Decoding again in float32 what was drawn in bfloat16: some pipelines hand it over as it is."""
    pipe = FAMILIES[family]().to(dtype=torch.bfloat16)
    pipe.vae.to(torch.float32)
    half = {key: {"dtype": "bfloat16"} for key in set(placement.modules_of(pipe)) - {"vae"}}
    held = values.on_cpu(placement.modules_of(pipe), **half)
    placement.place(pipe, values.plan(placements=held, dtype="bfloat16"))
    size = {name: CALLS[family][name] for name in ("height", "width", "num_frames", "num_inference_steps")}
    made = pipeline.generate(pipe, values.request(**size), Control(), StageClock(lambda progress: None))
    assert len(made) == CALLS[family]["num_frames"]


@pytest.mark.parametrize("family", ["wan", "ltx"])
def test_a_text_encoder_that_was_never_loaded_says_where_it_computes(family: str, tmp_path: Path) -> None:
    """Pipelines ask a component where to send its input; weights that are read from the disk are on `meta`."""
    FAMILIES[family]().save_pretrained(tmp_path)
    pipe = FAMILIES[family]()
    pipe.text_encoder = pipeline.load_empty(type(pipe.text_encoder), tmp_path / "text_encoder", torch.float32)
    pipe.register_to_config(_name_or_path=str(tmp_path))
    held = values.on_cpu(placement.modules_of(pipe), text_encoder=DISK)
    kind = type(pipe.text_encoder)
    placement.place(pipe, values.plan(placements=held))
    assert str(pipe.text_encoder.device) == "cpu"
    assert np.allclose(frames(pipe, family), frames(FAMILIES[family](), family), atol=1e-5)
    placement.remove(pipe)
    assert type(pipe.text_encoder) is kind

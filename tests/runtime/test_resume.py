"""A run that was cut off after any step gives, resumed, the frames of the one that was not: for every family."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from app.errors import InvalidOutput
from app.events import Keep
from app.runtime import checkpoint, pipeline, resume
from app.runtime.control import Control
from app.runtime.memory import StageClock
from app.runtime.resume import Keeper
from app.schema import GIB, Progress, Stage
from tests import values
from tests.runtime import families

FACTS = {"job": "j", "versions": {"diffusers": "x"}}
STEPS = 4
OTHER_SCHEDULERS = {
    "cogvideox": [("CogVideoXDPMScheduler", {}), ("DDIMScheduler", {}), ("DPMSolverMultistepScheduler", {})],
    "wan": [
        ("FlowMatchEulerDiscreteScheduler", {"shift": 5.0}),
        ("FlowMatchEulerDiscreteScheduler", {"shift": 5.0, "stochastic_sampling": True}),
        ("EulerAncestralDiscreteScheduler", {}),
    ],
}


def keep(folder: Path, **changes: Any) -> Keep:
    return Keep(**{"folder": folder, "quota_bytes": GIB, "seconds": 0.0, **changes})


class Run:
    """A pipeline under a keeper, as `pipeline.generate` has it."""

    def __init__(self, family: str, order: Keep | None, facts: dict[str, Any] = FACTS) -> None:
        self.family = family
        self.keeper = Keeper(order, facts) if order is not None else None
        self.calls = 0

    def frames(self, pipe: Any, *, copies: Path | None = None, **changes: Any) -> Any:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        generator = torch.Generator("cpu").manual_seed(3)
        torch.manual_seed(3)
        denoisers = pipeline.denoisers(pipe)

        def ended(_pipe: Any, index: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if self.keeper is not None:
                self.keeper.step_ended(index + 1, STEPS)
                if copies is not None:
                    shutil.copytree(self.keeper._order.folder, copies / str(index + 1))
            return tensors

        def count(*_: Any) -> None:
            self.calls += 1

        hooks = [module.register_forward_pre_hook(count) for module in denoisers.values()]
        try:
            with watching(self.keeper, pipe, denoisers, generator):
                return families.frames(
                    pipe,
                    self.family,
                    generator=generator,
                    callback_on_step_end=ended,
                    **{"num_inference_steps": STEPS, **changes},
                )
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def watching(keeper: Keeper | None, pipe: Any, denoisers: Any, generator: torch.Generator) -> Iterator[None]:
    if keeper is None:
        yield
    else:
        with keeper.watching(pipe, denoisers, generator):
            yield


def every_step_resumes(pipe: Any, family: str, tmp_path: Path) -> None:
    plain = Run(family, None)
    wanted = plain.frames(pipe)
    kept = Run(family, keep(tmp_path / "kept"))
    assert np.array_equal(kept.frames(pipe, copies=tmp_path), wanted), "being watched changes nothing"
    assert kept.calls == plain.calls
    for step in range(1, STEPS + 1):
        again = Run(family, keep(tmp_path / str(step), resume=True))
        assert np.array_equal(again.frames(pipe), wanted), f"after step {step}"
        assert again.keeper.resumed_at == step
        assert again.keeper.notes == []
        assert again.calls == plain.calls * (STEPS - step) // STEPS, "steps that were done are not computed again"


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("ltx", "wan_two_transformers") else pytest.param(name, marks=pytest.mark.slow)
        for name in families.FAMILIES
    ],
)
def test_every_family_goes_on_exactly_after_every_step(family: str, tmp_path: Path) -> None:
    every_step_resumes(families.FAMILIES[family](), family, tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [(family, *scheduler) for family, schedulers in OTHER_SCHEDULERS.items() for scheduler in schedulers],
)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own
def test_every_scheduler_goes_on_exactly(family: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Schedulers with a memory of several steps, and ones that draw noise at each."""
    pipe = families.FAMILIES[family]()
    pipe.scheduler = getattr(diffusers, name)(**options)
    every_step_resumes(pipe, family, tmp_path)


@pytest.mark.parametrize(
    ("size", "num_frames"), [(64, 5), pytest.param(96, 33, marks=pytest.mark.slow)], ids=["small", "default"]
)
def test_the_built_in_model_goes_on_after_each_of_its_eight_steps(tmp_path: Path, size: int, num_frames: int) -> None:
    pipe = families.load(families.DEMO)
    request = values.request(height=size, width=size, num_frames=num_frames, num_inference_steps=8, seed=4)

    def pixels(order: Keep | None, after: Path | None = None) -> Any:
        keeper = Keeper(order, FACTS) if order is not None else None

        def on_progress(progress: Progress) -> None:
            if after is not None and progress.stage is Stage.DENOISE and progress.step:
                shutil.copytree(order.folder, after / str(progress.step))

        made = pipeline.generate(pipe, request, Control(), StageClock(on_progress), keeper)
        return made, keeper.resumed_at if keeper is not None else 0

    wanted, _ = pixels(None)
    assert np.array_equal(pixels(keep(tmp_path / "kept"), tmp_path)[0], wanted)
    for step in range(1, 9):
        again, resumed_at = pixels(keep(tmp_path / str(step), resume=True))
        assert np.array_equal(again, wanted)
        assert resumed_at == step


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.FAMILIES["wan"]()


def test_text_is_not_encoded_again(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Run("wan", keep(tmp_path)).frames(pipe)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("encoded again")

    monkeypatch.setattr(type(pipe), "encode_prompt", fail)
    assert np.array_equal(Run("wan", keep(tmp_path, resume=True)).frames(pipe), wanted)


def test_nothing_is_left_of_the_watch(pipe: Any, tmp_path: Path) -> None:
    scheduler, model = type(pipe.scheduler), type(pipe.transformer)
    before = (scheduler.step, model.__call__, "encode_prompt" in vars(pipe), "__call__" in vars(model))
    Run("wan", keep(tmp_path)).frames(pipe)
    assert (scheduler.step, model.__call__, "encode_prompt" in vars(pipe), "__call__" in vars(model)) == before


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8] + b"12345678"), "checksum"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(bytes(len(path.read_bytes()))), "cannot be read"),
    ],
)
@pytest.mark.parametrize("name", [resume.PROMPT, resume.STEPS])
def test_a_damaged_file_is_refused_and_that_part_starts_over(
    pipe: Any, tmp_path: Path, name: str, spoil: Any, words: str
) -> None:
    wanted = Run("wan", keep(tmp_path)).frames(pipe)
    spoil(tmp_path / name)
    again = Run("wan", keep(tmp_path, resume=True))
    assert np.array_equal(again.frames(pipe), wanted)
    (note,) = again.keeper.notes
    assert words in note
    assert again.keeper.resumed_at == (STEPS if name == resume.PROMPT else 0)


@pytest.mark.parametrize("change", [(b'[[\\"steps\\", 4', b'[[\\"steps\\", 3'), (b'calls\\", [4]', b'calls\\", [2]')])
def test_a_number_that_was_changed_is_seen(pipe: Any, tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    Run("wan", keep(tmp_path)).frames(pipe)
    path = tmp_path / resume.STEPS
    data = path.read_bytes()
    assert data.count(change[0]) == 1, data[:300]
    path.write_bytes(data.replace(*change))
    again = Run("wan", keep(tmp_path, resume=True))
    again.frames(pipe)
    assert again.keeper.resumed_at == 0
    assert "checksum" in again.keeper.notes[0]
    assert str(tmp_path) not in again.keeper.notes[0], "others may read it"


def test_text_is_kept_before_the_first_step(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory falls short first; but not for a text that is encoded in a moment."""
    monkeypatch.setattr(resume, "LEAST_SECONDS", 0.0)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    hook = pipe.transformer.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        Run("wan", keep(tmp_path)).frames(pipe)
    hook.remove()
    assert [path.name for path in tmp_path.iterdir()] == [resume.PROMPT]


def test_invalid_numbers_are_seen_without_a_quota_too(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_finite", lambda result: False)
    run = Run("wan", keep(tmp_path, quota_bytes=0))
    with pytest.raises(InvalidOutput, match="Step 1"):
        run.frames(pipe)
    assert run.keeper.notes == []


def test_somebody_elses_is_refused(pipe: Any, tmp_path: Path) -> None:
    Run("wan", keep(tmp_path)).frames(pipe)
    again = Run("wan", keep(tmp_path, resume=True), {**FACTS, "job": "another"})
    again.frames(pipe)
    assert again.keeper.resumed_at == 0
    assert again.calls > 0
    assert "job differ" in again.keeper.notes[0]


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Run("wan", None).frames(pipe)
    run = Run("wan", keep(tmp_path, quota_bytes=100))
    assert np.array_equal(run.frames(pipe), wanted)
    assert "quota" in run.keeper.notes[0]
    assert list(tmp_path.iterdir()) == []

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    run = Run("wan", keep(tmp_path))
    assert np.array_equal(run.frames(pipe), wanted)
    assert run.keeper.notes == [
        "This run could not have been resumed for a part of it: nothing could be kept (No space left on device)."
    ]
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_invalid_numbers_stop_the_run_at_their_step_and_are_not_kept(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = type(pipe.scheduler).step, []

    def spoiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(0)
        result = step(self, *args, **kwargs)
        return (result[0] * float("nan"), *result[1:]) if len(seen) == 3 else result

    monkeypatch.setattr(type(pipe.scheduler), "step", spoiled)
    run = Run("wan", keep(tmp_path))
    with pytest.raises(InvalidOutput, match=f"Step 3 of {STEPS}"):
        run.frames(pipe)
    monkeypatch.undo()
    again = Run("wan", keep(tmp_path, resume=True))
    again.frames(pipe)
    assert again.keeper.resumed_at == 2


@pytest.mark.parametrize(
    ("elapsed", "done", "total", "cost", "pause"),
    [
        (600.0, 10, 100, 0.1, 60.0),  # a minute a step, hours in all: each minute
        (100.0, 10, 40, 0.1, 20.0),  # five percent of 400 s
        (1.0, 1, 8, 0.01, 2.0),
        (600.0, 10, 100, 10.0, 200.0),  # a slow disk must not slow the run
    ],
)
def test_how_often_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, done: int, total: int, cost: float, pause: float
) -> None:
    keeper = Keeper(keep(Path("nowhere"), seconds=None), FACTS)
    keeper._cost = cost
    monkeypatch.setattr(resume.time, "monotonic", lambda: elapsed)
    assert keeper._pause(done, total) == pytest.approx(pause)


def test_trees_come_back_as_they_were(tmp_path: Path) -> None:
    from diffusers.schedulers.scheduling_utils import SchedulerOutput

    tree = {
        "a": [torch.arange(3), None, (1, 2.5, "x"), {"b": True}],
        "c": np.arange(4.0),
        "d": np.float32(2.5),
        "e": torch.bfloat16,
        "f": SchedulerOutput(prev_sample=torch.ones(2, dtype=torch.bfloat16)),
        "g": torch.tensor(3.0),
        "h": torch.zeros(0),
        "i": float("inf"),
    }
    checkpoint.write(tmp_path / "x.safetensors", tree, FACTS, torch.device("cpu"))
    found = checkpoint.read(tmp_path / "x.safetensors", FACTS, torch.device("cpu"))
    assert list(found) == list(tree)
    assert torch.equal(found["a"][0], tree["a"][0])
    assert found["a"][1:] == tree["a"][1:]
    assert np.array_equal(found["c"], tree["c"])
    assert (found["d"], found["d"].dtype) == (2.5, np.float32)
    assert found["e"] is torch.bfloat16
    assert torch.equal(found["f"].prev_sample, tree["f"].prev_sample)
    assert (found["g"].shape, found["h"].numel(), found["i"]) == ((), 0, float("inf"))


@pytest.mark.parametrize("tree", [object(), {1: 2}, {"a": {3}}, torch.nn.Linear(1, 1)])
def test_what_has_no_place_in_a_file_is_not_kept(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(checkpoint.NotKept):
        checkpoint.write(tmp_path / "x.safetensors", tree, FACTS, torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["os:system", "diffusers.utils:logging", "builtins:eval", "diffusers.nothing:X"])
def test_a_file_cannot_name_a_class_of_its_choice(name: str) -> None:
    with pytest.raises((checkpoint.NotKept, ImportError)):
        checkpoint.unpack({"dict": [], "class": name}, {}, torch.device("cpu"))

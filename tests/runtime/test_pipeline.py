"""The stock pipeline on the built-in model, staged and interruptible from outside."""

from __future__ import annotations

import inspect
import shutil
import time
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from app.config import Settings, bundled
from app.errors import ModelNotUsable, PlanError
from app.presets import load_catalogue
from app.runtime import pipeline, placement
from app.runtime.control import Control, Interrupted
from app.runtime.memory import RamPeak, StageClock, is_ram_error
from app.schema import Defaults, Progress, Stage
from tests import values
from tests.runtime import families

REQUEST = values.request(height=64, width=64, num_frames=5, num_inference_steps=3)


def demo_card(folder: Path | None = None) -> Any:
    return values.card(repo_id=None, folder=folder or bundled("assets", "demo"))


@pytest.fixture(scope="module")
def pipe() -> Any:
    return pipeline.load(demo_card(), values.plan())


def staged(pipe: Any, control: Control | None = None, request: Any = REQUEST) -> tuple[Any, list[Progress], StageClock]:
    seen: list[Progress] = []
    clock = StageClock(seen.append)
    frames = pipeline.generate(pipe, request, control or Control(), clock)
    clock.close()
    return frames, seen, clock


def hooks(pipe: Any) -> int:
    return sum(
        len(module._forward_pre_hooks)
        for part in (pipe.transformer, pipe.vae, pipe.text_encoder)
        for module in part.modules()
    )


def test_frames_are_those_of_the_stock_pipeline(pipe: Any) -> None:
    frames, seen, clock = staged(pipe)
    plain = DiffusionPipeline.from_pretrained(bundled("assets", "demo"), dtype=torch.float32)
    plain.set_progress_bar_config(disable=True)
    expected = plain(
        prompt="a red ball", height=64, width=64, num_frames=5, num_inference_steps=3, guidance_scale=3.0,
        generator=torch.Generator("cpu").manual_seed(1), output_type="np",
    ).frames[0]  # fmt: skip
    assert np.array_equal(frames, pipeline.to_pixels(expected))
    assert [report.stage for report in clock.reports] == [Stage.ENCODE, Stage.DENOISE, Stage.DECODE]
    steps = [progress.step for progress in seen if progress.stage is Stage.DENOISE]
    assert steps == [0, 1, 2, 3]
    assert [progress.total for progress in seen if progress.stage is Stage.DENOISE] == [3] * 4


def test_nothing_stays_on_the_pipeline(pipe: Any) -> None:
    before = hooks(pipe)
    staged(pipe)
    assert hooks(pipe) == before
    assert "decode" not in vars(pipe.vae)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2", "transformer", "vae"])
def test_a_cancel_raises_at_the_next_block(pipe: Any, part: str) -> None:
    """Cancel in the forward of one block: no other block of that component runs afterwards."""
    before = hooks(pipe)
    control = Control()
    control.begin("j")
    ran: list[float] = []
    units = list(pipeline.blocks(getattr(pipe, part)))
    assert units

    def ended(*_: Any) -> None:
        ran.append(time.monotonic())
        control.cancel("j")

    handles = [unit.register_forward_hook(ended) for unit in units]
    try:
        with pytest.raises(Interrupted):
            staged(pipe, control)
    finally:
        for handle in handles:
            handle.remove()
    # a block inside another one ends before its parent does, so a few ends may follow, but no new block began
    assert 1 <= len(ran) <= 4
    assert hooks(pipe) == before
    assert "decode" not in vars(pipe.vae)
    control.end("j")
    assert staged(pipe, control)[0].shape == (5, 64, 64, 3)


def test_a_cancel_of_another_job_is_ignored() -> None:
    control = Control()
    control.begin("mine")
    control.cancel("other")
    control.check()
    control.cancel("mine")
    with pytest.raises(Interrupted):
        control.check()
    control.begin("next")
    control.check()
    control.end("next")
    control.cancel("next")
    control.check()


def test_a_broken_step_leaves_the_pipeline_usable(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("in mid-step")

    with monkeypatch.context() as patch:
        patch.setattr(pipe.scheduler, "step", fail)
        with pytest.raises(RuntimeError, match="mid-step"):
            staged(pipe)
    assert staged(pipe)[0].shape == (5, 64, 64, 3)


def test_arguments_that_a_pipeline_does_not_know_are_left_out() -> None:
    class Pipe:
        def __call__(self, prompt: str, num_frames: int, frame_rate: int) -> None: ...

    assert pipeline._arguments(Pipe(), REQUEST) == {"prompt": "a red ball", "num_frames": 5, "frame_rate": 16}


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled("assets", "demo"), folder)
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    torch.save({}, folder / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelNotUsable, match="safetensors"):
        pipeline.load(demo_card(folder), values.plan())


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled("assets", "demo"), folder)
    (folder / "transformer" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    index = (folder / "model_index.json").read_text()
    (folder / "model_index.json").write_text(
        index.replace('"Kandinsky5Transformer3DModel"', '"Evil"').replace(
            '"diffusers",\n    "Evil"', '"evil",\n    "Evil"'
        )
    )
    assert '"evil"' in (folder / "model_index.json").read_text()
    with pytest.raises(ModelNotUsable):
        pipeline.load(demo_card(folder), values.plan())
    assert not (tmp_path / "ran").exists()


def test_missing_and_broken_folders_and_unknown_pipelines(tmp_path: Path) -> None:
    with pytest.raises(ModelNotUsable, match="cannot be loaded"):
        pipeline.load(demo_card(tmp_path), values.plan())
    folder = tmp_path / "model"
    shutil.copytree(bundled("assets", "demo"), folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotUsable):
        pipeline.load(demo_card(folder), values.plan())
    card = values.card(
        pipeline="NoSuchPipeline",
        defaults=Defaults(height=64, width=64, num_frames=5, fps=8, num_inference_steps=1, guidance_scale=1.0),
    )
    with pytest.raises(ModelNotUsable, match="does not have"):
        pipeline.load(card, values.plan())


def test_peak_ram_sees_a_short_spike_and_forgets_it() -> None:
    peak = RamPeak()
    peak.reset()
    base = peak.read()
    spike = np.ones(200 * 2**20, np.uint8)
    del spike
    time.sleep(0.1)
    assert peak.read() - base > 150 * 2**20
    peak.reset()
    assert peak.read() - base < 100 * 2**20


def test_eta_follows_the_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("app.runtime.memory.time.monotonic", lambda: now)
    seen: list[Progress] = []
    clock = StageClock(seen.append)
    clock.enter(Stage.DENOISE, total=10)
    for done in range(1, 4):
        now += 2.0
        clock.step(done, 10)
    assert [progress.eta_seconds for progress in seen] == [None, None, 16.0, 14.0]
    clock.step(12, 10)  # a scheduler that calls back more often than there are steps
    assert (seen[-1].step, seen[-1].eta_seconds) == (10, 0.0)


def test_a_plan_without_sizes_is_applied(pipe: Any) -> None:
    """Of a Hub model that was not downloaded yet, the sizes are unknown when the plan is made."""
    placement.place(pipe, values.plan(placements=()))
    placement.remove(pipe)
    with pytest.raises(PlanError, match="doctor"):
        placement.place(pipe, values.plan(device="cuda:7"))


@pytest.mark.parametrize(
    ("error", "is_ram"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
        (OSError("The paging file is too small for this operation to complete. (os error 1455)"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_running_out_of_ram_is_recognised(error: BaseException, is_ram: bool) -> None:
    assert is_ram_error(error) is is_ram


def test_what_a_card_adds_reaches_the_pipeline(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(**added: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def call(_pipe: Any, *, num_videos_per_prompt: int = 1, timesteps: Any = None, **arguments: Any) -> Any:
            seen.update(arguments, num_videos_per_prompt=num_videos_per_prompt, timesteps=timesteps)
            raise Interrupted

        with monkeypatch.context() as patch:
            patch.setattr(type(pipe), "__call__", call)
            with pytest.raises(Interrupted):
                pipeline.generate(pipe, REQUEST, Control(), StageClock(lambda _progress: None), calls=added)
        return seen

    assert calls(num_videos_per_prompt=2)["num_videos_per_prompt"] == 2
    assert calls(timesteps=(900, 500, 0.03))["timesteps"] == [900, 500, 0.03]
    assert calls(timesteps=(900, 0.03))["timesteps"] is None  # three steps are asked for
    clock = StageClock(lambda _progress: None)
    with pytest.raises(ModelNotUsable, match=r"sets decode_timestep, which Kandinsky5T2VPipeline"):
        pipeline.generate(pipe, REQUEST, Control(), clock, calls={"decode_timestep": 0.05})


def test_cards_of_the_catalogue_say_what_their_pipelines_take(settings: Settings) -> None:
    for card in load_catalogue(settings).models.values():
        known = inspect.signature(getattr(diffusers, card.pipeline).__call__).parameters
        assert set(card.calls) <= set(known), card.id
        if card.repo_id is not None and "max_sequence_length" in known:
            assert card.max_sequence_length == known["max_sequence_length"].default, card.id


def test_a_guider_takes_the_strength_that_was_asked_for(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "guider", diffusers.ClassifierFreeGuidance(guidance_scale=9.0), raising=False)
    staged(pipe)
    assert pipe.guider.guidance_scale == REQUEST.guidance_scale


@pytest.mark.filterwarnings("ignore")
def test_a_model_made_for_sparse_attention_attends_to_everything(tmp_path: Path) -> None:
    pipe = families.kandinsky()
    wanted = families.frames(pipe, "kandinsky")
    sparse = {"attention_type": "nabla", "attention_P": 0.9, "attention_wT": 3, "attention_wH": 3, "attention_wW": 3}
    pipe.transformer.register_to_config(**sparse)
    with pytest.raises(
        (TypeError, ValueError, RuntimeError)
    ):  # the library's own: its default kernel takes no such mask
        families.frames(pipe, "kandinsky")
    pipe.save_pretrained(tmp_path)
    card = values.card(repo_id=None, folder=tmp_path, pipeline="Kandinsky5T2VPipeline")
    loaded = pipeline.load(card, values.plan(placements=()))
    assert np.array_equal(families.frames(loaded, "kandinsky"), wanted)

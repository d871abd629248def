"""The judge is right on drawn clips, and says so when there is nothing to see."""

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.demo import clips
from app.demo.clips import Attributes, render
from app.demo.evaluate import Case, contact_sheet, held_out_prompts, summarise, table
from app.demo.judge import calibrate, direction_right, judge
from app.demo.vocabulary import DIRECTIONS, MOTIONS


def test_judge_is_right_on_drawn_clips() -> None:
    result = calibrate(120, seed=17)
    assert min(result["accuracy"].values()) >= 0.98, result["wrong"]


@pytest.mark.parametrize("motion", MOTIONS)
def test_judge_reads_every_motion(motion: str) -> None:
    wanted = Attributes("heart", "orange", motion, "blue", "mid")
    verdict = judge(render(wanted, random.Random(1)))
    assert (verdict.shape, verdict.color, verdict.motion, verdict.background) == ("heart", "orange", motion, "blue")
    if motion in DIRECTIONS:
        assert [d for d in DIRECTIONS if direction_right(verdict, d)] == [motion]


def test_judge_sees_nothing_in_an_empty_clip_and_in_noise() -> None:
    empty = np.full((33, 96, 96, 3), 140, np.uint8)
    assert judge(empty).shape == "none"
    noise = np.random.default_rng(0).integers(0, 255, (33, 96, 96, 3), np.uint8)
    assert judge(noise).shape == "none"


def test_judge_does_not_take_a_blob_for_a_shape() -> None:
    blob = np.full((33, 96, 96, 3), 250, np.uint8)
    blob[:, 30:66, 44:52] = 0
    blob[:, 44:52, 20:76] = 0
    assert judge(blob).shape == "none"


def test_prompts_are_held_out_and_balanced() -> None:
    prompts = held_out_prompts(40)
    assert prompts == held_out_prompts(40)
    assert all(clips.is_held_out(a) for a, _ in prompts)
    assert {sum(a.motion == motion for a, _ in prompts) for motion in MOTIONS} == {4}


def test_summary_table_and_sheet(tmp_path: Path) -> None:
    rng = random.Random(2)
    cases, drawn = [], []
    for seed, (wanted, prompt) in enumerate(held_out_prompts(10)):
        drawn.append(render(wanted, rng))
        cases.append(Case(prompt, wanted, seed, judge(drawn[-1])))
    cases[0] = cases[0]._replace(verdict=cases[0].verdict._replace(color="none"))
    result = summarise(cases)
    assert result["accuracy"]["color"] == pytest.approx(0.9)
    assert result["accuracy"]["shape"] == 1
    assert len(result["mistakes"]) == 1
    text = table({**result, "calibration": {"count": 5, "accuracy": {"shape": 1.0}}})
    assert "| shape kind | 100.0% | 80% | 100.0% |" in text
    contact_sheet(drawn, [case.prompt for case in cases], tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[0] > 9 * clips.SIZE

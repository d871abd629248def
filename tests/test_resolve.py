from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.resolve import resolve
from app.schema import Draft, Lattice
from tests import values

CARD, PRESET = values.card(), values.preset()


def test_defaults_come_from_the_card() -> None:
    request, notices = resolve(Draft(prompt=" a red ball\n", seed=3), CARD, PRESET)
    assert request == values.request(model="built-in", seed=3)
    assert notices == ()


def test_a_prompt_that_is_longer_than_the_model_reads_is_told() -> None:
    card = CARD.model_copy(update={"max_sequence_length": 20, "vocabulary": None})
    for length, told in ((80, 0), (81, 1)):
        _, notices = resolve(Draft(prompt="x" * length), card, PRESET)
        assert len(notices) == told
    assert "reads about 80 characters of a prompt (20 tokens); this one has 81" in notices[0].text


@pytest.mark.parametrize(
    ("field", "value", "result", "words"),
    [
        ("num_frames", 18, 17, "4k+1"),
        ("num_frames", 19, 21, "4k+1"),
        ("num_frames", 1, 1, None),
        ("num_frames", 500, 33, "at most 33"),
        ("width", 100, 96, "multiples of 16"),
        ("width", 104, 112, "multiples of 16"),
        ("height", 5, 64, "64 to 192"),
        ("height", 4000, 192, "64 to 192"),
    ],
)
def test_snapping_is_said(field: str, value: int, result: int, words: str | None) -> None:
    request, notices = resolve(Draft(prompt="a red ball", **{field: value}), CARD, PRESET)
    assert getattr(request, field) == result
    assert [notice.field for notice in notices] == ([field] if words else [])
    if words:
        assert words in notices[0].text
        assert str(value) in notices[0].text


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "x" * 5001}, "prompt"),
        ({"prompt": "a\x00b"}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"negative_prompt": "\x1b[31m"}, "negative_prompt"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": -5}, "num_frames"),
        ({"width": 0}, "width"),
        ({"height": 10**9}, "height"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 10**6}, "num_inference_steps"),
        ({"guidance_scale": math.nan}, "guidance_scale"),
        ({"guidance_scale": math.inf}, "guidance_scale"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"fps": 0}, "fps"),
        ({"num_frames": 10**400}, "num_frames"),
        ({"seed": 10**400}, "seed"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": math.inf}, "timeout_seconds"),
    ],
)
def test_nonsense_is_refused_with_its_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(Draft(**{"prompt": "a red ball", **changes}), CARD, PRESET)
    assert caught.value.field == field


def test_seed_is_drawn_when_not_given() -> None:
    seeds = {resolve(Draft(prompt="x", seed=seed), CARD, PRESET)[0].seed for seed in (None, None, -1, -1)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_time_limit_flag_then_preset_then_card() -> None:
    limited = values.preset(timeout_seconds=60.0)
    assert resolve(Draft(prompt="x", timeout_seconds=5), CARD, limited)[0].timeout_seconds == 5
    assert resolve(Draft(prompt="x"), CARD, limited)[0].timeout_seconds == 60
    assert resolve(Draft(prompt="x"), CARD, PRESET)[0].timeout_seconds == 120


def test_empty_negative_prompt_is_kept_apart_from_none() -> None:
    assert resolve(Draft(prompt="x", negative_prompt=""), CARD, PRESET)[0].negative_prompt == ""
    assert resolve(Draft(prompt="x"), CARD, PRESET)[0].negative_prompt is None


def test_unknown_words_are_named_for_the_built_in_model() -> None:
    card = values.card(vocabulary="demo")
    _, notices = resolve(Draft(prompt="a red ball beside a zebra"), card, PRESET)
    assert ["zebra" in notice.text for notice in notices] == [True]
    assert resolve(Draft(prompt="a red ball bouncing on a blue background"), card, PRESET)[1] == ()


def test_untrained_size_is_said() -> None:
    card = values.card(lattice=Lattice(trained_sizes=("96x96",), min_side=64, max_side=192, max_num_frames=33))
    _, notices = resolve(Draft(prompt="x", width=128, height=96), card, PRESET)
    assert "trained on 96x96" in notices[0].text


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_result_is_on_the_lattice_and_stable(width: int, height: int, num_frames: int) -> None:
    draft = Draft(prompt="x", width=width, height=height, num_frames=num_frames)
    request, _ = resolve(draft, CARD, PRESET)
    assert request.width % 16 == request.height % 16 == 0
    assert 64 <= request.width <= 192
    assert 64 <= request.height <= 192
    assert request.num_frames % 4 == 1
    assert 1 <= request.num_frames <= 33
    again = draft.model_copy(
        update={"width": request.width, "height": request.height, "num_frames": request.num_frames}
    )
    assert resolve(again, CARD, PRESET)[1] == ()


def test_a_model_that_needs_an_image_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(InvalidRequest, match="start image") as caught:
        resolve(Draft(prompt="x"), values.card(tasks=("i2v",)), PRESET)
    assert caught.value.field == "model"

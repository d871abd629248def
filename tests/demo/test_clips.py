"""Vocabulary, captions, trajectories and rendering."""

import random
import subprocess
import sys

import numpy as np
import pytest

from app.demo import clips
from app.demo.clips import Attributes, random_attributes, random_caption, render_keyframes, trajectory, with_defaults
from app.demo.vocabulary import ATTRIBUTES, KNOWN_WORDS, MOTIONS, PALETTE, SHAPES, unknown_words


def test_vocabulary_is_importable_without_torch_and_numpy() -> None:
    code = "import sys, app.demo.vocabulary; assert not {'torch', 'numpy', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("a red ball bouncing on a blue background", []),
        ("A RED BALL, spinning; 4K!", []),
        ("a cute cat and a cute dog", ["cute", "cat", "dog"]),
        ("", []),
        ("{} \n <|im_end|> \U0001f600", ["im", "end"]),
    ],
)
def test_unknown_words(prompt: str, unknown: list[str]) -> None:
    assert unknown_words(prompt) == unknown


def test_every_word_of_a_full_caption_is_known_or_a_distractor() -> None:
    rng = random.Random(0)
    for _ in range(200):
        attributes = random_attributes(rng)
        caption = clips.plain_caption(attributes)
        assert unknown_words(caption) == []
        for value in attributes:
            assert value in KNOWN_WORDS or value in {"mid", "still"}


def test_held_out_combinations_never_occur_in_training_and_are_about_a_tenth() -> None:
    rng = random.Random(1)
    drawn = [random_attributes(rng) for _ in range(500)]
    assert not any(clips.is_held_out(a) for a in drawn)
    anything = [clips.is_held_out(random_attributes(rng, None)) for _ in range(1000)]
    assert 0.06 < np.mean(anything) < 0.15
    held_out = [random_attributes(rng, held_out=True) for _ in range(300)]
    assert all(clips.is_held_out(a) for a in held_out)
    assert {a.motion for a in held_out} == set(MOTIONS)
    assert {a.shape for a in held_out} == set(SHAPES)


def test_a_caption_names_what_it_says_it_names() -> None:
    rng = random.Random(2)
    for _ in range(300):
        attributes, named = with_defaults(random_attributes(rng), rng)
        caption = random_caption(attributes, named, rng).lower()
        assert attributes.color != attributes.background
        if "shape" in named:
            assert any(word in caption for word in clips.SHAPE_WORDS[attributes.shape])
        if "background" in named:
            assert any(word in caption for word in clips.COLOR_WORDS[attributes.background])
        else:
            assert attributes.background == "gray"


def test_a_short_clip_is_the_start_of_a_long_one() -> None:
    for motion in ATTRIBUTES["motion"]:
        attributes = Attributes("heart", "red", motion, "white", "mid")
        long = trajectory(attributes, random.Random(3))
        short = trajectory(attributes, random.Random(3), frames=17)
        for a, b in zip(short, long, strict=True):
            np.testing.assert_allclose(a, b[:17], atol=1e-6)


def test_shapes_stay_in_the_picture_and_have_their_colour() -> None:
    rng = random.Random(4)
    for shape in SHAPES:
        attributes = Attributes(shape, "red", "still", "white", "mid")
        clip = clips.render(attributes, rng)
        assert clip.shape == (clips.FRAMES, clips.SIZE, clips.SIZE, 3)
        assert tuple(clip[0, 0, 0]) == PALETTE["white"]
        share = (clip[0] == PALETTE["red"]).all(-1).mean()
        assert 0.05 < share < 0.3
        assert (clip[0] == clip[-1]).all()


def test_keyframes_are_the_pooled_frames() -> None:
    rng = random.Random(5)
    items = [random_attributes(rng) for _ in range(8)]
    for item in items:
        keyframes = render_keyframes([item], random.Random(6), range(clips.KEYFRAMES)).rgb[0]
        alpha = clips.coverage(item.shape, trajectory(item, random.Random(6)))[:: clips.STRIDE]
        exact = clips.paint(clips.pool(alpha), item.color, item.background)
        assert np.abs(keyframes - exact).mean() < 0.005


def test_a_window_is_a_part_of_the_picture() -> None:
    path = trajectory(Attributes("star", "red", "circle", "white", "mid"), random.Random(7))
    window = (slice(8, 56), slice(40, 88))
    np.testing.assert_array_equal(
        clips.coverage("star", path, window=window), clips.coverage("star", path)[:, window[0], window[1]]
    )


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="hexagon"):
        clips.signed_distance("hexagon", np.zeros(1, np.float32), np.zeros(1, np.float32), 1.0)

"""The clips the built-in model is trained on: attributes, captions, trajectories and exact rendering (numpy only).

Lengths are in half-widths of the square picture, whose coordinates run from -1 to 1; y grows downwards.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.demo.vocabulary import (
    ATTRIBUTES,
    BACKGROUNDS,
    COLOR_WORDS,
    COLORS,
    DEFAULTS,
    DISTRACTORS,
    GROUNDS,
    MOTION_WORDS,
    MOTIONS,
    PALETTE,
    PLACEHOLDERS,
    PREFIXES,
    SHAPE_WORDS,
    SHAPES,
    SIZE_WORDS,
    SUFFIXES,
)

Floats = NDArray[np.float32]

SIZE = 96
"""Height and width of a clip in pixels."""
FRAMES = 33
FPS = 16
STRIDE = 4
"""Frames per latent frame (after the first); every STRIDE-th frame is a keyframe."""
KEYFRAMES = (FRAMES - 1) // STRIDE + 1
POOL = 4
"""The latents hold keyframes averaged over POOL x POOL pixels."""

_LOW_CONTRAST = {
    frozenset(pair)
    for pair in (
        ("orange", "red"),
        ("orange", "yellow"),
        ("pink", "red"),
        ("blue", "purple"),
        ("white", "yellow"),
        ("cyan", "white"),
    )
}
_RADIUS = {"small": 0.34, "mid": 0.46, "big": 0.58}
_LANE = {"small": 0.16, "mid": 0.13, "big": 0.10}
"""Distance of the outer lanes from the middle one."""
_TRAVEL = {"small": 0.60, "mid": 0.50, "big": 0.42}
_ORBIT = {"small": 0.50, "mid": 0.42, "big": 0.34}
_GROWTH = {"small": 0.90, "mid": 1.0, "big": 1.10}
_DROP = {"small": 0.92, "mid": 0.76, "big": 0.60}
"""Height of a bounce."""


class Attributes(NamedTuple):
    """All that a caption can say about a clip."""

    shape: str
    color: str
    motion: str
    background: str
    size: str


class Path(NamedTuple):
    """Where the shape is in every frame: arrays of shape (frames,), half-widths and radians (clockwise)."""

    x: Floats
    y: Floats
    radius: Floats
    angle: Floats


def is_held_out(attributes: Attributes) -> bool:
    """Whether this (shape, colour, motion) never occurs in training: about 10 % of all triples."""
    shape, color, motion = (
        SHAPES.index(attributes.shape),
        COLORS.index(attributes.color),
        MOTIONS.index(attributes.motion),
    )
    return (7 * shape + 3 * color + motion) % 10 == 4


def default_color(background: str) -> str:
    """The colour of a shape whose colour is not named: red, unless the background is too close to it."""
    return "white" if background in ("red", "orange", "pink") else DEFAULTS["color"]


def random_attributes(rng: random.Random, held_out: bool | None = False) -> Attributes:
    """Random attributes; held_out False: of the training set only, True: of the held-out set only, None: any."""
    while True:
        plain_ground = rng.random() < 0.25
        a = Attributes(
            shape=rng.choice(SHAPES),
            color=rng.choice(COLORS),
            motion=rng.choice(MOTIONS),
            background=rng.choice(("gray", "white", "black")) if plain_ground else rng.choice(BACKGROUNDS),
            size=rng.choice(("mid", "mid", "mid", "small", "big")),
        )
        if a.color == a.background or (held_out is not None and is_held_out(a) != held_out):
            continue
        # A ball's rotation cannot be seen: known to the model, but rare and never tested.
        if (a.shape, a.motion) == ("ball", "rotate") and (held_out is not False or rng.random() < 0.7):
            continue
        if frozenset((a.color, a.background)) in _LOW_CONTRAST and rng.random() < 0.5:
            continue
        return a


def with_defaults(a: Attributes, rng: random.Random) -> tuple[Attributes, frozenset[str]]:
    """Drop some attributes from the caption: returns the attributes with defaults in their place and the named ones.

    The size "mid" has no word, and gray, the default ground, is named every other time.
    """
    keep = {"shape": 0.96, "color": 0.96, "motion": 0.95, "background": 0.97, "size": 1.0}
    named = {key for key in ATTRIBUTES if rng.random() < keep[key]}
    if a.background == DEFAULTS["background"] and rng.random() < 0.5:
        named.discard("background")
    if a.size == DEFAULTS["size"]:
        named.discard("size")
    values = {key: value if key in named else DEFAULTS[key] for key, value in a._asdict().items()}
    if "color" not in named:
        values["color"] = default_color(values["background"])
    if values["color"] == values["background"] and "color" in named:
        values["background"] = a.background
        named.add("background")
    return Attributes(**values), frozenset(named)


def plain_caption(a: Attributes) -> str:
    """The simplest wording that names every attribute."""
    size = f"{SIZE_WORDS[a.size][0]} " if SIZE_WORDS[a.size] else ""
    noun = f"{size}{COLOR_WORDS[a.color][0]} {SHAPE_WORDS[a.shape][0]}"
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{article} {noun} {MOTION_WORDS[a.motion][0][0]} on a {COLOR_WORDS[a.background][0]} background"


def _often_first(words: Sequence[str], rng: random.Random) -> str:
    return words[0] if rng.random() < 0.5 else rng.choice(words)


def _subject(a: Attributes, named: frozenset[str], rng: random.Random) -> str:
    if "shape" in named:
        noun = _often_first(SHAPE_WORDS[a.shape], rng)
    else:
        noun = rng.choice(PLACEHOLDERS) if rng.random() < 0.5 else rng.choice(DISTRACTORS)
    adjectives = []
    if "size" in named:
        adjectives.append(rng.choice(SIZE_WORDS[a.size]))
    if "color" in named:
        adjectives.append(_often_first(COLOR_WORDS[a.color], rng))
    if rng.random() < 0.15:
        adjectives.reverse()
    if rng.random() < 0.06:
        adjectives.insert(0, rng.choice(DISTRACTORS))
    return " ".join([*adjectives, noun])


def random_caption(a: Attributes, named: frozenset[str], rng: random.Random) -> str:
    """One of very many wordings that name the given attributes."""
    if rng.random() < 0.15 and named >= {"shape", "color", "motion", "background"}:
        return plain_caption(a)
    noun = _subject(a, named, rng)
    article = rng.choice(("", "the ", "one ")) if rng.random() < 0.25 else "an " if noun[0] in "aeiou" else "a "
    prefix = rng.choice(PREFIXES) + " " if rng.random() < 0.5 else ""
    suffix = rng.choice(SUFFIXES) if rng.random() < 0.55 else ""
    motion = ""
    if "motion" in named:
        participle, finite = rng.choice(MOTION_WORDS[a.motion])
        motion = participle if prefix else rng.choice((participle, participle, participle, finite, "is " + participle))
    subject = article + noun
    if "background" in named:
        noun_of_ground = GROUNDS[0] if rng.random() < 0.85 else rng.choice(GROUNDS)
        ground = f"{rng.choice(COLOR_WORDS[a.background])} {noun_of_ground}"
        preposition = rng.choice(("on", "on", "on", "against", "in front of", "over", "with"))
        place = f"{preposition} {rng.choice(('a ', 'a ', 'the ', ''))}{ground}"
        text = rng.choice(
            (
                *(f"{prefix}{subject} {motion} {place}{suffix}",) * 6,
                f"{place}, {subject} {motion}{suffix}",
                f"{prefix}{subject} {motion}, {ground}{suffix}",
                f"{noun}, {motion or 'video'}, {ground}{suffix}",
            )
        )
    else:
        text = f"{prefix}{subject} {motion}{suffix}"
    if rng.random() < 0.08:
        word = rng.choice(DISTRACTORS)
        text = rng.choice((f"{text} with a {word}", f"{text} near the {word}", f"{word}, {text}"))
    text = " ".join(text.split()).replace(" ,", ",")
    style = rng.random()
    text = text[:1].upper() + text[1:] if style < 0.35 else text.upper() if style < 0.37 else text
    return text + "." if rng.random() < 0.2 else text


def _floats(values: Any) -> Floats:
    return np.asarray(values, np.float32)


def trajectory(a: Attributes, rng: random.Random, frames: int = FRAMES, loose: float = 0.0) -> Path:
    """A random path for these attributes.  Speeds are per frame: a shorter clip is the start of a longer one.

    The shape takes one of three lanes close together.  So few ways to go leave the transformer free to learn outlines
    instead of places; noise picks the lane.  ``loose`` 1 varies everything a
    little more, for parts that must not depend on the lanes.
    """

    def about(value: float, spread: float) -> float:
        return value + loose * rng.uniform(-spread, spread)

    u = np.arange(frames, dtype=np.float32) / (FRAMES - 1)
    lane = rng.choice((-1, 0, 1))
    side = about(lane * _LANE[a.size], 0.1)
    x, y = np.full(frames, side, np.float32), np.full(frames, about(0, 0.1), np.float32)
    radius = np.full(frames, _RADIUS[a.size] * about(1, 0.04), np.float32)
    angle = np.zeros(frames, np.float32)
    sweep = _floats(about(0, 0.05) + _TRAVEL[a.size] * about(1, 0.05) * (2 * u - 1))
    if a.motion in ("right", "left"):
        x, y = (sweep if a.motion == "right" else -sweep), x
    elif a.motion in ("down", "up"):
        y = sweep if a.motion == "down" else -sweep
    elif a.motion == "bounce":
        y = _floats(0.92 - radius[0] - _DROP[a.size] * about(1, 0.05) * np.abs(np.cos(np.pi * u)))
    elif a.motion == "rotate":
        angle = _floats(about(0, 0.15) + 0.75 * np.pi * u)
    elif a.motion in ("grow", "shrink"):
        grown = (0.19 + 0.45 * u) * about(1, 0.05)
        radius = _floats((grown if a.motion == "grow" else 0.83 - grown) * _GROWTH[a.size])
        x = _floats(x / 2)
    elif a.motion == "circle":
        turn = 2 * np.pi * (u - 0.25) + about(0, 0.25)
        orbit = _ORBIT[a.size] * about(1, 0.03)
        x, y = _floats(x / 2 + orbit * np.cos(turn)), _floats(orbit * np.sin(turn))
    return Path(x, y, _floats(np.maximum(radius, 0.04)), angle)


def signed_distance(shape: str, x: Floats, y: Floats, radius: Floats | float) -> Floats:
    """Distance to the outline, negative inside; x and y relative to the shape's centre, all broadcast together."""
    if shape == "ball":
        d = np.sqrt(x * x + y * y) - 0.92 * radius
    elif shape == "square":
        d = np.maximum(np.abs(x), np.abs(y)) - 0.82 * radius
    elif shape == "triangle":
        y = y - 0.12 * radius
        d = np.maximum(0.866 * np.abs(x) - 0.5 * y, y) - 0.58 * radius
    elif shape == "star":
        d = _star_distance(x, y, radius)
    elif shape == "heart":
        d = _heart_distance(x, y, radius)
    else:
        raise ValueError(f"unknown shape: {shape}")
    return np.asarray(d, np.float32)


def _star_distance(x: Floats, y: Floats, radius: Floats | float) -> Any:
    sector = 2 * math.pi / 5
    angle = np.abs((np.arctan2(x, -y) + sector / 2) % sector - sector / 2)
    reach = np.sqrt(x * x + y * y)
    px, py = reach * np.cos(angle), reach * np.sin(angle)
    # One straight edge from a tip (outer, 0) to an inner corner; all others are its mirror images.
    outer, inner = 1.2, 0.55
    ex, ey = inner * math.cos(sector / 2) - outer, inner * math.sin(sector / 2)
    return (ey * (px - outer * radius) - ex * py) / math.hypot(ex, ey)


def _heart_distance(x: Floats, y: Floats, radius: Floats | float) -> Any:
    scale = 1.75 * radius
    px, py = np.abs(x) / scale, 0.55 - y / scale
    lobe = np.sqrt((px - 0.25) ** 2 + (py - 0.75) ** 2) - math.sqrt(2) / 4
    m = 0.5 * np.maximum(px + py, 0.0)
    side = np.sqrt(np.minimum(px**2 + (py - 1.0) ** 2, (px - m) ** 2 + (py - m) ** 2)) * np.sign(px - py)
    return np.where(px + py > 1.0, lobe, side) * scale


def coverage(shape: str, path: Path, size: int = SIZE, window: tuple[slice, slice] | None = None) -> Floats:
    """How much of every pixel the shape covers, 0 to 1: (frames, rows, columns), of the whole picture or a window."""
    axis = ((np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1).astype(np.float32)
    rows, columns = (axis, axis) if window is None else (axis[window[0]], axis[window[1]])
    x, y, radius, angle = (v[:, None, None] for v in path)
    dx, dy = columns[None, None, :] - x, rows[None, :, None] - y
    cos, sin = np.cos(angle), np.sin(angle)
    distance = signed_distance(shape, cos * dx + sin * dy, cos * dy - sin * dx, radius)
    return _floats(np.clip(0.5 - distance * (size / 2), 0, 1))


def rgb_of(name: str) -> Floats:
    """A named colour as RGB in [-1, 1]."""
    return np.asarray(np.asarray(PALETTE[name], np.float32) / 127.5 - 1, np.float32)


def blend(alpha: Floats, fore: Floats, back: Floats) -> Floats:
    """RGB of shape (..., 3) from coverage and two colours."""
    return np.asarray(back + alpha[..., None] * (fore - back), np.float32)


def paint(alpha: Floats, color: str, background: str) -> Floats:
    """RGB in [-1, 1] of shape (..., 3) from coverage and two colour names."""
    return blend(alpha, rgb_of(color), rgb_of(background))


def render(a: Attributes, rng: random.Random, frames: int = FRAMES) -> NDArray[np.uint8]:
    """A random clip: (frames, SIZE, SIZE, 3) uint8."""
    return to_uint8(paint(coverage(a.shape, trajectory(a, rng, frames)), a.color, a.background))


def to_uint8(rgb: Floats) -> NDArray[np.uint8]:
    """RGB in [-1, 1] to bytes."""
    return np.round((np.clip(rgb, -1, 1) + 1) * 127.5).astype(np.uint8)


def pool(alpha: Floats, factor: int = POOL) -> Floats:
    """Average over factor x factor pixels of the last two axes."""
    *rest, height, width = alpha.shape
    blocks = alpha.reshape(*rest, height // factor, factor, width // factor, factor)
    return np.asarray(blocks.mean((-3, -1)), np.float32)


class Keyframes(NamedTuple):
    """The pooled keyframes of random clips; side = SIZE // POOL."""

    rgb: Floats
    """In [-1, 1]: (clips, keys, side, side, 3)."""
    alpha: Floats
    """How much of each pixel the shape covers: (clips, keys, side, side)."""
    pose: Floats
    """x, y, radius and angle / pi of the shape: (clips, keys, 4)."""


def render_keyframes(
    items: Sequence[Attributes], rng: random.Random, keys: Sequence[int], loose: float = 0.0
) -> Keyframes:
    """The given keyframes of one random clip for each item.

    Rendered at twice the pooled size and averaged, which differs from pooling full-size frames only a little, at
    sharp corners, and costs a quarter.
    """
    frames = [STRIDE * key for key in keys]
    size = SIZE // POOL
    rgb = np.empty((len(items), len(frames), size, size, 3), np.float32)
    alphas = np.empty(rgb.shape[:-1], np.float32)
    paths = [trajectory(a, rng, loose=loose) for a in items]
    pose = np.stack([np.stack([axis[frames] for axis in path], -1) for path in paths])
    pose[..., 3] /= np.pi
    for shape in SHAPES:
        which = [i for i, a in enumerate(items) if a.shape == shape]
        if not which:
            continue
        joined = Path(*(np.concatenate([paths[i][axis][frames] for i in which]) for axis in range(4)))
        alpha = pool(coverage(shape, joined, 2 * size), 2).reshape(len(which), len(frames), size, size)
        for i, one in zip(which, alpha, strict=True):
            alphas[i] = one
            rgb[i] = paint(one, items[i].color, items[i].background)
    return Keyframes(rgb, alphas, pose)

"""The judge: reads colours, shape and motion off a clip by geometry alone (numpy only, nothing learned)."""

from __future__ import annotations

import functools
import math
import random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.demo.clips import Floats, random_attributes, render, rgb_of, signed_distance
from app.demo.vocabulary import BACKGROUNDS, COLORS, DIRECTIONS, SHAPES

Clip = NDArray[np.uint8]
_CELLS = 40
"""Side of the grid on which outlines are compared."""
_REACH = 2.1
"""Half the side of that grid, in radii of the disc that has the shape's area."""
_ANGLES = 72
_SYMMETRY = {"ball": 0.0, "square": 90.0, "triangle": 120.0, "star": 72.0, "heart": 360.0}
"""Degrees after which a turned shape looks the same."""
_MIN_OVERLAP = 0.75
"""Intersection over union below which an outline is called none of the shapes."""


class Verdict(NamedTuple):
    """What the judge sees in a clip; "none" or "other" where it sees nothing it knows."""

    shape: str
    color: str
    motion: str
    background: str
    dx: float
    """Net displacement to the right, in widths of the picture."""
    dy: float
    """Net displacement downwards."""
    overlap: float
    """Intersection over union of the outline with that of the shape, mean over frames."""


def _nearest(rgb: Floats, names: tuple[str, ...]) -> str:
    # Weights of a crude perceptual distance.
    weight = np.array([0.9, 1.1, 0.8])
    return min(names, key=lambda name: float(np.linalg.norm((rgb - (rgb_of(name) + 1) * 127.5) * weight)))


def _separate(clip: Clip) -> tuple[Floats, Floats, Floats]:
    """(background RGB, shape RGB, soft mask of the shape (frames, height, width))."""
    border = [clip[:, :3], clip[:, -3:], clip[:, :, :3], clip[:, :, -3:]]
    back = np.median(np.concatenate([part.reshape(-1, 3) for part in border]), 0)
    offset = clip.astype(np.float32) - back.astype(np.float32)
    distance = np.linalg.norm(offset, axis=-1)
    core = distance > max(12.0, 0.6 * float(np.percentile(distance, 99)))
    fore = np.median(clip[core], 0) if core.sum() > 50 else back
    axis = (fore - back).astype(np.float32)
    alpha = np.clip(offset @ axis / max(float(axis @ axis), 1e-3), 0, 1)
    return back, fore, np.asarray(alpha, np.float32)


def _square(axis: Floats) -> tuple[Floats, Floats]:
    """x and y of the points of a square grid."""
    y, x = np.meshgrid(axis, axis, indexing="ij")
    return np.asarray(x, np.float32), np.asarray(y, np.float32)


def _grid() -> tuple[Floats, Floats]:
    return _square(np.asarray(((np.arange(_CELLS) + 0.5) / _CELLS * 2 - 1) * _REACH, np.float32))


@functools.cache
def _templates() -> tuple[NDArray[np.float32], list[tuple[str, float]]]:
    """Outlines of every shape at every angle, centred and scaled to the area of the unit disc, one per row."""
    rows, labels = [], []
    x, y = _grid()
    fine = np.linspace(-1.5, 1.5, 601, dtype=np.float32)
    fx, fy = _square(fine)
    for shape in SHAPES:
        inside = signed_distance(shape, fx, fy, 1.0) < 0
        radius = math.sqrt(inside.sum() * float(fine[1] - fine[0]) ** 2 / math.pi)
        cx, cy = float(fx[inside].mean()), float(fy[inside].mean())
        period = _SYMMETRY[shape]
        count = max(1, round(_ANGLES * period / 360))
        for step in range(count):
            angle = math.radians(step * period / count)
            rx = np.asarray((math.cos(angle) * x + math.sin(angle) * y) * radius + cx, np.float32)
            ry = np.asarray((math.cos(angle) * y - math.sin(angle) * x) * radius + cy, np.float32)
            rows.append((signed_distance(shape, rx, ry, 1.0) < 0).ravel())
            labels.append((shape, math.degrees(angle)))
    return np.asarray(rows, np.float32), labels


def _outline(alpha: Floats) -> NDArray[np.float32] | None:
    """One frame's soft mask, centred and scaled like the templates, or None where there is too little to see."""
    area = float(alpha.sum())
    if area < 40:
        return None
    height, width = alpha.shape
    cy = float((alpha.sum(1) @ np.arange(height)) / area)
    cx = float((alpha.sum(0) @ np.arange(width)) / area)
    x, y = _grid()
    radius = math.sqrt(area / math.pi)
    px, py = np.clip(x * radius + cx, 0, width - 1.001), np.clip(y * radius + cy, 0, height - 1.001)
    ix, iy = px.astype(int), py.astype(int)
    fx, fy = px - ix, py - iy
    top = alpha[iy, ix] * (1 - fx) + alpha[iy, ix + 1] * fx
    bottom = alpha[iy + 1, ix] * (1 - fx) + alpha[iy + 1, ix + 1] * fx
    outside = (np.abs(x * radius + cx - (width - 1) / 2) > width / 2) | (
        np.abs(y * radius + cy - (height - 1) / 2) > height / 2
    )
    return np.asarray(((top * (1 - fy) + bottom * fy > 0.5) & ~outside).ravel(), np.float32)


def _read_shape(alpha: Floats) -> tuple[str, float, float]:
    """(shape, mean overlap, degrees turned over the clip) from the outlines of all frames."""
    templates, labels = _templates()
    found = [
        (i, outline) for i, outline in ((i, _outline(frame)) for i, frame in enumerate(alpha)) if outline is not None
    ]
    if len(found) < 3:
        return "none", 0.0, 0.0
    outlines = np.stack([outline for _, outline in found])
    shared = outlines @ templates.T
    overlap = shared / (outlines.sum(1)[:, None] + templates.sum(1)[None] - shared)
    names = np.array([shape for shape, _ in labels])
    best = {shape: overlap[:, names == shape].max(1) for shape in SHAPES}
    shape = max(SHAPES, key=lambda name: float(best[name].mean()))
    degrees = np.array([angle for name, angle in labels if name == shape])[overlap[:, names == shape].argmax(1)]
    period, turned = _SYMMETRY[shape], 0.0
    if period:
        steps = (np.diff(degrees) + period / 2) % period - period / 2
        turned = float(steps.sum())
    score = float(best[shape].mean())
    return (shape if score >= _MIN_OVERLAP else "none"), score, turned


def _read_motion(alpha: Floats, turned: float) -> tuple[str, float, float]:
    """(motion, net displacement to the right, downwards), in widths of the picture."""
    area = alpha.sum((1, 2))
    seen = np.flatnonzero(area > 15)
    if len(seen) < 0.7 * len(alpha):
        return "none", 0.0, 0.0
    height, width = alpha.shape[1:]
    x = (alpha.sum(1)[seen] @ np.arange(width)) / area[seen] / width
    y = (alpha.sum(2)[seen] @ np.arange(height)) / area[seen] / height
    dx, dy = float(x[-2:].mean() - x[:2].mean()), float(y[-2:].mean() - y[:2].mean())
    rx, ry = float(np.ptp(x)), float(np.ptp(y))
    ratio = float(area[seen][-3:].mean() / area[seen][:3].mean())
    motion = "other"
    if min(rx, ry) > 0.2 and max(abs(dx), abs(dy)) < 0.6 * max(rx, ry):
        motion = "circle"
    elif rx > 0.2 and rx > 1.5 * ry and abs(dx) > 0.7 * rx:
        motion = "right" if dx > 0 else "left"
    elif ry > 0.2 and ry > 1.5 * rx and abs(dy) > 0.7 * ry:
        motion = "down" if dy > 0 else "up"
    elif ry > 0.15 and ry > 1.5 * rx and abs(dy) < 0.5 * ry:
        motion = "bounce"
    elif max(rx, ry) < 0.2 and ratio > 2:
        motion = "grow"
    elif max(rx, ry) < 0.2 and ratio < 0.5:
        motion = "shrink"
    elif max(rx, ry) < 0.15 and abs(turned) > 60:
        motion = "rotate"
    elif max(rx, ry) < 0.08 and abs(turned) < 30 and 0.7 < ratio < 1.4:
        motion = "still"
    return motion, dx, dy


def judge(clip: Clip) -> Verdict:
    """Judge a clip (frames, height, width, 3) of one shape before a plain background."""
    back, fore, alpha = _separate(clip)
    shape, overlap, turned = _read_shape(alpha)
    motion, dx, dy = _read_motion(alpha, turned)
    return Verdict(shape, _nearest(fore, (*COLORS, "gray")), motion, _nearest(back, BACKGROUNDS), dx, dy, overlap)


def direction_right(verdict: Verdict, motion: str) -> bool:
    """Whether a directed motion went the asked way: far enough, and more along than across."""
    ux, uy = DIRECTIONS[motion]
    along, across = verdict.dx * ux + verdict.dy * uy, abs(verdict.dx * uy) + abs(verdict.dy * ux)
    return along > 0.1 and along > across


def calibrate(count: int, seed: int = 5) -> dict[str, Any]:
    """The judge's accuracy on clips drawn by the program, where the truth is known."""
    rng = random.Random(seed)
    right = dict.fromkeys(("shape", "color", "motion", "background"), 0)
    directions = [0, 0]
    wrong: list[str] = []
    for _ in range(count):
        a = random_attributes(rng, None if rng.random() < 0.5 else True)
        verdict = judge(render(a, rng))
        for key in right:
            # The rotation of a ball cannot be seen.
            truth = "still" if key == "motion" and (a.shape, a.motion) == ("ball", "rotate") else getattr(a, key)
            right[key] += getattr(verdict, key) == truth
            if getattr(verdict, key) != truth:
                wrong.append(f"{' '.join(a)}: {key} {getattr(verdict, key)}")
        if a.motion in DIRECTIONS:
            directions[0] += direction_right(verdict, a.motion)
            directions[1] += 1
    accuracy = {key: value / count for key, value in right.items()}
    accuracy["direction"] = directions[0] / max(1, directions[1])
    return {"count": count, "accuracy": accuracy, "wrong": wrong}

"""Measure a built-in model on held-out prompts: ``python -m app.demo.evaluate FOLDER -n 200 --json out.json``.

Held out means: this combination of shape, colour and motion never occurred in training.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from app.demo.clips import SIZE, Attributes, plain_caption, random_attributes, random_caption
from app.demo.folder import SETTINGS, Settings, load_folder, sample
from app.demo.judge import Clip, Verdict, calibrate, direction_right, judge
from app.demo.stages import progress
from app.demo.vocabulary import ATTRIBUTES, DEFAULTS, DIRECTIONS, MOTIONS

JUDGED = ("shape", "color", "motion", "background")
TARGETS = {"color": 0.95, "background": 0.95, "direction": 0.90, "shape": 0.80}


class Case(NamedTuple):
    """One prompt and what its clip was judged to be."""

    prompt: str
    wanted: Attributes
    seed: int
    verdict: Verdict


def held_out_prompts(count: int, seed: int = 2024) -> list[tuple[Attributes, str]]:
    """Held-out attributes with captions that name them all, as many of each motion; every other wording is plain."""
    rng = random.Random(seed)
    quota = collections.Counter({motion: -(-count // len(MOTIONS)) for motion in MOTIONS})
    out: list[tuple[Attributes, str]] = []
    while len(out) < count:
        a = random_attributes(rng, held_out=True)
        if quota[a.motion] == 0:
            continue
        quota[a.motion] -= 1
        named = frozenset(key for key in ATTRIBUTES if key != "size" or a.size != DEFAULTS["size"])
        out.append((a, plain_caption(a) if len(out) % 2 == 0 else random_caption(a, named, rng)))
    return out


def summarise(cases: Sequence[Case]) -> dict[str, Any]:
    """Accuracies over judged cases, by attribute, by motion and by shape, and every mistake."""
    right = {key: [getattr(c.verdict, key) == getattr(c.wanted, key) for c in cases] for key in JUDGED}
    directed = [direction_right(c.verdict, c.wanted.motion) for c in cases if c.wanted.motion in DIRECTIONS]
    accuracy = {key: float(np.mean(values)) for key, values in right.items()}
    accuracy["direction"] = float(np.mean(directed)) if directed else 0.0
    accuracy["all"] = float(np.mean([all(right[key][i] for key in JUDGED) for i in range(len(cases))]))
    parts = {}
    for key in ("motion", "shape"):
        values = ATTRIBUTES[key]
        picked = {v: [right[key][i] for i, c in enumerate(cases) if getattr(c.wanted, key) == v] for v in values}
        parts[key] = {value: f"{sum(found)}/{len(found)}" for value, found in picked.items() if found}
    mistakes = [
        f"{c.prompt!r} (seed {c.seed}): {key} {getattr(c.verdict, key)}"
        for i, c in enumerate(cases)
        for key in JUDGED
        if not right[key][i]
    ]
    return {"count": len(cases), "accuracy": accuracy, **{f"by_{k}": v for k, v in parts.items()}, "mistakes": mistakes}


def table(result: dict[str, Any]) -> str:
    """The accuracies as a Markdown table, with the judge's own on drawn clips beside them."""
    names = {
        "color": "shape colour",
        "background": "background colour",
        "direction": "direction of motion",
        "motion": "kind of motion",
        "shape": "shape kind",
        "all": "all of colour, background, motion and shape",
    }
    drawn = result["calibration"]["accuracy"]
    lines = [
        f"| right | {result['count']} held-out prompts | target "
        f"| the judge on {result['calibration']['count']} drawn clips |",
        "| --- | --- | --- | --- |",
    ]
    for key, name in names.items():
        target = f"{TARGETS[key]:.0%}" if key in TARGETS else ""
        judged = f"{drawn[key]:.1%}" if key in drawn else ""
        lines.append(f"| {name} | {result['accuracy'][key]:.1%} | {target} | {judged} |")
    return "\n".join(lines)


def contact_sheet(clips: Sequence[Clip], labels: Sequence[str], path: Path, columns: int = 9) -> None:
    """One row of evenly spaced frames per clip, its label above it."""
    row, width = SIZE + 16, columns * (SIZE + 2)
    sheet = Image.new("RGB", (width, row * len(clips)), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for number, (clip, label) in enumerate(zip(clips, labels, strict=True)):
        draw.text((2, number * row + 1), label, fill=(0, 0, 0))
        for column, index in enumerate(np.linspace(0, len(clip) - 1, columns).round().astype(int)):
            sheet.paste(Image.fromarray(clip[index]), (column * (SIZE + 2), number * row + 14))
    sheet.save(path)


def evaluate(pipe: Any, count: int, settings: Settings, sheet: Path | None = None, drawn: int = 200) -> dict[str, Any]:
    """Sample `count` held-out prompts with the stock pipeline, judge them, and calibrate the judge on drawn clips."""
    cases, clips, labels, spent = [], [], [], 0.0
    for seed, (wanted, prompt) in enumerate(progress(held_out_prompts(count), "evaluate")):
        started = time.perf_counter()
        clip = sample(pipe, prompt, seed, settings)
        spent += time.perf_counter() - started
        cases.append(Case(prompt, wanted, seed, judge(clip)))
        if sheet is not None and seed < 24:
            wrong = [
                f"{k}: {getattr(cases[-1].verdict, k)}"
                for k in JUDGED
                if getattr(cases[-1].verdict, k) != getattr(wanted, k)
            ]
            clips.append(clip)
            labels.append(f"{prompt}   [{', '.join(wrong) or 'all right'}]")
    if sheet is not None:
        contact_sheet(clips, labels, sheet)
    timing = {"seconds_per_clip": spent / max(1, count)}
    return {**summarise(cases), **timing, "settings": settings._asdict(), "calibration": calibrate(drawn)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m app.demo.evaluate", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--count", type=int, default=200, help="held-out prompts")
    parser.add_argument("--json", type=Path, help="write the full result here")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet (PNG) here")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps)
    parser.add_argument("--guidance", type=float, default=SETTINGS.guidance)
    options = parser.parse_args(arguments)
    settings = SETTINGS._replace(steps=options.steps, guidance=options.guidance)
    result = evaluate(load_folder(options.folder), options.count, settings, options.sheet)
    print(table(result))
    print(f"{result['seconds_per_clip']:.2f} s a clip; by motion {result['by_motion']}; by shape {result['by_shape']}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The model card: README.md of the built-in model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.demo.evaluate import table
from app.demo.folder import Settings
from app.demo.vocabulary import COLOR_WORDS, COLORS, MOTION_WORDS, MOTIONS, SHAPE_WORDS, SHAPES, SIZE_WORDS

_HEAD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
tags:
- text-to-video
- synthetic-data
---

# Pocketreel's built-in model

A very small text-to-video model made of the real classes of diffusers' `Kandinsky5T2VPipeline` at tiny size
(transformer, `AutoencoderKLHunyuanVideo`, Qwen2.5-VL and CLIP text encoders, flow-match Euler scheduler), so that a
whole program can be tried, tested and measured without downloading anything.  Every weight was trained from scratch, on
a CPU, on clips that the training program draws itself; no other data and no pretrained weights went into it.
"""

_USE = """
## Use

```python
import torch
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("assets/demo", dtype=torch.float32)
frames = pipe(
    "a red ball bouncing on a blue background",
    height={size}, width={size}, num_frames={frames}, num_inference_steps={steps}, guidance_scale={guidance},
    generator=torch.Generator().manual_seed(0), output_type="np",
).frames[0]
```

Defaults: {size}x{size}, {frames} frames at {fps} a second, {steps} steps, guidance {guidance}; the scheduler's shift is
{shift}.  Shorter clips are the beginning of longer ones.  The weights are stored as float16; load them as float32.
"""

_MAKING = """
## How it was made

`python -m app.demo.train --out DIR` trains all of it again from nothing, with fixed seeds; a run that is killed goes on
where it was.  The encoder is not trained: it is a linear map, built by initialisation, that averages every fourth frame
over 4x4 pixels.  The transformer learns to denoise those tiny pictures; the decoder learns to draw crisp frames, and
the frames between, from noisy ones.  Besides 12 channels of picture the latents have 15 of place (cosines of key, row
and column), which the autoencoder passes over: the transformer denoises them too and so knows where each token lies.
It learns in two courses, the first on varied paths, the second on three lanes close together, for the outlines.
"""


def _knows() -> str:
    motions = ", ".join(MOTION_WORDS[motion][0][0] for motion in MOTIONS)
    backgrounds = ", ".join(key for key in COLOR_WORDS)
    sizes = ", ".join(words[0] for words in SIZE_WORDS.values() if words)
    return f"""
## What it knows

One shape on a plain background, in English, with synonyms:

- shapes: {", ".join(SHAPE_WORDS[shape][0] for shape in SHAPES)}
- colours: {", ".join(COLORS)}; backgrounds: {backgrounds} (gray when none is named)
- motions: {motions}
- sizes: {sizes}, or none named

It knows nothing else.  Words that it does not know are ignored; a prompt that names no shape, colour or motion gets a
red ball that bounces.  Counts, several objects, speeds, textures and places are beyond it, and so are other picture
sizes.
"""


def write_card(out: Path, result: dict[str, Any], notes: str = "") -> None:
    """Write README.md from the result of an evaluation, the seconds that training took, and notes on this training."""
    settings = Settings(**result["settings"])
    minutes = {name: seconds / 60 for name, seconds in result["seconds"].items()}
    measured = f"""
## Measured

On {result["count"]} prompts whose combination of shape, colour and motion never occurred in training, half of them
in free wording, by a judge that uses geometry alone (`python -m app.demo.evaluate assets/demo -n {result["count"]}`):

{table(result)}

By shape: {_listed(result["by_shape"])}.
By motion: {_listed(result["by_motion"])}.
"""
    times = f"""
Wall time of this training: text encoders {minutes["text"]:.0f} minutes, decoder {minutes["decoder"]:.0f} minutes,
transformer {minutes["transformer"]:.0f} and {minutes["fine"]:.0f} minutes, partly at the same time.
"""
    text = _HEAD + _knows() + _USE.format(**settings._asdict()) + measured + _MAKING + times
    (out / "README.md").write_text(text + notes, "utf-8")


def _listed(counts: dict[str, str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())

"""Put the trained parts together as an ordinary diffusers folder, and load one."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, Kandinsky5T2VPipeline

from app.demo.clips import FPS, FRAMES, SIZE
from app.demo.text import TextEncoders
from app.demo.transformer import SHIFT


class Settings(NamedTuple):
    """How the built-in model is meant to be sampled."""

    steps: int = 8
    guidance: float = 2.0
    shift: float = SHIFT
    frames: int = FRAMES
    size: int = SIZE
    fps: int = FPS


SETTINGS = Settings()
LIMIT_BYTES = 16_000_000
"""What the shipped folder may weigh in all."""


def save_folder(out: Path, encoders: TextEncoders, vae: Any, transformer: Any) -> None:
    """Write the pipeline to a folder: float16 safetensors, and no trace of where it was made."""
    if out.exists():
        for name in ("model_index.json", "scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
            _remove(out / name)
        for name in ("transformer", "vae"):
            _remove(out / name)
    pipe = Kandinsky5T2VPipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=encoders.qwen,
        tokenizer=encoders.processor,
        text_encoder_2=encoders.clip,
        tokenizer_2=encoders.clip_tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SETTINGS.shift),
    )
    with _narrow_warnings():
        for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
            part.to(torch.float16)
        pipe.save_pretrained(str(out))
    for path in sorted(out.glob("**/*.json")):
        _clean_config(path)
    for path in out.glob("**/*.safetensors"):
        # safetensors writes files that only their owner can read.
        path.chmod(0o644)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clean_config(path: Path) -> None:
    """Drop local paths; let the text encoders load as float32 when no dtype is asked for, like the other parts."""
    config = json.loads(path.read_text("utf-8"))
    if not isinstance(config, dict) or path.name == "tokenizer.json":
        return
    for node in (config, *(value for value in config.values() if isinstance(value, dict))):
        node.pop("_name_or_path", None)
        node.pop("name_or_path", None)
        if node.get("dtype") == "float16":
            node["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file())


@contextlib.contextmanager
def _narrow_warnings() -> Iterator[None]:
    """Silence what diffusers says about float16 on a CPU: the parts are only stored so."""
    logger = logging.getLogger("diffusers.pipelines.pipeline_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*float16.*")
            yield
    finally:
        logger.setLevel(level)


def load_folder(folder: Path) -> Any:
    """The pipeline in float32 on the CPU, without progress bars."""
    pipe = DiffusionPipeline.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(pipe: Any, prompt: str, seed: int, settings: Settings = SETTINGS) -> Any:
    """One clip as uint8 of shape (frames, size, size, 3)."""
    frames = pipe(
        prompt,
        height=settings.size,
        width=settings.size,
        num_frames=settings.frames,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).frames[0]
    return (frames * 255).round().astype("uint8")

"""The shipped folder: small, safe to load, free of traces, and it draws what the prompt says."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from app.demo.evaluate import evaluate
from app.demo.folder import LIMIT_BYTES, SETTINGS, folder_bytes, load_folder, sample
from app.demo.judge import judge

FOLDER = Path(__file__).parents[2] / "assets" / "demo"


@pytest.fixture(scope="module")
def pipe():
    return load_folder(FOLDER)


def test_folder_is_small_and_holds_only_safe_files() -> None:
    assert folder_bytes(FOLDER) <= LIMIT_BYTES
    suffixes = {path.suffix for path in FOLDER.glob("**/*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".md", ""}
    assert {"README.md", "LICENSE", "model_index.json"} <= {path.name for path in FOLDER.iterdir()}
    assert "license: apache-2.0" in (FOLDER / "README.md").read_text("utf-8")


def test_configs_have_no_trace_of_where_they_were_made() -> None:
    for path in FOLDER.glob("**/*.json"):
        text = path.read_text("utf-8")
        assert "_name_or_path" not in text, path
        assert not re.search(r'"(/|[A-Za-z]:\\)[\w.-]+/', text), path
        if path.name == "config.json":
            assert "auto_map" not in json.loads(text), path


@pytest.mark.parametrize(
    ("prompt", "color", "background"),
    [
        ("a red ball bouncing on a blue background", "red", "blue"),
        ("a yellow star moving to the left on a purple background", "yellow", "purple"),
    ],
)
def test_clip_has_the_colours_of_the_prompt(pipe, prompt: str, color: str, background: str) -> None:
    clip = sample(pipe, prompt, 0)
    assert clip.shape == (SETTINGS.frames, SETTINGS.size, SETTINGS.size, 3)
    verdict = judge(clip)
    assert (verdict.color, verdict.background) == (color, background)


def test_same_seed_same_frames_and_another_seed_others(pipe) -> None:
    short = SETTINGS._replace(frames=9, steps=3)
    first, second, other = (sample(pipe, "a green square rotating", seed, short) for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_template_prefix_is_what_the_pipeline_cuts_off(pipe) -> None:
    start = pipe.prompt_template_encode_start_idx
    for prompt in ("a red ball", "", "{x}", "\N{SNOWMAN} ,", "1 ball"):
        text = pipe.prompt_template.format(prompt)
        ids = pipe.tokenizer(text=[text], images=None, videos=None, return_tensors="pt")["input_ids"][0]
        assert pipe.tokenizer.tokenizer.decode(ids[start:]) == prompt + "<|im_end|>"


def test_loads_without_a_dtype_too() -> None:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(str(FOLDER), local_files_only=True)
    parts = (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2)
    assert {part.dtype for part in parts} == {torch.float32}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_held_out_prompts_come_out_right(pipe) -> None:
    found = evaluate(pipe, 100, SETTINGS, drawn=100)["accuracy"]
    assert found["color"] >= 0.95
    assert found["background"] >= 0.95
    assert found["direction"] >= 0.90
    assert found["shape"] >= 0.80

"""The laws' arithmetic, and the files that the simulator writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.coefficients import Coefficients, LayersLaw, TextLaw, TiledGrid, TokenLaw, VideoGrid
from app.config import Settings
from app.errors import PresetError
from app.presets import load_catalogue
from app.presets.catalogue import read_model_card
from app.presets.fitted import read_coefficients
from app.schema import GIB
from tests import models

ROOT = Path(__file__).resolve().parent.parent
CARD = """
id = "{id}"
title = "My model"
repo_id = "me/my-model"
license = "MIT"
pipeline = "WanPipeline"
{more}
[defaults]
height = 480
width = 832
num_frames = 81
fps = 16
num_inference_steps = 50
guidance_scale = 5.0
"""


def as_toml(content: dict[str, Any], path: str = "") -> str:
    """Plain TOML, keys with a None left out: the form of app/runtime/simulate/toml.py."""
    nested = {key: item for key, item in content.items() if _nested(item)}
    lines = [f"[{path}]"] if path else []
    lines += [f"{key} = {json.dumps(item)}" for key, item in content.items() if item is not None and key not in nested]
    for key, item in nested.items():
        below = f"{path}.{key}" if path else key
        if isinstance(item, dict):
            lines.append(as_toml(item, below))
        else:
            for entry in item:
                lines += [f"[[{below}]]", *(f"{k} = {json.dumps(v)}" for k, v in entry.items())]
    return "\n".join(lines)


def _nested(item: Any) -> bool:
    return isinstance(item, dict) or (isinstance(item, list) and bool(item) and isinstance(item[0], dict))


def write(folder: Path, name: str, found: Coefficients) -> Path:
    path = folder / "coefficients" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_toml(found.model_dump(mode="json")), "utf-8")
    return path


def test_the_laws_are_those_of_the_facts() -> None:
    lattice = models.WAN_14B.lattice
    assert lattice.tokens(480, 832, 81) == 32760
    assert models.WAN_14B.denoise.bytes(32760) / GIB == pytest.approx(3.48, rel=0.01)
    assert models.WAN_14B.denoise.bytes(lattice.tokens(720, 1280, 81)) / GIB == pytest.approx(8.02, rel=0.01)
    assert models.DECODE_HUNYUAN.bytes(512, 768, 121) / GIB == pytest.approx(21.5, rel=0.15)


def test_no_working_memory_is_below_zero() -> None:
    assert TokenLaw(constant_bytes=-5e9, bytes_per_token=1, max_error=0).bytes(10) == 0
    steep = VideoGrid(pixels=(100, 200), num_frames=(5, 9), working_bytes=((10, 500), (20, 900)), max_error=0)
    assert steep.bytes(1, 1, 5) == 0


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
def test_a_grid_is_straight_between_its_points_and_beyond_them(height: int, width: int, num_frames: int) -> None:
    def law(pixels: int, frames: int) -> int:
        return 7 + 3 * pixels + 20 * frames + pixels * frames

    places, frames = (100, 400, 900), (9, 17, 33)
    rows = tuple(tuple(law(p, n) for p in places) for n in frames)
    found = VideoGrid(pixels=places, num_frames=frames, working_bytes=rows, max_error=0)
    assert found.bytes(height, width, num_frames) == law(height * width, max(num_frames, 9))


def test_a_grid_follows_the_bends_of_its_points() -> None:
    rows = ((100, 200, 1000), (100, 200, 1000))
    bent = VideoGrid(pixels=(10, 20, 30), num_frames=(5, 9), working_bytes=rows, max_error=0)
    assert [bent.bytes(1, p, 5) for p in (10, 15, 20, 25, 30, 40)] == [100, 150, 200, 600, 1000, 1800]


@given(st.integers(100, 900), st.integers(100, 900))
def test_a_picture_smaller_than_a_tile_takes_the_work_on_less_than_a_tile(height: int, width: int) -> None:
    """Half of the default size is less than a tile of 512 pixels, one and a half times of it is more."""
    sizes = ((256, 352), (512, 704), (816, 1136))
    tiles = tuple(min(h, 512) * min(w, 512) for h, w in sizes)
    found = TiledGrid(
        pixels=tuple(h * w for h, w in sizes), num_frames=(9, 17), tile_height=512, tile_width=512, tile_pixels=tiles,
        working_bytes=tuple(tuple(n * 900 * tile for tile in tiles) for n in (9, 17)), max_error=0,
    )  # fmt: skip
    assert found.bytes(height, width, 13) == pytest.approx(13 * 900 * min(height, 512) * min(width, 512), rel=1e-9)


@pytest.mark.parametrize(
    ("pixels", "frames", "rows"),
    [
        ((1, 2), (5, 9), ((1, 2),)),
        ((1, 2), (5, 9), ((1, 2), (3,))),
        ((2, 1), (5, 9), ((1, 2), (3, 4))),
        ((1, 2), (9, 9), ((1, 2), (3, 4))),
        ((1,), (5, 9), ((1,), (3,))),
    ],
)
def test_a_grid_must_be_whole_and_rise(
    pixels: tuple[int, ...], frames: tuple[int, ...], rows: tuple[tuple[int, ...], ...]
) -> None:
    with pytest.raises(ValidationError):
        VideoGrid(pixels=pixels, num_frames=frames, working_bytes=rows, max_error=0)


def test_what_layers_bring_lies_on_lines_from_nothing_to_the_largest_work() -> None:
    law = LayersLaw(working_bytes=(100, 300), brought_bytes=(60, 20))
    assert [law.bytes(working, 160) for working in (0, 50, 100, 200, 300, 9000)] == [160, 110, 60, 40, 20, 20]
    for working, brought in (((1, 2), (5,)), ((2, 1), (5, 6)), ((), ())):
        with pytest.raises(ValidationError):
            LayersLaw(working_bytes=working, brought_bytes=brought)


@given(st.integers(0, 2000))
def test_a_text_law_is_straight_between_its_points_and_flat_outside(tokens: int) -> None:
    law = TextLaw(tokens=(128, 256, 512), working_bytes=(100, 300, 1100))
    expected = 100 if tokens <= 128 else 1100 if tokens >= 512 else None
    if expected is None:
        expected = 100 + (tokens - 128) * 200 / 128 if tokens <= 256 else 300 + (tokens - 256) * 800 / 256
    assert law.bytes(tokens) == pytest.approx(expected, abs=0.5)


def test_text_points_must_pair_and_rise() -> None:
    for tokens, working in (((1, 2), (5,)), ((2, 1), (5, 6)), ((), ())):
        with pytest.raises(ValidationError):
            TextLaw(tokens=tokens, working_bytes=working)


@pytest.mark.parametrize("found", [models.KANDINSKY_LITE, models.WAN_14B, models.COGVIDEOX_5B])
def test_a_file_reads_back_to_what_was_written(tmp_path: Path, found: Coefficients) -> None:
    assert read_coefficients(write(tmp_path, "model", found)) == found


def test_a_card_takes_the_file_that_it_names_or_that_is_named_like_it(tmp_path: Path) -> None:
    write(tmp_path, "wan-like", models.WAN_14B)
    write(tmp_path, "lite", models.KANDINSKY_LITE)
    (tmp_path / "mine.toml").write_text(CARD.format(id="mine", more='coefficients = "wan-like"'), "utf-8")
    (tmp_path / "lite.toml").write_text(CARD.format(id="lite", more=""), "utf-8")
    (tmp_path / "other.toml").write_text(CARD.format(id="other", more=""), "utf-8")
    assert read_model_card(tmp_path / "mine.toml").coefficients == models.WAN_14B
    assert read_model_card(tmp_path / "lite.toml").coefficients == models.KANDINSKY_LITE
    assert read_model_card(tmp_path / "other.toml").coefficients is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('coefficients = "wan-lik"', r'mine\.toml:7: there are no coefficients "wan-lik"; did you mean "wan-like"'),
        ("coefficients = 3", r"mine\.toml:7: coefficients: 3 does not fit"),
        ('coefficients = "../secret"', r"mine\.toml:7: coefficients: '\.\./secret' does not fit"),
    ],
)
def test_a_name_that_is_nowhere_is_told_with_file_and_line(tmp_path: Path, more: str, words: str) -> None:
    write(tmp_path, "wan-like", models.WAN_14B)
    path = tmp_path / "mine.toml"
    path.write_text(CARD.format(id="mine", more=more), "utf-8")
    with pytest.raises(PresetError, match=words):
        read_model_card(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('model = "from the facts"', 'modle = "x"', r':1: unknown key "modle"; .*simulate fit'),
        ("answer_bytes = ", "answer_bytes = -", r":4: answer_bytes: .*greater than or equal to 0"),
        ("sure = true", 'sure = "yes"', r":3: sure: "),
        ("max_error = 0.012", "max_error = [", r"is not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_told_with_file_and_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = write(tmp_path, "wan", models.WAN_14B)
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(PresetError, match=r"wan\.toml.*" + words):
        read_coefficients(path)


def test_a_broken_file_of_a_person_leaves_only_their_card_out(settings: Settings) -> None:
    folder = settings.user_presets / "models"
    path = write(folder, "mine", models.WAN_14B)
    path.write_text("model = 3\n", "utf-8")
    (folder / "mine.toml").write_text(CARD.format(id="mine", more=""), "utf-8")
    catalogue = load_catalogue(settings)
    assert "mine" not in catalogue.models
    assert "built-in" in catalogue.models
    assert "mine.toml:1: " in catalogue.problems[0]


def test_cards_that_ship_name_models_that_the_simulator_knows() -> None:
    known = ROOT / "app" / "runtime" / "simulate" / "configs" / "models.toml"
    if not known.is_file():
        pytest.skip("the simulator is not in this checkout")
    text = known.read_text("utf-8")
    for path in sorted((ROOT / "presets" / "models").glob("*.toml")):
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("coefficients = "):
                name = line.split('"')[1]
                assert f"[{name}]" in text or f'["{name}"]' in text, f"{path.name}: {name}"


def test_everything_that_the_simulator_wrote_loads(settings: Settings) -> None:
    written = list((ROOT / "presets" / "models" / "coefficients").glob("*.toml"))
    for path in written:
        found = read_coefficients(path)
        assert found.versions
        assert found.model == path.stem
    used = {card.coefficients.model for card in load_catalogue(settings).models.values() if card.coefficients}
    assert used <= {path.stem for path in written}


def test_evaluation_needs_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, app.coefficients, app.estimate, app.planner\n"
        "found = sorted({'numpy', 'torch'} & set(sys.modules))\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

"""The catalogue: units, errors with file and line, folders of diffusers and what is refused about them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from app.config import Settings, bundled
from app.errors import InvalidRequest, ModelNotUsable, NotFound, PresetError
from app.presets import (
    Catalogue,
    cached_snapshot,
    card_folder,
    card_for_folder,
    card_for_repo,
    find_card,
    find_hardware,
    format_bytes,
    load_catalogue,
    parse_bytes,
    parse_seconds,
    read_header,
    tensor_counts,
    weight_bytes,
)
from app.presets.catalogue import read_hardware_preset, read_model_card
from app.presets.families import FAMILIES
from app.presets.files import key_lines
from app.schema import GIB, ModelCard

unhurried = hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Whoever shares the machine must not fail a test."""

CARD = """\
id = "mine"
title = "Mine"
repo_id = "me/mine"
license = "MIT"
pipeline = "WanPipeline"
timeout = "2 h"

[defaults]
height = 480
width = 832
num_frames = 81
fps = 16
num_inference_steps = 50
guidance_scale = 5

[lattice]
spatial_multiple = 16
temporal_multiple = 4
trained_sizes = [
  "832x480",
  "480x832",
]
"""

# ------------------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8 GiB", 8 * GIB),
        ("7.5GiB", 15 * GIB // 2),
        (" 512 MiB ", 512 * 1024**2),
        ("0 B", 0),
        ("1 kib", 1024),
        ("2 TiB", 2048 * GIB),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@unhurried
@given(
    st.integers(0, 9999), st.integers(0, 999), st.sampled_from(["B", "KiB", "MiB", "GiB"]), st.sampled_from(["", " "])
)
def test_sizes_are_exact(whole: int, thousandths: int, unit: str, space: str) -> None:
    factor = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": GIB}[unit]
    assert parse_bytes(f"{whole}.{thousandths:03}{space}{unit}") == int(
        Fraction(whole * 1000 + thousandths, 1000) * factor
    )


@unhurried
@given(st.text("0123456789.-+eE _GgMmKkTtiIbBsh\n", max_size=12))
def test_any_text_is_a_size_or_told(text: str) -> None:
    try:
        assert 0 <= parse_bytes(text) < 2**63
    except ValueError as error:
        assert "write" in str(error)  # noqa: PT017 - the property is "a size or a message"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8 GB", 'two meanings; write "8 GiB" .* or "7.451 GiB" for exactly 8 decimal GB'),
        ("500mb", '"500 MiB"'),
        ("8", "has no unit"),
        ("8 G", 'unknown unit "g"'),
        ("-1 GiB", 'negative; write a size of 0 or more: "1 GiB"'),
        ("eight GiB", "not a number"),
        ("1e3 GiB", "not a number"),
        ("", "not a number"),
        ("9999999999 TiB", "more than any machine"),
    ],
)
def test_sizes_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_bytes(text)


def test_durations() -> None:
    assert (parse_seconds("120 s"), parse_seconds("2min"), parse_seconds("1.5 h")) == (120.0, 120.0, 5400.0)
    for text in ("120", "2 m", "-1 s", "soon"):
        with pytest.raises(ValueError, match="write"):
            parse_seconds(text)


@unhurried
@given(st.integers(0, 2**50))
def test_shown_sizes_are_near(value: int) -> None:
    assert abs(parse_bytes(format_bytes(value)) - value) <= max(value // 20, 1024**2)


# ------------------------------------------------------------------------------------------------ what ships with it


@pytest.fixture
def catalogue(settings: Settings) -> Catalogue:
    return load_catalogue(settings)


def test_everything_that_ships_loads(catalogue: Catalogue) -> None:
    assert catalogue.problems == ()
    assert next(iter(catalogue.models)) == "built-in"
    assert list(catalogue.hardware)[:2] == ["auto", "cpu"]
    assert [name for name in catalogue.hardware if name.startswith("vram")] == [
        f"vram-{size}" for size in (4, 6, 8, 12, 16, 24)
    ]
    assert {"low-ram", "two-cards", "shared-desktop"} <= set(catalogue.hardware)
    assert catalogue.hardware["vram-8"].vram_limit_bytes == 8 * GIB
    assert catalogue.models["built-in"].folder == bundled("assets", "demo")
    assert catalogue.models["built-in"].timeout_seconds == 120


def test_every_card_runs_on_a_pipeline_that_is_known(catalogue: Catalogue) -> None:
    for card in catalogue.models.values():
        family = FAMILIES[card.pipeline]
        assert set(card.tasks) <= set(family.tasks), card.id
        assert card.lattice.spatial_multiple % family.checked_multiple == 0, card.id


def test_every_pipeline_is_one_of_the_installed_library() -> None:
    import importlib.util

    spec = importlib.util.find_spec("diffusers")
    assert spec is not None
    assert spec.origin is not None
    listed = Path(spec.origin).read_text("utf-8")
    assert [name for name in FAMILIES if f'"{name}"' not in listed] == []


@pytest.mark.parametrize("name", ["models", "hardware"])
def test_each_file_is_explained(catalogue: Catalogue, name: str) -> None:
    for value in getattr(catalogue, name).values():
        assert len(value.title) > 3
        assert value.summary.endswith("."), value.id


# ------------------------------------------------------------------------------------------------------ own presets


@pytest.fixture
def own(settings: Settings) -> Callable[..., Path]:
    def write(text: str, name: str = "mine", kind: str = "models") -> Path:
        path = settings.user_presets / kind / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    return write


def test_own_files_are_added(settings: Settings, own: Callable[..., Path]) -> None:
    own(CARD)
    own('id = "rig"\ntitle = "Rig"\nsummary = "x"\nvram_limit = "10.5 GiB"\ntimeout = "90 min"', "rig", "hardware")
    found = load_catalogue(settings)
    assert found.problems == ()
    assert found.models["mine"].lattice.trained_sizes == ("832x480", "480x832")
    assert found.models["mine"].timeout_seconds == 7200
    assert found.hardware["rig"].vram_limit_bytes == 21 * GIB // 2
    assert found.hardware["rig"].timeout_seconds == 5400


def test_one_broken_own_file_leaves_the_rest(settings: Settings, own: Callable[..., Path]) -> None:
    own(CARD)
    broken = own("id = ", "broken")
    own(CARD.replace('"mine"', '"wan-2.1-t2v-14b"'), "wan-2.1-t2v-14b")
    found = load_catalogue(settings)
    assert "mine" in found.models
    assert found.models["wan-2.1-t2v-14b"].repo_id == "Wan-AI/Wan2.1-T2V-14B-Diffusers"
    assert len(found.problems) == 2
    assert found.problems[0].startswith(f"{broken}:1: is not valid TOML")
    assert 'wan-2.1-t2v-14b.toml:1: the id "wan-2.1-t2v-14b" is taken already' in found.problems[1]


def test_a_broken_shipped_file_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Settings) -> None:
    shipped = tmp_path / "shipped"
    for kind in ("models", "hardware"):
        (shipped / kind).mkdir(parents=True)
    monkeypatch.setattr("app.presets.catalogue.bundled", lambda *parts: shipped)
    with pytest.raises(PresetError, match=r"built-in\.toml is missing"):
        load_catalogue(settings)
    (shipped / "models" / "mine.toml").write_text(CARD.replace("fps = 16", "fps = 0"))
    with pytest.raises(PresetError, match=r"mine\.toml:12: fps 0 is outside 1 to 240"):
        load_catalogue(settings)
    (shipped / "hardware").rmdir()
    (shipped / "hardware").write_text("a file")
    (shipped / "models" / "mine.toml").unlink()
    with pytest.raises(PresetError, match="hardware:1: cannot be listed"):
        load_catalogue(settings)


def test_a_folder_of_presets_that_cannot_be_listed(settings: Settings) -> None:
    settings.user_presets.mkdir(parents=True)
    (settings.user_presets / "models").write_text("a file")
    found = load_catalogue(settings)
    assert "built-in" in found.models
    assert "models:1: cannot be listed" in found.problems[0]


def test_a_folder_of_a_card_finds_the_card(settings: Settings, own: Callable[..., Path], folder: Path) -> None:
    own(CARD.replace('repo_id = "me/mine"', f"folder = '{folder}'"))
    found = find_card(load_catalogue(settings), str(folder))
    assert (found.id, found.title) == ("mine", "Mine")


def test_a_relative_folder_counts_from_the_file(own: Callable[..., Path]) -> None:
    card = read_model_card(own(CARD.replace('repo_id = "me/mine"', 'folder = "../weights"')))
    assert card.folder is not None
    assert card.folder.is_absolute()
    assert card.folder.resolve().name == "weights"


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (('title = "Mine"', 'titel = "Mine"'), 2, 'unknown key "titel"; did you mean "title"?'),
        (('title = "Mine"\n', ""), 1, 'the key "title" is missing; add title = ...'),
        (('timeout = "2 h"', 'timeout = "2"'), 6, 'timeout: "2" has no unit'),
        (('timeout = "2 h"', "timeout = 7200"), 6, '7200 has no unit; write text in quotes: timeout = "120 s"'),
        (('timeout = "2 h"', 'timeout = "-2 h"'), 6, "negative"),
        (('timeout = "2 h"', 'timeout = "0 s"'), 6, "every run would be ended at once"),
        (('timeout = "2 h"', "timeout_seconds = 7200"), 6, 'write it without that ending and with a unit: timeout = "'),
        (("fps = 16", "fsp = 16"), 12, 'unknown key "fsp"; did you mean "fps"?'),
        (("fps = 16\n", ""), 8, 'the key "defaults.fps" is missing'),
        (("height = 480", 'height = "480"'), 9, "write a whole number without quotes"),
        (("height = 480", "height = -480"), 9, "is outside 64 to 4096"),
        (("height = 480", "height = 490"), 9, "no multiple of spatial_multiple 16; write 496"),
        (("height = 480", "height = true"), 9, "write a whole number without quotes"),
        (("num_frames = 81", "num_frames = 80"), 11, "plus 1; write 81"),
        (('  "480x832",', '  "480X832",'), 19, '"480X832" is no size of this model'),
        (("[lattice]", "[lattise]"), 16, 'unknown key "lattise"; did you mean "lattice"?'),
        (('id = "mine"', 'id = "yours"'), 1, 'write id = "mine" or rename the file yours.toml'),
        (('id = "mine"', 'id = "Mine!"'), 1, "write small letters"),
        (('repo_id = "me/mine"\n', ""), 1, "either repo_id or folder"),
        (('repo_id = "me/mine"', 'repo_id = "me/mine"\nfolder = "x"'), 3, "either repo_id or folder"),
        (('repo_id = "me/mine"', 'repo_id = "mine"'), 3, 'write "owner/name"'),
        (('pipeline = "WanPipeline"', 'pipeline = "wan"'), 5, "no pipeline class"),
        (("fps = 16", "fps = 16\nfps = 17"), 13, "is not valid TOML: cannot overwrite a value"),
        (("fps = 16", "fps = = 16"), 12, "is not valid TOML: invalid value"),
    ],
)
def test_a_mistake_names_file_line_and_fix(
    own: Callable[..., Path], change: tuple[str, str], line: int, said: str
) -> None:
    assert change[0] in CARD
    path = own(CARD.replace(*change))
    with pytest.raises(PresetError) as caught:
        read_model_card(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value), "one mistake, one line"


def test_every_mistake_is_told_in_the_order_of_the_lines(own: Callable[..., Path]) -> None:
    path = own(
        'summary = 3\nid = "rig"\nvram_limit = "8 GB"\nvram_keep_free = "-1 GiB"\ndevise = "gpu"\n', "rig", "hardware"
    )
    with pytest.raises(PresetError) as caught:
        read_hardware_preset(path)
    lines = [re.sub(r".*?toml:(\d+): (\w+).*", r"\1 \2", line) for line in str(caught.value).splitlines()]
    assert lines == ["1 summary", "1 the", "3 vram_limit", "4 vram_keep_free", "5 unknown"]


def test_a_file_that_is_no_text_or_not_readable(own: Callable[..., Path]) -> None:
    path = own(CARD)
    path.write_bytes(CARD.replace("Mine", "M\xefne").encode("latin-1"))
    with pytest.raises(PresetError, match=r"mine\.toml:2: is not UTF-8"):
        read_model_card(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(PresetError, match=r"mine\.toml:1: cannot be read"):
        read_model_card(path)


def test_a_byte_order_mark_is_no_mistake(own: Callable[..., Path]) -> None:
    path = own(CARD)
    path.write_bytes(CARD.encode("utf-8-sig"))
    assert read_model_card(path).id == "mine"


keys = st.text("abcdefgh", min_size=1, max_size=4)
statements = st.one_of(
    st.sampled_from(
        ["1", '"x = 1 # no"', "true", "[1, 2]", "{ in = 1 }", "'''a\n[not.a.table]\nb = 2'''", "[\n  1, # c\n\n  2,\n]"]
    ),
)


@unhurried
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["", "# [x]", "\n"]), statements), min_size=1, max_size=8))
def test_lines_of_keys_are_those_they_were_written_on(parts: list[tuple[bool, str, str]]) -> None:
    """Build a file and remember where each key went, whatever stands between."""
    text, expected, table = "", {}, ()
    for number, (new_table, between, value) in enumerate(parts):
        text += between + "\n"
        if new_table:
            table = (f"table{number}",)
            expected[table] = text.count("\n") + 1
            text += f"[table{number}]\n"
        expected[(*table, f"key{number}")] = text.count("\n") + 1
        text += f"key{number} = {value}\n"
    found = key_lines(text)
    assert {where: found[where] for where in expected} == expected


# -------------------------------------------------------------------------------------------------- diffusers folders

INDEX: dict[str, Any] = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.42.1",
    "boundary_ratio": None,
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
}


def build(folder: Path, index: dict[str, Any] | None = None) -> Path:
    """A folder as `save_pretrained` writes it, with a few numbers for weights."""
    folder.mkdir(parents=True)
    described = index if index is not None else INDEX
    (folder / "model_index.json").write_text(json.dumps(described))
    configs: dict[str, dict[str, Any]] = {
        "transformer": {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2]},
        "vae": {"_class_name": "AutoencoderKLWan", "scale_factor_spatial": 16, "scale_factor_temporal": 4},
        "text_encoder": {"model_type": "umt5"},
    }
    for component in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler"):
        (folder / component).mkdir()
        if component in configs:
            (folder / component / "config.json").write_text(json.dumps(configs[component]))
    save_file({"a": np.zeros((4, 8), np.float16)}, folder / "transformer/diffusion_pytorch_model.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, folder / "vae/diffusion_pytorch_model.safetensors")
    save_file(
        {"c": np.zeros((2, 2), np.float32), "d": np.zeros(5, np.int64)}, folder / "text_encoder/model.safetensors"
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(tmp_path / "Mon modèle")


def test_a_folder_becomes_a_card(folder: Path, catalogue: Catalogue) -> None:
    card = find_card(catalogue, str(folder))
    assert (card.pipeline, card.folder, card.id) == ("WanPipeline", folder, "folder-mon-mod-le")
    assert card.lattice.spatial_multiple == 32  # 16 of the VAE times patches of 2
    assert (card.defaults.height, card.defaults.width, card.defaults.num_frames) == (704, 1280, 121)
    config = {"_class_name": "AutoencoderKLWan"}  # what is missing there are the library's defaults: 8x8, 4
    (folder / "vae/config.json").write_text(json.dumps(config))
    card = find_card(catalogue, str(folder))
    assert card.lattice.spatial_multiple == 16
    assert (card.defaults.height, card.defaults.width, card.defaults.num_frames) == (480, 832, 81)
    assert weight_bytes(card) == {"transformer": 64, "vae": 12, "text_encoder": 56}
    assert tensor_counts(card) == {"transformer": {"F16": 32}, "vae": {"F32": 3}, "text_encoder": {"F32": 4, "I64": 5}}


def test_only_components_are_counted(folder: Path) -> None:
    """Not the folders beside them, and of a folder what is there."""
    card = card_for_folder(folder)
    (folder / "older").mkdir()
    save_file({"z": np.zeros(9, np.float32)}, folder / "older/model.safetensors")
    assert weight_bytes(card) == {"transformer": 64, "vae": 12, "text_encoder": 56}
    (folder / "vae/diffusion_pytorch_model.safetensors").unlink()
    assert weight_bytes(card) == {"transformer": 64, "text_encoder": 56}
    (folder / "model_index.json").write_text("[]")
    with pytest.raises(ModelNotUsable, match="cannot be read"):
        weight_bytes(card)


def test_a_relative_path_is_a_folder_too(folder: Path, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert find_card(catalogue, folder.name).folder == folder
    assert find_card(catalogue, f"./{folder.name}").folder == folder


def test_cogvideox_generations_are_told_apart(tmp_path: Path) -> None:
    index = {**INDEX, "_class_name": "CogVideoXPipeline"}
    for name, patch_size_t, frames, multiple in (("old", None, 49, 8), ("new", 2, 81, 4)):
        folder = build(tmp_path / name, index)
        vae = {"_class_name": "AutoencoderKLCogVideoX", "temporal_compression_ratio": 4}
        (folder / "vae/config.json").write_text(json.dumps(vae))
        (folder / "transformer/config.json").write_text(json.dumps({"patch_size": 2, "patch_size_t": patch_size_t}))
        card = card_for_folder(folder)
        assert (card.defaults.num_frames, card.lattice.temporal_multiple) == (frames, multiple)


@unhurried
@given(
    pipeline=st.sampled_from(sorted(FAMILIES)),
    spatial=st.sampled_from([4, 8, 16, 32]),
    temporal=st.sampled_from([1, 4, 6, 8]),
    patch=st.sampled_from([1, 2, [1, 2, 2], [1, 1, 1]]),
)
def test_derived_defaults_lie_on_the_derived_lattice(pipeline: str, spatial: int, temporal: int, patch: Any) -> None:
    from app.presets.catalogue import _card_problems  # the checks that a card of the catalogue must pass
    from app.presets.families import derive

    vae = {"spatial_compression_ratio": spatial, "temporal_compression_ratio": temporal}
    defaults, lattice = derive(FAMILIES[pipeline], vae, {"patch_size": patch})
    card = ModelCard(
        id="x", title="x", repo_id="a/b", license="", pipeline=pipeline, defaults=defaults, lattice=lattice
    )
    assert _card_problems(card) == []


def spoil_index(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "model_index.json").write_text(json.dumps({**INDEX, **changes})) and None


def replace_weights(component: str, name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for file in (folder / component).glob("*.safetensors"):
            file.unlink()
        (folder / component / name).write_bytes(b"x")

    return change


def cut_short(folder: Path) -> None:
    path = folder / "vae/diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def write(path: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_text(text) and None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (replace_weights("vae", "diffusion_pytorch_model.bin"), "pickle files can run code .* save_pretrained"),
        (replace_weights("text_encoder", "pytorch_model.pt"), "pickle files can run code"),
        (
            replace_weights("vae", "diffusion_pytorch_model.fp16.safetensors"),
            r"Rename that file to diffusion_pytorch_model\.s",
        ),
        (replace_weights("vae", "notes.txt"), r"vae has no \.safetensors file"),
        (spoil_index(_class_name=["pipeline", "MyPipeline"]), "own pipeline code"),
        (spoil_index(_class_name="StableDiffusionPipeline"), "cannot run; known are: "),
        (spoil_index(_class_name="WanPipelin"), 'did you mean "WanPipeline"'),
        (spoil_index(vae=["my_module", "MyVAE"]), "brings code of its own"),
        (spoil_index(vae=["os", "system"]), "brings code of its own"),
        (spoil_index(vae=["../models", "ModelMixin"]), "brings code of its own"),
        (spoil_index(vae=["diffusers"]), "not one of diffusers"),
        (spoil_index(**{"../vae": ["diffusers", "AutoencoderKLWan"]}), "not one of diffusers"),
        (cut_short, "vae.* is cut short: 5 of its 12 bytes of weights are missing"),
        (spoil_index(image_encoder=["transformers", "CLIPVisionModel"]), "the folder image_encoder is missing"),
        (write("vae/diffusers.py", "print()"), "brings code of its own"),
        (write("text_encoder/config.json", '{"auto_map": {"AutoModel": "x.Y"}}'), "brings code of its own"),
        (write("vae/config.json", "{"), "is not JSON"),
        (write("model_index.json", "[]"), "does not hold a JSON object"),
        (lambda folder: (folder / "vae/config.json").unlink(), r"vae/config\.json is missing"),
        (lambda folder: (folder / "model_index.json").unlink(), r"has no model_index\.json"),
    ],
)
def test_what_is_refused_about_a_folder(folder: Path, spoil: Callable[[Path], None], said: str) -> None:
    card_for_folder(folder)
    spoil(folder)
    with pytest.raises(ModelNotUsable, match=said):
        card_for_folder(folder)


def test_a_pickle_beside_safetensors_does_no_harm(folder: Path) -> None:
    (folder / "vae/diffusion_pytorch_model.bin").write_bytes(b"x")
    assert card_for_folder(folder).pipeline == "WanPipeline"


def test_models_beside_a_pipeline_are_known(tmp_path: Path) -> None:
    index = {**INDEX, "_class_name": "LTX2Pipeline", "vocoder": ["ltx2", "LTX2Vocoder"]}
    folder = build(tmp_path / "ltx", index)
    (folder / "vocoder").mkdir()
    (folder / "vocoder/config.json").write_text("{}")
    save_file({"v": np.zeros(1, np.float32)}, folder / "vocoder/diffusion_pytorch_model.safetensors")
    assert card_for_folder(folder).pipeline == "LTX2Pipeline"


def test_a_file_or_the_folder_above_is_told(folder: Path) -> None:
    with pytest.raises(ModelNotUsable, match="is a file"):
        card_for_folder(folder / "model_index.json")
    with pytest.raises(ModelNotUsable, match=f"Did you mean {folder}"):
        card_for_folder(folder.parent)


# ---------------------------------------------------------------------------------------------------------- weights

arrays = st.builds(
    np.zeros,
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["float16", "float32", "int64", "bool", "uint8"]),
)


@unhurried
@given(
    tensors=st.dictionaries(st.text("abc.", min_size=1, max_size=5), arrays, min_size=1, max_size=5),
    cut=st.integers(1, 400),
)
def test_headers_are_read_as_the_library_writes_them_and_any_cut_shows(
    tensors: dict[str, np.ndarray[Any, Any]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(tensors, path)
    header = read_header(path)
    assert {name: (tuple(t["shape"]), t["data_offsets"][1] - t["data_offsets"][0]) for name, t in header.items()} == {
        name: (array.shape, array.nbytes) for name, array in tensors.items()
    }
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    with pytest.raises(ModelNotUsable, match=r"cut short|not a safetensors"):
        read_header(path)
    path.write_bytes(whole + b"0")
    with pytest.raises(ModelNotUsable, match="1 bytes too many"):
        read_header(path)


def tensor_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ([], b"", "holds no tensors"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "wrong length"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678", "wrong length or place"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "does not fit"),
        ({"a": 3}, b"", "does not fit"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]}}, b"", "does not fit"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, data: bytes, said: str) -> None:
    with pytest.raises(ModelNotUsable, match=said):
        read_header(tensor_file(tmp_path / "x.safetensors", header, data))


def test_a_pickle_named_safetensors_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x80\x04\x95" + b"." * 50)
    with pytest.raises(ModelNotUsable, match="cut short"):
        read_header(path)
    with pytest.raises(ModelNotUsable, match="not JSON"):
        read_header(tensor_file(path, "{", length=1))
    with pytest.raises(ModelNotUsable, match="cannot be read"):
        read_header(tmp_path / "nothing.safetensors")
    with tensor_file(path, {}, length=100_000_001).open("ab") as file:
        file.truncate(100_000_100)  # a hole: takes no room on the disk
    with pytest.raises(ModelNotUsable, match="its header would be 100000001 bytes"):
        read_header(path)


def test_shards_must_all_be_there(folder: Path) -> None:
    place = folder / "transformer"
    (place / "diffusion_pytorch_model.safetensors").rename(place / "part-1.safetensors")
    index = place / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "z": "part-1.safetensors"}}))
    assert weight_bytes(card_for_folder(folder)) == {"transformer": 64, "vae": 12, "text_encoder": 56}
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    with pytest.raises(ModelNotUsable, match=r"part-2\.safetensors is missing"):
        card_for_folder(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../vae/diffusion_pytorch_model.safetensors"}}))
    with pytest.raises(ModelNotUsable, match="is missing"):
        card_for_folder(folder)
    index.write_text("[]")
    with pytest.raises(ModelNotUsable, match="cannot be read"):
        card_for_folder(folder)


# ------------------------------------------------------------------------------------------------------------ the Hub


def cache(monkeypatch: pytest.MonkeyPatch, hub: Path, repo: str, index: dict[str, Any] | None = None) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    place = hub / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("c0ffee")
    return build(place / "snapshots/c0ffee", index)


def test_a_cached_model_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, catalogue: Catalogue) -> None:
    snapshot = cache(monkeypatch, tmp_path / "hub", "me/video")
    card = find_card(catalogue, "me/video")
    assert (card.repo_id, card.folder, card.id) == ("me/video", None, "hub-me-video")
    assert card_folder(card) == snapshot
    assert weight_bytes(card) == {"transformer": 64, "vae": 12, "text_encoder": 56}
    assert cached_snapshot("me/other") is None
    (snapshot / "vae/diffusion_pytorch_model.safetensors").rename(snapshot / "vae/elsewhere")
    assert weight_bytes(card) is None, "only a part was downloaded"
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (snapshot / "vae/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(card) is None


def test_a_cached_model_with_code_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache(monkeypatch, tmp_path / "hub", "me/evil", {**INDEX, "vae": ["evil", "VAE"]})
    with pytest.raises(ModelNotUsable, match="brings code of its own"):
        card_for_repo("me/evil")


def test_offline_and_not_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, catalogue: Catalogue) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotUsable, match="neither a folder here"):
        find_card(catalogue, "nobody/nothing-of-the-kind")
    assert weight_bytes(catalogue.models["mochi-1"]) is None


# -------------------------------------------------------------------------------------------------------------- names


def test_a_hub_id_of_the_catalogue_finds_its_card(catalogue: Catalogue) -> None:
    assert find_card(catalogue, "genmo/Mochi-1-preview") is catalogue.models["mochi-1"]
    assert find_card(catalogue, " mochi-1 ") is catalogue.models["mochi-1"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("built-n", 'did you mean "built-in"'),
        ("wan-2.1-t2v-1.3", 'did you mean "wan-2.1-t2v-1.3b"'),
        ("", "There is no model"),
        ("./nothing", "no model folder"),
        ("/nowhere/at all", "no model folder"),
        ("a/b/c", "no model folder"),
        ("~/nothing here", "no model folder"),
        (r"C:\models\x", "no model folder"),
    ],
)
def test_names_that_nothing_has(catalogue: Catalogue, name: str, said: str) -> None:
    with pytest.raises(NotFound, match=re.escape(said)):
        find_card(catalogue, name)


def test_hardware_by_name(catalogue: Catalogue) -> None:
    assert find_hardware(catalogue, "vram-12").vram_limit_bytes == 12 * GIB
    with pytest.raises(InvalidRequest, match='did you mean "vram-12"') as caught:
        find_hardware(catalogue, "vram12")
    assert caught.value.field == "preset"


def test_the_examples_of_the_readme_load(settings: Settings) -> None:
    """presets/README.md tells how to write one's own; its two blocks name their files in the first comment."""
    blocks = re.findall(
        r"```toml\n# (\w+/my-\w+\.toml).*?\n(.*?)```", bundled("presets", "README.md").read_text("utf-8"), re.DOTALL
    )
    assert len(blocks) == 2
    for name, text in blocks:
        path = settings.user_presets / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    found = load_catalogue(settings)
    assert found.problems == ()
    assert found.models["my-model"].defaults.negative_prompt == "blurry"
    assert found.hardware["my-rig"].vram_keep_free_bytes == 2 * GIB

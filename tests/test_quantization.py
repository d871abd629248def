"""Quantized models beforehand: what a card names, what lies on the disk, what the planner makes of it. No torch."""

from __future__ import annotations

import json
import re
import struct
import tomllib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES

from app import quantization
from app.config import Settings
from app.errors import ModelNotUsable, PlanError, PresetError
from app.planner import plan
from app.planner.table import how_words
from app.presets import as_stored, find_card, load_catalogue, tensor_counts
from app.presets.catalogue import read_hardware_preset, read_model_card
from app.presets.families import FAMILIES
from app.presets.gguf import PLAIN, TYPES, read_gguf
from app.presets.stored import bits_by_name
from app.quantization import Stored, install_line, method_of, missing, packed_bytes, unsupported
from app.schema import GIB, HardwarePreset, ModelCard, Plan, Strategy
from app.workload import sizes_of
from tests import values
from tests.test_planner import machine, request_for

ALL = {"bitsandbytes": "0.50.2", "torchao": "0.18.0", "gguf": "0.19.0"}
CARD = """
id = "mine"
title = "Mine"
folder = "model"
license = "MIT"
pipeline = "WanPipeline"

[defaults]
height = 480
width = 832
num_frames = 81
fps = 16
num_inference_steps = 50
guidance_scale = 5.0

[gguf]
transformer = "wan-Q8_0.gguf"
"""


def tiny_gguf(path: Path, kind: Any = gguf.GGMLQuantizationType.Q8_0) -> Path:
    writer = gguf.GGUFWriter(str(path), "wan")
    writer.add_array("general.tags", ["a", "b"])
    writer.add_float32("general.some", 1.5)
    matrix = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    writer.add_tensor("blocks.0.ffn.0.weight", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("blocks.0.ffn.0.bias", np.zeros(4, np.float32))
    writer.add_tensor("patch.weight", np.zeros((2, 3, 5), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def wan(settings: Settings) -> ModelCard:
    """The 14 B model of the catalogue, with the sizes that the simulator found."""
    return find_card(load_catalogue(settings), "wan-2.1-t2v-14b")


def planned(
    card: ModelCard, vram: float, preset: HardwarePreset, packages: Any = ALL, ram: float = 32, **gpu: Any
) -> Plan:
    hardware = machine(*([vram] if vram else []), ram=ram, **gpu).model_copy(update={"packages": packages})
    return plan(hardware, card, request_for(card), preset, {})


def held(found: Plan) -> dict[str, str | None]:
    return {one.component: one.quantization for one in found.placements}


# -------------------------------------------------------------------------------------------------------- what is known


def test_the_types_are_those_that_diffusers_unpacks() -> None:
    sizes = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert all(sizes[number] == known for number, known in TYPES.items())
    assert {name for name, _, _ in TYPES.values()} == {kind.name for kind in SUPPORTED_GGUF_QUANT_TYPES} | set(PLAIN)


def test_the_pipelines_are_those_whose_transformer_diffusers_reads_from_a_file() -> None:
    transformers = {
        "Wan": "WanTransformer3DModel", "LTX2": "LTX2VideoTransformer3DModel", "LTX": "LTXVideoTransformer3DModel",
        "HunyuanVideo15": "HunyuanVideo15Transformer3DModel", "HunyuanVideo": "HunyuanVideoTransformer3DModel",
        "Mochi": "MochiTransformer3DModel", "CogVideoX": "CogVideoXTransformer3DModel",
        "Kandinsky5": "Kandinsky5Transformer3DModel", "Kandinsky6": "Kandinsky6Transformer3DModel",
        "WanVACE": "WanVACETransformer3DModel", "HunyuanVideoFramepack": "HunyuanVideoFramepackTransformer3DModel",
        "SkyReels": "SkyReelsV2Transformer3DModel",
    }  # fmt: skip
    for pipeline in FAMILIES:
        family = max((name for name in transformers if pipeline.startswith(name)), key=len, default=None)
        if family is not None:
            reads = transformers[family] in SINGLE_FILE_LOADABLE_CLASSES
            assert pipeline.startswith(quantization.GGUF_PIPELINES) == reads, pipeline


def test_the_extras_ask_for_the_versions_that_are_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for package, oldest in quantization.OLDEST.items():
        assert project["optional-dependencies"][package] == [f"{package}>={oldest}"]
        assert f"{package}>={oldest}" in project["optional-dependencies"]["test"]
        assert quantization.installed()[package]


def test_a_missing_or_old_package_is_named_with_the_line_to_paste() -> None:
    assert missing("gguf", ALL) is None
    assert "pocketreel[gguf]" in str(missing("gguf", {}))
    assert "0.40 is older than 0.50" in str(missing("bitsandbytes_4bit", {"bitsandbytes": "0.40"}))
    assert missing("torchao_int8", {"torchao": "my build"}) is None
    assert install_line("gguf").endswith("install 'pocketreel[gguf]'")


def test_cards_that_are_known_not_to_compute_with_a_method() -> None:
    turing, pascal = values.gpu(compute_capability=(7, 5)), values.gpu(compute_capability=(6, 1))
    assert "7.5" in str(unsupported("torchao_int8", turing))
    assert unsupported("bitsandbytes_8bit", turing) is None
    assert "6.1" in str(unsupported("bitsandbytes_8bit", pascal))
    assert unsupported("bitsandbytes_4bit", pascal) is None
    amd = values.gpu(backend="rocm", compute_capability=None)
    assert "NVIDIA" in str(unsupported("bitsandbytes_4bit", amd))
    assert unsupported("gguf", amd) is None


def test_bytes_of_packed_weights() -> None:
    assert packed_bytes("bitsandbytes_4bit", 6400, 10) == 3200 + 400
    assert packed_bytes("torchao_int8", 6400, 10) == packed_bytes("bitsandbytes_8bit", 6400, 10) == 6440
    with pytest.raises(ValueError, match="header"):
        packed_bytes("gguf", 1, 1)


def test_how_a_config_says_quantized() -> None:
    assert method_of({}) is None
    four = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert method_of(four) == ("bitsandbytes_4bit", "bitsandbytes, 4 bit")
    assert method_of({"quantization_config": {"quant_method": "quanto"}}) == (None, "quanto")


# ------------------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16"])
def test_a_header_is_read_like_the_package_reads_it(kind: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf", gguf.GGMLQuantizationType[kind])
    theirs = {
        one.name: (tuple(int(n) for n in one.shape[::-1]), one.tensor_type.name, one.n_bytes)
        for one in gguf.GGUFReader(path).tensors
    }
    assert {one.name: (one.shape, one.type, one.bytes) for one in read_gguf(path)} == theirs


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "a.gguf").read_bytes()
    cases = {
        "cut short: 36 of its": whole[:-40],
        "header is not whole": whole[:60],
        "is no GGUF file": b"PK\x03\x04" + whole[4:],
        "of version 1": whole[:4] + struct.pack("<I", 1) + whole[8:],
        "header is not whole; ": whole[:8] + struct.pack("<Q", 2**60) + whole[16:],
    }
    for number, (words, content) in enumerate(cases.items()):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelNotUsable, match=words):
            read_gguf(path)
    with pytest.raises(ModelNotUsable, match="cannot be read"):
        read_gguf(tmp_path / "none.gguf")


def test_a_type_that_diffusers_cannot_unpack_is_refused_beforehand(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q8_0)
    content = bytearray(path.read_bytes())
    place = content.index(b"blocks.0.ffn.0.weight") + len("blocks.0.ffn.0.weight") + 4 + 16
    content[place : place + 4] = struct.pack("<I", 16)  # IQ2_XXS
    path.write_bytes(content)
    with pytest.raises(ModelNotUsable, match="GGUF type 16, which diffusers cannot unpack"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("title", "bits"), [("GGUF Q8_0", 8.5), ("GGUF Q4_0", 4.5), ("GGUF Q4_K", 4.77), ("GGUF Q2_K", 2.78), ("GGUF", 8.5)]
)
def test_bits_of_a_file_that_is_not_here_yet(title: str, bits: float) -> None:
    assert bits_by_name(title) == pytest.approx(bits, abs=0.01)


# ------------------------------------------------------------------------------------------------------------- the card


def test_a_card_names_its_file_beside_itself_absolute_or_on_the_hub(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "wan-Q8_0.gguf")
    card = tmp_path / "mine.toml"
    card.write_text(CARD)
    assert read_model_card(card).gguf == {"transformer": str(file)}
    card.write_text(CARD.replace('"wan-Q8_0.gguf"', json.dumps(str(file))))
    assert read_model_card(card).gguf == {"transformer": str(file)}
    card.write_text(CARD.replace("wan-Q8_0", "owner/repo/sub/wan-Q4_K_M"))
    found = read_model_card(card)
    assert found.gguf == {"transformer": "owner/repo/sub/wan-Q4_K_M.gguf"}
    stored = as_stored(found).stored["transformer"]
    assert (stored.title, stored.exact) == ("GGUF Q4_K", False)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('transformer = "wan', 'transformer = "none', 17, "there is no file .*none-Q8_0.gguf; write its path"),
        ("transformer =", "text_encoder =", 17, "only denoisers are read from GGUF"),
        ("Q8_0.gguf", "Q8_0.bin", 17, "is no GGUF file"),
        ("WanPipeline", "CogVideoXPipeline", 17, "diffusers reads no GGUF file for the CogVideoXPipeline"),
        ("[gguf]", "[stored]", 17, "stored"),
        ("transformer = ", "transformer = 5 #", 17, "write text in quotes"),
    ],
)
def test_a_mistake_in_it_is_told_with_line_and_fix(old: str, new: str, line: int, words: str, tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "wan-Q8_0.gguf")
    card = tmp_path / "mine.toml"
    card.write_text(CARD.replace(old, new))
    with pytest.raises(PresetError, match=rf"mine.toml:{line}: .*{words}"):
        read_model_card(card)


def test_a_preset_asks_for_quantization(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = 'id = "mine"\ntitle = "M"\nsummary = "m"\nquantization = "bitsandbytes_4bit"\n'
    path.write_text(text)
    assert read_hardware_preset(path).quantization == "bitsandbytes_4bit"
    path.write_text(text.replace("bitsandbytes_4bit", "gguf"))
    with pytest.raises(PresetError, match=r"mine.toml:4: quantization: 'gguf' does not fit; .*torchao_int8"):
        read_hardware_preset(path)


def test_a_gguf_card_counts_what_the_file_holds_and_leaves_the_folders_weights_out(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "wan-Q8_0.gguf")
    (tmp_path / "model").mkdir()
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "mine.toml").write_text(CARD)
    card = as_stored(read_model_card(tmp_path / "mine.toml"))
    stored = card.stored["transformer"]
    assert stored.packed_bytes == 4 * 256 * 34 // 32
    assert stored.plain_parameters == 4 + 2 * 3 * 5
    assert stored.bytes("float32") == stored.packed_bytes + 4 * 34
    assert tensor_counts(card) == {}
    found = plan(machine(8).model_copy(update={"packages": ALL}), card, request_for(card), values.preset(), {})
    assert held(found) == {"transformer": "gguf"}  # by the coarse rule
    assert found.placements[0].weight_bytes == stored.bytes("bfloat16")
    assert any("GGUF Q8_0" in reason for reason in found.reasons)


# ------------------------------------------------------------------------------------------------------------- the plan

FOUR = values.preset(quantization="bitsandbytes_4bit")


def test_weights_are_packed_only_where_it_helps(wan: ModelCard) -> None:
    helped = planned(wan, 12, FOUR)
    assert held(helped)["transformer"] == "bitsandbytes_4bit"
    assert any("packed while it is loaded, so the video is not quite" in reason for reason in helped.reasons)
    assert "+bitsandbytes_4bit" in how_words(helped.placements)
    assert (helped.predicted_seconds or 0) < (planned(wan, 12, values.preset()).predicted_seconds or 0)
    roomy = planned(wan, 80, FOUR, ram=128)
    assert set(held(roomy).values()) == {None}
    assert any("not used: without it, it fits and is no slower" in reason for reason in roomy.reasons)


def test_without_the_preset_nothing_is_packed(wan: ModelCard) -> None:
    for vram in (8, 12, 24):
        found = planned(wan, vram, values.preset(fp8_storage=True))
        assert {one.quantization for rung in (found, *found.ladder) for one in rung.placements} == {None}


@pytest.mark.parametrize(
    ("packages", "gpu", "words"),
    [
        ({}, {}, r"not used: the package bitsandbytes is not installed; paste: .*pocketreel\[bitsandbytes\]"),
        (ALL, {"backend": "rocm", "compute_capability": None}, "not used: bitsandbytes was tried with NVIDIA's"),
    ],
)
def test_what_a_preset_asks_for_and_cannot_be_had_is_left_out_with_the_reason(
    packages: dict[str, str], gpu: dict[str, Any], words: str, wan: ModelCard
) -> None:
    found = planned(wan, 12, FOUR, packages, **gpu)
    assert set(held(found).values()) == {None}
    assert any(re.search(words, reason) for reason in found.reasons)


def test_on_the_cpu_nothing_is_packed(wan: ModelCard) -> None:
    found = planned(wan, 0, FOUR, ram=200)
    assert set(held(found).values()) == {None}
    assert any("not used: the CPU computes" in reason for reason in found.reasons)


def test_what_does_not_fit_for_want_of_a_package_says_so(wan: ModelCard) -> None:
    with pytest.raises(PlanError, match=r"bitsandbytes_4bit was not used: the package bitsandbytes is not installed"):
        planned(wan, 4, FOUR, {}, ram=10)


@pytest.mark.parametrize("prefer_disk", [False, True])
@pytest.mark.parametrize("vram", [6, 8, 12, 24])
def test_no_plan_holds_packed_weights_as_placement_refuses(vram: int, prefer_disk: bool, wan: ModelCard) -> None:
    preset = values.preset(
        quantization="bitsandbytes_4bit", fp8_storage=True, streaming_engine=True, prefer_disk=prefer_disk
    )
    gguf_card = wan.model_copy(update={"stored": {"transformer": stored_file()}})
    for card in (wan, gguf_card):
        try:
            found = planned(card, vram, preset)
        except PlanError:
            continue
        for rung in (found, *found.ladder):
            for one in rung.placements:
                packed = one.quantization is not None
                assert not packed or quantization.refusal(one.strategy, one.storage_dtype) is None
                assert card is wan or one.component != "transformer" or one.quantization == "gguf"


def stored_file(**changes: Any) -> Stored:
    """About what `Q4_K_M` of 14 billion weights is."""
    fields = {"method": "gguf", "title": "GGUF Q4_K", "packed_bytes": 8 * GIB, "plain_parameters": 10**8}
    return Stored(**{**fields, "on_disk_bytes": 9 * GIB, **changes})


def test_a_gguf_file_is_planned_by_its_own_bytes(wan: ModelCard) -> None:
    card = wan.model_copy(update={"stored": {"transformer": stored_file()}})
    found = planned(card, 24, values.preset())
    transformer = next(one for one in found.placements if one.component == "transformer")
    assert transformer.weight_bytes == 8 * GIB + 2 * 10**8
    assert transformer.strategy is Strategy.RESIDENT  # 27 GiB unquantized
    assert held(found)["text_encoder"] is None
    assert found.estimate is not None
    disk = [part.bytes for part in found.estimate.memory if part.memory == "disk" and part.component == "transformer"]
    assert set(disk) == {9 * GIB}


def test_a_file_that_is_not_here_yet_is_reckoned_and_the_plan_says_so(wan: ModelCard) -> None:
    reckoned = stored_file(exact=False, bits=4.8, packed_bytes=0, plain_parameters=0, on_disk_bytes=0)
    found = planned(wan.model_copy(update={"stored": {"transformer": reckoned}}), 24, values.preset())
    transformer = next(one for one in found.placements if one.component == "transformer")
    assert 7.5 * GIB < transformer.weight_bytes < 9 * GIB
    assert any("reckoned by its name until it is downloaded" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("stored", "packages", "words"),
    [
        (stored_file(), {}, r"transformer of Wan 2.1 14B is quantized \(GGUF Q4_K\), and the package gguf is not inst"),
        (stored_file(method=None, title="quanto"), ALL, "quantized by quanto, which Pocketreel cannot read"),
    ],
)
def test_what_lies_quantized_and_cannot_be_read_is_refused_before_anything_runs(
    stored: Stored, packages: dict[str, str], words: str, wan: ModelCard
) -> None:
    with pytest.raises(PlanError, match=words):
        planned(wan.model_copy(update={"stored": {"transformer": stored}}), 24, values.preset(), packages)


def test_a_card_that_cannot_compute_with_it_is_refused_or_passed_over(wan: ModelCard) -> None:
    card = wan.model_copy(update={"stored": {"transformer": stored_file(method="bitsandbytes_8bit", title="8 bit")}})
    with pytest.raises(PlanError, match=r"needs it: compute capability 7\.5"):
        planned(card, 24, values.preset(), compute_capability=(7, 0))
    two = machine(24, 24).model_copy(update={"packages": ALL})
    old = two.gpus[0].model_copy(update={"compute_capability": (7, 0)})
    found = plan(two.model_copy(update={"gpus": (old, two.gpus[1])}), card, request_for(card), values.preset(), {})
    assert next(one for one in found.placements if one.component == "transformer").device == "cuda:1"


def test_packed_sizes_shrink_the_blocks_and_leave_the_rest(wan: ModelCard) -> None:
    assert wan.coefficients is not None
    facts = wan.coefficients.components["transformer"]
    plain, four, eight = (
        sizes_of(facts, "bfloat16", None, method) for method in (None, "bitsandbytes_4bit", "torchao_int8")
    )
    assert four.weights / plain.weights == pytest.approx(0.29, abs=0.01)
    assert eight.weights / plain.weights == pytest.approx(0.51, abs=0.01)
    assert four.other == plain.other
    assert four.block < 0.3 * plain.block
    assert four.unpacked == 13824 * 5120 * 2

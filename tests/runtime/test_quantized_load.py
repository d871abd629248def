"""`pipeline.load` with packed weights: from a preset, a GGUF file, a quantized folder; and what a GGUF file spares."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.errors import ModelNotUsable
from app.planner import plan
from app.presets import as_stored, card_for_folder, tensor_counts
from app.runtime import pipeline, placement
from app.runtime.packed import quantization_of
from app.schema import Defaults, Lattice, ModelCard, Placement, Plan, Strategy
from tests import values
from tests.runtime.families import frames
from tests.runtime.packed import folder, gguf_file
from tests.runtime.packed import pipeline as packed_pipeline
from tests.runtime.test_quantized import quantized_folder

CPU = {"strategy": Strategy.CPU, "device": "cpu", "dtype": "float32", "weight_bytes": 0}


def wan_card(place: Path, **changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "repo_id": None,
        "folder": place,
        "pipeline": "WanPipeline",
        "defaults": Defaults(height=64, width=96, num_frames=5, fps=8, num_inference_steps=2, guidance_scale=3.0),
        "lattice": Lattice(min_side=64),
    }
    return values.card(**{**fields, **changes})


def cpu_plan(**quantization: Any) -> Plan:
    placements = tuple(
        Placement(component=name, quantization=quantization.get(name), **CPU)
        for name in ("text_encoder", "transformer", "vae")
    )
    return values.plan(strategy=Strategy.CPU, placements=placements)


def loaded(card: ModelCard, found: Plan) -> Any:
    pipe = pipeline.load(card, found)
    placement.place(pipe, found)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def close_to(pipe: Any, method: str) -> bool:
    """Weights mapped from files add up in another order, by some 1e-6."""
    return bool(abs(frames(pipe, "wan") - frames(packed_pipeline(method), "wan")).max() < 1e-3)


def test_what_a_preset_packs_while_loading() -> None:
    pipe = loaded(wan_card(folder()), cpu_plan(transformer="torchao_int8", text_encoder="torchao_int8"))
    methods = {name: quantization_of(module) for name, module in placement.modules_of(pipe).items()}
    assert methods == {"text_encoder": "torchao_int8", "transformer": "torchao_int8", "vae": None}
    frames(pipe, "wan")


def test_a_gguf_file_replaces_the_folders_weights(tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(folder(), place)
    for weights in (place / "transformer").glob("*.safetensors*"):
        weights.unlink()
    card = wan_card(place, gguf={"transformer": str(gguf_file())})
    hardware = values.hardware(gpus=(), packages={"gguf": "0.19.0"})
    found = plan(hardware, as_stored(card), values.request(), values.preset(), tensor_counts(card))
    assert {one.component: one.quantization for one in found.placements}["transformer"] == "gguf"
    assert close_to(loaded(card, found), "gguf")


def test_a_plan_made_before_the_model_was_here_holds_it_too() -> None:
    card = wan_card(folder(), gguf={"transformer": str(gguf_file())})
    pipe = loaded(card, values.plan(strategy=Strategy.CPU))
    assert placement.placed(pipe).placements["transformer"].quantization == "gguf"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_folder_is_an_ordinary_model(bits: int, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(folder(), place)
    shutil.rmtree(place / "transformer")
    quantized_folder(place / "transformer", bits=bits)
    card = as_stored(card_for_folder(place))
    assert card.stored["transformer"].method == f"bitsandbytes_{bits}bit"
    hardware = values.hardware(gpus=(), packages={"bitsandbytes": "0.50.2"})
    found = plan(hardware, card, values.request(), values.preset(), tensor_counts(card))
    weights = {one.component: one.weight_bytes for one in found.placements}
    assert weights["transformer"] == card.stored["transformer"].bytes("float32")
    pipe = loaded(card, found)
    assert quantization_of(pipe.transformer) == f"bitsandbytes_{bits}bit"
    frames(pipe, "wan")


def test_a_file_of_another_model_is_refused_in_words() -> None:
    card = wan_card(folder(), gguf={"transformer": str(gguf_file("ltx"))})
    with pytest.raises(ModelNotUsable, match="cannot be loaded"):
        pipeline.load(card, cpu_plan(transformer="gguf"))


def test_a_gguf_plan_without_a_file_is_refused() -> None:
    with pytest.raises(ModelNotUsable, match="which its card does not name"):
        pipeline.load(wan_card(folder()), cpu_plan(transformer="gguf"))


@pytest.mark.slow
def test_model_and_file_of_the_hub(tmp_path: Path) -> None:
    """From the Hub's cache on this disk, in a process of its own, as the Hub's folder is settled at import."""
    for repo, source in (("me--tiny", folder()), ("me--tiny-gguf", gguf_file())):
        root = tmp_path / "hub" / f"models--{repo}"
        snapshot = root / "snapshots" / ("a" * 40)
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("a" * 40)
        if source.is_dir():
            shutil.copytree(source, snapshot)
            for weights in (snapshot / "transformer").glob("*.safetensors*"):
                weights.unlink()
        else:
            snapshot.mkdir(parents=True)
            shutil.copy(source, snapshot / "tiny-Q8_0.gguf")
    card = wan_card(Path("unused"), folder=None, repo_id="me/tiny", gguf={"transformer": "me/tiny-gguf/tiny-Q8_0.gguf"})
    script = (
        "import sys; from app.runtime import pipeline; from app.runtime.packed import quantization_of\n"
        "from app.schema import ModelCard, Plan; from app.presets import as_stored, tensor_counts\n"
        "card = ModelCard.model_validate_json(sys.argv[1]); plan = Plan.model_validate_json(sys.argv[2])\n"
        "assert as_stored(card).stored['transformer'].exact and set(tensor_counts(card)) == {'text_encoder', 'vae'}\n"
        "print(quantization_of(pipeline.load(card, plan).transformer))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, card.model_dump_json(), cpu_plan(transformer="gguf").model_dump_json()],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip().endswith("gguf"), done.stderr[-2000:]

"""A LoRA loaded, unloaded and fused on a placed pipeline: the video of an unplaced one, or a refusal in words."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from app.errors import GenerationFailed, ModelNotUsable
from app.runtime import placement
from app.schema import GIB
from tests.runtime.families import FAMILIES, frames, load
from tests.runtime.simulated import SimulatedMachine
from tests.runtime.test_placement import STRATEGIES, arrangement

STREAMED = ("stream", "stream_beside_residents")
KNOWN_LAYERS = [name for name in STRATEGIES if name not in (*STREAMED, "disk")]
QUICK = ("model_offload", "leaf_stream")


@cache
def lora() -> dict[str, Any]:
    """Random weights of rank 2 on half of the attention layers."""
    pipe = FAMILIES["wan"]()
    torch.manual_seed(0)
    pipe.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    return {f"transformer.{name}": value.clone() for name, value in get_peft_model_state_dict(pipe.transformer).items()}


@cache
def wanted() -> dict[str, Any]:
    """Videos of an unplaced pipeline."""
    pipe = FAMILIES["wan"]()
    found = {"plain": frames(pipe, "wan")}
    pipe.load_lora_weights(dict(lora()))
    found["lora"] = frames(pipe, "wan")
    pipe.fuse_lora()
    return {**found, "fused": frames(pipe, "wan")}


def test_the_lora_is_seen_at_all() -> None:
    assert not np.allclose(wanted()["plain"], wanted()["lora"], atol=0.01)


@pytest.mark.parametrize(
    "strategy", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KNOWN_LAYERS]
)
def test_loaded_unloaded_and_fused_on_a_placed_pipeline(strategy: str) -> None:
    videos = wanted()
    with SimulatedMachine(gpus=[4 * GIB] * 3) as machine:
        pipe = FAMILIES["wan"]()
        placement.place(pipe, arrangement(pipe, STRATEGIES[strategy]))
        assert np.array_equal(frames(pipe, "wan"), videos["plain"])
        pipe.load_lora_weights(dict(lora()))
        assert np.array_equal(frames(pipe, "wan"), videos["lora"])
        pipe.unload_lora_weights()
        assert np.array_equal(frames(pipe, "wan"), videos["plain"])
        pipe.load_lora_weights(dict(lora()))
        pipe.fuse_lora()
        assert np.array_equal(frames(pipe, "wan"), videos["fused"])
        placement.rest(pipe)
        placement.remove(pipe)
        assert np.array_equal(frames(pipe, "wan"), videos["fused"])
        assert machine.hazards == []


@pytest.mark.parametrize("strategy", STREAMED)
def test_streamed_blocks_want_to_be_placed_again(strategy: str) -> None:
    videos = wanted()
    with SimulatedMachine(gpus=[4 * GIB] * 3):
        pipe = FAMILIES["wan"]()
        plan = arrangement(pipe, STRATEGIES[strategy])
        placement.place(pipe, plan)
        pipe.load_lora_weights(dict(lora()))
        with pytest.raises(GenerationFailed, match="LoRA"):
            frames(pipe, "wan")
        placement.rest(pipe)
        placement.remove(pipe)
        placement.place(pipe, plan)
        assert np.array_equal(frames(pipe, "wan"), videos["lora"])


def test_weights_that_stay_on_the_disk_cannot_have_one(tmp_path: Path) -> None:
    with SimulatedMachine(gpus=[4 * GIB] * 3):
        FAMILIES["wan"]().save_pretrained(tmp_path)
        pipe = load(tmp_path)
        placement.place(pipe, arrangement(pipe, STRATEGIES["disk"]))
        pipe.load_lora_weights(dict(lora()))
        with pytest.raises(ModelNotUsable, match="no weight"):
            frames(pipe, "wan")

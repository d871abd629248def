"""A placed pipeline refuses to be trained, can be prepared for it after any plan, and placed again afterwards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import NotTrainable, OffloadActive
from app.runtime import placement
from app.runtime.guard import assert_trainable, prepare_for_training
from app.schema import Strategy
from tests.runtime.families import DEMO, FAMILIES, frames, load
from tests.runtime.test_guard import batch, loss_of  # noqa: F401 (a fixture)
from tests.runtime.test_placement import arrangement, by_stage

CPU = {"device": "cpu"}
HELD: dict[str, dict[str, Any]] = {
    "model_offload": {"strategy": Strategy.MODEL_OFFLOAD},
    "block": {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1},
    "leaf": {"strategy": Strategy.LEAF},
    "stream": {"strategy": Strategy.STREAM, "resident_blocks": 2},
    "disk": {"strategy": Strategy.DISK},
    "8 bits": {"strategy": Strategy.BLOCK, "num_blocks_per_group": 1, "storage_dtype": "float8_e4m3fn"},
}


@pytest.mark.parametrize(
    "held", [one if one in ("stream", "8 bits") else pytest.param(one, marks=pytest.mark.slow) for one in HELD]
)
def test_a_plan_is_taken_off_for_training_and_put_on_again(held: str, batch: dict[str, Any]) -> None:  # noqa: F811
    pipe = load(DEMO)
    rest = {"strategy": Strategy.CPU, **CPU}
    plan = arrangement(pipe, by_stage(denoise={**HELD[held], **CPU}, encode=rest, decode=rest))
    placement.place(pipe, plan)
    frames(pipe, "kandinsky", num_frames=5)
    with pytest.raises(OffloadActive):
        assert_trainable(pipe)
    with pytest.raises(OffloadActive):
        pipe.transformer.train()
    with pytest.raises(OffloadActive), torch.enable_grad():
        loss_of(pipe.transformer.requires_grad_(True), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what was cast to eight bits stays rounded
        prepare_for_training(pipe, "cpu")
    assert placement.placed(pipe) is None
    assert_trainable(pipe)
    optimizer = torch.optim.Adam(pipe.transformer.parameters(), lr=1e-4)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(pipe.transformer, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    pipe.transformer.requires_grad_(False).eval()
    wanted = frames(pipe, "kandinsky", num_frames=5)
    again = arrangement(pipe, by_stage(denoise={**HELD["block"], **CPU}, encode=rest, decode=rest))
    placement.place(pipe, again)
    assert (frames(pipe, "kandinsky", num_frames=5) == wanted).all()


def test_weights_that_were_never_loaded_cannot_be_trained(tmp_path: Path) -> None:
    from app.runtime import pipeline
    from tests import values

    plan = arrangement(FAMILIES["kandinsky"](), by_stage(denoise={**HELD["disk"], **CPU}, encode=CPU, decode=CPU))
    card = values.card(folder=DEMO, repo_id=None, pipeline="Kandinsky5T2VPipeline")
    whole = values.plan(placements=tuple(one for one in plan.placements if one.component == "transformer"))
    pipe = pipeline.load(card, whole)
    placement.place(pipe, plan)
    with pytest.raises(NotTrainable, match=r"[Ll]oad"):
        prepare_for_training(pipe, "cpu")

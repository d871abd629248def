"""Each guard of the placement is taken out once, and the test that watches it must turn red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import send_to_device

from app.runtime import placement
from app.runtime.placement import calls, groups, sharding, visiting
from app.schema import GIB
from tests.runtime import test_placement, test_traps
from tests.runtime.simulated import SimulatedMachine

pytestmark = pytest.mark.slow

AFTER_AN_ERROR = test_traps.test_after_an_error_in_a_block_the_card_is_empty_and_the_next_video_right
Patch = Callable[[pytest.MonkeyPatch], None]


def on_a_machine(test: Callable[..., None], *arguments: Any) -> Callable[[Path], None]:
    def run(_folder: Path) -> None:
        with SimulatedMachine(gpus=[4 * GIB, 4 * GIB]) as machine:
            test(*arguments, machine)

    return run


def in_the_matrix(family: str, strategy: str) -> Callable[[Path], None]:
    return lambda folder: test_placement.check(family, strategy, folder)


def setting(owner: Any, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def without(*names: str) -> Patch:
    """A placed pipeline whose class lacks these."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        stock = placement._subclass

        def subclass(cls: type, *rest: Any) -> type:
            made = stock(cls, *rest)
            kept = {name: value for name, value in vars(made).items() if name not in names and name != "__dict__"}
            return type(cls.__name__, (cls,), kept)

        monkeypatch.setattr(placement, "_subclass", subclass)

    return patch


def only_come(self: Any, _device: Any, _worker: Any, coming: Any = None) -> None:
    if coming is not None:
        coming.come()


MUTATIONS: dict[str, tuple[Patch, Callable[[Path], None]]] = {
    "the blocks of a VAE": (
        setting(groups, "block_modules", lambda module: getattr(module, "_group_offload_block_modules", None)),
        on_a_machine(test_traps.test_block_groups_of_a_vae, "hunyuan"),
    ),
    "the blocks of T5": (
        setting(groups, "NESTED_BLOCKS", {}),
        on_a_machine(test_traps.test_block_groups_of_a_text_encoder),
    ),
    "no streams for a VAE": (
        setting(groups, "is_vae", lambda _module: False),
        on_a_machine(test_traps.test_layers_of_a_vae_with_streams),
    ),
    "one plan at a time": (
        setting(placement, "placed", lambda _pipe: None),
        on_a_machine(test_traps.test_placing_twice_is_refused_and_switching_leaves_one_plan_in_force),
    ),
    "the execution device": (
        without("_execution_device"),
        on_a_machine(test_traps.test_the_execution_device_is_the_plans),
    ),
    "no moving": (without("to"), on_a_machine(test_traps.test_what_was_placed_cannot_be_moved_or_is_found_out)),
    "looking where the weights are": (
        setting(placement, "_expected", lambda _placement: None),
        on_a_machine(test_traps.test_what_was_placed_cannot_be_moved_or_is_found_out),
    ),
    "making room": (
        setting(visiting.Visitors, "make_room", only_come),
        on_a_machine(test_traps.test_the_vae_of_a_picture_to_video_model_leaves),
    ),
    "keeping what was written to": (
        setting(visiting, "version_of", lambda _tensor: 0),
        on_a_machine(test_traps.test_what_is_written_to_while_it_visits_is_kept),
    ),
    "undoing half of it": (
        setting(groups, "_take_home", lambda _module, _device: None),
        on_a_machine(test_traps.test_a_class_whose_blocks_are_not_found_is_refused),
    ),
    "leaving after a run": (
        setting(visiting.Visitors, "rest", lambda _self: None),
        on_a_machine(
            test_traps.test_after_an_error_in_a_block_the_card_is_empty_and_the_next_video_right, "model_offload"
        ),
    ),
    "leaving before a picture is prepared": (
        without("prepare_latents"),
        lambda _folder: test_placement.test_encoders_that_visit_a_card_leave_it_before_a_picture_is_prepared_there(),
    ),
    "arguments and results over a bridge": (
        setting(visiting, "moved", lambda value, _device: value),
        in_the_matrix("cogvideox", "two_cards"),
    ),
    "what a VAE's encode finds": (
        setting(visiting, "moved", send_to_device),
        on_a_machine(test_traps.test_what_a_vae_encodes_on_another_card_comes_back),
    ),
    "back to the main card after the last block": (
        setting(sharding, "moved", lambda value, _device: value),
        in_the_matrix("wan", "sharded"),
    ),
    "what all blocks get": (
        setting(calls.Copies, "of", lambda _self, value: value),
        in_the_matrix("wan", "sharded"),
    ),
    "every component": (
        setting(placement, "_complete", lambda _modules, plan: {one.component: one for one in plan.placements}),
        on_a_machine(test_traps.test_no_component_is_dropped),
    ),
    "a fresh scheduler": (
        setting(placement, "rest", lambda pipe: placement.placed(pipe).visitors.rest()),
        in_the_matrix("wan", "model_offload"),
    ),
}


@pytest.mark.parametrize("guard", MUTATIONS)
def test_without_the_guard_its_test_is_red(guard: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch, test = MUTATIONS[guard]
    test(tmp_path / "with")
    patch(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        test(tmp_path / "without")

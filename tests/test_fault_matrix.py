"""A sample of the fault matrix, another one each day, and all of it as a slow test."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date

import pytest

from tests.fault_matrix import CELLS, FAULTS, Bench, bench, run_cell

TODAY = random.Random(date.today().toordinal()).sample(CELLS, 1)
ALWAYS = [("kill -9 server", "middle step")]


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Bench, str]]:
    with bench() as made:
        yield made, made.video()


@pytest.mark.parametrize(
    ("fault", "point"),
    [cell if cell in (*ALWAYS, *TODAY) else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS],
)
def test_what_becomes_of_it(made: tuple[Bench, str], fault: str, point: str) -> None:
    assert run_cell(*made, fault, point).problems == ()


def test_every_stage_is_struck_by_something() -> None:
    assert {point for _, point in CELLS} == {point for kind in FAULTS.values() for point in kind.points}
    assert len(CELLS) >= 45

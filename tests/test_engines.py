"""Ways to hold one model, compared by the command."""

from __future__ import annotations

import json

import pytest

from tests.test_cli import run


@pytest.mark.slow  # loads the model for each
def test_engines_are_compared_and_make_the_same_frames() -> None:
    ran = run(
        "bench", "offload", "--engine", "stream_half", "--engine", "disk", "--frames", "5", "--steps", "2", "--json",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout)
    assert [one["engine"] for one in outcomes] == ["resident", "stream_half", "disk"]
    assert [one["difference"] for one in outcomes] == [None, 0, 0]
    assert all(one["error"] is None and one["seconds"] > 0 and one["step_seconds"] > 0 for one in outcomes)


def test_what_cannot_be_compared_is_told() -> None:
    unknown = run("bench", "offload", "--engine", "magic")
    assert (unknown.returncode, "stream_half" in unknown.stderr) == (2, True)
    small = run("bench", "offload", "--vram", "8GiB")
    assert (small.returncode, "no GPU" in small.stderr) == (2, True)

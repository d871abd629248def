from __future__ import annotations

import io

import pytest
from rich.console import Console

from app.terminal import job_table
from tests import values


@pytest.mark.parametrize("width", [60, 80, 120])
def test_an_id_can_be_copied_from_the_history(width: int) -> None:
    """`resume` and `history show` want all of it."""
    shown = io.StringIO()
    Console(file=shown, width=width).print(job_table([values.job("261201-004729-5796b2")]))
    assert "261201-004729-5796b2" in shown.getvalue()

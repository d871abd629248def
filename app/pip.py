"""The line to paste that installs something."""

from __future__ import annotations

import importlib.util
import sys


def pip_install(arguments: str) -> str:
    """The line that installs into the very Python that runs this, whatever is on PATH."""
    if importlib.util.find_spec("pip") is None:  # environments made by uv have none
        return f'uv pip install --python "{sys.executable}" {arguments}'
    return f'"{sys.executable}" -m pip install {arguments}'

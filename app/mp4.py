"""What an MP4 made by Pocketreel says of itself."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from imageio_ffmpeg import get_ffmpeg_exe

from app.errors import BadInput, NotFound
from app.schema import JsonObject

_SECONDS = 30


def read_metadata(path: Path) -> JsonObject:
    """The JSON that `runtime.export` embedded: pocketreel (version), job, model, request, plan, report.

    Raises:
        NotFound: no such file.
        BadInput: not a video, or not one of ours.
    """
    if not path.is_file():
        raise NotFound(f"There is no file {path}.")
    command = [get_ffmpeg_exe(), "-v", "error", "-i", f"file:{path}", "-f", "ffmetadata", "pipe:1"]
    hidden = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=True, creationflags=hidden
        )
    except (subprocess.SubprocessError, OSError):
        raise BadInput(f"{path} is not a video that ffmpeg can read. Give an MP4 made by Pocketreel.") from None
    # a value ends at the first newline that no backslash escapes
    found = re.search(r"^comment=((?:\\.|[^\\\n])*)", ran.stdout.decode("utf-8", "replace"), re.MULTILINE | re.DOTALL)
    try:
        document = json.loads(re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL)) if found else None
    except ValueError:
        document = None
    if not isinstance(document, dict) or "pocketreel" not in document:
        raise BadInput(f"{path} carries no settings: it was not made by Pocketreel, or another program rewrote it.")
    return document

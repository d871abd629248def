from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from app.errors import BadInput, InvalidOutput, NotFound, OutputNotWritten
from app.events import VIDEO_NAME
from app.mp4 import read_metadata
from app.outputs import publish
from app.runtime import export as module
from app.runtime.export import export
from app.runtime.pipeline import check_frames, to_pixels
from app.schema import OutputReport


def clip(height: int = 64, width: int = 96, count: int = 9) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A red square wandering over blue, [count, height, width, 3] in 0..1."""
    frames = np.zeros((count, height, width, 3), np.float32)
    frames[..., 2] = 0.8
    for index in range(count):
        frames[index, 8 : height - 8, index * 4 : index * 4 + 24] = (0.9, 0.1, 0.1)
    return frames


def write(frames: Any, target: Path, **changes: Any) -> OutputReport:
    arguments: dict[str, Any] = {
        "fps": 8,
        "target": target,
        "scratch": target.parent / ".scratch",
        "metadata": {"pocketreel": "test"},
        "on_frame": lambda done, total: None,
    }
    report = export(to_pixels(frames), **{**arguments, **changes})
    publish(target.parent / ".scratch" / VIDEO_NAME, target, overwrite=False)
    return report


def decoded(path: Path) -> tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """What ffmpeg says of the file, and its frames [count, height, width, 3] (64x96 ones)."""
    command = [get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    ran = subprocess.run(command, capture_output=True, check=True)
    return ran.stderr.decode(), np.frombuffer(ran.stdout, np.uint8).reshape(-1, 64, 96, 3)


def test_the_file_holds_the_frames(tmp_path: Path) -> None:
    frames = clip()
    report = write(frames, tmp_path / "clip.mp4")
    said, back = decoded(tmp_path / "clip.mp4")
    assert (report.width, report.height, report.num_frames, report.fps) == (96, 64, 9, 8)
    assert back.shape == (9, 64, 96, 3)
    assert re.search(r"h264 .*yuv420p\(tv, bt709.*96x64.* 8 fps", said), said
    assert np.abs(back.astype(float) - frames * 255).mean() < 6
    assert np.abs(back[:, 2, 90].astype(float) - [0, 0, 204]).max() < 8, "colours shifted: matrix or range tag is wrong"
    data = (tmp_path / "clip.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat"), "not faststart"
    assert report.size_bytes == len(data)


@pytest.mark.parametrize("colour", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 0, 1)], ids=str)
def test_a_video_of_one_colour_is_a_video(colour: tuple[int, int, int], tmp_path: Path) -> None:
    """Its brightness in the file is that of the frames, whatever the colour."""
    report = write(np.full((5, 64, 64, 3), colour, np.float32), tmp_path / "clip.mp4")
    assert report.mean_luma == pytest.approx(255 * np.dot(colour, (0.2126, 0.7152, 0.0722)), abs=1.5)


def test_odd_sides_are_padded_by_repeating(tmp_path: Path) -> None:
    report = write(clip(63, 95), tmp_path / "clip.mp4")
    assert (report.width, report.height, report.padded) == (96, 64, True)
    assert not write(clip(), tmp_path / "even.mp4").padded


@pytest.mark.parametrize(
    "prompt", ["a = b; c # d \\ e\nnew line", "ünïcödé 🎈 日本", "\"quotes\" and 'ticks'", "x" * 5000]
)
def test_metadata_comes_back_exactly(tmp_path: Path, prompt: str) -> None:
    document = {"pocketreel": "0", "request": {"prompt": prompt}, "nested": [1, 2.5, None]}
    write(clip(), tmp_path / "clip.mp4", metadata=document)
    assert read_metadata(tmp_path / "clip.mp4") == document


def test_metadata_of_other_files(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_metadata(tmp_path / "none.mp4")
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(BadInput, match="not a video"):
        read_metadata(tmp_path / "text.mp4")
    write(clip(), tmp_path / "clip.mp4", metadata={"other": 1})
    with pytest.raises(BadInput, match="carries no settings"):
        read_metadata(tmp_path / "clip.mp4")


def test_stopping_in_the_middle_leaves_no_target(tmp_path: Path) -> None:
    class StopHereError(Exception):
        pass

    def on_frame(done: int, _total: int) -> None:
        if done == 4:
            raise StopHereError

    with pytest.raises(StopHereError):
        write(clip(), tmp_path / "clip.mp4", on_frame=on_frame)
    assert not (tmp_path / "clip.mp4").exists()


def test_a_truncated_file_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = module._encode

    def truncated(pixels: Any, *rest: Any) -> None:
        encode(pixels[:5], *rest)

    monkeypatch.setattr(module, "_encode", truncated)
    with pytest.raises(InvalidOutput, match="5 frames"):
        write(clip(), tmp_path / "clip.mp4")
    assert not (tmp_path / "clip.mp4").exists()


def test_a_file_that_shows_something_else_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = module._encode
    monkeypatch.setattr(module, "_encode", lambda pixels, *rest: encode(pixels * 0, *rest))
    with pytest.raises(InvalidOutput, match="brightness"):
        write(clip(), tmp_path / "clip.mp4")


def test_folder_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputNotWritten, match="Check that"):
        write(clip(), tmp_path / "file" / "clip.mp4")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "small disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this container may not mount")
    try:
        noise = np.random.default_rng(0).random((9, 64, 96, 3), np.float32)
        with pytest.raises(OutputNotWritten, match="full"):
            write(noise, disk / "clip.mp4")
        assert not (disk / "clip.mp4").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_black_and_broken_frames_are_refused() -> None:
    check_frames(clip())
    with pytest.raises(InvalidOutput, match="black"):
        check_frames(np.zeros((5, 32, 32, 3), np.float32))
    for bad in (np.nan, np.inf):
        broken = clip()
        broken[3, 5, 5, 0] = bad
        with pytest.raises(InvalidOutput, match="NaN"):
            check_frames(broken)
    with pytest.raises(InvalidOutput, match="single colour"):
        check_frames(np.full((5, 32, 32, 3), 0.5, np.float32) + np.linspace(0, 0.2, 5)[:, None, None, None])


def test_metadata_is_plain_json_for_other_tools(tmp_path: Path) -> None:
    write(clip(), tmp_path / "clip.mp4", metadata={"pocketreel": "0", "k": "v"})
    assert json.loads(json.dumps(read_metadata(tmp_path / "clip.mp4")))["k"] == "v"

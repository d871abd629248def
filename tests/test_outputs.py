from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.errors import InvalidRequest, OutputExists
from app.outputs import check_output, publish, publish_somehow


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    source = tmp_path / "scratch" / "video.mp4"
    source.write_text("new")
    return source


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links on exFAT")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("links", [True, False])
def test_an_existing_file_is_never_touched(
    tmp_path: Path, source: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        no_links(monkeypatch)
    target = tmp_path / "clip.mp4"
    target.write_text("precious")
    with pytest.raises(OutputExists, match="--overwrite"):
        publish(source, target, overwrite=False)
    assert (target.read_text(), source.read_text()) == ("precious", "new")
    publish(source, tmp_path / "other.mp4", overwrite=False)
    assert (tmp_path / "other.mp4").read_text() == "new"
    assert not source.exists()


def test_overwriting_is_one_step(tmp_path: Path, source: Path) -> None:
    (tmp_path / "clip.mp4").write_text("old")
    publish(source, tmp_path / "clip.mp4", overwrite=True)
    assert (tmp_path / "clip.mp4").read_text() == "new"


def test_a_failed_move_leaves_no_empty_file(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_links(monkeypatch)

    def fail(*_: object) -> None:
        raise OSError("the share went away")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="went away"):
        publish(source, tmp_path / "clip.mp4", overwrite=False)
    assert not (tmp_path / "clip.mp4").exists()
    assert source.read_text() == "new"


def test_work_is_never_thrown_away_for_a_name(tmp_path: Path, source: Path) -> None:
    (tmp_path / "clip.mp4").write_text("came in between")
    path = publish_somehow(source, tmp_path / "clip.mp4", overwrite=False, job_id="j1")
    assert path == tmp_path / "clip-j1.mp4"
    assert path.read_text() == "new"
    assert (tmp_path / "clip.mp4").read_text() == "came in between"


@pytest.mark.parametrize(
    "name", ["clip.avi", "clip", "missing/clip.mp4", "x" * 300 + ".mp4", "nul\x00.mp4", "bad\udcff.mp4", "folder.mp4"]
)
def test_names_that_cannot_be_written_are_refused_early(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(InvalidRequest) as caught:
        check_output(tmp_path / name, overwrite=True)
    assert caught.value.field == "output"
    assert [path.name for path in tmp_path.iterdir()] == ["folder.mp4"]


def test_strange_homes_and_dangling_links(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        check_output(Path("~nobody-of-that-name/clip.mp4"), overwrite=False)
    (tmp_path / "link.mp4").symlink_to(tmp_path / "nowhere.mp4")
    with pytest.raises(OutputExists):
        check_output(tmp_path / "link.mp4", overwrite=False)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        check_output(tmp_path / "clip.mp4", overwrite=False)


def test_good_names_come_back_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_output(Path("ein Clip é 日本.MP4"), overwrite=False) == tmp_path / "ein Clip é 日本.MP4"
    assert list(tmp_path.iterdir()) == []

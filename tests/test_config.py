from __future__ import annotations

from pathlib import Path

import pytest

from app.config import bundled, load_settings
from app.errors import ConfigError


def test_flag_then_environment_then_file_then_default(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().port == 7860
    data_dir.mkdir()
    (data_dir / "config.toml").write_text("port = 1001\n")
    assert load_settings().port == 1001
    monkeypatch.setenv("POCKETREEL_PORT", "1002")
    assert load_settings().port == 1002
    assert load_settings(port=1003, host=None).port == 1003


@pytest.mark.parametrize("text", ["port = 99999\n", "prot = 1\n", "port = \n", "\udcff"])
def test_a_wrong_file_names_itself(data_dir: Path, text: str) -> None:
    data_dir.mkdir()
    (data_dir / "config.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.toml"):
        load_settings()


def test_the_data_folder_is_absolute_whoever_sets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("POCKETREEL_DATA_DIR", "~/reels")
    assert load_settings().data_dir == tmp_path / "reels"
    monkeypatch.setenv("POCKETREEL_DATA_DIR", "")
    assert load_settings().data_dir.is_absolute()
    assert load_settings().data_dir.name == "pocketreel"


def test_allowed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().allowed_hosts == ()
    monkeypatch.setenv("POCKETREEL_ALLOWED_HOSTS", "reel.example, nas.local,")
    assert load_settings().allowed_hosts == ("reel.example", "nas.local")
    assert load_settings(allowed_hosts=("one",)).allowed_hosts == ("one",)


def test_bundled_files_are_there() -> None:
    assert bundled("presets", "models", "built-in.toml").is_file()
    assert bundled("assets", "demo", "model_index.json").is_file()

"""What of the models lies on the disk, in a cache laid out as the Hub's library lays it out."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app import shelf
from app.cli import app
from app.config import Settings
from app.errors import InvalidRequest, NotFound
from app.presets import load_catalogue
from app.schema import ModelCard
from app.store import Store
from tests import values

WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


@pytest.fixture
def cards(settings: Settings) -> dict[str, ModelCard]:
    return dict(load_catalogue(settings).models)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two models, the larger one ours, and a dataset."""
    folder = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    _add(folder, f"models--{WAN.replace('/', '--')}", {"model_index.json": 2, "transformer/a.safetensors": 5000})
    _add(folder, "models--me--other", {"model_index.json": 10})
    _add(folder, "datasets--me--pictures", {"a.png": 10})
    return folder


def _add(hub: Path, name: str, files: dict[str, int]) -> None:
    place, commit = hub / name, hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "blobs").mkdir()
    for number, (file, size) in enumerate(files.items()):
        blob = place / "blobs" / f"{number:040x}"
        blob.write_bytes(b"{}" + b" " * (size - 2))
        link = place / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


def test_the_shelf_says_what_lies_there_and_whose_it_is(hub: Path, cards: dict[str, ModelCard]) -> None:
    found = shelf.look(cards)
    assert [(one.repo_id, one.models, one.size_bytes, one.files) for one in found.models] == [
        (WAN, ("wan-2.1-t2v-1.3b",), 5002, 2),
        ("me/other", (), 10, 1),
    ]
    assert found.size_bytes == 5012
    words = {card.id: shelf.offer_words(shelf.offer_of(card)) for card in cards.values()}
    assert words["wan-2.1-t2v-1.3b"] == "It is on this machine. License: Apache-2.0."
    assert words["built-in"].startswith("It is on this machine.")
    assert words["mochi-1"].startswith("It is downloaded at its first use, ")
    gated = shelf.offer_of(cards["mochi-1"].model_copy(update={"gated": True}))
    assert "Accept it on the model's page first" in shelf.offer_words(gated)


def test_a_damaged_folder_is_told_and_an_empty_cache_is_none(
    hub: Path, cards: dict[str, ModelCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub / "models--me--broken").mkdir()
    assert "models--me--broken" in shelf.look(cards).problems[0]
    monkeypatch.setenv("HF_HUB_CACHE", str(hub / "nowhere"))
    assert shelf.look(cards).models == []


def test_removing_takes_whole_models_or_nothing(settings: Settings, hub: Path, cards: dict[str, ModelCard]) -> None:
    with pytest.raises(NotFound, match="mochi-1 does not lie in"):
        shelf.remove(settings, cards, ["me/other", "mochi-1"])
    assert len(shelf.look(cards).models) == 2
    gone = shelf.remove(settings, cards, ["wan-2.1-t2v-1.3b"])
    assert [one.repo_id for one in gone] == [WAN]
    assert sorted(place.name for place in hub.iterdir() if place.name != ".locks") == [
        "datasets--me--pictures",
        "models--me--other",
    ]


def test_what_a_job_wants_stays(settings: Settings, hub: Path, cards: dict[str, ModelCard]) -> None:
    with closing(Store(settings.database)) as store:
        store.add(values.job("j1", request=values.request(model="wan-2.1-t2v-1.3b")), runner="one")
    with pytest.raises(InvalidRequest, match="wanted by job j1"):
        shelf.remove(settings, cards, [WAN])
    assert len(shelf.look(cards).models) == 2
    assert len(shelf.remove(settings, cards, ["me/other"])) == 1


def test_the_commands(hub: Path) -> None:
    run = CliRunner().invoke
    listed = json.loads(run(app, ["models", "--json"]).stdout)
    wan = next(offer for offer in listed if offer["id"] == "wan-2.1-t2v-1.3b")
    assert 10 * 10**9 < wan["download_bytes"] < 20 * 10**9
    assert wan["max_sequence_length"] == 512
    assert "on this disk" in run(app, ["models"], env={"COLUMNS": "200"}).stdout
    assert "none of ours" in run(app, ["models", "cache"], env={"COLUMNS": "200"}).stdout
    ran = run(app, ["models", "cache", "--remove", "me/other", "--json"])
    assert [one["repo_id"] for one in json.loads(ran.stdout)["removed"]] == ["me/other"]
    assert run(app, ["models", "cache", "--remove", "me/other"]).exit_code == 2

"""The models that can be made with, and what of them lies on this disk: listing, and removing what is not wanted.

Pocketreel writes no copies of weights: offloading to disk reads the model's own files (`app.runtime.streaming`), and
number formats are changed while loading. So the Hub's cache, which the Hub's own library keeps, is all there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from app import presets
from app.config import Settings, hub_folder
from app.errors import InvalidRequest, NotFound
from app.schema import Bytes, ModelCard, Value
from app.store import Store
from app.workload import download_bytes


class Offer(Value):
    """One model of the catalogue, as a person chooses it."""

    id: str
    title: str
    license: str
    gated: bool
    max_sequence_length: int | None
    download_bytes: Bytes | None
    """None: it is not downloaded (a folder on this disk), or its sizes are not known yet."""
    here: bool
    """Its files lie on this machine."""


class Cached(Value):
    """One model of the Hub in its cache."""

    repo_id: str
    models: tuple[str, ...]
    """Ids of the cards that load it; empty: none of ours."""
    size_bytes: Bytes
    files: int
    last_used: float
    """Seconds since 1970."""
    path: Path


def offer_of(card: ModelCard) -> Offer:
    """A model as it is offered."""
    return Offer(
        id=card.id,
        title=card.title,
        license=card.license,
        gated=card.gated,
        max_sequence_length=card.max_sequence_length,
        download_bytes=download_bytes(card.coefficients, card.stored)
        if card.repo_id is not None and card.coefficients is not None
        else None,
        here=presets.card_folder(card) is not None,
    )


def offer_words(offer: Offer) -> str:
    """`It is downloaded at its first use, about 27.2 GiB. License: Apache-2.0.`"""
    size = "of unknown size" if offer.download_bytes is None else f"about {presets.format_bytes(offer.download_bytes)}"
    where = "It is on this machine." if offer.here else f"It is downloaded at its first use, {size}."
    gate = " Accept it on the model's page first, and log in with `hf auth login`." if offer.gated else ""
    return f"{where} License: {offer.license}.{gate}"


class Shelf(NamedTuple):
    """What the Hub's cache holds."""

    models: list[Cached]
    problems: list[str]
    """Folders in it that are damaged, in words."""
    info: Any
    """`huggingface_hub.HFCacheInfo`; None: there is no cache."""

    @property
    def size_bytes(self) -> int:
        return sum(model.size_bytes for model in self.models)


def look(cards: Mapping[str, ModelCard]) -> Shelf:
    """The largest first. An empty or missing cache is no error."""
    from huggingface_hub import CacheNotFound, scan_cache_dir  # noqa: PLC0415 - half a second, and only needed here

    try:
        info = scan_cache_dir(hub_folder())
    except CacheNotFound:
        return Shelf([], [], None)
    used: dict[str, list[str]] = {}
    for card in cards.values():
        if card.repo_id is not None:
            used.setdefault(card.repo_id, []).append(card.id)
    found = [
        Cached(
            repo_id=repo.repo_id,
            models=tuple(used.get(repo.repo_id, ())),
            size_bytes=repo.size_on_disk,
            files=repo.nb_files,
            last_used=repo.last_accessed,
            path=repo.repo_path,
        )
        for repo in info.repos
        if repo.repo_type == "model"
    ]
    problems = [str(warning).splitlines()[0] for warning in info.warnings]
    return Shelf(sorted(found, key=lambda one: (-one.size_bytes, one.repo_id)), problems, info)


def remove(settings: Settings, cards: Mapping[str, ModelCard], names: Sequence[str]) -> list[Cached]:
    """Delete models from the cache, all or none; returns what went. They are downloaded again when they are wanted.

    Args:
        names: ids of cards, or Hub ids `owner/name`.

    Raises:
        NotFound: one of them does not lie there.
        InvalidRequest: a job that is not finished wants one of them, or the system keeps its files.
    """
    shelf = look(cards)
    chosen: dict[str, Cached] = {}
    for name in names:
        repo_id = cards[name].repo_id if name in cards else name
        found = next((one for one in shelf.models if one.repo_id == repo_id), None)
        if found is None:
            raise NotFound(f"{name} does not lie in {hub_folder()}. `pocketreel models cache` lists what does.")
        chosen[found.repo_id] = found
    for wanted, job_id in _wanted(settings, cards):
        if wanted in chosen:
            raise InvalidRequest(f"{wanted} is wanted by job {job_id}, which is not finished. Cancel it, or wait.")
    hashes = [
        revision.commit_hash
        for repo in shelf.info.repos
        if repo.repo_type == "model" and repo.repo_id in chosen
        for revision in repo.revisions
    ]
    shelf.info.delete_revisions(*hashes).execute()
    left = [one.path for one in chosen.values() if one.path.exists() and any(one.path.rglob("*"))]
    if left:
        raise InvalidRequest(
            f"{os.fspath(left[0])} could not be deleted whole; a program that runs may hold its files."
        )
    return list(chosen.values())


def _wanted(settings: Settings, cards: Mapping[str, ModelCard]) -> list[tuple[str, str]]:
    """Hub ids that unfinished jobs will load or have loaded, each with the job's."""
    if not settings.database.is_file():
        return []
    with closing(Store(settings.database)) as store:
        jobs = [job for job, _ in store.unfinished()]
    found = [
        (cards[job.request.model].repo_id if job.request.model in cards else job.request.model, job.id) for job in jobs
    ]
    return [(repo_id, job_id) for repo_id, job_id in found if repo_id is not None]

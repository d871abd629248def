"""The part of the command line about models: which there are, and what of them takes the disk."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from app.shell import AsJson, guarded, out, print_json

models = typer.Typer(
    help="List the models; `models cache` shows what they take on the disk.", invoke_without_command=True
)


@models.callback()
@guarded
def listed(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models: their ids, downloads and licenses. `models cache` shows what they take on the disk."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from app import shelf
    from app.config import load_settings
    from app.presets import format_bytes, load_catalogue

    found = [shelf.offer_of(card) for card in load_catalogue(load_settings()).models.values()]
    if as_json:
        print_json([offer.model_dump(mode="json") for offer in found])
        return
    table = Table("model", "title", "download", "license", box=None)
    for offer in found:
        download = "unknown" if offer.download_bytes is None else format_bytes(offer.download_bytes)
        license_words = offer.license + (" (gated: accept it on its page first)" if offer.gated else "")
        table.add_row(offer.id, offer.title, "on this disk" if offer.here else download, license_words)
    out.print(table)


@models.command()
@guarded
def cache(
    remove: Annotated[
        list[str] | None, typer.Option(help="Delete this model (an id, or owner/name of the Hub); repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which models take how much of the disk, or remove some. Pocketreel itself keeps no copies of weights."""
    from rich.table import Table

    from app import shelf
    from app.config import hub_folder, load_settings
    from app.presets import format_bytes, load_catalogue

    settings = load_settings()
    cards = load_catalogue(settings).models
    gone = shelf.remove(settings, cards, remove) if remove else []
    found = shelf.look(cards)
    if as_json:
        print_json(
            {
                "folder": str(hub_folder()),
                "models": [one.model_dump(mode="json") for one in found.models],
                "removed": [one.model_dump(mode="json") for one in gone],
                "problems": found.problems,
            }
        )
        return
    for one in gone:
        out.print(f"Removed {one.repo_id}: {format_bytes(one.size_bytes)}.", markup=False)
    if found.models:
        table = Table("model of the Hub", "used by", "size", "last used", box=None)
        for one in found.models:
            day = f"{datetime.fromtimestamp(one.last_used).astimezone():%Y-%m-%d}"
            table.add_row(one.repo_id, ", ".join(one.models) or "none of ours", format_bytes(one.size_bytes), day)
        out.print(table)
        out.print("To remove one: pocketreel models cache --remove NAME", markup=False)
    out.print(f"{format_bytes(found.size_bytes)} of downloaded models in {hub_folder()}.", markup=False)
    for problem in found.problems:
        out.print(f"Note: {problem}", markup=False)

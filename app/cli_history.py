"""The part of the command line about what was made: history, resume, replay."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from app.config import LOCAL_OWNER
from app.shell import AsJson, err, guarded, out, print_json

history = typer.Typer(help="List the jobs, show one, or read what a video says of itself.", invoke_without_command=True)


@history.callback()
@guarded
def listed(
    context: typer.Context,
    from_file: Annotated[
        Path | None, typer.Option("--from", help="Read the settings and the report out of an MP4 instead.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs at most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the jobs, show one, or read what a video says of itself."""
    if context.invoked_subcommand is not None:
        return
    from app import terminal

    if from_file is not None:
        from app.flight import read_record

        found = read_record(from_file)
        if as_json:
            print_json(found)
        else:
            out.print(terminal.metadata_summary(found), markup=False)
        return
    from app.config import load_settings
    from app.following import document
    from app.store import Store

    with closing(Store(load_settings().database)) as store:
        jobs = store.list(owner=LOCAL_OWNER, limit=limit)
    if as_json:
        print_json([document(job) for job in jobs])
    elif not jobs:
        out.print('No videos yet. Make one: pocketreel generate "a red ball bouncing on a blue background" -o clip.mp4')
    else:
        out.print(terminal.job_table(jobs))


@history.command()
@guarded
def show(job_id: Annotated[str, typer.Argument(metavar="ID", help="Of `pocketreel history`.")]) -> None:
    """Print the flight record of one job: settings, plan, predicted and measured, every try, memory over time."""
    from app.config import load_settings
    from app.errors import NotFound
    from app.flight import record
    from app.store import Store

    with closing(Store(load_settings().database)) as store:
        job = store.get(job_id)
    if job is None or job.owner != LOCAL_OWNER:
        raise NotFound(f"There is no job {job_id}. `pocketreel history` lists yours.")
    print_json(record(job))


@guarded
def resume(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Of `pocketreel history`.")],
    timeout: Annotated[float | None, typer.Option(help="Stop after that many seconds.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take up again a job that was interrupted or ran out of memory, time or disk, from where it was."""
    from app.following import follow, opened_service, tell

    with opened_service() as service:
        job = follow(service, service.resume(job_id, owner=LOCAL_OWNER, timeout_seconds=timeout))
    tell(job, as_json=as_json)


@guarded
def replay(
    file: Annotated[Path, typer.Argument(help="An MP4 made by Pocketreel, or the .pocketreel.json beside one.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The MP4 to write.")] = Path("replay.mp4"),
    model: Annotated[str | None, typer.Option(help="Where the model is here, if elsewhere than then.")] = None,
    preset: Annotated[str | None, typer.Option(help="Another hardware preset than then.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the same video again, by a plan for this machine, and name what differs from then."""
    from app.flight import differences, draft_from, read_record
    from app.following import follow, opened_service, submit, tell
    from app.schema import JobStatus

    found = read_record(file)
    changes = {name: value for name, value in (("model", model), ("preset", preset)) if value is not None}
    draft = draft_from(found).model_copy(update=changes)
    with opened_service() as service:
        job = follow(service, submit(service, draft, output, overwrite=overwrite))
    unlike = differences(found, job)
    for line in unlike:
        err.print(f"Differs: {line}", markup=False)
    if job.status is JobStatus.COMPLETED and not unlike:
        err.print("Nothing that is known differs from then.")
    tell(job, as_json=as_json)

"""One job from its start to its end: try after try in the worker, each on record, until there is a video or no way.

What to try next is `fallback`'s to say. Between tries the job stays `running`; what was computed is kept, so that a
try begins where the last one stopped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from app import events, fallback, flight
from app.config import Settings
from app.errors import PlanError, StoreError
from app.kept import Kept
from app.outputs import scratch_of
from app.records import Records
from app.schema import Attempt, ErrorKind, Hardware, Job, JobStatus, ModelCard, Plan, Progress, Request, Stage
from app.store import Store
from app.worker import Outcome, Worker

STALL_FACTOR = 20.0
"""A run hangs when it takes so many times as long as it should."""
TRIED_AGAIN = (ErrorKind.CRASH, ErrorKind.BLACK)


class Planned(NamedTuple):
    plan: Plan
    hardware: Hardware


class Planner(Protocol):
    """Plans against the machine as it is at the moment."""

    def __call__(self, request: Request, card: ModelCard, **limits: int) -> Planned:
        """`limits`: `vram_limit_bytes`, `ram_limit_bytes`. Raises PlanError."""
        ...


class Watcher(NamedTuple):
    """What the service wants to know of a run, and says to it."""

    canceled: Callable[[], bool]
    closing: Callable[[], bool]
    """Whether the program ends: then a cancel is an interruption."""
    on_progress: Callable[[Progress | None], None]
    """None: another try begins."""


class Runner:
    """Runs jobs, one at a time, with one worker."""

    def __init__(self, settings: Settings, store: Store, records: Records, worker: Worker, planner: Planner) -> None:
        self._settings, self._store, self._records, self._worker = settings, store, records, worker
        self._planner = planner
        self._kept = Kept(settings)
        self._jobs = 0
        self._first_rss, self._measured = 0, ""

    def run(self, job: Job, card: ModelCard, watcher: Watcher) -> None:
        """Bring a pending job to its end, whatever happens; nothing is left but what is on record."""
        begun = self._begin(job, card)
        if begun is None:
            return
        job, log = begun
        if self._lies_ready(job):
            return
        began = time.monotonic()
        tried = [job.plan]
        resume = bool(job.attempts)
        while True:
            outcome = self._worker.run(
                self._order(job, card, resume=resume, spent=time.monotonic() - began),
                canceled=watcher.canceled,
                on_progress=watcher.on_progress,
            )
            self._jobs += 1
            if isinstance(outcome, events.Failed) and watcher.canceled():  # the cancel came when it had just failed
                outcome = events.Canceled(job_id=job.id)
            if not isinstance(outcome, events.Failed):
                break
            try:
                step = fallback.after(
                    outcome,
                    job.plan,
                    tried,
                    job.attempts,
                    self._replan(job, card),
                    crashes=1 if self._settings.resume_by_itself else 0,
                )
                log = self._worker.ensure_started()
            except PlanError as error:
                if outcome.kind in (ErrorKind.OOM, ErrorKind.RAM) or (outcome.kind in TRIED_AGAIN and job.attempts):
                    outcome = outcome.model_copy(update={"message": f"{outcome.message} {error}"})
                break
            except OSError:
                break  # the failure that is known says more than that no process could be started after it
            attempt = _attempt(job.plan, outcome, step.words)
            job = self._note(job, attempts=(*job.attempts, attempt), plan=step.plan, log_path=log)
            tried.append(step.plan)
            resume = True
            watcher.on_progress(None)
        self._end(job, outcome, log, watcher)
        self._tidy(f"{card.id} {job.plan.dtype}")

    def sweep(self) -> None:
        """Remove what is kept for nobody. Raises StoreError."""
        if self._kept.any:
            self._kept.sweep(needed=self._store.in_need())

    # ------------------------------------------------------------------------------------------------ inside

    def _begin(self, job: Job, card: ModelCard) -> tuple[Job, Path] | None:
        try:
            planned = self._planner(job.request, card)
            log = self._worker.ensure_started()
        except PlanError as error:  # it did fit when it was submitted
            self._records.fail(job, ErrorKind.RAM if re.search(r"\bRAM\b", str(error)) else ErrorKind.OOM, str(error))
            return None
        except OSError as error:
            where = self._settings.data_dir
            self._records.fail(
                job, ErrorKind.DISK, f"No worker could be started: {error}. Check the disk that holds {where}."
            )
            return None
        facts = flight.facts_of(card, planned.hardware)
        started = self._store.start(job.id, at=datetime.now(UTC), log_path=log, plan=planned.plan, facts=facts)
        return None if started is None else (started, log)  # None: canceled while it waited

    def _lies_ready(self, job: Job) -> bool:
        """Whether its video was made and checked before, and only could not be put into its place; tries that again."""
        made = job.report is not None and job.report.output is not None
        if not made or job.report is None or not (scratch_of(job) / events.VIDEO_NAME).is_file():
            return False
        self._records.complete(job, job.report)
        self._kept.forget(job.id)
        return True

    def _order(self, job: Job, card: ModelCard, *, resume: bool, spent: float) -> events.Run:
        unfinished: set[str] | None = None  # not known: then no room is made
        with suppress(StoreError):
            unfinished = {job.id for job, _ in self._store.unfinished()}
        return events.Run(
            job_id=job.id,
            request=job.request,
            plan=job.plan,
            card=card,
            output_path=job.output_path,
            scratch=scratch_of(job),
            metadata={
                name: value for name, value in flight.record(job).items() if name not in ("report", "status", "receipt")
            },
            keep=self._kept.order(job.id, resume=resume, unfinished=unfinished),
            limits=events.Limits(
                spent_seconds=spent,
                stage_seconds=self._settings.stage_timeout_seconds,
                stall_seconds=self._patience(job),
                stall_factor=STALL_FACTOR,
                ram_floor_bytes=self._settings.ram_floor_bytes,
            ),
        )

    def _patience(self, job: Job) -> dict[Stage, float]:
        """A stage without steps tells nothing between its beginning and its end: twenty times what it should take."""
        least, estimate = self._settings.stall_seconds, job.plan.estimate
        found = dict.fromkeys(Stage, least)
        if estimate is not None:
            for stage in (Stage.ENCODE, Stage.DENOISE, Stage.DECODE):
                steps = job.request.num_inference_steps if stage is Stage.DENOISE else 1
                found[stage] = max(least, STALL_FACTOR * estimate.seconds(stage) / steps)
        return found

    def _replan(self, job: Job, card: ModelCard) -> fallback.Replan:
        return lambda limits: self._planner(job.request, card, **limits).plan

    def _note(self, job: Job, **changes: object) -> Job:
        """On record if it can be; the run goes on by it in any case."""
        with suppress(StoreError):  # the end will be saved again and again
            self._store.note(job.id, **changes)
        return job.model_copy(update=changes)

    def _end(self, job: Job, outcome: Outcome, log: Path, watcher: Watcher) -> None:
        changes: dict[str, Any] = {"attempts": job.attempts, "plan": job.plan}
        if isinstance(outcome, events.Completed):
            self._records.complete(job, outcome.report)
        elif isinstance(outcome, events.Failed):
            message = outcome.message if str(log) in outcome.message else f"{outcome.message} The log: {log}"
            self._records.fail(job, outcome.kind, message, report=outcome.report, **changes)
        elif watcher.closing():
            message = "Pocketreel was closed while this job ran. Resume it: it goes on from what was kept."
            self._records.fail(job, ErrorKind.INTERRUPTED, message, **changes)
        else:
            self._records.finish(job, JobStatus.CANCELED, receipt=outcome.receipt, **changes)
        ended = self._records.get(job.id)
        if ended is None or (ended.status.final and not ended.resumable):
            self._kept.forget(job.id)

    def _tidy(self, model: str) -> None:
        """A worker that has done much or has grown makes room for a new one."""
        held = self._worker.rss_bytes()
        if held == 0:
            self._jobs, self._measured = 0, ""
            return
        if self._measured != model:  # each model has a size of its own
            self._measured, self._first_rss = model, held
        grown = held - self._first_rss > self._settings.worker_growth_bytes
        if self._jobs >= self._settings.worker_max_jobs or grown:
            self._worker.stop()
            self._jobs, self._measured = 0, ""


def _attempt(plan: Plan, outcome: events.Failed, words: str) -> Attempt:
    return Attempt(
        at=datetime.now(UTC),
        kind=outcome.kind,
        message=outcome.message,
        progress=outcome.progress,
        then=words,
        predicted_vram_bytes=plan.predicted_vram_bytes,
        predicted_ram_bytes=plan.predicted_ram_bytes,
    )

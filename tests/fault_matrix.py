"""Every fault in every stage, on the real service with a real worker and the built-in model; what comes of each.

    python -m tests.fault_matrix                    all cells, about a quarter of an hour on two cores
    python -m tests.fault_matrix --out assets/faults.md
    python -m tests.fault_matrix --sample 5 --seed 1

After each cell, whatever happened: the job is in exactly one final state and on record once; a video that was made has
the frames of an undisturbed run; nothing half-written and no process is left; the next job succeeds. What failed is
resumed, and must give the same frames too. Run with `resume_by_itself`: without it a killed worker's job fails as
`crash` and is resumed by hand (tests/test_jobs.py). Not covered: the card. That memory falls short on one is shown on
simulated cards by tests/runtime/test_ladder.py.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from app.config import Settings
from app.errors import InvalidRequest
from app.jobs import JobService
from app.outputs import scratch_of
from app.schema import Draft, ErrorKind, Job, JobStatus
from app.worker import Worker
from tests.test_jobs import HELD, ME, finish

ROOT = Path(__file__).resolve().parent.parent
CLIP = Draft(prompt="a red ball on a blue background", num_frames=5, num_inference_steps=4, seed=1, height=64, width=64)
POINTS = {
    "load": "load",
    "encode": "encode",
    "first step": "denoise:1",
    "middle step": "denoise:2",
    "decode": "decode",
    "export": "export",
}
STEPS_KEPT = {"first step": 1, "middle step": 2, "decode": 4, "export": 4}
AFTER_STEPS = tuple(STEPS_KEPT)


class Fault(NamedTuple):
    mode: str
    """Of `held_worker`."""
    points: tuple[str, ...] = tuple(POINTS)
    ends: dict[str, ErrorKind] | ErrorKind | None = None
    """Why the job fails, for all points or by point; where nothing stands it goes on by itself to its video."""
    server: signal.Signals | None = None
    """Sent to the process of the service instead; then a new one takes the job up again."""

    def end(self, point: str) -> ErrorKind | None:
        return self.ends.get(point) if isinstance(self.ends, dict) else self.ends


def all_but(kind: ErrorKind, *points: str) -> dict[str, ErrorKind]:
    return {point: kind for point in POINTS if point not in points}


FAULTS = {
    "kill -9 worker": Fault("kill"),
    "kill -9 server": Fault("hard", ends=ErrorKind.INTERRUPTED, server=signal.SIGKILL),
    "SIGTERM server": Fault("hard", ends=ErrorKind.INTERRUPTED, server=signal.SIGTERM),
    # on a CPU there is no smaller plan but for decoding; cards: tests/runtime/test_ladder.py
    "out of memory on the device": Fault("oom", ends=all_but(ErrorKind.OOM, "decode")),
    "MemoryError": Fault("ram", ends=all_but(ErrorKind.RAM, "decode")),
    "disk full": Fault("full", ("export",), ErrorKind.DISK),
    "ENOSPC on checkpoint": Fault("unkept", ("encode", "first step", "middle step")),
    "damaged checkpoint": Fault("damage", AFTER_STEPS),
    "hung": Fault("stuck", ends=ErrorKind.STALL),
    "NaN step": Fault("nan", ("first step", "middle step"), ErrorKind.BLACK),
    # decoded on a CPU in float32 and in one piece nothing is left to try; else: tests/test_jobs.py
    "black decode": Fault("black", ("decode",), ErrorKind.BLACK),
}
CELLS = [(fault, point) for fault, kind in FAULTS.items() for point in kind.points]


class Outcome(NamedTuple):
    words: str
    problems: tuple[str, ...]
    seconds: float


class Bench:
    """A service on a data folder of its own, whose worker does what is ordered."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=folder, checkpoint_seconds=0.0, stall_seconds=8.0, resume_by_itself=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.orders = folder / "orders"
        self.worker = Worker(
            self.settings.logs,
            cancel_grace_seconds=self.settings.cancel_grace_seconds,
            command=[sys.executable, "-P", str(HELD), str(self.orders)],
        )
        self.service = JobService(self.settings, worker=self.worker)

    def close(self) -> None:
        self.service.close()

    def finish(self, job: Job) -> Job:
        return finish(self.service, job, seconds=180)

    def video(self) -> str:
        """The frames of an undisturbed run."""
        self.orders.unlink(missing_ok=True)
        job = self.finish(self.service.submit(CLIP, owner=ME))
        if job.report is None or job.report.output is None:
            raise AssertionError(f"an undisturbed job failed: {job.error}")
        return job.report.output.frames_sha256


@contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="pocketreel faults é ") as folder:
        made = Bench(Path(folder) / "données")
        try:
            yield made
        finally:
            made.close()


def run_cell(made: Bench, wanted: str, fault: str, point: str) -> Outcome:
    """Let it happen and look at what is left. `wanted` are the frames of an undisturbed run."""
    began = time.monotonic()
    kind, end = FAULTS[fault], FAULTS[fault].end(point)
    problems: list[str] = []
    before = {job.id for job in made.service.store.list(limit=10_000)}
    if kind.server is not None:
        job = _server_dies(made, kind, point)
    else:
        made.orders.write_text(f"{POINTS[point]} {kind.mode}")
        job = made.finish(made.service.submit(CLIP, owner=ME))
        if made.orders.exists():
            problems.append("the fault did not happen")
    words = _words(job)
    status = JobStatus.FAILED if end is not None else JobStatus.COMPLETED
    if (job.status, job.error_kind) != (status, end):
        problems.append(f"ended as {job.status} {job.error_kind}: {job.error}")
    _look(made, job, wanted, problems)
    if kind.mode == "stuck" and "held_worker.py" not in (job.log_path or Path()).read_text("utf-8", "replace"):
        problems.append("no stack in the log")
    made.worker.kill()  # its disk may be full for ever
    if job.status is JobStatus.FAILED and job.resumable:
        job = made.finish(made.service.resume(job.id, owner=ME))
        words += f"; resumed after {_steps(job)}" if job.status is JobStatus.COMPLETED else "; could not be resumed"
        if job.status is not JobStatus.COMPLETED:
            problems.append(f"could not be resumed: {job.error}")
        if kind.mode != "unkept" and _kept(job) != STEPS_KEPT.get(point, 0):
            problems.append(f"resumed after {_kept(job)} steps")
        _look(made, job, wanted, problems)
    elif job.status is JobStatus.FAILED:
        try:
            made.service.resume(job.id, owner=ME)
            problems.append("it could be resumed")
        except InvalidRequest:
            pass
    after = {job.id for job in made.service.store.list(limit=10_000)}
    if after - before != {job.id}:
        problems.append(f"on record are {len(after - before)} jobs instead of one")
    if made.video() != wanted:
        problems.append("the next job gave other frames")
    return Outcome(words, tuple(problems), time.monotonic() - began)


def _server_dies(made: Bench, kind: Fault, point: str) -> Job:
    made.service.close()
    made.orders.write_text(f"{POINTS[point]} {kind.mode}")
    command = [sys.executable, "-m", "tests.fault_matrix", "--serve", str(made.settings.data_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        job_id = server.stdout.readline().strip()
        until = time.monotonic() + 120
        while made.orders.exists():  # the worker removes it when it comes to the point
            if time.monotonic() > until:
                raise TimeoutError(f"never came to {point}")
            time.sleep(0.02)
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(kind.server)
        server.wait(30)
    left = psutil.wait_procs(children, timeout=10)[1]
    if left:
        raise AssertionError(f"left running: {left}")
    made.service = JobService(made.settings, worker=made.worker)
    return made.service.get(job_id, owner=ME)


def _look(made: Bench, job: Job, wanted: str, problems: list[str]) -> None:
    if job.status is JobStatus.COMPLETED:
        if job.report is None or job.report.output is None or not job.output_path.is_file():
            problems.append("completed without a video")
        elif job.report.output.frames_sha256 != wanted:
            problems.append("other frames than those of an undisturbed run")
    elif job.output_path.exists():
        problems.append("a video of a job that failed")
    if scratch_of(job).exists() or list(made.settings.data_dir.rglob("*.half")):
        problems.append("something half-written is left")
    if (made.settings.checkpoints / job.id).exists() and not job.resumable:
        problems.append("a checkpoint that nobody needs is left")
    known = {made.worker.pid}
    others = [one for one in psutil.Process().children(recursive=True) if one.pid not in known and one.is_running()]
    alive = [one for one in others if one.status() != psutil.STATUS_ZOMBIE]
    if alive:
        problems.append(f"left running: {alive}")


def _kept(job: Job) -> int:
    return job.report.resumed_at if job.report is not None else 0


def _steps(job: Job) -> str:
    kept = _kept(job)
    return f"{kept} step{'s' * (kept != 1)}"


def _words(job: Job) -> str:
    tries = ", ".join(f"{attempt.kind}: {attempt.then}" for attempt in job.attempts)
    if job.status is JobStatus.COMPLETED:
        said = f"video ({tries})" if tries else "video"
        said += f", from step {_kept(job)}" if _kept(job) else ""
        return said + (", told in a note" if job.report is not None and job.report.notices else "")
    return f"fails as `{job.error_kind}`" + (f" ({tries})" if tries else "")


def table(found: dict[tuple[str, str], Outcome]) -> str:
    """The matrix as Markdown: what was seen, cell by cell."""
    lines = ["| | " + " | ".join(POINTS) + " |", "|---|" + "---|" * len(POINTS)]
    for fault, kind in FAULTS.items():
        cells = []
        for point in POINTS:
            outcome = found.get((fault, point))
            cells.append(("not run" if point in kind.points else "") if outcome is None else _cell(outcome))
        lines.append(f"| **{fault}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    return outcome.words if not outcome.problems else f"**{'; '.join(outcome.problems)}** ({outcome.words})"


def serve(folder: Path) -> None:
    """The process that is killed: the real server with one job, whose id it prints."""
    from app.web import server

    made = Bench(folder)
    job = made.service.submit(CLIP, owner=ME)
    print(job.id, flush=True)  # noqa: T201 - to the test
    try:
        server.serve(made.service, host="127.0.0.1", port=0, open_browser=False, allowed_hosts=())
    finally:
        made.close()


def main() -> int:
    """Run the cells, print and write the table; 1 if any is not as stated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many cells only, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="cells of this fault only")
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return 0
    cells = [cell for cell in CELLS if options.only in (None, cell[0])]
    if options.sample is not None:
        cells = random.Random(options.seed).sample(cells, options.sample)
    found: dict[tuple[str, str], Outcome] = {}
    with bench() as made:
        wanted = made.video()
        for fault, point in cells:
            outcome = found[fault, point] = run_cell(made, wanted, fault, point)
            print(f"{fault} x {point} ({outcome.seconds:.0f} s): {_cell(outcome)}", flush=True)  # noqa: T201
    bad = [cell for cell, outcome in found.items() if outcome.problems]
    if options.out is not None:
        options.out.write_text(_document(found, bad), "utf-8")
    print(f"{len(found)} cells, {len(bad)} not as stated")  # noqa: T201
    return 1 if bad else 0


def _document(found: dict[tuple[str, str], Outcome], bad: list[tuple[str, str]]) -> str:
    import platform
    from importlib import metadata

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "diffusers"))
    seconds = sum(outcome.seconds for outcome in found.values())
    return (
        "# Faults\n\n"
        "What becomes of a job when something goes wrong in one of its stages, as seen by `python -m "
        "tests.fault_matrix --out assets/faults.md`: the real service with `resume_by_itself` (without it a killed "
        "worker's job fails as `crash`, and is resumed by hand), a real worker, the built-in model on a CPU.\n"
        "In every cell: one job on record in one final state, a video only with the frames of an undisturbed run, "
        "nothing half-written and no process left, and the next job succeeds. What failed and can be resumed was "
        "resumed, and gave the same frames.\n\n"
        f"{table(found)}\n\n"
        f"{len(found)} cells, {len(bad)} not as stated; {seconds:.0f} s; {platform.system()}, Python "
        f"{platform.python_version()}, {versions}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())

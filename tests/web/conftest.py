"""A real service whose worker process is an actor, and a real server around it."""

from __future__ import annotations

import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import StarletteDeprecationWarning

from app.config import Settings
from app.jobs import JobService
from app.schema import Job
from app.web.server import PageServer, create_app
from app.worker import Worker

with warnings.catch_warnings():
    # it wants httpx2; gradio brings httpx, and both work
    warnings.simplefilter("ignore", StarletteDeprecationWarning)
    from starlette.testclient import TestClient

__all__ = ["ROOT", "Live", "TestClient", "finished", "live", "until"]

ROOT = Path(__file__).resolve().parent.parent.parent
ACTOR = [sys.executable, str(Path(__file__).with_name("actor.py"))]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    """All real but the model: the worker process draws a moving bar. One for a module: starting it takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        settings = Settings(data_dir=tmp_path_factory.mktemp("données web"))
        worker = Worker(settings.logs, cancel_grace_seconds=settings.cancel_grace_seconds, command=ACTOR)
        service = JobService(settings, worker=worker)
        yield service
        service.close()


def until(condition: Callable[[], Any], *, seconds: float = 30) -> Any:
    """Wait for something true and return it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


def finished(service: JobService, job: Job) -> Job:
    """The job once it has ended."""

    def ended() -> Job | None:
        now = service.get(job.id, owner=job.owner)
        return now if now.status.final else None

    found = until(ended)
    assert isinstance(found, Job)
    return found


@dataclass
class Live:
    """A server on a port of its own."""

    url: str


@contextmanager
def live(service: JobService, **options: Any) -> Iterator[Live]:
    """Serve until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = PageServer(create_app(service, **options), url)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield Live(url)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()

"""The web server: one FastAPI application around the Gradio page, and the loop that serves it until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from gradio.routes import App as GradioApp
from starlette.routing import Mount

from app.errors import ConfigError
from app.web.guards import Guards, HostNames
from app.web.media import media_response
from app.web.owner import Access, is_loopback, owner_of
from app.web.page import STYLE, build_page, page_script, page_theme

if TYPE_CHECKING:
    from types import FrameType

    from app.jobs import JobService

_ICON = Path(__file__).with_name("favicon.svg")
_STOP_SECONDS = 2
"""How long open connections may finish after Ctrl-C; jobs are not among them."""


def create_app(
    service: JobService,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    shared: bool | None = None,
    allowed_hosts: Iterable[str] = (),
) -> FastAPI:
    """The application for a server bound to `host`.

    `shared` makes each browser its own owner; None: exactly when others than this machine can reach `host`.
    `allowed_hosts` are further names it may be asked for, such as that of a proxy in front.
    """
    access = Access(shared=not is_loopback(host) if shared is None else shared)
    app = FastAPI(title="Pocketreel", openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "version": _version()}

    @app.api_route("/media/{job_id}.mp4", methods=["GET", "HEAD"])
    def media(job_id: str, request: Request, download: bool = False) -> Response:
        return media_response(service, job_id, owner=owner_of(request), download=download)

    @app.get("/favicon.ico")
    @app.get("/favicon.svg")
    def icon() -> FileResponse:
        return FileResponse(_ICON, media_type="image/svg+xml")

    mount = partial(_mount, app, service, host, port)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # where none runs, Gradio makes an event loop for each of its parts and abandons it unclosed
        asyncio.run(_inside_a_loop(mount))
    else:
        mount()
    app.add_middleware(Guards, access=access, hosts=HostNames.of(host, allowed_hosts))
    return app


async def _inside_a_loop(call: Callable[[], None]) -> None:
    call()


def _mount(app: FastAPI, service: JobService, host: str, port: int) -> None:
    gr.mount_gradio_app(
        app,
        build_page(service),
        path="/",
        server_name=host,
        server_port=port,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        # the whole data folder; guards.py already refuses every file route of Gradio's
        blocked_paths=[str(service.settings.data_dir)],
        show_error=False,  # what went wrong inside may name paths; messages for people are raised as gr.Error
        max_file_size="1kb",
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        pwa=False,
        theme=page_theme(),
        css=STYLE.read_text(encoding="utf-8"),
        head=page_script(),
    )


def serve(
    service: JobService,
    *,
    host: str,
    port: int,
    open_browser: bool,
    allowed_hosts: Iterable[str] = (),
) -> None:
    """Serve until Ctrl-C or a termination signal, then close the service. Port 0 takes any free one.

    Raises:
        ConfigError: host or port cannot be used; says what to do.
    """
    try:
        with _listen(host, port) as listener:
            bound: int = listener.getsockname()[1]
            app = create_app(service, host=host, port=bound, allowed_hosts=allowed_hosts)
            PageServer(app, _url(host, bound), host, open_browser=open_browser).run_until_stopped(listener)
    finally:
        service.close()


class PageServer(uvicorn.Server):
    """uvicorn as it serves the page: tells the address once it answers, and ends quickly with pages open."""

    def __init__(self, app: FastAPI, url: str, host: str = "127.0.0.1", *, open_browser: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                proxy_headers=False,  # nothing here believes a forwarded address
                server_header=False,
                timeout_graceful_shutdown=_STOP_SECONDS,
                ws="none",
            )
        )
        self._app = app
        self._url = url
        self._host = host
        self._open_browser = open_browser

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        lines = [f"Pocketreel is at {self._url} (Ctrl-C ends it)"]
        if not is_loopback(self._host):
            lines.append("Others on this network can open it too; each browser sees only its own videos.")
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        if self._open_browser:
            # in a thread: some browsers' launchers block until the window is closed
            threading.Thread(target=webbrowser.open, args=(self._url,), daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # each open page holds a heartbeat stream; without this every one of them would be cut with an error
        for route in self._app.routes:
            if isinstance(route, Mount) and isinstance(route.app, GradioApp):
                route.app.stop_event.set()
        await super().shutdown(sockets)

    def run_until_stopped(self, listener: socket.socket) -> None:
        """Run; Ctrl-C and SIGTERM are the normal ends."""
        # uvicorn raises the signal again once it has stopped, and the default action for SIGTERM is to die on the spot
        before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with suppress(KeyboardInterrupt):
                self.run(sockets=[listener])
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, opened before anything slow, so that a busy port is reported at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise ConfigError(
            f"{host!r} is not an address of this machine. Use --host 127.0.0.1 (only this machine) or --host 0.0.0.0."
        ) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            # there SO_REUSEADDR would let two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, host, port) from error
    return listener


def _cannot_listen(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {port} is already in use, perhaps by another Pocketreel ({_url(host, port)}). "
            f"Close that program, or choose another port: --port {port % 65535 + 1} (--port 0 takes any free one)."
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"Port {port} may not be used by this account. Choose one above 1023: --port 7860.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{host} is not an address of this machine. Use --host 127.0.0.1 (only this machine) or --host 0.0.0.0."
        )
    return ConfigError(f"The page cannot be served at {host}, port {port}: {error}. Try another --port.")


def _url(host: str, port: int) -> str:
    """What a person at this machine types."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host.strip("[]") else host)  # noqa: S104
    return f"http://{shown.replace('[[', '[').replace(']]', ']')}:{port}"


def _version() -> str:
    try:
        return version("pocketreel")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+checkout"

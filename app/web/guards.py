"""What stands before every request: name, origin, route, size and owner are checked, safe headers are added.

Deny by default: a route that is not listed here does not exist, whatever Gradio registers (its file, upload, proxy and
queue routes among them). Not covered: encryption. On a network that others listen in on, put an HTTPS proxy in front.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.web.owner import Access, is_loopback, new_cookie, set_owner

MAX_BODY_BYTES = 256 * 1024
"""The form with its longest prompts is a tenth of this; nothing is uploaded."""

# Everybody who can reach the server gets these; they hold nothing of anybody.
_PUBLIC = re.compile(
    r"/assets/[\w.-]+|/static/(?:js|img|fonts)/[\w./-]+|/theme\.css|/favicon\.(?:ico|svg)|/manifest\.json|/health"
)
# These are answered for an owner. Events run by `run/predict` alone: none uses Gradio's queue.
_OWNED = {
    "GET": re.compile(r"/|/media/[0-9A-Za-z_-]{1,64}\.mp4|/gradio_api/heartbeat/[0-9a-z]{1,32}|/gradio_api/app_id"),
    "POST": re.compile(r"/gradio_api/run/predict"),
}

_HEADERS = {
    # Gradio's page needs inline scripts and eval; what matters here: nothing is loaded from or sent to another host.
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; media-src 'self' blob:; font-src 'self' data:; connect-src 'self'; "
        "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # not no-referrer: browsers would then send `Origin: null` with our own requests
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")

# A Strict cookie is not sent when a link on another site leads here, so a browser without one may well have one. It
# asks once more from our own page, and only then a new session is made: else every such click would lose the history.
_KNOCK = HTMLResponse(
    '<!doctype html><html lang="en"><title>Pocketreel</title>'
    '<meta http-equiv="refresh" content="0; url=/?session=ask"><p><a href="/?session=ask">Open Pocketreel</a></p>'
)


@dataclass(frozen=True)
class HostNames:
    """The names under which this server may be asked for. Others mean DNS rebinding, or a name nobody told us of."""

    loopback_only: bool
    names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, host: str, extra: Iterable[str] = ()) -> HostNames:
        """For a server bound to `host`: its loopback names, its own names and addresses, and `extra`."""
        names = {"localhost", *(name.lower() for name in extra)}
        loopback_only = is_loopback(host)
        if not loopback_only:
            machine = socket.gethostname().lower()
            names |= {host.lower(), machine, f"{machine}.local"}
        return cls(loopback_only, frozenset(names))

    def allow(self, name: str, server_address: str | None) -> bool:
        """`name` without port; `server_address` is the address of this machine that the connection came in on."""
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        if address.is_loopback:
            return True
        # The own addresses may change while the server runs, the connection always knows the one that was used.
        return not self.loopback_only and server_address is not None and name.strip("[]") == server_address


class Guards:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, access: Access, hosts: HostNames, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._access = access
        self._hosts = hosts
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refuse(scope)
        if scope["type"] == "websocket":
            if refusal is not None:
                await send({"type": "websocket.close", "code": 1008, "reason": "refused"})
                return
        elif refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        return (
            self._refuse_host(scope, headers)
            or self._refuse_origin(scope, headers)
            or self._refuse_body(headers)
            or self._refuse_route(scope)
        )

    def _refuse_host(self, scope: Scope, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            return PlainTextResponse("Refused: the request has no valid Host header.", 400)
        server = scope.get("server")
        if self._hosts.allow(match["name"].lower().rstrip("."), server[0] if server else None):
            return None
        known = ", ".join(sorted(self._hosts.names | {"127.0.0.1"}))
        return PlainTextResponse(
            f"Refused: this is Pocketreel, and it was asked for as {match['name']!r}, a name it does not know. "
            f"It answers to {known}" + ("." if self._hosts.loopback_only else " and this machine's own addresses."),
            421,
        )

    def _refuse_origin(self, scope: Scope, headers: Headers) -> Response | None:
        """Another site's page may not act here. Checked for every method: our own page always matches."""
        origins = headers.getlist("origin")
        foreign = PlainTextResponse("Refused: the request comes from another site's page.", 403)
        if not origins:
            # Old browsers leave both out; those that send this header tell the truth in it.
            cross = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            return (
                foreign if cross and (scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")) else None
            )
        try:
            origin = urlsplit(origins[0])
        except ValueError:
            return foreign
        scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
        # An HTTPS proxy in front speaks HTTP to us: its origin is https with the same host.
        same = origin.netloc.lower() == headers["host"].lower() and origin.scheme in (scheme, "https")
        return None if same and len(origins) == 1 and not origin.path else foreign

    def _refuse_body(self, headers: Headers) -> Response | None:
        if "transfer-encoding" in headers:
            return PlainTextResponse("Refused: send the length of the body (Content-Length).", 411)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return PlainTextResponse("Refused: the Content-Length is not a number.", 400)
        if int(length[:20]) > self._max_body_bytes:
            return PlainTextResponse(f"Refused: more than {self._max_body_bytes // 1024} KiB.", 413)
        return None

    def _refuse_route(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        method = "GET" if scope["type"] == "websocket" or scope["method"] == "HEAD" else scope["method"]
        public = method == "GET" and _PUBLIC.fullmatch(path) and ".." not in path
        owned = _OWNED[method].fullmatch(path) if method in _OWNED else None
        if not public and not owned:
            return PlainTextResponse("Not found.", 404)
        connection = HTTPConnection(scope)
        owner = self._access.find(connection)
        if owner is not None:
            set_owner(scope, owner)
            if path == "/" and "session" in connection.query_params:
                return RedirectResponse("/", 303)
            return None
        if public:
            return None
        if path != "/":
            return PlainTextResponse("Refused: no session. Open the page itself first, or reload it.", 401)
        return self._knock(connection, secure=scope["scheme"] == "https")

    def _knock(self, connection: HTTPConnection, *, secure: bool) -> Response:
        """Make a session for a browser that has none: page, question, cookie, page."""
        answer = connection.query_params.get("session")
        if answer is None:
            return _KNOCK
        if answer == "ask":
            return RedirectResponse("/?session=set", 303, headers={"set-cookie": new_cookie(secure=secure)})
        return PlainTextResponse(
            "Pocketreel needs a cookie to know which videos are yours. Allow cookies for this address, then reload.",
            403,
        )

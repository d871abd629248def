"""Who asks. One place decides it: `Access` finds the owner of a request, `owner_of` hands it to page and routes.

Bound to loopback, everyone on this machine is one person, `local`. Reachable from elsewhere, every browser is its own
owner: a random 128-bit cookie, of which only a hash is ever stored. Accounts will replace `Access.find`, nothing else.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from app.config import LOCAL_OWNER

if TYPE_CHECKING:
    import gradio as gr
    from starlette.types import Scope

COOKIE = "pocketreel_session"
SCOPE_KEY = "pocketreel.owner"
_COOKIE_VALUE = re.compile(r"[0-9a-f]{32}")
_COOKIE_SECONDS = 400 * 24 * 3600  # the longest that browsers keep a cookie


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` can be reached from this machine only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """`shared`: each browser is its own owner. Otherwise all who can reach the server are `local`."""

    shared: bool

    def find(self, connection: HTTPConnection) -> str | None:
        """The owner, or None when this browser has no session yet."""
        if not self.shared:
            return LOCAL_OWNER
        value = connection.cookies.get(COOKIE, "")
        if not _COOKIE_VALUE.fullmatch(value):
            return None
        # a copy of the database must not be enough to take over a session
        return "browser-" + hashlib.sha256(value.encode()).hexdigest()[:32]


def new_cookie(*, secure: bool) -> str:
    """A Set-Cookie value with a fresh session. HttpOnly: no script reads it. Strict: no other site sends it."""
    parts = [f"{COOKIE}={secrets.token_hex(16)}", "HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={_COOKIE_SECONDS}"]
    return "; ".join([*parts, "Secure"] if secure else parts)


def set_owner(scope: Scope, owner: str) -> None:
    """Note the owner on the request; only guards.py does this, after all its checks."""
    scope[SCOPE_KEY] = owner


def owner_of(request: gr.Request | HTTPConnection) -> str:
    """The owner of a request that came through the guards.

    Raises:
        PermissionError: it did not, so nobody may see anything.
    """
    connection = request if isinstance(request, HTTPConnection) else request.request
    owner = connection.scope.get(SCOPE_KEY) if connection is not None else None
    if not isinstance(owner, str) or not owner:
        raise PermissionError("This request came past the guards; it has no owner.")
    return owner

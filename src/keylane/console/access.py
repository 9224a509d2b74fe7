"""Who may use the console: the checks that every request passes before anything answers it."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse

from keylane.errors import SettingsError
from keylane.safe_text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SESSION_SECONDS = 12 * 3600
"""Time after which a browser needs a new link."""
_SESSIONS_MAX = 1000
_IDENTITY_CHARACTERS_MAX = 100
_BODY_BYTES_MAX = 65_536
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No inline code, nothing from elsewhere, and no way to turn text into markup: the browser refuses ``innerHTML``."""
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(slots=True, kw_only=True)
class Access:
    """Tokens and sessions of one console. ``hosts`` are the names that a browser may call it by, with the port.

    ``trust_header`` names a header in which a proxy says who the user is; empty: no header is trusted.
    ``announce`` gets a new one-time link whenever the last one has been used.
    """

    hosts: frozenset[str]
    trust_header: str = ""
    announce: Callable[[str], None] = lambda _path: None
    _token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _sessions: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def login_path(self) -> str:
        """Path and token of the link that logs one browser in."""
        return f"/login?token={self._token}"

    def redeem(self, token: str) -> str | None:
        """Exchange the one-time token for a session; None if it is not the current one."""
        with self._lock:
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return None
            self._token = secrets.token_urlsafe(32)
            session = secrets.token_urlsafe(32)
            while len(self._sessions) >= _SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[session] = time.monotonic() + SESSION_SECONDS
        self.announce(self.login_path())
        return session

    def knows(self, session: str) -> bool:
        """Whether this session is valid."""
        return self._sessions.get(session, 0.0) > time.monotonic()


def allowed_hosts(host: str, port: int, more: tuple[str, ...] = ()) -> frozenset[str]:
    """The values of the Host header that are accepted. Raises SettingsError for a name that is not one."""
    names = [*LOOPBACK, *([] if host in ("0.0.0.0", "::") else [f"[{host}]" if ":" in host else host])]  # noqa: S104
    found = {f"{name}:{port}" for name in names}
    for name in more:
        if not name or any(c.isspace() or c in "/@,*" for c in name):
            raise SettingsError(
                f"--allow-host: expected a host name, such as console.example.org, got {name!r}"
            )
        found |= {name.lower(), f"{name.lower()}:{port}"}
    return frozenset(found)


class Guard:
    """ASGI middleware: refuses requests of other sites, under other names, and without a session.

    The page's shell and its assets hold no data and need no session, so that a link from elsewhere can open the page.
    """

    def __init__(self, app: ASGIApp, access: Access, cookie: str) -> None:
        self._app = app
        self._access = access
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, then pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page uses no web sockets, which other sites may open
            return
        headers = Headers(scope=scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
                if not scope["path"].startswith("/assets/"):
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        refused = self._refused(scope, headers)
        if refused is not None:
            status, why = refused
            await JSONResponse({"error": why}, status)(scope, receive, answer)
            return
        if scope["path"] == "/login":
            await self._login(scope, receive, answer)
            return
        scope.setdefault("state", {})["who"] = self._who(headers)
        await self._app(scope, receive, answer)

    def _refused(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Why a request is refused; None if it is not."""
        host = headers.get("host", "").lower()
        if host not in self._access.hosts:
            return 421, f"host {printable(host)[:100]!r} is not a name of this console: see --allow-host"
        method = scope["method"]
        path = scope["path"]
        api = path.startswith("/api/")
        site = headers.get("sec-fetch-site", "none")
        if api and site not in ("same-origin", "none"):
            return 403, "refused: a request of another site"
        if method not in ("GET", "HEAD"):
            if method != "POST" or not api:
                return 405, f"method {method} is not used here"
            origin = headers.get("origin", "")
            if origin not in (f"http://{host}", f"https://{host}"):
                return 403, "refused: a request of another site, or without an Origin header"
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 415, "expected application/json"
            length = headers.get("content-length", "")
            if not length.isdigit() or int(length) > _BODY_BYTES_MAX:
                return 413, f"expected a body of at most {_BODY_BYTES_MAX} bytes, with its length"
        if api and self._who(headers) is None:
            return 401, "no session: open the link that the console printed when it started"
        return None

    def _who(self, headers: Headers) -> str | None:
        """Who sends the request: the proxy's word, an empty name for a session without one, or None for nobody."""
        if self._access.trust_header:
            named = headers.get(self._access.trust_header, "").strip()
            if named:
                return printable(named)[:_IDENTITY_CHARACTERS_MAX]
        session = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return "" if self._access.knows(session) else None

    async def _login(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = dict(
            pair.partition("=")[::2] for pair in scope["query_string"].decode("latin-1").split("&")
        ).get("token", "")
        session = self._access.redeem(token)
        if session is None:
            why = "this link was used before, or is of an earlier start: open the newest link that the console printed"
            await JSONResponse({"error": why}, 401)(scope, receive, send)
            return
        response = RedirectResponse("/", 303)
        response.set_cookie(
            self._cookie, session, max_age=SESSION_SECONDS, httponly=True, samesite="strict", path="/"
        )
        await response(scope, receive, send)
